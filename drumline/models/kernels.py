"""Fused kernels by Liger (`model.kernels: liger`, Hsu et al. 2024).

They compute RMS norms, rotary embeddings, gated feed-forward parts, and the cross-entropy of a
head. Experimental: none of it has run on a GPU here.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from drumline.models.containers import product_dtype
from drumline.plan.rules import NO_LIGER

# Arguments of Liger's functions. The loss is not among them: `linear_cross_entropy` below calls its
# kernel.
PARTS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}
# The function for rotary embeddings in a model's module.
ROTARY = "apply_rotary_pos_emb"


def apply_liger(model: nn.Module) -> None:
    """Replace parts of a model by Liger's kernels, in place and under the same names.

    Raises PlanError for a type of model that Liger does not know.
    """
    from liger_kernel.transformers import monkey_patch as liger

    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        name = model_type or type(model).__name__
        raise NO_LIGER.error(f"Liger has no kernels for {name}")
    module = sys.modules[type(model).__module__]
    before: Any = getattr(module, ROTARY, None)
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    # Each model's function takes the parts that the model has.
    known = inspect.signature(apply).parameters
    parts = {part: enabled for part, enabled in PARTS.items() if part in known}
    apply(model=model, **parts)
    # `models.head` reads this.
    model._drumline_fused = True  # type: ignore[assignment]
    fused: Any = getattr(module, ROTARY, None)
    if fused is before:
        return

    def rotary_by_device(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.is_cuda:
            return fused(q, *args, **kwargs)
        return before(q, *args, **kwargs)

    # Liger replaces the function for all models of the process, but trials of small copies run on
    # the CPU.
    setattr(module, ROTARY, rotary_by_device)


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `models.losses.linear_cross_entropy` by Liger's kernel, which chooses its chunks.

    The arguments are those of that function. Sums of the weight's gradient are fp32.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype = product_dtype(hidden_ND)
    hidden = hidden_ND.to(dtype)
    weight = weight_VD.to(dtype)
    bias = None
    if bias_V is not None:
        bias = bias_V.to(dtype)
    options: dict[str, Any] = {
        "reduction": "sum",
        "accum_dtype": torch.float32,
        "return_predicted_tokens": True,
    }
    with torch.autocast(hidden_ND.device.type, enabled=False):
        out = liger_fused_linear_cross_entropy(hidden, weight, targets_N, bias, **options)
    return out.loss.float(), out.predicted_tokens == targets_N
