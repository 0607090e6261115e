"""Hugging Face-style training arguments, flat or in sections → a config."""

from __future__ import annotations

from drumline.compat import accelerate as acc
from drumline.compat import groups, preferences
from drumline.compat.arguments import TABLE
from drumline.compat.sheet import Old, Sheet, read

WHAT = "training arguments"

# Sections that guides sort the same arguments into, and what they call things there.
SECTIONS: dict[str, dict[str, str]] = {
    "training": {}, "train": {}, "training_args": {}, "training_arguments": {}, "trainer": {}, "args": {}, "general": {}, "logging": {},
    "hardware": {}, "memory": {}, "performance": {}, "run": {}, "environment": {},
    "model": {"name": "model_name_or_path", "path": "model_name_or_path", "id": "model_name_or_path", "name_or_path": "model_name_or_path",
              "revision": "model_revision", "tokenizer": "tokenizer_name", "attention": "attn_implementation"},
    "model_args": {},
    "data": {"train": "train_file", "train_path": "train_file", "path": "train_file", "file": "train_file", "eval": "validation_file",
             "eval_path": "validation_file", "validation": "validation_file", "val_file": "validation_file", "val_path": "validation_file",
             "name": "dataset_name", "config": "dataset_config_name", "split": "dataset_train_split",
             "num_workers": "dataloader_num_workers",
             "prefetch_factor": "dataloader_prefetch_factor", "pin_memory": "dataloader_pin_memory", "text_field": "dataset_text_field",
             "text_column": "dataset_text_field", "drop_last": "dataloader_drop_last", "shuffle": "shuffle_dataset",
             "num_proc": "dataset_num_proc", "seed": "data_seed", "streaming": "dataset_streaming"},
    "optimizer": {"type": "optim", "name": "optim", "kind": "optim", "betas": "adam_betas", "eps": "adam_epsilon", "beta1": "adam_beta1",
                  "beta2": "adam_beta2"},
    "scheduler": {"type": "lr_scheduler_type", "name": "lr_scheduler_type", "kind": "lr_scheduler_type",
                  "num_warmup_steps": "warmup_steps"},
    "distributed": {"strategy": "distributed_strategy", "type": "distributed_strategy", "backend": "distributed_backend",
                    "timeout": "ddp_timeout", "tp": "tensor_parallel_size", "tensor_parallel": "tensor_parallel_size",
                    "pp": "pipeline_parallel_size", "pipeline_parallel": "pipeline_parallel_size", "cp": "context_parallel_size",
                    "context_parallel": "context_parallel_size"},
    "ddp": {"backend": "ddp_backend", "timeout": "ddp_timeout", "broadcast_buffers": "ddp_broadcast_buffers"},
    "lora": {"r": "lora_r", "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "lora_target_modules",
             "enabled": "use_peft", "bias": "lora_bias", "task_type": "lora_task_type", "modules_to_save": "lora_modules_to_save"},
    "dataloader": {"batch_size": "per_device_train_batch_size", "num_workers": "dataloader_num_workers",
                   "pin_memory": "dataloader_pin_memory", "prefetch_factor": "dataloader_prefetch_factor",
                   "drop_last": "dataloader_drop_last", "shuffle": "shuffle_dataset"},
    "evaluation": {"strategy": "eval_strategy", "steps": "eval_steps", "batch_size": "per_device_eval_batch_size"},
    "checkpoint": {"strategy": "save_strategy", "steps": "save_steps", "dir": "output_dir", "resume": "resume_from_checkpoint"},
}  # fmt: skip
SECTIONS |= {"dataset": SECTIONS["data"], "data_args": SECTIONS["data"], "peft": SECTIONS["lora"], "lr_scheduler": SECTIONS["scheduler"]}
SECTIONS |= {"eval": SECTIONS["evaluation"], "checkpointing": SECTIONS["checkpoint"], "parallelism": SECTIONS["distributed"]}


def training_arguments(sheet: Sheet, olds: list[Old]) -> None:
    """Put training arguments on the sheet. Raises ConfigError by the old file's line."""
    flat = [each for old in olds for each in flatten(old)]
    known = {**acc.TABLE, **TABLE, **preferences.TABLE}
    read(known, sheet, flat, WHAT)
    preferences.combine(sheet)
    groups.combine(sheet)
    acc.combine(sheet)
    groups.defaults(sheet, flat[0])


def flatten(old: Old) -> list[Old]:
    """The arguments of a section under the names that the table knows; anything else is one argument."""
    if not isinstance(old.value, dict) or old.key not in SECTIONS or old.key in ("fsdp", "deepspeed"):
        return [old]
    name_list = SECTIONS[old.key]
    return [each for one in old.inside() for each in flatten(Old(name_list.get(one.key, one.key), one.value, one.source, one.place))]
