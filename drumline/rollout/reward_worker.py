"""The process in which rewards run: `python -m drumline.launch.worker PARENT drumline.rollout.reward_worker FD JSON`. No torch.

It says once what it made of the config, then answers one request at a time over a socket that it was handed:

    {"index": which reward, "prompt": str, "completion": str, "meta": {}}  →  {"value": float} or {"failure": reason}

What a reward prints goes to standard error. A reward may do as it likes here: the other side of the socket has the watch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drumline.config.algorithms import Reward
from drumline.errors import DrumlineError
from drumline.rollout.reward_functions import Scorer, scorer

NICENESS = 10
LONGEST_REASON = 200


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.nice(NICENESS)
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # what a reward starts must not hold the socket open
    told = json.loads(sys.argv[2])
    try:
        scorers = {int(index): _build(reward, int(index), told) for index, reward in told["rewards"].items()}
    except DrumlineError as error:
        wrong = {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
        _send(connection, {"wrong": wrong})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:  # the parent closed its end
            return
        _send(connection, _answer(scorers[request["index"]], request))


def _build(reward: dict[str, Any], index: int, told: dict[str, Any]) -> Scorer:
    made: Reward = TypeAdapter(Reward).validate_python(reward)
    return scorer(made, Path(told["base_dir"]), f"algorithm.rewards[{index}]", told["columns"])


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _answer(score: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        returned = score(request["prompt"], request["completion"], request["meta"])
        return judge(returned)
    except BaseException as error:  # noqa: BLE001 — SystemExit and KeyboardInterrupt of a reward are failures like others
        return {"failure": f"raised {type(error).__name__}: {error}"[:LONGEST_REASON]}


def judge(returned: Any) -> dict[str, Any]:
    """A finite number, of any type that turns into a float by itself, or why not."""
    if not hasattr(returned, "__float__"):  # text has none
        what = "None" if returned is None else f"a {type(returned).__name__}"
        return {"failure": f"returned {what}, not a number"}
    value = float(returned)
    return {"value": value} if math.isfinite(value) else {"failure": f"returned {value}"}


if __name__ == "__main__":
    main()
