"""One process of rewards as its parent sees it: started, given requests, and killed when it is late. No torch.

Messages go over a pair of sockets, one line of JSON each. A reward shares its process with one end, and may write on any file descriptor
there: what the rank reads is not trusted.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Any

from drumline import errors
from drumline.core.process import exit_code, start_module
from drumline.core.rollouts import Reward
from drumline.errors import DrumlineError, EnvironmentFault

LONGEST_ANSWER = 2**20  # bytes; a reward's value or its reason take a few hundred
# Importing what rewards need, on a machine that is busy training. A module that takes longer hangs.
START_SECONDS = 120.0
END_SECONDS = 10.0  # that the guard has to end everything; it takes some hundredths
NOT_ITS_OWN = "wrote on a file descriptor that is not its own, or closed it"
WHERE = "algorithm.rewards"
Rewarded = tuple[float, str | None]  # a value, NaN with the reason where there is none


class Garbled(Exception):
    """What came is no message."""


class Channel:
    """One end. `longest`: bytes of a message that is read; None: any."""

    def __init__(self, end: socket.socket, longest: int | None = None) -> None:
        self.end, self.longest = end, longest
        self._rest = bytearray()

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Raises OSError where the other end is gone, TimeoutError where it does not read."""
        self.end.settimeout(seconds)
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next one. Raises TimeoutError where none comes within `seconds`, EOFError or OSError where the other end is gone, Garbled."""
        until = None if seconds is None else time.monotonic() + seconds
        while (size := self._rest.find(b"\n")) < 0:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.end.settimeout(left)
            more = self.end.recv(2**16)
            if not more:
                raise EOFError
            self._rest += more
            if self.longest is not None and len(self._rest) > self.longest:
                raise Garbled
        line = bytes(self._rest[:size])
        del self._rest[: size + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Garbled from None
        if not isinstance(message, dict):
            raise Garbled
        return message

    @property
    def ended(self) -> bool:
        """Whether the other end is closed."""
        try:
            self.end.settimeout(0)
            return self.end.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class Isolated:
    """A worker process that has built some rewards (`rewards`: place in the config's list → reward).

    One thread starts it and sends its requests, and must outlive it: the kernel signals the guard when that thread ends (`guard`), and the
    guard, in a session of its own, ends the rewards and all that they have started. Options go through the socket: a command line is
    for all to read.
    """

    def __init__(
        self, rewards: dict[int, Reward], base_dir: Path, columns: list[str] | None = None, start_seconds: float = START_SECONDS
    ) -> None:
        """`columns`: those that rows have, where a function is to be checked against them.

        Raises ConfigError or EnvironmentFault for what the worker refuses, EnvironmentFault where it cannot be started."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, LONGEST_ANSWER)
        try:
            self.process = start_module("drumline.rl.guard", str(os.getpid()), str(theirs.fileno()), keeps=[theirs.fileno()])
        except OSError as error:
            ours.close()
            raise EnvironmentFault(f"a process for rewards cannot be started: {error.strerror}", where=WHERE) from error
        finally:
            theirs.close()
        dumped = {index: reward.model_dump(mode="json") for index, reward in rewards.items()}
        try:
            self._start({"base_dir": str(base_dir), "columns": columns, "rewards": dumped}, rewards, start_seconds)
        except BaseException:
            self.kill()
            raise

    def _start(self, task: dict[str, Any], rewards: dict[int, Reward], seconds: float) -> None:
        """Hand the options over, and wait until everything is imported."""
        try:
            self.channel.send(task, seconds)
            reply = self.channel.receive(seconds)
        except TimeoutError:
            paths = ", ".join(getattr(reward, "path", reward.kind) for reward in rewards.values())
            raise EnvironmentFault(f"importing {paths} takes more than {seconds:g} s", where=WHERE, fix="mend what hangs there") from None
        except (EOFError, OSError, Garbled) as error:
            how = NOT_ITS_OWN if isinstance(error, Garbled) else ending(exit_code(self.process, END_SECONDS))
            fix = "look for the reason in the rank's log, or above"
            raise EnvironmentFault(f"a process for rewards {how} while it started", where=WHERE, fix=fix) from None
        if mistake := reply.get("wrong"):
            kind: type[DrumlineError] = getattr(errors, mistake["kind"])
            raise kind(mistake["what"], where=mistake["where"], fix=mistake["fix"])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def score(self, index: int, prompt: str, completion: str, meta: dict[str, Any], timeout_seconds: float) -> Rewarded:
        """One reward of one completion. A process that is late or ends is killed: `alive` is False then."""
        # A reward that writes on the socket does not know it, so an answer can neither be made up nor taken for that of another.
        token = secrets.token_hex(8)
        request = {"token": token, "index": index, "prompt": prompt, "completion": completion, "meta": meta}
        try:
            self.channel.send(request, timeout_seconds)
            reply = self.channel.receive(timeout_seconds)
            if reply.get("token") != token:
                raise Garbled
            return reply.get("value", math.nan), reply.get("failure")
        except TimeoutError:
            failure = f"timed out after {timeout_seconds:g} s"
        except (EOFError, OSError):
            failure = ending(exit_code(self.process, 1.0))
        except Garbled:
            failure = NOT_ITS_OWN
        self.kill()
        return math.nan, failure

    def kill(self) -> None:
        """End the process and what its rewards have started, and wait for it."""
        exit_code(self.process, 1.0 if self.channel.ended else 0.0)  # it may be about to end by itself
        self.process.terminate()
        if exit_code(self.process, END_SECONDS) is None:
            self.process.kill()
            self.process.wait()
        self.channel.end.close()


def ending(code: int | None) -> str:
    """How a process ended, by its exit code; None: it runs, although its end of the socket is closed."""
    if code is None:
        return NOT_ITS_OWN
    if code >= 0:
        return f"ended its process (exit code {code})"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"crashed its process ({name})"
