"""Run one attempt on one host by torch's elastic agent: start the ranks, keep their logs and watch them.

Two parts of torch's agent are not used: its restarts (measured to hang: stale keys in the store)
and its shutdown (30 s on SIGTERM). `local.py` starts a new agent with a new store for each attempt,
and this agent kills the remaining ranks as soon as one has failed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from drumline.errors import NotSaved
from drumline.hardware.detect import Groups, usable_cores
from drumline.launch.early import EarlyRanks
from drumline.launch.hangs import Hang, aborted
from drumline.launch.postmortem import RankEnd, read_error
from drumline.launch.watch import Watch
from drumline.system.process import PIPE, SECRET_COMES, is_suspended, wait_for_exit
from drumline.system.signals import LauncherSignals
from drumline.system.sockets import for_store

# The agent would report each start and failure as well; the launcher reports it once.
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

MONITOR_SECONDS = 0.1
# After an error the other ranks have this long to end by themselves: their errors may explain more
# than the first one.
SETTLE_SECONDS = 2.0
# For ranks to be gone after SIGKILL: freeing memory takes a while.
DEATH_SECONDS = 60.0
# The same if a rank sleeps in the kernel, for a disk that stalls: it dies only when it wakes up.
ASLEEP_SECONDS = 2.0
# Exit codes (errors.py) of ends on purpose, to which all ranks come together: some of them later,
# while they write the checkpoint.
TOGETHER = (3, 75, NotSaved.rank_code)


@dataclass(frozen=True)
class Place:
    """Which ranks of a run are this host's, and where they meet the others."""

    address: str  # of the store where all ranks meet, which the launcher holds
    port: int
    first: int  # this host's ranks begin with this one
    world_size: int
    secret: str  # what a rank must know to use the store; empty if nothing


def open_store(listener: socket.socket) -> TCPStore:
    """Return the store of the ranks, on a socket that listens already.

    The launcher holds it in the place of rank 0. So the port is taken before anything starts, and
    cannot be lost to another process while rank 0 imports torch; and the store outlives any rank.
    """
    address, port = listener.getsockname()[:2]
    # torch's newer libuv server cannot be given a socket, and without one it would listen on all
    # interfaces.
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=for_store(listener),
        use_libuv=False,
    )


class _Meeting(RendezvousHandler):
    """A rendezvous of this agent with no other: its own store stays in this process. Ranks meet at the address of an existing store."""

    def __init__(self, address: str, port: int, store: TCPStore | None) -> None:
        self.address = address
        self.port = port
        self.store = store

    def get_backend(self) -> str:
        return "drumline"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the existing store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.address, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no agent waits to join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "drumline"

    def shutdown(self) -> bool:
        """Close the ranks' store, so that its port is free for the next attempt."""
        self.store = None
        return True


