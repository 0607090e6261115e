"""From a config to the question of a search: sizes of its models, lengths of its data, the cluster. No weights, nothing prepared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.core.by_name import entry_points, package_of
from drumline.core.config import Config
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
    """`question`, and `notes` for the user on how it came about. `model`, `model_path`: where the policy's config is."""

    question: Question
    notes: tuple[str, ...]
    model: ModelConfig
    model_path: str | None


@dataclass(frozen=True)
class Found:
    """A model's Hugging Face config. `model`: as it is to be loaded; `path`: where its files are, None where only its shape is known;
    `how`: a note for the user."""

    hf_config: Any
    model: ModelConfig
    path: str | None
    how: str = ""


def ask(loaded: Loaded, on_progress: OnProgress) -> PlanRequest:
    """The question of a config. Raises ModelError for a model of unknown shape, and what the config's own mistakes raise."""
    from drumline.models.load import check_length

    config = loaded.config
    policy = find_model(config.model, on_progress)
    notes = [f"model: {policy.how}"] if policy.how else []
    if not config.images_alone:
        check_length(policy.hf_config.get_text_config(), config.data.max_length)
    data = _data(config, policy, loaded.base_dir, notes)
    roles, cluster = roles_of(config, policy, lambda model: find_model(model, on_progress)), _cluster(config)
    question = assemble(config, policy, roles, data, cluster, may_install=not cluster.found)
    return PlanRequest(question, (*notes, *cluster.notes), policy.model, policy.path)


def assemble(
    config: Config,
    policy: Found,
    roles: Mapping[str, RolePlan],
    data: DataPlan | None,
    cluster: Cluster,
    *,
    processes: bool = False,
    may_install: bool = False,
) -> Question:
    """The question of `plan`, of `train` and of a new plan after memory ran out: sizes of the policy and of `roles` are
    counted on the meta device. `processes`: see Question; `may_install`: DeepSpeed is on another machine, or will be."""
    from drumline.models.classes import with_classes
    from drumline.models.load import facts, load_config

    length = config.data.max_length
    sizes = {
        name: facts(with_classes(load_config(role.model_path, role.model), role.head, ()), length, head=role.head)
        for name, role in roles.items()
    }
    if config.images_alone:
        from drumline.models.vision import image_side

        length = image_side(config, policy.path, policy.hf_config)
    labels = data.labels if data else tuple(getattr(config.algorithm, "labels", None) or ())
    own = facts(with_classes(policy.hf_config, config.head, labels), length, config.adapter, config.head, config.model.freeze)
    deepspeed = may_install or importlib.util.find_spec("deepspeed") is not None
    return Question(config, cluster, replace(own, roles=sizes), data, roles, processes, deepspeed)


def roles_of(config: Config, policy: Found, find: Callable[[ModelConfig], Found]) -> dict[str, RolePlan]:
    """The auxiliary models, by their configs alone (train.roles also checks tokens and weights)."""
    roles = dict[str, RolePlan]()
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        role = policy if wanted.model == config.model else find(wanted.model)
        roles[name] = RolePlan(
            model=role.model, model_path=role.path, head=wanted.head, trainable=wanted.trainable, lr_ratio=wanted.lr_ratio
        )
    return roles


def find_model(model: ModelConfig, on_progress: OnProgress, weights: bool = False) -> Found:
    """The model of a folder, package or cached copy; else of the table of known shapes; else of the hub. `weights`: its files are needed,
    a shape is not enough. Raises ModelError."""
    from drumline.models import shapes
    from drumline.models.files import PREFIX, resolve
    from drumline.models.load import load_config

    if model.builder is not None:
        what = "what a module of your own computes is known to itself alone: nothing can be planned for it"
        raise ModelError(what, where="model.kind", fix="name a strategy and train")
    if (name := model.id) is None:
        return Found(load_config(None, model), model, None)
    if name in entry_points("models"):
        fix = f"write model: {{kind: {name}}} and algorithm: {{kind: python}} into a YAML, name a strategy and train"
        raise ModelError(f"{name} is a function of {package_of(entry_points('models')[name])}, of which nothing can be planned", fix=fix)
    known = shapes.find(name)
    local = name.startswith((PREFIX, "/", ".", "~")) or name.count("/") > 1 or Path(name).exists()
    if weights or local or known is None:
        try:
            path = resolve(model, on_progress)
        except ModelError as error:
            if weights or local:
                raise
            raise shapes.unknown(name, error.what) from None
        return Found(load_config(path, model), model, path)
    cached = _cached(shapes.hub_id(name), model.revision)
    if cached is not None:
        return Found(load_config(cached, model), model, cached)
    shaped = shapes.with_config(known, model)
    return Found(load_config(None, shaped), shaped, None, f"{name} is not on this machine; its shape is known")


def _cached(name: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # the hub has no such names
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def _data(config: Config, policy: Found, base: Path, notes: list[str]) -> DataPlan | None:
    """The prepared data; None where there is none yet: the planner then takes rows to be as long as they may be."""
    from drumline.data.prepare import cached, data_plan
    from drumline.models.vision import vision_of

    if policy.path is None and config.model.tokenizer is None:
        return None
    try:
        vision = vision_of(config, policy.path, policy.hf_config)
        prepared = cached(config, config.model.tokenizer or policy.path or "", base, vision)
        return None if prepared is None else data_plan(prepared, config, vision)
    except (DataError, ModelError) as error:
        notes.append(f"data: {error.what}")
        return None


def _cluster(config: Config) -> Cluster:
    """The devices that the YAML describes, or those of this machine that a run would use."""
    machine, described = detect(), config.cluster
    if config.run.device == "cpu" and (described is None or described.device is None):
        machine = machine.without_devices()
    processes = config.launch.nproc or max(1, len(machine.devices))
    return cluster_of(described, machine, processes, calibration_for(machine))
