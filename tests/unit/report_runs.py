"""Run folders with every kind of event that a page shows, written in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drumline.config.load import load_text
from drumline.telemetry import watched
from drumline.telemetry.events import (
    Eval,
    Event,
    EventLog,
    Export,
    Fault,
    Measured,
    Planned,
    Restore,
    Rollout,
    RunEnd,
    RunStart,
    Save,
    Step,
)

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
MEMORY = {
    "parameters": 100,
    "gradients": 100,
    "optimizer": 200,
    "activations": 50,
    "logits": 25,
    "buffers": 25,
    "peak": 500,
    "reserved": 500,
}


def start(steps: int = 20, ranks: int = 2) -> RunStart:
    line = f"tiny 30K · sft ddp on {ranks} × cpu · fp32"
    return RunStart(
        world_size=ranks, steps=steps, parameters=30_000, strategy="ddp", device="cpu", run_dir="runs/x", resumed_from=None, plan_line=line,
        left_out=["data.train: 2 of 40 rows cut at 96 tokens"], environment={"host": "h", "torch": "2.13.0"},
    )  # fmt: skip


def step(number: int, loss: float | None = None, **values: Any) -> Step:
    known: dict[str, Any] = {
        "step": number, "loss": 3 / math.sqrt(number) if loss is None else loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "samples": 4,
        "tokens_per_s": 1e4, "samples_per_s": 40.0, "mfu": None, "seconds": 0.1, "data_s": 0.01, "compute_s": 0.08, "comm_s": 0.01,
        "sent_bytes": 2**20, "memory_bytes": [2**28, 2**28 + 5],
        "epoch": number / 10, "metrics": {"token_accuracy": 0.5},
    }  # fmt: skip
    return Step(**known | values)


def write_run(
    folder: Path,
    steps: int = 20,
    seed: int = 0,
    lr: float = 1e-3,
    shift: float = 0.0,
    events: list[Event] | None = None,
) -> Path:
    """A finished run: `events` in the place of its own; `shift` is added to its losses."""
    folder.mkdir(parents=True)
    text = "model: {id: tiny}\ndata: {train: [{kind: file, path: a.jsonl}]}\n"
    text += f"optimizer: {{lr: {lr}}}\nrun: {{seed: {seed}, dir: {json.dumps(str(folder))}}}"
    config = load_text(text, []).model_dump(mode="json")
    data = {"train_samples": 40, "train_tokens": 2000, "train_learned": 900, "eval_samples": 6}
    plan = {
        "config": config,
        "data": data,
        "mesh": {"replicate": 2},
        "batch": {"global_samples": 4},
        "precision": "fp32",
        "lr": lr,
        "why": ["fp32: a CPU"],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "config.yaml").write_text(text)
    log = EventLog(folder / "events.jsonl")
    for event in events if events is not None else story(steps, shift):
        log.emit(event)
    return folder


def story(steps: int, shift: float = 0.0) -> list[Event]:
    """One restart, evaluations, samples, rollouts, checkpoints; texts of strangers."""
    half, goodput = (
        steps // 2,
        {"elapsed": 10.0, "productive": 7.0, "recompute": 0.5, "startup": 1.0, "other": 1.5},
    )
    phases = {"forward": [1.0, 1.2], "backward": [2.0, 2.1], "collective": [0.3, 0.1]}
    fault = Fault(
        attempt=0,
        rank=1,
        signal="SIGKILL",
        exitcode=-9,
        error=f"killed {HOSTILE}",
        log="logs/rank-1.log",
        step=half,
        action="restart",
    )
    planned = Planned(
        memory={**MEMORY, "overhead": 0, "phase": "backward", "phases": {}}, host={"load": 1, "train": 1, "save": 1}, limit=2**30,
        verdict="fits", seconds={"compute": 0.1, "total": 0.1}, traffic={"all_reduce": 2.0**20, "total": 2.0**20}, calibrated=False,
    )  # fmt: skip
    texts = [
        {"set": "", "prompt": "2 + 2?", "text": "5", "answer": "4", "ended": True, "tokens": 2}
    ]
    better = [{**texts[0], "text": f"4 {HOSTILE}"}]
    shown = [
        {
            "prompt": [{"role": "user", "content": f"sum {place}"}],
            "text": f"{place} api_key=hunter2hunter2",
            "reward": place / 4,
            "domain": "a",
            "ended": place > 0,
            "tokens": 3,
        }
        for place in range(4)
    ]
    rollout = Rollout(
        step=half, prompts=1, drawn=1, episodes=4, reward=0.4, reward_std=0.1, groups_differ=1.0, rewards={"task": 0.4},
        shares={"a": 1.0}, failures={}, length=3.0, length_max=3.0, ended=1.0,
        generate_s=0.1, reward_s=0.1, infer_s=0.1, train_s=0.1, sampler_gap=0.0125, metrics={"reward/a": 0.4},
    )  # fmt: skip
    return [
        start(steps),
        planned,
        Eval(step=0, samples=6, seconds=0.1, metrics={"loss": 3.5 + shift}),
        watched.Samples(step=0, when="before", samples=texts, seconds=0.1),
        *(step(number, 3 / math.sqrt(number) + shift) for number in range(1, half + 2)),
        Save(step=half, path="c", seconds=0.1, bytes=2**20, blocked_seconds=0.01, error=None),
        fault,
        start(steps),
        Restore(step=half, path="c", seconds=0.1, skipped=[]),
        *(step(number, 3 / math.sqrt(number) + shift) for number in range(half + 1, steps + 1)),
        rollout,
        watched.Completions(step=half, completions=shown),
        Eval(step=steps, samples=6, seconds=0.1, metrics={"loss": 1.0 + shift}),
        watched.Samples(step=steps, when="after", samples=better, seconds=0.1),
        Measured(
            off={},
            warned=[],
            warnings=["peak: 20% more"],
            notes=[],
            metrics={"memory": {"peak": 510}, "phases": phases},
        ),
        Export(path=f"runs/x/export{HOSTILE}", seconds=1.0, max_logit_difference=0.0),
        RunEnd(status="finished", exit_code=0, step=steps, goodput=goodput),
    ]
