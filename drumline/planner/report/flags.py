"""The config of `drumline plan`: a YAML, flags in its place, or flags over it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drumline.core.cluster import cluster_from_string
from drumline.core.load import Loaded, load, load_text
from drumline.errors import ConfigError, UserError
from drumline.models.classes import of_images_alone
from drumline.models.shapes import find, hub_id

OVERRIDE = re.compile(r"[\w.]+=")
FLAGS = "flags"  # the name of a config that was not read from a file
WITHOUT_DATA = "data: {train: [{kind: file, path: data.jsonl}]}"
IMAGES = "algorithm={kind: classify, modality: image}"
# Flag → key, in the order in which they override.
KEYS = {"model": "model.id", "cluster": "cluster", "length": "data.max_length", "adapter": "adapter", "batch": "batch.global_samples",
        "algorithm": "algorithm", "precision": "precision", "price": "cluster.price_per_device_hour"}  # fmt: skip
ADAPTERS = {"none": "none", "full": "none", "lora": "lora", "qlora": "{kind: lora, quantize: 4bit}"}


@dataclass(frozen=True)
class Flags:
    """The flags besides a YAML; None: not given. `length`: tokens; `batch`: samples of a step."""

    model: str | None = None
    cluster: str | None = None
    length: int | None = None
    adapter: str | None = None
    batch: int | None = None
    algorithm: str | None = None
    precision: str | None = None
    price: float | None = None

    def overrides(self) -> dict[str, str]:
        """The flags as overrides of a config, each with the flag as it was typed. Raises UserError for an adapter that there is not."""
        if self.adapter is not None and self.adapter not in ADAPTERS:
            raise UserError(f"no adapter {self.adapter!r}", where="--adapter", fix=" or ".join(ADAPTERS))
        model = self.model and json.dumps(hub_id(self.model))
        cluster = None if self.cluster is None else _cluster(self.cluster)
        values = vars(self) | {"model": model, "cluster": cluster, "adapter": self.adapter and ADAPTERS[self.adapter]}
        return {f"{key}={values[name]}": f"--{name} {getattr(self, name)}" for name, key in KEYS.items() if values[name] is not None}


@contextmanager
def mistakes_by_flag(overrides: dict[str, str]) -> Iterator[None]:
    """A mistake in an override names the flag that the override comes from."""
    try:
        yield
    except ConfigError as error:
        flag = overrides.get((error.where or "").removeprefix("override "))
        if flag is None:
            raise
        raise ConfigError(error.what, where=flag, fix=error.fix) from None


def load_with_flags(path: Path | None, overrides: list[str], flags: Flags) -> Loaded:
    """The config to plan for. Without a YAML it needs a model at least; its data is a file that need not exist. Raises ConfigError or
    UserError."""
    # No YAML at all: the first word is an override. It may be too long for a file's name, which Path.exists would raise for.
    if path is not None and OVERRIDE.match(str(path)) and not os.path.exists(path):  # noqa: PTH110
        path, overrides = None, [str(path), *overrides]
    made = flags.overrides()
    if path is not None:
        with mistakes_by_flag(made):
            return load(path, [*made, *overrides])
    known = find(flags.model or "")
    if known is not None and of_images_alone(known.values["model_type"]):
        made = {IMAGES: f"--model {flags.model}", **made}  # a later override of the algorithm goes before it
    overrides = [*made, *overrides]
    if not any(override.startswith("model") for override in overrides):
        fix = "name a YAML, or a model and the devices: drumline plan --model llama-3.1-8b --cluster 4x4090 --length 4096"
        raise UserError("what is to be planned?", where="drumline plan", fix=fix)
    with mistakes_by_flag(made):
        return Loaded(load_text(WITHOUT_DATA, overrides, FLAGS), Path(FLAGS), Path())


def _cluster(text: str) -> str:
    """The short form of a cluster as keys, so that an override can add more."""
    if not text.strip():
        raise UserError("is empty", where="--cluster", fix="such as 4x4090; leave it out for this machine")
    made = cluster_from_string(text)
    return json.dumps(made) if isinstance(made, dict) and not text.lstrip().startswith("{") else text
