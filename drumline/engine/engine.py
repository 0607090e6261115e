"""The interface between the training loop and the engine that spreads a model.

The loop sees only this. Trainable models side by side (a policy, and a value model of its own) are
one engine, `CompositeEngine`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from drumline.dist.reduce import exact
from drumline.telemetry.memory_tracker import MemoryStats

Sums = dict[str, float]
# Of fp64 scalars on this rank's device.
DeviceSums = dict[str, torch.Tensor]
# Called with the outputs of a model and the batch.
Read = Callable[[Any, Any], torch.Tensor]
# Sections of tensors, of any role, that only some runs have. What they hold is lost if a run
# without them resumes. A run that has them, and resumes from a checkpoint without, starts them
# afresh.
OPTIONAL = ("outer", "compensation")
POLICY = "policy"
T = TypeVar("T")
N = TypeVar("N", float, torch.Tensor)


class Engine(Protocol):
    """Owns the model, its gradients and its optimizer on this rank.

    Sums are those of this rank's samples. Ranks that share samples (pp, cp, tp) all return the same
    ones, and the loop counts them once. Those of a training step come from the last stage of a
    pipeline alone; other stages return zeros.

    No call of a training step makes the host wait for the device, with four exceptions: DeepSpeed's
    calls, fp16 (its next scale depends on this step's norm), an optimizer without a fused kernel,
    and gradients in host memory.
    """

    def begin_step(self, lr: float) -> None:
        """Set the learning rate of the step that begins, if weights are updated in backward.

        Other engines get it by `step`.
        """

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """Accumulate the gradients of Σ loss / denominator over all samples of all ranks.

        Returns the sums, `loss` among them.
        """

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """Return the sums, computed without gradients. The model is left in training mode."""

    def infer(
        self, micro_batches: Iterable[Any], read: Read, adapter: bool = True
    ) -> list[torch.Tensor]:
        """Return `read(outputs, batch)` of each micro-batch, computed without gradients.

        It is the same on all ranks that share the samples. All ranks come with as many
        micro-batches. The model is left in training mode. `adapter` False: without LoRA's product,
        so the model is what it was before training.
        """

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of each weight and each persistent buffer, whole, on every rank.

        Frozen weights are among them. They come one after the other, in the same order on all
        ranks, on this rank's device. Names are those of the Hugging Face model (with an adapter, of
        PEFT's). A tensor may be the engine's own: copy it, do not change it. A tied weight comes
        once under each of its names, one after the other: a reader that does not tie it (vLLM, as
        it reloads) needs them all. Collective: all ranks go through to the end.
        Raises ModelError if weights are packed in 4 or 8 bits.
        """

    def unsharded_model(self) -> nn.Module | None:
        """Return the whole Hugging Face model if this rank has one that can be called as it is.

        None if the model is cut or sharded. What is changed on it (mode, cache) must be put back;
        its weights must not be changed. Collective.
        """

    def grad_norm(self) -> torch.Tensor:
        """Return the global L2 norm of the accumulated gradients, before clipping.

        It is an fp64 scalar, the same on all ranks.
        """

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Clip by the norm given, update the weights, and delete the gradients.

        If `finite`, a bool scalar of the device, does not hold, weights and moments stay as they
        are. `lr` None: at the rates that the optimizer has.
        """

    def rescales(self) -> bool:
        """Return whether a non-finite gradient is an overflow of fp16.

        `step` answers it with a smaller loss scale.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state as they are now, by their canonical names.

        These are `model.<fqn>` and `optim.<fqn>.<slot>`. Between them the ranks name all; a rank
        may name a part. A checkpoint is saved from these tensors; loading fills them and hands them
        to `load_state`. Collective.
        """

    def state(self) -> dict[str, Any]:
        """Return what else must survive, as JSON."""

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a checkpoint.

        `tensors`: what `tensors()` returned, filled by the checkpoint. `state`: what `state()`
        returned when it was saved, with `step`, the number of steps done. The checkpoint may be
        another engine's: of `state` nothing but `step` is certain, and sections in `OPTIONAL` may
        not be filled.
        """

    def memory_stats(self) -> MemoryStats:
        """Return the bytes of parameters, gradients and optimizer state that this rank holds now.

        Gradients exist between `forward_backward` and `step`.
        """

    def exposed_communication(self) -> float | None:
        """Return the seconds of the last forward_backward in which this rank waited for gradients.

        None if nothing measures it.
        """


class OpenEngine(Engine, Protocol):
    """An engine for a loop of the user's own.

    The loop calls the model, and comes with a loss for each micro-batch.

    `named`: the parameters as the optimizer has them, whatever a forward puts in their place.
    `initially_trainable`: the names of those that were trainable when the model was spread.
    `is_whole`: each rank has all of the model, and calls it as it is.
    """

    model: nn.Module
    named: dict[str, nn.Parameter]
    initially_trainable: set[str]
    max_grad_norm: float | None
    optimizer: torch.optim.Optimizer
    is_whole: bool

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forwards and backwards of a micro-batch.

        `last`: of the global batch. At the end of its context all gradients are reduced.
        """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; its floating-point tensors are in fp32 or more."""

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Accumulate the gradients of Σ loss_sum / denominator over all ranks."""

    def divide(self, by: torch.Tensor) -> None:
        """Divide the gradients of the global batch by a scalar of the device.

        Called before `grad_norm`.
        """

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context to evaluate the model in: one state on all ranks, no gradients.

        Collective.
        """


def added(outs: list[dict[str, torch.Tensor]]) -> DeviceSums:
    """Return the sums over micro-batches, or for a key `max_…` the largest.

    Each of `outs` has the same keys, with a scalar each.
    """
    if not outs:
        return {}
    if len(outs) == 1:
        return {key: exact(value.detach()) for key, value in outs[0].items()}
    keys = list(outs[0])
    rows = []
    for out in outs:
        values = [exact(value.detach()) for value in out.values()]
        rows.append(torch.stack(values))
    stacked = torch.stack(rows)
    sums = dict(zip(keys, stacked.sum(0).unbind(), strict=True))
    for key, largest in zip(keys, stacked.amax(0).unbind(), strict=True):
        if key.startswith("max_"):
            sums[key] = largest
    return sums


def total(outs: list[dict[str, torch.Tensor]]) -> Sums:
    """Return the sums over micro-batches as numbers, brought to the host by one copy."""
    sums = added(outs)
    if not sums:
        return {}
    values = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, values, strict=True))


