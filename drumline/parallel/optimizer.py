"""The optimizer over a model's parameters, its state made before the first step and named canonically."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.core.config import OptimizerConfig
from drumline.errors import PlanError
from drumline.foreign import class_and_line, first_line
from drumline.parallel.adafactor import Adafactor
from drumline.parallel.muon import Joined, Muon
from drumline.parallel.norms import local

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Groups = list[dict[str, Any]]
# What schedulefree keeps besides second moments.
MEAN_OF, AVERAGED = (
    "z",
    ("k", "weight_sum", "lr_max"),
)


def new_optimizer(
    named: dict[str, nn.Parameter],
    options: OptimizerConfig,
    matrices: frozenset[str] = frozenset(),
    make: Callable[[Groups], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters, without state. Weight decay on parameters of two dimensions or more, and on all of a
    group that has its own. `matrices`: names of those of two dimensions within blocks, which Muon takes. `make`: in place of the kind's
    own.

    Parameters on another mesh, or on none, are a group of their own: torch takes no mixture. So are those of `options.groups`; a group of
    torch's has its `lr_ratio`.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            chosen, mesh = (
                options.group_of(name),
                parameter.device_mesh if isinstance(parameter, DTensor) else None,
            )
            usual = options.weight_decay if parameter.ndim >= 2 else 0.0
            decay = usual if chosen is None or chosen.weight_decay is None else chosen.weight_decay
            ratio = 1.0 if chosen is None else chosen.lr_ratio
            # No more than differ: ZeRO gathers each by itself.
            key = (
                mesh,
                decay,
                ratio,
                name in matrices,
            )
            made = {
                "params": [],
                "weight_decay": decay,
                "lr_ratio": ratio,
                "matrices": name in matrices,
            }
            group = groups.setdefault(key, made)
            group["params"].append(parameter)
    # A pipeline's stage may have nothing trainable, and torch takes no empty list.
    found = [*groups.values()] or [{"params": []}]
    return MAKERS[options.kind](found, options) if make is None else make(found)


def _adamw(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=options.fused
    )


def _sgd(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    # torch has no fused SGD for parts of tensors.
    fused = options.fused and not any(
        isinstance(parameter, DTensor) for group in groups for parameter in group["params"]
    )
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=fused)


def _quantised(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    from torchao import optim

    kind = {"adamw_8bit": optim.AdamW8bit, "adamw_4bit": optim.AdamW4bit}[options.kind]
    made: torch.optim.Optimizer = kind(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    return made


def _muon(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    rest = [group for group in groups if not group.get("matrices")]
    made = (
        [Muon([group for group in groups if group.get("matrices")], options)]
        if len(rest) < len(groups)
        else []
    )
    parts = [*made, *([_adamw(rest, options)] if rest else [])]
    return parts[0] if len(parts) == 1 else Joined(*parts)  # type: ignore[return-value]


def _schedule_free(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    made: torch.optim.Optimizer = AdamWScheduleFree(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False
    )
    at_mean(made, False)
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
                    weight, gradient, mean = (
                        local(parameter),
                        local(parameter.grad),
                        local(state["exp_avg"]),
                    )
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(mean.lerp(gradient, 1 - first).sign_(), alpha=-group["lr"])
                    mean.lerp_(gradient, 1 - second)


MAKERS: dict[str, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw, "sgd": _sgd, "lion": Lion, "adamw_8bit": _quantised, "adamw_4bit": _quantised, "adafactor": Adafactor,
    "muon": _muon, "schedule_free": _schedule_free,
}  # fmt: skip


def build_optimizer(
    named: dict[str, nn.Parameter],
    options: OptimizerConfig,
    optimizer: torch.optim.Optimizer | None = None,
    matrices: frozenset[str] = frozenset(),
    make: Callable[[Groups], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The kind that `options` have, or `optimizer`, with its state: so a checkpoint can be loaded into it, and memory that will be needed
    is taken at once. `matrices`, `make`: see new_optimizer."""
    if optimizer is None:
        optimizer = new_optimizer(named, options, matrices, make)
    else:
        require_zero_state(optimizer)
    make_state(optimizer)
    return optimizer


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """A step; torchao compiles its own, on a GPU: a CPU would compile a minute for each shape."""
    on_cpu = type(optimizer).__module__.startswith("torchao") and all(
        local(parameter).device.type == "cpu"
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
        optimizer.step()


def masks(optimizer: torch.optim.Optimizer, device: str) -> bool:
    """Return whether a step leaves all as it is where `found_inf`, on `device`, is 1, so that the host need not know it.

    Fused kernels do so, and Muon; but kernels of another device read what may not have come there yet. For the others the host decides.
    Masks would win nothing there. Lion, Adafactor and AdamW in pure bf16 are bound by memory: they would read and write each gradient
    once more, which of large weights takes longer than the wait should. The latter two also count their steps on the host, for rates
    and noise. The optimizers of torchao and schedulefree, and a user's own, cannot be told.
    """
    if isinstance(optimizer, Joined):
        return all(masks(part, device) for part in optimizer.parts)
    for group in optimizer.param_groups:
        if any(local(parameter).device.type != device for parameter in group["params"]):
            return False
        if not (group.get("fused") or isinstance(optimizer, Muon)):
            return False
    return True


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
    What is frozen gets none. A zero momentum buffer is what SGD's first step starts from; quantised moments are zero already, and z of a
    schedule-free optimizer begins as the weights."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"] if step is None else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    (step or (lambda: take_step(optimizer)))()
    if step is None:
        optimizer.zero_grad(set_to_none=True)
    for group, before, rate in zip(optimizer.param_groups, groups, rates, strict=True):
        group.update(before)
        _set_rate(group, rate)
    for state in optimizer.state.values():
        for slot, value in state.items():
            if isinstance(value, torch.Tensor) and not quantised(value) and slot != MEAN_OF:
                value.zero_()
            elif isinstance(value, int | float):
                state[slot] = type(value)(0)


