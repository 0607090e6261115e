"""Threads of a rank that touch torch begin on its GPU, not on the first one of the host."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.checkpoint.save import Checkpointer
from drumline.data.order import BatchStream, GlobalOrder
from drumline.models import attention
from drumline.plan.plan import BatchPlan
from drumline.rl.generate import DistributedSampling
from drumline.system.threads import bind_to_gpu
from tests.checkpoint_ranks import content


class Nothing:
    def generate(self, requests: list[Any], step: int) -> list[Any]:
        return []


def save(folder: Path) -> None:
    checkpointer = Checkpointer(folder, 2, True, "min", asynchronous=True)
    checkpointer.save(1, content(1), {}, None)
    assert checkpointer.wait()[0].error is None


def roll_out(folder: Path) -> None:
    assert DistributedSampling(Nothing(), [], 0, in_background=True).result == []


def collate(folder: Path) -> None:
    cache: Any = SimpleNamespace(lengths=np.ones(8, np.int64))
    batch = BatchPlan(global_samples=8, micro_batch=8, accumulation=1, eval_micro_batch=1)
    numbers = SimpleNamespace(weight=1, tokens=1)
    with BatchStream(
        cache, GlobalOrder(8, 0, False), batch, 0, 1, 0, 8, lambda ids: numbers, prefetch=1
    ) as batches:
        assert len(list(batches)) == 1


def try_a_kernel(folder: Path) -> None:
    functools.lru_cache(attention._works.__wrapped__)(
        "varlen", torch.device("cpu"), torch.float32, 8
    )


@pytest.mark.parametrize("work", [save, roll_out, collate, try_a_kernel])
def test_a_thread_begins_on_its_ranks_gpu(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that torch gets show it: this machine may have no GPU."""
    began: list[tuple[int, bool]] = []
    first = threading.main_thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda number: began.append((number, threading.current_thread() is first)),
    )
    work(tmp_path)
    assert began == [(3, False)]


def test_without_a_gpu_work_is_left_as_it_is() -> None:
    assert bind_to_gpu(save) is save or torch.cuda.is_initialized()
