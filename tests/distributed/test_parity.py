"""The heart of the project: the same global batch gives the same losses and weights however it is
spread.

One row a strategy, one case a kind of work; a covering array of both, and with `--full` the whole
cross. Each row's losses, gradient norms, weights and moments are held against one process with one
micro-batch, in fp32, to 1e-5 relative.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from tests.distributed.conftest import Record
from tests.distributed.promises import held_as_planned, sent_as_planned
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
from tests.distributed.setups import EIGHT_BY_FOUR, UNSAVED, chosen_params, merge, plan_in, slug
from tests.distributed.setups import case as case_of
from tests.distributed.test_distill import teacher_dir
from tests.harness import column, events
from tests.tiny import CALLING, tiny_architecture_dir, tiny_calling_dir, tiny_model_dir


def is_counted(row: Row, case: Case) -> bool:
    """Whether the planner's bytes are held against a run's.

    Under tensor parallelism they depend on how long a batch's longest row is, and ZeRO 3 gathers
    more where one process has had several engines, as here: see test_planner_traffic. What
    exchanges of experts send hangs on the width of batches, which is fixed in a pipeline and with
    parts of rows alone; not on the routing. Heads are taken to be of one width, which those of
    DeepSeek-V3 are not.
    """
    if "ep 2" in row.name:
        has_one_head_width = case.architecture != "deepseek_v3"
        return "pp 2" in row.name or ("cp 2" in row.name and has_one_head_width)
    if case.name != "packed" or row.world_size == 1:
        return False
    return "tp 2" not in row.name and not row.name.startswith("zero3")


def is_zero(row: Row, case: Case) -> bool:
    return case.name == "packed" and row.world_size > 1 and engine_of(row) == "zero"


COUNTED = [pair for pair in PAIRS if is_counted(*pair)]
EXPERTS = [(row, case) for row, case in PAIRS if "ep 2" in row.name]
# In the step that is counted DDP of a static graph tells the others how it has arranged its
# buckets: 20 parameters.
ONCE = {"ddp 2, static graph": 4 * (1 + 21) / 2}
ZERO = [pair for pair in PAIRS if is_zero(*pair)]
# Plans that one process group trains in a row.
AT_ONCE = 30
# The first test of a group waits for the training of its rows.
pytestmark = pytest.mark.timeout(3000)


def run_name(row: Row, case: Case) -> str:
    return slug(f"{row.name}-{case.name}")


def steps_of(case: Case) -> int:
    steps: int = case.sections.get("run", {}).get("steps", STEPS)
    return steps


def wanted(session: pytest.Session, group: str) -> list[tuple[Row, Case]]:
    """What the chosen tests of this file look at in one group: `-k "tp 2"` trains nothing else."""
    # Two tests may look at one run.
    pairs: dict[tuple[Row, Case], None] = {}
    for params in chosen_params(session, __file__):
        row = params["row"]
        if group_of(row) == group:
            pairs[row, params.get("case", LOW_CASE)] = None
    return list(pairs)


class Runs:
    """Rows × cases, trained when the first test of a group asks: one process group each, and one
    for the references."""

    def __init__(self, root: Path, session: pytest.Session) -> None:
        self.root = root
        self.session = session
        self.models: dict[str, Path] = {}
        self.groups: set[str] = set()

    def model(self, row: Row, case: Case) -> Path:
        kind = case.architecture
        name = f"{kind}-{row.layers}"
        if name not in self.models:
            folder = self.root / name
            if kind == "llama":
                self.models[name] = tiny_model_dir(folder, layers=row.layers)
            elif kind == CALLING:
                self.models[name] = tiny_calling_dir(folder, layers=row.layers)
            else:
                self.models[name] = tiny_architecture_dir(folder, kind)
        return self.models[name]

    @functools.cached_property
    def teacher(self) -> Path:
        """The folder of the teacher's model."""
        return teacher_dir(self.root)

    def plan(self, row: Row, case: Case) -> Path:
        is_reference = row in REFERENCES.values()
        base = {
            "optimizer": {"lr": 3e-3},
            "batch": EIGHT_BY_FOUR,
            "checkpoint": UNSAVED,
            "run": {"steps": STEPS},
            "eval": {"at_start": is_reference},  # what they learn is held against it
        }
        sections = merge(base, case.sections, row.sections)
        if case.has_teacher:
            teacher = {"id": str(self.teacher)}
            sections = merge(sections, {"algorithm": {"teacher": teacher}})
        model = self.model(row, case)
        return plan_in(self.root, run_name(row, case), row.world_size, model, **sections)

    def train(self, pairs: list[tuple[Row, Case]]) -> None:
        new = [pair for pair in pairs if not (self.root / run_name(*pair)).exists()]
        for start in range(0, len(new), AT_ONCE):
            some = new[start : start + AT_ONCE]
            plans = []
            counted = []
            for row, case in some:
                path = self.plan(row, case)
                plans.append(path)
                if (row, case) in COUNTED or (row, case) in EXPERTS:
                    counted.append(path)
            train(plans, some[0][0].world_size, counted)

    def of(self, row: Row, case: Case) -> Path:
        """The run folder of a row in a case."""
        if row in REFERENCES.values():
            self.train([(row, case)])
        else:
            self.train_group(group_of(row))
        run = self.root / run_name(row, case) / "run"
        failure = run / "failure.txt"
        assert not failure.exists(), failure.read_text()
        return run

    def train_group(self, group: str) -> None:
        """Train the chosen rows of a group and what they are held against, once."""
        if group in self.groups:
            return
        self.groups.add(group)
        pairs = wanted(self.session, group)
        self.train(pairs)
        references = {(REFERENCES[row.layers], case): None for row, case in pairs}
        self.train(list(references))

    def reference(self, row: Row, case: Case) -> Path:
        """The run folder of one process, which a row is held against."""
        return self.of(REFERENCES[row.layers], case)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"), request.session)


