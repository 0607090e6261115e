"""The environments of a rank's episodes, each in a process of its own. No torch.

An environment that raises, hangs, crashes or returns nonsense costs its episode: its reply has a
failure, the reason. The rank runs no code of the user's.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from drumline.config.rollouts import Environment
from drumline.foreign import require_package
from drumline.rl.episodes import WHERE
from drumline.rl.rewards import (
    END_SECONDS,
    EXIT_SECONDS,
    LONGEST_ANSWER,
    NOT_ITS_OWN,
    START_SECONDS,
    Channel,
    GuardedProcess,
    MalformedMessage,
    describe_exit,
)
from drumline.system import heartbeat

# The most environments of a rank that are waited for at the same time.
MOST_AT_ONCE = 16
# Kind of an environment → the package that it needs, and how to install it.
PACKAGES = {
    "verifiers": ("verifiers", "pip install 'verifiers>=0.3,<0.4'"),
    "openenv": ("openenv", "pip install openenv"),
}
# Seconds in which a process must have imported one of these packages and the user's code. They import
# hundreds of modules, which took over two minutes on two busy cores.
PACKAGE_START_SECONDS = 900.0
# The failure of an episode whose process was killed with that of all environments.
FORKING_PROCESS_KILLED = "was ended with the process that all environments are forked from"


@dataclass(frozen=True)
class Reply:
    """What an environment answered to `reset` or `step`."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    # The reward of the turn; None: the environment gave none.
    reward: float | None = None
    # Whether the episode is over.
    done: bool = False
    # Number of calls of tools in the turn, and how many of them failed.
    tool_calls: int = 0
    tool_errors: int = 0
    # Why the environment failed, which ends the episode; None if it did not.
    failure: str | None = None


