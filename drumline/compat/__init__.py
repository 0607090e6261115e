"""Configs of other tools: accelerate's, DeepSpeed's, Hugging Face-style training arguments → the same things in Drumline's words.

Tables say what each key becomes (`accelerate`, `deepspeed`, `arguments`), `rules` do it, and `groups` puts together what stands
in several keys. Nothing is dropped silently: a key without a meaning gets a note, one whose effect Drumline lacks is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drumline.compat.accelerate import TABLE as ACCELERATE
from drumline.compat.accelerate import accelerate_file
from drumline.compat.arguments import SECTIONS, TABLE, training_arguments
from drumline.compat.deepspeed import deepspeed_file
from drumline.compat.sheet import Sheet, Source, listed
from drumline.core.config import Config
from drumline.core.yaml_lines import Place

Kind = Literal["accelerate", "deepspeed", "training"]


def recognise(values: Mapping[Any, Any]) -> Kind | None:
    """Whose config this is; None: Drumline's own, or nobody's. One that says `data.train` in Drumline's way is Drumline's."""
    if _own_data(values.get("data")):
        return None
    keys = {str(key) for key in values}
    if {"zero_optimization", "train_micro_batch_size_per_gpu"} & keys and not (keys & TABLE.keys()) - DEEPSPEED_TOO:
        return "deepspeed"
    arguments = {key for key in keys if key in TABLE and key not in ACCELERATE and key not in Config.model_fields}
    sections = {key for key in keys & SECTIONS.keys() if _holds_arguments(key, values[key])}
    if {"compute_environment", "distributed_type"} & keys and not arguments - {"deepspeed", "fsdp"}:
        return "accelerate"
    return "training" if arguments or sections else None


# Words of DeepSpeed configs that training arguments have, too.
DEEPSPEED_TOO = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16"}


def _own_data(data: Any) -> bool:
    train = data.get("train") if isinstance(data, dict) else None
    return isinstance(train, list) and any(isinstance(source, dict) for source in train)


def _holds_arguments(name: str, section: Any) -> bool:
    """A section of training arguments: under a name that Drumline does not have, or with keys that its section does not have."""
    if not isinstance(section, dict):
        return False
    known = {*TABLE, *SECTIONS[name]} & {str(key) for key in section}
    if name not in Config.model_fields:
        return bool(known)
    field = Config.model_fields[name].annotation
    own = set(getattr(field, "model_fields", ()))
    return bool(known - own) and not ({str(key) for key in section} & own) - known


def translate(values: Mapping[Any, Any], lines: Mapping[Place, int], name: str, base: Path, folder: Path) -> Sheet | None:
    """A sheet with the values of an old file in Drumline's words; None where it is none. Raises ConfigError by the old file's line. Files
    that it names are looked for from `base` and from the current folder; the new paths are relative to `folder`."""
    kind = recognise(values)
    if kind is None:
        return None
    sheet, olds = Sheet(base, folder), listed(dict(values), Source(name, lines))
    {"accelerate": accelerate_file, "deepspeed": deepspeed_file, "training": training_arguments}[kind](sheet, olds)
    return sheet
