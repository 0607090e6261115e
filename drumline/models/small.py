"""A small model of the same architecture, for trials of its properties before the model itself has any weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from drumline.dist.seeds import drawing
from drumline.errors import ModelError
from drumline.foreign import judged
from drumline.models.blocks import blocks
from drumline.models.classes import is_vision_language, of_layers

T = TypeVar("T")
VOCABULARY, WIDTH = 128, 64
LAYERED = ("intermediate_size", "moe_intermediate_size")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """Token ids for trials: int64[B, T] each; `position_ids_BT` None: 0, 1, 2, … `images`: what the model is also called with. `documents`:
    lengths in each row, which fill it; with `branches` each goes on from the first."""

    input_ids_BT: torch.Tensor
    position_ids_BT: Any = None
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    documents: tuple[tuple[int, ...], ...] | None = None
    branches: bool = False

    @property
    def bounds_N(self) -> torch.Tensor:  # noqa: N802 - as the fields of batches are called
        sizes = [0, *(size for row in self.documents or () for size in row)]
        return torch.tensor(sizes, device=self.input_ids_BT.device).cumsum(0).to(torch.int32)

    def __post_init__(self) -> None:
        if self.position_ids_BT is None:
            positions_T = torch.arange(self.input_ids_BT.shape[1], device=self.input_ids_BT.device)
            object.__setattr__(self, "position_ids_BT", positions_T.expand_as(self.input_ids_BT))

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT, **self.images}


def probe(model: Any, ids_BT: torch.Tensor) -> Tokens:
    """A batch for trials that runs all of a model: for a vision-language model the second token of each row is an image."""
    if not is_vision_language(model.config):
        return Tokens(ids_BT)
    vision, device, ids_BT = model.config.vision_config, ids_BT.device, ids_BT.clone()
    ids_BT[:, 1], merge = model.config.image_token_id, vision.spatial_merge_size
    grid_N3 = torch.tensor([[1, merge, merge]] * len(ids_BT), device=device)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels_PD = torch.linspace(-1, 1, len(ids_BT) * merge**2 * width, device=device).view(-1, width)
    return Tokens(ids_BT, images={"pixel_values": pixels_PD, "image_grid_thw": grid_N3})


def try_small(
    model: Any, device: str, trial: Callable[[Any, torch.Tensor], T], layers: int = 1
) -> T:
    """The result of `trial` with a small copy of `model` and eight token ids, int64[1, 8]: on `device`, without gradients, in full fp32.
    Raises ModelError for a model that does not run, as of a config whose numbers do not fit each other."""
    small = small_copy(model, device, layers)
    ids_BT = torch.arange(8, device=device)[None] % small.config.get_text_config().vocab_size
    where = getattr(model.config, "name_or_path", None) or "model.config"
    fix = "mend its config: heads, heads of keys and values, and experts have to fit each other"
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        with (
            torch.no_grad(),
            judged(f"a small copy of {type(model).__name__} does not run", where, ModelError, fix),
        ):
            return trial(small, ids_BT)
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two outputs of a small copy are equal up to rounding, relative to the largest value.

    One logit may be near zero by cancellation, so an entry is not held against itself. The copy has a few layers and always the same
    random weights, so the answer is a property of its class and device, not of a run's weights. A sum of n products is off by about √n
    units of roundoff (`rounding.product_bits`); 100 eps are 200 units, enough for sums of 40,000 products in any order.
    """
    return a.shape == b.shape and float((a - b).abs().max()) <= 100 * torch.finfo(
        a.dtype
    ).eps * float(a.abs().max())


def small_copy(model: Any, device: str, least: int = 1) -> Any:
    """A model of the class of `model` in eval mode, fp32, with random weights: enough of its first layers to have every kind of layer
    (at least `least`), few tokens, narrow feed-forward layers, the same attention. Leaves the random state unchanged."""
    layers = _layers_of_every_kind(model, least)
    with drawing(0):
        try:
            built = type(model)(_cut(model.config, layers, narrow=True))
        except Exception as error:  # noqa: BLE001 - a class may require other widths
            logger.info(
                "%s cannot be built narrow (%s): tried with full widths",
                type(model).__name__,
                error,
            )
            built = type(model)(_cut(model.config, layers, narrow=False))
    return built.eval().to(device)


def with_few_layers(model: Any) -> Any:
    """Return a copy of a model's config with so few layers that every kind of layer is there."""
    return _cut(model.config, _layers_of_every_kind(model, 1), narrow=False)


def _layers_of_every_kind(model: Any, least: int) -> int:
    text = model.config.get_text_config()
    language = (
        model.get_decoder() if getattr(model.config, "vision_config", None) is not None else model
    )
    # Of each block.
    kinds = [
        tuple(type(module).__name__ for module in block.modules()) for block in blocks(language)
    ]
    layers = max(
        _first_of_each(kinds), _first_of_each(getattr(text, "layer_types", None) or ()), least
    )
    # Embeddings may count as a block, as ModernBERT's do.
    return min(layers, text.num_hidden_layers)


def _cut(config: Any, layers: int, narrow: bool) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = text.num_hidden_layers
    for key, value in text.to_dict().items():
        derived = isinstance(getattr(type(text), key, None), property)
        if isinstance(value, list) and len(value) == before and not derived:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    vision: Any = getattr(config, "vision_config", None)
    if hasattr(vision, "to_dict"):  # a config of its own; a foreign file may have anything there
        vision.depth = 1
        vision.deepstack_visual_indexes = [0]
    if narrow:
        text.vocab_size = min(text.vocab_size, VOCABULARY)
        if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
            text.pad_token_id = None
        for key in LAYERED:
            if isinstance((sizes := of_layers(text, key))[0], int) and len(sizes) == 1:
                setattr(text, key, min(sizes[0], WIDTH))
    return config


def _first_of_each(kinds: Any) -> int:
    """How many of the first entries have one of each kind; 1 for none."""
    return max((kinds.index(kind) for kind in {*kinds}), default=0) + 1
