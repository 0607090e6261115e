"""The interface between the training loop and whatever spreads a model: the loop sees only this.

Trainable models side by side (a policy, and a value model of its own) are one engine, `CompositeEngine`.
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
DeviceSums = dict[str, torch.Tensor]  # fp64 scalars on this rank's device
Read = Callable[[Any, Any], torch.Tensor]
# Sections of tensors, of any role, that only some runs have. What they hold is lost if a run without them resumes; a run that has them
# and resumes without starts them afresh.
OPTIONAL = ("outer", "compensation")
POLICY = "policy"
T = TypeVar("T")
N = TypeVar("N", float, torch.Tensor)


class Engine(Protocol):
    """Owns the model, its gradients and its optimizer on this rank.

    Sums are those of this rank's samples: ranks that share samples (pp, cp, tp) all return the same ones, and the loop counts them once
    (those of a training step come from the last stage alone; other stages return zeros).

    No call of a training step makes the host wait for the device, but for DeepSpeed's, for fp16 (its next scale depends on this step's
    norm), for an optimizer without a fused kernel, and for gradients in host memory.
    """

    def begin_step(self, lr: float) -> None:
        """The learning rate of the step that begins, for an engine whose weights are updated in backward; others have it by `step`."""

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """Accumulate the gradients of Σ loss / denominator over all samples of all ranks. Returns the sums, `loss` among them."""

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """The sums without gradients; the model is left in training mode."""

    def infer(
        self, micro_batches: Iterable[Any], read: Read, adapter: bool = True
    ) -> list[torch.Tensor]:
        """What `read(outputs, batch)` gives for each micro-batch, without gradients; the model is left in training mode.

        The same on all ranks that share the samples. All ranks come with as many micro-batches. `adapter` False: without LoRA's product,
        so the model is what it was before training.
        """

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each weight, frozen ones too, and each persistent buffer, whole, on every rank, one after the other in the
        same order on all, on this rank's device. Names are those of the Hugging Face model (with an adapter, of PEFT's). A tensor may be
        the engine's own: copy, do not change. A tied weight comes once under each of its names, one after the other: a reader that does
        not tie it (vLLM, as it reloads) needs them all. Collective: all ranks go through to the end.

        Raises ModelError where weights are packed in 4 or 8 bits.
        """

    def unsharded_model(self) -> nn.Module | None:
        """The whole Hugging Face model of this rank where it has one that can be called as it is, and None where the model is cut or
        sharded. Put back what is changed on it (mode, cache); never its weights. Collective."""

    def grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the accumulated gradients, before clipping: an fp64 scalar, the same on all ranks."""

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Clip by the norm given, update the weights where `finite` (a bool scalar) holds, and forget the gradients. Where it does not,
        weights and moments stay as they are. `lr` None: at the rates that the optimizer has."""

    def rescales(self) -> bool:
        """True where a non-finite gradient is an overflow of fp16 that `step` answers with a smaller loss scale."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state as they are now, under canonical names (`model.<fqn>`, `optim.<fqn>.<slot>`).

        Between them the ranks name all; a rank may name a part. A checkpoint is saved from them; loading fills them and hands them to
        `load_state`. Collective.
        """

    def state(self) -> dict[str, Any]:
        """What else must survive, as JSON."""

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from `tensors`, what `tensors()` gave and a checkpoint filled, and from what `state` gave there, with `step`: steps done.

        The checkpoint may be another engine's: of `state` nothing but `step` is certain, and sections in `OPTIONAL` may not be filled.
        """

    def memory_stats(self) -> MemoryStats:
        """Bytes of parameters, gradients and optimizer state that this rank holds now; gradients exist between `forward_backward` and
        `step`."""

    def exposed_communication(self) -> float | None:
        """Seconds of the last forward_backward in which this rank only waited for gradients of others; None where nothing measures it."""


class OpenEngine(Engine, Protocol):
    """An engine that a loop of the user's own drives: it calls the model, and comes with a loss for each micro-batch."""

    model: nn.Module
    # As the optimizer has them, whatever a forward puts in their place.
    named: dict[str, nn.Parameter]
    learned: set[str]  # the names of those that learned when the model was spread
    max_grad_norm: float | None
    optimizer: torch.optim.Optimizer
    is_whole: bool  # each rank has all of the model, and calls it as it is

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forwards and backwards of a micro-batch. `last`: of the global batch; at its end all gradients are reduced."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives; floating-point tensors of it in fp32 or more."""

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Accumulate the gradients of Σ loss_sum / denominator over all ranks."""

    def divide(self, by: torch.Tensor) -> None:
        """Divide the gradients of the global batch by a scalar of the device; before `grad_norm`."""

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Within, the model is evaluated: one state on all ranks, no gradients. Collective."""


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
        rows.append(torch.stack([exact(out[key].detach()) for key in out]))
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
    """Return an objective for `Engine.evaluate` that appends to `kept` what `read` returns for each micro-batch."""

    def objective(outputs: Any, batch: Any) -> Any:
        kept.append(read(outputs, batch))
        return SimpleNamespace(loss_sum=torch.zeros((), device=kept[-1].device), sums={})

    return objective


class CompositeEngine:
    """An Engine over the engines of several roles.

    Objectives are by role (role → objective) and sums are added up. The norm, by which gradients
    are clipped, is that of all gradients together.

    Calls for one model (infer, whole_weights, unsharded_model, an objective that is no mapping) go to the policy. Canonical names of
    another role's tensors have the role before them: `value/model.<fqn>`, so that an export or a run without it finds the policy's alone.
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
            prefix = "" if role == POLICY else f"{role}/"
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
        # All engines are asked, whatever the first answers: the answer sets some of their clocks to 0.
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
    """Return sums of several roles as one: the loss of all roles, and sums that share a name, are added up."""
    total: dict[str, N] = {}
    for sums in parts:
        for key, value in sums.items():
            if key in total:
                total[key] = total[key] + value
            else:
                total[key] = value
    return total
