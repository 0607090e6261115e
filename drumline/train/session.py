"""`drumline.session`: a training loop of the user's own on the engines, checkpoints, order of data and plan that the YAML has.

    with drumline.session(strategy="fsdp2", precision="bf16", global_samples=64) as s:
        model, optimizer = s.prepare(build, make_optimizer)
        for batch in s.batches(dataset, collate):
            loss_sum, weight = my_loss(model, batch)
            s.backward(loss_sum, weight)
            if s.step(max_grad_norm=1.0):
                s.log(); s.save(every=100)

One denominator: `backward` divides a loss sum by the samples of the global batch, which are known; `step` multiplies the gradients once by
samples / Σ weight over all ranks, which is known only then. So what fp16 and compression see keeps its scale, and what is clipped, and
stepped with, is the gradient of Σ loss / Σ weight.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from drumline.checkpoint.ranks import Ranks as RankGroup
from drumline.core.explain import default_run_dir
from drumline.core.output import say
from drumline.core.resolve import batch_norm_why
from drumline.core.signals import StopFlag
from drumline.data.samples import global_batches, held_out
from drumline.dist.reduce import Gather
from drumline.dist.seeds import Draws, derive, deterministic, seed_step
from drumline.dist.start import Ranks, gpu, start, stop
from drumline.errors import DataError, EnvironmentFault, Preempted, TrainingStopped, UserError
from drumline.launchers.environment import die_with_launchers
from drumline.launchers.tasks import join_tasks
from drumline.models.blocks import Units
from drumline.models.containers import each_tensor
from drumline.models.tape import Build
from drumline.parallel.optimizer import MakeOptimizer
from drumline.parallel.transforms import batch_norms
from drumline.strategies.build import build_module
from drumline.telemetry.events import Emit, Eval
from drumline.train import own
from drumline.train.build import Start, checkpointer_of, memory_of
from drumline.train.entry import MainReporter, Reporter, run_start
from drumline.train.failure import fresh
from drumline.train.garbage import GarbageCollection
from drumline.train.hook import print_error, report, take_hook
from drumline.train.model import Model
from drumline.train.own import MAIN, Engines, Trained, claim, plan_of, require_one_model, scalar
from drumline.train.saving import Saver
from drumline.train.state import Flight, Goodput, TrainState, judge

Pair = tuple[Build, MakeOptimizer]
Collate = Callable[[list[Any]], Any]
FIX = 'look at the samples, lower the rate, or pass over it: on_nan="skip"'


class Session:
    """One run of a loop of the user's own, on one rank. All ranks walk the same path through it."""

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
        """`strategy`, `precision`: as in the YAML. `global_samples`: of a step, over all ranks; `micro_batch`: that a rank takes at once,
        by default all of its own. `resume`: go on from the newest checkpoint of `run_dir`, or from a checkpoint's folder; `allow`: keys of
        the config that may differ then. `units`, `tp_plan`: see strategies.build.build_module. `options`: those of train.own.OPTIONS.

        Raises UserError, as all of the session does, for what cannot be.
        """
        take_hook()
        fresh()
        join_tasks()
        ranks = Ranks.from_environment()
        where = str(run_dir or default_run_dir(Path(sys.argv[0] or "session")))
        self.plan = plan_of(
            strategy, precision, global_samples, micro_batch, where, ranks.world_size, options
        )
        self.resume, self.allow, self.units, self.tp_plan = resume, allow, units, tp_plan
        self.started, self.stack = time.time(), ExitStack()
        self.garbage = GarbageCollection(self.plan.config.run.collect_every)
        self._logged, self._epoch = (0, self.started, 0), 0.0
        self._models: dict[str, Trained] = {}
        self._now: tuple[int, bool] | None = (
            None  # of the micro-batch that the loop is in: its end's position, whether it is the last
        )
        self._signal, self._ended = 0, False
        self.metric: float | None = None

    # ---------------------------------------------------------------------------------------------------- start and end

    def __enter__(self) -> Self:
        die_with_launchers()
        plan = self.plan
        if plan.config.run.deterministic:
            deterministic()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            plan.config.precision.tf32
        )
        self.stop_flag = self.stack.enter_context(StopFlag(alone="RANK" not in os.environ))
        # A process group that is there is used, and left as it is.
        self.owns = not dist.is_initialized()
        self.ranks = (
            start(plan.device, plan.backend, plan.config.launch.timeout_seconds)
            if self.owns
            else Ranks.from_environment()
        )
        sys.excepthook = print_error  # torch has put its own around it, which drops what a hook prints that ends the process
        self.device = f"cuda:{gpu(self.ranks)}" if plan.device == "cuda" else "cpu"
        self.gather = Gather(
            self.ranks.rank,
            self.ranks.world_size,
            self.device,
            counts=plan.mesh.counts(self.ranks.rank),
        )
        try:
            self.resume = RankGroup.all(error_type=EnvironmentFault).first(
                lambda: claim(plan, self.resume, self.allow, self.stack)
            )
        except EnvironmentFault:
            self.stack.close()
            if self.owns:
                stop()
            raise
        self.reporter = MainReporter(plan) if self.is_first else Reporter()
        self.emit: Emit = self.reporter.emit
        self.goodput = Goodput(self.started)
        self.emit(run_start(plan, str(self.resume) if self.resume else None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
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
                stop(failed=not isinstance(error, Preempted | TrainingStopped | None))
            self.reporter.close(error, self.goodput)
            self.stack.close()

    def prepare(
        self, build: Build | Mapping[str, Pair], make_optimizer: MakeOptimizer | None = None
    ) -> Any:
        """(model, optimizer) on this rank: `build()` laid out without memory, spread as planned, and filled by parts;
        `make_optimizer(model)`'s optimizer over the parameters that are there then. Of {name: (build, make_optimizer)} two dicts by name.
        With `resume` both are as the checkpoint has them. Collective."""
        pairs = dict(build) if isinstance(build, Mapping) else {MAIN: (build, make_optimizer)}
        if (
            self._models
            or not pairs
            or any(make is None for _, make in pairs.values())
            or any("/" in n or "." in n for n in pairs)
        ):
            what = (
                "prepare takes build and make_optimizer, or {name: (build, make_optimizer)}, once"
            )
            raise UserError(what, where="session.prepare", fix="see docs/session_reference.md")
        pairs = own.makers(pairs)
        require_one_model(self.plan, len(pairs))
        found, memory = None, memory_of(self.plan, self.resume is True)
        if self.resume:
            found = Start.find(
                self.plan, "newest" if self.resume is True else str(self.resume), memory
            )
        unfrozen = own.unfrozen(found.path if found else None, pairs)
        options: dict[str, Any] = {
            "units": self.units,
            "tp_plan": self.tp_plan,
            "overlaps": len(pairs) == 1,
        }
        for name, (build_one, make) in pairs.items():
            options |= {
                "checkpoint_keys": found.keys_of(name) if found else frozenset(),
                "unfrozen": unfrozen[name],
            }
            self._models[name] = Trained(
                build_module(
                    own.seeded(self.plan, name),
                    build_one,
                    self.device,
                    make_optimizer=make,
                    **options,
                )
            )
        self.engines = Engines(
            {name: model.engine for name, model in self._models.items()}, unfrozen
        )
        for model in self._models.values() if self.is_first else ():
            for line in batch_norm_why(
                self.plan.config, self.plan.batch, len(batch_norms(model.engine.model))
            ):
                say(f"note: {line}")
        checkpointer = checkpointer_of(self.plan, "min")
        if memory is not None:
            memory.begin()
        self._state = found.restore(self.engines, self.emit, time.time()) if found else TrainState()  # type: ignore[arg-type]
        self.stack.enter_context(self.garbage)
        self._logged = (self.steps, time.time(), self._state.tokens)
        saved, again = (
            self.steps if found and found.path and checkpointer.is_kept(found.path) else -1,
            ("resume=True", "resume={!r}"),
        )
        parts = (
            self.plan,
            self.engines,
            self._state,
            checkpointer,
            self.emit,
            self.gather,
            self.stop_flag,
        )
        self.saver = Saver(*parts, saved, again, memory)
        made = {
            name: (Model(model.engine), own.guarded(model.engine.optimizer))
            for name, model in self._models.items()
        }
        return (
            made[MAIN]
            if MAIN in made
            else ({n: m for n, (m, _) in made.items()}, {n: o for n, (_, o) in made.items()})
        )

    # -------------------------------------------------------------------------------------------------------- the loop

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
        """Samples that were taken since the run began, over all ranks and passes: all that the order of data hangs on."""
        self._require_prepared()
        return self._state.position

    @property
    def state(self) -> dict[str, Any]:
        """A dictionary of the user's own, saved with each checkpoint and restored with it; values that JSON has."""
        self._require_prepared()
        return self._state.stream

    @property
    def loss(self) -> float:
        """The mean loss of the last step over the global batch, of a session with one model.

        Waits for the device. One rank alone may read it. Raises UserError before this start's
        first step, and in a session of several models, which has `losses`.
        """
        return own.last_step(self._models, "loss").loss

    @property
    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping; like `loss` otherwise."""
        return own.last_step(self._models, "grad_norm").grad_norm

    @property
    def losses(self) -> dict[str, float]:
        """`loss` of each model of a session with several, by name; models without a step are left out."""
        return {name: model.last.loss for name, model in self._models.items() if model.last}

    @property
    def grad_norms(self) -> dict[str, float]:
        """`grad_norm` of each model, like `losses`."""
        return {name: model.last.grad_norm for name, model in self._models.items() if model.last}

    def batches(
        self,
        dataset: Any,
        collate: Collate = default_collate,
        *,
        epochs: int | None = 1,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> Iterator[Any]:
        """`collate(samples)` of each micro-batch of this rank, its tensors on the device, from `position` on.

        `epochs`: passes of the whole run over the dataset (None: without end); `steps`: global batches of the whole run instead. A dataset
        with `len` and indices is shuffled by (seed, pass); one that can only be iterated is read by every rank, and skipped to `position`.
        Before each micro-batch python, numpy and torch are seeded by (seed, step, rank, micro-batch).
        """
        self._require_prepared()
        config, batch = self.plan.config, self.plan.batch
        seed = derive(config.run.seed, "order") if shuffle else None
        rank = self.plan.mesh.data_rank(self.ranks.rank)
        passes = None if steps is not None else epochs
        drawn, began = Draws(derive(config.run.seed, "rows")).used, self.position
        rows = iter(global_batches(dataset, batch, rank, began, passes, seed, drawn))
        while steps is None or self.steps < steps:
            seed_step(config.run.seed, self.steps, *self.plan.mesh.stream(self.ranks.rank))
            micro_batches = next(rows, None)
            if micro_batches is None:
                break
            own.require_free(self._now is not None, self._unused())
            for model in self._models.values():
                model.sums, model.stepped = [], False
            end = self.position + batch.global_samples
            self._epoch = own.passes(dataset, end)
            for index, samples in enumerate(micro_batches):
                seed_step(
                    config.run.seed, self.steps, *self.plan.mesh.stream(self.ranks.rank), index
                )
                self._now = (end, index == len(micro_batches) - 1)
                for model in self._models.values():
                    model.contexts.enter_context(model.engine.micro_batch(self._now[1]))
                try:
                    yield each_tensor(
                        lambda tensor: tensor.to(self.device, non_blocking=True), collate(samples)
                    )
                finally:
                    for model in self._models.values():
                        model.contexts.close()
                    last, self._now = self._now[1], None
            if last and (left := self._unused()):
                what = f"a global batch ended, and its gradients{f' of {min(left)}' if min(left) else ''} were not used"
                raise UserError(
                    what,
                    where="session.batches",
                    fix="call s.step() after s.backward() in each turn of the loop",
                )
            self._state.step, self._state.position = self.steps + (not self._stepped()), end
            self._stop_if_requested()
        own.require_more(self.position > began, self._ended)
        self._ended = True
        self._land()
        self._stop_if_requested()

    def backward(
        self, loss_sum: torch.Tensor, weight: float | torch.Tensor, of: str = MAIN
    ) -> None:
        """Accumulate the gradients of the sum of a micro-batch's losses, in the parameters of one model alone. `weight`: what the sum is
        divided by in the end, summed over the global batch: samples, tokens."""
        model = own.named(self._models, of)
        own.require_sum(loss_sum, weight, self.plan.engine != "pipeline")
        other_grads = [
            (p, p.grad)
            for name, other in self._models.items()
            if name != of
            for p in other.engine.named.values()
        ]
        for parameter, _ in other_grads:
            parameter.grad = None
        model.engine.backward(loss_sum, float(self.plan.batch.global_samples))
        for parameter, gradient in other_grads:
            parameter.grad = gradient
        model.sums.append(torch.stack([scalar(value, self.device) for value in (loss_sum, weight)]))

    def step(
        self, max_grad_norm: float | None = None, lr: float | None = None, of: str = MAIN
    ) -> bool:
        """At the end of a global batch: divide the gradients by its weight, clip them by their global norm, update, and return True. Before
        that False. `lr`: for all groups of the optimizer; None: as they have it. Where loss or gradients are not finite the weights stay,
        as `on_nan` has it. Collective."""
        own.require_rates(max_grad_norm, lr)
        model, (end, last) = own.named(self._models, of), self._now or (0, False)
        if not last:
            return False
        if model.stepped or not model.sums:
            raise UserError(
                "step without a backward before it",
                where="session.step",
                fix="call s.backward(loss_sum, weight) first",
            )
        engine = model.engine
        model.contexts.close()
        loss_sum, weight = torch.stack(model.sums).sum(0)
        total = self.gather.start(
            {"loss": loss_sum, "weight": weight}, float(self.stop_flag.requested)
        )
        whole = total["weight"]
        engine.divide(torch.where(whole > 0, whole, 1.0) / self.plan.batch.global_samples)
        engine.max_grad_norm = max_grad_norm
        norm = engine.grad_norm()
        own.take_step(engine, lr, norm, torch.isfinite(total["loss"]) & torch.isfinite(norm))
        total.fetch(norm)
        self.metric = None
        first = not self._stepped()
        if first:
            self._state.step, self._state.position = self.steps + 1, end
        flight = Flight(total, self.steps)
        self._land(model)
        model.flight = model.last = flight
        model.counts, model.stepped = first, True
        if first:
            self.garbage.after(self.steps)
        return True

    def _stepped(self) -> list[str]:
        """The models that have done their step of the global batch."""
        return [name for name, model in self._models.items() if model.stepped]

    def _unused(self) -> list[str]:
        """The models whose gradients no step has used yet."""
        return [name for name, model in self._models.items() if model.sums and not model.stepped]

    def _land(self, *chosen: Trained) -> None:
        """Act on the numbers of steps in flight, by default of all models; all ranks after the same steps, so not where one alone may read
        them. Raises TrainingStopped where a step that is not finite is one too many."""
        for model in chosen or self._models.values():
            if (flight := model.flight) is not None:
                self._state.tokens += model.tokens
                model.flight = None
                self._signal = self._signal or int(max(flight.by_rank[0]))
                judge(
                    flight,
                    self.plan,
                    self._state,
                    model.engine.rescales(),
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
        """Means over a dataset, each sample once over all ranks, without gradients. `measure(batch)` → (loss sum, weight), or with a
        dictionary of further sums behind. The result's `loss` chooses the best checkpoint, where it is saved at this step. Collective."""
        self._require_prepared()
        began, sums = time.time(), dict[str, torch.Tensor]()
        rank, ranks = self.plan.mesh.data_rank(self.ranks.rank), self.plan.mesh.data_ranks
        with ExitStack() as states:
            for model in self._models.values():
                states.enter_context(model.engine.evaluating())
            drawn = Draws(derive(self.plan.config.run.seed, "held out")).used
            for samples, counts in held_out(
                dataset, micro_batch or self.plan.batch.eval_micro_batch, rank, ranks, drawn
            ):
                batch = each_tensor(lambda tensor: tensor.to(self.device), collate(samples))
                loss_sum, weight, *more = own.measured(measure(batch))
                for name, value in {
                    "loss": loss_sum,
                    "weight": weight,
                    **(more[0] if more else {}),
                }.items():
                    part = torch.as_tensor(value, device=self.device).double().reshape(()) * counts
                    sums[name] = sums.get(name, torch.zeros_like(part)) + part
        if not sums:
            raise DataError(
                "the dataset gives no samples",
                where="session.evaluate",
                fix="give a list, or one whose iter() starts again",
            )
        total, _ = self.gather.start(sums).read()
        weight = total.pop("weight", 0.0) or 1.0
        means = {name: value / weight for name, value in total.items()}
        self.metric = means.get("loss")
        self.emit(
            Eval(step=self.steps, samples=int(weight), seconds=time.time() - began, metrics=means)
        )
        return means

    def log(self, **metrics: Any) -> None:
        """An event of this step, on rank 0 a line as well: the loss and the gradient norm of all ranks (of several models under NAME_loss),
        and `metrics`, numbers as this rank has them. Before this start's first step there is the line alone."""
        self._require_prepared()
        scalars: dict[str, float] = {}
        for name in self._stepped():
            prefix = f"{name}_" if name else ""
            scalars |= {
                f"{prefix}loss": self.losses[name],
                f"{prefix}grad_norm": self.grad_norms[name],
            }
        scalars |= own.numbers(metrics)
        if self.is_first:
            say(
                f"step {self.steps}  "
                + "  ".join(f"{name} {value:.5g}" for name, value in scalars.items()),
                sys.stdout,
            )
        if not self.losses:
            return
        now, done = (
            time.time(),
            (self.steps, self._state.tokens + sum(model.tokens for model in self._models.values())),
        )
        (steps, began, tokens), self._logged = self._logged, (done[0], now, done[1])
        each, engine = max(1, done[0] - steps), next(iter(self._models.values())).engine
        metrics_of_step = {
            "seconds": (now - began) / each,
            "tokens": (done[1] - tokens) // each,
            "epoch": self._epoch,
        }
        metrics_of_step |= {
            "loss": next(iter(self.losses.values())),
            "grad_norm": next(iter(self.grad_norms.values())),
        }
        self.emit(own.step_event(self.steps, self.plan, engine, scalars, **metrics_of_step))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def save(self, every: int | None = None) -> None:
        """Save a checkpoint, in the background; with `every` at its multiples alone, and between them in memory as `in_memory_every` has
        it. At the end of the session the last is saved anyway. Collective."""
        self._require_prepared()
        in_memory, on_disk = (
            self.plan.config.checkpoint.in_memory_every,
            every is None or self.steps % own.counted(every) == 0,
        )
        if not on_disk and (in_memory is None or self.steps % in_memory):
            return
        if self._unused():
            what = "save in the middle of a global batch"
            raise UserError(
                what, where="session.save", fix="call it after the last s.step() of the batch"
            )
        self._land()
        own.require_json(self.state)
        if on_disk:
            self.saver.save(self.metric)
        else:
            self.saver.keep_in_memory()

    def _save_last(self) -> None:
        self._land()
        own.require_json(self.state, drop=True)
        if self.steps:
            self.saver.save_last(self.metric)

    def _stop_if_requested(self) -> None:
        if self._signal:
            self._save_last()
            self.saver.leave(self._signal)

    def _require_prepared(self) -> None:
        if not self._models:
            raise UserError(
                "no model yet", where="session", fix="call s.prepare(build, make_optimizer) first"
            )


session = Session  # entered by `with`
