"""PEFT's layers over the experts of a mixture, with factors of their own for each expert.

PEFT has a layer (`ParamWrapper`) for each adapted tensor of the experts, one inside the other. It
adds the whole product of the factors to the tensor in each forward, in a copy as large as all
experts. Here rows go through the factors by grouped products:

    y = x W_eᵀ + alpha / r · (x A_eᵀ) B_eᵀ        e: the row's expert

Factors are kept by expert, A [E, R, I] and B [E, O, R], so that they are cut with the experts.
PEFT's files have them as blocks of the rank (`join_experts`).

Only what uses PEFT imports this module. E experts, R the rank, I inputs, O outputs of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.models.blocks import takes_adapters
from drumline.models.expert_layers import (
    Addition,
    has_inputs_first,
    prepare_experts,
    run_experts,
)
from drumline.models.packed import Multiply
from drumline.vendor.peft import ParamWrapper

# Rows of 16-bit numbers have to be multiples of 16 bytes for torch's grouped products.
RANK_MULTIPLE = 8


class ExpertFactor(nn.Module):
    """One factor of an adapter for all experts of a layer: A float[E, R, I] or B float[E, O, R]."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.num_experts = len(values)
        self.weight = nn.Parameter(values)


class AdaptedExperts(ParamWrapper):
    """PEFT's layer over one tensor of a layer of experts.

    Of several that lie one inside the other the outermost one computes; the others only have
    factors.
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the experts compute. `inputs`: those of the experts' own forward."""
        base = self.get_base_layer()
        if self.disable_adapters:
            result: Tensor = base(*inputs)
            return result
        additions: dict[str, Addition] = {}
        for layer in layers_over_experts(self):
            if layer.adapters_in_use():
                additions[layer.parameter_name] = layer.compute_addition
        return run_experts(base, additions, *inputs)

    def adapters_in_use(self) -> list[str]:
        """Return the names of the active adapters that have factors here."""
        return [name for name in self.active_adapters if name in self.lora_A]

    def compute_addition(self, rows: Tensor, multiply: Multiply) -> Tensor:
        """Return what all active adapters add to the product of rows with the tensor."""
        names = self.adapters_in_use()
        total = self._addition_of_adapter(names[0], rows, multiply)
        for name in names[1:]:
            total = total + self._addition_of_adapter(name, rows, multiply)
        return total

    def _addition_of_adapter(self, adapter: str, rows: Tensor, multiply: Multiply) -> Tensor:
        """Return what one adapter adds."""
        a_ERI = self.lora_A[adapter].weight
        b_EOR = self.lora_B[adapter].weight
        missing = -a_ERI.shape[1] % RANK_MULTIPLE
        if missing:
            # Zeros add nothing.
            a_ERI = functional.pad(a_ERI, (0, 0, 0, missing))
            b_EOR = functional.pad(b_EOR, (0, missing))
        inner = multiply(self.lora_dropout[adapter](rows), a_ERI)
        return multiply(self.scaling[adapter] * inner, b_EOR)


def layers_over_experts(layer: Any) -> Iterator[Any]:
    """Yield PEFT's layers over the tensors of a layer of experts, the outermost first."""
    while isinstance(layer, ParamWrapper):
        yield layer
        layer = layer.base_layer


def adopt_layers(model: nn.Module) -> None:
    """Turn PEFT's layers over experts into `AdaptedExperts`, with factors by expert.

    The factors' values are kept. PEFT's layers over other parameters stay as they are.
    """
    for module in list(model.modules()):
        if type(module) is not ParamWrapper:
            continue
        layer: Any = module
        base = layer.get_base_layer()
        if layer.get_param().ndim != 3 or not takes_adapters(base):
            continue
        layer.__class__ = AdaptedExperts
        prepare_experts(base)
        for adapter in list(layer.lora_A):
            a_ERI, b_EOR = split_by_expert(
                layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            )
            layer.lora_A[adapter] = ExpertFactor(a_ERI)
            layer.lora_B[adapter] = ExpertFactor(b_EOR)


def split_by_expert(layer: Any, file_a: Tensor, file_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors A [E, R, I] and B [E, O, R] of an adapter in PEFT's files.

    `file_a`: [E·R, I], the ranks of one expert after another. `file_b`: [O, R·E], the experts of
    one rank after another. `layer`: PEFT's layer over the tensor.
    """
    experts = layer.num_experts
    first = file_a.detach().unflatten(0, (experts, -1))
    second = file_b.detach().unflatten(1, (-1, experts)).permute(2, 0, 1)
    if _is_read_in_reverse(layer):
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    return first.contiguous(), second.contiguous()


def join_experts(layer: Any, a_ERI: Tensor, b_EOR: Tensor) -> tuple[Tensor, Tensor]:
    """Return an adapter's factors as PEFT's files have them; the reverse of `split_by_expert`."""
    first = a_ERI
    second = b_EOR
    if _is_read_in_reverse(layer):
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    return first.flatten(0, 1), second.permute(1, 2, 0).flatten(1, 2)


def _is_read_in_reverse(layer: Any) -> bool:
    """Return whether PEFT takes the inputs of a tensor for its outputs.

    It does so for Llama 4, whose class does not say that inputs come first. The product is the same
    if A and B change places.
    """
    base = layer.get_base_layer()
    return has_inputs_first(base) and not getattr(base, "is_transposed", False)


@torch.no_grad()
def merge_expert(layer: Any, expert: int) -> Tensor:
    """Return one expert's matrix with the products of all active adapters added, fp64.

    `layer`: PEFT's layer over the tensor. The result has the dimensions of the tensor's own.
    """
    base = layer.get_base_layer()
    merged = getattr(base, layer.parameter_name)[expert].double()
    for adapter in layer.adapters_in_use():
        a_RI = layer.lora_A[adapter].weight[expert].double()
        b_OR = layer.lora_B[adapter].weight[expert].double()
        added = layer.scaling[adapter] * (b_OR @ a_RI)
        if has_inputs_first(base):
            added = added.T
        merged = merged + added
    return merged


@torch.no_grad()
def products_of_expert(layer: Any, expert: int, rows_PI: Tensor) -> Tensor:
    """Return rows multiplied by one expert's matrix and its adapters, as in a forward, fp64[P, O].

    `rows_PI`: float64[P, I]. Only this expert has rows.
    """
    base = layer.get_base_layer()
    matrix = getattr(base, layer.parameter_name)[expert].double()
    if has_inputs_first(base):
        matrix = matrix.T
    multiply = partial(_product_of_expert, expert)
    products: Tensor = rows_PI @ matrix.T
    if layer.adapters_in_use():
        products = products + layer.compute_addition(rows_PI, multiply)
    return products


def _product_of_expert(expert: int, rows: Tensor, weight_EOI: Tensor) -> Tensor:
    """Return rows multiplied by one expert's matrix in fp64."""
    return rows @ weight_EOI[expert].double().T
