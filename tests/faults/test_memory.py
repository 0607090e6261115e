"""Memory that runs out, for real: the whole command under a limit of the kernel, held against a run that had enough."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.common import status_bytes
from drumline.plan.plan import Plan
from tests.forks import Forked
from tests.harness import ENV, events, losses, survivors, write_config
from tests.tiny import tiny_model_dir

MiB = 2**20
# What a rank may have less than it took in the run that had enough: about half of what its micro-batch's activations
# take, for a micro-batch of half the size saves twice that. So both sides have room for what is sampled too seldom.
TAKEN = 80 * MiB


FITTING = r"the plan predicted .* — nearest plan that fits: (batch: {micro_batch: \d|memory: {activation_checkpointing: )"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m")


def train(
    config: Path, run: Path, *overrides: str, limit: int | None = None, by: tuple[str, ...] = ()
) -> tuple[int, str, int]:
    """(exit code, stderr, the most bytes of writable memory that a rank had) of `drumline train`, each process limited to `limit`. `by`:
    the module that starts it, and its arguments."""
    module, *arguments = (*by, "drumline", "train", str(config), f"run.dir={run}", *overrides)
    process = Forked(module, *arguments, env=ENV)
    if limit is not None:
        # Its ranks inherit it.
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_DATA, (limit, limit))
    most = _Most(process.pid)
    try:
        if limit is None:
            most.start()
        _, err = process.communicate(timeout=400)
    finally:
        process.end()
    return process.returncode, err, most.bytes_


class _Most(threading.Thread):
    """Follows the processes that `pid` has started, as long as it lives. `bytes_`: the most of VmData (proc(5)), which is what the
    limit is about, that one of them had."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.bytes_ = pid, 0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                ranks = psutil.Process(self.pid).children()
                for _ in range(50):
                    self.bytes_ = max(
                        [self.bytes_, *(status_bytes("VmData", rank.pid) for rank in ranks)]
                    )
                    time.sleep(0.01)


@dataclass(frozen=True)
class Enough:
    """A run with all the memory it wanted, and what it took."""

    config: Path
    run: Path
    most: int


@pytest.fixture(scope="module")
def enough(tmp_path_factory: pytest.TempPathFactory) -> Enough:
    """Its micro-batch's activations are most of what a rank has."""
    folder = tmp_path_factory.mktemp("memory")
    config = write_config(
        folder,
        tiny_model_dir(folder / "model", layers=4, hidden=128),
        rows=300,
        data={"max_length": 256, "packing": True},
        batch={"global_samples": 32, "micro_batch": 32},
        optimizer={"lr": 1e-3},
        run={"steps": 3},
        checkpoint={"every": 1, "keep": 1},
        eval={"at_start": False},
    )
    code, err, most = train(config, folder / "run")
    assert code == 0, err
    return Enough(config, folder / "run", most)


@pytest.mark.claim("memory that runs out is reported, and planned anew if asked")
def test_a_rank_without_memory_says_which_line_of_the_plan_was_wrong(
    enough: Enough, tmp_path: Path
) -> None:
    code, err, _ = train(enough.config, tmp_path / "run", limit=enough.most - TAKEN)
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 1
    # torch's allocator says how much it was asked for, C++'s `std::bad_alloc` does not.
    assert re.search(
        r"ran out of memory in (forward|backward|the loss): .* in use, (.* requested, )?room for ",
        line,
    ), err
    assert re.search(FITTING, line), err
    assert "Traceback" not in err
    (fault,) = events(tmp_path / "run", "fault")
    assert fault["action"].startswith("stop: memory.on_oom is stop")
    assert not survivors(str(tmp_path))


@pytest.mark.claim("memory that runs out is reported, and planned anew if asked")
def test_replan_goes_on_with_the_same_global_batch(enough: Enough, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, err, _ = train(enough.config, run, "memory.on_oom=replan", limit=enough.most - TAKEN)
    assert code == 0, err
    assert losses(run) == pytest.approx(losses(enough.run), rel=1e-5)
    replans = events(run, "replan")
    assert replans and all(
        r["predicted_bytes"]["to"] < r["predicted_bytes"]["from"] for r in replans
    )
    first, last = Plan.load(run / "plan-0.json"), Plan.load(run / "plan.json")
    assert replans[0]["plan"] == str(run / "plan-0.json")
    assert first.batch.micro_batch == 32 and last.batch.global_samples == 32
    assert (last.batch, last.activation_checkpointing) != (
        first.batch,
        first.activation_checkpointing,
    )
    assert last.config.batch == first.config.batch


def test_another_launcher_is_left_to_decide(enough: Enough, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, err, _ = train(
        enough.config, run, "memory.on_oom=replan", limit=enough.most - TAKEN, by=TORCHRUN
    )
    assert code == 1
    assert re.search(r"error: .*rank 0 ran out of memory in ", err), err
    assert len(re.findall(FITTING, err)) == 1, err
    assert not events(run, "replan") and not (run / "plan-0.json").exists()
