"""The vision tower of a model that sees: where it is, what it costs, and inputs that make it work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.errors import ModelError
from drumline.models.small import Tokens
from drumline.models.vision import is_vision_language


@dataclass(frozen=True)
class _Seeing(Tokens):
    """A trial's tokens, of which the second of each row is an image of one token."""

    config: Any = None

    def inputs(self) -> dict[str, torch.Tensor]:
        eyes, device, ids_BT = self.config.vision_config, self.input_ids_BT.device, self.input_ids_BT.clone()
        ids_BT[:, 1], merge = self.config.image_token_id, eyes.spatial_merge_size
        grid_N3 = torch.tensor([[1, merge, merge]] * len(ids_BT), device=device)
        width = eyes.in_channels * eyes.temporal_patch_size * eyes.patch_size**2
        pixels_PD = torch.linspace(-1, 1, len(ids_BT) * merge**2 * width, device=device).view(-1, width)
        return {**super().inputs(), "input_ids": ids_BT, "pixel_values": pixels_PD, "image_grid_thw": grid_N3}


def probe(model: Any, ids_BT: torch.Tensor) -> Tokens:
    """A batch to try a model on, which all of it works for: with an image where the model sees."""
    return _Seeing(ids_BT, config=model.config) if is_vision_language(model.config) else Tokens(ids_BT)


def vision_tower(model: Any) -> Any:
    """The vision tower of a model. Raises ModelError where it has none of the names that transformers gives it."""
    for part in (model.base_model, model):
        for name in ("visual", "vision_tower", "vision_model"):
            if hasattr(part, name):
                return getattr(part, name)
    what = f"the vision tower of {type(model).__name__} is not known"
    raise ModelError(what, where="model", fix="use a Qwen3-VL, or a model of text alone")


def tower_flops(model: Any) -> float:
    """FLOPs of the tower for one image token, forward and backward: 6 for each parameter that a patch, of which a token takes several, or
    behind the merging a token, is multiplied with; 4 where it is frozen, 2 where nothing in the tower learns. Without attention."""
    tower, total, eyes = vision_tower(model), 0.0, model.config.vision_config
    if (merge := getattr(eyes, "spatial_merge_size", None)) is not None:
        patches = merge**2
    elif (tokens := getattr(model.config, "mm_tokens_per_image", None)) is not None:
        patches = (eyes.image_size // eyes.patch_size) ** 2 // tokens
    else:
        patches = round(1 / getattr(eyes, "pixel_shuffle_ratio", 1.0) ** 2)
    learns = any(p.requires_grad for p in tower.parameters())
    for name, parameter in tower.named_parameters():
        times = 1 if "merger" in name else 0 if name == "pos_embed.weight" else patches
        total += times * parameter.numel() * (6 if parameter.requires_grad else 4 if learns else 2)
    return total
