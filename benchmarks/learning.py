"""Does it learn? Example configs run whole on the real SmolLM2-135M from several seeds; the curves as JSON and PNG.

    python benchmarks/learning.py sft [key=value …] [--seeds 0 1 2] [--out benchmarks/results]

Every seed that was run is drawn and written down; none is chosen. A figure is read from the runs' own events.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2)
# Config, kind of event, and the figures drawn: title → key.
RUNS: dict[str, tuple[str, str, dict[str, str]]] = {
    "sft": ("examples/sft_two_tasks.yaml", "eval", {"held-out exact match": "exact_match", "held-out loss": "loss"}),
    "reward": ("examples/reward_smollm2.yaml", "eval", {"held-out pair accuracy": "accuracy", "held-out loss": "loss"}),
    "dpo": (
        "examples/dpo_smollm2.yaml",
        "eval",
        {"held-out margin of rewards": "margin", "log-prob of chosen": "log_prob_chosen", "log-prob of rejected": "log_prob_rejected"},
    ),
    "grpo": ("examples/grpo_smollm2.yaml", "rollout", {"mean verified reward of a rollout": "reward"}),
    "ppo": ("examples/ppo_smollm2.yaml", "rollout", {"mean verified reward of a rollout": "reward"}),
}


def train(config: str, seed: int, folder: Path, overrides: list[str]) -> Path:
    """One run, by the command that a user types."""
    run = folder / f"{Path(config).stem}-seed{seed}"
    command = [sys.executable, "-m", "drumline", "train", config, f"run.dir={run}", f"run.seed={seed}", "checkpoint.export=none"]
    command += ["checkpoint.every=null", "checkpoint.keep_best=false", *overrides]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return run


def curve(run: Path, kind: str, figures: dict[str, str]) -> dict[str, list[float]]:
    """Steps, and each figure at them."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    chosen = [event for event in events if event["kind"] == kind]
    return {"step": [e["step"] for e in chosen], **{key: [e[key] for e in chosen] for key in figures.values()}}


def seconds(run: Path) -> float:
    """From the first event of a run to its last."""
    times = [json.loads(line)["t"] for line in (run / "events.jsonl").read_text().splitlines()]
    return round(times[-1] - times[0], 1)


def draw(name: str, figures: dict[str, str], curves: dict[int, dict[str, list[float]]], path: Path) -> None:
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
    drawing.suptitle(f"{name}: SmolLM2-135M-Instruct, {RUNS[name][0]}")
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)


def ends(curves: dict[int, dict[str, list[float]]], key: str) -> Iterator[tuple[int, float, float]]:
    for seed, values in curves.items():
        yield seed, values[key][0], values[key][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning", help="where the runs are kept")
    options, overrides = parser.parse_known_args()
    config, kind, figures = RUNS[options.name]
    curves, took = {}, {}
    for seed in options.seeds:
        run = options.runs / f"{Path(config).stem}-seed{seed}"
        if not (run / "events.jsonl").exists():
            run = train(config, seed, options.runs, overrides)
        curves[seed], took[seed] = curve(run, kind, figures), seconds(run)
    import torch
    import transformers

    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/learning.py", options.name, *overrides, "--seeds", *map(str, options.seeds)]),
        "config": config,
        "hardware": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": took,
        "curves": curves,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"learning-{options.name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(options.name, figures, curves, options.out / f"learning-{options.name}-cpu.png")
    for title, key in figures.items():
        print(f"{title}: " + "; ".join(f"seed {seed} {first:.3f} → {last:.3f}" for seed, first, last in ends(curves, key)))


if __name__ == "__main__":
    main()
