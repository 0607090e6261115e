"""Copies whose step is shared out over data ranks (ZeRO-1, Rajbhandari et al. 2020), with tensor and pipeline parallelism or without."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from drumline.dist.mesh import first_row
from drumline.parallel.data_parallel import Clock, Spread, buckets
from drumline.parallel.norms import local
from drumline.vendor.torch import StridedShard


class SharedStep(Spread):
    """Each rank along `replicate` averages and steps some rows of each parameter, and all gather the rows of the others.

    The optimizer is given parameters of its own: views of those rows as DTensors, cut as FSDP2 cuts. So a state lies on one rank, and a
    checkpoint has it as FSDP2's. Gradients stay whole until the step; of them, these rows are averaged."""

    def __init__(self, module: nn.Module, whole: DeviceMesh, bucket_bytes: int) -> None:
        super().__init__(module)
        self.whole, self.over, self.clock = whole, whole["replicate"], Clock()
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [
            Bucket([Rows.of(p, self.over) for p in bucket], self.over)
            for bucket in buckets(trainable, bucket_bytes)
        ]
        self.mine = {id(p): nn.Parameter(self._placed(p, local(p.detach()))) for p in trainable}

    def stepped(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: self.mine.get(id(parameter), parameter) for name, parameter in named.items()}

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if last and self.buckets:
            with self.clock.measure(self.over.device_type), torch.no_grad():
                for bucket in self.buckets:
                    bucket.average()
                for bucket in self.buckets:
                    for rows in bucket.rows:
                        grad = rows.parameter.grad
                        self.mine[id(rows.parameter)].grad = (
                            None if grad is None else self._placed(rows.parameter, local(grad))
                        )

    def after_step(self) -> None:
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.gather()

    def exposed_communication(self) -> float:
        return self.clock.seconds()

    def _placed(self, parameter: nn.Parameter, here: Tensor) -> DTensor:
        """This rank's rows of a tensor that lies as the parameter does, without a copy."""
        rows = Rows.of(parameter, self.over)
        mesh, placements = self.over, list[Placement]([Shard(0)])
        if isinstance(parameter, DTensor):
            (cut,), tp = parameter.placements, parameter.device_mesh
            names = tp.mesh_dim_names
            assert names is not None
            mesh = self.whole["replicate", names[0]]
            if cut.is_shard(0):  # rows of a part of the rows
                placements = [StridedShard(0, split_factor=tp.size())]
            placements.append(cut)
        part = here[rows.first : rows.first + rows.number]
        return DTensor.from_local(
            part,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@dataclass(frozen=True)
class Rows:
    """Of a parameter's part on this rank: `each` rows for each data rank, fewer for the last ones; `number` of them here, from `first`."""

    parameter: nn.Parameter
    each: int
    first: int
    number: int

    @classmethod
    def of(cls, parameter: nn.Parameter, over: DeviceMesh) -> Rows:
        rows = local(parameter).shape[0]
        each, first = math.ceil(rows / over.size()), first_row(rows, over)
        return cls(parameter, each, first, min(each, rows - first))

    @property
    def entries(self) -> int:
        """For each data rank, filled up."""
        return self.each * (local(self.parameter).numel() // max(1, local(self.parameter).shape[0]))


class Bucket:
    """Some parameters, whose rows travel at once: for each data rank its rows end to end, filled up to the same size."""

    def __init__(self, rows: list[Rows], over: DeviceMesh) -> None:
        self.rows, self.group, self.ranks, self.rank = (
            rows,
            over.get_group(),
            over.size(),
            over.get_local_rank(),
        )
        self.size = sum(each.entries for each in rows)

    def average(self) -> None:
        """Behind a rank's rows is a 1 for each gradient that it has: one that no rank has stays None."""
        like = local(self.rows[0].parameter)
        sent_RN = like.new_zeros(self.ranks, self.size + len(self.rows))
        for index, (rows, (start, stop)) in enumerate(self._places()):
            if (grad := rows.parameter.grad) is not None:
                _fill(sent_RN[:, start:stop], local(grad), rows.each)
                sent_RN[:, self.size + index] = 1
        sums_N = like.new_empty(sent_RN.shape[1])
        dist.reduce_scatter_tensor(sums_N, sent_RN.view(-1), group=self.group)
        for index, (rows, (start, _)) in enumerate(self._places()):
            if rows.parameter.grad is None:
                if not sums_N[self.size + index]:
                    continue
                rows.parameter.grad = torch.zeros_like(rows.parameter)
            mine = local(rows.parameter.grad)[rows.first : rows.first + rows.number]
            mine.copy_(sums_N[start : start + mine.numel()].view(mine.shape)).div_(self.ranks)

    def gather(self) -> None:
        """The rows of all ranks, as they are after a step."""
        like = local(self.rows[0].parameter)
        mine_N, all_RN = like.new_zeros(self.size), like.new_empty(self.ranks, self.size)
        for rows, (start, _) in self._places():
            part = local(rows.parameter)[rows.first : rows.first + rows.number]
            mine_N[start : start + part.numel()].copy_(part.reshape(-1))
        dist.all_gather_into_tensor(all_RN.view(-1), mine_N, group=self.group)
        for rows, (start, stop) in self._places():
            _fill(all_RN[:, start:stop], local(rows.parameter), rows.each, back=True)

    def _places(self) -> Iterator[tuple[Rows, tuple[int, int]]]:
        start = 0
        for rows in self.rows:
            yield rows, (start, start + rows.entries)
            start += rows.entries


def _fill(flat_RN: Tensor, whole: Tensor, each: int, back: bool = False) -> None:
    """Put `each` rows of a tensor into each row of `flat_RN`; `back`: the other way. The last ones may have fewer."""
    if whole.numel():
        filled = whole.shape[0] // each
        parts = [
            (flat_RN[:filled], whole[: filled * each]),
            (flat_RN[filled : filled + 1], whole[filled * each :]),
        ]
        for flat, part in parts:
            if len(part):
                flat = flat[:, : part.numel() // len(flat)]
                (part if back else flat).copy_(
                    flat.reshape(part.shape) if back else part.reshape(flat.shape)
                )
