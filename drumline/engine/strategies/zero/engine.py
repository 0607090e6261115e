"""The DeepSpeed engine: ZeRO 1, 2 and 3 (Rajbhandari et al. 2020), with offloading to host and NVMe (2021).

DeepSpeed does backward, reduction and step. Drumline decides what is summed, what it is divided by,
the learning rate, and what happens at non-finite numbers. This is the only file that imports
deepspeed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from torch import nn

from drumline.config.mesh import share
from drumline.engine.data_parallel import DataParallelWrapper
from drumline.engine.engine import DeviceSums, IsWanted, is_any, sum_on_device
from drumline.engine.native import ForwardEngine
from drumline.engine.norms import CLIP_EPSILON
from drumline.engine.optimizer import MakeOptimizer, make_state, new_optimizer
from drumline.engine.strategies.zero.clock import CollectiveClock, clock_of_backend
from drumline.engine.strategies.zero.fill import (
    ParametersInTurn,
    fill_parameters,
    require_slots,
    shard_of_rank,
)
from drumline.engine.transforms import (
    agree_on_statistics,
    apply_compile,
    apply_memory,
    apply_sync_batchnorm,
)
from drumline.engine.user_module import UserModule, modes_kept
from drumline.models.adapters import borrowed_parameters
from drumline.models.containers import LOW_PRECISION, lower_precision, raise_precision
from drumline.models.freeze import require_none_unfrozen
from drumline.models.head import ForwardWithObjective, trial_batch, trunk_and_head
from drumline.models.packed import scales_of
from drumline.models.recurrent import separated_layers
from drumline.models.scores import score_head
from drumline.models.shards import (
    Values,
    all_tensors,
    canonical_tensors,
    extra_states,
    set_extra_states,
    tied_names,
)
from drumline.plan.plan import Plan
from drumline.system.heartbeat import beat
from drumline.system.redact import reveal
from drumline.telemetry.memory_tracker import MemoryStats, tensors_in
from drumline.vendor.deepspeed import (
    CPU_Accelerator,
    combine_grad_norm_groups,
    get_global_norm_of_tensors,
    release_groups,
)

# The process group that DeepSpeed's own groups were made in last.
_joined: list[dist.ProcessGroup | None] = []
# What torch's optimizers keep of a parameter.
ADAM = ("exp_avg", "exp_avg_sq")
SGD = ("momentum_buffer",)
# The method that measures the gradient norm in a step, by which DeepSpeed's optimizers differ.
MEASURES = (
    "scaled_global_norm",  # ZeRO 1 and 2
    "_get_norm_groups",  # ZeRO 3
    "get_grads_for_norm",  # ZeRO 1 in bf16
)
# Where DeepSpeed's optimizers keep gradients, besides at parameters.
GRADIENTS = (
    "averaged_gradients",  # all ZeRO stages
    "all_grad_tensors",  # ZeRO 1 and 2
    "accumulated_grads_in_cpu",  # ZeRO 1 and 2 with offloading
    "grad_partitions_flat_buffer",  # ZeRO 3
    "fp32_groups_gradients_flat",  # ZeRO 1 in bf16
)


def prepare(
    plan: Plan,
    model: nn.Module,
    values: Values,
    plain: bool = False,
    make_optimizer: MakeOptimizer | None = None,
) -> DeepSpeedEngine:
    """Shard a model and return its engine. Collective.

    `values` writes the model's weights into host memory in fp32, block by block, before they are
    sharded (stage 3) or moved to the device (stage 1 and 2). `plain`: the model is a user's module,
    not a Hugging Face model. `make_optimizer` replaces the plan's optimizer.
    """
    assert plan.deepspeed is not None
    options = reveal(plan.deepspeed, "strategy.options")
    join(plan.device)
    if plan.config.model.sync_batchnorm and plan.mesh.world_size > 1:
        apply_sync_batchnorm(model, plan.device, plan.config.model.sync_batchnorm_ranks)
    module: nn.Module
    if plain:
        module = UserModule(model, plan.batch)
    else:
        module = ForwardWithObjective(model)
    apply_memory(model, plan)
    apply_compile(model, plan.config.compile)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # The optimizer is made before anything is cut: shapes decide which weights decay. On the host
    # it is torch's own too. DeepSpeedCPUAdam is as fast, rounds 1 − β₂ (so second moments are off
    # by 1.3e-5) and has to be compiled.
    if make_optimizer:
        optimizer = make_optimizer(model)
    else:
        optimizer = new_optimizer(trainable, plan.config.optimizer)
    require_slots(optimizer)
    masters = _fill(plan, model, module, values, options)
    if plan.deepspeed["zero_optimization"]["stage"] == 3:
        gather_separated_layers_whole(model)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(trainable.values()),
        optimizer=optimizer,
        config=options,
        dist_init_required=False,
    )
    prepared = DeepSpeedEngine(plan, model, trainable, engine)
    for name, value in masters.items():
        if prepared.sharded:
            safe_set_local_fp32_param(trainable[name], value.to(engine.device))
        else:
            safe_set_full_fp32_param(trainable[name], value.to(engine.device))
    return prepared


def _fill(
    plan: Plan, model: nn.Module, module: nn.Module, values: Values, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Fill the weights of `model` block by block, and cut each block under stage 3.

    Returns the trainable weights before they were rounded to a low precision, by name; under stage
    3 this rank's parts of them. `module`: the wrapped model that DeepSpeed gets, with its
    `options`.
    """
    assert plan.deepspeed is not None
    masters: dict[str, torch.Tensor] = {}
    if plan.deepspeed["zero_optimization"]["stage"] == 3:
        rank = dist.get_rank()
        ranks = dist.get_world_size()

        def local_shard(full: torch.Tensor) -> torch.Tensor:
            return shard_of_rank(full, rank, ranks)

        parameters = fill_parameters(plan, model, values, masters, local_shard)
        dtype = LOW_PRECISION.get(plan.precision, torch.float32)
        in_turn = ParametersInTurn(module, parameters)
        deepspeed.zero.Init(module=in_turn, config_dict_or_path=options, dtype=dtype)
        return masters
    device = torch.device(get_accelerator().current_device_name())

    def whole(full: torch.Tensor) -> torch.Tensor:
        return full

    for _ in fill_parameters(plan, model, values, masters, whole, device):
        # Iterating fills the weights.
        pass
    return masters


