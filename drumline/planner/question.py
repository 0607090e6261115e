"""Build the `Question` of a search, which is the planning problem, from a YAML and flags.

It has the config, the cluster, the sizes of the models, and the lengths of the data. Nobody is asked
anything here; the questions that `drumline init` puts to a user are in `planner.init`. No weights
are read, and nothing is prepared.
"""

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

from drumline.config.cluster import ClusterConfig, cluster_from_string
from drumline.config.config import Config, LoRAConfig
from drumline.config.load import Loaded, load_lines, load_text, override_label, reader
from drumline.config.model import ModelConfig
from drumline.config.registry import entry_points, package_of
from drumline.config.rollouts import require_room
from drumline.errors import ConfigError, DataError, ModelError, PlanError, UserError
from drumline.hardware.cluster import Cluster, calibration_for
from drumline.hardware.detect import detect
from drumline.models import shapes
from drumline.plan.plan import DataPlan, RolePlan
from drumline.plan.unadapted import describe_unadapted, find_unadapted
from drumline.planner.adapter_size import describe_adapter
from drumline.planner.cluster import cluster_of
from drumline.planner.embedding import resolve_embedding
from drumline.planner.new_tokens import (
    model_from_known_shape,
    vocabulary_notes,
    with_trainable_token_embeddings,
)
from drumline.planner.search.answer import Question
from drumline.planner.seq2seq import may_have_encoder, resolve_seq2seq
from drumline.planner.sizes import FoundModel, sizes_of, text_notes
from drumline.report.bars import OnProgress
from drumline.system import mirror

OVERRIDE = re.compile(r"[\w.]+=")
CLUSTER_FORM = "write 8xh100-80g, or 2x8xh100-80g for two hosts of eight; `drumline plan --devices` lists devices"
FLAGS_ONLY_PATH = "flags"  # stands for the path of a config that was not read from a file
WITHOUT_DATA = "data: {train: [{kind: file, path: data.jsonl}]}"
# Flag → key, in the order in which they override.
KEYS = {
    "model": "model.id",
    "cluster": "cluster",
    "length": "data.max_length",
    "adapter": "adapter",
    "batch": "batch.global_samples",
    "algorithm": "algorithm",
    "precision": "precision",
    "price": "cluster.price_per_device_hour",
    "mtbf_hours": "cluster.mtbf_hours",
}
ADAPTERS = {"none": "none", "full": "none", "lora": "lora", "qlora": "{kind: lora, quantize: 4bit}"}


@dataclass(frozen=True)
class Flags:
    """The flags that stand beside a YAML; None: not given.

    `length`: tokens of a row.
    `batch`: samples of a step.
    `price`: of a device for an hour.
    `mtbf_hours`: the mean hours between two faults of one device.
    """

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
        """Return the flags as overrides of a config, each with the flag as it was typed.

        Raises UserError for an unknown adapter and for an empty cluster.
        """
        if self.adapter is not None and self.adapter not in ADAPTERS:
            raise UserError(
                f"no adapter {self.adapter!r}", where="--adapter", fix=" or ".join(ADAPTERS)
            )
        values = dict(vars(self))
        if self.model:
            values["model"] = json.dumps(shapes.hub_id(self.model))
        if self.adapter is not None:
            values["adapter"] = ADAPTERS[self.adapter]
        if self.cluster is not None:
            values["cluster"] = _cluster_value(self.cluster)
        overrides = {}
        for name, key in KEYS.items():
            if values[name] is not None:
                flag = "--" + name.replace("_", "-")
                overrides[f"{key}={values[name]}"] = f"{flag} {getattr(self, name)}"
        return overrides


def _cluster_value(cluster: str) -> str:
    """Return the value of `--cluster` as one of a YAML.

    It is written as keys, so that an override can add more.
    """
    if not cluster.strip():
        raise UserError(
            "is empty", where="--cluster", fix=f"{CLUSTER_FORM}; leave it out for this machine"
        )
    keys = cluster_from_string(cluster)
    is_written_as_keys = cluster.lstrip().startswith("{")
    if isinstance(keys, dict) and not is_written_as_keys:
        return json.dumps(keys)
    return cluster


