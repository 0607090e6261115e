"""Memory that runs out, for real: the whole command under a limit of the kernel, held against a run
that had enough."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from benchmarks.common import status_bytes
from drumline.plan.plan import Plan
from tests.forks import Forked
from tests.harness import ENV, column, events, losses, survivors, write_config
from tests.tiny import tiny_model_dir

MiB = 2**20
# What a rank may have less than it took in the run that had enough: about half of what its
# micro-batch's activations take, for a micro-batch of half the size saves twice that. So both sides
# have room for what is sampled too seldom.
TAKEN = 80 * MiB


FITTING = (
    r"the plan predicted .* — nearest plan that fits: "
    r"(batch: {micro_batch: \d|memory: {activation_checkpointing: )"
)
# torch's allocator says how much it was asked for, C++'s `std::bad_alloc` does not.
RAN_OUT = r"ran out of memory in (forward|backward|the loss): .* in use, (.* requested, )?room for "
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m")


class Ended(NamedTuple):
    """How a command ended; `most`: the most bytes of writable memory that a rank had."""

    code: int
    err: str
    most: int


def train(
    config: Path, run: Path, *overrides: str, limit: int | None = None, by: tuple[str, ...] = ()
) -> Ended:
    """Run `drumline train`, each process limited to `limit`; its memory is measured without one.
    `by`: the module that starts it, and its arguments."""
    command = ("drumline", "train", config, f"run.dir={run}", *overrides)
    module, *arguments = (*by, *command)
    process = Forked(str(module), *arguments, env=ENV)
    most = _Most(process.pid)
    if limit is None:
        most.start()
    else:
        # Its ranks inherit it.
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_DATA, (limit, limit))
    try:
        _, err = process.communicate(timeout=400)
    finally:
        process.end()
    return Ended(process.returncode, err, most.bytes_)


class _Most(threading.Thread):
    """Follows the processes that `pid` has started, as long as it lives. `bytes_`: the most of
    VmData (proc(5)), which is what the limit is about, that one of them had."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.bytes_ = 0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                ranks = psutil.Process(self.pid).children()
                for _ in range(50):
                    for rank in ranks:
                        self.bytes_ = max(self.bytes_, status_bytes("VmData", rank.pid))
                    time.sleep(0.01)


class Enough(NamedTuple):
    """A run with all the memory it wanted, and a limit that is below what it took."""

    config: Path
    run: Path
    limit: int


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
    run = folder / "run"
    ended = train(config, run)
    assert ended.code == 0, ended.err
    return Enough(config, run, ended.most - TAKEN)


@pytest.mark.claim("memory that runs out is reported, and planned anew if asked")
def test_a_rank_without_memory_says_which_line_of_the_plan_was_wrong(
    enough: Enough, run_dir: Path
) -> None:
    ended = train(enough.config, run_dir, limit=enough.limit)
    assert ended.code == 1
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error:")]
    assert re.search(RAN_OUT, line), ended.err
    assert re.search(FITTING, line), ended.err
    assert "Traceback" not in ended.err
    (action,) = column(run_dir, "action", "fault")
    assert action.startswith("stop: memory.on_oom is stop")
    assert not survivors(str(run_dir))


@pytest.mark.claim("memory that runs out is reported, and planned anew if asked")
def test_replan_goes_on_with_the_same_global_batch(enough: Enough, run_dir: Path) -> None:
    ended = train(enough.config, run_dir, "memory.on_oom=replan", limit=enough.limit)
    assert ended.code == 0, ended.err
    assert losses(run_dir) == pytest.approx(losses(enough.run), rel=1e-5)

    replans = events(run_dir, "replan")
    assert replans[0]["plan"] == str(run_dir / "plan-0.json")
    for replan in replans:
        predicted = replan["predicted_bytes"]
        assert predicted["to"] < predicted["from"]

    first = Plan.load(run_dir / "plan-0.json")
    last = Plan.load(run_dir / "plan.json")
    assert first.batch.micro_batch == 32
    assert last.batch.global_samples == 32
    is_same_batch = last.batch == first.batch
    assert not is_same_batch or last.activation_checkpointing != first.activation_checkpointing
    assert last.config.batch == first.config.batch


@pytest.mark.full
def test_another_launcher_is_left_to_decide(enough: Enough, run_dir: Path) -> None:
    ended = train(enough.config, run_dir, "memory.on_oom=replan", limit=enough.limit, by=TORCHRUN)
    assert ended.code == 1
    assert re.search(r"error: .*rank 0 ran out of memory in ", ended.err), ended.err
    assert len(re.findall(FITTING, ended.err)) == 1, ended.err
    assert not events(run_dir, "replan")
    assert not (run_dir / "plan-0.json").exists()
