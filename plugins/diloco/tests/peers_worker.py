"""A host of test_peers: `python -m plugins.diloco.tests.peers_worker FOLDER SEED SECONDS PEER…`.

It takes steps of that many seconds until there is a file `stop`, and writes each outer step to
FOLDER/SEED.jsonl: the hosts in it, and a checksum of the outer weights.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from torch import nn

import drumline
from drumline.errors import DrumlineError
from drumline_diloco.peers import PeersEngine
from tests.distributed import session_loop

STRATEGY: dict[str, Any] = {
    "kind": "diloco",
    "period": 8,
    "fragments": 2,
    "bits": 8,
    "delay": 2,
    "secret": "${env:PEERS_SECRET}",
}
SESSION: dict[str, Any] = {
    "precision": "fp32",
    "device": "cpu",
    "global_samples": 4,
    "asynchronous": False,
}


def outer_step(engine: PeersEngine) -> str:
    """Return a line about the last outer step."""
    rounds, checksum = engine._progress()
    line = {
        "round": rounds,
        "hosts": engine.hosts,
        "sums": checksum,
        "index": engine.peers.index,
    }
    return json.dumps(line) + "\n"


def main(folder: Path, seed: int, seconds: float, peers: list[str]) -> None:
    strategy = {**STRATEGY, "peers": peers}
    run_dir = folder / f"run-{seed}-{os.getpid()}"
    log = (folder / f"{seed}.jsonl").open("a")
    with drumline.session(strategy, run_dir=run_dir, seed=seed, **SESSION) as session:
        build = functools.partial(session_loop.build, 0.0)
        model, _ = session.prepare(build, session_loop.make_optimizer)
        engine = cast(PeersEngine, next(iter(session._models.values())).engine)
        written = 0
        rows = session_loop.dataset()
        for inputs, labels in session.batches(rows, session_loop.collate, steps=10**6):
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            session.backward(loss, len(labels))
            session.step(max_grad_norm=1.0)
            time.sleep(seconds)
            if engine.rounds != written:
                written = engine.rounds
                log.write(outer_step(engine))
                log.flush()
            if (folder / "stop").exists():
                os._exit(0)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
