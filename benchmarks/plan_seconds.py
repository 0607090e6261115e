"""Processor seconds (user and system) of `drumline plan` from its start to its end, by process: of the first plan, with nothing kept on
disk, and of the second. The sizes of known shapes come with the package; those of any other model are counted by the first plan, which
imports torch and transformers for it and builds the model on the meta device. Wall time stands beside it: it follows what else runs.

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
        *(
            "--model",
            "llama-3.1-405b",
            "--cluster",
            "128x8xh100-80g",
            "--length",
            "8192",
            "batch.global_samples=1024",
        )
    ],
    "1,024 devices, DeepSeek-V3": [
        *(
            "--model",
            "deepseek-v3",
            "--cluster",
            "128x8xh100-80g",
            "--length",
            "4096",
            "batch.global_samples=4096",
        )
    ],
    "1,024 devices, Kimi K2": [
        *(
            "--model",
            "kimi-k2",
            "--cluster",
            "128x8xh100-80g",
            "--length",
            "4096",
            "batch.global_samples=4096",
        )
    ],
    "8 devices, a shape of one's own": [
        "model.shape={layers: 32, hidden: 4096, heads: 32, kv_heads: 8, intermediate: 14336, vocabulary: 128000}",
        *("--cluster", "8x4090", "--length", "4096"),
    ],
}


def seconds(arguments: list[str], cache: str) -> tuple[float, float]:
    """(seconds of the processor, wall seconds) of one plan."""
    env = os.environ | {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
    before, start = of_children(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "drumline", "plan", *arguments],
        env=env,
        check=True,
        capture_output=True,
    )
    return of_children() - before, time.perf_counter() - start


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
            kind: {
                "processor_s": [round(used, 2) for used, _ in each],
                "wall_s": [round(wall, 2) for _, wall in each],
            }
            for kind, each in (("first plan", first), ("second plan", again))
        }
        print(
            f"{name:32} first {median(s for s, _ in first):5.2f} s, second {median(s for s, _ in again):5.2f} s of a core"
        )
    write({"plan_seconds": figures}, options.out)


if __name__ == "__main__":
    main()
