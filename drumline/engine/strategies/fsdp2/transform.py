"""Shard a model over ranks by torch's fully_shard."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from drumline.dist.mesh import data_mesh, expert_mesh
from drumline.engine.data_parallel import Sharded
from drumline.engine.experts import cut_expert_layers
from drumline.engine.transforms import DTYPES, gather_dtype
from drumline.engine.user_module import UserModule
from drumline.models.blocks import blocks, embedding_and_head
from drumline.models.containers import map_tensors
from drumline.models.head import gather_for_objective
from drumline.models.recurrent import modules_in_separated_layers
from drumline.models.shards import Values
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.config.strategies.fsdp2 import FSDP2Strategy


def spread(
    options: FSDP2Strategy,
    plan: Plan,
    world_mesh: DeviceMesh,
    model: nn.Module,
    roots: list[tuple[nn.Module, nn.Module]],
    values: Values,
) -> Sharded:
    """Shard the model, and then fill this rank's parts of its weights.

    `roots`: the modules that run, each with the part of the model within it; several for the stages
    of a pipeline.
    """
    is_user_module = isinstance(roots[0][0], UserModule)
    dtype = gather_dtype(plan, is_user_module)
    experts = None
    if plan.mesh.ep > 1:
        experts = expert_mesh(world_mesh)
    mesh = data_mesh(world_mesh)
    separate_embedding_and_head = options.gathers_ends_apart(plan.mesh, is_user_module)
    sharded_roots = []
    for root, inner in roots:
        sharded = apply_fsdp2(
            root, inner, options, mesh, dtype, experts, separate_embedding_and_head
        )
        sharded_roots.append(sharded)
    values.fill(model, offloaded=plan.offload == "cpu")
    is_pipeline = plan.engine == "pipeline"
    # In a pipeline torch's stages start the reduction themselves, after the last micro-batch.
    sync = options.sync_each_micro_batch and not is_pipeline
    # Two cases are not measured: hybrid sharding, which also sums over replicas, and stages of a
    # pipeline, which train outside of `micro_batch`.
    timed = mesh.device_type == "cpu" and mesh.ndim == 1 and not is_pipeline
    first, *more_roots = sharded_roots
    return Sharded(first, sync, casts=dtype is not None, more_roots=more_roots, timed=timed)


class FSDPUnits(NamedTuple):
    """The modules whose weights are gathered separately, one module at a time.

    `embedding` and `head` have one module, or none.
    """

    embedding: list[nn.Module]
    blocks: list[nn.Module]
    head: list[nn.Linear]

    def list_in_forward_order(self) -> list[nn.Module]:
        """Return all units in the order of forward."""
        return [*self.embedding, *self.blocks, *self.head]


def apply_fsdp2(
    module: nn.Module,
    model: nn.Module,
    options: FSDP2Strategy,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    experts: DeviceMesh | None = None,
    separate_embedding_and_head: bool = False,
) -> FSDPModule:
    """Shard weights, gradients and moments (ZeRO-3, Rajbhandari et al. 2020), each parameter as a DTensor.

    `module` is the root. Each block is a unit, and with `separate_embedding_and_head` also the
    embedding and the head. The rest (the last norm, a tied embedding) belongs to the root. Weights
    are gathered in `param_dtype`. Gradients are averaged over all ranks of the mesh in
    `options.reduce_dtype`. The parameters may be on the meta device. `experts`: the mesh over which
    experts are dealt, if they are; the experts of each layer are then a unit.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[options.reduce_dtype],
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if options.offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shared: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    units = _find_units(module, model, options, separate_embedding_and_head)
    for unit in (*units.list_in_forward_order(), module):
        # Registered before the hook of `fully_shard`, which then gets no views.
        unit.register_forward_hook(_return_no_views, with_kwargs=True)
    if experts is not None:
        for unit in cut_expert_layers(model):
            fully_shard(unit, mesh=experts, reshard_after_forward=options.reshards, **shared)
    # Inner units first: an outer unit takes only the weights that no unit within it has.
    for unit in reversed(units.blocks):
        fully_shard(unit, mesh=mesh, reshard_after_forward=options.reshards, **shared)
    for unit in units.embedding:
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True, **shared)
        # Its gradient needs no weights.
        sharded.set_unshard_in_backward(False)
    for unit in units.head:
        # Backward begins with it, so it stays gathered.
        fully_shard(unit, mesh=mesh, reshard_after_forward=False, **shared)
        gather_for_objective(unit)
    root = fully_shard(module, mesh=mesh, reshard_after_forward=False, **shared)
    _prefetch(units, options.prefetch, options.prefetch_in_backward)
    return root


