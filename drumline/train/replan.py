"""After memory ran out: what the plan predicted, the nearest plan that fits, and, where that is wanted, a run that goes on with it."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from drumline.core.config import BatchConfig, Config
from drumline.core.estimate import Estimate
from drumline.core.explain import size, strategy_name
from drumline.core.out_of_memory import Exhausted, limit, verdict
from drumline.core.plan import Plan
from drumline.core.registry import make
from drumline.core.resolve import resolve
from drumline.core.strategy import StrategySpec
from drumline.errors import PlanError
from drumline.hardware.detect import Machine, detect
from drumline.launchers.local import furthest_step
from drumline.planner.cluster import cluster_here
from drumline.planner.cost.times import estimate
from drumline.planner.question import Found, assemble
from drumline.planner.search.advice import changed, find_fallbacks, nothing_fits
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.search import search
from drumline.telemetry.events import EventLog, Replan
from drumline.train.setup import predict

MOST_REPLANS = 4


def machine_of(plan: Plan) -> Machine:
    """A host that its ranks run on."""
    return plan.config.launch.machine(plan.config) or detect()


@dataclass(frozen=True)
class Advice:
    """`line`: what the plan predicted, and what to change, for the user. `nearest`: the plan to go on with, None where none fits."""

    line: str
    nearest: Candidate | None
    predicted: Estimate


def question(plan: Plan, ranks: int | None = None) -> Question:
    """What the planner knew when it made a plan, found out again: sizes from the model's config, this machine. `ranks`: in the place of
    the plan's."""
    model = plan.config.model
    policy = Found(model, plan.model_path)
    cluster, _ = cluster_here(
        plan.config,
        machine_of(plan),
        plan.device,
        (ranks or plan.mesh.world_size) * plan.devices_per_rank,
    )
    return assemble(plan.config, policy, plan.roles, plan.data, cluster, processes=True)


def advise(plan: Plan, out: Exhausted, baseline: Config | None = None) -> Advice:
    """Compare a plan with what was found when memory ran out, and look for the nearest one that fits into what there really is.
    `baseline`: the config that changes are shown against; None: the plan's."""
    baseline = baseline or batched(plan)
    request = question(plan)
    # As the plans to choose from are estimated, whatever else the plan's own estimate was made of.
    predicted = estimate(plan, request.facts, request.cluster)
    if out.killed and plan.device == "cuda":
        host = predicted.host
        needs = f"{size(host.load)} while weights are loaded, {size(host.train)} in training, {size(host.save)} while it saves"
        return Advice(
            f"the plan predicted {needs} of host memory, and the host has {size(detect().memory_bytes)}",
            None,
            predicted,
        )
    there = limit(out, predicted.memory, predicted.limit)
    device = dataclasses.replace(request.cluster.device, memory_bytes=there)
    smaller = dataclasses.replace(
        request, cluster=dataclasses.replace(request.cluster, device=device)
    )
    fitting, leanest = find_fallbacks(smaller, plan, there, predicted.memory.peak, baseline)
    line = verdict(out, (plan.predicted.estimate or predicted).memory)
    if not fitting:
        fitting, line = _otherwise(smaller, plan, baseline, line, leanest)
    if fitting:
        best = fitting[0]
        needs = size(best.estimate.memory.peak)
        return Advice(
            f"{line} — nearest plan that fits: {best.name} ({needs} at its peak)", best, predicted
        )
    return Advice(line, None, predicted)


def _otherwise(
    request: Question, plan: Plan, baseline: Config, line: str, leanest: Candidate | None
) -> tuple[list[Candidate], str]:
    """Where no fallback fits: what any other strategy offers, or else the smallest change of the work itself."""
    pinned = BatchConfig(global_samples=plan.batch.global_samples)
    config = plan.config.model_copy(
        update={"strategy": make(StrategySpec, "auto"), "batch": pinned}
    )
    any_strategy = dataclasses.replace(request, config=config)
    # After memory ran out once, no plan that may run out of it again.
    answer = search(any_strategy, with_room=True)
    if not answer.ranked:
        answer = search(any_strategy)
    if answer.ranked:
        other = answer.ranked[0]
        return [dataclasses.replace(other, name=changed(baseline, other.config))], line
    least = (
        ""
        if leanest is None
        else f": {leanest.name} still needs {size(leanest.estimate.memory.reserved)}"
    )
    changes = nothing_fits(answer)
    change = f"; what would: {changes[0].line()}" if changes else ""
    return (
        [],
        f"{line} — nothing that takes the same steps fits into {size(request.cluster.device.memory_bytes)}{least}{change}",
    )


def batched(plan: Plan) -> Config:
    """A plan's config with its batch written out."""
    b = plan.batch
    batch = BatchConfig(
        global_samples=b.global_samples, micro_batch=b.micro_batch, accumulation=b.accumulation
    )
    return plan.config.model_copy(update={"batch": batch})


def _kept(plan: Plan) -> dict[str, Any]:
    """What stays as it is in another plan of the same run: a mix with fewer data ranks scales no rate."""
    return {
        "lr": plan.lr,
        "warmup_steps": plan.warmup_steps,
        "steps": plan.steps,
        "base": plan.base,
    }


