"""The DeepSpeed engine: ZeRO 1, 2 and 3 (Rajbhandari et al. 2020), with offloading to the host and to NVMe (2021).

DeepSpeed owns backward, reduction and step; sums, denominators, the learning rate and what non-finite numbers mean stay
Drumline's. It is the only file that imports deepspeed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
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
)
from torch import nn

from drumline.core.heartbeat import beat
from drumline.core.mesh import share
from drumline.core.plan import Plan
from drumline.core.redact import reveal
from drumline.models.adapters import borrowed
from drumline.models.containers import LOW_PRECISION, lowered, precise
from drumline.models.freeze import require_none_late
from drumline.models.head import ForwardWithObjective, any_batch, split
from drumline.models.packed import scales_of
from drumline.models.scores import score_head
from drumline.models.shards import (
    Values,
    all_tensors,
    canonical_tensors,
    extra_states,
    set_extra_states,
    tied_names,
)
from drumline.parallel.data_parallel import Spread
from drumline.parallel.engine import DeviceSums, added
from drumline.parallel.native import ForwardEngine
from drumline.parallel.optimizer import MakeOptimizer, make_state, new_optimizer
from drumline.parallel.plain import Plain, modes_kept
from drumline.parallel.transforms import (
    agree_on_statistics,
    apply_compile,
    apply_memory,
    apply_sync_batchnorm,
)
from drumline.strategies.zero.clock import clock
from drumline.strategies.zero.fill import InTurn, filled, part, require_slots
from drumline.telemetry.memory_tracker import MemoryStats, tensors_in
from drumline.vendor.deepspeed import (
    CPU_Accelerator,
    combine_grad_norm_groups,
    get_global_norm_of_tensors,
    release_groups,
)

_joined: list[dist.ProcessGroup | None] = []  # what DeepSpeed made groups in last
# What their optimizers keep of a parameter.
ADAM, SGD = (
    ("exp_avg", "exp_avg_sq"),
    ("momentum_buffer",),
)
# What DeepSpeed's optimizers call the first half of measuring the norm in their step: ZeRO 1 and 2, ZeRO 3, and ZeRO 1 in bf16.
MEASURES = ("scaled_global_norm", "_get_norm_groups", "get_grads_for_norm")
# Where they keep gradients, besides at parameters: ZeRO 1 and 2 (the second with offloading), ZeRO 3, ZeRO 1 in bf16.
GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
)


def prepare(
    plan: Plan,
    model: nn.Module,
    values: Values,
    plain: bool = False,
    make_optimizer: MakeOptimizer | None = None,
) -> DeepSpeedEngine:
    """Spread a model. `values` puts its weights into host memory in fp32, block by block, before they are cut (stage 3) or moved to the
    device (stage 1 and 2). `plain`: any module, not a Hugging Face model. `make_optimizer`: in place of the plan's. Collective."""
    assert plan.deepspeed is not None
    options = reveal(plan.deepspeed, "strategy.options")
    join(plan.device)
    if plan.config.model.sync_batchnorm and plan.mesh.world_size > 1:
        apply_sync_batchnorm(model, plan.device, plan.config.model.sync_batchnorm_ranks)
    module = Plain(model, plan.batch) if plain else ForwardWithObjective(model)
    apply_memory(model, plan)
    apply_compile(model, plan.config.compile)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Before anything is cut: shapes decide which weights decay.
    # torch's own on the host too: DeepSpeedCPUAdam is as fast, rounds 1 − β₂ (second moments 1.3e-5 off) and has to be compiled.
    optimizer = (
        make_optimizer(model) if make_optimizer else new_optimizer(trainable, plan.config.optimizer)
    )
    require_slots(optimizer)
    masters: dict[str, torch.Tensor] = {}
    if plan.deepspeed["zero_optimization"]["stage"] == 3:
        ranks, dtype = dist.get_world_size(), LOW_PRECISION.get(plan.precision, torch.float32)
        in_turn = InTurn(
            module,
            filled(plan, model, values, masters, lambda full: part(full, dist.get_rank(), ranks)),
        )
        deepspeed.zero.Init(module=in_turn, config_dict_or_path=options, dtype=dtype)
    else:
        device = torch.device(get_accelerator().current_device_name())
        list(filled(plan, model, values, masters, lambda full: full, device))
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(trainable.values()),
        optimizer=optimizer,
        config=options,
        dist_init_required=False,
    )
    made = DeepSpeedEngine(plan, model, trainable, engine)
    for name, value in masters.items():  # the weights before rounding
        if made.sharded:
            safe_set_local_fp32_param(trainable[name], value.to(engine.device))
        else:
            safe_set_full_fp32_param(trainable[name], value.to(engine.device))
    return made


