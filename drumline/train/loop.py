"""The training loop. It sees an Engine, an Algorithm and streams of batches; not the model, not the strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from drumline.algorithms.base import Algorithm
from drumline.core import heartbeat
from drumline.core.plan import Plan
from drumline.core.signals import StopFlag
from drumline.data.stream import GlobalBatch
from drumline.dist.reduce import Gather
from drumline.dist.seeds import seed_step
from drumline.errors import ConfigError, TrainingStopped
from drumline.models.router import router_metrics
from drumline.parallel.engine import Engine
from drumline.telemetry.devices import Meter
from drumline.telemetry.events import Emit, Eval, Started, Step
from drumline.telemetry.measure import Measure
from drumline.telemetry.profile import Profile
from drumline.telemetry.stragglers import Stragglers
from drumline.train.garbage import GarbageCollection
from drumline.train.health import Collectives, GoBack, Spikes, Weights
from drumline.train.saving import Saver
from drumline.train.state import SQUARES, Flight, Goodput, TrainState, due, judge, judged
from drumline.train.timeouts import CollectiveTimeout

if TYPE_CHECKING:
    from drumline.rl.rollouts import Rollouts  # what generates takes a second to import
    from drumline.train.sampling import Answers
    from drumline.train.tasks import Tasks

FIX = "look at the samples of the `nonfinite` event in events.jsonl; lower optimizer.lr, or pass over it: health.on_nan=skip"


@dataclass
class Loop:
    """One run on one rank. All ranks walk the same path: what decides is summed over ranks first."""

    plan: Plan
    engine: Engine
    algorithm: Algorithm
    stream: Iterable[GlobalBatch]
    held_out: dict[str, Callable[[], Iterable[GlobalBatch]]]  # by name of the evaluation set
    saver: Saver
    emit: Emit
    gather: Gather
    timeout: CollectiveTimeout
    stop_flag: StopFlag
    memory_bytes: Callable[[], int]
    state: TrainState
    goodput: Goodput
    measure: Measure
    seen_step: int = 0
    retries: bool = False  # all ranks know that it is time
    stop: int = 0  # the signal that asks some rank to stop; all ranks know it after the same step
    flight: Flight | None = None
    landed: float = 0.0  # when the last flight did (unix)
    step_s: float = 0.0  # that the last flight took on this rank
    metric: float | None = None  # of the weights as they are now; a step makes it unknown
    rollouts: Rollouts | None = None
    rewind: Callable[[], Iterable[GlobalBatch]] | None = (
        None  # to the newest checkpoint; gives the stream from there on
    )
    checkpointable: bool = (
        True  # not in the middle of the steps of a rollout, where a run could not go on from
    )
    meter: Meter | None = None
    answers: Answers | None = None
    tasks: Tasks | None = None

    def __post_init__(self) -> None:
        health = self.plan.config.health
        self.spikes = Spikes(health, self.emit)
        self.spikes.take_up(self.state.spikes)
        self.state.spikes = self.spikes.state()
        self.weights = Weights(self.plan, self.engine, self.gather, self.emit)
        self.garbage = GarbageCollection(self.plan.config.run.collect_every)
        self.profile = Profile(self.plan, self.gather.rank, self.emit)
        self.collectives = Collectives(health.check_collectives)
        self.stragglers = Stragglers(self.gather, self.emit, health.straggler_ratio)
        # Ranks over a slow link step by their own numbers, and read those of all a step later.
        self.alone: bool = getattr(self.engine, "go_alone", bool)()

    def run(self) -> str | None:
        """Train from `state` to the end of the stream, or until it is `stale`: then why. Raises Preempted after a stop signal,
        TrainingStopped by policy."""
        try:
            with self.garbage:
                self._run()
            return self.stale
        except TrainingStopped:
            self.saver.wait()
            raise
        finally:
            if self.rollouts is not None:
                self.rollouts.close()

    def _run(self) -> None:
        config = self.plan.config
        if self.state.step == 0:
            self.state.evaluated = 0
            if config.eval.at_start:
                self.evaluate()
        # By a stop signal.
        broken_off = self.state.evaluated >= 0 and due(
            config.eval.steps, self.state.evaluated, self.state.step
        )
        if broken_off and self.evaluate() and config.checkpoint.keep_best:
            self.save()
        while True:
            try:
                self._steps()
                self._land()
                break
            except GoBack as back:
                self._go_back(back)
        self.profile.after(self.state.step, last=True)
        if not config.eval.steps or (
            self.state.step % config.eval.steps and self.state.evaluated != self.state.step
        ):
            self._evaluate_last()
        self._save_last()
        self.measure.finish(self.state.step)
        if self.meter is not None:
            _, devices = self.gather({}, *self.meter.values(now=True))
            if (read := self.meter.event(self.state.step, devices, now=True)) is not None:
                self.emit(read)

    def _evaluate_last(self) -> None:
        """Where it may fail, the weights are saved before."""
        if self.tasks is not None:
            self._save_last()
        try:
            self.evaluate()
        except ConfigError:  # no such metric: on all ranks
            self._save_last()
            raise

    def _steps(self) -> None:
        """To the end of the stream."""
        config, batches = self.plan.config, iter(self.stream)
        rested = self.state.step  # the last step that the run could go on from
        while True:
            if self.rollouts is not None and self.checkpointable:
                self._stop_if_requested()  # before a rollout, which takes long, and not after it
                self.timeout.before_long_work(self.state.step)
            if self.stale:
                self._report_rollout()
                break
            drawn = time.time()
            heartbeat.step(
                self.state.step, self.state.position, free=self.measure.traffic.due(self.state.step)
            )
            heartbeat.beat("data")
            batch = next(batches, None)
            if batch is None:
                break
            self.profile.before(self.state.step)
            self._train_step(batch, time.time() - drawn)
            self.profile.after(self.state.step)
            self.collectives.check()
            self.garbage.after(self.state.step)
            if self.weights.due(self.state.step):
                self.weights.check(self.state.step)
            if self.checkpointable:
                self._leave_if_requested()
                best = due(config.eval.steps, rested, self.state.step) and self.evaluate()
                if (
                    due(config.checkpoint.steps, rested, self.state.step)
                    or (best and config.checkpoint.keep_best)
                    or self.retries
                ):
                    self.save()
                elif self.saver.memory is not None and due(
                    config.checkpoint.in_memory_every, rested, self.state.step
                ):
                    self._land()
                    self.timeout.before_long_work(self.state.step)
                    heartbeat.beat("save")
                    self.weights.check(self.state.step)
                    with self.goodput.spend("save"):
                        self.saver.keep_in_memory()
                rested = self.state.step
            self.saver.report(self.saver.checkpointer.poll())

    def _go_back(self, back: GoBack) -> None:
        """To the newest checkpoint. All ranks come here after the same step."""
        assert self.rewind is not None
        self.seen_step = max(self.seen_step, self.state.step)
        self.saver.wait()
        if self.saver.memory is not None:
            self.saver.memory.forget()  # it may hold what the run turns back from
        self.spikes.passed_over.add(back.position)
        self.timeout.before_long_work(self.state.step)
        heartbeat.beat("startup")
        with self.goodput.spend("restore"):
            self.stream = self.rewind()
        self.state.spikes = self.spikes.state()  # what has shown since is still known
        self.saver.saved_step, self.metric, self.landed, self.checkpointable = (
            self.state.step,
            None,
            time.time(),
            True,
        )
        # And not on the weights after it, which are made again.
        self.weights.agreed = self.state.step

    def _train_step(self, batch: GlobalBatch, data_s: float) -> None:
        """Compute a step, and read the numbers of the one before, which have come to the host by now. Its own are waited for where it is
        logged, and where its traffic is counted, whose collective is a second one."""
        started = time.time()
        self.goodput.first_step()
        step = self.state.step
        weight, tokens = batch.of_all or self._of_all(batch)
        denominator = weight or 1.0
        seed_step(self.plan.config.run.seed, step, *self.plan.mesh.stream(self.gather.rank))
        heartbeat.beat("forward")
        lr = self.plan.lr * self.plan.config.schedule.rate(
            step, self.plan.steps or 1, self.plan.warmup_steps
        )
        self.engine.begin_step(lr)
        with self.measure.watch(step):
            sums = self.engine.forward_backward(
                batch.micro_batches, self.algorithm.objective, denominator
            )
        waited = self.engine.exposed_communication()
        comm_s = math.nan if waited is None else waited
        logged = (step + 1) % self.plan.config.run.log_every == 0 or step + 1 == self.plan.steps
        devices = self.meter.values() if logged and self.meter is not None else []
        mine = data_s, comm_s, float(self.memory_bytes()), self.step_s
        shared = float(self.stop_flag.requested), self.saver.retry_at, *mine, *devices
        heartbeat.beat("collective")
        gathered = None if self.alone else self.gather.start(sums, *shared)
        heartbeat.beat("optimizer")
        with self.measure.watch(step, "clip"):
            grad_norm = self.engine.grad_norm()
        if gathered is None:
            gathered = self.gather.start({**sums, SQUARES: grad_norm.square()}, *shared)
        loss = sums["loss"] if self.alone else gathered["loss"]
        ids = batch.sample_ids[batch.sample_ids >= 0]
        flight = Flight(
            gathered,
            step + 1,
            denominator,
            batch.position,
            ids,
            int(tokens),
            lr,
            started - data_s,
            data_s,
        )
        # A sum in fp64 is finite if both are: one test launches half the kernels of two.
        finite = self.spikes.allows(flight, loss, torch.isfinite(loss + grad_norm))
        with self.measure.watch(step, "step"):
            self.engine.step(lr, grad_norm, finite)
        heartbeat.beat("collective")
        if not self.alone:
            gathered.fetch(grad_norm)
        self.state.step, self.state.position, self.state.stream = (
            step + 1,
            batch.position,
            batch.state,
        )
        self.checkpointable = batch.checkpointable
        self.state.tokens += int(tokens)
        flight.computed = time.time()
        whole = not self.measure.traffic.due(step) or flight.finite
        copies = self.saver.checkpointer.staging.bytes_
        flight.volume, flight.clock = self.measure.end_step(
            step, batch.micro_batches, copies, whole, data=data_s, communication=comm_s
        )
        flight.logged = logged
        self._land()
        self.flight = flight
        if flight.logged and not self.alone:
            self._land()

    def _of_all(self, batch: GlobalBatch) -> tuple[float, float]:
        """Weight and tokens of a global batch that does not have them."""
        total, _ = self.gather(
            {
                "weight": float(sum(b.weight for b in batch.micro_batches)),
                "tokens": float(batch.tokens),
            }
        )
        return total["weight"], total["tokens"]

    def _land(self) -> None:
        """Read the numbers of the step in flight, if there is one, and act on them. All ranks come here after the same step."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        signals, retry_at, data, communication, _, step_s, *_ = flight.by_rank
        self.stop = int(max(signals)) or self.stop
        self.retries = max(retry_at) < flight.step
        seconds = flight.arrived[2] - max(self.landed, flight.began)
        self.landed, self.step_s = flight.arrived[2], seconds
        self.timeout.after_step(flight.step, step_s)
        self.goodput.seconds["recompute" if flight.step <= self.seen_step else "productive"] += (
            seconds
        )
        self.measure.took(flight.step, flight.clock, max(0.0, seconds - flight.data_s))
        heartbeat.beat("report")
        if parts := self.goodput.begun():
            self.emit(Started(seconds=parts))
        self.stragglers.add(flight.step, seconds, flight.tokens, data, communication)
        if flight.logged:
            self._log_step(flight, seconds)
        if flight.finite:
            self.metric = None
        skips = self.state.skips
        judge(
            flight, self.plan, self.state, self.engine.rescales(), self.emit, "health.on_nan", FIX
        )
        if flight.finite:
            can_go_back = self.rewind is not None and self.saver.saved_step >= 0
            self.state.skips = self.spikes.judge(flight, skips, can_go_back)

    def _log_step(self, flight: Flight, seconds: float) -> None:
        world = self.gather.world_size
        # Of the waits the mean is shown (NaN: not measured).
        _, _, data, comm, memory, _, *devices, _ = flight.by_rank
        if devices and self.meter is not None and (read := self.meter.event(flight.step, devices)):
            self.emit(read)
        rate = flight.tokens / seconds
        mfu = self.plan.predicted.mfu(rate, world * self.plan.devices_per_rank)
        data_s, comm_s = sum(data) / world, sum(comm) / world
        total = self.plan.data.epoch if self.plan.data else 0
        event = Step(
            step=flight.step,
            loss=flight.loss,
            lr=flight.lr,
            grad_norm=flight.grad_norm,
            tokens=flight.tokens,
            sent_bytes=flight.volume,
            metrics=self.algorithm.step_metrics(flight.total)
            | router_metrics(flight.total, flight.denominator),
            samples=len(flight.sample_ids),
            tokens_per_s=rate,
            samples_per_s=len(flight.sample_ids) / seconds,
            mfu=mfu,
            seconds=seconds,
            data_s=data_s,
            compute_s=max(0.0, seconds - data_s - (0.0 if math.isnan(comm_s) else comm_s)),
            comm_s=comm_s,
            memory_bytes=[int(m) for m in memory],
            epoch=flight.position / total if total else 0.0,
        )
        self.emit(event)

    def evaluate(self) -> bool:
        """Emit metrics over the whole held-out sets, each sample once, and of tasks; then samples. True: the best weights so far. A stop
        signal breaks it off."""
        self._land()
        started, step = time.time(), self.state.step
        self.timeout.before_long_work(step)
        heartbeat.beat("eval")
        with self.goodput.spend("eval"):
            metrics, samples, failures = (
                self._held_out_metrics() if self.rollouts is None else self.rollouts.evaluate(step)
            )
            if self.tasks is not None and (
                self.tasks.due(self.state.evaluated, step) or self._ends(metrics)
            ):
                self._stop_if_requested()
                metrics |= self.tasks.score()
        if not metrics:
            return False
        self.state.evaluated = step
        self.emit(
            Eval(
                step=step,
                samples=samples,
                seconds=time.time() - started,
                reward_failures=failures or None,
                metrics=metrics,
            )
        )
        self.metric, better = judged(metrics, self.plan.config.eval, self.state)
        if self.answers is not None:
            heartbeat.beat("eval")
            with self.goodput.spend("eval"):
                self.answers.write(
                    step,
                    "before"
                    if step == 0
                    else "after"
                    if self.stale or step == self.plan.steps
                    else "during",
                )
        return better

    def _ends(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation that has measured these so far is the last by eval.patience."""
        options, after = self.plan.config.eval, replace(self.state)
        if options.metric in metrics:
            judged(metrics, options, after)
        return options.patience is not None and after.stale >= options.patience

    @property
    def stale(self) -> str | None:
        """Why the run ends before its last step; None while it goes on. The same on all ranks, and after a resume."""
        options, state = self.plan.config.eval, self.state
        if options.patience is None or state.stale < options.patience:
            return None
        by = f" by more than {options.min_delta:g}" * (options.min_delta > 0)
        than = "finite" if state.mark is None else f"better than {state.mark:.6g}{by}"
        return f"{options.metric} was not {than} in {state.stale} evaluation{'s' * (state.stale > 1)} (eval.patience)"

    def _held_out_metrics(self) -> tuple[dict[str, float], int, dict[str, Any]]:
        """Over all sets; those of a set that has a name also under NAME/. And how many samples; no reward failed."""
        whole, by_set, samples = dict[str, float](), dict[str, float](), 0
        for name, batches in self.held_out.items():
            sums: dict[str, float] = {}
            for batch in batches():
                self._stop_if_requested()
                sums = _added(
                    sums, self.engine.evaluate(batch.micro_batches, self.algorithm.eval_objective)
                )
                samples += int((batch.sample_ids >= 0).sum())
            total, _ = self.gather(sums)
            whole = _added(whole, total)
            by_set |= (
                {f"{name}/{key}": value for key, value in self.algorithm.metrics(total).items()}
                if name
                else {}
            )
        return (
            (self.algorithm.metrics(whole) | by_set, samples, {}) if self.held_out else ({}, 0, {})
        )

    def save(self) -> None:
        """Hand the state to the checkpointer. `metric` goes with it only if it was measured on these very weights."""
        self._land()
        self.retries = False
        self.timeout.before_long_work(self.state.step)
        heartbeat.beat("save")
        self.weights.check(self.state.step)
        with self.goodput.spend("save"):
            self.saver.save(self.metric)

    def _stop_if_requested(self) -> None:
        """Between two steps: where any rank got a stop signal, all save at this same step and leave. Collective."""
        _, (signals,) = self.gather({}, float(self.stop_flag.requested))
        self.stop = int(max(signals)) or self.stop
        self._leave_if_requested()

    def _leave_if_requested(self) -> None:
        if self.stop and self.checkpointable:
            self._report_rollout()
            self._save_last()
            self.saver.leave(self.stop)

    def _report_rollout(self) -> None:
        """The next start begins with another rollout, and nobody would report this one."""
        if self.rollouts is not None:
            self._land()
            self.rollouts.report()

    def _save_last(self) -> None:
        self._land()
        self.timeout.before_long_work(self.state.step)
        heartbeat.beat("save")
        if self.plan.saves:
            self.weights.check(self.state.step)
            with self.goodput.spend("save"):
                self.saver.save_last(self.metric)


def _added(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Sums of what was evaluated so far and of `more` batches (of a key `max_…` the largest)."""
    return {
        key: max(sums.get(key, value), value)
        if key.startswith("max_")
        else sums.get(key, 0.0) + value
        for key, value in more.items()
    }
