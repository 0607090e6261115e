"""The process that computes rewards, a child of `guard`. It imports no torch.

It receives the rewards' settings over its socket, answers whether they could be loaded, then answers
one request at a time:

    {"token": …, "index": which reward, "prompt": str, "completion": str, "meta": {}}
    →  {"token": …, "value": float}, {"token": …, "value": null} (it does not apply),
       or {"token": …, "failure": reason}

For a reward of a group "completion" is the list of the prompt's completions, and "value" a list with
a number or null for each.

What a reward prints goes to standard error. A reward may do anything here: the process at the other
end of the socket watches the time.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from drumline.config.registry import find_function
from drumline.config.rollouts import (
    FunctionReward,
    MathReward,
    RegexReward,
    Reward,
    TaskReward,
    text_argument,
)
from drumline.errors import ConfigError, DrumlineError
from drumline.foreign import class_and_line, import_quietly
from drumline.rl.rewards import LARGEST_REWARD, Channel
from drumline.system.redact import redact, redacted_streams, reveal

NICENESS = 10
LONGEST_REASON = 200
FIX = "write module:function or file.py:function, or install the package that has it"
# Tasks whose verifiers compare boards with ==. A board is made of tuples, which JSON turned into lists.
TUPLES = ("arc_agi", "rearc")
# What marks a formula as LaTeX in an answer.
LATEX_SIGNS = ("$", "\\boxed", "\\(", "\\[")
# Arguments: prompt, completion (of a reward of a group: a list of them), meta of the row. May return
# anything; `_answer` checks it.
Scorer = Callable[[str, Any, dict[str, Any]], Any]
# What a worker loads before it serves.
T = TypeVar("T")


@redacted_streams()
def main(fd: int) -> None:
    """Serve requests from the socket `fd` until its other end is closed."""
    channel = open_channel(fd)
    scorers = load_or_refuse(channel, _load_scorers)
    if scorers is None:
        return
    channel.send({"ready": True})
    with suppress(EOFError):  # the parent closed its end
        while True:
            request = channel.receive()
            score = scorers[request["index"]]
            answer = _answer(score, request)
            channel.send({"token": request["token"], **answer})


def open_channel(fd: int) -> Channel:
    """Return the channel of a worker that runs code of a user's, and lower its priority."""
    os.nice(NICENESS)
    channel = Channel(socket.socket(fileno=fd))
    # Processes that the code starts must not hold the socket open.
    channel.end.set_inheritable(False)
    return channel


