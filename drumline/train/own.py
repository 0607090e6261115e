"""What a loop of the user's own is made of: its plan, its models by name, and its run folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.checkpoint.load import named as at_place
from drumline.checkpoint.load import newest_state, read_state
from drumline.checkpoint.memory import require_room
from drumline.checkpoint.remote import require_unused
from drumline.checkpoint.retention import recover
from drumline.core.load import Draft, refused, saved_config, strategy_change, validated
from drumline.core.output import say
from drumline.core.plan import Plan
from drumline.core.resolve import resolve
from drumline.data.samples import indexed
from drumline.dist.seeds import derive
from drumline.dist.start import Ranks
from drumline.errors import CheckpointError, EnvironmentFault, UserError
from drumline.foreign import disk_errors
from drumline.hardware.detect import detect
from drumline.launchers.lease import Lease
from drumline.launchers.local import ATTEMPT, newest_or
from drumline.launchers.script import link_logs
from drumline.models.freeze import learning
from drumline.parallel.engine import OpenEngine
from drumline.telemetry.events import Step
from drumline.train.state import Flight, keyed

MAIN = ""  # the name of the one model of a session
# Options of a session → where the YAML has them.
OPTIONS = {
    "seed": "run.seed", "device": "run.device", "deterministic": "run.deterministic", "report_to": "run.report_to",
    "collect_every": "run.collect_every",
    "sync_batchnorm": "model.sync_batchnorm", "activation_checkpointing": "memory.activation_checkpointing",
    "compile": "compile.enabled", "keep": "checkpoint.keep", "asynchronous": "checkpoint.asynchronous", "on_nan": "health.on_nan",
    "url": "checkpoint.url", "replicas": "checkpoint.replicas", "in_memory_every": "checkpoint.in_memory_every",
    "timeout_seconds": "launch.timeout_seconds", "initial_scale": "precision.initial_scale", "tf32": "precision.tf32",
}  # fmt: skip


def plan_of(
    strategy: str | Mapping[str, Any],
    precision: str,
    global_samples: int,
    micro_batch: int | None,
    run_dir: str,
    world_size: int,
    options: Mapping[str, Any],
) -> Plan:
    """The plan of a session on `world_size` ranks: the YAML's own, of a model that is not there yet.

    Raises UserError for an option that there is not, ConfigError and PlanError as for a YAML.
    """
    if unknown := options.keys() - OPTIONS.keys():
        raise UserError(
            f"no option {min(unknown)!r}",
            where="session",
            fix=f"one of {', '.join(sorted(OPTIONS))}",
        )
    # Without a word about micro-batches a rank takes all of its samples at once.
    batch = {
        "global_samples": global_samples,
        **({"micro_batch": micro_batch} if micro_batch else {"accumulation": 1}),
    }
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
    sections["strategy"] = dict(strategy) if isinstance(strategy, Mapping) else {"kind": strategy}
    config = validated(Draft("session", sections, {}), [])
    return resolve(
        config,
        run_dir=run_dir,
        machine=detect(),
        world_size=world_size,
        facts=None,
        model_path=None,
        data=None,
    )


def claim(
    plan: Plan, resume: bool | str | Path, allow: tuple[str, ...], stack: ExitStack
) -> bool | str:
    """On rank 0, for which `stack` gets the folder's lease: make the run folder and write the plan into it. Returns what to go on from: a
    checkpoint, or True for the newest one.

    Raises EnvironmentFault for a folder that another run is in, CheckpointError where the config differs in what the run depends on.
    """
    run_dir = Path(plan.run_dir)
    stack.enter_context(Lease(run_dir))
    if (
        Ranks.from_environment().attempt > 0 or os.environ.get(ATTEMPT, "0") != "0"
    ):  # torchrun or `drumline launch`: once more
        resume = newest_or(
            None if isinstance(resume, bool) else str(resume), run_dir, plan.config.checkpoint.apart
        )
    resume = resume == "newest" or (resume if isinstance(resume, bool) else str(resume))
    checkpoints = run_dir / "checkpoints"
    recover(checkpoints)
    if not resume and run_dir.is_dir() and any(run_dir.glob("*.jsonl")):
        fix = "go on with it by resume=True, or choose another run_dir"
        raise EnvironmentFault("the run folder is not empty", where=str(run_dir), fix=fix)
    url = plan.config.checkpoint.url
    if plan.config.checkpoint.memory_copies:
        require_room(plan.checkpoint_bytes)
    if url and not resume:
        require_unused(url)
    found = newest_state(checkpoints, url) if resume is True else None
    if resume and resume is not True:
        found = at_place(str(resume))
    if found is not None:
        path, state = found
        saved = saved_config(state["config"], plan.config, allow, path)
        changes, keys = refused(saved, plan.config, allow)
        if keys:
            fix = f"take it back, or accept it with allow={tuple(keys)}"
            raise CheckpointError(
                f"the session differs in what the run depends on: {changes}", where=path, fix=fix
            )
        strategy_line = strategy_change(saved, plan.config, path)
        if strategy_line is not None:
            say(f"note: {strategy_line}")
    with disk_errors(
        "cannot write the run folder", str(run_dir), EnvironmentFault, "choose another run_dir"
    ):
        checkpoints.mkdir(parents=True, exist_ok=True)
        plan.save(run_dir / "plan.json")
        link_logs(run_dir)
    return resume


@dataclass
class Trained:
    """A model of a session: what it has done in the global batch that the loop is in, and its last step."""

    engine: OpenEngine
    contexts: ExitStack = field(default_factory=ExitStack)  # of the micro-batch that the loop is in
    # Fp64[2] of each backward: loss sum and weight.
    sums: list[torch.Tensor] = field(default_factory=list)
    stepped: bool = False
    counts: bool = False  # its last step was the first of that global batch, and its weight is counted as tokens
    flight: Flight | None = None  # its last step, where nothing has followed from its numbers yet
    last: Flight | None = None  # its last step

    @property
    def tokens(self) -> int:
        """Of the step in flight, where they count."""
        return int(self.flight.total["weight"]) if self.flight is not None and self.counts else 0


class Engines:
    """The engines of a session as checkpoints see them: the tensors of a named model lie under NAME/, the optimizers' groups are state."""

    def __init__(
        self, engines: dict[str, OpenEngine], unfrozen: Mapping[str, frozenset[str]]
    ) -> None:
        """`unfrozen`: of each model the weights that learn although its `build` has them frozen."""
        self.engines, self.unfrozen = engines, unfrozen

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            _under(name, key): tensor
            for name, engine in self.engines.items()
            for key, tensor in engine.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        named = {
            name: {**engine.state(), "groups": _groups(engine.optimizer)}
            for name, engine in self.engines.items()
        }
        for name, engine in self.engines.items():
            if late := {*learning(engine.model)} - engine.learned | self.unfrozen[name]:
                named[name]["unfrozen"] = sorted(late)
        return named.get(MAIN, {"models": named})

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, engine in self.engines.items():
            own, prefix = (
                {**(state if name == MAIN else state["models"][name]), "step": state["step"]},
                _under(name, ""),
            )
            engine.load_state(
                own,
                {
                    key.removeprefix(prefix): t
                    for key, t in tensors.items()
                    if key.startswith(prefix)
                },
            )
            for group, saved in zip(
                engine.optimizer.param_groups, own.get("groups", ()), strict=False
            ):
                for key, value in saved.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def unfrozen(path: Path | None, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Of each model in a checkpoint of `Engines` the weights that learned although its `build` had them frozen."""
    state = read_state(path)["engine"] if path else {}
    return {
        name: frozenset(state.get("models", {MAIN: state}).get(name, {}).get("unfrozen", ()))
        for name in names
    }


def _under(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Rates and the like of each group of parameters, as far as JSON has them."""
    simple = (bool, int, float, str, type(None))

    def is_simple(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(isinstance(item, simple) for item in value)
        return isinstance(value, simple)

    groups = []
    for group in optimizer.param_groups:
        kept = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if key != "params" and is_simple(value):
                kept[key] = value
        groups.append(kept)
    return groups


def require_one_model(plan: Plan, models: int) -> None:
    """Raises UserError where a strategy takes one model alone."""
    if models == 1:
        return
    strategy, compression = plan.config.strategy, plan.config.strategy.copies().compression.kind
    reasons = {
        "ZeRO takes one model: DeepSpeed's engine owns backward and step": plan.engine
        == "deepspeed",
        "compression goes with one model: DDP, whose buckets it works on, wants to see each backward": compression
        != "none",
        "several models reduce after each micro-batch": getattr(
            strategy, "sync_each_micro_batch", True
        )
        is False,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(
                reason,
                where="strategy",
                fix="use ddp or fsdp2 with their defaults, or one module that holds the models",
            )


def makers(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """The same {name: (build, make_optimizer)}, whose optimizers are looked at. Raises UserError for what is made already, and for an
    optimizer that cannot be stepped."""

    def checked(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(model: Any) -> Any:
            optimizer = make(model)
            if not isinstance(optimizer, torch.optim.Optimizer):
                what = f"make_optimizer returns {type(optimizer).__name__}, an optimizer of torch is wanted"
                raise UserError(what, where="session.prepare", fix="return it")
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                what = f"{type(optimizer).__name__} computes the loss itself, several times a step"
                raise UserError(
                    what,
                    where="session.prepare",
                    fix="take an optimizer whose step requires no closure",
                )
            own = {id(parameter) for parameter in model.parameters()}
            if foreign := [
                p for group in optimizer.param_groups for p in group["params"] if id(p) not in own
            ]:
                what = f"{type(optimizer).__name__} steps {len(foreign)} parameters that are not the model's, and nothing averages them"
                raise UserError(
                    what,
                    where="session.prepare",
                    fix="make them part of the module that build returns",
                )
            return optimizer

        return made

    for build, make in pairs.values():
        if isinstance(build, nn.Module) or not callable(build):
            fix = "give a class or a function, such as lambda: Net(): it is called where no memory is taken"
            raise UserError(
                f"build is a {type(build).__name__} that is made already",
                where="session.prepare",
                fix=fix,
            )
        if not callable(make):
            fix = "give a function: lambda model: torch.optim.AdamW(model.parameters())"
            raise UserError(
                f"make_optimizer is a {type(make).__name__} that is made already",
                where="session.prepare",
                fix=fix,
            )
    return {name: (build, checked(make)) for name, (build, make) in pairs.items()}


_in_turn = False  # while a session steps its optimizers


def take_step(
    engine: OpenEngine, lr: float | None, norm: torch.Tensor, finite: torch.Tensor
) -> None:
    """The engine's step, in which alone the user's optimizer may step."""
    global _in_turn
    _in_turn = True
    try:
        engine.step(lr, norm, finite)
    finally:
        _in_turn = False


def _only_in_turn(*_: object) -> None:
    """Raises UserError for a step that would come beside the session's."""
    if not _in_turn:
        raise UserError(
            "optimizer.step() is called by s.step()",
            where="session",
            fix="leave it out, and optimizer.zero_grad() as well",
        )


def _no_more_groups(*_: object) -> None:
    """Raises UserError for parameters that the optimizer would not have where the run is gone on with."""
    fix = "give make_optimizer all of them: those that are to wait are frozen until then"
    raise UserError("optimizer.add_param_group() comes after prepare", where="session", fix=fix)


def guarded(optimizer: Any) -> Any:
    """The optimizer, which from now on steps in the session's turn alone, and has the parameters that it has."""
    if isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed's steps for its engine alone
        optimizer.register_step_pre_hook(_only_in_turn)
        vars(optimizer)["add_param_group"] = _no_more_groups
    return optimizer


def measured(given: Any) -> tuple[Any, ...]:
    """What `measure` of evaluate returns. Raises UserError for another form."""
    if (
        isinstance(given, tuple | list)
        and len(given) in (2, 3)
        and (len(given) == 2 or isinstance(given[2], Mapping))
    ):
        if taken := {"loss", "weight"}.intersection(given[2] if len(given) == 3 else ()):
            what = (
                f"measure returns a sum of the name {min(taken)!r}, which the session uses itself"
            )
            raise UserError(what, where="session.evaluate", fix="give it another name")
        return tuple(given)
    what = f"measure returns {type(given).__name__}, (loss sum, weight) or (loss sum, weight, {{name: sum}}) is wanted"
    raise UserError(what, where="session.evaluate", fix="return losses.sum(), len(batch)")


def named(models: Mapping[str, Trained], of: str) -> Trained:
    """The model of that name. Raises UserError where there is none."""
    if of not in models:
        known = ", ".join(repr(name) for name in models if name)
        fix = (
            f"of= one of {known}"
            if known
            else "call s.prepare first"
            if not models
            else "leave of= out: there is one model"
        )
        raise UserError(
            f"no model {of!r}" if of else "which model?" if known else "no model yet",
            where="session",
            fix=fix,
        )
    return models[of]


def last_step(models: Mapping[str, Trained], what: str) -> Flight:
    """Return the last step of a session's one model.

    Raises UserError if there are several models, or no step yet. `what`: the property that asks.
    """
    if len(models) > 1:
        names = ", ".join(repr(name) for name in models)
        plural = {"loss": "losses", "grad_norm": "grad_norms"}[what]
        fix = f"read s.{plural}[NAME], of {names}"
        raise UserError("the session has several models", where=f"session.{what}", fix=fix)
    for model in models.values():
        if model.last is not None:
            return model.last
    fix = "read it after s.step() has returned True"
    raise UserError("no step was done yet", where=f"session.{what}", fix=fix)


def step_event(
    step: int,
    plan: Plan,
    engine: OpenEngine,
    scalars: Mapping[str, float],
    *,
    seconds: float,
    tokens: float,
    **metrics: float,
) -> Step:
    """The event of a step that took so many seconds, for so many tokens. `metrics`: loss, grad_norm and epoch."""
    samples = plan.batch.global_samples
    return Step(
        step=step, lr=float(engine.optimizer.param_groups[0]["lr"]), tokens=int(tokens), samples=samples, tokens_per_s=tokens / seconds,
        samples_per_s=samples / seconds, mfu=None, seconds=seconds, data_s=0.0, compute_s=seconds, comm_s=None, sent_bytes=None,
        memory_bytes=[], metrics=dict(scalars), **metrics,
    )  # fmt: skip


def require_free(inside: bool, left: list[str]) -> None:
    """Raises UserError for a loop over batches `inside` of another, and for one after a loop that was left between a backward and its step:
    the gradients of these samples, which are taken again, are there already."""
    if inside:
        what = "two loops take batches at once, and each would count its own steps"
        raise UserError(
            what,
            where="session.batches",
            fix="write one loop, over a dataset that gives the samples of both",
        )
    if left:
        what = f"a loop was left in the middle of a global batch, and its gradients{f' of {min(left)}' if min(left) else ''} were not used"
        raise UserError(
            what, where="session.batches", fix="leave it where s.step() has returned True"
        )


def passes(dataset: Any, end: int) -> float:
    """How often a dataset of known length was taken by position `end`; 0 for others, as what is iterable may have a len() that raises."""
    return end / len(dataset) if indexed(dataset) else 0.0


def require_json(state: dict[str, Any], drop: bool = False) -> None:
    """Raises UserError for a value of `session.state` that JSON does not have; with `drop` it goes instead, with a line."""
    for key, value in [*state.items()]:
        try:
            json.dumps(keyed({key: value}))
        except (TypeError, ValueError):
            what, fix = (
                f"s.state[{key!r}] is a {type(value).__name__}, which JSON does not have",
                "keep a number or a text of it: float(x)",
            )
            if not drop:
                raise UserError(what, where="session.save", fix=fix) from None
            say(f"warning: {what}: it is not saved; {fix}")
            del state[key]


def require_more(rows: bool, ended: bool) -> None:
    """Raises UserError for a second loop over a run that a first one has brought to its end: `epochs` and `steps` count the whole run."""
    if ended and not rows:
        what = "the run is at its end: epochs and steps count the whole run, whatever loop takes its batches"
        raise UserError(
            what,
            where="session.batches",
            fix="write one loop: for batch in s.batches(dataset, collate, epochs=N)",
        )


def seeded(plan: Plan, name: str) -> Plan:
    """Models of other names are drawn from other seeds."""
    run = plan.config.run.model_copy(update={"seed": derive(plan.config.run.seed, name) % 2**31})
    return (
        plan.model_copy(update={"config": plan.config.model_copy(update={"run": run})})
        if name
        else plan
    )


def require_sum(loss_sum: Any, weight: Any, learns: bool) -> None:
    """Raises UserError for what is no loss sum, with gradients where this rank `learns` from it, and no weight; what lies on the device is
    not read."""
    fix = "call s.backward(losses.sum(), number of samples or tokens)"
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        shape = (
            f"of shape {list(loss_sum.shape)}"
            if isinstance(loss_sum, torch.Tensor)
            else f"a {type(loss_sum).__name__}"
        )
        raise UserError(
            f"the loss is {shape}, a tensor of one number is wanted",
            where="session.backward",
            fix=fix,
        )
    if learns and not loss_sum.requires_grad:
        raise UserError(
            "the loss has no gradients",
            where="session.backward",
            fix="compute it from the model, outside of torch.no_grad",
        )
    if not isinstance(weight, torch.Tensor) and not (
        isinstance(weight, Real) and float(weight) >= 0
    ):
        raise UserError(
            f"the weight is {weight!r}, a number of 0 or more is wanted",
            where="session.backward",
            fix=fix,
        )


def require_rates(max_grad_norm: float | None, lr: float | None) -> None:
    """Raises UserError for what would train uphill, or not at all."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UserError(
            f"max_grad_norm is {max_grad_norm}, a number above 0 is wanted",
            where="session.step",
            fix="None clips nothing",
        )
    if lr is not None and not lr >= 0:
        raise UserError(
            f"lr is {lr}, a number of 0 or more is wanted",
            where="session.step",
            fix="None takes the optimizer's own",
        )


def counted(every: int) -> int:
    """Raises UserError for what is no number of steps."""
    if not isinstance(every, int) or every < 1:
        raise UserError(
            f"every is {every}, a number of steps from 1 on is wanted",
            where="session.save",
            fix="None saves at each call",
        )
    return every


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What `log` shows. Raises UserError for what is no number."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"{name} is a {type(value).__name__}, a number is wanted"
            raise UserError(what, where="session.log", fix="print texts, and log numbers") from None
    return found


def scalar(value: Any, device: str) -> torch.Tensor:
    """fp64 on the device; of a number without the host waiting for a copy."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)
