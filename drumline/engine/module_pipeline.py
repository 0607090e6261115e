"""The pipeline engine of a user's module, by the stages that the module names.

The module's own forward runs on every rank, with the stages of other ranks replaced:

- The stage right before the rank's own receives hidden states from the rank before.
- The stage right after the rank's own sends what it is given to the next rank.
- All others return zeros of the right shape.

So only on the last rank does the module return real values, and backward starts from the loss
there. A rank runs a backward as soon as it has as many micro-batches in flight as the schedule
allows. So the schedule is kept in the loop of a config and in a loop of the user's own.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drumline.dist.mesh import device_mesh
from drumline.engine import native
from drumline.engine.engine import DeviceSums, Extract, Sums, neutral_sum
from drumline.engine.native import NativeEngine
from drumline.engine.pipeline import PartOfPipeline
from drumline.engine.stages import StandIn
from drumline.engine.transforms import batch_norms
from drumline.errors import PlanError
from drumline.models.blocks import blocks
from drumline.models.shards import Values, has_extra_state
from drumline.plan.plan import Plan
from drumline.plan.stages import Cost, Range, balance
from drumline.vendor.torch import tree_leaves, tree_map_only

NAME_THEM = "return an nn.Sequential, or give the module `stages`: the submodules that it calls one after another"


def prepare(plan: Plan, model: nn.Module, values: Values, **options: Any) -> ModulePipeline:
    """Return the engine over this rank's stages of a module, spread as planned and filled.

    `options`: as of `native.prepare`. Collective. Raises PlanError as `assign_stages` does.
    """
    mesh = device_mesh(plan.mesh, plan.device)
    bounds = assign_stages(model, plan.mesh.pp)
    link = Link(model, bounds, mesh, values.device)
    if not next(model.parameters()).is_meta:
        # A model that was built whole lies on the host. Only the rank's own stages are left of it.
        model.to(values.device)
    # DDP has to see each forward that a backward goes through. Here a backward does not begin at
    # what the module returned to DDP, but at what was sent to the next rank.
    options["overlaps"] = False
    return native.prepare(plan, model, values, partial(ModulePipeline, link), **options)


def stages_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the stages of a module by name, in order.

    These are the children of an nn.Sequential, or what the attribute `stages` of another module
    lists. Raises PlanError if it names none, or some that cannot be held apart.
    """
    found: Any
    if isinstance(model, nn.Sequential):
        found = model
    else:
        found = getattr(model, "stages", None)
    if found is None:
        raise PlanError(
            f"a pipeline requires the stages of {type(model).__name__}",
            where="strategy",
            fix=NAME_THEM,
        )
    names = {module: name for name, module in model.named_modules()}
    # The name "" stands for what is no submodule; it is the model's own name as well.
    stages = {names.get(stage, ""): stage for stage in found}
    if "" in stages or len(stages) != len(list(found)):
        raise PlanError(
            f"the stages of {type(model).__name__} are not submodules, each once",
            where="strategy",
            fix=NAME_THEM,
        )
    _require_one_stage_a_weight(model, stages)
    _require_stateless(model)
    return stages


def _require_one_stage_a_weight(model: nn.Module, stages: dict[str, nn.Module]) -> None:
    """Raise PlanError for a weight that several stages hold, or none."""
    owners: dict[nn.Parameter, list[str]] = {}
    for parameter in model.parameters():
        owners[parameter] = []
    for stage_name, stage in stages.items():
        for parameter in stage.parameters():
            owners[parameter].append(stage_name)
    for name, parameter in model.named_parameters():
        owners_of_weight = owners[parameter]
        if len(owners_of_weight) == 1:
            continue
        what = "in none of the stages"
        if owners_of_weight:
            what = f"shared by stages {' and '.join(owners_of_weight)}"
        raise PlanError(
            f"{name} is {what}",
            where="strategy",
            fix="put each weight into one stage, or use ddp, fsdp2 or zero3",
        )


def _require_stateless(model: nn.Module) -> None:
    """Raise PlanError for modules with a state that stages would not agree on, or not save."""
    if batch_norms(model):
        raise PlanError(
            "batch norms agree on their statistics over all ranks, and stages have different ones",
            where="strategy",
            fix="use a norm without statistics, or ddp, fsdp2 or zero3",
        )
    for module in model.modules():
        if has_extra_state(module):
            raise PlanError(
                f"get_extra_state of {type(module).__name__} is saved by the first rank alone,"
                " and stages lie on others",
                where="strategy",
                fix="keep it in buffers, or use ddp, fsdp2 or zero3",
            )


