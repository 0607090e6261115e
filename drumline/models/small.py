"""Small copies of a model, on which trials find out what its code does.

The trials run before the model itself has any weights.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from drumline.dist.seeds import use_seed
from drumline.errors import ModelError
from drumline.foreign import first_line, translate_exceptions
from drumline.models.attention import without_kernels
from drumline.models.blocks import blocks
from drumline.models.classes import (
    is_encoder_decoder,
    is_seq2seq,
    is_text_alone,
    is_vision_language,
    values_by_layer,
)
from drumline.models.image_tokens import has_rotary_positions, trial_images
from drumline.models.recurrent import separate_alike

T = TypeVar("T")
# The most tokens of a small copy's vocabulary, and the most width of its feed-forward layers.
VOCABULARY = 128
WIDTH = 64
# Tokens of each of the two documents of a trial's pack.
DOCUMENT_TOKENS = 4
# Config keys for that width; some configs have a list of it, by layer.
FEED_FORWARD_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
# Config keys for the number of a decoder's layers, if the one for all layers is of the encoder.
DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialTokens:
    """Token ids for trials, int64[B, T].

    `position_ids_BT`: int64[B, T]; None: 0, 1, 2, … `images`: further arguments of a
    vision-language model. `document_lengths`: lengths of the documents in each row; there is no
    padding.
    `has_shared_prefix`: whether each document continues the first of its row.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: Any = None
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    has_shared_prefix: bool = False

    @property
    def cu_seqlens_N(self) -> torch.Tensor:  # noqa: N802 - as the fields of batches are called
        """int32[N + 1]: the place of each document's first token, and the end of the last one.

        All rows lie end to end.
        """
        sizes = [0]
        for row in self.document_lengths or ():
            sizes += row
        sizes_N = torch.tensor(sizes, device=self.input_ids_BT.device)
        return sizes_N.cumsum(0).to(torch.int32)

    def __post_init__(self) -> None:
        if self.position_ids_BT is None:
            ids_BT = self.input_ids_BT
            positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            # The class is frozen.
            object.__setattr__(self, "position_ids_BT", positions_T.expand_as(ids_BT))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model for this batch."""
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT, **self.images}


def pack_of_two(model: Any, ids_BT: torch.Tensor) -> TrialTokens:
    """Return a trial's eight tokens as a pack of two documents. `ids_BT`: int64[1, 8]."""
    positions_T = torch.arange(DOCUMENT_TOKENS, device=ids_BT.device)
    positions_BT = positions_T.repeat(2)[None]
    documents = ((DOCUMENT_TOKENS, DOCUMENT_TOKENS),)
    arguments = {}
    if has_rotary_positions(model.config):
        # As `ImageInputs.inputs`. By two dimensions Qwen2-VL does not find documents.
        arguments = {"position_ids": positions_BT.expand(4, -1, -1)}
    return TrialTokens(ids_BT, positions_BT, arguments, documents)


def trial_tokens(model: Any, ids_BT: torch.Tensor) -> TrialTokens:
    """Return a batch for trials that runs all of a model.

    For a vision-language model each row has a small image behind its first token, unless its images
    are not read here. `ids_BT`: the tokens, int64[B, T].
    """
    if not is_vision_language(model.config) or is_text_alone(model.config):
        return TrialTokens(ids_BT)
    with_images_BT, images = trial_images(model.config, ids_BT)
    return TrialTokens(with_images_BT, images=images)


