"""The experts of a mixture with tensors packed in 4 or 8 bits (QLoRA), as models.packed has layers.

A tensor [E, R, C] of the experts is replaced by its codes, a parameter [E, R, C × bits / 8 / bytes
of an entry] with `_packed` after its name. A product unpacks the tensor for all experts of the
layer, and backward unpacks it again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from drumline.models.expert_layers import prepare_experts, run_experts
from drumline.models.packed import Bits, PackedTensor
from drumline.plan.facts import is_packable


class PackedExperts(nn.Module):
    """What a class of experts has besides its own once its tensors are packed.

    `packings`: the name of a tensor → how it is packed.
    """

    packings: dict[str, PackedTensor]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the experts compute. `inputs`: those of the class's own forward."""
        return run_experts(self, {}, *inputs)


def pack_experts(module: Any, bits: Bits, storage: torch.dtype) -> None:
    """Pack the frozen tensors [experts, …] of a module of experts, in place.

    Those whose shapes cannot be packed stay, as do trainable ones. `storage`: the type that weights
    are gathered in.
    """
    packings = {}
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.ndim != 3 or weight.requires_grad or not is_packable(tuple(weight.shape)):
            continue
        packing = PackedTensor(name, weight.shape, bits, storage)
        codes = torch.empty(packing.packed_shape, dtype=storage, device="meta")
        if not weight.is_meta:
            codes = packing.pack_weight(weight.detach().float())
        delattr(module, name)
        module.register_parameter(packing.parameter_name, nn.Parameter(codes, requires_grad=False))
        packings[name] = packing
    if packings:
        module.packings = packings
        prepare_experts(module)
        module.__class__ = _packed_class(module.__class__)


@lru_cache
def _packed_class(experts_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class of packed experts that has all else from `experts_class`."""
    return type(experts_class.__name__, (PackedExperts, experts_class), {})
