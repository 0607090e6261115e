"""Questions to the planner for tests: well-known shapes written out as configs, devices as they are sold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from drumline.config.config import Adapter, Config, LoRAConfig, NoAdapter
from drumline.hardware.detect import Machine
from drumline.plan.facts import ModelFacts
from drumline.planner.cluster import cluster_of
from drumline.planner.search.answer import Question

# layers, hidden, heads, heads of keys and values, intermediate, vocabulary, tied
SHAPES = {
    "0.1b": (12, 768, 12, 12, 2048, 32_000, True),
    "1b": (16, 2048, 32, 8, 8192, 128_256, True),
    "3b": (28, 3072, 24, 8, 8192, 128_256, True),
    "8b": (32, 4096, 32, 8, 14_336, 128_256, False),
    "70b": (80, 8192, 64, 8, 28_672, 128_256, False),
    "9 heads": (4, 288, 9, 3, 768, 32_000, True),
}
LENGTH = 4096
HERE = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)


@cache
def facts(name: str, length: int = LENGTH, adapter: str = "none") -> ModelFacts:
    """By Hugging Face's own Llama class on the meta device. `adapter`: none, lora, or a word of `quantize`."""
    from transformers import LlamaConfig

    from drumline.models.load import facts

    layers, hidden, heads, kv, middle, words, tied = SHAPES[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=middle,
        vocab_size=words, tie_word_embeddings=tied, max_position_embeddings=131_072,
    )  # fmt: skip
    return facts(config, length, laid(adapter))


def laid(adapter: str) -> Adapter:
    return (
        NoAdapter()
        if adapter == "none"
        else LoRAConfig(quantize="none" if adapter == "lora" else adapter)
    )


def question(
    shape: str, cluster: str | dict[str, Any], adapter: str = "none", **sections: Any
) -> Question:
    """Rows of 4096 tokens; the strategy is auto where `sections` say none."""
    values = {
        "model": {"id": "m"},
        "data": {"train": [{"kind": "file", "path": "x"}], "max_length": LENGTH},
        "cluster": cluster,
        **sections,
    }
    config = Config.model_validate({**values, "adapter": laid(adapter).model_dump()})
    return Question(config, cluster_of(config.cluster, HERE, 1), facts(shape, LENGTH, adapter))


def asks(*words: Any, **sections: Any) -> Callable[[], Question]:
    """The `question`, for a table that is read before its test is chosen: to count a model's weights takes a second."""
    return partial(question, *words, **sections)
