"""Activations of a layout by tracing our own engine at two numbers of layers: no memory, seconds, nothing but shapes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

import drumline
from drumline.core.config import CompileConfig, Config, LoRAConfig
from drumline.core.estimate import Activations
from drumline.core.facts import ModelFacts
from drumline.core.files import write_whole
from drumline.core.mesh import Mesh
from drumline.core.plan import DataPlan, Layout, Plan, Predicted
from drumline.core.process import run_module
from drumline.core.registry import make
from drumline.core.strategy import StrategySpec
from drumline.errors import DrumlineError
from drumline.hardware.detect import cache_dir
from drumline.models.load import load_config
from drumline.planner.tracing.run import Traced, Untraceable, run

logger = logging.getLogger(__name__)
# Part of the name of what is stored: raise it when a trace would come out otherwise than before.
VERSION = 4
CHILD_SECONDS = 300
LONGEST_PATTERN = 8  # kinds of layers that repeat (five local ones, then a global one): no more than so many are traced twice


def trace(config: Config, model_path: str | None, layout: Layout, facts: ModelFacts) -> Activations | None:
    """Bytes besides weights, gradients and moments while a micro-batch of `layout` runs: traced without memory at two numbers of layers,
    and extended along a line. The result is kept on disk, by all that it depends on.

    On the CPU whatever the device: bf16 by the CPU's autocast, attention by its flash kernel, as a GPU's saves its result and one number a
    row. FSDP2 and ZeRO are traced as one process with weights in the type that they are gathered in (what they gather is no activation);
    tensor and context parallelism as rank 0 of torch's fake process group, in a child. None, and one line in the log, where a model
    cannot be traced: the formula is as good as there is.
    """
    try:
        question = question_of(config, model_path, layout, facts)
        stored = cache_dir() / "traces" / f"{_key(question)}.json"
        with contextlib.suppress(OSError, ValueError):
            return Activations.model_validate_json(stored.read_text())
        found = _activations(question, layout)
    except (Untraceable, DrumlineError) as reason:
        logger.warning("%s is not traced, its activations are by formula: %s", facts.name, reason)
        return None
    with contextlib.suppress(OSError):
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stored, found.model_dump_json(), shared=True)
    return found


def question_of(config: Config, model_path: str | None, layout: Layout, facts: ModelFacts) -> dict[str, Any]:
    """All that a trace depends on, as JSON. `layers`: the two numbers of layers."""
    if facts.vision_language:
        raise Untraceable("it sees images of many sizes")
    if layout.engine == "pipeline" and layout.mesh.tp * layout.mesh.cp > 1:
        raise Untraceable("its pipeline's stages are cut")
    plain: dict[str, Any] = {"strategy": make(StrategySpec, "single"), "compile": CompileConfig()}
    if isinstance(config.adapter, LoRAConfig):
        plain["adapter"] = config.adapter.model_copy(update={"quantize": "none"})
    plan = Plan(
        config=config.model_copy(update=plain),
        run_dir="",
        mesh=Mesh(tp=layout.mesh.tp, cp=layout.mesh.cp),
        engine="native",
        cp_method=config.strategy.context_method(),
        device="cpu",
        backend="gloo",
        precision="fp32" if layout.precision == "fp32" else "bf16",
        activation_checkpointing=layout.activation_checkpointing,
        batch=layout.batch,
        lr=0.0,
        data=DataPlan(train_cache="", labels=("0", "1")) if config.head in ("text", "image") else None,
        model_path=model_path,
        bidirectional=facts.bidirectional,
        first_position=facts.first_position or 0,
        predicted=Predicted(),
    )
    low = config.strategy.gathered_in(plan.precision, config.images_alone)
    if layout.engine == "deepspeed" and plan.precision != "fp32":
        low = plan.precision
    hf_config = load_config(model_path, config.model)
    layers = _layers(getattr(hf_config.get_text_config(), "layer_types", None) or [], facts.layers)
    return {
        "plan": json.loads(plan.model_dump_json()),
        "rows": layout.rows,
        "length": layout.length,
        "dtype": low,
        "layers": layers,
        "model": hf_config.to_dict(),
    }


def _layers(kinds: list[str], layers: int) -> tuple[int, int]:
    """Two numbers of layers whose difference has the kinds of layers in the model's own proportion."""
    period = next((p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))), 1)
    if period > LONGEST_PATTERN:
        raise Untraceable("its layers do not repeat")
    few = 2 * period if 4 * period <= layers and period == 1 else period
    if 2 * few > layers:
        raise Untraceable("it has too few layers to go on from")
    return few, 2 * few


