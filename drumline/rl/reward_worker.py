"""The process in which rewards run, a child of `guard`. No torch.

It gets the rewards over its socket, answers once whether they loaded, then answers one request at a time:

    {"token": …, "index": which reward, "prompt": str, "completion": str, "meta": {}}
    →  {"token": …, "value": float}, {"token": …, "value": null} (it does not apply),
       or {"token": …, "failure": reason}

What a reward prints goes to standard error. A reward may do anything here: the other side of the socket keeps the time.
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
from typing import Any

from pydantic import TypeAdapter

from drumline.core.redact import redact, redacted_streams, reveal
from drumline.core.registry import find_function
from drumline.core.rollouts import FunctionReward, MathReward, RegexReward, Reward, TaskReward
from drumline.errors import ConfigError, DrumlineError
from drumline.foreign import class_and_line, import_quietly
from drumline.rl.rewards import LARGEST, Channel

NICENESS = 10
LONGEST_REASON = 200
FIX = "write module:function or file.py:function, or install the package that has it"
# The verifiers of these compare boards with ==, and a board consists of tuples, which JSON has made lists.
TUPLES = ("arc_agi", "rearc")
# (prompt, completion, meta of the row) → anything; `_answer` makes a number of it.
Scorer = Callable[[str, str, dict[str, Any]], Any]


@redacted_streams()
def main(fd: int) -> None:
    """Serve until the other end of the socket is closed."""
    os.nice(NICENESS)
    channel = Channel(socket.socket(fileno=fd))
    channel.end.set_inheritable(False)  # what a reward starts must not hold the socket open
    try:
        task = channel.receive()
        rewards: dict[int, Reward] = TypeAdapter(dict[int, Reward]).validate_python(task["rewards"])
        base, columns = Path(task["base_dir"]), task["columns"]
        scorers = {
            index: scorer(reward, base, f"algorithm.rewards[{index}]", columns)
            for index, reward in rewards.items()
        }
    except DrumlineError as error:
        channel.send(
            {
                "wrong": {
                    "kind": type(error).__name__,
                    "what": error.what,
                    "where": error.where,
                    "fix": error.fix,
                }
            }
        )
        return
    channel.send({"ready": True})
    with suppress(EOFError):  # the parent closed its end
        while True:
            request = channel.receive()
            channel.send({"token": request["token"], **_answer(scorers[request["index"]], request)})


def _answer(score: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """Return a number within ±LARGEST, null if the reward does not apply, or why there is none.

    Any type that turns into a float by itself is a number.
    """
    try:
        returned = score(request["prompt"], request["completion"], request["meta"])
        if returned is None:
            return {"value": None}
        if not hasattr(returned, "__float__"):  # text has none
            return {"failure": f"returned a {type(returned).__name__}, not a number"}
        value = float(returned)
    except BaseException as error:  # noqa: BLE001 — SystemExit and KeyboardInterrupt of a reward are failures like others
        return {"failure": f"raised {redact(f'{class_and_line(error)}: {error}')}"[:LONGEST_REASON]}
    if abs(value) <= LARGEST:
        return {"value": value}
    return {
        "failure": f"returned {value}" + (f", beyond ±{LARGEST:g}" if math.isfinite(value) else "")
    }


def scorer(reward: Reward, base_dir: Path, where: str, columns: list[str] | None = None) -> Scorer:
    """`columns`: those that rows have, where that is known: a function that requires others is refused.

    Raises ConfigError for a function that cannot be found or called."""
    if isinstance(reward, FunctionReward):
        return _function(reward, base_dir, where, columns)
    if isinstance(reward, TaskReward):
        return _task(reward)
    if isinstance(reward, MathReward):
        return _math(reward)
    assert isinstance(reward, RegexReward), reward.kind
    pattern = re.compile(reward.pattern)
    find = pattern.fullmatch if reward.full else pattern.search
    return lambda prompt, completion, meta: float(find(completion) is not None)


def _function(
    reward: FunctionReward, base_dir: Path, where: str, columns: list[str] | None
) -> Scorer:
    function = find_function(reward.path, "rewards", base_dir, f"{where}.path", "a reward", FIX)
    reward = reward.model_copy(update={"options": reveal(reward.options, f"{where}.options")})
    takes = _takes(function, reward, where, columns)

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> Any:
        taken = {name: value for name, value in meta.items() if takes is None or name in takes}
        return function(**{**taken, **reward.options, "prompt": prompt, "completion": completion})

    return score


def _takes(
    function: Callable[..., Any], reward: FunctionReward, where: str, columns: list[str] | None
) -> frozenset[str] | None:
    """The names of the columns that may be handed over; None: all. Raises ConfigError where it cannot be called as it will be."""
    where = f"{where}.path"
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{reward.path} is async; a reward is a plain function", where=where)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given: dict[str, Any] = {"prompt": "", "completion": "", **reward.options}
    try:
        signature.bind_partial(**given)
        if columns is not None:
            signature.bind(
                **{name: None for name in columns if takes_all or name in signature.parameters}
                | given
            )
    except TypeError as error:
        rows = "" if columns is None else f" and the rows' columns ({', '.join(columns) or 'none'})"
        fix = "define it as f(prompt, completion, **columns)"
        what = f"{reward.path}{signature} cannot be called with {', '.join(given)}{rows}: {error}"
        raise ConfigError(what, where=where, fix=fix) from error
    return None if takes_all else frozenset(signature.parameters)


def _task(reward: TaskReward) -> Scorer:
    reasoning_gym = import_quietly("reasoning_gym")
    pattern = re.compile(reward.pattern) if reward.pattern else None

    @lru_cache(maxsize=256)
    def dataset(name: str, options: str) -> Any:
        return reasoning_gym.create_dataset(name, **json.loads(options))

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> Any:
        name, entry = meta["task"], meta["entry"]
        answer = completion.strip()
        if pattern is not None:
            found = [match.group(1) for match in pattern.finditer(completion)]
            if not found or found[-1] is None:
                return 0.0
            answer = found[-1].strip()
        if name in TUPLES:
            entry = _tuples(entry)
        verifier = dataset(name, json.dumps(meta.get("options") or {}))
        try:
            return verifier.score_answer(answer, entry)
        except Exception:  # noqa: BLE001 — a strange answer makes verifiers raise anything
            # Raises as well where the answer is not the cause.
            verifier.score_answer(entry["answer"], entry)
            return 0.0

    return score


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _math(reward: MathReward) -> Scorer:
    from math_verify import parse, verify

    # It warns of each call without its own alarm; ours is outside.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    @lru_cache(maxsize=1024)
    def gold(answer: str) -> Any:
        """A bare formula is LaTeX only between dollars; without them one number of it would be taken for the whole."""
        bare = not any(sign in answer for sign in ("$", "\\boxed", "\\(", "\\["))
        texts = (f"${answer}$", answer) if bare else (answer, f"${answer}$")
        parsed = next(
            (found for text in texts if (found := parse(text, parsing_timeout=None))), None
        )
        if not parsed:
            raise ValueError(f"column {reward.column!r} holds no formula: {answer[:60]!r}")
        return parsed

    def score(prompt: str, completion: str, meta: dict[str, Any]) -> Any:
        if meta[reward.column] is None:
            raise ValueError(f"column {reward.column!r} is empty")
        right = gold(str(meta[reward.column]))
        return float(verify(right, parse(completion, parsing_timeout=None), timeout_seconds=None))

    return score
