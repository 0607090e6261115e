"""Rules of sequence parallelism, which cuts the residual stream by tokens between tp's layers.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.config import Config
from drumline.config.refusal import Refusal
from drumline.plan.facts import ModelFacts

# Types of models (model_type) whose losses and gradients under sequence parallelism were compared with
# those of one process, in tests/distributed: test_tensor_parallel.py, and test_classify.py for BERT.
# For all others it is off unless the user sets it.
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


def reason_against_sequence_parallelism(config: Config, facts: ModelFacts | None) -> str:
    """Return why sequence parallelism is off by default for a model; empty if it is on.

    `facts`: of the model; None if it is not known, or is a module of the user's own.
    """
    if facts is None:
        return "what the model computes between its layers is not known"
    refusal = next(sequence_parallel_refusals(config, facts), None)
    if refusal is not None:
        return refusal.reason
    strategy = config.strategy
    if getattr(strategy, "cp", 1) > 1 and strategy.context_method() == "ring":
        return "it has not run beside ring attention"
    if facts.name not in PROVEN:
        return f"it is not proven for models of type {facts.name}"
    return ""


def sequence_parallel_refusals(config: Config, facts: ModelFacts) -> Iterator[Refusal]:
    """Yield why sequence parallelism cannot be used with a model."""
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
        reason = (
            "tp ranks draw the same random numbers, so their parts would drop the same positions"
        )
        yield Refusal(
            "sequence_parallel × dropout over the stream",
            reason,
            "set the model's dropout to 0, or use tp without it",
            where,
        )
    if config.adapter.kind == "lora" and facts.tp_styles & {"rowwise_split_input", "rowwise_rep"}:
        reason = "the adapter of a layer with whole inputs would return all tokens, and the layer returns a part"
        yield Refusal("sequence_parallel × LoRA × layers with whole inputs", reason, instead, where)
