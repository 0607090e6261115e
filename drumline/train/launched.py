"""`drumline train` as one rank of a launcher that is not ours (torchrun and others): rank 0 plans, and the other ranks get the plan."""

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

from drumline.core.files import write_whole
from drumline.core.load import to_yaml
from drumline.core.plan import Plan
from drumline.core.process import process
from drumline.core.redact import withheld
from drumline.core.signals import NOTHING_LOST, Interrupted
from drumline.dist.start import Ranks, publish, receive, rendezvous
from drumline.errors import DrumlineError, EnvironmentFault, TrainingStopped
from drumline.hardware.detect import hide_gpus
from drumline.launchers.environment import launched_by
from drumline.launchers.lease import Lease, has_lease
from drumline.launchers.local import newest_or
from drumline.launchers.ssh.spec import SSHLauncher
from drumline.report.bars import aside, notes
from drumline.report.page import at_end
from drumline.report.progress import Progress
from drumline.telemetry.events import last
from drumline.telemetry.watched import Hang
from drumline.train.entry import run
from drumline.train.failure import OutOfMemory, let_go, note, recording
from drumline.train.replan import advise
from drumline.train.setup import Request, as_before, claim_run_dir, make_plan

LAUNCH = "launch.json"  # in the run folder: who launched it last
SHARED_SECONDS = 10.0  # a network file system may take a moment to show another host's file
RECEIVED_SECONDS = 5.0  # for ranks that start later than rank 0 has failed: its store goes with it


def train(make_request: Callable[[int], Request]) -> int:
    """One rank, from plan to end. `make_request`: world size → request. A restarted run resumes from its newest checkpoint."""
    with recording(), ExitStack() as stack:
        plan, start = join(make_request, stack, display=True)
        if plan.device == "cpu":
            hide_gpus()
        train_rank(plan, start, display=True)
    return 0


def join(
    make_request: Callable[[int], Request], stack: ExitStack, display: bool
) -> tuple[Plan, str | None]:
    """The plan and the checkpoint to go on from, the same on all ranks. `stack` gets the lease of the run folder."""
    ranks = Ranks.from_environment()
    # Before the data is prepared: other ranks find rank 0 now, wait for its plan, and notice if it dies meanwhile.
    rendezvous()
    return (
        _plan(make_request, ranks, stack, display)
        if ranks.rank == 0
        else _plan_from_rank_0(ranks, stack)
    )


def train_rank(plan: Plan, start: str | None, display: bool) -> None:
    """Train as this rank, to the end."""
    rank = Ranks.from_environment().rank
    try:
        if rank != 0 or not display:
            run(plan, start)
            return
        with Progress(Console()) as progress:
            run(plan, start, progress.on_event)
    except OutOfMemory as error:
        # Another launcher decides whether it goes on; what to change is reported all the same, and finding it needs memory.
        let_go(error)
        print(f"error: rank {rank}: {advise(plan, error.exhausted).line}", file=sys.stderr)
        raise
    finally:
        if rank == 0:
            at_end(plan)


def _plan(
    make_request: Callable[[int], Request], ranks: Ranks, stack: ExitStack, display: bool
) -> tuple[Plan, str | None]:
    """Rank 0's part, outside any collective: it may take as long as the data needs."""
    try:
        request = make_request(ranks.world_size)
        _require_as_launched(request, ranks)
        with aside(display) as on_progress:
            plan = make_plan(request, on_progress=on_progress)
        notes(plan.data.notes if plan.data else ())
        run_dir = Path(plan.run_dir)
        lease = stack.enter_context(Lease(run_dir))
        mark = _mark(request)
        if ranks.attempt:
            _require_no_stop(plan)
        if ranks.attempt or _is_same(run_dir / LAUNCH, mark):
            request = replace(
                request, resume=newest_or(request.resume, run_dir, plan.config.checkpoint.apart)
            )
        plan = as_before(plan, request)
        _, start = claim_run_dir(plan, request)
        write_whole(run_dir / LAUNCH, json.dumps(mark))
        # The other ranks have read neither the YAML nor its secrets.
        answer = {
            "plan": plan.model_dump(mode="json"),
            "resume": start,
            "lease": lease.token,
            "secrets": withheld(),
        }
        publish(json.dumps(answer), "plan")
        _require_shared(plan, ranks)
    except (Exception, Interrupted) as error:
        code = (
            error.exit_code
            if isinstance(error, DrumlineError)
            else NOTHING_LOST
            if isinstance(error, Interrupted)
            else 1
        )
        if isinstance(error, DrumlineError):
            # Before the others end: some launchers stop the ranks that are left at once.
            note(error)
        for name in ("plan", "go"):  # whichever the other ranks wait for
            publish(json.dumps({"exit_code": code}), name)
        if not isinstance(error, Interrupted):
            with suppress(
                EnvironmentFault, RuntimeError
            ):  # a rank did not come, or the store was another process's and is gone
                for rank in range(1, ranks.world_size):
                    receive(f"received-{rank}", RECEIVED_SECONDS)
        raise
    publish(json.dumps({}), "go")
    return plan, start


