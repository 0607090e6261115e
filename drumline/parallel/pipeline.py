"""The pipeline engine: each rank holds some stages of the model, and torch's schedules decide which runs when.

Every rank of a pipeline is given the same micro-batches, so only hidden states and their gradients travel between stages. The last
stage's forward ends in the objective, which is the loss that the schedule differentiates; its sums then go to all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from drumline.core.plan import Plan
from drumline.dist.mesh import device_mesh
from drumline.models import adapters
from drumline.models.shards import Values, all_tensors, tied_names
from drumline.parallel.data_parallel import Spread
from drumline.parallel.engine import DeviceSums, Read, Sums, added, reader, total
from drumline.parallel.experts import apply_expert_parallelism
from drumline.parallel.native import ForwardEngine, NativeEngine, spread_over_data, whole
from drumline.parallel.norms import local
from drumline.parallel.stages import Cuts, Stage, find_cuts, part, tied
from drumline.parallel.tensor_parallel import apply_tp
from drumline.parallel.transforms import apply_compile, apply_memory, gathered_in

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "model_parallel": pipelining.ScheduleGPipe,
}
P = TypeVar("P", bound="ForwardPipeline")


def prepare(plan: Plan, model: nn.Module, values: Values, engine: type[P]) -> P:
    """Cut a model (laid out without weights, or whole on the CPU) as planned, spread this rank's stages, and fill those. Collective.

    Raises PlanError for a model that cannot be cut.
    """
    assert plan.pipeline is not None and plan.pipeline.layers, "workers get plans of known models"
    whole = device_mesh(plan.mesh, plan.device)
    rank, layers = whole["pp"].get_local_rank(), plan.pipeline.layers
    cuts = find_cuts(model)
    mine = range(rank, len(layers), plan.mesh.pp)
    shared = tied(model, cuts)
    # Hidden states travel in the type of the residual stream, which autocast leaves in fp32, and FSDP2's cast weights do not.
    dtype = gathered_in(plan) or torch.float32
    model_part = part(model, cuts, [layers[index] for index in mine], dtype)
    if not next(model_part.parameters()).is_meta:
        model_part.to(values.device)
    if plan.mesh.tp > 1:
        apply_tp(
            model_part, whole["tp"], plan.stream_parts > 1, plan.activation_checkpointing == "none"
        )
    if plan.mesh.ep > 1:
        apply_expert_parallelism(model_part, whole["ep"])
    apply_memory(model_part, plan)
    apply_compile(model_part, plan.config.compile)
    stages = [StageWithObjective(model_part, cuts, layers[index], dtype) for index in mine]
    roots = [(stage, stage.model) for stage in stages]
    spread = spread_over_data(plan, whole, model_part, roots, model_part, values, overlaps=False)
    return engine(
        plan, model_part, spread, stages, cuts, whole["pp"], torch.device(values.device), shared
    )


class StageWithObjective(Stage):
    """A stage as a schedule runs it; the last one ends in the loss, float32[1].

    Every schedule runs a stage's micro-batches in their order, so the stage takes them in turn. A number from the schedule
    would have to be a tensor, which FSDP2 copies to the device, and the host would wait to read it.
    """

    def __init__(self, *parts: Any) -> None:
        """`parts`: as of Stage."""
        super().__init__(*parts)
        self.micro_batches: Iterator[Any] = iter(())
        self.objective: Any = None
        self.scale: float | torch.Tensor | None = None
        self.autocast: Any = contextlib.nullcontext
        self.splits_backward = False
        self.outs: list[dict[str, torch.Tensor]] = []

    def begin(
        self, micro_batches: list[Any], objective: Any, scale: float | torch.Tensor | None
    ) -> None:
        """`scale`: what the loss is multiplied by before backward; None without gradients."""
        self.micro_batches, self.objective, self.scale = iter(micro_batches), objective, scale

    def forward(self, received: torch.Tensor | None = None) -> torch.Tensor:
        batch = next(self.micro_batches)
        with self.autocast():
            out = self.run(batch, None if self.is_first else received)
            if isinstance(out, torch.Tensor):
                return out
            if self.splits_backward and self.scale is not None:
                return self._loss_at_once(out, batch)
            return self._loss(out, batch)

    def _loss(self, out: Any, batch: Any) -> torch.Tensor:
        answer = self.objective(out, batch)
        self.outs.append({"loss": answer.loss_sum.detach(), **answer.sums})
        return (answer.loss_sum * (1.0 if self.scale is None else self.scale)).reshape(1)

    def _loss_at_once(self, out: Any, batch: Any) -> torch.Tensor:
        """The objective's backward right behind its forward, for a schedule that goes through a stage's graph twice: the chunked
        cross-entropy makes its gradients in forward and gives them away once."""
        values = {
            name: value
            for name in ("hidden_BTD", "logits_BTV", "logits_BC")
            if (value := getattr(out, name)) is not None
        }
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        loss = self._loss(replace(out, **leaves), batch)
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        return _Known.apply(
            loss.detach(), [leaf.grad for leaf in leaves.values()], *values.values()
        )


class _Known(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor | None], *values: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        return (
            None,
            None,
            *(
                gradient if gradient is None else gradient * grad_loss
                for gradient in ctx.saved_tensors
            ),
        )


class PartOfPipeline(ForwardEngine):
    """What an engine over some stages of a model does with the others'. `place`: where they compute."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    place: torch.device

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._come_together()
        mine = all_tensors(self.model)
        tied = tied_names(self.model)
        forms_of_mine = {
            name: (tensor.shape, tensor.dtype, tied.get(name, [])) for name, tensor in mine.items()
        }
        of_ranks: list[Any] = [None] * self.ranks
        dist.all_gather_object(of_ranks, forms_of_mine, group=self.group)
        counted: set[str] = set()
        for rank, forms in enumerate(of_ranks):
            for name, (shape, dtype, aliases) in forms.items():
                if name in counted:  # both ends hold tied weights
                    continue
                counted.update((name, *aliases))
                full = self._from(
                    rank,
                    whole(name, mine[name], self.place) if rank == self.rank else None,
                    shape,
                    dtype,
                )
                for each in (name, *aliases):
                    yield each, full

    def _from(
        self, rank: int, mine: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor that one rank of the pipeline has, on all of them."""
        full = (
            torch.empty(shape, dtype=dtype, device=self.place)
            if mine is None
            else mine.contiguous()
        )
        dist.broadcast(full, group=self.group, group_src=rank)
        return full


class ForwardPipeline(PartOfPipeline):
    """A rank's stages without gradients: the last stage makes the outputs, and all ranks of the pipeline get them."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: Spread,
        stages: list[StageWithObjective],
        cuts: Cuts,
        pp: DeviceMesh,
        place: torch.device,
        shared: list[str],
    ) -> None:
        """`place`: where stages compute. `shared`: names of the weights that both ends hold."""
        super().__init__(plan, model, spread)
        self.stages, self.cuts, self.group = stages, cuts, pp.get_group()
        self.rank, self.ranks = pp.get_local_rank(), pp.size()
        self.dtype = stages[0].dtype
        self.place, self.shared = place, shared
        for stage in stages:
            stage.autocast = self._autocast

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """Forward alone, each micro-batch through all stages, sent on without waiting: the next one starts behind it."""
        sends: list[tuple[Any, torch.Tensor]] = []
        batches = list(micro_batches)
        with self.evaluating():
            for stage in self.stages:
                stage.begin(batches, objective, None)
            for batch in batches:
                for stage in self.stages:
                    received = None
                    if not stage.is_first:
                        received = torch.empty(
                            *batch.input_ids_BT.shape,
                            self.cuts.width,
                            dtype=self.dtype,
                            device=self.place,
                        )
                        dist.recv(
                            received, group=self.group, group_src=(self.rank - 1) % self.ranks
                        )
                    out = stage(received)
                    if not stage.is_last:
                        sends.append(
                            (
                                dist.isend(
                                    out, group=self.group, group_dst=(self.rank + 1) % self.ranks
                                ),
                                out,
                            )
                        )
            for work, _ in sends:
                work.wait()
        last = self.stages[-1]
        sums: Sums = self._of_last(total(last.outs) if last.is_last else None)
        last.outs.clear()
        return sums

    def infer(
        self, micro_batches: Iterable[Any], read: Read, adapter: bool = True
    ) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with contextlib.ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(adapters.switched(stage.model, adapter))
            self.evaluate(micro_batches, reader(read, kept))
        forms = self._of_last([(tensor.shape, tensor.dtype) for tensor in kept])
        last = self.rank == self.ranks - 1
        return [
            self._from(self.ranks - 1, kept[i] if last else None, *form)
            for i, form in enumerate(forms)
        ]

    def _of_last(self, mine: Any) -> Any:
        """What the rank of the last stage has, on all ranks of the pipeline."""
        box = [mine]
        dist.broadcast_object_list(box, group=self.group, group_src=self.ranks - 1)
        return box[0]

    def _train(self, mode: bool) -> None:
        super()._train(mode)
        for stage in self.stages:
            stage.train(mode)


