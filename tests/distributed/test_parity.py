"""The heart of the project: the same global batch gives the same losses and weights however it is spread.

One row a strategy, one case a kind of work; a covering array of both, and with `--full` the whole cross. Each row's losses, gradient
norms, weights and moments are held against one process with one micro-batch, in fp32, to 1e-5 relative.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.models import load as models
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import stage_of, state_of
from drumline.planner.cost.traffic import flows
from drumline.telemetry.events import last_measurement, read
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.conftest import Record
from tests.distributed.ranks import run_plans
from tests.distributed.rows import (
    COVERING,
    LOW,
    LOW_AGAIN,
    LOW_CASE,
    LOW_TOLERANCE,
    PAIRS,
    REFERENCES,
    STEPS,
    TOLERANCE,
    Case,
    Row,
    engine_of,
    group_of,
)
from tests.harness import events, write_config
from tests.tiny import tiny_architecture_dir, tiny_model_dir

# Under tensor parallelism it depends on how long a batch's longest row is, and ZeRO 3 gathers more where one process has had several
# engines, as here: see test_planner_traffic.
COUNTED = [
    (row, case)
    for row, case in PAIRS
    if case.name == "packed"
    and row.world_size > 1
    and "tp 2" not in row.name
    and not row.name.startswith("zero3")
]
# What exchanges send hangs on the width of batches, which is fixed in a pipeline alone; not on the routing.
EXPERTS = [(row, case) for row, case in PAIRS if "ep 2" in row.name]
COUNTED += [(row, case) for row, case in EXPERTS if "pp 2" in row.name]
# In the step that is counted DDP of a static graph tells the others how it has arranged its buckets: 20 parameters.
ONCE = {"ddp 2, static graph": 4 * (1 + 21) / 2}
ZERO = [
    (row, case)
    for row, case in PAIRS
    if case.name == "packed" and row.world_size > 1 and engine_of(row) == "zero"
]
# Plans that one process group trains in a row.
AT_ONCE = 30
# The first test of a group waits for the training of its rows.
pytestmark = pytest.mark.timeout(3000)


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merged[key] = (
                {**merged[key], **value}
                if isinstance(value, dict) and isinstance(merged.get(key), dict)
                else value
            )
    return merged


def slug(row: Row, case: Case) -> str:
    return f"{row.name}-{case.name}".replace(" ", "_").replace(",", "")


def wanted(session: pytest.Session, group: str) -> list[tuple[Row, Case]]:
    """What the chosen tests of this file look at in one group: `-k "tp 2"` trains nothing else."""
    tests = [
        item
        for item in session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    pairs = [
        (t.callspec.params["row"], t.callspec.params.get("case", LOW_CASE))
        for t in tests
        if hasattr(t, "callspec")
    ]
    # Two tests may look at one run.
    return list(dict.fromkeys(pair for pair in pairs if group_of(pair[0]) == group))


class Runs:
    """Rows × cases, trained when the first test of a group asks: one process group each, and one for the references."""

    def __init__(self, root: Path, session: pytest.Session) -> None:
        self.root, self.session = root, session
        self.models: dict[str, Path] = {}
        self.groups: set[str] = set()

    def model(self, row: Row, case: Case) -> Path:
        kind = case.architecture
        name = f"{kind}-{row.layers}"
        if name not in self.models:
            folder = self.root / name
            self.models[name] = (
                tiny_model_dir(folder, layers=row.layers)
                if kind == "llama"
                else tiny_architecture_dir(folder, kind)
            )
        return self.models[name]

    def plan(self, row: Row, case: Case) -> Path:
        folder = self.root / slug(row, case)
        folder.mkdir()
        base = {
            "optimizer": {"lr": 3e-3},
            "batch": {"global_samples": 8, "micro_batch": 4},
            "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
            "run": {"steps": STEPS},
            "eval": {"at_start": row in REFERENCES.values()},  # what they learn is held against it
        }
        path = write_config(
            folder, self.model(row, case), **merge(base, case.sections, row.sections)
        )
        asked = Request(
            load(path, [f"data.cache_dir={self.root / 'cache'}"]), world_size=row.world_size
        )
        return claim_run_dir(make_plan(asked, on_progress=lambda *_: None), asked)[0]

    def train(self, pairs: list[tuple[Row, Case]]) -> None:
        new = [(row, case) for row, case in pairs if not (self.root / slug(row, case)).exists()]
        for start in range(0, len(new), AT_ONCE):
            some = new[start : start + AT_ONCE]
            plans = {pair: self.plan(*pair) for pair in some}
            train(
                list(plans.values()),
                some[0][0].world_size,
                [plans[pair] for pair in some if pair in COUNTED or pair in EXPERTS],
            )

    def of(self, row: Row, case: Case) -> Path:
        """The run folder of a row in a case."""
        if row in REFERENCES.values():
            self.train([(row, case)])
        elif (group := group_of(row)) not in self.groups:
            self.groups.add(group)
            pairs = wanted(self.session, group)
            self.train(pairs)
            self.train(list(dict.fromkeys((REFERENCES[row.layers], case) for row, case in pairs)))
        run = self.root / slug(row, case) / "run"
        failure = run / "failure.txt"
        assert not failure.exists(), failure.read_text()
        return run


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"), request.session)


def train(plans: list[Path], world_size: int, counted: list[Path]) -> None:
    """Where a rank fails, the rows that it did not come to are told; the others keep their results."""
    try:
        run_plans(plans, world_size, counted=counted)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        for plan in plans:
            if not any((plan.parent / "checkpoints").glob("step-*")):
                (plan.parent / "failure.txt").write_text(str(failure))


def params(pairs: list[tuple[Row, Case]], name: str) -> list[Any]:
    """Those beyond the covering array are the full cross."""
    return [
        pytest.param(
            row,
            case,
            id=name.format(row=row, case=case),
            marks=[] if (row.name, case.name) in COVERING else pytest.mark.full,
        )
        for row, case in pairs
    ]


def learns(reference: Path, case: Case) -> None:
    """Parity of runs that stand still would prove nothing."""
    if (
        case.sections.get("run", {}).get("steps", STEPS) < STEPS
    ):  # too few for a loss or a reward to say much
        assert min(e["grad_norm"] for e in events(reference, "step")) > 0.05
        return
    figures = [e["loss"] for e in events(reference, "eval")]
    assert figures[-1] < figures[0] - 0.02


@pytest.mark.claim("the same numbers however the work is spread, 1e-5 in fp32")
@pytest.mark.parametrize(("row", "case"), params(PAIRS, "{row.name}-{case.name}"))
def test_same_numbers_as_one_process(runs: Runs, row: Row, case: Case, parity: Record) -> None:
    mine, reference = (runs.of(r, case) for r in (row, REFERENCES[row.layers]))
    apart = difference(mine, reference)
    parity(row, case, apart)
    assert len(events(mine, "step")) == case.sections.get("run", {}).get("steps", STEPS)
    assert apart.largest <= TOLERANCE, apart
    assert [e["tokens"] for e in events(mine, "step")] == [
        e["tokens"] for e in events(reference, "step")
    ]
    figure = "reward" if events(mine, "rollout") else "loss"
    held_out = [events(run, "eval")[-1][figure] for run in (mine, reference)]
    assert held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE)
    learns(reference, case)


@pytest.mark.claim("ranks hold and send what the plan says")
@pytest.mark.parametrize(("row", "case"), params(COUNTED, "{row.name}-{case.name}"))
def test_the_planner_says_what_a_step_sends(runs: Runs, row: Row, case: Case) -> None:
    run = runs.of(row, case)
    plan = Plan.load(run / "plan.json")
    facts = models.facts(
        models.load_config(plan.model_path, plan.config.model),
        plan.config.data.max_length,
        plan.config.adapter,
    )
    told = flows(plan, facts, step=2).traffic().total + ONCE.get(row.name, 0)
    assert events(run, "step")[-1]["sent_bytes"] == pytest.approx(told, rel=1e-6, abs=1)


@pytest.mark.parametrize(("row", "case"), params(ZERO, "{row.name}-{case.name}"))
def test_zero_measures_how_long_ranks_wait(runs: Runs, row: Row, case: Case) -> None:
    waits = [event["comm_s"] / event["seconds"] for event in events(runs.of(row, case), "step")]
    assert all(0 <= wait < 1 for wait in waits) and max(waits) > 0, waits


@pytest.mark.parametrize(("row", "case"), params(EXPERTS, "{row.name}-{case.name}"))
def test_experts_are_held_as_planned(runs: Runs, row: Row, case: Case) -> None:
    run = runs.of(row, case)
    plan = Plan.load(run / "plan.json")
    facts = models.facts(
        models.load_config(plan.model_path, plan.config.model),
        plan.config.data.max_length,
        plan.config.adapter,
    )
    states = [state_of(plan, facts, stage_of(plan, facts, stage)) for stage in range(plan.mesh.pp)]
    memory = last_measurement(read(run / "events.jsonl"))
    assert memory is not None
    for part in ("parameters", "optimizer"):
        assert max(memory.by_rank[part]) == max(getattr(state, part) for state in states), part


@pytest.mark.claim("low precision stays near fp32")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(r, id=r.name, marks=pytest.mark.full if r.name in LOW_AGAIN else [])
        for r in LOW
    ],
)
def test_low_precision_stays_near(runs: Runs, row: Row) -> None:
    mine, reference = (events(runs.of(r, LOW_CASE), "step") for r in (row, REFERENCES[row.layers]))
    for key, tolerance in LOW_TOLERANCE.items():
        figures = [[e[key] for e in steps] for steps in (mine, reference)]
        assert (
            figures[0] == pytest.approx(figures[1], rel=tolerance) and figures[0] != figures[1]
        ), key
