"""Real runs, hurt for real, and held against one that was left alone: bit for bit in fp32 on the
same world size."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.disks import fill, flip_bit, small_disk
from tests.faults.live import gone, kill, ranks_of, the_event, wait_for, wait_until
from tests.harness import (
    column,
    drumline,
    events,
    losses,
    run_drumline,
    same_tensors,
    start_drumline,
    weights,
    write_config,
)

STEPS = 120
EVERY = 10
# Each step multiplies the weights by −999.
EXPLODES = (
    "optimizer.lr=1000",
    "optimizer.weight_decay=1",
    "optimizer.max_grad_norm=null",
    "run.steps=20",
)


def figures(run: Path) -> dict[int, tuple[float, float, int, int]]:
    """What a step is known by; the last word on each. Equal samples in another order would give
    other losses."""
    found = {}
    for event in events(run, "step"):
        found[event["step"]] = (
            event["loss"],
            event["grad_norm"],
            event["tokens"],
            event["samples"],
        )
    return found


def same(run: Path, reference: Path) -> None:
    """Losses, samples, weights and moments bit for bit."""
    assert figures(run) == figures(reference)
    got = weights(run)
    expected = weights(reference)
    assert got.keys() == expected.keys()
    same_tensors(got, expected)


def near(run: Path, reference: Path) -> None:
    """The same tokens and samples in each step, and losses to 1e-5."""
    got = figures(run)
    expected = figures(reference)
    assert got.keys() == expected.keys()
    for step, (loss, _, tokens, samples) in expected.items():
        got_loss, _, got_tokens, got_samples = got[step]
        assert got_tokens == tokens, step
        assert got_samples == samples, step
        assert got_loss == pytest.approx(loss, rel=1e-5), step


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("faults"),
        model,
        rows=90,
        # So that a resume with other random numbers would show.
        model={"config": {"attention_dropout": 0.1}},
        data={"packing": False},
        launch={"nproc": 2},
        optimizer={"lr": 1e-3},
        run={"steps": STEPS},
        checkpoint={"every": EVERY, "keep": 3},
        eval={"every": 50},
    )


@pytest.fixture(scope="module")
def reference(config: Path) -> Path:
    """The run that nothing happened to."""
    run = config.parent / "reference"
    run_drumline("train", config, f"run.dir={run}")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    return run


def start(config: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    return start_drumline("train", config, f"run.dir={run}", *more)


def start_until(
    kind: str, at_least: int, config: Path, run: Path, *more: str
) -> subprocess.Popen[str]:
    """Start a run, and return it once it has come to an event of this step."""
    process = start(config, run, *more)
    wait_for(run, kind, at_least, process)
    return process


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Wait for the end, require this exit code, and return all that was said."""
    out, err = process.communicate(timeout=150)
    said = out + err
    assert process.returncode == code, said
    return said


def resume(config: Path, run: Path, *more: str) -> None:
    run_drumline("train", config, f"run.dir={run}", *more, "--resume")


@pytest.mark.full  # named: test_launch_kills; to the bit: the next test, and test_chaos
def test_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_been(
    config: Path, reference: Path, run_dir: Path
) -> None:
    process = start_until("step", 35, config, run_dir)
    kill(ranks_of(run_dir)[1])
    said = finish(process, 0)

    the_event(run_dir, "fault", rank=1, signal="SIGKILL", action="restart")
    assert "SIGKILL" in said
    assert "rank 1" in said
    restored = the_event(run_dir, "restore")
    assert 20 <= restored["step"] <= 60
    same(run_dir, reference)
    assert gone(run_dir, 1.0)


@pytest.mark.claim("a killed run goes on bit for bit")
def test_all_killed_then_resumed(config: Path, reference: Path, run_dir: Path) -> None:
    process = start_until("step", 33, config, run_dir)
    kill(process.pid)
    process.wait()
    assert gone(run_dir, 1.0), "ranks outlived their launcher"

    resume(config, run_dir)
    same(run_dir, reference)


# What each signal does to a launcher and its ranks is shown without a model in test_launch_signals.
@pytest.mark.claim("signals save first, exit code 75")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGUSR1, id="SIGUSR1", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.full),
    ],
)
def test_asked_to_stop_saves_and_says_how_to_go_on(
    config: Path, reference: Path, run_dir: Path, number: signal.Signals
) -> None:
    process = start_until("step", 20, config, run_dir)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what a terminal does on Ctrl-C
    else:
        process.send_signal(number)
    said = finish(process, 75)

    assert "--resume" in said
    stopped = the_event(run_dir, "preempt")
    saves = [event["step"] for event in events(run_dir, "save") if not event["error"]]
    assert stopped["step"] == max(saves)
    assert stopped["step"] == max(losses(run_dir))
    resume(config, run_dir)
    same(run_dir, reference)


@pytest.mark.full  # test_launch_signals asks ranks without a model
def test_one_rank_asked_to_stop_stops_all_at_the_same_step(
    config: Path, reference: Path, run_dir: Path
) -> None:
    process = start_until("step", 15, config, run_dir)
    kill(ranks_of(run_dir)[1], signal.SIGTERM)
    finish(process, 75)
    resume(config, run_dir)
    same(run_dir, reference)


