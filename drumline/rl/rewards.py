"""What an episode is worth: the rewards of the config, computed in processes of their own and summed with their weights. No torch.

A reward that raises, hangs, crashes or returns no number costs its sample that part alone: the part
is NaN, counts as 0 in the sum, and its reason is reported. A reward that returns None does not
apply to the sample: the others decide. A process that was taken along is replaced. Nothing but
arithmetic is run in the caller's process.

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
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from drumline import errors
from drumline.core import heartbeat
from drumline.core.process import exit_code, start_module
from drumline.core.redact import reveal
from drumline.core.rollouts import (
    FunctionReward,
    LengthReward,
    MathReward,
    ModelReward,
    Reward,
    TaskReward,
)
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.foreign import require_package
from drumline.hardware.detect import usable_cores

MOST_WORKERS = 4
PACKAGES = {"task": "reasoning_gym", "math": "math_verify"}
# Statistics of rewards are made in fp32: their squares, summed over a rollout, stay below its 3e38.
LARGEST = 1e15
LONGEST_ANSWER = 2**20  # bytes; a reward's value or its reason take a few hundred
# Importing what rewards need, on a machine that is busy training. A module that takes longer hangs.
START_SECONDS = 120.0
END_SECONDS = 10.0  # that the guard has to end everything; it takes some hundredths
NOT_ITS_OWN = "wrote on a file descriptor that is not its own, or closed it"
WHERE = "algorithm.rewards"
# A value and None; NaN and None if the reward does not apply; NaN and the reason if it failed.
Rewarded = tuple[float, str | None]


@dataclass(frozen=True)
class Item:
    """One episode. `tokens`: length of the completion. `meta`: what came with its prompt: the other columns of the row, and for a prompt
    of a reasoning-gym task `task` (its name), `options` (of the task) and `entry` (question, answer, metadata)."""

    prompt: str
    completion: str
    tokens: int
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """What one episode is worth.

    `value`: the weighted sum of the parts that are numbers. `parts`: reward name → value without
    its weight, NaN if it failed or does not apply. `failures`: reward name → short reason.
    `applies`: whether any reward applies to the episode.
    """

    value: float
    parts: dict[str, float]
    failures: dict[str, str]
    applies: bool = True


def reward_names(configs: Sequence[Reward]) -> list[str]:
    """What each reward is called in events: its `name`, else its function's or its kind; a second one of the same name is `name.2`."""
    names: list[str] = []
    for config in configs:
        name = config.name or (
            config.path.rpartition(":")[2] if isinstance(config, FunctionReward) else config.kind
        )
        numbered = (f"{name}.{number}" for number in count(2))
        names.append(
            name if name not in names else next(free for free in numbered if free not in names)
        )
    return names


def require(configs: Sequence[Reward]) -> None:
    """Raises EnvironmentFault for a package that is missing (nothing is imported), ConfigError for a variable of their options that is not
    set here; the values are redacted from now on: reasons name them."""
    for index, config in enumerate(configs):
        where = f"algorithm.rewards[{index}]"
        if config.kind in PACKAGES:
            require_package(PACKAGES[config.kind], where)
        reveal(getattr(config, "options", {}), f"{where}.options")


def check(
    configs: Sequence[Reward], base_dir: Path, columns: Collection[str] | None = None
) -> None:
    """Raises ConfigError or EnvironmentFault for rewards that `require` lets pass and that cannot be computed, before anything is started
    for training.

    Functions are imported in a process that is ended again: an import may hang or crash. `columns`: those that rows have, where known.
    """
    for index, config in enumerate(configs):
        where = f"algorithm.rewards[{index}]"
        if (
            columns is not None
            and isinstance(config, TaskReward)
            and not {"task", "entry"} <= set(columns)
        ):
            fix = "take rows of `kind: tasks`, or another reward"
            raise ConfigError(
                "a reward of kind task needs prompts of reasoning-gym tasks", where=where, fix=fix
            )
        if columns is not None and isinstance(config, MathReward) and config.column not in columns:
            there = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"no row has a column {config.column!r}; there are: {there}",
                where=f"{where}.column",
            )
    functions: dict[int, Reward] = {
        index: config for index, config in enumerate(configs) if isinstance(config, FunctionReward)
    }
    if functions:
        Isolated(functions, base_dir, None if columns is None else sorted(columns)).kill()


