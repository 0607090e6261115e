"""What a block of a Llama takes besides its matrix products, measured for `drumline calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drumline.hardware.cluster import Measured, Product, line_through, nearest

# (tokens, width) of blocks of Llama that are timed: the least is all host.
BLOCKS = {
    "cpu": ((8, 64), (256, 256), (512, 576), (1024, 1024)),
    "cuda": ((8, 64), (2048, 2048), (8192, 4096)),
}


def besides_products(
    device: str,
    products: Mapping[str, Sequence[Product]],
    dtypes: Mapping[str, torch.dtype],
    timed: Callable[[Callable[[], Any]], float],
) -> dict[str, tuple[Measured, Measured]]:
    """Lines of what a Llama's block takes besides its products, forward and backward, by the bytes of its hidden states. The least block
    has next to no products: its seconds are those of the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = {}
    for precision, dtype in dtypes.items():
        if precision == "fp16" and device == "cpu":
            continue
        points: tuple[list[tuple[float, float]], ...] = [], []
        for rows, width in BLOCKS[device]:
            sizes: dict[str, Any] = {
                "hidden_size": width,
                "intermediate_size": 3 * width,
                "num_attention_heads": max(1, width // 64),
                "vocab_size": 64,
            }
            model = LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=1, num_key_value_heads=sizes["num_attention_heads"], **sizes
                )
            ).model
            block, rotary = model.to(device).layers[0], model.rotary_emb
            hidden = torch.randn(1, rows, width, device=device, requires_grad=True)
            with torch.autocast(device, dtype, enabled=precision != "fp32"):
                angles = rotary(hidden, torch.arange(rows, device=device)[None])

                def forward(block: Any = block, hidden: Any = hidden, angles: Any = angles) -> Any:
                    given = block(hidden, position_embeddings=angles)
                    return (given[0] if isinstance(given, tuple) else given).sum()

                ahead = timed(forward)
                both = timed(lambda: forward().backward())
            # Of attention half of all pairs.
            flop = 2.0 * rows * (13 * width * width + rows * width)
            spent = flop / nearest(products[precision], rows, width).rate
            for line, seconds in zip(
                points, (ahead - spent, both - ahead - 2 * spent), strict=True
            ):
                line.append((rows * width * (4 if precision == "fp32" else 2), max(seconds, 1e-6)))
        found[precision] = line_through(points[0]), line_through(points[1])
    return found
