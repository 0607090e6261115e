"""Out-of-memory fallbacks: plans that take the same steps with less memory, for a run that ran out of it. Pure.

All of them keep the global batch, the ranks and the numbers (up to rounding): micro-batches made smaller with more accumulation, activation
checkpointing, chunks of the cross-entropy, states sharded over the ranks there are, states kept on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from drumline.core.algorithm import AlgorithmSpec, ChunkedSpec
from drumline.core.config import BatchConfig, Config
from drumline.core.explain import flow
from drumline.core.plan import Plan
from drumline.errors import PlanError
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.search import evaluate

HEAVIER = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}


def find_fallbacks(question: Question, plan: Plan, limit: int, below: int, baseline: Config) -> tuple[list[Candidate], Candidate | None]:
    """(candidates that fit into `limit` bytes of a device and peak below `below`, the nearest to `plan` first; the leanest of all, which
    may not fit). Near: few changes, then few seconds. The name of each is its difference from `baseline`, the user's config."""
    found: list[tuple[int, Candidate]] = []
    for changes, config in _variants(plan, question.facts.batch_norms > 0):
        try:
            candidate = evaluate(question, config, changed(baseline, config))
        except PlanError:
            continue
        found.append((changes, candidate))
    leanest = min((c for _, c in found), key=lambda c: c.estimate.memory.reserved, default=None)
    fitting = [(n, c) for n, c in found if c.estimate.memory.peak < below and c.estimate.memory.reserved <= limit and c.estimate.host_fits]
    fitting.sort(key=lambda f: (f[0], f[1].estimate.seconds.total, -f[1].estimate.memory.peak))
    return [candidate for _, candidate in fitting], leanest


def changed(old: Config, new: Config) -> str:
    """The difference, as keys of the YAML: `batch: {micro_batch: 1, accumulation: 8}, memory: {activation_checkpointing: full}`."""
    sections = []
    for section in ("strategy", "batch", "eval", "memory", "algorithm"):
        before, after = getattr(old, section).model_dump(mode="json"), getattr(new, section).model_dump(mode="json")
        usual = getattr(new, section).__class__.model_fields
        keys = {
            k: v
            for k, v in after.items()
            if before.get(k) != v and (k in before or k == "kind" or v != usual[k].get_default(call_default_factory=True))
        }
        if keys:
            kind = {"kind": after["kind"]} if "kind" in after and section == "strategy" else {}
            sections.append(f"{section}: {flow({**kind, **keys})}")
    return ", ".join(sections)


def _variants(plan: Plan, by_micro_batch: bool) -> Iterator[tuple[int, Config]]:
    """(number of changes, config). `by_micro_batch`: the results depend on the micro-batch (batch norm), so it stays."""
    config, batch = plan.config, plan.batch
    per_rank = batch.micro_batch * batch.accumulation
    micros = [m for m in range(batch.micro_batch, 0, -1) if per_rank % m == 0 and (m == batch.micro_batch or not by_micro_batch)]
    algorithm = config.algorithm
    chunks: list[AlgorithmSpec] = [algorithm]
    if isinstance(algorithm, ChunkedSpec) and not algorithm.loss_chunk and algorithm.rollout is None:
        usual = type(algorithm).model_fields["loss_chunk"].default
        chunks.append(algorithm.model_copy(update={"loss_chunk": usual}))
    spreads = [(0, config.strategy), *config.strategy.fallbacks(plan.mesh.data_ranks * plan.mesh.cp > 1, plan.device)]
    for micro, kept, loss, (cost, strategy) in product(micros, HEAVIER[plan.activation_checkpointing], chunks, spreads):
        fewer = micro < batch.micro_batch
        changes = fewer + (kept != plan.activation_checkpointing) + (loss is not algorithm) + cost
        if not changes:
            continue
        smaller = BatchConfig(global_samples=batch.global_samples, micro_batch=micro, accumulation=per_rank // micro)
        held_out = config.eval.micro_batch
        update = {
            "batch": smaller,
            "memory": config.memory.model_copy(update={"activation_checkpointing": kept}),
            "algorithm": loss,
            "strategy": strategy,
            "eval": config.eval.model_copy(update={"micro_batch": min(held_out, micro)}) if held_out and fewer else config.eval,
        }
        yield changes, config.model_copy(update=update)
