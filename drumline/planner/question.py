"""From a YAML and flags to the question of a search: sizes of models, lengths of data, the cluster. No weights, nothing prepared."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.core import mirror
from drumline.core.cluster import cluster_from_string
from drumline.core.config import Config, LoRAConfig
from drumline.core.load import Loaded, load_lines, load_text, override_label, reader
from drumline.core.model import ModelConfig
from drumline.core.plan import DataPlan, RolePlan
from drumline.core.registry import entry_points, package_of
from drumline.core.rollouts import require_room
from drumline.core.unadapted import describe_unadapted, find_unadapted
from drumline.errors import ConfigError, DataError, ModelError, PlanError, UserError
from drumline.hardware.cluster import Cluster, calibration_for
from drumline.hardware.detect import detect
from drumline.models import shapes
from drumline.planner.cluster import cluster_of
from drumline.planner.new_tokens import rows_notes, shape_of, with_new_rows
from drumline.planner.search.answer import Question
from drumline.planner.sizes import Found, sizes_of
from drumline.report.bars import OnProgress

OVERRIDE = re.compile(r"[\w.]+=")
CLUSTER_FORM = "write 8xh100-80g, or 2x8xh100-80g for two hosts of eight; `drumline plan --devices` lists devices"
FLAGS = "flags"  # the name of a config that was not read from a file
WITHOUT_DATA = "data: {train: [{kind: file, path: data.jsonl}]}"
IMAGES = "algorithm={kind: classify, modality: image}"
# Flag → key, in the order in which they override.
KEYS = {"model": "model.id", "cluster": "cluster", "length": "data.max_length", "adapter": "adapter", "batch": "batch.global_samples",
        "algorithm": "algorithm", "precision": "precision", "price": "cluster.price_per_device_hour",
        "mtbf_hours": "cluster.mtbf_hours"}  # fmt: skip
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
    mtbf_hours: float | None = None

    def overrides(self) -> dict[str, str]:
        """The flags as overrides of a config, each with the flag as it was typed. Raises UserError for an adapter that there is not."""
        if self.adapter is not None and self.adapter not in ADAPTERS:
            raise UserError(
                f"no adapter {self.adapter!r}", where="--adapter", fix=" or ".join(ADAPTERS)
            )
        model = self.model and json.dumps(shapes.hub_id(self.model))
        cluster = self.cluster
        if cluster is not None:
            if not cluster.strip():
                raise UserError(
                    "is empty",
                    where="--cluster",
                    fix=f"{CLUSTER_FORM}; leave it out for this machine",
                )
            keys = cluster_from_string(cluster)  # so that an override can add more
            cluster = (
                json.dumps(keys)
                if isinstance(keys, dict) and not cluster.lstrip().startswith("{")
                else cluster
            )
        values = vars(self) | {
            "model": model,
            "cluster": cluster,
            "adapter": self.adapter and ADAPTERS[self.adapter],
        }
        return {
            f"{key}={values[name]}": f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name, key in KEYS.items()
            if values[name] is not None
        }


@contextmanager
def mistakes_by_flag(overrides: dict[str, str]) -> Iterator[None]:
    """A mistake in an override names the flag that the override comes from."""
    try:
        yield
    except ConfigError as error:
        labels = {override_label(override): flag for override, flag in overrides.items()}
        flag = labels.get(error.where or "")
        if flag is None:
            raise
        if flag.startswith("--cluster "):
            raise _cluster_mistake(error, flag) from None
        raise ConfigError(error.what, where=flag, fix=error.fix) from None


def _cluster_mistake(error: ConfigError, flag: str) -> ConfigError:
    """Return a mistake in `--cluster` with the form of the flag, in the place of keys of the YAML."""
    what, _, advice = error.what.partition(" — ")
    guess = re.search(r"did you mean [^?]*\?", advice)
    fix = CLUSTER_FORM if guess is None else f"{guess[0]} {CLUSTER_FORM}"
    return ConfigError(what, where=flag, fix=fix)


def load_with_flags(
    config: str | Path | Mapping[str, Any] | None, overrides: list[str], flags: Flags
) -> Loaded:
    """The config to plan for: of a YAML or of its keys, flags and overrides over it. Without one it needs a model at least; its data is a
    file that need not exist. Raises ConfigError or UserError."""
    # No YAML at all: the first word is an override. It may be too long for a file's name, which Path.exists would raise for.
    is_override = isinstance(config, str | Path) and OVERRIDE.match(str(config)) is not None
    if is_override and not os.path.exists(str(config)):  # noqa: PTH110
        config, overrides = None, [str(config), *overrides]
    made = flags.overrides()
    if config is None:
        known = shapes.find(flags.model or "")
        if known is not None and known.values["model_type"] in shapes.OF_IMAGES:
            # A later override of the algorithm goes before it.
            made = {
                IMAGES: f"--model {flags.model}",
                **made,
            }
        if not any(override.startswith("model") for override in [*made, *overrides]):
            fix = "name a YAML, or a model and the devices: drumline plan --model llama-3.1-8b --cluster 4x4090 --length 4096"
            raise UserError("what is to be planned?", where="drumline plan", fix=fix)
    with mistakes_by_flag(made):
        laid = in_turn(list(made), overrides)
        return load_lines(WITHOUT_DATA, laid, FLAGS) if config is None else reader(config)(laid)


def in_turn(flags: list[str], overrides: list[str]) -> list[str]:
    """Overrides over flags; but one of a whole section, such as `cluster=8xh100`, below flags that set a key in it."""
    keys = {override: override.partition("=")[0] for override in (*flags, *overrides)}
    # Which --model names whole.
    inside = {keys[flag].partition(".")[0] for flag in flags if "." in keys[flag]} - {"model"}
    sections = [override for override in overrides if keys[override] in inside]
    first = [flag for flag in flags if "." not in keys[flag]]
    return [
        *first,
        *sections,
        *(flag for flag in flags if flag not in first),
        *(each for each in overrides if each not in sections),
    ]


@dataclass(frozen=True)
class PlanRequest:
    """`question`, `notes` for the user on how it came about, and where the config of the policy is."""

    question: Question
    notes: tuple[str, ...]
    policy: Found


def ask(loaded: Loaded, on_progress: OnProgress) -> PlanRequest:
    """The question of a config. Raises ModelError for a model of unknown shape, PlanError where the run is on the CPU and the
    cluster has GPUs, and what the config's own mistakes raise."""
    config = loaded.config
    policy = find_model(config.model, on_progress)
    notes = [f"model: {policy.how}"] if policy.how else []
    notes += rows_notes(config, policy)
    config = with_new_rows(config, policy)
    data = _data(config, policy, loaded, notes)
    roles = roles_of(config, policy, lambda model: find_model(model, on_progress))
    # The devices that the YAML describes, or those of this machine that a run would use.
    machine, described = detect(), config.cluster
    if config.run.device == "cpu" and (described is None or described.device is None):
        machine = machine.without_devices()
    processes = config.launch.nproc or max(1, len(machine.devices))
    cluster = cluster_of(described, machine, processes, calibration_for(machine))
    if config.run.device == "cpu" and cluster.device.kind == "cuda":
        what = f"run.device is cpu, and the cluster to plan for is of {cluster.device.name}"
        raise PlanError(what, where="run.device", fix="take one of the two out")
    here = config.launch.nproc is not None and cluster.found
    question = assemble(
        config, policy, roles, data, cluster, processes=here, may_install=not cluster.found
    )
    if not config.images_alone:
        shapes.check_length(question.facts.max_positions, config.data.max_length)
        require_room(config.algorithm.new_tokens, config.data.max_length)
    unadapted = describe_unadapted(find_unadapted(question.facts, config.adapter))
    return PlanRequest(question, (*notes, *unadapted, *cluster.notes), policy)


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
    length = config.data.max_length
    sizes = {
        name: sizes_of(Found(role.model, role.model_path), length, role.head)
        for name, role in roles.items()
    }
    if config.images_alone:
        from drumline.models.vision import image_side

        length = image_side(config, policy.path, policy.hf_config)
    labels = data.labels if data else tuple(getattr(config.algorithm, "labels", None) or ())
    own = sizes_of(policy, length, config.head, labels, config.adapter, config.model.freeze)
    deepspeed = may_install or importlib.util.find_spec("deepspeed") is not None
    return Question(config, cluster, replace(own, roles=sizes), data, roles, processes, deepspeed)


