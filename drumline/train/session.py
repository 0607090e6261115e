"""`drumline.session`: the user's own training loop, on the engines, checkpoints, data order and plan of a YAML run.

    with drumline.session(strategy="fsdp2", precision="bf16", global_samples=64) as s:
        model, optimizer = s.prepare(build, make_optimizer)
        for batch in s.batches(dataset, collate):
            loss_sum, weight = my_loss(model, batch)
            s.backward(loss_sum, weight)
            if s.step(max_grad_norm=1.0):
                s.log(); s.save(every=100)

The gradient of a step is that of Σ loss / Σ weight over the global batch. Σ weight is known only
after the last backward, so the division is made in two parts. `backward` divides each loss sum by
the number of samples of the global batch. `step` multiplies the gradients by samples / Σ weight
over all ranks. So fp16 and compression see gradients of the usual scale, and clipping sees the
final gradient.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from drumline.checkpoint.memory import Memory
from drumline.checkpoint.ranks import RankGroup
from drumline.config.resume import Resume
from drumline.data.samples import evaluation_batches, global_batches
from drumline.dist.reduce import SumReducer
from drumline.dist.seeds import Draws, derive, seed_step, use_deterministic_kernels
from drumline.dist.start import RankInfo, gpu, start, stop
from drumline.engine.build import ModuleParts, build_module
from drumline.engine.optimizer import MakeOptimizer
from drumline.engine.transforms import batch_norms
from drumline.errors import DataError, EnvironmentFault, Preempted, TrainingStopped, UserError
from drumline.launch.environment import die_with_launchers
from drumline.launch.tasks import join_tasks
from drumline.models.blocks import Units
from drumline.models.containers import map_tensors
from drumline.models.tape import Build
from drumline.plan.explain import default_run_dir
from drumline.plan.resolve import describe_batch_norms
from drumline.system.output import Verbosity, say, say_note, verbosity
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Emit, Eval
from drumline.train import session_checks, session_parts
from drumline.train.entry import MainReporter, Reporter, run_start
from drumline.train.failure import forget_first_error
from drumline.train.garbage import GarbageCollection
from drumline.train.restore import ResumePoint, checkpointer_of, memory_checkpoints_of
from drumline.train.saving import ResumeHints, Saver
from drumline.train.session_model import Model
from drumline.train.session_parts import MAIN, Pair, SessionEngines, SessionModel
from drumline.train.state import Goodput, PendingStep, TrainState, check_finite
from drumline.train.uncaught import install_hook, print_error, report

Collate = Callable[[list[Any]], Any]
FIX = 'look at the samples, lower the rate, or pass over it: on_nan="skip"'


class MicroBatch(NamedTuple):
    """The micro-batch that the user's loop is in."""

    end: int  # the run's position after its global batch
    is_last: bool  # whether it is the last one of its global batch


class LogMark(NamedTuple):
    """Where the run stood when `log` was called last."""

    steps: int
    time: float  # unix
    tokens: int


