"""What these tests need before the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu.stand_in import IS_STAND_IN

pytest.register_assert_rewrite("tests.gpu.runs")


@pytest.fixture(scope="session", autouse=True)
def computing_over_the_stand_in() -> None:
    """Choose a device, as every rank does: from then on the stand-in computes what its kernels leave out."""
    if IS_STAND_IN:
        torch.cuda.set_device(0)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of one rank over NCCL."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()
