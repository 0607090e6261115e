"""`drumline calibrate` on as many GPUs as there are: rates below the datasheet's, and near enough to be of this device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.hardware.catalog import find_by_driver_name
from drumline.hardware.cluster import read_calibration
from tests.gpu.stand_in import GPUS, IS_STAND_IN, NEEDS_CUDA, WITHOUT_NUMBERS
from tests.harness import ENV, run_drumline

pytestmark = NEEDS_CUDA


def group_sizes() -> set[int]:
    """Return the sizes of groups that are measured: 2, 4, 8 and so on, and all GPUs."""
    sizes = set()
    size = 2
    while size <= GPUS:
        sizes |= {size, GPUS}
        size *= 2
    return sizes


def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WITHOUT_NUMBERS.items():
        monkeypatch.setitem(ENV, name, value)
    box = tmp_path / "box.json"
    run_drumline("calibrate", "--quick", "--out", box)
    measured = read_calibration(box)

    assert set(measured.host) == {"to_device", "to_host"}
    for line in measured.host.values():
        assert line.bandwidth > 1e9
    measured_sizes = {size for _, size in measured.collectives}
    assert measured_sizes == group_sizes()

    spec = find_by_driver_name(torch.cuda.get_device_name())
    if spec is None or IS_STAND_IN:
        return  # no time over the stand-in means anything
    for name, rate in measured.matmul.items():
        peak = spec.flops[name]
        assert 0.3 * peak < rate < 1.02 * peak
    assert measured.memory is not None
    assert 0.5 * spec.bandwidth < measured.memory < 1.02 * spec.bandwidth
