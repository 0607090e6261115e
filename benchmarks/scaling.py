"""How strategies scale from one process to two, and whether Drumline's scale as the loops one would write by hand do.

    python benchmarks/scaling.py [--strategies ddp,fsdp2,zero1,zero2,zero3] [--steps 16] [--rounds 3] [--smoke] [--out FILE]

The same global batch on one process and on two. In each, Drumline's loop and the one by hand live in the same processes and take steps in
turn (benchmarks/strategy_overhead.py). Each strategy is measured on both numbers of processes once a round. The speed-up of a round is
the median step on one process over that on two, the slower rank counts. `scaling` is Drumline's speed-up divided by the other's, by the
ratios of steps that were taken in turn (the median of them on one process over that on two), since what disturbs a step disturbs both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common, strategy_overhead

SIDES = ("drumline", "by_hand")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--strategies", default="ddp,fsdp2,zero1,zero2,zero3")
    parser.add_argument(
        "--steps", type=int, default=16, help="pairs of steps a round, after the warm-up"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = common.parse(parser, strategies="ddp", steps=2, rounds=1)
    names = options.strategies.split(",")
    seconds: dict[str, dict[int, list[dict[str, float]]]] = {name: {1: [], 2: []} for name in names}
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        plans = {
            (name, ranks): planned(Path(folder) / str(ranks), name, ranks)
            for name in names
            for ranks in (1, 2)
        }
        for number in range(options.rounds):
            loads.append(round(os.getloadavg()[0], 2))
            for name in names:
                for ranks in (1, 2):
                    seconds[name][ranks].append(
                        measured(plans[name, ranks], name, ranks, options.steps)
                    )
                    print(number, name, ranks, seconds[name][ranks][-1], flush=True)
            figures = {name: summary(each) for name, each in seconds.items()}
            head = {
                "shape": strategy_overhead.SHAPE,
                "rounds": number + 1,
                "load_before_each_round": loads,
            }
            common.write({**head, "strategies": figures}, options.out)  # so far
    print(json.dumps(figures, indent=1))


def planned(root: Path, name: str, ranks: int) -> Path:
    from drumline.config.load import load
    from drumline.train.setup import Request, claim_run_dir, make_plan

    root.mkdir(exist_ok=True)
    request = Request(load(strategy_overhead._prepare(root, name), []), world_size=ranks)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def measured(plan: Path, name: str, ranks: int, steps: int) -> dict[str, float]:
    """Seconds of the median step of each side, and `ratio`: the median over steps of Drumline's seconds divided by the other's; of ranks
    the slower one counts."""
    strategy_overhead.RANKS = ranks
    pairs = strategy_overhead._ranks(
        {"plan": str(plan), "name": name, "sides": list(SIDES), "steps": steps}
    )
    by_step = list(zip(*(each["seconds"] for each in pairs), strict=True))
    slowest = [[max(pair[i] for pair in ranks_) for i in (0, 1)] for ranks_ in by_step]
    medians = {side: statistics.median(pair[i] for pair in slowest) for i, side in enumerate(SIDES)}
    return {**medians, "ratio": statistics.median(mine / other for mine, other in slowest)}


def summary(seconds: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds, and [least, most] of what is compared."""
    pairs = list(zip(seconds[1], seconds[2], strict=True))
    gains = {side: [one[side] / two[side] for one, two in pairs] for side in SIDES}
    scaling = [one["ratio"] / two["ratio"] for one, two in pairs]
    return {
        "seconds": {
            side: {
                n: round(statistics.median(each[side] for each in rounds), 4)
                for n, rounds in seconds.items()
            }
            for side in SIDES
        },
        "samples_per_s": {
            n: round(
                strategy_overhead.SHAPE["samples"]
                / statistics.median(each["drumline"] for each in rounds),
                2,
            )
            for n, rounds in seconds.items()
        },
        "speed_up": {side: round(statistics.median(values), 3) for side, values in gains.items()},
        "scaling": round(statistics.median(scaling), 3),
        "scaling_ends": [round(min(scaling), 3), round(max(scaling), 3)],
    }


if __name__ == "__main__":
    main()
