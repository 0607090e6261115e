"""Measure for `drumline calibrate` how long a Llama block takes besides its matrix products.

The rest is norms, rotary positions, softmax, activations and residual additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drumline.hardware.cluster import CostLine, Product, line_through, nearest_product

# (tokens, width of the hidden states) of the blocks that are timed. In the smallest, products take
# next to no time, so its seconds are those in which the host starts kernels.
BLOCKS = {
    "cpu": ((8, 64), (256, 256), (512, 576), (1024, 1024)),
    "cuda": ((8, 64), (2048, 2048), (8192, 4096)),
}
HEAD_DIM = 64
# Inner width of the feed-forward part, as a multiple of the width of the hidden states.
MLP_RATIO = 3
# Entries of a block's matrices, as a multiple of width²: attention has 4 matrices of width²
# entries, and the feed-forward part 3 of MLP_RATIO × width².
MATRICES = 4 + 3 * MLP_RATIO
# The fewest seconds of a point. It is a difference of measured seconds, which may be below 0.
LEAST_SECONDS = 1e-6


def besides_products(
    device: str,
    products: Mapping[str, Sequence[Product]],
    dtypes: Mapping[str, torch.dtype],
    measure: Callable[[Callable[[], Any]], float],
) -> dict[str, tuple[CostLine, CostLine]]:
    """Return precision → (forward, backward): the cost of a block besides its matrix products.

    A cost is a latency in seconds and a bandwidth, in bytes of the block's hidden states per
    second.

    Args:
        device: cpu or cuda.
        products: Precision → measured matrix products.
        dtypes: Precision → dtype, for the precisions to measure.
        measure: Returns the seconds of a call.
    """
    lines = {}
    for precision, dtype in dtypes.items():
        if precision == "fp16" and device == "cpu":
            continue
        # Bytes as if all hidden states were in this precision. Under autocast some operators of the
        # block take them in fp32.
        entry_bytes = 2
        if precision == "fp32":
            entry_bytes = 4
        forward_points = []
        backward_points = []
        for tokens, width in BLOCKS[device]:
            forward, both = _time_block(device, precision, dtype, (tokens, width), measure)
            # Attention is causal: it computes half of all pairs of tokens.
            flop = 2.0 * tokens * (MATRICES * width * width + tokens * width)
            product = nearest_product(products[precision], tokens, width)
            product_seconds = flop / product.rate
            bytes_ = tokens * width * entry_bytes
            forward_rest = max(forward - product_seconds, LEAST_SECONDS)
            # Backward has two products for each of forward.
            backward_rest = max(both - forward - 2 * product_seconds, LEAST_SECONDS)
            forward_points.append((bytes_, forward_rest))
            backward_points.append((bytes_, backward_rest))
        lines[precision] = line_through(forward_points), line_through(backward_points)
    return lines


def _time_block(
    device: str,
    precision: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    measure: Callable[[Callable[[], Any]], float],
) -> tuple[float, float]:
    """Return the seconds of a block's forward, and of its forward and backward together.

    Args:
        device: cpu or cuda.
        precision: A key of DTYPES in calibrate.py; under fp32 there is no autocast.
        dtype: The dtype of autocast.
        shape: (tokens, width) of the hidden states.
        measure: Returns the seconds of a call.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, width = shape
    heads = max(1, width // HEAD_DIM)
    config = LlamaConfig(
        num_hidden_layers=1,
        num_key_value_heads=heads,
        hidden_size=width,
        intermediate_size=MLP_RATIO * width,
        num_attention_heads=heads,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).model.to(device)
    block = model.layers[0]
    hidden = torch.randn(1, tokens, width, device=device, requires_grad=True)
    with torch.autocast(device, dtype, enabled=precision != "fp32"):
        positions = torch.arange(tokens, device=device)[None]
        angles = model.rotary_emb(hidden, positions)

        def forward() -> Any:
            output = block(hidden, position_embeddings=angles)
            if isinstance(output, tuple):
                output = output[0]
            return output.sum()

        def forward_and_backward() -> None:
            forward().backward()

        return measure(forward), measure(forward_and_backward)