def try_small(
    model: Any, device: str, trial: Callable[[Any, torch.Tensor], T], layers: int = 1
) -> T:
    """Return the result of `trial`, called with a small copy of `model` and eight token ids.

    The ids are int64[1, 8]. The copy is on `device`, without gradients and in full fp32. `layers`:
    its layers at least.
    Raises ModelError for a model that does not run, such as one whose config has numbers that do
    not fit each other.
    """
    small = small_copy(model, device, layers)
    vocab_size = small.config.get_text_config().vocab_size
    ids_BT = torch.arange(8, device=device)[None] % vocab_size
    what = f"a small copy of {type(model).__name__} does not run"
    where = getattr(model.config, "name_or_path", None) or "model.config"
    fix = "fix its config: heads, heads of keys and values, and experts have to fit each other"
    # Rounding to TF32, which a run may have turned on, is coarser than what `is_close` allows.
    products = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = False
    convolutions.allow_tf32 = False
    try:
        trial_errors = translate_exceptions(what, where, ModelError, fix)
        with torch.no_grad(), without_kernels(), _code_of_device(type(model), device), trial_errors:
            return trial(small, ids_BT)
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def _code_of_device(model_class: type, device: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a class runs on a device: kernels for GPUs take no CPU's tensors."""
    from drumline.vendor.transformers import torch_functions

    if device == "cpu":
        return torch_functions(model_class)
    return contextlib.nullcontext()


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two outputs of a small copy are equal up to rounding.

    Their difference is compared with the largest value of all, since one logit may be near zero by
    cancellation. The copy always has the same random weights, so the answer depends on its class
    and device, not on a run's weights. A sum of n products is off by about √n units of roundoff
    (`rounding.product_bits`). The limit of 100 eps is 200 units, enough for sums of 40,000 products
    in any order.
    """
    if a.shape != b.shape:
        return False
    difference = float((a - b).abs().max())
    largest = float(a.abs().max())
    allowed = 100 * torch.finfo(a.dtype).eps * largest
    return difference <= allowed


def small_copy(model: Any, device: str, least: int = 1) -> Any:
    """Return a model of the class of `model` in eval mode, in fp32 and with random weights.

    It has enough of the first layers to have every kind of layer (at least `least`), few tokens,
    narrow feed-forward layers, and the same attention and separated layers. Leaves the random state
    unchanged.
    """
    layers = _layers_of_every_kind(model, least)
    model_class = type(model)
    with use_seed(0):
        try:
            built = model_class(_cut_config(model.config, layers, narrow=True))
        except Exception as error:  # noqa: BLE001 - a class may require other widths
            logger.info(
                "%s cannot be built narrow (%s): tried with full widths",
                model_class.__name__,
                error,
            )
            built = model_class(_cut_config(model.config, layers, narrow=False))
    separate_alike(model, built)
    return built.eval().to(device)


def narrow_config_around(config: Any, text: Any) -> Any:
    """Return a small copy of a vision-language model's config.

    `text`: the language model within it, whose kinds of layers all stay.
    """
    return _cut_config(config, _layers_of_every_kind(text, least=1), narrow=True)


def config_with_few_layers(model: Any) -> Any:
    """Return a copy of a model's config with just enough layers to have every kind of layer."""
    layers = _layers_of_every_kind(model, least=1)
    return _cut_config(model.config, layers, narrow=False)


def _layers_of_every_kind(model: Any, least: int) -> int:
    """Return how many of a model's first layers have every kind of layer; at least `least`."""
    text_config = model.config.get_text_config()
    stacks = [model]
    if is_seq2seq(model):
        stacks = [model.get_encoder(), model.get_decoder()]
    elif getattr(model.config, "vision_config", None) is not None:
        # Blocks of the tower are not counted: the copy has one of them in any case.
        stacks = [model.get_decoder()]
    layer_types = getattr(text_config, "layer_types", None) or ()
    layers = max(_first_of_each(layer_types), least)
    for stack in stacks:
        # The classes of the modules of each block.
        block_kinds = []
        for block in blocks(stack):
            class_names = tuple(type(module).__name__ for module in block.modules())
            block_kinds.append(class_names)
        layers = max(layers, _first_of_each(block_kinds))
    # Embeddings may count as a block, as ModernBERT's do.
    return min(layers, text_config.num_hidden_layers)


def _cut_config(config: Any, layers: int, narrow: bool) -> Any:
    """Return a copy of a config with its first `layers` layers.

    With `narrow` it also has few tokens and narrow feed-forward layers.
    """
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    encoder: Any = getattr(config, "encoder", None)
    if not hasattr(encoder, "num_hidden_layers"):
        encoder = None
    _keep_layers(text_config, layers)
    if encoder is not None:
        _keep_layers(encoder, layers)
    vision: Any = getattr(config, "vision_config", None)
    # A foreign file may have anything there that is no config.
    if hasattr(vision, "to_dict"):
        # The names of Qwen's towers, and of all others.
        if hasattr(vision, "depth"):
            vision.depth = 1
            vision.deepstack_visual_indexes = [0]
        else:
            vision.num_hidden_layers = 1
    if narrow:
        _make_narrow(text_config)
        if encoder is not None:
            _make_narrow(encoder)
        if is_encoder_decoder(config):
            config.vocab_size = text_config.vocab_size
            for key in ("decoder_start_token_id", "pad_token_id"):
                if (getattr(config, key, None) or 0) >= config.vocab_size:
                    setattr(config, key, 0)
    return config


def _keep_layers(config: Any, layers: int) -> None:
    """Cut a config to its first `layers` layers, in place, and those of a decoder beside them."""
    for key, value in _lists_by_layer(config).items():
        setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
    for key in DECODER_LAYERS:
        if hasattr(config, key):
            setattr(config, key, layers)


def _lists_by_layer(config: Any) -> dict[str, list[Any]]:
    """Return key → list, for the lists of a config that have an entry for each layer.

    Other lists may only happen to be as long, such as Falcon-H1's two multipliers. In a config of
    the same class with one layer more, such a list is as long. A list whose name says that it is of
    layers is none of them: Nemotron-H has four kinds of layers by default, however many layers.
    """
    layers = config.num_hidden_layers
    lists = {}
    for key, value in config.to_dict().items():
        # A property follows from other values, and cannot be set.
        is_derived = isinstance(getattr(type(config), key, None), property)
        if isinstance(value, list) and len(value) == layers and not is_derived:
            lists[key] = value
    doubtful = [key for key in lists if "layer" not in key]
    if not doubtful:
        return lists
    deeper = _default_values(config, layers + 1)
    for key in doubtful:
        value = deeper.get(key)
        if isinstance(value, list) and len(value) == layers:
            del lists[key]
    return lists


def _default_values(config: Any, layers: int) -> dict[str, Any]:
    """Return the values of a config of the same class, with its defaults and so many layers.

    They are empty if the class has no defaults.
    """
    try:
        values: dict[str, Any] = type(config)(num_hidden_layers=layers).to_dict()
    except Exception as error:  # noqa: BLE001 - a foreign class may require other values
        logger.info("%s has no defaults: %s", type(config).__name__, first_line(error))
        return {}
    return values


def _make_narrow(text_config: Any) -> None:
    """Give a config few tokens and narrow feed-forward layers, in place."""
    text_config.vocab_size = min(text_config.vocab_size, VOCABULARY)
    # torch refuses an embedding whose padding row is beyond its rows.
    pad_token_id = getattr(text_config, "pad_token_id", None) or 0
    if pad_token_id >= text_config.vocab_size:
        text_config.pad_token_id = None
    for key in FEED_FORWARD_WIDTHS:
        sizes = values_by_layer(text_config, key)
        if len(sizes) == 1 and isinstance(sizes[0], int):
            setattr(text_config, key, min(sizes[0], WIDTH))


def _first_of_each(kinds: Any) -> int:
    """Return how many of the first entries have one of each kind; 1 for none."""
    # The place of the entry that is the first of its kind and comes last.
    last_first = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return last_first + 1
