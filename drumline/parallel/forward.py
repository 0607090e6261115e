"""What an engine does without gradients: evaluate, infer, hand out weights. A frozen model needs no more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.core.plan import Plan
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.models.names import all_tensors
from drumline.parallel.batchnorm import agree_on_statistics, batch_norms
from drumline.parallel.data_parallel import Replicated, Sharded, Spread, Unreplicated
from drumline.parallel.engine import Read, Sums, reader, total
from drumline.telemetry.memory_tracker import MemoryStats
from drumline.vendor.torch import tree_map_only


class Plain(nn.Module):
    """Any module as engines take it: an objective runs it on a batch, or it is called as it is."""

    splits, sequence = False, None  # it has no head to take off

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, objective: Any = None) -> Any:
        """`objective(model, batch)`'s (loss sum, other sums); without an objective what `model(*args, **kwargs)` gives, `batch` = (args,
        kwargs)."""
        if objective is None:
            args, kwargs = batch
            return self.model(*args, **kwargs)
        out = objective(self.model, batch)
        return out.loss_sum, out.sums


Around = Callable[[], contextlib.AbstractContextManager[Any]]
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardEngine:
    """A module whose forward runs model and objective together (so wrappers' hooks see all uses of a weight), spread over ranks."""

    def __init__(self, plan: Plan, model: nn.Module, spread: Spread, around: Around = contextlib.nullcontext) -> None:
        """`around`: a context that each forward (and its backward) runs in."""
        self.model, self.spread, self.around = model, spread, around
        self.device = plan.device
        # FSDP2 casts weights as it gathers them; elsewhere autocast does it op by op.
        self.autocast_dtype = None if isinstance(spread, Sharded) and spread.casts else LOW_PRECISION.get(plan.precision)
        self.batch_norms = batch_norms(model)
        self.is_whole = isinstance(spread, Unreplicated | Replicated) and plan.mesh.tp * plan.mesh.cp * plan.mesh.pp == 1
        self.model.eval()

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        return total(self._evaluated(self.spread.inner, micro_batches, objective))

    def infer(self, micro_batches: Iterable[Any], read: Read, adapter: bool = True) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with adapters.switched(self.model, adapter):
            self._evaluated(self.spread.reads, micro_batches, reader(read, kept))
        return kept

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._come_together()
        for name, tensor in all_tensors(self.model).items():
            yield name, whole(name, tensor, self.device)

    def unsharded_model(self) -> nn.Module | None:
        if not self.is_whole:
            return None
        self._come_together()
        return self.model

    def memory_stats(self) -> MemoryStats:
        """Bytes of the weights that this rank holds."""
        return MemoryStats.of(self.model.parameters(), (), ())

    def exposed_communication(self) -> float | None:
        return self.spread.exposed_communication()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives; floating-point tensors of it in fp32 or more, since a loss is made of them outside of autocast."""
        trains = torch.is_grad_enabled()
        with self._autocast():
            out = (self.spread.module if trains else self.spread.inner)((args, kwargs))
        if not trains and isinstance(self.spread, Sharded):
            self.spread.reshard()
        return precise(out)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, the model is evaluated: one state on all ranks, no gradients. Collective."""
        self._come_together()
        was_training = self.model.training
        self._train(False)
        try:
            with torch.no_grad(), self.around():
                yield
        finally:
            self._train(was_training)
            if isinstance(self.spread, Sharded):
                self.spread.reshard()

    def _evaluated(self, module: nn.Module, micro_batches: Iterable[Any], objective: Any) -> list[dict[str, torch.Tensor]]:
        outs = []
        with self.evaluating(), self._autocast():
            for batch in micro_batches:
                loss_sum, sums = module(batch, objective)
                outs.append({"loss": loss_sum, **sums})
        return outs

    def _come_together(self) -> None:
        """Before the model is evaluated: state that differs between ranks becomes the same on all. Collective."""
        agree_on_statistics(self.batch_norms)

    def _train(self, mode: bool) -> None:
        self.model.train(mode)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast_dtype)


def lowered(values: Any, precision: str) -> Any:
    """The same with floating-point tensors in the type of a low `precision`, where weights are kept in it and nothing casts."""
    dtype = LOW_PRECISION.get(precision)
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, values)


def precise(values: Any) -> Any:
    """The same with floating-point tensors of less than 32 bits in fp32."""
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() and t.itemsize < 4 else t, values)


def whole(name: str, tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A tensor, all of it, on `device`, where parts in host memory are brought first. Collective over the ranks that hold parts.

    Raises ModelError for a weight that is packed in 4 or 8 bits.
    """
    if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
        what = f"{name} is packed, and is not handed out whole"
        raise ModelError(what, where="adapter.quantize", fix="use adapter.quantize=none for this")
    tensor = tensor.detach().to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
