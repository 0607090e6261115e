"""What DeepSpeed requires of this machine, checked before any rank starts; its helper for NVMe is compiled here, while no rank waits."""

from __future__ import annotations

import ctypes.util
import fcntl
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from drumline.core.process import run_module
from drumline.errors import EnvironmentFault
from drumline.foreign import require_package
from drumline.strategies.zero.config import Offload

HELPER, MARKER = "async_io", "drumline.built"
COMPILING = "compiling DeepSpeed's helper for NVMe, once, about two minutes"
A_MOMENT = 30.0  # seconds between torch's lock and its ninja, at most


def require(
    offloads: dict[str, Offload], on_progress: Callable[[str, int, int | None], None]
) -> None:
    """Raises EnvironmentFault for what is missing. `offloads`: where each is set in the YAML, and how."""
    require_package("deepspeed", "strategy", "pip install deepspeed ninja")
    on_disk = {where: offload for where, offload in offloads.items() if offload.kind == "nvme"}
    if on_disk and ctypes.util.find_library("aio") is None:
        fix = "apt-get install libaio-dev, or offload to cpu"
        raise EnvironmentFault("NVMe offload needs libaio", where=next(iter(on_disk)), fix=fix)
    for where, offload in on_disk.items():
        path = Path(offload.path or ".")
        if not path.is_dir() or not os.access(path, os.W_OK):
            raise EnvironmentFault(
                f"{path} is no folder that can be written to",
                where=f"{where}.path",
                fix="name one on the NVMe disk",
            )
    if on_disk:
        compile_helper(on_progress)


def compile_helper(on_progress: Callable[[str, int, int | None], None]) -> None:
    """Compile DeepSpeed's asynchronous I/O where that has not been done with the torch and DeepSpeed there are, one launcher at a time.

    Raises EnvironmentFault.
    """
    beside = Path(sys.executable).parent  # pip puts ninja there, and PATH need not know
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"
    for tool, fix in (
        ("ninja", "pip install ninja"),
        (os.environ.get("CXX", "c++"), "install a C++ compiler, such as g++"),
    ):
        if shutil.which(tool) is None:
            raise EnvironmentFault(
                f"DeepSpeed compiles a helper for NVMe, and {tool} is missing",
                where="strategy",
                fix=fix,
            )
    from drumline.vendor.torch import get_build_directory

    root = Path(
        get_build_directory("drumline", verbose=False)
    ).parent  # where torch keeps what it compiles
    root.mkdir(parents=True, exist_ok=True)
    if _is_newest(root):
        _clear(root)  # a rank that was killed while it read what is built leaves one, too
        return
    with (root / "drumline.lock").open("w") as lock:
        on_progress(COMPILING, 0, 1)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _clear(root)
        # It holds our lock too, so that the lock outlives a launcher that is killed.
        code, out, err = run_module("drumline.strategies.zero.engine", keeps=[lock.fileno()])
        if code != 0:
            errors = [line.strip() for line in (out + err).splitlines() if "rror" in line]
            what = f"DeepSpeed's helper for NVMe cannot be compiled: {errors[-1] if errors else f'exit code {code}'}"
            raise EnvironmentFault(
                what, where=str(root / HELPER), fix="mend that, or offload to cpu"
            )
        (root / MARKER).write_text(_origins())
        on_progress(COMPILING, 1, 1)


def _is_newest(root: Path) -> bool:
    """Whether a launcher saw it finished with the torch and DeepSpeed there are. Else each rank would compile it again, while the others
    wait, and one that is killed leaves a lock."""
    marker = root / MARKER
    if (
        not (root / HELPER / f"{HELPER}.so").exists()
        or not marker.exists()
        or marker.read_text() != _origins()
    ):
        return False
    return all(
        Path(origin).stat().st_mtime <= marker.stat().st_mtime for origin in _origins().splitlines()
    )


def _origins() -> str:
    """Where torch and DeepSpeed are, a line each."""
    return "\n".join(
        spec.origin
        for name in ("torch", "deepspeed")
        if (spec := importlib.util.find_spec(name)) and spec.origin
    )


def _clear(root: Path) -> None:
    """Take away the locks that killed builds have left: torch would wait for them for ever. A build that lives has ninja in its folder."""
    import psutil

    building = set()
    for process in psutil.process_iter():
        try:
            building.add(Path(process.cwd()))
        except psutil.Error:  # it has gone, or belongs to another user
            continue
    for left in root.glob("*/lock"):
        if left.parent not in building and time.time() - left.stat().st_mtime > A_MOMENT:
            left.unlink(missing_ok=True)
