"""Any module as engines take it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from drumline.core.plan import BatchPlan
from drumline.vendor.torch import BatchNorm

logger = logging.getLogger(__name__)


class Plain(nn.Module):
    """Any module as engines take it: an objective runs it on a batch, or it is called as it is."""

    splits, sequence = False, None  # it has no head to take off

    def __init__(self, model: nn.Module, batch: BatchPlan) -> None:
        """Where a global batch is cut, the buffers that the first forward changes are named in the log."""
        super().__init__()
        self.model, self.names_changed = model, batch.global_samples > batch.micro_batch
        self.over_devices: nn.Module | None = None  # what is called in the place of the model

    def forward(self, batch: Any, objective: Any = None) -> Any:
        """`objective(model, batch)`'s (loss sum, other sums); without an objective what `model(*args, **kwargs)` gives, `batch` = (args,
        kwargs)."""
        before = buffer_versions(self.model) if self.names_changed and self.training else None
        run = self.model if self.over_devices is None else self.over_devices
        if objective is None:
            args, kwargs = batch
            out = run(*args, **kwargs)
        else:
            made = objective(run, batch)
            out = made.loss_sum, made.sums
        if before is not None:
            self.names_changed = False
            after, same = (
                buffer_versions(self.model),
                lambda one, other: one[0] is other[0] and one[1] == other[1],
            )
            if changed := [
                name for name in after if not same(after[name], before.get(name, (None, 0)))
            ]:
                logger.warning(
                    "forward changes %s: what is kept there follows from how the global batch is cut",
                    ", ".join(changed),
                )
        return out


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in the mode that it was in: a part of a model may be in eval mode for good."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def buffer_versions(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Each buffer, but those of batch norms, and how often it was written."""
    owners = (
        (path, module)
        for path, module in model.named_modules()
        if not isinstance(module, BatchNorm)
    )
    buffers = (
        (f"{path}.{name}" if path else name, b)
        for path, module in owners
        for name, b in module.named_buffers(recurse=False)
    )
    return {name: (buffer, buffer._version) for name, buffer in buffers}
