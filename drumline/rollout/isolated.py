"""One process of rewards as its parent sees it: started, asked, and killed when it is late."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from drumline import errors
from drumline.config.algorithms import Reward
from drumline.errors import DrumlineError, EnvironmentFault

# Importing what rewards need, on a machine that is busy training. A module that takes longer hangs.
START_SECONDS = 120.0
WHERE = "algorithm.rewards"


@dataclass(frozen=True)
class Answer:
    """What a reward said, or why it said nothing; and how long the parent waited."""

    value: float | None
    failure: str | None
    seconds: float


class Isolated:
    """A worker process that has built some rewards (`rewards`: place in the config's list → reward).

    It is started and asked by one thread, which must outlive it: the kernel kills it when that thread ends (`launch.worker`).
    It stays in its parent's process group, so that whoever kills the group reaches what a reward may have started, too.
    """

    def __init__(
        self, rewards: dict[int, Reward], base_dir: Path, columns: list[str] | None = None, start_seconds: float = START_SECONDS
    ) -> None:
        """`columns`: those that rows have, where a function is to be checked against them.

        Raises ConfigError or EnvironmentFault for what the worker refuses, EnvironmentFault where it cannot be started."""
        ours, theirs = multiprocessing.Pipe()
        told = {
            "base_dir": str(base_dir),
            "columns": columns,
            "rewards": {index: reward.model_dump(mode="json") for index, reward in rewards.items()},
        }
        command = [sys.executable, "-m", "drumline.launch.worker", str(os.getpid())]
        command += ["drumline.rollout.reward_worker", str(theirs.fileno()), json.dumps(told)]
        self.connection: Connection = ours
        try:
            # Prints go to standard error: standard output may be a table or a YAML that somebody reads.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),))
        except OSError as error:
            ours.close()
            raise EnvironmentFault(f"a process for rewards cannot be started: {error.strerror}", where=WHERE) from error
        finally:
            theirs.close()
        try:
            self._await_ready(rewards, start_seconds)
        except BaseException:
            self.kill()
            raise

    def _await_ready(self, rewards: dict[int, Reward], seconds: float) -> None:
        try:
            said = self._receive(seconds)
        except EOFError:
            how = ending(self.process.wait())
            fix = "look for the reason in the rank's log, or above"
            raise EnvironmentFault(f"a process for rewards {how} while it started", where=WHERE, fix=fix) from None
        if said is None:
            paths = ", ".join(getattr(reward, "path", reward.kind) for reward in rewards.values())
            raise EnvironmentFault(f"importing {paths} takes more than {seconds:g} s", where=WHERE, fix="mend what hangs there")
        if wrong := said.get("wrong"):
            kind: type[DrumlineError] = getattr(errors, wrong["kind"])
            raise kind(wrong["what"], where=wrong["where"], fix=wrong["fix"])

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None where none came in time. Raises EOFError (or ConnectionResetError) when the process has ended."""
        return json.loads(self.connection.recv_bytes()) if self.connection.poll(seconds) else None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, index: int, prompt: str, completion: str, meta: dict[str, Any], timeout_seconds: float) -> Answer:
        """One reward of one completion. A process that is late or ends is killed: `alive` is False then."""
        request = {"index": index, "prompt": prompt, "completion": completion, "meta": meta}
        began = time.monotonic()
        try:
            self.connection.send_bytes(json.dumps(request).encode())
            said = self._receive(timeout_seconds)
        except (EOFError, OSError):
            self.kill()
            return Answer(None, ending(self.process.returncode), time.monotonic() - began)
        seconds = time.monotonic() - began
        if said is None:
            self.kill()
            return Answer(None, f"timed out after {timeout_seconds:g} s", seconds)
        return Answer(said.get("value"), said.get("failure"), seconds)

    def kill(self) -> None:
        """End the process and what its rewards have started, and wait for it."""
        if self.alive:
            try:
                family = psutil.Process(self.process.pid).children(recursive=True)
            except psutil.Error:  # it ended just now
                family = []
            self._wait_for_own_end()
            for process in family:
                if process.is_running():
                    process.kill()
        self.connection.close()

    def _wait_for_own_end(self) -> None:
        """A process whose socket has closed is about to end by itself, and its exit code tells more than ours would."""
        ended = self.connection.poll(0) if not self.connection.closed else False
        try:
            self.process.wait(1.0 if ended else 0.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended its process (exit code {code})"
    try:
        return f"crashed its process ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed its process (signal {-code})"
