"""The device mesh of a plan, and the groups of ranks that strategies communicate in."""

from __future__ import annotations

import math
from functools import lru_cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumline.config.mesh import DIMENSIONS, GROUP_BESIDE_STEPS, Mesh
from drumline.dist.timeouts import apply_timeout_to_groups, limit_between_steps

# Names of the dimension that `mesh_of_experts` has.
EXPERT_DIMENSIONS = frozenset({"ep", "ep_tp"})


def device_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """Return the device mesh of a plan, with all dimensions of `config.mesh.DIMENSIONS` by name.

    Dimensions of size one are among them. A single process becomes a process group of one. All
    models of a run share one mesh, because each group of NCCL takes memory on every GPU.
    Collective.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return _cached_mesh(dist.group.WORLD, mesh, device)


@lru_cache(maxsize=1)
def _cached_mesh(_world: dist.ProcessGroup, mesh: Mesh, device: str) -> DeviceMesh:
    sizes = tuple(getattr(mesh, name) for name in DIMENSIONS)
    made = init_device_mesh(device, sizes, mesh_dim_names=DIMENSIONS)
    apply_timeout_to_groups()
    return made


@lru_cache(maxsize=1)
def side_group(_world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a second group of all ranks, for communication beside the steps.

    The first call makes the group, and is collective.
    """
    return dist.new_group(timeout=limit_between_steps(), group_desc=GROUP_BESIDE_STEPS)


def data_mesh(whole: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards all weights but those of experts.

    Its dimensions are (shard,), or (replicate, shard) if there are several copies of the model.
    Context-parallel ranks (cp) hold parts of the same sequence and so the same weights, which they
    shard together with the data ranks. So do ranks that hold different experts (ep); the experts
    are sharded over `expert_mesh`. Collective.
    """
    return _sharding_mesh(whole, ("ep", "cp"))


def expert_mesh(whole: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards a rank's experts: the ranks with the same experts.

    Its dimensions are those of `data_mesh`, without ep. Collective.
    """
    return _sharding_mesh(whole, ("cp",))


def _sharding_mesh(whole: DeviceMesh, more: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh (shard,) or (replicate, shard), whose shard spans more dimensions. Collective.

    `more`: names of the further dimensions. Those of size one are left out.
    """
    names = ["shard"]
    for name in more:
        if whole[name].size() > 1:
            names.append(name)
    if len(names) > 1:
        shard = _flatten(whole[tuple(names)], "_".join(names))
    else:
        shard = whole["shard"]
    if whole["replicate"].size() == 1:
        return shard
    return whole["replicate", shard.mesh_dim_names[0]]  # type: ignore[index]


def mesh_of_experts(whole: DeviceMesh) -> DeviceMesh:
    """Return the mesh of one dimension over which the experts of a layer are cut. Collective.

    It is ep. With tensor parallelism it spans tp as well, so its ranks are those of tp within those
    of ep. The name of its dimension is one of EXPERT_DIMENSIONS.
    """
    if whole["tp"].size() == 1:
        return whole["ep"]
    return _flatten(whole["ep", "tp"], "ep_tp")


def first_row(rows: int, over: DeviceMesh) -> int:
    """Return the index of the first row that this rank holds of a tensor with `rows` rows.

    The tensor is cut by rows over the mesh `over` of one dimension, as DTensor's Shard(0) cuts it.
    """
    rows_per_rank = math.ceil(rows / over.size())
    return min(rows, over.get_local_rank() * rows_per_rank)


def gradient_group(whole: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same weights and see different tokens. Collective.

    It spans the dimensions replicate, shard, ep and cp.
    """
    return _flatten(whole["replicate", "shard", "ep", "cp"], "gradients").get_group()


def expert_gradient_group(whole: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same experts and see different tokens. Collective.

    It spans the dimensions replicate, shard and cp.
    """
    if whole["shard"].size() * whole["cp"].size() == 1:
        # A group of its own would take memory on every GPU.
        return whole["replicate"].get_group()
    return _flatten(whole["replicate", "shard", "cp"], "expert_gradients").get_group()


def _flatten(part: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with all dimensions of `part` as one, over a new group with the run's timeout.

    Collective.
    """
    flat = part._flatten(name)
    apply_timeout_to_groups()
    return flat