class Rewards:
    """The rewards of a run, on one rank. Processes start at once, while the caller goes on; they end with `close`, or with the caller."""

    def __init__(
        self, configs: Sequence[Reward], base_dir: Path, workers: int | None = None
    ) -> None:
        """`base_dir`: folder of the YAML. `workers`: processes; None: one a core that this rank may count its own, at most MOST_WORKERS."""
        require(configs)
        self.configs, self.names, self.base_dir = list(configs), reward_names(configs), base_dir
        self.isolated: dict[int, Reward] = {
            index: config
            for index, config in enumerate(configs)
            if not isinstance(config, LengthReward | ModelReward)
        }
        # A thread for each worker: it starts the process, sends its requests, and replaces it.
        processes = workers or max(
            1, min(MOST_WORKERS, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="reward")
        self._own = threading.local()
        self._workers: set[Isolated] = set()
        self._closed = False
        if self.isolated:
            for _ in range(processes):
                # What goes wrong here goes wrong again, and is raised, in `score`.
                self._pool.submit(self._worker)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        for worker in list(self._workers):
            worker.process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def score(
        self, items: Sequence[Item], given: Mapping[str, Sequence[float]] | None = None
    ) -> list[Scored]:
        """What each item is worth, in their order. `given`: the values of rewards of kind model, by reward name, each as long as `items`.

        Raises EnvironmentFault where no process can be started.
        """
        by_item = [
            {name: float(values[place]) for name, values in (given or {}).items()}
            for place in range(len(items))
        ]
        # A process that is late is killed, and another one started: these are the limits here.
        granted = 2 * (
            START_SECONDS + sum(config.timeout_seconds for config in self.isolated.values())
        )
        scored = []
        heartbeat.alive(granted)
        for one in self._pool.map(self._scored, items, by_item):
            heartbeat.alive(granted)
            scored.append(one)
        return scored

    def _scored(self, item: Item, given: Mapping[str, float]) -> Scored:
        """All rewards of an item, in turn, the isolated ones in this thread's process."""
        parts, failures, value = {}, {}, 0.0
        applies = not any(map(_decides, self.configs))
        for index, (name, config) in enumerate(zip(self.names, self.configs, strict=True)):
            failure: str | None = None
            if isinstance(config, LengthReward):
                parts[name] = overlong(item.tokens, config.free, config.limit)
            elif isinstance(config, ModelReward):
                parts[name], failure = (
                    (given[name], None)
                    if math.isfinite(given[name])
                    else (math.nan, f"returned {given[name]}")
                )
            elif self._closed:
                raise RuntimeError("the rewards were closed while they were computed")
            else:
                parts[name], failure = self._worker().score(
                    index, item.prompt, item.completion, item.meta, config.timeout_seconds
                )
            weighted = config.weight * parts[name]
            if failure is None and abs(weighted) > LARGEST:
                parts[name] = math.nan
                failure = f"with its weight it is {weighted:g}, beyond ±{LARGEST:g}"
            does_not_apply = failure is None and math.isnan(weighted)
            if does_not_apply:
                continue
            # A penalty for length, or a reward of weight 0, does not make up for all the others not applying.
            applies = applies or _decides(config)
            if failure is None:
                value += weighted
            else:
                failures[name] = failure
        return Scored(value, parts, failures, applies)

    def _worker(self) -> Isolated:
        worker: Isolated | None = getattr(self._own, "worker", None)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self._workers.discard(worker)
        self._own.worker = worker = Isolated(self.isolated, self.base_dir)
        self._workers.add(worker)
        return worker


def _decides(config: Reward) -> bool:
    """Return whether a reward can say how good an answer is: not a penalty for length, and not one of weight 0."""
    return not isinstance(config, LengthReward) and config.weight != 0


def overlong(tokens: int, free: int, limit: int) -> float:
    """0 up to `free` tokens, then linearly down to −1 at `limit` (DAPO, Yu et al. 2025, equation 13)."""
    return -min(max(tokens - free, 0) / (limit - free), 1.0)


def count_reasons(reasons: Iterable[str]) -> Counter[str]:
    """Count the failures of a reward by type and place, each group under the first reason met.

    The text of an exception may differ from episode to episode (`<object at 0x7f…>`); reasons that
    begin with the same `raised TYPE in FILE:LINE` are one group.
    """
    labels: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        group = reason
        if reason.startswith("raised "):
            group = reason.partition(": ")[0]
        label = labels.setdefault(group, reason)
        counts[label] += 1
    return counts


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
        self,
        rewards: dict[int, Reward],
        base_dir: Path,
        columns: list[str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`columns`: those that rows have, where a function is to be checked against them.

        Raises ConfigError or EnvironmentFault for what the worker refuses, EnvironmentFault where it cannot be started."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, LONGEST_ANSWER)
        try:
            self.process = start_module(
                "drumline.rl.guard", str(os.getpid()), str(theirs.fileno()), keeps=[theirs.fileno()]
            )
        except OSError as error:
            ours.close()
            raise EnvironmentFault(
                f"a process for rewards cannot be started: {error.strerror}", where=WHERE
            ) from error
        finally:
            theirs.close()
        dumped = {index: reward.model_dump(mode="json") for index, reward in rewards.items()}
        try:
            self._start(
                {"base_dir": str(base_dir), "columns": columns, "rewards": dumped},
                rewards,
                start_seconds,
            )
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
            raise EnvironmentFault(
                f"importing {paths} takes more than {seconds:g} s",
                where=WHERE,
                fix="mend what hangs there",
            ) from None
        except (EOFError, OSError, Garbled) as error:
            how = (
                NOT_ITS_OWN
                if isinstance(error, Garbled)
                else ending(exit_code(self.process, END_SECONDS))
            )
            fix = "look for the reason in the rank's log, or above"
            raise EnvironmentFault(
                f"a process for rewards {how} while it started", where=WHERE, fix=fix
            ) from None
        if mistake := reply.get("wrong"):
            kind: type[DrumlineError] = getattr(errors, mistake["kind"])
            raise kind(mistake["what"], where=mistake["where"], fix=mistake["fix"])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def score(
        self, index: int, prompt: str, completion: str, meta: dict[str, Any], timeout_seconds: float
    ) -> Rewarded:
        """One reward of one completion. A process that is late or ends is killed: `alive` is False then."""
        # A reward that writes on the socket does not know it, so an answer can neither be made up nor taken for that of another.
        token = secrets.token_hex(8)
        request = {
            "token": token,
            "index": index,
            "prompt": prompt,
            "completion": completion,
            "meta": meta,
        }
        try:
            self.channel.send(request, timeout_seconds)
            reply = self.channel.receive(timeout_seconds)
            if reply.get("token") != token:
                raise Garbled
            value = reply.get("value")
            return math.nan if value is None else value, reply.get("failure")
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
        # It may be about to end by itself.
        exit_code(self.process, 1.0 if self.channel.ended else 0.0)
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
