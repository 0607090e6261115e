"""Modules of a user's own that spread otherwise than most: weights in two places, weights in a low type, inputs in fp32 beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load_values
from drumline.engine.tensor_parallel import _require_untied
from drumline.errors import ModelError, PlanError
from drumline.models.own import require_trainable
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.shared import Tied, UpsTied
from tests.distributed.test_own_models import staged
from tests.harness import losses

FILE = Path(__file__).with_name("shared.py")


def planned(run_dir: Path, build: str, strategy: Any, world: int, **sections: Any) -> Path:
    values = staged(run_dir, build, strategy)
    values["model"] = {"kind": "python", "path": f"{FILE}:{build}"}
    if build in ("Tied", "Repeated"):
        values["algorithm"] = {"kind": "python", "path": f"{FILE}:objective"}
        values["data"] = {"train": [{"kind": "python", "path": f"{FILE}:rows"}]}
    if build == "Staged":
        values["model"] = staged(run_dir, build, strategy)["model"]
    request = Request(load_values({**values, **sections}, []), world)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


@pytest.mark.full
def test_weights_in_two_places_are_trained_as_one(tmp_path: Path) -> None:
    builds = ("Tied", "Repeated")
    run_plans([planned(tmp_path / f"{build} alone", build, "single", 1) for build in builds], 1)
    run_plans([planned(tmp_path / build, build, "fsdp2", 2) for build in builds], 2)
    for build in builds:
        assert losses(tmp_path / build) == pytest.approx(
            losses(tmp_path / f"{build} alone"), rel=1e-5
        )


@pytest.mark.full
def test_inputs_meet_weights_of_a_low_type_under_zero(tmp_path: Path) -> None:
    low = {"precision": "bf16"}
    run_plans([planned(tmp_path / "alone", "Staged", "single", 1, **low)], 1)
    run_plans([planned(tmp_path / "zero2", "Staged", "zero2", 2, **low)], 2)
    assert losses(tmp_path / "zero2") == pytest.approx(losses(tmp_path / "alone"), rel=2e-2)


@pytest.mark.full
def test_ranks_go_on_from_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """Also of weights in bf16, of which it has copies."""
    sections = {
        "run": {"steps": 4, "dir": "", "report_to": [], "device": "cpu"},
        "checkpoint": {"export": "none", "every": 2},
    }
    strategy = {"kind": "local_sgd", "period": 3}
    whole, again = tmp_path / "whole", tmp_path / "again"

    def plan(run_dir: Path) -> Path:
        return planned(
            run_dir,
            "Low",
            strategy,
            2,
            **{**sections, "run": {**sections["run"], "dir": str(run_dir)}},
        )

    run_plans([plan(whole)], 2)
    second = plan(again)
    shutil.copytree(
        whole / "checkpoints" / "step-00000002", again / "checkpoints" / "step-00000002"
    )
    run_plans([second], 2)
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 2}


def test_a_tie_that_would_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight is also another module's weight"):
        _require_untied(UpsTied(), ["blocks.0.up"])
    _require_untied(UpsTied(), ["blocks.0.down", "first"])


def test_what_fsdp2_cannot_cut_is_refused() -> None:
    model = Tied()
    model.parts[0].weight.data = model.parts[0].weight.data.T.contiguous().T
    with pytest.raises(ModelError, match="is not contiguous"):
        require_trainable(model, cut=True, deepspeed=False)
    require_trainable(model, cut=False, deepspeed=False)