def load_or_refuse(channel: Channel, load: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `load` makes of the first message; None if it cannot, which the answer says."""
    try:
        return load(channel.receive())
    except DrumlineError as error:
        mistake = {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
        channel.send({"wrong": mistake})
        return None


def _load_scorers(task: dict[str, Any]) -> dict[int, Scorer]:
    """Return index → scorer of the rewards in the first message. Raises the errors of `scorer`."""
    adapter = TypeAdapter(dict[int, Reward])
    rewards: dict[int, Reward] = adapter.validate_python(task["rewards"])
    base_dir = Path(task["base_dir"])
    scorers = {}
    for index, reward in rewards.items():
        where = f"algorithm.rewards[{index}]"
        scorers[index] = scorer(reward, base_dir, where, task["columns"])
    return scorers


def _answer(score: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request: `value`, or `failure`, the reason.

    The value is a number, or null if the reward does not apply; for several completions a list of them.
    """
    completion = request["completion"]
    try:
        returned = score(request["prompt"], completion, request["meta"])
        if isinstance(completion, list):
            return _check_values(returned, len(completion))
        return _check_value(returned)
    except BaseException as error:  # noqa: BLE001 — SystemExit and KeyboardInterrupt of a reward are failures like others
        reason = redact(f"{class_and_line(error)}: {error}")
        return {"failure": f"raised {reason}"[:LONGEST_REASON]}


def _check_values(returned: Any, number: int) -> dict[str, Any]:
    """Return the answer for what a reward of a group returned for `number` completions.

    It must be a list or a tuple, or have `tolist` as arrays do. One wrong value fails for all.
    """
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return {"failure": f"returned a {type(returned).__name__}, not a list of numbers"}
    if len(returned) != number:
        return {"failure": f"returned {len(returned)} values for {number} completions"}
    values = []
    for index, item in enumerate(returned):
        answer = _check_value(item)
        if "failure" in answer:
            return {"failure": f"{answer['failure']} for completion {index + 1} of {number}"}
        values.append(answer["value"])
    return {"value": values}


def _check_value(returned: Any) -> dict[str, Any]:
    """Return the answer for what a reward returned for a completion.

    A number is anything with a method `__float__`, and must lie within ±LARGEST_REWARD. None says that
    the reward does not apply. Raises what `__float__` raises.
    """
    if returned is None:
        return {"value": None}
    if not hasattr(returned, "__float__"):  # text has none
        return {"failure": f"returned a {type(returned).__name__}, not a number"}
    value = float(returned)
    if abs(value) <= LARGEST_REWARD:
        return {"value": value}
    if math.isfinite(value):
        return {"failure": f"returned {value}, beyond ±{LARGEST_REWARD:g}"}
    return {"failure": f"returned {value}"}


def scorer(reward: Reward, base_dir: Path, where: str, columns: list[str] | None = None) -> Scorer:
    """Return the function that computes a reward of any kind but length, model and environment.

    Args:
        reward: The section of the config.
        base_dir: The folder that a function's file is relative to.
        where: The reward's key in the config, for errors.
        columns: The columns of the rows; a function that requires others is refused. None: they are
            not known.

    Raises ConfigError for a function that cannot be found or called.
    """
    if isinstance(reward, FunctionReward):
        return _function_scorer(reward, base_dir, where, columns)
    if isinstance(reward, TaskReward):
        return _task_scorer(reward)
    if isinstance(reward, MathReward):
        return _math_scorer(reward)
    assert isinstance(reward, RegexReward), reward.kind
    return _regex_scorer(reward)


def _regex_scorer(reward: RegexReward) -> Scorer:
    """Return a function that gives 1 to a completion that the pattern matches, else 0."""
    pattern = re.compile(reward.pattern)
    find = pattern.search
    if reward.full:
        find = pattern.fullmatch

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> float:
        is_match = find(completion) is not None
        return float(is_match)

    return score


def _function_scorer(
    reward: FunctionReward, base_dir: Path, where: str, columns: list[str] | None
) -> Scorer:
    """Return a function that calls the user's function with the columns of the row that it accepts.

    Options of the config win over columns of the same name. Raises ConfigError.
    """
    function = find_function(reward.path, "rewards", base_dir, f"{where}.path", "a reward", FIX)
    options = reveal(reward.options, f"{where}.options")
    accepted = _accepted_columns(function, reward, options, f"{where}.path", columns)
    text_name = text_argument(reward)

    def score(prompt: str, completion: Any, meta: dict[str, Any]) -> Any:
        arguments = {}
        for name, value in meta.items():
            if accepted is None or name in accepted:
                arguments[name] = value
        arguments.update(options)
        arguments["prompt"] = prompt
        arguments[text_name] = completion
        return function(**arguments)

    return score


def _accepted_columns(
    function: Callable[..., Any],
    reward: FunctionReward,
    options: dict[str, Any],
    where: str,
    columns: list[str] | None,
) -> frozenset[str] | None:
    """Return the names of the columns that a reward's function accepts; None: all.

    Args:
        function: The user's function.
        reward: The section of the config.
        options: The options of the function in the config, with their secrets.
        where: The key of the path, for errors.
        columns: The columns of the rows; None: they are not known.

    Raises ConfigError if the function cannot be called with prompt, completion, the options and the columns.
    """
    path = reward.path
    text_name = text_argument(reward)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{path} is async; a reward is a plain function", where=where)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return None
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given: dict[str, Any] = {"prompt": "", text_name: "", **options}
    try:
        # Options that the function does not take are a mistake, whatever the rows have.
        signature.bind_partial(**given)
        if columns is not None:
            arguments: dict[str, Any] = {}
            for name in columns:
                if takes_all or name in parameters:
                    arguments[name] = None
            signature.bind(**{**arguments, **given})
    except TypeError as error:
        rows = ""
        if columns is not None:
            rows = f" and the rows' columns ({', '.join(columns) or 'none'})"
        fix = f"define it as f(prompt, {text_name}, **columns)"
        what = f"{path}{signature} cannot be called with {', '.join(given)}{rows}: {error}"
        raise ConfigError(what, where=where, fix=fix) from error
    if takes_all:
        return None
    return frozenset(parameters)


def _task_scorer(reward: TaskReward) -> Scorer:
    """Return a function that scores an answer by the verifier of its row's reasoning-gym task.

    With a pattern the answer is the first group of its last match; without a match it scores 0.
    """
    reasoning_gym = import_quietly("reasoning_gym")
    pattern = None
    if reward.pattern:
        pattern = re.compile(reward.pattern)

    # The options as JSON, because a dictionary cannot be a key of the cache.
    @lru_cache(maxsize=256)
    def dataset(name: str, options: str) -> Any:
        return reasoning_gym.create_dataset(name, **json.loads(options))

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> Any:
        name = meta["task"]
        entry = meta["entry"]
        answer = completion
        if pattern is not None:
            matches = [match.group(1) for match in pattern.finditer(completion)]
            # A group of an alternative that did not match is None.
            if not matches or matches[-1] is None:
                return 0.0
            answer = matches[-1]
        if name in TUPLES:
            entry = _convert_to_tuples(entry)
        options = json.dumps(meta.get("options") or {})
        verifier = dataset(name, options)
        try:
            return verifier.score_answer(answer.strip(), entry)
        except Exception:  # noqa: BLE001 — a strange answer makes verifiers raise anything
            # The right answer raises, too, if the cause is not this answer but the entry.
            verifier.score_answer(entry["answer"], entry)
            return 0.0

    return score


def _convert_to_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: _convert_to_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_convert_to_tuples(item) for item in value)
    return value


def _math_scorer(reward: MathReward) -> Scorer:
    """Return a function that gives 1 to a completion whose formula equals the row's, else 0.

    It raises ValueError for a row whose column holds no formula.
    """
    from math_verify import parse, verify

    # It warns at each call without a timeout. The rank limits the time of this process.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    @lru_cache(maxsize=1024)
    def parse_gold(text: str) -> Any:
        """Parse the right answer. Raises ValueError if it has no formula.

        math_verify parses a formula as LaTeX only between dollars. Without them it would take one
        number of the formula for the whole.
        """
        texts = [text, f"${text}$"]
        if not any(sign in text for sign in LATEX_SIGNS):
            texts.reverse()
        for candidate in texts:
            parsed = parse(candidate, parsing_timeout=None)
            if parsed:
                return parsed
        raise ValueError(f"column {reward.column!r} holds no formula: {text[:60]!r}")

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> Any:
        value = meta[reward.column]
        if value is None:
            raise ValueError(f"column {reward.column!r} is empty")
        gold = parse_gold(str(value))
        answer = parse(completion, parsing_timeout=None)
        return float(verify(gold, answer, timeout_seconds=None))

    return score
