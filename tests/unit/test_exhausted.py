"""Memory that ran out: recognised by its words, held against the plan, and answered with plans that take the same steps with less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.hardware.detect import Groups, detect
from drumline.launch.postmortem import RankEnd, memory_exhaustion
from drumline.plan.estimate import Memory
from drumline.plan.out_of_memory import (
    Exhausted,
    corrected_limit,
    correction,
    is_out_of_memory,
    misestimate,
    verdict,
)
from drumline.planner.search.advice import describe_config_difference
from drumline.train.failure import MemoryWatch, describe_stack, parse_cuda_message
from tests.unit.test_loop import plan

GiB = 2**30
# As c10/cuda/CUDACachingAllocator.cpp of torch 2.13 puts it together.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.50 GiB is free. Including"
    " non-PyTorch memory, this process has 77.00 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 512.00"
    " MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting …"
)
CAPPED = CUDA.replace("Of the allocated", "8.00 GiB allowed; Of the allocated").replace(
    "70.00 GiB is alloc", "7.25 GiB is alloc"
)
CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


def planned(**more: Any) -> Memory:
    """20 GiB of states and 20 that come on top."""
    figures = {
        "parameters": 5 * GiB,
        "gradients": 5 * GiB,
        "optimizer": 10 * GiB,
        "activations": 14 * GiB,
        "logits": 4 * GiB,
    }
    return Memory(
        **{
            **figures,
            "buffers": 2 * GiB,
            "overhead": GiB,
            "peak": 40 * GiB,
            "reserved": 45 * GiB,
            "phase": "backward",
            **more,
        }
    )


STATS = {"parameters": 5 * GiB, "gradients": 5 * GiB, "optimizer": 10 * GiB}


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (MemoryError(), True),
        (RuntimeError(CPU), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_recognised(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_recognised_behind_another_error() -> None:
    try:
        try:
            raise RuntimeError(CPU)
        except RuntimeError as inner:
            raise ValueError("in a hook") from inner
    except ValueError as outer:
        assert is_out_of_memory(outer)


def test_what_was_done_is_read_from_the_stack() -> None:
    def forward_backward() -> None:
        _engine_run_backward()

    def _engine_run_backward() -> None:
        raise MemoryError

    try:
        forward_backward()
    except MemoryError as error:
        assert describe_stack(error.__traceback__) == "backward"


def test_figures_of_cudas_message() -> None:
    assert parse_cuda_message(CUDA) == {
        "requested": 2 * GiB,
        "allocated": 70 * GiB,
        "reserved": round(70.5 * GiB),
        "room": 72 * GiB,
    }
    assert parse_cuda_message(CAPPED)["room"] == 8 * GiB
    assert parse_cuda_message("CUDA error: out of memory") == {}


@pytest.mark.parametrize(
    ("out", "category", "by"),
    [
        (
            Exhausted(
                rank=0, during="backward", allocated=44 * GiB, requested=2 * GiB, memory_stats=STATS
            ),
            "activations",
            6 * GiB,
        ),
        (
            Exhausted(
                rank=0, during="the loss", allocated=44 * GiB, requested=2 * GiB, memory_stats=STATS
            ),
            "logits",
            6 * GiB,
        ),
        (
            Exhausted(
                rank=0,
                during="the optimizer's step",
                allocated=44 * GiB,
                memory_stats=STATS | {"optimizer": 20 * GiB},
            ),
            "optimizer",
            10 * GiB,
        ),
        (
            Exhausted(rank=0, during="loading", allocated=41 * GiB, requested=GiB),
            "parameters",
            2 * GiB,
        ),
        (
            Exhausted(
                rank=0,
                during="backward",
                allocated=30 * GiB,
                requested=2 * GiB,
                memory_stats=STATS,
                room=31 * GiB,
            ),
            None,
            0,
        ),
        (Exhausted(rank=0, during="", killed=True), None, 0),
    ],
)
def test_which_line_was_misestimate(out: Exhausted, category: str | None, by: int) -> None:
    found = misestimate(out, planned())
    assert (found and found.category, found.found - found.planned if found else 0) == (category, by)


def test_a_plan_that_was_right_says_that_there_is_too_little() -> None:
    out = Exhausted(
        rank=0,
        during="backward",
        allocated=30 * GiB,
        requested=2 * GiB,
        memory_stats=STATS,
        room=31 * GiB,
    )
    assert (
        verdict(out, planned())
        == "the plan predicted 40.00 GiB, more than there is room for; most of it activations, 14.00 GiB"
    )
    assert correction(out, planned()) == 1.0
    assert corrected_limit(out, planned(), 80 * GiB) == 32 * GiB


def test_what_the_plan_was_short_of_makes_the_limit_smaller() -> None:
    out = Exhausted(
        rank=0,
        during="backward",
        allocated=48 * GiB,
        requested=12 * GiB,
        memory_stats=STATS,
        room=59 * GiB,
    )
    assert correction(out, planned()) == 1.5
    assert corrected_limit(out, planned(), 80 * GiB) == 40 * GiB
    fragmented = Exhausted(
        rank=0,
        during="backward",
        allocated=30 * GiB,
        reserved=86 * GiB,
        requested=2 * GiB,
        room=87 * GiB,
    )
    assert correction(fragmented, planned()) == 2.0


def test_a_kill_counts_where_the_kernel_counts_it(tmp_path: Path) -> None:
    killed = RankEnd(1, -9, None, Path("/nowhere"), kills=(3, 4))
    told = memory_exhaustion(killed)
    assert told is not None and told.killed and told.rank == 1
    assert (
        memory_exhaustion(replace(killed, kills=(3, 3))) is None
        and memory_exhaustion(replace(killed, kills=(None, None))) is None
    )
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 5\noom_kill 2\n")
    assert Groups(tmp_path, "0::/job\n").oom_kill_count() == 2
    (tmp_path / "memory.events").write_text("oom_kill 7\n")
    assert Groups(tmp_path, "0::/job\n").oom_kill_count() == 2, "kills of other groups do not count"
    (tmp_path / "memory.events").unlink()
    assert Groups(tmp_path, "0::/elsewhere\n").oom_kill_count() is None


def test_changes_are_keys_of_the_yaml() -> None:
    old = Config.model_validate(
        {
            "data": {"train": [{"kind": "file", "path": "x"}]},
            "batch": {"micro_batch": 8},
            "strategy": "ddp",
        }
    )
    new = Config.model_validate(
        {
            "data": {"train": [{"kind": "file", "path": "x"}]},
            "batch": {"micro_batch": 2, "global_samples": 8},
            "strategy": {"kind": "fsdp2", "tp": 2},
            "memory": {"activation_checkpointing": "full"},
        }
    )
    assert describe_config_difference(old, new) == (
        "strategy: {kind: fsdp2, tp: 2}, batch: {global_samples: 8, micro_batch: 2}, memory: {activation_checkpointing: full}"
    )


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two hosts: half of a host each."""
    watch = MemoryWatch(plan(tmp_path).model_copy(update={"mesh": Mesh(shard=4)}), 0)
    rooms = []
    for ranks in (2, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        rooms.append(watch.measure(MemoryError()).room)
    assert rooms[0] - rooms[1] == pytest.approx(detect().memory_bytes / 4, rel=1e-3)
