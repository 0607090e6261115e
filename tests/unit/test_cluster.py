"""What the machine has, and what devices can do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drumline.cluster.catalog import PEAKS, peak_flops
from drumline.cluster.detect import detect, free_bytes


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA A10", 125e12),
        ("Tesla T4", 65e12),
        ("AMD EPYC", None),
    ],
)
def test_peaks_are_found_by_the_drivers_name(name: str, bf16: float | None) -> None:
    assert peak_flops(name, "bf16") == bf16
    assert (peak_flops(name, "fp32") or 0) <= (bf16 or 0)


def test_half_precision_is_never_slower() -> None:
    assert all(half >= full > 0 for half, full in PEAKS.values())


def test_this_machine() -> None:
    machine = detect()
    assert 1 <= machine.cores <= (os.cpu_count() or 1) and machine.memory_bytes > 2**28
    assert (machine.device == "cuda") == bool(machine.devices)


def test_hidden_gpus_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().device == "cpu"


def test_free_space_of_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
