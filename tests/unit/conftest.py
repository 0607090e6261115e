"""What holds for all unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """DeepSpeed's engine makes one for itself where there is none; the next file on this worker may want its own."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
