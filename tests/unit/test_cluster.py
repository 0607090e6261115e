"""What a machine is seen to have, and what its devices can do at most."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.hardware.catalog import peak_flops
from drumline.hardware.detect import Groups, detect, free_bytes


def test_this_machine() -> None:
    machine = detect()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 2**28 < machine.memory_bytes < 2**50
    assert machine.device == ("cuda" if machine.devices else "cpu")
    assert machine.devices or not machine.bf16


def test_a_system_without_affinity_and_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS: all cores, all memory."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Groups, "from_this_process", lambda: Groups(Path("/none"), ""))
    assert detect().cores == os.cpu_count()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_there_and_not_asked_for(hidden: str) -> None:
    code = "import sys; from drumline.hardware.detect import detect; assert detect().device == 'cpu'; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": hidden},
        check=True,
        timeout=60,
    )


# name → (the group's listing, files below the mount, cores, bytes)
GROUPS: dict[str, tuple[str, dict[str, str], float, float]] = {
    "v2, limited": (
        "0::/job\n",
        {"job/cpu.max": "150000 100000\n", "job/memory.max": "1000\n"},
        1.5,
        1000,
    ),
    "v2, limited above": (
        "0::/a/b\n",
        {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/memory.max": "max"},
        2.0,
        math.inf,
    ),
    "v2, limits only in the mount's root": (
        "0::/../elsewhere\n",
        {"cpu.max": "50000 100000", "memory.max": "7"},
        0.5,
        7,
    ),
    "v1": (
        "3:cpu,cpuacct:/job\n2:memory:/job\n1:name=systemd:/\n",
        {
            "cpu/job/cpu.cfs_quota_us": "300000",
            "cpu/job/cpu.cfs_period_us": "100000",
            "memory/job/memory.limit_in_bytes": "99",
        },
        3.0,
        99,
    ),
    "v1, unlimited": (
        "3:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        math.inf,
        math.inf,
    ),
    "no groups": ("", {}, math.inf, math.inf),
}


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_control_groups(name: str, tmp_path: Path) -> None:
    listing, files, cores, bytes_ = GROUPS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    groups = Groups(tmp_path, listing)
    assert (groups.cores(), groups.memory_bytes()) == (cores, bytes_)


def test_free_space_below_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert 0 < free_bytes(tmp_path / "a" / "b") < 2**60


# (as nvidia-smi and torch write it, precision, TFLOP/s)
@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "fp32", 104.8),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H200", "fp8", 1978.8),
        ("Intel(R) Xeon(R) Processor", "fp32", None),
    ],
)
def test_peaks_by_the_driver_s_name(device: str, precision: str, tera: float | None) -> None:
    assert peak_flops(device, precision) == (None if tera is None else tera * 1e12)
