"""A pipeline of any module, by the stages that it names: its own forward runs on every rank, with the stages of other ranks replaced.

A stage before the rank's own gives zeros, but the last of them gives what the rank before has sent; the stage after its own sends on what
it is given. So what the module returns is real on the last rank alone (elsewhere zeros of the same form), and backward starts from the
loss there. A rank goes back as soon as it has as many micro-batches in flight as the schedule allows, whoever drives the loop.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drumline.core.plan import Plan
from drumline.core.stages import Cost, Range, balance
from drumline.dist.mesh import device_mesh
from drumline.errors import PlanError
from drumline.models.blocks import blocks
from drumline.models.shards import Values, has_extra_state
from drumline.parallel import native
from drumline.parallel.engine import DeviceSums, Read, Sums
from drumline.parallel.native import NativeEngine
from drumline.parallel.pipeline import PartOfPipeline
from drumline.parallel.stages import Absent
from drumline.parallel.transforms import batch_norms
from drumline.vendor.torch import tree_leaves, tree_map_only

NAME_THEM = "return an nn.Sequential, or give the module `stages`: the submodules that it calls one after another"


def prepare(plan: Plan, model: nn.Module, values: Values, **options: Any) -> OwnPipeline:
    """Keep this rank's stages of a module, spread them as planned, and fill them. Collective. Raises PlanError as `cut` does."""
    whole, bounds = device_mesh(plan.mesh, plan.device), cut(model, plan.mesh.pp)
    link = Link(model, bounds, whole, values.device)
    if not next(model.parameters()).is_meta:
        model.to(values.device)
    return native.prepare(
        plan, model, values, partial(OwnPipeline, link), **{**options, "overlaps": False}
    )


def stages_of(model: nn.Module) -> dict[str, nn.Module]:
    """The stages of a module by name, in order. Raises PlanError where it names none, or some that cannot be held apart."""
    found = model if isinstance(model, nn.Sequential) else getattr(model, "stages", None)
    if found is None:
        raise PlanError(
            f"a pipeline requires the stages of {type(model).__name__}",
            where="strategy",
            fix=NAME_THEM,
        )
    names = {module: name for name, module in model.named_modules()}
    stages = {names.get(stage, ""): stage for stage in found}
    if "" in stages or len(stages) != len(list(found)):
        raise PlanError(
            f"the stages of {type(model).__name__} are not submodules, each once",
            where="strategy",
            fix=NAME_THEM,
        )
    owners: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in model.parameters()}
    for name, stage in stages.items():
        for parameter in stage.parameters():
            owners[parameter].append(name)
    for name, parameter in model.named_parameters():
        if len(owners[parameter]) != 1:
            what = (
                f"shared by stages {' and '.join(owners[parameter])}"
                if owners[parameter]
                else "in none of the stages"
            )
            raise PlanError(
                f"{name} is {what}",
                where="strategy",
                fix="put each weight into one stage, or use ddp, fsdp2 or zero3",
            )
    if batch_norms(model):
        what = (
            "batch norms agree on their statistics over all ranks, and stages have different ones"
        )
        raise PlanError(
            what, where="strategy", fix="use a norm without statistics, or ddp, fsdp2 or zero3"
        )
    if own := [type(module).__name__ for module in model.modules() if has_extra_state(module)]:
        what = f"get_extra_state of {own[0]} is saved by the first rank alone, and stages lie on others"
        raise PlanError(
            what, where="strategy", fix="keep it in buffers, or use ddp, fsdp2 or zero3"
        )
    return stages


def cut(model: nn.Module, ranks: int) -> list[Range]:
    """Stages [first, stop) of each rank, as equal in parameters as can be, none without. Raises PlanError as `stages_of`, and for few."""
    stages = [*stages_of(model).values()]
    starts = [
        0,
        *[
            index
            for index, stage in enumerate(stages)
            if next(stage.parameters(), None) is not None
        ][1:],
    ]
    if len(starts) < ranks:
        what = f"{len(starts)} stages with weights cannot be cut over {ranks} ranks"
        raise PlanError(what, where="strategy", fix=f"at most pp={len(starts)}, or more stages")
    ends = [*starts, len(stages)]
    sizes = [
        float(sum(p.numel() for stage in stages[a:b] for p in stage.parameters()))
        for a, b in pairwise(ends)
    ]
    parts = balance(lambda i, j: Cost(sum(sizes[i:j]), int(sum(sizes[i:j]))), len(starts), ranks)
    return [(ends[i], ends[j]) for i, j in parts]


