"""`drumline train` as one rank of another launcher, such as torchrun.

Rank 0 plans, and the other ranks get its plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.config.load import to_yaml
from drumline.config.resume import Resume, resume_option
from drumline.dist.start import RankInfo, publish, receive, rendezvous
from drumline.errors import DrumlineError, EnvironmentFault, TrainingStopped
from drumline.hardware.detect import hide_gpus
from drumline.launch.environment import launched_by
from drumline.launch.lease import Lease, has_lease
from drumline.launch.local import resume_of_restart
from drumline.plan.plan import Plan
from drumline.report.bars import notes, stderr_bars
from drumline.report.page import write_final_page
from drumline.report.progress import Progress
from drumline.report.start_banner import banner_lines
from drumline.system.files import write_whole
from drumline.system.output import verbosity
from drumline.system.process import process
from drumline.system.redact import withheld
from drumline.system.signals import EXIT_TEMPFAIL, Interrupted
from drumline.telemetry.events import read_tail
from drumline.telemetry.watched import Hang
from drumline.train.entry import run
from drumline.train.failure import OutOfMemory, exit_on_error, record_failure, release_frames
from drumline.train.replan import advise
from drumline.train.setup import Request, claim_run_dir, keep_learning_rate, make_plan

# The file in the run folder that says who launched the run last.
LAUNCH = "launch.json"
# A network file system may take a moment to show another host's file.
SHARED_SECONDS = 10.0
# How long a failed rank 0 waits for each other rank to read that it has failed. They read it from a
# store that lives in rank 0's process.
RECEIVED_SECONDS = 5.0


def train(make_request: Callable[[int], Request]) -> int:
    """Plan and train as one rank. Returns the exit code.

    If the launcher starts the ranks again, the run resumes from its newest checkpoint.
    `make_request`: returns the request for a number of ranks.
    """
    with exit_on_error(), ExitStack() as stack:
        plan, resume = join(make_request, stack, display=True)
        if plan.device == "cpu":
            hide_gpus()
        train_rank(plan, resume, display=True)
    return 0


def join(
    make_request: Callable[[int], Request], stack: ExitStack, display: bool
) -> tuple[Plan, Resume | None]:
    """Return the plan and the checkpoint to go on from, the same on all ranks.

    `stack` gets the lease of the run folder.
    """
    ranks = RankInfo.from_environment()
    # Before the data are prepared: other ranks find rank 0 now, wait for its plan, and notice if it
    # dies meanwhile.
    rendezvous()
    if ranks.rank == 0:
        return _plan(make_request, ranks, stack, display)
    return _plan_from_rank_0(ranks, stack)


def train_rank(plan: Plan, resume: Resume | None, display: bool) -> None:
    """Train as this rank, to the end of the run."""
    rank = RankInfo.from_environment().rank
    option = resume_option(resume)
    try:
        if rank != 0 or not display:
            run(plan, option)
            return
        with Progress(
            Console(), verbosity=verbosity(), start_banner=banner_lines(plan)
        ) as progress:
            run(plan, option, progress.on_event)
    except OutOfMemory as error:
        # The other launcher decides on a restart. We still print what to change. Computing that
        # needs memory, so the frames of the stack are freed first.
        release_frames(error)
        print(f"error: rank {rank}: {advise(plan, error.exhausted).line}", file=sys.stderr)
        raise
    finally:
        if rank == 0:
            write_final_page(plan)


def _plan(
    make_request: Callable[[int], Request], ranks: RankInfo, stack: ExitStack, display: bool
) -> tuple[Plan, Resume | None]:
    """Make the plan on rank 0, and publish it. If that fails, all ranks end with its exit code.

    The other ranks do not wait in a collective, so preparing the data may take any time.
    """
    try:
        plan, resume = _plan_and_publish(make_request, ranks, stack, display)
    except (Exception, Interrupted) as error:
        _publish_failure(error, ranks)
        raise
    publish(json.dumps({}), "go")
    return plan, resume


def _plan_and_publish(
    make_request: Callable[[int], Request], ranks: RankInfo, stack: ExitStack, display: bool
) -> tuple[Plan, Resume | None]:
    """Make the plan, claim the run folder, and hand the plan to the other ranks."""
    request = make_request(ranks.world_size)
    _require_as_launched(request, ranks)
    with stderr_bars(display) as on_progress:
        plan = make_plan(request, on_progress=on_progress)
    notes(plan.data.notes if plan.data else ())
    run_dir = Path(plan.run_dir)
    lease = stack.enter_context(Lease(run_dir))
    record = _launch_record(request)
    if ranks.attempt:
        _require_no_stop(plan)
    if ranks.attempt or _is_restart(run_dir / LAUNCH, record):
        # Whether hosts have run folders of their own, so that rank 0's may lack the checkpoints.
        has_folder_per_host = plan.config.checkpoint.allows_separate_folders
        resume_again = resume_of_restart(request.resume, run_dir, has_folder_per_host)
        request = replace(request, resume=resume_again)
    plan = keep_learning_rate(plan, request)
    _, resume = claim_run_dir(plan, request)
    write_whole(run_dir / LAUNCH, json.dumps(record))
    answer = {
        "plan": plan.model_dump(mode="json"),
        "resume": resume_option(resume),
        "lease": lease.token,
        # The other ranks have read neither the YAML nor its secrets.
        "secrets": withheld(),
    }
    publish(json.dumps(answer), "plan")
    _require_shared(plan, ranks)
    return plan, resume


def _publish_failure(error: BaseException, ranks: RankInfo) -> None:
    """Let the other ranks end with rank 0's exit code, after rank 0 has failed to plan."""
    code = 1
    if isinstance(error, DrumlineError):
        code = error.exit_code
        # Before the other ranks end: some launchers then stop the ranks that are left at once.
        record_failure(error)
    elif isinstance(error, Interrupted):
        code = EXIT_TEMPFAIL
    # The other ranks wait for either of these two.
    for name in ("plan", "go"):
        publish(json.dumps({"exit_code": code}), name)
    if isinstance(error, Interrupted):
        return
    # A rank may never have started, or the store may be another process's, and gone.
    with suppress(EnvironmentFault, RuntimeError):
        for rank in range(1, ranks.world_size):
            receive(f"received-{rank}", RECEIVED_SECONDS)


