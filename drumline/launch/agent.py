"""torch's elastic agent for one attempt on one machine: it starts the ranks, keeps their logs and watches them.

Its own restarts are not used (measured to hang: stale keys in the store) and its farewell is not either (30 s on SIGTERM):
`local.py` starts a new agent with a new store for each attempt, and this one kills what is left as soon as a rank has failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from drumline.launch.postmortem import RankEnd, read_error

# The agent tells of each start and failure in its own words; the launcher tells it once, in its own.
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

MONITOR_SECONDS = 0.1
# A rank that raised is given this long to be followed by the one whose error was the cause, before all are killed.
SETTLE_SECONDS = 2.0
# Ways for a rank to end on purpose (errors.py); the others get the grace time to do so as well.
ON_PURPOSE = (2, 3, 75)


class _OneHost(RendezvousHandler):
    """A rendezvous with nobody else: the agent's store stays in this process, the ranks' own listens on loopback."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody waits to join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "drumline"

    def shutdown(self) -> bool:
        return True


class _Logs(LogsSpecs):
    """One file a rank: FOLDER/rank-R.log for its errors, .out for what it prints, .json for the exception that ended it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {end: {rank: str(self.folder / f"rank-{rank}{end}") for rank in envs} for end in (".out", ".log", ".json")}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = files[".json"][rank]
        return LogsDest(stdouts=files[".out"], stderrs=files[".log"], error_files=files[".json"])


class Agent(LocalElasticAgent):
    """Runs `command` (Python's arguments) on `nproc` ranks once."""

    def __init__(self, command: list[str], nproc: int, port: int, logs: Path, asked: Callable[[], int], grace_seconds: float) -> None:
        spec = WorkerSpec(
            role="drumline",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=_OneHost(port),
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
        )
        super().__init__(spec, _Logs(logs), exit_barrier_timeout=1)
        self.logs, self.asked, self.grace_seconds = logs, asked, grace_seconds
        self.killed: set[int] = set()
        self._forwarded = 0
        self._kill_at: float | None = None

    def attempt(self) -> list[RankEnd]:
        """Start the ranks, wait until the last has gone, and say how each ended."""
        # The agent would turn these signals into an exception; the launcher has handlers of its own.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        try:
            self.run()
        finally:
            self.kill()
        return [
            RankEnd(rank, code, read_error(self.logs / f"rank-{rank}.json"), self.logs / f"rank-{rank}.log", rank in self.killed)
            for rank, code in sorted(self._exitcodes().items())
        ]

    def kill(self) -> None:
        """SIGKILL every rank that is left, and whatever ranks have started (each is the leader of a session of its own)."""
        for rank, process in self._processes().items():
            if process.poll() is None:
                self.killed.add(rank)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes().values():
            process.wait()

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        """Forward what the launcher was asked, and end the attempt the moment that it has failed; then the agent's own look."""
        self._forward()
        codes = self._exitcodes()
        failed = {rank: code for rank, code in codes.items() if code not in (None, 0)}
        if failed:
            self._settle()
            self.kill()
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        return super()._monitor_workers(worker_group)

    def _settle(self) -> None:
        """Wait for the others: briefly after an error, as long as saving may take after an end on purpose, not at all after a kill."""
        codes = self._exitcodes()
        if any(code is not None and code < 0 for code in codes.values()) and not self.asked():
            return
        on_purpose = any(code in ON_PURPOSE for code in codes.values()) or self.asked()
        until = time.monotonic() + (self.grace_seconds if on_purpose else SETTLE_SECONDS)
        while None in self._exitcodes().values() and time.monotonic() < until:
            self._forward()
            time.sleep(MONITOR_SECONDS / 2)

    def _forward(self) -> None:
        """Hand a signal on to the ranks once; a second one kills them."""
        number = self.asked()
        if number == self._forwarded:
            return
        if number == signal.SIGKILL:
            self.kill()
        else:
            for process in self._processes().values():
                if process.poll() is None:
                    process.send_signal(number)
            self._kill_at = time.monotonic() + self.grace_seconds
        self._forwarded = number

    def _processes(self) -> dict[int, Any]:
        context: Any = self._pcontext
        return {} if context is None else {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}

    def _exitcodes(self) -> dict[int, Any]:
        return {rank: process.poll() for rank, process in self._processes().items()}
