"""Faults that raise no error, in real runs: a weight that is flipped, a batch that is poisoned, a rank that is slow."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness
from tests.faults.live import kill, ranks_of, wait_for
from tests.harness import (
    drumline,
    events,
    losses,
    start_drumline,
    weights,
    write_config,
    write_rows,
)
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full  # tests/unit/test_health.py and test_stragglers.py show the decisions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


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
        run={"steps": 12},
    )
    more = ["checkpoint.every=5", "run.callbacks=[tests.faults.flips:Flips]", "eval.at_start=false"]
    finished = drumline(
        "train", config, f"run.dir={tmp_path / 'one'}", *more, "health.check_weights_every=2"
    )
    assert finished.code == 0, finished.out + finished.err
    (differ,) = events(tmp_path / "one", "weights_differ")
    assert (differ["ranks"], differ["agreed"]) == ([1], 6) and differ["step"] in (8, 10), (
        "it is flipped when step 7 is reported"
    )
    (fault,) = events(tmp_path / "one", "fault")
    assert (
        fault["rank"] == 1
        and "the weights of rank 1 differ from the other copies" in fault["error"]
    )
    assert [e["step"] for e in events(tmp_path / "one", "restore")] == [5]
    left_alone = drumline("train", config, f"run.dir={tmp_path / 'two'}", *more)
    assert left_alone.code == 0, left_alone.err
    assert (tmp_path / "flipped").exists()
    # Three ranks add up in the order of DDP's buckets, which it makes anew after its first step.
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), abs=1e-5)
    got = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
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
        run={"steps": 40},
        optimizer={"lr": 1e-2},
        eval={"at_start": False},
    )
    rows: list[dict[str, Any]] = [
        {"prompt": "march left?", "completion": "left left left left."}
    ] * 200
    rows[120:124] = [{"prompt": "march left?", "completion": "zq xv qz vx jj zz."}] * 4
    write_rows(tmp_path / "train.jsonl", rows)
    said = {}
    for policy in ("skip", "rollback"):
        run = tmp_path / policy
        more = [
            "data.packing=false",
            "data.order=sequential",
            "health.spike_window=20",
            f"health.on_spike={policy}",
            "checkpoint.every=7",
        ]
        finished = drumline("train", config, f"run.dir={run}", *more)
        assert finished.code == 0, finished.out + finished.err
        (spike,) = events(run, "spike")
        assert (spike["step"], spike["policy"]) == (31, policy) and sorted(spike["sample_ids"]) == [
            120,
            121,
            122,
            123,
        ]
        said[policy] = weights(run)
    assert [e["step"] for e in events(tmp_path / "rollback", "restore")] == [28]
    for name, tensor in said["skip"].items():
        assert torch.equal(said["rollback"][name], tensor), name


def test_a_rank_that_is_held_up_is_named(model: Path, tmp_path: Path) -> None:
    """Stopped for a part of the time, as a host does that has too much to do."""
    config = write_config(
        tmp_path,
        model,
        launch={"nproc": 2},
        strategy={"kind": "ddp"},
        run={"steps": 400},
        eval={"at_start": False},
    )
    run = tmp_path / "run"
    process = start_drumline(
        "train", config, f"run.dir={run}", "checkpoint.every=null", "run.epochs=100"
    )
    wait_for(run, "step", 5, process)
    slow, ended = ranks_of(run)[1], threading.Event()

    def pulses() -> None:
        while not ended.is_set():
            kill(slow, signal.SIGSTOP)
            time.sleep(0.15)
            kill(slow, signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=pulses)
    thread.start()
    try:
        until = time.monotonic() + 120
        while (
            not (found := [e for e in events(run, "straggler") if e["rank"] == 1])
            and time.monotonic() < until
        ):
            time.sleep(0.2)
    finally:
        ended.set()
        thread.join()
        kill(slow, signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=100)
    assert (
        found
        and found[0]["seconds"] > 1.3 * found[0]["median"]
        and found[0]["lost_tokens_per_s"] > 0
    )
    assert (found[0]["host"], found[0]["device"]) == (os.uname().nodename, "cpu")
    assert not events(run, "hang")


def test_collectives_of_another_type_are_found_after_the_step(tmp_path: Path) -> None:
    """gloo adds the bits of the one to those of the other."""
    from tests.checkpoint_ranks import run

    assert (
        run(2, mismatched)
        == [
            (
                "the ranks begin different collectives: rank 0: all_reduce Float [4]",
                "all_reduce Int [4]",
            )
        ]
        * 2
    )


def mismatched() -> tuple[str, str]:
    import torch.distributed as dist

    from drumline.errors import DrumlineError
    from drumline.train.health import CollectiveCheck

    check = CollectiveCheck(True)
    dist.all_reduce(torch.ones(4))
    check.check()
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))
    try:
        check.check()
    except DrumlineError as error:
        first, _, second = error.what.partition("; rank 1: ")
        assert "test_silent_faults.py" in first and "test_silent_faults.py" in second
        return first.partition(" (")[0], second.partition(" (")[0]
    raise AssertionError("nothing was found")
