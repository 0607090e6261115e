"""A well-known public model, and how the tables of `models.shapes` are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A well-known model.

    `id`: on the hub. `values`: those of its config, `model_type` among them. `algorithm`: the value
    of the key `algorithm` that trains it; None if `sft` does.
    """

    id: str
    values: dict[str, Any]
    algorithm: str | None = None


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def read_rows(text: str) -> dict[str, Known]:
    """Return short name → model, for the lines of a table.

    A line `[model_type key=value …]` has values for all lines below it. Each of these is
    `name id hidden intermediate layers heads kv_heads vocabulary positions [key=value …]`.
    """
    keys = [*SIZES, "vocab_size", "max_position_embeddings"]
    common: dict[str, Any] = {}
    rows: dict[str, Known] = {}
    for line in text.strip().splitlines():
        columns = []
        named: dict[str, Any] = {}
        for word in line.strip(" []").split():
            key, equals, value = word.partition("=")
            if equals:
                named[key] = json.loads(value)
            else:
                columns.append(word)
        if line.startswith("["):
            common = {"model_type": columns[0], **named}
        else:
            name, model_id, *numbers = columns
            sizes = dict(zip(keys, map(int, numbers), strict=True))
            rows[name] = Known(model_id, {**common, **sizes, **named})
    return rows


def with_sizes(sizes: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return values of a config: as many of SIZES as `sizes` has, and `more`."""
    return {**dict(zip(SIZES, sizes, strict=False)), **more}


def language_model_with_tower(
    model_type: str, text: dict[str, Any], vision: dict[str, Any], **both: Any
) -> dict[str, Any]:
    """Return values of the config of a language model with a vision tower.

    `text`, `vision`: of its parts. `both`: those that its language model has, too, such as
    `tie_word_embeddings`.
    """
    return {
        "model_type": model_type,
        **both,
        "text_config": text | both,
        "vision_config": vision,
    }
