"""Transforms, which change a model in place. `native.prepare` applies these in this order:

1. Batch norms: their statistics become those of several ranks' samples together (Ioffe & Szegedy
   2015, over one larger batch).
2. Activation checkpointing, which runs a block's forward again in backward.
3. Compiling, of a block with its checkpointing.
4. The data-parallel wrapper, around everything, so that it sees the parameters as they are used.
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

from drumline.config.config import CompileConfig
from drumline.config.strategy import CopyOptions
from drumline.engine.offload import ActivationOffload
from drumline.models import losses
from drumline.models.blocks import blocks, text_blocks
from drumline.models.containers import LOW_PRECISION
from drumline.plan.plan import Plan
from drumline.plan.rules import NO_CHUNKS, NO_RECOMPUTING
from drumline.vendor.torch import BatchNorm, TorchDispatchMode, foreach_copy_, tree_map_only

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATEN = torch.ops.aten
# The operations of attention that have a kernel. Attention without one consists of smaller
# operations, which selective checkpointing computes again.
_ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTION = {getattr(_ATEN, name).default for name in _ATTENTION_NAMES if hasattr(_ATEN, name)}
# Namespaces of operations, all of which are attention over sequences of different lengths.
KERNELS = ("torch_attn", "flash_attn", "flash_attn_3", "drumline")
MATMULS = {_ATEN.mm.default, _ATEN.addmm.default}
# The same operations as compiled code calls them.
COMPILED_MATMULS = {_ATEN.mm.out, _ATEN.addmm.out}


def apply_sync_batchnorm(model: nn.Module, device: str, ranks: int | None) -> None:
    """Let all batch norms of a model share their statistics over groups of `ranks` neighbours.

    Collective. `ranks` None: over all ranks. The modules get another class in place, so names stay:
    torch's SyncBatchNorm on a GPU, and on a CPU, for which torch has none, `SyncBatchNormOnCPU`.
    Running statistics differ between groups until `agree_on_statistics`.
    """
    group = dist.group.WORLD
    if ranks is not None:
        # Collective: all ranks make all groups, and each gets its own first.
        group = dist.new_subgroups(ranks)[0]
    for module in model.modules():
        if isinstance(module, BatchNorm):
            # All classes of batch norms have the same attributes; these two add only the group.
            if device == "cpu":
                module.__class__ = SyncBatchNormOnCPU
            else:
                module.__class__ = nn.SyncBatchNorm
            module.process_group = group


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms that keep running statistics."""
    norms: list[BatchNorm] = []
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            norms.append(module)
    return norms


def agree_on_statistics(norms: list[BatchNorm]) -> None:
    """Average the running statistics of batch norms over all ranks, in fp64. Collective.

    Then all ranks evaluate and save the same. One all-reduce carries the statistics of all norms.
    """
    if not norms or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers: list[torch.Tensor] = []
    for norm in norms:
        for buffer in (norm.running_mean, norm.running_var):
            if buffer is not None:
                buffers.append(buffer)
    flat = torch.cat([buffer.double().flatten() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [buffer.numel() for buffer in buffers]
    means = flat.split(sizes)
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))


