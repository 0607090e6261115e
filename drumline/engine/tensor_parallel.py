"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019) by a plan of styles.

The plan comes with the Hugging Face model, or `models.blocks` has one for it. It names a style for
each module that is cut (transformers.distributed.tensor_parallel explains the styles). All other
modules are whole on each rank, and all ranks compute the same in them. Weights become DTensors, so
a checkpoint holds them whole, under their own names. What passes between modules are plain tensors:
whole, or this rank's part, as the next module expects them.

With sequence parallelism (Korthikanti et al. 2022) the same ranks also cut the norms and the
residual stream by tokens. A region (attention, a feed-forward) gathers its inputs over the tokens,
and reduces and scatters its outputs. A weight that is not cut then sees other tokens on each rank,
so its gradients are summed over the ranks.

Shapes: B rows, T tokens, t of them on this rank.
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

from drumline.dist.mesh import first_row
from drumline.engine.experts import (
    ExpertRanks,
    apply_expert_parallelism,
    apply_experts,
    expert_ranks,
    expert_ranks_of_tp,
    forward_with_replaced_weights,
)
from drumline.engine.norms import local
from drumline.errors import PlanError
from drumline.models.blocks import (
    blocks_in_a_row,
    column_parallel_modules,
    cut_layers,
    embedding_and_head,
    find_base_layer,
    tensor_plan,
)
from drumline.models.containers import product_dtype
from drumline.models.cut_trial import modules_with_partial_gradients
from drumline.models.packed import PackedLinear
from drumline.models.router_load import note_tensor_parallelism
from drumline.plan.facts import COLUMN_PARALLEL, TP_STYLES
from drumline.plan.plan import Plan

# Styles that leave a module whole.
REPLICATED = "replicate"
REPLICATED_ON_PARTS = "replicated_with_grad_allreduce"
# The style of a module that computes all experts of a layer.
EXPERTS = "experts"


def apply_tensor_and_expert_parallelism(
    plan: Plan, model: nn.Module, world_mesh: DeviceMesh | None
) -> None:
    """Cut a model, or a part of it, over the ranks of tp and ep as planned, in place. Collective.

    `world_mesh`: of all ranks; None for one process alone. Raises PlanError as `apply_tp` does.
    """
    if world_mesh is None or plan.mesh.tp * plan.mesh.ep == 1:
        return
    cuts_tokens = plan.stream_parts > 1
    experts: ExpertRanks | None = None
    if plan.mesh.ep > 1:
        experts = expert_ranks(world_mesh, cuts_tokens)
    if plan.mesh.tp > 1:
        keeps_parts = plan.activation_checkpointing == "none"
        apply_tp(model, world_mesh["tp"], cuts_tokens, keeps_parts, experts)
    elif experts is not None:
        apply_expert_parallelism(model, experts)


def apply_tp(
    model: Any,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    keeps_parts: bool = True,
    experts: ExpertRanks | None = None,
) -> None:
    """Cut the model over `mesh` (one dimension) in place.

    All ranks come with the same weights, or with meta tensors. LoRA may be in place.
    `keeps_parts`: with sequence parallelism autograd keeps only this rank's part of what a region
    gathers, and gathers it again in backward. False if blocks are checkpointed, which has the same
    effect. A compiled region always keeps the whole tensor.
    `experts`: how experts are cut over data ranks, too. None: over `mesh` alone, if the plan cuts
    them.

    Raises PlanError for a model without a plan, and for a style that is not known here.
    """
    plan = tensor_plan(model)
    _require_known_styles(model, plan)
    note_tensor_parallelism(model, mesh.get_local_rank(), mesh.size(), sequence_parallel)
    embedding, head = embedding_and_head(model)
    if embedding is not None:
        whole_head = None if head is None else find_base_layer(head)
        _shard_vocabulary(find_base_layer(embedding), whole_head, mesh)
    sequence_sharding: SequenceSharding | None = None
    if sequence_parallel:
        sequence_sharding = SequenceSharding(mesh, keeps_parts)
    else:
        # With sequence parallelism, the gradients of all weights that are not cut are summed.
        plan = dict.fromkeys(modules_with_partial_gradients(model), REPLICATED_ON_PARTS) | plan
    _require_untied(model, [name for name, style in plan.items() if style != REPLICATED])
    for name, style in plan.items():
        is_cut_over_data_ranks = style == EXPERTS and experts is not None
        if not is_cut_over_data_ranks:
            _shard_module(model.get_submodule(name), style, mesh, sequence_sharding)
    if experts is not None:
        apply_expert_parallelism(model, experts)
    if sequence_sharding is not None:
        _shard_between_blocks(model, sequence_sharding)