@contextmanager
def name_flags_in_errors(overrides: dict[str, str]) -> Iterator[None]:
    """Context manager: errors in an override that came from a flag name the flag, not the key.

    `overrides`: override → its flag as it was typed. Raises ConfigError again, with the flag as its
    place.
    """
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
    """Return the config to plan for: that of a YAML or of its keys, under flags and overrides.

    Without one the flags need a model at least, and the data is a file that need not exist.

    Raises ConfigError or UserError.
    """
    config, overrides = _without_first_override(config, overrides)
    by_flag = flags.overrides()
    if config is None:
        # First, so that a later override of the algorithm goes before it.
        by_flag = _algorithm_of_known(flags) | by_flag
        has_model = any(each.startswith("model") for each in [*by_flag, *overrides])
        if not has_model:
            fix = "name a YAML, or a model and the devices: drumline plan --model llama-3.1-8b --cluster 4x4090 --length 4096"
            raise UserError("what is to be planned?", where="drumline plan", fix=fix)
    with name_flags_in_errors(by_flag):
        ordered = order_overrides(list(by_flag), overrides)
        if config is None:
            return load_lines(WITHOUT_DATA, ordered, FLAGS_ONLY_PATH)
        return reader(config)(ordered)


def _without_first_override(
    config: str | Path | Mapping[str, Any] | None, overrides: list[str]
) -> tuple[str | Path | Mapping[str, Any] | None, list[str]]:
    """Return the config and all overrides; the first word is one of them if there is no YAML at all."""
    if isinstance(config, str | Path) and _is_override(str(config)):
        return None, [str(config), *overrides]
    return config, overrides


def _is_override(text: str) -> bool:
    """Return whether the first word of a command is an override and no file."""
    if OVERRIDE.match(text) is None:
        return False
    # Path.exists would raise for a text that is too long for a file's name.
    return not os.path.exists(text)  # noqa: PTH110


def _algorithm_of_known(flags: Flags) -> dict[str, str]:
    """Return the override, with its flag, of the algorithm that a known model needs.

    Models of images, embedding models and rerankers need one. Empty for other models.
    """
    known = shapes.find(flags.model or "")
    if known is None or known.algorithm is None:
        return {}
    return {f"algorithm={known.algorithm}": f"--model {flags.model}"}


def order_overrides(flags: list[str], overrides: list[str]) -> list[str]:
    """Return the overrides that flags stand for and other overrides, in the order of application.

    Flags come first.

    An override of a whole section, such as `cluster=8xh100`, comes before flags that set a key in that
    section, since it would undo them.
    """
    keys = {override: override.partition("=")[0] for override in (*flags, *overrides)}
    sections_of_flags = set()
    for flag in flags:
        section, dot, _ = keys[flag].partition(".")
        # --model names the model as a whole, though its key lies in a section.
        if dot and section != "model":
            sections_of_flags.add(section)
    whole_flags = [flag for flag in flags if "." not in keys[flag]]
    inner_flags = [flag for flag in flags if flag not in whole_flags]
    sections = [override for override in overrides if keys[override] in sections_of_flags]
    rest = [override for override in overrides if override not in sections]
    return [*whole_flags, *sections, *inner_flags, *rest]


@dataclass(frozen=True)
class PlanRequest:
    """A question, notes for the user on what it assumes, and where the config of the policy is."""

    question: Question
    notes: tuple[str, ...]
    policy: FoundModel


def build_request(loaded: Loaded, on_progress: OnProgress) -> PlanRequest:
    """Return the question that a loaded config poses, with notes and where the policy was found.

    `drumline plan`, `drumline init` and `drumline.plan` use it.

    Raises ModelError for a model of unknown shape, PlanError if the run is on the CPU and the cluster
    has GPUs, and what the config's own mistakes raise.
    """
    config = loaded.config
    policy = find_model(config.model, on_progress)
    notes = []
    if policy.how:
        notes.append(f"model: {policy.how}")
    notes += vocabulary_notes(config, policy)
    if may_have_encoder(config, policy):
        config = resolve_seq2seq(config, policy.hf_config, notes.extend)
    config = resolve_embedding(config, policy, notes.extend)
    config = with_trainable_token_embeddings(config, policy)
    data = _data(config, policy, loaded, notes)
    roles = roles_of(config, policy, lambda model: find_model(model, on_progress))
    cluster = _cluster_to_plan_for(config)
    question = build_question(
        config,
        policy,
        roles,
        data,
        cluster,
        needs_all_processes=_needs_all_processes(config, cluster),
        may_install=not cluster.is_this_machine,
    )
    notes += text_notes(policy, config.head, question.facts)
    if not config.images_alone:
        shapes.check_length(question.facts.max_positions, config.data.max_length)
        require_room(config.algorithm.new_tokens, config.data.max_length)
    unadapted = describe_unadapted(find_unadapted(question.facts, config.adapter))
    notes += describe_adapter(question.facts, config)
    return PlanRequest(question, (*notes, *unadapted, *cluster.notes), policy)


