"""Ways of changing a model in place, applied in one order (see `native.prepare`):

batch norms first, whose statistics become those of several ranks' samples (Ioffe & Szegedy 2015, over one larger batch);
activation checkpointing next, since it re-enters a block's forward; then compile, around the block as it will be run again;
the data-parallel wrapper last, around everything, so that it sees the parameters as they will be used.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drumline.core.config import CompileConfig
from drumline.core.plan import Plan
from drumline.core.rules import NO_CHUNKS, NO_RECOMPUTING
from drumline.core.strategy import CopyOptions
from drumline.models import losses
from drumline.models.blocks import blocks
from drumline.parallel.offload import ActivationOffload
from drumline.vendor.torch import BatchNorm, TorchDispatchMode, foreach_copy_, tree_map_only

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATEN = torch.ops.aten
# Attention by its kernels on each device; the plain one is made of smaller operations, which are computed again.
ATTENTION = {
    getattr(_ATEN, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_ATEN, name)
}
# Of variable lengths, by the libraries of their operations.
KERNELS = (
    "torch_attn",
    "flash_attn",
    "flash_attn_3",
    "drumline",
)
PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}
WRITTEN = {_ATEN.mm.out, _ATEN.addmm.out}  # as compiled code calls them


def apply_sync_batchnorm(model: nn.Module, device: str, ranks: int | None) -> None:
    """Let all batch norms of a model share their statistics over groups of `ranks` neighbours; None: over all ranks. Collective.

    In place, under the same names: torch's own on `device` cuda; it takes no CPU tensors, so there by `OnCPU`. Running statistics of
    ranks in other groups differ until `agree_on_statistics`.
    """
    group = dist.group.WORLD if ranks is None else dist.new_subgroups(ranks)[0]
    for module in model.modules():
        if isinstance(module, BatchNorm):
            # The classes of batch norm hold the same state; the group is all that this one adds.
            module.__class__ = OnCPU if device == "cpu" else nn.SyncBatchNorm
            module.process_group = group


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """The batch norms that keep running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, BatchNorm) and module.running_mean is not None
    ]