def _plan_from_rank_0(ranks: Ranks, stack: ExitStack) -> tuple[Plan, str | None]:
    """The other ranks' part: wait for rank 0's plan, and see whether its run folder is this host's, too."""
    answer = _received("plan", ranks)
    os.environ.update(answer["secrets"])
    plan = Plan.of(answer["plan"])
    run_dir = Path(plan.run_dir)
    shared, mistake = has_lease(answer["lease"], run_dir, SHARED_SECONDS), ""
    if not shared and plan.config.checkpoint.apart and ranks.local_rank == 0:
        try:
            stack.enter_context(Lease(run_dir))  # this host has one of its own
            _require_fresh(run_dir, answer["resume"])
        except EnvironmentFault as error:
            mistake = error.line()
    publish(mistake or ("" if shared else socket.gethostname()), f"shared-{ranks.rank}")
    _received("go", ranks)
    return plan, answer["resume"]


def _require_fresh(run_dir: Path, resume: str | None) -> None:
    """Raises EnvironmentFault where a run that begins would find checkpoints of another one on this host."""
    if resume is None and any((run_dir / "checkpoints").glob("step-*")):
        fix = "add --resume to go on with it, or choose another with run.dir=…"
        raise EnvironmentFault(
            f"the run folder is not empty on host {socket.gethostname()}",
            where=str(run_dir.absolute()),
            fix=fix,
        )


def _received(name: str, ranks: Ranks) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(receive(name))
    if "exit_code" in answer:
        publish("", f"received-{ranks.rank}")
        raise SystemExit(answer["exit_code"])  # rank 0 reports why
    return answer


def _require_shared(plan: Plan, ranks: Ranks) -> None:
    """Raises EnvironmentFault where another host has another folder of that name, or none: what its ranks save would be lost, unless
    checkpoints go further than its own disk."""
    answers = [receive(f"shared-{rank}") for rank in range(1, ranks.world_size)]
    without = sorted({answer for answer in answers if answer})
    if plan.config.checkpoint.apart:
        mistakes = [answer for answer in without if ": " in answer]
        if mistakes:
            raise EnvironmentFault(mistakes[0])
        return
    if without:
        what = f"host {', '.join(without)} does not have the run folder that rank 0 writes to on host {socket.gethostname()}"
        fix = (
            "put it on storage that all hosts mount at the same place, with run.dir=…; or have each host keep a folder of its own, with"
            " checkpoint.replicas=1 or checkpoint.url=s3://…"
        )
        raise EnvironmentFault(what, where=str(Path(plan.run_dir).absolute()), fix=fix)


def _require_as_launched(request: Request, ranks: Ranks) -> None:
    launch, of_host = request.loaded.config.launch, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    nproc = launch.nproc
    if isinstance(launch, SSHLauncher) and launch.nodes is not None:
        what = f"{launched_by()} has started the ranks, so hosts cannot come and go"
        raise EnvironmentFault(
            what,
            where="launch.nodes",
            fix="leave launch.nodes out, or start the run by drumline train",
        )
    # accelerate's own flags go before its file, too: a number that another tool's file has is only what it was last started with.
    if nproc not in (None, ranks.world_size, of_host) and not request.loaded.old:
        what = (
            f"launch.nproc is {nproc}, but {launched_by()} has started {ranks.world_size} processes"
        )
        raise EnvironmentFault(what, where="launch.nproc", fix="leave launch.nproc out")


def _require_no_stop(plan: Plan) -> None:
    """Raises TrainingStopped where the start before this one hung, and the config does not want another."""
    if plan.config.health.on_hang == "stop" and any(
        isinstance(event, Hang) for event in last(Path(plan.run_dir) / "events.jsonl")[-2:]
    ):
        raise TrainingStopped(
            "the run hung, and health.on_hang is stop",
            where=plan.run_dir,
            fix="go on with --resume",
        )


def _mark(request: Request) -> dict[str, Any]:
    """What a restart by torchrun has in common with the start before it. It counts failures only: where a host came or went, the count
    of restarts is what it was."""
    config = hashlib.sha256(to_yaml(request.loaded.config).encode()).hexdigest()
    return {
        "config": config,
        "agent": asdict(process(os.getppid())),
        "rendezvous": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
    }


def _is_same(path: Path, mark: dict[str, Any]) -> bool:
    """Whether the run in the folder was started by this launcher with this config: then it is this run, started again."""
    try:
        known = json.loads(path.read_text())
        same_agent = known["agent"] == mark["agent"] and mark["agent"]["boot"] != ""
        same_rendezvous = known["rendezvous"] == mark["rendezvous"] != "none"
        return (
            launched_by() == "torchrun"
            and known["config"] == mark["config"]
            and (same_agent or same_rendezvous)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
