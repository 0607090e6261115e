"""Run one attempt of a run on one host: start the ranks, keep their logs and watch them.

The processes are started by torch's elastic agent.

Two parts of torch's agent are not used: its restarts, which were seen to hang on stale keys in the
store, and its shutdown, which takes 30 s after SIGTERM. Instead `local.py` starts a new agent with
a new store for each attempt, and this agent kills the remaining ranks as soon as one has failed.
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

from drumline.hardware.detect import Groups, usable_cores
from drumline.launch.early import EarlyRanks
from drumline.launch.hangs import Hang, gloo_abort_error
from drumline.launch.postmortem import EXIT_CODES_OF_ALL_RANKS, RankEnd, read_error
from drumline.launch.watch import Watch
from drumline.system.output import say
from drumline.system.process import PIPE, SECRET_ON_STDIN, is_suspended, wait_for_exit
from drumline.system.signals import LauncherSignals
from drumline.system.sockets import detach_for_store

# The agent would report each start and failure as well; the launcher reports it once.
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

MONITOR_SECONDS = 0.1
# After an error the other ranks have this long to end by themselves: their errors may explain more
# than the first one.
SETTLE_SECONDS = 2.0
# How long to wait for ranks to be gone after SIGKILL: freeing memory takes a while.
DEATH_SECONDS = 60.0
# The same if a rank sleeps in the kernel, for a disk that stalls: it dies only when it wakes up.
ASLEEP_SECONDS = 2.0


@dataclass(frozen=True)
class Place:
    """The ranks of this host within a run, and the store by which they meet the other ranks."""

    address: str  # of the store where all ranks meet, which the launcher holds
    port: int
    first: int  # the lowest rank of this host
    world_size: int
    secret: str  # a rank must know it to use the store; empty if the store is open to all


def open_store(listener: socket.socket) -> TCPStore:
    """Return the ranks' store, opened on a socket that listens already.

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
        master_listen_fd=detach_for_store(listener),
        use_libuv=False,
    )