def assign_stages(model: nn.Module, ranks: int) -> list[Range]:
    """Return the stages of each rank as (first, stop), with parameters as equal as can be.

    Each rank gets stages with weights. Raises PlanError as `stages_of` does, and for too few stages.
    """
    stages = list(stages_of(model).values())
    # The parts that are dealt to ranks: each begins at a stage with weights, and has the stages
    # without weights that follow it. The first part also has those before it.
    with_weights: list[int] = []
    for index, stage in enumerate(stages):
        if next(stage.parameters(), None) is not None:
            with_weights.append(index)
    starts = [0, *with_weights[1:]]
    if len(starts) < ranks:
        raise PlanError(
            f"{len(starts)} stages with weights cannot be cut over {ranks} ranks",
            where="strategy",
            fix=f"at most pp={len(starts)}, or more stages",
        )
    boundaries = [*starts, len(stages)]
    sizes: list[int] = []
    for start, stop in pairwise(boundaries):
        part = stages[start:stop]
        sizes.append(sum(_count_entries(stage) for stage in part))

    def cost(first: int, stop: int) -> Cost:
        # Parameters stand for FLOPs too: what a stranger's stage computes is not known.
        parameters = sum(sizes[first:stop])
        return Cost(float(parameters), parameters)

    parts = balance(cost, len(starts), ranks)
    return [(boundaries[first], boundaries[stop]) for first, stop in parts]


