"""How a module is spread over data ranks, for the native engine: when gradients are reduced, which module evaluates."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from drumline.core.cost import BUCKET
from drumline.errors import ModelError
from drumline.parallel.compress import Compressor
from drumline.parallel.experts import of_experts
from drumline.parallel.norms import local
from drumline.vendor.torch import DefaultAllGather, DefaultReduceScatter, queue_callback

MOST_UNDER_WAY = 16  # that nobody has asked for yet
T = TypeVar("T", bound=torch.Tensor)
logger = logging.getLogger(__name__)


class Spread:
    """One way of spreading. `module` runs a training forward, `inner` one without gradients, `reads` one whose objective is called
    once with all rows of the batch."""

    def __init__(
        self, module: nn.Module, inner: nn.Module | None = None, reads: nn.Module | None = None
    ) -> None:
        self.module = module
        self.inner = module if inner is None else inner
        self.reads = self.inner if reads is None else reads

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward; gradients must be reduced once the last one is through."""
        return contextlib.nullcontext()

    def going_back(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Around a backward from `loss`."""
        return contextlib.nullcontext()

    def stepped(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What an optimizer steps in the place of the model's parameters, by name."""
        return named

    def after_step(self) -> None:
        """Once it has stepped. Collective."""

    def exposed_communication(self) -> float | None:
        """Seconds of the last step in which backward had ended and gradients were still on their way; None where it is not known."""
        return None


def learning(module: nn.Module) -> set[int]:
    """The ids of the weights that learn now."""
    return {id(weight) for weight in module.parameters() if weight.requires_grad}


class Unreplicated(Spread):
    """One process."""

    def exposed_communication(self) -> float:
        return 0.0


class Replicated(Spread):
    """DDP. Evaluation runs below it: nothing is to be reduced there.

    It averages in a backward that follows a forward of its own. Where the last one follows none (a loss of a method of the module's, a
    second backward of one forward), the gradients are averaged once more: averages of averages are averages. It waits for the weights that
    learned when it was made; while others learn, those that a loop has frozen or unfrozen since, all are averaged after backward."""

    def __init__(
        self, module: DistributedDataParallel, compressor: Compressor | None = None
    ) -> None:
        super().__init__(module, inner=module.module)
        self.ddp, self.compressor = module, compressor
        self.records_graph = module.static_graph
        self.by_hand = BucketedAllReduce(module.module, module.process_group)
        self.learned = self.by_hand.learned
        self.called = self.averaged = self.reported = (
            False  # since the last backward; by the last backward; in the log
        )
        self.last, self.clock, self.device = (
            False,
            self.by_hand.clock,
            next(module.parameters()).device.type,
        )
        module.register_forward_pre_hook(self._note_call)

    def _note_call(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.called = True
            if learning(self.inner) != self.learned:
                self.ddp.require_backward_grad_sync = False  # as within no_sync

    @contextlib.contextmanager
    def going_back(self, loss: torch.Tensor) -> Iterator[None]:
        if self.last and loss.requires_grad:
            # Callbacks run at the end of a backward, in their order: before DDP's own, which waits for the averages.
            loss.register_hook(lambda _: queue_callback(lambda: self.clock.start(self.device)))
        yield
        self.clock.stop()
        self.called, self.averaged = False, self.called

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # DDP records a static graph in the first backward, which has to reduce: averages of averages are averages.
        checks = last and not (self.ddp.static_graph or self.ddp.find_unused_parameters)
        before = self._gradients() if checks else {}
        self.called = self.averaged = False
        self.last = last
        with contextlib.nullcontext() if last or self.records_graph else self.ddp.no_sync():
            yield
        self.ddp.require_backward_grad_sync, self.records_graph = True, False
        if last and learning(self.inner) != self.learned:
            self.ddp.require_forward_param_sync = True  # buffers, in the next forward
            self._average("other weights learn than when the model was spread")
        elif last and not self.averaged:
            self._average("the last backward of a step follows no call of the model")
        elif checks:
            self._require_gradients(before)
        if last and self.compressor:
            self.compressor.step += 1

    def _average(self, why: str) -> None:
        if not self.reported:
            logger.warning("%s: gradients are averaged after backward, not during it", why)
        self.reported = True
        self.by_hand.average()

    def _gradients(self) -> dict[str, tuple[int, int] | None]:
        """Of each weight that learns: which gradient it has, and how often that was written."""
        learning = (
            (name, weight.grad)
            for name, weight in self.inner.named_parameters()
            if weight.requires_grad
        )
        return {
            name: None if gradient is None else (id(gradient), gradient._version)
            for name, gradient in learning
        }

    def _require_gradients(self, before: dict[str, tuple[int, int] | None]) -> None:
        """Raises ModelError for weights that this backward has not reached: DDP would leave others unaveraged, and say so a step later."""
        after = self._gradients()
        without = [
            name.replace("_orig_mod.", "").removeprefix("model.")
            for name, now in after.items()
            if now == before[name]
        ]
        if (
            0 < len(without) < len(after)
        ):  # none has one where they step within backward, or nothing was learned
            more = f" and {len(without) - 3} more" if len(without) > 3 else ""
            fix = "set strategy.find_unused_parameters: true, or leave them out with model.freeze"
            raise ModelError(
                f"no gradient reaches {', '.join(without[:3])}{more}, and DDP waits for it",
                where="model",
                fix=fix,
            )

    def exposed_communication(self) -> float:
        # On a CPU a compressor waits within backward.
        return self.clock.seconds() + (self.compressor.take_seconds() if self.compressor else 0.0)


class Sharded(Spread):
    """FSDP2. Evaluation gathers weights too, so it goes through the same module."""

    def __init__(
        self,
        module: FSDPModule,
        sync_each_micro_batch: bool,
        casts: bool = False,
        more_roots: Iterable[FSDPModule] = (),
        timed: bool = False,
    ) -> None:
        """`casts`: weights are gathered in a lower precision than they are kept in. `more_roots`: further roots (stages of one rank).
        `timed`: all communication is gathers and scattered sums that have ended when they return, as on a CPU: it is exposed, and
        measured."""
        assert isinstance(module, nn.Module)
        super().__init__(module)
        self.casts = casts
        roots = nn.ModuleList([module, *more_roots])  # type: ignore[list-item]
        self.units = [unit for unit in roots.modules() if isinstance(unit, FSDPModule)]
        self.fsdp, self.sync_each_micro_batch = module, sync_each_micro_batch
        self.timed, self.trains, self.waited = timed, False, 0.0
        if timed:
            gathers: Any = Timed(DefaultAllGather(), self._took)
            sums: Any = Timed(DefaultReduceScatter(), self._took)
            for unit in self.units:
                unit.set_custom_all_gather(gathers)
                unit.set_custom_reduce_scatter(sums)

    def _took(self, seconds: float) -> None:
        self.waited += seconds if self.trains else 0.0

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.fsdp.set_requires_gradient_sync(last or self.sync_each_micro_batch)
        self.trains = True
        try:
            yield
        finally:
            self.trains = False

    def exposed_communication(self) -> float | None:
        waited, self.waited = self.waited, 0.0
        return waited if self.timed else None

    def reshard(self) -> None:
        """After forwards without a backward, cut again what they left gathered (the root, in the type that it computes in). Until
        then the model's parameters are those, not the trainable shards."""
        for unit in self.units:
            unit.reshard()


class Timed:
    """A collective of FSDP2 that says how many seconds a call took."""

    def __init__(self, collective: Any, took: Callable[[float], None]) -> None:
        self.allocate, self.collective, self.took = collective.allocate, collective, took

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = self.collective(*args, **kwargs)
        self.took(time.perf_counter() - began)
        return work


class BucketedAllReduce(Spread):
    """Copies whose parameters are themselves spread (tensor parallel, a pipeline's stage), which DDP does not take: this rank's parts
    of the gradients are averaged over `group`, the ranks that hold the same parts and see other tokens, after the last micro-batch.
    `experts`: that group for experts which are cut over data ranks."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET,
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module)
        self.groups, self.bucket_bytes = (
            (group, group if experts is None else experts),
            bucket_bytes,
        )
        self.clock, self.learned = Clock(), learning(module)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self.average()

    def average(self) -> None:
        """Average all gradients over the group, in flat buckets. Collective over the group.

        A gradient that only other ranks have counts as zero here and is made; one that no rank has stays None.
        """
        # Frozen since, with a gradient.
        trainable = [
            p for p in self.module.parameters() if p.requires_grad or id(p) in self.learned
        ]
        apart = [p for p in trainable if self.groups[0] is not self.groups[1] and of_experts(p)]
        rest = [p for p in trainable if not any(p is other for other in apart)]
        for parameters, group in zip((rest, apart), self.groups, strict=True):
            ranks = dist.get_world_size(group)
            if ranks == 1 or not parameters:
                continue
            with self.clock.measure(parameters[0].device.type), torch.no_grad():
                under_way: list[_Bucket] = []
                for bucket in buckets(parameters, self.bucket_bytes):
                    under_way.append(_Bucket(bucket, group))
                    # One is on its way while the next is packed: more would only take memory.
                    if len(under_way) > 1:
                        under_way.pop(0).unpack(ranks)
                for last in under_way:
                    last.unpack(ranks)

    def exposed_communication(self) -> float:
        return self.clock.seconds()


class _Bucket:
    """Gradients of some parameters end to end, and behind them a 1 for each that this rank has; summed over the group.

    The host reads the ones, and waits for the device, only where this rank lacks a gradient: it has to know whether another has it."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        parts = [
            torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in parameters
        ]
        self.sizes, self.shapes = [part.numel() for part in parts], [part.shape for part in parts]
        self.lacks_gradient = any(parameter.grad is None for parameter in parameters)
        has = parts[0].new_ones(len(parameters))
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                has[index].zero_()
        self.flat = torch.cat([*(part.reshape(-1) for part in parts), has])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def unpack(self, ranks: int) -> None:
        assert self.work is not None
        self.work.wait()
        *parts, has = self.flat.split([*self.sizes, len(self.parameters)])
        ranks_with_gradient = (
            has.tolist() if self.lacks_gradient else [ranks] * len(self.parameters)
        )
        for index, (parameter, part, shape) in enumerate(
            zip(self.parameters, parts, self.shapes, strict=True)
        ):
            if parameter.grad is None:
                if ranks_with_gradient[index] == 0:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(part.view(shape)).div_(ranks)


def buckets(tensors: Iterable[T], bucket_bytes: int) -> Iterator[list[T]]:
    """Neighbours of one dtype, up to `bucket_bytes` together (one larger than that goes by itself)."""
    bucket: list[T] = []
    filled = 0
    for tensor in tensors:
        size = local(tensor).numel() * tensor.element_size()
        if bucket and (filled + size > bucket_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Clock:
    """Seconds of a stretch of work, on a GPU by events in its stream: of the last one that has ended, since nothing is waited for."""

    def __init__(self) -> None:
        self.last = 0.0
        self.began: torch.cuda.Event | float | None = None
        self.under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(
            maxlen=MOST_UNDER_WAY
        )

    @contextlib.contextmanager
    def measure(self, device: str) -> Iterator[None]:
        self.start(device)
        yield
        self.stop()

    def start(self, device: str) -> None:
        self.began = _event() if device == "cuda" else time.perf_counter()

    def stop(self) -> None:
        """Nothing where none has started."""
        began, self.began = self.began, None
        if isinstance(began, float):
            self.last = time.perf_counter() - began
        elif began is not None:
            self.under_way.append((began, _event()))

    def seconds(self) -> float:
        while self.under_way and self.under_way[0][1].query():
            began, ended = self.under_way.popleft()
            self.last = began.elapsed_time(ended) / 1e3
        return self.last
