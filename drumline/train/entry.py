"""The entry of each rank: `python -m drumline.train.entry PLAN_JSON [--resume PATH|newest]`.

It reads nothing but the plan.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from drumline.checkpoint.remote import copy_run_files_within
from drumline.config.resume import Resume, resume_option
from drumline.dist.start import RankInfo, draw_nonce, start, stop
from drumline.errors import DrumlineError, EnvironmentFault, Preempted, TrainingStopped
from drumline.foreign import class_and_line, first_line
from drumline.hardware.detect import hide_gpus
from drumline.launch import watcher
from drumline.launch.environment import launched_by, use_expandable_segments
from drumline.launch.lease import guard_run_folder
from drumline.plan.explain import EXPORT_FAILED, plan_line, strategy_name, way_to_export
from drumline.plan.plan import Plan
from drumline.system import heartbeat
from drumline.system.output import say
from drumline.system.redact import redact
from drumline.system.signals import StopFlag
from drumline.telemetry import flight
from drumline.telemetry.events import (
    Emit,
    Event,
    EventLog,
    Export,
    Exporting,
    Number,
    RunEnd,
    RunStart,
    read,
)
from drumline.telemetry.measure import planned_event
from drumline.telemetry.trackers import Callbacks, open_sinks
from drumline.telemetry.watched import Devices
from drumline.train.failure import convert_out_of_memory, exit_on_error, record_failure
from drumline.train.state import Goodput
from drumline.version import __version__

# How a run has ended by an error of a type; all other errors are failures.
STATUS_OF_ERRORS: dict[type[BaseException], str] = {
    Preempted: "preempted",
    TrainingStopped: "stopped",
}
# How long a run that has ended waits for its store to take the last events.
LAST_COPY_SECONDS = 60.0


def main(
    arguments: list[str] | None = None, work: Callable[[Plan, Resume | None], None] | None = None
) -> None:
    """Run one rank of our own launcher. `work`: called in place of `run`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    options = parser.parse_args(arguments)
    with exit_on_error():
        plan = Plan.load(options.plan)
        if plan.device == "cpu":
            hide_gpus()
        else:
            # Ranks of other hosts inherit nothing from the launcher.
            use_expandable_segments()
        if work is None:
            run(plan, options.resume)
        else:
            work(plan, Resume.parse(options.resume))


def run(plan: Plan, resume: str | None, listener: Emit | None = None) -> None:
    """Join the process group, train, leave it, and export on rank 0.

    `resume`: the value of `--resume`. `listener` also gets each event of rank 0.
    """
    started = time.time()
    events_path = Path(plan.run_dir) / "events.jsonl"
    with StopFlag() as stop_flag, guard_run_folder(Path(plan.run_dir)):
        start_heartbeats(plan)
        ranks = start(
            plan.device,
            plan.backend,
            plan.config.launch.timeout_seconds,
            plan.config.launch.interface,
        )
        past = read(events_path)
        callbacks = Callbacks(plan.config.run.callbacks, Path(plan.base_dir), ranks.rank)
        if ranks.rank == 0:
            reporter: Reporter = MainReporter(plan, listener, callbacks)
        else:
            reporter = Reporter(callbacks)
        emit = reporter.emit
        goodput = Goodput(started)
        goodput.end_part("processes")
        error: BaseException | None = None
        try:
            reporter.why = train_on(
                plan,
                ranks,
                Resume.parse(resume),
                emit=emit,
                stop_flag=stop_flag,
                past=past,
                goodput=goodput,
            )
            heartbeat.beat("done")
            stop()
            reporter.export()
        except BaseException as raised:
            # Before anything is taken down: errors of other ranks that follow are consequences.
            record_failure(raised)
            error = raised
            raise
        finally:
            has_failed = not isinstance(error, Preempted | TrainingStopped | None)
            stop(failed=has_failed)
            reporter.close(error, goodput)


def train_on(
    plan: Plan,
    ranks: RankInfo,
    resume: Resume | None,
    *,
    emit: Emit,
    stop_flag: StopFlag,
    past: list[Event],
    goodput: Goodput,
) -> str | None:
    """Build the loop of a plan, and run it in the existing process group.

    Returns why the run ended before its last step; None if it did not.
    """
    from drumline.train.build import build

    emit(run_start(plan, resume))
    if plan.predicted.estimate is not None:
        emit(planned_event(plan.predicted.estimate))
    with convert_out_of_memory(plan, ranks.rank) as memory_watch:
        loop = build(plan, ranks, resume, emit, stop_flag, past, goodput)
        memory_watch.set_engine(loop.engine)
        why = loop.run()
        if plan.config.checkpoint.export != "none":
            # Rank 0 exports alone, so its disk gets all files of the newest and best checkpoints.
            loop.saver.checkpointer.gather()
    return why


def start_heartbeats(plan: Plan) -> None:
    """Send heartbeats, so that the launcher notices if this rank hangs.

    If another program has started the ranks, a watcher process of ours is started, which notices it
    in place of the launcher.
    """
    has_own_launcher = heartbeat.VARIABLE in os.environ
    is_launched = launched_by() or "TORCHELASTIC_ERROR_FILE" in os.environ
    if is_launched and not has_own_launcher:
        ranks = RankInfo.from_environment()
        watcher.watch_this_rank(
            draw_nonce("watch"), ranks.rank, ranks.world_size, Path(plan.run_dir)
        )
    if heartbeat.register(plan.config.health.limits()) is None:
        return
    heartbeat.register_answer("collectives", flight.recent)
    if plan.config.compile.enabled:
        # Importing torch._dynamo takes a second.
        from drumline.vendor.torch import on_compile_end, on_compile_start

        on_compile_start(lambda *_: heartbeat.note_compilation(True))
        on_compile_end(lambda *_: heartbeat.note_compilation(False))


