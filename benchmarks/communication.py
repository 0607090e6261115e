"""What sending less costs: the same small model, data and seeds under plain DDP and under each way of sending less.

    python benchmarks/communication.py [--steps 200] [--seeds 3] [--smoke] [--out benchmarks/results/communication-cpu.json]

A random Llama of 1.1 million parameters learns problems of sums and their answers from scratch (reasoning-gym's chain_sum as text in
byte-level tokens, all of them learned) on two processes over gloo, 512 tokens a step, every method at the same learning rate. For each
method: the loss on held-out problems at the end, mean over seeds (of the weights and of the order of data); how far it lies over plain
DDP's of the same seed; bytes that a rank sends a step, mean over steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
METHODS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "bf16": {"kind": "ddp", "compression": "bf16"},
    "fp16": {"kind": "ddp", "compression": "fp16"},
    "int8": {"kind": "ddp", "compression": "int8"},
    "powersgd, rank 4": {
        "kind": "ddp",
        "compression": {"kind": "powersgd", "rank": 4, "start_step": 10},
    },
    "topk, 10%": {"kind": "ddp", "compression": {"kind": "topk", "ratio": 0.1}},
    "topk, 1%": {"kind": "ddp", "compression": {"kind": "topk", "ratio": 0.01, "start_step": 10}},
    "local_sgd, period 8": {"kind": "local_sgd", "period": 8, "start_step": 10},
    "diloco, period 10": {"kind": "diloco", "period": 10},
    "diloco, period 10, gentle": {
        "kind": "diloco",
        "period": 10,
        "outer_lr": 0.7,
        "outer_momentum": 0.3,
    },
    "diloco, period 50": {"kind": "diloco", "period": 50, "outer_momentum": 0.3},
    "diloco, period 50, 8 bits": {"kind": "diloco", "period": 50, "outer_momentum": 0.3, "bits": 8},
    "diloco, period 50, streamed": {
        "kind": "diloco",
        "period": 50,
        "outer_momentum": 0.3,
        "bits": 8,
        "fragments": 10,
        "delay": 5,
    },
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="ddp must be among them",
    )
    parser.add_argument(
        "--timeout", type=float, default=1200, help="seconds for the runs of one seed"
    )
    # The third is counted.
    options = common.parse(parser, steps=4, seeds=1, methods=["ddp", "topk, 10%"])
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        runs = train(options, Path(folder))
    table = reduce(runs)
    show(table)
    setting = {
        "processes": 2,
        "backend": "gloo",
        "steps": options.steps,
        "seeds": options.seeds,
        "shape": SHAPE,
        "methods": METHODS,
    }
    common.write(
        {"setting": setting, "seconds": round(time.time() - began), "table": table, "runs": runs},
        options.out,
    )


def train(options: argparse.Namespace, work: Path) -> dict[str, list[dict[str, float]]]:
    """Every method with every seed, one pair of processes a seed; the figures of each run, by seed."""
    from tests.distributed.ranks import run_plans
    from tests.tiny import tiny_tokenizer

    model = work / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(model)
    plans = {
        (name, seed): plan(work, model, name, seed, options.steps)
        for seed in range(options.seeds)
        for name in options.methods
    }
    for seed in range(options.seeds):
        run_plans(
            [plans[name, seed] for name in options.methods],
            2,
            timeout=options.timeout,
            counted=True,
        )
    return {
        name: [figures(plans[name, seed].parent) for seed in range(options.seeds)]
        for name in options.methods
    }


def plan(work: Path, model: Path, name: str, seed: int, steps: int) -> Path:
    """plan.json of one run."""
    import yaml

    from drumline.config.load import load
    from drumline.train.setup import Request, claim_run_dir, make_plan

    def problems(size: int, seed: int) -> list[dict[str, Any]]:
        return [
            {
                "kind": "tasks",
                "tasks": {"chain_sum": {"max_terms": 3, "max_digits": 2}},
                "size": size,
                "seed": seed,
            }
        ]

    config = {
        "model": {"id": None, "tokenizer": str(model), "config": {"model_type": "llama", "vocab_size": 320, **SHAPE}},
        "algorithm": "sft",
        "data": {
            "train": problems(4000, 1), "eval": problems(200, 2), "max_length": 128, "packing": True, "learn_on": "all", "workers": 1,
            "cache_dir": str(work / "cache"),
        },
        "batch": {"global_samples": 4, "micro_batch": 2},
        "optimizer": {"lr": 2e-3},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.1},
        "strategy": METHODS[name],
        "checkpoint": {"every": None, "export": "none", "asynchronous": False},
        "run": {"dir": str(work / f"{name}-{seed}".replace(" ", "")), "seed": seed, "steps": steps, "report_to": [], "device": "cpu"},
    }  # fmt: skip
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    request = Request(load(path, []), world_size=2)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def figures(run_dir: Path) -> dict[str, float]:
    from drumline.telemetry.events import Eval, read, series

    events = read(run_dir / "events.jsonl")
    sent = [b for b in series(events, "sent_bytes").values() if b is not None]
    return {
        "held_out_loss": list(series(events, "loss", Eval).values())[-1],
        "token_accuracy": list(series(events, "token_accuracy", Eval).values())[-1],
        "sent_bytes_a_step": statistics.mean(sent),
        "step_seconds": statistics.median(series(events, "seconds").values()),
    }


def reduce(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over seeds; the distance to DDP seed by seed, its mean and its worst."""
    table = {}
    for name, mine in runs.items():
        over = [
            a["held_out_loss"] - b["held_out_loss"] for a, b in zip(mine, runs["ddp"], strict=True)
        ]
        means = {key: statistics.mean(run[key] for run in mine) for key in mine[0]}
        part = means["sent_bytes_a_step"] / statistics.mean(
            run["sent_bytes_a_step"] for run in runs["ddp"]
        )
        table[name] = means | {
            "part_of_ddp_bytes": part,
            "over_ddp": statistics.mean(over),
            "worst_over_ddp": max(over),
        }
    return table


def show(table: dict[str, dict[str, float]]) -> None:
    print(
        f"{'method':<28}{'held-out loss':>14}{'over DDP':>10}{'worst':>9}{'bytes a step':>14}{'of DDP':>9}"
    )
    for name, row in table.items():
        print(
            f"{name:<28}{row['held_out_loss']:>14.4f}{row['over_ddp']:>+10.4f}{row['worst_over_ddp']:>+9.4f}"
            f"{row['sent_bytes_a_step']:>14,.0f}{row['part_of_ddp_bytes']:>9.2%}"
        )


if __name__ == "__main__":
    main()
