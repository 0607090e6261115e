"""What a killed rank costs: steps done again, and seconds until the run is as far as it was, from disk alone and from host memory.

    python benchmarks/recovery.py [--kills 5] [--every 100] [--in-memory-every 5] [--smoke] [--out benchmarks/results/recovery-cpu.json]

A tiny Llama on two processes over gloo under our launcher. A rank is killed at a random step; the two settings take turns. Seconds count
from the kill to the first step that the run had not done before: starting the ranks again is in them, and is the same for both.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints on disk")
    parser.add_argument("--in-memory-every", type=int, default=5)
    options = common.parse(parser, kills=1, every=20, in_memory_every=2)
    settings = {
        "disk": {"every": options.every},
        "memory": {"every": options.every, "in_memory_every": options.in_memory_every},
    }
    draw, kills = random.Random(0), {name: list[dict[str, float]]() for name in settings}
    for number in range(options.kills):
        at = options.every + draw.randrange(options.every // 2, options.every)
        for name, checkpoint in settings.items():
            with tempfile.TemporaryDirectory() as folder:
                kills[name].append(one_kill(Path(folder), checkpoint, at))
            print(f"kill {number + 1}, {name}: {kills[name][-1]}", flush=True)
    means = {
        name: {key: statistics.mean(each[key] for each in found) for key in found[0]}
        for name, found in kills.items()
    }
    print(f"{'':8}{'steps lost':>12}{'seconds':>10}")
    for name, mean in means.items():
        print(f"{name:8}{mean['steps_lost']:>12.1f}{mean['seconds']:>10.1f}")
    setting = {
        "processes": 2,
        "every": options.every,
        "in_memory_every": options.in_memory_every,
        "kills": options.kills,
    }
    common.write({"setting": setting, "mean": means, "kills": kills}, options.out)


def one_kill(folder: Path, checkpoint: dict[str, Any], at: int) -> dict[str, float]:
    """Steps and seconds that a kill of rank 1 at step `at` costs."""
    from tests.faults.live import kill, ranks_of, wait_for
    from tests.harness import events, start_drumline, write_config
    from tests.tiny import tiny_model_dir

    config = write_config(
        folder,
        tiny_model_dir(folder / "model"),
        rows=200,
        run={"steps": 3 * at},
        batch={"global_samples": 16, "micro_batch": 8},
        checkpoint={**checkpoint, "keep_best": False},
        eval={"at_start": False},
    )
    process = start_drumline("train", config, "--nproc", "2")
    try:
        wait_for(folder / "run", "step", at, process)
        kill(ranks_of(folder / "run")[1])
        killed = time.time()
        reached = max(event["step"] for event in events(folder / "run", "step"))
        wait_for(folder / "run", "restore", 0, process, after=killed)
        again = wait_for(folder / "run", "step", reached + 1, process, after=killed)
        (restored,) = events(folder / "run", "restore")
        return {"steps_lost": reached - restored["step"], "seconds": again["t"] - killed}
    finally:
        process.terminate()  # saves, and leaves nothing in memory
        process.communicate(timeout=120)


if __name__ == "__main__":
    main()