def join(device: str) -> None:
    """Let DeepSpeed use the process group that exists (one process alone gets one)."""
    if get_accelerator().device_name() != device:
        set_accelerator(CPU_Accelerator())  # GPUs that the plan does not use
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    # It calls torch's collectives by names that newer releases have others for.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # It would spend a minute to compile an all-reduce over shared memory that only its inference uses.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        dist_init_required=False,
        verbose=False,
    )
    if (
        _joined != [dist.group.WORLD]
    ):  # a process may train more than once, each time in groups of its own, and it keeps what it has made
        release_groups()
        _joined[:] = [dist.group.WORLD]


class DeepSpeedEngine(ForwardEngine):
    """Engine over deepspeed.initialize's. Without gradients its module runs by itself.

    A checkpoint names each tensor on one rank, its owner: a parameter is gathered by itself, and only the owner keeps it.
    """

    trains = True

    def __init__(
        self, plan: Plan, model: nn.Module, trainable: dict[str, nn.Parameter], engine: Any
    ) -> None:
        super().__init__(plan, model, Spread(engine, inner=engine.module))
        self.autocast_dtype = None  # its weights lie in the type that they compute in
        self.named, self.learned, self.engine = trainable, {*trainable}, engine
        self.image_side = getattr(plan.config.algorithm, "image_size", None)
        self.zero = engine.optimizer
        self.data_ranks, self.precision = plan.mesh.data_ranks, plan.precision
        self.clock = clock(deepspeed.comm.comm) if plan.device == "cpu" else None
        self.sharded = engine.zero_optimization_partition_weights()
        self.optimizer = engine.basic_optimizer
        self.counts_steps = not isinstance(self.optimizer, torch.optim.SGD)
        self.slots = (
            ADAM if self.counts_steps else SGD if self.optimizer.defaults["momentum"] else ()
        )
        self.rank = dist.get_rank()
        self.owner = share(
            {name: _shape(p).numel() for name, p in trainable.items()}, dist.get_world_size()
        )
        self.measure = next(name for name in MEASURES if hasattr(self.zero, name))
        self.norms: Any = None
        self.own_norm, self.max_grad_norm = 0.0, plan.config.optimizer.max_grad_norm
        self.steps, self.divisor = 0, 1.0
        self.has_state = False
        plain = isinstance(engine.module, Plain)
        # Weights are in the type of a low precision, and nothing casts what they meet; texts are embedded in it.
        if (plain or plan.config.images_alone) and plan.precision != "fp32":
            model.register_forward_pre_hook(
                lambda _, args, named: lowered((args, named), plan.precision), with_kwargs=True
            )
        if plain and plan.precision != "fp32":
            model.register_forward_hook(lambda _module, _given, out: precise(out))
        parts = split(model) if engine.module.splits else None
        heads = nn.ModuleList(
            [
                head
                for head in (parts and parts[1], None if plain else score_head(model))
                if head is not None
            ]
        )
        for parameter in heads.parameters() if self.sharded else ():
            # The objective uses their weights outside of the heads' forward.
            deepspeed.zero.register_external_parameter(engine.module, parameter)
        for layer, parameter in borrowed(model) if self.sharded else ():
            deepspeed.zero.register_external_parameter(layer, parameter)
        if self.rescales():
            self.zero.loss_scale = plan.config.precision.initial_scale
            self.zero.loss_scaler.raise_error_at_min_scale = (
                False  # the loop stops a run that never comes right
            )
        self.is_whole = not self.sharded

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        outs = []
        for index, batch in enumerate(micro_batches):
            with self.micro_batch(last=index == len(micro_batches) - 1):
                beat("forward")
                loss_sum, sums = self.engine(batch, objective)
                beat("backward")
                self.backward(loss_sum, denominator)
            outs.append({"loss": loss_sum.detach(), **sums})
        return added(outs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self.statistics.note()
        self.engine.set_gradient_accumulation_boundary(last)
        return self._timed()

    def _timed(self) -> contextlib.AbstractContextManager[None]:
        return self.clock.running() if self.clock else contextlib.nullcontext()

    def exposed_communication(self) -> float | None:
        """And of the step before: ZeRO 1 and 2 gather the weights in it."""
        return self.clock.take() if self.clock else None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return precise(
            (self.engine if torch.is_grad_enabled() else self.engine.module)(
                lowered((args, kwargs), self.precision)
            )
        )

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        # DeepSpeed averages over ranks and, with this option, divides by nothing else.
        self.engine.backward(loss_sum * (self.data_ranks / denominator), scale_wrt_gas=False)

    def divide(self, by: torch.Tensor) -> None:
        # As a loss scale that is taken back, which is a number of the host; ZeRO 1 in bf16 has none.
        self.divisor = float(by)
        for gradients in getattr(self.zero, "fp32_groups_gradients_flat", ()):
            gradients.div_(by)
            self.divisor = 1.0

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trainable weights in fp32, as they are kept; frozen ones in the type that they compute in."""
        tied = tied_names(self.model)
        for name, tensor in all_tensors(self.model).items():
            if name in self.named:
                full = safe_get_full_fp32_param(tensor).to(self.engine.device)
            else:
                with self._whole(tensor):
                    full = tensor.detach().to(self.engine.device, copy=self.sharded)
            for each in (name, *tied.get(name, ())):
                yield each, full

    def unsharded_model(self) -> nn.Module | None:
        return None if self.sharded else self.model

    def grad_norm(self) -> torch.Tensor:
        self.norms = getattr(self.zero, self.measure)()
        if self.measure == "get_grads_for_norm":
            norm = get_global_norm_of_tensors(input_tensors=self.norms[0])
        else:
            norm = (
                combine_grad_norm_groups(self.norms) if isinstance(self.norms, list) else self.norms
            )
        value = float(norm) / (
            self.divisor * (float(self.zero.loss_scale) if self.rescales() else 1.0)
        )
        # DeepSpeed gives a negative one for inf and NaN.
        self.own_norm = value if value >= 0 else float("inf")
        return torch.full((), self.own_norm, dtype=torch.float64, device=self.engine.device)

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """DeepSpeed decides on the host what a step does, so both scalars are read at once."""
        require_none_late(self.model, self.learned)
        self.statistics.settle(finite)
        if finite:
            return self._step(lr, float(grad_norm))
        self.divisor = 1.0
        # At an infinite norm DeepSpeed leaves the weights, lowers its loss scale and drops the gradients.
        infinite = torch.full((1,), float("inf"), device=self.engine.device)
        infinite_norm = {
            "scaled_global_norm": infinite[0],
            "_get_norm_groups": [infinite[0]],
            "get_grads_for_norm": ([infinite], {}),
        }
        kept = (
            dict(vars(self.zero.loss_scaler))
            if self.rescales() and torch.isfinite(grad_norm)
            else {}
        )
        with self._with_norms(infinite_norm[self.measure]):
            self.engine.step()
        if kept:  # no overflow: the loss jumped
            vars(self.zero.loss_scaler).update(kept)

    def _step(self, lr: float | None, norm: float) -> None:
        # DeepSpeed clips by the same formula, by the norm of its own gradients, which is not measured again. A given norm over more
        # than these lowers its limit in proportion.
        self.zero.clip_grad = (self.max_grad_norm or 0.0) * (self.own_norm / norm if norm else 1.0)
        for group in self.zero.param_groups if lr is not None else ():
            group["lr"] = lr
        if self.divisor != 1.0:
            self.zero.custom_loss_scaler, self.zero.external_loss_scale = (
                True,
                float(self.zero.loss_scale) * self.divisor,
            )
        with self._with_norms(self.norms), self._timed():
            self.engine.step()
        self.zero.custom_loss_scaler, self.divisor = False, 1.0
        self.steps += 1
        if not self.has_state and not self.sharded:
            # DeepSpeed does it after the first step of the first group, when the other groups have no state yet.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        self.has_state = True

    def rescales(self) -> bool:
        return self.precision == "fp16"

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.slots and not self.has_state:
            # DeepSpeed's optimizers make their state in the first step: take one of zero gradients at rate zero, which does not count.
            steps = self.engine.global_steps
            make_state(self.optimizer, self._first_step)
            self.steps, self.engine.global_steps, self.statistics.before = 0, steps, None
            self._set_steps(0)
        agree_on_statistics(self.batch_norms)
        named = {
            n: tensor
            for n, tensor in canonical_tensors(self.model).items()
            if n.removeprefix("model.") not in self.named
        }
        for name, parameter in self.named.items():
            mine = self.owner[name] == self.rank
            for key, slot in self._keys(name):
                full = (
                    safe_get_full_fp32_param(parameter)
                    if slot is None
                    else safe_get_full_optimizer_state(parameter, slot)
                )
                if mine:
                    named[key] = full.to("cpu", torch.float32, copy=True)
            if mine and self.counts_steps:
                named[f"optim.{name}.step"] = torch.tensor(float(self.steps))
        return named

    def state(self) -> dict[str, Any]:
        kept = {"modules": extra_states(self.model)}
        if not self.rescales():
            return kept
        scaler = self.zero.loss_scaler
        # In the form of LossScale, for the other engines.
        return kept | {
            "scaler": {
                "scale": float(self.zero.loss_scale),
                "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1,
            }
        }

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        set_extra_states(self.model, state.get("modules", {}))
        for name, parameter in self.named.items():
            with self._whole(parameter, modifier_rank=0):  # written on all ranks alike
                for key, slot in self._keys(name):
                    self._set(parameter, self._from_owner(name, tensors.get(key)), slot)
            if self.counts_steps:
                self.steps = int(
                    self._from_owner(name, tensors.get(f"optim.{name}.step"), torch.Size(()))
                )
        self._set_steps(self.steps)
        if not self.sharded:  # the weights that forward uses, from the fp32 ones
            self.zero.update_lp_params()
        saved = state.get("scaler", {})
        if self.rescales() and "good_steps" in saved:
            self.zero.loss_scale = saved["scale"]
            self.zero.loss_scaler.cur_iter, self.zero.loss_scaler.last_overflow_iter = (
                saved["good_steps"],
                -1,
            )

    def memory_stats(self) -> MemoryStats:
        """ZeRO 3 counts what it has cut, not what it has gathered."""
        weights = [
            *(getattr(p, "ds_tensor", p) for p in self.model.parameters()),
            *scales_of(self.model),
        ]
        # Outside of its step, ZeRO 3 hides its masters from the optimizer; in fp32 they are the weights themselves.
        masters = tensors_in(
            getattr(self.zero, "fp32_partitioned_groups_flat", None)
            or [g["params"] for g in self.zero.param_groups]
        )
        own = tensors_in(
            *(
                (p.grad, getattr(p, "grad_accum", None))
                for p in (*self.model.parameters(), *masters)
            )
        )
        lists = (getattr(self.zero, name, None) for name in GRADIENTS)
        # Dicts of lists of a class of DeepSpeed's own, whose insides torch does not look into, as lists.
        kept = tensors_in(
            *(
                [[*g] if isinstance(g, list) else g for g in k.values()]
                if isinstance(k, dict)
                else k
                for k in lists
            )
        )
        return MemoryStats.of(
            weights,
            [*own, *kept],
            [*masters, *tensors_in(*self.engine.basic_optimizer.state.values())],
        )

    @contextlib.contextmanager
    def _with_norms(self, norms: Any) -> Iterator[None]:
        """Within, DeepSpeed's step takes `norms` for what it would measure."""
        if (
            self.measure == "get_grads_for_norm" and norms is self.norms
        ):  # it also takes from this what to clip
            yield
            return
        setattr(self.zero, self.measure, lambda *_, **__: norms)
        try:
            yield
        finally:
            delattr(self.zero, self.measure)

    def _keys(self, name: str) -> list[tuple[str, str | None]]:
        """(canonical name, optimizer slot) of what is kept of a parameter; slot None is the weight itself."""
        return [(f"model.{name}", None), *((f"optim.{name}.{slot}", slot) for slot in self.slots)]

    def _first_step(self) -> None:
        with modes_kept(self.engine):
            self.engine.eval()  # no statistics are taken of it
            if isinstance(self.engine.module, Plain):  # what it takes is not known
                trainable = [*self.named.values()]
                with (
                    deepspeed.zero.GatheredParameters(trainable)
                    if self.sharded
                    else contextlib.nullcontext()
                ):
                    touched = torch.stack([parameter.sum() for parameter in trainable]).sum()
                    self.forward_backward(
                        [None], lambda *_: SimpleNamespace(loss_sum=touched * 0, sums={}), 1.0
                    )
            else:
                batch = any_batch(self.model, self.engine.device, self.image_side)
                self.forward_backward(
                    [batch],
                    lambda out, _: SimpleNamespace(loss_sum=out.touched() * 0, sums={}),
                    1.0,
                )
        self.grad_norm()
        self._step(0.0, 0.0)
        self.exposed_communication()  # the time of this step does not count

    def _set_steps(self, steps: int) -> None:
        for state in self.engine.basic_optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps

    def _from_owner(
        self, name: str, mine: torch.Tensor | None, shape: torch.Size | None = None
    ) -> torch.Tensor:
        """A tensor that `name`'s owner holds in host memory, on every rank's device. Collective."""
        full = torch.empty(
            _shape(self.named[name]) if shape is None else shape, device=self.engine.device
        )
        if self.owner[name] == self.rank:
            assert mine is not None
            full.copy_(mine)
        dist.broadcast(full, self.owner[name])
        return full

    def _whole(self, tensor: Any, **options: int) -> contextlib.AbstractContextManager[Any]:
        """Within, what ZeRO 3 has cut is whole. `modifier_rank`: it may be written, and that rank's is taken."""
        return (
            deepspeed.zero.GatheredParameters([tensor], **options)
            if hasattr(tensor, "ds_id")
            else contextlib.nullcontext()
        )

    def _set(self, parameter: Any, full: torch.Tensor, slot: str | None) -> None:
        """Put a whole fp32 tensor, the same on all ranks, into what this rank holds of it."""
        if not self.sharded:
            safe_set_full_fp32_param(
                parameter, full
            ) if slot is None else safe_set_full_optimizer_state(parameter, full, slot)
            return
        # By the local call: the one for whole tensors requires sizes that the ranks divide.
        own = part(full, self.rank, dist.get_world_size())
        if slot is None:
            parameter.data.copy_(full)
            safe_set_local_fp32_param(parameter, own)
        else:
            safe_set_local_optimizer_state(parameter, own, slot)


def _shape(parameter: Any) -> torch.Size:
    """Of the whole parameter; ZeRO 3 leaves an empty one in its place."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape


if __name__ == "__main__":  # compile what NVMe offload needs to where torch keeps such things
    get_accelerator().create_op_builder("AsyncIOBuilder").load()
