"""ZeRO-1 (Rajbhandari et al. 2020): data ranks have copies of a model, and shard its optimizer.

This is `strategy.shard_optimizer` of DDP.

It can be combined with tensor and pipeline parallelism.
"""

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
from drumline.engine.data_parallel import Clock, DataParallelWrapper, buckets
from drumline.engine.norms import local
from drumline.vendor.torch import StridedShard


class ShardedOptimizerWrapper(DataParallelWrapper):
    """Each data rank averages the gradients of some rows of each parameter, and updates these rows.

    The data ranks are those along the axis `replicate` of the mesh. After the step all ranks gather
    the rows of the others. The optimizer gets parameters of its own: views of this rank's rows, as
    DTensors that are cut as FSDP2 would cut them. So each part of its state lies on one rank, and
    checkpoints are the same as FSDP2's. Gradients stay whole, but only this rank's rows of them are
    averaged.
    """

    def __init__(self, module: nn.Module, world_mesh: DeviceMesh, bucket_bytes: int) -> None:
        """`world_mesh`: of all ranks. `bucket_bytes`: bytes of the parameters of one bucket."""
        super().__init__(module)
        self.world_mesh = world_mesh
        self.replicas = world_mesh["replicate"]
        self.clock = Clock()
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets: list[Bucket] = []
        for bucket in buckets(trainable, bucket_bytes):
            rows_of_bucket = [Rows.from_parameter(parameter, self.replicas) for parameter in bucket]
            self.buckets.append(Bucket(rows_of_bucket, self.replicas))
        # Id of a parameter → this rank's rows, which the optimizer updates.
        self.local_rows: dict[int, nn.Parameter] = {}
        for parameter in trainable:
            part = local(parameter.detach())
            self.local_rows[id(parameter)] = nn.Parameter(self._rows_as_dtensor(parameter, part))

    def optimizer_parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return this rank's rows of each trainable parameter, under the parameter's name."""
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in named.items():
            parameters[name] = self.local_rows.get(id(parameter), parameter)
        return parameters

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See DataParallelWrapper.

        Gradients are averaged after the last micro-batch, and the wait is measured.
        """
        yield
        if last and self.buckets:
            with self.clock.measure(self.replicas.device_type), torch.no_grad():
                self._average_gradients()

    def _average_gradients(self) -> None:
        """Average this rank's rows of all gradients, and hand them to the optimizer."""
        for bucket in self.buckets:
            bucket.average()
        for bucket in self.buckets:
            for rows in bucket.rows:
                grad = rows.parameter.grad
                local_grad: DTensor | None = None
                if grad is not None:
                    # A view: scaling or clipping it changes the rows of the whole gradient.
                    local_grad = self._rows_as_dtensor(rows.parameter, local(grad))
                self.local_rows[id(rows.parameter)].grad = local_grad

    def after_step(self) -> None:
        """Gather the rows that the other ranks have updated. Collective over the data ranks.

        The optimizer's parameters are views of the model's, so this rank's own rows are in place.
        """
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.gather()

    def exposed_communication(self) -> float:
        """Return the seconds of averaging gradients, all of which come after backward."""
        return self.clock.seconds()

    def _rows_as_dtensor(self, parameter: nn.Parameter, part: Tensor) -> DTensor:
        """Return this rank's rows of a tensor, without a copy.

        `part`: what this rank holds of the tensor, which is sharded as the parameter is.
        """
        rows = Rows.from_parameter(parameter, self.replicas)
        # A parameter that tensor parallelism has left whole is cut over the data ranks alone.
        mesh = self.replicas
        placements: list[Placement] = [Shard(0)]
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            tp = parameter.device_mesh
            names = tp.mesh_dim_names
            assert names is not None
            mesh = self.world_mesh["replicate", names[0]]
            if placement.is_shard(0):
                # These are rows of a part of the rows: the tp ranks cut first, the data ranks
                # within.
                placements = [StridedShard(0, split_factor=tp.size())]
            placements.append(placement)
        return DTensor.from_local(
            rows.select(part),
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that one data rank averages and updates.

    `per_rank`: the most rows that a data rank has; the last ranks may have fewer. `first`,
    `count`: the first of this rank's rows, and how many it has. If tensor parallelism has cut the
    parameter, all of these are rows of this rank's part.
    """

    parameter: nn.Parameter
    per_rank: int
    first: int
    count: int

    @classmethod
    def from_parameter(cls, parameter: nn.Parameter, replicas: DeviceMesh) -> Rows:
        """Return the rows of a parameter that this rank updates."""
        rows = local(parameter).shape[0]
        # As torch's Shard does it: each rank has the same number, and the last ones what is left.
        per_rank = math.ceil(rows / replicas.size())
        first = first_row(rows, replicas)
        return cls(parameter, per_rank, first, min(per_rank, rows - first))

    @property
    def entries(self) -> int:
        """How many entries `per_rank` rows have."""
        part = local(self.parameter)
        # A part may have no rows at all, and then has no entries.
        entries_per_row = part.numel() // max(1, part.shape[0])
        return self.per_rank * entries_per_row

    def select(self, part: Tensor) -> Tensor:
        """Return a view of these rows of a tensor that is cut as the parameter is."""
        return part[self.first : self.first + self.count]


@dataclass(frozen=True)
class _Slot:
    """Where in a bucket's message the rows of one parameter lie: columns [start, stop)."""

    rows: Rows
    start: int
    stop: int


class Bucket:
    """Some parameters whose rows are sent together.

    The message for a data rank has its rows of all these parameters end to end. The messages for
    all ranks have the same layout, since a reduce-scatter takes messages of one size.
    """

    def __init__(self, rows: list[Rows], replicas: DeviceMesh) -> None:
        """`rows`: of each parameter, in one order on all ranks. `replicas`: the data ranks."""
        self.rows = rows
        self.group = replicas.get_group()
        self.ranks = replicas.size()
        self.slots: list[_Slot] = []
        # Columns of all rows together.
        self.size = 0
        for each in rows:
            stop = self.size + each.entries
            self.slots.append(_Slot(each, self.size, stop))
            self.size = stop

    def average(self) -> None:
        """Replace this rank's rows of each gradient by their mean over the data ranks.

        After the rows of a message is a 1 for each gradient that the rank has. A gradient that no
        rank has stays None, so that all ranks agree on which parameters are updated.
        """
        like = local(self.rows[0].parameter)
        sent_RN = like.new_zeros(self.ranks, self.size + len(self.rows))
        for index, slot in enumerate(self.slots):
            grad = slot.rows.parameter.grad
            if grad is not None:
                columns_RN = sent_RN[:, slot.start : slot.stop]
                _pack(columns_RN, local(grad), slot.rows.per_rank)
                sent_RN[:, self.size + index] = 1

        sums_N = like.new_empty(sent_RN.shape[1])
        dist.reduce_scatter_tensor(sums_N, sent_RN.view(-1), group=self.group)

        for index, slot in enumerate(self.slots):
            parameter = slot.rows.parameter
            if parameter.grad is None:
                # Only for a parameter without a gradient does the host wait for the device.
                has_other_rank_one = bool(sums_N[self.size + index])
                if not has_other_rank_one:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            local_rows = slot.rows.select(local(parameter.grad))
            sum_ = sums_N[slot.start : slot.start + local_rows.numel()]
            local_rows.copy_(sum_.view(local_rows.shape)).div_(self.ranks)

    def gather(self) -> None:
        """Bring the rows of all ranks, as they are after a step, to this rank."""
        like = local(self.rows[0].parameter)
        local_N = like.new_zeros(self.size)
        all_RN = like.new_empty(self.ranks, self.size)
        for slot in self.slots:
            local_rows = slot.rows.select(local(slot.rows.parameter))
            stop = slot.start + local_rows.numel()
            local_N[slot.start : stop].copy_(local_rows.reshape(-1))
        dist.all_gather_into_tensor(all_RN.view(-1), local_N, group=self.group)
        for slot in self.slots:
            columns_RN = all_RN[:, slot.start : slot.stop]
            _unpack(columns_RN, local(slot.rows.parameter), slot.rows.per_rank)


def _pack(columns_RN: Tensor, tensor: Tensor, per_rank: int) -> None:
    """Copy a tensor's rows into a message, `per_rank` of them into the columns of each rank."""
    for columns, rows in _pairs(columns_RN, tensor, per_rank):
        columns.copy_(rows.reshape(columns.shape))


def _unpack(columns_RN: Tensor, tensor: Tensor, per_rank: int) -> None:
    """Copy the columns of all ranks into the rows of a tensor: the inverse of `_pack`."""
    for columns, rows in _pairs(columns_RN, tensor, per_rank):
        rows.copy_(columns.reshape(rows.shape))


def _pairs(columns_RN: Tensor, tensor: Tensor, per_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views, of a message and of a tensor, that stand for the same entries.

    The first pair is of the ranks with `per_rank` rows, the second of the rank with fewer rows.
    """
    if not tensor.numel():
        return
    full_ranks = tensor.shape[0] // per_rank
    first_left = full_ranks * per_rank
    pairs = [
        (columns_RN[:full_ranks], tensor[:first_left]),
        (columns_RN[full_ranks : full_ranks + 1], tensor[first_left:]),
    ]
    for columns, rows in pairs:
        if len(rows):
            # The columns of a rank with fewer rows are not all used.
            used = rows.numel() // len(columns)
            yield columns[:, :used], rows