def run_start(plan: Plan, resume: Resume | None) -> RunStart:
    """Return the event that each start of a run begins with."""
    return RunStart(
        world_size=plan.mesh.world_size,
        steps=plan.steps,
        parameters=plan.predicted.parameters,
        strategy=strategy_name(plan),
        device=plan.device,
        run_dir=plan.run_dir,
        resumed_from=resume_option(resume),
        plan_line=plan_line(plan),
        left_out=list(plan.data.left_out) if plan.data else [],
        writes=plan.config.algorithm.writes and not plan.config.has_own_module,
        unadapted=list(plan.predicted.unadapted),
        environment=_environment(plan),
    )


def _environment(plan: Plan) -> dict[str, str]:
    """Return what an event says of the machine and the versions of packages."""
    import torch  # imported by now

    found = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    for name in ("torch", "transformers", "peft", "deepspeed"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if plan.device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return {"drumline": __version__, **found}


class Reporter:
    """Takes the events of a rank, and gives them to its callbacks."""

    def __init__(self, callbacks: Callbacks | None = None) -> None:
        if callbacks is None:
            callbacks = Callbacks((), Path(), 0)
        self.callbacks = callbacks
        self.last_step = 0
        # Why the run ended before its last step.
        self.why: str | None = None
        self.kwh: Number = None

    def emit(self, event: Event) -> None:
        self.last_step = getattr(event, "step", 0) or self.last_step
        if isinstance(event, Devices):
            self.kwh = event.kwh
        self.callbacks.event(event)

    def export(self) -> None:
        """Do nothing: only rank 0 exports."""

    def close(self, error: BaseException | None, goodput: Goodput) -> None:
        """Emit the last event, which says how this process ended."""
        if error is None:
            status = "finished"
            code = 0
        else:
            status = STATUS_OF_ERRORS.get(type(error), "failed")
            code = error.exit_code if isinstance(error, DrumlineError) else 1
            self.why = _error_line(error)
        self.emit(
            RunEnd(
                status=status,
                exit_code=code,
                step=self.last_step,
                why=self.why,
                kwh=self.kwh,
                goodput=goodput.report(),
            )
        )


def _error_line(error: BaseException) -> str:
    """Return what ended a run, in one line without secrets."""
    if isinstance(error, DrumlineError):
        return redact(error.line())
    return redact(f"{class_and_line(error)}: {first_line(error)}")


class MainReporter(Reporter):
    """Takes the events of rank 0, and gives them to all that listen.

    These are events.jsonl, the trackers of `run.report_to`, the listener, and the callbacks.
    """

    def __init__(
        self, plan: Plan, listener: Emit | None = None, callbacks: Callbacks | None = None
    ) -> None:
        super().__init__(callbacks)
        run_dir = Path(plan.run_dir)
        self.plan = plan
        self.listener = listener
        self.log = EventLog(run_dir / "events.jsonl")
        config = plan.config.model_dump(mode="json")
        self.sinks = open_sinks(
            plan.config.run.report_to,
            run_dir,
            config,
            run_dir.name,
            Path(plan.base_dir),
            plan.config.run.tracker,
        )

    def emit(self, event: Event) -> None:
        event = self.log.emit(event)
        for sink in self.sinks:
            sink.event(event)
        if self.listener:
            self.listener(event)
        super().emit(event)

    def export(self) -> None:
        """Write the Hugging Face folder of a finished run.

        The weights are saved by now. So if the export fails, that is reported and the run still
        counts as finished: a restart would only fail in the same way.
        """
        if self.plan.config.checkpoint.export == "none":
            return
        # The engine's objects refer to each other.
        gc.collect()
        self.emit(Exporting(step=self.last_step))
        began = time.time()
        try:
            self._export()
        except Exception as failure:  # noqa: BLE001 - whatever stops an export, such as a full disk or memory, the run is finished
            error = f"{EXPORT_FAILED}: {_error_line(failure)}; {way_to_export(self.plan)}"
            say(f"note: {error}")
            self.emit(
                Export(
                    path=None, seconds=time.time() - began, max_logit_difference=None, error=error
                )
            )

    def _export(self) -> None:
        """Write the folder, or for a module of the user's own a file with its weights."""
        config = self.plan.config
        which = config.checkpoint.export
        assert which != "none", "the caller has looked"
        run_dir = Path(self.plan.run_dir)
        if config.has_own_module:
            from drumline.models.own import export_weights

            export_weights(self.plan, which)
            return
        from drumline.models.export import export

        result = export(
            run_dir,
            run_dir / "export",
            which,
            adapter=config.checkpoint.export_adapter,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.emit(
            Export(
                path=str(result.path),
                seconds=result.seconds,
                max_logit_difference=result.max_logit_difference,
            )
        )

    def close(self, error: BaseException | None, goodput: Goodput) -> None:
        super().close(error, goodput)
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as failed:  # noqa: BLE001 - what a tracker could not write changes no run's end, and hides no error
                say(f"note: {type(sink).__name__} could not write its last: {failed}")
        url = self.plan.config.checkpoint.url
        if url is not None:
            try:
                copy_run_files_within(url, Path(self.plan.run_dir), LAST_COPY_SECONDS)
            except (OSError, EnvironmentFault) as failure:
                # The run is over, and its own folder has the events.
                say(f"note: the last events did not reach {url}: {failure}")


if __name__ == "__main__":
    main()
