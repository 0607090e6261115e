"""The engine of a pipeline of a Hugging Face model. Torch's schedules say which stage runs when.

Each rank holds some stages. All ranks of a pipeline are given the same micro-batches, so only
hidden states and their gradients travel between stages. The forward of the last stage ends in the
objective: the schedule differentiates its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from drumline.dist.mesh import device_mesh
from drumline.engine.data_parallel import DataParallelWrapper
from drumline.engine.engine import (
    DeviceSums,
    Extract,
    IsWanted,
    Sums,
    extracting_objective,
    is_any,
    neutral_sum,
    sum_on_device,
    sum_to_host,
)
from drumline.engine.experts import cast_experts_under_autocast
from drumline.engine.native import (
    ForwardEngine,
    NativeEngine,
    full_tensor,
    wrap_for_data_parallelism,
)
from drumline.engine.norms import local
from drumline.engine.stages import (
    SplitPoints,
    Stage,
    find_split_points,
    rank_part,
    weights_of_first_and_last_stage,
)
from drumline.engine.tensor_parallel import apply_tensor_and_expert_parallelism
from drumline.engine.transforms import (
    apply_compile,
    apply_memory,
    autocast_dtype,
    gather_dtype,
)
from drumline.models import adapters
from drumline.models.shards import Values, all_tensors, tied_names
from drumline.plan.plan import Plan

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "model_parallel": pipelining.ScheduleGPipe,
}
# Schedules that run several stages on each rank.
INTERLEAVED = ("interleaved", "zero_bubble")
# Fields of Outputs that an objective may differentiate.
DIFFERENTIABLE = ("hidden_BTD", "logits_BTV", "logits_BC")
META = torch.device("meta")
P = TypeVar("P", bound="ForwardPipeline")


def prepare(plan: Plan, model: nn.Module, values: Values, engine: type[P]) -> P:
    """Cut a model as planned, spread and fill this rank's stages, and return the engine over them.

    The model was laid out without weights, or is whole on the CPU. Collective.
    Raises PlanError for a model that cannot be cut.
    """
    assert plan.pipeline is not None and plan.pipeline.layers, "workers get plans of known models"
    mesh = device_mesh(plan.mesh, plan.device)
    layers = plan.pipeline.layers
    # Stages are dealt to the ranks in turn, as torch's interleaved schedules require.
    local_stages = range(mesh["pp"].get_local_rank(), len(layers), plan.mesh.pp)
    local_layers = [layers[index] for index in local_stages]
    split_points = find_split_points(model)
    shared = weights_of_first_and_last_stage(model, split_points)
    gathered_in = gather_dtype(plan)
    dtype = _stream_dtype(plan, gathered_in)
    model_part = rank_part(model, split_points, local_layers, dtype)
    if not next(model_part.parameters()).is_meta:
        model_part.to(values.device)
    if autocast_dtype(plan, casts_weights=gathered_in is not None) is not None:
        cast_experts_under_autocast(model_part)
    apply_tensor_and_expert_parallelism(plan, model_part, mesh)
    apply_memory(model_part, plan)
    apply_compile(model_part, plan.config.compile)
    stages = [
        StageWithObjective(model_part, split_points, bounds, dtype) for bounds in local_layers
    ]
    roots = [(stage, stage.model) for stage in stages]
    wrapper = wrap_for_data_parallelism(
        plan, mesh, model_part, roots, model_part, values, overlaps=False
    )
    device = torch.device(values.device)
    return engine(plan, model_part, wrapper, stages, split_points, mesh["pp"], device, shared)


def _stream_dtype(plan: Plan, gathered_in: torch.dtype | None) -> torch.dtype:
    """Return the type of the residual stream, in which hidden states travel.

    Autocast leaves it in fp32. Weights that are in low precision while they compute do not.

    `gathered_in`: the type in which FSDP2 gathers weights; None if it casts none.
    """
    if gathered_in is not None:
        return gathered_in
    if plan.is_pure_bf16:
        return torch.bfloat16
    return torch.float32


class StageWithObjective(Stage):
    """A stage as a schedule runs it. The last stage returns the loss, float32[1].

    Every schedule runs a stage's micro-batches in their order, so the stage takes the next one at
    each forward. (A schedule could only hand it the number of a micro-batch as a tensor, which FSDP2
    would copy to the device, and the host would wait to read.)
    """

    def __init__(self, *parts: Any) -> None:
        """Make a stage that runs nothing yet; `begin` sets what it runs on.

        `parts`: as of Stage.
        """
        super().__init__(*parts)
        self.micro_batches: Iterator[Any] = iter(())
        self.objective: Any = None
        self.scale: float | torch.Tensor | None = None
        self.autocast: Any = contextlib.nullcontext
        self.splits_backward = False
        # The sums of each micro-batch, on the last stage; whoever reads them clears them.
        self.outs: list[dict[str, torch.Tensor]] = []

    def begin(
        self, micro_batches: list[Any], objective: Any, scale: float | torch.Tensor | None
    ) -> None:
        """Set what the next forwards run on.

        `scale`: what the loss is multiplied by before backward; None without gradients.
        """
        self.micro_batches = iter(micro_batches)
        self.objective = objective
        self.scale = scale

    def forward(self, received: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states for the next stage, [B, T, D].

        The last stage returns the loss, [1].

        `received`: what the previous stage has sent. The first stage gets token ids from the
        schedule, and takes those of its batch.
        """
        batch = next(self.micro_batches)
        hidden_BTD = None if self.is_first else received
        with self.autocast():
            out = self.run(batch, hidden_BTD)
            if isinstance(out, torch.Tensor):
                return out
            if self.splits_backward and self.scale is not None:
                return self._loss_with_gradients(out, batch)
            return self._loss(out, batch)

    def _loss(self, out: Any, batch: Any) -> torch.Tensor:
        """Return the scaled loss of a micro-batch, [1], and keep its sums.

        `out`: Outputs of the model.
        """
        answer = self.objective(out, batch)
        self.outs.append({"loss": answer.loss_sum.detach(), **answer.sums})
        scale = 1.0 if self.scale is None else self.scale
        return (answer.loss_sum * scale).reshape(1)

    def _loss_with_gradients(self, out: Any, batch: Any) -> torch.Tensor:
        """Return the scaled loss, after running the objective's backward at once.

        For a schedule that goes through a stage's graph twice (zero bubble): the chunked
        cross-entropy makes its gradients in forward, and can hand them out only once.
        """
        values: dict[str, torch.Tensor] = {}
        for name in DIFFERENTIABLE:
            value = getattr(out, name)
            if value is not None:
                values[name] = value
        leaves: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            leaves[name] = value.detach().requires_grad_()
        loss = self._loss(replace(out, **leaves), batch)
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        gradients = [leaf.grad for leaf in leaves.values()]
        return _LossOfKnownGradients.apply(loss.detach(), gradients, *values.values())


