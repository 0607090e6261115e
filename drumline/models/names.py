"""One name for each tensor of a model, whatever wraps it: what checkpoints and exports are keyed by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.<fqn>` → live tensor for each parameter that learns (tied ones once, under the first name) and each persistent buffer.

    Frozen parameters are left out: they are what the model was built from, and building it again gives them.
    """
    tensors = {f"model.{name}": parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
    return tensors | {f"model.{name}": buffer for name, buffer in _persistent(model)}


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`<fqn>` → live tensor for each parameter, frozen or not (tied ones once, under the first name), and each persistent buffer."""
    return dict(model.named_parameters()) | dict(_persistent(model))


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def file_name(name: str) -> str:
    """What the model's own files call a tensor: the name without the layer that an adapter is laid over."""
    return name.replace(".base_layer.", ".")
