"""SIGKILL at random moments of saving: whatever was going on, the newest checkpoint is whole and
holds what was saved at its step."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.checkpoint.load import newest, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.save import Checkpointer
from tests.checkpoint_ranks import content
from tests.faults.savers import SavingRanks, has_step_beyond, require_content, require_success

WORLD = 2


def save_for_ever(root: Path, asynchronous: bool) -> None:
    """Go on from the newest checkpoint, one save after the other, until killed."""
    checkpointer = Checkpointer(root, 2, True, "max", asynchronous)
    path = newest(root, verify=True).path
    step = 0
    if path:
        step = read_state(path)["step"]
        require_content(path, step)
    dist.barrier()
    while True:
        step += 1
        # The metric goes up and down, so that the best and the newest are pruned apart.
        metric = float(step * 7 % 5)
        checkpointer.save(step, content(step), {"step": step}, metric=metric)
        require_success(checkpointer.poll())


def kill_savers(root: Path, asynchronous: bool, newest_step: int, draw: random.Random) -> None:
    """SIGKILL to a rank or two, soon after a checkpoint of a later step than `newest_step`."""
    victims = draw.choice([(0,), (1,), (0, 1)])
    with SavingRanks(WORLD, save_for_ever, root, asynchronous) as ranks:
        ranks.await_save(has_step_beyond, root, newest_step)
        time.sleep(draw.random() * 0.15)
        ranks.kill([ranks.processes[rank] for rank in victims])
        for rank, pipe in enumerate(ranks.pipes):
            if rank not in victims:
                # Its own saves were good until the other was gone.
                good, said = pipe.recv()
                assert not good
                assert re.search("Connection|peer|reset", said), said


def check_all(root: Path) -> int:
    """Require that each checkpoint that has its name is whole; return the newest one's step."""
    found = newest(root, verify=True)
    assert found.path is not None
    assert found.skipped == []
    for path in root.iterdir():
        step = step_of(path.name)
        if step is not None:
            require_content(path, step)
    newest_step = step_of(found.path.name)
    assert newest_step is not None
    return newest_step


@pytest.mark.claim("no kill tears a checkpoint")
@pytest.mark.timeout(240)
def test_no_kill_tears_a_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    draw = random.Random(0)
    newest_step = 0
    half_folders = 0
    for trial in range(12):
        is_asynchronous = trial % 2 == 1
        kill_savers(root, is_asynchronous, newest_step, draw)
        for pattern in (".tmp-step*", ".trash-*"):
            half_folders += len(list(root.glob(pattern)))
        step = check_all(root)
        assert step >= newest_step, trial
        newest_step = step
    assert half_folders > 0, "no kill fell into a save: the test proves nothing"
