"""fp8: the matrix products of linear layers in blocks, by torchao (`precision: fp8`). Their weights stay in the type of `master`; inputs,
weights and gradients are cast where they are used, with a scale for each row or for a whole tensor. All else computes as in bf16."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from drumline.core.facts import MULTIPLE
from drumline.core.plan import Plan
from drumline.core.rules import NO_FP8
from drumline.models.blocks import blocks


def apply_fp8(model: nn.Module, plan: Plan) -> None:
    """In place, under the same names, before the model is spread. On a CPU values are rounded to fp8 and multiplied in fp32, which shows
    the numbers and not the speed. Raises PlanError where the GPU or the model has none of it."""
    options = plan.config.precision
    if options.kind != "fp8":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if plan.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise NO_FP8.error(f"{torch.cuda.get_device_name()} has no fp8")
    inner = {
        id(module)
        for block in blocks(model)
        for module in block.modules()
        if type(module) is nn.Linear
    }

    def chosen(module: nn.Module, _: str) -> bool:
        return (
            id(module) in inner
            and isinstance(module, nn.Linear)
            and not any(side % MULTIPLE for side in module.weight.shape)
        )

    if not any(chosen(module, "") for module in model.modules()):
        raise NO_FP8.error(
            f"no linear layer in the blocks of {type(model).__name__} has sides that are multiples of {MULTIPLE}"
        )
    recipe = replace(
        Float8LinearConfig.from_recipe_name(options.scaling),
        emulate=plan.device == "cpu",
        enable_fsdp_float8_all_gather=options.gather == "fp8",
    )
    convert_to_float8_training(model, config=recipe, module_filter_fn=chosen)


def gathered_scales(model: nn.Module) -> None:
    """The scales that FSDP2 will gather weights with, by one all-reduce in the place of one for each weight. Collective."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
