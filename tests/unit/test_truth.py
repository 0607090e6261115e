"""Predicted against measured: what a difference is, what is warned of, what the loop measures, and `drumline plan --check`."""

from __future__ import annotations

import json
import math
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import UserError
from drumline.plan.estimate import Estimate, HostMemory, Memory, Seconds, Traffic
from drumline.plan.plan import Plan, Predicted
from drumline.planner.report.check import check, only_shown
from drumline.report.details import prediction
from drumline.report.facts import RunFacts
from drumline.report.sections import ChartRegistry
from drumline.telemetry.events import EventLog, Measured
from drumline.telemetry.measure import HostPeak, planned_event
from drumline.telemetry.plan_accuracy import Comparison, Measurement, compare, notes
from tests.unit.test_loop import loop, of, plan
from tests.unit.test_report_progress import START, told

GIB = 2**30
ESTIMATE = Estimate(
    memory=Memory(
        parameters=100 * GIB,
        gradients=100 * GIB,
        optimizer=200 * GIB,
        activations=400 * GIB,
        logits=200 * GIB,
        buffers=0,
        overhead=50 * GIB,
        peak=1000 * GIB,
        reserved=1150 * GIB,
        phase="backward",
    ),
    host=HostMemory(load=GIB, train=GIB, save=GIB),
    traffic=Traffic(all_reduce=80, p2p=20),
    seconds=Seconds(compute=1.0, optimizer=0.5, rollout=3.0),
    tokens_per_s=1.0,
    mfu=None,
    limit=2000,
    calibrated=True,
)
MEASURED = Measurement(
    step=9,
    final=True,
    by="tracker",
    memory={
        "parameters": 100 * GIB,
        "gradients": 100 * GIB,
        "optimizer": 200 * GIB,
        "peak": 1000 * GIB,
    },
    by_rank={},
    host={"load": GIB, "train": GIB},
    ranks_per_host=1,
    seconds={"total": 1.5},
    timed=3,
    traffic=100.0,
    width=1.0,
)


def estimate_with(**memory: Any) -> Estimate:
    """Return the estimate with other figures of the memory."""
    changed = ESTIMATE.memory.model_copy(update=memory)
    return ESTIMATE.model_copy(update={"memory": changed})


def measured_with(**changes: Any) -> Measurement:
    return MEASURED.model_copy(update=changes)


def warned_categories(estimate: Estimate = ESTIMATE, **changes: Any) -> list[str]:
    rows = compare(estimate, measured_with(**changes))
    return [row.category for row in rows if row.warns]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"memory": {"peak": 1150 * GIB}}, []),
        ({"memory": {"peak": 1151 * GIB}}, ["peak"]),
        ({"memory": {"peak": 840 * GIB}}, ["peak"]),
        ({"memory": {"optimizer": 0, "gradients": 200 * GIB}}, ["optimizer", "gradients"]),
        ({"memory": {"reserved": 1100 * GIB}}, []),  # what torch does not own is not in it
        ({"memory": {"peak": 700 * GIB}, "width": 0.5}, []),  # half of what grows with tokens
        # Far below the plan's own, so only shown.
        ({"memory": {"peak": 990 * GIB}, "width": 0.5}, []),
        ({"memory": {"peak": 1010 * GIB}, "width": 0.5}, ["peak"]),
        ({"memory": {"peak": 1100 * GIB}, "width": 0.8}, ["peak"]),
        ({"host": {"train": int(1.4 * GIB)}}, []),  # 15% off, but within what the interpreter takes
        ({"host": {"train": 2 * GIB}}, ["host train"]),
        ({"host": {"train": 2 * GIB}, "ranks_per_host": 4}, []),
        # The host of a CPU run holds activations, and rows of a quarter of the planned tokens need less.
        ({"host": {"load": 0, "train": 0, "save": 0}, "width": 0.25}, ["host load"]),
        ({"host": {"train": 0}, "width": 0.8}, ["host train"]),
        ({"host": {"train": 2 * GIB}, "width": 0.25}, ["host train"]),
        ({"host": {"train": 0}, "width": 0.25, "by": "allocator"}, ["host train"]),
        ({"traffic": 116.0}, ["traffic"]),
        ({"traffic": None}, []),
        ({"seconds": {"total": 1.8}}, ["seconds"]),  # the rollout is no part of a step
        ({"seconds": {"total": 1.5, "optimizer": 5.0}}, []),  # a part is only shown
    ],
)
def test_what_is_warned_of(changes: dict[str, Any], expected: list[str]) -> None:
    assert warned_categories(**changes) == expected


