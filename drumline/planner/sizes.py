"""Find the sizes of a model.

The sizes of known shapes come with the package. The sizes of models of their families, and of
adapters over them, are derived. Other models are counted on the meta device once, and their sizes
are read from disk after that. Only counting imports torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from drumline.config.config import Adapter, LoRAConfig
from drumline.config.model import Head, ModelConfig
from drumline.errors import ModelError
from drumline.foreign import read_object, read_text
from drumline.hardware.detect import cache_dir
from drumline.models.shapes import KNOWN, full_config
from drumline.plan.facts import ModelFacts, with_length
from drumline.planner.derived import KEYS_WITHOUT_EFFECT_ON_SIZES, derive_from_family, with_lora
from drumline.system.files import load_or_compute
from drumline.version import __version__

PACKAGE = Path(__file__).parents[1]
# The code that decides the sizes.
COUNTED_BY = ("plan/facts.py", "models/*.py")
# Written by scripts/known_sizes.py: transformers' version, then a line with name and sizes for each shape.
SHIPPED = PACKAGE / "models" / "known_sizes.txt"
# Keys of a model's section on which its sizes do not depend.
MODEL_KEYS_WITHOUT_EFFECT_ON_SIZES = {
    "id",
    "revision",
    "tokenizer",
    "new_tokens",
    "vocabulary_multiple",
    "chat_template",
    "freeze",
}
KEY_DIGITS = 24


@dataclass(frozen=True)
class FoundModel:
    """A model to plan for, and where its config is.

    `model`: how it is loaded. `path`: the folder of its files; None if only its shape is known.
    `how`: a note for the user on how it was found; empty if there is nothing to say.
    """

    model: ModelConfig
    path: str | None
    how: str = ""

    @property
    def hf_config(self) -> Any:
        """Return transformers' config, whose import takes seconds. Raises ModelError."""
        return self._config_and_growth[0]

    @property
    def growth(self) -> Any:
        """Return the rows that the model gets besides those of its files (`models.vocabulary.Growth`).

        None if the config sets neither new tokens nor a tokenizer. Raises ModelError.
        """
        if not self.model.may_grow:
            return None
        return self._config_and_growth[1]

    @cached_property
    def _config_and_growth(self) -> tuple[Any, Any]:
        from drumline.models.load import load_grown

        return load_grown(self.path, self.model)


def sizes_of(
    found: FoundModel,
    length: int,
    head: Head,
    labels: Sequence[str] = (),
    adapter: Adapter | None = None,
    frozen: Sequence[str] = (),
) -> ModelFacts:
    """Return the facts of a model, as `models.load.facts` counts them.

    They are derived from a known model if possible. Else they are counted once and kept on disk, under
    a key of all that they depend on; damaged files and those of other versions are counted anew.

    `length`: tokens of a row; for images the length of their side. Raises ModelError.
    """
    if head == "lm" and not frozen:
        derived = _derive(found, length)
        if derived is not None and isinstance(adapter, LoRAConfig):
            derived = with_lora(derived, adapter)
        if derived is not None:
            return derived

    def count() -> tuple[int, ModelFacts]:
        from drumline.models.classes import set_classes
        from drumline.models.load import facts

        hf_config = set_classes(deepcopy(found.hf_config), head, tuple(labels))
        return length, facts(hf_config, length, adapter, head, frozen)

    key = _key(found, head, [labels, frozen, adapter and adapter.model_dump(mode="json")])
    if key is None:
        counted_length, sizes = count()
    else:
        file = cache_dir() / "facts" / f"{key}.json"
        counted_length, sizes = load_or_compute(file, _read, count, _text)
    if counted_length == length:
        return sizes
    return with_length(sizes, counted_length, length)


def text_notes(found: FoundModel, head: Head, sizes: ModelFacts) -> list[str]:
    """Return in one line, for the user, that a vision-language model is trained on text alone.

    That is its language model (`models.text_part`), or all of it but its tower
    (`models.text_alone`). None for any other model. `sizes`: of `found` with the head `head`.
    """
    from drumline.models.classes import IMAGE_READING_TYPES

    # Heads under which the sizes of a vision-language model say that it is one.
    if head not in ("lm", "valued", "score") or found.model.trust_remote_code:
        return []
    values = _stored_values(found)
    kind = values.get("model_type")
    if not values.get("vision_config"):
        return []
    if not sizes.vision_language:
        return [f"model: the language model within {kind} is trained, on text; images are not read"]
    if kind not in IMAGE_READING_TYPES:
        return [
            f"model: {kind} is trained on text; images are not read, and its tower stays frozen"
        ]
    return []


def _stored_values(found: FoundModel) -> dict[str, Any]:
    """Return the values of a model's config.json, or of `model.config` if it has none.

    Raises ModelError.
    """
    if found.path is None:
        return dict(found.model.config)
    file = Path(found.path) / "config.json"
    if file.is_file():
        return read_object(file, ModelError)
    # It is on the hub.
    from drumline.models.load import whole_config

    values: dict[str, Any] = whole_config(found.path, found.model).to_dict()
    return values


