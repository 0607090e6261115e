"""Reads how sentence-transformers makes embeddings by a model, from the files beside its weights.

Its folder has a list of modules, `modules.json`, and a folder with a config for some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.foreign import parse_json, read_object, read_text
from drumline.models.files import find_file

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# Modules that embed here does without a module of its own.
KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}
# Names of the ways to pool by the keys of older files, which are true or false.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class EmbeddingFiles:
    """What the files of a model say of its embeddings.

    Attributes:
        pooling: names of sentence-transformers for the ways to pool; several are joined.
        pooling_file: the name of the file that says so.
        normalizes: whether an embedding is divided by its norm.
        pools_prompt: whether the tokens of a prompt count in the pooling.
        other_modules: names of modules besides, such as Dense.
        prompts: text before each query and each document, by their names.
    """

    pooling: tuple[str, ...] = ()
    pooling_file: str = ""
    normalizes: bool = False
    pools_prompt: bool = True
    other_modules: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)


def read_embedding_files(path: str, model: ModelConfig) -> EmbeddingFiles | None:
    """Return what a model's files say of its embeddings; None without `modules.json`.

    `path`: the folder or hub id. Raises ModelError for a file that is damaged.
    """
    file = find_file(path, MODULES, model)
    if file is None:
        return None
    modules = parse_json(read_text(file, ModelError), str(file), ModelError)
    if not isinstance(modules, list):
        raise ModelError("holds no list", where=str(file), fix="it is a JSON list of modules")
    folders: dict[str, str] = {}
    for module in modules:
        if isinstance(module, dict):
            _, _, name = str(module.get("type")).rpartition(".")
            folders[name] = str(module.get("path", ""))
    pooling: tuple[str, ...] = ()
    pooling_file = ""
    pools_prompt = True
    if "Pooling" in folders:
        # A file of a stranger names no folder elsewhere.
        pooling_file = f"{Path(folders['Pooling']).name}/config.json"
        values = _read_values(path, pooling_file, model)
        pooling = _read_poolings(values)
        pools_prompt = values.get("include_prompt", True) is not False
    other_modules = [name for name in folders if name not in KNOWN_MODULES]
    return EmbeddingFiles(
        pooling,
        pooling_file,
        "Normalize" in folders,
        pools_prompt,
        tuple(other_modules),
        _read_prompts(_read_values(path, SETTINGS, model)),
    )


def _read_values(path: str, name: str, model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a JSON file of a model; {} if the model has no such file."""
    file = find_file(path, name, model)
    if file is None:
        return {}
    return read_object(file, ModelError)


def _read_poolings(values: dict[str, Any]) -> tuple[str, ...]:
    """Return the ways to pool that the config of a pooling module names: mean without any."""
    named = values.get("pooling_mode")
    if isinstance(named, str):
        return (named,)
    if isinstance(named, list) and named:
        return tuple(str(way) for way in named)
    poolings = [pooling for key, pooling in POOLING_KEYS.items() if values.get(key) is True]
    return tuple(poolings) or ("mean",)


def _read_prompts(settings: dict[str, Any]) -> dict[str, str]:
    """Return the prompts that are not empty by their names, such as query and document."""
    prompts = settings.get("prompts")
    if not isinstance(prompts, dict):
        return {}
    return {name: text for name, text in prompts.items() if isinstance(text, str) and text}