def rows_of(estimate: Estimate, **changes: Any) -> dict[str, Comparison]:
    return {row.category: row for row in compare(estimate, measured_with(**changes))}


def test_peaks_are_compared_part_by_part_of_a_step() -> None:
    phases = {"forward": 700, "loss": 800, "head": 900, "blocks": 1000, "end": 600, "step": 450}
    estimate = estimate_with(phases={name: value * GIB for name, value in phases.items()})
    peaks = {"forward": 700 * GIB, "backward": 900 * GIB, "step": 450 * GIB, "clip": GIB}

    rows = rows_of(estimate, peaks=peaks)
    assert rows["peak, forward"].predicted == 800 * GIB
    assert rows["peak, backward"].predicted == 1000 * GIB
    assert rows["peak, backward"].measured == 900 * GIB
    assert rows["peak, step"].predicted == 450 * GIB
    # Nothing was predicted of it.
    assert "peak, clip" not in rows
    assert rows["activations, logits, buffers"].predicted == 600 * GIB
    assert not any(row.warns for row in rows.values())

    # Half of the tokens: half of what a part has besides the states, of 400 GiB.
    short = rows_of(estimate, peaks=peaks, width=0.5)
    assert short["peak, backward"].predicted == 700 * GIB
    assert short["peak, step"].predicted == 450 * GIB

    on_gpu = rows_of(estimate, peaks={"forward and backward": 900 * GIB}, by="allocator")
    assert on_gpu["peak, forward and backward"].predicted == 1000 * GIB


def test_seconds_are_compared_pass_by_pass_where_waiting_is_known() -> None:
    seconds = Seconds(compute=1.0, communication=0.25, optimizer=0.5, rollout=3.0, forward=0.25)
    estimate = ESTIMATE.model_copy(update={"seconds": seconds})
    known = {"total": 2.0, "forward": 0.5, "backward": 0.75, "communication": 0.25, "data": 0.5}

    rows = rows_of(estimate, seconds=known)
    predicted = {name: row.predicted for name, row in rows.items() if row.unit == "s"}
    assert predicted == {
        "seconds": 1.75,
        "seconds, forward": 0.25,
        "seconds, backward": 0.75,
        "seconds, communication": 0.25,
        "seconds, data": 0.0,
    }

    # A GPU's host does not see where one pass ends.
    rows = rows_of(estimate, seconds={"total": 2.0, "communication": 0.5})
    assert rows["seconds, computing"].predicted == 1.5
    assert rows["seconds, computing"].measured == 1.5

    # Where waiting is not known, passes would contain it.
    rows = rows_of(estimate, seconds={"total": 2.0, "forward": 0.5, "backward": 0.75})
    assert "seconds, forward" not in rows


def test_what_is_sampled_between_steps_is_none_of_a_tracked_step() -> None:
    phases = {"rollout": 1800 * GIB, "step": 1000 * GIB}
    sampling = estimate_with(phase="rollout", peak=1800 * GIB, phases=phases)
    assert warned_categories(sampling) == []
    assert warned_categories(sampling, by="allocator") == ["peak"]


@pytest.mark.parametrize(
    ("peak", "expected"),
    [(2 * 2**20, []), (150 * 2**20, []), (160 * 2**20, ["peak"]), (GIB, ["peak"])],
)
def test_of_little_it_is_bytes_that_count(peak: int, expected: list[str]) -> None:
    """A tiny model on a CPU that takes twice what was said is nothing to warn of: it is shown."""
    small = estimate_with(peak=2**20, activations=0, logits=0)
    memory = {"peak": peak}
    assert warned_categories(small, memory=memory) == expected

    rows = compare(small, measured_with(memory=memory))
    (row,) = [row for row in rows if row.category == "peak"]
    assert row.off > 0.15
    assert bool(only_shown(row)) == (not expected)