class EnvironmentServer(GuardedProcess):
    """The process that imports the user's code, and forks for each episode."""

    worker = "drumline.rl.environment_worker"
    noun = "environments"
    where = WHERE

    def __init__(self, config: Environment, base_dir: Path) -> None:
        """Start the process, which imports nothing yet; `wait_until_ready` comes next.

        `base_dir`: the folder of the YAML. Raises EnvironmentFault if it cannot be started.
        """
        task = {"base_dir": str(base_dir), "environment": config.model_dump(mode="json")}
        super().__init__(task, config.code)
        # One request at a time: the sockets of two would be mixed up.
        self._lock = Lock()

    def start_episode(self) -> tuple[int, socket.socket]:
        """Return the id of a new process for an episode, and our end of its socket.

        Raises EOFError, OSError, TimeoutError or MalformedMessage if this process does not answer.
        """
        ours, theirs = socket.socketpair()
        try:
            reply = self._request({}, [theirs.fileno()])
            return int(reply["pid"]), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def end_fork(self, pid: int, patience: float = 0.0) -> int | None:
        """End the process of an episode, and return its exit code.

        `patience`: seconds in which it may end by itself; None is returned if it was killed after
        them. Raises the errors of `start_episode`.
        """
        code: int | None = self._request({"end": pid, "patience": patience}, [])["code"]
        return code

    def _request(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Return the answer to a message."""
        token = secrets.token_hex(8)
        line = json.dumps({"token": token, **message}).encode()
        with self._lock:
            try:
                return self._exchange(token, line, fds)
            except (EOFError, OSError, MalformedMessage):
                # Later answers might be taken for those of other requests. A new process takes its
                # place at the next `reset`.
                self.process.terminate()
                raise

    def _exchange(self, token: str, line: bytes, fds: list[int]) -> dict[str, Any]:
        """Send a message, and return the answer with its token."""
        self.channel.end.settimeout(END_SECONDS)
        if fds:
            socket.send_fds(self.channel.end, [line], fds)
        else:
            self.channel.end.sendall(line)
        reply = self.channel.receive(END_SECONDS)
        if reply.get("token") != token:
            raise MalformedMessage
        return reply


class EnvironmentProcess:
    """The process of one episode. After a failure all calls return that failure."""

    def __init__(self, server: EnvironmentServer, timeout_seconds: float) -> None:
        """Start the process. `timeout_seconds`: the most seconds of a call."""
        self.server = server
        self.timeout_seconds = timeout_seconds
        self.failure: str | None = None
        self.pid: int | None = None
        try:
            self.pid, end = server.start_episode()
            self.channel = Channel(end, LONGEST_ANSWER)
        except (EOFError, OSError, MalformedMessage):
            self.failure = "could not be started"

    def call(self, seed: int, **arguments: Any) -> Reply:
        """Return the answer to `reset` (argument `row`), `step` (`message`) or `finish` (`finish`).

        `seed`: of the environment's random numbers in this call.
        """
        if self.failure is not None:
            return Reply(failure=self.failure)
        # An environment that writes on the socket does not know the token, and cannot forge an answer.
        token = secrets.token_hex(8)
        patience = 0.0
        try:
            self.channel.send({"token": token, "seed": seed, **arguments}, self.timeout_seconds)
            reply = self.channel.receive(self.timeout_seconds)
            if reply.pop("token", None) != token:
                raise MalformedMessage
            self.failure = reply.get("failure")
            return Reply(**reply)
        except TimeoutError:
            failure = f"timed out after {self.timeout_seconds:g} s"
        except (EOFError, OSError):
            failure = ""
            patience = EXIT_SECONDS
        except (MalformedMessage, TypeError):
            failure = NOT_ITS_OWN
        code = self.end(patience)
        self.failure = failure or self.failure or describe_exit(code)
        return Reply(failure=self.failure)

    def end(self, patience: float = 0.0) -> int | None:
        """End the process, and return its exit code; None if it was killed, or is not known.

        `patience`: seconds in which it may end by itself.
        """
        if self.pid is None:
            return None
        pid = self.pid
        self.pid = None
        try:
            return self.server.end_fork(pid, patience)
        except (EOFError, OSError, MalformedMessage):
            # The server has ended, and with it all of its forks.
            self.failure = FORKING_PROCESS_KILLED
            return None
        finally:
            self.channel.end.close()


class Environments:
    """The environments of the episodes that one rank takes care of.

    The process that imports the user's code starts at once, while the caller goes on; `tools` waits for
    it. All processes end with `close`, or with the caller.
    """

    def __init__(self, config: Environment, base_dir: Path) -> None:
        """Start. `base_dir`: the folder of the YAML. Raises EnvironmentFault if that fails."""
        self.config = config
        self.base_dir = base_dir
        self._server = EnvironmentServer(config, base_dir)
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="environment")
        # Number of an episode → its process.
        self._processes: dict[int, EnvironmentProcess] = {}

    def tools(self) -> list[dict[str, Any]]:
        """Wait until the user's code is imported, and return the JSON schemas of its tools.

        Only the kinds tools and verifiers have some. Raises ConfigError or EnvironmentFault for what cannot be imported.
        """
        tools: list[dict[str, Any]] = self._server.wait_until_ready(self._start_seconds)["tools"]
        return tools

    @property
    def _start_seconds(self) -> float:
        """The seconds in which a process must have read its task, and then have imported everything."""
        if self.config.kind in PACKAGES:
            return PACKAGE_START_SECONDS
        return START_SECONDS

    def reset(self, rows: dict[int, dict[str, Any]], seeds: dict[int, int]) -> dict[int, Reply]:
        """Begin episodes, and return the reply of each. Call `tools` before the first ones.

        Args:
            rows: Number of the episode → what its `reset` gets.
            seeds: Number of the episode → seed of its random numbers.

        Raises EnvironmentFault if a process that has ended cannot be started again.
        """
        if not self._server.is_alive:
            self._replace_server()
        for number in rows:
            process = EnvironmentProcess(self._server, self.config.timeout_seconds)
            self._processes[number] = process
        arguments = {number: {"row": row} for number, row in rows.items()}
        return self._call(arguments, seeds)

    def _replace_server(self) -> None:
        """Start a new process that imports the user's code, after the old one has ended.

        The old one may have been killed for its memory. Its episodes have failed. Raises
        EnvironmentFault if the new one cannot be started.
        """
        # Give the watcher the longest time that this takes: the end of the old process, and
        # the same time each for the new one to read its task and to import.
        heartbeat.alive(EXIT_SECONDS + END_SECONDS + 2 * self._start_seconds)
        self._server.kill()
        # Episodes may be played in a thread that ends before the process does. The pool's do not.
        starting = self._pool.submit(EnvironmentServer, self.config, self.base_dir)
        self._server = starting.result()
        self._server.wait_until_ready(self._start_seconds)

    def step(self, messages: dict[int, dict[str, Any]], seeds: dict[int, int]) -> dict[int, Reply]:
        """Give environments the model's message, and return the reply of each.

        The arguments are as in `reset`.
        """
        arguments = {number: {"message": message} for number, message in messages.items()}
        return self._call(arguments, seeds)

    def finish(self, seeds: dict[int, int]) -> dict[int, Reply]:
        """Tell environments that their episodes have ended, and return the reply of each.

        `seeds`: as in `reset`.
        """
        arguments: dict[int, dict[str, Any]] = {number: {"finish": True} for number in seeds}
        return self._call(arguments, seeds)

    def _call(
        self, arguments: dict[int, dict[str, Any]], seeds: dict[int, int]
    ) -> dict[int, Reply]:
        """Return the reply of each environment to a call."""
        # A call may wait for one before it.
        granted = 2 * (self.config.timeout_seconds + EXIT_SECONDS) + START_SECONDS
        heartbeat.alive(granted)
        pending = {}
        for number, values in arguments.items():
            process = self._processes[number]
            pending[number] = self._pool.submit(process.call, seeds[number], **values)
        replies = {}
        for number, future in pending.items():
            replies[number] = future.result()
            heartbeat.alive(granted)
        return replies

    def end(self, numbers: Sequence[int]) -> None:
        """End the processes of some episodes."""
        for number in numbers:
            process = self._processes.pop(number, None)
            if process is not None:
                process.end()

    def close(self) -> None:
        """End all processes."""
        self._processes.clear()
        self._server.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


def require_installed(config: Environment | None) -> None:
    """Raise EnvironmentFault if the package of an environment is missing. Nothing is imported."""
    if config is not None and config.kind in PACKAGES:
        package, fix = PACKAGES[config.kind]
        require_package(package, f"{WHERE}.kind", fix)


def check_importable(config: Environment, base_dir: Path) -> list[dict[str, Any]]:
    """Check that an environment can be imported, and return the JSON schemas of its tools.

    It is imported in a process that is ended again, because an import may hang or crash. Raises
    ConfigError or EnvironmentFault.
    """
    environments = Environments(config, base_dir)
    try:
        return environments.tools()
    finally:
        environments.close()