def gather_separated_layers_whole(model: nn.Module) -> None:
    """Let ZeRO 3 gather each layer that runs by documents at once, with all modules within.

    These run once for each length of documents, on each rank a different number of times. If each
    of them gathered its weights, ranks would wait for each other, and backward would meet weights
    that are released already.
    """
    for layer in separated_layers(model):
        set_z3_leaf_module(layer, True)
        _self, *names = inspect.signature(type(layer).forward).parameters
        hook = functools.partial(_pass_by_position, names)
        layer.register_forward_pre_hook(hook, with_kwargs=True)


@torch.compiler.disable
def _pass_by_position(
    names: Sequence[str], layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments, its first ones by position, and one of them with a gradient.

    When the gradients of the arguments by position are there, DeepSpeed reduces those of the
    layer's weights and releases the weights. Without such a gradient it would reduce zeros, before
    the layer's backward. `names`: of all arguments of the layer's forward, in order.
    """
    positional = list(args)
    left = dict(options)
    for name in names[len(args) :]:
        if name not in left:
            break
        positional.append(left.pop(name))
    learns = any(parameter.requires_grad for parameter in layer.parameters())
    if learns and torch.is_grad_enabled():
        _require_gradient_of_one(positional)
    return tuple(positional), left


def _require_gradient_of_one(values: list[Any]) -> None:
    """Let the first tensor of floating point take a gradient, in place, unless one does already.

    None does in the first layer behind a frozen embedding.
    """
    floating = []
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            floating.append(index)
    assert floating, "without a gradient of an argument, gradients of weights would be zeros"
    if not any(values[index].requires_grad for index in floating):
        first = floating[0]
        values[first] = values[first].detach().requires_grad_()


def join(device: str) -> None:
    """Let DeepSpeed use the process group that exists; a single process gets one."""
    if get_accelerator().device_name() != device:
        # There are GPUs that the plan does not use.
        set_accelerator(CPU_Accelerator())
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl"
        if device == "cpu":
            backend = "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # DeepSpeed calls torch's collectives by names that newer releases of torch deprecate.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # DeepSpeed would compile, for a minute, an all-reduce over shared memory that only its
    # inference uses.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        dist_init_required=False,
        verbose=False,
    )
    # A process may train more than once, each time in new process groups, and DeepSpeed keeps the
    # groups that it made in the old ones.
    if _joined != [dist.group.WORLD]:
        release_groups()
        _joined[:] = [dist.group.WORLD]


class DeepSpeedEngine(ForwardEngine):
    """The Engine protocol over the engine that deepspeed.initialize returns.

    Evaluations run DeepSpeed's module without its engine. For a checkpoint all ranks gather one
    parameter after another, and only one rank, its owner, keeps the whole tensor and saves it.
    """

    trains = True

    def __init__(
        self, plan: Plan, model: nn.Module, trainable: dict[str, nn.Parameter], engine: Any
    ) -> None:
        super().__init__(plan, model, DataParallelWrapper(engine, eval_module=engine.module))
        # No autocast: the weights are in the type that they compute in.
        self.autocast_dtype = None
        # Name → trainable parameter.
        self.named = trainable
        self.initially_trainable = set(trainable)
        self.engine = engine
        self.image_side = getattr(plan.config.algorithm, "image_size", None)
        # DeepSpeed's optimizer, around the one of torch in `self.optimizer`.
        self.zero = engine.optimizer
        self.data_ranks = plan.mesh.data_ranks
        self.precision = plan.precision
        self.clock: CollectiveClock | None = None
        if plan.device == "cpu":
            self.clock = clock_of_backend(deepspeed.comm.comm)
        self.sharded = engine.zero_optimization_partition_weights()
        self.is_whole = not self.sharded
        self.optimizer = engine.basic_optimizer
        # SGD's state has no count of steps.
        self.counts_steps = not isinstance(self.optimizer, torch.optim.SGD)
        self.slots = self._slots()
        self.rank = dist.get_rank()
        # Name → the rank that writes the parameter into checkpoints.
        sizes = {name: _shape(parameter).numel() for name, parameter in trainable.items()}
        self.owner = share(sizes, dist.get_world_size())
        # The method of DeepSpeed's optimizer that measures the norm, and what it returned last.
        self.measure = next(name for name in MEASURES if hasattr(self.zero, name))
        self.norms: Any = None
        # The norm of the gradients of this engine, which may be one of several.
        self.own_norm = 0.0
        self.max_grad_norm = plan.config.optimizer.max_grad_norm
        self.steps = 0
        # What `divide` leaves to the next step to divide the gradients by.
        self.divisor = 1.0
        # Whether the optimizer has made its moments.
        self.has_state = False
        self._add_casts(plan)
        if self.sharded:
            self._register_borrowed_weights()
        if self.uses_loss_scale():
            self.zero.loss_scale = plan.config.precision.initial_scale
            # The loop stops a run whose steps all overflow.
            self.zero.loss_scaler.raise_error_at_min_scale = False

    def _slots(self) -> tuple[str, ...]:
        """Return the names of what the optimizer keeps of a parameter."""
        if self.counts_steps:
            return ADAM
        if self.optimizer.defaults["momentum"]:
            return SGD
        return ()

    def _add_casts(self, plan: Plan) -> None:
        """Let hooks cast the inputs of models that need it to the type of the weights.

        Token ids need no cast, since their embeddings have that type. So only models of images and
        modules of the user's own need it.
        """
        if plan.precision == "fp32":
            return
        is_user_module = isinstance(self.engine.module, UserModule)

        def lower_inputs(_module: nn.Module, args: Any, named: Any) -> Any:
            return lower_precision((args, named), plan.precision)

        def restore_output(_module: nn.Module, _args: Any, output: Any) -> Any:
            return raise_precision(output)

        if is_user_module or plan.config.images_alone:
            self.model.register_forward_pre_hook(lower_inputs, with_kwargs=True)
        if is_user_module:
            self.model.register_forward_hook(restore_output)

    def _register_borrowed_weights(self) -> None:
        """Tell ZeRO 3 which weights are also used outside of their own module's forward."""
        module = self.engine.module
        heads = nn.ModuleList()
        # The objective uses the weights of the heads.
        if module.has_separable_head:
            parts = trunk_and_head(self.model)
            if parts and parts[1] is not None:
                heads.append(parts[1])
        if not isinstance(module, UserModule):
            score = score_head(self.model)
            if score is not None:
                heads.append(score)
        for parameter in heads.parameters():
            deepspeed.zero.register_external_parameter(module, parameter)
        for layer, parameter in borrowed_parameters(self.model):
            deepspeed.zero.register_external_parameter(layer, parameter)

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """Run forward and backward of all micro-batches of a step, and return their sums."""
        outs = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.micro_batch(last=is_last):
                beat("forward")
                loss_sum, sums = self.engine(batch, objective)
                beat("backward")
                self.backward(loss_sum, denominator)
            outs.append({"loss": loss_sum.detach(), **sums})
        return sum_on_device(outs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Run a micro-batch in a `with` block. After the last one DeepSpeed reduces gradients."""
        self.statistics.begin_step()
        self.engine.set_gradient_accumulation_boundary(last)
        return self._measure_waits()

    def _measure_waits(self) -> contextlib.AbstractContextManager[None]:
        """Count the seconds in collectives in a `with` block, on a CPU."""
        if self.clock is None:
            return contextlib.nullcontext()
        return self.clock.run()

    def exposed_communication(self) -> float | None:
        """Return the seconds that this rank waited for collectives; None if they are not measured.

        They include the last step's: ZeRO 1 and 2 gather the weights in it.
        """
        if self.clock is None:
            return None
        return self.clock.take()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run any module as a user calls it: inputs in its weights' type, outputs in fp32."""
        module = self.engine.module
        if torch.is_grad_enabled():
            module = self.engine
        return raise_precision(module(lower_precision((args, kwargs), self.precision)))

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Accumulate the gradients of Σ loss_sum / denominator over all ranks."""
        # DeepSpeed averages over ranks. With scale_wrt_gas=False it divides by nothing else.
        scale = self.data_ranks / denominator
        self.engine.backward(loss_sum * scale, scale_wrt_gas=False)

    def divide(self, by: torch.Tensor) -> None:
        """Divide the gradients by a number that is known after backward."""
        # DeepSpeed divides by a loss scale, which is a number of the host. ZeRO 1 in bf16 has none,
        # so there the gradients are divided here.
        self.divisor = float(by)
        for gradients in getattr(self.zero, "fp32_groups_gradients_flat", ()):
            gradients.div_(by)
            self.divisor = 1.0

    def whole_weights(self, is_wanted: IsWanted = is_any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield trainable weights in fp32, as they are kept.

        Frozen ones come in the type that they compute in.
        """
        tied = tied_names(self.model)
        for name, tensor in all_tensors(self.model).items():
            if not is_wanted(name):
                continue
            if name in self.named:
                full = safe_get_full_fp32_param(tensor).to(self.engine.device)
            else:
                with self._whole(tensor):
                    full = tensor.detach().to(self.engine.device, copy=self.sharded)
            yield name, full
            for other_name in tied.get(name, ()):
                yield other_name, full

    def unsharded_model(self) -> nn.Module | None:
        """Return the model if each rank has whole weights, else None."""
        if self.sharded:
            return None
        return self.model

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient, as DeepSpeed measures it."""
        self.norms = getattr(self.zero, self.measure)()
        if self.measure == "get_grads_for_norm":
            norm = get_global_norm_of_tensors(input_tensors=self.norms[0])
        elif isinstance(self.norms, list):
            norm = combine_grad_norm_groups(self.norms)
        else:
            norm = self.norms
        scaled_norm = float(norm)
        scale = self.divisor
        if self.uses_loss_scale():
            scale *= float(self.zero.loss_scale)
        self.own_norm = scaled_norm / scale
        # DeepSpeed returns a negative norm for inf and NaN.
        if not self.own_norm >= 0:
            self.own_norm = float("inf")
        return torch.full((), self.own_norm, dtype=torch.float64, device=self.engine.device)

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Take the step.

        DeepSpeed decides on the host what it does, so both scalars are read at once.
        """
        require_none_unfrozen(self.model, self.initially_trainable)
        self.statistics.end_step(finite)
        # Waits for the device, as does the norm below.
        if finite:
            self._step(lr, float(grad_norm))
            return
        self.divisor = 1.0
        # At an infinite norm DeepSpeed leaves the weights, lowers its loss scale and drops the
        # gradients.
        infinite = torch.full((1,), float("inf"), device=self.engine.device)
        infinite_norm = {
            "scaled_global_norm": infinite[0],
            "_get_norm_groups": [infinite[0]],
            "get_grads_for_norm": ([infinite], {}),
        }
        scaler_before: dict[str, Any] = {}
        if self.uses_loss_scale() and torch.isfinite(grad_norm):
            # The loss jumped, which is no overflow: the loss scale stays.
            scaler_before = dict(vars(self.zero.loss_scaler))
        with self._with_norms(infinite_norm[self.measure]):
            self.engine.step()
        if scaler_before:
            vars(self.zero.loss_scaler).update(scaler_before)

    def _step(self, lr: float | None, norm: float) -> None:
        """Let DeepSpeed clip and step. `norm`: of all gradients that are clipped together."""
        # DeepSpeed multiplies by limit / (own norm + 1e-6), if that is less than 1, and does not
        # measure the norm again. This limit makes it the factor of all gradients that are clipped
        # together, limit / (norm + 1e-6), also if its own norm is as small as 1e-6.
        limit = self.max_grad_norm or 0.0
        limit *= (self.own_norm + CLIP_EPSILON) / (norm + CLIP_EPSILON)
        self.zero.clip_grad = limit
        if lr is not None:
            for group in self.zero.param_groups:
                group["lr"] = lr
        if self.divisor != 1.0:
            self.zero.external_loss_scale = float(self.zero.loss_scale) * self.divisor
            self.zero.custom_loss_scaler = True
        with self._with_norms(self.norms), self._measure_waits():
            self.engine.step()
        # The next step divides by nothing, unless `divide` is called again.
        self.zero.custom_loss_scaler = False
        self.divisor = 1.0
        self.steps += 1
        if not self.has_state and not self.sharded:
            # DeepSpeed links the moments after the first step of the first group, when the other
            # groups have no state yet.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        self.has_state = True

    def uses_loss_scale(self) -> bool:
        """Return whether the loss is scaled."""
        return self.precision == "fp16"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors that this rank owns, in host memory. Collective."""
        if self.slots and not self.has_state:
            # DeepSpeed's optimizers make their state in the first step. Take one with zero
            # gradients at rate zero, which does not count.
            global_steps = self.engine.global_steps
            make_state(self.optimizer, self._first_step)
            self.steps = 0
            self.engine.global_steps = global_steps
            self.statistics.before = None
            self._set_steps(0)
        agree_on_statistics(self.batch_norms)
        tensors = {}
        for name, tensor in canonical_tensors(self.model).items():
            if name.removeprefix("model.") not in self.named:
                tensors[name] = tensor
        for name, parameter in self.named.items():
            is_owner = self.owner[name] == self.rank
            for key, slot in self._keys(name):
                # Collective, so all ranks take part.
                if slot is None:
                    full = safe_get_full_fp32_param(parameter)
                else:
                    full = safe_get_full_optimizer_state(parameter, slot)
                if is_owner:
                    tensors[key] = full.to("cpu", torch.float32, copy=True)
            if is_owner and self.counts_steps:
                tensors[f"optim.{name}.step"] = torch.tensor(float(self.steps))
        return tensors

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"modules": extra_states(self.model)}
        if self.uses_loss_scale():
            # In the form of LossScale, for the other engines.
            scaler = self.zero.loss_scaler
            good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
            state["scaler"] = {"scale": float(self.zero.loss_scale), "good_steps": good_steps}
        return state

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint's tensors, which each parameter's owner has, into all ranks.

        Collective.
        """
        set_extra_states(self.model, state.get("modules", {}))
        for name, parameter in self.named.items():
            # Written on all ranks alike, so any rank may be the one whose values are taken.
            with self._whole(parameter, modifier_rank=0):
                shape = _shape(parameter)
                for key, slot in self._keys(name):
                    full = self._broadcast_from_owner(name, tensors.get(key), shape)
                    self._set(parameter, full, slot)
            if self.counts_steps:
                step = tensors.get(f"optim.{name}.step")
                self.steps = int(self._broadcast_from_owner(name, step, torch.Size(())))
        self._set_steps(self.steps)
        if not self.sharded:
            # The weights that forward uses, from the fp32 ones.
            self.zero.update_lp_params()
        saved = state.get("scaler", {})
        if self.uses_loss_scale() and "good_steps" in saved:
            self.zero.loss_scale = saved["scale"]
            self.zero.loss_scaler.cur_iter = saved["good_steps"]
            self.zero.loss_scaler.last_overflow_iter = -1

    def memory_stats(self) -> MemoryStats:
        """Return the bytes of this rank.

        ZeRO 3 counts what it has cut, not what it has gathered.
        """
        parameters = list(self.model.parameters())
        weights = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
        weights += scales_of(self.model)
        # Outside of its step, ZeRO 3 hides its masters from the optimizer. In fp32 they are the
        # weights themselves.
        master_lists = getattr(self.zero, "fp32_partitioned_groups_flat", None)
        if not master_lists:
            master_lists = [group["params"] for group in self.zero.param_groups]
        masters = tensors_in(master_lists)
        at_parameters = [
            (parameter.grad, getattr(parameter, "grad_accum", None))
            for parameter in (*parameters, *masters)
        ]
        elsewhere = [_as_lists(getattr(self.zero, name, None)) for name in GRADIENTS]
        gradients = [*tensors_in(*at_parameters), *tensors_in(*elsewhere)]
        moments = tensors_in(*self.engine.basic_optimizer.state.values())
        return MemoryStats.from_tensors(weights, gradients, [*masters, *moments])

    @contextlib.contextmanager
    def _with_norms(self, norms: Any) -> Iterator[None]:
        """Let DeepSpeed's step use `norms` in place of what it would measure, in a `with` block."""
        if self.measure == "get_grads_for_norm" and norms is self.norms:
            # The BF16_Optimizer also gets from this call which gradients it clips.
            yield
            return

        def given_norms(*_args: Any, **_options: Any) -> Any:
            return norms

        setattr(self.zero, self.measure, given_norms)
        try:
            yield
        finally:
            delattr(self.zero, self.measure)

    def _keys(self, name: str) -> list[tuple[str, str | None]]:
        """Return (canonical name, optimizer slot) of what is kept of a parameter.

        Slot None is the weight itself.
        """
        keys: list[tuple[str, str | None]] = [(f"model.{name}", None)]
        for slot in self.slots:
            keys.append((f"optim.{name}.{slot}", slot))
        return keys

    def _first_step(self) -> None:
        """Take a step with zero gradients at rate zero, which makes the optimizer's state."""
        with modes_kept(self.engine):
            # In evaluation mode, so that batch norms do not update their statistics.
            self.engine.eval()
            if isinstance(self.engine.module, UserModule):
                self._zero_backward_of_any_module()
            else:
                batch = trial_batch(self.model, self.engine.device, self.image_side)

                def zero_of_output(out: Any, _batch: Any) -> SimpleNamespace:
                    return SimpleNamespace(loss_sum=out.sum_of_all() * 0, sums={})

                self.forward_backward([batch], zero_of_output, 1.0)
        self.grad_norm()
        self._step(0.0, 0.0)
        # The time of this step does not count.
        self.exposed_communication()

    def _zero_backward_of_any_module(self) -> None:
        """Run a backward with zero gradients of a module whose inputs are not known."""
        parameters = list(self.named.values())
        gathered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.sharded:
            gathered = deepspeed.zero.GatheredParameters(parameters)
        with gathered:
            touched = torch.stack([parameter.sum() for parameter in parameters]).sum()

            def zero(*_: Any) -> SimpleNamespace:
                return SimpleNamespace(loss_sum=touched * 0, sums={})

            self.forward_backward([None], zero, 1.0)

    def _set_steps(self, steps: int) -> None:
        """Set the optimizer's count of steps."""
        for state in self.engine.basic_optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps

    def _broadcast_from_owner(
        self, name: str, mine: torch.Tensor | None, shape: torch.Size
    ) -> torch.Tensor:
        """Return a tensor that the owner of `name` holds in host memory, on this rank's device.

        Collective. `mine`: the tensor on the owner. `shape`: its shape.
        """
        full = torch.empty(shape, device=self.engine.device)
        if self.owner[name] == self.rank:
            assert mine is not None
            full.copy_(mine)
        dist.broadcast(full, self.owner[name])
        return full

    def _whole(self, tensor: Any, **options: int) -> contextlib.AbstractContextManager[Any]:
        """Gather a tensor that ZeRO 3 has cut, in a `with` block.

        `modifier_rank`: the tensor may be written there, and the values of that rank are taken.
        """
        if not hasattr(tensor, "ds_id"):
            return contextlib.nullcontext()
        gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            [tensor], **options
        )
        return gathered

    def _set(self, parameter: Any, full: torch.Tensor, slot: str | None) -> None:
        """Put a whole fp32 tensor, the same on all ranks, into what this rank holds of it."""
        if not self.sharded:
            if slot is None:
                safe_set_full_fp32_param(parameter, full)
            else:
                safe_set_full_optimizer_state(parameter, full, slot)
            return
        # By DeepSpeed's local functions: those for whole tensors require sizes that the number of
        # ranks divides.
        local_shard = shard_of_rank(full, self.rank, dist.get_world_size())
        if slot is None:
            parameter.data.copy_(full)
            safe_set_local_fp32_param(parameter, local_shard)
        else:
            safe_set_local_optimizer_state(parameter, local_shard, slot)


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter. ZeRO 3 leaves an empty one in its place."""
    if hasattr(parameter, "ds_shape"):
        return parameter.ds_shape
    return parameter.shape


def _as_lists(kept: Any) -> Any:
    """Return the values of a dictionary of gradients, in plain lists; anything else as it is.

    DeepSpeed keeps them in lists of a class of its own, which torch does not look into.
    """
    if not isinstance(kept, dict):
        return kept
    lists = []
    for value in kept.values():
        if isinstance(value, list):
            value = list(value)
        lists.append(value)
    return lists


if __name__ == "__main__":
    # Compile what NVMe offload needs, to where torch keeps such extensions.
    get_accelerator().create_op_builder("AsyncIOBuilder").load()
