"""The seam between the training loop and whatever spreads a model: the loop sees only this. Trainable models side by side (a policy, and a
value model of its own) are one engine."""

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
# Sections of tensors, of any role, that only some runs have: what they hold is lost where another goes on, and they start afresh without.
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
    """Sums over micro-batches (of a key `max_…` the largest). Each of `outs` has the same keys."""
    if not outs:
        return {}
    if len(outs) == 1:
        return {key: exact(value.detach()) for key, value in outs[0].items()}
    stacked = torch.stack([torch.stack([exact(out[key].detach()) for key in out]) for out in outs])
    columns = zip(outs[0], stacked.sum(0).unbind(), stacked.amax(0).unbind(), strict=True)
    return {key: largest if key.startswith("max_") else whole for key, whole, largest in columns}


def total(outs: list[dict[str, torch.Tensor]]) -> Sums:
    """The same, brought to the host in one go."""
    sums = added(outs)
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}


def reader(read: Read, kept: list[torch.Tensor]) -> Callable[[Any, Any], Any]:
    """An objective for `Engine.evaluate` that notes in `kept` what `read` gives for each micro-batch."""

    def objective(outputs: Any, batch: Any) -> Any:
        kept.append(read(outputs, batch))
        return SimpleNamespace(loss_sum=torch.zeros((), device=kept[-1].device), sums={})

    return objective


class CompositeEngine:
    """An Engine over the engines of several roles. Objectives are by role (role → objective), sums are added up, the norm is that of all
    gradients together, and so clipping is.

    Calls for one model (infer, whole_weights, unsharded_model, an objective that is no mapping) go to the policy. Canonical names of
    another role's tensors have the role before them: `value/model.<fqn>`, so that an export or a run without it finds the policy's alone.
    """

    def __init__(self, engines: dict[str, Engine], rates: Mapping[str, float]) -> None:
        """`engines`: by role, `policy` among them. `rates`: learning rate of a role as a part of the policy's, where it is another."""
        self.engines, self.rates = engines, rates
        self.policy = engines[POLICY]
        self.infer, self.whole_weights, self.unsharded_model = (
            self.policy.infer,
            self.policy.whole_weights,
            self.policy.unsharded_model,
        )

    def begin_step(self, lr: float) -> None:
        for role, engine in self.engines.items():
            engine.begin_step(lr * self.rates.get(role, 1.0))

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        assert objective.keys() == self.engines.keys(), "each trainable model has an objective"
        return _added(
            engine.forward_backward(micro_batches, objective[role], denominator)
            for role, engine in self.engines.items()
        )

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        if not isinstance(objective, Mapping):
            return self.policy.evaluate(micro_batches, objective)
        batches = list(micro_batches)
        return _added(
            self.engines[role].evaluate(batches, wanted) for role, wanted in objective.items()
        )

    def grad_norm(self) -> torch.Tensor:
        return (
            torch.stack([engine.grad_norm() for engine in self.engines.values()])
            .square()
            .sum()
            .sqrt()
        )

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        for role, engine in self.engines.items():
            engine.step(lr and lr * self.rates.get(role, 1.0), grad_norm, finite)

    def rescales(self) -> bool:
        return any(engine.rescales() for engine in self.engines.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            name if role == POLICY else f"{role}/{name}": tensor
            for role, engine in self.engines.items()
            for name, tensor in engine.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        return self.policy.state() | {
            "roles": {
                role: engine.state() for role, engine in self.engines.items() if role != POLICY
            }
        }

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for role, engine in self.engines.items():
            own = (
                state
                if role == POLICY
                else {**state.get("roles", {}).get(role, {}), "step": state["step"]}
            )
            engine.load_state(own, of_role(tensors, role))

    def memory_stats(self) -> MemoryStats:
        return sum(
            (engine.memory_stats() for engine in self.engines.values()), MemoryStats(0, 0, 0)
        )

    def exposed_communication(self) -> float | None:
        waits = [engine.exposed_communication() for engine in self.engines.values()]
        return None if None in waits else math.fsum(wait for wait in waits if wait is not None)


def of_role(named: Mapping[str, T], role: str) -> dict[str, T]:
    """The tensors of a role, under the names that its own engine has for them."""
    if role == POLICY:
        return {name: value for name, value in named.items() if "/" not in name}
    return {
        name.removeprefix(f"{role}/"): value
        for name, value in named.items()
        if name.startswith(f"{role}/")
    }


def _added(parts: Iterable[dict[str, N]]) -> dict[str, N]:
    """The losses of all roles are one; other sums of one name are added up as well."""
    total: dict[str, N] = {}
    for sums in parts:
        for key, value in sums.items():
            total[key] = total[key] + value if key in total else value
    return total