def at_mean(optimizer: torch.optim.Optimizer, mean: bool) -> bool:
    """Set the weights of a schedule-free optimizer to the mean that is evaluated, saved and exported, or to those that it learns at. True
    where they were others."""
    turn = getattr(optimizer, "eval" if mean else "train", None)
    if turn is None:
        return False
    changes: bool = optimizer.param_groups[0].get("train_mode", mean) == mean
    turn()
    return changes


def scalars(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What a schedule-free optimizer keeps besides tensors, the same in all groups; empty for others."""
    return {
        key: optimizer.param_groups[0][key] for key in AVERAGED if key in optimizer.param_groups[0]
    }


def require_zero_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for an optimizer that does not begin with a state of zeros, which is what a new one is set to.

    It is tried: after that setting, a step must be that of a fresh optimizer."""

    # A step that is put over it.
    kind, own = (
        type(optimizer),
        {key: value for key, value in vars(optimizer).items() if key != "step"},
    )
    group = optimizer.defaults | optimizer.param_groups[0]

    def stepped(primed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        probe = kind.__new__(kind)  # whatever its constructor takes
        vars(probe).update(
            own, state=defaultdict(dict), param_groups=[{**group, "params": [parameter]}]
        )
        if primed:
            make_state(probe)
        parameter.grad = torch.tensor([[0.1, -0.2], [0.3, 0.4]])
        take_step(probe)
        return parameter.detach(), dict(probe.state[parameter])

    try:
        (one, state), (other, _) = stepped(primed=True), stepped(primed=False)
    except Exception as error:  # whatever a stranger's optimizer raises
        what = f"{kind.__name__} does not step a matrix by itself: {class_and_line(error)}: {first_line(error)}"
        raise PlanError(
            what, where="make_optimizer", fix="use one that steps each parameter by its gradient"
        ) from error
    if not torch.equal(one, other):
        what = f"the state of {kind.__name__} does not begin at zero, and a checkpoint is loaded over one that does"
        raise PlanError(
            what,
            where="make_optimizer",
            fix="use Adam, AdamW, SGD, RMSprop or another whose moments begin at zero",
        )
    if lost := [
        slot
        for slot, value in state.items()
        if not isinstance(value, torch.Tensor | int | float | None)
    ]:
        what = f"{kind.__name__} keeps a {type(state[lost[0]]).__name__} of each parameter ({lost[0]}), which no checkpoint has"
        raise PlanError(what, where="make_optimizer", fix="use one that keeps tensors and numbers")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """`optim.<parameter name>.<slot>` → the optimizer's own tensor, for every parameter that has state; `<slot>.<parameter name>` of a slot
    that is a section by itself. A number as a tensor of it."""
    states, sections = optimizer.state, getattr(optimizer, "sections", ())
    return {
        f"{slot}.{name}" if slot in sections else f"optim.{name}.{slot}": _as_tensor(value)
        for name, parameter in named.items()
        for slot, value in states.get(parameter, {}).items()
        if isinstance(value, torch.Tensor | int | float)
    }


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def load_numbers(
    optimizer: torch.optim.Optimizer,
    named: dict[str, nn.Parameter],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Set the numbers that an optimizer keeps besides tensors to what tensors of them say."""
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        for slot, value in state.items():
            if (
                isinstance(value, int | float)
                and (saved := tensors.get(f"optim.{name}.{slot}")) is not None
            ):
                state[slot] = type(value)(saved.item())


def quantised(tensor: torch.Tensor) -> bool:
    """Whether these are codes and scales of torchao's. Where a part is small, another rank's may be, and this one not."""
    return hasattr(local(tensor), "codes")


@torch.no_grad()
def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a quantised or bfloat16 one an fp32 copy in host memory. What is quantised is quantised again, here as in a
    run that begins with it (`load_saved`), so that both go on alike."""
    part: Any = local(tensor)
    if not quantised(tensor) and tensor.dtype != torch.bfloat16:
        return tensor
    whole = part.dequantize() if quantised(tensor) else part.float()
    if quantised(tensor):
        part.copy_(whole)
    if isinstance(tensor, DTensor):
        mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
        return DTensor.from_local(
            whole, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        ).cpu()
    return whole.cpu()


@torch.no_grad()
def load_saved(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Set a tensor to what `as_saved` gave, or what it was filled with."""
    if saved is not tensor:
        local(tensor).copy_(local(saved))
