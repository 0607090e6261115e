"""How a module is spread over data ranks, as far as the native engine has to know: when gradients are reduced, what evaluates."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


class Spread(Protocol):
    """One way of spreading. `module` runs a training forward, `inner` one without gradients."""

    module: nn.Module
    inner: nn.Module

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward; gradients must be reduced once the last one is through."""
        ...

    def exposed_communication(self) -> float:
        """Seconds of the last step in which backward had ended and gradients were still on their way; 0 where it is not known."""
        ...


class Alone:
    """One process."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.inner = module

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def exposed_communication(self) -> float:
        return 0.0


class Replicated:
    """DDP. Evaluation runs below it: nothing is to be reduced there."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.ddp = module
        self.module: nn.Module = module
        self.inner: nn.Module = module.module

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.ddp.no_sync()

    def exposed_communication(self) -> float:
        clocks = self.ddp._get_ddp_logging_data()
        nanoseconds = clocks.get("backward_comm_time", 0) - clocks.get("backward_compute_comm_overlap_time", 0)
        return max(0, nanoseconds) / 1e9


class Sharded:
    """FSDP2. Evaluation gathers weights too, so it goes through the same module."""

    def __init__(self, module: FSDPModule, sync_each_micro_batch: bool) -> None:
        assert isinstance(module, nn.Module)
        self.module: nn.Module = module
        self.inner: nn.Module = module
        self.fsdp, self.sync_each_micro_batch = module, sync_each_micro_batch

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        self.fsdp.set_requires_gradient_sync(last or self.sync_each_micro_batch)
        return contextlib.nullcontext()

    def exposed_communication(self) -> float:
        return 0.0
