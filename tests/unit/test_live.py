"""Bytes of live tensors: a computation whose peak is known by hand, and a real model in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from drumline.telemetry.memory_tracker import LiveBytes, MemoryStats
from drumline.telemetry.traffic import CommunicatedBytes

KB = 1000 * 4  # bytes of a vector of 1000


@pytest.mark.slow
def test_a_peak_known_by_hand() -> None:
    x, w = torch.zeros(1000), torch.zeros(1000, requires_grad=True)
    live = LiveBytes()
    with CommunicatedBytes(), live:
        base = live.base
        assert base >= 2 * KB
        y = x * w
        z = y.sin()  # keeps y
        total = z.sum()
        assert live.current - base == 2 * KB + 4
        del y, z
        assert live.current - base == KB + 4  # autograd still has y
        total.backward()
    assert live.current - base == KB + 4  # the gradient, and the sum
    # Forward at its end: y, z and the sum. Backward: besides y and the sum its own gradient 1, cos(y), the product, …
    assert live.peaks["forward"] - base == 2 * KB + 4
    assert live.peaks["backward"] - base == 3 * KB + 8
    assert live.peak == live.peaks["backward"] == max(live.peaks.values())
    with live:
        live.phase = "step"
        grown = torch.cat([x] * 10)
        assert live.peak - base == live.peaks["step"] - base == 11 * KB + 4
        grown.untyped_storage().resize_(0)  # as FSDP2 frees what it gathered
        assert live.current - base == KB + 4


def test_what_nobody_showed_was_there_before() -> None:
    """C++ holds tensors that Python's garbage collector does not know. They count from the start when they show up, if they stay."""
    late, kernels = torch.zeros(1000), [torch.zeros(7000)]
    live = LiveBytes()
    live._has_searched = True  # as if it had found nothing
    with live:
        torch.zeros(500)
        late.add_(1)
        kernels.pop().add_(1)
    assert (live.base, live.peak, live.current) == (KB, KB + KB // 2, KB)


def test_a_tuple_that_another_thread_fills_is_left_alone() -> None:
    """CPython raises SystemError where a tuple grows to which anybody else has a reference."""
    filled: list[tuple[list[int], ...]] = []
    has_begun = threading.Event()
    done = threading.Event()

    def numbers() -> Iterator[list[int]]:
        while not done.is_set():
            has_begun.set()
            time.sleep(1e-4)
            yield []

    thread = threading.Thread(target=lambda: filled.append(tuple(numbers())))
    thread.start()
    has_begun.wait()
    try:
        for _ in range(5):
            with LiveBytes():
                pass
    finally:
        done.set()
        thread.join()

    assert filled, "the thread raised an error"


def test_views_and_aliases_count_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 250))
    stats = MemoryStats.from_tensors(
        [weight, weight.data, weight[0]], [weight.view(-1)], [torch.zeros(250), torch.zeros(())]
    )
    assert stats == MemoryStats(KB, 0, 1000)
    assert sum([MemoryStats(1, 2, 3), MemoryStats(1, 1, 1)], MemoryStats(0, 0, 0)) == MemoryStats(
        2, 3, 4
    )
