"""The devices, cores and memory of this machine.

torch is imported only if there is a GPU driver, so a laptop does not wait for it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

# Files that a GPU driver makes: NVIDIA's, NVIDIA's in a container, AMD's, and that of WSL.
DRIVERS = (
    "/dev/nvidia0",
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dxg",
)
# Variables that list the GPUs that a process may use, and their values that hide all GPUs.
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NO_DEVICES = ("", "-1")


@dataclass(frozen=True)
class Device:
    """An accelerator, with the name that its driver gives and its memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """A host, or the part of it that this process may use.

    `cores`, `memory_bytes`: what its affinity and its control groups leave to this process.
    `device`: what a run computes on by default. `bf16`: whether the GPUs compute in bfloat16.
    """

    devices: list[Device]
    cores: int
    memory_bytes: int
    device: Literal["cpu", "cuda"]
    bf16: bool
    # Whether it has Apple silicon, whose GPU shares this memory.
    mps: bool = False

    def without_devices(self) -> Machine:
        """Return this host as a run on its processor sees it: without devices."""
        return replace(self, devices=[], device="cpu", bf16=False)


def detect() -> Machine:
    """Return this machine, without GPUs that the variables hide."""
    devices, bf16 = _gpus()
    groups = Groups.from_this_process()
    cores = min(usable_cores(), groups.cores())
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        devices=devices,
        cores=max(1, math.ceil(cores)),
        memory_bytes=int(min(installed, groups.memory_bytes())),
        device="cuda" if devices else "cpu",
        bf16=bf16,
        mps=apple_silicon(),
    )


def apple_silicon() -> bool:
    """Return whether this is a Mac with Apple's own processor, whose GPU shares its memory."""
    return sys.platform == "darwin" and os.uname().machine == "arm64"


def usable_cores() -> int:
    """Return the cores that this process may run on.

    They are all cores if the system, as macOS, has no affinity of processes.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def likely_gpus() -> int:
    """Return how many GPUs there seem to be, by NVIDIA's files and CUDA_VISIBLE_DEVICES.

    torch would know for certain, but importing it takes seconds.
    """
    installed = len(list(Path("/dev").glob("nvidia[0-9]*")))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return installed
    visible = [name for name in listed.split(",") if name not in NO_DEVICES]
    return min(installed, len(visible))


def hide_gpus() -> None:
    """Hide all GPUs from this process and from those that it starts.

    torch's optimizers would otherwise open a CUDA context, some hundred MB of a GPU, in a run that
    computes on the processor. It has no effect once CUDA has been asked for its devices.
    """
    for name in VISIBILITY_VARIABLES:
        os.environ[name] = ""


def _gpus() -> tuple[list[Device], bool]:
    """Return the visible GPUs, and whether they compute in bf16."""
    are_hidden = any(os.environ.get(name) in NO_DEVICES for name in VISIBILITY_VARIABLES)
    if are_hidden or not _has_driver():
        return [], False
    import torch

    if not torch.cuda.is_available():
        return [], False
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(Device(properties.name, properties.total_memory))
    return devices, torch.cuda.is_bf16_supported(including_emulation=False)


def _has_driver() -> bool:
    if any(Path(driver).exists() for driver in DRIVERS):
        return True
    return shutil.which("nvidia-smi") is not None


@dataclass(frozen=True)
class Groups:
    """The control groups (cgroups) that a process is in, version 1 or 2.

    A limit holds for a group and all groups below it, so the smallest one counts.

    `root`: the folder that they are mounted at. `listing`: the text of /proc/self/cgroup, whose
    lines are id:controllers:path.
    """

    root: Path
    listing: str

    @classmethod
    def from_this_process(cls) -> Groups:
        """Return the groups of this process; none if the kernel has no control groups."""
        listing = Path("/proc/self/cgroup")
        text = listing.read_text() if listing.exists() else ""
        return cls(Path("/sys/fs/cgroup"), text)

    def cores(self) -> float:
        """Return the limit of processor time as a number of cores; inf without one."""
        quotas = [math.inf]
        for folder in self._folders("cpu"):
            numbers = _numbers(folder / "cpu.max")
            if not numbers:
                # Version 1 has two files.
                numbers = _numbers(folder / "cpu.cfs_quota_us")
                numbers += _numbers(folder / "cpu.cfs_period_us")
            if len(numbers) == 2:
                quota, period = numbers
                # Version 1 writes -1 for no limit.
                if quota > 0:
                    quotas.append(quota / period)
        return min(quotas)

    def memory_bytes(self) -> float:
        """Return the limit of memory in bytes; inf without one."""
        limits = [math.inf]
        for folder in self._folders("memory"):
            limits += _numbers(folder / "memory.max")
            limits += _numbers(folder / "memory.limit_in_bytes")
        return min(limits)

    def oom_kill_count(self) -> int | None:
        """Return how many processes of this group the kernel has killed because memory ran out.

        None if nothing counts them. The groups above count processes of other people, too: theirs
        is only read if the group's own folder is missing, as it may be in a container.
        """
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                try:
                    lines = (folder / name).read_text().splitlines()
                except OSError:
                    continue
                for line in lines:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the group's own folder and those above it, up to the mount.

        Inside a container they may be missing, and the limits lie in the mount's root.
        """
        for line in self.listing.splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = self.root
            if controllers:
                # Version 1 mounts each controller by itself.
                mount = self.root / controller
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield folder


def _numbers(path: Path) -> list[float]:
    """Return the numbers in a control file, `max` as inf; none if there is no such file."""
    try:
        entries = path.read_text().split()
    except OSError:
        return []
    return [math.inf if entry == "max" else float(entry) for entry in entries]


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written below `path`.

    If `path` does not exist yet, the nearest folder around it counts.
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def cache_dir() -> Path:
    """Return the folder of files that can be deleted and made again.

    It is XDG_CACHE_HOME/drumline, by default ~/.cache/drumline.
    """
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "drumline"
