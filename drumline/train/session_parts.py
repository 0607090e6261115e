"""The parts of a session: its plan, its run folder, its models, and checks of what is given to it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.checkpoint.load import read_state, state_to_resume
from drumline.checkpoint.memory import require_room
from drumline.checkpoint.remote import require_unused
from drumline.checkpoint.retention import recover
from drumline.config.load import (
    Draft,
    refused_changes,
    saved_config,
    strategy_change,
    validate_draft,
)
from drumline.config.resume import Resume
from drumline.data.samples import has_index
from drumline.dist.seeds import derive
from drumline.dist.start import RankInfo
from drumline.engine.engine import CustomLoopEngine
from drumline.engine.optimizer import MakeOptimizer
from drumline.errors import CheckpointError, EnvironmentFault, UserError
from drumline.foreign import disk_errors
from drumline.hardware.detect import detect
from drumline.launch.lease import Lease
from drumline.launch.local import ATTEMPT, resume_of_restart
from drumline.launch.script import link_logs
from drumline.models.freeze import trainable_names
from drumline.models.tape import Build
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.system.output import say_note
from drumline.telemetry.events import Step
from drumline.train.state import PendingStep

Pair = tuple[Build, MakeOptimizer]

# The name of the model of a session that has only one.
MAIN = ""
# Option of a session → its key in the YAML.
OPTIONS = {
    "seed": "run.seed",
    "device": "run.device",
    "deterministic": "run.deterministic",
    "report_to": "run.report_to",
    "collect_every": "run.collect_every",
    "sync_batchnorm": "model.sync_batchnorm",
    "activation_checkpointing": "memory.activation_checkpointing",
    "compile": "compile.enabled",
    "keep": "checkpoint.keep",
    "asynchronous": "checkpoint.asynchronous",
    "on_nan": "health.on_nan",
    "url": "checkpoint.url",
    "replicas": "checkpoint.replicas",
    "in_memory_every": "checkpoint.in_memory_every",
    "timeout_seconds": "launch.timeout_seconds",
    "initial_scale": "precision.initial_scale",
    "tf32": "precision.tf32",
}


def make_plan(
    strategy: str | Mapping[str, Any],
    precision: str,
    global_samples: int,
    micro_batch: int | None,
    run_dir: str,
    world_size: int,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan of a session on `world_size` ranks.

    It is made as from a YAML, but without a model, which does not exist yet. Raises UserError for
    an unknown option, and ConfigError and PlanError as for a YAML.
    """
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise UserError(
            f"no option {min(unknown)!r}",
            where="session",
            fix=f"one of {', '.join(sorted(OPTIONS))}",
        )
    batch = {"global_samples": global_samples}
    if micro_batch:
        batch["micro_batch"] = micro_batch
    else:
        # By default a rank takes all of its samples at once.
        batch["accumulation"] = 1
    sections: dict[str, dict[str, Any]] = {
        "model": {"id": None, "init": "random"},
        "data": {"train": [{"kind": "file", "path": "session"}], "packing": False},
        "batch": batch,
        "run": {"dir": run_dir, "report_to": ()},
        "checkpoint": {"export": "none"},
        "precision": {"kind": precision},
    }
    for name, value in options.items():
        section, _, key = OPTIONS[name].partition(".")
        sections.setdefault(section, {})[key] = value
    if isinstance(strategy, Mapping):
        sections["strategy"] = dict(strategy)
    else:
        sections["strategy"] = {"kind": strategy}
    config = validate_draft(Draft("session", sections, {}), [])
    return resolve(
        config,
        run_dir=run_dir,
        machine=detect(),
        world_size=world_size,
        model=KnownModel(),
        data=None,
    )


