"""One packed run of a tiny Llama in bf16 on the GPU, held against the same run on the CPU.

    python benchmarks/gpu_losses.py [--smoke] [--out FILE.json]

The CPU runs it twice, in fp32 and in bf16: what lies between these two is what rounding to bf16
does to this run. The GPU rounds in another order, so its bf16 losses may be four times as far from
the CPU's fp32 losses. All start from the same file of weights: what a device draws by itself
differs from what another one draws. The runs start side by side. Without a GPU the bf16 run of the CPU is
compared alone, which shows that the command works. Exit code 1 if the losses are further apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks import common
from benchmarks.planner_runs import ready
from tests.tiny import tiny_model_dir

LENGTH = 128  # tokens of a pack
STEPS = 8


def main() -> None:
    options = common.parse(common.parser(__doc__))
    steps = 3 if options.smoke else STEPS
    devices = {"cpu fp32": ("cpu", "fp32"), "cpu bf16": ("cpu", "bf16")}
    if torch.cuda.is_available():
        devices["gpu bf16"] = ("cuda", "bf16")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_dir(Path(folder) / "model")
        plans = {}
        for name, (device, precision) in devices.items():
            run_folder = Path(folder) / name.replace(" ", "-")
            plans[name] = write_plan(run_folder, model, device, precision, steps)
        losses = train_side_by_side(plans, steps)
    exact = losses["cpu fp32"]
    for name, values in losses.items():
        row = " ".join(f"{value:.5f}" for value in values)
        print(f"{name}: {row}  largest relative difference {largest_difference(values, exact):.2e}")
    limit = 4 * largest_difference(losses["cpu bf16"], exact)
    tried = losses.get("gpu bf16", losses["cpu bf16"])
    found = largest_difference(tried, exact)
    is_within = len(tried) == steps and found <= limit
    common.write({"losses": losses, "difference": found, "limit": limit}, options.out)
    print(
        f"{found:.2e} of at most {limit:.2e}: {'as on the CPU' if is_within else 'NOT as on the CPU'}"
    )
    raise SystemExit(not is_within)


def write_plan(folder: Path, model: Path, device: str, precision: str, steps: int) -> Path:
    """Return the path of the plan.json of a run that packs short documents."""
    sections = {
        "model": {"id": str(model), "config": None},
        "strategy": "single",
        "precision": precision,
        "run": {"device": device, "steps": steps},
        "optimizer": {"lr": 1e-3},
    }
    return ready(folder, {}, LENGTH, 1, sections, words=12)


def train_side_by_side(plans: dict[str, Path], steps: int) -> dict[str, list[float]]:
    """Return the losses of each run; each trains in a process of its own."""
    worker = str(Path(__file__).with_name("gpu_memory_sweep.py"))
    processes = {}
    for name, plan in plans.items():
        command = [sys.executable, worker, "--steps", str(steps), "--worker", str(plan)]
        processes[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    losses = {}
    for name, process in processes.items():
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{errors[-3000:]}")
        lines = plans[name].with_name("events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        losses[name] = [event["loss"] for event in events if event["kind"] == "step"]
    return losses


def largest_difference(values: list[float], exact: list[float]) -> float:
    """Return the largest relative difference between losses of the same steps."""
    pairs = zip(values, exact, strict=True)
    return max(abs(value - reference) / abs(reference) for value, reference in pairs)


if __name__ == "__main__":
    main()
