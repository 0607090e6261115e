"""The interface between the training loop and the engine that holds a parallelised model.

The loop sees only this. If several models are trained (a policy, and a value model of its own),
their engines together are one engine, `CompositeEngine`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from drumline.dist.reduce import to_fp64
from drumline.models.router_load import RouterLoad
from drumline.telemetry.memory_tracker import MemoryStats

Sums = dict[str, float]
# The same as fp64 scalars on this rank's device: name → float64[].
DeviceSums = dict[str, torch.Tensor]
# (outputs of a model, batch) → a tensor that is taken or computed from them, of any shape and type.
Extract = Callable[[Any, Any], torch.Tensor]
# A name of a weight → whether it is wanted.
IsWanted = Callable[[str], bool]
# Sections of a checkpoint that only some runs have, of any role. A run that does not have such a
# section drops it as it resumes. A run that has it, and whose checkpoint does not, starts it afresh.
OPTIONAL_SECTIONS = ("outer", "compensation")
POLICY = "policy"
T = TypeVar("T")
N = TypeVar("N", float, torch.Tensor)


def is_any(name: str) -> bool:
    """Return True: whatever its name, a weight is wanted."""
    return True


class Engine(Protocol):
    """Owns the model, its gradients and its optimizer on this rank.

    Sums are over this rank's samples. Ranks that share samples (pp, cp, tp) all return the same
    sums, and the loop counts them once. The exception is a pipeline, in training and in evaluations
    of a user's module: its ranks without the last stage return neutral values (`neutral_sum`).

    An objective is called as objective(outputs, batch), with the outputs of a Hugging Face model,
    or as objective(module, batch) with a user's module (`UserModule`). What it returns has
    `loss_sum`, a scalar, and `sums`, scalars by name.

    No call of a training step makes the host wait for the device, with four exceptions: DeepSpeed's
    calls, fp16 (its next scale depends on this step's norm), an optimizer without a fused kernel,
    and gradients in host memory.
    """

    # Counts the tokens that each expert of a mixture gets in a step; None for other models. The
    # counts of all ranks, added up, are those of the global batch.
    router_load: RouterLoad | None

    def begin_step(self, lr: float) -> None:
        """Set the learning rate of a step that begins.

        Only engines that update weights in backward need it so early; others get it by `step`.
        """

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """Accumulate the gradients of Σ loss / denominator over all samples of all ranks.

        Returns the sums, `loss` among them. `denominator`: the total loss weight of the global
        batch (its target tokens, or its samples).
        """

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """Return the sums, computed without gradients. The model is left in training mode."""

    def infer(
        self, micro_batches: Iterable[Any], extract: Extract, adapter: bool = True
    ) -> list[torch.Tensor]:
        """Return `extract(outputs, batch)` of each micro-batch, computed without gradients.

        Ranks that share samples return the same. All ranks must bring the same number of
        micro-batches. The model is left in training mode.

        `adapter` False: LoRA's product is left out, so the model is what it was before training.
        """

    def whole_weights(self, is_wanted: IsWanted = is_any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of each weight and each persistent buffer, whole, on every rank.

        `is_wanted`: returns by its name whether a weight is yielded. The others are not gathered.

        Frozen weights are included. The order is the same on all ranks, the tensors are on this
        rank's device, and the names are those of the Hugging Face model (with an adapter, of PEFT's
        model). A tensor may be the engine's own, so it must not be changed. A tied weight is
        yielded once under each of its names: a reader that does not tie weights (vLLM, as it
        reloads) needs them all.

        Collective: all ranks must iterate to the end. Raises ModelError if weights are packed in 4
        or 8 bits.
        """

    def unsharded_model(self) -> nn.Module | None:
        """Return the Hugging Face model if this rank has all of it, and can call it as it is.

        None if the model is sharded or split. A caller that changes its mode or cache must put them
        back, and must not change its weights. Collective.
        """

    def grad_norm(self) -> torch.Tensor:
        """Return the global L2 norm of the accumulated gradients, before clipping.

        It is an fp64 scalar, the same on all ranks.
        """

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Clip the gradients by `grad_norm`, update the weights, and delete the gradients.

        `lr`: None for the rates that the optimizer has. `finite`: a bool scalar on the device; if it
        is False, weights and moments stay as they are.
        """

    def uses_loss_scale(self) -> bool:
        """Return whether the loss is scaled, as in fp16.

        Then a gradient that is not finite is an overflow, after which `step` lowers the scale.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state as they are now, by their canonical names.

        Names are `model.<fqn>` and `optim.<fqn>.<slot>`. A rank may return only some of the tensors;
        all ranks together return all. A checkpoint is saved from these tensors. To load one, they
        are filled and handed to `load_state`. Collective.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the engine besides `tensors`, as JSON."""

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a checkpoint.

        `tensors`: what `tensors()` returned, filled from the checkpoint. `state`: what `state()`
        returned when it was saved, with `step`, the number of steps done.

        The checkpoint may be another engine's. Then `state` may lack everything but `step`, and
        tensors of `OPTIONAL_SECTIONS` may be as `tensors` returned them, without a value from the
        checkpoint.
        """

    def memory_stats(self) -> MemoryStats:
        """Return the bytes of parameters, gradients and optimizer state that this rank holds now.

        Gradients exist between `forward_backward` and `step`.
        """

    def exposed_communication(self) -> float | None:
        """Return the seconds of the last forward_backward in which this rank waited for gradients.

        None if nothing measures it. It is called once a step: some engines count from one call to
        the next, so a second call may return 0.
        """


class CustomLoopEngine(Engine, Protocol):
    """An engine for a training loop that the user has written (`drumline.session`).

    The loop calls the model itself, and hands a loss to `backward` for each micro-batch.

    `named`: the model's parameters by name. A forward may put other tensors in their place.
    `initially_trainable`: the names of those that were trainable when the engine was built.
    `is_whole`: whether each rank has all of the model, and calls it as it is.
    """

    model: nn.Module
    named: dict[str, nn.Parameter]
    initially_trainable: set[str]
    max_grad_norm: float | None
    optimizer: torch.optim.Optimizer
    is_whole: bool

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forwards and backwards of a micro-batch.

        `last`: whether it is the last one of the global batch. When its context ends, all gradients
        are reduced.
        """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and return its result with floating-point tensors in fp32 or more."""

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Accumulate the gradients of Σ loss_sum / denominator over all ranks."""

    def divide(self, by: torch.Tensor) -> None:
        """Divide the gradients of the global batch by a scalar on the device, before `grad_norm`."""

    def evaluation_mode(self) -> contextlib.AbstractContextManager[None]:
        """Return a context to evaluate the model in, without gradients.

        On entering, the ranks agree on weights and statistics that may differ. Collective.
        """


def sum_on_device(outs: list[dict[str, torch.Tensor]]) -> DeviceSums:
    """Return the sums over micro-batches as float64 scalars on the device.

    Of a key `max_…` it is the maximum.

    `outs`: for each micro-batch a scalar by name; all have the same names.
    """
    if not outs:
        return {}
    if len(outs) == 1:
        return {key: to_fp64(value.detach()) for key, value in outs[0].items()}
    keys = list(outs[0])
    rows = []
    for out in outs:
        values = [to_fp64(value.detach()) for value in out.values()]
        rows.append(torch.stack(values))
    stacked = torch.stack(rows)
    sums = dict(zip(keys, stacked.sum(0).unbind(), strict=True))
    for key, largest in zip(keys, stacked.amax(0).unbind(), strict=True):
        if key.startswith("max_"):
            sums[key] = largest
    return sums


def neutral_sum(name: str) -> float:
    """Return the value that changes no total: for ranks of a pipeline without the last stage.

    Sums are added up over the ranks, but of a key `max_…` the largest is taken.
    """
    if name.startswith("max_"):
        return -math.inf
    return 0.0


def sum_to_host(outs: list[dict[str, torch.Tensor]]) -> Sums:
    """Return `sum_on_device` as numbers, which one copy brings to the host."""
    sums = sum_on_device(outs)
    if not sums:
        return {}
    values = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, values, strict=True))


def sum_without_model(micro_batches: Iterable[Any], objective: Any) -> Sums:
    """Return what `Engine.evaluate` does for an objective that takes no outputs of a model."""
    outs = []
    with torch.no_grad():
        for batch in micro_batches:
            out = objective(None, batch)
            outs.append({"loss": out.loss_sum, **out.sums})
    return sum_to_host(outs)


def extracting_objective(
    extract: Extract, extracted: list[torch.Tensor]
) -> Callable[[Any, Any], Any]:
    """Return an objective that appends `extract(outputs, batch)` to the list `extracted`.

    With it `Engine.infer` runs as an evaluation does. Its loss is 0.
    """

    def objective(outputs: Any, batch: Any) -> Any:
        tensor = extract(outputs, batch)
        extracted.append(tensor)
        return SimpleNamespace(loss_sum=torch.zeros((), device=tensor.device), sums={})

    return objective


class CompositeEngine:
    """An Engine over the engines of several roles. See `Engine` for what each method does.

    There is an objective for each role (role → objective), and the sums of the roles are added up.
    Gradients are clipped by the norm of all roles' gradients together.

    Calls for one model go to the policy: infer, whole_weights, unsharded_model, and evaluate with an
    objective that is no mapping. The names of another role's tensors begin with the role:
    `value/model.<fqn>`. So an export, or a run without that role, finds the policy's tensors alone.
    """

    def __init__(self, engines: dict[str, Engine], lr_ratios: Mapping[str, float]) -> None:
        """`engines`: by role, `policy` among them.

        `lr_ratios`: factor of the learning rate by role; 1 for a role that is missing.
        """
        self.engines = engines
        self.lr_ratios = lr_ratios
        self.policy = engines[POLICY]
        self.router_load = self.policy.router_load
        self.infer = self.policy.infer
        self.whole_weights = self.policy.whole_weights
        self.unsharded_model = self.policy.unsharded_model

    def begin_step(self, lr: float) -> None:
        for role, engine in self.engines.items():
            engine.begin_step(lr * self.lr_ratios.get(role, 1.0))

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        assert objective.keys() == self.engines.keys(), "each trainable model has an objective"
        sums_of_roles = []
        for role, engine in self.engines.items():
            sums = engine.forward_backward(micro_batches, objective[role], denominator)
            sums_of_roles.append(sums)
        return _sum_over_roles(sums_of_roles)

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        if not isinstance(objective, Mapping):
            return self.policy.evaluate(micro_batches, objective)
        batches = list(micro_batches)
        sums_of_roles = []
        for role, role_objective in objective.items():
            sums_of_roles.append(self.engines[role].evaluate(batches, role_objective))
        return _sum_over_roles(sums_of_roles)

    def grad_norm(self) -> torch.Tensor:
        # The roles' parameters are disjoint, so the squares of their norms add up.
        norms = torch.stack([engine.grad_norm() for engine in self.engines.values()])
        return norms.square().sum().sqrt()

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        for role, engine in self.engines.items():
            role_lr: float | None = None
            if lr is not None:
                role_lr = lr * self.lr_ratios.get(role, 1.0)
            engine.step(role_lr, grad_norm, finite)

    def uses_loss_scale(self) -> bool:
        return any(engine.uses_loss_scale() for engine in self.engines.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for role, engine in self.engines.items():
            # `select_role` undoes this.
            prefix = ""
            if role != POLICY:
                prefix = f"{role}/"
            for name, tensor in engine.tensors().items():
                tensors[prefix + name] = tensor
        return tensors

    def state(self) -> dict[str, Any]:
        roles: dict[str, Any] = {}
        for role, engine in self.engines.items():
            if role != POLICY:
                roles[role] = engine.state()
        return self.policy.state() | {"roles": roles}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        roles = state.get("roles", {})
        for role, engine in self.engines.items():
            if role == POLICY:
                role_state = state
            else:
                role_state = {**roles.get(role, {}), "step": state["step"]}
            engine.load_state(role_state, select_role(tensors, role))

    def memory_stats(self) -> MemoryStats:
        stats = MemoryStats(0, 0, 0)
        for engine in self.engines.values():
            stats += engine.memory_stats()
        return stats

    def exposed_communication(self) -> float | None:
        # All engines are asked, even if the first one returns None: some count from one call to the
        # next.
        waits = [engine.exposed_communication() for engine in self.engines.values()]
        if None in waits:
            return None
        return math.fsum(seconds for seconds in waits if seconds is not None)


def select_role(named: Mapping[str, T], role: str) -> dict[str, T]:
    """Return the values of one role, by the names that the role's own engine uses.

    `named`: values by the names that `CompositeEngine.tensors` gives.
    """
    if role == POLICY:
        return {name: value for name, value in named.items() if "/" not in name}
    prefix = f"{role}/"
    found: dict[str, T] = {}
    for name, value in named.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value
    return found


def _sum_over_roles(parts: Iterable[dict[str, N]]) -> dict[str, N]:
    """Return the sums of all roles together: those that share a name, as the losses do, are added."""
    total: dict[str, N] = {}
    for sums in parts:
        for key, value in sums.items():
            if key in total:
                total[key] = total[key] + value
            else:
                total[key] = value
    return total
