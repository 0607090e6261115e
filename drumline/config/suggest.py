"""Which keys there are, and which one was probably meant."""

from __future__ import annotations

import difflib
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from drumline.config.schema import Config

Loc = tuple[str | int, ...]


# What others call a thing → what it is called here.
SYNONYMS = {
    "learning_rate": "lr",
    "batch_size": "micro_batch",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_length": "max_length",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "output_dir": "dir",
    "save_steps": "every",
    "save_total_limit": "keep",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_clipping": "max_grad_norm",
    "model_name_or_path": "id",
    "logging_steps": "log_every",
    "num_workers": "workers",
}


def nearest(word: str, words: list[str]) -> str | None:
    """The one of `words` that was probably meant: by another tool's name for it, or by similar letters."""
    called = difflib.get_close_matches(word.lower(), SYNONYMS, n=1, cutoff=0.8)
    if called and SYNONYMS[called[0]] in words:
        return SYNONYMS[called[0]]
    found = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return found[0] if found else None


def models_at(path: Loc, root: type[BaseModel] = Config) -> list[type[BaseModel]]:
    """The sections that may stand at a path of plain keys (several where a union does)."""
    models = [root]
    for key in path:
        if isinstance(key, int):
            continue
        fields = [m.model_fields[key].annotation for m in models if key in m.model_fields]
        models = [model for annotation in fields for model in _sections(annotation)]
    return models


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list) or hasattr(annotation, "__metadata__"):
        return [model for part in get_args(annotation) for model in _sections(part)]
    return []


def keys_at(path: Loc) -> list[str]:
    """The keys that are known at a path."""
    return sorted({key for model in models_at(path) for key in model.model_fields})


def kind_of(model: type[BaseModel]) -> str | None:
    """The `kind` that selects this section in its union, where it is fixed to one."""
    field = model.model_fields.get("kind")
    if field is None or get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) != 1:
        return None
    return str(get_args(field.annotation)[0])


def elsewhere(key: str, model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted places where a key of this very name is known."""
    found = []
    for name, field in model.model_fields.items():
        if name == key and prefix:
            found.append(f"{prefix}{name}")
        for section in _sections(field.annotation):
            found += elsewhere(key, section, f"{prefix}{name}.")
    return sorted(set(found))