def train(plans: list[Path], world_size: int, counted: list[Path]) -> None:
    """Where a rank fails, the rows that it did not come to are told; the others keep their results."""
    try:
        run_plans(plans, world_size, counted=counted)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        for plan in plans:
            run = plan.parent
            if not any((run / "checkpoints").glob("step-*")):
                (run / "failure.txt").write_text(str(failure))


def params(pairs: list[tuple[Row, Case]]) -> list[Any]:
    """Those beyond the covering array are the full cross."""
    found = []
    for row, case in pairs:
        name = f"{row.name}-{case.name}"
        full = (row.name, case.name) not in COVERING
        found.append(case_of(row, case, id=name, full=full))
    return found


def learns(reference: Path, case: Case) -> None:
    """Parity of runs that stand still would prove nothing."""
    # Too few steps for a loss or a reward to say much.
    if steps_of(case) < STEPS or events(reference, "rollout"):
        assert min(column(reference, "grad_norm")) > 0.05
        return
    figures = column(reference, "loss", "eval")
    assert figures[-1] < figures[0] - 0.02


def loads(run: Path) -> list[dict[str, list[int]]]:
    return [event["tokens"] for event in events(run, "expert_load")]


@pytest.mark.claim("the same numbers however the work is spread, 1e-5 in fp32")
@pytest.mark.parametrize(("row", "case"), params(PAIRS))
def test_same_numbers_as_one_process(runs: Runs, row: Row, case: Case, parity: Record) -> None:
    mine = runs.of(row, case)
    reference = runs.reference(row, case)
    apart = difference(mine, reference)
    parity(row, case, apart)
    assert len(events(mine, "step")) == steps_of(case)
    assert apart.largest <= TOLERANCE, apart
    assert column(mine, "tokens") == column(reference, "tokens")
    figure = "loss"
    # A distillation on the model's own completions has rollouts without rewards.
    if events(mine, "rollout") and "reward" in events(reference, "eval")[-1]:
        figure = "reward"
    # Of a mixture: the tokens of each expert, whole numbers. Other models have no such event.
    assert loads(mine) == loads(reference)
    held_out = column(mine, figure, "eval")[-1]
    expected = column(reference, figure, "eval")[-1]
    assert held_out == pytest.approx(expected, rel=TOLERANCE)
    learns(reference, case)


@pytest.mark.claim("ranks hold and send what the plan says")
@pytest.mark.parametrize(("row", "case"), params(COUNTED))
def test_the_planner_says_what_a_step_sends(runs: Runs, row: Row, case: Case) -> None:
    sent_as_planned(runs.of(row, case), more=ONCE.get(row.name, 0))


@pytest.mark.parametrize(("row", "case"), params(ZERO))
def test_zero_measures_how_long_ranks_wait(runs: Runs, row: Row, case: Case) -> None:
    waits = []
    for event in events(runs.of(row, case), "step"):
        waits.append(event["comm_s"] / event["seconds"])
    assert min(waits) >= 0, waits
    assert 0 < max(waits) < 1, waits


@pytest.mark.parametrize(("row", "case"), params(EXPERTS))
def test_experts_are_held_as_planned(runs: Runs, row: Row, case: Case) -> None:
    held_as_planned(runs.of(row, case), ("parameters", "optimizer"))


@pytest.mark.claim("low precision stays near fp32")
@pytest.mark.parametrize(
    "row", [case_of(row, id=row.name, full=row.name in LOW_AGAIN) for row in LOW]
)
def test_low_precision_stays_near(runs: Runs, row: Row) -> None:
    mine = runs.of(row, LOW_CASE)
    reference = runs.reference(row, LOW_CASE)
    for key, tolerance in LOW_TOLERANCE.items():
        found = column(mine, key)
        expected = column(reference, key)
        assert found == pytest.approx(expected, rel=tolerance), key
        assert found != expected, key
