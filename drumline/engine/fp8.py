"""fp8: the matrix products of linear layers in blocks, by torchao (`precision: fp8`).

The weights stay in the type of `master`. Inputs, weights and gradients are cast where they are
used, with a scale for each row or for a whole tensor. All other operators compute as in bf16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from drumline.models.blocks import blocks
from drumline.models.classes import is_vision_language
from drumline.plan.facts import MULTIPLE
from drumline.plan.plan import Plan
from drumline.plan.rules import NO_FP8

# The first CUDA compute capability with fp8.
LEAST_CAPABILITY = (8, 9)


def apply_fp8(model: nn.Module, plan: Plan) -> None:
    """Replace linear layers by layers that multiply in fp8, in place and under the same names.

    Called before the model is sharded. On a CPU, values are rounded to fp8 and multiplied in fp32,
    which shows the numbers and not the speed.
    Raises PlanError if the GPU has no fp8, or the model no layers for it.
    """
    options = plan.config.precision
    if options.kind != "fp8":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if plan.device == "cuda" and torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        raise NO_FP8.error(f"{torch.cuda.get_device_name()} has no fp8")
    chosen: set[int] = set()
    for block in blocks(model):
        for module in block.modules():
            if _is_fit(module):
                chosen.add(id(module))
    if not chosen:
        raise NO_FP8.error(
            f"no linear layer in the blocks of {type(model).__name__} has sides that are multiples of {MULTIPLE}"
        )
    recipe = replace(
        Float8LinearConfig.from_recipe_name(options.scaling),
        emulate=plan.device == "cpu",
        enable_fsdp_float8_all_gather=options.gather == "fp8",
        pad_inner_dim=not (has_only_token_inputs(model, plan) and has_aligned_tokens(plan)),
    )
    convert_to_float8_training(
        model, config=recipe, module_filter_fn=lambda module, _name: id(module) in chosen
    )


def _is_fit(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with both sides multiples of MULTIPLE."""
    # Not a subclass: that may compute something else.
    if type(module) is not nn.Linear:
        return False
    return all(side % MULTIPLE == 0 for side in module.weight.shape)


def has_only_token_inputs(model: Any, plan: Plan) -> bool:
    """Return whether all inputs of the linear layers are tokens of the batch.

    They are not in models of images, which also compute on patches, and may not be in a user's
    module.
    """
    if plan.config.has_own_module or plan.config.images_alone:
        return False
    return not is_vision_language(model.config)


def has_aligned_tokens(plan: Plan) -> bool:
    """Return whether each product of a model of text takes a multiple of MULTIPLE tokens.

    The gradient of a weight is a sum over tokens, and `torch._scaled_mm` takes only multiples there.
    Others are padded with zeros, which copies both sides of every product, so it is done if needed.
    """
    width = plan.fixed_width
    if width is None:
        return False
    chunk = plan.config.memory.mlp_chunk or MULTIPLE
    return width % MULTIPLE == 0 and chunk % MULTIPLE == 0


def compute_gather_scales(model: nn.Module) -> None:
    """Compute the scales that FSDP2 will gather weights with. Collective.

    It takes one all-reduce in the place of one for each weight.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