def _cluster_to_plan_for(config: Config) -> Cluster:
    """Return the devices that the YAML describes, or those of this machine that a run would use.

    Raises PlanError for a run on the CPU where the cluster has GPUs.
    """
    machine = detect()
    described = config.cluster
    is_on_cpu = config.run.device == "cpu"
    if is_on_cpu and (described is None or described.device is None):
        machine = machine.without_devices()
    processes = config.launch.nproc or max(1, len(machine.devices))
    cluster = cluster_of(described, machine, processes, calibration_for(machine))
    if is_on_cpu and cluster.device.kind == "cuda":
        what = f"run.device is cpu, and the cluster to plan for is of {cluster.device.name}"
        raise PlanError(what, where="run.device", fix="take one of the two out")
    return cluster


def load_cluster(
    loaded: Loaded,
    config: str | Path | Mapping[str, Any] | None,
    overrides: list[str],
    flags: Flags,
) -> ClusterConfig:
    """Return the section `cluster` that flags describe, under those overrides that are of it.

    `loaded`: what `load_with_flags` returned for the same `config` and `overrides`, and another
    cluster. Nothing but this section is read again. Raises ConfigError or UserError.
    """
    _, overrides = _without_first_override(config, overrides)
    by_flag = {}
    for override, flag in flags.overrides().items():
        if _is_of_cluster(override):
            by_flag[override] = flag
    of_cluster = [override for override in overrides if _is_of_cluster(override)]
    with name_flags_in_errors(by_flag):
        ordered = order_overrides(list(by_flag), of_cluster)
        described = load_text(WITHOUT_DATA, ordered, FLAGS_ONLY_PATH).cluster
    assert described is not None, "a flag describes it"
    if described.calibration is None or loaded.config.cluster is None:
        return described
    # The path of the file, from the folder of the config on.
    calibration = loaded.config.cluster.calibration
    return described.model_copy(update={"calibration": calibration})


def _is_of_cluster(override: str) -> bool:
    """Return whether an override sets the section `cluster` or a key in it."""
    key, _, _ = override.partition("=")
    section, _, _ = key.partition(".")
    return section == "cluster"


def move_to_cluster(request: PlanRequest, described: ClusterConfig) -> PlanRequest:
    """Return the request for the same run on other devices, with the notes on these alone.

    The model, its sizes and the data are taken from `request`. Raises PlanError as `build_request`
    does.
    """
    config = request.question.config.model_copy(update={"cluster": described})
    cluster = _cluster_to_plan_for(config)
    question = replace(
        request.question,
        config=config,
        cluster=cluster,
        needs_all_processes=_needs_all_processes(config, cluster),
        has_deepspeed=_has_deepspeed(may_install=not cluster.is_this_machine),
    )
    return replace(request, question=question, notes=cluster.notes)


def _needs_all_processes(config: Config, cluster: Cluster) -> bool:
    """Return whether the config sets the number of processes of this machine."""
    return config.launch.nproc is not None and cluster.is_this_machine


def _has_deepspeed(may_install: bool) -> bool:
    """Return whether DeepSpeed is installed, or can be installed where the run will be."""
    return may_install or importlib.util.find_spec("deepspeed") is not None


def build_question(
    config: Config,
    policy: FoundModel,
    roles: Mapping[str, RolePlan],
    data: DataPlan | None,
    cluster: Cluster,
    *,
    needs_all_processes: bool = False,
    may_install: bool = False,
) -> Question:
    """Return the question: the given parts, with the sizes of the policy and of `roles`.

    `build_request` calls it, `train.setup` before a run, and `train.replan` after one ran out of
    memory. Sizes are counted on the meta device, if they are not known.

    `data`: None if none is prepared yet.
    `needs_all_processes`: their number is set, so each must have work.
    `may_install`: DeepSpeed can be installed, or is on another machine.
    """
    length = config.data.max_length
    role_sizes = {}
    for name, role in roles.items():
        role_sizes[name] = sizes_of(FoundModel(role.model, role.model_path), length, role.head)
    if config.images_alone:
        from drumline.models.vision import image_side

        length = image_side(config, policy.path, policy.hf_config)
    labels = _labels(config)
    if data is not None:
        labels = data.labels
    sizes = sizes_of(policy, length, config.head, labels, config.adapter, config.model.freeze)
    return Question(
        config,
        cluster,
        facts=replace(sizes, roles=role_sizes),
        data=data,
        roles=roles,
        needs_all_processes=needs_all_processes,
        has_deepspeed=_has_deepspeed(may_install),
    )


def _labels(config: Config) -> tuple[str, ...]:
    """Return the labels that a classifier is configured with; empty for other algorithms."""
    return tuple(getattr(config.algorithm, "labels", None) or ())


