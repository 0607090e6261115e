"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019) by the plan that a Hugging Face model carries, or `models.blocks` has for it.

The plan names a style for each module that is cut; all else is held whole on each rank and computed alike. Weights become DTensors, so
a checkpoint holds them whole, under their own names. Between modules there are plain tensors, whole or this rank's part, as the next
one expects them. transformers.distributed.tensor_parallel explains the styles.

With sequence parallelism (Korthikanti et al. 2022) norms and the residual stream between the layers that are cut are cut by tokens over
the same ranks. A region (attention, a feed-forward) gathers the tokens that it begins with, and adds up and deals out what it ends with.
Each rank's backward is then one summand of each gradient of what is not cut, so that is added up. B rows, T tokens, t of them here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from drumline.core.facts import ROWS_CUT, TP_STYLES
from drumline.dist.mesh import first_row
from drumline.errors import PlanError
from drumline.models.blocks import (
    blocks_in_a_row,
    cut_layers,
    regions,
    tensor_plan,
    vocabulary,
    whole_layer,
)
from drumline.models.cut_trial import weights_on_parts
from drumline.parallel.experts import apply_experts, with_weights
from drumline.parallel.norms import local


def apply_tp(
    model: Any, mesh: DeviceMesh, sequence_parallel: bool = False, keeps_parts: bool = True
) -> None:
    """Cut the model over `mesh` (one dimension) in place. All ranks hold the same weights before, or meta tensors; LoRA may be in place.
    `keeps_parts`: with sequence parallelism, what a region gathers is gathered again for its backward (nothing recomputes blocks). A
    compiled region keeps it whole.

    Raises PlanError for a model without a plan, and for a style that is not known here.
    """
    plan = tensor_plan(model)
    if not plan or not TP_STYLES.issuperset(plan.values()):
        unknown = ", ".join(sorted({*plan.values()} - TP_STYLES))
        what = f"{type(model).__name__} " + (
            f"is cut in ways not known here: {unknown}" if plan else "has no tensor-parallel plan"
        )
        raise PlanError(what, where="strategy.tp", fix="use strategy=fsdp2")
    embedding, head = vocabulary(model)
    if embedding is not None:
        _cut_vocabulary(whole_layer(embedding), head and whole_layer(head), mesh)
    stream = Stream(mesh, keeps_parts) if sequence_parallel else None
    if stream is None:  # else all gradients of weights that are not cut are added up
        plan = dict.fromkeys(weights_on_parts(model), "replicated_with_grad_allreduce") | plan
    _require_untied(model, [name for name, style in plan.items() if style != "replicate"])
    for name, style in plan.items():
        _cut(model.get_submodule(name), style, mesh, stream)
    if stream is not None:
        _cut_stream(model, stream)


def _require_untied(model: Any, names: list[str]) -> None:
    """Raises PlanError for a weight that a module to be cut shares with another: each would get a part of its own, and train it alone."""
    # Which are tied again.
    ends = {
        id(weight)
        for layer in vocabulary(model)
        if layer is not None
        for weight in layer.parameters()
    }
    places = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    for name in names:
        for own, weight in model.get_submodule(name).named_parameters(name):
            if places[id(weight)] > 1 and id(weight) not in ends:
                raise PlanError(
                    f"{own} is also another module's weight",
                    where="tp_plan",
                    fix="leave both out of it, or use fsdp2",
                )


def _moved(
    x: Tensor,
    mesh: DeviceMesh,
    lies: Placement,
    after: Placement,
    back: Placement | None = None,
    shape: Any = None,
) -> Tensor:
    """A tensor that `lies` on the ranks in one way, in another; its gradient goes the opposite way. `back`: how that comes, if not as what
    is returned lies. `shape`: of the whole, where parts may differ."""
    stride = None if shape is None else torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(x, mesh, [lies], run_check=False, shape=shape, stride=stride)
    moved: Tensor = placed.redistribute(placements=[after]).to_local(
        grad_placements=None if back is None else [back]
    )
    return moved


