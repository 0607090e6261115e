"""DPO's reference on two real ranks: each way to have it gives the same run, and a table on disk serves whoever it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import events, losses, write_config
from tests.tiny import tiny_model_dir

STEPS = 4
DPO = {"kind": "dpo", "beta": 0.5, "loss_chunk": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def plan_of(folder: Path, model: Path, resume: Resume | None = None, **sections: Any) -> Path:
    """A run of two ranks, checkpoints of steps 2 and 4; 22 pairs, so that the last table places are fillers."""
    folder.mkdir(exist_ok=True)
    base: dict[str, Any] = {
        "algorithm": DPO,
        "strategy": "ddp",
        "batch": {"global_samples": 8, "micro_batch": 4},
        "rows": 22,
    }
    path = write_config(folder, model, held_out=7, **base | sections)
    asked = Request(load(path, []), world_size=2, resume=resume)
    plan = make_plan(asked, on_progress=lambda *_: None)
    return claim_run_dir(plan, asked)[0]


def tables(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {
        path.name: np.load(path) for path in sorted((folder / "run" / "reference").glob("*.npy"))
    }


def found(folder: Path) -> list[bool]:
    """Of the last start: whether the tables of train and eval were there."""
    told = events(folder / "run", "reference")[-2:]
    assert [event["data"] for event in told] == ["train", "eval"] and [
        event["pairs"] for event in told
    ] == [22, 7]
    return [event["found"] for event in told]


def test_live_and_precomputed_say_the_same(tmp_path: Path, model: Path) -> None:
    kinds = {kind: tmp_path / kind for kind in ("precomputed", "live")}
    run_plans(
        [
            plan_of(folder, model, algorithm={**DPO, "reference": kind})
            for kind, folder in kinds.items()
        ],
        2,
    )
    table, asked = (losses(folder / "run") for folder in kinds.values())
    assert len(table) == STEPS and table == pytest.approx(asked, rel=1e-6)
    assert table[STEPS] < table[1]
    evals = [
        [(e["loss"], e["margin"]) for e in events(folder / "run", "eval")]
        for folder in kinds.values()
    ]
    # The policy is the reference still.
    assert evals[0][0] == pytest.approx((np.log(2), 0.0), abs=1e-6)
    assert np.allclose(evals[0], evals[1], rtol=1e-5, atol=1e-6)
    assert not (kinds["live"] / "run" / "reference").exists()


def test_a_resumed_run_reads_the_table_or_makes_it_anew_from_the_same_model(
    tmp_path: Path, model: Path
) -> None:
    run_plans([plan_of(tmp_path / "a", model)], 2)
    first, whole = tables(tmp_path / "a"), losses(tmp_path / "a" / "run")
    assert found(tmp_path / "a") == [False, False] and [
        table.shape for table in first.values()
    ] == [(7, 2), (22, 2)]
    assert all((table < 0).all() for table in first.values())
    for damage, read in (("eval's cut short", [True, False]), ("all gone", [False, False])):
        shutil.rmtree(tmp_path / "a" / "run" / "checkpoints" / "step-00000004", ignore_errors=True)
        (path,) = (tmp_path / "a" / "run" / "reference").glob("eval-*")
        path.write_bytes(path.read_bytes()[:100])
        if damage == "all gone":
            shutil.rmtree(path.parent)
        run_plans([plan_of(tmp_path / "a", model, resume=Resume())], 2)
        assert found(tmp_path / "a") == read
        again = tables(tmp_path / "a")
        assert again.keys() == first.keys() and all(
            np.allclose(again[name], first[name], rtol=1e-9) for name in first
        )
        assert losses(tmp_path / "a" / "run") == pytest.approx(whole, rel=1e-6)


def test_another_reference_has_a_table_of_its_own(tmp_path: Path, model: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", seed=7)
    run_plans(
        [
            plan_of(tmp_path / "a", model),
            plan_of(
                tmp_path / "b", model, algorithm={**DPO, "reference_model": {"id": str(other)}}
            ),
        ],
        2,
    )
    mine, theirs = tables(tmp_path / "a"), tables(tmp_path / "b")
    assert not mine.keys() & theirs.keys()
    assert all(abs(a - b).max() > 0.1 for a, b in zip(mine.values(), theirs.values(), strict=True))
    first = events(tmp_path / "b" / "run", "eval")[0]
    assert abs(first["margin"]) > 1e-3  # from the first step on the policy is not the reference