def claim_run_folder(
    plan: Plan, resume: Resume | None, allow: tuple[str, ...], stack: ExitStack
) -> Resume | None:
    """Take the lease of the run folder, and write the plan into it. Called on rank 0.

    Returns what the ranks resume from; None for a run that starts afresh. `stack` gets the lease,
    and releases it.

    Raises EnvironmentFault if the folder is another run's, and CheckpointError if the config
    differs in what the run depends on.
    """
    run_dir = Path(plan.run_dir)
    stack.enter_context(Lease(run_dir))
    # torchrun, or `drumline launch`, has started the script once more.
    is_restart = RankInfo.from_environment().attempt > 0 or os.environ.get(ATTEMPT, "0") != "0"
    if is_restart:
        resume = resume_of_restart(resume, run_dir, plan.config.checkpoint.allows_separate_folders)
    checkpoints = run_dir / "checkpoints"
    recover(checkpoints)
    if resume is None and run_dir.is_dir() and any(run_dir.glob("*.jsonl")):
        raise EnvironmentFault(
            "the run folder is not empty",
            where=str(run_dir),
            fix="go on with it by resume=True, or choose another run_dir",
        )
    url = plan.config.checkpoint.url
    if plan.config.checkpoint.memory_copies:
        require_room(plan.checkpoint_bytes)
    if url and resume is None:
        require_unused(url)
    saved_state = None
    if resume is not None:
        saved_state = state_to_resume(resume, checkpoints, url)
    if saved_state is not None:
        path, state = saved_state
        _require_same_run(plan, allow, path, state)
    with disk_errors(
        "cannot write the run folder", str(run_dir), EnvironmentFault, "choose another run_dir"
    ):
        checkpoints.mkdir(parents=True, exist_ok=True)
        plan.save(run_dir / "plan.json")
        link_logs(run_dir)
    return resume


def _require_same_run(plan: Plan, allow: tuple[str, ...], path: str, state: dict[str, Any]) -> None:
    """Raise CheckpointError if the session differs from a checkpoint in what the run depends on.

    `state`: of the checkpoint at `path`.
    """
    saved = saved_config(state["config"], plan.config, allow, path)
    changes = refused_changes(saved, plan.config, allow)
    if changes.keys:
        raise CheckpointError(
            f"the session differs in what the run depends on: {changes.description}",
            where=path,
            fix=f"take it back, or accept it with allow={tuple(changes.keys)}",
        )
    strategy_line = strategy_change(saved, plan.config, path)
    if strategy_line is not None:
        say_note(strategy_line)


@dataclass
class SessionModel:
    """A model of a session: what it has done in the current global batch, and its last step."""

    engine: CustomLoopEngine
    # Contexts of the micro-batch that the loop is in.
    contexts: ExitStack = field(default_factory=ExitStack)
    # For each backward of the global batch an fp64[2]: loss sum and weight.
    sums: list[torch.Tensor] = field(default_factory=list)
    # Whether the model has made its step of the global batch.
    has_stepped: bool = False
    # Whether the weight of its last step counts as tokens: the step was the first of its global
    # batch.
    counts_tokens: bool = False
    # The last step, until its numbers are read and acted on.
    pending_step: PendingStep | None = None
    last_step: PendingStep | None = None

    @property
    def tokens(self) -> int:
        """The weight of the pending step as tokens; 0 if it does not count. Waits for the device."""
        if self.pending_step is None or not self.counts_tokens:
            return 0
        return int(self.pending_step.total["weight"])


class SessionEngines:
    """The engines of a session as one engine, as far as checkpoints need it.

    The names of a named model's tensors begin with NAME/. The state has the options of the
    optimizers' groups, and which weights were unfrozen.
    """

    def __init__(
        self, engines: dict[str, CustomLoopEngine], unfrozen: Mapping[str, frozenset[str]]
    ) -> None:
        """`unfrozen`: for each model the weights that are trained although its `build` has them frozen."""
        self.engines = engines
        self.unfrozen = unfrozen

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, engine in self.engines.items():
            for key, tensor in engine.tensors().items():
                tensors[_qualify(name, key)] = tensor
        return tensors

    def state(self) -> dict[str, Any]:
        states: dict[str, dict[str, Any]] = {}
        for name, engine in self.engines.items():
            state = {**engine.state(), "groups": _group_options(engine.optimizer)}
            trainable_now = set(trainable_names(engine.model))
            newly_trainable = trainable_now - engine.initially_trainable
            unfrozen = newly_trainable | self.unfrozen[name]
            if unfrozen:
                state["unfrozen"] = sorted(unfrozen)
            states[name] = state
        if MAIN in states:
            return states[MAIN]
        return {"models": states}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, engine in self.engines.items():
            saved = state if name == MAIN else state["models"][name]
            own_state = {**saved, "step": state["step"]}
            prefix = _qualify(name, "")
            own_tensors = {}
            for key, tensor in tensors.items():
                if key.startswith(prefix):
                    own_tensors[key.removeprefix(prefix)] = tensor
            engine.load_state(own_state, own_tensors)
            groups = own_state.get("groups", ())
            for group, saved_group in zip(engine.optimizer.param_groups, groups, strict=False):
                _load_group_options(group, saved_group)


