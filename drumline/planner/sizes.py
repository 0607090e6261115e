"""A model that was found, and its sizes: those of known shapes come with the package, others are counted on the meta device once, then read
from disk. So neither a plan of a known shape nor a second plan imports torch or transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import drumline
from drumline.core.config import Adapter
from drumline.core.facts import ModelFacts, with_length
from drumline.core.files import kept
from drumline.core.model import Head, ModelConfig
from drumline.errors import ModelError
from drumline.foreign import read_text
from drumline.hardware.detect import cache_dir
from drumline.models.shapes import KNOWN

PACKAGE = Path(drumline.__file__).parent
COUNTED_BY = ("core/facts.py", "models/*.py")  # whose code decides the sizes
SHIPPED = PACKAGE / "models" / "known_sizes.txt"  # by scripts/known_sizes.py: transformers' version, then a line of name and sizes each


@dataclass(frozen=True)
class Found:
    """`model`: as it is to be loaded; `path`: where its files are, None where only its shape is known; `how`: a note for the user."""

    model: ModelConfig
    path: str | None
    how: str = ""

    @cached_property
    def hf_config(self) -> Any:
        """transformers' config, whose import takes seconds. Raises ModelError."""
        from drumline.models.load import load_config

        return load_config(self.path, self.model)


def sizes_of(
    found: Found, length: int, head: Head, labels: Sequence[str] = (), adapter: Adapter | None = None, frozen: Sequence[str] = ()
) -> ModelFacts:
    """`models.load.facts` of a model, kept on disk by all that they depend on. `length`: tokens of a row, of images their side. What is
    damaged there, or of other versions, is counted anew. Raises ModelError."""
    plain = head == "lm" and not frozen and (adapter is None or adapter.kind == "none")
    if plain and (shipped := _shipped(found)) is not None:
        return with_length(shipped[1], shipped[0], length)
    key = _key(found, head, [labels, frozen, adapter and adapter.model_dump(mode="json")])

    def count() -> tuple[int, ModelFacts]:
        from drumline.models.classes import with_classes
        from drumline.models.load import facts

        return length, facts(with_classes(deepcopy(found.hf_config), head, tuple(labels)), length, adapter, head, frozen)

    counted_at, sizes = count() if key is None else kept(cache_dir() / "facts" / f"{key}.json", _read, count, _text)
    return sizes if counted_at == length else with_length(sizes, counted_at, length)


def _key(found: Found, head: Head, how: list[Any]) -> str | None:
    """None for what is not kept: a model with code of its own, one whose config.json is not here, and images, whose FLOPs depend on their
    side in ways of their own."""
    if found.model.trust_remote_code or head == "image":
        return None
    config = ""
    if found.path is not None:
        if not (file := Path(found.path) / "config.json").is_file():
            return None
        config = read_text(file, ModelError)
    sources = sorted(file for pattern in COUNTED_BY for file in PACKAGE.glob(pattern))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    versions = [drumline.__version__, code, *map(_version, ("torch", "transformers", "peft"))]
    model = found.model.model_dump(mode="json", exclude={"id", "revision", "tokenizer", "chat_template", "freeze"})
    made = [versions, config, model, head, how]
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _shipped(found: Found) -> tuple[int, ModelFacts] | None:
    """The sizes of a known shape with nothing changed, where this transformers has counted them; None for any other model."""
    if found.path is not None or found.model.shape is not None or found.model.trust_remote_code:
        return None
    names = [name for name, known in KNOWN.items() if known.values == found.model.config]
    version, *lines = SHIPPED.read_text().splitlines() if names else [""]
    bodies = (body for name, _, body in (line.partition(" ") for line in lines) if name in names)
    return next(map(parse, bodies), None) if version == _version("transformers") else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _text(sizes: tuple[int, ModelFacts]) -> str:
    """`dump`, and a line before it with its digest."""
    body = dump(*sizes)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def _read(text: str) -> tuple[int, ModelFacts]:
    """What `_text` wrote. Raises ValueError for anything else."""
    digest, _, body = text.rstrip("\n").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("damaged")
    return parse(body)


def dump(length: int, facts: ModelFacts) -> str:
    """The length, the number of each block's kind, and the sizes with one block of each kind, as JSON."""
    kinds = list(dict.fromkeys(facts.block_weights))
    blocks = [kinds.index(block) for block in facts.block_weights]
    values = _adapter().dump_python(replace(facts, block_weights=tuple(kinds)), mode="json", exclude_defaults=True)
    return json.dumps([length, blocks, {key: sorted(value) if key in ("classes", "tp_styles") else value for key, value in values.items()}])


def parse(body: str) -> tuple[int, ModelFacts]:
    """What `dump` wrote; equal blocks share one tuple. Raises ValueError for anything else."""
    length, blocks, values = json.loads(body)
    facts = _adapter().validate_python(values)
    return length, replace(facts, block_weights=tuple(facts.block_weights[kind] for kind in blocks))


def _adapter() -> TypeAdapter[ModelFacts]:
    return TypeAdapter(ModelFacts)
