"""Configs of other tools: accelerate's, DeepSpeed's, Hugging Face-style training arguments, LLaMA-Factory's, Axolotl's, TRL's → the same in
Drumline's words. Tables have a rule for each key, and `groups` combines several keys. Nothing is dropped silently: a key without a meaning
gets a note, one whose effect Drumline lacks is an error, or on a lenient sheet a note as well."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drumline.compat.accelerate import TABLE as ACCELERATE
from drumline.compat.accelerate import accelerate_file
from drumline.compat.arguments import SECTIONS, TABLE
from drumline.compat.axolotl import axolotl
from drumline.compat.deepspeed import deepspeed_file
from drumline.compat.llama_factory import llama_factory
from drumline.compat.sheet import Sheet, Source, listed
from drumline.compat.trl import trl_arguments
from drumline.core.config import Config
from drumline.core.data import is_own
from drumline.core.yaml_lines import Place

Kind = Literal["accelerate", "deepspeed", "training", "llama_factory", "axolotl"]
READERS = {"accelerate": accelerate_file, "deepspeed": deepspeed_file, "training": trl_arguments, "llama_factory": llama_factory,
           "axolotl": axolotl}  # fmt: skip


def recognise(values: Mapping[Any, Any]) -> Kind | None:
    """The tool whose config this is; None for Drumline's own, which any with `data.train` in Drumline's form is, and for any other."""
    if is_own(values):
        return None
    keys = {str(key) for key in values}
    if {"stage", "finetuning_type"} & keys or {"dataset", "template"} <= keys:
        return "llama_factory"
    if (
        "base_model" in keys
        and {"sequence_len", "sample_packing", "datasets", "pretraining_dataset", "val_set_size"}
        & keys
    ):
        return "axolotl"
    if {"zero_optimization", "train_micro_batch_size_per_gpu"} & keys and not (
        keys & TABLE.keys()
    ) - DEEPSPEED_TOO:
        return "deepspeed"
    arguments = {
        key
        for key in keys
        if key in TABLE and key not in ACCELERATE and key not in Config.model_fields
    }
    sections = {key for key in keys & SECTIONS.keys() if _holds_arguments(key, values[key])}
    if {"compute_environment", "distributed_type"} & keys and not arguments - {"deepspeed", "fsdp"}:
        return "accelerate"
    if sections and not arguments and any(_is_own(key, values[key]) for key in keys - sections):
        return None  # Drumline's own, with a mistake in a section
    return "training" if arguments or sections else None


# Words of DeepSpeed configs that training arguments have, too.
DEEPSPEED_TOO = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
}


def _own_keys(name: str) -> set[str]:
    """The keys of Drumline's own section of that name."""
    field = Config.model_fields.get(name)
    return set(getattr(field.annotation, "model_fields", ())) if field else set()


def _is_own(name: str, section: Any) -> bool:
    """Whether a section has keys of Drumline's own, and no others."""
    own = _own_keys(name) - {*TABLE, *SECTIONS.get(name, ())}
    return isinstance(section, dict) and bool(section) and {str(key) for key in section} <= own


def _holds_arguments(name: str, section: Any) -> bool:
    """Whether a section has training arguments: under a name that Drumline does not have, or with keys that its section does not have."""
    if not isinstance(section, dict):
        return False
    keys = {str(key) for key in section}
    known = {*TABLE, *SECTIONS[name]} & keys
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
    """A sheet with the values of an old file under Drumline's keys; None for any other file. Files that it names are relative to `base` or
    to the current folder, new paths to `folder`. `lenient`: as the sheet's. Raises ConfigError with the old file's line."""
    kind = recognise(values)
    if kind is None:
        return None
    sheet, olds = Sheet(base, folder, lenient=lenient), listed(dict(values), Source(name, lines))
    READERS[kind](sheet, olds)
    return sheet
