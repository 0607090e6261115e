"""What sampling ahead saves: seconds of a step of GRPO on two real vLLM servers, for values of `ahead`.

    python benchmarks/rollouts_ahead.py [--steps 8] [--repeats 2] [--smoke] [--out benchmarks/results/rollouts_ahead-cpu.json]

A random Llama of 2 layers. Both servers run on the first core, training on the second, as generation and
learning have machines of their own; so none gains by taking the other's time. An episode ends at one
of four letters, so most completions are short and a few go on to `max_new_tokens`. The settings take turns.
It needs two cores and vLLM (`make servers`).
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common

SETTINGS: dict[str, dict[str, Any]] = {
    "ahead 0": {},
    "ahead 1": {"ahead": 1},
    "ahead 2": {"ahead": 2},
    "ahead 4, partial": {"ahead": 4, "partial": True},
}
SERVER_CORE = {0}
TRAINING_CORE = {1}
# Rollouts until as many are sampled ahead as a setting asks for; they are not measured.
WARM_UP = 5
FIGURES = ("seconds", "waiting", "tokens", "longest", "staleness")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--most-tokens", type=int, default=384)
    options = common.parse(parser, steps=2, repeats=1, prompts=2, most_tokens=16)
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(options, Path(folder))
    medians = {name: middle(found) for name, found in runs.items()}
    base = medians["ahead 0"]["seconds"]
    header = ("s/step", "of it waiting", "speed", "tokens", "longest", "steps old")
    print(f"{'':18}" + "".join(f"{title:>15}" for title in header))
    for name, median in medians.items():
        median["speed"] = base / median["seconds"]
        figures = [median["seconds"], median["waiting"], median["speed"]]
        figures += [median["tokens"], median["longest"], median["staleness"]]
        print(f"{name:18}" + "".join(f"{figure:>15.2f}" for figure in figures))
    setting = {
        "servers": 2,
        "steps": options.steps,
        "prompts": options.prompts,
        "group_size": 4,
        "max_new_tokens": options.most_tokens,
    }
    common.write({"setting": setting, "median": medians, "runs": runs}, options.out)


def measure(options: Any, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Start both servers, and return the figures of each run by setting."""
    from tests.servers.server import RealServer
    from tests.tiny import tiny_model_dir

    model = tiny_model_dir(folder / "model", hidden=256)
    servers = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        servers.append(RealServer(model, folder / name / "log.txt"))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    try:
        os.sched_setaffinity(0, SERVER_CORE)
        for server in servers:
            server.start()
        os.sched_setaffinity(0, TRAINING_CORE)
        for number in range(options.repeats):
            for name, keys in SETTINGS.items():
                for server in servers:
                    server.restore()
                found = one_run(folder / f"{name}-{number}", servers, keys, options)
                runs[name].append(found)
                print(f"{number + 1}, {name}: {found}", flush=True)
    finally:
        for server in servers:
            server.stop()
    return runs


def one_run(
    folder: Path, servers: list[Any], keys: dict[str, Any], options: Any
) -> dict[str, float]:
    """Return the medians over the measured steps of a run."""
    from tests.harness import column, drumline
    from tests.servers.sampling import write_grpo

    folder.mkdir()
    generator = {
        "url": [server.url for server in servers],
        "max_new_tokens": options.most_tokens,
        "stop": list("kvxz"),
        "transport": "network",
    }
    prompts = options.prompts
    config = write_grpo(
        folder,
        servers[0],
        generator,
        keys,
        run={"steps": WARM_UP + options.steps},
        batch={"global_samples": 4 * prompts, "micro_batch": 8},
        # The policy hardly changes, so that completions are equally long in all settings.
        optimizer={"lr": 1e-8},
        checkpoint={"every": None, "keep_best": False, "export": "none"},
    )
    finished = drumline("train", config, timeout=1800)
    if finished.code:
        raise SystemExit(finished.out + finished.err)
    run = folder / "run"
    times = column(run, "t", "step")
    seconds = [after - before for before, after in itertools.pairwise(times)]
    columns = {
        "seconds": seconds[WARM_UP - 1 :],
        "waiting": column(run, "generate_s", "rollout")[WARM_UP:],
        "tokens": column(run, "length", "rollout")[WARM_UP:],
        "longest": column(run, "length_max", "rollout")[WARM_UP:],
        "staleness": [old or 0 for old in column(run, "staleness", "rollout")[WARM_UP:]],
    }
    return {name: statistics.median(values) for name, values in columns.items()}


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median over runs of each figure."""
    return {name: statistics.median(run[name] for run in found) for name in FIGURES}


if __name__ == "__main__":
    main()
