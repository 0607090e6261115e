"""Joining and leaving: how long groups wait, which GPU is a rank's, and a start that no other start
is taken for."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from drumline.dist.start import RankInfo, _agree_on_start, gpu
from drumline.errors import EnvironmentFault
from tests.distributed.ranks import start_ranks
from tests.distributed.test_launch_join import end
from tests.faults.live import kill
from tests.forks import Forked
from tests.harness import ROOT


def ranks(how: str) -> list[Forked]:
    return start_ranks("tests.distributed.starting_worker", how, cwd=ROOT)


def test_every_group_has_the_timeout_of_the_config() -> None:
    for process in ranks("timeouts"):
        code, said = end(process)
        assert code == 0, said
        assert set(said.split()[-7:]) == {"41.0"}, said


def test_the_limit_of_collectives_follows_what_the_ranks_do() -> None:
    outputs = []
    for process in ranks("phases"):
        code, said = end(process)
        assert code == 0, said
        assert "300.0 100.0 150.0 600.0 600.0 150.0 7200.0 600.0" in said
        outputs.append(said)
    first, second = outputs
    assert "1000ms" in first
    assert "1000ms" not in second


def test_an_error_is_the_end_though_a_peer_does_not_answer() -> None:
    first, second = ranks("blocked")
    try:
        # Its collective would wait for 41 s, and the end of the process group with it.
        code, said = end(first, timeout=38)
        assert code == 1
        assert "2 collectives are under way" in said
    finally:
        kill(second.pid)
        end(second)


def test_a_rank_that_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {1: [0, 0], 2: [0, 1]}
    for count, numbers in seen.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert [gpu(RankInfo(rank, rank, 2)) for rank in (0, 1)] == numbers
    with pytest.raises(EnvironmentFault, match="local rank 2 sees 2 GPUs"):
        gpu(RankInfo(2, 2, 3))


def test_ranks_agree_on_a_start_whatever_an_earlier_one_left() -> None:
    store = dist.HashStore()

    def agree(late: bool) -> set[str]:
        """The word of three ranks, rank 0 last to come or first."""
        words: list[str] = []

        def join(rank: int) -> None:
            words.append(_agree_on_start(store, RankInfo(rank, rank, 3)))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        if late:
            threads.reverse()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(words) == 3
        return set(words)

    first = agree(late=False)
    for late in (True, False):
        again = agree(late)
        assert len(again) == 1
        assert again != first
