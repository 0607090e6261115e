"""Later plans learn from measured runs of this machine: `drumline plan --check RUN --learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.errors import UserError
from drumline.planner import learned
from drumline.planner.learned import (
    LearnedRun,
    devices_of,
    factors_of_runs,
    learned_file,
    read_learned,
)
from drumline.planner.search.correction import Factors
from drumline.planner.search.search import search
from drumline.telemetry.plan_accuracy import Comparison, lessons
from tests.harness import ENV, drumline, events, write_config
from tests.tiny import tiny_model_dir
from tests.unit.shapes import question


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(folder))
    return folder


def run_of(seconds: float, name: str = "a", devices: str = "1 × cpu") -> LearnedRun:
    return LearnedRun(run=f"/runs/{name}", devices=devices, factors=Factors(seconds=seconds))


def test_factors_are_a_bounded_mean() -> None:
    assert factors_of_runs([run_of(1.5), run_of(2 / 3)]).seconds == pytest.approx(1)
    assert factors_of_runs([run_of(1.2)]).seconds == pytest.approx(1.2)
    assert factors_of_runs([run_of(50.0)]).seconds == learned.MOST_TIMES
    assert factors_of_runs([run_of(0.01)]).seconds == learned.FEWEST_TIMES


def test_estimates_are_scaled_and_their_ranges_stay() -> None:
    asked = question("1b", "8xa100-80g", batch={"global_samples": 64})
    first = search(asked).ranked[0]
    slower = Factors(seconds=1.25, live=1.1)
    found = {each.name: each for each in search(asked.with_learned(slower)).ranked}
    other = found[first.name]

    assert other.estimate.seconds_range == first.estimate.seconds_range
    if other.layout == first.layout:
        assert other.estimate.seconds.total == pytest.approx(1.25 * first.estimate.seconds.total)
        assert other.estimate.memory.activations > first.estimate.memory.activations


def comparison(category: str, measured: float) -> Comparison:
    unit: Any = "s" if category == "seconds" else "bytes"
    predicted = 10.0 if unit == "s" else 10e9
    return Comparison(category=category, unit=unit, predicted=predicted, measured=measured)


def test_what_is_off_names_the_constant_that_it_would_move() -> None:
    (seconds,) = lessons([comparison("seconds", 15.0)])
    (reserved,) = lessons([comparison("reserved", 15e9)])
    (activations,) = lessons([comparison("activations", 15e9)])

    assert "PRODUCTS" in seconds and "drumline calibrate" in seconds
    assert "FRAGMENTS" in reserved and "1.5 ×" in reserved
    assert "--trace" in activations
    assert not lessons([comparison("seconds", 10.1)])


def test_seconds_teach_by_the_part_that_is_off_most() -> None:
    total = comparison("seconds", 15.0)
    small = Comparison(category="seconds, backward", unit="s", predicted=4.0, measured=5.0)
    waiting = Comparison(category="seconds, communication", unit="s", predicted=1.0, measured=5.0)

    (links,) = lessons([total, small, waiting])
    assert "50% more, most of it in communication" in links
    assert "cluster.inter" in links

    # The surplus of products is fitted to GPUs, and moves by the part that it makes.
    (products,) = lessons([total, small], constants={"PRODUCTS": 1.2})
    assert "PRODUCTS" in products and "from 1.2 to 1.5" in products
    (processor,) = lessons([total, small], on_cpu=True)
    assert "PRODUCTS" not in processor and "LOOP" in processor


def test_a_peak_teaches_by_the_part_of_the_step_that_is_off_most() -> None:
    peak = comparison("peak", 15e9)
    forward = Comparison(category="peak, forward", unit="bytes", predicted=8e9, measured=8e9)
    backward = Comparison(category="peak, backward", unit="bytes", predicted=10e9, measured=15e9)

    (lesson,) = lessons([peak, forward, backward])
    assert lesson.startswith("peak: 50% more in backward")
    assert "--trace" in lesson


@pytest.mark.slow
def test_a_run_teaches_later_plans_until_they_are_told_not_to(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    config = write_config(tmp_path, model, run={"steps": 5})
    assert drumline("train", config).code == 0
    run = tmp_path / "run"

    *_, last = events(run, "measured")
    assert last["seconds"]["forward"] > 0 and last["seconds"]["backward"] > 0
    assert last["seconds"]["forward"] + last["seconds"]["backward"] < last["seconds"]["total"]
    assert last["peaks"].keys() == {"forward", "backward", "clip", "step"}
    assert max(last["peaks"].values()) == last["memory"]["peak"]

    kept = drumline("plan", "--check", run, "--learn")
    assert kept.code == 0, kept.err
    assert "kept for later plans of 1 × cpu" in kept.out
    (known,) = read_learned("1 × cpu")
    assert known.run == str(run)

    taught = drumline("plan", config)
    assert "corrected by 1 run measured on 1 × cpu (run)" in taught.err
    plain = drumline("plan", config, "--no-learn")
    assert "corrected by" not in plain.err
    elsewhere = drumline(
        "plan", "--model", "llama-3.1-8b", "--cluster", "8xh100-80g", "--length", "1024"
    )
    assert "corrected by" not in elsewhere.err

    again = drumline("plan", "--check", run, "--learn")
    assert again.code == 0
    assert len(read_learned("1 × cpu")) == 1


def test_the_newest_runs_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learned, "MOST_RUNS", 2)
    asked = question("1b", "8xa100-80g", batch={"global_samples": 64})
    monkeypatch.setattr(learned, "factors_of", lambda *_: Factors(seconds=1.1))
    plan = search(asked).ranked[0]

    class Planned:
        predicted = type("Predicted", (), {"estimate": plan.estimate})

    given: Any = Planned
    for name in ("a", "b", "c"):
        learned.learn(tmp_path / name, given, given, asked.cluster)
    kept = read_learned(devices_of(asked.cluster))

    assert [Path(run.run).name for run in kept] == ["b", "c"]


def test_a_damaged_file_is_one_line() -> None:
    learned_file().parent.mkdir(parents=True)
    learned_file().write_text("[{")

    with pytest.raises(UserError, match="no file of measured runs"):
        read_learned("1 × cpu")


def test_learn_without_a_run_is_refused() -> None:
    finished = drumline("plan", "--model", "llama-3.1-8b", "--cluster", "h100-80g", "--learn")

    assert finished.code == 2
    assert "add --check RUN" in finished.err