class Session:
    """A run of the user's own training loop, on one rank.

    All ranks take the same path through it.
    """

    def __init__(
        self,
        strategy: str | Mapping[str, Any] = "auto",
        precision: str = "auto",
        *,
        global_samples: int,
        micro_batch: int | None = None,
        run_dir: str | Path | None = None,
        resume: bool | str | Path = False,
        allow: tuple[str, ...] = (),
        units: Units | None = None,
        tp_plan: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Plan the run.

        Args:
            strategy: As in the YAML, with `precision`.
            global_samples: Samples of a step, over all ranks.
            micro_batch: Samples that a rank takes at once; by default all of its own.
            resume: Go on from the newest checkpoint of `run_dir` (True), or from a checkpoint's folder.
            allow: Keys of the config that may differ on a resume.
            units: See engine.build.ModuleParts, also for `tp_plan`.
            options: Further keys of the YAML by short names, such as seed, device, keep and compile;
                see train.session_parts.OPTIONS.

        Raises UserError, as all methods of the session do, for what cannot be done.
        """
        install_hook()
        forget_first_error()
        join_tasks()
        ranks = RankInfo.from_environment()
        run_dir = run_dir or default_run_dir(Path(sys.argv[0] or "session"))
        self.plan = session_parts.make_plan(
            strategy,
            precision,
            global_samples,
            micro_batch,
            str(run_dir),
            ranks.world_size,
            options,
        )
        self.resume = Resume.from_argument(resume)
        self.allow = allow
        self.units = units
        self.tp_plan = tp_plan
        self.started = time.time()
        self.stack = ExitStack()
        self.garbage = GarbageCollection(self.plan.config.run.collect_every)
        # The loss of the last evaluation, if no step came after it.
        self.metric: float | None = None
        self._models: dict[str, SessionModel] = {}
        self._micro_batch: MicroBatch | None = None
        self._last_log = LogMark(0, self.started, 0)
        self._epoch = 0.0
        # The signal by which some rank was asked to stop; 0 for none.
        self._stop_signal = 0
        # Whether a loop over `batches` has come to its end.
        self._has_ended = False

    def __enter__(self) -> Self:
        """Join the process group, and claim the run folder. Collective."""
        die_with_launchers()
        plan = self.plan
        if plan.config.run.deterministic:
            use_deterministic_kernels()
        torch.backends.cuda.matmul.allow_tf32 = plan.config.precision.tf32
        torch.backends.cudnn.allow_tf32 = plan.config.precision.tf32
        self.stop_flag = self.stack.enter_context(StopFlag(alone="RANK" not in os.environ))
        # A process group of the user's is used, and left as it is.
        self.owns = not dist.is_initialized()
        if self.owns:
            self.ranks = start(plan.device, plan.backend, plan.config.launch.timeout_seconds)
        else:
            self.ranks = RankInfo.from_environment()
        # torch's `init_process_group` has wrapped `print_error`, our excepthook, in its own. Since
        # `print_error` ends the process, torch's would lose what it prints, so ours is set again.
        sys.excepthook = print_error
        self.device = "cpu"
        if plan.device == "cuda":
            self.device = f"cuda:{gpu(self.ranks)}"
        # Of the ranks that share samples, exactly one contributes to sums over all ranks.
        contributes = plan.mesh.is_counted(self.ranks.rank)
        self.reducer = SumReducer(
            self.ranks.rank, self.ranks.world_size, self.device, contributes=contributes
        )
        try:
            self.resume = RankGroup.all(error_type=EnvironmentFault).run_on_rank_0(
                lambda: session_parts.claim_run_folder(plan, self.resume, self.allow, self.stack)
            )
        except EnvironmentFault:
            # Python calls `__exit__` only for a session that was entered.
            self.stack.close()
            if self.owns:
                stop()
            raise
        self.reporter = MainReporter(plan) if self.is_first else Reporter()
        self.emit: Emit = self.reporter.emit
        self.goodput = Goodput(self.started)
        self.emit(run_start(plan, self.resume))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Save the last step if nothing was raised, report what was, and leave the process group."""
        try:
            if error is None and self._models:
                self._save_last()
        except Exception as failure:
            error = failure
            raise
        finally:
            if isinstance(error, Exception):
                report(error)
            for model in self._models.values():
                model.contexts.close()
            if self.owns:
                has_failed = not isinstance(error, Preempted | TrainingStopped | None)
                stop(failed=has_failed)
            self.reporter.close(error, self.goodput)
            self.stack.close()

    def prepare(
        self, build: Build | Mapping[str, Pair], make_optimizer: MakeOptimizer | None = None
    ) -> Any:
        """Return (model, optimizer) on this rank. Collective.

        `build()` is laid out without memory, spread as planned, and each rank fills its own parts.
        `make_optimizer(model)` makes the optimizer over the parameters that are there then. With
        `resume` both are as the checkpoint has them.

        For {name: (build, make_optimizer)} two dictionaries by name are returned.
        """
        pairs = session_checks.require_pairs(build, make_optimizer, bool(self._models))
        pairs = session_parts.check_optimizers(pairs)
        session_checks.require_one_model(self.plan, len(pairs))
        resumes_newest = self.resume is not None and self.resume.is_newest_of_run
        memory_checkpoints = memory_checkpoints_of(self.plan, resumes_newest)
        resume_point = self._find_resume_point(memory_checkpoints)
        checkpoint: Path | None = None
        if resume_point is not None:
            checkpoint = resume_point.path
        unfrozen = session_parts.unfrozen_weights(checkpoint, pairs)
        # With several models a backward may go through forwards of more than one of them.
        overlaps = len(pairs) == 1
        for name, pair in pairs.items():
            self._models[name] = self._build_model(
                name, pair, resume_point, unfrozen[name], overlaps
            )
        engines = {name: model.engine for name, model in self._models.items()}
        self.engines = SessionEngines(engines, unfrozen)
        self._note_batch_norms()
        checkpointer = checkpointer_of(self.plan, "min")
        if memory_checkpoints is not None:
            memory_checkpoints.open_writer()
        self._state = TrainState()
        saved_step = -1
        if resume_point is not None:
            self._state = resume_point.restore(self.engines, self.emit, time.time())  # type: ignore[arg-type]
            if resume_point.path is not None and checkpointer.is_kept(resume_point.path):
                saved_step = self.steps
        self.stack.enter_context(self.garbage)
        self._last_log = LogMark(self.steps, time.time(), self._state.tokens)
        self.saver = Saver(
            self.plan,
            self.engines,
            self._state,
            checkpointer,
            self.emit,
            self.reducer,
            self.stop_flag,
            saved_step,
            ResumeHints("resume=True", "resume={!r}"),
            memory_checkpoints,
        )
        models = {}
        optimizers = {}
        for name, model in self._models.items():
            models[name] = Model(model.engine)
            optimizers[name] = session_parts.guard_optimizer(model.engine.optimizer)
        if MAIN in models:
            return models[MAIN], optimizers[MAIN]
        return models, optimizers

    def _find_resume_point(self, memory_checkpoints: Memory | None) -> ResumePoint | None:
        """Return what the run resumes from; None for a run that begins. Collective."""
        if self.resume is None:
            return None
        return ResumePoint.resolve(self.plan, self.resume, memory_checkpoints)

    def _build_model(
        self,
        name: str,
        pair: Pair,
        resume_point: ResumePoint | None,
        unfrozen: frozenset[str],
        overlaps: bool,
    ) -> SessionModel:
        """Build one model and its optimizer, spread as planned. Collective.

        `unfrozen`: weights that are trained although `build` has them frozen. `overlaps`: whether
        gradients may be reduced while backward still runs.
        """
        build, make_optimizer = pair
        checkpoint_keys = frozenset[str]()
        if resume_point is not None:
            checkpoint_keys = resume_point.keys_of(name)
        engine = build_module(
            session_parts.plan_of_model(self.plan, name),
            build,
            self.device,
            checkpoint_keys,
            parts=ModuleParts(self.units, self.tp_plan),
            make_optimizer=make_optimizer,
            overlaps=overlaps,
            unfrozen=unfrozen,
        )
        return SessionModel(engine)

    def _note_batch_norms(self) -> None:
        """Print on rank 0 how batch norms of the models see a batch that is spread over ranks."""
        if not self.is_first:
            return
        for model in self._models.values():
            layers = len(batch_norms(model.engine.model))
            for line in describe_batch_norms(self.plan.config, self.plan.batch, layers):
                say_note(line)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self.ranks.rank == 0

    @property
    def steps(self) -> int:
        """Global batches that are done, over all starts of the run."""
        self._require_prepared()
        return self._state.step

    @property
    def position(self) -> int:
        """Samples that were taken since the run began, over all ranks and passes.

        The order of the data depends on it alone.
        """
        self._require_prepared()
        return self._state.position

    @property
    def state(self) -> dict[str, Any]:
        """A dictionary for the user's own values, which JSON must have.

        It is saved and restored with each checkpoint.
        """
        self._require_prepared()
        # In a session no data loader keeps its state in this field.
        return self._state.stream

    @property
    def loss(self) -> float:
        """The mean loss of the last step over the global batch, of a session with one model.

        Waits for the device. One rank alone may read it. Raises UserError before this start's
        first step, and in a session of several models, which has `losses`.
        """
        return session_parts.last_step(self._models, "loss").loss

    @property
    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping; like `loss` otherwise."""
        return session_parts.last_step(self._models, "grad_norm").grad_norm

    @property
    def losses(self) -> dict[str, float]:
        """`loss` of each model of a session with several, by name; models without a step are left out."""
        return {name: step.loss for name, step in self._last_steps()}

    @property
    def grad_norms(self) -> dict[str, float]:
        """`grad_norm` of each model, like `losses`."""
        return {name: step.grad_norm for name, step in self._last_steps()}

    def _last_steps(self) -> Iterator[tuple[str, PendingStep]]:
        """Yield (name, last step) of each model that has made one in this start."""
        for name, model in self._models.items():
            if model.last_step is not None:
                yield name, model.last_step

    def batches(
        self,
        dataset: Any,
        collate: Collate = default_collate,
        *,
        epochs: int | None = 1,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> Iterator[Any]:
        """Yield `collate(samples)` of each micro-batch of this rank, with its tensors on the device, from `position` on.

        Before each micro-batch python, numpy and torch are seeded by (seed, step, rank,
        micro-batch).

        Args:
            dataset: One with `len` and indices is shuffled by (seed, pass). One that can only be iterated is read by every
                rank, and skipped to `position`.
            epochs: Passes of the whole run over the dataset; None: without end.
            steps: Global batches of the whole run, instead of `epochs`.
        """
        self._require_prepared()
        seed = self.plan.config.run.seed
        first_position = self.position
        rows = iter(
            global_batches(
                dataset,
                self.plan.batch,
                self.plan.mesh.data_rank(self.ranks.rank),
                first_position,
                epochs if steps is None else None,
                derive(seed, "order") if shuffle else None,
                Draws(derive(seed, "rows")).use,
            )
        )
        rng_coordinates = self.plan.mesh.rng_coordinates(self.ranks.rank)
        while steps is None or self.steps < steps:
            seed_step(seed, self.steps, *rng_coordinates)
            micro_batches = next(rows, None)
            if micro_batches is None:
                break
            session_checks.require_free(
                self._micro_batch is not None, self._models_with_unused_gradients()
            )
            for model in self._models.values():
                model.sums = []
                model.has_stepped = False
            end = self.position + self.plan.batch.global_samples
            self._epoch = session_parts.passes_until(dataset, end)
            for index, samples in enumerate(micro_batches):
                seed_step(seed, self.steps, *rng_coordinates, index)
                is_last = index == len(micro_batches) - 1
                self._micro_batch = MicroBatch(end, is_last)
                for model in self._models.values():
                    model.contexts.enter_context(model.engine.micro_batch(is_last))
                try:
                    yield self._copy_to_device(collate(samples), non_blocking=True)
                finally:
                    for model in self._models.values():
                        model.contexts.close()
                    self._micro_batch = None
            self._end_global_batch(end)
        session_checks.require_more(self.position > first_position, self._has_ended)
        self._has_ended = True
        self._finish_pending_steps()
        self._exit_if_signal_known()

    def _copy_to_device(self, batch: Any, non_blocking: bool = False) -> Any:
        """Return a batch of any structure with its tensors on this rank's device."""
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=non_blocking), batch)

    def _end_global_batch(self, end: int) -> None:
        """Count a global batch that the loop has gone through, and exit here if asked to.

        `end`: the position after it.
        """
        unused = self._models_with_unused_gradients()
        if unused:
            of_model = f" of {min(unused)}" if min(unused) else ""
            raise UserError(
                f"a global batch ended, and its gradients{of_model} were not used",
                where="session.batches",
                fix="call s.step() after s.backward() in each turn of the loop",
            )
        if not self._stepped_models():
            # A loop may pass over a batch.
            self._state.step += 1
        self._state.position = end
        self._exit_if_signal_known()

    def backward(
        self, loss_sum: torch.Tensor, weight: float | torch.Tensor, of: str = MAIN
    ) -> None:
        """Accumulate the gradients of a micro-batch's loss sum, in the parameters of one model alone.

        `weight`: the part of this micro-batch in what the loss is divided by: samples, or tokens.
        The weights of the global batch are summed.
        """
        model = session_parts.find_model(self._models, of)
        session_checks.require_sum(loss_sum, weight, self.plan.engine != "pipeline")
        # A loss may go through other models, whose gradients it must not change.
        other_grads = []
        for name, other in self._models.items():
            if name != of:
                other_grads += [(p, p.grad) for p in other.engine.named.values()]
        for parameter, _ in other_grads:
            parameter.grad = None
        model.engine.backward(loss_sum, float(self.plan.batch.global_samples))
        for parameter, gradient in other_grads:
            parameter.grad = gradient
        sums = [session_parts.to_scalar(value, self.device) for value in (loss_sum, weight)]
        model.sums.append(torch.stack(sums))

    def step(
        self, max_grad_norm: float | None = None, lr: float | None = None, of: str = MAIN
    ) -> bool:
        """At the end of a global batch make the update, and return True; before that return False.

        Collective. The gradients are divided by the weight of the global batch, and clipped by
        their global norm. If loss or gradients are not finite the weights stay as they are, and
        `on_nan` decides.

        Args:
            lr: For all groups of the optimizer; None: as the groups have it.
        """
        session_checks.require_rates(max_grad_norm, lr)
        model = session_parts.find_model(self._models, of)
        micro_batch = self._micro_batch
        if micro_batch is None or not micro_batch.is_last:
            return False
        if model.has_stepped or not model.sums:
            raise UserError(
                "step without a backward before it",
                where="session.step",
                fix="call s.backward(loss_sum, weight) first",
            )
        engine = model.engine
        # Leaving the context of the micro-batch reduces the gradients.
        model.contexts.close()
        loss_sum, weight = torch.stack(model.sums).sum(0)
        gathered = self.reducer.start(
            {"loss": loss_sum, "weight": weight}, float(self.stop_flag.requested)
        )
        total_weight = gathered["weight"]
        divisor = torch.where(total_weight > 0, total_weight, 1.0)
        engine.divide(divisor / self.plan.batch.global_samples)
        engine.max_grad_norm = max_grad_norm
        grad_norm = engine.grad_norm()
        is_finite = torch.isfinite(gathered["loss"]) & torch.isfinite(grad_norm)
        session_parts.take_step(engine, lr, grad_norm, is_finite)
        gathered.fetch(grad_norm)

        self.metric = None
        is_first_model = not self._stepped_models()
        if is_first_model:
            self._state.step += 1
            self._state.position = micro_batch.end
        # The numbers of the model's step before are on the host by now; those of this one are on
        # their way.
        pending = PendingStep(gathered, self.steps)
        self._finish_pending_steps([model])
        model.pending_step = pending
        model.last_step = pending
        model.counts_tokens = is_first_model
        model.has_stepped = True
        if is_first_model:
            self.garbage.collect_if_due(self.steps)
        return True

    def _stepped_models(self) -> list[str]:
        """Return the names of the models that have made their step of the global batch."""
        return [name for name, model in self._models.items() if model.has_stepped]

    def _models_with_unused_gradients(self) -> list[str]:
        """Return the names of the models with gradients that no step has used yet."""
        return [
            name for name, model in self._models.items() if model.sums and not model.has_stepped
        ]

    def _finish_pending_steps(self, models: Iterable[SessionModel] | None = None) -> None:
        """Read the numbers of pending steps, of all models by default, and act on them.

        All ranks must call it after the same steps. So properties, which one rank alone may read,
        do not call it. Raises TrainingStopped if a step that is not finite is one too many.
        """
        if models is None:
            models = self._models.values()
        for model in models:
            pending = model.pending_step
            if pending is None:
                continue
            self._state.tokens += model.tokens
            model.pending_step = None
            if not self._stop_signal:
                self._stop_signal = int(max(pending.stop_signals))
            check_finite(
                pending,
                self.plan,
                self._state,
                model.engine.uses_loss_scale(),
                self.emit,
                "on_nan",
                FIX,
            )

    def evaluate(
        self,
        dataset: Any,
        collate: Collate,
        measure: Callable[..., Any],
        micro_batch: int | None = None,
    ) -> dict[str, float]:
        """Return means over a dataset, each sample once over all ranks, without gradients.

        Collective. The result's `loss` decides which checkpoint is the best, if one is saved at
        this step.

        Args:
            measure: measure(batch) returns (loss sum, weight), or (loss sum, weight, {name: sum}).
            micro_batch: Samples that a rank takes at once; by default as in training.
        """
        self._require_prepared()
        began = time.time()
        micro_batch = micro_batch or self.plan.batch.eval_micro_batch
        sums = self._sum_over_dataset(dataset, collate, measure, micro_batch)
        if not sums:
            raise DataError(
                "the dataset gives no samples",
                where="session.evaluate",
                fix="give a list, or one whose iter() starts again",
            )
        # One rank's share of a dataset may have names that only other datasets have on the others.
        self.reducer.require_same_names(tuple(sums))
        total, _ = self.reducer.start(sums).read()
        weight = total.pop("weight", 0.0) or 1.0
        means = {name: value / weight for name, value in total.items()}
        self.metric = means.get("loss")
        seconds = time.time() - began
        # The weights are those that `measure` returned. Their sum is the number of samples only if
        # each sample weighs 1; it is the number of tokens if the loss is summed over tokens.
        self.emit(Eval(step=self.steps, samples=int(weight), seconds=seconds, metrics=means))
        return means

    def _sum_over_dataset(
        self, dataset: Any, collate: Collate, measure: Callable[..., Any], micro_batch: int
    ) -> dict[str, torch.Tensor]:
        """Return this rank's sums of what `measure` returns, as fp64 scalars on the device.

        Collective.
        """
        sums: dict[str, torch.Tensor] = {}
        mesh = self.plan.mesh
        with ExitStack() as contexts:
            for model in self._models.values():
                contexts.enter_context(model.engine.evaluation_mode())
            drawn = Draws(derive(self.plan.config.run.seed, "held out")).use
            data_rank = mesh.data_rank(self.ranks.rank)
            for samples, contributes in evaluation_batches(
                dataset, micro_batch, data_rank, mesh.data_ranks, drawn
            ):
                batch = self._copy_to_device(collate(samples))
                values = session_checks.normalize_measure_result(measure(batch))
                for name, value in values.items():
                    scalar = torch.as_tensor(value, device=self.device).double().reshape(())
                    # 0 for samples that another rank contributes.
                    part = scalar * contributes
                    sums[name] = sums.get(name, torch.zeros_like(part)) + part
        return sums

    def log(self, **metrics: Any) -> None:
        """Write an event of this step, and on rank 0 print a line.

        Both have the loss and the gradient norm over all ranks (of several models as NAME_loss),
        and `metrics`, numbers of this rank. Before this start's first step only the line is
        printed.
        """
        self._require_prepared()
        scalars: dict[str, float] = {}
        for name in self._stepped_models():
            prefix = f"{name}_" if name else ""
            scalars[f"{prefix}loss"] = self.losses[name]
            scalars[f"{prefix}grad_norm"] = self.grad_norms[name]
        scalars |= session_checks.require_numbers(metrics)
        if self.is_first and verbosity() is not Verbosity.QUIET:
            shown = "  ".join(f"{name} {value:.5g}" for name, value in scalars.items())
            say(f"step {self.steps}  {shown}", sys.stdout)
        losses = self.losses
        if not losses:
            return
        before = self._last_log
        now = time.time()
        pending_tokens = sum(model.tokens for model in self._models.values())
        self._last_log = LogMark(self.steps, now, self._state.tokens + pending_tokens)
        steps = max(1, self.steps - before.steps)
        first_model = next(iter(self._models.values()))
        event = session_parts.step_event(
            self.steps,
            self.plan,
            first_model.engine,
            scalars,
            seconds=(now - before.time) / steps,
            tokens=(self._last_log.tokens - before.tokens) // steps,
            epoch=self._epoch,
            loss=next(iter(losses.values())),
            grad_norm=next(iter(self.grad_norms.values())),
        )
        self.emit(event)

    def save(self, every: int | None = None) -> None:
        """Save a checkpoint in the background. Collective.

        With `every` it is saved at multiples of `every` alone, and between them in memory as
        `in_memory_every` has it. The end of the session saves the last one anyway.
        """
        self._require_prepared()
        is_due_on_disk = every is None or self.steps % session_checks.require_every(every) == 0
        in_memory_every = self.plan.config.checkpoint.in_memory_every
        is_due_in_memory = in_memory_every is not None and self.steps % in_memory_every == 0
        if not is_due_on_disk and not is_due_in_memory:
            return
        if self._models_with_unused_gradients():
            raise UserError(
                "save in the middle of a global batch",
                where="session.save",
                fix="call it after the last s.step() of the batch",
            )
        self._finish_pending_steps()
        session_checks.require_json(self.state)
        if is_due_on_disk:
            self.saver.save(self.metric)
        else:
            self.saver.keep_in_memory()

    def _save_last(self) -> None:
        """Leave the run with its last step saved. Collective."""
        self._finish_pending_steps()
        session_checks.drop_unless_json(self.state)
        if self.steps:
            self.saver.save_last(self.metric)

    def _exit_if_signal_known(self) -> None:
        """Save and raise Preempted if the ranks already know of a stop signal, on all ranks."""
        if self._stop_signal:
            self._save_last()
            self.saver.raise_preempted(self._stop_signal)

    def _require_prepared(self) -> None:
        if not self._models:
            raise UserError(
                "no model yet", where="session", fix="call s.prepare(build, make_optimizer) first"
            )


session = Session  # entered by `with`