def test_seconds_count_only_by_rates_that_were_measured() -> None:
    guessed = ESTIMATE.model_copy(update={"calibrated": False})
    assert warned_categories(guessed, seconds={"total": 99.0}) == []

    (row,) = [row for row in compare(guessed, MEASURED) if row.unit == "s"]
    assert "calibrate" in row.note


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (100, 100, "as predicted"),
        (100, 112, "12% more"),
        (100, 40, "60% less"),
        (100, 100.5, "0.50% more"),
        (1, 37, "37 times as much"),
        (0, 5, "none predicted"),
        (0, 0, "as predicted"),
    ],
)
def test_by_how_much(predicted: float, measured: float, words: str) -> None:
    row = Comparison(category="peak", unit="bytes", predicted=predicted, measured=measured)
    assert row.describe_difference() == words
    assert math.isinf(row.off) == (words == "none predicted")

    line = row.line()
    assert "peak: predicted" in line
    assert line.endswith(words)


def test_notes_say_what_is_missing() -> None:
    assert notes(MEASURED) == []

    cases: list[tuple[str, dict[str, Any]]] = [
        ("too short to be measured", {"memory": {}}),
        ("too short to be timed", {"timed": 0}),
        ("50% of the planned tokens", {"width": 0.5}),
    ]
    for words, changes in cases:
        first = notes(measured_with(**changes))[0]
        assert words in first

    slow_count = measured_with(seconds={"total": 0.5, "counted": 2.0})
    assert notes(slow_count) == ["the instrumented step took 2 s, the others 0.5 s"]


# ------------------------------------------------------------------------------------------------------------- the loop


@pytest.mark.slow
def test_a_loop_tells_twice_and_the_display_once(tmp_path: Path) -> None:
    built, said = loop(tmp_path)
    built.run()
    first, last = of(said, "measured")

    assert first["step"] == 6
    assert not first["final"]
    assert first["timed"] == 3
    assert first["seconds"].keys() == {"total", "data", "communication", "optimizer", "counted"}
    assert first["host"]["load"] > 0
    assert first["ranks_per_host"] == 1

    assert last["step"] == 6
    assert last["final"]
    assert last["by"] == "tracker"
    assert last["host"]["save"] > 0
    assert last["memory"]["peak"] >= built.engine.weight.nbytes  # type: ignore[attr-defined]
    # Nothing was predicted.
    assert last["off"] == {}
    assert last["warned"] == []

    _, out = told(START, {"t": 0.0, **first}, {"t": 0.0, **last})
    (line,) = [line for line in out.splitlines() if "measured" in line]
    assert "drumline plan --check 'runs/my run'" in line


@pytest.mark.full
@pytest.mark.parametrize(
    ("steps", "words"), [(2, "too short to be measured"), (3, "too short to be timed")]
)
@pytest.mark.slow
def test_a_short_run_says_that_it_is(tmp_path: Path, steps: int, words: str) -> None:
    built, said = loop(tmp_path, steps=range(steps))
    built.run()
    (event,) = of(said, "measured")
    assert event["final"]
    assert words in " ".join(event["notes"])
    assert bool(event["memory"]) == (steps > 2)


@pytest.mark.slow
def test_a_wrong_plan_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built, said = loop(tmp_path)
    predicted = Predicted(estimate=ESTIMATE)
    built.measure.plan = built.plan.model_copy(update={"predicted": predicted})
    built.run()

    first, last = of(said, "measured")
    # The fake engine has neither.
    assert "optimizer" in first["warned"]
    assert "traffic" in last["warned"]

    words = "optimizer: predicted 200.00 GiB, measured 0 B, 100% less"
    assert any(words in line for line in first["warnings"])

    logged = [record for record in caplog.records if "optimizer" in record.message]
    assert len(logged) == 1


def test_the_peak_of_each_phase_is_its_own() -> None:
    host = HostPeak()
    # An allocator might hand out what it already has, and keep what is given back.
    block = mmap(-1, 64 * 2**20)
    block[::4096] = b"1" * len(block[::4096])

    host.end("train")
    with_block = host.bytes_["train"]
    block.close()
    host.end("train")
    host.end("save")

    # Other threads of this process take a little, too.
    assert with_block <= host.bytes_["train"] < with_block + 16 * 2**20
    assert host.bytes_["save"] <= with_block - 32 * 2**20


