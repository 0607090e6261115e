"""Run a model over all GPUs of a machine by nn.DataParallel."""

from __future__ import annotations

import logging
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from drumline.engine.data_parallel import NoGradientSync
from drumline.engine.user_module import UserModule
from drumline.models.shards import Values
from drumline.plan.plan import Plan

logger = logging.getLogger(__name__)


def spread(plan: Plan, model: nn.Module, module: nn.Module, values: Values) -> NoGradientSync:
    """Fill the weights of `model` and return `module`, which runs it, over all GPUs."""
    values.fill(model)
    if isinstance(module, UserModule):
        if plan.device == "cuda":
            logger.warning(
                "strategy dp with a module of your own is experimental on GPUs: no test has run it there"
            )
            module.over_devices = OverDevices(model)
        return NoGradientSync(module)
    return NoGradientSync(Scattered(module, plan.device), infer_module=module)


class OverDevices(nn.DataParallel):
    """nn.DataParallel around any module, with all attributes of the module.

    Each tensor of a call is cut over its first dimension, and the outputs are put together the same
    way.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Scattered(nn.Module):
    """A module like `module`, a ForwardWithObjective on the first GPU, whose forward uses all GPUs.

    One process drives all GPUs of the machine by nn.DataParallel; on a CPU it computes all rows
    itself. DDP is faster; this is for a host where one process alone may run. The rows of a batch
    are cut over the GPUs in equal runs, the weights are copied to each, and the sums are added on
    the first. If there are fewer rows than GPUs, some GPUs idle. nn.DataParallel cuts tensors
    alone, so a batch goes through it as a dictionary of its tensors.
    """

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        rows = _Rows(module)
        self.over_devices: nn.Module = rows
        if device == "cuda":
            self.over_devices = nn.DataParallel(rows)

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        is_cut = (
            isinstance(self.over_devices, nn.DataParallel) and len(self.over_devices.device_ids) > 1
        )
        if is_cut and hasattr(batch, "learned_M"):
            # `cu_seqlens_N` (where segments begin) and `learned_M` (the M targets with a loss) are
            # indices into all rows end to end, so they are wrong for a part of the rows. `_Rows`
            # makes the part's `learned_M` on the host: to make it on a device would mean to wait
            # for it.
            batch = replace(batch, cu_seqlens_N=None, learned_M=None)
        tensors = {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor):
                tensors[field.name] = value
        loss_sums, sums = self.over_devices(tensors, batch, objective)
        return loss_sums.sum(), {name: values.sum() for name, values in sums.items()}


class _Rows(nn.Module):
    """The part of each GPU: it computes its rows of the batch.

    Fields of the batch that are not tensors come from the whole `batch`. The sums have the shape
    [1], so that nn.DataParallel can concatenate them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, tensors: dict[str, torch.Tensor], batch: Any, objective: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        part = replace(batch, **tensors)
        if _is_cut(batch):
            rows, width = batch.targets_BT.shape
            device = part.targets_BT.device
            mine = rows_of_part(rows, device.index, torch.cuda.device_count())
            learned_M = torch.from_numpy(learned_of_rows(batch.learned_on_host_M, mine, width))
            part = replace(
                part, document_lengths=batch.document_lengths[mine], learned_M=learned_M
            ).to(device)
        loss_sum, sums = self.module(part, objective)
        return loss_sum[None], {name: value[None] for name, value in sums.items()}


def _is_cut(batch: Any) -> bool:
    """Return whether `Scattered` has removed from a batch what belongs to all its rows."""
    return getattr(batch, "learned_on_host_M", None) is not None and batch.learned_M is None


def rows_of_part(rows: int, part: int, parts: int) -> slice:
    """Return the rows that nn.DataParallel gives to a device.

    It cuts as torch.chunk does: the last parts may be shorter, or empty.
    """
    part_rows = math.ceil(rows / parts)
    return slice(part * part_rows, (part + 1) * part_rows)


def learned_of_rows(
    indices_M: npt.NDArray[np.int64], rows: slice, width: int
) -> npt.NDArray[np.int64]:
    """Return the indices that lie in `rows`, counted from the first of these rows.

    `indices_M`: int64[M], indices in a flattened [B, `width`].
    """
    first = rows.start * width
    stop = rows.stop * width
    is_here_M = (indices_M >= first) & (indices_M < stop)
    return indices_M[is_here_M] - first
