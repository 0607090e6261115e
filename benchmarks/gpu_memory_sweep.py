"""What runs on one GPU take, against their plans: torch's max_memory_allocated and max_memory_reserved, and the seconds of a step.

    drumline calibrate; python benchmarks/gpu_memory_sweep.py [--list speed] [--runs WORD] [--smoke] [--out FILE.json]

Models from 0.1B to 8B by their shapes, with random weights; full and LoRA, each kind of activation checkpointing, several batches and
lengths, bf16 and fp32, plain and chunked cross-entropy. Each run is a process of its own, that starts with an empty allocator. It takes no
checkpoint. A run that is out of memory is a row, too: of one whose plan says "fits", that is a failure (exit code 1). A run that fails in
another way is a row with its last words (exit code 1), and the next one begins.
`--list speed` takes the few runs whose tokens/s and MFU people ask for first, eager and compiled. The file is written after each run.

Targets: allocated ±5%, reserved ±10%, seconds ±10% after calibration. Without CUDA it says so and does nothing (exit code 2);
`--smoke` takes each kind of run of the list once, with a tiny model in place of the real one; on a CPU it is one run in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.planner_runs import FULL, LORA, PLAIN, SELECTIVE, STEPS, TINY, held_against, ready

COMPILED: dict[str, Any] = {"compile": {"enabled": True}}
LORA_16 = {"adapter": {"kind": "lora", "r": 16}}
TARGETS = {"peak": 0.05, "reserved": 0.10, "seconds": 0.10}


@dataclass(frozen=True)
class Run:
    """`model`: a name of models.shapes, or "tiny". Two micro-batches a step."""

    model: str
    length: int
    micro_batch: int
    parts: tuple[dict[str, Any], ...] = ()
    precision: str = "bf16"
    device: str = "cuda"

    @property
    def name(self) -> str:
        is_lora = LORA in self.parts or LORA_16 in self.parts
        kinds = ["lora" if is_lora else "full"]
        kinds += [f"AC {name}" for name, part in AC.items() if part in self.parts]
        if COMPILED in self.parts:
            kinds.append("compiled")
        return (
            f"{self.model} {' '.join(kinds)} {self.micro_batch} × {self.length} {self.precision}"
            + (" plain" if PLAIN in self.parts else "")
        )

    @property
    def sections(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "strategy": "single",
            "precision": self.precision,
            "batch": {"micro_batch": self.micro_batch, "global_samples": 2 * self.micro_batch},
            "run": {"device": self.device},
        }
        for part in self.parts:
            made |= part
        return made


AC = {"selective": SELECTIVE, "full": FULL}
RUNS = [
    Run("smollm2-135m", 1024, 8),
    Run("smollm2-135m", 1024, 8, precision="fp32"),
    Run("smollm2-135m", 1024, 8, (PLAIN,)),
    Run("smollm2-135m", 2048, 16, (FULL,)),
    Run("qwen2.5-0.5b", 2048, 4),
    Run("qwen2.5-0.5b", 2048, 4, (PLAIN,)),
    Run("qwen2.5-0.5b", 2048, 8, (SELECTIVE,)),
    Run("tinyllama-1.1b", 2048, 4),
    Run("tinyllama-1.1b", 2048, 16, (FULL,)),
    Run("tinyllama-1.1b", 1024, 4, (SELECTIVE,), "fp32"),
    Run("llama-3.2-1b", 8192, 1, (FULL,)),
    Run("qwen2.5-1.5b", 2048, 4, (LORA,)),
    Run("llama-3.2-3b", 2048, 2, (FULL,)),
    Run("llama-3.2-3b", 2048, 4, (LORA, SELECTIVE)),
    Run("llama-3.1-8b", 2048, 1, (LORA,)),
    Run("llama-3.1-8b", 4096, 2, (LORA, FULL)),
    Run("llama-3.1-8b", 2048, 2, (LORA, SELECTIVE, PLAIN)),
]

# Figures that people ask for first, in order of worth: there may be time for only some. The first two are what `drumline plan --model
# llama-3.1-8b --cluster h100-80g --length 4096 --adapter lora` prints first (without checkpointing, compiled), and the same in eager mode.
SPEED_RUNS = [
    Run("llama-3.1-8b", 4096, 2, (LORA_16,)),
    Run("llama-3.1-8b", 4096, 2, (LORA_16, COMPILED)),
    Run("llama-3.2-1b", 4096, 2),
    Run("llama-3.2-1b", 4096, 2, (COMPILED,)),
    Run("llama-3.1-8b", 4096, 2, (LORA_16, FULL)),
    Run("llama-3.1-8b", 4096, 2, (LORA_16, FULL, COMPILED)),
]
LISTS = {"memory": RUNS, "speed": SPEED_RUNS}
RUNS_ON_A_CPU = [Run("tiny", 64, 1, precision="fp32", device="cpu")]
WORKER = Path(__file__)  # trains with --worker


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--list", choices=tuple(LISTS), default="memory", help="which runs")
    parser.add_argument("--runs", default="", help="only runs with this in their names")
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = common.parse(parser)
    if options.worker:
        train(options.worker, options.steps)
        return
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.smoke:
        print(
            "error: no CUDA GPU here; the sweep measures torch's allocator on one", file=sys.stderr
        )
        raise SystemExit(2)
    chosen = LISTS[options.list]
    if options.smoke:
        chosen = tiny_runs(chosen) if device != "cpu" else RUNS_ON_A_CPU
    found: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for run in chosen:
        if options.runs not in run.name:
            continue
        if skipped := why_skipped(run):
            found.append({"name": run.name, "skipped": skipped})
        else:
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(run, Path(folder)))
        print(line(found[-1]), flush=True)
        report = {
            "within_targets": rows_within_targets(found),
            "fits_but_out_of_memory": broken_promises(found),
            "failed": [row["name"] for row in found if "failed" in row],
        }
        common.write({"device": device, **report, "runs": found}, options.out)
    print(json.dumps(report))
    has_failed = any("failed" in row for row in found)
    raise SystemExit(has_failed or bool(broken_promises(found)))


def tiny_runs(runs: list[Run]) -> list[Run]:
    """Return each kind of run once, with a tiny model and one short row a micro-batch."""
    tiny = [replace(run, model="tiny", length=64, micro_batch=1) for run in runs]
    kinds = {run.name: run for run in tiny}
    return list(kinds.values())


def why_skipped(run: Run) -> str:
    """Return what a run needs that the stand-in of a GPU lacks; nothing on a real one."""
    from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN

    return f"needs {COMPILED_CODE}" if IS_STAND_IN and COMPILED in run.parts else ""


def broken_promises(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of runs that were out of memory though their plan said that they fit."""
    ended = [row for row in rows if "verdict" in row]
    return [row["name"] for row in ended if row["verdict"] == "fits" and row["out_of_memory"]]


