"""Ranks that save for ever until they are killed, and the check of what they leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from drumline.checkpoint.disks import Disks, Gatherer
from drumline.checkpoint.load import load_tensors, read_state
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.ranks import RankGroup
from drumline.checkpoint.remote import Store
from drumline.checkpoint.save import SaveResult
from drumline.config.resume import CHECKPOINTS
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing, end, start


class SavingRanks:
    """Ranks that do `work` until they are killed; those that are left at the end are killed, too."""

    def __init__(self, world: int, work: Callable[..., Any], *arguments: object) -> None:
        started = start(world, work, *arguments)
        self.processes = [process for process, _ in started]
        self.pipes = [pipe for _, pipe in started]

    def __enter__(self) -> SavingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.processes)

    def await_save(self, came: Callable[..., bool], *arguments: object) -> None:
        """Wait until `came(*arguments)`. Raises AssertionError if a rank ends or a minute is over."""
        deadline = time.monotonic() + 60
        while not came(*arguments):
            assert time.monotonic() < deadline, "no save came"
            for process in self.processes:
                assert process.is_alive(), "no save came"
            time.sleep(0.005)

    def kill(self, victims: Sequence[BaseProcess]) -> None:
        """Send SIGKILL to some ranks. Raises AssertionError if another one does not end of it."""
        for process in victims:
            process.kill()
        for rank, process in enumerate(self.processes):
            process.join(30)
            assert process.exitcode is not None, f"rank {rank} hangs after others were killed"


def require_content(checkpoint: Path, step: int) -> None:
    """Load a checkpoint and require the tensors that are saved at `step`."""
    expected = content(step)
    tensors = blank(expected)
    load_tensors(checkpoint, tensors)
    assert differing(tensors, expected) == [], checkpoint


def require_success(results: Iterable[SaveResult]) -> None:
    """Require that none of these saves failed."""
    for result in results:
        assert not result.error, result.error


def last_step(names: Iterable[str]) -> int:
    """Return the newest step of these folders of checkpoints, 0 without one."""
    steps = [step_of(name) or 0 for name in names]
    return max(steps, default=0)


def has_step_beyond(root: Path, step: int) -> bool:
    """Tell whether a checkpoint of a later step than `step` has its name."""
    names = [path.name for path in root.glob("step-*")]
    return last_step(names) > step


def root_of(folder: Path, apart: bool) -> Path:
    """The folder of this rank's host, of which there are as many as ranks if they are `apart`."""
    host = RankGroup.all().rank if apart else 0
    return folder / f"host-{host}" / CHECKPOINTS


def resumed(root: Path, url: str | None = None) -> int:
    """The step of the newest checkpoint, whose content is compared on this rank; 0 without one."""
    ranks = RankGroup.all(error_type=CheckpointError)
    store = None
    if url:
        store = Store(url)
    found = Gatherer(root, True, store, Disks.find(root, ranks)).newest()
    if found.path is None:
        return 0
    step = int(read_state(found.path)["step"])
    require_content(found.path, step)
    return step
