"""The seam between the training loop and whatever spreads a model. The loop sees only this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from drumline.telemetry.memory_tracker import MemoryStats

Sums = dict[str, float]
DeviceSums = dict[str, torch.Tensor]  # fp64 scalars on this rank's device
Read = Callable[[Any, Any], torch.Tensor]
# Sections of tensors that only some strategies have: what they hold is lost where another goes on, and they start afresh without.
OPTIONAL = frozenset({"outer", "value/outer"})


class Engine(Protocol):
    """Owns the model, its gradients and its optimizer on this rank.

    Sums are those of this rank's samples: ranks that share samples (pp, cp, tp) all return the same ones, and the loop counts them once
    (those of a training step come from the last stage alone; other stages return zeros).

    No call of a training step makes the host wait for the device, but for DeepSpeed's, for fp16 (its next scale depends on this step's
    norm), for an optimizer without a fused kernel, and for gradients in host memory.
    """

    def forward_backward(self, micro_batches: list[Any], objective: Any, denominator: float) -> DeviceSums:
        """Accumulate the gradients of Σ loss / denominator over all samples of all ranks. Returns the sums, `loss` among them."""
        ...

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """The sums without gradients; the model is left in training mode."""
        ...

    def infer(self, micro_batches: Iterable[Any], read: Read, adapter: bool = True) -> list[torch.Tensor]:
        """What `read(outputs, batch)` gives for each micro-batch, without gradients; the model is left in training mode.

        The same on all ranks that share the samples. All ranks come with as many micro-batches. `adapter` False: without LoRA's product,
        so the model is what it was before training.
        """
        ...

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each weight, frozen ones too, and each persistent buffer, whole, on every rank, one after the other in the
        same order on all, on this rank's device. Names are those of the Hugging Face model (with an adapter, of PEFT's). A tensor may be
        the engine's own: copy, do not change. Tied weights come once. Collective: all ranks go through to the end.

        Raises ModelError where weights are packed in 4 or 8 bits.
        """
        ...

    def unsharded_model(self) -> nn.Module | None:
        """The whole Hugging Face model of this rank where it has one that can be called as it is, and None where the model is cut or
        sharded. Put back what is changed on it (mode, cache); never its weights. Collective."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the accumulated gradients, before clipping: an fp64 scalar, the same on all ranks."""
        ...

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Clip by the norm given, update the weights where `finite` (a bool scalar) holds, and forget the gradients. Where it does not,
        weights and moments stay as they are. `lr` None: at the rates that the optimizer has."""
        ...

    def rescales(self) -> bool:
        """True where a non-finite gradient is an overflow of fp16 that `step` answers with a smaller loss scale."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state as they are now, under canonical names (`model.<fqn>`, `optim.<fqn>.<slot>`).

        Between them the ranks name all; a rank may name a part. A checkpoint is saved from them; loading fills them and hands them to
        `load_state`. Collective.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What else must survive, as JSON."""
        ...

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from `tensors`, what `tensors()` gave and a checkpoint filled, and from what `state` gave there, with `step`: steps done.

        The checkpoint may be another engine's: of `state` nothing but `step` is certain, and sections in `OPTIONAL` may not be filled.
        """
        ...

    def memory_stats(self) -> MemoryStats:
        """Bytes of parameters, gradients and optimizer state that this rank holds now; gradients exist between `forward_backward` and
        `step`."""
        ...

    def exposed_communication(self) -> float | None:
        """Seconds of the last forward_backward in which this rank only waited for gradients of others; None where nothing measures it."""
        ...


class OpenEngine(Engine, Protocol):
    """An engine that a loop of the user's own drives: it calls the model, and comes with a loss for each micro-batch."""

    model: nn.Module
    named: dict[str, nn.Parameter]  # as the optimizer has them, whatever a forward puts in their place
    max_grad_norm: float | None
    optimizer: torch.optim.Optimizer

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forwards and backwards of a micro-batch. `last`: of the global batch; at its end all gradients are reduced."""
        ...

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives; floating-point tensors of it in fp32 or more."""
        ...

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Accumulate the gradients of Σ loss_sum / denominator over all ranks."""
        ...

    def divide(self, by: torch.Tensor) -> None:
        """Divide the gradients of the global batch by a scalar of the device; before `grad_norm`."""
        ...

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Within, the model is evaluated: one state on all ranks, no gradients. Collective."""
        ...


def added(outs: list[dict[str, torch.Tensor]]) -> DeviceSums:
    """Sums over micro-batches (of a key `max_…` the largest). Each of `outs` has the same keys."""
    if not outs:
        return {}
    stacked = torch.stack([torch.stack([out[key].detach().double() for key in out]) for out in outs])
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
