"""What the planner says of a run, held against what its ranks counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from drumline.models import load as models
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import part_of_pp_rank, state_of
from drumline.planner.cost.terms import State
from drumline.planner.cost.traffic import flows
from drumline.telemetry.events import newest_measurement, read
from drumline.telemetry.plan_accuracy import Measurement
from tests.harness import column


def facts_of(plan: Plan) -> ModelFacts:
    config = plan.config
    model = models.load_config(plan.model_path, config.model)
    length = config.data.max_length
    return models.facts(model, length, config.adapter, config.head, config.model.freeze)


def states_of(plan: Plan, facts: ModelFacts) -> list[State]:
    """Return what a rank of each stage of the pipeline holds between steps."""
    stages = range(plan.mesh.pp)
    return [state_of(plan, facts, part_of_pp_rank(plan, facts, stage)) for stage in stages]


def measurement_of(run: Path) -> Measurement:
    measured = newest_measurement(read(run / "events.jsonl"))
    assert measured is not None
    return measured


def held_as_planned(run: Path, parts: Iterable[str]) -> None:
    """The largest bytes of each part that any rank holds are the planner's, exactly."""
    plan = Plan.load(run / "plan.json")
    states = states_of(plan, facts_of(plan))
    measured = measurement_of(run)
    for part in parts:
        planned = max(getattr(state, part) for state in states)
        assert max(measured.by_rank[part]) == planned, part


def sent_as_planned(run: Path, step: int = 2, more: float = 0.0) -> None:
    """The last step sends the planner's bytes of step `step`, and `more`."""
    plan = Plan.load(run / "plan.json")
    planned = flows(plan, facts_of(plan), step=step).traffic().total
    sent = column(run, "sent_bytes")[-1]
    assert sent == pytest.approx(planned + more, rel=1e-6, abs=1)
