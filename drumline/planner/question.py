"""From a config to what the search is asked: sizes of its models, lengths of its data, the cluster. No weights, nothing prepared."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.facts import ModelFacts
from drumline.core.load import Loaded
from drumline.core.model import ModelConfig
from drumline.core.plan import DataPlan, RolePlan
from drumline.errors import DataError, ModelError
from drumline.hardware.calibration import calibration_for
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import detect
from drumline.planner.cluster import cluster_of
from drumline.planner.search.answer import Question
from drumline.report.bars import OnProgress


@dataclass(frozen=True)
class PlanRequest:
    """`question`, and what the user should know of how it came about. `model`, `model_path`: where the policy's config is had from."""

    question: Question
    notes: tuple[str, ...]
    model: ModelConfig
    model_path: str | None


@dataclass(frozen=True)
class Found:
    """A model's Hugging Face config. `model`: as it is to be asked for; `path`: where its files are, None where only its shape is known;
    `how` in words."""

    hf_config: Any
    model: ModelConfig
    path: str | None
    how: str = ""


def ask(loaded: Loaded, on_progress: OnProgress) -> PlanRequest:
    """Raises ModelError for a model whose shape cannot be had, and whatever the config's own mistakes raise."""
    from drumline.models import load as models
    from drumline.models.classes import with_classes

    config = loaded.config
    policy = find_model(config.model, on_progress)
    notes = [f"model: {policy.how}"] if policy.how else []
    length, data = config.data.max_length, None
    if config.images_alone:
        from drumline.models.vision import image_side

        length = image_side(config, policy.path, policy.hf_config)
    else:
        models.check_length(policy.hf_config.get_text_config(), length)
    data = _data(config, policy, loaded.base_dir, notes)
    labels = data.labels if data else tuple(getattr(config.algorithm, "labels", None) or ())
    with_classes(policy.hf_config, config.head, labels)
    roles, sizes = _roles(config, on_progress)
    facts = replace(models.facts(policy.hf_config, length, config.adapter, config.head, config.model.freeze), roles=sizes)
    cluster = _cluster(config)
    deepspeed = not cluster.found or importlib.util.find_spec("deepspeed") is not None
    question = Question(config, cluster, facts, data, roles, deepspeed=deepspeed)
    return PlanRequest(question, (*notes, *cluster.notes), policy.model, policy.path)


def find_model(model: ModelConfig, on_progress: OnProgress) -> Found:
    """Its folder, package or cached copy; else the table of known shapes; else the hub. Raises ModelError."""
    from drumline.models import shapes
    from drumline.models.load import load_config
    from drumline.models.package import PREFIX, resolve

    name = model.id
    if name is None:
        return Found(load_config(None, model), model, None)
    known = shapes.find(name)
    local = name.startswith((PREFIX, "/", ".", "~")) or name.count("/") > 1 or Path(name).exists()
    if local or known is None:
        try:
            path = resolve(model, on_progress)
        except ModelError as error:
            if local:
                raise
            raise shapes.unknown(name, error.what) from None
        return Found(load_config(path, model), model, path)
    cached = _cached(shapes.hub_id(name), model.revision)
    if cached is not None:
        return Found(load_config(cached, model), model, cached)
    written = shapes.with_config(known, model)
    return Found(load_config(None, written), written, None, f"{name} is not on this machine; its shape is known")


def _cached(name: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # the hub has no such names
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def _data(config: Config, policy: Found, base: Path, notes: list[str]) -> DataPlan | None:
    """What prepared data holds; None where there is none yet: rows are then taken to be as long as they may be."""
    from drumline.data.describe import describe
    from drumline.data.prepare import cached
    from drumline.models.vision import vision_of

    if policy.path is None and config.model.tokenizer is None:
        return None
    try:
        vision = vision_of(config, policy.path, policy.hf_config)
        prepared = cached(config, config.model.tokenizer or policy.path or "", base, vision)
        return None if prepared is None else describe(prepared, config, vision)
    except (DataError, ModelError) as error:
        notes.append(f"data: {error.what}")
        return None


def _roles(config: Config, on_progress: OnProgress) -> tuple[dict[str, RolePlan], dict[str, ModelFacts]]:
    """The models besides the policy, by their configs alone (train.roles looks at tokens and weights, too)."""
    from drumline.models.classes import with_classes
    from drumline.models.load import facts

    roles, sizes = dict[str, RolePlan](), dict[str, ModelFacts]()
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        role = find_model(wanted.model, on_progress)
        hf_config = with_classes(role.hf_config, wanted.head, ())
        roles[name] = RolePlan(model=wanted.model, model_path=role.path, head=wanted.head, learns=wanted.learns, lr_ratio=wanted.lr_ratio)
        sizes[name] = facts(hf_config, config.data.max_length, head=wanted.head)
    return roles, sizes


def _cluster(config: Config) -> Cluster:
    """The devices that are said, or those of this machine that a run would take."""
    machine, said = detect(), config.cluster
    if config.run.device == "cpu" and (said is None or said.device is None):
        machine = machine.without_devices()
    processes = config.launch.nproc or max(1, len(machine.devices))
    return cluster_of(said, machine, processes, calibration_for(machine))
