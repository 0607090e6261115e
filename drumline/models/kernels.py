"""Fused kernels by Liger (`model.kernels: liger`, Hsu et al. 2024): RMS norms, rotary embeddings, gated feed-forward parts, and the
cross-entropy of a head. Experimental: none of it has run on a GPU here."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.rules import NO_LIGER


def apply_liger(model: nn.Module) -> None:
    """In place, under the same names. Raises PlanError for a kind of model that Liger does not know."""
    from liger_kernel.transformers import monkey_patch as liger

    kind, module = (
        getattr(getattr(model, "config", None), "model_type", ""),
        sys.modules[type(model).__module__],
    )
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NO_LIGER.error(f"Liger has no kernels for {kind or type(model).__name__}")
    rotary = "apply_rotary_pos_emb"
    before: Any = getattr(module, rotary, None)
    parts = {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "geglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    apply(
        model=model,
        **{
            part: wanted
            for part, wanted in parts.items()
            if part in inspect.signature(apply).parameters
        },
    )
    model._drumline_fused = True  # type: ignore[assignment]  # models.head asks
    fused: Any = getattr(module, rotary, None)
    if (
        fused is not before
    ):  # Liger sets it for all models of the process; trials of small copies run on the CPU
        setattr(
            module,
            rotary,
            lambda q, *args, **kwargs: (fused if q.is_cuda else before)(q, *args, **kwargs),
        )


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """`models.losses.linear_cross_entropy` by Liger's kernel, which chooses its chunks. Sums of the weight's gradient are fp32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    hidden, weight, bias = (
        None if part is None else part.to(dtype) for part in (hidden_ND, weight_VD, bias_V)
    )
    options: dict[str, Any] = {
        "reduction": "sum",
        "accum_dtype": torch.float32,
        "return_predicted_tokens": True,
    }
    with torch.autocast(kind, enabled=False):
        out = liger_fused_linear_cross_entropy(hidden, weight, targets_N, bias, **options)
    return out.loss.float(), out.predicted_tokens == targets_N