class _LossOfKnownGradients(torch.autograd.Function):
    """A loss whose gradients by `values` are known already."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor | None], *values: torch.Tensor
    ) -> torch.Tensor:
        """Return `loss`.

        `gradients`: of the loss by each of `values`; None if it does not use it.
        """
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        """Return the known gradients by `values`, times the gradient of the loss."""
        grad_values: list[torch.Tensor | None] = []
        for gradient in ctx.saved_tensors:
            if gradient is None:
                grad_values.append(None)
            else:
                grad_values.append(gradient * grad_loss)
        return None, None, *grad_values


class _Form(NamedTuple):
    """A tensor of a rank, without its values. `aliases`: further names of a tied weight."""

    shape: torch.Size
    dtype: torch.dtype
    aliases: list[str]


class PartOfPipeline(ForwardEngine):
    """An engine over some stages of a model, which exchanges tensors with the ranks of the others.

    `rank`, `ranks`: this rank's number in the pipeline, and how many ranks it has. `group`: these
    ranks. `device`: this rank's device.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup
    device: torch.device

    def whole_weights(self, is_wanted: IsWanted = is_any) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine. Each rank of the pipeline in turn broadcasts the weights of its stages.

        Before that, all ranks exchange the names and shapes of their weights: each has to make a
        buffer for what it receives, and to run the same broadcasts in the same order.
        """
        self._prepare_evaluation_weights()
        local_tensors = all_tensors(self.model)
        tied = tied_names(self.model)
        local_forms: dict[str, _Form] = {}
        for name, tensor in local_tensors.items():
            if is_wanted(name):
                local_forms[name] = _Form(tensor.shape, tensor.dtype, tied.get(name, []))
        forms_by_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(forms_by_rank, local_forms, group=self.group)
        yielded: set[str] = set()
        for rank, forms in enumerate(forms_by_rank):
            for name, form in forms.items():
                if name in yielded:  # first and last stage both hold tied weights
                    continue
                local_tensor = None
                if rank == self.rank:
                    local_tensor = full_tensor(name, local_tensors[name], self.device)
                full = self._broadcast_from(rank, local_tensor, form.shape, form.dtype)
                for each in (name, *form.aliases):
                    yielded.add(each)
                    yield each, full

    def _broadcast_from(
        self, rank: int, local_tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor of one rank of the pipeline, on all of them. Collective.

        `local_tensor`: the tensor on that rank; None on the others.
        """
        if local_tensor is None:
            full = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            full = local_tensor.contiguous()
        dist.broadcast(full, group=self.group, group_src=rank)
        return full


