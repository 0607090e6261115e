"""A Plan as text: the one line above the progress display, and the whole of it for --dry-run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from drumline.core.config import LoRAConfig
from drumline.core.plan import Layout, Plan

EXPORT_FAILED = "the run is finished and its weights are saved, but the export failed"


def size(bytes_: float) -> str:
    """Bytes in the largest binary unit that keeps them above one: 2.01 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(bytes_) < 1024:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.2f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.2f} TiB"


def count(number: float) -> str:
    """A count the way models are named: 134.5M, 8.03B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.4g}{unit}"
    return f"{number:g}"


def strategy_name(plan: Plan) -> str:
    """What the plan runs, mixes written out: `ddp`, `fsdp2 × tp 2`."""
    return plan.config.strategy.title(plan.data_parallel, plan.mesh)


def way_to_export(plan: Plan) -> str:
    """Say how to get the model of a finished run after its export has failed."""
    config = plan.config
    if config.plain:
        return "drumline train with --resume exports again, and trains nothing"
    command = f"drumline export {shlex.quote(plan.run_dir)} --to FOLDER"
    is_merged = isinstance(config.adapter, LoRAConfig) and not config.checkpoint.export_adapter
    if is_merged and config.model.as_published:
        return f"get the adapter by itself with {command} --adapter"
    return f"export again with {command}"


def plan_line(plan: Plan) -> str:
    predicted, world = plan.predicted, plan.mesh.world_size
    model = plan.config.model.id or plan.config.model.config.get("model_type", "model")
    model = model.removeprefix("package:").rstrip("/").split("/")[-1]
    if predicted.parameters:
        frozen = predicted.trainable not in (None, predicted.parameters)
        model += (
            f" {count(predicted.parameters)}"
            + f", {count(predicted.trainable or 0)} of them learn" * frozen
        )
    parts = [
        model,
        f"{plan.config.algorithm.kind} {strategy_name(plan)} on {world * plan.devices_per_rank} × {plan.device}",
        plan.precision,
        plan.batch.rule(plan.mesh.data_ranks),
        f"{plan.steps if plan.steps is not None else '?'} steps",
        f"lr {plan.lr:g} {plan.config.schedule.kind}",
    ]
    if estimate := predicted.estimate:
        parts.append(
            f"{size(estimate.memory.reserved)} of {size(estimate.limit)} a rank at its peak"
        )
    return " · ".join(parts)


def explain(plan: Plan) -> str:
    """The whole plan: its numbers, and why they were chosen where the user left it open."""
    data, mesh, pipeline, moves = (
        plan.data,
        plan.mesh,
        list[tuple[str, str]](),
        plan.config.memory.activation_offload,
    )
    if plan.pipeline:
        stages = [
            f"stage {index} on rank {index % mesh.pp}: layers {a}–{b - 1}"
            for index, (a, b) in enumerate(plan.pipeline.layers)
        ]
        pipeline = [
            (
                "pipeline",
                "; ".join(
                    [plan.pipeline.schedule, *(stages or ["stages known once the model is"])]
                ),
            )
        ]
    data_line = "not prepared yet: `drumline prepare` or `drumline train` does it"
    if data:
        tokens = f" ({count(data.train_tokens)} tokens)" if data.train_tokens else ""
        data_line = f"{data.train_samples} training samples{tokens}, {data.eval_samples} held out"
        if data.epoch_samples:
            data_line += f"; {data.epoch_samples} an epoch"
    rows = [
        ("run folder", plan.run_dir),
        ("model", _model(plan)),
        (
            "mesh",
            " × ".join(f"{name} {size}" for name, size in mesh.model_dump().items())
            + f" = {mesh.world_size} ranks",
        ),
        (
            "engine",
            f"{plan.engine}, {strategy_name(plan)}, {plan.backend} on {plan.device}, {plan.precision}",
        ),
        (
            "memory",
            f"activation checkpointing {checkpointing(plan)}, offload {plan.offload}{' and activations' * moves}",
        ),
        ("batch", plan.batch.rule(mesh.data_ranks)),
        *pipeline,
        (
            "steps",
            f"{plan.steps if plan.steps is not None else 'known once the data is prepared'}, {_warm_up(plan)} of them warm-up",
        ),
        ("learning rate", f"{plan.lr:g}, {plan.config.schedule.kind}"),
        ("data", data_line),
    ]
    rows += [
        ("mixture", line.removeprefix("data.train: ")) for line in (data.mixture if data else ())
    ]
    if plan.deepspeed:
        rows.append(("DeepSpeed", json.dumps(plan.deepspeed)))
    predicted = plan.predicted
    rows += [("adapter", line) for line in predicted.unadapted]
    if estimate := predicted.estimate:
        memory = estimate.memory
        rows.append(
            (
                "state a rank",
                f"{size(memory.parameters + memory.gradients + memory.optimizer)} of weights, gradients and moments",
            )
        )
        rows.append(
            ("peak a rank", f"{size(memory.reserved)} of {size(estimate.limit)}, in {memory.phase}")
        )
    if predicted.flops_per_token:
        rows.append(("FLOPs a token", f"{predicted.flops_per_token:.4g}"))
    return "\n".join(
        f"{name:<14} {value}" for name, value in (*rows, *(("because", line) for line in plan.why))
    )


def _model(plan: Plan) -> str:
    """Return the model, and where its weights or its shape come from."""
    model = plan.config.model
    if model.builder is not None:
        return f"a module of your own ← {model.builder}"
    return f"{model.id or 'written out'} ← {plan.model_path or 'config'}"


def _warm_up(plan: Plan) -> str:
    """Steps of warm-up; their share where it is known alone."""
    schedule = plan.config.schedule
    share = schedule.warmup_ratio if plan.steps is None and schedule.warmup_steps is None else 0.0
    return f"{100 * share:g}%" if share else str(plan.warmup_steps)


def checkpointing(layout: Layout) -> str:
    """The kind of activation checkpointing, and of how many blocks, where not of all."""
    number = layout.config.memory.checkpointed_blocks
    return layout.activation_checkpointing + (f" of {number} blocks" if number else "")


def flow(value: Any) -> str:
    """A value as YAML writes it on one line: `fsdp2`, `{kind: fsdp2, tp: 2}`."""
    if isinstance(value, dict):
        if set(value) == {"kind"}:
            return str(value["kind"])
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def default_run_dir(config_path: Path) -> str:
    """runs/<name of the YAML>, below the current folder."""
    return str(Path("runs") / config_path.stem)
