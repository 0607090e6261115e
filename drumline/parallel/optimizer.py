"""The optimizer over a model's parameters, its state made before the first step and named canonically."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.core.config import OptimizerConfig
from drumline.errors import PlanError

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def new_optimizer(named: dict[str, nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters, without state. Weight decay on parameters of two dimensions or more.

    Parameters on another mesh, or on none, are a group of their own: torch takes no mixture.
    """
    groups: dict[tuple[Any, bool], dict[str, Any]] = {}
    for parameter in named.values():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            group = groups.setdefault((mesh, decays), {"params": [], "weight_decay": options.weight_decay if decays else 0.0})
            group["params"].append(parameter)
    # A pipeline's stage may have nothing trainable, and torch takes no empty list.
    params = [*groups.values()] or [{"params": []}]
    if options.kind == "adamw":
        return torch.optim.AdamW(params, lr=options.lr, betas=options.betas, eps=options.eps, fused=options.fused)
    # torch has no fused SGD for parts of tensors.
    fused = options.fused and not any(isinstance(parameter, DTensor) for parameter in named.values())
    return torch.optim.SGD(params, lr=options.lr, momentum=options.momentum, fused=fused)


def build_optimizer(
    named: dict[str, nn.Parameter], options: OptimizerConfig, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """AdamW or SGD as `options` have it, or `optimizer`, with its state: so a checkpoint can be loaded into it, and memory that will be
    needed is taken at once."""
    if optimizer is None:
        optimizer = new_optimizer(named, options)
    else:
        require_zero_state(optimizer)
    make_state(optimizer)
    return optimizer


def make_state(optimizer: torch.optim.Optimizer, step: Callable[[], None] | None = None) -> None:
    """Let an optimizer make its state as it does (in a `step` at rate zero; None: of zero gradients), and set it back to before any step.
    A zero momentum buffer is what SGD's first step starts from."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"] if step is None else ():
            parameter.grad = torch.zeros_like(parameter)
    (step or optimizer.step)()
    if step is None:
        optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def require_zero_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for an optimizer that does not begin with a state of zeros, which is what a new one is set to.

    It is tried: after that setting, a step must be that of a fresh optimizer."""

    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have one that is Adam's

    def stepped(primed: bool) -> torch.Tensor:
        parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        probe = type(optimizer)([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
        if primed:
            make_state(probe)
        parameter.grad = torch.tensor([[0.1, -0.2], [0.3, 0.4]])
        probe.step()
        return parameter.detach()

    if not torch.equal(stepped(primed=True), stepped(primed=False)):
        what = f"the state of {type(optimizer).__name__} does not begin at zero, and a checkpoint is loaded over one that does"
        raise PlanError(what, where="make_optimizer", fix="use Adam, AdamW, SGD, RMSprop or another whose moments begin at zero")


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """`optim.<parameter name>.<slot>` → the optimizer's own tensor, for every parameter that has state."""
    return {
        f"optim.{name}.{slot}": value
        for name, parameter in named.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