# ---------------------------------------------------------------------------------------------------------------- check


def write_run(folder: Path, estimate: Estimate | None, *measured: dict[str, Any]) -> Path:
    """Write a run with an estimate and with an event for each change of the measurement."""
    folder.mkdir(exist_ok=True)
    predicted = Predicted(estimate=estimate)
    made: Plan = plan(folder).model_copy(update={"predicted": predicted})
    made.save(folder / "plan.json")

    log = EventLog(folder / "events.jsonl")
    log.emit(planned_event(ESTIMATE))
    for changes in measured:
        metrics = MEASURED.model_dump() | changes
        log.emit(Measured(off={}, warned=[], warnings=[], notes=[], metrics=metrics))

    return folder


def test_the_page_sets_measured_beside_predicted_and_says_what_it_teaches(tmp_path: Path) -> None:
    phases = {"forward": 800 * GIB, "blocks": 1000 * GIB}
    measured = {
        "memory": {"parameters": 100 * GIB, "peak": 1500 * GIB},
        "peaks": {"forward": 800 * GIB, "backward": 1500 * GIB},
        "seconds": {"total": 3.0, "communication": 0.5},
    }
    run = RunFacts(write_run(tmp_path / "a b", estimate_with(phases=phases), measured))
    registry = ChartRegistry()
    shown = prediction(run, registry)
    assert shown is not None

    charts = {spec["title"]: spec for spec in registry.specs}
    peaks = charts["Peak of memory by part of a step"]
    assert peaks["rows"] == ["forward", "backward"]
    assert [series["name"] for series in peaks["series"]] == ["predicted", "measured"]
    assert peaks["series"][1]["x"] == [800 * GIB, 1500 * GIB]
    assert charts["Seconds of a step by part"]["rows"] == ["computing", "communication"]

    bytes_, seconds = shown.tables
    assert [row[0].value for row in bytes_.rows][:2] == ["parameters", "peak"]
    assert seconds.rows[0][0].value == "seconds"
    peak, step = shown.lessons
    assert "50% more in backward" in peak
    assert "most of it in computing" in step
    assert shown.command is not None
    assert shown.command.endswith("/a b' --learn")


def test_check_prints_a_row_a_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = {"memory": {"peak": 7 * GIB}}
    late = {"memory": {"parameters": 100 * GIB, "peak": 2000 * GIB}}
    run = write_run(tmp_path, ESTIMATE, early, late)
    assert check(run) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines:
        category, *figures = line.split() or [""]
        rows[category] = " ".join(figures)

    assert rows["parameters"] == "100.00 GiB 100.00 GiB as predicted"
    assert rows["peak"] == "1000.00 GiB 1.95 TiB 100% more"
    assert lines[-1] == "off by more than 15%: peak"

    assert check(run, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["category"]: row["warns"] for row in printed["rows"]} == {
        "parameters": False,
        "peak": True,
        "host load": False,
        "host train": False,
        "traffic": False,
        "seconds": False,
    }


@pytest.mark.parametrize(
    ("estimate", "events", "words"),
    [
        (None, [{}], "no estimate"),
        (ESTIMATE, [], "measured nothing in 0 steps"),
        (ESTIMATE, [{"memory": {}}], "measured nothing"),
    ],
)
def test_check_of_runs_that_cannot_be_checked(
    tmp_path: Path, estimate: Estimate | None, events: list[dict[str, Any]], words: str
) -> None:
    run = write_run(tmp_path, estimate, *events)
    with pytest.raises(UserError, match=words):
        check(run)


def test_check_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a run folder"):
        check(tmp_path)

    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="not one of this version"):
        check(tmp_path)

    old = write_run(tmp_path / "old", ESTIMATE)
    # As a version wrote it that measured less.
    event = {"t": 0, "kind": "measured", "memory": {"peak": 1}}
    with (old / "events.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")

    with pytest.raises(UserError, match="not one of this version"):
        check(old)
