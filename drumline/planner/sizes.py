"""A model that was found, and its sizes: those of known shapes come with the package, those of their families and of adapters over them
follow, others are counted on the meta device once, then read from disk. Only the counting imports torch and transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import drumline
from drumline.core.config import Adapter, LoRAConfig
from drumline.core.facts import ModelFacts, with_length
from drumline.core.files import kept
from drumline.core.model import Head, ModelConfig
from drumline.errors import ModelError
from drumline.foreign import read_object, read_text
from drumline.hardware.detect import cache_dir
from drumline.models.shapes import KNOWN, full_config
from drumline.planner.derived import NO_SIZES, of_family, with_lora

PACKAGE = Path(drumline.__file__).parent
COUNTED_BY = ("core/facts.py", "models/*.py")  # whose code decides the sizes
# By scripts/known_sizes.py: transformers' version, then a line of name and sizes each.
SHIPPED = PACKAGE / "models" / "known_sizes.txt"


@dataclass(frozen=True)
class Found:
    """`model`: as it is to be loaded; `path`: where its files are, None where only its shape is known; `how`: a note for the user."""

    model: ModelConfig
    path: str | None
    how: str = ""

    @property
    def hf_config(self) -> Any:
        """transformers' config, whose import takes seconds. Raises ModelError."""
        return self._config_and_growth[0]

    @property
    def growth(self) -> Any:
        """Return its rows beside those of its files (`models.vocabulary.Growth`), or None.

        None where the model asks for neither new tokens nor a tokenizer. Raises ModelError.
        """
        return self._config_and_growth[1] if self.model.may_grow else None

    @cached_property
    def _config_and_growth(self) -> tuple[Any, Any]:
        from drumline.models.load import load_grown

        return load_grown(self.path, self.model)


def sizes_of(
    found: Found,
    length: int,
    head: Head,
    labels: Sequence[str] = (),
    adapter: Adapter | None = None,
    frozen: Sequence[str] = (),
) -> ModelFacts:
    """`models.load.facts` of a model, kept on disk by all that they depend on. `length`: tokens of a row, of images their side. What is
    damaged there, or of other versions, is counted anew. Raises ModelError."""
    if head == "lm" and not frozen and (derived := _derived(found, length)) is not None:
        adapted = with_lora(derived, adapter) if isinstance(adapter, LoRAConfig) else derived
        if adapted is not None:
            return adapted
    key = _key(found, head, [labels, frozen, adapter and adapter.model_dump(mode="json")])

    def count() -> tuple[int, ModelFacts]:
        from drumline.models.classes import with_classes
        from drumline.models.load import facts

        return length, facts(
            with_classes(deepcopy(found.hf_config), head, tuple(labels)),
            length,
            adapter,
            head,
            frozen,
        )

    counted_at, sizes = (
        count() if key is None else kept(cache_dir() / "facts" / f"{key}.json", _read, count, _text)
    )
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
    changes_nothing = {
        "id",
        "revision",
        "tokenizer",
        "new_tokens",
        "vocabulary_multiple",
        "chat_template",
        "freeze",
    }
    model = found.model.model_dump(mode="json", exclude=changes_nothing)
    made: list[Any] = [versions, config, model, head, how]
    if found.model.may_grow:
        made.append(getattr(found.hf_config.get_text_config(), "vocab_size", None))
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _derived(found: Found, length: int) -> ModelFacts | None:
    """The sizes of a known shape, or of a model that differs from one in its sizes alone, where this transformers has counted those; None
    for any other model."""
    version, *lines = SHIPPED.read_text().splitlines()
    values = _values(found)
    if values is None or version != _version("transformers"):
        return None
    bodies = {name: body for name, _, body in (line.partition(" ") for line in lines)}
    known = [
        (KNOWN[name].values, body)
        for name, body in bodies.items()
        if KNOWN[name].values["model_type"] == values.get("model_type")
    ]
    if (same := next((body for config, body in known if config == values), None)) is not None:
        counted_at, facts = parse(same)
        return with_length(facts, counted_at, length)
    return of_family(values, ((config, parse(body)[1]) for config, body in known), length)


def _values(found: Found) -> dict[str, Any] | None:
    """All values of the model's config; None where only transformers knows them: overrides of a file's, code of the model's own, and a
    vocabulary that its tokenizer decides."""
    model = found.model
    if model.may_grow:
        return None
    if model.trust_remote_code or (found.path is not None and model.config):
        return None
    if (
        found.path is None
    ):  # of these keys each is one that the class of the config must know, and only it knows which it does
        values = {**(full_config(model.shape) if model.shape else {}), **model.config}
        return None if NO_SIZES & {*values} - {"model_type"} else values
    if not (file := Path(found.path) / "config.json").is_file():
        return None
    from drumline.models.files import check_folder

    check_folder(file.parent)
    return read_object(file, ModelError)


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
    values = _adapter().dump_python(
        replace(facts, block_weights=tuple(kinds)), mode="json", exclude_defaults=True
    )
    return json.dumps(
        [
            length,
            blocks,
            {
                key: sorted(value) if key in ("classes", "tp_styles") else value
                for key, value in values.items()
            },
        ]
    )


def parse(body: str) -> tuple[int, ModelFacts]:
    """What `dump` wrote; equal blocks share one tuple. Raises ValueError for anything else."""
    length, blocks, values = json.loads(body)
    facts = _adapter().validate_python(values)
    return length, replace(facts, block_weights=tuple(facts.block_weights[kind] for kind in blocks))


@cache  # its schema takes 6 ms to make, and a plan reads all known models of a family
def _adapter() -> TypeAdapter[ModelFacts]:
    return TypeAdapter(ModelFacts)
