"""Does it learn? Example configs run whole on the real SmolLM2-135M from several seeds; the curves as JSON and PNG.

    python benchmarks/learning.py sft [key=value …] [--seeds 0 1 2] [--smoke] [--out FILE.json]

Every seed that was run is drawn and written down; none is chosen. A figure is read from the runs' own events.jsonl.
The PNG lies beside the JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.common import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SEEDS = (0, 1, 2)


class Trained(NamedTuple):
    """What is trained, and which figures of its events are drawn.

    `figures`: title → key of an event of kind `event`.
    `teacher`: the config that trains the teacher, whose place in the run's config is its export.
    """

    config: str
    event: str
    figures: dict[str, str]
    teacher: str | None = None


RUNS = {
    "sft": Trained(
        "examples/sft_two_tasks.yaml",
        "eval",
        {"held-out exact match": "exact_match", "held-out loss": "loss"},
    ),
    "reward": Trained(
        "examples/reward_smollm2.yaml",
        "eval",
        {"held-out pair accuracy": "accuracy", "held-out loss": "loss"},
    ),
    "dpo": Trained(
        "examples/dpo_smollm2.yaml",
        "eval",
        {
            "held-out margin of rewards": "margin",
            "log-prob of chosen": "log_prob_chosen",
            "log-prob of rejected": "log_prob_rejected",
        },
    ),
    "grpo": Trained(
        "examples/grpo_smollm2.yaml",
        "rollout",
        {"mean verified reward of a rollout": "reward"},
    ),
    "tries": Trained(
        "examples/grpo_tries.yaml",
        "rollout",
        {"mean reward of an episode": "reward", "mean number of tries": "turns"},
    ),
    "ppo": Trained(
        "examples/ppo_smollm2.yaml",
        "rollout",
        {"mean verified reward of a rollout": "reward"},
    ),
    "gkd": Trained(
        "examples/gkd_two_tasks.yaml",
        "eval",
        {"held-out KL(teacher ‖ student)": "kl", "held-out verified reward": "reward"},
        teacher="examples/sft_two_tasks.yaml",
    ),
}


def train_teacher(config: str, folder: Path) -> Path:
    """Train the teacher as a user does, unless it is there already, and return its export."""
    run = folder / f"{Path(config).stem}-teacher"
    if not (run / "export").exists():
        start(config, [f"run.dir={run}", "launch.nproc=1"])
    return run / "export"


def train(config: str, seed: int, folder: Path, overrides: list[str]) -> Path:
    """Train from a seed, and return the run's folder."""
    run = folder / f"{Path(config).stem}-seed{seed}"
    keys = [f"run.dir={run}", f"run.seed={seed}", "checkpoint.export=none"]
    keys += ["checkpoint.every=null", "checkpoint.keep_best=false"]
    start(config, keys + overrides)
    return run


def start(config: str, overrides: list[str]) -> None:
    """Train by the command that a user types."""
    command = [sys.executable, "-m", "drumline", "train", config, *overrides]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def read_events(run: Path) -> list[dict[str, Any]]:
    """Return a run's events, whose texts may hold characters that `splitlines` takes for line breaks."""
    with (run / "events.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def curve(run: Path, kind: str, figures: dict[str, str]) -> dict[str, list[float]]:
    """Steps, and each figure at them."""
    chosen = [event for event in read_events(run) if event["kind"] == kind]
    return {
        "step": [e["step"] for e in chosen],
        **{key: [e[key] for e in chosen] for key in figures.values()},
    }


def seconds(run: Path) -> float:
    """From the first event of a run to its last."""
    times = [event["t"] for event in read_events(run)]
    return round(times[-1] - times[0], 1)


def draw(
    name: str, figures: dict[str, str], curves: dict[int, dict[str, list[float]]], path: Path
) -> None:
    """One panel a figure, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, len(figures), figsize=(5 * len(figures), 3.6), squeeze=False)
    for axis, (title, key) in zip(axes[0], figures.items(), strict=True):
        for seed, values in curves.items():
            axis.plot(values["step"], values[key], marker="o", markersize=3, label=f"seed {seed}")
        axis.set_title(title)
        axis.set_xlabel("optimizer steps")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    drawing.suptitle(f"{name}: SmolLM2-135M-Instruct, {RUNS[name].config}")
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)


def ends(curves: dict[int, dict[str, list[float]]], key: str) -> Iterator[tuple[int, float, float]]:
    for seed, values in curves.items():
        yield seed, values[key][0], values[key][-1]


def small(folder: Path) -> list[str]:
    """Overrides of `--smoke`: the example's data and steps on a model that is built here."""
    from tests.tiny import tiny_model_dir

    model = tiny_model_dir(folder / "model", positions=512)
    sizes = [
        "run.steps=2",
        "eval.every=1",
        "run.device=cpu",
        "launch.nproc=1",
        "data.train.0.size=16",
        "data.eval.0.size=4",
    ]
    return [f"model.id={model}", f"data.cache_dir={folder / 'cache'}", *sizes]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("name", nargs="?", choices=RUNS)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="laid over the example's config"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "learning", help="where the runs are kept"
    )
    options = common.parse(parser, name="sft", seeds=[0])
    if options.name is None:
        parser.error(f"name what shall learn: {', '.join(RUNS)}")
    if not options.smoke:
        out = options.out or RESULTS / f"learning-{options.name}-cpu.json"
        compare(options.name, options.overrides, options.seeds, options.runs, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "figures.json"
        compare(
            options.name,
            [*small(Path(folder)), *options.overrides],
            options.seeds,
            Path(folder),
            out,
        )


def compare(name: str, overrides: list[str], seeds: list[int], runs: Path, out: Path) -> None:
    """Train from each seed what was not trained yet; write the curves, draw them, print their ends."""
    config, kind, figures, teacher = RUNS[name]
    more = []
    if teacher:
        more = [f"algorithm.teacher.id={train_teacher(teacher, runs)}"]
    curves, took = {}, {}
    for seed in seeds:
        run = runs / f"{Path(config).stem}-seed{seed}"
        if not (run / "events.jsonl").exists():
            run = train(config, seed, runs, [*more, *overrides])
        curves[seed], took[seed] = curve(run, kind, figures), seconds(run)
    common.write({"config": config, "overrides": overrides, "seconds": took, "curves": curves}, out)
    draw(name, figures, curves, out.with_suffix(".png"))
    for title, key in figures.items():
        print(
            f"{title}: "
            + "; ".join(
                f"seed {seed} {first:.3f} → {last:.3f}" for seed, first, last in ends(curves, key)
            )
        )


if __name__ == "__main__":
    main()
