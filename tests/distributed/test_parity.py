"""The heart of the project: the same global batch gives the same losses and weights however it is spread.

One row a strategy, one case a kind of work. Each row's losses, gradient norms, weights and moments are held against one
process with one micro-batch, in fp32, to 1e-5 relative.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.difference import difference
from drumline.config.load import load
from drumline.models import load as models
from drumline.plan.forecast.traffic import traffic
from drumline.plan.layout import Layout
from drumline.plan.plan import Plan
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.conftest import Record
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CASES, LOW, LOW_CASE, LOW_TOLERANCE, PAIRS, REFERENCE, TOLERANCE, Case, Row
from tests.harness import events, write_config
from tests.tiny import tiny_model_dir

# Under tensor parallelism it depends on how long a batch's longest row is, and ZeRO 3 gathers more where one process has had several
# engines, as here: see test_planner_traffic.
COUNTED = [
    (row, case)
    for row, case in PAIRS
    if case.name == "packed" and row.world_size > 1 and "tp 2" not in row.name and not row.name.startswith("zero3")
]
# In the step that is counted DDP of a static graph tells the others how it has arranged its buckets: 38 parameters.
ONCE = {"ddp 2, static graph": 4 * (1 + 39) / 2}
# Plans that one process group trains in a row.
AT_ONCE = 30
# The first test waits for the training of all rows.
pytestmark = pytest.mark.timeout(3000)


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merged[key] = {**merged[key], **value} if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def slug(row: Row, case: Case) -> str:
    return f"{row.name}-{case.name}".replace(" ", "_").replace(",", "")


def wanted(session: pytest.Session) -> dict[Case, list[Row]]:
    """The rows that the chosen tests of this file look at, and the reference: `-k "tp 2"` trains nothing else."""
    tests = [item for item in session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)]
    rows: dict[Case, list[Row]] = {case: [REFERENCE] for case in CASES} if any(not hasattr(item, "callspec") for item in tests) else {}
    for item in tests:
        if hasattr(item, "callspec"):
            rows.setdefault(item.callspec.params.get("case", LOW_CASE), [REFERENCE]).append(item.callspec.params["row"])
    return {case: list(dict.fromkeys(chosen)) for case, chosen in rows.items()}  # two tests may look at one run


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows × cases, trained: one process group for each world size and engine."""
    root = tmp_path_factory.mktemp("parity")
    model = tiny_model_dir(root / "model", layers=4)
    by_group: dict[tuple[int, str], list[Path]] = {}
    for case, rows in wanted(request.session).items():
        for row in rows:
            folder = root / slug(row, case)
            folder.mkdir()
            base = {
                "optimizer": {"lr": 3e-3},
                "batch": {"global_samples": 8, "micro_batch": 4},
                "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
            }
            path = write_config(folder, model, **merge(base, case.sections, row.sections))
            asked = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=row.world_size)
            plan = make_plan(asked, on_progress=lambda *_: None)
            plan_path, _ = claim_run_dir(plan, asked)
            by_group.setdefault((row.world_size, plan.engine), []).append(plan_path)
    for (world_size, _), plans in by_group.items():
        for start in range(0, len(plans), AT_ONCE):
            train(plans[start : start + AT_ONCE], world_size)
    return root


def train(plans: list[Path], world_size: int) -> None:
    """Where a rank fails, the rows that it did not come to are told; the others keep their results."""
    try:
        run_plans(plans, world_size)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        for plan in plans:
            if not any((plan.parent / "checkpoints").glob("step-*")):
                (plan.parent / "failure.txt").write_text(str(failure))


def trained(runs: Path, row: Row, case: Case) -> Path:
    run = runs / slug(row, case) / "run"
    failure = run / "failure.txt"
    assert not failure.exists(), failure.read_text()
    return run


@pytest.mark.parametrize(("row", "case"), PAIRS, ids=[f"{row.name}-{case.name}" for row, case in PAIRS])
def test_same_numbers_as_one_process(runs: Path, row: Row, case: Case, parity: Record) -> None:
    mine, reference = (trained(runs, r, case) for r in (row, REFERENCE))
    apart = difference(mine, reference)
    parity(row, case, apart)
    assert len(events(mine, "step")) == case.sections.get("run", {}).get("steps", 4)
    assert apart.largest <= TOLERANCE, apart
    assert [e["tokens"] for e in events(mine, "step")] == [e["tokens"] for e in events(reference, "step")]
    figure = "reward" if events(mine, "rollout") else "loss"
    held_out = [[e[figure] for e in events(run, "eval")] for run in (mine, reference)]
    assert held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE)


@pytest.mark.parametrize(("row", "case"), COUNTED, ids=[row.name for row, _ in COUNTED])
def test_the_planner_says_what_a_step_sends(runs: Path, row: Row, case: Case) -> None:
    run = trained(runs, row, case)
    plan = Plan.load(run / "plan.json")
    facts = models.facts(models.load_config(plan.model_path, plan.config.model), plan.config.data.max_length, plan.config.adapter)
    told = traffic(Layout.of(plan), facts, step=2).total + ONCE.get(row.name, 0)
    assert events(run, "step")[-1]["sent_bytes"] == pytest.approx(told, rel=1e-6, abs=1)


@pytest.mark.parametrize("row", LOW, ids=lambda r: r.name)
def test_low_precision_stays_near(runs: Path, row: Row) -> None:
    mine, reference = (events(runs / slug(r, LOW_CASE) / "run", "step") for r in (row, REFERENCE))
    for key, tolerance in LOW_TOLERANCE.items():
        figures = [[e[key] for e in steps] for steps in (mine, reference)]
        assert figures[0] == pytest.approx(figures[1], rel=tolerance) and figures[0] != figures[1], key


def test_the_reference_learns(runs: Path) -> None:
    """Parity of runs that stand still would prove nothing."""
    for case in CASES:
        if case.sections.get("run", {}).get("steps", 4) < 4:  # too few for a loss or a reward to say much
            assert min(e["grad_norm"] for e in events(runs / slug(REFERENCE, case) / "run", "step")) > 0.05, case.name
            continue
        figures = [e["loss"] for e in events(runs / slug(REFERENCE, case) / "run", "eval")]
        assert figures[-1] < figures[0] - 0.02, case.name