def reader(read: Read, kept: list[torch.Tensor]) -> Callable[[Any, Any], Any]:
    """Return an objective for `Engine.evaluate` that keeps what `read` returns of a micro-batch.

    It appends to `kept`.
    """

    def objective(outputs: Any, batch: Any) -> Any:
        kept.append(read(outputs, batch))
        return SimpleNamespace(loss_sum=torch.zeros((), device=kept[-1].device), sums={})

    return objective


class CompositeEngine:
    """An Engine over the engines of several roles.

    Objectives are by role (role → objective) and sums are added up. The norm, by which gradients
    are clipped, is that of all gradients together. What each method does is described in `Engine`.

    Calls for one model (infer, whole_weights, unsharded_model, an objective that is no mapping) go
    to the policy. Canonical names of another role's tensors have the role before them:
    `value/model.<fqn>`. So an export, or a run without that role, finds the policy's alone.
    """

    def __init__(self, engines: dict[str, Engine], rates: Mapping[str, float]) -> None:
        """`engines`: by role, `policy` among them.

        `rates`: learning rate of a role as a part of the policy's; 1 for a role that is missing.
        """
        self.engines = engines
        self.rates = rates
        self.policy = engines[POLICY]
        self.infer = self.policy.infer
        self.whole_weights = self.policy.whole_weights
        self.unsharded_model = self.policy.unsharded_model

    def begin_step(self, lr: float) -> None:
        for role, engine in self.engines.items():
            engine.begin_step(lr * self.rates.get(role, 1.0))

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        assert objective.keys() == self.engines.keys(), "each trainable model has an objective"
        sums_of_roles = []
        for role, engine in self.engines.items():
            sums = engine.forward_backward(micro_batches, objective[role], denominator)
            sums_of_roles.append(sums)
        return _added(sums_of_roles)

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        if not isinstance(objective, Mapping):
            return self.policy.evaluate(micro_batches, objective)
        batches = list(micro_batches)
        sums_of_roles = []
        for role, role_objective in objective.items():
            sums_of_roles.append(self.engines[role].evaluate(batches, role_objective))
        return _added(sums_of_roles)

    def grad_norm(self) -> torch.Tensor:
        # The roles' parameters are disjoint, so the squares of their norms add up.
        norms = torch.stack([engine.grad_norm() for engine in self.engines.values()])
        return norms.square().sum().sqrt()

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        for role, engine in self.engines.items():
            role_lr: float | None = None
            if lr is not None:
                role_lr = lr * self.rates.get(role, 1.0)
            engine.step(role_lr, grad_norm, finite)

    def rescales(self) -> bool:
        return any(engine.rescales() for engine in self.engines.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for role, engine in self.engines.items():
            # As `of_role` takes them apart again.
            prefix = ""
            if role != POLICY:
                prefix = f"{role}/"
            for name, tensor in engine.tensors().items():
                tensors[prefix + name] = tensor
        return tensors

    def state(self) -> dict[str, Any]:
        roles: dict[str, Any] = {}
        for role, engine in self.engines.items():
            if role != POLICY:
                roles[role] = engine.state()
        return self.policy.state() | {"roles": roles}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        roles = state.get("roles", {})
        for role, engine in self.engines.items():
            if role == POLICY:
                role_state = state
            else:
                role_state = {**roles.get(role, {}), "step": state["step"]}
            engine.load_state(role_state, of_role(tensors, role))

    def memory_stats(self) -> MemoryStats:
        stats = MemoryStats(0, 0, 0)
        for engine in self.engines.values():
            stats += engine.memory_stats()
        return stats

    def exposed_communication(self) -> float | None:
        # All engines are asked, whatever the first answers: the answer sets some of their clocks to
        # 0.
        waits = [engine.exposed_communication() for engine in self.engines.values()]
        if None in waits:
            return None
        return math.fsum(seconds for seconds in waits if seconds is not None)


def of_role(named: Mapping[str, T], role: str) -> dict[str, T]:
    """Return what belongs to a role, under the names that the role's own engine has."""
    if role == POLICY:
        return {name: value for name, value in named.items() if "/" not in name}
    prefix = f"{role}/"
    found: dict[str, T] = {}
    for name, value in named.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value
    return found


def _added(parts: Iterable[dict[str, N]]) -> dict[str, N]:
    """Return the sums of several roles as one.

    The losses of all roles, and sums that share a name, are added up.
    """
    total: dict[str, N] = {}
    for sums in parts:
        for key, value in sums.items():
            if key in total:
                total[key] = total[key] + value
            else:
                total[key] = value
    return total
