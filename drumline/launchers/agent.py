"""torch's elastic agent for one attempt on one host: it starts the ranks, keeps their logs and watches them.

Its own restarts are not used (measured to hang: stale keys in the store) and its farewell is not either (30 s on SIGTERM):
`local.py` starts a new agent with a new store for each attempt, and this one kills what is left as soon as a rank has failed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
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

from drumline.core.process import PIPE, SECRET_COMES, exit_code, is_suspended
from drumline.core.signals import LauncherSignals
from drumline.core.sockets import for_store
from drumline.errors import NotSaved
from drumline.hardware.detect import Groups, usable_cores
from drumline.launchers.early import EarlyRanks
from drumline.launchers.hangs import Hang, aborted
from drumline.launchers.postmortem import RankEnd, read_error
from drumline.launchers.watch import Watch

# The agent would report each start and failure as well; the launcher reports it once.
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

MONITOR_SECONDS = 0.1
# After an error the other ranks have this long to end by themselves: their errors may explain more than the first one.
SETTLE_SECONDS = 2.0
# After SIGKILL: freeing memory takes a while, and a process that sleeps in the kernel, for a disk that stalls, dies when it wakes up.
DEATH_SECONDS, ASLEEP_SECONDS = 60.0, 2.0
# Ends on purpose that all ranks come to together (errors.py), some of them later, since they are still writing the checkpoint.
TOGETHER = (3, 75, NotSaved.rank_code)


@dataclass(frozen=True)
class Place:
    """Which ranks of a run are this host's: those from `first` on. `address`, `port`: of the store where all ranks meet, which the launcher
    holds; `secret`: what a rank must know to meet the others there."""

    address: str
    port: int
    first: int
    world_size: int
    secret: str


def open_store(listener: socket.socket) -> TCPStore:
    """The ranks' store, on a socket that listens already.

    The launcher holds it, not rank 0: the port is taken before anything starts and cannot be lost to another process while rank 0 imports
    torch, and the store outlives any rank.
    """
    address, port = listener.getsockname()[:2]
    # torch's newer libuv server cannot be given a socket, and without one it would listen on all interfaces.
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=for_store(listener),
        use_libuv=False,
    )


class _Meeting(RendezvousHandler):
    """A rendezvous of agents with nobody else: its own store stays in this process. Ranks meet at the address of a store that is there."""

    def __init__(self, address: str, port: int, store: TCPStore | None) -> None:
        self.address, self.port, self.store = address, port, store

    def get_backend(self) -> str:
        return "drumline"

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the store that is there."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.address, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody waits to join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "drumline"

    def shutdown(self) -> bool:
        """Close the ranks' store: its port is free for the next attempt."""
        self.store = None
        return True


class _Logs(LogsSpecs):
    """One file a rank: FOLDER/rank-R.log for its errors, .out for what it prints, .json for the exception that ended it. Each rank gets its
    share of the cores as threads, unless the user has set another."""

    def __init__(self, folder: Path, first: int, watch: Watch) -> None:
        super().__init__(str(folder))
        self.folder, self.first, self.watch = folder, first, watch

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {
            end: {rank: str(self.folder / f"rank-{self.first + rank}{end}") for rank in envs}
            for end in (".out", ".log", ".json")
        }
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // len(envs)))
        for rank, env in envs.items():
            env |= {
                "TORCHELASTIC_ERROR_FILE": files[".json"][rank],
                "OMP_NUM_THREADS": threads,
                **self.watch.variable(rank),
            }
        return LogsDest(stdouts=files[".out"], stderrs=files[".log"], error_files=files[".json"])


