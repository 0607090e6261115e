"""Sequence parallelism beside tensor parallelism: whether it is on, and why a stream cannot be cut.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.config import Config
from drumline.config.refusal import Refusal
from drumline.plan.facts import ModelFacts

# Types of models whose losses and gradients with a cut stream were compared with those of one
# process: in tests/distributed/test_tensor_parallel.py, BERT's in test_classify.py. The stream of
# another type is cut only if the user asks for it.
PROVEN = frozenset(
    (
        "apertus", "arcee", "bert", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5",
        "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "glm",
        "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "helium", "hy_v3", "hyperclovax",
        "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama", "mellum", "minimax_m2",
        "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
        "starcoder2", "vaultgemma",
    )
)  # fmt: skip


def reason_against_stream(config: Config, facts: ModelFacts | None) -> str:
    """Return why sequence parallelism is off if the user has left it open; empty if it is on.

    `facts`: of the model; None: it is not known, or a module of the user's own.
    """
    if facts is None:
        return "what the model computes between its layers is not known"
    refusal = next(whole_stream(config, facts), None)
    if refusal is not None:
        return refusal.reason
    strategy = config.strategy
    if getattr(strategy, "cp", 1) > 1 and strategy.context_method() == "ring":
        return "it has not run beside ring attention"
    if facts.name not in PROVEN:
        return f"it is not proven for models of type {facts.name}"
    return ""


def whole_stream(config: Config, facts: ModelFacts) -> Iterator[Refusal]:
    """Yield refusals of a residual stream that is cut over tp ranks."""
    where = "strategy.sequence_parallel"
    instead = "use tp without it"
    reason = facts.whole_stream
    if facts.vision_language:
        reason = "images are added to the stream between blocks"
    if reason:
        yield Refusal("sequence_parallel × the model", reason, instead, where)
    if facts.trains_router:
        reason = "the loss needs all tokens of a document on one rank"
        yield Refusal(
            "sequence_parallel × the router loss of a mixture of experts", reason, instead, where
        )
    if facts.drops_stream:
        reason = "tp ranks draw alike, so their parts of a sequence would drop the same places"
        yield Refusal(
            "sequence_parallel × dropout over the stream",
            reason,
            "set the model's dropout to 0, or use tp without it",
            where,
        )
    if config.adapter.kind == "lora" and facts.tp_styles & {"rowwise_split_input", "rowwise_rep"}:
        reason = "the adapter of a layer whose inputs are whole would give all tokens, and the layer gives a part"
        yield Refusal("sequence_parallel × LoRA × layers with whole inputs", reason, instead, where)