class RunningStatistics:
    """Puts the running statistics of batch norms back if a step is skipped.

    The host does not wait for the device.
    """

    def __init__(self, norms: list[BatchNorm]) -> None:
        self.norms = norms
        # The buffers as they were before the step, end to end, a tensor for each type.
        self.before: list[torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Copy the statistics as they are before a step. Further calls in the step do nothing."""
        if self.norms and self.before is None:
            self.before = [_end_to_end(buffers) for buffers in self._buffers()]

    @torch.no_grad()
    def end_step(self, finite: torch.Tensor) -> None:
        """Put the statistics from before the step back if `finite`, a bool scalar, is False."""
        if self.before is not None:
            for buffers, before in zip(self._buffers(), self.before, strict=True):
                now = _end_to_end(buffers)
                after = torch.where(finite.to(before.device), now, before)
                sizes = [buffer.numel() for buffer in buffers]
                shaped = []
                for part, buffer in zip(after.split(sizes), buffers, strict=True):
                    shaped.append(part.view_as(buffer))
                foreach_copy_(buffers, shaped)
        self.before = None

    def _buffers(self) -> list[list[torch.Tensor]]:
        """Return the buffers of all norms, in a list for each dtype: counts are integers."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for norm in self.norms:
            for buffer in norm.buffers(recurse=False):
                by_type.setdefault(buffer.dtype, []).append(buffer)
        return list(by_type.values())


def _end_to_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the entries of some tensors of one type as one flat tensor, a copy."""
    return torch.cat([tensor.flatten() for tensor in tensors])


class SyncBatchNormOnCPU(BatchNorm):
    """nn.SyncBatchNorm for tensors on a CPU, written in plain operations."""

    process_group: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return float[N, C, …] normalised by channel.

        In training, mean and variance are those over all ranks of the group.
        """
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
            factor = self.momentum
            if factor is None:
                # Without a momentum the running statistics are the average over all batches.
                factor = 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), factor)
            # As in torch, the running variance is the unbiased one, although the biased one
            # normalises.
            unbiased_C = variance_C * (count / (count - 1).clamp_min(1))
            self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), factor)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accept inputs of any number of dimensions: the class replaces BatchNorm1d, 2d and 3d."""
        assert input.dim() >= 2, input.shape


class _Normalise(torch.autograd.Function):
    """Batch norm over the samples of all ranks of a group.

    Its forward makes one all-gather over the group, its backward one all-reduce.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight_C: Any, bias_C: Any, eps: float, group: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the output, float[N, C, …], and of each channel mean, biased variance and count.

        `input`: float[N, C, …], this rank's samples, perhaps none. `weight_C`, `bias_C`: float[C]
        or None.
        """
        precise = torch.promote_types(input.dtype, torch.float32)
        x_CM = input.transpose(0, 1).flatten(1).to(precise)
        # A rank without samples counts with zeros: a mean of nothing would be NaN.
        mine = torch.zeros(3, x_CM.shape[0], dtype=precise)
        if x_CM.numel():
            mean_C = x_CM.mean(1)
            count_C = torch.full_like(mean_C, x_CM.shape[1])
            squares_C = (x_CM - mean_C[:, None]).square().sum(1)
            mine = torch.stack([count_C, mean_C, squares_C])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        # Counts, means and squared distances of parts make those of the whole (Chan et al. 1979).
        count_RC, mean_RC, squares_RC = torch.stack(parts).unbind(1)
        count_C = count_RC.sum(0)
        mean_C = (count_RC * mean_RC).sum(0) / count_C
        squares_between_RC = count_RC * (mean_RC - mean_C).square()
        variance_C = (squares_RC + squares_between_RC).sum(0) / count_C
        scale_C = (variance_C + eps).rsqrt()
        normal_CM = (x_CM - mean_C[:, None]) * scale_C[:, None]
        ctx.save_for_backward(normal_CM, scale_C, weight_C, count_C)
        ctx.group = group
        out_CM = normal_CM
        if weight_C is not None:
            out_CM = out_CM * weight_C[:, None]
        if bias_C is not None:
            out_CM = out_CM + bias_C[:, None]
        ctx.mark_non_differentiable(mean_C, variance_C, count_C)
        return _restore_shape(out_CM, input), mean_C, variance_C, count_C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients by input, weight and bias. `grad`: by the output, float[N, C, …]."""
        normal_CM, scale_C, weight_C, count_C = ctx.saved_tensors
        grad_CM = grad.transpose(0, 1).flatten(1).to(normal_CM.dtype)
        grad_bias_C = grad_CM.sum(1)
        grad_weight_C = (grad_CM * normal_CM).sum(1)
        # The gradients of weight and bias stay this rank's own: they are averaged later with all
        # others. What flows back through the statistics is summed over the group now.
        through = torch.stack([grad_bias_C, grad_weight_C])
        dist.all_reduce(through, group=ctx.group)
        mean_CM, slope_CM = (through / count_C)[:, :, None]
        factor_C = scale_C
        if weight_C is not None:
            factor_C = scale_C * weight_C
        grad_input_CM = (grad_CM - mean_CM - normal_CM * slope_CM) * factor_C[:, None]
        grad_input = _restore_shape(grad_input_CM, grad)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_weight: torch.Tensor | None = None
        if needs_weight and weight_C is not None:
            grad_weight = grad_weight_C
        grad_bias: torch.Tensor | None = None
        if needs_bias and weight_C is not None:
            grad_bias = grad_bias_C
        return grad_input, grad_weight, grad_bias, None, None


