"""Data parallelism of the native engine: one subclass of `DataParallelWrapper` for each kind.

A subclass decides when gradients are reduced, and which module runs in training and evaluation.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from drumline.engine.compress import Compressor
from drumline.engine.experts import is_expert_shard
from drumline.engine.norms import local
from drumline.errors import ModelError
from drumline.plan.wire import BUCKET
from drumline.system.heartbeat import note_collective
from drumline.vendor.torch import DefaultAllGather, DefaultReduceScatter, queue_callback

# The most measurements that a clock keeps until somebody asks for the seconds.
MOST_UNDER_WAY = 16
T = TypeVar("T", bound=torch.Tensor)
logger = logging.getLogger(__name__)


class DataParallelWrapper:
    """The data-parallel wrapper around a module, which decides when gradients are reduced.

    `train_module`: what runs in training. `eval_module`: what runs without gradients; by default
    `train_module`. `infer_module`: what `Engine.infer` runs; by default `eval_module`. It differs
    under nn.DataParallel, since the results of `infer` are of all rows of a batch, and not of the
    rows of each GPU.
    """

    def __init__(
        self,
        train_module: nn.Module,
        eval_module: nn.Module | None = None,
        infer_module: nn.Module | None = None,
    ) -> None:
        if eval_module is None:
            eval_module = train_module
        if infer_module is None:
            infer_module = eval_module
        self.train_module = train_module
        self.eval_module = eval_module
        self.infer_module = infer_module

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a micro-batch's forward and backward.

        `last`: whether it is the last one of the global batch. When its context ends, gradients are
        reduced.
        """
        return contextlib.nullcontext()

    def backward_context(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a backward from `loss`."""
        return contextlib.nullcontext()

    def optimizer_parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what the optimizer updates, by name: the model's parameters, or parts of them."""
        return named

    def after_step(self) -> None:
        """Bring the model's weights up to date after the optimizer has stepped. Collective."""

    def exposed_communication(self) -> float | None:
        """Return the seconds of the last step between the end of backward and the last gradient.

        None if they are not measured. It is called once a step: some subclasses count from one call
        to the next.
        """
        return None


# The old name, for plug-ins.
Spread = DataParallelWrapper


def trainable_ids(module: nn.Module) -> set[int]:
    """Return the Python ids of the weights that require gradients now.

    Comparing it with an earlier result tells whether a loop has frozen or unfrozen weights since.
    """
    return {id(weight) for weight in module.parameters() if weight.requires_grad}


class NoGradientSync(DataParallelWrapper):
    """Gradients are not averaged over ranks.

    So it is for one process, for nn.DataParallel, and for ranks that train by themselves (local
    SGD).
    """

    def exposed_communication(self) -> float:
        return 0.0


class _Gradient(NamedTuple):
    """Which gradient a weight has, and how often that tensor was written."""

    id: int
    version: int


class Replicated(DataParallelWrapper):
    """DDP. Evaluation runs on the module within it, since there is nothing to reduce.

    DDP averages gradients during a backward, but only if that follows a call of DDP's forward, and
    only of the weights that were trainable when DDP was made. In two cases the gradients are
    averaged after backward instead:

    - The last backward follows no such call: the loss is of another method of the module, or it is
      the second backward of one forward. Averaging gradients that are averages already changes
      nothing.
    - The user's loop has frozen or unfrozen weights since.
    """

    def __init__(
        self, module: DistributedDataParallel, compressor: Compressor | None = None
    ) -> None:
        super().__init__(module, eval_module=module.module)
        self.ddp = module
        self.compressor = compressor
        # DDP records a static graph in the first backward.
        self.records_graph = module.static_graph
        self.fallback = BucketedAllReduce(module.module, module.process_group)
        self.initially_trainable = self.fallback.initially_trainable
        self.clock = self.fallback.clock
        self.device = next(module.parameters()).device.type
        # Whether DDP's forward ran since the last backward.
        self.was_called = False
        # Whether the last backward averaged the gradients.
        self.has_averaged = False
        # Whether the log says already that gradients are averaged after backward.
        self.has_warned = False
        # Whether this is the last micro-batch of the global batch.
        self.last = False
        module.register_forward_pre_hook(self._note_call)

    def _note_call(self, *_: object) -> None:
        """Note a forward of DDP, and keep DDP from waiting for weights that were frozen."""
        if torch.is_grad_enabled():
            self.was_called = True
            if trainable_ids(self.eval_module) != self.initially_trainable:
                # As `no_sync` does it: DDP would wait for gradients that never come.
                self.ddp.require_backward_grad_sync = False

    @contextlib.contextmanager
    def backward_context(self, loss: torch.Tensor) -> Iterator[None]:
        """See the base class. Measure how long the last backward of a step waits for averages."""

        def start_clock() -> None:
            self.clock.start(self.device)

        if self.last and loss.requires_grad:
            # Callbacks run at the end of a backward, in their order: this one before DDP's own,
            # which waits for the averages.
            loss.register_hook(lambda _: queue_callback(start_clock))
        yield
        self.clock.stop()
        self.has_averaged = self.was_called
        self.was_called = False

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See DataParallelWrapper. Before the last micro-batch DDP only accumulates gradients.

        Raises ModelError if a weight has no gradient that DDP waits for.
        """
        requires_all = not (self.ddp.static_graph or self.ddp.find_unused_parameters)
        checks_gradients = last and requires_all
        before: dict[str, _Gradient | None] = {}
        if checks_gradients:
            before = self._gradients()
        self.was_called = False
        self.has_averaged = False
        self.last = last
        if last or self.records_graph:
            # DDP records a static graph in a backward that reduces. If that is not the last
            # micro-batch, the last one averages again, which does not change the averages.
            yield
        else:
            with self.ddp.no_sync():
                yield
        self.ddp.require_backward_grad_sync = True
        self.records_graph = False
        if last and trainable_ids(self.eval_module) != self.initially_trainable:
            # DDP broadcasts buffers in the next forward only if this backward was synchronised.
            self.ddp.require_forward_param_sync = True
            self._average("other weights learn than when the model was spread")
        elif last and not self.has_averaged:
            self._average("the last backward of a step follows no call of the model")
        elif checks_gradients:
            self._require_gradients(before)
        if last and self.compressor:
            self.compressor.step += 1

    def _average(self, why: str) -> None:
        """Average the gradients after backward. `why`: the reason, which is logged once."""
        if not self.has_warned:
            logger.warning("%s: gradients are averaged after backward, not during it", why)
        self.has_warned = True
        self.fallback.average()

    def _gradients(self) -> dict[str, _Gradient | None]:
        """Return the gradient of each weight that learns, by the weight's name."""
        gradients: dict[str, _Gradient | None] = {}
        for name, weight in self.eval_module.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                gradients[name] = None
            else:
                gradients[name] = _Gradient(id(weight.grad), weight.grad._version)
        return gradients

    def _require_gradients(self, before: dict[str, _Gradient | None]) -> None:
        """Raise ModelError for weights that this backward has not reached.

        DDP would wait for their gradients, leave those of other weights unaveraged, and report it
        only in the next step.
        """
        after = self._gradients()
        without: list[str] = []
        for name, gradient in after.items():
            if gradient == before[name]:
                without.append(name.replace("_orig_mod.", "").removeprefix("model."))
        # If no weight has a gradient, the weights step within backward, or the loss needs none.
        if 0 < len(without) < len(after):
            listed = ", ".join(without[:3])
            if len(without) > 3:
                listed += f" and {len(without) - 3} more"
            raise ModelError(
                f"no gradient reaches {listed}, and DDP waits for it",
                where="model",
                fix="set strategy.find_unused_parameters: true, or leave them out with model.freeze",
            )

    def exposed_communication(self) -> float:
        """See DataParallelWrapper."""
        seconds = self.clock.seconds()
        if self.compressor is not None:
            # On a CPU a compressor waits within backward.
            within_backward = self.compressor.take_seconds()
            note_collective(within_backward)
            seconds += within_backward
        return seconds


class Sharded(DataParallelWrapper):
    """FSDP2. Evaluation gathers weights too, so it goes through the same module."""

    def __init__(
        self,
        module: FSDPModule,
        sync_each_micro_batch: bool,
        casts: bool = False,
        more_roots: Iterable[FSDPModule] = (),
        timed: bool = False,
    ) -> None:
        """`casts`: weights are gathered in a lower precision than they are kept in.

        `more_roots`: further roots, if this rank has several stages of a pipeline. `timed`: whether
        to measure collectives. That makes sense only on a CPU, where each has ended when the call
        returns, so its time is all exposed.
        """
        assert isinstance(module, nn.Module)
        super().__init__(module)
        self.casts = casts
        roots = nn.ModuleList([module, *more_roots])  # type: ignore[list-item]
        self.units = [unit for unit in roots.modules() if isinstance(unit, FSDPModule)]
        self.fsdp = module
        self.sync_each_micro_batch = sync_each_micro_batch
        self.timed = timed
        self.trains = False
        # Seconds in collectives of training since the last call of `exposed_communication`.
        self.waited = 0.0
        if timed:
            gathers: Any = Timed(DefaultAllGather(), self._count_seconds)
            sums: Any = Timed(DefaultReduceScatter(), self._count_seconds)
            for unit in self.units:
                unit.set_custom_all_gather(gathers)
                unit.set_custom_reduce_scatter(sums)

    def _count_seconds(self, seconds: float) -> None:
        """Count the seconds of a collective, unless it is one of an evaluation."""
        if self.trains:
            self.waited += seconds
            note_collective(seconds)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See the base class.

        Without `sync_each_micro_batch` gradients stay whole until the last one.
        """
        self.fsdp.set_requires_gradient_sync(last or self.sync_each_micro_batch)
        self.trains = True
        try:
            yield
        finally:
            self.trains = False

    def exposed_communication(self) -> float | None:
        waited = self.waited
        self.waited = 0.0
        if not self.timed:
            return None
        return waited

    def reshard(self) -> None:
        """Shard again what forwards without a backward have left gathered.

        That is the root, in the type that it computes in. Until then the model's parameters are
        the gathered ones, not the trainable shards.
        """
        for unit in self.units:
            unit.reshard()


class Timed:
    """A collective of FSDP2 that reports the seconds of each call to `report`."""

    def __init__(self, collective: Any, report: Callable[[float], None]) -> None:
        self.allocate = collective.allocate
        self.collective = collective
        self.report = report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the collective, report its seconds, and return its work."""
        start = time.perf_counter()
        work = self.collective(*args, **kwargs)
        self.report(time.perf_counter() - start)
        return work


class BucketedAllReduce(DataParallelWrapper):
    """Copies that average their gradients after the last micro-batch.

    For copies that DDP does not take, because their parameters are sharded (tensor parallel) or are
    a stage of a pipeline. This rank's parts of the gradients are averaged over `group`: the
    ranks that hold the same parts and see other tokens. `experts`: the same for the weights of
    experts, if these are cut over data ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET,
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module)
        self.group = group
        self.group_of_experts = group if experts is None else experts
        self.bucket_bytes = bucket_bytes
        self.clock = Clock()
        self.initially_trainable = trainable_ids(module)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self.average()

    def average(self) -> None:
        """Average all gradients over the group, in flat buckets. Collective over the group.

        If only other ranks have a gradient, this rank counts as zero, and gets the average too. A
        gradient that no rank has stays None.
        """
        has_own_group = self.group_of_experts is not self.group
        experts: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in self.train_module.parameters():
            # A weight that was frozen since may still have a gradient.
            if not parameter.requires_grad and id(parameter) not in self.initially_trainable:
                continue
            if has_own_group and is_expert_shard(parameter):
                experts.append(parameter)
            else:
                rest.append(parameter)
        self._average_over(self.group, rest)
        self._average_over(self.group_of_experts, experts)

    def _average_over(self, group: dist.ProcessGroup, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of some parameters over a group, one all-reduce a bucket."""
        ranks = dist.get_world_size(group)
        if ranks == 1 or not parameters:
            return
        with self.clock.measure(parameters[0].device.type), torch.no_grad():
            under_way: list[_Bucket] = []
            for bucket in buckets(parameters, self.bucket_bytes):
                under_way.append(_Bucket(bucket, group))
                # One bucket is on its way while the next is packed. More would only take memory.
                if len(under_way) > 1:
                    under_way.pop(0).unpack(ranks)
            for last in under_way:
                last.unpack(ranks)

    def exposed_communication(self) -> float:
        return self.clock.seconds()


class _Bucket:
    """Gradients of some parameters end to end, summed over the group.

    After them is a 1 for each gradient that this rank has, so the sum counts the ranks that have
    it. Only a rank that lacks a gradient needs that count on the host, and waits for the device.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        parts: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parts.append(torch.zeros_like(local(parameter)))
            else:
                parts.append(local(parameter.grad))
        self.sizes = [part.numel() for part in parts]
        self.shapes = [part.shape for part in parts]
        self.lacks_gradient = any(parameter.grad is None for parameter in parameters)
        has_gradient = parts[0].new_ones(len(parameters))
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                has_gradient[index].zero_()
        flat_parts = [part.reshape(-1) for part in parts]
        self.flat = torch.cat([*flat_parts, has_gradient])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def unpack(self, ranks: int) -> None:
        """Wait for the sums, and set the gradients to their averages over so many ranks."""
        assert self.work is not None
        self.work.wait()
        sizes = [*self.sizes, len(self.parameters)]
        *parts, has_gradient = self.flat.split(sizes)
        # As long as this rank has all gradients, no number of the device is needed.
        ranks_with_gradient = [ranks] * len(self.parameters)
        if self.lacks_gradient:
            ranks_with_gradient = has_gradient.tolist()
        for parameter, part, shape, holders in zip(
            self.parameters, parts, self.shapes, ranks_with_gradient, strict=True
        ):
            if parameter.grad is None:
                if holders == 0:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(part.view(shape)).div_(ranks)


def buckets(tensors: Iterable[T], bucket_bytes: int) -> Iterator[list[T]]:
    """Yield lists of consecutive tensors of one dtype, each of at most `bucket_bytes`.

    A larger tensor is in a list of its own.
    """
    bucket: list[T] = []
    filled = 0
    for tensor in tensors:
        size = local(tensor).numel() * tensor.element_size()
        if bucket:
            is_full = filled + size > bucket_bytes
            has_other_dtype = tensor.dtype != bucket[0].dtype
            if is_full or has_other_dtype:
                yield bucket
                bucket = []
                filled = 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


def _event() -> torch.cuda.Event:
    """Return an event that the GPU reaches after all work that its current stream has so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Clock:
    """Measures how long some work takes that is done again and again, on a GPU by events.

    Nothing waits for the work: `seconds` is the duration of the last one that has ended.
    """

    def __init__(self) -> None:
        self.last = 0.0
        # When the work under way started: an event on a GPU, else seconds.
        self.began: torch.cuda.Event | float | None = None
        # The first and last event of work on a GPU whose seconds nobody has asked for.
        self.under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(
            maxlen=MOST_UNDER_WAY
        )

    @contextlib.contextmanager
    def measure(self, device: str) -> Iterator[None]:
        """Measure the work of a `with` block. `device`: the type of the device that does it."""
        self.start(device)
        yield
        self.stop()

    def start(self, device: str) -> None:
        """Begin a measurement. `device`: the type of the device that does the work."""
        if device == "cuda":
            self.began = _event()
        else:
            self.began = time.perf_counter()

    def stop(self) -> None:
        """End the measurement. Without a start it does nothing."""
        began = self.began
        self.began = None
        if isinstance(began, float):
            self.last = time.perf_counter() - began
            note_collective(self.last)
        elif began is not None:
            self.under_way.append((began, _event()))

    def seconds(self) -> float:
        """Return the seconds of the last work that has ended; 0 before the first."""
        while self.under_way and self.under_way[0][1].query():
            began, ended = self.under_way.popleft()
            self.last = began.elapsed_time(ended) / 1e3
        return self.last
