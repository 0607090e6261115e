"""Recognise configs of other tools, for the entry points of the group `drumline.config_readers`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from drumline.compat.accelerate import TABLE as ACCELERATE
from drumline.compat.readers import ConfigReader
from drumline.compat.signs import (
    ACCELERATE_KEYS,
    DEEPSPEED_KEYS,
    is_axolotl,
    is_llama_factory,
    own_keys,
)
from drumline.config.config import Config
from drumline_convert.arguments import SECTIONS, TABLE
from drumline_convert.axolotl import axolotl
from drumline_convert.llama_factory import llama_factory
from drumline_convert.trl import trl_arguments

# Keys that DeepSpeed configs and training arguments have in common.
KEYS_IN_COMMON_WITH_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
}


def recognise(values: Mapping[Any, Any]) -> str | None:
    """Return the tool of a config that this distribution reads; None for any other config."""
    keys = {str(key) for key in values}
    if is_llama_factory(keys):
        return "llama_factory"
    if is_axolotl(keys):
        return "axolotl"
    if _has_arguments(values, keys):
        return "training"
    return None


def _has_arguments(values: Mapping[Any, Any], keys: set[str]) -> bool:
    """Return True for training arguments, flat or in sections."""
    arguments = keys & TABLE.keys()
    if DEEPSPEED_KEYS & keys and not arguments - KEYS_IN_COMMON_WITH_DEEPSPEED:
        return False
    arguments -= ACCELERATE.keys() | Config.model_fields.keys()
    if ACCELERATE_KEYS & keys and not arguments - {"deepspeed", "fsdp"}:
        return False
    if arguments:
        return True
    sections = {key for key in keys & SECTIONS.keys() if _holds_arguments(key, values[key])}
    if not sections:
        return False
    # A file with a section of Drumline's own is Drumline's, with a mistake in another section.
    return not any(_is_own(key, values[key]) for key in keys - sections)


def _is_own(name: str, section: Any) -> bool:
    """Return True if a section has keys of Drumline's own, and no others."""
    if not isinstance(section, dict) or not section:
        return False
    own = own_keys(name) - TABLE.keys() - set(SECTIONS.get(name, ()))
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
    own = own_keys(name)
    return bool(known - own) and not (keys & own) - known


def _recognised_as(tool: str, values: Mapping[Any, Any]) -> bool:
    """Return True if a config is of the tool."""
    return recognise(values) == tool


LLAMA_FACTORY = ConfigReader(partial(_recognised_as, "llama_factory"), llama_factory)
AXOLOTL = ConfigReader(partial(_recognised_as, "axolotl"), axolotl)
TRAINING = ConfigReader(partial(_recognised_as, "training"), trl_arguments)