def require_adapter(config: Config, policy: Found) -> None:
    """Raise ModelError if the adapter names a layer, module or token that the model does not have.

    Asked before anything is downloaded or prepared: it takes the model's config alone, and no PEFT.
    """
    if not isinstance(config.adapter, LoRAConfig):
        return
    from drumline.models.adapters import find_targets
    from drumline.models.classes import with_classes
    from drumline.models.load import on_meta

    labels = tuple(getattr(config.algorithm, "labels", None) or ())
    hf_config = with_classes(deepcopy(policy.hf_config), config.head, labels)
    find_targets(on_meta(hf_config, config.head), config.adapter)


def roles_of(
    config: Config, policy: Found, find: Callable[[ModelConfig], Found]
) -> dict[str, RolePlan]:
    """The auxiliary models, by their configs alone (train.setup also checks tokens and weights)."""
    roles = dict[str, RolePlan]()
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        role = policy if wanted.model == config.model else find(wanted.model)
        roles[name] = RolePlan(
            model=role.model,
            model_path=role.path,
            head=wanted.head,
            trainable=wanted.trainable,
            lr_ratio=wanted.lr_ratio,
        )
    return roles


def find_model(model: ModelConfig, on_progress: OnProgress, weights: bool = False) -> Found:
    """The model of a folder, package or cached copy; else of the table of known shapes; else of the hub. `weights`: its files are needed,
    a shape is not enough. Raises ModelError."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from drumline.models.files import PREFIX, resolve

    if model.builder is not None:
        what = "what a module of your own computes is known to itself alone: nothing can be planned for it"
        raise ModelError(what, where="model.kind", fix="name a strategy and train")
    if (name := model.id) is None:
        return Found(model, None)
    if name in entry_points("models"):
        fix = f"write model: {{kind: {name}}} and algorithm: {{kind: python}} into a YAML, name a strategy and train"
        raise ModelError(
            f"{name} is a function of {package_of(entry_points('models')[name])}, of which nothing can be planned",
            fix=fix,
        )
    known = shapes.find(name)
    local = (
        name.startswith((PREFIX, mirror.PREFIX, "/", ".", "~"))
        or name.count("/") > 1
        or Path(name).exists()
    )
    if weights or local or known is None:
        try:
            path = resolve(model, on_progress)
        except ModelError as error:
            if weights or local:
                raise
            raise shapes.unknown(name, error.what) from None
        return Found(model, path)
    hub_id = shapes.hub_id(name)
    if os.path.isdir(os.path.join(HF_HUB_CACHE, "--".join(("models", *hub_id.split("/"))))):  # noqa: PTH112, PTH118 - its name may be too long
        from huggingface_hub import try_to_load_from_cache  # it takes 0.1 s
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # the hub has no such names
            if isinstance(
                cached := try_to_load_from_cache(hub_id, "config.json", revision=model.revision),
                str,
            ):
                return Found(model, str(Path(cached).parent))
    return Found(shape_of(known, model), None, f"{name} is not on this machine; its shape is known")


def _data(config: Config, policy: Found, loaded: Loaded, notes: list[str]) -> DataPlan | None:
    """The prepared data; None where there is none yet: the planner then takes rows to be as long as they may be."""
    by_flags = (
        loaded.path == Path(FLAGS)
        and config.data.train == load_text(WITHOUT_DATA, [], FLAGS).data.train
    )
    if by_flags or (policy.path is None and config.model.tokenizer is None):
        return None
    from drumline.data.prepare import cached  # which imports torch
    from drumline.models.vision import vision_of

    try:
        vision = vision_of(config, policy.path, policy.hf_config)
        return cached(config, config.model.tokenizer or policy.path or "", loaded.base_dir, vision)
    except (DataError, ModelError) as error:
        notes.append(f"data: {error.what}")
        return None
