"""What cannot be combined: one table, each row with its reason and the nearest thing that works. Read before any process starts."""

from __future__ import annotations

from drumline.core import strategies as s
from drumline.core.batch import nearest
from drumline.core.communication import compression
from drumline.core.facts import TP_STYLES
from drumline.core.rule import Case, Rule, cp_method, offloads
from drumline.core.rules_models import MODEL_RULES
from drumline.errors import PlanError

# Strategies whose ranks take each forward together, on whole samples of their own.
_IN_STEP = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    Rule(
        "compression × tp",
        lambda c: c.mesh.tp > 1 and compression(c.strategy) != "none",
        "gradients of cut matrices are averaged without DDP, whose buckets the compression works on",
        "use compression=none",
        "strategy.compression",
    ),
    Rule(
        "compression × pp",
        lambda c: c.mesh.pp > 1 and compression(c.strategy) != "none",
        "gradients of a pipeline's stages are averaged without DDP, whose buckets the compression works on",
        "use compression=none",
        "strategy.compression",
    ),
    Rule(
        "powersgd, topk × fp16",
        lambda c: c.precision == "fp16" and compression(c.strategy) in s.WITH_MEMORY,
        "what they keep for the next step would be in units of a loss scale that changes",
        "use precision=bf16, or compression=int8",
        "strategy.compression",
    ),
    Rule(
        "selective checkpointing × zero3",
        lambda c: c.config.memory.activation_checkpointing == "selective" and c.strategy.kind == "zero3",
        "torch's selective checkpointing wants the same operations again, and DeepSpeed gathers weights within a block otherwise then",
        "use memory.activation_checkpointing=full, or strategy=fsdp2",
        "memory.activation_checkpointing",
    ),
    Rule(
        "SyncBatchNorm × a strategy that is not data parallel",
        lambda c: c.config.model.sync_batchnorm and not (c.strategy.kind in _IN_STEP and c.mesh.tp * c.mesh.pp * c.mesh.cp == 1),
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
        "wrap × the model",
        lambda c: bool(_not_there(c)),
        lambda c: f"the model has no module of class {', '.join(_not_there(c))}",
        lambda c: f"there are {', '.join(sorted(c.facts.classes))}" if c.facts else "",
        "strategy.wrap",
    ),
    Rule(
        "fp16 weights or gradients × no loss scale",
        lambda c: isinstance(z := c.strategy, s.FSDP2Strategy) and c.precision != "fp16" and "fp16" in (z.param_dtype, z.reduce_dtype),
        "gradients in fp16 fall to zero without the loss scale of precision=fp16",
        "use precision=fp16, or bf16 for the two types",
    ),
    Rule(
        "ring × CPU",
        lambda c: c.mesh.cp > 1 and c.device == "cpu" and cp_method(c.strategy) == "ring",
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
        lambda c: c.mesh.cp > 1 and cp_method(c.strategy) == "ring" and c.config.packs,
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
        lambda c: c.mesh.cp > 1 and cp_method(c.strategy) == "ulysses" and _heads(c) % (c.mesh.cp * c.mesh.tp) != 0,
        lambda c: f"{_heads(c)} attention heads do not divide by cp {c.mesh.cp}" + (f" × tp {c.mesh.tp}" if c.mesh.tp > 1 else ""),
        lambda c: (
            f"use cp={max(n for n in range(1, c.mesh.cp + 1) if _heads(c) % (n * c.mesh.tp) == 0 or n == 1)}, or cp_method=ring on GPUs"
        ),
    ),
    Rule(
        "weights of images in low precision",
        lambda c: c.config.images_alone and isinstance(z := c.strategy, s.FSDP2Strategy) and z.param_dtype in ("bf16", "fp16"),
        "pixels and the statistics of batch norms are fp32, and layers take one type",
        "leave strategy.param_dtype out: autocast computes in low precision, op by op",
        "strategy.param_dtype",
    ),
    Rule(
        "dp × compile",
        lambda c: c.strategy.kind == "dp" and c.config.compile.enabled,
        "nn.DataParallel copies modules at each step, and a compiled block goes on with the weights it was compiled for",
        "use strategy=ddp, or compile.enabled=false",
        where="compile.enabled",
    ),
    Rule(
        "zero_bubble × fsdp2",
        lambda c: _zero_bubble(c) and isinstance(c.strategy, s.FSDP2Strategy),
        "the split backward does not see through FSDP2's hooks: measured, weights of later stages get no gradient and nothing is said",
        "use schedule: interleaved",
    ),
    Rule(
        "selective checkpointing × zero_bubble",
        lambda c: c.config.memory.activation_checkpointing == "selective" and _zero_bubble(c),
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
    Rule(
        "zero3 × compile",
        lambda c: isinstance(c.strategy, s.Zero3Strategy) and c.config.compile.enabled,
        "its hooks gather weights between the calls of layers, which torch.compile cannot trace",
        "use strategy=zero2 or fsdp2",
        "compile.enabled",
    ),
    Rule(
        "zero1, zero2 × NVMe offload",
        lambda c: c.strategy.kind in ("zero1", "zero2") and offloads(c.strategy)[0] == "nvme",
        "DeepSpeed has NVMe offload in ZeRO-3 only, and would quietly use host memory",
        "use strategy=zero3, or offload_optimizer=cpu",
        "strategy.offload_optimizer",
    ),
    Rule(
        "zero3 with its optimizer on the device × parameters on NVMe",
        lambda c: offloads(c.strategy) == ("none", "nvme"),
        "the step would bring all weights back to the device",
        "set offload_optimizer to cpu or nvme as well",
        "strategy.offload_parameters",
    ),
    Rule(
        "zero3 on NVMe × SGD",
        lambda c: c.strategy.kind == "zero3" and offloads(c.strategy)[0] == "nvme" and c.config.optimizer.kind == "sgd",
        "DeepSpeed swaps the moments of Adam only",
        "use optimizer.kind=adamw, or offload_optimizer=cpu",
        "strategy.offload_optimizer",
    ),
    Rule(
        "ZeRO × fp16 × CPU",
        lambda c: isinstance(c.strategy, s.ZeroStrategy) and c.device == "cpu" and c.precision == "fp16",
        "DeepSpeed takes fp16 on GPUs only",
        "use precision=bf16 or fp32, or strategy=fsdp2",
        "precision",
    ),
    Rule(
        "ZeRO++ quantisation × CPU",
        lambda c: (
            c.device == "cpu"
            and isinstance(z := c.strategy, s.Zero3Strategy)
            and (z.zeropp.quantized_weights or z.zeropp.quantized_gradients)
        ),
        "its kernels are for GPUs",
        "leave quantized_weights and quantized_gradients out",
        "strategy.zeropp",
    ),
    Rule(
        "ZeRO++ hierarchical_partition × number of processes",
        lambda c: isinstance(z := c.strategy, s.Zero3Strategy) and c.mesh.world_size % z.zeropp.hierarchical_partition != 0,
        "the ranks of a second copy must divide all ranks",
        "use the number of GPUs of one host",
        "strategy.zeropp.hierarchical_partition",
    ),
)


def _zero_bubble(c: Case) -> bool:
    strategy = c.strategy
    options = strategy.pipeline if isinstance(strategy, s.DDPStrategy | s.FSDP2Strategy) else strategy
    return c.mesh.pp > 1 and getattr(options, "schedule", None) == "zero_bubble"


def check_rules(case: Case) -> None:
    """Raises PlanError by the first rule that refuses."""
    for rule in RULES:
        if rule.refuses(case):
            reason, instead = (text if isinstance(text, str) else text(case) for text in (rule.reason, rule.instead))
            raise PlanError(f"{rule.name}: {reason}", where=rule.where, fix=instead)


def _not_there(case: Case) -> list[str]:
    """Classes that FSDP2 should wrap and the model does not have."""
    wrap = case.strategy.wrap if isinstance(case.strategy, s.FSDP2Strategy) else None
    return sorted(set(wrap or ()) - case.facts.classes) if case.facts else []


def _stretches(case: Case) -> int:
    """Into how many stretches a sequence is cut: one a rank, or two where a ring shares causal work out evenly."""
    return case.mesh.cp * (2 if case.mesh.cp > 1 and cp_method(case.strategy) == "ring" else 1)


def _heads(case: Case) -> int:
    return case.facts.heads if case.facts else 0
