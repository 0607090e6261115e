"""Which keys and kinds there are at a place of the config, and which one was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumline.core.by_name import nearest
from drumline.core.config import Config
from drumline.core.registry import Spec, kinds, literal_kinds
from drumline.core.yaml_lines import Place


def by_word(table: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each word of a table whose keys are words with spaces between them: those of a key mean the same."""
    return {word: value for names, value in table.items() for word in names.split()}


# What others call a thing → what it is called here: a dotted key, or a bare one that is known in several sections.
SYNONYMS = by_word(
    {
        "learning_rate": "optimizer.lr",
        "adam_epsilon": "optimizer.eps",
        "gradient_clipping clip_grad_norm": "optimizer.max_grad_norm",
        "optim": "optimizer.kind",
        "lr_scheduler_type lr_scheduler": "schedule.kind",
        "scheduler": "schedule",
        "warmup": "schedule.warmup_steps",
        "batch_size global_batch_size train_batch_size": "batch.global_samples",
        "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu": "batch.micro_batch",
        "per_device_eval_batch_size": "eval.micro_batch",
        "gradient_accumulation_steps": "batch.accumulation",
        "max_seq_length max_seq_len sequence_length block_size": "data.max_length",
        "dataset": "data",
        "datasets train_file": "data.train",
        "num_workers": "data.workers",
        "num_train_epochs num_epochs max_epochs": "run.epochs",
        "max_steps": "run.steps",
        "output_dir": "run.dir",
        "logging_steps": "run.log_every",
        "save_steps save_every": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "eval_steps eval_every": "eval.every",
        "metric_for_best_model": "eval.metric",
        "gradient_checkpointing": "memory.activation_checkpointing",
        "torch_compile": "compile.enabled",
        "mixed_precision dtype torch_dtype fp16 bf16": "precision",
        "model_name_or_path model_name base_model": "model.id",
        "attn_implementation": "model.attention",
        "num_processes nproc_per_node num_gpus devices": "launch.nproc",
        "distributed parallelism": "strategy",
        "type": "kind",
    }
)


def models_at(place: Place) -> list[type[BaseModel]]:
    """The sections that may stand at a place (several where a union does)."""
    models: list[type[BaseModel]] = [Config]
    for key in place:
        if key.isdigit():
            continue
        fields = [m.model_fields[key].annotation for m in models if key in m.model_fields]
        models = [model for annotation in fields for model in _sections(annotation)]
    return models


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, Spec) and "group" in vars(annotation):
        return list(kinds(annotation).values())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, tuple) or hasattr(annotation, "__metadata__"):
        return [model for part in get_args(annotation) for model in _sections(part)]
    return []


def kind_of(model: type[BaseModel]) -> str | None:
    """The `kind` that selects this section in its union, where it is fixed to one."""
    fixed = literal_kinds(model)
    return fixed[0] if len(fixed) == 1 else None


def kinds_at(place: Place) -> list[str]:
    """The values that `kind` may have in the section at a place; empty where there is no such key."""
    return [kind for model in models_at(place) for kind in literal_kinds(model)]


def keys_at(place: Place, kind: str | None = None) -> list[str]:
    """The keys that are known at a place, in the section of one kind where that is given."""
    return sorted({key for model in models_at(place) if kind in (None, kind_of(model)) for key in model.model_fields})


def field_at(place: Place) -> FieldInfo | None:
    """What the schema says of the value at a place."""
    found = [model.model_fields[place[-1]] for model in models_at(place[:-1]) if place[-1] in model.model_fields] if place else []
    return found[0] if found else None


def meant(key: str, place: Place, kind: str | None = None) -> list[str]:
    """What an unknown key at a place was probably meant to be, the likeliest first: a bare key of that place, or dotted ones elsewhere."""
    known, word = keys_at(place, kind), key.lower().replace("-", "_")
    if found := _synonym(word, place, known):
        return found
    if close := nearest(word, known):
        return [close]
    if found_elsewhere := elsewhere(word):
        return found_elsewhere
    similar = difflib.get_close_matches(word, SYNONYMS, n=1, cutoff=0.85)
    return _synonym(similar[0], place, known) if similar else []


def _synonym(word: str, place: Place, known: list[str]) -> list[str]:
    dotted = SYNONYMS.get(word, "")
    section, _, last = dotted.rpartition(".")
    if last in known and section in ("", ".".join(place)):
        return [last]
    return [dotted] if section or dotted in Config.model_fields else []


def elsewhere(key: str, model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted places where a key of this very name is known, those near the top first."""
    found = []
    for name, field in model.model_fields.items():
        if name == key and prefix:
            found.append(f"{prefix}{name}")
        for section in _sections(field.annotation):
            found += elsewhere(key, section, f"{prefix}{name}.")
    return sorted(set(found), key=lambda dotted: (dotted.count("."), dotted))
