"""Check what DeepSpeed requires of this machine before any rank starts.

DeepSpeed's helper for NVMe is compiled here, while no rank waits.
"""

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

from drumline.engine.strategies.zero.config import Offload
from drumline.errors import EnvironmentFault
from drumline.foreign import require_package
from drumline.system.process import run_module

HELPER = "async_io"
MARKER = "drumline.built"
COMPILING = "compiling DeepSpeed's helper for NVMe, once, about two minutes"
# Seconds that may pass between torch's lock and the ninja that it starts.
LOCK_SECONDS = 30.0


def require(
    offloads: dict[str, Offload], on_progress: Callable[[str, int, int | None], None]
) -> None:
    """Raise EnvironmentFault for what is missing.

    `offloads`: key of the YAML → how it offloads. `on_progress`: takes a message, the number of
    things done, and their total.
    """
    require_package("deepspeed", "strategy", "pip install deepspeed ninja")
    on_disk = {where: offload for where, offload in offloads.items() if offload.kind == "nvme"}
    if not on_disk:
        return
    if ctypes.util.find_library("aio") is None:
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
    compile_helper(on_progress)


def compile_helper(on_progress: Callable[[str, int, int | None], None]) -> None:
    """Compile DeepSpeed's asynchronous I/O, unless it was compiled with the installed torch and DeepSpeed.

    One launcher compiles at a time. Raises EnvironmentFault.
    """
    _require_compilers()
    from drumline.vendor.torch import get_build_directory

    # Where torch keeps what it compiles.
    root = Path(get_build_directory("drumline", verbose=False)).parent
    root.mkdir(parents=True, exist_ok=True)
    if _is_newest(root):
        # A rank that was killed while it loaded the helper leaves a lock, too.
        _remove_old_locks(root)
        return
    with (root / "drumline.lock").open("w") as lock:
        on_progress(COMPILING, 0, 1)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_old_locks(root)
        # The compiling process holds the lock too, so that it outlives a launcher that is killed.
        code, out, err = run_module(
            "drumline.engine.strategies.zero.engine", pass_fds=[lock.fileno()]
        )
        if code != 0:
            reason = f"exit code {code}"
            for line in (out + err).splitlines():
                if "rror" in line:
                    reason = line.strip()
            raise EnvironmentFault(
                f"DeepSpeed's helper for NVMe cannot be compiled: {reason}",
                where=str(root / HELPER),
                fix="fix that, or offload to cpu",
            )
        (root / MARKER).write_text(_origins())
        on_progress(COMPILING, 1, 1)


def _require_compilers() -> None:
    """Raise EnvironmentFault if ninja or a C++ compiler is missing."""
    # pip installs ninja beside the interpreter, in a folder that PATH need not contain.
    scripts = Path(sys.executable).parent
    if shutil.which("ninja") is None and (scripts / "ninja").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{scripts}"
    compiler = os.environ.get("CXX", "c++")
    fixes = {"ninja": "pip install ninja"}
    fixes[compiler] = "install a C++ compiler, such as g++"
    for tool, fix in fixes.items():
        if shutil.which(tool) is None:
            raise EnvironmentFault(
                f"DeepSpeed compiles a helper for NVMe, and {tool} is missing",
                where="strategy",
                fix=fix,
            )


def _is_newest(root: Path) -> bool:
    """Return whether a launcher saw the helper finished with the installed torch and DeepSpeed.

    Otherwise each rank would compile it again while the rest wait, and a rank that is killed would
    leave a lock.
    """
    marker = root / MARKER
    library = root / HELPER / f"{HELPER}.so"
    if not library.exists() or not marker.exists() or marker.read_text() != _origins():
        return False
    finished = marker.stat().st_mtime
    return all(Path(origin).stat().st_mtime <= finished for origin in _origins().splitlines())


def _origins() -> str:
    """Return the paths of torch and DeepSpeed, a line each."""
    origins = []
    for name in ("torch", "deepspeed"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            origins.append(spec.origin)
    return "\n".join(origins)


def _remove_old_locks(root: Path) -> None:
    """Remove the locks that killed builds have left: torch would wait for them for ever.

    A build that is running has ninja in its folder.
    """
    import psutil

    building = set()
    for process in psutil.process_iter():
        try:
            building.add(Path(process.cwd()))
        except psutil.Error:
            # It has ended, or belongs to another user.
            continue
    for lock in root.glob("*/lock"):
        if lock.parent in building:
            continue
        age = time.time() - lock.stat().st_mtime
        if age > LOCK_SECONDS:
            lock.unlink(missing_ok=True)