def _count_entries(module: nn.Module) -> int:
    """Return the number of entries of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


class Call(NamedTuple):
    """What one forward of a rank has received and sent.

    `received` is None on the first rank of the pipeline, `sent` on the last.
    """

    received: torch.Tensor | None = None
    sent: torch.Tensor | None = None


class Link:
    """What a rank's forwards and backwards receive from its neighbours and send to them.

    `rank`, `ranks`: this rank's number in the pipeline, and how many ranks it has.
    `first`, `stop`: this rank's stages, [first, stop).
    `calls`: the forwards of this micro-batch, for their backward.
    `sends`: sends that may not have ended yet.
    """

    def __init__(
        self, model: nn.Module, bounds: list[Range], mesh: DeviceMesh, device: str
    ) -> None:
        """Replace the stages of other ranks in `model`, and its forward. Collective.

        `bounds`: stages of each rank, (first, stop).
        """
        pp = mesh["pp"]
        self.rank = pp.get_local_rank()
        self.ranks = pp.size()
        self.device = device
        # Hidden states and gradients each have a group: over one group a rank's sends would wait
        # for its receives on a GPU. Each row has the ranks of one pipeline, since `pp` is the first
        # axis of the mesh.
        ranks_by_pipeline = mesh.mesh.movedim(0, -1).reshape(-1, self.ranks)
        pipelines = ranks_by_pipeline.tolist()
        self.group_of_hidden = pp.get_group()
        self.group_of_gradients = dist.new_subgroups_by_enumeration(pipelines)[0]
        self.first, self.stop = bounds[self.rank]
        self.model_on_meta = _without_memory(model)
        # What each stage returns, on the meta device, by the shapes of the module's inputs.
        self.traced: dict[str, list[torch.Tensor]] = {}
        # The same for the inputs of the current forward.
        self.forms: list[torch.Tensor] = []
        self.calls: list[Call] = []
        # With each send its tensor, which must live until it has left.
        self.sends: list[tuple[Any, torch.Tensor]] = []
        stages = stages_of(model)
        for index, name in enumerate(stages):
            if not self.first <= index < self.stop:
                model.set_submodule(name, StandIn(run=self._forward_in_place_of(index)))
        own_stages = list(stages.values())[self.first : self.stop]
        _keep_blocks(model, own_stages)
        model.forward = partial(self._forward, model.forward)

    def _forward_in_place_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what runs in the place of a stage of another rank.

        Stages that are not next to this rank's stages return zeros: the module's forward goes
        through them, and what they return is not used.
        """
        if index == self.first - 1:
            return self.receive
        if index == self.stop:
            return self.send
        return partial(self._zeros, index)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's own `forward`, with the shapes of its stages known."""
        key = str(tree_map_only(torch.Tensor, _shape_and_dtype, (args, kwargs)))
        if key not in self.traced:
            self.traced[key] = trace(self.model_on_meta, args, kwargs)
        self.forms = self.traced[key]
        if not torch.is_grad_enabled():
            # In training `micro_batch` waits at the end of a step. Nothing else ends an evaluation,
            # and its sent tensors would pile up.
            self.wait()
        self.calls.append(Call())
        out = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            # No backward follows.
            self.calls.pop()
        return out

    def _zeros(self, index: int, _: Any = None) -> torch.Tensor:
        """Return zeros in the form of what a stage returns."""
        return torch.zeros_like(self.forms[index], device=self.device)

    def receive(self, _: Any) -> torch.Tensor:
        """Return the hidden states of the rank before."""
        received = self._zeros(self.first - 1)
        dist.recv(received, group=self.group_of_hidden, group_src=self.rank - 1)
        received.requires_grad_(torch.is_grad_enabled())
        self.calls[-1] = Call(received)
        return received

    def send(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send hidden states to the next rank, and return zeros in place of what it computes."""
        # Under autocast a stage may return another type than it did on the meta device, by which
        # the next rank makes its buffer.
        sent = hidden.to(self.forms[self.stop - 1].dtype).contiguous()
        self.calls[-1] = self.calls[-1]._replace(sent=sent)
        self._start_send(sent.detach(), self.group_of_hidden, self.rank + 1)
        return self._zeros(self.stop)

    def run_backward(self, calls: list[Call]) -> None:
        """Run the backward of some forwards: receive gradients from the next rank, send them to the one before.

        On the last rank the loss has made the gradients already, and nothing is received.
        `calls`: in the order of the forwards, which is the same on both ranks of a send.
        """
        sent = [call.sent for call in calls if call.sent is not None]
        gradients = [torch.empty_like(hidden) for hidden in sent]
        for gradient in gradients:
            dist.recv(gradient, group=self.group_of_gradients, group_src=self.rank + 1)
        torch.autograd.backward(sent, gradients)
        for call in calls:
            if call.received is not None:
                to_send = call.received.grad
                if to_send is None:
                    # The rank before waits for a gradient, also if the loss does not depend on it.
                    to_send = torch.zeros_like(call.received)
                self._start_send(to_send, self.group_of_gradients, self.rank - 1)

    def _start_send(self, tensor: torch.Tensor, group: Any, rank: int) -> None:
        """Begin to send a tensor to another rank of the pipeline; `wait` waits for it."""
        work = dist.isend(tensor, group=group, group_dst=rank)
        self.sends.append((work, tensor))

    def wait(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()


def _keep_blocks(model: nn.Module, own_stages: list[nn.Module]) -> None:
    """Set the blocks of a module to those that this rank still has, or else to its stages."""
    kept = set(model.modules())
    own_blocks = [block for block in blocks(model) if block in kept]
    model._drumline_blocks = own_blocks or own_stages  # type: ignore[assignment]


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return what the shapes of the stages depend on: inputs that agree in it are traced once."""
    return tensor.shape, tensor.dtype


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form without memory, outside of any graph."""
    return tensor.detach().to("meta")


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a module with its parameters and buffers on the meta device."""
    empty: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        if isinstance(tensor, nn.Parameter):
            empty[id(tensor)] = nn.Parameter(_to_meta(tensor), tensor.requires_grad)
        else:
            empty[id(tensor)] = tensor.to("meta")
    # deepcopy takes these in the place of copies of its own.
    return copy.deepcopy(model, empty)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return what each stage of a module returns for some inputs, on the meta device.

    `model`: on the meta device, as `_without_memory` makes it.
    Raises PlanError if the stages are not one chain.
    """
    name = type(model).__name__
    stages = list(stages_of(model).values())
    forwards = [stage.forward for stage in stages]
    leaves: list[torch.Tensor] = []
    try:
        for index, stage in enumerate(stages):
            stage.forward = partial(_run_traced_stage, name, index, leaves, forwards[index])
        with torch.enable_grad(), torch.device("meta"):
            # With gradients, because the graph shows which stages the output comes from.
            args, kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
            out = model(*args, **kwargs)
            uses_earlier_stage = _depends_on(out, leaves[:-1])
    except (RuntimeError, TypeError, NotImplementedError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"{name} does not run without memory, so its stages' shapes are not known: {first_line}",
            where="strategy",
        ) from error
    finally:
        for stage, forward in zip(stages, forwards, strict=True):
            stage.forward = forward
    if uses_earlier_stage:
        what = f"what {name} returns does not come from its last stage alone"
        raise PlanError(what, where="strategy", fix=NAME_THEM)
    if len(leaves) != len(stages):
        what = f"what {name} returns does not come through its stages"
        raise PlanError(what, where="strategy", fix=NAME_THEM)
    return leaves


def _run_traced_stage(
    model_name: str,
    index: int,
    leaves: list[torch.Tensor],
    forward: Callable[..., Any],
    given: torch.Tensor,
    /,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    """Run one stage of a traced module, and append what it returns to `leaves`, as a new leaf.

    `forward`: the stage's own. Raises PlanError if the stage takes anything else from the stages
    before than what the last of them has returned, or does not return one tensor.
    """
    is_next = len(leaves) == index
    if leaves and given is not leaves[-1]:
        is_next = False
    if not is_next or _requiring_grad((more, named)):
        raise PlanError(
            f"stage {index} of {model_name} is not called once,"
            " with what the stage before it has returned alone",
            where="strategy",
            fix="put what lies between two stages into one of them",
        )
    out = forward(given, *more, **named)
    if not isinstance(out, torch.Tensor) or not out.is_floating_point():
        raise PlanError(
            f"stage {index} of {model_name} does not return one floating-point tensor",
            where="strategy",
            fix=NAME_THEM,
        )
    leaf = out.detach().requires_grad_()
    leaves.append(leaf)
    return leaf


def _requiring_grad(tree: Any) -> list[torch.Tensor]:
    """Return the tensors anywhere in some values that require gradients."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found.append(leaf)
    return found


def _depends_on(out: Any, earlier_leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether an output has a gradient by any of some leaves."""
    sums = [tensor.sum() for tensor in _requiring_grad(out)]
    if not sums or not earlier_leaves:
        return False
    gradients = torch.autograd.grad(sums, earlier_leaves, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


class ModulePipeline(PartOfPipeline, NativeEngine):
    """Engine over a rank's stages of a user's module."""

    def __init__(
        self, link: Link, plan: Plan, model: nn.Module, *args: Any, **options: Any
    ) -> None:
        super().__init__(plan, model, *args, **options)
        assert plan.pipeline is not None
        self.link = link
        self.rank = link.rank
        self.ranks = link.ranks
        self.group = link.group_of_hidden
        self.device = torch.device(link.device)
        # Micro-batches whose backward may be outstanding; None: all of a step (GPipe). With 1F1B a
        # rank is as far ahead as there are ranks from it to the end of the pipeline.
        in_flight = {"1f1b": self.ranks - self.rank, "model_parallel": 1}
        self.in_flight = in_flight.get(plan.pipeline.schedule)
        self.is_last = self.rank == self.ranks - 1
        # The forwards of each micro-batch whose backward is outstanding, the oldest first.
        self.queue: deque[list[Call]] = deque()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See CustomLoopEngine. After the last micro-batch, run all backwards that are left."""
        with super().micro_batch(last):
            yield
            if last:
                # Within the context: at its end gradients are reduced, and have to be complete.
                while self.queue:
                    self.link.run_backward(self.queue.popleft())
        if last:
            # Forwards without a backward of their own leave nothing for the next step.
            self.link.calls.clear()
            self.link.wait()

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        """Run a backward now on the last rank; elsewhere when the schedule has it run.

        `loss_sum` counts on the last rank alone; elsewhere it is made of zeros.
        """
        calls = self.link.calls
        self.link.calls = []
        if self.is_last:
            super().backward(loss_sum, denominator)
            self.link.run_backward(calls)
            return
        self.queue.append(calls)
        if len(self.queue) == self.in_flight:
            self.link.run_backward(self.queue.popleft())

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        sums = super().forward_backward(micro_batches, objective, denominator)
        if self.is_last:
            return sums
        uncounted = {}
        for name, sum_ in sums.items():
            uncounted[name] = torch.full_like(sum_, neutral_sum(name))
        return uncounted

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        sums = super().evaluate(micro_batches, objective)
        if self.is_last:
            return sums
        return {name: neutral_sum(name) for name in sums}

    def infer(
        self, micro_batches: Iterable[Any], extract: Extract, adapter: bool = True
    ) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for tensor in super().infer(micro_batches, extract, adapter):
            # Shapes are right on all ranks, values on the last one.
            local_tensor = tensor if self.is_last else None
            full = self._broadcast_from(self.ranks - 1, local_tensor, tensor.shape, tensor.dtype)
            results.append(full)
        return results
