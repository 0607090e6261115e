"""Faults that raise no error, in real runs: a weight that is flipped, a batch that is poisoned, a
rank that is slow."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drumline.errors import DrumlineError
from drumline.train.health import CollectiveCheck
from tests import harness
from tests.checkpoint_ranks import run
from tests.faults.live import kill, ranks_of, the_event, wait_for, wait_until
from tests.harness import (
    column,
    events,
    losses,
    run_drumline,
    same_tensors,
    start_drumline,
    weights,
    write_config,
    write_rows,
)

pytestmark = pytest.mark.full  # tests/unit/test_health.py and test_stragglers.py show the decisions


def test_a_flipped_weight_names_its_rank_and_the_run_goes_on_where_they_agreed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks two are right."""
    monkeypatch.setattr(harness, "ENV", {**harness.ENV, "FLIPS": str(tmp_path)})
    config = write_config(
        tmp_path,
        model,
        batch={"global_samples": 6, "micro_batch": 2},
        launch={"nproc": 3},
        run={"steps": 12, "callbacks": ["tests.faults.flips:Flips"]},
        checkpoint={"every": 5},
        eval={"at_start": False},
    )
    checked = tmp_path / "one"
    run_drumline("train", config, f"run.dir={checked}", "health.check_weights_every=2")
    differ = the_event(checked, "weights_differ", ranks=[1], agreed=6)
    assert differ["step"] in (8, 10), "it is flipped when step 7 is reported"
    fault = the_event(checked, "fault", rank=1)
    assert "the weights of rank 1 differ from the other copies" in fault["error"]
    assert column(checked, "step", "restore") == [5]

    left_alone = tmp_path / "two"
    run_drumline("train", config, f"run.dir={left_alone}")
    assert (tmp_path / "flipped").exists()
    # Three ranks add up in the order of DDP's buckets, which it makes anew after its first step.
    assert losses(checked) == pytest.approx(losses(left_alone), abs=1e-5)
    got = weights(checked)
    for name, tensor in weights(left_alone).items():
        assert torch.allclose(got[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_going_back_ends_with_the_weights_of_skipping(
    model: Path, tmp_path: Path, strategy: str
) -> None:
    """Either way nothing was learned from the batch, and all others once."""
    config = write_config(
        tmp_path,
        model,
        strategy={"kind": strategy},
        launch={"nproc": 2},
        data={"packing": False, "order": "sequential"},
        run={"steps": 40},
        optimizer={"lr": 1e-2},
        checkpoint={"every": 7},
        eval={"at_start": False},
        health={"spike_window": 20},
    )
    usual = {"prompt": "march left?", "completion": "left left left left."}
    poisoned = {"prompt": "march left?", "completion": "zq xv qz vx jj zz."}
    write_rows(tmp_path / "train.jsonl", [usual] * 120 + [poisoned] * 4 + [usual] * 76)

    skipping = tmp_path / "skip"
    going_back = tmp_path / "rollback"
    for run_dir in (skipping, going_back):
        policy = run_dir.name
        run_drumline("train", config, f"run.dir={run_dir}", f"health.on_spike={policy}")
        spike = the_event(run_dir, "spike", step=31, policy=policy)
        assert sorted(spike["sample_ids"]) == [120, 121, 122, 123]
    assert column(going_back, "step", "restore") == [28]
    same_tensors(weights(going_back), weights(skipping))


@contextmanager
def held_up(pid: int) -> Iterator[None]:
    """A process that is stopped for three quarters of the time meanwhile."""
    ended = threading.Event()

    def pulse() -> None:
        while not ended.is_set():
            kill(pid, signal.SIGSTOP)
            time.sleep(0.15)
            kill(pid, signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        kill(pid, signal.SIGCONT)


def test_a_rank_that_is_held_up_is_named(model: Path, run_dir: Path, tmp_path: Path) -> None:
    """Stopped for a part of the time, as a host does that has too much to do."""
    config = write_config(
        tmp_path,
        model,
        launch={"nproc": 2},
        strategy={"kind": "ddp"},
        run={"steps": 400, "epochs": 100},
        checkpoint={"every": None},
        eval={"at_start": False},
    )
    process = start_drumline("train", config)
    wait_for(run_dir, "step", 5, process)

    def stragglers() -> list[dict[str, Any]]:
        return [event for event in events(run_dir, "straggler") if event["rank"] == 1]

    try:
        with held_up(ranks_of(run_dir)[1]):
            wait_until(stragglers, 120)
    finally:
        process.terminate()
        process.communicate(timeout=100)

    first = stragglers()[0]
    assert first["seconds"] > 1.3 * first["median"]
    assert first["lost_tokens_per_s"] > 0
    assert first["host"] == os.uname().nodename
    assert first["device"] == "cpu"
    assert not events(run_dir, "hang")


def test_collectives_of_another_type_are_found_after_the_step() -> None:
    """gloo adds the bits of the one to those of the other."""
    found = (
        "the ranks begin different collectives: rank 0: all_reduce Float [4]",
        "all_reduce Int [4]",
    )
    assert run(2, mismatched) == [found, found]


def mismatched() -> tuple[str, str]:
    check = CollectiveCheck(True)
    dist.all_reduce(torch.ones(4))
    check.check()
    dtype = torch.int32 if dist.get_rank() else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))
    with pytest.raises(DrumlineError) as caught:
        check.check()
    first, _, second = caught.value.what.partition("; rank 1: ")
    assert "test_silent_faults.py" in first
    assert "test_silent_faults.py" in second
    return first.partition(" (")[0], second.partition(" (")[0]
