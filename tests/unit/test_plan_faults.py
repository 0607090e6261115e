"""What faults cost: formulas against a simulation of single events, and the commands that use them.

These are `drumline plan --mtbf-hours` and `checkpoint.every: auto`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from drumline.config.load import Request, load
from drumline.errors import PlanError
from drumline.plan.plan import RolePlan
from drumline.planner.faults import (
    MTBF_HOURS,
    NOTICE_HOST,
    NOTICE_RANK,
    RESTART,
    CheckpointTier,
    RunUnderFaults,
    goodput_range,
    run_under_faults,
)
from drumline.planner.search.answer import Candidate
from drumline.planner.search.search import search_strategy
from drumline.train.setup import plan_own_module
from tests.harness import ROOT, read_json, write_config
from tests.strategies import DDPStrategy
from tests.unit.conftest import Run
from tests.unit.shapes import question

PLAN = [
    "plan",
    "--model",
    "llama-3.1-8b",
    "--cluster",
    "16x8xh100-80g",
    "--length",
    "4096",
    "cluster.inter=8x400Gb",
    "--mtbf-hours",
    "50000",
]
PRICED = [*PLAN, "--price", "2", "--tokens", "1e12"]
DISK = CheckpointTier(stall=2.0, lag=40.0, restart=90.0, mtbf=6 * 3600.0)


class Save(NamedTuple):
    """A save of a simulated campaign, and the second from which on a run can go back to it."""

    ready: float
    step: int
    kind: str


class Faults:
    """Faults of each kind at random times, and the restarts after them."""

    def __init__(self, levels: dict[str, CheckpointTier], seed: int) -> None:
        self.draw = random.Random(seed)
        self.levels = levels
        self.due = {}
        for kind, level in levels.items():
            self.due[kind] = self.draw.expovariate(1 / level.mtbf)

    def next(self) -> tuple[str, float]:
        """Return the kind and the time of the next fault."""
        kind = min(self.due, key=self.due.__getitem__)
        return kind, self.due[kind]

    def restart(self) -> float:
        """Return the time at which the run trains again after the next fault."""
        kind, time = self.next()
        level = self.levels[kind]
        self.due[kind] += self.draw.expovariate(1 / level.mtbf)
        return time + level.restart


def simulated_goodput(made: RunUnderFaults, training: float, seed: int) -> float:
    """Return the share of the time that is training, in a campaign event by event.

    Events are steps, saves, which hold the steps up and can be gone back to later, and faults of
    two kinds at random times. There may be faults during restarts, too.

    Args:
        made: The campaign.
        training: Seconds of training to be done.
        seed: Of the faults.
    """
    levels = {"disk": made.disk}
    every = {"disk": made.every}
    lag = {"disk": max(0.0, made.disk.lag - made.disk.stall)}
    if made.memory is not None:
        levels["memory"] = made.memory
        every["memory"] = made.in_memory_every
        lag["memory"] = 0.0

    faults = Faults(levels, seed)
    now = 0.0
    step = 0
    steps = round(training / made.step)
    saves = [Save(0.0, 0, "disk")]
    while step < steps:
        due_saves = [kind for kind in every if (step + 1) % every[kind] == 0]
        end = now + made.step
        for kind in due_saves:
            end += levels[kind].stall

        lost, time_of_fault = faults.next()
        if time_of_fault >= end:
            now = end
            step += 1
            for kind in due_saves:
                saves.append(Save(now + lag[kind], step, kind))
            saves = saves[-400:]
            continue

        # A host that is lost has lost its memory: only what was on disk by then counts.
        saves = [save for save in saves if save.ready <= time_of_fault]
        if lost == "disk":
            saves = [save for save in saves if save.kind == "disk"]
        step = saves[-1].step

        now = faults.restart()
        _, time_of_fault = faults.next()
        while time_of_fault < now:
            now = faults.restart()
            _, time_of_fault = faults.next()

    return steps * made.step / now


@pytest.mark.claim("what faults cost is what a campaign of single events costs")
@pytest.mark.parametrize("hours", [1, 12])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.slow
def test_the_formula_is_the_campaign(hours: float, in_memory: bool) -> None:
    """Within 5%, and no other interval does better than the one that is called best."""
    mtbf = hours * 3600
    memory = None
    disk = replace(DISK, mtbf=mtbf)
    if in_memory:
        memory = CheckpointTier(stall=0.5, lag=0.0, restart=30.0, mtbf=mtbf / 0.3)
        disk = replace(DISK, mtbf=mtbf / 0.7)

    made = RunUnderFaults(64, 8, mtbf / 2000, disk, memory, 0.0, 24.0)
    total = 0.0
    for seed in range(3):
        total += simulated_goodput(made, 40 * mtbf, seed)

    goodput = made.goodput()
    assert goodput == pytest.approx(total / 3, rel=0.05)

    shorter = max(1, made.every // 3)
    assert goodput >= made.goodput(shorter)
    assert goodput >= made.goodput(made.every * 3)


def test_young_and_daly() -> None:
    """Daly's formula grows into Young's for short saves, and saves no more often than one takes."""
    short = CheckpointTier(stall=1.0, lag=0.0, restart=0.0, mtbf=1e6)
    assert short.best_interval_seconds(0.1) == pytest.approx((2e6) ** 0.5, rel=0.01)

    lagging = replace(short, lag=5000.0)
    assert lagging.best_interval_seconds(0.1) == 4999.0

    long = replace(short, stall=30.0, mtbf=10.0)
    assert long.best_interval_seconds(0.1) == 10.0

    assert pytest.approx(50_677, abs=1) == MTBF_HOURS


def test_spare_hosts() -> None:
    made = RunUnderFaults(1024, 128, 5.0, DISK, None, hosts_lost=0.02, repair_hours=24)
    assert made.available(made.spares) > 0.9
    assert made.available(0) < 0.7

    assert replace(made, hosts_lost=0.0).spares == 0
    assert replace(made, repair_hours=0.1).spares == 0


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
    """In fp32, also of quantised moments; and of each trained model, such as PPO's of values."""
    asked = question("0.1b", "8xa100-80g", optimizer=optimizer, checkpoint={"asynchronous": False})
    cluster = asked.cluster
    first = search_strategy(asked, DDPStrategy())
    assert isinstance(first, Candidate)

    made = run_under_faults(first, cluster, asked.facts)

    write_seconds = cluster.disk_seconds("write", each * asked.facts.trainable)
    assert made.disk.stall == pytest.approx(write_seconds)

    value = RolePlan(model=asked.config.model, model_path=None, head="score", trainable=True)
    layout = first.layout.model_copy(update={"roles": {"value": value}})
    facts = replace(asked.facts, roles={"value": asked.facts})
    more = run_under_faults(replace(first, layout=layout), cluster, facts)
    assert more.disk.stall == pytest.approx(2 * made.disk.stall, rel=1e-3)


