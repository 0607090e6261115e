"""What faults cost: formulas against a simulation of single events, and `drumline plan --mtbf-hours` and checkpoint.every: auto."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import Request, load
from drumline.errors import PlanError
from drumline.plan.plan import RolePlan
from drumline.planner.faults import MTBF_HOURS, CheckpointTier, RunUnderFaults, run_under_faults
from drumline.planner.search.answer import Candidate
from drumline.planner.search.search import search_strategy
from drumline.train.setup import plan_own_module
from tests.harness import write_config
from tests.strategies import DDPStrategy
from tests.unit.conftest import Run
from tests.unit.shapes import question

PLAN = [
    "--model",
    "llama-3.1-8b",
    "--cluster",
    "16x8xh100-80g",
    "--length",
    "4096",
    "cluster.inter=8x400Gb",
]
DISK = CheckpointTier(stall=2.0, lag=40.0, restart=90.0, mtbf=6 * 3600.0)


def simulated(made: RunUnderFaults, training: float, seed: int) -> float:
    """The part of the time that is training, in a campaign event by event: steps, saves, which hold the steps up and can be gone back to
    later, faults of two kinds at random times, restarts, in which there may be faults too. `training`: seconds of it to be done."""
    draw = random.Random(seed)
    disk, memory = made.disk, made.memory
    every = {"disk": made.every, "memory": made.in_memory_every or 0}
    due = {
        "disk": draw.expovariate(1 / disk.mtbf),
        "memory": draw.expovariate(1 / memory.mtbf) if memory else float("inf"),
    }
    now, step, steps, saves = 0.0, 0, round(training / made.step), [(0.0, 0, "disk")]
    while step < steps:
        end = now + made.step
        saved = [kind for kind in every if every[kind] and (step + 1) % every[kind] == 0]
        end += sum((disk if kind == "disk" else memory).stall for kind in saved)  # type: ignore[union-attr]
        kind = min(due, key=lambda each: due[each])
        if due[kind] >= end:
            now, step = end, step + 1
            lag = {"disk": max(0.0, disk.lag - disk.stall), "memory": 0.0}
            saves += [(now + lag[each], step, each) for each in saved]
            saves = saves[-400:]
            continue
        level = disk if kind == "disk" else memory
        assert level is not None
        now = due[kind] + level.restart
        # A host that is lost has lost its memory: only what was on disk by then counts.
        saves = [
            each
            for each in saves
            if each[0] <= due[kind] and (kind == "memory" or each[2] == "disk")
        ]
        step = saves[-1][1]
        due[kind] += draw.expovariate(1 / level.mtbf)
        while min(due.values()) < now:  # while it starts: it starts again
            kind = min(due, key=lambda each: due[each])
            level = disk if kind == "disk" else memory
            assert level is not None
            now = due[kind] + level.restart
            due[kind] += draw.expovariate(1 / level.mtbf)
    return steps * made.step / now


@pytest.mark.claim("what faults cost is what a campaign of single events costs")
@pytest.mark.parametrize("hours", [1, 12])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.slow
def test_the_formula_is_the_campaign(hours: float, in_memory: bool) -> None:
    """Within 5%, and no other interval does better than the one that is called best."""
    mtbf = hours * 3600
    memory = (
        CheckpointTier(stall=0.5, lag=0.0, restart=30.0, mtbf=mtbf / 0.3) if in_memory else None
    )
    disk = replace(DISK, mtbf=mtbf / 0.7 if in_memory else mtbf)
    made = RunUnderFaults(64, 8, mtbf / 2000, disk, memory, 0.0, 24.0)
    found = [simulated(made, 40 * mtbf, seed) for seed in range(3)]
    assert made.goodput() == pytest.approx(sum(found) / 3, rel=0.05)
    assert made.goodput() >= max(
        made.goodput(every) for every in (made.every // 3 or 1, made.every * 3)
    )


def test_young_and_daly() -> None:
    """Daly's example grows into Young's formula where saves are short, and saves no more often than a save takes."""
    short = CheckpointTier(stall=1.0, lag=0.0, restart=0.0, mtbf=1e6)
    assert short.best_interval_seconds(0.1) == pytest.approx((2e6) ** 0.5, rel=0.01)
    assert (
        CheckpointTier(1.0, 5000.0, 0.0, 1e6).best_interval_seconds(0.1) == 4999.0
        and CheckpointTier(30.0, 0.0, 0.0, 10.0).best_interval_seconds(0.1) == 10.0
    )
    assert pytest.approx(50_677, abs=1) == MTBF_HOURS


def test_spare_hosts() -> None:
    made = RunUnderFaults(1024, 128, 5.0, DISK, None, hosts_lost=0.02, repair_hours=24)
    assert made.available(made.spares) > 0.9 and made.available(0) < 0.7
    assert (
        replace(made, hosts_lost=0.0).spares == 0
        and replace(made, hosts_lost=0.02, repair_hours=0.1).spares == 0
    )


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [
        ({}, 12),
        ({"kind": "sgd"}, 8),
        ({"kind": "sgd", "momentum": 0}, 4),
        ({"kind": "lion"}, 8),
        ({"kind": "adamw_4bit"}, 12),
    ],
)
def test_a_checkpoint_has_what_the_optimizer_keeps(optimizer: dict[str, Any], each: int) -> None:
    """In fp32, also of quantised moments; and of each model that is trained, such as PPO's of values."""
    asked = question("0.1b", "8xa100-80g", optimizer=optimizer, checkpoint={"asynchronous": False})
    first = search_strategy(asked, DDPStrategy())
    assert isinstance(first, Candidate)
    made = run_under_faults(first, asked.cluster, asked.facts)
    assert made.disk.stall == pytest.approx(
        asked.cluster.disk_seconds("write", each * asked.facts.trainable)
    )
    value = RolePlan(model=asked.config.model, model_path=None, head="score", trainable=True)
    both = replace(first, layout=first.layout.model_copy(update={"roles": {"value": value}}))
    more = run_under_faults(both, asked.cluster, replace(asked.facts, roles={"value": asked.facts}))
    assert more.disk.stall == pytest.approx(2 * made.disk.stall, rel=1e-3)


