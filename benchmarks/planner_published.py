"""Published measurements as data, and what the planner says of the same runs.

What a row does not publish and the planner has to know is `open`: each value that it may have had is predicted, and nothing is fitted.
A row that lacks something without which there is no prediction (its batch or its length), or that asks for a mix that Drumline has not,
says so in `without`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GiB = 2**30
# MosaicML's MPT by size, as a model of Llama's kind with as many parameters; that rows of 2,048 tokens were trained follows from the
# published MFU: rate × (6 × parameters + 12 × layers × hidden × length) = MFU × peak, to 0.3%.
MPT_7B = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 10923, "vocabulary": 50368, "tied": True}
MPT_13B = {"layers": 40, "hidden": 5120, "heads": 40, "intermediate": 13653, "vocabulary": 50368, "tied": True}
MPT_30B = {"layers": 48, "hidden": 7168, "heads": 64, "intermediate": 19115, "vocabulary": 50368, "tied": True}
MPT_70B = {"layers": 80, "hidden": 8192, "heads": 64, "intermediate": 21845, "vocabulary": 50368, "tied": True}


@dataclass(frozen=True)
class Published:
    """`measured`: reserved and active (bytes), tokens_per_s (of a device; a range as its middle), mfu, seconds (of a step)."""

    name: str
    measured: dict[str, float]
    sections: dict[str, Any] = field(default_factory=dict)
    open: dict[str, list[Any]] = field(default_factory=dict)
    without: str = ""


def _run(model: str | dict[str, Any], cluster: dict[str, Any], length: int, micro_batch: int | None, **more: Any) -> dict[str, Any]:
    said = {"id": model} if isinstance(model, str) else {"shape": model}
    batch = {} if micro_batch is None else {"micro_batch": micro_batch}  # accumulation 1: the global batch follows the devices
    return {"model": said, "cluster": cluster, "data": {"max_length": length}, "batch": batch, "precision": "bf16", **more}


PLAIN = {"kind": "pretrain", "loss_chunk": 0}
TITAN: dict[str, Any] = {"strategy": "fsdp2", "algorithm": PLAIN}
# llm-foundry's kernels are fused; of our ways to run, a compiled one is the nearest.
FOUNDRY: dict[str, Any] = {**TITAN, "compile": {"enabled": True}}
AC = "memory.activation_checkpointing"
H100_96 = {"device": "h100-80g", "per_node": 8}

ROWS = [
    Published(
        "Llama-2-7B, 8×H100, FSDP2, full AC",
        {"active": 22.73 * GiB, "reserved": 31.02 * GiB, "tokens_per_s": 6200},
        _run("llama-2-7b", H100_96, 2048, 8, **TITAN, memory={"activation_checkpointing": "full"}),
    ),
    Published(
        "Llama-2-7B, 8×H100, FSDP2, selective AC",
        {"active": 49.54 * GiB, "reserved": 59.41 * GiB, "tokens_per_s": 6700},
        _run("llama-2-7b", H100_96, 2048, 8, **TITAN, memory={"activation_checkpointing": "selective"}),
    ),
    Published(
        "Llama-3.1-8B, 8×H100, FSDP2, selective AC",
        {"reserved": 82.4 * GiB, "tokens_per_s": 5762},
        _run("llama-3.1-8b", H100_96, 8192, 2, **TITAN, memory={"activation_checkpointing": "selective"}),
    ),
    Published(
        "Llama-3.1-8B, 128×H100, FSDP2, selective AC",
        {"reserved": 67.0 * GiB, "tokens_per_s": 5605},
        _run(
            "llama-3.1-8b", {"device": "h100-80g", "per_node": 8, "nodes": 16}, 8192, 2,
            **TITAN, memory={"activation_checkpointing": "selective"},
        ),
        {"cluster.inter": ["400Gb", "8x400Gb"]},
    ),
    *(
        Published(
            f"7B, 8×A100-80, data 2 × sequence 4, {name}",
            {"reserved": gb * 1e9, "seconds": ms / 1000},
            without="its length is not published, and Drumline has no ZeRO with sequence parallelism",
        )
        for name, gb, ms in (
            ("ZeRO-3, full AC", 52.8, 13_000),
            ("ZeRO-2, full AC", 43.8, 13_194),
            ("ZeRO-3", 75.2, 10_329),
            ("ZeRO-2", 62.3, 10_050),
        )
    ),
    Published("Qwen2.5-3B, 8×A100-40, ZeRO-2", {"reserved": 34.5 * GiB}, without="its length and micro-batch are not published"),
    Published(
        "7B, 8×H100, FSDP, micro-batch 6",
        {"tokens_per_s": 10_643, "mfu": 0.464},
        _run(MPT_7B, {"device": "h100-80g", "per_node": 8}, 2048, 6, **FOUNDRY),
    ),
    Published(
        "13B, 8×A100-80, FSDP",
        {"tokens_per_s": 2262, "mfu": 0.596},
        _run(MPT_13B, {"device": "a100-80g", "per_node": 8}, 2048, None, **FOUNDRY),
        {"batch.micro_batch": [1, 2, 3]},
    ),
    Published(
        "70B, 512×H100, FSDP",
        {"tokens_per_s": 1007, "mfu": 0.413},
        _run(MPT_70B, {"device": "h100-80g", "per_node": 8, "nodes": 64, "inter": "8x400Gb"}, 2048, None, **FOUNDRY),
        {"batch.micro_batch": [4, 8], AC: ["none", "full"]},
    ),
    Published(
        "30B, 128×A100-40, FSDP",
        {"tokens_per_s": 865, "mfu": 0.523},
        _run(MPT_30B, {"device": "a100-40g", "per_node": 8, "nodes": 16, "inter": "8x200Gb"}, 2048, None, **FOUNDRY),
        {"batch.micro_batch": [1, 4], AC: ["none", "full"]},
    ),
]  # fmt: skip


def predicted(row: Published) -> list[dict[str, Any]]:
    """For each way to fill in what is open: its values, the planner's figures under the names of `measured`, the relative errors."""
    ways = [dict(zip(row.open, values, strict=True)) for values in itertools.product(*row.open.values())]
    found = []
    for way in ways if not row.without else []:
        figures = _figures(row.sections, way)
        errors = {name: said / value - 1 for name, value in row.measured.items() if (said := figures[name]) is not None}
        found.append({"open": way, "predicted": {name: figures[name] for name in row.measured}, "error": errors})
    return found


def _figures(sections: dict[str, Any], way: dict[str, Any]) -> dict[str, float | None]:
    import yaml

    from drumline.core.load import Loaded, load_text
    from drumline.planner.question import ask
    from drumline.planner.search.search import evaluate

    said = yaml.safe_dump({**sections, "data": {**sections["data"], "train": [{"kind": "file", "path": "rows.jsonl"}]}})
    overrides = [f"{key}={value}" for key, value in way.items()]
    question = ask(Loaded(load_text(said, overrides, "row"), Path("row"), Path()), lambda *_: None).question
    estimate = evaluate(question, question.config, "row").estimate
    devices = question.cluster.world_size
    return {
        "active": estimate.memory.peak,
        "reserved": estimate.memory.reserved - estimate.memory.overhead,
        "tokens_per_s": estimate.tokens_per_s / devices,
        "mfu": estimate.mfu,
        "seconds": estimate.seconds.total,
    }
