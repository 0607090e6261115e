"""Runs made here to hold the planner against: real ones over gloo on this machine's CPUs, under each strategy (planner_accuracy.py)."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.hardware.detect import Machine

LENGTH = 128
STEPS = 7  # two to settle, one that is counted, the others are timed
# A small Llama: what grows with the hidden size, the vocabulary and the length all show in the peak.
SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
# For runs that show only that something works.
TINY = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
# SmolLM2-135M with 4 of its 30 layers: most of it is the embedding, and logits are wide.
SMOL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
# As in tests/distributed/rows.py: by default all of a small model's parameters stay whole under ZeRO 3.
CUT = {"kind": "zero3", "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
FULL, SELECTIVE = ({"memory": {"activation_checkpointing": kind}} for kind in ("full", "selective"))
PLAIN = {"algorithm": {"loss_chunk": 0}}
LORA = {"adapter": {"kind": "lora", "r": 8}}


@dataclass(frozen=True)
class Run:
    """8 samples a step in micro-batches of 2, where `sections` do not say otherwise."""

    name: str
    processes: int
    sections: dict[str, Any] = field(default_factory=dict)
    shape: str = "small"


def _run(
    name: str,
    processes: int,
    strategy: Any,
    *more: dict[str, Any],
    shape: str = "small",
    **batch: int,
) -> Run:
    """Return a run of a strategy; `more`: further sections, `batch`: keys of the section batch."""
    sections: dict[str, Any] = {"strategy": strategy}
    for part in more:
        sections |= part
    if batch:
        sections["batch"] = batch
    return Run(name, processes, sections, shape)


def _runs_of_one_process() -> Iterator[Run]:
    yield _run("single", 1, "single")
    yield _run("single, micro-batch 8", 1, "single", micro_batch=8)
    yield _run("single, selective AC", 1, "single", SELECTIVE)
    yield _run("single, full AC", 1, "single", FULL)
    yield _run("single, plain cross-entropy", 1, "single", PLAIN)
    yield _run("single, LoRA", 1, "single", LORA)
    yield _run("single, SGD", 1, "single", {"optimizer": {"kind": "sgd"}})
    yield _run("single, bf16", 1, "single", {"precision": "bf16"})


def _runs_of_two_processes() -> Iterator[Run]:
    yield _run("ddp 2", 2, "ddp")
    yield _run("ddp 2, micro-batch 1", 2, "ddp", micro_batch=1)
    yield _run("ddp 2, LoRA", 2, "ddp", LORA)
    yield _run("ddp 2, full AC", 2, "ddp", FULL)
    yield _run("fsdp2 2", 2, "fsdp2")
    yield _run("fsdp2 2, one micro-batch", 2, "fsdp2", micro_batch=4)
    yield _run("fsdp2 2, grad-op", 2, {"kind": "fsdp2", "reshard_after_forward": False})
    yield _run("fsdp2 2, full AC", 2, "fsdp2", FULL)
    yield _run("fsdp2 2, selective AC", 2, "fsdp2", SELECTIVE)
    yield _run("fsdp2 2, LoRA", 2, "fsdp2", LORA)
    yield _run("fsdp2 2, bf16", 2, "fsdp2", {"precision": "bf16"})
    yield _run("fsdp2 2, plain cross-entropy", 2, "fsdp2", PLAIN)
    yield _run("zero1 2", 2, "zero1")
    yield _run("zero2 2", 2, "zero2")
    yield _run("zero3 2", 2, CUT)
    yield _run("tp 2", 2, "tp")
    yield _run("tp 2, full AC", 2, "tp", FULL)
    yield _run("tp 2, plain cross-entropy", 2, "tp", PLAIN)
    yield _run("pp 2, 1f1b", 2, "pp")
    yield _run("pp 2, gpipe", 2, {"kind": "pp", "schedule": "gpipe"})
    yield _run("pp 2, interleaved", 2, {"kind": "pp", "schedule": "interleaved"})
    yield _run("cp 2", 2, "cp")
    yield _run("fsdp2 × cp 2", 2, {"kind": "fsdp2", "cp": 2})
    yield _run("local_sgd 2", 2, {"kind": "local_sgd", "period": 4})
    yield _run("diloco 2", 2, {"kind": "diloco", "period": 4})


def _runs_of_four_processes() -> Iterator[Run]:
    yield _run("ddp 4", 4, "ddp")
    yield _run("fsdp2 4", 4, "fsdp2")
    yield _run("fsdp2 4, hybrid 2 × 2", 4, {"kind": "fsdp2", "replicate": 2})
    yield _run("fsdp2 2 × tp 2", 4, {"kind": "fsdp2", "tp": 2})
    yield _run("ddp 2 × pp 2", 4, {"kind": "ddp", "pp": 2})
    yield _run("tp 2 × pp 2", 4, {"kind": "ddp", "tp": 2, "pp": 2})
    yield _run("zero2 4", 4, "zero2")
    yield _run("zero3 4", 4, CUT)


def _runs_of_other_shapes() -> Iterator[Run]:
    yield _run("tiny, single", 1, "single", shape="tiny")
    yield _run("tiny, micro-batch 8", 1, "single", shape="tiny", micro_batch=8)
    yield _run("smollm2, single", 1, "single", shape="smollm2", micro_batch=4)
    yield _run("smollm2, plain cross-entropy", 1, "single", PLAIN, shape="smollm2", micro_batch=4)
    yield _run("smollm2, ddp 2", 2, "ddp", shape="smollm2")
    yield _run("smollm2, fsdp2 2", 2, "fsdp2", shape="smollm2")
    yield _run("smollm2, fsdp2 2, full AC", 2, "fsdp2", FULL, shape="smollm2")


RUNS = [
    *_runs_of_one_process(),
    *_runs_of_two_processes(),
    *_runs_of_four_processes(),
    *_runs_of_other_shapes(),
]


def measure(runs: list[Run], kept: Path) -> Iterator[dict[str, Any]]:
    """Train each for a few steps and yield its name, processes, and what was predicted and measured by category; one that fails is yielded
    with its `error`. What a run leaves in `kept` (plan.json, events.jsonl) is used where it is there already: it is then only predicted
    anew. Each has processes of its own (DeepSpeed keeps its engines, and they would count); checkpoints go at once."""
    from tests.distributed.ranks import run_plans

    for run in runs:
        place = kept / run.name.replace(" ", "-").replace(",", "")
        try:
            if not (place / "events.jsonl").exists():
                with tempfile.TemporaryDirectory() as folder:
                    plan = _plan(run, Path(folder) / "work")
                    run_plans([plan], run.processes, timeout=900, counted=True)
                    place.mkdir(parents=True, exist_ok=True)
                    for name in ("plan.json", "events.jsonl"):
                        shutil.copy(plan.with_name(name), place)
            categories = held_against(place / "plan.json")
            yield {"name": run.name, "processes": run.processes, "categories": categories}
        except AssertionError as failed:
            yield {"name": run.name, "processes": run.processes, "error": str(failed)[-2000:]}


# Of RUNS, those whose seconds are held against the plan's; each is launched as a user's run is.
TIMED = (
    "single",
    "single, bf16",
    "single, full AC",
    "ddp 2",
    "fsdp2 2",
    "tp 2",
    "pp 2, 1f1b",
    "smollm2, single",
    "tiny, single",
    "tiny, micro-batch 8",
)


def timed(rounds: int, names: Sequence[str] = TIMED) -> Iterator[dict[str, Any]]:
    """Predicted and measured seconds of a step of each run, measured in turn, `rounds` times. Threads are those that the launcher gives a
    rank; the prediction is by this machine's calibration."""
    from drumline.launch.local import launch_trial
    from drumline.plan.plan import Plan
    from drumline.telemetry.events import newest_measurement, read

    found: dict[str, dict[str, Any]] = {}
    chosen = [run for run in RUNS if run.name in names]
    for _ in range(rounds):
        for run in chosen:
            with tempfile.TemporaryDirectory() as folder:
                path = _plan(run, Path(folder) / "work")
                plan = Plan.load(path)
                assert plan.predicted.estimate is not None
                code = launch_trial(plan, path, run.name, lambda *_: None)
                measured = newest_measurement(read(path.with_name("events.jsonl")))
                assert code == 0 and measured is not None, (run.name, code)
                estimate = plan.predicted.estimate
                each = found.setdefault(
                    run.name, {"name": run.name, "processes": run.processes, "measured": []}
                )
                each |= {"predicted": estimate.seconds.total, "calibrated": estimate.calibrated}
                each["measured"].append(measured.seconds["total"])
    yield from found.values()


