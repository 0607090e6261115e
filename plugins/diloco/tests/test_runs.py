"""Runs whose fragments are sent in 8 bits and beside the steps: near DDP, resumed to the bit, with fewer bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_plans
from tests.distributed.test_compression import FOUR, Run, ddp, figures, of, parameters, plan
from tests.faults.live import gone, kill, wait_for
from tests.faults.test_train_faults import EVERY, resume, same, start
from tests.harness import drumline, events, weights, write_config
from tests.tiny import tiny_model_dir

STREAMED: dict[str, Any] = {
    "kind": "diloco",
    "period": 6,
    "fragments": 3,
    "bits": 8,
    "delay": 2,
}
# A fragment is sent after the first step and used after the third.
SHORT: dict[str, Any] = {**STREAMED, "period": 3, "fragments": 2}
RUNS = {
    "ddp": Run(ddp()),
    "8 bits": Run({"kind": "diloco", "period": 5, "bits": 8}, 0.25, (0.0, 1.0)),
    "streamed": Run(STREAMED, 0.25, (0.0, 1.0)),
    "four": Run(SHORT, sections=FOUR),
}
# With --full alone.
AGAIN = "8 bits"
NEAR = [pytest.param("8 bits", marks=pytest.mark.full), "streamed"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of RUNS, and of one that is resumed from the second step."""
    root = tmp_path_factory.mktemp("streamed")
    tiny_model_dir(root / "model")
    plans = []
    for name, run in RUNS.items():
        if name != AGAIN or request.config.getoption("--full"):
            plans.append(plan(root, name, 2, run))
    run_plans(plans, 2, counted=True)

    resumed = plan(root, "resumed", 2, RUNS["four"])
    stopped = of(root, "four") / "checkpoints" / "step-00000002"
    shutil.copytree(stopped, resumed.parent / "checkpoints" / stopped.name)
    run_plans([resumed], 2, counted=True)
    return root


@pytest.mark.parametrize("name", NEAR)
def test_ends_near_ddp(runs: Path, name: str) -> None:
    """By the held-out loss, on another way."""
    mine = figures(runs, name, "loss", "eval")
    plain = figures(runs, "ddp", "loss", "eval")
    assert plain[-1] < plain[0] - 1.5, "the task is learned"
    assert mine[-1] - plain[-1] <= RUNS[name].distance
    losses = figures(runs, name, "loss")
    losses_of_ddp = figures(runs, "ddp", "loss")
    assert losses[5:] != losses_of_ddp[5:]


@pytest.mark.parametrize("name", NEAR)
def test_sends_less_than_ddp(runs: Path, name: str) -> None:
    sent = []
    for bytes_ in figures(runs, name, "sent_bytes")[4:]:
        if bytes_ is not None:
            sent.append(bytes_)
    mean = sum(sent) / len(sent)
    of_ddp = 4 * parameters(runs)
    assert 0 < mean < of_ddp


@pytest.mark.claim(
    "DiLoCo in fragments, in 8 bits and beside the steps is its formulas, and goes on to the bit"
)
def test_goes_on_to_the_bit(runs: Path) -> None:
    """A fragment is under way when the first run stops."""
    assert figures(runs, "resumed", "step") == [3, 4]
    assert figures(runs, "resumed", "loss") == figures(runs, "four", "loss")[2:]

    mine = weights(of(runs, "resumed"))
    expected = weights(of(runs, "four"))
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.full  # test_goes_on_to_the_bit goes on from such a checkpoint
def test_all_killed_with_a_fragment_under_way_then_resumed(tmp_path: Path) -> None:
    """One is under way after each step. A kill between checkpoints loses it, and it is made again."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        rows=90,
        data={"packing": False},
        launch={"nproc": 2},
        strategy={**STREAMED, "period": 8, "fragments": 4, "delay": 3},
        run={"steps": 60},
        checkpoint={"every": EVERY, "keep": 3},
        eval={"every": 25},
    )
    whole = tmp_path / "whole"
    run = tmp_path / "killed"
    assert drumline("train", path, f"run.dir={whole}").code == 0

    process = start(path, run)
    wait_for(run, "step", 33, process)
    kill(process.pid)
    process.wait()
    assert gone(str(run), 1.0)
    resume(path, run)

    restored = []
    for event in events(run, "restore"):
        if event["path"]:
            restored.append(event["step"])
    (step,) = restored
    assert 25 <= step <= 32
    same(run, whole)
