"""What cannot be combined: one table, each row with its reason and the nearest thing that works. Read before any process starts."""

from __future__ import annotations

from drumline.core.batch import nearest
from drumline.core.facts import TP_STYLES
from drumline.core.rule import Case, Rule, plain, recomputes_some
from drumline.core.rules_models import MODEL_RULES

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    Rule(
        "SyncBatchNorm × a strategy that is not data parallel",
        lambda c: c.config.model.sync_batchnorm and not (c.strategy.in_step and plain(c.mesh)),
        "batch statistics are shared over ranks that hold whole samples and are in step at each forward: under DDP, FSDP2 and ZeRO",
        "use strategy=ddp",
        "model.sync_batchnorm",
    ),
    Rule(
        "SyncBatchNorm × groups that do not divide",
        lambda c: c.config.model.sync_batchnorm and bool(c.mesh.data_ranks % (c.config.model.sync_batchnorm_ranks or 1)),
        "the ranks of a group must divide the data ranks",
        "use a divisor of the data ranks, or null for all",
        "model.sync_batchnorm_ranks",
    ),
    Rule(
        "SyncBatchNorm × no batch norm",
        lambda c: c.config.model.sync_batchnorm and c.facts is not None and c.facts.batch_norms == 0,
        "this model has no batch norm",
        "take model.sync_batchnorm out",
        "model.sync_batchnorm",
    ),
    Rule(
        "ring × CPU",
        lambda c: c.mesh.cp > 1 and c.device == "cpu" and c.strategy.context_method() == "ring",
        "ring attention has no CPU kernel in torch",
        "use cp_method=ulysses",
    ),
    Rule(
        "tp × no plan",
        lambda c: c.mesh.tp > 1 and c.facts is not None and not c.facts.tp_styles,
        "this model's class carries no tensor-parallel plan in transformers",
        "use strategy=fsdp2",
    ),
    Rule(
        "tp × mixture of experts",
        lambda c: c.mesh.tp > 1 and c.facts is not None and not c.facts.tp_styles <= TP_STYLES,
        "this model's tensor-parallel plan has styles for experts, which are not built",
        "use strategy=fsdp2",
    ),
    Rule(
        "tp × heads",
        lambda c: c.facts is not None and c.facts.tp_cuts_heads and bool(c.facts.heads % c.mesh.tp or c.facts.kv_heads % c.mesh.tp),
        "the attention heads, and those of keys and values, must divide by tp",
        "choose a tp that divides both numbers",
    ),
    Rule(
        "tp × small vocabulary",
        lambda c: c.mesh.tp > 1 and c.facts is not None and -(-c.facts.vocab_size // c.mesh.tp) * (c.mesh.tp - 1) >= c.facts.vocab_size,
        "some rank would hold no row of the vocabulary",
        "use a smaller tp",
    ),
    Rule(
        "ring × packing",
        lambda c: c.mesh.cp > 1 and c.strategy.context_method() == "ring" and c.config.packs,
        "torch's ring attention takes no mask, and documents of a pack are kept apart by one",
        "use ulysses, or data.packing=false",
    ),
    Rule(
        "cp × pp",
        lambda c: c.mesh.cp > 1 and c.mesh.pp > 1,
        "the stages of a pipeline are handed whole sequences",
        "use cp with ddp or fsdp2, or pp without cp",
    ),
    Rule(
        "cp × attention",
        lambda c: c.mesh.cp > 1 and c.config.model.attention not in ("auto", "sdpa"),
        lambda c: f"parts of sequences are exchanged around sdpa, not around {c.config.model.attention}",
        "use model.attention=auto",
        where="model.attention",
    ),
    Rule(
        "cp × max_length",
        lambda c: c.config.data.max_length % _stretches(c) != 0,
        lambda c: f"sequences of {c.config.data.max_length} tokens do not divide into {_stretches(c)} parts",
        lambda c: f"nearest: {nearest(c.config.data.max_length, _stretches(c))}",
        where="data.max_length",
    ),
    Rule(
        "cp × heads",
        lambda c: c.mesh.cp > 1 and c.strategy.context_method() == "ulysses" and _heads(c) % (c.mesh.cp * c.mesh.tp) != 0,
        lambda c: f"{_heads(c)} attention heads do not divide by cp {c.mesh.cp}" + (f" × tp {c.mesh.tp}" if c.mesh.tp > 1 else ""),
        lambda c: (
            f"use cp={max(n for n in range(1, c.mesh.cp + 1) if _heads(c) % (n * c.mesh.tp) == 0 or n == 1)}, or cp_method=ring on GPUs"
        ),
    ),
    Rule(
        "selective checkpointing × zero_bubble",
        lambda c: recomputes_some(c) and _zero_bubble(c),
        "the split backward goes through a block twice, and what was kept of it is given out once",
        "use schedule: interleaved, or activation_checkpointing=full",
        "memory.activation_checkpointing",
    ),
    Rule(
        "zero_bubble × compile",
        lambda c: _zero_bubble(c) and c.config.compile.enabled,
        "a compiled block has one backward, which does not split into that of its inputs and that of its weights",
        "use schedule: interleaved",
    ),
)


def _zero_bubble(c: Case) -> bool:
    return c.mesh.pp > 1 and c.strategy.pipeline_schedule()[0] == "zero_bubble"


def check_rules(case: Case) -> None:
    """Raises PlanError by the first rule that refuses: those for all strategies, then the strategy's own."""
    for rule in (*RULES, *case.strategy.rules):
        rule.check(case)


def _stretches(case: Case) -> int:
    """Into how many stretches a sequence is cut: one a rank, or two where a ring shares causal work out evenly."""
    return case.mesh.cp * (2 if case.mesh.cp > 1 and case.strategy.context_method() == "ring" else 1)


def _heads(case: Case) -> int:
    return case.facts.heads if case.facts else 0
