"""The one name of each tensor of a model in checkpoints and exports, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.<fqn>` → the model's tensor, for each trainable parameter (tied ones once, under the first name) and persistent buffer. Frozen
    parameters are left out: building the model again gives them."""
    tensors = {f"model.{name}": parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
    return tensors | {f"model.{name}": buffer for name, buffer in _persistent(model)}


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`<fqn>` → the model's tensor, for each parameter, frozen or not (tied ones once, under the first name), and persistent buffer."""
    return dict(model.named_parameters()) | dict(_persistent(model))


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def file_name(name: str) -> str:
    """The name of a tensor in the model's files: without the part for the base layer of an adapter."""
    return name.replace(".base_layer.", ".")