class Agent(LocalElasticAgent):
    """Runs `command` (Python's arguments) on `nproc` ranks of this host once. `meeting`: a socket for a store of these ranks, or where
    they meet those of other hosts."""

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
        if isinstance(meeting, socket.socket):
            store = open_store(meeting)
            meeting = Place("127.0.0.1", store.port, 0, nproc, "")
        else:
            store = None
        self.place, self.meeting = meeting, _Meeting(meeting.address, meeting.port, store)
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
        self.logs, self.signals, self.grace_seconds, self.early = logs, signals, grace, early
        self.killed: dict[int, bool] = {}  # by this agent: rank → whether it was suspended
        self.elsewhere: set[int] = set()  # exit codes of ranks of other hosts, but 0
        self.hang: Hang | None = None
        self.paused = 0  # a signal for the ranks of this attempt alone: they save and end, and the launcher goes on
        self._ended: dict[int, float] = {}
        self._raised: dict[int, float] = {}
        self._forwarded = False
        self._kill_at: float | None = None
        self._dead_at: float | None = None

    def attempt(self) -> list[RankEnd]:
        """Start the ranks, wait until the last has gone, and return how each ended."""
        # The agent would turn these signals into an exception; the launcher has handlers of its own.
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
        """SIGKILL every rank that is left, and whatever ranks have started, and wait a little for their end."""
        self.strike()
        asleep = self.hang is not None and any(seen.state == "D" for seen in self.hang.seen)
        self._dead_at = self._dead_at or time.monotonic() + (
            ASLEEP_SECONDS if asleep else DEATH_SECONDS
        )
        for process in self._processes().values():
            exit_code(process, max(0.0, self._dead_at - time.monotonic()))

    def strike(self) -> None:
        """The same without waiting. Each rank is the leader of a session of its own."""
        for rank, process in self._processes().items():
            if process.poll() is None:
                self.killed[rank] = is_suspended(process.pid)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Not the agent's own, which waits for a process that sleeps in the kernel."""
        self.kill()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = self.place.first, self.place.world_size
        return [Worker(n, first + n, first + n, size, size) for n in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """The ranks that wait already, else new ones, which get the secret of the store."""
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
                self.early.end()  # there were more than the plan has

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Forward the launcher's signals, and end the attempt the moment that it has failed.

        The agent's own look is left for when all ranks have gone: at a failure it would send SIGTERM and wait 30 s.
        """
        self._forward()
        codes = self._exitcodes()
        if any(codes.values()) or self.elsewhere or self._stuck():
            self._settle()
            self.kill()
        elif self._hangs() or (self._kill_at is not None and time.monotonic() > self._kill_at):
            self.kill()
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        if None in self._exitcodes().values():
            # One cannot be killed, and the agent's own look would wait for it.
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _settle(self) -> None:
        """Wait for the other ranks: not after a kill, briefly after an error or an abort, as long as saving may take after an
        end on purpose."""
        codes = (set(self._exitcodes().values()) | self.elsewhere) - {None, 0}
        if min(codes - {-signal.SIGABRT}, default=0) < 0 and not self.signals.number:
            return
        until = time.monotonic() + (self.grace_seconds if codes & set(TOGETHER) else SETTLE_SECONDS)
        if self._kill_at is not None:
            until = min(until, self._kill_at)
        while (
            None in self._exitcodes().values()
            and time.monotonic() < until
            and not self.signals.at_once
        ):
            self._forward()
            time.sleep(MONITOR_SECONDS / 2)

    def _stuck(self) -> bool:
        """A rank has noted an error a while ago and has not ended: leaving a process group before the other ranks may block."""
        now = time.monotonic()
        for rank, code in self._exitcodes().items():
            if (
                code is None
                and rank not in self._raised
                and (self.logs / f"rank-{rank}.json").exists()
            ):
                error = read_error(self.logs / f"rank-{rank}.json")
                on_purpose = error is not None and error["exit_code"] in TOGETHER
                self._raised[rank] = now + (self.grace_seconds if on_purpose else SETTLE_SECONDS)
        return any(now > at for at in self._raised.values())

    def _hangs(self) -> bool:
        """The ranks have stood still for longer than they may. Not while they are to end: they have the grace time for that."""
        if self.hang is None and not (self.signals.number or self.paused):
            self.hang = self.watch.look(
                {
                    rank: process.pid
                    for rank, process in self._processes().items()
                    if process.poll() is None
                }
            )
        return self.hang is not None

    def _forward(self) -> None:
        """Hand a signal on to the ranks once; they have the grace time from then on, and a second Ctrl-C ends it."""
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
        error = read_error(self.logs / f"rank-{rank}.json")
        if self.hang is not None and rank == self.hang.of.rank:
            error = self.hang.error()
        elif error is None and code == -signal.SIGABRT:
            error = aborted(self.logs / f"rank-{rank}.log")
        killed = rank in self.killed
        if error and (killed or code == 0):
            # It had reported why it ends before we killed it, or before sys.exit() of the user's own.
            code = error["exit_code"]
        at = error["time"] if error else self._ended.get(rank, time.time())
        code = -signal.SIGKILL if code is None else code  # it dies as soon as it can
        return RankEnd(
            rank,
            code,
            error,
            self.logs / f"rank-{rank}.log",
            killed,
            at,
            self.killed.get(rank, False),
            kills,
        )

    def _processes(self) -> dict[int, Any]:
        """Rank of the run → its process."""
        context, first = cast("Any", self._pcontext), self.place.first
        return (
            {}
            if context is None
            else {
                first + local: handler.proc
                for local, handler in context.subprocess_handlers.items()
            }
        )

    def _exitcodes(self) -> dict[int, Any]:
        """Rank → exit code, None while it runs; the time (unix seconds) at which an end was first seen is kept."""
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        for rank, code in codes.items():
            if code is not None:
                self._ended.setdefault(rank, time.time())
        return codes


def _with_secret(
    usual: Callable[..., Any], secret: str, *, env: dict[str, str], **options: Any
) -> Any:
    """In the place of `usual`, which is Popen: a rank that reads the secret of its store from standard input (`dist.start`)."""
    process = usual(env={**env, SECRET_COMES: "1"}, stdin=PIPE, **options)
    with suppress(BrokenPipeError), process.stdin as pipe:  # it has died: that is seen soon
        pipe.write(secret.encode() + b"\n")
    return process
