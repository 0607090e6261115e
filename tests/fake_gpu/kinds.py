"""Kinds of kernels: what a regression is to be seen in, where single names are too many to commit."""

from __future__ import annotations

import re

# The first pattern that a kernel's name has decides its kind.
KINDS = {
    "copy": r"^copy |^memset$",
    "communication": r"^nccl",
    "product": r"^cublas|gemm|gemv",
    "attention": r"fmha|flash_|attention",
    "optimizer": r"FusedAdam|FusedSgd|FusedOptimizer",
    "several tensors": r"multi_tensor_apply|lpnorm",
    "softmax": r"[sS]oft[mM]ax|nll_loss",
    "normalisation": r"layer_norm|LayerNorm|rms_norm|RMSNorm",
    "reduction": r"reduce_kernel|Reduce",
    "indexing": r"index|gather|scatter|embedding|nonzero|masked_select|sort|Sort|cub::",
    "concatenation": r"CatArray|chunk_cat|split_with_sizes",
    "elementwise": r"elementwise|triu_tril|dropout",
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name: the word under which it is committed."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel):
            return kind
    return "other"