def _require_known_styles(model: Any, plan: dict[str, str]) -> None:
    """Raise PlanError for a model without a plan, and for a style that is not known here."""
    class_name = type(model).__name__
    unknown = sorted(set(plan.values()) - TP_STYLES)
    if not plan:
        what = f"{class_name} has no tensor-parallel plan"
    elif unknown:
        what = f"{class_name} is cut in ways not known here: {', '.join(unknown)}"
    else:
        return
    raise PlanError(what, where="strategy.tp", fix="use strategy=fsdp2")


def _require_untied(model: Any, names: list[str]) -> None:
    """Raise PlanError for a weight that a module to be cut shares with another module.

    Each of the two would get a part of its own, and train it alone.
    """
    # Embedding and head are tied again after they are cut.
    ids_of_tied: set[int] = set()
    for layer in embedding_and_head(model):
        if layer is not None:
            ids_of_tied.update(id(weight) for weight in layer.parameters())
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(weight) for weight in module._parameters.values())
    for name in names:
        for full_name, weight in model.get_submodule(name).named_parameters(name):
            if uses[id(weight)] > 1 and id(weight) not in ids_of_tied:
                raise PlanError(
                    f"{full_name} is also another module's weight",
                    where="tp_plan",
                    fix="leave both out of it, or use fsdp2",
                )


def _redistribute(
    x: Tensor,
    mesh: DeviceMesh,
    before: Placement,
    after: Placement,
    grad: Placement | None = None,
    shape: Any = None,
) -> Tensor:
    """Bring a tensor from one placement on the ranks to another, and its gradient back.

    `grad`: the placement in which the gradient of the result comes; None: `after`. `shape`: of the
    whole tensor, if parts may differ in size.
    """
    stride = None
    if shape is not None:
        stride = torch.empty(shape, device="meta").stride()
    grad_placements = None
    if grad is not None:
        grad_placements = [grad]
    placed = DTensor.from_local(x, mesh, [before], run_check=False, shape=shape, stride=stride)
    moved = placed.redistribute(placements=[after])
    result: Tensor = moved.to_local(grad_placements=grad_placements)
    return result


class SequenceSharding:
    """Sequence parallelism: shards the residual stream by tokens over the ranks of `mesh`.

    `rows`, `length`: B and T of the current batch; 0 before the first one.
    """

    def __init__(self, mesh: DeviceMesh, keeps_parts: bool) -> None:
        """`keeps_parts`: see `apply_tp`."""
        self.mesh = mesh
        self.keeps_parts = keeps_parts
        self.rows = 0
        self.length = 0

    def shard(self, whole_BTD: Tensor) -> Tensor:
        """Return this rank's tokens of the whole hidden states, [B, t, D]."""
        self.rows, self.length = whole_BTD.shape[:2]
        return _redistribute(whole_BTD, self.mesh, Replicate(), Shard(1))

    def gather(self, part_BtD: Tensor, grad: Placement | None = None) -> Tensor:
        """Return the hidden states of all tokens, [B, T, D].

        `grad`: Partial if the ranks compute different things of it; None: all compute the same.
        """
        shape = (part_BtD.shape[0], self.length, *part_BtD.shape[2:])
        return _redistribute(part_BtD, self.mesh, Shard(1), Replicate(), grad, shape)

    def reduce_scatter(self, product: Tensor) -> Tensor:
        """Return this rank's tokens of a sum over the ranks.

        `product`: this rank's summand, float[B, T, D] or float[B·T, D]. The result is float[B, t,
        D] or float[B·t, D].
        """
        if product.ndim > 2:
            return _redistribute(product, self.mesh, Partial(), Shard(1))
        product_BTD = product.unflatten(0, (self.rows, self.length))
        return self.reduce_scatter(product_BTD).flatten(0, 1)