def require_adapter(config: Config, policy: FoundModel) -> None:
    """Raise ModelError if the adapter names a layer, module or token that the model does not have.

    It takes the model's config alone and no PEFT, so it can run before anything is downloaded or prepared.
    """
    if not isinstance(config.adapter, LoRAConfig):
        return
    from drumline.models.adapters import find_targets
    from drumline.models.classes import set_classes
    from drumline.models.load import build_without_memory

    hf_config = set_classes(deepcopy(policy.hf_config), config.head, _labels(config))
    find_targets(build_without_memory(hf_config, config.head), config.adapter)


def roles_of(
    config: Config, policy: FoundModel, find: Callable[[ModelConfig], FoundModel]
) -> dict[str, RolePlan]:
    """Return the auxiliary models of an algorithm by name, from their configs alone.

    `find` returns where a model's config is. `train.setup` also checks tokens and weights.
    """
    roles = dict[str, RolePlan]()
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        if wanted.model == config.model:
            role = policy
        else:
            role = find(wanted.model)
        roles[name] = RolePlan(
            model=role.model,
            model_path=role.path,
            head=wanted.head,
            trainable=wanted.trainable,
            lr_ratio=wanted.lr_ratio,
        )
    return roles


def find_model(model: ModelConfig, on_progress: OnProgress, weights: bool = False) -> FoundModel:
    """Return where the config of a model is.

    It is looked for in a folder, a package or a cached copy, then in the table of known shapes, then on the hub.
    `weights`: the model's files are needed, and a shape is not enough. Raises ModelError.
    """
    from drumline.models.files import resolve

    if model.builder is not None:
        what = "what a module of your own computes is known to itself alone: nothing can be planned for it"
        raise ModelError(what, where="model.kind", fix="name a strategy and train")
    name = model.id
    if name is None:
        return FoundModel(model, None)
    if name in entry_points("models"):
        raise _unplannable(name)
    known = shapes.find(name)
    is_local = _is_local(name)
    if weights or is_local or known is None:
        try:
            path = resolve(model, on_progress)
        except ModelError as error:
            if weights or is_local:
                raise
            raise shapes.unknown_shape(name, error.what) from None
        return FoundModel(model, path)
    cached = _cached_config(shapes.hub_id(name), model.revision)
    if cached is not None:
        return FoundModel(model, str(cached.parent))
    return FoundModel(
        model_from_known_shape(known, model),
        None,
        f"{name} is not on this machine; its shape is known",
    )


def _unplannable(name: str) -> ModelError:
    """Return the error for a model that a package's function builds."""
    package = package_of(entry_points("models")[name])
    return ModelError(
        f"{name} is a function of {package}, of which nothing can be planned",
        fix=f"write model: {{kind: {name}}} and algorithm: {{kind: python}} into a YAML, name a strategy and train",
    )


def _is_local(name: str) -> bool:
    """Return whether a model's name is one of a package or mirror, or a path."""
    from drumline.models.files import PREFIX

    if name.startswith((PREFIX, mirror.PREFIX, "/", ".", "~")):
        return True
    return name.count("/") > 1 or Path(name).exists()


def _cached_config(hub_id: str, revision: str | None) -> Path | None:
    """Return the config file of a model in the cache of the hub; None if it is not there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = "--".join(("models", *hub_id.split("/")))
    # Path would raise for a name that is too long.
    if not os.path.isdir(os.path.join(HF_HUB_CACHE, folder)):  # noqa: PTH112, PTH118
        return None
    from huggingface_hub import try_to_load_from_cache  # it takes 0.1 s
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # the hub has no such names
        cached = try_to_load_from_cache(hub_id, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    return None


def _data(config: Config, policy: FoundModel, loaded: Loaded, notes: list[str]) -> DataPlan | None:
    """Return the prepared data, and append to `notes` why it cannot be read.

    None if there is none yet: the planner then takes rows to be as long as they may be.
    """
    is_by_flags = False
    if loaded.path == Path(FLAGS_ONLY_PATH):
        unset = load_text(WITHOUT_DATA, [], FLAGS_ONLY_PATH).data.train
        is_by_flags = config.data.train == unset
    has_tokenizer = policy.path is not None or config.model.tokenizer is not None
    if is_by_flags or not has_tokenizer:
        return None
    from drumline.data.prepare import find_prepared  # which imports torch
    from drumline.models.vision import vision_of

    try:
        vision = vision_of(config, policy.path, policy.hf_config)
        return find_prepared(
            config, config.model.tokenizer or policy.path or "", loaded.base_dir, vision
        )
    except (DataError, ModelError) as error:
        notes.append(f"data: {error.what}")
        return None