@pytest.mark.slow
@pytest.mark.full
def test_plan_says_what_faults_cost(run: Run) -> None:
    code, out, _ = run(
        "plan", *PLAN, "--mtbf-hours", 50000, "--price", 2, "--tokens", "1e12", columns=80
    )
    assert (
        code == 0
        and "checkpoint.every=" in out
        and "100,000" in out
        and max(map(len, out.splitlines())) <= 120
    ), out
    rows = json.loads(
        run("plan", *PLAN, "--mtbf-hours", 50000, "--price", 2, "--tokens", "1e12", "--json")[1]
    )["faults"]
    assert [row["devices"] for row in rows][::8] == [128, 100_000]
    assert all(
        one["goodput"] > other["goodput"] and one["every"] >= other["every"]
        for one, other in pairwise(rows)
    )
    memory = json.loads(
        run("plan", *PLAN, "--mtbf-hours", 50000, "checkpoint.in_memory_every=5", "--json")[1]
    )["faults"]
    assert (
        memory[0]["in_memory_every"] > 0
        and rows[0]["in_memory_every"] is None
        and 0 < memory[0]["goodput"] < 1
    )
    assert run("plan", *PLAN, "--mtbf-hours", 50000, "--max-seq")[0] == 2


def test_auto_becomes_a_number(run: Run, model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, checkpoint={"every": "auto"}, launch={"nproc": 2})
    code, out, err = run("train", config, "--dry-run")
    assert code == 0 and "checkpoint.every auto: " in out, err
    with pytest.raises(PlanError, match="module of your own"):
        plan_own_module(Request(load(config, [])), True, lambda *_: None)
