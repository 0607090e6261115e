"""The native engine: one process, or DDP. PyTorch's autograd and optimizer, with the model changed by ordered transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from drumline.config.schema import DDPStrategy
from drumline.models.head import ForwardWithObjective
from drumline.models.names import canonical_tensors
from drumline.plan.plan import Plan
from drumline.strategies.engine import Sums
from drumline.strategies.optimizer import build_optimizer, optimizer_tensors
from drumline.strategies.transforms import apply_activation_checkpointing, apply_compile, apply_ddp

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(plan: Plan, model: nn.Module) -> NativeEngine:
    """Spread a model as the plan says: transforms in order, then the optimizer over the parameters they left."""
    config = plan.config
    apply_activation_checkpointing(model, plan.activation_checkpointing)
    apply_compile(model, config.compile)
    module: nn.Module = ForwardWithObjective(model)
    if plan.mesh.replicate > 1:
        module = apply_ddp(module, config.strategy if isinstance(config.strategy, DDPStrategy) else DDPStrategy())
    return NativeEngine(plan, model, module)


class NativeEngine:
    """Engine over one module whose forward runs model and objective in one go (so DDP's hooks see the whole graph)."""

    def __init__(self, plan: Plan, model: nn.Module, module: nn.Module) -> None:
        self.model, self.module = model, module
        self.data_ranks = plan.mesh.data_ranks
        self.max_grad_norm = plan.config.optimizer.max_grad_norm
        self.device = plan.device
        self.autocast_dtype = AUTOCAST.get(plan.precision)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=plan.config.precision.initial_scale, enabled=plan.precision == "fp16")
        self.named = dict(model.named_parameters())
        self.optimizer = build_optimizer(self.named, plan.config.optimizer)
        self.model.train()

    def forward_backward(self, micro_batches: list[Any], objective: Any, denominator: float) -> Sums:
        # DDP averages gradients over ranks; a sum over ranks is wanted, and scaling the loss gives it without a second pass.
        scale = self.data_ranks / denominator
        outs = []
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self._no_sync():
                with self._autocast():
                    loss_sum, sums = self.module(batch, objective)
                self.scaler.scale(loss_sum * scale).backward()
            outs.append({"loss": loss_sum.detach(), **sums})
        return _total(outs)

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        # The module below DDP: ranks may hold different numbers of rows, and no gradient is to be reduced.
        inner = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        self.model.eval()
        try:
            outs = []
            with torch.no_grad(), self._autocast():
                for batch in micro_batches:
                    loss_sum, sums = inner(batch, objective)
                    outs.append({"loss": loss_sum, **sums})
            return _total(outs)
        finally:
            self.model.train()

    def grad_norm(self) -> float:
        self.scaler.unscale_(self.optimizer)
        return float(get_total_norm([p.grad for p in self.named.values() if p.grad is not None]))

    def step(self, lr: float, grad_norm: float) -> None:
        if self.max_grad_norm is not None:
            total = torch.tensor(grad_norm, device=self.device)
            clip_grads_with_norm_(list(self.named.values()), self.max_grad_norm, total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def skip(self) -> None:
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def rescales(self) -> bool:
        return self.scaler.is_enabled()

    def tensors(self) -> dict[str, torch.Tensor]:
        return canonical_tensors(self.model) | optimizer_tensors(self.optimizer, self.named)

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled() and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])

    def exposed_communication(self) -> float:
        if not isinstance(self.module, DistributedDataParallel):
            return 0.0
        clocks = self.module._get_ddp_logging_data()
        nanoseconds = clocks.get("backward_comm_time", 0) - clocks.get("backward_compute_comm_overlap_time", 0)
        return max(0, nanoseconds) / 1e9

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast_dtype)

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else contextlib.nullcontext()


def _total(outs: list[dict[str, torch.Tensor]]) -> Sums:
    """Sums over micro-batches, brought to the host in one go."""
    if not outs:
        return {}
    stacked = torch.stack([torch.stack([out[key].detach().double() for key in out]) for out in outs])
    return dict(zip(outs[0], stacked.sum(0).tolist(), strict=True))