def _restore_shape(x_CM: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return float[C, N·…] in the shape and type of `like`, float[N, C, …].

    It is always a copy, because a following activation may work in place.
    """
    channels_first = like.transpose(0, 1).shape
    x_CN = x_CM.to(like.dtype).view(channels_first)
    return x_CN.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def apply_memory(model: Any, plan: Plan) -> None:
    """Apply the options of the section `memory`, those inside of a block first."""
    memory = plan.config.memory
    if memory.mlp_chunk:
        apply_mlp_chunks(model, memory.mlp_chunk)
    apply_activation_checkpointing(model, plan.activation_checkpointing, memory.checkpointed_blocks)
    if memory.activation_offload:
        ActivationOffload(model, plan.device)


def apply_activation_checkpointing(
    model: Any, kind: Literal["none", "selective", "full"], block_count: int | None = None
) -> None:
    """Let blocks compute their activations again in backward (Chen et al. 2016).

    `full` keeps only the input of each block. `selective` keeps more: see `selective_contexts`. The
    random numbers are replayed, so dropout agrees. `block_count`: only the first so many blocks are
    checkpointed, and all of a vision tower; None: all.
    """
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = selective_contexts
    require_checkpointable(model)
    if drumline_checkpoints_blocks(model):
        for block in blocks(model)[:block_count]:
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        # The name in older transformers.
        enable = model.gradient_checkpointing_enable
    enable(options)
    if block_count is not None:
        for block in text_blocks(model)[block_count:]:
            block.gradient_checkpointing = False  # type: ignore[assignment]


def apply_mlp_chunks(model: nn.Module, tokens: int) -> None:
    """Let the feed-forward part of each block work on at most `tokens` of a micro-batch at once.

    It is computed again in backward. So the wide tensors inside of it never exist for all tokens of
    a long row (tiled MLP of Arctic Long Sequence Training, Bekman et al. 2025).
    """
    # Those of a vision tower have patches in place of rows of tokens.
    parts: list[Any] = [getattr(block, "mlp", None) for block in text_blocks(model)]
    if not parts or None in parts:
        raise NO_CHUNKS.error("its blocks have no part of the name mlp")
    for part in parts:
        part.forward = functools.partial(_run_in_chunks, part.forward, tokens)


def _run_in_chunks(
    inner: Any, tokens: int, hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return `inner(hidden_BTD, *args, **kwargs)`, computed in chunks of at most `tokens` tokens.

    A tensor of shape [B, T, …] among `args` and `kwargs`, such as Bloom's residual, is cut too.
    """
    rows, length = hidden_BTD.shape[:2]
    width = max(1, tokens // rows)
    if length <= width:
        return inner(hidden_BTD, *args, **kwargs)

    def compute(start: int) -> torch.Tensor:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] != (rows, length):
                return tensor
            return tensor[:, start : start + width]

        all_args = (hidden_BTD, *args)
        chunk_args, chunk_kwargs = tree_map_only(torch.Tensor, cut, (all_args, kwargs))
        return checkpoint(inner, *chunk_args, use_reentrant=False, **chunk_kwargs)

    chunks = [compute(start) for start in range(0, length, width)]
    return torch.cat(chunks, 1)


def drumline_checkpoints_blocks(model: Any) -> bool:
    """Return whether Drumline checkpoints the blocks; False: the model's own class does it."""
    return not hasattr(model, "supports_gradient_checkpointing") and bool(blocks(model))


def require_checkpointable(model: Any) -> None:
    """Raise PlanError if neither Drumline nor the model's class can checkpoint its blocks."""
    if drumline_checkpoints_blocks(model):
        if batch_norms(model):
            raise NO_RECOMPUTING.error(
                "it runs a block twice, and a batch norm would count its samples twice"
            )
    elif not getattr(model, "supports_gradient_checkpointing", False):
        raise NO_RECOMPUTING.error(f"{type(model).__name__} has no activation checkpointing")


def selective_contexts() -> tuple[Any, Any]:
    """Return the contexts (of the forward, of the recomputation) of one checkpointed region.

    The results of attention and of every second matmul are kept, since these cost most to compute
    again; keeping all matmuls would take too much memory (as in torchtitan). Matmuls are numbered
    in the same way in the forward and in the recomputation.
    """
    # Matmuls so far, by whether they belong to the recomputation.
    matmuls = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in MATMULS:
            matmuls[context.is_recompute] += 1
            is_kept = matmuls[context.is_recompute] % 2 == 1
        else:
            is_kept = operation in ATTENTION or operation.namespace in KERNELS
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    kept: deque[torch.Tensor] = deque()
    first, again = create_selective_checkpoint_contexts(policy)
    return _Selective(first, kept, False), _Selective(again, kept, True)


class _Selective(TorchDispatchMode):
    """Wraps torch's mode for one pass, `inner`, to also keep the matmuls of compiled code.

    Compiled code writes their results into memory that it uses again later. So a copy of every
    second result is kept in the forward, and copied into its place in the recomputation.
    """

    supports_higher_order_operators = True
    ac_graph_id: Any = None  # set where the region is traced with its recomputation

    def __init__(self, inner: Any, kept: deque[torch.Tensor], is_recompute: bool) -> None:
        super().__init__()
        self.inner = inner
        self.kept = kept
        self.is_recompute = is_recompute
        self.matmuls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch's own checkpointing modes do; otherwise blocks are not compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of the region, or take its kept result.

        Matmuls are numbered from 1 in both passes; those with odd numbers are kept.
        """
        if func not in COMPILED_MATMULS:
            self.inner.ac_graph_id = self.ac_graph_id
            return self.inner.__torch_dispatch__(func, types, args, kwargs)
        self.matmuls += 1
        is_kept = self.matmuls % 2 == 1
        if is_kept and self.is_recompute:
            return kwargs["out"].copy_(self.kept.popleft())
        out = func(*args, **kwargs)
        if is_kept:
            self.kept.append(out.clone())
        return out


def apply_compile(model: nn.Module, options: CompileConfig) -> None:
    """Compile each block in place, and the part of the cross-entropy that works on logits.

    `options` may switch off either. Names of parameters stay. Equal blocks share one compilation.
    The blocks of a vision tower stay eager: how many patches they get, and how these divide into
    images, is another number in each micro-batch.
    """
    if options.loss and not hasattr(losses._softmax_sums, "_torchdynamo_orig_callable"):
        # Dynamic shapes, because the last chunk of a batch is shorter.
        losses._softmax_sums = torch.compile(losses._softmax_sums, dynamic=True)
    if not options.enabled:
        return
    skip_side_effects_of_recomputation()
    for block in text_blocks(model) or [model]:
        is_cut = any(isinstance(parameter, DTensor) for parameter in block.parameters())
        is_checkpointed = getattr(block, "gradient_checkpointing", False)
        if is_cut and is_checkpointed:
            _compile_in_checkpoint(block, options.mode)
        else:
            block.compile(mode=options.mode)


def skip_side_effects_of_recomputation() -> None:
    """Let a compiled block with checkpointing change Python objects in its forward alone.

    The counts of a mixture's experts are such a change. A recomputation would only repeat it, and
    without this torch refuses the block. It holds for all models of the process.
    """
    from drumline.vendor.torch import dynamo_config

    dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _compile_in_checkpoint(block: Any, mode: str | None) -> None:
    """Compile the forward of a block of transformers, and leave its checkpointing around it eager.

    Together with tensor parallelism the two cannot be one graph. torch 2.13 takes the mesh for a
    tensor that backward needs (an AssertionError), and with sequence parallelism a norm has another
    weight while its forward runs, which is refused in a checkpointed region.
    """
    checkpoint_block = block._gradient_checkpointing_func
    compiled = torch.compile(_call, mode=mode)

    def run(forward: functools.partial[Any], *inputs: Any) -> Any:
        # `forward` is a new partial in each call, which would be compiled anew. Its parts are not.
        return checkpoint_block(compiled, forward.func, forward.args, forward.keywords, *inputs)

    block._gradient_checkpointing_func = run


def _call(function: Any, first: tuple[Any, ...], options: dict[str, Any], *inputs: Any) -> Any:
    """Call a function. Compiling this one function serves all calls of a block."""
    return function(*first, *inputs, **options)


def compile_step(optimizer: torch.optim.Optimizer) -> None:
    """Compile an optimizer's step, with rates as tensors: each new number would be compiled anew."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]


def gather_dtype(plan: Plan, is_user_module: bool = False) -> torch.dtype | None:
    """Return the low-precision type in which the strategy gathers weights; None if it casts none.

    `is_user_module`: inputs may then be fp32, as those of image models are.
    """
    may_have_fp32_inputs = plan.config.images_alone or is_user_module
    low = plan.config.strategy.gathered_in(plan.precision, may_have_fp32_inputs)
    if low is None:
        return None
    return DTYPES[low]


def autocast_dtype(plan: Plan, casts_weights: bool) -> torch.dtype | None:
    """Return the type in which autocast lets operations compute; None if there is no autocast.

    `casts_weights`: the strategy casts weights as it gathers them, which leaves autocast nothing.
    """
    if plan.is_pure_bf16 or casts_weights:
        return None
    return LOW_PRECISION.get(plan.precision)


def apply_ddp(
    module: nn.Module, options: CopyOptions, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """Return DDP around a module (Li et al. 2020).

    It averages gradients over the ranks of `group` while backward still runs.
    """
    # Passed only if it is False: torch 2.13 warns about this argument, and older versions have no
    # other for it.
    buffers: dict[str, Any] = {}
    if not options.broadcast_buffers:
        buffers["broadcast_buffers"] = False
    wrapped = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        **buffers,
    )
    wrapped.logger = _LoggerWithoutTimings(wrapped.logger)  # type: ignore[assignment]
    if not (options.static_graph or options.find_unused_parameters):
        _fix_bucket_layout(wrapped)
    return wrapped


class _LoggerWithoutTimings:
    """DDP's logger without the seconds of forward and backward.

    DDP's own logger asks for them in the first ten steps and in each hundredth, and makes the host wait
    for the device.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Leave the seconds of the last step unmeasured."""


def _fix_bucket_layout(ddp: DistributedDataParallel) -> None:
    """Run a backward of zeros, after which the layout of DDP's buckets is final.

    After its first backward DDP makes its buckets anew, in the order in which gradients came.
    The order in which three or more ranks are summed depends on an entry's place in a bucket. So
    the first step of a resumed run, with the old layout, would differ in its last bits. As in a
    real step, the last parameter gets its gradient first here.
    """
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        # One entry of each parameter is enough to reach it.
        zeros = [(parameter.flatten()[:1].float() * 0).sum() for parameter in parameters]
        loss = torch.stack(zeros).sum()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    for parameter in parameters:
        parameter.grad = None
    ddp.reducer._rebuild_buckets()
