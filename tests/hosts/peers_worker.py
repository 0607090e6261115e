"""One host of test_peers: `python -m tests.hosts.peers_worker FOLDER SEED SECONDS PEER…` takes steps of that many seconds until there is a
file `stop`, and writes each outer step to FOLDER/SEED.jsonl: who is in it, and a checksum of the outer weights."""

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
from drumline.engine.strategies.diloco.peers import PeersEngine
from drumline.errors import DrumlineError
from tests.distributed import session_loop

STRATEGY: dict[str, Any] = {
    "kind": "diloco",
    "period": 8,
    "fragments": 2,
    "bits": 8,
    "delay": 2,
    "secret": "${env:PEERS_SECRET}",
}


def main(folder: Path, seed: int, seconds: float, peers: list[str]) -> None:
    options: Any = {
        "precision": "fp32",
        "device": "cpu",
        "global_samples": 4,
        "asynchronous": False,
        "seed": seed,
    }
    with drumline.session(
        {**STRATEGY, "peers": peers}, run_dir=folder / f"run-{seed}-{os.getpid()}", **options
    ) as s:
        model, _ = s.prepare(
            functools.partial(session_loop.build, 0.0), session_loop.make_optimizer
        )
        engine, seen, log = (
            cast(PeersEngine, next(iter(s._models.values())).engine),
            0,
            (folder / f"{seed}.jsonl").open("a"),
        )
        for inputs, labels in s.batches(session_loop.dataset(), session_loop.collate, steps=10**6):
            s.backward(
                nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
            )
            s.step(max_grad_norm=1.0)
            time.sleep(seconds)
            if engine.rounds != seen:
                seen, sums = engine._place()
                log.write(
                    json.dumps(
                        {
                            "round": seen,
                            "hosts": engine.hosts,
                            "sums": sums,
                            "index": engine.peers.index,
                        }
                    )
                    + "\n"
                )
                log.flush()
            if (folder / "stop").exists():
                os._exit(0)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
