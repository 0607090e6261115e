"""The native engines: PyTorch's autograd and optimizer over a parallelised model.

`ForwardEngine` does what needs no gradients (evaluate, infer, return weights), which is all that a
frozen model needs. `NativeEngine` trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from drumline.dist.copies import AsyncHostCopy
from drumline.dist.mesh import device_mesh, expert_gradient_group, gradient_group
from drumline.dist.seeds import derive
from drumline.engine.bf16_adamw import BFloat16AdamW
from drumline.engine.compress import compress_ddp
from drumline.engine.context_parallel import apply_context_parallel
from drumline.engine.data_parallel import (
    BucketedAllReduce,
    DataParallelWrapper,
    NoGradientSync,
    Replicated,
    Sharded,
)
from drumline.engine.engine import (
    DeviceSums,
    Extract,
    IsWanted,
    Sums,
    extracting_objective,
    is_any,
    sum_on_device,
    sum_to_host,
)
from drumline.engine.experts import cast_experts_under_autocast
from drumline.engine.fp8 import apply_fp8, compute_gather_scales
from drumline.engine.norms import CLIP_EPSILON, LossScale, global_norm, local, total_norm
from drumline.engine.optimizer import (
    Groups,
    MakeOptimizer,
    as_saved,
    build_optimizer_with_state,
    handles_found_inf,
    load_numbers,
    load_saved,
    optimizer_tensors,
    schedule_free_scalars,
    set_rate,
    take_step,
    use_averaged_weights,
)
from drumline.engine.per_parameter import OptimizerInBackward, OptimizerOnHost
from drumline.engine.sharded_optimizer import ShardedOptimizerWrapper
from drumline.engine.tensor_parallel import apply_tensor_and_expert_parallelism
from drumline.engine.transforms import (
    RunningStatistics,
    agree_on_statistics,
    apply_compile,
    apply_ddp,
    apply_memory,
    apply_sync_batchnorm,
    autocast_dtype,
    batch_norms,
    compile_step,
    gather_dtype,
)
from drumline.engine.user_module import UserModule, modes_kept
from drumline.errors import ModelError, PlanError
from drumline.models import adapters
from drumline.models.blocks import blocks, tensor_plan
from drumline.models.containers import lower_precision, raise_precision
from drumline.models.freeze import trainable_names
from drumline.models.head import ForwardWithObjective
from drumline.models.kernels import apply_liger
from drumline.models.packed import scales_of
from drumline.models.router_load import router_load_of
from drumline.models.shards import (
    Values,
    all_tensors,
    canonical_tensors,
    extra_states,
    set_extra_states,
    tied_names,
)
from drumline.plan.plan import Plan
from drumline.plan.rule import is_data_parallel_only
from drumline.plan.strategy_engine import engine_spec
from drumline.system.heartbeat import alive, beat
from drumline.telemetry.memory_tracker import MemoryStats, tensors_in
from drumline.vendor.torch import foreach_mul_

E = TypeVar("E", bound="ForwardEngine")
ForwardContext = Callable[[], contextlib.AbstractContextManager[Any]]


def prepare(
    plan: Plan,
    model: nn.Module,
    values: Values,
    engine: Callable[..., E],
    *,
    plain: bool = False,
    overlaps: bool = True,
    make_optimizer: MakeOptimizer | None = None,
) -> E:
    """Parallelise a model as planned, fill its weights, and return the engine over it. Collective.

    Transforms are applied from the inside out, so that each sees what those before it have made:
    fp8, tensor and expert parallelism, batch norms, kernels, context parallelism, activation
    checkpointing and offload, compiling, data parallelism.

    `engine`: called as engine(plan, model, wrapper, forward_context).
    `plain`: the model is a module of the user's, not a Hugging Face model.
    `overlaps`: whether DDP may all-reduce gradients during backward. For that it has to see each
    forward that a backward goes through. False: they are averaged after backward, without DDP.
    `make_optimizer`: makes the optimizer in place of the plan's.
    """
    config = plan.config
    # FSDP2 is also used by a single process, to keep its weights in host memory.
    has_mesh = plan.mesh.world_size > 1 or plan.data_parallel == "fsdp2"
    mesh = device_mesh(plan.mesh, plan.device) if has_mesh else None
    _apply_to_layers(plan, model, mesh, is_user_module=plain)
    module: UserModule | ForwardWithObjective
    if plain:
        module = UserModule(model, plan.batch)
    else:
        module = ForwardWithObjective(model)
    if config.model.kernels == "liger":
        apply_liger(model)
    if plan.is_pure_bf16 and config.images_alone:
        # Pixels are fp32, and there is no autocast.
        model.register_forward_pre_hook(partial(_lower_inputs, plan.precision), with_kwargs=True)
    if plan.mesh.cp > 1:
        assert mesh is not None and isinstance(module, ForwardWithObjective)
        apply_context_parallel(module, model, mesh["cp"], plan.cp_method, config.packs)
    apply_memory(model, plan)
    apply_compile(model, config.compile)
    forward_context: ForwardContext = contextlib.nullcontext
    if module.sequence is not None:
        forward_context = module.sequence.around
    options: dict[str, Any] = {}
    if make_optimizer is not None:
        options["make_optimizer"] = make_optimizer
    wrapper = wrap_for_data_parallelism(
        plan, mesh, model, [(module, model)], module, values, overlaps
    )
    return engine(plan, model, wrapper, forward_context, **options)


def _apply_to_layers(
    plan: Plan, model: nn.Module, mesh: DeviceMesh | None, is_user_module: bool
) -> None:
    """Apply the transforms that replace or cut layers. `mesh`: None for one process alone."""
    apply_fp8(model, plan)
    casts_weights = gather_dtype(plan) is not None
    if not is_user_module and autocast_dtype(plan, casts_weights) is not None:
        cast_experts_under_autocast(model)
    # A stage of a pipeline may have no layer that is cut.
    if plan.mesh.pp == 1 or tensor_plan(model):
        apply_tensor_and_expert_parallelism(plan, model, mesh)
    options = plan.config.model
    if options.sync_batchnorm and mesh is not None:
        apply_sync_batchnorm(model, plan.device, options.sync_batchnorm_ranks)


def wrap_for_data_parallelism(
    plan: Plan,
    world_mesh: DeviceMesh | None,
    model: nn.Module,
    roots: list[tuple[Any, Any]],
    module: nn.Module,
    values: Values,
    overlaps: bool,
) -> DataParallelWrapper:
    """Fill a model's weights, and return the data-parallel wrapper around it. Collective.

    This is the last transform, around all others. If the strategy has code for it
    (`EngineSpec.spread`), that does it; otherwise each data rank has a copy of `module`.
    `world_mesh`: of all ranks; None for one process alone. `roots`: pairs (module that runs, the
    part of the model within it), one for each stage of a pipeline, otherwise a single one.
    """
    strategy = plan.config.strategy
    strategy_wrapper: DataParallelWrapper | None = engine_spec(strategy).spread(
        plan, world_mesh, model, roots, values
    )
    if strategy_wrapper is not None:
        return strategy_wrapper
    values.fill(model)
    if world_mesh is None or plan.data_parallel != "ddp":
        return NoGradientSync(module)
    ddp_options = strategy.copies()
    bucket_bytes = int(ddp_options.bucket_cap_mb * 2**20)
    if strategy.optimizer_shards(plan.mesh) > strategy.shards(plan.mesh):
        return ShardedOptimizerWrapper(module, world_mesh, bucket_bytes)
    if plan.mesh.tp * plan.mesh.ep > 1 or not overlaps:
        experts: dist.ProcessGroup | None = None
        if plan.mesh.ep > 1:
            experts = expert_gradient_group(world_mesh)
        return BucketedAllReduce(module, gradient_group(world_mesh), bucket_bytes, experts)
    ddp = apply_ddp(module, ddp_options, gradient_group(world_mesh))
    seed = derive(plan.config.run.seed, "compression")
    compressor = compress_ddp(ddp, ddp_options.compression, seed)
    return Replicated(ddp, compressor)


class ForwardEngine:
    """An engine over a model that is not trained. `NativeEngine` adds training to it.

    A forward runs model and objective together, so that the hooks of wrappers (DDP, FSDP2) see all
    uses of a weight. Methods without a docstring are described in `Engine` and `CustomLoopEngine`.
    """

    trains = False

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        wrapper: DataParallelWrapper,
        forward_context: ForwardContext = contextlib.nullcontext,
    ) -> None:
        """`forward_context`: makes the context that each forward and its backward run in."""
        self.model = model
        self.wrapper = wrapper
        self.forward_context = forward_context
        self.router_load = router_load_of(model)
        # cpu, cuda or mps. On a GPU it stands for the current device of the process.
        self.device_type = plan.device_type
        # FSDP2 casts weights as it gathers them. Other strategies leave casting to autocast.
        casts_weights = isinstance(wrapper, Sharded) and wrapper.casts
        self.autocast_dtype = autocast_dtype(plan, casts_weights)
        self.batch_norms = batch_norms(model)
        self.statistics = RunningStatistics(self.batch_norms)
        # Whether this rank has all weights of the model in their usual form: no strategy that
        # shards them, and no axis of the mesh besides the data ranks.
        is_unsharded = isinstance(
            wrapper, NoGradientSync | Replicated | ShardedOptimizerWrapper | BucketedAllReduce
        )
        self.is_whole = is_unsharded and is_data_parallel_only(plan.mesh)
        if not self.trains:
            self.model.eval()
        elif not self.model.training:  # a part that was built in eval mode stays in it
            self.model.train()

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """See Engine. The module runs without DDP, since there are no gradients to reduce."""
        return sum_to_host(
            self._evaluate_batches(self.wrapper.eval_module, micro_batches, objective)
        )

    def infer(
        self, micro_batches: Iterable[Any], extract: Extract, adapter: bool = True
    ) -> list[torch.Tensor]:
        """See Engine. An objective appends what `extract` returns to `extracted`."""
        extracted: list[torch.Tensor] = []
        with adapters.switch_adapters(self.model, adapter):
            self._evaluate_batches(
                self.wrapper.infer_module, micro_batches, extracting_objective(extract, extracted)
            )
        return extracted

    def whole_weights(self, is_wanted: IsWanted = is_any) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine. Only one weight at a time is gathered: all of them may not fit."""
        self._prepare_evaluation_weights()
        tied = tied_names(self.model)
        for name, tensor in all_tensors(self.model).items():
            if not is_wanted(name):
                continue
            full = full_tensor(name, tensor, self.device_type)
            for each in (name, *tied.get(name, ())):
                yield each, full

    def unsharded_model(self) -> nn.Module | None:
        if not self.is_whole:
            return None
        self._prepare_evaluation_weights()
        return self.model

    def memory_stats(self) -> MemoryStats:
        """Bytes of the weights that this rank holds."""
        return MemoryStats.from_tensors(self.model.parameters(), (), ())

    def exposed_communication(self) -> float | None:
        return self.wrapper.exposed_communication()

    def begin_step(self, lr: float) -> None:
        """See Engine."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """See CustomLoopEngine.

        With gradients the call goes through DDP, which averages them in backward.
        """
        trains = torch.is_grad_enabled()
        if trains:
            module = self.wrapper.train_module
        else:
            module = self.wrapper.eval_module
        with self._autocast():
            out = module((args, kwargs))
        if not trains and isinstance(self.wrapper, Sharded):
            # FSDP2 keeps some weights gathered for a backward, and none follows.
            self.wrapper.reshard()
        # A loss is made of it outside of autocast.
        return raise_precision(out)

    @contextlib.contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """See CustomLoopEngine.

        On leaving, each module is in the mode (training or not) that it had before.
        """
        self._prepare_evaluation_weights()
        was_training = self.model.training
        with modes_kept(self.model):
            self._set_training(False)
            try:
                with torch.no_grad(), self.forward_context():
                    yield
            finally:
                self._set_training(was_training)
                if isinstance(self.wrapper, Sharded):
                    self.wrapper.reshard()

    def _evaluate_batches(
        self, module: nn.Module, micro_batches: Iterable[Any], objective: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Return the sums of each micro-batch, `loss` among them, as scalars on the device."""
        outs = []
        with self.evaluation_mode(), self._autocast():
            for batch in micro_batches:
                alive()
                loss_sum, sums = module(batch, objective)
                outs.append({"loss": loss_sum, **sums})
        return outs

    def _prepare_evaluation_weights(self) -> None:
        """Put the weights and statistics in place that an evaluation or an export reads. Collective.

        Here the batch norms agree on their running statistics. An engine overrides this to switch
        weights first: to the mean of the ranks' copies (local SGD), or to the running average of a
        schedule-free optimizer.
        """
        agree_on_statistics(self.batch_norms)

    def _set_training(self, mode: bool) -> None:
        """Set the model to training mode or out of it."""
        self.model.train(mode)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forwards compute: autocast, if operations are cast by it."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.autocast_dtype)