def rows_within_targets(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return for each category how many rows were predicted within its target."""
    within = {}
    for name, target in TARGETS.items():
        errors = [abs(error(row, name)) for row in rows if name in row.get("categories", {})]
        within[name] = sum(found <= target for found in errors)
    return within


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: its plan's verdict, whether it was out of memory, and by category predicted and measured;
    or what it said when it failed."""
    from drumline.models.shapes import find
    from drumline.plan.plan import Plan

    known = None if run.model == "tiny" else find(run.model)
    path = ready(
        folder / "run",
        dict(known.values) if known else {"model_type": "llama", **TINY},
        run.length,
        1,
        run.sections,
    )
    ended = subprocess.run(
        [sys.executable, str(WORKER), "--worker", str(path)], capture_output=True, text=True
    )
    plan = Plan.load(path)
    estimate = plan.predicted.estimate
    assert estimate is not None
    lost = "OutOfMemory" in ended.stderr
    if ended.returncode and not lost:
        return {"name": run.name, "failed": ended.stderr[-3000:]}
    row = {
        "name": run.name,
        "verdict": estimate.verdict,
        "limit": estimate.limit,
        "planned": estimate.memory.model_dump(),
    }
    if lost:
        return {**row, "out_of_memory": True, "categories": {}}
    categories = held_against(path)
    tokens_per_s = 2 * run.micro_batch * run.length / categories["seconds"]["measured"]
    speed = {"tokens_per_s": tokens_per_s, "mfu": plan.predicted.mfu(tokens_per_s)}
    return {**row, "out_of_memory": False, "categories": categories, **speed}


def train(path: Path, steps: int) -> None:
    """The worker: a few steps of the plan, and the `measured` event; no checkpoint."""
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan
    from drumline.system.signals import StopFlag
    from drumline.telemetry.events import EventLog
    from drumline.train.build import build
    from drumline.train.failure import convert_out_of_memory
    from drumline.train.state import Goodput

    plan = Plan.load(path)
    ranks = start(plan.device, plan.backend, 600.0)
    with convert_out_of_memory(plan, 0) as watch:
        loop = build(
            plan,
            ranks,
            None,
            EventLog(Path(plan.run_dir) / "events.jsonl").emit,
            StopFlag(),
            [],
            Goodput(time.time()),
        )
        watch.set_engine(loop.engine)
        for _, batch in zip(range(steps), loop.batches, strict=False):
            loop._train_step(batch, 0.0)
        loop._finish_pending_step()
        loop.measure.finish(loop.state.step)
    stop()


def error(row: dict[str, Any], category: str) -> float:
    figures = row["categories"][category]
    return float(figures["predicted"] / figures["measured"] - 1)


def line(row: dict[str, Any]) -> str:
    """`name  fits  peak 12.30 GiB (+1.2%) reserved 13.00 GiB (-3.0%) seconds 0.51 (+8.0%)`."""
    if "skipped" in row:
        return f"{row['name']:48} skipped: {row['skipped']}"
    if "failed" in row:
        return f"{row['name']:48} failed: {row['failed'].strip().splitlines()[-1]}"
    if row["out_of_memory"]:
        return f"{row['name']:48} {row['verdict']:6} out of memory; {row['planned']['peak'] / 2**30:.2f} GiB were planned"
    words = []
    for name in (name for name in TARGETS if name in row["categories"]):
        value = row["categories"][name]["measured"]
        shown = f"{value:.3g}" if name == "seconds" else f"{value / 2**30:.2f} GiB"
        words.append(f"{name} {shown} ({error(row, name):+.1%})")
    words.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if row["mfu"] is not None:
        words.append(f"MFU {row['mfu']:.1%}")
    return f"{row['name']:48} {row['verdict']:6} " + "  ".join(words)


if __name__ == "__main__":
    main()
