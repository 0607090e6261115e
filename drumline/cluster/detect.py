"""What this machine has. torch is asked only where a GPU driver shows itself, so a laptop does not wait for it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Device:
    """One accelerator: the name its driver gives, and its memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """One host. `cores` and `memory_bytes` are what this process may use."""

    devices: list[Device]
    cores: int
    memory_bytes: int
    device: Literal["cpu", "cuda"]
    bf16: bool


def detect() -> Machine:
    """Look at the machine; GPUs that CUDA_VISIBLE_DEVICES hides are not there."""
    devices, bf16 = _gpus()
    return Machine(devices, len(os.sched_getaffinity(0)), _memory(), "cuda" if devices else "cpu", bf16)


def _gpus() -> tuple[list[Device], bool]:
    driver = any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")) or shutil.which("nvidia-smi")
    if not driver or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [], False
    import torch

    if not torch.cuda.is_available():
        return [], False
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Device(p.name, p.total_memory) for p in properties], torch.cuda.is_bf16_supported(including_emulation=False)


def _memory() -> int:
    """Bytes of RAM, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(total, int(text))
    return total


def free_bytes(path: Path) -> int:
    """Bytes that may still be written below `path`, or below the nearest folder of it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