class NativeEngine(ForwardEngine):
    """Engine over a trainable model.

    `named`: the model's parameters by name. `optimizer_parameters`: what the optimizer updates, by
    the same names. With ShardedOptimizerWrapper these are this rank's rows, otherwise the
    parameters themselves.
    """

    trains = True
    group: Any = None  # the process group of a pipeline's ranks; None without a pipeline
    # Names of tied weights whose gradients another rank of the pipeline counts in the norm.
    counted_elsewhere: frozenset[str] = frozenset()

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        wrapper: DataParallelWrapper,
        forward_context: ForwardContext = contextlib.nullcontext,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        """`make_optimizer`: in place of the plan's."""
        super().__init__(plan, model, wrapper, forward_context)
        self.averaged_over = plan.mesh.data_ranks * plan.mesh.cp
        self.max_grad_norm = plan.config.optimizer.max_grad_norm
        self.loss_scale = LossScale(
            plan.config.precision.initial_scale, plan.precision == "fp16", self.device_type
        )
        self.named = dict(model.named_parameters())
        # A loop of the user's own may freeze some of these later, and unfreeze others.
        self.initially_trainable = set(trainable_names(model))
        self.optimizer_parameters = wrapper.optimizer_parameters(self.named)
        self.optimizer: Any = self._build_optimizer(plan, make_optimizer)
        if plan.config.compile.optimizer:
            compile_step(self.optimizer)
        self.gathers_fp8 = plan.config.precision.gather == "fp8"
        # Whether the optimizer skips a step by itself if a flag on the device says so. Otherwise
        # the host has to wait for the flag before each step.
        self.handles_found_inf = isinstance(self.optimizer, OptimizerOnHost) or handles_found_inf(
            self.optimizer, self.device_type
        )

    def _build_optimizer(self, plan: Plan, make_optimizer: MakeOptimizer | None) -> Any:
        """Return the user's optimizer, or the plan's, with its state made."""
        options = plan.config.optimizer
        user_optimizer: torch.optim.Optimizer | None = None
        if make_optimizer is not None:
            user_optimizer = make_optimizer(self.model)
        if user_optimizer is not None and self.optimizer_parameters is not self.named:
            raise PlanError(
                "it steps the model's own parameters, and shard_optimizer parts of them",
                where="make_optimizer",
                fix="use strategy=fsdp2, or leave make_optimizer out",
            )
        if user_optimizer is None and options.in_backward:
            return OptimizerInBackward(
                self.named, lambda some: build_optimizer_with_state(some, options)
            )
        if user_optimizer is None and options.offload:
            return OptimizerOnHost(
                self.named, lambda some: build_optimizer_with_state(some, options)
            )
        make_from_groups: Callable[[Groups], torch.optim.Optimizer] | None = None
        if plan.is_pure_bf16:
            make_from_groups = partial(_bfloat16_adamw, plan=plan, named=self.optimizer_parameters)
        matrices = frozenset[str]()
        if options.kind == "muon":
            matrices = self._matrices_in_blocks()
        return build_optimizer_with_state(
            self.optimizer_parameters, options, user_optimizer, matrices, make_from_groups
        )

    def _matrices_in_blocks(self) -> frozenset[str]:
        """Return the names of the two-dimensional parameters within blocks, which Muon steps."""
        matrices: set[int] = set()
        for block in blocks(self.model):
            matrices |= {id(parameter) for parameter in block.parameters() if parameter.ndim == 2}
        return frozenset(
            name for name, parameter in self.named.items() if id(parameter) in matrices
        )

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """See Engine.

        Gradients of all micro-batches but the last are accumulated without communication.
        """
        outs = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.micro_batch(last=is_last):
                beat("forward")
                with self._autocast():
                    loss_sum, sums = self.wrapper.train_module(batch, objective)
                # Backward runs outside of autocast: each operation's is in the type of its forward.
                beat("backward")
                self.backward(loss_sum, denominator)
            outs.append({"loss": loss_sum.detach(), **sums})
        return sum_on_device(outs)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See CustomLoopEngine. If an evaluation has left averaged weights, switch back first."""
        self._use_averaged_weights(False)
        self.statistics.begin_step()
        with self.forward_context(), self.wrapper.micro_batch(last):
            yield

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        # Gradients are averaged over ranks, but their sum is wanted. Scaling the loss by the number
        # of ranks gives the sum without a second pass over the gradients.
        scale = self.loss_scale.scale(self.averaged_over / denominator)
        with self.wrapper.backward_context(loss_sum):
            scaled_loss = loss_sum * scale
            scaled_loss.backward()

    def divide(self, by: torch.Tensor) -> None:
        gradients = self._local_gradients()
        if gradients:
            foreach_mul_(gradients, (1.0 / by).to(gradients[0]))

    def begin_step(self, lr: float) -> None:
        """See Engine. An optimizer that steps within backward needs the rate now."""
        if isinstance(self.optimizer, OptimizerInBackward):
            set_rate(cast(Any, self.optimizer), lr)

    def grad_norm(self) -> torch.Tensor:
        """See Engine. Gradients of fp16 are divided by their loss scale here, once a step."""
        if isinstance(self.optimizer, OptimizerInBackward):
            # The gradients are deleted already; their squares were added up during backward.
            return total_norm(self.optimizer.squares, self.device_type)
        self.loss_scale.unscale(self._local_gradients())
        counted: list[torch.Tensor] = []
        for name, parameter in self.optimizer_parameters.items():
            if parameter.grad is not None and name not in self.counted_elsewhere:
                counted.append(parameter.grad)
        return global_norm(counted, self.device_type, self.group)

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """See Engine.

        An optimizer that handles `found_inf` steps without the host knowing `finite`.
        """
        self.statistics.end_step(finite)
        # If the host has to know whether to step, it asks for the flag before clipping, so that the
        # device has work while the answer is on its way.
        late_finite: AsyncHostCopy | None = None
        if not self.handles_found_inf:
            late_finite = AsyncHostCopy(finite)
        gradients = self._local_gradients()
        # A pipeline's stage may have nothing trainable.
        if self.max_grad_norm is not None and gradients:
            # The formula of torch.nn.utils.clip_grad_norm_, applied to whole and sharded gradients
            # alike.
            factor = (self.max_grad_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
            foreach_mul_(gradients, factor.to(gradients[0]))
        if late_finite is None or late_finite.read():
            if lr is not None:
                set_rate(self.optimizer, lr)
            if self.handles_found_inf:
                self.optimizer.found_inf = (~finite).float()
            take_step(self.optimizer)
            self._weights_changed()
            self.wrapper.after_step()
        if self.loss_scale.enabled:
            self.loss_scale.update(is_stepped=finite, is_overflow=~torch.isfinite(grad_norm))
        self.optimizer.zero_grad(set_to_none=True)
        # The optimizer may step only parts of the model's parameters, or a parameter may be frozen:
        # it then does not delete the model's own gradients.
        for parameter in self.named.values():
            parameter.grad = None

    def uses_loss_scale(self) -> bool:
        return self.loss_scale.enabled

    def _use_averaged_weights(self, averaged: bool) -> None:
        """Switch the weights of a schedule-free optimizer (see `optimizer.use_averaged_weights`).

        Collective if the weights change.
        """
        if use_averaged_weights(self.optimizer, averaged):
            self._weights_changed()

    def _weights_changed(self) -> None:
        """Compute the scales again by which FSDP2 gathers weights in fp8. Collective."""
        if self.gathers_fp8:
            compute_gather_scales(self.model)

    def _prepare_evaluation_weights(self) -> None:
        self._use_averaged_weights(True)
        super()._prepare_evaluation_weights()

    def tensors(self) -> dict[str, torch.Tensor]:
        """See Engine. Checkpoints and exports hold the averaged weights of a schedule-free run."""
        self._use_averaged_weights(True)
        agree_on_statistics(self.batch_norms)
        return {name: as_saved(tensor) for name, tensor in self._saved_tensors().items()}

    def state(self) -> dict[str, Any]:
        return {
            "scaler": self.loss_scale.state(),
            "optimizer": schedule_free_scalars(self.optimizer),
            "modules": extra_states(self.model),
        }

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """See Engine. What is derived from weights (fp8 scales, copies on the host) is updated."""
        # A tensor is the engine's own, so it is filled already. Or it is the fp32 copy of a
        # quantised or bf16 tensor (`as_saved`), which still has to get the values.
        for name, tensor in self._saved_tensors().items():
            load_saved(tensor, tensors.get(name, tensor))
        load_numbers(self.optimizer, self.optimizer_parameters, tensors)
        set_extra_states(self.model, state.get("modules", {}))
        for group in self.optimizer.param_groups:
            group.update(state.get("optimizer", {}))
        if isinstance(self.optimizer, OptimizerOnHost):
            self.optimizer.refresh()
        self._weights_changed()
        self.loss_scale.load_state(state.get("scaler", {}))
        if isinstance(self.wrapper, Replicated) and self.wrapper.compressor:
            self.wrapper.compressor.step = state["step"]

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state by canonical name.

        Includes weights that the user's loop has frozen since the engine was built.
        """
        frozen: dict[str, torch.Tensor] = {}
        for name, parameter in self.named.items():
            if name in self.initially_trainable and not parameter.requires_grad:
                frozen[f"model.{name}"] = parameter.data
        weights = canonical_tensors(self.model)
        return frozen | weights | optimizer_tensors(self.optimizer, self.optimizer_parameters)

    def memory_stats(self) -> MemoryStats:
        """See Engine. Of a sharded tensor this rank's part counts."""
        parameters = [*self.named.values(), *scales_of(self.model)]
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        states = tensors_in(*self.optimizer.state.values())
        copies = getattr(self.optimizer, "copies", ())
        return MemoryStats.from_tensors(parameters, gradients, [*states, *copies])

    def _local_gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients."""
        return [local(p.grad) for p in self.optimizer_parameters.values() if p.grad is not None]


def _bfloat16_adamw(
    groups: Groups, plan: Plan, named: dict[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of a run in pure bfloat16. `named`: parameters by name."""
    config = plan.config
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named.items()}
    return BFloat16AdamW(groups, config.optimizer, config.precision, config.run.seed, names)


def _lower_inputs(
    precision: str, _module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return a module's inputs in the type of its weights: a hook before its forward."""
    return lower_precision((args, named), precision)


def full_tensor(name: str, tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return the whole tensor on `device`. Collective over the ranks that hold parts of it.

    Raises ModelError for a weight that is packed in 4 or 8 bits.
    """
    if name.endswith((".packed", "_packed")):
        raise ModelError(
            f"{name} is packed, and is not handed out whole",
            where="adapter.quantize",
            fix="use adapter.quantize=none for this",
        )
    on_device = tensor.detach().to(device)
    if isinstance(on_device, DTensor):
        return on_device.full_tensor()
    return on_device
