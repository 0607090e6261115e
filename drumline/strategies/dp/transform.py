"""nn.DataParallel around a model."""

from __future__ import annotations

import logging
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from drumline.core.plan import Plan
from drumline.models.sequence import copy_without_wait
from drumline.models.shards import Values
from drumline.parallel.data_parallel import Unreplicated
from drumline.parallel.plain import Plain

logger = logging.getLogger(__name__)


def spread(plan: Plan, model: nn.Module, module: nn.Module, values: Values) -> Unreplicated:
    values.fill(model)
    if isinstance(module, Plain):
        if plan.device == "cuda":
            logger.warning("strategy dp with a module of your own is experimental on GPUs: no test has run it there")
            module.over_devices = OverDevices(model)
        return Unreplicated(module)
    return Unreplicated(Scattered(module, plan.device), reads=module)


class OverDevices(nn.DataParallel):
    """nn.DataParallel around any module, with all of its attributes. Each tensor of a call is cut over its first dimension, and so is what
    the module gives put together again."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Scattered(nn.Module):
    """nn.DataParallel: a module like `module` (a ForwardWithObjective on the first GPU) whose forward uses all GPUs of the machine from one
    process; on a CPU it does all rows itself. DDP is faster; this is for a host where one process alone may run.

    The rows of a batch are cut over the GPUs in equal runs, the weights copied to each, the sums added on the first. Where there are
    fewer rows than GPUs, some GPUs idle. nn.DataParallel cuts tensors alone, so a batch goes through it as a dict of its tensors.
    """

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        rows = _Rows(module)
        self.over_devices = nn.DataParallel(rows) if device == "cuda" else rows

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if isinstance(self.over_devices, nn.DataParallel):  # they are of all rows, and each device has some
            known = {name: None for name in ("documents", "bounds_N", "learned_M") if hasattr(batch, name)}
            batch = replace(batch, **known)
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}
        loss_sums, sums = self.over_devices(tensors, batch, objective)
        return loss_sums.sum(), {name: values.sum() for name, values in sums.items()}


class _Rows(nn.Module):
    """What each GPU does: its rows of the batch (`batch` gives what is not a tensor). Sums of shape [1], which are put end to end."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensors: dict[str, torch.Tensor], batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        part = replace(batch, **tensors)
        is_cut = getattr(batch, "learned_M", None) is None
        places_M = getattr(batch, "learned_on_host_M", None)
        if is_cut and places_M is not None:
            device = part.targets_BT.device
            mine_M = learned_of_part(places_M, batch.targets_BT.shape, device.index, torch.cuda.device_count())
            part = replace(part, learned_M=copy_without_wait(torch.from_numpy(mine_M), device))
        loss_sum, sums = self.module(part, objective)
        return loss_sum[None], {name: value[None] for name, value in sums.items()}


def learned_of_part(places_M: npt.NDArray[np.int64], shape: tuple[int, int], part: int, parts: int) -> npt.NDArray[np.int64]:
    """Return the places of the targets in one part of the rows of [B, T] = `shape`, by those of the whole.

    nn.DataParallel cuts rows as torch.chunk does: equal parts, of which the last may be shorter. The host knows the places, and
    does not wait for a device to count them.
    """
    rows, width = shape
    part_size = math.ceil(rows / parts) * width
    first = part * part_size
    is_here_M = (places_M >= first) & (places_M < first + part_size)
    return places_M[is_here_M] - first