class _SingleRendezvous(RendezvousHandler):
    """A rendezvous with a single participant, this agent.

    The agent's own store stays in this process. The ranks meet at the address of an existing store.
    """

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
    """Name the log files of each rank, and set the variables of its environment.

    Rank R has FOLDER/rank-R.log for its standard error, rank-R.out for its standard output, and
    rank-R.json for the exception that ended it.

    A rank gets its share of the cores as threads, unless the user has set a number.
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
        """Return the path of one log of each rank. Keys are the local ranks of this host."""
        return {rank: str(self.folder / f"rank-{self.first + rank}{ending}") for rank in ranks}


class Agent(LocalElasticAgent):
    """Run a command once on all ranks of this host.

    `drumline_hosts.agent.HostRanks` overrides `_wait_for_remaining_ranks`.

    Args:
        command: Arguments of the Python interpreter.
        nproc: Number of ranks on this host.
        meeting: A listening socket for a store of these ranks alone, or the `Place` of a store that
            they share with ranks of other hosts.
        logs: Folder for the logs of the ranks.
        signals: The signals that the launcher has received.
        grace: Seconds that ranks have to save and end after a signal.
        early: Processes that wait to become ranks; None to start all ranks anew.
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
        self.meeting = _SingleRendezvous(meeting.address, meeting.port, store)
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
        # Ranks that this agent has killed; each with whether it was suspended at that time.
        self.killed: dict[int, bool] = {}
        # Exit codes of failed ranks of other hosts.
        self.failed_codes_of_other_hosts: set[int] = set()
        self.hang: Hang | None = None
        # Number of a signal for the ranks of this attempt alone; 0 for none. The ranks save and
        # end, and the launcher goes on.
        self.pause_signal = 0
        # Unix seconds at which this agent first saw that a rank had ended.
        self._ended: dict[int, float] = {}
        # Monotonic seconds by which a rank that has noted an error must have ended.
        self._must_end_by: dict[int, float] = {}
        self._forwarded = False
        self._kill_at: float | None = None  # monotonic seconds at which the grace time ends
        self._dead_at: float | None = None  # monotonic seconds at which killed ranks are given up

    def attempt(self) -> list[RankEnd]:
        """Start the ranks, wait until the last has gone, and return how each ended.

        The ends are ordered by rank. No process is left, and the port of the store is free again.
        """
        # The agent would turn these signals into an exception; the launcher has handlers of its
        # own.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        groups = Groups.from_this_process()
        kills = groups.oom_kill_count()
        try:
            self.run()
        finally:
            self.kill()
            self.meeting.shutdown()
            self.watch.close()
        # The kernel's counts before and after tell whether it killed a process for lack of memory.
        seen = (kills, groups.oom_kill_count())
        return [self._end(rank, code, seen) for rank, code in sorted(self._exitcodes().items())]

    def kill(self) -> None:
        """Send SIGKILL to all remaining ranks and their child processes, and wait for their end."""
        self.kill_without_waiting()
        patience = DEATH_SECONDS
        if self.hang is not None and any(seen.state == "D" for seen in self.hang.seen):
            patience = ASLEEP_SECONDS
        # Called more than once for an attempt: all calls together wait no longer than `patience`.
        if not self._dead_at:
            self._dead_at = time.monotonic() + patience
        for process in self._processes().values():
            wait_for_exit(process, max(0.0, self._dead_at - time.monotonic()))

    def kill_without_waiting(self) -> None:
        """Send SIGKILL to all ranks and their child processes, without waiting for their end.

        Each rank leads a session of its own, so its process group holds what it has started.
        """
        for rank, process in self._processes().items():
            if process.poll() is None:
                # Asked before the kill: afterwards nothing shows that the rank was suspended.
                self.killed[rank] = is_suspended(process.pid)
            # The group may outlive its leader, so a rank that has ended is no exception.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Kill the ranks.

        This replaces a method of torch's agent, which would wait for a process that sleeps in the
        kernel.
        """
        self.kill()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = self.place.first, self.place.world_size
        return [Worker(n, first + n, first + n, size, size) for n in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, from the early processes if there are any.

        Torch offers no hook for the start of a process, so `Popen` is replaced within this call.
        New processes get the secret of the store on their standard input.
        """
        original_popen = subprocess_handler.Popen
        try:
            if self.early is not None:
                subprocess_handler.Popen = partial(self.early.start_rank, original_popen)  # type: ignore[assignment, misc]
            elif self.place.secret:
                subprocess_handler.Popen = partial(_with_secret, original_popen, self.place.secret)  # type: ignore[assignment, misc]
            return super()._start_workers(worker_group)
        finally:
            subprocess_handler.Popen = original_popen  # type: ignore[misc]
            if self.early is not None:
                # More processes may have waited than the plan has ranks.
                self.early.end()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Forward the launcher's signals, and end the attempt once a rank has failed.

        Torch's agent calls this every MONITOR_SECONDS.

        Torch's own method is called only when all ranks have gone: at a failure it would send
        SIGTERM and wait 30 s.
        """
        self._forward_signal()
        codes = self._exitcodes()
        if any(codes.values()) or self.failed_codes_of_other_hosts or self._has_lingering_error():
            self._wait_for_remaining_ranks()
            self.kill()
        elif self._find_hang() or self._is_grace_over():
            self.kill()
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        if None in self._exitcodes().values():
            # One rank cannot be killed, and torch's own method would wait for it.
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _is_grace_over(self) -> bool:
        """Return whether the ranks were signalled and have used up their time to save."""
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def _wait_for_remaining_ranks(self) -> None:
        """Wait for the other ranks after one has failed.

        How long depends on the failure: not at all after a kill, SETTLE_SECONDS after an error or
        an abort, and the grace time after a deliberate end, since other ranks may be saving.
        """
        codes = (set(self._exitcodes().values()) | self.failed_codes_of_other_hosts) - {None, 0}
        was_killed = any(code < 0 and code != -signal.SIGABRT for code in codes)
        if was_killed and not self.signals.number:
            return
        patience = SETTLE_SECONDS
        if codes & EXIT_CODES_OF_ALL_RANKS:
            patience = self.grace_seconds
        until = time.monotonic() + patience
        if self._kill_at is not None:
            until = min(until, self._kill_at)
        while None in self._exitcodes().values() and time.monotonic() < until:
            if self.signals.at_once:
                return
            self._forward_signal()
            time.sleep(MONITOR_SECONDS / 2)

    def _has_lingering_error(self) -> bool:
        """Return whether a rank noted an error a while ago and still runs.

        It may be blocked: a rank that leaves a process group first may wait for the other ranks.
        """
        now = time.monotonic()
        for rank, code in self._exitcodes().items():
            file = self.logs / f"rank-{rank}.json"
            if code is not None or rank in self._must_end_by or not file.exists():
                continue
            error = read_error(file)
            patience = SETTLE_SECONDS
            if error is not None and error["exit_code"] in EXIT_CODES_OF_ALL_RANKS:
                patience = self.grace_seconds
            self._must_end_by[rank] = now + patience
        return any(now > at for at in self._must_end_by.values())

    def _find_hang(self) -> bool:
        """Look for a hang, note it in `self.hang`, and return whether there is one.

        Ranks that were told to end are not checked, because the grace time limits them.
        """
        if self.hang is None and not (self.signals.number or self.pause_signal):
            running = {}
            for rank, process in self._processes().items():
                if process.poll() is None:
                    running[rank] = process.pid
            self.hang = self.watch.look(running)
        return self.hang is not None

    def _forward_signal(self) -> None:
        """Forward the launcher's signal to the ranks, once.

        The grace time begins with the signal. A second Ctrl-C ends it at once.
        """
        number = self.signals.number or self.pause_signal
        if number and not self._forwarded:
            self._forwarded = True
            for process in self._processes().values():
                if process.poll() is None:
                    process.send_signal(number)
            self._kill_at = time.monotonic() + self.grace_seconds
            if self.signals.number == signal.SIGINT and 0 in self._processes():
                say(
                    f"stopping: the ranks have {self.grace_seconds:g} s to save; Ctrl-C again ends"
                    " them at once"
                )
        if self.signals.at_once:
            self._kill_at = 0.0

    def _end(self, rank: int, code: int | None, kills: tuple[int | None, int | None]) -> RankEnd:
        """Return how a rank ended.

        Args:
            rank: Its number in the run.
            code: Its exit code; None if it cannot die yet because it sleeps in the kernel.
            kills: Kills for lack of memory on this host, before and after the attempt.
        """
        log = self.logs / f"rank-{rank}.log"
        error = self._error(rank, code)
        was_killed = rank in self.killed
        if error and (was_killed or code == 0):
            # The rank noted its error first. The kill, or a sys.exit() of the user's code, came
            # later and hides the exit code that belongs to the error.
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
        """Return the error that ended a rank; None if none is known.

        It is the hang that this agent found, the error that the rank noted, or the message with
        which gloo aborted.
        """
        error = read_error(self.logs / f"rank-{rank}.json")
        if self.hang is not None and rank == self.hang.subject.rank:
            return self.hang.error()
        if error is None and code == -signal.SIGABRT:
            return gloo_abort_error(self.logs / f"rank-{rank}.log")
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
        """Return the exit code of each rank; None while it runs.

        The time at which an end is first seen is kept, for ranks that note no time themselves.
        """
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        for rank, code in codes.items():
            if code is not None:
                self._ended.setdefault(rank, time.time())
        return codes


def _with_secret(
    original_popen: Callable[..., Any], secret: str, *, env: dict[str, str], **options: Any
) -> Any:
    """Start a rank that reads the secret of its store from standard input (`dist.start`).

    Args:
        original_popen: The original `Popen`, for which this function stands.
        secret: The secret, which must not be seen in arguments or in the environment.
        env: Environment of the rank.
        options: All other arguments of `Popen`.
    """
    process = original_popen(env={**env, SECRET_ON_STDIN: "1"}, stdin=PIPE, **options)
    # A pipe is broken if the rank has died, which is seen soon.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(secret.encode() + b"\n")
    return process
