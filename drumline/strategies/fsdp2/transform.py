"""torch's fully_shard around a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

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

from drumline.core.plan import Plan
from drumline.dist.mesh import data_mesh, expert_mesh
from drumline.models.blocks import blocks, vocabulary
from drumline.models.containers import each_tensor
from drumline.models.head import gather_for_objective
from drumline.models.shards import Values
from drumline.parallel.data_parallel import Sharded
from drumline.parallel.experts import of_experts
from drumline.parallel.native import Plain
from drumline.parallel.transforms import DTYPES, gathered_in

if TYPE_CHECKING:
    from drumline.strategies.fsdp2.spec import FSDP2Strategy


def spread(
    options: FSDP2Strategy,
    plan: Plan,
    whole: DeviceMesh,
    model: nn.Module,
    roots: list[tuple[nn.Module, nn.Module]],
    values: Values,
) -> Sharded:
    """`roots`: modules that run, each with the model in it. A model without weights is sharded first, then its parts are filled."""
    is_own_module = isinstance(roots[0][0], Plain)
    dtype = gathered_in(plan, is_own_module)
    experts = expert_mesh(whole) if plan.mesh.ep > 1 else None
    mesh = data_mesh(whole)
    ends_apart = options.gathers_ends_apart(plan.mesh, is_own_module)
    first, *more_roots = [
        apply_fsdp2(root, inner, options, mesh, dtype, experts, ends_apart) for root, inner in roots
    ]
    values.fill(model, offloaded=plan.offload == "cpu")
    # torch's stages hold the reduction back until the last micro-batch, and then start it themselves.
    sync = options.sync_each_micro_batch and plan.engine != "pipeline"
    # Hybrid sharding also sums over replicas, and stages train outside of `micro_batch`: neither passes by these clocks.
    timed = mesh.device_type == "cpu" and mesh.ndim == 1 and plan.engine != "pipeline"
    return Sharded(first, sync, casts=dtype is not None, more_roots=more_roots, timed=timed)


def apply_fsdp2(
    module: nn.Module,
    model: nn.Module,
    options: FSDP2Strategy,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    experts: DeviceMesh | None = None,
    ends_apart: bool = False,
) -> FSDPModule:
    """Shard weights, gradients and moments (ZeRO-3, Rajbhandari et al. 2020), each parameter as a DTensor. `module` is the root.

    Each block is a unit of its own, with `ends_apart` the embedding and the head, too; the rest (the last norm, tied ends) belongs
    to the root. Weights are gathered in `param_dtype`; gradients are averaged over all ranks of the mesh in
    `options.reduce_dtype`. The parameters may be on the meta device. `experts`: the mesh of experts that are cut by their
    number; each layer's are a unit.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[options.reduce_dtype],
        cast_forward_inputs=False,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if options.offload == "cpu"
        else OffloadPolicy()
    )
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    units = (
        blocks(model)
        if options.wrap is None
        else [m for m in model.modules() if type(m).__name__ in options.wrap]
    )
    embedding, head = _ends(model) if ends_apart else ([], [])
    # Which `wrap` may name, too.
    units = [unit for unit in units if unit not in (*embedding, *head)]
    # BERT's embeddings are a unit: a layer inside of one is no unit of its own.
    inside: set[nn.Module] = set()
    for unit in units:
        inside.update(unit.modules())
    if embedding and embedding[0] in inside:
        embedding = []
    if head and head[0] in inside:
        head = []
    alone = _without_shared([*embedding, *units, *head], module)
    embedding = [unit for unit in embedding if unit in alone]
    units = [unit for unit in units if unit in alone]
    head = [unit for unit in head if unit in alone]
    for unit in (*alone, module):
        # Before `fully_shard`, whose own hook then finds tensors that are no views.
        unit.register_forward_hook(_return_no_views, with_kwargs=True)
    for unit in (
        [m for m in model.modules() if any(map(of_experts, m._parameters.values()))]
        if experts is not None
        else ()
    ):
        fully_shard(unit, reshard_after_forward=options.reshards, **{**shared, "mesh": experts})
    for unit in reversed(units):  # inner ones first: what they take is no part of the outer
        fully_shard(unit, reshard_after_forward=options.reshards, **shared)
    for unit in embedding:
        # Its gradient needs no weights.
        fully_shard(unit, reshard_after_forward=True, **shared).set_unshard_in_backward(False)
    for unit in head:
        # Backward begins with it, so it stays.
        fully_shard(unit, reshard_after_forward=False, **shared)
        gather_for_objective(unit)
    root = fully_shard(module, reshard_after_forward=False, **shared)
    ahead = options.prefetch
    behind = ahead if options.backward_prefetch is None else options.backward_prefetch
    in_turn = [*embedding, *units, *head]
    for index, unit in enumerate(in_turn):
        assert isinstance(unit, FSDPModule)
        before = in_turn[len(embedding) : index]  # the embedding is not gathered for backward
        unit.set_modules_to_forward_prefetch(in_turn[index + 1 : index + 1 + ahead])  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(before[max(0, len(before) - behind) :][::-1])  # type: ignore[arg-type]
    return root


def _ends(model: nn.Module) -> tuple[list[nn.Embedding], list[nn.Linear]]:
    """Return the embedding and the head of a Hugging Face model, each in a list; an empty one if an adapter wraps it."""
    embedding, head = vocabulary(model)
    embeddings = [embedding] if isinstance(embedding, nn.Embedding) else []
    heads = [head] if isinstance(head, nn.Linear) else []
    return embeddings, heads


class _NotAView(torch.autograd.Function):
    """The same memory as a tensor of its own, which shares the version counter of the view."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
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
    elsewhere = Counter(_memory(tensor) for tensor in (*returned, *_tensors_in((args, options))))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_view(tensor) or elsewhere[_memory(tensor)] > 1:
            return tensor
        alone: torch.Tensor = _NotAView.apply(tensor)
        return alone

    return each_tensor(own, outputs)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    each_tensor(note, values)
    return found


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors over the same memory have in common."""
    return int(tensor.untyped_storage().data_ptr())


def _without_shared(units: list[nn.Module], root: nn.Module) -> list[nn.Module]:
    """Those units all of whose weights are theirs alone: one that is tied to another module's is gathered with what belongs to the root."""

    def counted(module: nn.Module) -> Counter[int]:
        return Counter(
            id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
        )

    everywhere = counted(root)
    return [
        unit
        for unit in units
        if all(number == everywhere[weight] for weight, number in counted(unit).items())
    ]
