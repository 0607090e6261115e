"""DPO's reference on two real ranks: each way to have it gives the same run, and a table on disk
serves whoever it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.setups import EIGHT_BY_FOUR, claim
from tests.harness import column, events, losses, write_config
from tests.tiny import tiny_model_dir

STEPS = 4
DPO = {"kind": "dpo", "beta": 0.5, "loss_chunk": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def plan_of(folder: Path, model: Path, resume: Resume | None = None, **options: Any) -> Path:
    """A run of two ranks, checkpoints of steps 2 and 4; 22 pairs, so that the last table places are
    fillers."""
    folder.mkdir(exist_ok=True)
    path = write_config(
        folder,
        model,
        rows=22,
        held_out=7,
        algorithm={**DPO, **options},
        strategy="ddp",
        batch=EIGHT_BY_FOUR,
    )
    return claim(Request(load(path, []), world_size=2, resume=resume))


def tables(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    paths = sorted((folder / "run" / "reference").glob("*.npy"))
    return {path.name: np.load(path) for path in paths}


def found(folder: Path) -> list[bool]:
    """Of the last start: whether the tables of train and eval were there."""
    train, held_out = events(folder / "run", "reference")[-2:]
    assert (train["data"], train["pairs"]) == ("train", 22)
    assert (held_out["data"], held_out["pairs"]) == ("eval", 7)
    return [train["found"], held_out["found"]]


def test_live_and_precomputed_say_the_same(tmp_path: Path, model: Path) -> None:
    precomputed = tmp_path / "precomputed"
    live = tmp_path / "live"
    plans = [plan_of(folder, model, reference=folder.name) for folder in (precomputed, live)]
    run_plans(plans, 2)
    table = losses(precomputed / "run")
    assert len(table) == STEPS
    assert table == pytest.approx(losses(live / "run"), rel=1e-6)
    assert table[STEPS] < table[1]
    first = {}
    for key in ("loss", "margin"):
        evaluations = column(precomputed / "run", key, "eval")
        asked = column(live / "run", key, "eval")
        assert np.allclose(evaluations, asked, rtol=1e-5, atol=1e-6)
        first[key] = evaluations[0]
    # The policy is the reference still.
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0.0, abs=1e-6)
    assert not (live / "run" / "reference").exists()


def test_a_resumed_run_reads_the_table_or_makes_it_anew_from_the_same_model(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "a"
    run = folder / "run"
    run_plans([plan_of(folder, model)], 2)
    first = tables(folder)
    whole = losses(run)
    assert found(folder) == [False, False]
    assert [table.shape for table in first.values()] == [(7, 2), (22, 2)]
    for table in first.values():
        assert table.max() < 0
    for damage, read in (("eval's cut short", [True, False]), ("all gone", [False, False])):
        shutil.rmtree(run / "checkpoints" / "step-00000004", ignore_errors=True)
        (path,) = (run / "reference").glob("eval-*")
        path.write_bytes(path.read_bytes()[:100])
        if damage == "all gone":
            shutil.rmtree(path.parent)
        run_plans([plan_of(folder, model, Resume())], 2)
        assert found(folder) == read
        again = tables(folder)
        assert again.keys() == first.keys()
        for name, table in first.items():
            assert np.allclose(again[name], table, rtol=1e-9)
        assert losses(run) == pytest.approx(whole, rel=1e-6)


@pytest.mark.full
def test_another_reference_has_a_table_of_its_own(tmp_path: Path, model: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", seed=7)
    plain = plan_of(tmp_path / "a", model)
    asked = plan_of(tmp_path / "b", model, reference_model={"id": str(other)})
    run_plans([plain, asked], 2)
    mine = tables(tmp_path / "a")
    theirs = tables(tmp_path / "b")
    assert mine.keys().isdisjoint(theirs)
    for one, two in zip(mine.values(), theirs.values(), strict=True):
        assert abs(one - two).max() > 0.1
    first = events(tmp_path / "b" / "run", "eval")[0]
    assert abs(first["margin"]) > 1e-3  # from the first step on the policy is not the reference