def kills_of(name: str) -> list[dict[str, Any]]:
    """Return the kills in a file of results that were noticed as faults of a rank or of a host."""
    found = []
    for made in read_json(ROOT / "benchmarks" / "results" / name)["runs"]:
        for kill in made["kills"]:
            if kill["noticed_s"] is not None:
                found.append(kill)
    return found


def test_times_of_faults_are_those_that_were_measured() -> None:
    """Of the committed results: those that the explanation names."""
    kills = kills_of("chaos_hosts-cpu.json") + kills_of("chaos_hosts_elastic-cpu.json")
    assert len(kills) == 37

    ranks = [kill["noticed_s"] for kill in kills if kill["target"] in ("rank", "save")]
    hosts = [kill["noticed_s"] for kill in kills if kill["target"] == "host"]
    # A step took a second.
    restarts = [kill["back_s"] - kill["noticed_s"] - kill["steps_again"] for kill in kills]
    for constant, seconds in ((NOTICE_RANK, ranks), (NOTICE_HOST, hosts), (RESTART, restarts)):
        assert constant.median == pytest.approx(median(seconds), abs=0.06)
        assert constant.longest == pytest.approx(max(seconds), abs=0.06)

    recovered = read_json(ROOT / "benchmarks/results/recovery-cpu.json")["kills"]["memory"]
    fastest = min(kill["seconds"] for kill in recovered)
    assert RESTART.shortest == pytest.approx(fastest - NOTICE_RANK.shortest, abs=0.06)

    agent = (ROOT / "drumline/launch/agent.py").read_text()
    timing = (ROOT / "plugins/hosts/src/drumline_hosts/timing.py").read_text()
    assert re.search(rf"^MONITOR_SECONDS = {NOTICE_RANK.shortest}$", agent, re.MULTILINE)
    assert re.search(rf"^SILENT_SECONDS = {NOTICE_HOST.shortest}$", timing, re.MULTILINE)


