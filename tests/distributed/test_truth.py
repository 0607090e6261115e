"""Every run says what it was expected to need and what it took; on two processes the two agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.plan.plan import Plan
from drumline.telemetry.traffic import Traffic
from drumline.train.entry import run
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import drumline, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

# How far the peak may lie off. It is some MB of a tiny model here, of which FSDP2's buffers are predicted too large.
ROWS = {"ddp": 0.15, "fsdp2": 0.25, "zero2": 0.15}
# All rows are as wide as planned, so that the peak is that of what was predicted.
SECTIONS: dict[str, Any] = {
    "data": {"max_length": 64, "packing": True},
    "batch": {"global_samples": 4, "micro_batch": 1},
    "run": {"steps": 6},
    "eval": {"at_start": False},
    "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder for each row, and `wrong`: ddp by a plan that was tampered with."""
    root = tmp_path_factory.mktemp("truth")
    model = tiny_model_dir(root / "model", hidden=64)
    native, deepspeed = [], []
    for name in (*ROWS, "wrong"):
        folder = root / name
        folder.mkdir()
        path = write_config(folder, model, strategy="ddp" if name == "wrong" else name, **SECTIONS)
        asked = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=2)
        plan_path, _ = claim_run_dir(make_plan(asked, on_progress=lambda *_: None), asked)
        (deepspeed if name == "zero2" else native).append(plan_path)
        if name == "wrong":
            values = json.loads(plan_path.read_text())
            memory, traffic = (
                values["predicted"]["estimate"]["memory"],
                values["predicted"]["estimate"]["traffic"],
            )
            memory["optimizer"] *= 2
            traffic["all_reduce"] /= 2
            plan_path.write_text(json.dumps(values))
    run_plans(native, 2, counted=True)
    run_plans(deepspeed, 2, counted=True)
    return root


@pytest.mark.claim("ranks hold and send what the plan says")
@pytest.mark.parametrize("name", ROWS)
def test_what_ranks_hold_and_send_is_what_was_predicted(runs: Path, name: str) -> None:
    (planned,) = events(runs / name / "run", "planned")
    first, last = events(runs / name / "run", "measured")
    assert (first["final"], last["final"], last["by"]) == (False, True, "tracker")
    for category in ("parameters", "gradients", "optimizer"):
        assert last["memory"][category] == planned["memory"][category], category
        assert max(last["by_rank"][category]) == last["memory"][category]
    assert last["traffic"] == pytest.approx(planned["traffic"]["total"], rel=1e-6)
    assert abs(last["off"]["peak"]) < ROWS[name]
    # Of some MB bytes count, no share; seconds are the machine's.
    assert set(last["warned"]) <= {"seconds"}, last["warnings"]


def test_a_wrong_plan_is_warned_of(runs: Path) -> None:
    (first, last) = events(runs / "wrong" / "run", "measured")
    for event in (first, last):
        assert "traffic" in event["warned"] and event["off"]["optimizer"] == -0.5
        assert any("100% more" in line for line in event["warnings"] if line.startswith("traffic"))
    told = drumline("plan", "--check", runs / "wrong" / "run")
    assert told.code == 0, told.err
    assert "off by more than 15%: traffic" in told.out and "100% more" in told.out  # the traffic


def test_what_is_measured_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the one counted step: the same losses and weights, bit for bit."""
    model = tiny_model_dir(tmp_path / "model")
    for name in ("counted", "not counted"):
        folder = tmp_path / name
        folder.mkdir()
        asked = Request(
            load(write_config(folder, model, **SECTIONS), [f"data.cache_dir={tmp_path / 'cache'}"])
        )
        plan_path, _ = claim_run_dir(make_plan(asked, on_progress=lambda *_: None), asked)
        run(Plan.load(plan_path), None)
        monkeypatch.setattr(Traffic, "FIRST", 1000)
    found = [
        events(tmp_path / name / "run", "measured")[-1]["memory"]
        for name in ("counted", "not counted")
    ]
    assert found[0]["peak"] > 0 and found[1] == {}
    assert losses(tmp_path / "counted" / "run") == losses(tmp_path / "not counted" / "run")
    same_weights(tmp_path / "counted" / "run", tmp_path / "not counted" / "run", tolerance=0.0)