def _find_units(
    root: nn.Module, model: nn.Module, options: FSDP2Strategy, separate_embedding_and_head: bool
) -> FSDPUnits:
    """Return the units of a model. A module that shares a weight with another one is no unit."""
    if options.wrap is None:
        candidates = list(blocks(model))
    else:
        chosen = [unit for unit in model.modules() if type(unit).__name__ in options.wrap]
        inside_separated = modules_in_separated_layers(model)
        candidates = [unit for unit in chosen if unit not in inside_separated]
    # If they stay with the root, they are gathered for all of forward and backward.
    embedding: list[nn.Module] = []
    head: list[nn.Linear] = []
    if separate_embedding_and_head:
        embedding, head = _embedding_and_head_units(model)
    # `wrap` may name their classes, too.
    candidates = [unit for unit in candidates if unit not in (*embedding, *head)]
    # BERT's embeddings are a unit: a layer inside of one is no unit of its own.
    inside: set[nn.Module] = set()
    for unit in candidates:
        inside.update(unit.modules())
    embedding = [unit for unit in embedding if unit not in inside]
    head = [unit for unit in head if unit not in inside]
    unshared = _without_shared([*embedding, *candidates, *head], root)
    return FSDPUnits(
        embedding=[unit for unit in embedding if unit in unshared],
        blocks=[unit for unit in candidates if unit in unshared],
        head=[unit for unit in head if unit in unshared],
    )


def _prefetch(units: FSDPUnits, forward: int, backward: int) -> None:
    """Let each unit gather that many units ahead of itself, in forward and in backward."""
    in_turn = units.list_in_forward_order()
    # The embedding is not gathered for backward.
    first_in_backward = len(units.embedding)
    for index, unit in enumerate(in_turn):
        assert isinstance(unit, FSDPModule)
        after = in_turn[index + 1 : index + 1 + forward]
        before = in_turn[first_in_backward:index]
        nearest_before = before[max(0, len(before) - backward) :]
        nearest_before.reverse()
        unit.set_modules_to_forward_prefetch(after)  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(nearest_before)  # type: ignore[arg-type]


def _embedding_and_head_units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Linear]]:
    """Return the embedding and the head of a Hugging Face model as units, each in a list.

    The list is empty if an adapter wraps the module.
    """
    embeddings: list[nn.Module] = []
    heads: list[nn.Linear] = []
    embedding, head = embedding_and_head(model)
    if isinstance(embedding, nn.Embedding):
        embeddings.append(embedding)
    if isinstance(head, nn.Linear):
        heads.append(head)
    return embeddings, heads


class _NotAView(torch.autograd.Function):
    """Makes a tensor out of a view that has the same memory and version counter, but is no view."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        """Return the tensor. autograd gives it a history of its own, this function's."""
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.compiler.disable
def _return_no_views(unit: nn.Module, args: Any, options: Any, outputs: Any) -> Any:
    """Replace views among a unit's outputs by tensors over the same memory.

    FSDP2 gathers the weights for backward in a hook on the outputs. An operation in place on a
    view (`out *= 2` after a Linear layer) replaces the view's history and drops that hook.
    A view of an input, or one whose memory another output shares, stays a view: autograd must
    know what else an operation in place changes. torch warns of it.
    """
    if not torch.is_grad_enabled():
        return outputs
    returned = _tensors_in(outputs)
    if not any(_is_view(tensor) for tensor in returned):
        return outputs
    # How many of the outputs and inputs lie in the same memory.
    inputs = _tensors_in((args, options))
    users_of_memory = Counter(_memory(tensor) for tensor in (*returned, *inputs))

    def detach_view(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is no view, if nothing else lies in its memory."""
        if not _is_view(tensor) or users_of_memory[_memory(tensor)] > 1:
            return tensor
        alone: torch.Tensor = _NotAView.apply(tensor)
        return alone

    return map_tensors(detach_view, outputs)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, values)
    return found


def _is_view(tensor: torch.Tensor) -> bool:
    """Return whether an output is a view of another tensor, and has a history."""
    return tensor.requires_grad and tensor._base is not None


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors over the same memory have in common."""
    return int(tensor.untyped_storage().data_ptr())


def _without_shared(units: list[nn.Module], root: nn.Module) -> list[nn.Module]:
    """Return the units whose weights no other module shares.

    A weight that is tied to another module's is gathered with what belongs to the root.
    """
    everywhere = _count_weights(root)
    unshared = []
    for unit in units:
        weights = _count_weights(unit)
        if all(count == everywhere[weight] for weight, count in weights.items()):
            unshared.append(unit)
    return unshared


def _count_weights(module: nn.Module) -> Counter[int]:
    """Return how many times a module has each of its parameters, by the parameter's id."""
    counts = Counter[int]()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        counts[id(parameter)] += 1
    return counts
