"""A module of the user's own: what makes it, and the weights that a run has left for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from drumline.checkpoint.load import best_or_latest, load, pointed
from drumline.core.model import ModelConfig
from drumline.core.plan import Plan
from drumline.core.registry import find_function, imported
from drumline.dist.seeds import derive, drawing
from drumline.errors import CheckpointError
from drumline.models.freeze import freeze
from drumline.models.shards import canonical_tensors


def own_build(plan: Plan) -> Callable[[], nn.Module]:
    """The function that makes it, with its options. Raises ConfigError where there is none, and so does the function where it fails."""
    model = plan.config.model
    builder = partial(find_builder(model, Path(plan.base_dir)), **model.options)
    return lambda: imported(builder, model.builder or "", _where(model), doing="calling")


def find_builder(model: ModelConfig, base_dir: Path) -> Callable[..., nn.Module]:
    """The function alone. Raises ConfigError where there is none."""
    return find_function(model.builder or "", "models", base_dir, _where(model), "the model", "install it, or write file.py:function")


def _where(model: ModelConfig) -> str:
    return "model.path" if model.kind == "python" else "model.kind"


def read_module(plan: Plan, run_dir: Path, which: str) -> tuple[Any, Path]:
    """(the module on the CPU in eval mode, with the weights of the best or the last checkpoint in `run_dir`; that checkpoint)."""
    root = run_dir / "checkpoints"
    checkpoint = best_or_latest(root) if which == "best" else pointed(root, "latest")
    if checkpoint is None:
        raise CheckpointError("nothing was saved", where=str(run_dir))
    with drawing(derive(plan.config.run.seed, "weights")):
        module = own_build(plan)()
    freeze(module, plan.config.model.freeze)
    load(checkpoint, canonical_tensors(module), alone=True)
    return module.eval(), checkpoint


def export_weights(plan: Plan, which: str) -> Path:
    """The module's state dict as RUN/export/model.safetensors, of the best or the last checkpoint; its floats in
    `checkpoint.export_dtype`, where that is not auto."""
    folder = Path(plan.run_dir) / "export"
    module, _ = read_module(plan, folder.parent, which)
    if (dtype := plan.config.checkpoint.export_dtype) != "auto":
        module.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    folder.mkdir(exist_ok=True)
    save_model(module, str(folder / "model.safetensors"))
    return folder
