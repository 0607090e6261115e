"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019) by the plan that a Hugging Face model carries.

The plan names a style for each module that is cut; all else is held whole on each rank and computed alike. Weights become DTensors, so
a checkpoint holds them whole, under their own names. Between modules there are plain tensors, whole or this rank's part, as the next
one expects them. transformers.distributed.tensor_parallel explains the styles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from drumline.core.facts import ROWS_CUT, TP_STYLES
from drumline.dist.mesh import first_row
from drumline.errors import PlanError
from drumline.models.blocks import cut_layers, tensor_plan, vocabulary, whole_layer
from drumline.vendor.torch import prepare_rowwise_input


def apply_tp(model: Any, mesh: DeviceMesh) -> None:
    """Cut the model over `mesh` (one dimension) in place. All ranks hold the same weights before, or meta tensors; LoRA may be in place.

    Raises PlanError for a model without a plan, and for a style that is not known here.
    """
    plan = tensor_plan(model)
    if not plan or not TP_STYLES.issuperset(plan.values()):
        unknown = ", ".join(sorted({*plan.values()} - TP_STYLES))
        what = f"{type(model).__name__} " + (f"is cut in ways not known here: {unknown}" if plan else "has no tensor-parallel plan")
        raise PlanError(what, where="strategy.tp", fix="use strategy=fsdp2")
    embedding, head = vocabulary(model)
    if embedding is not None:
        _cut_vocabulary(whole_layer(embedding), head and whole_layer(head), mesh)
    for name, style in plan.items():
        _cut(model.get_submodule(name), style, mesh)


def _cut(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """One module by its style."""
    if style == "replicated_with_grad_allreduce":
        # Each rank uses the weight on its own heads, so its gradient is the sum over ranks.
        def summed_in_backward(weight: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

        module.forward = _with_weights(module, module.forward, summed_in_backward)
    elif style != "replicate":
        whole: dict[str, Any] = (
            {} if style in ("colwise", "rowwise") else {"output_layouts" if style in ROWS_CUT else "input_layouts": Replicate()}
        )
        how: ParallelStyle = ColwiseParallel(**whole) if style in ROWS_CUT else _Rowwise(**whole)
        for layer in cut_layers(module, style):
            parallelize_module(layer, mesh, how, src_data_rank=None)


class _Rowwise(RowwiseParallel):
    """For a width that does not divide, too: torch would take each rank's part of the input to be as wide as its own."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh) -> Any:
        part = inputs[0]
        if input_layouts == desired_input_layouts and mod.in_features % device_mesh.size():
            shape = torch.Size((*part.shape[:-1], mod.in_features))
            strides = torch.empty(shape, device="meta").stride()
            inputs = (DTensor.from_local(part, device_mesh, input_layouts, run_check=False, shape=shape, stride=strides),)
        return prepare_rowwise_input(input_layouts, desired_input_layouts, mod, inputs, device_mesh)


def _cut_vocabulary(embedding: nn.Module, head: nn.Module | None, mesh: DeviceMesh) -> None:
    """Each rank holds some rows of embedding and head, of the last ones fewer where they do not divide; a tied pair stays one parameter.

    The head's own forward gathers all logits; where the loss can take hidden states it is never called (`models.head.Outputs`).
    """
    # A pipeline's stage has something else in the place of what other stages hold.
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", head)
    if tied and not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
        return
    if isinstance(head, nn.Linear):
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
    if not isinstance(embedding, nn.Embedding):
        return
    whole = embedding.weight
    cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    embedding.weight = nn.Parameter(cut, requires_grad=whole.requires_grad)
    first, rows = first_row(embedding.num_embeddings, mesh), cut.to_local().shape[0]
    padding = embedding.padding_idx
    embedding.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None
    if tied:
        embedding.weight = head.weight  # type: ignore[union-attr,assignment]
    local = _with_weights(embedding, embedding.forward, lambda weight: weight.to_local())

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        """A token's row is looked up on the rank that has it and is zero elsewhere; the sum over ranks is the embedding."""
        mine = ids - first
        elsewhere = (mine < 0) | (mine >= rows)
        part = local(mine.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

    embedding.forward = look_up  # type: ignore[assignment]


def _with_weights(
    module: nn.Module, forward: Callable[..., torch.Tensor], change: Callable[[Any], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """`forward` as it is with `change(weight)` in the place of each of the module's own weights.

    They are taken from the module at each call: FSDP2 puts others there for as long as a forward runs.
    """

    def run(*inputs: Any) -> torch.Tensor:
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        module._parameters.update({name: change(weight) for name, weight in own.items()})  # type: ignore[misc]
        try:
            return forward(*inputs)
        finally:
            module._parameters.update(own)

    return run
