"""The optimizer over a model's parameters, its state made before the first step and named canonically."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.core.config import OptimizerConfig
from drumline.errors import PlanError
from drumline.parallel.norms import local

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Groups = list[dict[str, Any]]


def new_optimizer(named: dict[str, nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters, without state. Weight decay on parameters of two dimensions or more.

    Parameters on another mesh, or on none, are a group of their own: torch takes no mixture. So are those of `options.groups`; a group of
    torch's has its `lr_ratio`.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            chosen, mesh = options.group_of(name), parameter.device_mesh if isinstance(parameter, DTensor) else None
            own = options.weight_decay if chosen is None or chosen.weight_decay is None else chosen.weight_decay
            decay, ratio = own if parameter.ndim >= 2 else 0.0, 1.0 if chosen is None else chosen.lr_ratio
            group = groups.setdefault((mesh, parameter.ndim >= 2, decay, ratio), {"params": [], "weight_decay": decay, "lr_ratio": ratio})
            group["params"].append(parameter)
    # A pipeline's stage may have nothing trainable, and torch takes no empty list.
    return MAKERS[options.kind]([*groups.values()] or [{"params": []}], options)


def _adamw(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=options.fused)


def _sgd(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    # torch has no fused SGD for parts of tensors.
    fused = options.fused and not any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=fused)


def _quantised(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    from torchao import optim

    kind = {"adamw_8bit": optim.AdamW8bit, "adamw_4bit": optim.AdamW4bit}[options.kind]
    made: torch.optim.Optimizer = kind(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    return made


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): with gradient g and momentum m, w ← w (1 − lr λ) − lr sign(β1 m + (1 − β1) g), then
    m ← β2 m + (1 − β2) g. Every entry for itself, so each rank updates its part."""

    def __init__(self, groups: Groups, options: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": options.lr, "betas": options.betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    weight, gradient, mean = local(parameter), local(parameter.grad), local(state["exp_avg"])
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(mean.lerp(gradient, 1 - first).sign_(), alpha=-group["lr"])
                    mean.lerp_(gradient, 1 - second)


MAKERS: dict[str, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw, "sgd": _sgd, "lion": Lion, "adamw_8bit": _quantised, "adamw_4bit": _quantised,
}  # fmt: skip


def build_optimizer(
    named: dict[str, nn.Parameter], options: OptimizerConfig, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """The kind that `options` have, or `optimizer`, with its state: so a checkpoint can be loaded into it, and memory that will be needed
    is taken at once."""
    if optimizer is None:
        optimizer = new_optimizer(named, options)
    else:
        require_zero_state(optimizer)
    make_state(optimizer)
    return optimizer


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """A step; torchao compiles its own, on a GPU: a CPU would compile a minute for each shape."""
    on_cpu = type(optimizer).__module__.startswith("torchao") and all(
        local(parameter).device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"]
    )
    with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
        optimizer.step()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all groups, each times its ratio. torchao's is a tensor."""
    for group in optimizer.param_groups:
        _set_rate(group, rate * group.get("lr_ratio", 1.0))


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_state(optimizer: torch.optim.Optimizer, step: Callable[[], None] | None = None) -> None:
    """Let an optimizer make its state as it does (in a `step` at rate zero; None: of zero gradients), and set it back to before any step.
    A zero momentum buffer is what SGD's first step starts from; quantised moments are zero already."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"] if step is None else ():
            parameter.grad = torch.zeros_like(parameter)
    (step or (lambda: take_step(optimizer)))()
    if step is None:
        optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _set_rate(group, rate)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and not quantised(value):
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
    """`optim.<parameter name>.<slot>` → the optimizer's own tensor, for every parameter that has state; of a quantised one an fp32 copy in
    host memory. That is quantised again, here as in a run that begins with it (`load_quantised`), so that both go on alike."""
    found = _states(optimizer, named)
    for name, value in found.items():
        if quantised(value):
            found[name] = _dequantised(value)
            value.copy_(found[name].to(value.device))
    return found


def load_quantised(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    """Quantise moments of `tensors` (`optimizer_tensors`, filled) into the optimizer's own."""
    for name, value in _states(optimizer, named).items():
        if quantised(value):
            value.copy_(tensors[name].to(value.device))


def quantised(tensor: torch.Tensor) -> bool:
    """Whether these are codes and scales of torchao's. Where a part is small, another rank's may be, and this one not."""
    return hasattr(local(tensor), "codes")


def _states(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        f"optim.{name}.{slot}": value
        for name, parameter in named.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _dequantised(value: torch.Tensor) -> torch.Tensor:
    part: Any = local(value)
    whole = part.dequantize()
    if isinstance(value, DTensor):
        mesh, shape, stride = value.device_mesh, value.shape, value.stride()
        return DTensor.from_local(whole, mesh, value.placements, run_check=False, shape=shape, stride=stride).cpu()
    return whole.cpu()