def agree_on_statistics(norms: list[BatchNorm]) -> None:
    """Average the running statistics of batch norms over all ranks, so that all evaluate and save the same. Collective."""
    if not norms or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers = [
        buffer
        for norm in norms
        for buffer in (norm.running_mean, norm.running_var)
        if buffer is not None
    ]
    flat = torch.cat([buffer.double().flatten() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(
        buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True
    ):
        buffer.copy_(mean.view_as(buffer))


class Statistics:
    """What batch norms keep of the samples of a step, which is put back where the step turns out to be none. The host waits for nothing."""

    def __init__(self, norms: list[BatchNorm]) -> None:
        self.norms = norms
        self.before: list[torch.Tensor] | None = None

    def note(self) -> None:
        """Before each micro-batch: as they are before the first of a step."""
        if self.norms and self.before is None:
            self.before = [_end_to_end(buffers) for buffers in self._buffers()]

    @torch.no_grad()
    def settle(self, finite: torch.Tensor) -> None:
        """At the end of a step: as they were, but where `finite`, a bool scalar, holds."""
        for buffers, before in zip(self._buffers(), self.before or (), strict=False):
            kept = torch.where(finite.to(before.device), _end_to_end(buffers), before).split(
                [buffer.numel() for buffer in buffers]
            )
            foreach_copy_(
                buffers, [part.view_as(buffer) for part, buffer in zip(kept, buffers, strict=True)]
            )
        self.before = None

    def _buffers(self) -> list[list[torch.Tensor]]:
        """By type: counts are no floats."""
        buffers = [buffer for norm in self.norms for buffer in norm.buffers(recurse=False)]
        return [
            [buffer for buffer in buffers if buffer.dtype == dtype]
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers)
        ]


def _end_to_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class OnCPU(BatchNorm):
    """nn.SyncBatchNorm in plain operations."""

    process_group: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float[N, C, …] → the same, normalised by channel. In training by the mean and variance over all ranks of the group."""
        if not self.training:
            return super().forward(input)
        output, mean_C, variance_C, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked += 1
            factor = (
                1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            )
            self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), factor)
            unbiased_C = variance_C * (count / (count - 1).clamp_min(1))
            self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), factor)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        assert input.dim() >= 2, input.shape


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight_C: Any, bias_C: Any, eps: float, group: Any
    ) -> tuple[torch.Tensor, ...]:
        precise = torch.promote_types(input.dtype, torch.float32)
        x_CM = input.transpose(0, 1).flatten(1).to(precise)
        mine = torch.zeros(3, x_CM.shape[0], dtype=precise)
        if x_CM.numel():
            mean_C = x_CM.mean(1)
            mine = torch.stack(
                [
                    torch.full_like(mean_C, x_CM.shape[1]),
                    mean_C,
                    (x_CM - mean_C[:, None]).square().sum(1),
                ]
            )
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        # Counts, means and squared distances of parts make those of the whole (Chan et al. 1979).
        count_RC, mean_RC, squares_RC = torch.stack(parts).unbind(1)
        count_C = count_RC.sum(0)
        mean_C = (count_RC * mean_RC).sum(0) / count_C
        variance_C = (squares_RC + count_RC * (mean_RC - mean_C).square()).sum(0) / count_C
        scale_C = (variance_C + eps).rsqrt()
        normal_CM = (x_CM - mean_C[:, None]) * scale_C[:, None]
        ctx.save_for_backward(normal_CM, scale_C, weight_C, count_C)
        ctx.group = group
        out_CM = normal_CM if weight_C is None else normal_CM * weight_C[:, None]
        out_CM = out_CM if bias_C is None else out_CM + bias_C[:, None]
        ctx.mark_non_differentiable(mean_C, variance_C, count_C)
        return _back(out_CM, input), mean_C, variance_C, count_C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal_CM, scale_C, weight_C, count_C = ctx.saved_tensors
        grad_CM = grad.transpose(0, 1).flatten(1).to(normal_CM.dtype)
        grad_bias_C, grad_weight_C = grad_CM.sum(1), (grad_CM * normal_CM).sum(1)
        # The weights' gradients are this rank's, summed later like all others; what flows back through the statistics is the group's.
        through = torch.stack([grad_bias_C, grad_weight_C])
        dist.all_reduce(through, group=ctx.group)
        mean_CM, slope_CM = (through / count_C)[:, :, None]
        factor_C = scale_C if weight_C is None else scale_C * weight_C
        grad_input_CM = (grad_CM - mean_CM - normal_CM * slope_CM) * factor_C[:, None]
        wanted = [needed and weight_C is not None for needed in ctx.needs_input_grad[1:3]]
        return (
            _back(grad_input_CM, grad),
            grad_weight_C if wanted[0] else None,
            grad_bias_C if wanted[1] else None,
            None,
            None,
        )


def _back(x_CM: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """float[C, N·…] in the shape and type of float[N, C, …]. A copy, also where N is 1: an activation behind may work in place."""
    swapped = like.transpose(0, 1)
    return (
        x_CM.to(like.dtype)
        .view(swapped.shape)
        .transpose(0, 1)
        .clone(memory_format=torch.contiguous_format)
    )


def apply_memory(model: Any, plan: Plan) -> None:
    """What the section `memory` changes of a model: first what is inside of a block, last what goes around it."""
    memory = plan.config.memory
    if memory.mlp_chunk:
        apply_mlp_chunks(model, memory.mlp_chunk)
    apply_activation_checkpointing(model, plan.activation_checkpointing, memory.checkpointed_blocks)
    if memory.activation_offload:
        ActivationOffload(model, plan.device)


def apply_activation_checkpointing(
    model: Any, kind: Literal["none", "selective", "full"], number: int | None = None
) -> None:
    """full: keep the input of each block, compute the rest again in backward (Chen et al. 2016). RNG is replayed, so dropout agrees.
    selective: keep more, see `selective`. `number`: of the first so many blocks; None: of all."""
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False} | (
        {"context_fn": selective} if kind == "selective" else {}
    )
    if recomputed_by_blocks(model):
        for block in blocks(model)[:number]:
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return
    # Older transformers know it by the other name alone.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable(options)
    for block in blocks(model)[number:] if number is not None else ():
        block.gradient_checkpointing = False  # type: ignore[assignment]


def apply_mlp_chunks(model: nn.Module, tokens: int) -> None:
    """Let the feed-forward part of each block work on at most `tokens` of a micro-batch at once, and again in backward: what is as wide as
    its inside never exists for all of a long row (tiled MLP of Arctic Long Sequence Training, Bekman et al. 2025)."""
    parts = [getattr(block, "mlp", None) for block in blocks(model)]
    if not parts or None in parts:
        raise NO_CHUNKS.error("its blocks have no part of the name mlp")
    for part in parts:
        part.forward = functools.partial(_in_chunks, part.forward, tokens)  # type: ignore[union-attr]


def _in_chunks(
    inner: Any, tokens: int, hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`args`, `kwargs`: what else it takes, such as Bloom's residual; of what has the same tokens each chunk gets its own."""
    rows, length = hidden_BTD.shape[:2]
    width = max(1, tokens // rows)
    if length <= width:
        return inner(hidden_BTD, *args, **kwargs)

    def chunk(start: int) -> torch.Tensor:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            return (
                tensor[:, start : start + width] if tensor.shape[:2] == (rows, length) else tensor
            )

        given, named = tree_map_only(torch.Tensor, own, ((hidden_BTD, *args), kwargs))
        return checkpoint(inner, *given, use_reentrant=False, **named)

    return torch.cat([chunk(start) for start in range(0, length, width)], 1)


def recomputed_by_blocks(model: Any) -> bool:
    """Whether blocks are computed again one by one, not as the model's own class has it. Raises PlanError where neither can be."""
    by_blocks = not hasattr(model, "supports_gradient_checkpointing") and bool(blocks(model))
    if by_blocks and batch_norms(model):
        raise NO_RECOMPUTING.error(
            "it runs a block twice, and a batch norm would count its samples twice"
        )
    if not by_blocks and not getattr(model, "supports_gradient_checkpointing", False):
        raise NO_RECOMPUTING.error(f"{type(model).__name__} has no activation checkpointing")
    return by_blocks


def selective() -> tuple[Any, Any]:
    """Contexts of one checkpointed region: the results of attention and of every second matrix product are kept.

    Those cost most to compute again; of the products every second one is a fair trade for memory (as torchtitan has it). The
    products are counted alike in the forward and in the recomputation, so that both mean the same ones.
    """
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in PRODUCTS:
            seen[context.is_recompute] += 1
            return (
                CheckpointPolicy.MUST_SAVE
                if seen[context.is_recompute] % 2
                else CheckpointPolicy.PREFER_RECOMPUTE
            )
        return (
            CheckpointPolicy.MUST_SAVE
            if operation in ATTENTION or operation.namespace in KERNELS
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    kept: deque[torch.Tensor] = deque()
    first, again = create_selective_checkpoint_contexts(policy)
    return _Selective(first, kept, False), _Selective(again, kept, True)


class _Selective(TorchDispatchMode):
    """torch's mode of one pass, `inner`, and the same for products of compiled code: it writes them into memory of its own, which it uses
    again later, so every second one is kept as a copy, and `again` written from it."""

    supports_higher_order_operators = True
    ac_graph_id: Any = None  # set where the region is traced with its recomputation

    def __init__(self, inner: Any, kept: deque[torch.Tensor], again: bool) -> None:
        super().__init__()
        self.inner, self.kept, self.again, self.products = inner, kept, again, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's modes for this: below others blocks would not be compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in WRITTEN:
            self.inner.ac_graph_id = self.ac_graph_id
            return self.inner.__torch_dispatch__(func, types, args, kwargs)
        self.products += 1
        if self.products % 2 and self.again:
            return kwargs["out"].copy_(self.kept.popleft())
        out = func(*args, **kwargs)
        if self.products % 2:
            self.kept.append(out.clone())
        return out


def apply_compile(model: nn.Module, options: CompileConfig) -> None:
    """torch.compile each block in place (names of parameters stay): equal blocks share one compilation. And what the cross-entropy does
    with logits."""
    if options.loss and not hasattr(losses._sums, "_torchdynamo_orig_callable"):
        # The last chunk of a batch is shorter.
        losses._sums = torch.compile(losses._sums, dynamic=True)
    if not options.enabled:
        return
    for block in blocks(model) or [model]:
        is_cut = any(isinstance(parameter, DTensor) for parameter in block.parameters())
        is_checkpointed = getattr(block, "gradient_checkpointing", False)
        if is_cut and is_checkpointed:
            _compile_in_checkpoint(block, options.mode)
        else:
            block.compile(mode=options.mode)


def _compile_in_checkpoint(block: Any, mode: str | None) -> None:
    """Compile the forward of a block of transformers, and leave its checkpointing around it eager.

    Together with tensor parallelism the two cannot be one graph. torch 2.13 takes the mesh for a
    tensor that backward needs (an AssertionError), and with sequence parallelism a norm has another
    weight while its forward runs, which is refused in a checkpointed region.
    """
    checkpoint_block = block._gradient_checkpointing_func
    compiled = torch.compile(_call, mode=mode)

    def run(forward: functools.partial[Any], *inputs: Any) -> Any:
        # Not `forward` itself: each call has another, and would be compiled anew.
        return checkpoint_block(compiled, forward.func, forward.args, forward.keywords, *inputs)

    block._gradient_checkpointing_func = run


def _call(function: Any, first: tuple[Any, ...], options: dict[str, Any], *inputs: Any) -> Any:
    return function(*first, *inputs, **options)


def compile_step(optimizer: torch.optim.Optimizer) -> None:
    """torch.compile an optimizer's step. Its rates become tensors: each new number would be compiled anew."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]


def gathered_in(plan: Plan, plain: bool = False) -> torch.dtype | None:
    """The low type in which weights are gathered; None: they are used as they are kept. `plain`: any module, whose inputs may be fp32 as
    images are."""
    low = plan.config.strategy.gathered_in(plan.precision, plan.config.images_alone or plain)
    return None if low is None else DTYPES[low]


def apply_ddp(
    module: nn.Module, options: CopyOptions, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """Replicate: gradients are averaged over the ranks of `group` while backward still runs (Li et al. 2020)."""
    # Named only where it is switched off: torch 2.13 warns about the name, and older ones know no other.
    buffers: dict[str, Any] = {} if options.broadcast_buffers else {"broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        **buffers,
    )
    if not (options.static_graph or options.find_unused_parameters):
        _lay_out_buckets(wrapped)
    return wrapped


def _lay_out_buckets(ddp: DistributedDataParallel) -> None:
    """After its first backward DDP lays out its buckets anew, in the order in which gradients came. The order in which three ranks and more
    are summed depends on the place in a bucket, so the first step of a resumed run would differ in its last bits. This is that backward: of
    zeros, last parameter first, as in a step."""
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        nothing = torch.stack(
            [(parameter.flatten()[:1].float() * 0).sum() for parameter in parameters]
        ).sum()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    nothing.backward()
    for parameter in parameters:
        parameter.grad = None
    ddp.reducer._rebuild_buckets()
