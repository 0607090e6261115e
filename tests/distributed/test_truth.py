"""Every run says what it was expected to need and what it took; on two processes the two agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.plan.plan import Plan
from drumline.telemetry.traffic import Traffic
from drumline.train.entry import run
from tests.distributed.setups import UNSAVED, plan_in, train
from tests.harness import Sections, events, losses, run_drumline, same_weights
from tests.tiny import tiny_model_dir

# How far the peak may lie off. It is some MB of a tiny model here, of which FSDP2's buffers are
# predicted too large.
ROWS = {"ddp": 0.15, "fsdp2": 0.25, "zero2": 0.15}
# All rows are as wide as planned, so that the peak is that of what was predicted.
SECTIONS: Sections = {
    "data": {"max_length": 64, "packing": True},
    "batch": {"global_samples": 4, "micro_batch": 1},
    "run": {"steps": 6},
    "eval": {"at_start": False},
    "checkpoint": UNSAVED,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder for each row, and `wrong`: ddp by a plan that was tampered with."""
    root = tmp_path_factory.mktemp("truth")
    model = tiny_model_dir(root / "model", hidden=64)
    plans = {}
    for name in ROWS:
        plans[name] = plan_in(root, name, 2, model, strategy=name, **SECTIONS)
    plans["wrong"] = plan_in(root, "wrong", 2, model, strategy="ddp", **SECTIONS)
    tamper(plans["wrong"])
    train(plans.values(), counted=True)
    return root


def tamper(path: Path) -> None:
    values = json.loads(path.read_text())
    estimate = values["predicted"]["estimate"]
    estimate["memory"]["optimizer"] *= 2
    estimate["traffic"]["all_reduce"] /= 2
    path.write_text(json.dumps(values))


@pytest.mark.claim("ranks hold and send what the plan says")
@pytest.mark.parametrize("name", ROWS)
def test_what_ranks_hold_and_send_is_what_was_predicted(runs: Path, name: str) -> None:
    run = runs / name / "run"
    (planned,) = events(run, "planned")
    first, last = events(run, "measured")
    assert not first["final"]
    assert last["final"]
    assert last["by"] == "tracker"
    for category in ("parameters", "gradients", "optimizer"):
        held = last["memory"][category]
        assert held == planned["memory"][category], category
        assert max(last["by_rank"][category]) == held
    expected = planned["traffic"]["total"]
    assert last["traffic"] == pytest.approx(expected, rel=1e-6)
    assert abs(last["off"]["peak"]) < ROWS[name]
    # Of some MB bytes count, no share; seconds are the machine's.
    assert set(last["warned"]) <= {"seconds"}, last["warnings"]


def test_a_wrong_plan_is_warned_of(runs: Path) -> None:
    run = runs / "wrong" / "run"
    events_of_both = events(run, "measured")
    assert len(events_of_both) == 2
    for event in events_of_both:
        assert "traffic" in event["warned"]
        assert event["off"]["optimizer"] == -0.5
        warnings = [line for line in event["warnings"] if line.startswith("traffic")]
        assert any("100% more" in line for line in warnings)
    told = run_drumline("plan", "--check", run)
    assert "off by more than 15%: traffic" in told.out
    assert "100% more" in told.out  # the traffic


def test_what_is_measured_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the one counted step: the same losses and weights, bit for bit."""
    model = tiny_model_dir(tmp_path / "model")
    runs = []
    for name in ("counted", "not counted"):
        path = plan_in(tmp_path, name, 1, model, **SECTIONS)
        run(Plan.load(path), None)
        runs.append(path.parent)
        monkeypatch.setattr(Traffic, "FIRST", 1000)
    counted, other = runs
    assert events(counted, "measured")[-1]["memory"]["peak"] > 0
    assert events(other, "measured")[-1]["memory"] == {}
    assert losses(counted) == losses(other)
    same_weights(counted, other, tolerance=0.0)
