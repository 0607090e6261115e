"""`UserModule` wraps a user's module, so that engines call it like a Hugging Face model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from drumline.plan.plan import BatchPlan
from drumline.vendor.torch import BatchNorm

logger = logging.getLogger(__name__)


class UserModule(nn.Module):
    """A user's module, with the interface that engines call: that of `ForwardWithObjective`.

    A forward either hands the module to an objective, or calls it with arguments of its own.
    """

    # Attributes of ForwardWithObjective that engines read. The head of a user's module cannot be
    # separated from its trunk, and its sequences are not sharded (context parallelism).
    has_separable_head = False
    sequence = None

    def __init__(self, model: nn.Module, batch: BatchPlan) -> None:
        """`batch`: of the plan. If a global batch has several micro-batches, the log names once the
        buffers that a forward changes.
        """
        super().__init__()
        self.model = model
        # Whether the next forward in training warns of the buffers that it changes.
        self.warns_of_changed_buffers = batch.global_samples > batch.micro_batch
        # What is called in place of the model if it runs on several GPUs (nn.DataParallel).
        self.over_devices: nn.Module | None = None

    def forward(self, batch: Any, objective: Any = None) -> Any:
        """Return the loss sum and the other sums of `objective(model, batch)`.

        Without an objective, `batch` is (args, kwargs), and the result is `model(*args, **kwargs)`.
        """
        before: dict[str, BufferVersion] | None = None
        if self.warns_of_changed_buffers and self.training:
            before = buffer_versions(self.model)
        run = self.model if self.over_devices is None else self.over_devices
        if objective is None:
            args, kwargs = batch
            out = run(*args, **kwargs)
        else:
            answer = objective(run, batch)
            out = answer.loss_sum, answer.sums
        if before is not None:
            self.warns_of_changed_buffers = False
            self._warn_of_changes(before)
        return out

    def _warn_of_changes(self, before: dict[str, BufferVersion]) -> None:
        """Name the buffers in the log that were written or replaced since `before`."""
        changed: list[str] = []
        for name, version in buffer_versions(self.model).items():
            if not version.equals(before.get(name)):
                changed.append(name)
        if changed:
            logger.warning(
                "forward changes %s once per micro-batch, so their values depend on batch.micro_batch",
                ", ".join(changed),
            )


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module after the context.

    A part of a model may be in eval mode for good.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class BufferVersion(NamedTuple):
    """A buffer, and how often it was written."""

    buffer: torch.Tensor
    writes: int

    def equals(self, other: BufferVersion | None) -> bool:
        """Return whether this is the same buffer, and nothing was written to it in between."""
        if other is None:
            return False
        return self.buffer is other.buffer and self.writes == other.writes


def buffer_versions(model: nn.Module) -> dict[str, BufferVersion]:
    """Return the versions of all buffers by name, except those of batch norms."""
    versions: dict[str, BufferVersion] = {}
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}" if path else name
            versions[full_name] = BufferVersion(buffer, buffer._version)
    return versions
