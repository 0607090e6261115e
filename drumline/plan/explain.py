"""A plan as text: one line above the progress display, and all of it for --dry-run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from drumline.config.config import LoRAConfig
from drumline.plan.plan import Layout, PipelinePlan, Plan

EXPORT_FAILED = "the run is finished and its weights are saved, but the export failed"


def size(bytes_: float) -> str:
    """Return a number of bytes in the largest binary unit that does not exceed it: 2.01 GiB."""
    if abs(bytes_) < 1024:
        return f"{bytes_:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        bytes_ /= 1024
        if abs(bytes_) < 1024:
            return f"{bytes_:.2f} {unit}"
    return f"{bytes_ / 1024:.2f} TiB"


def count(number: float) -> str:
    """Return a number with a suffix, as models are named: 134.5M, 8.03B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.4g}{unit}"
    return f"{number:g}"


def strategy_name(plan: Plan) -> str:
    """Return the strategy of a plan with its degrees of parallelism: `ddp`, `fsdp2 × tp 2`."""
    return plan.config.strategy.title(plan.data_parallel, plan.mesh)


def way_to_export(plan: Plan) -> str:
    """Return how to get the model of a finished run whose export has failed."""
    config = plan.config
    if config.has_own_module:
        return "drumline train with --resume exports again, and trains nothing"
    command = f"drumline export {shlex.quote(plan.run_dir)} --to FOLDER"
    is_merged = isinstance(config.adapter, LoRAConfig) and not config.checkpoint.export_adapter
    if is_merged and config.model.as_published:
        return f"get the adapter by itself with {command} --adapter"
    return f"export again with {command}"


def plan_line(plan: Plan) -> str:
    """Return the plan in one line, for above the progress display."""
    config = plan.config
    devices = plan.mesh.world_size * plan.devices_per_rank
    steps = "?" if plan.steps is None else plan.steps
    parts = [
        named_model(plan),
        f"{config.algorithm.kind} {strategy_name(plan)} on {devices} × {plan.device}",
        plan.precision,
        plan.batch.describe_product(plan.mesh.data_ranks),
        f"{steps} steps",
        f"lr {plan.lr:g} {config.schedule.kind}",
    ]
    estimate = plan.predicted.estimate
    if estimate:
        reserved = size(estimate.memory.reserved)
        parts.append(f"{reserved} of {size(estimate.limit)} reserved a rank at its peak")
    return " · ".join(parts)


def named_model(plan: Plan) -> str:
    """Return the model's name and its number of parameters, as far as it is known."""
    model = plan.config.model
    full_name = model.builder or model.id or model.config.get("model_type", "model")
    name = full_name.removeprefix("package:").rstrip("/").split("/")[-1]
    predicted = plan.predicted
    if not predicted.parameters:
        return name
    name += f" {count(predicted.parameters)}"
    if predicted.trainable not in (None, predicted.parameters):
        name += f", {count(predicted.trainable or 0)} of them learn"
    return name


def explain(plan: Plan) -> str:
    """Return the whole plan as lines: its numbers, and why those were chosen that were left open."""
    config = plan.config
    steps = "known once the data is prepared" if plan.steps is None else plan.steps
    memory = f"activation checkpointing {describe_checkpointing(plan)}, offload {_describe_offload(plan)}"
    rows = [
        ("run folder", plan.run_dir),
        ("model", _model(plan)),
        ("mesh", _mesh(plan)),
        (
            "engine",
            f"{plan.engine}, {strategy_name(plan)}, {plan.backend} on {plan.device}, {plan.precision}",
        ),
        ("memory", memory),
        ("batch", plan.batch.describe_product(plan.mesh.data_ranks)),
    ]
    if plan.pipeline:
        rows.append(("pipeline", _stages(plan.pipeline, plan.mesh.pp)))
    rows += [
        ("steps", f"{steps}, {_warm_up(plan)} of them warm-up"),
        ("learning rate", f"{plan.lr:g}, {config.schedule.kind}"),
        ("data", describe_data(plan)),
    ]
    if plan.data:
        rows += [("mixture", line.removeprefix("data.train: ")) for line in plan.data.mixture]
    if plan.deepspeed:
        rows.append(("DeepSpeed", json.dumps(plan.deepspeed)))
    rows += _prediction_rows(plan)
    rows += [("because", line) for line in plan.why]
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _describe_offload(plan: Plan) -> str:
    """Return what is kept on the host or on NVMe: `none`, `cpu`, `cpu and activations`.

    A place by itself stands for all that the strategy offloads.
    """
    parts: list[str] = []
    if plan.offload != "none":
        parts.append(plan.offload)
    if plan.config.optimizer.offload:
        parts.append("optimizer states")
    if plan.config.memory.activation_offload:
        parts.append("activations")
    return " and ".join(parts) or "none"


