"""Plan again while a run is under way: after memory ran out, or when hosts came or went."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drumline.config.config import BatchConfig, Config
from drumline.config.registry import make
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.hardware.detect import Machine, detect
from drumline.launch.local import furthest_step
from drumline.plan.estimate import Estimate
from drumline.plan.explain import size, strategy_name
from drumline.plan.out_of_memory import Exhausted, corrected_limit, verdict
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.planner.cluster import cluster_here
from drumline.planner.cost.times import estimate
from drumline.planner.question import FoundModel, build_question
from drumline.planner.search.advice import (
    describe_config_difference,
    find_fallbacks,
    smallest_changes,
)
from drumline.planner.search.answer import Answer, Candidate, Question
from drumline.planner.search.search import search
from drumline.telemetry.events import EventLog, Replan
from drumline.train.setup import predict

MOST_REPLANS = 4


def machine_of(plan: Plan) -> Machine:
    """Return a host that the ranks of a plan run on."""
    return plan.config.launch.machine(plan.config) or detect()


@dataclass(frozen=True)
class Advice:
    """What follows from memory that ran out."""

    # For the user: what the plan predicted, and what to change.
    line: str
    # The plan to go on with; None if none fits.
    nearest: Candidate | None
    predicted: Estimate


def planning_question(plan: Plan, ranks: int | None = None) -> Question:
    """Return the planning problem that a plan solves, with the model's sizes and this machine.

    `ranks`: how many ranks to plan for, if not as many as the plan has.
    """
    policy = FoundModel(plan.config.model, plan.model_path)
    devices = (ranks or plan.mesh.world_size) * plan.devices_per_rank
    cluster, _ = cluster_here(plan.config, machine_of(plan), plan.device, devices)
    return build_question(
        plan.config, policy, plan.roles, plan.data, cluster, needs_all_processes=True
    )


def advise(plan: Plan, oom: Exhausted, baseline: Config | None = None) -> Advice:
    """Return what to change in a plan, after memory ran out.

    The nearest plan is looked for that fits into the memory there is. `oom`: what is known of the
    memory that ran out. `baseline`: the config that
    changes are shown against; the plan's by default.
    """
    baseline = baseline or config_with_batch(plan)
    question = planning_question(plan)
    # Estimated again, so that it is comparable with the estimates of the plans to choose from.
    predicted = estimate(plan, question.facts, question.cluster)
    if oom.killed and plan.device == "cuda":
        return Advice(_host_line(predicted), None, predicted)
    memory_bytes = corrected_limit(oom, predicted.memory, predicted.limit)
    question = _with_memory(question, memory_bytes)
    peak = predicted.memory.peak
    fitting, leanest = find_fallbacks(question, plan, memory_bytes, peak, baseline)
    line = verdict(oom, (plan.predicted.estimate or predicted).memory)
    if fitting:
        return _advice(line, fitting[0], predicted)
    answer = _search_any_strategy(question, plan)
    if answer.ranked:
        best = answer.ranked[0]
        best = dataclasses.replace(best, name=describe_config_difference(baseline, best.config))
        return _advice(line, best, predicted)
    line += f" — no plan with the same global batch fits into {size(memory_bytes)}"
    if leanest is not None:
        line += f": {leanest.name} still needs {size(leanest.estimate.memory.reserved)}"
    changes = smallest_changes(answer)
    if changes:
        line += f"; what would: {changes[0].line()}"
    return Advice(line, None, predicted)


def _advice(line: str, nearest: Candidate, predicted: Estimate) -> Advice:
    """Return the advice to go on with a plan."""
    peak = size(nearest.estimate.memory.peak)
    line += f" — nearest plan that fits: {nearest.name} ({peak} at its peak)"
    return Advice(line, nearest, predicted)


def _host_line(predicted: Estimate) -> str:
    """Return a line on the host memory that a plan predicted, and that there is."""
    host = predicted.host
    needs = (
        f"{size(host.load)} while weights are loaded, {size(host.train)} in training,"
        f" {size(host.save)} while it saves"
    )
    return (
        f"the plan predicted {needs} of host memory, and the host has {size(detect().memory_bytes)}"
    )


def _with_memory(question: Question, memory_bytes: int) -> Question:
    """Return the question for devices with so much memory."""
    device = dataclasses.replace(question.cluster.device, memory_bytes=memory_bytes)
    cluster = dataclasses.replace(question.cluster, device=device)
    return dataclasses.replace(question, cluster=cluster)


def _search_any_strategy(question: Question, plan: Plan) -> Answer:
    """Return the plans of any strategy with the plan's global batch."""
    any_strategy = dataclasses.replace(question, config=_with_any_strategy(plan))
    # After memory ran out once, a plan that may run out of it again is the last choice.
    answer = search(any_strategy, exclude_tight=True)
    if not answer.ranked:
        answer = search(any_strategy)
    return answer


