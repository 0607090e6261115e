"""What `drumline plan` was asked: a YAML, flags in its place, or flags laid over one. Everything becomes one Config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from drumline.config.cluster import cluster_from_string
from drumline.config.load import Loaded, load, load_text
from drumline.errors import UserError
from drumline.models.shapes import hub_id

FLAGS = "flags"  # the name of a config that was not read from a file
WITHOUT_DATA = "data: {train: [{kind: file, path: data.jsonl}]}"
ADAPTERS = {"none": "none", "full": "none", "lora": "lora", "qlora": "{kind: lora, quantize: 4bit}"}


@dataclass(frozen=True)
class Flags:
    """What the command line says besides a YAML, each None where it says nothing. `length`: tokens; `batch`: samples of a step."""

    model: str | None = None
    cluster: str | None = None
    length: int | None = None
    adapter: str | None = None
    batch: int | None = None
    algorithm: str | None = None
    precision: str | None = None
    price: float | None = None

    def overrides(self) -> list[str]:
        """The flags as overrides of a config. Raises UserError for an adapter that there is not."""
        if self.adapter is not None and self.adapter not in ADAPTERS:
            raise UserError(f"no adapter {self.adapter!r}", where="--adapter", fix=" or ".join(ADAPTERS))
        said = {
            "model.id": None if self.model is None else json.dumps(hub_id(self.model)),
            "cluster": None if self.cluster is None else _cluster(self.cluster),
            "data.max_length": self.length,
            "adapter": None if self.adapter is None else ADAPTERS[self.adapter],
            "batch.global_samples": self.batch,
            "algorithm": self.algorithm,
            "precision": self.precision,
            "cluster.price_per_device_hour": self.price,
        }
        return [f"{key}={value}" for key, value in said.items() if value is not None]


def asked(path: Path | None, overrides: list[str], flags: Flags) -> Loaded:
    """The config to plan for. Without a YAML at least a model is wanted, and data stands for some file that is not there.

    Raises ConfigError or UserError.
    """
    if path is not None and "=" in path.name and not path.exists():  # no YAML at all: the first word is an override
        path, overrides = None, [str(path), *overrides]
    overrides = [*flags.overrides(), *overrides]
    if path is not None:
        return load(path, overrides)
    if not any(override.startswith("model") for override in overrides):
        raise UserError(
            "what is to be planned?",
            where="drumline plan",
            fix="name a YAML, or a model and the devices: drumline plan --model llama-3.1-8b --cluster 4x4090 --length 4096",
        )
    return Loaded(load_text(WITHOUT_DATA, overrides, FLAGS), Path(FLAGS), Path())


def _cluster(said: str) -> str:
    """A cluster's short form written out, so that further keys can be laid over it."""
    made = cluster_from_string(said)
    return json.dumps(made) if isinstance(made, dict) and not said.lstrip().startswith("{") else said
