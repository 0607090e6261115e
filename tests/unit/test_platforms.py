"""Systems that are not Linux: Windows is refused, macOS trains by one process or more on its CPU, and by one on its GPU (experimental)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drumline.config.load import load
from drumline.dist.reduce import SumReducer
from drumline.engine.engine import sum_on_device
from drumline.engine.norms import global_norm
from drumline.errors import PlanError
from drumline.hardware.detect import detect
from drumline.plan.resolve import KnownModel, resolve
from tests.harness import ENV, events, write_config
from tests.tiny import tiny_model_dir

# What a Mac lacks of what Python has on Linux. psutil and torch ask for the platform as they are imported, and are those of Linux.
MAC = """
import sysconfig; sysconfig.get_config_vars()
import ctypes, ctypes.util, os, sys, time, asyncio, multiprocessing, subprocess, tempfile, psutil, torch, torch.distributed
for name in ("sched_getaffinity", "posix_fallocate", "posix_fadvise", "memfd_create", "pidfd_open", "eventfd", "setns", "unshare"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "darwin"

def hidden(path):
    # whether one of drumline's own modules asks for a path that macOS has not
    frame = sys._getframe(1)
    if not str(path).startswith(("/proc", "/sys", "/dev/shm")):
        return False
    while frame is not None and "/drumline/" not in frame.f_code.co_filename:
        if "/psutil/" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and arguments and hidden(arguments[0]):
        raise FileNotFoundError(2, "no such file on macOS", str(arguments[0]))

def stat(path, *more, really=os.stat, **options):
    if hidden(path):
        raise FileNotFoundError(2, "no such file on macOS", str(path))
    return really(path, *more, **options)

os.stat = stat
os.access = lambda path, mode, really=os.access, **options: not hidden(path) and really(path, mode, **options)
sys.addaudithook(refuse)
"""


@pytest.mark.claim("Windows is refused in one line, and MPS takes one process")
@pytest.mark.parametrize(
    "how", ["import drumline.cli", "import drumline", "import runpy; runpy.run_module('drumline')"]
)
def test_windows_is_refused_in_one_line(how: str) -> None:
    """Before anything that Windows lacks is imported."""
    gone = "import sys; sys.platform = 'win32'; sys.modules |= dict.fromkeys(('resource', 'fcntl', 'pwd', 'grp', 'termios'))"
    done = subprocess.run(
        [sys.executable, "-c", f"{gone}; {how}"],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ") and "WSL" in done.stderr and done.stderr.count("\n") == 1
    )


@pytest.mark.full
@pytest.mark.parametrize("nproc", [1, 2])
def test_macos_trains(tmp_path: Path, nproc: int) -> None:
    """A stand-in: Linux without /proc, /sys, /dev/shm and the calls that macOS lacks."""
    (tmp_path / "mac").mkdir()
    (tmp_path / "mac" / "sitecustomize.py").write_text(MAC)
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"steps": 3},
        strategy="ddp" if nproc > 1 else "single",
    )
    env = {
        **ENV,
        "PYTHONPATH": f"{tmp_path / 'mac'}:{ENV['PYTHONPATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for command in ("plan", "train", "doctor"):
        line = [
            sys.executable,
            "-m",
            "drumline",
            command,
            str(config),
            *[f"run.dir={tmp_path / 'run'}"] * (command != "doctor"),
        ]
        nproc_given = ["--nproc", str(nproc)] * (command == "train")
        done = subprocess.run(
            [*line, *nproc_given],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0 or command == "doctor", done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    assert len([event for event in events(tmp_path / "run") if event["kind"] == "step"]) == 3


def on_mps(folder: Path, world: int | None, **sections: object) -> None:
    config = write_config(folder, folder / "model", **sections)
    loaded = load(config, ["run.device=mps"]).config
    machine = replace(detect().without_devices(), mps=True)
    plan = resolve(
        loaded,
        run_dir="r",
        machine=machine,
        world_size=world,
        model=KnownModel(),
        data=None,
    )
    assert (plan.device_type, plan.device, plan.backend, plan.precision) == (
        "mps",
        "cpu",
        "gloo",
        "fp32",
    )


@pytest.mark.claim("Windows is refused in one line, and MPS takes one process")
def test_mps_takes_one_process(tmp_path: Path) -> None:
    on_mps(tmp_path, None, strategy="single")
    with pytest.raises(PlanError, match="mps × several processes"):
        on_mps(tmp_path, 2, strategy="ddp")
    with pytest.raises(PlanError, match="mps × what it has not been written for"):
        on_mps(tmp_path, 1, strategy="single", precision="bf16")
    with pytest.raises(PlanError, match="mps × what it has not been written for"):
        on_mps(tmp_path, 1, strategy="single", algorithm={"kind": "dpo"})
    if not detect().mps:
        with pytest.raises(PlanError, match="this is no Mac with Apple silicon"):
            resolve(
                load(write_config(tmp_path, tmp_path / "model"), ["run.device=mps"]).config,
                run_dir="r", machine=detect(), world_size=1, model=KnownModel(), data=None,
            )  # fmt: skip


def test_sums_of_mps_are_in_fp64_on_the_host() -> None:
    """MPS has no fp64. Its tensors are stood in for by those that have a device and no numbers."""
    with FakeTensorMode():
        parts = [torch.empty(3, 2, device="mps"), torch.empty(5, device="mps")]
        sums = sum_on_device(
            [
                {
                    "loss": torch.empty((), device="mps"),
                    "tokens": torch.empty((), device="mps", dtype=torch.int64),
                }
            ]
            * 2
        )
        norm = global_norm(parts, "mps")
        gathered = SumReducer(0, 1, "mps").start({**sums, "squares": norm.square()}, 1.0)
        made = [*sums.values(), norm, gathered.vector]
    assert all(tensor.device.type == "cpu" and tensor.dtype == torch.float64 for tensor in made)
