"""DeepSpeed's compiled helpers, made before any rank starts: none of them compiles while the others wait, and what is missing is told at once."""

from __future__ import annotations

import ctypes.util
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from drumline.config.strategies import Zero3Strategy, ZeroStrategy
from drumline.errors import EnvironmentFault
from drumline.plan.plan import Plan

A_MOMENT = 30.0  # seconds between torch's lock and its ninja, at most
COMPILING = "compiling DeepSpeed's helper {}, once, about a minute"


def require_deepspeed(plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
    """Everything a plan asks of DeepSpeed and this machine. Raises EnvironmentFault. Nothing where DeepSpeed is not the engine."""
    strategy = plan.config.strategy
    if not isinstance(strategy, ZeroStrategy):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise EnvironmentFault("the package deepspeed is missing", where="strategy", fix="pip install 'drumline[deepspeed]'")
    offloads = {"strategy.offload_optimizer": strategy.offload_optimizer}
    if isinstance(strategy, Zero3Strategy):
        offloads["strategy.offload_parameters"] = strategy.offload_parameters
    for where, offload in offloads.items():
        if offload.kind == "nvme":
            _require_disk(Path(offload.path or "."), where)
    helpers = ["cpu_adam"] * (strategy.offload_optimizer.kind != "none" and plan.config.optimizer.kind == "adamw")
    helpers += ["async_io"] * (plan.offload == "nvme")
    if helpers:
        compile_helpers(helpers, on_progress)


def compile_helpers(helpers: list[str], on_progress: Callable[[str, int, int | None], None]) -> None:
    """cpu_adam, async_io: compiled where they are not yet. One launcher at a time. Raises EnvironmentFault."""
    _require_compiler()
    root = _build_root()
    root.mkdir(parents=True, exist_ok=True)
    missing = [name for name in helpers if not (root / name / f"{name}.so").exists()]
    if not missing:
        return
    with (root / "drumline.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _clear(root)
        for name in missing:
            on_progress(COMPILING.format(name), 0, 1)
            command = [sys.executable, "-m", "drumline.strategies.deepspeed", name]
            # It holds our lock too, so that the lock outlives a launcher that is killed.
            made = subprocess.run(command, capture_output=True, text=True, pass_fds=(lock.fileno(),))
            if made.returncode != 0:
                said = [line.strip() for line in (made.stdout + made.stderr).splitlines() if "rror" in line]
                raise EnvironmentFault(
                    f"DeepSpeed's helper {name} cannot be compiled: {said[-1] if said else f'exit code {made.returncode}'}",
                    where=str(root / name),
                    fix="mend that, or leave offloading out",
                )
            on_progress(COMPILING.format(name), 1, 1)


def _clear(root: Path) -> None:
    """Take away the locks that killed builds have left: torch would wait for them for ever. A build that lives has ninja in its folder."""
    import psutil

    building = set()
    for process in psutil.process_iter():
        try:
            building.add(Path(process.cwd()))
        except psutil.Error:  # it has gone, or is somebody else's
            continue
    for left in root.glob("*/lock"):
        if left.parent not in building and time.time() - left.stat().st_mtime > A_MOMENT:
            left.unlink(missing_ok=True)


def _require_compiler() -> None:
    beside = Path(sys.executable).parent  # pip puts ninja there, and PATH need not know
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"
    for tool, fix in (("ninja", "pip install ninja"), (os.environ.get("CXX", "c++"), "install a C++ compiler, such as g++")):
        if shutil.which(tool) is None:
            raise EnvironmentFault(f"DeepSpeed compiles a helper for offloading, and {tool} is missing", where="strategy", fix=fix)


def _require_disk(path: Path, where: str) -> None:
    if ctypes.util.find_library("aio") is None:
        raise EnvironmentFault("NVMe offload needs libaio", where=where, fix="apt-get install libaio-dev, or offload to cpu")
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise EnvironmentFault(f"{path} is no folder that can be written to", where=f"{where}.path", fix="name one on the NVMe disk")


def _build_root() -> Path:
    """Where torch keeps what it compiles."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("drumline", verbose=False)).parent