@pytest.mark.full  # at steps: the test before
@pytest.mark.parametrize("moment", ["start-up", "evaluation", "save"])
def test_asked_to_stop_at_any_moment(
    config: Path, reference: Path, run_dir: Path, moment: str
) -> None:
    process = start(config, run_dir)
    if moment == "start-up":
        wait_until(lambda: len(ranks_of(run_dir)) >= 2, 60)
        wait_for(run_dir, "run_start", 0, process)
    elif moment == "evaluation":
        wait_for(run_dir, "step", 49, process)
    else:
        wait_for(run_dir, "step", EVERY, process)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)

    resume(config, run_dir)
    same(run_dir, reference)


def damage(shard: Path, how: str) -> None:
    size = shard.stat().st_size
    if how == "flipped byte":
        flip_bit(shard, size // 2)
    elif how == "truncated":
        os.truncate(shard, size - 7)
    else:
        shard.unlink()


# Every kind of damage is done to a checkpoint without a run in test_checkpoint_damage.
@pytest.mark.claim("damage is noticed, and the checkpoint before is used")
@pytest.mark.parametrize(
    "how",
    [
        "flipped byte",
        pytest.param("truncated", marks=pytest.mark.full),
        pytest.param("missing file", marks=pytest.mark.full),
    ],
)
def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    config: Path, reference: Path, run_dir: Path, how: str
) -> None:
    process = start_until("save", 30, config, run_dir)
    kill(process.pid)
    process.wait()
    assert gone(run_dir, 5.0)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    shard = min(newest.glob("*.distcp"))
    damage(shard, how)

    finished = run_drumline("train", config, f"run.dir={run_dir}", "--resume")

    assert shard.name in finished.out + finished.err
    restored = column(run_dir, "step", "restore")[-1]
    assert restored < int(newest.name.removeprefix("step-"))
    same(run_dir, reference)


@pytest.mark.full  # tests/distributed/test_resume_pairs.py has the numbers
def test_other_world_size_walks_through_the_same_samples(
    config: Path, run_dir: Path, tmp_path: Path
) -> None:
    # Random numbers belong to a rank: with others of those, dropout differs.
    still = "model.config.attention_dropout=0.0"
    reference = tmp_path / "reference"
    run_drumline("train", config, f"run.dir={reference}", still)

    first = start_until("step", 30, config, run_dir, "launch.nproc=2", still)
    first.send_signal(signal.SIGTERM)
    finish(first, 75)
    second = start_until("step", 60, config, run_dir, "launch.nproc=1", still, "--resume")
    second.send_signal(signal.SIGTERM)
    finish(second, 75)
    finish(start(config, run_dir, "launch.nproc=2", still, "--resume"), 0)

    near(run_dir, reference)
    assert set(column(run_dir, "world_size", "run_start")) == {1, 2}


@pytest.mark.claim("NaN stops the run, or is skipped and counted")
def test_nan_stops_with_its_samples_named(config: Path, run_dir: Path) -> None:
    finished = drumline("train", config, f"run.dir={run_dir}", *EXPLODES)
    said = finished.out + finished.err
    assert finished.code == 3, said
    event = the_event(run_dir, "nonfinite", policy="stop")
    assert len(event["sample_ids"]) == 4
    assert "health.on_nan" in said
    assert not events(run_dir, "fault"), "a stop by policy is no crash and is not restarted"


@pytest.mark.full  # the loop's own counting is shown in process in tests/unit/test_loop.py
def test_nan_skips_and_counts(config: Path, run_dir: Path) -> None:
    more = ["health.on_nan=skip", "health.max_skips=3", *EXPLODES]
    finished = drumline("train", config, f"run.dir={run_dir}", *more)
    assert finished.code == 3, finished.out + finished.err
    assert column(run_dir, "policy", "nonfinite") == ["skip"] * 4


@pytest.mark.claim("a full disk costs a checkpoint, not the run")
def test_full_disk_costs_a_checkpoint_and_not_the_run(
    config: Path, reference: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 24) as disk:
        run = disk / "run"
        process = start_until("save", EVERY, config, run)
        # Room for events, not for a checkpoint.
        ballast = fill(disk, leave=150_000)
        full = time.time()
        failed = wait_for(run, "save", 0, process, after=full)
        if failed["error"] is None:  # it was on the disk before that was full
            failed = wait_for(run, "save", failed["step"] + 1, process, after=full)
        assert failed["error"], failed
        assert "space" in failed["error"], failed
        assert weights(run), "the checkpoint before is still whole"

        ballast.unlink()
        finish(process, 0)
        same(run, reference)
        assert not list((run / "checkpoints").glob(".tmp*"))


def test_resume_finds_a_finished_run_finished(config: Path, reference: Path) -> None:
    before = figures(reference)
    resume(config, reference)
    assert figures(reference) == before
    assert len(events(reference, "run_start")) == 2
