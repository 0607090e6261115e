"""SIGKILL at random moments of saving: whatever was going on, the newest checkpoint is whole and holds what was saved at its step."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.checkpoint.load import load, newest, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.save import Checkpointer
from tests.checkpoint_ranks import blank, content, differing, end, start

WORLD = 2


def save_for_ever(root: Path, asynchronous: bool) -> None:
    """Go on from the newest checkpoint, one save after the other, until killed."""
    checkpointer = Checkpointer(root, 2, True, "max", asynchronous)
    found = newest(root, verify=True)
    step = 0
    if found.path:
        step = read_state(found.path)["step"]
        tensors = blank(content(step))
        load(found.path, tensors)
        assert differing(tensors, content(step)) == [], found.path
    dist.barrier()
    while True:
        step += 1
        # The metric goes up and down, so that the best and the newest are pruned apart.
        checkpointer.save(step, content(step), {"step": step}, metric=float(step * 7 % 5))
        errors = [result.error for result in checkpointer.poll() if result.error]
        assert not errors, errors


def kill_trials(root: Path, trials: int, seed: int) -> dict[str, int]:
    """Kill savers `trials` times. Returns what was seen; raises AssertionError when a checkpoint is torn or an old one is lost."""
    draw = random.Random(seed)
    seen = {"half folders": 0, "steps": 0}
    newest_step = 0
    for trial in range(trials):
        asynchronous, victims = bool(trial % 2), draw.choice([(0,), (1,), (0, 1)])
        started = start(WORLD, save_for_ever, root, asynchronous)
        processes = [process for process, _ in started]
        try:
            await_save(root, newest_step, processes)
            time.sleep(draw.random() * 0.15)
            for rank in victims:
                os.kill(processes[rank].pid or 0, signal.SIGKILL)
            for rank, (process, pipe) in enumerate(started):
                process.join(30)
                assert process.exitcode is not None, (
                    f"trial {trial}: rank {rank} hangs after {victims} were killed"
                )
                if rank not in victims:
                    # Its own saves were good until the other was gone.
                    good, said = pipe.recv()
                    assert not good and (
                        "Connection" in said or "peer" in said or "reset" in said
                    ), said
        finally:
            end(processes)
        names = [path.name for path in root.iterdir()]
        seen["half folders"] += sum(name.startswith((".tmp-step", ".trash-")) for name in names)
        found = newest(root, verify=True)
        assert found.path is not None and found.skipped == [], (trial, found)
        step = step_of(found.path.name)
        assert step is not None and step >= newest_step, (trial, step, newest_step)
        newest_step = step
        for name in names:
            # Not the newest alone: all that have a name are whole.
            if step_of(name) is not None:
                tensors = blank(content(step_of(name) or 0))
                load(root / name, tensors)
                assert differing(tensors, content(step_of(name) or 0)) == [], (trial, name)
    seen["steps"] = newest_step
    return seen


def await_save(root: Path, beyond: int, processes: list[BaseProcess]) -> None:
    """Wait until a checkpoint of a later step than `beyond` has its name. Raises AssertionError when none comes."""
    deadline = time.monotonic() + 60
    while not any((step_of(path.name) or 0) > beyond for path in root.glob("step-*")):
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes), (
            "no save came"
        )
        time.sleep(0.005)


@pytest.mark.claim("no kill tears a checkpoint")
@pytest.mark.timeout(240)
def test_no_kill_tears_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    seen = kill_trials(tmp_path / "root", trials=12, seed=0)
    assert seen["half folders"] > 0, "no kill fell into a save: the test proves nothing"
