"""The optimizer over a model's parameters: how it is built, and how its state is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from drumline.config.config import OptimizerConfig
from drumline.engine.adafactor import Adafactor
from drumline.engine.joined import JoinedOptimizer
from drumline.engine.muon import Muon
from drumline.engine.norms import as_dtensor_on_mesh_device, local
from drumline.errors import PlanError
from drumline.foreign import class_and_line, first_line

# Makes the optimizer of a module: the argument `make_optimizer` of a session.
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Groups = list[dict[str, Any]]
# The slot in which schedulefree keeps the weights that it steps; it begins as the weights do.
SCHEDULE_FREE_WEIGHTS = "z"
# The numbers that schedulefree keeps in each group for its running average of the weights.
SCHEDULE_FREE_SCALARS = ("k", "weight_sum", "lr_max")


class _GroupKey(NamedTuple):
    """What all parameters of one group of the optimizer have in common."""

    mesh: DeviceMesh | None
    weight_decay: float
    lr_ratio: float
    is_matrix: bool


def new_optimizer(
    named: dict[str, nn.Parameter],
    options: OptimizerConfig,
    matrices: frozenset[str] = frozenset(),
    make_from_groups: Callable[[Groups], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, without state.

    Weight decay applies to parameters of two dimensions or more, and to all parameters of a group
    of `options.groups` that sets its own. Parameters on another mesh, or on none, form groups of
    their own, because torch takes no mixture. Each of torch's groups carries its `lr_ratio`.

    `named`: parameters by name. `matrices`: the names of two-dimensional parameters within blocks,
    which Muon steps. `make_from_groups`: makes the optimizer in place of `options.kind`.
    """
    # As few groups as possible: ZeRO gathers each one separately.
    groups: dict[_GroupKey, dict[str, Any]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        key = _group_key(name, parameter, options, name in matrices)
        if key not in groups:
            groups[key] = {
                "params": [],
                "weight_decay": key.weight_decay,
                "lr_ratio": key.lr_ratio,
                "matrices": key.is_matrix,
            }
        groups[key]["params"].append(parameter)
    group_list: Groups = list(groups.values())
    if not group_list:
        # A pipeline's stage may have nothing trainable, and torch takes no empty list.
        group_list = [{"params": []}]
    if make_from_groups is not None:
        return make_from_groups(group_list)
    return MAKERS[options.kind](group_list, options)


def _group_key(
    name: str, parameter: nn.Parameter, options: OptimizerConfig, is_matrix: bool
) -> _GroupKey:
    """Return the group of a parameter.

    `is_matrix`: whether Muon steps it, if that is the optimizer.
    """
    mesh = None
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
    # Norms and biases are not decayed, as is usual.
    weight_decay = 0.0
    if parameter.ndim >= 2:
        weight_decay = options.weight_decay
    lr_ratio = 1.0
    group = options.group_of(name)
    if group is not None:
        lr_ratio = group.lr_ratio
        if group.weight_decay is not None:
            weight_decay = group.weight_decay
    return _GroupKey(mesh, weight_decay, lr_ratio, is_matrix)


def _adamw(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=options.fused
    )


def _sgd(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Return SGD with momentum: fused, unless a parameter is cut over ranks."""
    fused = options.fused
    for group in groups:
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            # torch has no fused SGD for parts of tensors.
            fused = False
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=fused)


def _torchao_adamw(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Return torchao's AdamW, whose moments are quantised to 8 or 4 bits."""
    from torchao import optim

    kinds = {"adamw_8bit": optim.AdamW8bit, "adamw_4bit": optim.AdamW4bit}
    kind = kinds[options.kind]
    optimizer: torch.optim.Optimizer = kind(
        groups, lr=options.lr, betas=options.betas, eps=options.eps
    )
    return optimizer


def _muon(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Return Muon for the matrices within blocks, AdamW for the rest, or both as one."""
    matrix_groups = [group for group in groups if group.get("matrices")]
    other_groups = [group for group in groups if not group.get("matrices")]
    parts: list[torch.optim.Optimizer] = []
    if matrix_groups:
        parts.append(Muon(matrix_groups, options))
    if other_groups:
        parts.append(_adamw(other_groups, options))
    if len(parts) == 1:
        return parts[0]
    return JoinedOptimizer(*parts)  # type: ignore[return-value]


def _schedule_free(groups: Groups, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Return schedule-free AdamW, with the weights in place at which gradients are taken."""
    from schedulefree import AdamWScheduleFree

    optimizer: torch.optim.Optimizer = AdamWScheduleFree(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False
    )
    use_averaged_weights(optimizer, False)
    return optimizer


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2).

    With gradient g and momentum m, w ← w (1 − lr λ) − lr sign(β1 m + (1 − β1) g), then
    m ← β2 m + (1 − β2) g. Entries do not depend on each other, so each rank updates its part.
    """

    def __init__(self, groups: Groups, options: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": options.lr, "betas": options.betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step each parameter that has a gradient, by itself."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Step this rank's part of one parameter, and then take its gradient into the momentum."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        weight = local(parameter)
        gradient = local(parameter.grad)
        mean = local(state["exp_avg"])
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        weight.mul_(1 - lr * group["weight_decay"])
        # β1 m + (1 − β1) g, in a tensor of its own: m itself is averaged with β2.
        direction = mean.lerp(gradient, 1 - beta1).sign_()
        weight.add_(direction, alpha=-lr)
        mean.lerp_(gradient, 1 - beta2)


MAKERS: dict[str, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": Lion,
    "adamw_8bit": _torchao_adamw,
    "adamw_4bit": _torchao_adamw,
    "adafactor": Adafactor,
    "muon": _muon,
    "schedule_free": _schedule_free,
}


def build_optimizer_with_state(
    named: dict[str, nn.Parameter],
    options: OptimizerConfig,
    optimizer: torch.optim.Optimizer | None = None,
    matrices: frozenset[str] = frozenset(),
    make_from_groups: Callable[[Groups], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Return `optimizer`, or a new one of the kind in `options`, with its state made.

    A checkpoint can then be loaded into the state, and the memory that the state needs is taken at
    once. `matrices` and `make_from_groups` are those of `new_optimizer`.
    """
    if optimizer is None:
        optimizer = new_optimizer(named, options, matrices, make_from_groups)
    else:
        require_zero_initial_state(optimizer)
    make_state(optimizer)
    return optimizer


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer, without compiling on a CPU.

    torchao compiles its step. That pays on a GPU; a CPU would compile a minute for each shape.
    """
    is_compiled = type(optimizer).__module__.startswith("torchao")
    if is_compiled and _is_on_cpu(optimizer):
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    else:
        optimizer.step()


def _is_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters of an optimizer lie in host memory."""
    devices: set[str] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            devices.add(local(parameter).device.type)
    return devices <= {"cpu"}


def handles_found_inf(optimizer: torch.optim.Optimizer, device: str) -> bool:
    """Return whether the optimizer's step changes nothing if its `found_inf`, on `device`, is 1.

    Then the host need not know whether the step is taken, and does not wait for the device. Fused
    kernels of torch read that flag, and so does Muon. All parameters must lie on `device`: on
    another device the flag may not have arrived when it is read.

    For all other optimizers the host reads the flag, and decides:

    - Lion, Adafactor and AdamW in pure bf16 could only apply it by reading and writing each
      gradient once more, which for large weights takes longer than the host waits. The latter two
      also count their steps on the host.
    - The optimizers of torchao and schedulefree, and a user's own, do not take a flag.
    """
    if isinstance(optimizer, JoinedOptimizer):
        return all(handles_found_inf(part, device) for part in optimizer.parts)
    for group in optimizer.param_groups:
        if any(local(parameter).device.type != device for parameter in group["params"]):
            return False
        if not (group.get("fused") or isinstance(optimizer, Muon)):
            return False
    return True


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group to `rate` times the group's `lr_ratio`."""
    for group in optimizer.param_groups:
        _set_group_rate(group, rate * group.get("lr_ratio", 1.0))


def _set_group_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of one group. A rate that is a tensor is changed in place."""
    if isinstance(group["lr"], torch.Tensor):  # as torchao keeps it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_state(optimizer: torch.optim.Optimizer, step: Callable[[], None] | None = None) -> None:
    """Let an optimizer make its state, as it is before the first step.

    Optimizers make their state within a step. So one is taken at rate zero (`step`, or by default
    one with zero gradients), and then undone: state is set to zero, and numbers in the groups to
    what they were. Quantised moments are zero already, and the `z` of a schedule-free optimizer
    begins as the weights. Frozen parameters get no state.
    """
    # A step may change numbers in the groups, such as schedulefree's count of steps.
    options_before = []
    rates_before = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "lr")}
        options_before.append(options)
        rates_before.append(float(group["lr"]))
    set_rate(optimizer, 0.0)
    if step is None:
        _step_zero_gradients(optimizer)
    else:
        step()
    groups = zip(optimizer.param_groups, options_before, rates_before, strict=True)
    for group, options, rate in groups:
        group.update(options)
        _set_group_rate(group, rate)
    for state in optimizer.state.values():
        _reset_state(state)


def _step_zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of zero gradients, and delete the gradients again."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = None
    take_step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    # FSDP2 makes gradients on a stream of its own. torch's allocator would keep the memory of these
    # ones for the stream that made them, beside that of the next ones.
    torch.cuda.empty_cache()


def _reset_state(state: dict[str, Any]) -> None:
    """Set the state of one parameter to zero, in place."""
    for slot, value in state.items():
        if isinstance(value, torch.Tensor):
            if slot != SCHEDULE_FREE_WEIGHTS and not is_quantised(value):
                value.zero_()
        elif isinstance(value, int | float):
            state[slot] = type(value)(0)


def use_averaged_weights(optimizer: torch.optim.Optimizer, averaged: bool) -> bool:
    """Switch the weights of a schedule-free optimizer, and return whether they changed.

    `averaged` True: to the running average that is evaluated, saved and exported; False: to the
    weights at which gradients are taken. Other optimizers are left as they are.
    """
    if averaged:
        switch = getattr(optimizer, "eval", None)
    else:
        switch = getattr(optimizer, "train", None)
    if switch is None:
        return False
    # Averaged weights are in place exactly if the optimizer is not in its training mode. Without
    # the key the mode is unknown, which counts as a change.
    first_group = optimizer.param_groups[0]
    wants_training_mode = not averaged
    is_in_training_mode: bool = first_group.get("train_mode", averaged)
    switch()
    return is_in_training_mode != wants_training_mode


def schedule_free_scalars(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers that a schedule-free optimizer keeps in its groups; {} for any other.

    They are the same in all groups.
    """
    first_group = optimizer.param_groups[0]
    return {key: first_group[key] for key in SCHEDULE_FREE_SCALARS if key in first_group}


def require_zero_initial_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose initial state is not all zeros.

    `make_state` sets the state to zeros. A trial shows whether that is right: one step of a small
    matrix must come out the same from a state of zeros as from no state.
    """
    kind = type(optimizer)
    try:
        weight_of_primed, state = _trial_step(optimizer, is_primed=True)
        weight_of_fresh, _ = _trial_step(optimizer, is_primed=False)
    except Exception as error:  # whatever a stranger's optimizer raises
        cause = f"{class_and_line(error)}: {first_line(error)}"
        raise PlanError(
            f"{kind.__name__} does not step a matrix by itself: {cause}",
            where="make_optimizer",
            fix="use one that steps each parameter by its gradient",
        ) from error
    if not torch.equal(weight_of_primed, weight_of_fresh):
        raise PlanError(
            f"the state of {kind.__name__} does not begin at zero, "
            "and a checkpoint is loaded over one that does",
            where="make_optimizer",
            fix="use Adam, AdamW, SGD, RMSprop or another whose moments begin at zero",
        )
    for slot, value in state.items():
        if not isinstance(value, torch.Tensor | int | float | None):
            raise PlanError(
                f"{kind.__name__} keeps a {type(value).__name__} of each parameter ({slot}), "
                "which no checkpoint has",
                where="make_optimizer",
                fix="use one that keeps tensors and numbers",
            )


def _trial_step(
    optimizer: torch.optim.Optimizer, is_primed: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Step a matrix by a copy of `optimizer`; return the matrix and its state.

    `is_primed`: the state is made and set to zeros before.
    """
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    options = optimizer.defaults | optimizer.param_groups[0]
    # Made without calling its constructor, whose arguments are not known.
    kind = type(optimizer)
    probe = kind.__new__(kind)
    # A `step` among the attributes was put over the class's own, for the original optimizer.
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
    attributes["state"] = defaultdict(dict)
    attributes["param_groups"] = [{**options, "params": [parameter]}]
    vars(probe).update(attributes)
    if is_primed:
        make_state(probe)
    parameter.grad = torch.tensor([[0.1, -0.2], [0.3, 0.4]])
    take_step(probe)
    return parameter.detach(), dict(probe.state[parameter])


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's own tensors by canonical name, for every parameter that has state.

    A name is `optim.<parameter name>.<slot>`, or `<slot>.<parameter name>` for a slot that is a
    section by itself. A number becomes a tensor float64[].
    """
    sections = getattr(optimizer, "sections", ())
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        for slot, value in state.items():
            if slot in sections:
                canonical = f"{slot}.{name}"
            else:
                canonical = f"optim.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[canonical] = value
            elif isinstance(value, int | float):
                tensors[canonical] = torch.tensor(value, dtype=torch.float64)
    return tensors


def load_numbers(
    optimizer: torch.optim.Optimizer,
    named: dict[str, nn.Parameter],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Set the numbers in the optimizer's state, by the names of `optimizer_tensors`."""
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        for slot, value in state.items():
            if not isinstance(value, int | float):
                continue
            saved = tensors.get(f"optim.{name}.{slot}")
            if saved is not None:
                state[slot] = type(value)(saved.item())


def is_quantised(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is quantised by torchao, into codes and scales.

    torchao leaves small tensors as they are, so of one sharded tensor some ranks' parts may be
    quantised and others not.
    """
    return hasattr(local(tensor), "codes")


@torch.no_grad()
def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a checkpoint saves of a tensor.

    Of a quantised or bfloat16 tensor that is an fp32 copy in host memory, otherwise the tensor
    itself. A quantised tensor is changed too: it is quantised again from the copy, as it will be by
    `load_saved` in a run that resumes, so that both runs continue in the same way.
    """
    part: Any = local(tensor)
    if is_quantised(tensor):
        whole = part.dequantize()
        part.copy_(whole)
    elif tensor.dtype == torch.bfloat16:
        whole = part.float()
    else:
        return tensor
    return as_dtensor_on_mesh_device(whole, tensor).cpu()


@torch.no_grad()
def load_saved(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Set a tensor to the values of `saved`, which `as_saved` gave and a checkpoint filled."""
    if saved is not tensor:
        local(tensor).copy_(local(saved))
