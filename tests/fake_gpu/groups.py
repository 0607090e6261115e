"""A rank that joins by `dist.start` over NCCL: `python -m tests.fake_gpu.groups`.

It fails where a group, or its half for tensors on the host, has another limit than the run's, and
where a tensor that goes from stage to stage brings a line of NCCL.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist

from drumline.config.mesh import DIMENSIONS, Mesh
from drumline.dist.mesh import device_mesh, gradient_group
from drumline.dist.start import start, stop
from drumline.telemetry import flight

SECONDS = 41.0


def main() -> None:
    ranks = start("cuda", "nccl", SECONDS)
    whole = device_mesh(Mesh(pp=2), "cuda")
    groups: dict[str, dist.ProcessGroup] = {name: whole[name].get_group() for name in DIMENSIONS}
    groups["gradients"] = gradient_group(whole)
    seconds = {}
    for name, group in groups.items():
        for device in ("cpu", "cuda"):
            backend = group._get_backend(torch.device(device))
            seconds[name, device] = backend.options._timeout.total_seconds()
    assert set(seconds.values()) == {SECONDS}, seconds

    # NCCL's collectives and gloo's are in recorders of their own.
    dist.all_reduce(torch.ones(3, device="cuda"))
    dist.all_reduce(torch.ones(5))
    names = {(entry["op"], str(entry["sizes"])) for entry in flight.recent()}
    assert names >= {("all_reduce", "[[3]]"), ("all_reduce", "[[5]]")}, flight.recent()

    tensor = torch.ones(2, device="cuda")
    with tempfile.TemporaryFile() as lines:
        stderr = os.dup(2)
        os.dup2(lines.fileno(), 2)
        try:
            if ranks.rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
            torch.cuda.synchronize()
        finally:
            os.dup2(stderr, 2)
        lines.seek(0)
        printed = lines.read().decode()
    assert "serialized" not in printed, printed
    stop()


if __name__ == "__main__":
    main()
