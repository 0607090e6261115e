"""Ranks of other hosts, asked in the store whether they are at work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.dist.roll_call import RollCall
from drumline.system import heartbeat
from drumline.system.heartbeat import LIMITS, Heart


def test_a_rank_at_work_answers_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=False)
    board = heartbeat.new_board(2)
    assert board is not None
    hearts, others = [], []
    for place in range(2):
        heart = Heart(board, place, dict.fromkeys(LIMITS, 100.0))
        monkeypatch.setattr(heartbeat, "_heart", heart)
        hearts.append(heart)
        others.append(RollCall(store))
        # The test asks and answers itself. This one's thread would go on after the store has gone.
        heart.listen = None
    waits, works = others
    hearts[0].step(3, 0, untimed=False)
    hearts[1].step(3, 0, untimed=False)
    hearts[1].beat("report")
    assert hearts[1].step_unless_hung() == 3
    assert not waits.ask(3), "nobody had been asked before"
    works.listen(3)
    works.listen(3)
    assert waits.ask(3) and not waits.ask(3), "one answer for each question"
    works.listen(None)
    assert not waits.ask(3), "it was not at work then"
    works.listen(4)
    assert not waits.ask(3), "it is ahead"
    hearts[1].floats[hearts[1].at + heartbeat.SINCE] -= 200.0
    assert hearts[1].step_unless_hung() is None
    assert Path(board.folder).is_dir()
