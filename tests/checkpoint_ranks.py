"""Real ranks over gloo for the checkpoint tests, forked from a server that has torch imported: a rank starts in tenths of a second."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"]
FORKS.set_forkserver_preload(
    [
        *PRELOADED,
        "drumline.checkpoint.save",
        "drumline.checkpoint.load",
        "drumline.engine.native",
        "drumline.train.loop",
        "drumline.train.session",
        "pytest",
        "s3fs",
    ]
)

LIFETIME = 120  # seconds after which a rank is killed whatever happens
CUT_OFF = "Gloo connectFullMesh failed"
PR_SET_PDEATHSIG = 1


def content(step: int, shift: int = 0) -> dict[str, torch.Tensor]:
    """Tensors that a step determines: 24 of up to 40 thousand numbers, two dtypes, scalars, one of a single row."""
    tensors: dict[str, torch.Tensor] = {
        "model.single": torch.full((1, 7), float(step)),
        "optim.single.step": torch.tensor(float(step)),
    }
    for index in range(24):
        generator = torch.Generator().manual_seed(1000 * step + index + shift)
        tensors[f"model.{index}"] = torch.randn(101 + index, 300, generator=generator)
        tensors[f"optim.{index}.step"] = torch.tensor(float(step))
    tensors["model.half"] = torch.full((33,), step, dtype=torch.bfloat16)
    return tensors


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def start(
    world: int, work: Callable[..., Any], *arguments: object, lifetime: int = LIFETIME
) -> list[tuple[BaseProcess, multiprocessing.connection.Connection]]:
    """`work(*arguments)` on `world` ranks of a fresh process group (no group for a world of 0: one process alone)."""
    with tempfile.NamedTemporaryFile(prefix="drumline-store-", delete=True) as file:
        store = file.name
    # Killed ranks leave it behind.
    atexit.register(Path(store).unlink, missing_ok=True)
    started: list[tuple[BaseProcess, multiprocessing.connection.Connection]] = []
    for rank in range(max(world, 1)):
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=_rank,
            args=(rank, world, store, theirs, work, arguments, dict(os.environ), lifetime),
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def run(world: int, work: Callable[..., Any], *arguments: object, timeout: float = 60) -> list[Any]:
    """Each rank's result, in order. Raises AssertionError with the rank's traceback, or when a rank takes longer than `timeout` seconds.
    Where gloo's own handshake was cut off, before any work began, the ranks are started once more."""
    try:
        return _run(world, work, *arguments, timeout=timeout)
    except AssertionError as error:
        if CUT_OFF not in str(error):
            raise
    return _run(world, work, *arguments, timeout=timeout)


def _run(world: int, work: Callable[..., Any], *arguments: object, timeout: float) -> list[Any]:
    lifetime = max(LIFETIME, int(timeout) + 10)
    started = start(world, work, *arguments, lifetime=lifetime)
    try:
        results = []
        for rank, (_, pipe) in enumerate(started):
            assert pipe.poll(timeout), f"rank {rank} hangs"
            good, value = pipe.recv()
            assert good, f"rank {rank}:\n{value}"
            results.append(value)
        return results
    finally:
        end([process for process, _ in started])


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        process.kill()
        process.join()


def _rank(
    rank: int,
    world: int,
    store: str,
    pipe: Any,
    work: Callable[..., Any],
    arguments: tuple[object, ...],
    variables: dict[str, str],
    lifetime: int,
) -> None:
    os.environ.update(variables)  # the server may be older than some of them
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(lifetime)
    torch.set_num_threads(1)
    try:
        if world:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
        pipe.send((True, work(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    finally:
        if world and dist.is_initialized():
            dist.destroy_process_group()
