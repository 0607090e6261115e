"""The training loop of a config: steps, evaluations, saves, and the ways in which a run ends.

The loop sees an Engine, an Algorithm and batches, but neither the model nor the strategy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drumline.algorithms.base import Algorithm
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import PendingSums, SumReducer
from drumline.dist.seeds import seed_step
from drumline.engine.engine import DeviceSums, Engine, sum_without_model
from drumline.engine.norms import nonfinite_weight
from drumline.errors import ConfigError, TrainingStopped
from drumline.models.router import router_metrics
from drumline.plan.plan import Plan
from drumline.system import heartbeat
from drumline.system.signals import StopFlag
from drumline.telemetry.devices import Meter
from drumline.telemetry.events import Emit, Eval, Started, Step
from drumline.telemetry.measure import Measure
from drumline.telemetry.profile import Profile
from drumline.telemetry.stragglers import Stragglers
from drumline.train.garbage import GarbageCollection
from drumline.train.health import CollectiveCheck, GoBack, Spikes, WeightCheck
from drumline.train.router_load import ExpertLoads
from drumline.train.saving import Saver
from drumline.train.state import (
    SQUARES,
    Goodput,
    PendingStep,
    StepNumbers,
    TrainState,
    check_finite,
    is_due,
    rate_evaluation,
)
from drumline.train.timeouts import CollectiveTimeout

if TYPE_CHECKING:
    from drumline.rl.rollouts import Rollouts  # what generates takes a second to import
    from drumline.train.sampling import Answers
    from drumline.train.tasks import Tasks

# The advice of the error for numbers that are not finite.
FIX = "look at the samples of the `nonfinite` event in events.jsonl; lower optimizer.lr, or pass over it: health.on_nan=skip"


class Evaluation(NamedTuple):
    """What an evaluation has measured. Without held-out data all parts are empty."""

    metrics: dict[str, float]
    samples: int
    reward_failures: dict[str, Any]


class ReducedStep(NamedTuple):
    """The sums of a step, which are being added up over the ranks, and what decides the update."""

    gathered: PendingSums
    loss: torch.Tensor  # fp64 scalar on the device: the sum of all ranks, or this rank's own
    grad_norm: torch.Tensor  # fp64 scalar on the device: of all ranks, or this rank's own


class StopRequest:
    """The signal by which some rank was asked to stop. All ranks learn of it after the same step."""

    def __init__(self) -> None:
        self.signal = 0  # 0: none

    def record(self, signals_by_rank: list[float]) -> None:
        """Keep a signal that any rank has received. `signals_by_rank`: 0 for none."""
        signal = int(max(signals_by_rank))
        if signal:
            self.signal = signal


class StepClock:
    """Measures the seconds of steps on this rank."""

    def __init__(self) -> None:
        self.finished_at = 0.0  # unix time of the end of the last step
        self.last_step_s = 0.0

    def finish(self, pending: PendingStep) -> float:
        """Return the seconds of a step that has ended.

        They count from the end of the step before, or, if other work came between, from when this
        step's batch was waited for.
        """
        began = max(self.finished_at, pending.began)
        self.finished_at = pending.arrived.finished_at
        self.last_step_s = self.finished_at - began
        return self.last_step_s


@dataclass
class Loop:
    """Trains one run on one rank.

    All ranks take the same path through it: every number that decides something is summed over the
    ranks first. A rank that decided by itself would miss a collective that the others are in, and
    all would hang.
    """

    plan: Plan
    engine: Engine
    algorithm: Algorithm
    # The training batches of this rank, from `state.position` to the end of the run.
    batches: Iterable[GlobalBatch]
    # For each evaluation set, by name: a function that returns its batches.
    held_out: dict[str, Callable[[], Iterable[GlobalBatch]]]
    saver: Saver
    emit: Emit
    # Sums named numbers over all ranks, and gathers further numbers by rank, in one collective.
    reducer: SumReducer
    timeout: CollectiveTimeout
    stop_flag: StopFlag
    memory_bytes: Callable[[], int]
    state: TrainState
    goodput: Goodput
    measure: Measure
    # The furthest step that was ever done in the run. Steps up to it are repeated ones.
    seen_step: int = 0
    rollouts: Rollouts | None = None
    # Restores the newest checkpoint, and returns the batches from there on.
    rewind: Callable[[], Iterable[GlobalBatch]] | None = None
    meter: Meter | None = None
    answers: Answers | None = None
    tasks: Tasks | None = None

    def __post_init__(self) -> None:
        health = self.plan.config.health
        self.spikes = Spikes(health, self.emit)
        self.spikes.restore(self.state.spikes)
        self.state.spikes = self.spikes.state()
        self.weight_check = WeightCheck(self.plan, self.engine, self.reducer, self.emit)
        self.garbage = GarbageCollection(self.plan.config.run.collect_every)
        self.profile = Profile(self.plan, self.reducer.rank, self.emit)
        self.collectives = CollectiveCheck(health.check_collectives)
        self.stragglers = Stragglers(self.reducer, self.emit, health.straggler_ratio)
        self.expert_loads = ExpertLoads(
            self.engine.router_load,
            self.reducer.fp64_device,
            self.emit,
            self.plan.steps,
            self.plan.config.model.router_bias_rate,
        )
        # With engines with local updates (local SGD, DiLoCo) each rank decides on its update by its
        # own loss and norm. The sums over all ranks are only reported, and are read a step later.
        self.uses_local_updates = False
        if hasattr(self.engine, "enable_steps_without_peers"):
            self.uses_local_updates = self.engine.enable_steps_without_peers()

        # The step whose numbers are still on their way to the host.
        self.pending_step: PendingStep | None = None
        self.clock = StepClock()
        self.stop_request = StopRequest()
        # Whether the run can be resumed after the last step. It cannot between steps that share a
        # rollout.
        self.is_resumable = True
        self.last_resumable_step = self.state.step
        # Whether it is time to try a failed save again; the same on all ranks.
        self.should_retry_save = False
        # eval.metric of the current weights; None if they were not evaluated.
        self.metric: float | None = None

    def run(self) -> str | None:
        """Train from `state` to the last batch.

        Returns None, or why eval.patience has ended the run earlier. Raises Preempted after a stop
        signal, and TrainingStopped if a policy stops the run.
        """
        try:
            with self.garbage:
                self._run()
            return self.early_stop_reason
        except TrainingStopped:
            self.saver.wait()
            raise
        finally:
            if self.rollouts is not None:
                self.rollouts.close()

    def _run(self) -> None:
        """Evaluate, train, evaluate again, save, and report the last measurements."""
        self._evaluate_before_training()
        self._train()
        self.profile.stop_if_due(self.state.step, last=True)
        if self._needs_last_evaluation():
            self._evaluate_last()
        self._save_last()
        self.measure.finish(self.state.step)
        if self.meter is not None:
            _, device_values = self.reducer({}, *self.meter.values(now=True))
            devices = self.meter.event(self.state.step, device_values, now=True)
            if devices is not None:
                self.emit(devices)

    def _evaluate_before_training(self) -> None:
        """Evaluate a run that begins, or repeat an evaluation that a stop signal has interrupted."""
        config = self.plan.config
        if self.state.step == 0:
            self.state.evaluated = 0
            if config.eval.at_start:
                self.evaluate()
        evaluation_was_interrupted = self.state.evaluated >= 0 and is_due(
            config.eval.every_steps, self.state.evaluated, self.state.step
        )
        if evaluation_was_interrupted:
            is_best = self.evaluate()
            if is_best and config.checkpoint.keep_best:
                self.save()

    def _needs_last_evaluation(self) -> bool:
        """Whether the last step has not been evaluated yet."""
        every = self.plan.config.eval.every_steps
        if not every:
            return True
        is_multiple = self.state.step % every == 0
        return not is_multiple and self.state.evaluated != self.state.step

    def _evaluate_last(self) -> None:
        """Evaluate after the last step. If the evaluation may fail, the weights are saved first."""
        if self.tasks is not None:
            self._save_last()
        try:
            self.evaluate()
        except ConfigError:  # there is no such metric, on any rank
            self._save_last()
            raise

    def _train(self) -> None:
        """Take all steps to the last batch.

        A spike in the loss may send the run back to a checkpoint.
        """
        while True:
            try:
                self._take_steps()
                self._finish_pending_step()
                return
            except GoBack as back:
                self._go_back(back)

    def _take_steps(self) -> None:
        """Take steps to the last batch; evaluate and save between them."""
        batches = iter(self.batches)
        self.last_resumable_step = self.state.step
        while True:
            if self.rollouts is not None and self.is_resumable:
                # The next batch begins with a rollout, which takes long: a run that is asked to
                # stop does so before it.
                self._sync_signals_and_exit_if_any()
                self.timeout.before_long_work(self.state.step)
            if self.early_stop_reason:
                self._report_rollout()
                return
            draw_began = time.time()
            batch = self._next_batch(batches)
            if batch is None:
                return
            self.profile.start_if_due(self.state.step)
            self._train_step(batch, time.time() - draw_began)
            self.profile.stop_if_due(self.state.step)
            self.collectives.check()
            self.garbage.collect_if_due(self.state.step)
            if self.weight_check.is_due(self.state.step):
                self.weight_check.check(self.state.step)
            if self.is_resumable:
                self._evaluate_and_save_if_due()
            self.saver.report(self.saver.checkpointer.poll())

    def _next_batch(self, batches: Iterator[GlobalBatch]) -> GlobalBatch | None:
        """Wait for the next batch; None after the last one."""
        # A step whose traffic is counted may take as long as it likes.
        is_counted = self.measure.traffic.due(self.state.step)
        heartbeat.step(self.state.step, self.state.position, untimed=is_counted)
        heartbeat.beat("data")
        return next(batches, None)

    def _evaluate_and_save_if_due(self) -> None:
        """Stop, evaluate and save, each if it is time, after a step that can be resumed from."""
        config = self.plan.config
        self._exit_if_signal_known()
        is_best = False
        if self._is_due(config.eval.every_steps):
            is_best = self.evaluate()
        should_save_best = is_best and config.checkpoint.keep_best
        if (
            self._is_due(config.checkpoint.every_steps)
            or should_save_best
            or self.should_retry_save
        ):
            self.save()
        elif self.saver.memory_checkpoints is not None and self._is_due(
            config.checkpoint.in_memory_every
        ):
            self._keep_in_memory()
        self.last_resumable_step = self.state.step

    def _is_due(self, every: int | None) -> bool:
        """Whether a multiple of `every` was passed since the last step that can be resumed from."""
        return is_due(every, self.last_resumable_step, self.state.step)

    def _go_back(self, back: GoBack) -> None:
        """Go back to the newest checkpoint. All ranks come here after the same step.

        Restoring it also undoes updates that were made after the spike, before its loss was read.
        """
        assert self.rewind is not None
        self.seen_step = max(self.seen_step, self.state.step)
        self.saver.wait()
        if self.saver.memory_checkpoints is not None:
            self.saver.memory_checkpoints.forget()  # it may hold steps that the run goes back from
        self.spikes.passed_over.add(back.position)
        self.timeout.before_long_work(self.state.step)
        heartbeat.beat("startup")
        with self.goodput.spend("restore"):
            self.batches = self.rewind()
        # The spikes that came after the checkpoint stay known.
        self.state.spikes = self.spikes.state()
        self.saver.saved_step = self.state.step
        self.metric = None
        self.clock.finished_at = time.time()
        self.is_resumable = True
        # The weights of this checkpoint were checked when it was saved, so they count as agreed.
        # The checks of later steps are repeated.
        self.weight_check.last_agreed_step = self.state.step

    def _train_step(self, batch: GlobalBatch, data_s: float) -> None:
        """Take one step. `data_s`: seconds that its batch was waited for.

        The host does not wait for the device here. While the device computes this step, the host
        reads the numbers of the step before. It waits for this step's own numbers only if the step
        is logged, or its traffic is counted.
        """
        started = time.time()
        self.goodput.end_startup()
        step = self.state.step

        # The loss is a sum over all samples of all ranks, divided once by their weight: the number
        # of samples, or of tokens.
        weight, tokens = batch.totals or self._sum_weight_and_tokens(batch)
        denominator = weight or 1.0
        # A step draws the same numbers whether the run was resumed before it or not.
        rng_coordinates = self.plan.mesh.rng_coordinates(self.reducer.rank)
        seed_step(self.plan.config.run.seed, step, *rng_coordinates)

        heartbeat.beat("forward")
        lr = self._learning_rate(step)
        self.engine.begin_step(lr)
        self.expert_loads.begin_step()
        with self.measure.watch(step):
            sums = self.engine.forward_backward(
                batch.micro_batches, self.algorithm.objective, denominator
            )
        comm_s = self.engine.exposed_communication()
        if comm_s is None:
            comm_s = math.nan

        is_logged = self._is_logged(step)
        own_numbers = self._own_numbers(is_logged, data_s, comm_s)
        counts = self.expert_loads.counts(is_logged)
        if self.uses_local_updates:
            reduced = self._reduce_after_norm(step, sums, own_numbers, counts)
        else:
            reduced = self._reduce_before_norm(step, sums, own_numbers, counts)

        pending = PendingStep(
            reduced.gathered,
            step=step + 1,
            denominator=denominator,
            position=batch.position,
            sample_ids=batch.sample_ids[batch.sample_ids >= 0],
            tokens=int(tokens),
            lr=lr,
            began=started - data_s,
            data_s=data_s,
            is_logged=is_logged,
        )

        # The device decides whether the update is made. The sum is finite if both parts are, and
        # one test launches half the kernels of two.
        is_finite = torch.isfinite(reduced.loss + reduced.grad_norm)
        may_update = self.spikes.allows(pending, reduced.loss, is_finite)
        with self.measure.watch(step, "step"):
            self.engine.step(lr, reduced.grad_norm, may_update)
            self.expert_loads.balance(reduced.gathered, may_update)
        heartbeat.beat("collective")
        if not self.uses_local_updates:
            reduced.gathered.fetch(reduced.grad_norm)

        self._advance(batch, int(tokens))
        self._end_measurement(pending, batch, comm_s)
        self._finish_pending_step()
        self.pending_step = pending
        # A rank with local updates would wait for the slowest rank here.
        if pending.is_logged and not self.uses_local_updates:
            self._finish_pending_step()

    def _reduce_before_norm(
        self, step: int, sums: DeviceSums, own_numbers: list[float], counts: torch.Tensor | None
    ) -> ReducedStep:
        """Sum the losses over the ranks, and compute the gradient norm meanwhile. Collective.

        One collective carries the sums, what each rank reports of itself (`own_numbers`), and the
        tokens of experts that it has counted (`counts`). It begins before the norm, so that both
        run side by side. The norm joins the numbers after the update.
        """
        heartbeat.beat("collective")
        gathered = self.reducer.start(sums, *own_numbers, counts=counts)
        heartbeat.beat("optimizer")
        with self.measure.watch(step, "clip"):
            grad_norm = self.engine.grad_norm()
        return ReducedStep(gathered, gathered["loss"], grad_norm)

    def _reduce_after_norm(
        self, step: int, sums: DeviceSums, own_numbers: list[float], counts: torch.Tensor | None
    ) -> ReducedStep:
        """Compute this rank's own gradient norm, and sum it over the ranks with the losses.

        Collective. The norm comes first, because its square travels with the sums:
        `PendingStep.arrived` makes the norm that is reported from them. The update itself follows
        this rank's own loss and norm, so no rank waits for another before it.
        """
        heartbeat.beat("collective")
        heartbeat.beat("optimizer")
        with self.measure.watch(step, "clip"):
            grad_norm = self.engine.grad_norm()
        sums_with_norm = {**sums, SQUARES: grad_norm.square()}
        gathered = self.reducer.start(sums_with_norm, *own_numbers, counts=counts)
        return ReducedStep(gathered, sums["loss"], grad_norm)

    def _sum_weight_and_tokens(self, batch: GlobalBatch) -> tuple[float, float]:
        """Return the weight and the tokens of a global batch. Collective.

        For a batch whose weight does not follow from the cache: each rank knows only its own part.
        """
        own_weight = sum(micro_batch.weight for micro_batch in batch.micro_batches)
        own_sums = {"weight": float(own_weight), "tokens": float(batch.tokens)}
        total, _ = self.reducer(own_sums)
        return total["weight"], total["tokens"]

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate of a step. `step`: steps done before."""
        # Only the plan of a dry run may lack the number of steps, and that takes none.
        schedule = self.plan.config.schedule
        rate = schedule.rate(step, self.plan.steps or 1, self.plan.warmup_steps)
        return self.plan.lr * rate

    def _is_logged(self, step: int) -> bool:
        """Whether an event is written of a step. `step`: steps done before."""
        steps_done = step + 1
        is_multiple = steps_done % self.plan.config.run.log_every == 0
        return is_multiple or steps_done == self.plan.steps

    def _own_numbers(self, is_logged: bool, data_s: float, comm_s: float) -> list[float]:
        """Return the numbers that this rank reports with the sums of a step.

        They are `StepNumbers`, and for a logged step the values of its devices after them. All ranks
        have to report the same number of them.
        """
        device_values: list[float] = []
        if is_logged and self.meter is not None:
            device_values = self.meter.values()
        numbers = StepNumbers(
            stop_signal=float(self.stop_flag.requested),
            retry_after_step=self.saver.retry_after_step,
            data_s=data_s,
            comm_s=comm_s,
            memory_bytes=float(self.memory_bytes()),
            last_step_s=self.clock.last_step_s,
        )
        return [*numbers, *device_values]

    def _advance(self, batch: GlobalBatch, tokens: int) -> None:
        """Update the state of the run after a step. `tokens`: of the batch, over all ranks."""
        self.state.step += 1
        self.state.position = batch.position
        self.state.stream = batch.state
        self.state.tokens += tokens
        self.is_resumable = batch.checkpointable

    def _end_measurement(self, pending: PendingStep, batch: GlobalBatch, comm_s: float) -> None:
        """Record when the host has finished a step, and what the step sent."""
        pending.host_finished_at = time.time()
        step = pending.step - 1
        has_update = True
        if self.measure.traffic.due(step):
            # A step without an update sends less than the plan predicts. Reading this waits for
            # the device.
            has_update = pending.is_finite
        pending.sent_bytes, pending.timing = self.measure.end_step(
            step,
            batch.micro_batches,
            self.saver.checkpointer.staging.arena_bytes,
            has_update,
            data=pending.data_s,
            communication=comm_s,
        )

    def _finish_pending_step(self) -> None:
        """Read the numbers of the pending step, if there is one, and act on them.

        All ranks come here after the same step, with the same numbers.
        """
        pending = self.pending_step
        self.pending_step = None
        if pending is None:
            return
        numbers = pending.numbers
        self.stop_request.record(numbers.stop_signal)
        self.should_retry_save = max(numbers.retry_after_step) < pending.step
        seconds = self.clock.finish(pending)
        self.timeout.after_step(pending.step, numbers.last_step_s)
        category = "recompute" if pending.step <= self.seen_step else "productive"
        self.goodput.seconds[category] += seconds
        seconds_without_data = max(0.0, seconds - pending.data_s)
        self.measure.note_seconds(pending.step, pending.timing, seconds_without_data)

        heartbeat.beat("report")
        startup_seconds = self.goodput.report_startup()
        if startup_seconds:
            self.emit(Started(seconds=startup_seconds))
        self.stragglers.add(pending.step, seconds, pending.tokens, numbers.data_s, numbers.comm_s)
        if pending.is_logged:
            self._log_step(pending, seconds)
        self._judge(pending)

    def _judge(self, pending: PendingStep) -> None:
        """Count a step without an update: its numbers are not finite, or its loss is a spike.

        Raises TrainingStopped or GoBack, as the policies of `health` say.
        """
        skips = self.state.skips
        if pending.is_finite:
            self.metric = None
        fix = FIX
        if not pending.is_finite:
            fix = self._fix_of_nonfinite()
        check_finite(
            pending,
            self.plan,
            self.state,
            self.engine.uses_loss_scale(),
            self.emit,
            "health.on_nan",
            fix,
        )
        if pending.is_finite:
            can_go_back = self.rewind is not None and self.saver.saved_step >= 0
            self.state.skips = self.spikes.judge(pending, skips, can_go_back)

    def _fix_of_nonfinite(self) -> str:
        """Return advice for numbers that are not finite.

        A step that is not finite changes no weights. So if weights are not finite now, they were
        not before the step, nor when the run began.
        """
        # An engine of several models has no model of its own.
        model = getattr(self.engine, "model", None)
        name: str | None = None
        if model is not None:
            name = nonfinite_weight(model)
        if name is None:
            return FIX
        return f"weights were not finite before this step, {name} for one: start from a sound model or checkpoint"

    def _log_step(self, pending: PendingStep, seconds: float) -> None:
        """Emit the event of a step, and that of the devices."""
        world_size = self.reducer.world_size
        numbers = pending.numbers
        if pending.device_values and self.meter is not None:
            devices = self.meter.event(pending.step, pending.device_values)
            if devices is not None:
                self.emit(devices)
        tokens_per_s = pending.tokens / seconds
        # Means over the ranks. The time of communication is NaN if it is not measured.
        data_s = sum(numbers.data_s) / world_size
        comm_s = sum(numbers.comm_s) / world_size
        compute_s = seconds - data_s
        if not math.isnan(comm_s):
            compute_s -= comm_s
        metrics = self.algorithm.step_metrics(pending.total)
        metrics = metrics | router_metrics(pending.total, pending.denominator)
        metrics = metrics | self.expert_loads.report(pending)
        epoch = 0.0
        if self.plan.data and self.plan.data.epoch:
            epoch = pending.position / self.plan.data.epoch
        event = Step(
            step=pending.step,
            loss=pending.loss,
            lr=pending.lr,
            grad_norm=pending.grad_norm,
            tokens=pending.tokens,
            sent_bytes=pending.sent_bytes,
            metrics=metrics,
            samples=len(pending.sample_ids),
            tokens_per_s=tokens_per_s,
            samples_per_s=len(pending.sample_ids) / seconds,
            mfu=self.plan.predicted.mfu(tokens_per_s, world_size * self.plan.devices_per_rank),
            seconds=seconds,
            data_s=data_s,
            compute_s=max(0.0, compute_s),
            comm_s=comm_s,
            memory_bytes=[int(bytes_) for bytes_ in numbers.memory_bytes],
            epoch=epoch,
        )
        self.emit(event)

    def evaluate(self) -> bool:
        """Evaluate on the held-out sets, each sample once, and on tasks; then answer prompts.

        Collective. Returns whether the current weights are the best so far. A stop signal interrupts
        the evaluation.
        """
        self._finish_pending_step()
        started = time.time()
        step = self.state.step
        self.timeout.before_long_work(step)
        heartbeat.beat("eval")
        with self.goodput.spend("eval"):
            evaluation = self._measure_metrics(step)
        if not evaluation.metrics:
            return False
        self.state.evaluated = step
        event = Eval(
            step=step,
            samples=evaluation.samples,
            seconds=time.time() - started,
            reward_failures=evaluation.reward_failures or None,
            metrics=evaluation.metrics,
        )
        self.emit(event)
        self.metric, is_best = rate_evaluation(
            evaluation.metrics, self.plan.config.eval, self.state
        )
        if self.answers is not None:
            heartbeat.beat("eval")
            with self.goodput.spend("eval"):
                self.answers.write(step, self._evaluation_phase())
        return is_best

    def _measure_metrics(self, step: int) -> Evaluation:
        """Return the metrics of the held-out sets or prompts, and of tasks if it is their turn.

        Tasks take long, so they are scored less often, and always in the last evaluation.
        Collective.
        """
        if self.rollouts is None:
            evaluation = self._evaluate_held_out()
        else:
            evaluation = Evaluation(*self.rollouts.evaluate(step))
        if self.tasks is None:
            return evaluation
        is_turn_of_tasks = self.tasks.is_due(self.state.evaluated, step)
        if is_turn_of_tasks or self._is_last_evaluation(evaluation.metrics):
            self._sync_signals_and_exit_if_any()
            metrics = evaluation.metrics | self.tasks.score()
            evaluation = evaluation._replace(metrics=metrics)
        return evaluation

    def _is_last_evaluation(self, metrics: dict[str, float]) -> bool:
        """Whether eval.patience ends the run after an evaluation with these metrics."""
        options = self.plan.config.eval
        state_after = replace(self.state)
        if options.metric in metrics:
            rate_evaluation(metrics, options, state_after)
        return options.patience is not None and state_after.stale >= options.patience

    def _evaluation_phase(self) -> str:
        """Return "before", "during" or "after": when in training this evaluation takes place."""
        if self.state.step == 0:
            return "before"
        if self.early_stop_reason or self.state.step == self.plan.steps:
            return "after"
        return "during"

    @property
    def early_stop_reason(self) -> str | None:
        """Why the run ends by eval.patience; None while it goes on.

        It is the same on all ranks, and after a resume.
        """
        options = self.plan.config.eval
        state = self.state
        if options.patience is None or state.stale < options.patience:
            return None
        if state.mark is None:
            expected = "finite"
        else:
            expected = f"better than {state.mark:.6g}"
            if options.min_delta > 0:
                expected += f" by more than {options.min_delta:g}"
        evaluations = "evaluations" if state.stale > 1 else "evaluation"
        return f"{options.metric} was not {expected} in {state.stale} {evaluations} (eval.patience)"

    def _evaluate_held_out(self) -> Evaluation:
        """Return the metrics over all held-out sets together. Collective.

        Those of each named set follow as NAME/METRIC.
        """
        if not self.held_out:
            return Evaluation({}, 0, {})
        sums_of_all: dict[str, float] = {}
        metrics_of_sets: dict[str, float] = {}
        samples = 0
        for set_name, batches in self.held_out.items():
            own_sums: dict[str, float] = {}
            for batch in batches():
                self._sync_signals_and_exit_if_any()
                batch_sums = self._evaluate_batch(batch.micro_batches)
                own_sums = _add_sums(own_sums, batch_sums)
                samples += int((batch.sample_ids >= 0).sum())
            set_sums, _ = self.reducer(own_sums)
            sums_of_all = _add_sums(sums_of_all, set_sums)
            if set_name:
                for metric, value in self.algorithm.metrics(set_sums).items():
                    metrics_of_sets[f"{set_name}/{metric}"] = value
        metrics = self.algorithm.metrics(sums_of_all) | metrics_of_sets
        return Evaluation(metrics, samples, {})

    def _evaluate_batch(self, micro_batches: Any) -> dict[str, float]:
        """Return the sums of the held-out objective over micro-batches of this rank. Collective."""
        objective = self.algorithm.eval_objective
        if self.algorithm.evaluates_first_pass:
            return sum_without_model(micro_batches, objective)
        return self.engine.evaluate(micro_batches, objective)

    def save(self) -> None:
        """Save the current weights, with their metric if it is known. Collective."""
        self._finish_pending_step()
        self.should_retry_save = False
        self._begin_saving()
        self.weight_check.check(self.state.step)
        with self.goodput.spend("save"):
            self.saver.save(self.metric)

    def _keep_in_memory(self) -> None:
        """Keep the state in the memory of hosts. Collective."""
        self._finish_pending_step()
        self._begin_saving()
        self.weight_check.check(self.state.step)
        with self.goodput.spend("save"):
            self.saver.keep_in_memory()

    def _save_last(self) -> None:
        """Save the current weights, and wait until they are on disk, unless the run saves nothing.

        Collective.
        """
        self._finish_pending_step()
        self._begin_saving()
        if self.plan.saves:
            self.weight_check.check(self.state.step)
            with self.goodput.spend("save"):
                self.saver.save_last(self.metric)

    def _begin_saving(self) -> None:
        """Raise the time that ranks wait for each other, to what a save may take."""
        self.timeout.before_long_work(self.state.step)
        heartbeat.beat("save")

    def _sync_signals_and_exit_if_any(self) -> None:
        """Ask all ranks for stop signals; if any has one, save and raise Preempted. Collective."""
        _, (signals,) = self.reducer({}, float(self.stop_flag.requested))
        self.stop_request.record(signals)
        self._exit_if_signal_known()

    def _exit_if_signal_known(self) -> None:
        """Save and raise Preempted if the ranks already know of a stop signal, on all ranks.

        Does nothing between steps that share a rollout, from which a run cannot be resumed.
        """
        if self.stop_request.signal and self.is_resumable:
            self._report_rollout()
            self._save_last()
            self.saver.raise_preempted(self.stop_request.signal)

    def _report_rollout(self) -> None:
        """Report the last rollout, since the next start will begin with another one."""
        if self.rollouts is not None:
            self._finish_pending_step()
            self.rollouts.report()


def _add_sums(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Return `sums` with the sums of `more` added; of a key `max_…` the larger one is taken."""
    added = dict(sums)
    for key, value in more.items():
        if key.startswith("max_"):
            added[key] = max(sums.get(key, value), value)
        else:
            added[key] = sums.get(key, 0.0) + value
    return added
