"""Compute the experts of a mixture by grouped products, with room for adapters.

transformers keeps the experts of a layer in one module, whose tensors have a matrix for each
expert. This does what the module's own forward does, in the same order, and adds what an adapter
says after each product. So no weight is changed or copied.

Shapes: N tokens, k experts that each of them chooses, S = N·k choices sorted by expert, E experts,
D the hidden size, I inputs and O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drumline.models.blocks import GETS_EQUAL_ROWS
from drumline.models.packed import Multiply, multiply_packed, packings_of
from drumline.models.router import count_choices

# The rows of a product, and how to multiply them → what an adapter adds to it, float[S, O].
Addition = Callable[[Tensor, Multiply], Tensor]


def prepare_experts(base: Any) -> None:
    """Let `run_experts` compute a module of experts.

    Raises EnvironmentFault if this version of transformers has no grouped products.
    """
    from drumline.vendor.transformers import grouped_linear

    # A compiled forward could not import it.
    base.grouped_linear = grouped_linear


def has_inputs_first(base: Any) -> bool:
    """Return whether a module of experts keeps [experts, inputs, outputs], not outputs first."""
    return bool(getattr(base, "is_transposed", type(base).__name__ in GETS_EQUAL_ROWS))


def run_experts(base: Any, additions: Mapping[str, Addition], *inputs: Tensor) -> Tensor:
    """Return what a module of experts computes, with additions to its products.

    `base`: the module, prepared, of a class that `blocks.takes_adapters` knows. `additions`: the
    name of one of its tensors → what is added to the product with it. `inputs`: those of the
    module's own forward.
    """
    if type(base).__name__ in GETS_EQUAL_ROWS:
        return _run_equal(base, additions, *inputs)
    return _run_grouped(base, additions, *inputs)


def _run_grouped(
    base: Any,
    additions: Mapping[str, Addition],
    hidden_ND: Tensor,
    chosen_Nk: Tensor,
    weights_Nk: Tensor,
) -> Tensor:
    """Return the weighted sums of the chosen experts' outputs, float[N, D].

    `chosen_Nk`: the indices of the experts. `weights_Nk`: what their outputs are multiplied by.
    """
    experts_per_token = chosen_Nk.shape[1]
    chosen_S = chosen_Nk.flatten()
    order_S = chosen_S.argsort(stable=True)
    expert_S = chosen_S[order_S]
    load_E = count_choices(chosen_Nk, base.num_experts)
    ends_E = load_E.cumsum(0, dtype=torch.int32)
    multiply = partial(_grouped_product, base.grouped_linear, ends_E)

    def product(name: str, rows: Tensor) -> Tensor:
        """Return the product of the rows with the tensor `name`, its bias and additions."""
        result = _product(base, additions, name, multiply, rows)
        if base.has_bias:
            bias_EO = getattr(base, f"{name}_bias")
            result = result + bias_EO[expert_S].to(result.dtype)
        return result

    rows_SD = hidden_ND[order_S // experts_per_token]
    if base.has_gate:
        inner = base._apply_gate(product("gate_up_proj", rows_SD))
    else:
        inner = base.act_fn(product("up_proj", rows_SD))
    out_SD = product("down_proj", inner)
    if base.has_post_expert_norm:
        out_SD = base.post_expert_norm(out_SD)
    weighted_SD = out_SD * weights_Nk.flatten()[order_S, None]
    # Choice → its row in the order by experts: the inverse of the sort.
    row_S = torch.empty_like(order_S)
    row_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    by_choice_NkD = weighted_SD[row_S].unflatten(0, chosen_Nk.shape)
    return by_choice_NkD.sum(1).to(hidden_ND.dtype)


def _run_equal(base: Any, additions: Mapping[str, Addition], rows_SD: Tensor) -> Tensor:
    """Return each row's output, float[S, D]. Each expert has the same number of rows."""
    multiply = partial(_batched_product, base.num_experts)
    gate_and_up = _product(base, additions, "gate_up_proj", multiply, rows_SD)
    gate, up = gate_and_up.chunk(2, dim=-1)
    inner = up * base.act_fn(gate)
    return _product(base, additions, "down_proj", multiply, inner)


def _product(
    base: Any, additions: Mapping[str, Addition], name: str, multiply: Multiply, rows: Tensor
) -> Tensor:
    """Return the product of the rows with the tensor `name` of a module, and its addition."""
    packing = packings_of(base).get(name)
    is_transposed = has_inputs_first(base)
    if packing is not None:
        result = multiply_packed(rows, base, packing, multiply, is_transposed)
    else:
        weight = getattr(base, name)
        if is_transposed:
            weight = weight.transpose(-2, -1)
        result = multiply(rows, weight)
    if name in additions:
        added = additions[name](rows, multiply)
        result = result + added.to(result.dtype)
    return result


def _grouped_product(
    grouped_linear: Callable[..., Tensor], ends_E: Tensor, rows_SI: Tensor, weight_EOI: Tensor
) -> Tensor:
    """Return the product of each row with its expert's matrix, float[S, O].

    `grouped_linear`: transformers' function. `ends_E`: the place after each expert's last row.
    """
    return grouped_linear(rows_SI, weight_EOI, ends_E)


def _batched_product(experts: int, rows_SI: Tensor, weight_EOI: Tensor) -> Tensor:
    """Return the same for experts that have equal numbers of rows, float[S, O]."""
    rows_ENI = rows_SI.view(experts, -1, rows_SI.shape[-1])
    product_ENO = torch.bmm(rows_ENI, weight_EOI.transpose(-2, -1))
    return product_ENO.flatten(0, 1)