def _plan_from_rank_0(ranks: RankInfo, stack: ExitStack) -> tuple[Plan, Resume | None]:
    """Wait for rank 0's plan, and tell rank 0 whether this host has the run folder."""
    answer = _receive("plan", ranks)
    os.environ.update(answer["secrets"])
    plan = Plan.from_values(answer["plan"])
    resume = Resume.parse(answer["resume"])
    run_dir = Path(plan.run_dir)
    reply = ""
    if not has_lease(answer["lease"], run_dir, SHARED_SECONDS):
        reply = socket.gethostname()
        if plan.config.checkpoint.allows_separate_folders and ranks.local_rank == 0:
            try:
                # This host has a run folder of its own.
                stack.enter_context(Lease(run_dir))
                if resume is None:
                    _require_fresh(run_dir)
            except EnvironmentFault as error:
                reply = error.line()
    publish(reply, f"shared-{ranks.rank}")
    _receive("go", ranks)
    return plan, resume


def _require_fresh(run_dir: Path) -> None:
    """Raise EnvironmentFault if this host has checkpoints of another run in the folder."""
    if any((run_dir / "checkpoints").glob("step-*")):
        raise EnvironmentFault(
            f"the run folder is not empty on host {socket.gethostname()}",
            where=str(run_dir.absolute()),
            fix="add --resume to go on with it, or choose another with run.dir=…",
        )