def _key(found: FoundModel, head: Head, other_inputs: list[Any]) -> str | None:
    """Return the name under which the sizes of a model are kept; None if they are not kept.

    Not kept are the sizes of a model with code of its own, of one whose config.json is not here, and
    of models of images, whose FLOPs depend on the side of the images in various ways. `other_inputs`:
    what else the sizes depend on.
    """
    if found.model.trust_remote_code or head == "image":
        return None
    config = ""
    if found.path is not None:
        file = Path(found.path) / "config.json"
        if not file.is_file():
            return None
        config = read_text(file, ModelError)
    versions = [
        __version__,
        _digest_of_code(),
        _version("torch"),
        _version("transformers"),
        _version("peft"),
    ]
    model = found.model.model_dump(mode="json", exclude=MODEL_KEYS_WITHOUT_EFFECT_ON_SIZES)
    content: list[Any] = [versions, config, model, head, other_inputs]
    if found.model.may_grow:
        text_config = found.hf_config.get_text_config()
        content.append(getattr(text_config, "vocab_size", None))
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def _digest_of_code() -> str:
    """Return a digest of the code that decides the sizes."""
    files: list[Path] = []
    for pattern in COUNTED_BY:
        files += PACKAGE.glob(pattern)
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


class _Known(NamedTuple):
    """A known shape: its config, and a line of `dump` with its sizes."""

    config: dict[str, Any]
    body: str


def _derive(found: FoundModel, length: int) -> ModelFacts | None:
    """Return the sizes of a known shape, or of a model that differs from one only in its sizes.

    None for other models, and if another version of transformers has counted the known shapes.
    """
    version, *lines = SHIPPED.read_text().splitlines()
    values = _values(found)
    if values is None or version != _version("transformers"):
        return None
    known = _known_of_type(lines, values.get("model_type"))
    for config, body in known:
        if config == values:
            counted_length, facts = parse(body)
            return with_length(facts, counted_length, length)
    family = ((config, parse(body)[1]) for config, body in known)
    return derive_from_family(values, family, length)


def _known_of_type(lines: list[str], model_type: Any) -> list[_Known]:
    """Return the known shapes of a model type; `lines`: those of SHIPPED."""
    known = []
    for line in lines:
        name, _, body = line.partition(" ")
        config = KNOWN[name].values
        if config["model_type"] == model_type:
            known.append(_Known(config, body))
    return known


def _values(found: FoundModel) -> dict[str, Any] | None:
    """Return all values of the model's config; None if only transformers knows them.

    That is so if the config overrides values of a file, if the model has code of its own, and if its
    tokenizer decides the size of the vocabulary.
    """
    model = found.model
    if model.may_grow or model.trust_remote_code:
        return None
    if found.path is None:
        return _values_of_shape(model)
    if model.config:
        return None
    file = Path(found.path) / "config.json"
    if not file.is_file():
        return None
    from drumline.models.files import check_folder

    check_folder(file.parent)
    return read_object(file, ModelError)


def _values_of_shape(model: ModelConfig) -> dict[str, Any] | None:
    """Return all values of a model without files; None if only its config's class knows them."""
    values: dict[str, Any] = {}
    if model.shape:
        values |= full_config(model.shape)
    values |= model.config
    # The class of the config must know each of these keys, and only the class can tell.
    if KEYS_WITHOUT_EFFECT_ON_SIZES & (values.keys() - {"model_type"}):
        return None
    return values


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _text(sizes: tuple[int, ModelFacts]) -> str:
    """Return what `dump` returns, with its digest in a line before it."""
    body = dump(*sizes)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def _read(text: str) -> tuple[int, ModelFacts]:
    """Return what `_text` wrote. Raises ValueError for anything else."""
    digest, _, body = text.rstrip("\n").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("damaged")
    return parse(body)


def dump(length: int, facts: ModelFacts) -> str:
    """Return the length and the sizes as JSON.

    Blocks are written once for each kind, with the number of the kind of each block.
    """
    kinds = list(dict.fromkeys(facts.block_weights))
    blocks = [kinds.index(block) for block in facts.block_weights]
    one_of_each = replace(facts, block_weights=tuple(kinds))
    values = _adapter().dump_python(one_of_each, mode="json", exclude_defaults=True)
    for key in ("classes", "tp_styles"):
        # Sets have no order of their own.
        if key in values:
            values[key] = sorted(values[key])
    return json.dumps([length, blocks, values])


def parse(body: str) -> tuple[int, ModelFacts]:
    """Return what `dump` wrote; equal blocks share one tuple. Raises ValueError for anything else."""
    length, blocks, values = json.loads(body)
    facts = _adapter().validate_python(values)
    block_weights = tuple(facts.block_weights[kind] for kind in blocks)
    return length, replace(facts, block_weights=block_weights)


# The schema takes 6 ms to make, and a plan reads all known models of a family.
@cache
def _adapter() -> TypeAdapter[ModelFacts]:
    """Return the adapter that reads and writes facts."""
    return TypeAdapter(ModelFacts)
