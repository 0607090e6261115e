"""Configs of other tools → the same in Drumline's words.

They are accelerate's, DeepSpeed's, Hugging Face-style training arguments, LLaMA-Factory's, Axolotl's
and TRL's. Tables have a rule for each key, and `groups` combines several keys. Nothing is dropped
silently: a key without a meaning gets a note. One whose effect Drumline lacks is an error, or on a
lenient sheet a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drumline.compat.accelerate import TABLE as ACCELERATE
from drumline.compat.accelerate import accelerate_file
from drumline.compat.deepspeed import deepspeed_file
from drumline.compat.sheet import Sheet, Source, section_keys
from drumline.config.config import Config
from drumline.config.data import is_own
from drumline.system.yaml_lines import Place
from drumline_convert.arguments import SECTIONS, TABLE
from drumline_convert.axolotl import axolotl
from drumline_convert.llama_factory import llama_factory
from drumline_convert.trl import trl_arguments

Kind = Literal["accelerate", "deepspeed", "training", "llama_factory", "axolotl"]
READERS = {
    "accelerate": accelerate_file,
    "deepspeed": deepspeed_file,
    "training": trl_arguments,
    "llama_factory": llama_factory,
    "axolotl": axolotl,
}


# Keys that only Axolotl's configs have beside base_model.
AXOLOTL_KEYS = {
    "sequence_len",
    "sample_packing",
    "datasets",
    "pretraining_dataset",
    "val_set_size",
}


def recognise(values: Mapping[Any, Any]) -> Kind | None:
    """Return the tool whose config this is; None for Drumline's own, and for any other.

    A config with `data.train` in Drumline's form is always its own.
    """
    if is_own(values):
        return None
    keys = {str(key) for key in values}
    if {"stage", "finetuning_type"} & keys or {"dataset", "template"} <= keys:
        return "llama_factory"
    if "base_model" in keys and AXOLOTL_KEYS & keys:
        return "axolotl"
    has_engine_keys = bool({"zero_optimization", "train_micro_batch_size_per_gpu"} & keys)
    if has_engine_keys and not (keys & TABLE.keys()) - DEEPSPEED_TOO:
        return "deepspeed"
    arguments = (keys & TABLE.keys()) - ACCELERATE.keys() - Config.model_fields.keys()
    if {"compute_environment", "distributed_type"} & keys and not arguments - {"deepspeed", "fsdp"}:
        return "accelerate"
    if arguments:
        return "training"
    sections = {key for key in keys & SECTIONS.keys() if _holds_arguments(key, values[key])}
    if not sections:
        return None
    if any(_is_own(key, values[key]) for key in keys - sections):
        # It is Drumline's own, with a mistake in a section.
        return None
    return "training"


# Keys of DeepSpeed configs that training arguments have, too.
DEEPSPEED_TOO = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
}


def _own_keys(name: str) -> set[str]:
    """Return the keys of Drumline's own section of that name; none if there is no such section."""
    field = Config.model_fields.get(name)
    if field is None:
        return set()
    return set(getattr(field.annotation, "model_fields", ()))


def _is_own(name: str, section: Any) -> bool:
    """Return True if a section has keys of Drumline's own, and no others."""
    if not isinstance(section, dict) or not section:
        return False
    own = _own_keys(name) - TABLE.keys() - set(SECTIONS.get(name, ()))
    return {str(key) for key in section} <= own


def _holds_arguments(name: str, section: Any) -> bool:
    """Return True if a section has training arguments.

    Its name is none of Drumline's, or it has keys that Drumline's section of that name lacks.
    """
    if not isinstance(section, dict):
        return False
    keys = {str(key) for key in section}
    known = keys & {*TABLE, *SECTIONS[name]}
    if name not in Config.model_fields:
        return bool(known)
    own = _own_keys(name)
    return bool(known - own) and not (keys & own) - known


def translate(
    values: Mapping[Any, Any],
    lines: Mapping[Place, int],
    name: str,
    base: Path,
    folder: Path,
    lenient: bool,
) -> Sheet | None:
    """Return a sheet with the values of an old file under Drumline's keys; None for any other file.

    Args:
        values: the keys and values of the file.
        lines: the line of each key.
        name: names the file in messages.
        base: the folder that files are named from; the current one is the second.
        folder: the folder that new paths are relative to.
        lenient: notes in the place of errors, as the sheet's.

    Raises ConfigError with the old file's line.
    """
    kind = recognise(values)
    if kind is None:
        return None
    sheet = Sheet(base, folder, lenient=lenient)
    olds = section_keys(dict(values), Source(name, lines))
    READERS[kind](sheet, olds)
    return sheet