def _receive(name: str, ranks: RankInfo) -> dict[str, Any]:
    """Return what rank 0 has published. Exits with rank 0's code if it has failed."""
    answer: dict[str, Any] = json.loads(receive(name))
    if "exit_code" in answer:
        publish("", f"received-{ranks.rank}")
        # Rank 0 reports why.
        raise SystemExit(answer["exit_code"])
    return answer


def _require_shared(plan: Plan, ranks: RankInfo) -> None:
    """Raise EnvironmentFault if another host does not share this run folder.

    What its ranks save would be lost with it. If checkpoints are copied to other hosts or to a URL
    (`checkpoint.allows_separate_folders`), each host may have a folder of its own, unless it reports a mistake.
    """
    replies = [receive(f"shared-{rank}") for rank in range(1, ranks.world_size)]
    # A rank replies "" if all is well, its host if that lacks the folder, or the line of an error.
    complaints = sorted({reply for reply in replies if reply})
    if plan.config.checkpoint.allows_separate_folders:
        mistakes = [complaint for complaint in complaints if ": " in complaint]
        if mistakes:
            raise EnvironmentFault(mistakes[0])
        return
    if complaints:
        hosts = ", ".join(complaints)
        raise EnvironmentFault(
            f"host {hosts} does not have the run folder that rank 0 writes to on host {socket.gethostname()}",
            where=str(Path(plan.run_dir).absolute()),
            fix="put it on storage that all hosts mount at the same place, with run.dir=…;"
            " or have each host keep a folder of its own, with checkpoint.replicas=1 or checkpoint.url=s3://…",
        )


def _require_as_launched(request: Request, ranks: RankInfo) -> None:
    """Raise EnvironmentFault if the config asks for other ranks than the launcher has started."""
    launch = request.loaded.config.launch
    if launch.hosts_may_change:
        raise EnvironmentFault(
            f"{launched_by()} has started the ranks, so hosts cannot come and go",
            where="launch.nodes",
            fix="leave launch.nodes out, or start the run by drumline train",
        )
    # The number in another tool's file is only a default, as it is for that tool: it does not have
    # to agree.
    is_from_another_tool = request.loaded.is_translated
    if is_from_another_tool or launch.nproc is None:
        return
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if launch.nproc not in (ranks.world_size, ranks_of_host):
        raise EnvironmentFault(
            f"launch.nproc is {launch.nproc}, but {launched_by()} has started {ranks.world_size} processes",
            where="launch.nproc",
            fix="leave launch.nproc out",
        )


def _require_no_stop(plan: Plan) -> None:
    """Raise TrainingStopped if the last start hung, and `health.on_hang` is stop."""
    if plan.config.health.on_hang != "stop":
        return
    newest_events = read_tail(Path(plan.run_dir) / "events.jsonl")[-2:]
    if any(isinstance(event, Hang) for event in newest_events):
        raise TrainingStopped(
            "the run hung, and health.on_hang is stop",
            where=plan.run_dir,
            fix="go on with --resume",
        )


def _launch_record(request: Request) -> dict[str, Any]:
    """Return what identifies this launch: a restart by torchrun has the same as the start before.

    torchrun's own count of restarts is not enough: it stays as it was when a host came or went.
    """
    config = hashlib.sha256(to_yaml(request.loaded.config).encode()).hexdigest()
    return {
        "config": config,
        "agent": asdict(process(os.getppid())),
        "rendezvous": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
    }


def _is_restart(path: Path, record: dict[str, Any]) -> bool:
    """Whether this start is a restart: the same launcher has started this config here before.

    `path`: the file with the record of the start before. `record`: the record of this start.
    """
    try:
        before = json.loads(path.read_text())
        same_agent = before["agent"] == record["agent"] and record["agent"]["boot"] != ""
        same_rendezvous = before["rendezvous"] == record["rendezvous"] != "none"
        same_config = before["config"] == record["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return launched_by() == "torchrun" and same_config and (same_agent or same_rendezvous)