def _mesh(plan: Plan) -> str:
    """Return the degree of each dimension: `pp 1 × replicate 2 × … = 2 ranks`."""
    degrees = [f"{name} {degree}" for name, degree in plan.mesh.model_dump().items()]
    return f"{' × '.join(degrees)} = {plan.mesh.world_size} ranks"


def _stages(pipeline: PipelinePlan, ranks: int) -> str:
    """Return the schedule of a pipeline, and the rank and the layers of each stage."""
    parts: list[str] = [pipeline.schedule]
    for index, (first, end) in enumerate(pipeline.layers):
        parts.append(f"stage {index} on rank {index % ranks}: layers {first}–{end - 1}")
    if not pipeline.layers:
        parts.append("stages known once the model is")
    return "; ".join(parts)


def describe_data(plan: Plan) -> str:
    """Return the numbers of samples, or how to prepare the data if it is not."""
    data = plan.data
    if not data:
        return "not prepared yet: `drumline prepare` or `drumline train` does it"
    tokens = f" ({count(data.train_tokens)} tokens)" if data.train_tokens else ""
    line = f"{data.train_samples} training samples{tokens}, {data.eval_samples} held out"
    if data.epoch_samples:
        line += f"; {data.epoch_samples} an epoch"
    return line


def _prediction_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows about predictions: weights without adapter, memory and FLOPs."""
    predicted = plan.predicted
    rows = [("adapter", line) for line in predicted.unadapted]
    estimate = predicted.estimate
    if estimate:
        memory = estimate.memory
        state = size(memory.parameters + memory.gradients + memory.optimizer)
        peak = f"{size(memory.reserved)} of {size(estimate.limit)} reserved, in {memory.phase}"
        rows.append(("state a rank", f"{state} of weights, gradients and moments"))
        rows.append(("peak a rank", peak))
    if predicted.flops_per_token:
        rows.append(("FLOPs a token", f"{predicted.flops_per_token:.4g}"))
    return rows


def _model(plan: Plan) -> str:
    """Return the model, and the source of its weights or its shape."""
    model = plan.config.model
    if model.builder is not None:
        return f"a module of your own ← {model.builder}"
    return f"{model.id or 'written out'} ← {plan.model_path or 'config'}"


def _warm_up(plan: Plan) -> str:
    """Return the steps of warm-up, or their share as long as the number of steps is unknown."""
    schedule = plan.config.schedule
    is_share = plan.steps is None and schedule.warmup_steps is None
    if is_share and schedule.warmup_ratio:
        return f"{100 * schedule.warmup_ratio:g}%"
    return str(plan.warmup_steps)


def describe_checkpointing(layout: Layout) -> str:
    """Return the kind of activation checkpointing, with the number of blocks if not all have it."""
    blocks = layout.config.memory.checkpointed_blocks
    if blocks is not None:
        return f"{layout.activation_checkpointing} of {blocks} blocks"
    return layout.activation_checkpointing


def describe_recomputation(layout: Layout) -> str:
    """Return the activation checkpointing of a layout, and what else saves memory in its blocks."""
    parts = [describe_checkpointing(layout)]
    if layout.config.memory.activation_offload:
        parts.append("offloaded")
    if layout.config.memory.mlp_chunk:
        parts.append("in chunks")
    return " + ".join(parts)


def flow_style(value: Any) -> str:
    """Return a value as YAML writes it on one line: `fsdp2`, `{kind: fsdp2, tp: 2}`."""
    if isinstance(value, dict):
        if set(value) == {"kind"}:
            return str(value["kind"])
        pairs = [f"{key}: {flow_style(inner)}" for key, inner in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_style, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return str(value)


def default_run_dir(config_path: Path) -> str:
    """Return the run folder of a YAML without run.dir: `runs/` and the YAML's name."""
    return str(Path("runs") / config_path.stem)