class ForwardPipeline(PartOfPipeline):
    """A rank's stages without gradients.

    The last stage makes the outputs, and all ranks of the pipeline get them.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        wrapper: DataParallelWrapper,
        stages: list[StageWithObjective],
        split_points: SplitPoints,
        pp: DeviceMesh,
        device: torch.device,
        shared: list[str],
    ) -> None:
        """`device`: where stages compute. `shared`: names of the weights that the first and the
        last stage both hold (a tied head).
        """
        super().__init__(plan, model, wrapper)
        self.stages = stages
        self.split_points = split_points
        self.group = pp.get_group()
        self.rank = pp.get_local_rank()
        self.ranks = pp.size()
        self.dtype = stages[0].dtype
        self.device = device
        self.shared = shared
        for stage in stages:
            stage.autocast = self._autocast

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        """See Engine. Micro-batches go through all stages one after another, by forwards alone.

        A rank starts the next micro-batch while the hidden states of the one before are being sent.
        """
        batches = list(micro_batches)
        # With each send its tensor, which must live until it has left.
        sends: list[tuple[Any, torch.Tensor]] = []
        with self.evaluation_mode():
            for stage in self.stages:
                stage.begin(batches, objective, None)
            for batch in batches:
                for stage in self.stages:
                    received = None
                    if not stage.is_first:
                        received = self._receive_hidden(batch)
                    out = stage(received)
                    if not stage.is_last:
                        next_rank = (self.rank + 1) % self.ranks
                        work = dist.isend(out, group=self.group, group_dst=next_rank)
                        sends.append((work, out))
            for work, _ in sends:
                work.wait()
        last = self.stages[-1]
        local_sums: Sums | None = None
        if last.is_last:
            local_sums = sum_to_host(last.outs)
        sums: Sums = self._object_of_last_rank(local_sums)
        last.outs.clear()
        return sums

    def _receive_hidden(self, batch: Any) -> torch.Tensor:
        """Receive the hidden states of a micro-batch from the rank before, [B, T, D]."""
        hidden_BTD = torch.empty(
            *batch.input_ids_BT.shape,
            self.split_points.width,
            dtype=self.dtype,
            device=self.device,
        )
        rank_before = (self.rank - 1) % self.ranks
        dist.recv(hidden_BTD, group=self.group, group_src=rank_before)
        return hidden_BTD

    def infer(
        self, micro_batches: Iterable[Any], extract: Extract, adapter: bool = True
    ) -> list[torch.Tensor]:
        """See Engine. The last stage calls `extract`, and broadcasts the results to all ranks."""
        extracted: list[torch.Tensor] = []
        with contextlib.ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(adapters.switch_adapters(stage.model, adapter))
            self.evaluate(micro_batches, extracting_objective(extract, extracted))
        local_forms = [(tensor.shape, tensor.dtype) for tensor in extracted]
        forms = self._object_of_last_rank(local_forms)
        last_rank = self.ranks - 1
        results: list[torch.Tensor] = []
        for index, (shape, dtype) in enumerate(forms):
            local_tensor: torch.Tensor | None = None
            if self.rank == last_rank:
                local_tensor = extracted[index]
            results.append(self._broadcast_from(last_rank, local_tensor, shape, dtype))
        return results

    def _object_of_last_rank(self, local_object: Any) -> Any:
        """Return the `local_object` of the last stage's rank, on all ranks of the pipeline.

        Collective.
        """
        box = [local_object]
        dist.broadcast_object_list(box, group=self.group, group_src=self.ranks - 1)
        return box[0]

    def _set_training(self, mode: bool) -> None:
        super()._set_training(mode)
        # Stages are shallow copies of the model with the same blocks, and have flags of their own.
        for stage in self.stages:
            stage.train(mode)


class LeanStage(pipelining.PipelineStage):
    """A stage of torch's schedules whose buffers live only as long as they are needed.

    Before the first micro-batch, torch allocates the buffers that all micro-batches of a step
    receive into, forward and backward. Here a micro-batch gets its buffer when it is about to
    receive, and frees it after its backward. So the memory of 1F1B does not grow with accumulation.
    """

    def _setup_forward_recv_info(self, *given: Any) -> None:
        """Note what each micro-batch receives from the previous stage, without memory for it."""
        with self._allocates_nothing():
            super()._setup_forward_recv_info(*given)

    def _create_grad_recv_info(self, *given: Any) -> Any:
        """Return what each micro-batch receives from the next stage, without memory for it."""
        with self._allocates_nothing():
            return super()._create_grad_recv_info(*given)

    @contextlib.contextmanager
    def _allocates_nothing(self) -> Iterator[None]:
        """Within, buffers are made on the meta device."""
        device = self.device
        self.device = META
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's forward, with memory for what comes."""
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's backward, with memory for what comes."""
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a micro-batch's backward, and free what it has received.

        `full_backward` False: only the gradients by the inputs, those by the weights follow later
        (zero bubble) and still need the inputs.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), META)
        received = _move_buffers(self.args_recv_info[bwd_chunk_id], META)
        if full_backward:
            # The graph of a loss still holds them, and the schedule keeps that to the end of the
            # step.
            for buffer in received:
                buffer.untyped_storage().resize_(0)


