"""`drumline train` as one rank of a launcher that is not ours (torchrun and its kin): rank 0 plans, the others are told."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from drumline.config.load import Loaded
from drumline.dist.start import Ranks, publish, receive, rendezvous
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.launch.environment import launched_by
from drumline.plan.plan import Plan
from drumline.report.bars import bars
from drumline.report.progress import Progress
from drumline.train.entry import run
from drumline.train.exhausted import OutOfMemory
from drumline.train.failure import recording
from drumline.train.replan import advise
from drumline.train.setup import Request, claim_run_dir, make_plan


def train(loaded: Loaded, resume: str | None, allow: tuple[str, ...]) -> int:
    """One rank, from plan to end. After a restart by the launcher the run goes on from its newest checkpoint."""
    ranks = Ranks.from_environment()
    asked = loaded.config.launch.nproc
    # accelerate's own flags go before its file, too: a number that another tool's file has is only what it was last started with.
    if asked is not None and asked != ranks.world_size and not loaded.old:
        raise EnvironmentFault(
            f"launch.nproc is {asked}, but {launched_by()} has started {ranks.world_size} processes",
            where="launch.nproc",
            fix="leave launch.nproc out",
        )
    with recording():
        # Before the data is prepared: the others find rank 0 now, wait for its word, and notice if it dies meanwhile.
        rendezvous()
        if ranks.rank == 0:
            plan, start = _plan(loaded, ranks, resume, allow)
        else:
            told = json.loads(receive())
            if "error" in told:
                raise SystemExit(told["exit_code"])
            plan, start = Plan.model_validate(told["plan"]), told["resume"]
        try:
            if ranks.rank != 0:
                run(plan, start)
                return 0
            with Progress(Console()) as progress:
                run(plan, start, progress.on_event)
        except OutOfMemory as error:
            # Another launcher decides whether it goes on; what to change is said all the same.
            print(f"error: rank {ranks.rank}: {advise(plan, error.exhausted).line}", file=sys.stderr)
            raise
    return 0


def _plan(loaded: Loaded, ranks: Ranks, resume: str | None, allow: tuple[str, ...]) -> tuple[Plan, str | None]:
    """Rank 0's part, outside any collective: it may take as long as the data needs."""
    request = Request(loaded, world_size=ranks.world_size, resume="newest" if ranks.attempt else resume, allow=allow)
    try:
        with bars(Console(file=sys.stderr)) as on_progress:
            plan = make_plan(request, on_progress=on_progress)
        for line in plan.data.left_out if plan.data else ():
            print(f"note: {line}", file=sys.stderr)
        _, start = claim_run_dir(plan, request)
    except Exception as error:
        publish(json.dumps({"error": str(error), "exit_code": error.exit_code if isinstance(error, DrumlineError) else 1}))
        raise
    publish(json.dumps({"plan": plan.model_dump(mode="json"), "resume": start}))
    return plan, start