def test_what_a_fault_costs_is_a_range() -> None:
    """A dead rank of one host; of several, the mean over ranks and hosts; a host back from the disk."""
    asked = question("0.1b", "8xa100-80g", checkpoint={"in_memory_every": 5})
    first = search_strategy(asked, DDPStrategy())
    assert isinstance(first, Candidate)

    read = asked.cluster.disk_seconds("read", 12 * asked.facts.trainable)
    paces = {}
    for pace in ("shortest", "median", "longest"):
        paces[pace] = run_under_faults(first, asked.cluster, asked.facts, pace=pace)
    restarts = {pace: made.disk.restart for pace, made in paces.items()}
    assert restarts["shortest"] == pytest.approx(0.1 + 1.0 + read)
    assert restarts["median"] == pytest.approx(0.5 + 24.0 + read)
    assert restarts["longest"] == pytest.approx(0.8 + 74.9 + read)

    goodputs = [paces[pace].goodput() for pace in ("longest", "median", "shortest")]
    assert goodputs == sorted(goodputs)
    assert len({made.every for made in paces.values()}) == 1
    ends = goodput_range(first, asked.cluster, asked.facts)
    assert ends == (goodputs[0], goodputs[2])

    several = replace(asked.cluster, nodes=4)
    made = run_under_faults(first, several, asked.facts, devices=32)
    assert made.disk.restart == pytest.approx(8.1 + 24.0 + read)
    assert made.memory is not None
    assert made.memory.restart == pytest.approx(0.5 + 24.0)

    on_disk = question("0.1b", "8xa100-80g")
    first = search_strategy(on_disk, DDPStrategy())
    assert isinstance(first, Candidate)
    made = run_under_faults(first, several, on_disk.facts, devices=32)
    assert made.disk.restart == pytest.approx(0.78 * 8.1 + 0.22 * 0.5 + 24.0 + read)

    own = replace(several, restart_seconds=300.0)
    made = run_under_faults(first, own, on_disk.facts, devices=32, pace="longest")
    assert made.disk.restart == pytest.approx(0.78 * 18.6 + 0.22 * 0.8 + 300.0 + read)


@pytest.fixture
def faults(run: Run) -> Callable[..., list[dict[str, Any]]]:
    """Return a function of a command's words that gives the rows of its JSON on faults."""

    def rows(*words: str) -> list[dict[str, Any]]:
        _, out, _ = run(*words, "--json")
        return json.loads(out)["faults"]

    return rows


@pytest.mark.slow
@pytest.mark.full
def test_plan_says_what_faults_cost(run: Run, faults: Callable[..., Any]) -> None:
    code, out, _ = run(*PRICED, columns=80)
    assert code == 0, out
    assert "checkpoint.every=" in out, out
    assert "100,000" in out, out
    assert max(map(len, out.splitlines())) <= 120, out

    rows = faults(*PRICED)
    devices = [row["devices"] for row in rows]
    assert devices[::8] == [128, 100_000]
    for row in rows:
        low, high = row["goodput_range"]
        assert low < row["goodput"] < high
        low, high = row["hours_range"]
        assert low < row["hours"] < high
    for one, other in pairwise(rows):
        assert one["goodput"] > other["goodput"]
        assert one["every"] >= other["every"]

    first = faults(*PLAN, "checkpoint.in_memory_every=5")[0]
    assert first["in_memory_every"] > 0
    assert rows[0]["in_memory_every"] is None
    assert 0 < first["goodput"] < 1

    code, _, _ = run(*PLAN, "--max-seq")
    assert code == 2


def test_auto_becomes_a_number(run: Run, model: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, model, checkpoint={"every": "auto"}, launch={"nproc": 2})
    code, out, err = run("train", path, "--dry-run")
    assert code == 0, err
    assert "checkpoint.every auto: " in out, err

    request = Request(load(path, []))
    with pytest.raises(PlanError, match="module of your own"):
        plan_own_module(request, True, lambda *_: None)
