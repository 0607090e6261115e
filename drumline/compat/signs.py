"""Recognise by distinctive keys which tool a config belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.config.config import Config
from drumline.config.registry import Spec

# Tools whose configs another distribution reads → what errors call such a file.
TITLES = {
    "llama_factory": "a config of LLaMA-Factory",
    "axolotl": "a config of Axolotl",
    "training": "a file of training arguments, as transformers and TRL have them",
}
# A config with base_model and one of these keys is Axolotl's.
AXOLOTL_KEYS = {
    "sequence_len",
    "sample_packing",
    "datasets",
    "pretraining_dataset",
    "val_set_size",
}
DEEPSPEED_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu"}
ACCELERATE_KEYS = {"compute_environment", "distributed_type"}
# Frequent training arguments of transformers and TRL, and the sections that hold them. None is a
# key of accelerate or DeepSpeed.
TRAINING_KEYS = {
    "dataset_name",
    "eval_strategy",
    "learning_rate",
    "logging_steps",
    "lr_scheduler_type",
    "max_steps",
    "model_name_or_path",
    "num_train_epochs",
    "output_dir",
    "per_device_train_batch_size",
    "report_to",
    "save_steps",
    "train_file",
    "train_path",
    "training",
    "training_args",
    "training_arguments",
    "use_peft",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
}


def is_llama_factory(keys: set[str]) -> bool:
    """Return True for the keys of a config of LLaMA-Factory. One of the first two is enough."""
    return bool({"stage", "finetuning_type"} & keys) or {"dataset", "template"} <= keys


def is_axolotl(keys: set[str]) -> bool:
    """Return True for the keys of a config of Axolotl."""
    return "base_model" in keys and bool(AXOLOTL_KEYS & keys)


def tool_by_signs(values: Mapping[Any, Any]) -> str | None:
    """Return the tool (a key of TITLES) that a file's keys are typical of; None for no such tool."""
    keys = {str(key) for key in values}
    if is_llama_factory(keys):
        return "llama_factory"
    if is_axolotl(keys):
        return "axolotl"
    if TRAINING_KEYS & keys:
        return "training"
    return None


def launcher_by_signs(values: Mapping[Any, Any]) -> str | None:
    """Return "deepspeed" or "accelerate" for a config of either; None for any other."""
    keys = {str(key) for key in values}
    if DEEPSPEED_KEYS & keys:
        return "deepspeed"
    if ACCELERATE_KEYS & keys:
        return "accelerate"
    return None


def own_keys(name: str) -> set[str]:
    """Return the keys of a section of Drumline's config; none if it has no section of that name."""
    field = Config.model_fields.get(name)
    if field is None:
        return set()
    return set(getattr(field.annotation, "model_fields", ()))


def has_only_own_keys(values: Mapping[Any, Any]) -> bool:
    """Return True if all keys are Drumline's own, at the top level and in each section.

    The keys of a section with a `kind` are not examined: no other tool has a section of its name.
    """
    return all(_is_own(str(name), section) for name, section in values.items())


def _is_own(name: str, section: Any) -> bool:
    """Return True if a key of the top level is Drumline's own, and all keys below it are."""
    field = Config.model_fields.get(name)
    if field is None:
        return False
    annotation = field.annotation
    depends_on_kind = not isinstance(annotation, type) or issubclass(annotation, Spec)
    if depends_on_kind or not isinstance(section, dict):
        return True
    return {str(key) for key in section} <= own_keys(name)