class _Logs(LogsSpecs):
    """The logs of each rank R: FOLDER/rank-R.log for its errors, .out for what it prints, .json for the exception that ended it.

    It also sets the variables of each rank. A rank gets its share of the cores as threads, unless
    the user has set a number.
    """

    def __init__(self, folder: Path, first: int, watch: Watch) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.first = first
        self.watch = watch

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.folder.mkdir(parents=True, exist_ok=True)
        outputs = self._files(".out", envs)
        logs = self._files(".log", envs)
        errors = self._files(".json", envs)
        threads_per_rank = max(1, usable_cores() // len(envs))
        threads = os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            env["OMP_NUM_THREADS"] = threads
            env.update(self.watch.variable(rank))
        return LogsDest(stdouts=outputs, stderrs=logs, error_files=errors)

    def _files(self, ending: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the file with this ending of each rank of this host, by its local number."""
        return {rank: str(self.folder / f"rank-{self.first + rank}{ending}") for rank in ranks}


class Agent(LocalElasticAgent):
    """Run `command` (Python's arguments) on `nproc` ranks of this host once.

    `meeting` is a socket for a store of these ranks alone, or the place where they meet the ranks
    of other hosts. `grace` is how many seconds ranks have to save and end after a signal.
    """

    def __init__(
        self,
        command: list[str],
        nproc: int,
        meeting: socket.socket | Place,
        logs: Path,
        signals: LauncherSignals,
        grace: float,
        early: EarlyRanks | None = None,
    ) -> None:
        store = None
        if isinstance(meeting, socket.socket):
            store = open_store(meeting)
            meeting = Place("127.0.0.1", store.port, 0, nproc, "")
        self.place = meeting
        self.meeting = _Meeting(meeting.address, meeting.port, store)
        spec = WorkerSpec(
            role="drumline",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=self.meeting,
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
        )
        self.watch = Watch(nproc, meeting.first, meeting.world_size)
        super().__init__(spec, _Logs(logs, meeting.first, self.watch), exit_barrier_timeout=1)
        self.logs = logs
        self.signals = signals
        self.grace_seconds = grace
        self.early = early
        self.killed: dict[int, bool] = {}  # by this agent: rank → whether it was suspended
        # Exit codes of failed ranks of other hosts.
        self.failed_codes_of_other_hosts: set[int] = set()
        self.hang: Hang | None = None
        # The number of a signal for the ranks of this attempt alone: they save and end, and the
        # launcher goes on.
        self.paused = 0
        self._ended: dict[int, float] = {}  # unix seconds at which the end of a rank was first seen
        # Monotonic seconds by which a rank that has noted an error must have ended.
        self._raised: dict[int, float] = {}
        self._forwarded = False
        self._kill_at: float | None = None  # monotonic seconds at which the grace time ends
        self._dead_at: float | None = None  # monotonic seconds at which killed ranks are given up

    def attempt(self) -> list[RankEnd]:
        """Start the ranks, wait until the last has gone, and return how each ended."""
        # The agent would turn these signals into an exception; the launcher has handlers of its
        # own.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        groups = Groups.of_this_process()
        kills = groups.oom_kills()
        try:
            self.run()
        finally:
            self.kill()
            self.meeting.shutdown()
            self.watch.close()
        seen = (kills, groups.oom_kills())
        return [self._end(rank, code, seen) for rank, code in sorted(self._exitcodes().items())]

    def kill(self) -> None:
        """Send SIGKILL to every remaining rank, and to whatever ranks have started, and wait for their end."""
        self.strike()
        patience = DEATH_SECONDS
        if self.hang is not None and any(seen.state == "D" for seen in self.hang.seen):
            patience = ASLEEP_SECONDS
        if not self._dead_at:
            self._dead_at = time.monotonic() + patience
        for process in self._processes().values():
            wait_for_exit(process, max(0.0, self._dead_at - time.monotonic()))

    def strike(self) -> None:
        """Send SIGKILL without waiting. Each rank is the leader of a session of its own."""
        for rank, process in self._processes().items():
            if process.poll() is None:
                self.killed[rank] = is_suspended(process.pid)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Kill the ranks. The method of torch's agent would wait for a process that sleeps in the kernel."""
        self.kill()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = self.place.first, self.place.world_size
        return [Worker(n, first + n, first + n, size, size) for n in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Use the ranks that wait already; without them start new ones, which get the secret of the store."""
        usual = subprocess_handler.Popen
        try:
            if self.early is not None:
                subprocess_handler.Popen = partial(self.early.take, usual)  # type: ignore[assignment, misc]
            elif self.place.secret:
                subprocess_handler.Popen = partial(_with_secret, usual, self.place.secret)  # type: ignore[assignment, misc]
            return super()._start_workers(worker_group)
        finally:
            subprocess_handler.Popen = usual  # type: ignore[misc]
            if self.early is not None:
                # There may have been more of them than the plan has.
                self.early.end()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Forward the launcher's signals, and end the attempt as soon as it has failed.

        Torch's own method is called only when all ranks have gone: at a failure it would send
        SIGTERM and wait 30 s.
        """
        self._forward()
        codes = self._exitcodes()
        if any(codes.values()) or self.failed_codes_of_other_hosts or self._stuck():
            self._settle()
            self.kill()
        elif self._hangs() or self._is_grace_over():
            self.kill()
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        if None in self._exitcodes().values():
            # One rank cannot be killed, and torch's own method would wait for it.
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _is_grace_over(self) -> bool:
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def _settle(self) -> None:
        """Wait for the other ranks after one has failed.

        Not at all after a kill, briefly after an error or an abort, and after an end on purpose for
        as long as saving may take.
        """
        codes = (set(self._exitcodes().values()) | self.failed_codes_of_other_hosts) - {None, 0}
        was_killed = min(codes - {-signal.SIGABRT}, default=0) < 0
        if was_killed and not self.signals.number:
            return
        patience = SETTLE_SECONDS
        if codes & set(TOGETHER):
            patience = self.grace_seconds
        until = time.monotonic() + patience
        if self._kill_at is not None:
            until = min(until, self._kill_at)
        while None in self._exitcodes().values() and time.monotonic() < until:
            if self.signals.at_once:
                return
            self._forward()
            time.sleep(MONITOR_SECONDS / 2)

    def _stuck(self) -> bool:
        """Return whether a rank has noted an error a while ago and has not ended.

        Leaving a process group before the other ranks do may block.
        """
        now = time.monotonic()
        for rank, code in self._exitcodes().items():
            file = self.logs / f"rank-{rank}.json"
            if code is not None or rank in self._raised or not file.exists():
                continue
            error = read_error(file)
            patience = SETTLE_SECONDS
            if error is not None and error["exit_code"] in TOGETHER:
                patience = self.grace_seconds
            self._raised[rank] = now + patience
        return any(now > at for at in self._raised.values())

    def _hangs(self) -> bool:
        """Return whether the ranks have stood still for longer than they may. Ranks that are to end have the grace time instead."""
        if self.hang is None and not (self.signals.number or self.paused):
            running = {}
            for rank, process in self._processes().items():
                if process.poll() is None:
                    running[rank] = process.pid
            self.hang = self.watch.look(running)
        return self.hang is not None

    def _forward(self) -> None:
        """Hand a signal on to the ranks once. The grace time begins then, and a second Ctrl-C ends it."""
        number = self.signals.number or self.paused
        if number and not self._forwarded:
            self._forwarded = True
            for process in self._processes().values():
                if process.poll() is None:
                    process.send_signal(number)
            self._kill_at = time.monotonic() + self.grace_seconds
        if self.signals.at_once:
            self._kill_at = 0.0

    def _end(self, rank: int, code: int | None, kills: tuple[int | None, int | None]) -> RankEnd:
        """Return how a rank ended, by its exit code; None if it has not ended, but dies as soon as it can."""
        log = self.logs / f"rank-{rank}.log"
        error = self._error(rank, code)
        was_killed = rank in self.killed
        if error and (was_killed or code == 0):
            # It had reported why it ends before this agent killed it, or before sys.exit() of the
            # user's own.
            code = error["exit_code"]
        if error:
            at = error["time"]
        else:
            at = self._ended.get(rank, time.time())
        if code is None:
            code = -signal.SIGKILL
        was_suspended = self.killed.get(rank, False)
        return RankEnd(rank, code, error, log, was_killed, at, was_suspended, kills)

    def _error(self, rank: int, code: int | None) -> dict[str, Any] | None:
        """Return the error that ended a rank: its hang, what the rank noted, or what gloo wrote as it aborted."""
        error = read_error(self.logs / f"rank-{rank}.json")
        if self.hang is not None and rank == self.hang.subject.rank:
            return self.hang.error()
        if error is None and code == -signal.SIGABRT:
            return aborted(self.logs / f"rank-{rank}.log")
        return error

    def _processes(self) -> dict[int, Any]:
        """Return the process of each started rank, by its number in the run."""
        context = cast("Any", self._pcontext)
        if context is None:
            return {}
        first = self.place.first
        handlers = context.subprocess_handlers
        return {first + local: handler.proc for local, handler in handlers.items()}

    def _exitcodes(self) -> dict[int, Any]:
        """Return the exit code of each rank, None while it runs, and note the time at which each end was first seen."""
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        for rank, code in codes.items():
            if code is not None:
                self._ended.setdefault(rank, time.time())
        return codes


def _with_secret(
    usual: Callable[..., Any], secret: str, *, env: dict[str, str], **options: Any
) -> Any:
    """Start a rank that reads the secret of its store from standard input (`dist.start`). `usual` is Popen, which this replaces."""
    process = usual(env={**env, SECRET_COMES: "1"}, stdin=PIPE, **options)
    # A pipe is broken if the rank has died, which is seen soon.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(secret.encode() + b"\n")
    return process
