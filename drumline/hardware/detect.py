"""The devices, cores and memory of this machine. torch is imported only where there is a GPU driver, so a laptop does not wait for it."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

# NVIDIA, NVIDIA in a container, AMD, WSL.
DRIVERS = (
    "/dev/nvidia0",
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dxg",
)
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Device:
    """An accelerator: the name by its driver, and its memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """A host. `cores` and `memory_bytes` are what this process may use, by its affinity and its control groups."""

    devices: list[Device]
    cores: int
    memory_bytes: int
    device: Literal["cpu", "cuda"]
    bf16: bool
    mps: bool = False  # Apple silicon, whose GPU shares this memory

    def without_devices(self) -> Machine:
        """The same host for a run that computes on its processor."""
        return replace(self, devices=[], device="cpu", bf16=False)


def detect() -> Machine:
    """This machine, without GPUs that CUDA_VISIBLE_DEVICES hides."""
    devices, bf16 = _gpus()
    groups = Groups.of_this_process()
    cores = min(usable_cores(), groups.cores())
    memory = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), groups.memory_bytes())
    return Machine(
        devices,
        max(1, math.ceil(cores)),
        int(memory),
        "cuda" if devices else "cpu",
        bf16,
        apple_silicon(),
    )


def apple_silicon() -> bool:
    return sys.platform == "darwin" and os.uname().machine == "arm64"


def usable_cores() -> int:
    """Cores that this process may run on; all of them where the system keeps no affinity, as macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def likely_gpus() -> int:
    """How many GPUs there seem to be by NVIDIA's files and CUDA_VISIBLE_DEVICES, without asking torch, which takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([*Path("/dev").glob("nvidia[0-9]*")])
    return (
        there
        if visible is None
        else min(there, len([name for name in visible.split(",") if name not in ("", "-1")]))
    )


def hide_gpus() -> None:
    """Let this process and those that it starts see no GPU: torch's optimizers would take a context of CUDA, some hundred MB of a GPU, on
    a run that computes on the processor. Without effect where CUDA has been asked for its devices."""
    for name in HIDING:
        os.environ[name] = ""


def _gpus() -> tuple[list[Device], bool]:
    hidden = any(os.environ.get(name) in ("", "-1") for name in HIDING)
    if hidden or not (
        any(Path(driver).exists() for driver in DRIVERS) or shutil.which("nvidia-smi")
    ):
        return [], False
    import torch

    if not torch.cuda.is_available():
        return [], False
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Device(p.name, p.total_memory) for p in properties], torch.cuda.is_bf16_supported(
        including_emulation=False
    )


@dataclass(frozen=True)
class Groups:
    """The control groups that a process is in, version 1 or 2: a limit holds for a group and all below it, so the smallest one counts.
    `root` is where they are mounted, `listing` is the text of /proc/self/cgroup: lines of id:controllers:path."""

    root: Path
    listing: str

    @classmethod
    def of_this_process(cls) -> Groups:
        listing = Path("/proc/self/cgroup")
        return cls(Path("/sys/fs/cgroup"), listing.read_text() if listing.exists() else "")

    def cores(self) -> float:
        """Cores' worth of time; inf where there is no limit."""
        quotas = [math.inf]
        for folder in self._folders("cpu"):
            match _numbers(folder / "cpu.max") or _numbers(folder / "cpu.cfs_quota_us") + _numbers(
                folder / "cpu.cfs_period_us"
            ):
                case [quota, period] if quota > 0:  # version 1 writes -1 for no limit
                    quotas.append(quota / period)
        return min(quotas)

    def memory_bytes(self) -> float:
        """Bytes of memory; inf where there is no limit."""
        limits = [math.inf]
        for folder in self._folders("memory"):
            limits += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
        return min(limits)

    def oom_kills(self) -> int | None:
        """Processes of this group that the kernel has killed so far because memory ran out; None where nothing counts them."""
        counts = []
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                try:
                    lines = (folder / name).read_text().splitlines()
                except OSError:
                    continue
                counts += [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        return max(counts, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's own folder and those above it. Inside a container they may be missing, and the limits lie in the mount's root."""
        for line in self.listing.splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = self.root / controller if controllers else self.root
            group = mount / path.lstrip("/")
            yield from (
                folder for folder in (group, *group.parents) if folder.is_relative_to(mount)
            )


def _numbers(path: Path) -> list[float]:
    """The numbers in a control file, `max` as inf; none where there is no such file."""
    try:
        return [math.inf if word == "max" else float(word) for word in path.read_text().split()]
    except OSError:
        return []


def free_bytes(path: Path) -> int:
    """Bytes that may still be written below `path`, or below the nearest folder of it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def cache_dir() -> Path:
    """The folder of files that can be deleted and made again: XDG_CACHE_HOME/drumline, by default ~/.cache/drumline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drumline"
