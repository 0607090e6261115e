"""`drumline calibrate` on as many GPUs as there are: rates below the datasheet's, and near enough to be of this device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.hardware.catalog import by_driver
from drumline.hardware.cluster import read_calibration
from tests.gpu.stand_in import IS_STAND_IN, WITHOUT_NUMBERS
from tests.harness import ENV, drumline

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)


def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WITHOUT_NUMBERS.items():
        monkeypatch.setitem(ENV, name, value)
    done = drumline("calibrate", "--quick", "--out", tmp_path / "box.json")
    assert done.code == 0, done.err
    measured, gpus = read_calibration(tmp_path / "box.json"), torch.cuda.device_count()
    assert set(measured.host) == {"to_device", "to_host"} and all(
        line.bandwidth > 1e9 for line in measured.host.values()
    )
    assert {size for _, size in measured.collectives} == ({2, gpus} if gpus > 1 else set()) | {
        2**i for i in range(1, 8) if 2**i <= gpus
    }
    if IS_STAND_IN:
        return  # no time over it means anything
    spec = by_driver(torch.cuda.get_device_name())
    if spec is not None:
        assert all(
            0.3 * spec.flops[name] < rate < 1.02 * spec.flops[name]
            for name, rate in measured.matmul.items()
        )
        assert (
            measured.memory is not None
            and 0.5 * spec.bandwidth < measured.memory < 1.02 * spec.bandwidth
        )
