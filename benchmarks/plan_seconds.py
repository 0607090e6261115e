"""Processor seconds of `drumline plan` from its start to its end, by process: with nothing kept on disk (torch and transformers are
imported, the model is built on the meta device), and with its sizes kept. Wall time stands beside it: it follows what else runs.

    python benchmarks/plan_seconds.py --out benchmarks/results/plan_seconds-cpu.json
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import parse, parser, write

CASES = {
    "8 devices": ["--model", "llama-3.1-8b", "--cluster", "8x4090", "--length", "4096"],
    "1,024 devices, batch 1,024": [
        *("--model", "llama-3.1-405b", "--cluster", "128x8xh100-80g", "--length", "8192", "batch.global_samples=1024")
    ],
}


def seconds(arguments: list[str], cache: str) -> tuple[float, float]:
    """(user seconds of the processor, wall seconds) of one plan."""
    env = os.environ | {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    subprocess.run([sys.executable, "-m", "drumline", "plan", *arguments], env=env, check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, time.perf_counter() - start


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--cases", type=int, default=len(CASES))
    options = parse(given, rounds=1, cases=1)
    figures: dict[str, Any] = {}
    for name, arguments in list(CASES.items())[: options.cases]:
        first, again = [], []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                first.append(seconds(arguments, cache))
                again.append(seconds(arguments, cache))
        figures[name] = {
            kind: {"user_s": [round(user, 2) for user, _ in each], "wall_s": [round(wall, 2) for _, wall in each]}
            for kind, each in (("nothing kept", first), ("sizes kept", again))
        }
        print(f"{name:28} nothing kept {median(u for u, _ in first):5.2f} s, sizes kept {median(u for u, _ in again):5.2f} s of a core")
    write({"plan_seconds": figures}, options.out)


if __name__ == "__main__":
    main()
