"""Pack the frozen layers and the experts of a model in 4 or 8 bits, under its adapters (QLoRA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drumline.models.blocks import blocks, expert_modules, find_base_layer, takes_adapters
from drumline.models.direct_weights import directly_read_layers
from drumline.models.packed import Bits, PackedLinear
from drumline.models.packed_experts import pack_experts
from drumline.plan.facts import is_packable


def pack(model: Any, bits: Bits, storage: torch.dtype) -> None:
    """Replace each frozen linear layer in the blocks by a `PackedLinear`, also beneath adapters.

    The tensors of a mixture's experts are packed, too (models.packed_experts). What has a shape
    that cannot be packed stays, and so does what is read without its layer (models.direct_weights).
    What is on the meta device is to be filled later. `storage`: the type that weights are gathered in.
    """
    directly_read = {id(layer) for layer in directly_read_layers(model)}
    for path in expert_modules(model):
        experts = find_base_layer(model.get_submodule(path))
        if takes_adapters(experts):
            pack_experts(experts, bits, storage)
    # Embedding and head lie outside of the blocks: they stay as they are.
    for block in blocks(model) or [model]:
        # Lists, since the loops replace children.
        owners: list[Any] = list(block.modules())
        for owner in owners:
            for name, layer in list(owner.named_children()):
                if id(layer) in directly_read or not _is_packable(layer):
                    continue
                setattr(owner, name, PackedLinear(layer, bits, storage))
                if not layer.weight.is_meta:
                    _measure_magnitudes(owner)


def _is_packable(layer: Any) -> bool:
    """Return whether a layer is linear and frozen, with a shape that can be packed."""
    from drumline.vendor.transformers import Conv1D

    if not isinstance(layer, nn.Linear | Conv1D) or layer.weight.requires_grad:
        return False
    return is_packable(tuple(layer.weight.shape))


def _measure_magnitudes(owner: Any) -> None:
    """Set DoRA's lengths to those of the weight as it is packed.

    They were measured before the weight was rounded. `owner`: PEFT's layer, or any other module.
    """
    for magnitude in getattr(owner, "lora_magnitude_vector", {}).values():
        weight = owner.base_layer.weight + owner.get_delta_weight("default")
        inputs_dim = 0 if owner.fan_in_fan_out else 1
        magnitude.weight.data.copy_(weight.norm(dim=inputs_dim))