def _plan(run: Run, folder: Path) -> Path:
    shape = {"small": SMALL, "smollm2": SMOL, "tiny": TINY}[run.shape]
    return ready(folder, {"model_type": "llama", **shape}, LENGTH, run.processes, run.sections)


def ready(
    folder: Path,
    shape: dict[str, Any],
    length: int,
    processes: int,
    sections: dict[str, Any],
    words: int | None = None,
    machine: Machine | None = None,
    saves: bool = True,
) -> Path:
    """Return the plan.json of a run that may start: a random model of a Hugging Face config.

    Rows have `words` words; by default so many that each fills `length` tokens. `machine`: the host
    that the plan is for; None: this one. `saves`: the run writes checkpoints, for which there must
    be room.
    """
    import yaml

    from drumline.config.load import load
    from drumline.train.setup import Request, claim_run_dir, make_plan
    from tests.tiny import tiny_tokenizer

    folder.mkdir(parents=True)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    row_words = 4 * length if words is None else words
    row_count = 80 if words is None else 80 * length // words
    texts = [
        " ".join(draw.choices(["left", "right", "drum", "sum"], k=row_words))
        for _ in range(row_count)
    ]
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config: dict[str, Any] = {
        "model": {"id": None, "config": shape, "tokenizer": str(folder / "tokenizer")},
        "algorithm": {"kind": "pretrain"},
        "data": {
            "train": [{"kind": "file", "path": "rows.jsonl"}],
            "max_length": length,
            "workers": 1,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_samples": 8, "micro_batch": 2},
        "optimizer": {"lr": 1e-4},
        "schedule": "constant",
        "eval": {"at_start": False},
        "checkpoint": {"export": "none", "asynchronous": False},
        "run": {"dir": str(folder / "run"), "report_to": [], "device": "cpu", "steps": STEPS},
    }
    for name, values in sections.items():
        config[name] = (
            {**config[name], **values}
            if isinstance(values, dict) and isinstance(config.get(name), dict)
            else values
        )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    request = Request(load(path, []), world_size=processes, machine=machine)
    plan = make_plan(request, on_progress=lambda *_: None)
    return claim_run_dir(plan if saves else plan.measurement_plan(), request)[0]


def held_against(plan_path: Path) -> dict[str, dict[str, float]]:
    """By category what the planner says now of a run that has ended, and what was measured in it. The plan speaks of one rank of a
    pipeline, the fullest; where two are nearly as full, another may have had the highest peak, so states are those of the rank that is
    nearest to the plan's."""
    from drumline.plan.plan import Plan
    from drumline.telemetry.events import newest_measurement, read
    from drumline.telemetry.plan_accuracy import compare
    from drumline.train.replan import planning_question
    from drumline.train.setup import predict

    plan = Plan.load(plan_path)
    # The tokenizer went with the folder of the run. The planner would read it to count rows of new tokens, which no run here has.
    model = plan.config.model.model_copy(update={"tokenizer": None})
    plan = plan.model_copy(update={"config": plan.config.model_copy(update={"model": model})})
    known = planning_question(plan)
    estimate = predict(plan, known.facts, known.cluster).predicted.estimate
    assert estimate is not None
    measured = newest_measurement(read(plan_path.with_name("events.jsonl")))
    assert measured is not None and measured.final
    rows = {
        row.category: {"predicted": row.predicted, "measured": row.measured}
        for row in compare(estimate, measured)
    }
    states = ("parameters", "gradients", "optimizer")
    distance = [
        sum(abs(measured.by_rank[s][r] - rows[s]["predicted"]) for s in states)
        for r in range(plan.mesh.world_size)
    ]
    for name in states:
        rows[name]["measured"] = measured.by_rank[name][distance.index(min(distance))]
    return rows
