"""Llama 3.2 1B, 3.1 8B and a tiny one by their configs, and a tokenizer with a vocabulary of any size: nothing is downloaded."""

from __future__ import annotations

import itertools
from typing import Any

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
WIDE = LLAMA | {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA | {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 4096, "max_position_embeddings": 4096,
    },
    "1b": WIDE | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True,
        "rope_parameters": ROPE | {"factor": 32.0},
    },
    "8b": WIDE | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False,
        "rope_parameters": ROPE | {"factor": 8.0},
    },
}  # fmt: skip


def byte_pairs(size: int) -> Any:
    """A byte-level BPE tokenizer with a vocabulary of exactly `size` ids: one special token, 256 bytes, then pairs and triples of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(left, right) for left in alphabet for right in alphabet]
    triples = ((left + right, third) for left, right in pairs for third in alphabet)
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - 1 - len(alphabet)))
    tokens = ["<|endoftext|>", *alphabet, *map("".join, merges)]
    core = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tokens[0], pad_token=tokens[0])