class Stream:
    """The residual stream, cut by tokens. `rows`, `length`: B and T of the batch in hand. Until a block has begun it is whole, as in
    trials."""

    def __init__(self, mesh: DeviceMesh, keeps_parts: bool) -> None:
        self.mesh, self.keeps_parts, self.rows, self.length = mesh, keeps_parts, 0, 0

    def cut(self, whole_BTD: Tensor) -> Tensor:
        self.rows, self.length = whole_BTD.shape[:2]
        return _moved(whole_BTD, self.mesh, Replicate(), Shard(1))

    def gathered(self, part_BtD: Tensor, back: Placement | None = None) -> Tensor:
        """`back`: Partial, where what is computed of it differs by rank."""
        shape = (part_BtD.shape[0], self.length, *part_BtD.shape[2:])
        return _moved(part_BtD, self.mesh, Shard(1), Replicate(), back, shape)

    def summed(self, product: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks of float[B, T, D], or of float[B·T, D]: float[B, t, D], or float[B·t, D]."""
        if product.ndim > 2:
            return _moved(product, self.mesh, Partial(), Shard(1))
        product_BTD = product.unflatten(0, (self.rows, self.length))
        return self.summed(product_BTD).flatten(0, 1)


class _Parts:
    """What autograd keeps in the place of a gathered tensor: this rank's part, which is gathered again when it is asked for."""

    def __init__(self, part: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.part, self.gather = part.detach(), gather
        self.storage: Any = (
            None  # of the gathered tensor, while it runs: autograd keeps this object
        )
        self.kept = self.left = 0
        self.again: Tensor | None = None

    @contextlib.contextmanager
    def instead_of(self, whole: Tensor) -> Iterator[None]:
        self.storage = whole.untyped_storage()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.storage = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage() is not self.storage:
            return tensor
        self.kept += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.again is None:
            self.again, self.left = self.gather(self.part), self.kept
        again, self.left = self.again, self.left - 1
        if not self.left:
            self.again = None
        return again.as_strided(*kept)


def _region(stream: Stream, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward on the tokens of all ranks, given this rank's."""

    def run(*given: Any, **options: Any) -> Any:
        part_BtD = given[0] if given else options.pop("hidden_states")
        is_flat = part_BtD.ndim == 2  # a mixture may give its shared expert rows end to end
        if is_flat:
            part_BtD = part_BtD.unflatten(0, (stream.rows, -1))
        device = part_BtD.device.type
        if torch.is_autocast_enabled(device):  # its layers would cast it, each for itself
            part_BtD = part_BtD.to(torch.get_autocast_dtype(device))
        whole = stream.gathered(part_BtD, Partial())
        if is_flat:
            whole = whole.flatten(0, 1)
        # Hooks on what autograd keeps would break the graph of a compiled block.
        keeps_whole = torch.compiler.is_compiling() or not stream.keeps_parts
        if keeps_whole or not torch.is_grad_enabled():
            return forward(whole, *given[1:], **options)
        with _Parts(part_BtD, torch.no_grad()(stream.gathered)).instead_of(whole):
            return forward(whole, *given[1:], **options)

    return run


def _cut_stream(model: nn.Module, stream: Stream) -> None:
    """Blocks in a row (of a pipeline, those of a stage) hand on this rank's tokens: the first cuts them, the last gathers them."""
    row = blocks_in_a_row(model)
    for name in regions(model):
        region = model.get_submodule(name)
        region.forward = _region(stream, region.forward)
    for name, block in row.items():
        for module in block.modules():
            # Also the experts' router, and factors of LoRA.
            if any(
                p is not None and p.requires_grad and not isinstance(p, DTensor)
                for p in module._parameters.values()
            ):
                module.forward = with_weights(
                    module, module.forward, _with_options(_summed, stream.mesh)
                )
        path, _, number = name.rpartition(".")
        if f"{path}.{int(number) - 1}" not in row:
            block.register_forward_pre_hook(partial(_enter, stream), with_kwargs=True)
        if f"{path}.{int(number) + 1}" not in row:
            block.register_forward_hook(partial(_leave, stream))


def _enter(
    stream: Stream, _block: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if given:
        return (stream.cut(given[0]), *given[1:]), options
    return given, {**options, "hidden_states": stream.cut(options["hidden_states"])}


def _leave(stream: Stream, _block: Any, _given: Any, result: Any) -> Any:
    return (
        (stream.gathered(result[0]), *result[1:])
        if isinstance(result, tuple)
        else stream.gathered(result)
    )


def _summed(mesh: DeviceMesh, weight: Tensor) -> Tensor:
    """A weight that each rank uses on tokens or heads of its own, so that its gradient is the sum over ranks."""
    return (
        weight
        if isinstance(weight, DTensor)
        else _moved(weight, mesh, Replicate(), Replicate(), Partial())
    )


def _cut(module: nn.Module, style: str, mesh: DeviceMesh, stream: Stream | None) -> None:
    """One module by its style."""
    if style == "experts":
        apply_experts(module, mesh, shares_tokens=stream is None)
    elif style == "replicated_with_grad_allreduce":
        if stream is None:  # else it is done for all
            module.forward = with_weights(module, module.forward, _with_options(_summed, mesh))
    elif style != "replicate":
        for layer in cut_layers(module, style):
            by_rows, transposed = style in ROWS_CUT, _transposed(layer)
            if not (isinstance(layer, nn.Linear) or transposed):
                raise PlanError(
                    f"{type(layer).__name__} is no linear layer",
                    where="tp_plan",
                    fix="cut linear layers alone",
                )
            _place(layer, "weight", mesh, Shard(int(by_rows == transposed)))
            if by_rows and layer.bias is not None:
                _place(layer, "bias", mesh, Shard(0))
            how = _by_rows if by_rows else _by_columns
            layer.forward = _with_options(how, layer, style, mesh, stream)


def _with_options(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return `function` with its first arguments, as functools.partial does.

    torch.compile takes two partials for different code, so each block would be compiled anew; two of
    these it compares by what they do and hold.
    """

    def run(*inputs: Any) -> Any:
        return function(*options, *inputs)

    return run


def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module._parameters[name]
    assert whole is not None
    cut = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def _by_rows(layer: Any, style: str, mesh: DeviceMesh, stream: Stream | None, x: Tensor) -> Tensor:
    """The outputs of this rank's rows of the weight; of all rows, where they are needed."""
    weight = layer.weight
    x = x if stream else _moved(x, mesh, Replicate(), Replicate(), Partial())
    out = nn.functional.linear(x, _matrix(layer), None if layer.bias is None else local(layer.bias))
    if style == "colwise":
        return out
    shape = (*out.shape[:-1], weight.shape[int(_transposed(layer))])
    return _moved(out, mesh, Shard(out.ndim - 1), Replicate(), Partial() if stream else None, shape)


def _by_columns(
    layer: Any, style: str, mesh: DeviceMesh, stream: Stream | None, x: Tensor
) -> Tensor:
    """This rank's columns of the weight times its part of the inputs, added up over the ranks; with a stream, of this rank's tokens."""
    matrix = _matrix(layer)
    if style != "rowwise" and stream is None:
        x = _moved(x, mesh, Replicate(), Shard(x.ndim - 1))
    elif style != "rowwise":
        x = x.narrow(-1, first_row(x.shape[-1], mesh), matrix.shape[1])
    product = nn.functional.linear(x, matrix)
    out = stream.summed(product) if stream else _moved(product, mesh, Partial(), Replicate())
    return out if layer.bias is None else out + local(layer.bias).to(out.dtype)


def _transposed(layer: Any) -> bool:
    """GPT-2's layers have inputs first."""
    return type(layer).__name__ == "Conv1D"


def _matrix(layer: Any) -> Tensor:
    """This rank's part of a layer's weight: [outputs, inputs]."""
    return local(layer.weight).T if _transposed(layer) else local(layer.weight)


def _cut_vocabulary(embedding: nn.Module, head: nn.Module | None, mesh: DeviceMesh) -> None:
    """Each rank holds some rows of embedding and head, of the last ones fewer where they do not divide; a tied pair stays one parameter.

    The head's own forward gathers all logits; where the loss can take hidden states it is never called (`models.head.Outputs`).
    """
    # A pipeline's stage has something else in the place of what other stages hold.
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", head)
    if tied and not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
        return
    if isinstance(head, nn.Linear):
        _cut(head, "colwise_gather_output", mesh, None)
    if not isinstance(embedding, nn.Embedding):
        return
    first = first_row(embedding.num_embeddings, mesh)
    _place(embedding, "weight", mesh, Shard(0))
    rows, padding = local(embedding.weight).shape[0], embedding.padding_idx
    own_padding = None
    if padding is not None and first <= padding < first + rows:
        own_padding = padding - first
    if tied:
        embedding.weight = head.weight  # type: ignore[union-attr,assignment]
    inner = with_weights(embedding, embedding.forward, local)

    def look_up(ids: Tensor) -> Tensor:
        """A token's row is looked up on the rank that has it and is zero elsewhere; the sum over ranks is the embedding."""
        mine = ids - first
        elsewhere = (mine < 0) | (mine >= rows)
        # An adapter over the embedding reads the number of the padding's row among all rows.
        embedding.padding_idx = own_padding
        try:
            part = inner(mine.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        finally:
            embedding.padding_idx = padding
        return _moved(part, mesh, Partial(), Replicate())

    embedding.forward = look_up  # type: ignore[assignment]
