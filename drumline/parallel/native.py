"""The native engine: PyTorch's autograd and optimizer over one process, copies, or what a strategy makes of a model. The model is changed
by ordered transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drumline.core.plan import Plan
from drumline.dist.mesh import device_mesh, gradient_group
from drumline.dist.seeds import derive
from drumline.models.head import ForwardWithObjective
from drumline.models.names import canonical_tensors
from drumline.models.shards import Values
from drumline.models.weights import tensor_plan
from drumline.parallel.batchnorm import agree_on_statistics, apply_sync_batchnorm
from drumline.parallel.compress import compress_ddp
from drumline.parallel.context_parallel import apply_context_parallel
from drumline.parallel.data_parallel import BucketedAllReduce, Replicated, Spread, Unreplicated
from drumline.parallel.engine import DeviceSums, added
from drumline.parallel.forward import Around, ForwardEngine, Plain
from drumline.parallel.norms import LossScale, global_norm, local
from drumline.parallel.optimizer import MakeOptimizer, build_optimizer, optimizer_tensors
from drumline.parallel.tensor_parallel import apply_tp
from drumline.parallel.transforms import apply_activation_checkpointing, apply_compile, apply_ddp
from drumline.telemetry.memory_tracker import MemoryStats, tensors_in
from drumline.vendor.torch import foreach_mul_

E = TypeVar("E", bound=ForwardEngine)


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
    """Spread a model as planned: transforms in order, then its weights, then what the engine adds (an optimizer, where it trains).
    `plain`: any module, not a Hugging Face model. `overlaps` False: copies are averaged without DDP, which has to see each forward
    that a backward goes through. `make_optimizer`: in place of the plan's."""
    config = plan.config
    # FSDP2 has work for one process alone, too: to keep its weights in host memory.
    spreads = plan.mesh.world_size > 1 or plan.data_parallel == "fsdp2"
    whole = device_mesh(plan.mesh, plan.device) if spreads else None
    if plan.mesh.tp > 1 and (plan.mesh.pp == 1 or tensor_plan(model)):  # a stage may have no layer that is cut
        assert whole is not None
        apply_tp(model, whole["tp"])
    if config.model.sync_batchnorm and whole is not None:
        apply_sync_batchnorm(model, plan.device, config.model.sync_batchnorm_ranks)
    module = Plain(model) if plain else ForwardWithObjective(model)
    if plan.mesh.cp > 1:
        assert whole is not None and isinstance(module, ForwardWithObjective)
        apply_context_parallel(module, model, whole["cp"], plan.cp_method, config.packs)
    apply_activation_checkpointing(model, plan.activation_checkpointing)
    apply_compile(model, config.compile)
    around = module.sequence.around if module.sequence is not None else contextlib.nullcontext
    own = {} if make_optimizer is None else {"make_optimizer": make_optimizer}
    spread = spread_over_data(plan, whole, model, [(module, model)], module, values, overlaps)
    return engine(plan, model, spread, around, **own)


def spread_over_data(
    plan: Plan, whole: DeviceMesh | None, model: nn.Module, roots: list[tuple[Any, Any]], module: nn.Module, values: Values, overlaps: bool
) -> Spread:
    """Data parallelism goes on last, around everything: the strategy's own, or copies of `module`. `roots`: see StrategySpec.spread."""
    own: Spread | None = plan.config.strategy.spread(plan, whole, model, roots, values)
    if own is not None:
        return own
    values.fill(model)
    if whole is None or plan.data_parallel != "ddp":
        return Unreplicated(module)
    options = plan.config.strategy.copies()
    if plan.mesh.tp > 1 or not overlaps:
        return BucketedAllReduce(module, gradient_group(whole), int(options.bucket_cap_mb * 2**20))
    ddp = apply_ddp(module, options, gradient_group(whole))
    return Replicated(ddp, compress_ddp(ddp, options.compression, derive(plan.config.run.seed, "compression")))


class NativeEngine(ForwardEngine):
    """Engine over a trainable model."""

    group: dist.ProcessGroup | None = None  # of a pipeline: the ranks with the other stages
    counted_elsewhere: frozenset[str] = frozenset()  # tied weights whose gradients count on another of them

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: Spread,
        around: Around = contextlib.nullcontext,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        """`make_optimizer`: in place of the plan's."""
        super().__init__(plan, model, spread, around)
        self.averaged_over = plan.mesh.data_ranks * plan.mesh.cp
        self.max_grad_norm = plan.config.optimizer.max_grad_norm
        self.loss_scale = LossScale(plan.config.precision.initial_scale, enabled=plan.precision == "fp16")
        self.named = dict(model.named_parameters())
        self.optimizer: Any = build_optimizer(self.named, plan.config.optimizer, make_optimizer and make_optimizer(model))
        # Fused kernels leave all as it is where `found_inf` is 1; for others the host decides.
        self.masks = all(group.get("fused") for group in self.optimizer.param_groups) and not self.loss_scale.enabled
        self.model.train()

    def forward_backward(self, micro_batches: list[Any], objective: Any, denominator: float) -> DeviceSums:
        outs = []
        for index, batch in enumerate(micro_batches):
            with self.micro_batch(last=index == len(micro_batches) - 1):
                with self._autocast():
                    loss_sum, sums = self.spread.module(batch, objective)
                self.backward(loss_sum, denominator)
            outs.append({"loss": loss_sum.detach(), **sums})
        return added(outs)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.around(), self.spread.micro_batch(last):
            yield

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        # Gradients are averaged over ranks; a sum over ranks is wanted, and scaling the loss gives it without a second pass.
        (loss_sum * (self.averaged_over / denominator * self.loss_scale.value)).backward()

    def divide(self, by: torch.Tensor) -> None:
        if gradients := [local(g) for g in self._gradients()]:
            foreach_mul_(gradients, (1.0 / by).to(gradients[0]))

    def grad_norm(self) -> torch.Tensor:
        self.loss_scale.unscale([local(g) for g in self._gradients()])
        counted = [p.grad for name, p in self.named.items() if p.grad is not None and name not in self.counted_elsewhere]
        return global_norm(counted, self.device, self.group)

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        if self.masks or finite:
            self._update(lr, grad_norm, finite)
            self.loss_scale.good()
        else:
            self.loss_scale.overflow()
        self.optimizer.zero_grad(set_to_none=True)

    def _update(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        gradients = [local(g) for g in self._gradients()]
        if self.max_grad_norm is not None and gradients:  # a pipeline's stage may have nothing trainable
            # As torch.nn.utils.clip_grad_norm_ does it, but by one number: plain and sharded gradients are scaled alike.
            factor = (self.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            foreach_mul_(gradients, factor.to(gradients[0]))
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        if self.masks:
            self.optimizer.found_inf = (~finite).float()
        self.optimizer.step()

    def rescales(self) -> bool:
        return self.loss_scale.enabled

    def tensors(self) -> dict[str, torch.Tensor]:
        agree_on_statistics(self.batch_norms)
        return canonical_tensors(self.model) | optimizer_tensors(self.optimizer, self.named)

    def state(self) -> dict[str, Any]:
        return {"scaler": self.loss_scale.state()}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        # The tensors are the engine's own, and filled.
        self.loss_scale.load(state.get("scaler", {}))
        if isinstance(self.spread, Replicated) and self.spread.compressor:
            self.spread.compressor.step = state["step"]

    def memory_stats(self) -> MemoryStats:
        return MemoryStats.of(self.named.values(), self._gradients(), tensors_in(*self.optimizer.state.values()))

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]
