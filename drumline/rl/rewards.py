"""Score episodes by the config's rewards, which separate processes compute. No torch.

An episode is worth the weighted sum of its rewards. A reward fails if it raises, hangs, crashes or
returns no number. The episode's worth is then unknown (NaN), unless that reward has the weight 0, and
the reason is reported. A reward of a group gets all completions of a prompt together, and fails for
all of them. A reward that returns None does not apply to the episode. A process that ended
is replaced. The caller's process runs no code of the user's.

Messages go over a pair of sockets, one line of JSON each. A reward runs in the same process as the
socket's other end and may write on it, so the caller does not trust what it reads.
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
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drumline import errors
from drumline.config.rollouts import (
    EnvironmentReward,
    FunctionReward,
    IsolatedReward,
    LengthReward,
    MathReward,
    ModelReward,
    Reward,
    TaskReward,
    sees_groups,
)
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.foreign import require_package
from drumline.hardware.detect import usable_cores
from drumline.system import heartbeat
from drumline.system.process import start_module, wait_for_exit
from drumline.system.redact import reveal

MOST_WORKERS = 4
# Kind of a reward → the package that it needs.
PACKAGES = {"task": "reasoning_gym", "math": "math_verify"}
# The largest absolute value of a reward. Statistics of rewards are made in fp32: squares of such rewards,
# summed over a rollout, stay below its maximum of 3e38.
LARGEST_REWARD = 1e15
# The most bytes of an answer. The reason of a failure takes a few hundred, and a group's values about
# 25 for each completion.
LONGEST_ANSWER = 2**20
# Seconds in which a process must have imported the modules of its rewards, on a machine that is busy
# training. An import that takes longer counts as hung.
START_SECONDS = 120.0
# Seconds in which the guard must have ended all processes, which takes some hundredths of a second.
END_SECONDS = 10.0
# Seconds to wait for a process that is about to end by itself.
EXIT_SECONDS = 1.0
NOT_ITS_OWN = "wrote on a file descriptor that is not its own, or closed it"
WHERE = "algorithm.rewards"
# The name under which failures of environments are counted beside those of rewards.
ENVIRONMENT = "environment"


class RewardResult(NamedTuple):
    """The result of one reward for one episode."""

    # Without its weight; NaN if the reward does not apply, and if it failed.
    value: float
    # The reason why it failed; None if it did not.
    failure: str | None = None


@dataclass(frozen=True)
class EpisodeText:
    """An episode as text, as rewards read it."""

    prompt: str
    completion: str
    # Number of tokens of the completion.
    tokens: int
    # The other columns of the prompt's row. A prompt of a reasoning-gym task has `task` (its name),
    # `options` (of the task) and `entry` (question, answer, metadata).
    meta: dict[str, Any] = field(default_factory=dict)
    # The sum of the rewards of the episode's environment; NaN if it gave none.
    environment_reward: float = math.nan
    # Why the environment failed, so that the episode has no reward; None if it did not.
    failure: str | None = None
    # All messages of a conversation; None for an episode that is one completion.
    messages: list[dict[str, Any]] | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """What a reward may read besides prompt and completion: `meta`, and `messages` if there are any."""
        if self.messages is None:
            return self.meta
        return {**self.meta, "messages": self.messages}


@dataclass(frozen=True)
class EpisodeScore:
    """The results of all rewards for one episode."""

    # The weighted sum of the rewards that apply; NaN if one of them failed, unless its weight is 0.
    value: float
    # Reward name → value without its weight, NaN if it failed or does not apply.
    parts: dict[str, float]
    # Reward name → short reason; under ENVIRONMENT that of an environment.
    failures: dict[str, str]
    # Whether any reward applies to the episode.
    applies: bool = True
    # The part of `value` that is not the environment's.
    outcome: float = 0.0


def reward_names(configs: Sequence[Reward]) -> list[str]:
    """Return the name of each reward in events.

    It is the reward's `name`, else the name of its function, else its kind. A second reward of the
    same name is called `name.2`.
    """
    names: list[str] = []
    for config in configs:
        if config.name:
            name = config.name
        elif isinstance(config, FunctionReward):
            _, _, name = config.path.rpartition(":")
        else:
            name = config.kind
        free_name = name
        number = 2
        while free_name in names:
            free_name = f"{name}.{number}"
            number += 1
        names.append(free_name)
    return names


def require_installed(configs: Sequence[Reward]) -> None:
    """Check that the rewards' packages and environment variables exist, without importing anything.

    Raises EnvironmentFault for a missing package, ConfigError for a variable in a reward's options
    that is not set. The variables' values are redacted from now on, because reasons may show them.
    """
    for index, config in enumerate(configs):
        where = f"algorithm.rewards[{index}]"
        if config.kind in PACKAGES:
            require_package(PACKAGES[config.kind], where)
        reveal(getattr(config, "options", {}), f"{where}.options")


def check_importable(
    configs: Sequence[Reward], base_dir: Path, columns: Collection[str] | None = None
) -> None:
    """Check that functions can be imported and called, and that rows have the columns they read.

    Functions are imported in a process that is ended again, because an import may hang or crash.
    `require_installed` is called before this.

    Args:
        configs: The rewards of the config.
        base_dir: The folder of the YAML.
        columns: The columns that all rows have; None if they are not known.

    Raises ConfigError or EnvironmentFault.
    """
    functions: dict[int, Reward] = {}
    for index, config in enumerate(configs):
        if columns is not None:
            _check_columns(config, f"algorithm.rewards[{index}]", columns)
        if isinstance(config, FunctionReward):
            functions[index] = config
    if functions:
        sorted_columns = None
        if columns is not None:
            sorted_columns = sorted(columns)
        process = RewardProcess(functions, base_dir, sorted_columns)
        process.wait_until_ready()
        process.kill()


def _check_columns(config: Reward, where: str, columns: Collection[str]) -> None:
    """Raise ConfigError if the rows lack a column that a reward of kind task or math reads."""
    if isinstance(config, TaskReward) and not {"task", "entry"} <= set(columns):
        raise ConfigError(
            "a reward of kind task needs prompts of reasoning-gym tasks",
            where=where,
            fix="take rows of `kind: tasks`, or another reward",
        )
    if isinstance(config, MathReward) and config.column not in columns:
        existing = ", ".join(sorted(columns)) or "none"
        what = f"no row has a column {config.column!r}; there are: {existing}"
        raise ConfigError(what, where=f"{where}.column")


class Rewards:
    """The rewards of a run, on one rank.

    Processes start at once, while the caller goes on. They end with `close`, or with the caller.

    A new kind of reward needs a config class in `config.rollouts` and a branch in
    `reward_worker.scorer`; a package that it needs belongs in `PACKAGES`, and columns that it reads in
    `_check_columns`. If it can be computed in this process, it has a branch in `_compute` instead and
    is left out of `isolated`.
    """

    def __init__(
        self, configs: Sequence[Reward], base_dir: Path, workers: int | None = None
    ) -> None:
        """Start the processes.

        Args:
            configs: The rewards of the config.
            base_dir: The folder of the YAML.
            workers: Number of processes; None: see `_default_workers`.
        """
        require_installed(configs)
        self.configs = list(configs)
        self.names = reward_names(configs)
        # Indices of the rewards that get all completions of a prompt together.
        self.group_indices = [i for i, config in enumerate(configs) if sees_groups(config)]
        self.base_dir = base_dir
        # Rewards that the processes compute, by their index in the config's list.
        self.isolated: dict[int, IsolatedReward] = {}
        for index, config in enumerate(configs):
            if not isinstance(config, LengthReward | ModelReward | EnvironmentReward):
                self.isolated[index] = config
        processes = workers or _default_workers()
        # A thread for each worker: it starts the process, sends its requests, and replaces it.
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="reward")
        self._thread_local = threading.local()
        self._workers: set[RewardProcess] = set()
        self._closed = False
        if self.isolated:
            for _ in range(processes):
                # A failure here happens again in `score`, which raises it.
                self._pool.submit(self._worker)

    @property
    def environment_weight(self) -> float:
        """The weight of the environment's rewards in the sum; 0 without any."""
        weights = [
            reward.weight for reward in self.configs if isinstance(reward, EnvironmentReward)
        ]
        return sum(weights)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, also those that are still importing."""
        self._closed = True
        for worker in list(self._workers):
            worker.process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def score(
        self,
        episodes: Sequence[EpisodeText],
        model_scores: Mapping[str, Sequence[float]] | None = None,
        group_size: int = 1,
    ) -> list[EpisodeScore]:
        """Return the score of each episode, in their order.

        Args:
            episodes: The episodes, group after group.
            model_scores: Name of a reward of kind model → its value for each episode.
            group_size: Number of completions of each prompt.

        Raises EnvironmentFault if no process can be started.
        """
        scores_of_episodes: list[dict[str, float]] = [{} for _ in episodes]
        for name, values in (model_scores or {}).items():
            for index, scores_of_episode in enumerate(scores_of_episodes):
                scores_of_episode[name] = float(values[index])
        # The most seconds of an episode or of a group: each reward may time out, and its process be started again.
        timeouts = sum(config.timeout_seconds for config in self.isolated.values())
        granted = 2 * (START_SECONDS + timeouts)
        heartbeat.alive(granted)
        group_results = self._score_groups(episodes, group_size, granted)
        scores = []
        for score in self._pool.map(
            self._score_episode, episodes, scores_of_episodes, group_results
        ):
            heartbeat.alive(granted)
            scores.append(score)
        return scores

    def _score_groups(
        self, episodes: Sequence[EpisodeText], group_size: int, granted: float
    ) -> list[dict[int, RewardResult]]:
        """Return the results of the rewards of groups for each episode, see `_score_group`.

        `granted`: the most seconds that a group may take.
        """
        if not self.group_indices:
            return [{} for _ in episodes]
        groups = [episodes[i : i + group_size] for i in range(0, len(episodes), group_size)]
        results: list[dict[int, RewardResult]] = []
        for results_of_group in self._pool.map(self._score_group, groups):
            heartbeat.alive(granted)
            results += results_of_group
        return results

    def _score_group(self, group: Sequence[EpisodeText]) -> list[dict[int, RewardResult]]:
        """Compute the rewards of a group in turn, in this thread's process.

        Returns for each episode the index of a reward → its result. Functions do not see episodes whose
        environment failed.
        """
        results: list[dict[int, RewardResult]] = [{} for _ in group]
        seen = [number for number, episode in enumerate(group) if episode.failure is None]
        if not seen:
            return results
        episodes = [group[number] for number in seen]
        for index in self.group_indices:
            config = self.isolated[index]
            worker = self._open_worker()
            answers = worker.score_group(index, episodes, config.timeout_seconds)
            for number, answer in zip(seen, answers, strict=True):
                results[number][index] = answer
        return results

    def _score_episode(
        self,
        episode: EpisodeText,
        model_scores: Mapping[str, float],
        group_results: Mapping[int, RewardResult],
    ) -> EpisodeScore:
        """Return the score of an episode. The rewards that are not known yet are computed in turn.

        Args:
            episode: The episode.
            model_scores: Name of a reward of kind model → its value.
            group_results: Index of a reward of the episode's group → its result for the episode.
        """
        if episode.failure is not None:
            unknown = dict.fromkeys(self.names, math.nan)
            return EpisodeScore(math.nan, unknown, {ENVIRONMENT: episode.failure})
        if not self.configs:
            return EpisodeScore(math.nan, {}, {}, applies=False)
        parts = {}
        failures = {}
        total = 0.0
        outcome = 0.0
        applies = not any(_tells_good_answers(config) for config in self.configs)
        for index, name in enumerate(self.names):
            config = self.configs[index]
            if index in group_results:
                value, failure = group_results[index]
            else:
                value, failure = self._compute(index, episode, model_scores)
            weighted = config.weight * value
            if failure is None and abs(weighted) > LARGEST_REWARD:
                value = math.nan
                failure = f"with its weight it is {weighted:g}, beyond ±{LARGEST_REWARD:g}"
            parts[name] = value
            does_not_apply = failure is None and math.isnan(weighted)
            if does_not_apply:
                continue
            # An episode to which only penalties for length apply counts as one without a reward.
            applies = applies or _tells_good_answers(config)
            if failure is None:
                total += weighted
                if not isinstance(config, EnvironmentReward):
                    outcome += weighted
                continue
            failures[name] = failure
            # A reward of weight 0 is only a metric: without it the sum is still known.
            if config.weight != 0:
                total = math.nan
        return EpisodeScore(total, parts, failures, applies, outcome)

    def _compute(
        self, index: int, episode: EpisodeText, model_scores: Mapping[str, float]
    ) -> RewardResult:
        """Return the result of one reward for an episode."""
        config = self.configs[index]
        if isinstance(config, LengthReward):
            return RewardResult(length_penalty(episode.tokens, config.free, config.limit))
        if isinstance(config, EnvironmentReward):
            return RewardResult(episode.environment_reward)
        if isinstance(config, ModelReward):
            value = model_scores[self.names[index]]
            if math.isfinite(value):
                return RewardResult(value)
            return RewardResult(math.nan, f"returned {value}")
        return self._open_worker().score(index, episode, config.timeout_seconds)

    def _open_worker(self) -> RewardProcess:
        """Return this thread's process. Raises RuntimeError if the rewards were closed."""
        if self._closed:
            raise RuntimeError("the rewards were closed while they were computed")
        return self._worker()

    def _worker(self) -> RewardProcess:
        """Return this thread's process, which is started anew if it has ended."""
        worker: RewardProcess | None = getattr(self._thread_local, "worker", None)
        if worker is not None and worker.is_alive:
            return worker
        if worker is not None:
            self._workers.discard(worker)
        worker = RewardProcess(self.isolated, self.base_dir)
        self._thread_local.worker = worker
        # Before it is ready: `close` ends it in the middle of an import, too.
        self._workers.add(worker)
        if self._closed:
            worker.kill()
            raise RuntimeError("the rewards were closed while a process was started")
        worker.wait_until_ready()
        return worker


