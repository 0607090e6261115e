"""What these tests need before the first of them."""

from __future__ import annotations

import pytest

from tests.gpu.stand_in import IS_STAND_IN


@pytest.fixture(scope="session", autouse=True)
def computing_over_the_stand_in() -> None:
    """Choose a device, as every rank does: from then on the stand-in computes what its kernels leave out."""
    if IS_STAND_IN:
        import torch

        torch.cuda.set_device(0)