class LeanStage(pipelining.PipelineStage):
    """torch makes room for what all micro-batches of a step receive, both ways, before the first. Here each gets its own when it is about
    to receive, and gives it back after its backward: what 1F1B holds does not grow with accumulation."""

    def _setup_forward_recv_info(self, *given: Any) -> None:
        with self._no_room():
            super()._setup_forward_recv_info(*given)

    def _create_grad_recv_info(self, *given: Any) -> Any:
        with self._no_room():
            return super()._create_grad_recv_info(*given)

    @contextlib.contextmanager
    def _no_room(self) -> Iterator[None]:
        place, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = place

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))
        for tensor in _move(self.args_recv_info[bwd_chunk_id], torch.device("meta")):
            if (
                full_backward
            ):  # the graph of a loss, which the schedule keeps to the end of the step, holds it
                tensor.untyped_storage().resize_(0)


def _move(received: Iterable[Any], place: torch.device) -> list[torch.Tensor]:
    """Give what another stage sends its room on another device; the tensors that were its room before. Ids come from no stage."""
    before = []
    for info in received:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.is_meta != (place.type == "meta"):
            before.append(buffer)
            info.buffer = torch.empty_like(buffer, device=place)
    return before


class PipelineEngine(ForwardPipeline, NativeEngine):
    """Engine over a rank's stages. What it does not override is done as on one process, to the parameters that this rank holds."""

    def __init__(self, plan: Plan, *parts: Any) -> None:
        """`parts`: as of ForwardPipeline."""
        super().__init__(plan, *parts)
        assert plan.pipeline is not None
        self.shared = [
            name
            for name in self.shared
            if self.rank in (0, self.ranks - 1) and self.named[name].requires_grad
        ]
        self.counted_elsewhere = frozenset(self.shared if self.rank else ())
        self.at_once = 1 if plan.pipeline.schedule == "model_parallel" else plan.batch.accumulation
        for stage in self.stages:
            stage.splits_backward = plan.pipeline.schedule == "zero_bubble"
        # torch's schedule over this rank's stages, with all shapes given: it needs no trial run, and no messages to agree on them.
        B, T = plan.batch.micro_batch * plan.batch.rows_per_sample, plan.config.data.max_length
        ids = torch.empty(B, T, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            B, T, self.cuts.width, dtype=self.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(1, device="meta", requires_grad=True)
        made = [
            LeanStage(
                module,
                self.rank + turn * self.ranks,
                len(plan.pipeline.layers),
                self.place,
                input_args=ids if module.is_first else hidden,
                output_args=loss if module.is_last else hidden,
                group=self.group,
            )
            for turn, module in enumerate(self.stages)
        ]
        kind = SCHEDULES[plan.pipeline.schedule]
        interleaves = plan.pipeline.schedule in ("interleaved", "zero_bubble")
        # The loss is a sum and scaled already.
        self.schedule = kind(
            made if interleaves else made[0],
            self.at_once,
            loss_fn=lambda out, _target: out.sum(),
            scale_grads=False,
        )
        self.sums: DeviceSums | None = (
            None  # what stages before the last one return, once they know the names
        )
        self._train(True)

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        scale = self.loss_scale.scale(self.averaged_over / denominator)
        self._at_mean(False)
        with self.spread.micro_batch(last=True):
            for start in range(0, len(micro_batches), self.at_once):
                batches = micro_batches[start : start + self.at_once]
                for stage in self.stages:
                    stage.begin(batches, objective, scale)
                unused = torch.arange(len(batches))  # a target for each, which schedules ask for
                ids = [torch.cat([b.input_ids_BT for b in batches])] if self.rank == 0 else []
                self.schedule.step(*ids, target=unused)
        self._add_up_shared()
        return self._last_sums()

    def _last_sums(self) -> DeviceSums:
        """The last stage's sums over all its micro-batches there; elsewhere zeros, which the loop does not count (of a key `max_…` −∞)."""
        last = self.stages[-1]
        found = added(last.outs)
        last.outs.clear()
        if self.sums is None:
            none = {
                name: -math.inf if name.startswith("max_") else 0.0
                for name in self._of_last(list(found))
            }
            self.sums = {
                name: torch.tensor(value, dtype=torch.float64).to(self.place)
                for name, value in none.items()
            }
        return found if last.is_last else self.sums

    def _add_up_shared(self) -> None:
        """Weights of both ends have a gradient from each: both ranks get the sum, and so take the same step."""
        peer = self.ranks - 1 - self.rank
        for name in self.shared:
            parameter = self.named[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad).contiguous()
            theirs = torch.empty_like(mine)
            ops = [dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer)]
            ops.append(dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            local(parameter.grad).add_(theirs)
