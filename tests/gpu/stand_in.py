"""What these tests need, and whether they run over the stand-in of a GPU.

docs/explanations/gpu_tests.md describes it.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_STAND_IN = "libfakecuda" in os.environ.get("LD_PRELOAD", "")
COMPILED_CODE = "compiled code: the stand-in runs no kernel of Triton"
KERNELS_THAT_TAKE_TIME = "kernels that take time: those of the stand-in end at once"
# tests/fake_gpu has test_sizes.py for plans, and in test_runs.py a small run that is out of memory.
GIGABYTES = "a run of gigabytes, beside which CUDA's own memory is small: a CPU takes too long"
# Variables of processes whose large tensors nobody reads. Over the stand-in they are neither
# computed nor copied, so they take no time and no memory.
WITHOUT_NUMBERS: dict[str, str] = {}
if IS_STAND_IN:
    WITHOUT_NUMBERS = {"FAKE_GPU_FILL": "0", "FAKE_GPU_LARGEST_TENSOR": "65536"}

GPUS = torch.cuda.device_count()
NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)
NEEDS_TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}")


def size(on_a_gpu: int, over_the_stand_in: int) -> int:
    """Return a size of a model or a batch: the stand-in computes on a CPU, and needs a smaller one."""
    return over_the_stand_in if IS_STAND_IN else on_a_gpu


def requires(what: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test over the stand-in, which lacks `what`."""
    return pytest.mark.skipif(IS_STAND_IN, reason=f"needs {what}")
