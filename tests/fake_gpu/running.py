"""Start ranks over the stand-in, and read what they leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from drumline.config.load import load
from drumline.hardware.detect import Device, Machine
from drumline.train.setup import Request
from tests.distributed.ranks import free_port
from tests.distributed.setups import claim
from tests.fake_gpu.environment import PYTHON, environment
from tests.harness import Finished

NEEDS_STAND_IN = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs the CUDA build of torch: make fake-gpu"
)
H100 = Device("NVIDIA H100 80GB HBM3", 85_014_609_920)


def machine(devices: int) -> Machine:
    """Return the host that plans are made for: what the stand-in shows, on cores enough."""
    return Machine([H100] * devices, cores=8, memory_bytes=2**36, device="cuda", bf16=True)


def claim_plan(path: Path, world_size: int, host: Machine | None) -> Path:
    """Return the plan, in a run folder of its own, of the run of a config. None: for this host."""
    return claim(Request(load(path, []), world_size=world_size, machine=host))


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    """A folder for NCCL's ranks to meet in, which is gone afterwards, also after a kill."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-fake-gpu-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(arguments: list[object], env: dict[str, str]) -> subprocess.Popen[str]:
    """Start Python over the stand-in, in a session of its own; output goes to files beside it."""
    out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
    process = subprocess.Popen(
        [str(PYTHON), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    process.stdout = out  # type: ignore[assignment]
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    process.stdout.seek(0)
    return process.stdout.read()


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def drumline(
    *arguments: object, devices: int = 1, timeout: float = 200, **settings: object
) -> Finished:
    """Run the command line over the stand-in to its end; `err` is empty, `out` has all output."""
    with shared_memory() as meeting:
        env = environment(devices, meeting, **settings)
        process = start(["-m", "drumline", *arguments], env)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            end(process)
            late = f"drumline {arguments} ran over {timeout} s"
            raise AssertionError(f"{late}:\n{said(process)}") from None
        output = said(process)
        return Finished(process.returncode, output, output)


def run_ranks(
    module: str,
    arguments: Sequence[object],
    world_size: int,
    timeout: float,
    devices_of_rank: int = 1,
    **settings: object,
) -> dict[int, str]:
    """Run `python -m module` on each rank. Return rank → output of those that failed."""
    with shared_memory() as meeting:
        env = environment(world_size * devices_of_rank, meeting, **settings)
        env["WORLD_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(world_size)
        env["MASTER_ADDR"] = "127.0.0.1"
        env["MASTER_PORT"] = str(free_port())
        ranks = []
        for rank in range(world_size):
            env["RANK"] = env["LOCAL_RANK"] = str(rank)
            ranks.append(start(["-m", module, *arguments], env))
        failed = _await_all(ranks, timeout)
        for process in ranks:
            end(process)
        outputs = {}
        for rank, why in failed.items():
            outputs[rank] = f"{why}:\n{said(ranks[rank])[-4000:]}"
        return outputs


def _await_all(ranks: list[subprocess.Popen[str]], timeout: float) -> dict[int, str]:
    """Wait until all ranks have ended, or until one has failed: the others then wait for it."""
    deadline = time.monotonic() + timeout
    while True:
        waiting = []
        failed = {}
        for rank, process in enumerate(ranks):
            code = process.poll()
            if code is None:
                waiting.append(rank)
            elif code != 0:
                failed[rank] = f"exited with {code}"
        if failed or not waiting:
            return failed
        if time.monotonic() > deadline:
            return dict.fromkeys(waiting, "ran out of time")
        time.sleep(0.1)
