"""The process in which rewards run, a child of `guard`. No torch.

It gets the rewards over its socket, answers once whether they loaded, then answers one request at a time:

    {"token": …, "index": which reward, "prompt": str, "completion": str, "meta": {}}
    →  {"token": …, "value": float} or {"token": …, "failure": reason}

What a reward prints goes to standard error. A reward may do anything here: the other side of the socket keeps the time.
"""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drumline.core.redact import redact, redacted_streams
from drumline.core.rollouts import Reward
from drumline.errors import DrumlineError
from drumline.rl.channel import Channel
from drumline.rl.reward_functions import Scorer, scorer

NICENESS = 10
LONGEST_REASON = 200
# Statistics of rewards are made in fp32: their squares, summed over a rollout, stay below its 3e38.
LARGEST = 1e15


def main(fd: int) -> None:
    """Serve until the other end of the socket is closed."""
    os.nice(NICENESS)
    with redacted_streams():
        _serve(fd)


def _serve(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    channel.end.set_inheritable(False)  # what a reward starts must not hold the socket open
    try:
        task = channel.receive()
        scorers = {int(index): _build(reward, int(index), task) for index, reward in task["rewards"].items()}
    except DrumlineError as error:
        channel.send({"wrong": {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}})
        return
    channel.send({"ready": True})
    with suppress(EOFError):  # the parent closed its end
        while True:
            request = channel.receive()
            channel.send({"token": request["token"], **_answer(scorers[request["index"]], request)})


def _build(reward: dict[str, Any], index: int, task: dict[str, Any]) -> Scorer:
    made: Reward = TypeAdapter(Reward).validate_python(reward)
    return scorer(made, Path(task["base_dir"]), f"algorithm.rewards[{index}]", task["columns"])


def _answer(score: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        returned = score(request["prompt"], request["completion"], request["meta"])
        return judge(returned)
    except BaseException as error:  # noqa: BLE001 — SystemExit and KeyboardInterrupt of a reward are failures like others
        return {"failure": f"raised {redact(f'{type(error).__name__}: {error}')}"[:LONGEST_REASON]}


def judge(returned: Any) -> dict[str, Any]:
    """A number within ±LARGEST, of any type that turns into a float by itself, or why there is none."""
    if not hasattr(returned, "__float__"):  # text has none
        what = "None" if returned is None else f"a {type(returned).__name__}"
        return {"failure": f"returned {what}, not a number"}
    value = float(returned)
    if abs(value) <= LARGEST:
        return {"value": value}
    return {"failure": f"returned {value}" + (f", beyond ±{LARGEST:g}" if math.isfinite(value) else "")}