def _default_workers() -> int:
    """Return this rank's share of the cores, at least 1 and at most MOST_WORKERS."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own_cores = usable_cores() // local_ranks
    return max(1, min(MOST_WORKERS, own_cores))


def _tells_good_answers(config: Reward) -> bool:
    """Return whether a reward tells good answers from bad ones.

    A penalty for length does not, and neither does a reward of weight 0.
    """
    return not isinstance(config, LengthReward) and config.weight != 0


def length_penalty(tokens: int, free: int, limit: int) -> float:
    """Return the penalty for the length of a completion of `tokens` tokens.

    It is 0 up to `free` tokens and falls linearly to −1 at `limit` tokens (DAPO, Yu et al. 2025, eq. 13).
    """
    excess = max(tokens - free, 0)
    return -min(excess / (limit - free), 1.0)


def count_reasons(reasons: Iterable[str]) -> Counter[str]:
    """Return reason → number of failures of a reward, with similar exceptions counted together.

    The text of an exception may differ from episode to episode (`<object at 0x7f…>`). So reasons that
    begin with the same `raised TYPE in FILE:LINE` are counted together, under the first of them.
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


class MalformedMessage(Exception):
    """The bytes that were received are not a message."""


class Channel:
    """One end of the pair of sockets.

    `longest`: the most bytes of a message that is received; None: no limit.
    """

    def __init__(self, end: socket.socket, longest: int | None = None) -> None:
        self.end = end
        self.longest = longest
        self._unread = bytearray()

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Send a message.

        Raises OSError if the other end is gone, TimeoutError if it does not read.
        """
        self.end.settimeout(seconds)
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the next message.

        Raises TimeoutError if no message comes within `seconds`, EOFError or OSError if the other end
        is gone, MalformedMessage for bytes that are not a message.
        """
        line = self._receive_line(seconds)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise MalformedMessage from None
        if not isinstance(message, dict):
            raise MalformedMessage
        return message

    def _receive_line(self, seconds: float | None) -> bytes:
        """Return the next line. Raises the errors of `receive`."""
        # The deadline is for the whole line, since a sender may write a byte now and then for ever.
        deadline = None
        if seconds is not None:
            deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = None
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
            self.end.settimeout(left)
            received = self.end.recv(2**16)
            if not received:
                raise EOFError
            self._unread += received
            if self.longest is not None and len(self._unread) > self.longest:
                raise MalformedMessage
        line, _, rest = self._unread.partition(b"\n")
        self._unread = rest
        return bytes(line)

    @property
    def is_closed(self) -> bool:
        """Whether the other end is closed."""
        try:
            self.end.settimeout(0)
            return self.end.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class GuardedProcess:
    """A process that runs code of the user's.

    The thread that starts the process must outlive it, because the kernel signals the guard
    (`rl.guard`) when that thread ends. The guard, in a session of its own,
    ends the process and all processes that it has started. Options go through the socket, because
    everybody can read a command line.
    """

    # The module whose `main` the process runs.
    worker: ClassVar[str]
    # What errors call the code, and its key in the config.
    noun: ClassVar[str]
    where: ClassVar[str]

    def __init__(self, task: dict[str, Any], paths: Sequence[str]) -> None:
        """Start the process, which imports nothing yet; `wait_until_ready` comes next.

        Args:
            task: The first message, from which the process knows what to import.
            paths: What it imports, for errors.

        Raises EnvironmentFault if it cannot be started.
        """
        self.task = task
        self.paths = paths
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, LONGEST_ANSWER)
        fd = theirs.fileno()
        try:
            self.process = start_module(
                "drumline.rl.guard", str(os.getpid()), str(fd), self.worker, pass_fds=[fd]
            )
        except OSError as error:
            ours.close()
            raise EnvironmentFault(
                f"a process for {self.noun} cannot be started: {error.strerror}", where=self.where
            ) from error
        finally:
            theirs.close()

    def wait_until_ready(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Have the process import everything, which may take `seconds`, and return its answer.

        If that fails the process is killed. Raises ConfigError or EnvironmentFault for what the
        worker refuses, EnvironmentFault if it ends or hangs.
        """
        try:
            return self._import(seconds)
        except BaseException:
            self.kill()
            raise

    def _import(self, seconds: float) -> dict[str, Any]:
        """Send the first message, and wait until everything is imported."""
        try:
            self.channel.send(self.task, seconds)
            reply = self.channel.receive(seconds)
        except TimeoutError:
            raise EnvironmentFault(
                f"importing {', '.join(self.paths)} takes more than {seconds:g} s",
                where=self.where,
                fix="fix what hangs there",
            ) from None
        except MalformedMessage:
            raise self._failed_start(NOT_ITS_OWN) from None
        except (EOFError, OSError):
            how = describe_exit(wait_for_exit(self.process, END_SECONDS))
            raise self._failed_start(how) from None
        mistake = reply.get("wrong")
        if mistake:
            error_type: type[DrumlineError] = getattr(errors, mistake["kind"])
            raise error_type(mistake["what"], where=mistake["where"], fix=mistake["fix"])
        return reply

    def _failed_start(self, how: str) -> EnvironmentFault:
        """Return the error for a process that ended, or whose socket was misused, at its start."""
        return EnvironmentFault(
            f"a process for {self.noun} {how} while it started",
            where=self.where,
            fix="look for the reason in the rank's log, or above",
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and all processes that it has started, and wait for them."""
        # A process that has closed its end of the socket is about to end by itself.
        if self.channel.is_closed:
            wait_for_exit(self.process, EXIT_SECONDS)
        self.process.terminate()
        if wait_for_exit(self.process, END_SECONDS) is None:
            self.process.kill()
            self.process.wait()
        self.channel.end.close()


class RewardProcess(GuardedProcess):
    """A process that computes some rewards."""

    worker = "drumline.rl.reward_worker"
    noun = "rewards"
    where = WHERE

    def __init__(
        self,
        rewards: Mapping[int, Reward],
        base_dir: Path,
        columns: list[str] | None = None,
    ) -> None:
        """Start the process, which imports nothing yet; `wait_until_ready` comes next.

        Args:
            rewards: Index in the config's list → reward.
            base_dir: The folder of the YAML.
            columns: The columns of the rows, if functions are to be checked against them; else None.

        Raises EnvironmentFault if it cannot be started.
        """
        dumped = {index: reward.model_dump(mode="json") for index, reward in rewards.items()}
        task = {"base_dir": str(base_dir), "columns": columns, "rewards": dumped}
        paths = [getattr(reward, "path", reward.kind) for reward in rewards.values()]
        super().__init__(task, paths)

    def score(self, index: int, episode: EpisodeText, timeout_seconds: float) -> RewardResult:
        """Return the result of a reward for an episode.

        A process that is late or ends is killed: `is_alive` is False then.

        Args:
            index: The reward's index in the config's list.
            episode: The episode.
            timeout_seconds: The most seconds that the reward may take.
        """
        request = {
            "index": index,
            "prompt": episode.prompt,
            "completion": episode.completion,
            "meta": episode.columns,
        }
        value, failure = self._ask(request, timeout_seconds)
        return _to_result(value, failure)

    def score_group(
        self, index: int, episodes: Sequence[EpisodeText], timeout_seconds: float
    ) -> list[RewardResult]:
        """Return the result of a reward of a group for each episode of a prompt.

        Conversations are a column `messages`, a list with the messages of each. A process that is late
        or ends is killed, as in `score`.

        Args:
            index: The reward's index in the config's list.
            episodes: The episodes, at least one.
            timeout_seconds: The most seconds that the reward may take for all of them.
        """
        first = episodes[0]
        columns = dict(first.meta)
        if first.messages is not None:
            columns["messages"] = [episode.messages for episode in episodes]
        request = {
            "index": index,
            "prompt": first.prompt,
            "completion": [episode.completion for episode in episodes],
            "meta": columns,
        }
        values, failure = self._ask(request, timeout_seconds)
        if failure is not None:
            values = [None] * len(episodes)
        return [_to_result(value, failure) for value in values]

    def _ask(self, request: dict[str, Any], timeout_seconds: float) -> tuple[Any, str | None]:
        """Return the value in the answer to a request, and the reason if the reward failed."""
        # A reward that writes on the socket does not know the token. So it cannot forge an answer, and
        # an answer is never taken for that of another request.
        token = secrets.token_hex(8)
        try:
            self.channel.send({"token": token, **request}, timeout_seconds)
            reply = self.channel.receive(timeout_seconds)
            if reply.get("token") != token:
                raise MalformedMessage
            return reply.get("value"), reply.get("failure")
        except TimeoutError:
            failure = f"timed out after {timeout_seconds:g} s"
        except (EOFError, OSError):
            failure = describe_exit(wait_for_exit(self.process, EXIT_SECONDS))
        except MalformedMessage:
            failure = NOT_ITS_OWN
        self.kill()
        return None, failure


def _to_result(value: float | None, failure: str | None) -> RewardResult:
    """Return an answer of a process as a result. None: the reward does not apply, or failed."""
    if value is None:
        return RewardResult(math.nan, failure)
    return RewardResult(value, failure)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, by its exit code.

    None: it still runs, although its end of the socket is closed.
    """
    if code is None:
        return NOT_ITS_OWN
    if code >= 0:
        return f"ended its process (exit code {code})"
    number = -code
    name = f"signal {number}"
    if number in signal.valid_signals():
        name = signal.Signals(number).name
    return f"crashed its process ({name})"
