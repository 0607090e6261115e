"""Modules of a user's own that spread otherwise than most: weights in two places, weights in a low
type, inputs in fp32 beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load_values
from drumline.engine.tensor_parallel import _require_untied
from drumline.errors import ModelError, PlanError
from drumline.models.own import require_trainable
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.setups import claim, copy_checkpoint
from tests.distributed.shared import Tied, UpsTied
from tests.distributed.test_own_models import staged
from tests.harness import losses

FILE = Path(__file__).with_name("shared.py")


def planned(run_dir: Path, build: str, strategy: Any, world: int, **sections: Any) -> Path:
    values = staged(run_dir, build, strategy)
    if build != "Staged":
        values["model"] = {"kind": "python", "path": f"{FILE}:{build}"}
    if build in ("Tied", "Repeated"):
        values["algorithm"] = {"kind": "python", "path": f"{FILE}:objective"}
        values["data"] = {"train": [{"kind": "python", "path": f"{FILE}:rows"}]}
    values |= sections
    return claim(Request(load_values(values, []), world))


@pytest.mark.full
def test_weights_in_two_places_are_trained_as_one(tmp_path: Path) -> None:
    builds = ("Tied", "Repeated")
    run_plans([planned(tmp_path / f"{build} alone", build, "single", 1) for build in builds], 1)
    run_plans([planned(tmp_path / build, build, "fsdp2", 2) for build in builds], 2)
    for build in builds:
        expected = losses(tmp_path / f"{build} alone")
        assert losses(tmp_path / build) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_inputs_meet_weights_of_a_low_type_under_zero(tmp_path: Path) -> None:
    low = {"precision": "bf16"}
    run_plans([planned(tmp_path / "alone", "Staged", "single", 1, **low)], 1)
    run_plans([planned(tmp_path / "zero2", "Staged", "zero2", 2, **low)], 2)
    expected = losses(tmp_path / "alone")
    assert losses(tmp_path / "zero2") == pytest.approx(expected, rel=2e-2)


@pytest.mark.full
def test_ranks_go_on_from_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """Also of weights in bf16, of which it has copies."""
    strategy = {"kind": "local_sgd", "period": 3}

    def plan(run_dir: Path) -> Path:
        run = {"steps": 4, "dir": str(run_dir), "report_to": [], "device": "cpu"}
        checkpoint = {"export": "none", "every": 2}
        return planned(run_dir, "Low", strategy, 2, run=run, checkpoint=checkpoint)

    whole = tmp_path / "whole"
    again = tmp_path / "again"
    run_plans([plan(whole)], 2)
    second = plan(again)
    copy_checkpoint(whole, second)
    run_plans([second], 2)
    expected = losses(whole)
    del expected[1], expected[2]
    assert losses(again) == expected


def test_a_tie_that_would_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight is also another module's weight"):
        _require_untied(UpsTied(), ["blocks.0.up"])
    _require_untied(UpsTied(), ["blocks.0.down", "first"])


def test_what_fsdp2_cannot_cut_is_refused() -> None:
    model = Tied()
    weight = model.parts[0].weight
    weight.data = weight.data.T.contiguous().T
    with pytest.raises(ModelError, match="is not contiguous"):
        require_trainable(model, cut=True, deepspeed=False)
    require_trainable(model, cut=False, deepspeed=False)