def _move_buffers(infos: Iterable[Any], device: torch.device) -> list[torch.Tensor]:
    """Replace the receive buffers that are not on `device` by empty ones there; return the old ones.

    `infos`: torch's descriptions of what a micro-batch receives. Those without a buffer, such as
    token ids, which come from no other stage, are left as they are.
    """
    before = []
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.is_meta != (device.type == "meta"):
            before.append(buffer)
            info.buffer = torch.empty_like(buffer, device=device)
    return before


class PipelineEngine(ForwardPipeline, NativeEngine):
    """Trains a rank's stages.

    Methods of `NativeEngine` that it does not override act on the parameters that this rank holds.
    """

    def __init__(self, plan: Plan, *parts: Any) -> None:
        """`parts`: as of ForwardPipeline."""
        super().__init__(plan, *parts)
        assert plan.pipeline is not None
        # From here on `shared` has only the trainable ones, on the two ranks that hold them: their
        # gradients are summed after backward.
        if self.rank in (0, self.ranks - 1):
            self.shared = [name for name in self.shared if self.named[name].requires_grad]
        else:
            self.shared = []
        # In the norm only the first rank counts their gradients, since they would count twice.
        self.counted_elsewhere = frozenset()
        if self.rank != 0:
            self.counted_elsewhere = frozenset(self.shared)
        schedule = plan.pipeline.schedule
        # Micro-batches in one run of the schedule. With `model_parallel` one at a time goes through
        # all stages and back, so that one rank computes and the others wait.
        self.at_once = plan.batch.accumulation
        if schedule == "model_parallel":
            self.at_once = 1
        for stage in self.stages:
            stage.splits_backward = schedule == "zero_bubble"
        self.schedule = self._build_schedule(plan, schedule, len(plan.pipeline.layers))
        # The sums that stages before the last one return, which change no total; None until their
        # names are known.
        self.neutral_sums: DeviceSums | None = None
        self._set_training(True)

    def _build_schedule(self, plan: Plan, name: str, stage_count: int) -> Any:
        """Return torch's schedule over this rank's stages.

        All shapes are given, so it needs no trial run, and no messages to agree on them.
        """
        B = plan.batch.micro_batch * plan.batch.rows_per_sample
        T = plan.config.data.max_length
        D = self.split_points.width
        ids_BT = torch.empty(B, T, dtype=torch.int64, device=META)
        hidden_BTD = torch.empty(B, T, D, dtype=self.dtype, device=META, requires_grad=True)
        loss = torch.empty(1, device=META, requires_grad=True)
        stages = []
        for turn, module in enumerate(self.stages):
            stage = LeanStage(
                module,
                self.rank + turn * self.ranks,
                stage_count,
                self.device,
                input_args=ids_BT if module.is_first else hidden_BTD,
                output_args=loss if module.is_last else hidden_BTD,
                group=self.group,
            )
            stages.append(stage)
        stages_of_schedule: Any = stages[0]
        if name in INTERLEAVED:
            stages_of_schedule = stages
        return SCHEDULES[name](
            stages_of_schedule,
            self.at_once,
            loss_fn=_loss_of_output,
            # The loss is a sum and scaled already.
            scale_grads=False,
        )

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        """See Engine.

        The schedule runs forwards and backwards of `at_once` micro-batches at a time.
        """
        # As in NativeEngine.backward: gradients are averaged over ranks, and a sum is wanted.
        scale = self.loss_scale.scale(self.averaged_over / denominator)
        self._use_averaged_weights(False)
        with self.wrapper.micro_batch(last=True):
            for start in range(0, len(micro_batches), self.at_once):
                batches = micro_batches[start : start + self.at_once]
                for stage in self.stages:
                    stage.begin(batches, objective, scale)
                inputs = []
                if self.rank == 0:
                    inputs.append(torch.cat([batch.input_ids_BT for batch in batches]))
                # A schedule requires a target for each micro-batch; the objective has its own.
                unused = torch.arange(len(batches))
                self.schedule.step(*inputs, target=unused)
        self._sum_shared_gradients()
        return self._sums_of_last_stage()

    def _sums_of_last_stage(self) -> DeviceSums:
        """Return the sums over all micro-batches, on the rank of the last stage.

        Elsewhere return neutral sums (0, or −∞ for a key `max_…`), which change no total.
        """
        last = self.stages[-1]
        local_sums = sum_on_device(last.outs)
        last.outs.clear()
        if self.neutral_sums is None:
            self.neutral_sums = {}
            # Once in a run: the names of the sums do not change.
            for name in self._object_of_last_rank(list(local_sums)):
                value = torch.tensor(neutral_sum(name), dtype=torch.float64)
                self.neutral_sums[name] = value.to(self.device)
        if last.is_last:
            return local_sums
        return self.neutral_sums

    def _sum_shared_gradients(self) -> None:
        """Sum the gradients of the weights that the first and the last stage both hold.

        So both take the same step. The two ranks exchange messages, so that the other ranks of the
        pipeline need not take part.
        """
        peer = self.ranks - 1 - self.rank
        for name in self.shared:
            parameter = self.named[name]
            if parameter.grad is None:
                # The peer waits for a gradient nevertheless.
                parameter.grad = torch.zeros_like(parameter)
            sent = local(parameter.grad).contiguous()
            received = torch.empty_like(sent)
            send = dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            local(parameter.grad).add_(received)


def _loss_of_output(out: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a micro-batch, which is all that the last stage returns."""
    return out.sum()
