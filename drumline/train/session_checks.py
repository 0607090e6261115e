"""Checks of what the user gives to a session. Each raises UserError with what to do instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from drumline.errors import UserError
from drumline.plan.plan import Plan
from drumline.system.output import say
from drumline.train.session_parts import MAIN
from drumline.train.state import encode_keys


def require_pairs(build: Any, make_optimizer: Any, is_prepared: bool) -> dict[str, Any]:
    """Return {name: (build, make_optimizer)} of the arguments of `prepare`.

    Raises UserError for a second call of `prepare`, and for arguments of another form.
    """
    pairs = {MAIN: (build, make_optimizer)}
    if isinstance(build, Mapping):
        pairs = dict(build)
    if is_prepared or not pairs or not _are_well_formed(pairs):
        raise UserError(
            "prepare takes build and make_optimizer, or {name: (build, make_optimizer)}, once",
            where="session.prepare",
            fix="see docs/reference/session.md",
        )
    return pairs


def _are_well_formed(pairs: Mapping[str, Any]) -> bool:
    """Whether each pair has a make_optimizer, and a name that can be part of names in a checkpoint."""
    has_optimizers = all(make_optimizer is not None for _, make_optimizer in pairs.values())
    return has_optimizers and not any("/" in name or "." in name for name in pairs)


def require_one_model(plan: Plan, models: int) -> None:
    """Raise UserError if the session has several models, and its strategy takes only one."""
    if models == 1:
        return
    strategy = plan.config.strategy
    reason: str | None = None
    if plan.engine == "deepspeed":
        reason = "ZeRO takes one model: DeepSpeed's engine owns backward and step"
    elif strategy.copies().compression.kind != "none":
        reason = "compression goes with one model: DDP, whose buckets it works on, wants to see each backward"
    elif getattr(strategy, "sync_each_micro_batch", True) is False:
        reason = "several models reduce after each micro-batch"
    if reason is not None:
        raise UserError(
            reason,
            where="strategy",
            fix="use ddp or fsdp2 with their defaults, or one module that holds the models",
        )


def require_free(is_in_batch: bool, unused: list[str]) -> None:
    """Raise UserError if a loop over batches may not begin now.

    `is_in_batch`: another loop is in a micro-batch. `unused`: the models with gradients that no step
    has used, so an earlier loop was left in the middle of a global batch. Its samples would be taken
    again, on top of these gradients.
    """
    if is_in_batch:
        raise UserError(
            "two loops take batches at once, and each would count its own steps",
            where="session.batches",
            fix="write one loop, over a dataset that gives the samples of both",
        )
    if unused:
        of_model = f" of {min(unused)}" if min(unused) else ""
        raise UserError(
            f"a loop was left in the middle of a global batch, and its gradients{of_model} were not used",
            where="session.batches",
            fix="leave it where s.step() has returned True",
        )


def require_more(has_rows: bool, has_ended: bool) -> None:
    """Raise UserError if a loop got no batches because an earlier one has ended the run."""
    if has_ended and not has_rows:
        raise UserError(
            "the run is at its end: epochs and steps count the whole run, whatever loop takes its batches",
            where="session.batches",
            fix="write one loop: for batch in s.batches(dataset, collate, epochs=N)",
        )


def require_sum(loss_sum: Any, weight: Any, needs_gradients: bool) -> None:
    """Raise UserError unless a loss sum is a tensor of one number, and a weight a number from 0 on.

    `needs_gradients`: whether the loss must have gradients on this rank. No value on the device is
    read.
    """
    fix = "call s.backward(losses.sum(), number of samples or tokens)"
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        if isinstance(loss_sum, torch.Tensor):
            form = f"of shape {list(loss_sum.shape)}"
        else:
            form = f"a {type(loss_sum).__name__}"
        raise UserError(
            f"the loss is {form}, a tensor of one number is wanted",
            where="session.backward",
            fix=fix,
        )
    if needs_gradients and not loss_sum.requires_grad:
        raise UserError(
            "the loss has no gradients",
            where="session.backward",
            fix="compute it from the model, outside of torch.no_grad",
        )
    if isinstance(weight, torch.Tensor):
        return
    if not isinstance(weight, Real) or not float(weight) >= 0:
        raise UserError(
            f"the weight is {weight!r}, a number of 0 or more is wanted",
            where="session.backward",
            fix=fix,
        )


def require_rates(max_grad_norm: float | None, lr: float | None) -> None:
    """Raise UserError for arguments of `step` by which the model would not learn."""
    # A comparison with NaN is false, so NaN is refused, too.
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


def normalize_measure_result(result: Any) -> dict[str, Any]:
    """Return what the `measure` of `evaluate` returned as sums by name, with `loss` and `weight`.

    Raises UserError for another form than (loss sum, weight) or (loss sum, weight, {name: sum}).
    """
    is_sequence = isinstance(result, tuple | list)
    if is_sequence and len(result) == 2:
        more: Mapping[str, Any] = {}
    elif is_sequence and len(result) == 3 and isinstance(result[2], Mapping):
        more = result[2]
    else:
        kind = type(result).__name__
        raise UserError(
            f"measure returns {kind}, (loss sum, weight) or (loss sum, weight, {{name: sum}}) is wanted",
            where="session.evaluate",
            fix="return losses.sum(), len(batch)",
        )
    own_names = {"loss", "weight"}.intersection(more)
    if own_names:
        raise UserError(
            f"measure returns a sum of the name {min(own_names)!r}, which the session uses itself",
            where="session.evaluate",
            fix="give it another name",
        )
    return {"loss": result[0], "weight": result[1], **more}


def require_every(every: int) -> int:
    """Return a number of steps. Raises UserError for anything else."""
    if not isinstance(every, int) or every < 1:
        raise UserError(
            f"every is {every}, a number of steps from 1 on is wanted",
            where="session.save",
            fix="None saves at each call",
        )
    return every


def require_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of `log` as floats. Raises UserError for one that is not a number."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"{name} is a {type(value).__name__}, a number is wanted"
            raise UserError(what, where="session.log", fix="print texts, and log numbers") from None
    return numbers


FIX_FOR_STATE = "keep a number or a text of it: float(x)"


def require_json(state: dict[str, Any]) -> None:
    """Raise UserError for a value of `session.state` that JSON cannot hold."""
    for key, value in state.items():
        complaint = _json_complaint(key, value)
        if complaint is not None:
            raise UserError(complaint, where="session.save", fix=FIX_FOR_STATE)


def drop_unless_json(state: dict[str, Any]) -> None:
    """Delete the values of `session.state` that JSON cannot hold, with a warning for each.

    Otherwise they would make the last save fail.
    """
    for key, value in list(state.items()):
        complaint = _json_complaint(key, value)
        if complaint is not None:
            say(f"warning: {complaint}: it is not saved; {FIX_FOR_STATE}")
            del state[key]


def _json_complaint(key: str, value: Any) -> str | None:
    """Return why JSON cannot hold an entry of `session.state`; None if it can."""
    try:
        json.dumps(encode_keys({key: value}))
    except (TypeError, ValueError):
        return f"s.state[{key!r}] is a {type(value).__name__}, which JSON does not have"
    return None
