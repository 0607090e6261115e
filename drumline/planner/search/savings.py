"""Savings for micro-batches of many tokens, which the search tries where checkpointing is not enough. Pure.

They change no result of a run. Each takes time: a chunked feed-forward part is computed again in
backward, and offloaded activations are copied to the host and back.
"""

from __future__ import annotations

from typing import Any

from drumline.config.config import MemoryConfig

# Tokens of a chunk of the feed-forward part. Matrix products of so many rows fill a GPU.
MLP_CHUNK = 8192


def savings_to_try(options: MemoryConfig, device: str) -> list[dict[str, Any]]:
    """Return keys of the section `memory` that save memory with full checkpointing, with their values.

    The first entry has all savings, and saves most. Those that the config sets are the user's choice.
    The list is empty without a GPU, and with a budget, which chooses among kinds of checkpointing alone.
    """
    if device != "cuda" or options.budget_gb is not None:
        return []
    is_set = options.model_fields_set
    savings: dict[str, Any] = {}
    if "mlp_chunk" not in is_set:
        savings["mlp_chunk"] = MLP_CHUNK
    if "activation_offload" not in is_set:
        savings["activation_offload"] = True
    if not savings:
        return []
    if len(savings) == 1:
        return [savings]
    return [savings, *({key: value} for key, value in savings.items())]