class _SavedPart:
    """Lets autograd keep this rank's part of a gathered tensor, and gather it again in backward."""

    def __init__(self, part: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.part = part.detach()
        self.gather = gather
        # The storage of the gathered tensor, while its forward runs. It must not stay here longer:
        # autograd keeps this object until backward.
        self.storage: Any = None
        # How many saved tensors are views of the gathered one, and how many of these backward has
        # still to read.
        self.saved = 0
        self.left = 0
        self.gathered_again: Tensor | None = None

    @contextlib.contextmanager
    def save_part_instead(self, whole: Tensor) -> Iterator[None]:
        """Within, autograd keeps the part in the place of `whole` and its views."""
        self.storage = whole.untyped_storage()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.storage = None

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor: of a view of the gathered one only its geometry."""
        if tensor.untyped_storage() is not self.storage:
            return tensor
        self.saved += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that backward asks for. The first view gathers, the last one frees."""
        if isinstance(packed, Tensor):
            return packed
        if self.gathered_again is None:
            self.gathered_again = self.gather(self.part)
            self.left = self.saved
        whole = self.gathered_again
        self.left -= 1
        if self.left == 0:
            self.gathered_again = None
        shape, stride, offset = packed
        return whole.as_strided(shape, stride, offset)


def _run_on_all_tokens(
    sequence_sharding: SequenceSharding, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a region's forward that is given this rank's tokens and runs on those of all ranks."""

    def run(*given: Any, **options: Any) -> Any:
        """Gather the first input, and run the region's own forward on it."""
        if given:
            part_BtD = given[0]
        else:
            part_BtD = options.pop("hidden_states")
        # A mixture may give its shared expert rows end to end.
        is_flat = part_BtD.ndim == 2
        if is_flat:
            part_BtD = part_BtD.unflatten(0, (sequence_sharding.rows, -1))
        # Under autocast each layer of the region would cast the gathered tensor for itself.
        part_BtD = part_BtD.to(product_dtype(part_BtD))
        whole = sequence_sharding.gather(part_BtD, Partial())
        if is_flat:
            whole = whole.flatten(0, 1)
        # Hooks on what autograd keeps would break the graph of a compiled block.
        keeps_whole = torch.compiler.is_compiling() or not sequence_sharding.keeps_parts
        if keeps_whole or not torch.is_grad_enabled():
            return forward(whole, *given[1:], **options)
        saved = _SavedPart(part_BtD, torch.no_grad()(sequence_sharding.gather))
        with saved.save_part_instead(whole):
            return forward(whole, *given[1:], **options)

    return run


def _shard_between_blocks(model: nn.Module, sequence_sharding: SequenceSharding) -> None:
    """Let consecutive blocks exchange this rank's tokens alone.

    Before the first block the hidden states are sharded by tokens, after the last they are
    gathered.

    In a pipeline these are the blocks of a stage.
    """
    for name in column_parallel_modules(model):
        region = model.get_submodule(name)
        region.forward = _run_on_all_tokens(sequence_sharding, region.forward)
    row = blocks_in_a_row(model)
    for name, block in row.items():
        for module in block.modules():
            if _has_whole_weight(module):
                sum_gradient = _with_options(_sum_gradient, sequence_sharding.mesh)
                module.forward = forward_with_replaced_weights(module, module.forward, sum_gradient)
        path, _, index = name.rpartition(".")
        is_first = f"{path}.{int(index) - 1}" not in row
        is_last = f"{path}.{int(index) + 1}" not in row
        if is_first:
            block.register_forward_pre_hook(
                partial(_shard_inputs, sequence_sharding), with_kwargs=True
            )
        if is_last:
            block.register_forward_hook(partial(_gather_outputs, sequence_sharding))


def _has_whole_weight(module: nn.Module) -> bool:
    """Return whether a module itself has a trainable weight that is not cut.

    The router of experts and the factors of LoRA have some, too.
    """
    for parameter in module._parameters.values():
        if parameter is None or isinstance(parameter, DTensor):
            continue
        if parameter.requires_grad:
            return True
    return False


def _shard_inputs(
    sequence_sharding: SequenceSharding,
    _block: Any,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before the first block: its hidden states become this rank's tokens."""
    if given:
        return (sequence_sharding.shard(given[0]), *given[1:]), options
    return given, {**options, "hidden_states": sequence_sharding.shard(options["hidden_states"])}


def _gather_outputs(
    sequence_sharding: SequenceSharding, _block: Any, _given: Any, result: Any
) -> Any:
    """Hook after the last block: its hidden states become those of all ranks."""
    if isinstance(result, tuple):
        return (sequence_sharding.gather(result[0]), *result[1:])
    return sequence_sharding.gather(result)


def _sum_gradient(mesh: DeviceMesh, weight: Tensor) -> Tensor:
    """Return a weight whose gradient is summed over the ranks; a weight that is cut, as it is.

    For a whole weight that each rank uses on tokens or heads of its own.
    """
    if isinstance(weight, DTensor):
        return weight
    return _redistribute(weight, mesh, Replicate(), Replicate(), Partial())


def _shard_module(
    module: nn.Module, style: str, mesh: DeviceMesh, sequence_sharding: SequenceSharding | None
) -> None:
    """Shard the weights of one module by its style.

    `sequence_sharding`: None without sequence parallelism.
    """
    if style == REPLICATED:
        return
    if style == REPLICATED_ON_PARTS:
        # With sequence parallelism `_shard_between_blocks` does it for all such weights.
        if sequence_sharding is None:
            sum_gradient = _with_options(_sum_gradient, mesh)
            module.forward = forward_with_replaced_weights(module, module.forward, sum_gradient)
        return
    if style == EXPERTS:
        cuts_tokens = sequence_sharding is not None
        apply_experts(module, expert_ranks_of_tp(mesh, cuts_tokens))
        return
    for layer in cut_layers(module, style):
        _shard_linear(layer, style, mesh, sequence_sharding)


def _shard_linear(
    layer: Any, style: str, mesh: DeviceMesh, sequence_sharding: SequenceSharding | None
) -> None:
    """Shard the weight of one linear layer, and replace the layer's forward.

    Raises PlanError for any other kind of layer.
    """
    is_transposed = _is_transposed(layer)
    if not (isinstance(layer, nn.Linear | PackedLinear) or is_transposed):
        raise PlanError(
            f"{type(layer).__name__} is no linear layer",
            where="tp_plan",
            fix="cut linear layers alone",
        )
    is_column_parallel = style in COLUMN_PARALLEL
    dimension_of_outputs = 1 if is_transposed else 0
    dimension_of_inputs = 1 - dimension_of_outputs
    if is_column_parallel:
        _shard_weight(layer, mesh, dimension_of_outputs)
        if layer.bias is not None:
            _shard_parameter(layer, "bias", mesh, Shard(0))
        run = _column_parallel_forward
    else:
        _shard_weight(layer, mesh, dimension_of_inputs)
        run = _row_parallel_forward
    layer.forward = _with_options(run, layer, style, mesh, sequence_sharding)


def _shard_weight(layer: Any, mesh: DeviceMesh, dimension: int) -> None:
    """Shard the weight of a linear layer along a dimension, also if it is packed."""
    if isinstance(layer, PackedLinear):
        layer.packing.cut(dimension, mesh.get_local_rank(), mesh.size())
        _shard_parameter(layer, "packed", mesh, Shard(dimension))
    else:
        _shard_parameter(layer, "weight", mesh, Shard(dimension))


def _with_options(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return `function` with its first arguments set, as functools.partial does.

    torch.compile takes any two partials for different code, and would compile each block anew. Two
    results of this function it takes for the same if their arguments are alike.
    """

    def run(*inputs: Any) -> Any:
        return function(*options, *inputs)

    return run


def _shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter by a DTensor that holds this rank's part of it."""
    whole = module._parameters[name]
    assert whole is not None
    sharded = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=whole.requires_grad))


def _column_parallel_forward(
    layer: Any, style: str, mesh: DeviceMesh, sequence_sharding: SequenceSharding | None, x: Tensor
) -> Tensor:
    """Return the outputs of a linear layer whose weight is sharded by outputs.

    With the style `colwise` these are this rank's, float[..., outputs / ranks]; with any other one
    they are gathered, float[..., outputs]. `x`: float[..., inputs] of all tokens (with sequence
    parallelism the region has gathered them). The ranks then use different outputs of it, so its
    gradient is summed over the ranks.
    """
    if sequence_sharding is None:
        x = _redistribute(x, mesh, Replicate(), Replicate(), Partial())
    bias = None if layer.bias is None else local(layer.bias)
    out = _local_product(layer, x, bias)
    if style == "colwise":
        return out
    shape = (*out.shape[:-1], _outputs(layer))
    grad = None if sequence_sharding is None else Partial()
    return _redistribute(out, mesh, Shard(out.ndim - 1), Replicate(), grad, shape)


def _row_parallel_forward(
    layer: Any, style: str, mesh: DeviceMesh, sequence_sharding: SequenceSharding | None, x: Tensor
) -> Tensor:
    """Return the outputs of a linear layer whose weight is sharded by inputs: a sum over the ranks.

    `x`: with the style `rowwise` this rank's inputs, float[..., inputs / ranks]; otherwise all,
    float[..., inputs]. The result is float[..., outputs]; with sequence parallelism of this rank's
    tokens, otherwise of all.
    """
    if style != "rowwise":
        if sequence_sharding is None:
            x = _redistribute(x, mesh, Replicate(), Shard(x.ndim - 1))
        else:
            x = x.narrow(-1, first_row(x.shape[-1], mesh), _local_inputs(layer))
    product = _local_product(layer, x)
    if sequence_sharding is None:
        out = _redistribute(product, mesh, Partial(), Replicate())
    else:
        out = sequence_sharding.reduce_scatter(product)
    if layer.bias is None:
        return out
    return out + local(layer.bias).to(out.dtype)


def _is_transposed(layer: Any) -> bool:
    """Return whether a layer's weight is [inputs, outputs], as GPT-2's are."""
    if isinstance(layer, PackedLinear):
        return layer.has_inputs_first
    return type(layer).__name__ == "Conv1D"


def _local_product(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of inputs with this rank's part of a layer's weight, plus a bias."""
    if not isinstance(layer, PackedLinear):
        return nn.functional.linear(x, _local_matrix(layer), bias)
    product = layer.multiply(x)
    if bias is None:
        return product
    return product + bias.to(product.dtype)


def _local_matrix(layer: Any) -> Tensor:
    """Return this rank's part of a layer's weight as [outputs, inputs]."""
    weight = local(layer.weight)
    if _is_transposed(layer):
        return weight.T
    return weight


def _local_inputs(layer: Any) -> int:
    """Return how many inputs this rank's part of a layer's weight has."""
    if isinstance(layer, PackedLinear):
        return layer.packing.local_shape[0 if layer.has_inputs_first else 1]
    return _local_matrix(layer).shape[1]


def _outputs(layer: Any) -> int:
    """Return how many outputs a layer has over all ranks."""
    if isinstance(layer, PackedLinear):
        return layer.out_features
    return int(layer.weight.shape[1 if _is_transposed(layer) else 0])


def _shard_vocabulary(embedding: nn.Module, head: nn.Module | None, mesh: DeviceMesh) -> None:
    """Shard embedding and head over the vocabulary; a tied pair stays one parameter.

    The last ranks hold fewer rows if the rows do not divide. The head's own forward gathers all
    logits. If the loss can take hidden states, it is never called (`models.head.Outputs`).
    """
    # On a stage of a pipeline, something else is in the place of a layer that another stage holds.
    is_tied = False
    if head is not None and hasattr(embedding, "weight"):
        is_tied = getattr(head, "weight", None) is embedding.weight
    if is_tied and not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
        return
    if isinstance(head, nn.Linear):
        _shard_module(head, "colwise_gather_output", mesh, None)
    if isinstance(embedding, nn.Embedding):
        _shard_embedding(embedding, mesh)
        if is_tied:
            assert isinstance(head, nn.Linear)
            embedding.weight = head.weight


def _shard_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Shard an embedding over the vocabulary, and replace its forward."""
    first = first_row(embedding.num_embeddings, mesh)
    _shard_parameter(embedding, "weight", mesh, Shard(0))
    rows = local(embedding.weight).shape[0]
    padding = embedding.padding_idx
    local_padding = None
    if padding is not None and first <= padding < first + rows:
        local_padding = padding - first
    inner = forward_with_replaced_weights(embedding, embedding.forward, local)

    def look_up(ids: Tensor) -> Tensor:
        """Return the embedding of each token, summed over the ranks.

        A token's row is looked up on the rank that has it, and is zero on the others.
        """
        local_ids = ids - first
        is_elsewhere = (local_ids < 0) | (local_ids >= rows)
        # An adapter over the embedding reads the number of the padding's row among all rows.
        embedding.padding_idx = local_padding
        try:
            looked_up = inner(local_ids.masked_fill(is_elsewhere, 0))
            part = looked_up.masked_fill(is_elsewhere[..., None], 0)
        finally:
            embedding.padding_idx = padding
        return _redistribute(part, mesh, Partial(), Replicate())

    embedding.forward = look_up  # type: ignore[assignment]