class Link:
    """What a rank's forwards receive and send. `calls`: (received, sent) of the forwards whose backward is still to come."""

    def __init__(
        self, model: nn.Module, bounds: list[Range], whole: DeviceMesh, device: str
    ) -> None:
        """Replaces in `model` the stages of other ranks, and its forward. Collective."""
        pp = whole["pp"]
        self.rank, self.ranks, self.device = pp.get_local_rank(), pp.size(), device
        # Both ways at once: over one group a rank's sends would wait for its receives on a GPU.
        rows = whole.mesh.movedim(0, -1).reshape(-1, self.ranks).tolist()
        self.onward, self.back = pp.get_group(), dist.new_subgroups_by_enumeration(rows)[0]
        self.first, self.stop = bounds[self.rank]
        self.traced, self.known = _without_memory(model), dict[str, list[torch.Tensor]]()
        self.forms: list[torch.Tensor] = []
        self.calls: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self.works: list[tuple[Any, torch.Tensor]] = []
        stages = stages_of(model)
        for index, name in enumerate(stages):
            if not self.first <= index < self.stop:
                run = (
                    self.receive
                    if index == self.first - 1
                    else self.send
                    if index == self.stop
                    else partial(self._zeros, index)
                )
                model.set_submodule(name, Absent(run=run))
        kept = {*model.modules()}
        model._drumline_blocks = [b for b in blocks(model) if b in kept] or [*stages.values()][
            self.first : self.stop
        ]  # type: ignore[assignment]
        model.forward = partial(self._forward, model.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = str(tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (args, kwargs)))
        if key not in self.known:
            self.known[key] = trace(self.traced, args, kwargs)
        self.forms = self.known[key]
        if not torch.is_grad_enabled():
            self.wait()
        self.calls.append((None, None))
        out = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.calls.pop()
        return out

    def _zeros(self, index: int, _: Any = None) -> torch.Tensor:
        return torch.zeros_like(self.forms[index], device=self.device)

    def receive(self, _: Any) -> torch.Tensor:
        received = self._zeros(self.first - 1)
        dist.recv(received, group=self.onward, group_src=self.rank - 1)
        self.calls[-1] = (received.requires_grad_(torch.is_grad_enabled()), None)
        return received

    def send(self, given: torch.Tensor) -> torch.Tensor:
        sent = given.to(self.forms[self.stop - 1].dtype).contiguous()
        self.calls[-1] = (self.calls[-1][0], sent)
        self._start(sent.detach(), self.onward, self.rank + 1)
        return self._zeros(self.stop)

    def go_back(self, calls: list[tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
        """The backward of some forwards: gradients come from the rank behind (on the last they are there), and go to the one before."""
        sent = [out for _, out in calls if out is not None]
        gradients = [torch.empty_like(out) for out in sent]
        for gradient in gradients:
            dist.recv(gradient, group=self.back, group_src=self.rank + 1)
        torch.autograd.backward(sent, gradients)
        for received, _ in calls:
            if received is not None:
                self._start(
                    torch.zeros_like(received) if received.grad is None else received.grad,
                    self.back,
                    self.rank - 1,
                )

    def _start(self, tensor: torch.Tensor, group: Any, to: int) -> None:
        self.works.append((dist.isend(tensor, group=group, group_dst=to), tensor))

    def wait(self) -> None:
        """Until all that was sent has left."""
        for work, _ in self.works:
            work.wait()
        self.works.clear()


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy on the meta device; what is not one stays as it is."""
    tensors = chain(model.parameters(), model.buffers())
    empty = {
        id(t): nn.Parameter(t.detach().to("meta"), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    return copy.deepcopy(model, empty)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What each stage of a module without memory gives, without memory. Raises PlanError where they are not one chain."""
    leaves: list[torch.Tensor] = []
    name = type(model).__name__

    def followed(
        index: int, forward: Callable[..., Any], given: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        follows = len(leaves) == index and (not leaves or given is leaves[-1])
        if not follows or any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves((more, named))
        ):
            what = f"stage {index} of {name} is not called once, with what the stage before it has returned alone"
            raise PlanError(
                what, where="strategy", fix="put what lies between two stages into one of them"
            )
        out = forward(given, *more, **named)
        if not (isinstance(out, torch.Tensor) and out.is_floating_point()):
            raise PlanError(
                f"stage {index} of {name} does not return one floating-point tensor",
                where="strategy",
                fix=NAME_THEM,
            )
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    stages = [*stages_of(model).values()]
    own = [stage.forward for stage in stages]
    try:
        for index, stage in enumerate(stages):
            stage.forward = partial(followed, index, own[index])
        with torch.enable_grad(), torch.device("meta"):
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.detach().to("meta"), (args, kwargs)
            )
            out = model(*args, **kwargs)
            ends = [
                t.sum() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            around = (
                [g is not None for g in torch.autograd.grad(ends, leaves[:-1], allow_unused=True)]
                if ends and leaves[1:]
                else []
            )
    except (RuntimeError, TypeError, NotImplementedError) as error:
        first = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"{name} does not run without memory, so its stages' shapes are not known: {first}",
            where="strategy",
        ) from error
    finally:
        for stage, forward in zip(stages, own, strict=True):
            stage.forward = forward
    if len(leaves) != len(stages) or any(around):
        what = f"what {name} returns " + (
            "does not come from its last stage alone"
            if any(around)
            else "does not come through its stages"
        )
        raise PlanError(what, where="strategy", fix=NAME_THEM)
    return leaves


class OwnPipeline(PartOfPipeline, NativeEngine):
    """Engine over a rank's stages of any module."""

    def __init__(
        self, link: Link, plan: Plan, model: nn.Module, *args: Any, **options: Any
    ) -> None:
        super().__init__(plan, model, *args, **options)
        assert plan.pipeline is not None
        self.link, self.rank, self.ranks, self.group, self.place = (
            link,
            link.rank,
            link.ranks,
            link.onward,
            torch.device(link.device),
        )
        self.in_flight = {"1f1b": self.ranks - self.rank, "model_parallel": 1}.get(
            plan.pipeline.schedule
        )
        self.is_last = self.rank == self.ranks - 1
        self.queue: deque[list[Any]] = deque()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with super().micro_batch(last):
            yield
            while last and self.queue:
                self.link.go_back(self.queue.popleft())
        if last:
            self.link.calls.clear()
            self.link.wait()

    def backward(self, loss_sum: torch.Tensor, denominator: float) -> None:
        calls, self.link.calls = self.link.calls, []
        if self.is_last:
            super().backward(loss_sum, denominator)
            return self.link.go_back(calls)
        self.queue.append(calls)
        if len(self.queue) == self.in_flight:
            self.link.go_back(self.queue.popleft())

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        return self._counted(
            super().forward_backward(micro_batches, objective, denominator), torch.full_like
        )

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        return self._counted(super().evaluate(micro_batches, objective), lambda _, value: value)

    def infer(
        self, micro_batches: Iterable[Any], read: Read, adapter: bool = True
    ) -> list[torch.Tensor]:
        found = super().infer(micro_batches, read, adapter)
        return [
            self._from(self.ranks - 1, tensor if self.is_last else None, tensor.shape, tensor.dtype)
            for tensor in found
        ]

    def _counted(self, sums: dict[str, Any], full: Callable[[Any, float], Any]) -> dict[str, Any]:
        """Sums of zeros are not those of the samples: nothing, and −∞ for a key `max_…`."""
        return (
            sums
            if self.is_last
            else {
                n: full(v, -float("inf") if n.startswith("max_") else 0.0) for n, v in sums.items()
            }
        )
