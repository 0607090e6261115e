"""Bytes that a rank sends in one optimizer step, by the ring algorithm's shares. Pure; `dist.traffic` counts the same where it runs."""

from __future__ import annotations

from drumline.config import strategies as s
from drumline.config.model import Head
from drumline.plan.communication import averages, compresses
from drumline.plan.facts import ModelFacts
from drumline.plan.forecast.sent import Sent, held, tp_ranks
from drumline.plan.forecast.sent_data import averaged, batch_norms, ddp, fsdp2, norm, together
from drumline.plan.forecast.sent_model import context, pipeline, tensor
from drumline.plan.forecast.sent_zero import zero
from drumline.plan.forecast.states import shards_of
from drumline.plan.layout import Layout


def flows(layout: Layout, facts: ModelFacts, step: int | None = None) -> Sent:
    """Mean over ranks of what forward, backward, gradient norm and step of every model that learns send; as `train.loop` counts it, so
    rollouts, frozen roles, sums of losses and checkpoints are left out. `step`: of the step after so many; None: the mean of a long run,
    which differs for local SGD and DiLoCo alone.

    Exact for weights, gradients, norms, stages and sequences. Where activations travel (tp), rows are taken to be `layout.positions` wide:
    without packing a batch is as wide as its longest row, so more is sent. All real tokens are taken to carry a loss: of the cross-entropy
    over a cut vocabulary 20 bytes are sent for each that does, against 28 × width in each block. See also `sent_data.ddp`, `sent_zero`.
    """
    sent = Sent()
    _of_model(sent, layout, facts, layout.config.head, step)
    for name, role in layout.roles.items():
        if role.learns and name in layout.role_facts:
            _of_model(sent, layout, layout.role_facts[name], role.head, step)
    return sent


def _of_model(sent: Sent, layout: Layout, facts: ModelFacts, head: Head, step: int | None) -> None:
    mesh, strategy = layout.mesh, layout.strategy
    sent.part = 1.0
    batch_norms(sent, layout, facts)
    if layout.engine == "deepspeed":
        zero(sent, layout, facts)
        return
    if isinstance(strategy, s.LocalSGDStrategy | s.DiLoCoStrategy):
        together(sent, layout, facts, 1 / strategy.period if step is None else float(averages(strategy, step)))
        return
    if mesh.world_size == 1:
        return
    wrap = tuple(strategy.wrap) if isinstance(strategy, s.FSDP2Strategy) and strategy.wrap is not None else None
    for tp_rank, part in tp_ranks(facts, mesh.tp):
        has = held(facts, mesh.pp > 1, mesh.tp, tp_rank, shards_of(layout), wrap)
        sent.part = part / mesh.pp  # all stages together, dealt to their ranks
        if layout.data_parallel == "fsdp2":
            fsdp2(sent, layout, facts, has)
        elif mesh.tp * mesh.pp > 1:
            averaged(sent, layout, has)
        else:
            ddp(sent, layout, facts, _compresses(layout, step))
        pipeline(sent, layout, facts, has)
        sent.part = part
        norm(sent, layout, has)
    sent.part = 1 / mesh.pp
    tensor(sent, layout, facts, head)
    context(sent, layout, facts, head)


def _compresses(layout: Layout, step: int | None) -> bool:
    strategy = layout.strategy
    return isinstance(strategy, s.DDPStrategy) and compresses(strategy.compression, 10**9 if step is None else step)
