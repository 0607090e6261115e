"""The device mesh of a plan: one dimension for each way of spreading that is in use."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumline.plan.plan import Mesh


def data_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """The ranks that see different samples: (shard,), or (replicate, shard) where there are several copies. Collective."""
    if mesh.replicate == 1:
        return init_device_mesh(device, (mesh.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))