def _load_group_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Set the options of a group of parameters to saved ones, from `_group_options`.

    Options that are tensors or tuples stay so.
    """
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        elif isinstance(current, tuple):
            group[key] = tuple(value)
        else:
            group[key] = value


def unfrozen_weights(path: Path | None, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return for each model the weights that were trained although its `build` has them frozen.

    `path`: the checkpoint of `SessionEngines` that says so; None for a run that begins.
    """
    if path is None:
        return dict.fromkeys(names, frozenset())
    state = read_state(path)["engine"]
    states = state.get("models", {MAIN: state})
    return {name: frozenset(states.get(name, {}).get("unfrozen", ())) for name in names}


def _qualify(name: str, key: str) -> str:
    """Return the key of a model's tensor in a checkpoint."""
    return f"{name}/{key}" if name else key


def _group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters that JSON can hold, with the learning rate."""
    simple = (bool, int, float, str, type(None))

    def is_simple(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(isinstance(item, simple) for item in value)
        return isinstance(value, simple)

    groups = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if key != "params" and is_simple(value):
                options[key] = value
        groups.append(options)
    return groups


def check_optimizers(pairs: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the same {name: (build, make_optimizer)}; each make_optimizer checks what it returns.

    Raises UserError for a model or an optimizer that is made already. A make_optimizer that is
    returned raises it for an optimizer that cannot be stepped.
    """
    checked: dict[str, Pair] = {}
    for name, (build, make_optimizer) in pairs.items():
        if isinstance(build, nn.Module) or not callable(build):
            raise UserError(
                f"build is a {type(build).__name__} that is made already",
                where="session.prepare",
                fix="give a class or a function, such as lambda: Net(): it is called where no memory is taken",
            )
        if not callable(make_optimizer):
            raise UserError(
                f"make_optimizer is a {type(make_optimizer).__name__} that is made already",
                where="session.prepare",
                fix="give a function: lambda model: torch.optim.AdamW(model.parameters())",
            )
        checked[name] = (build, _with_check(make_optimizer))
    return checked


def _with_check(make_optimizer: Callable[[Any], Any]) -> MakeOptimizer:
    """Return `make_optimizer` with a check of what it returns."""

    def make_checked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make_optimizer(model)
        _require_steppable(optimizer, model)
        return optimizer

    return make_checked


def _require_steppable(optimizer: Any, model: nn.Module) -> None:
    """Raise UserError if a session cannot step the optimizer of a model."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"make_optimizer returns {kind}, an optimizer of torch is wanted",
            where="session.prepare",
            fix="return it",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{kind} computes the loss itself, several times a step",
            where="session.prepare",
            fix="take an optimizer whose step requires no closure",
        )
    own_ids = {id(parameter) for parameter in model.parameters()}
    foreign = 0
    for group in optimizer.param_groups:
        foreign += sum(id(parameter) not in own_ids for parameter in group["params"])
    if foreign:
        raise UserError(
            f"{kind} steps {foreign} parameters that are not the model's, and nothing averages them",
            where="session.prepare",
            fix="make them part of the module that build returns",
        )


# Whether a session is stepping an optimizer now.
_is_stepping = False


def take_step(
    engine: CustomLoopEngine, lr: float | None, norm: torch.Tensor, finite: torch.Tensor
) -> None:
    """Make the engine's step, during which the user's optimizer may step (`guard_optimizer`)."""
    global _is_stepping
    _is_stepping = True
    try:
        engine.step(lr, norm, finite)
    finally:
        _is_stepping = False


def _require_stepping(*_: object) -> None:
    """Raise UserError if the user has called the optimizer's step, and not the session."""
    if not _is_stepping:
        raise UserError(
            "optimizer.step() is called by s.step()",
            where="session",
            fix="leave it out, and optimizer.zero_grad() as well",
        )