def _with_any_strategy(plan: Plan) -> Config:
    """Return a plan's config with its global batch, and the strategy left open."""
    batch = BatchConfig(global_samples=plan.batch.global_samples)
    strategy = make(StrategyConfig, "auto")
    return plan.config.model_copy(update={"strategy": strategy, "batch": batch})


def config_with_batch(plan: Plan) -> Config:
    """Return a plan's config with the numbers of its batch, which the config may have left open."""
    batch = BatchConfig(
        global_samples=plan.batch.global_samples,
        micro_batch=plan.batch.micro_batch,
        accumulation=plan.batch.accumulation,
    )
    return plan.config.model_copy(update={"batch": batch})


class Replanner:
    """Answers the launcher when a rank of its run is out of memory, or hosts came or went."""

    def __init__(self, plan: Plan, plan_path: Path) -> None:
        self.plan = plan
        self.plan_path = plan_path
        # Plans that may still be tried.
        self.left = MOST_REPLANS
        self.baseline = config_with_batch(plan)
        self.batch = plan.config.batch
        # The micro-batch to plan with: the one of the config, or the last one that was planned.
        self.micro_batch = self.batch.micro_batch or plan.batch.micro_batch

    def __call__(self, oom: Exhausted, step: int) -> tuple[str, str | None]:
        """Return (advice, why the run does not go on), after memory ran out.

        If the reason is None, plan.json holds the next plan. `oom`: what is known of the memory
        that ran out. `step`: the last one that was done.
        """
        advice = advise(self.plan, oom, self.baseline)
        if self.plan.config.memory.on_oom == "stop":
            return advice.line, "memory.on_oom is stop; replan goes on by itself"
        if advice.nearest is None:
            return advice.line, "nothing to go on with"
        if not self.left:
            return advice.line, f"{MOST_REPLANS} other plans did not fit either"
        self.left -= 1
        self._adopt(advice.nearest, advice.predicted, oom, step)
        return advice.line, None

    def _adopt(self, nearest: Candidate, predicted: Estimate, oom: Exhausted, step: int) -> None:
        """Go on with another plan of the same ranks: write it, and an event.

        `predicted`: of the plan so far.
        """
        old = self.plan
        plan = self._resolve(nearest.config, old.mesh.world_size, planning_question(old))
        plan = plan.model_copy(update={"why": [*plan.why, f"out of memory before: {nearest.name}"]})
        self.plan = self._as_same_run(plan)
        self.micro_batch = plan.batch.micro_batch
        old_plan_path = self._replace_plan_file()
        event = Replan(
            from_=describe_config_difference(nearest.config, config_with_batch(old)),
            to=nearest.name,
            why=f"rank {oom.rank} {oom.describe()}; {verdict(oom, predicted.memory)}",
            predicted_bytes={
                "from": predicted.memory.peak,
                "to": nearest.estimate.memory.peak,
            },
            plan=str(old_plan_path),
            step=step,
        )
        EventLog(Path(old.run_dir) / "events.jsonl").emit(event)

    def _as_same_run(self, plan: Plan) -> Plan:
        """Return a plan with the numbers that stay for the whole run: rate, steps, and the batch.

        A plan with fewer data ranks would scale the learning rate otherwise. The batch keys stay as
        the config has them: a resumed run is compared with these, and how a batch is cut up does
        not change the run's numbers.
        """
        old = self.plan
        numbers = {
            "lr": old.lr,
            "warmup_steps": old.warmup_steps,
            "steps": old.steps,
            "base": old.base,
        }
        config = plan.config.model_copy(update={"batch": self.batch})
        return plan.model_copy(update={**numbers, "config": config})

    def _replace_plan_file(self) -> Path:
        """Copy plan.json to plan-0.json, or the next free number, and overwrite it with `plan`.

        Returns the path of the copy, which holds the old plan.
        """
        number = 0
        while True:
            old_plan_path = self.plan_path.with_name(f"plan-{number}.json")
            if not old_plan_path.exists():
                break
            number += 1
        shutil.copyfile(self.plan_path, old_plan_path)
        self.plan.save(self.plan_path)
        return old_plan_path

    def resize(self, ranks: int) -> bool:
        """Write a plan for so many ranks into plan.json. Returns whether there is one.

        The global batch, the order of samples and the learning rate stay; the strategy stays if it
        can.
        """
        old = self.plan
        if ranks == old.mesh.world_size:
            return True
        plan = self._resize_plan(ranks)
        if plan is None:
            return False
        self.plan = self._as_same_run(plan)
        self.baseline = config_with_batch(self.plan)
        predicted_bytes = {}
        if old.predicted.estimate is not None:
            predicted_bytes["from"] = old.predicted.estimate.memory.peak
        if plan.predicted.estimate is not None:
            predicted_bytes["to"] = plan.predicted.estimate.memory.peak
        event = Replan(
            from_=f"{old.mesh.world_size} ranks, {strategy_name(old)}",
            to=f"{ranks} ranks, {strategy_name(plan)}, accumulation {plan.batch.accumulation}",
            why="hosts came or went",
            predicted_bytes=predicted_bytes,
            plan=str(self._replace_plan_file()),
            step=max(furthest_step(Path(old.run_dir)), 0),
        )
        EventLog(Path(old.run_dir) / "events.jsonl").emit(event)
        return True

    def _resize_plan(self, ranks: int) -> Plan | None:
        """Return a plan for so many ranks; None if there is none.

        The strategy stays, with the largest micro-batch up to the current one that fits. If none
        fits, it is the best plan of any strategy.
        """
        old = self.plan
        # The sizes of a module of the user's own are not known.
        question: Question | None = None
        if not old.config.has_own_module:
            question = planning_question(old, ranks)
        for micro_batch in range(self.micro_batch, 0, -1):
            batch = BatchConfig(global_samples=old.batch.global_samples, micro_batch=micro_batch)
            config = old.config.model_copy(update={"batch": batch})
            with suppress(PlanError):
                plan = self._resolve(config, ranks, question)
                estimated = plan.predicted.estimate
                if estimated is None or estimated.verdict != "no":
                    return plan
        if question is None:
            return None
        answer = search(dataclasses.replace(question, config=_with_any_strategy(old)))
        if not answer.ranked:
            return None
        return self._resolve(answer.ranked[0].config, ranks, question)

    def _resolve(self, config: Config, ranks: int, question: Question | None) -> Plan:
        """Return the plan of a config, with its predicted needs if the model's sizes are known.

        `question`: has these sizes; None for a module of the user's own. Raises PlanError.
        """
        old = self.plan
        facts = None
        if question is not None:
            facts = question.facts
        plan = resolve(
            config,
            run_dir=old.run_dir,
            machine=machine_of(old),
            world_size=ranks,
            model=KnownModel(facts, old.model_path, old.roles),
            data=old.data,
            base_dir=old.base_dir,
        )
        if question is None:
            return plan
        return predict(plan, question.facts, question.cluster)
