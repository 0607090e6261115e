"""Real runs, hurt for real, and held against one that was left alone: bit for bit in fp32 on the same world size."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.live import gone, kill, ranks_of, wait_for
from tests.harness import drumline, events, losses, start_drumline, weights, write_config
from tests.tiny import tiny_model_dir

STEPS = 120
EVERY = 10


def figures(run: Path) -> dict[int, tuple[float, float, int, int]]:
    """What a step is known by; the last word on each. Equal samples in another order would give other losses."""
    return {
        e["step"]: (e["loss"], e["grad_norm"], e["tokens"], e["samples"])
        for e in events(run, "step")
    }


def same(run: Path, reference: Path) -> None:
    """Losses, samples, weights and moments bit for bit."""
    assert figures(run) == figures(reference)
    got, expected = weights(run), weights(reference)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


# Each step multiplies the weights by −999.
EXPLODES = (
    "optimizer.lr=1000",
    "optimizer.weight_decay=1",
    "optimizer.max_grad_norm=null",
    "run.steps=20",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
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
    finished = drumline("train", config, f"run.dir={run}")
    assert finished.code == 0, finished.err
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    return run


def start(config: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    return start_drumline("train", config, f"run.dir={run}", *more)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out + err


def resume(config: Path, run: Path, *more: str) -> None:
    finished = drumline("train", config, f"run.dir={run}", *more, "--resume")
    assert finished.code == 0, finished.out + finished.err


@pytest.mark.full  # named: test_launch_kills; to the bit: the next test, and test_chaos
def test_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_been(
    config: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, "step", 35, process)
    kill(ranks_of(run)[1])
    code, said = finish(process)
    assert code == 0, said
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["signal"], fault["action"]) == (1, "SIGKILL", "restart")
    assert "SIGKILL" in said and "rank 1" in said
    (restored,) = events(run, "restore")
    assert 20 <= restored["step"] <= 60
    same(run, reference)
    assert gone(str(run), 1.0)


@pytest.mark.claim("a killed run goes on bit for bit")
def test_all_killed_then_resumed(config: Path, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, "step", 33, process)
    kill(process.pid)
    process.wait()
    assert gone(str(run), 1.0), "ranks outlived their launcher"
    resume(config, run)
    same(run, reference)


# What each signal does to a launcher and its ranks is shown without a model in test_launch_signals.
@pytest.mark.claim("signals save first, exit code 75")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(s, marks=pytest.mark.full) for s in (signal.SIGUSR1, signal.SIGINT)),
    ],
    ids=lambda s: s.name,
)
def test_asked_to_stop_saves_and_says_how_to_go_on(
    config: Path, reference: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, "step", 20, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what a terminal does on Ctrl-C
    else:
        process.send_signal(number)
    code, said = finish(process)
    assert code == 75, said
    assert "--resume" in said
    (stopped,) = events(run, "preempt")
    saves = [e["step"] for e in events(run, "save") if not e["error"]]
    assert stopped["step"] == max(saves) == max(losses(run))
    resume(config, run)
    same(run, reference)


@pytest.mark.full  # test_launch_signals asks ranks without a model
def test_one_rank_asked_to_stop_stops_all_at_the_same_step(
    config: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, "step", 15, process)
    kill(ranks_of(run)[1], signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    resume(config, run)
    same(run, reference)


@pytest.mark.full  # at steps: the test before
@pytest.mark.parametrize("moment", ["start-up", "evaluation", "save"])
def test_asked_to_stop_at_any_moment(
    config: Path, reference: Path, tmp_path: Path, moment: str
) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    if moment == "start-up":
        deadline = time.time() + 60
        while len(ranks_of(run)) < 2 and time.time() < deadline:
            time.sleep(0.02)
        wait_for(run, "run_start", 0, process)
    elif moment == "evaluation":
        wait_for(run, "step", 49, process)
    else:
        wait_for(run, "step", EVERY, process)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    resume(config, run)
    same(run, reference)


# Every kind of damage is done to a checkpoint without a run in test_checkpoint_damage.
@pytest.mark.claim("damage is noticed, and the checkpoint before is used")
@pytest.mark.parametrize(
    "damage",
    [
        "flipped byte",
        *(pytest.param(d, marks=pytest.mark.full) for d in ("truncated", "missing file")),
    ],
)
def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    config: Path, reference: Path, tmp_path: Path, damage: str
) -> None:
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, "save", 30, process)
    kill(process.pid)
    process.wait()
    assert gone(str(run), 5.0)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    shard = sorted(newest.glob("*.distcp"))[0]
    if damage == "flipped byte":
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-7])
    else:
        shard.unlink()
    finished = drumline("train", config, f"run.dir={run}", "--resume")
    assert finished.code == 0, finished.err
    assert shard.name in finished.out + finished.err
    restored = events(run, "restore")[-1]
    assert restored["step"] < int(newest.name.removeprefix("step-"))
    same(run, reference)


@pytest.mark.full  # tests/distributed/test_resume_pairs.py has the numbers
def test_other_world_size_walks_through_the_same_samples(config: Path, tmp_path: Path) -> None:
    run, reference = tmp_path / "run", tmp_path / "reference"
    still = "model.config.attention_dropout=0.0"  # random numbers belong to a rank: with others of those, dropout differs
    assert drumline("train", config, f"run.dir={reference}", still).code == 0
    for nproc, until in ((2, 30), (1, 60), (2, None)):
        more = ["--resume"] if run.exists() else []
        process = start(config, run, f"launch.nproc={nproc}", still, *more)
        if until is not None:
            wait_for(run, "step", until, process)
            process.send_signal(signal.SIGTERM)
        code, said = finish(process)
        assert code == (75 if until else 0), said
    got, expected = figures(run), figures(reference)
    assert [row[2:] for row in got.values()] == [row[2:] for row in expected.values()]
    for step, row in expected.items():
        assert got[step][0] == pytest.approx(row[0], rel=1e-5), step
    assert {e["world_size"] for e in events(run, "run_start")} == {1, 2}


@pytest.mark.claim("NaN stops the run, or is skipped and counted")
def test_nan_stops_with_its_samples_named(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = drumline("train", config, f"run.dir={run}", *EXPLODES)
    assert finished.code == 3, finished.out + finished.err
    (event,) = events(run, "nonfinite")
    assert event["policy"] == "stop" and len(event["sample_ids"]) == 4
    assert "health.on_nan" in finished.out + finished.err
    assert not events(run, "fault"), "a stop by policy is no crash and is not restarted"


@pytest.mark.full  # the loop's own counting is shown in process in tests/unit/test_loop.py
def test_nan_skips_and_counts(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["health.on_nan=skip", "health.max_skips=3", *EXPLODES]
    finished = drumline("train", config, f"run.dir={run}", *more)
    assert finished.code == 3, finished.out + finished.err
    assert [e["policy"] for e in events(run, "nonfinite")] == ["skip"] * 4


@pytest.mark.claim("a full disk costs a checkpoint, not the run")
def test_full_disk_costs_a_checkpoint_and_not_the_run(
    config: Path, reference: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        run = disk / "run"
        process = start(config, run)
        wait_for(run, "save", EVERY, process)
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(b"\0" * 65536)
                    file.flush()
            except OSError:
                full = time.time()
        # Room for events, not for a checkpoint.
        os.truncate(ballast, ballast.stat().st_size - 150_000)
        failed = wait_for(run, "save", 0, process, after=full)
        if failed["error"] is None:  # it was on the disk before that was full
            failed = wait_for(run, "save", failed["step"] + 1, process, after=full)
        assert failed["error"] and "space" in failed["error"], failed
        assert weights(run), "the checkpoint before is still whole"
        ballast.unlink()
        code, said = finish(process)
        assert code == 0, said
        same(run, reference)
        assert not list((run / "checkpoints").glob(".tmp*"))
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def run_start_count(run: Path) -> int:
    return len(events(run, "run_start"))


def test_resume_finds_a_finished_run_finished(config: Path, reference: Path) -> None:
    before: dict[int, Any] = figures(reference)
    resume(config, reference)
    assert figures(reference) == before and run_start_count(reference) == 2