def _refuse_groups(*_: object) -> None:
    """Raise UserError for a new group of parameters, which the optimizer would lack after a resume."""
    raise UserError(
        "optimizer.add_param_group() comes after prepare",
        where="session",
        fix="give make_optimizer all of them: those that are to wait are frozen until then",
    )


def guard_optimizer(optimizer: Any) -> Any:
    """Return the optimizer, changed to step only within `take_step`, and to refuse new groups."""
    # DeepSpeed's optimizer is not torch's; its engine alone steps it.
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.register_step_pre_hook(_require_stepping)
        vars(optimizer)["add_param_group"] = _refuse_groups
    return optimizer


def find_model(models: Mapping[str, SessionModel], name: str) -> SessionModel:
    """Return the model of a name. Raises UserError if there is none."""
    if name in models:
        return models[name]
    known = ", ".join(repr(each) for each in models if each)
    if known:
        fix = f"of= one of {known}"
    elif models:
        fix = "leave of= out: there is one model"
    else:
        fix = "call s.prepare first"
    if name:
        what = f"no model {name!r}"
    elif known:
        what = "which model?"
    else:
        what = "no model yet"
    raise UserError(what, where="session", fix=fix)


def last_step(models: Mapping[str, SessionModel], what: str) -> PendingStep:
    """Return the last step of a session's one model.

    Raises UserError if there are several models, or no step yet. `what`: the property that asks.
    """
    if len(models) > 1:
        names = ", ".join(repr(name) for name in models)
        plural = {"loss": "losses", "grad_norm": "grad_norms"}[what]
        fix = f"read s.{plural}[NAME], of {names}"
        raise UserError("the session has several models", where=f"session.{what}", fix=fix)
    for model in models.values():
        if model.last_step is not None:
            return model.last_step
    fix = "read it after s.step() has returned True"
    raise UserError("no step was done yet", where=f"session.{what}", fix=fix)


def step_event(
    step: int,
    plan: Plan,
    engine: CustomLoopEngine,
    scalars: Mapping[str, float],
    *,
    seconds: float,
    tokens: float,
    **metrics: float,
) -> Step:
    """Return the event of a step.

    `seconds` and `tokens`: of the step; `metrics`: loss, grad_norm and epoch.
    """
    samples = plan.batch.global_samples
    return Step(
        step=step,
        lr=float(engine.optimizer.param_groups[0]["lr"]),
        tokens=int(tokens),
        samples=samples,
        tokens_per_s=tokens / seconds,
        samples_per_s=samples / seconds,
        mfu=None,
        seconds=seconds,
        data_s=0.0,
        compute_s=seconds,
        comm_s=None,
        sent_bytes=None,
        memory_bytes=[],
        metrics=dict(scalars),
        **metrics,
    )


def passes_until(dataset: Any, position: int) -> float:
    """Return how many passes over a dataset end at a position; 0 if its length is not known.

    Only a dataset that is read by index is asked for its length: that of others may raise.
    """
    if not has_index(dataset):
        return 0.0
    return position / len(dataset)


def plan_of_model(plan: Plan, name: str) -> Plan:
    """Return the plan with a seed that depends on the model's name, so that models draw differently."""
    if not name:
        return plan
    seed = derive(plan.config.run.seed, name) % 2**31
    run = plan.config.run.model_copy(update={"seed": seed})
    config = plan.config.model_copy(update={"run": run})
    return plan.model_copy(update={"config": config})


def to_scalar(value: Any, device: str) -> torch.Tensor:
    """Return a number, or a tensor with one number, as an fp64 scalar on the device.

    The host does not wait for the device.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)