class Replanner:
    """Answers the launcher when a rank of its run is out of memory, or hosts came or went."""

    def __init__(self, plan: Plan, plan_path: Path) -> None:
        self.plan, self.plan_path, self.left = plan, plan_path, MOST_REPLANS
        self.baseline = batched(plan)
        self.batch = plan.config.batch
        # That was wanted, and fits as far as is known.
        self.micro = self.batch.micro_batch or plan.batch.micro_batch

    def __call__(self, out: Exhausted, step: int) -> tuple[str, str | None]:
        """(the line, why the run does not go on). None: plan.json holds the next plan. `step`: the last one done."""
        advice = advise(self.plan, out, self.baseline)
        if self.plan.config.memory.on_oom == "stop":
            return advice.line, "memory.on_oom is stop; replan goes on by itself"
        if advice.nearest is None:
            return advice.line, "nothing to go on with"
        if not self.left:
            return advice.line, f"{MOST_REPLANS} other plans did not fit either"
        self.left -= 1
        self._take(advice, out, step)
        return advice.line, None

    def _take(self, advice: Advice, out: Exhausted, step: int) -> None:
        assert advice.nearest is not None
        old, taken = self.plan, advice.nearest
        # The batch stays as it was set: a resumed run is compared with it, and micro-batches do not change its numbers.
        plan = self._resolved(taken)
        self.plan = plan.model_copy(
            update={**_kept(old), "config": plan.config.model_copy(update={"batch": self.batch})}
        )
        self.micro = plan.batch.micro_batch
        kept = self._save()
        event = Replan(
            from_=changed(taken.config, batched(old)),
            to=taken.name,
            why=f"rank {out.rank} {out.describe()}; {verdict(out, advice.predicted.memory)}",
            predicted_bytes={
                "from": advice.predicted.memory.peak,
                "to": taken.estimate.memory.peak,
            },
            plan=str(kept),
            step=step,
        )
        EventLog(Path(old.run_dir) / "events.jsonl").emit(event)

    def _save(self) -> Path:
        """Write plan.json. Returns the file of the plan that is left, under the first free name: plan-0.json, plan-1.json, …"""
        kept = next(
            path
            for number in count()
            if not (path := self.plan_path.with_name(f"plan-{number}.json")).exists()
        )
        shutil.copyfile(self.plan_path, kept)
        self.plan.save(self.plan_path)
        return kept

    def resize(self, ranks: int) -> bool:
        """Plan for so many ranks: plan.json is new then. The global batch, the order of samples and the learning rate stay, and so does the
        strategy where it can. False where there is no such plan."""
        old = self.plan
        if ranks == old.mesh.world_size:
            return True
        plan = self._resized(ranks)
        if plan is None:
            return False
        self.plan = plan.model_copy(
            update={**_kept(old), "config": plan.config.model_copy(update={"batch": self.batch})}
        )
        self.baseline = batched(self.plan)
        estimates = {"from": old.predicted.estimate, "to": plan.predicted.estimate}
        event = Replan(
            from_=f"{old.mesh.world_size} ranks, {strategy_name(old)}",
            to=f"{ranks} ranks, {strategy_name(plan)}, accumulation {plan.batch.accumulation}",
            why="hosts came or went",
            predicted_bytes={
                name: each.memory.peak for name, each in estimates.items() if each is not None
            },
            plan=str(self._save()),
            step=max(furthest_step(Path(old.run_dir)), 0),
        )
        EventLog(Path(old.run_dir) / "events.jsonl").emit(event)
        return True

    def _resized(self, ranks: int) -> Plan | None:
        """With the strategy and about the micro-batch that there are, else the best plan of any; None where there is none."""
        old, config = self.plan, self.plan.config
        request = None if config.plain else question(old, ranks)
        for micro in range(self.micro, 0, -1):
            batch = BatchConfig(global_samples=old.batch.global_samples, micro_batch=micro)
            with suppress(PlanError):
                plan = self._resolve(config.model_copy(update={"batch": batch}), ranks, request)
                if plan.predicted.estimate is None or plan.predicted.estimate.verdict != "no":
                    return plan
        if request is None:
            return None
        pinned = BatchConfig(global_samples=old.batch.global_samples)
        free = config.model_copy(update={"strategy": make(StrategySpec, "auto"), "batch": pinned})
        answer = search(dataclasses.replace(request, config=free))
        return self._resolve(answer.ranked[0].config, ranks, request) if answer.ranked else None

    def _resolve(self, config: Config, ranks: int, request: Question | None) -> Plan:
        """The plan of a config, with what it is expected to need where the model's sizes are known. Raises PlanError."""
        old = self.plan
        plan = resolve(
            config,
            run_dir=old.run_dir,
            machine=machine_of(old),
            world_size=ranks,
            facts=request.facts if request else None,
            model_path=old.model_path,
            data=old.data,
            base_dir=old.base_dir,
            roles=old.roles,
        )
        return predict(plan, request.facts, request.cluster) if request else plan

    def _resolved(self, taken: Candidate) -> Plan:
        plan = self._resolve(taken.config, self.plan.mesh.world_size, question(self.plan))
        return plan.model_copy(update={"why": [*plan.why, f"out of memory before: {taken.name}"]})