def _key(question: dict[str, Any]) -> str:
    """The key of a question by its content, without paths on disk and without what does not change the training step."""
    config = question["plan"]["config"]
    matters = {name: config[name] for name in ("model", "adapter", "algorithm", "precision", "memory")}
    plan = {**question["plan"], "config": {**matters, "packing": config["data"]["packing"]}, "model_path": None, "batch": None}
    versions = [VERSION, drumline.__version__, *(metadata.version(name) for name in ("torch", "transformers"))]
    text = json.dumps({**question, "plan": plan, "versions": versions}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _activations(question: dict[str, Any], layout: Layout) -> Activations:
    apart = layout.mesh.tp * layout.mesh.cp > 1
    few, more = in_child(question) if apart else traces(question)
    tokens = layout.rows * layout.length / layout.mesh.cp
    step = more.layers - few.layers

    def line(few_bytes: int, more_bytes: int) -> tuple[int, int]:
        """(of a block, of the ends) of what grows with the layers."""
        block = (more_bytes - few_bytes) // step
        return block, few_bytes - few.layers * block

    block, ends = line(few.saved_at["loss"], more.saved_at["loss"])
    saved = more.saved_at["loss"]
    # A block stands on what those up to it have saved.
    ahead = [more.peaks_at[str(i)] - (i + 1) * block for i in range(more.layers)]
    behind = [more.peaks_at.get(f"-{i}", 0) - (i + 1) * block for i in range(more.layers)]
    return Activations(
        saved_block=block / tokens,
        saved_ends=ends / tokens,
        live_forward=max(0, *ahead) / tokens,
        live_backward=max(0, *behind) / tokens,
        live_loss=max(0, more.peaks_at["loss"] - saved) / tokens,
        live_loss_backward=max(0, more.peaks_at.get("-loss", 0) - saved) / tokens,
        copies=line(few.copies, more.copies),
        copies_kept=line(few.copies_kept, more.copies_kept),
        source="trace",
    )


def traces(question: dict[str, Any]) -> Iterator[Traced]:
    """The traces at each of the question's numbers of layers."""
    plan = Plan.model_validate(question["plan"])
    for layers in question["layers"]:
        model = plan.config.model
        fewer = model.model_copy(update={"config": {**model.config, "num_hidden_layers": layers}})
        config = plan.config.model_copy(update={"model": fewer})
        yield run(plan.model_copy(update={"config": config}), question["rows"], question["length"], question["dtype"])


def in_child(question: dict[str, Any]) -> list[Traced]:
    """The traces, made in a process of their own: this one may be a rank of a real process group."""
    code, out, err = run_module("drumline.planner.tracing.trace", json.dumps(question, default=str), CHILD_SECONDS)
    if code is None:
        raise Untraceable(f"no answer within {CHILD_SECONDS} s")
    lines = out.strip().splitlines() or [""]
    if code or not lines[-1].startswith("["):
        lines = err.strip().splitlines() or ["it ended without a reason"]
        raise Untraceable(lines[-1])
    return [Traced(**traced) for traced in json.loads(lines[-1])]


def _child() -> None:
    """Trace as rank 0 of a process group that sends nothing: the question on stdin, the answer the last line of stdout."""
    import torch.distributed as dist

    from drumline.parallel import context_parallel
    from drumline.vendor.torch import FakeStore

    context_parallel._same_in_parts = lambda *_: True  # a proof needs ranks that answer; a run makes it
    question = json.load(sys.stdin)
    world_size = Plan.model_validate(question["plan"]).mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        print(json.dumps([asdict(traced) for traced in traces(question)]))
    except Untraceable as reason:
        sys.exit(str(reason))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _child()
