"""Reads the configs of models, and derives their sizes (`facts`), by Hugging Face's classes.

No weights are read: `models.build` builds models, and `models.shards` fills them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from drumline.config.config import Adapter, LoRAConfig
from drumline.config.model import Head, ModelConfig
from drumline.config.registry import nearest
from drumline.errors import ModelError
from drumline.foreign import first_line, translate_exceptions
from drumline.models import adapters
from drumline.models.attention import has_score_dropout, has_soft_caps, head_sizes
from drumline.models.blocks import (
    common_facts,
    count_entries,
    expert_modules,
    find_base_layer,
    is_head_tied,
    layers_with_attention,
    reason_against_context_parallelism,
    reason_against_sequence_parallelism,
    reason_for_mask,
    reason_not_to_cut,
    scan_flops,
    tensor_plan,
    tower_flops,
    vision_tower,
)
from drumline.models.classes import (
    LM,
    SEEING,
    auto_class,
    bidirectional_error,
    is_encoder,
    is_encoder_decoder,
    is_text_alone,
    is_vision_language,
    require_text_trunk,
    values_by_layer,
)
from drumline.models.cut_trial import try_cut
from drumline.models.files import call_loader, check_counts, check_folder, hub_options
from drumline.models.freeze import freeze
from drumline.models.router import trains_router
from drumline.models.router_load import has_router_bias
from drumline.models.scores import add_head, first_position, is_bidirectional, score_head
from drumline.models.seq2seq import encoder_decoder_facts
from drumline.models.shapes import check_length, full_config
from drumline.models.text_part import text_config_of
from drumline.models.vocabulary import Growth, growth_of, set_rows
from drumline.plan.facts import ModelFacts

# The config key for the soft-capping of logits, by a tanh: Gemma 2.
LOGIT_CAP = "final_logit_softcapping"
# Config keys for the soft-capping and scaling of logits: Gemma 2, Cohere, Granite.
# `models.head.can_split` tries the model itself.
LOGIT_KEYS = (LOGIT_CAP, "logit_scale", "logits_scaling")
# Config keys of GPT-2, Llama, BERT, OPT, StarCoder 2 and T5 for dropout over a block's outputs to the
# residual stream, and of Mixtral for noise on it before the router.
STREAM_DROPOUTS = (
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "dropout_rate",
    "router_jitter_noise",
)
# Config keys without which the sizes of a model are not known.
SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Keys that a model reads, though the class of its config does not declare them.
UNDECLARED = {"qwen3_moe": ("head_dim",), "glm4_moe": ("head_dim",), "falcon_h1": ("head_dim",)}
# Kinds of layers whose attention sees a window.
WINDOWED_LAYERS = {"sliding_attention", "chunked_attention"}
# FLOPs of a token for each parameter in a matrix product: 2 in forward, and 2 each for the
# gradients of inputs and of weights, which a frozen parameter does not have.
TRAINABLE_FLOPS = 6
FROZEN_FLOPS = 4


def load_config(path: str | None, model: ModelConfig) -> Any:
    """Return the Hugging Face config of a model, with the values of `model.config`.

    Its vocabulary is large enough for `model.new_tokens` and `model.tokenizer`. `path`: the folder
    or hub id; None: the config has only the values of `model.config`, among them model_type. Raises
    ModelError for a model_type, key or value that transformers does not take.
    """
    return load_grown(path, model)[0]


def load_grown(path: str | None, model: ModelConfig) -> tuple[Any, Growth | None]:
    """Return the config of `load_config`, and how its rows differ from those of the model's files.

    The latter is None if the model names neither new tokens nor a tokenizer.
    """
    config = stored_config(path, model)
    growth = growth_of(config, path, model)
    if growth is not None and growth.added_rows:
        set_rows(config, growth.rows)
    return config, growth


def stored_config(path: str | None, model: ModelConfig) -> Any:
    """Return the config of `load_config` with the size of the vocabulary that the files have."""
    whole = whole_config(path, model)
    text_config = text_config_of(whole, model.config.get("model_type"))
    if path is None:
        return text_config or whole
    values = dict(model.config)
    if text_config is None:
        return _set_values(whole, values)
    if values.get("model_type") == whole.model_type:
        del values["model_type"]
    return _set_values(text_config, values)


def whole_config(path: str | None, model: ModelConfig) -> Any:
    """Return the Hugging Face config that the files have, or that the values of `model.config` make.

    Unlike `load_config` it is that of the whole model, also if only a part is trained
    (`models.text_part`), and without the values that override those of files.
    """
    check_counts(model.config, "model.config")
    if path is None:
        return _config_of_values(model)
    check_folder(Path(path))
    return _config_of_files(path, model)


def config_around_text(path: str | None, model: ModelConfig) -> Any | None:
    """Return the config of the vision-language model of which files have the language model.

    None if the files are of the model that `load_config` describes.
    """
    whole = whole_config(path, model)
    if text_config_of(whole, model.config.get("model_type")) is None:
        return None
    return whole


def _config_of_files(path: str, model: ModelConfig) -> Any:
    """Return the Hugging Face config in a folder or of a hub id."""
    from transformers import AutoConfig, PreTrainedConfig

    def read() -> Any:
        options = hub_options(path, model)
        values, _ = PreTrainedConfig.get_config_dict(path, **options)
        check_counts(values, f"{path}: config.json")
        return AutoConfig.from_pretrained(path, **options)

    return call_loader(path, model, read, "its config.json")


def _config_of_values(model: ModelConfig) -> Any:
    """Return the Hugging Face config of a model without files.

    It has the values of `model.shape`, and over these those of `model.config`.
    """
    from transformers import AutoConfig

    values: dict[str, Any] = {}
    if model.shape:
        values |= full_config(model.shape)
    values |= model.config
    model_type = values.pop("model_type", None)
    if model_type is None:
        what = "neither an id nor a config with model_type"
        fix = "set model.id, model.shape, or model.config.model_type"
        raise ModelError(what, where="model", fix=fix)
    # First without values, for the keys that this type of model has.
    try:
        config = AutoConfig.for_model(model_type)
    except (ValueError, TypeError):
        what = f"transformers knows no model_type {model_type!r}"
        where = "model.config.model_type"
        fix = "use one such as llama, qwen3 or gpt2"
        raise ModelError(what, where=where, fix=fix) from None
    _require_known(config, values)
    with _report_value_errors():
        return AutoConfig.for_model(model_type, **values)


def _report_value_errors() -> AbstractContextManager[None]:
    """Turn errors within the context into a ModelError about the values of `model.config`."""
    what = "transformers does not take this"
    return translate_exceptions(
        what, "model.config", ModelError, "fix the values under model.config"
    )


def _set_values(config: Any, values: dict[str, Any]) -> Any:
    """Set values in a config that was read from files, and return it.

    Keys that depend on these values are updated too, unless they are among them: the size of heads
    (width / heads), and the list of layer kinds (cut, or repeated, to the number of layers).
    """
    if not values:
        return config
    model_type = values.get("model_type", config.model_type)
    if model_type != config.model_type:
        what = f"the model's files are of type {config.model_type}, not {model_type}"
        fix = "leave it out, or set model.id: null for a new model of model.config alone"
        raise ModelError(what, where="model.config.model_type", fix=fix)
    _require_known(config, values)
    # Before the values are set, which makes the old head size look like one of its own.
    head_dim_follows = _is_head_dim_derived(config)
    with _report_value_errors():
        for key, value in values.items():
            setattr(config, key, value)
        if head_dim_follows and "head_dim" not in values:
            config.head_dim = config.hidden_size // config.num_attention_heads
        layer_types = getattr(config, "layer_types", None)
        layers = getattr(config, "num_hidden_layers", None)
        if layer_types and layers and "layer_types" not in values:
            period = len(layer_types)
            config.layer_types = [layer_types[number % period] for number in range(layers)]
        # transformers checks how the values fit each other only if it is asked to.
        if hasattr(config, "validate"):
            config.validate()
    return config


def _is_head_dim_derived(config: Any) -> bool:
    """Return whether a config's head size is its width over its heads."""
    width = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if not width or not heads:
        return False
    return values_by_layer(config, "head_dim") == [width // heads]


def _require_known(config: Any, values: dict[str, Any]) -> None:
    """Raise ModelError for an unknown key.

    transformers takes any key silently, so a typing error would train another model.
    """
    undeclared = UNDECLARED.get(config.model_type, ())
    if is_encoder_decoder(config):
        undeclared = (*undeclared, "decoder_start_token_id")
    for key in values:
        if values_by_layer(config, key) != [None] or hasattr(config, key) or key in undeclared:
            continue
        known = [name for name in config.to_dict() if not name.startswith("_")]
        guess = nearest(key, known)
        fix = "see the model's config.json for its keys"
        if guess:
            fix = f"did you mean {guess}?"
        what = f"the config of {config.model_type} has no key {key!r}"
        raise ModelError(what, where=f"model.config.{key}", fix=fix)


def facts(
    config: Any,
    length: int,
    adapter: Adapter | None = None,
    head: Head = "lm",
    frozen_names: Sequence[str] = (),
) -> ModelFacts:
    """Return the sizes of the model that a config describes.

    The model is built on the meta device, without weights. `length`: tokens of a training row; for
    the head `image` the side of a square image in pixels, where a training row counts as one token.
    `adapter`: injected before the count. `frozen_names`: parameters to freeze, see `models.freeze`.

    FLOPs of a token, forward and backward:

    - 6 for each parameter in a matrix product (Kaplan et al. 2020), 4 if it is frozen and needs no
      gradient. An embedding is a look-up and has none; a tied one counts once, as the head. Of a
      mixture only the experts that the router chooses count.
    - 12·layers·width·length for attention (PaLM, Chowdhery et al. 2022, appendix B), with width =
      heads × head size. This counts all pairs of positions of a row, as if it were one document and
      not causal. Only layers that have attention count.
    - The scans of recurrent layers, see `blocks.scan_flops`.
    - Of a model with an encoder and a decoder see `seq2seq.encoder_decoder_facts`.
    - A vision tower is counted separately, since only image tokens use it. Its attention is left
      out, since it depends on the sizes of images.

    Raises ModelError for a model whose shapes are not known, and for an adapter's targets that are
    not in the model.
    """
    model = build_without_memory(config, head)
    with _report_config_errors(config):
        freeze(model, frozen_names)
        if isinstance(adapter, LoRAConfig):
            adapters.inject(model, adapter, seed=0)
        if head == "image":
            return _facts_of_images(model, length)
        if head in LM and is_encoder(model):
            raise bidirectional_error(model)
        sizes = _facts_of_text(model, length, head)
        if head == "seq2seq":
            return encoder_decoder_facts(model, sizes, length)
        return sizes


def build_without_memory(
    config: Any,
    head: Head = "lm",
    path: str = "model.config",
    source: ModelConfig | None = None,
    **options: Any,
) -> Any:
    """Return the model of a config on the meta device.

    `path`, `source`: the model's folder and options, for errors. `options`: of `from_config`.
    Raises ModelError for a config that describes no model.
    """
    if head == "embedding":
        require_text_trunk(config)
    # The class is in the model's own code. The user has agreed to run it: without that the config
    # could not have been loaded.
    is_remote = type(config).__module__.startswith("transformers_modules")
    with _report_config_errors(config):
        with torch.device("meta"):
            make = auto_class(config, head).from_config
            build = partial(make, config, trust_remote_code=is_remote, **options)
            model: Any = call_loader(path, source or ModelConfig(), build)
        for tensor in model.state_dict(keep_vars=True).values():
            # Some functions of torch, such as torch.normal, ignore the device of the context.
            if not tensor.is_meta:
                _move_to_meta(tensor)
        untie_unscaled_head(model)
        return add_head(model, head)


def untie_unscaled_head(model: Any) -> None:
    """Give the head of a T5 1.1 or a FLAN-T5 a weight of its own, if the model has a head.

    Their config says so by `tie_word_embeddings: false`. transformers keeps only `scale_decoder_outputs`
    of it, ties the head nevertheless, and unties it again if the files hold two weights that differ.
    The new weight begins as a copy of the embedding.
    """
    if getattr(model.config, "scale_decoder_outputs", True) or not hasattr(model, "lm_head"):
        return
    embedding = model.get_input_embeddings().weight
    if model.lm_head.weight is not embedding:
        return
    model.lm_head.weight = torch.nn.Parameter(embedding.detach().clone())
    for name in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = dict(getattr(model, name))
        tied.pop("lm_head.weight", None)
        setattr(model, name, tied)


def _move_to_meta(tensor: torch.Tensor) -> None:
    """Move a tensor to the meta device in place: the object stays the same."""
    on_meta_device = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        on_meta_device = torch.nn.Parameter(on_meta_device, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, on_meta_device)


def _report_config_errors(config: Any) -> AbstractContextManager[None]:
    """Turn errors within the context into a ModelError about the config."""
    what = "its config describes no model that can be built"
    where = getattr(config, "name_or_path", None) or "model.config"
    return translate_exceptions(what, f"{where}", ModelError, "fix its config.json")


class _Experts(NamedTuple):
    """How many experts each mixture has, and how many take a token; 1 and 1 without mixtures."""

    number: int
    per_token: int


def _facts_of_text(model: Any, length: int, head: Head) -> ModelFacts:
    """Return the sizes of a model of text, or of text and images, on the meta device.

    See `facts`.
    """
    config = model.config
    text_config = config.get_text_config()
    _require_shape(model, text_config)
    counts = common_facts(model)
    layers = int(text_config.num_hidden_layers)
    hidden = int(text_config.hidden_size)
    heads = int(text_config.num_attention_heads)
    sizes = head_sizes(text_config)
    kv_heads = _kv_heads(text_config, heads)
    if sizes.latent:
        # Each head has keys and values of its own, which are made of what all share.
        kv_heads = heads
    positions = getattr(text_config, "max_position_embeddings", None)
    # Other models are causal, and need no mask.
    sees_later_tokens = head in ("text", "embedding") and is_bidirectional(model)
    position_of_first: int | None = 0
    if sees_later_tokens:
        position_of_first = first_position(model)
    has_tower = head in SEEING and is_vision_language(config)
    flops_per_image_token = 0.0
    if has_tower and not is_text_alone(config):
        flops_per_image_token = tower_flops(model)
    experts = _experts_of(text_config)
    products = _product_flops(model, experts, has_tower)
    # Scores and their products with values, each of two FLOPs in forward and four in backward. A
    # mean over all layers, of which some may have no attention.
    width = heads * (sizes.queries + sizes.values)
    attention_flops = 6 * width * length * layers_with_attention(model) / layers
    if not expert_modules(model):
        # Without a module that holds all experts of a layer, strategies cannot treat it as a
        # mixture.
        experts = _Experts(0, 0)
    head_parameters = _head_parameters(model)
    scans = scan_flops(model)
    embedding = find_base_layer(model.get_input_embeddings()).weight
    outside_blocks = counts["parameters"] - sum(counts["block_parameters"])
    only_in_head = [parameter for parameter in head_parameters if parameter is not embedding]
    return ModelFacts(
        **counts,
        **_cut_facts(model),
        name=str(text_config.model_type),
        flops_per_token=float(products + scans + layers * attention_flops),
        vocab_size=int(text_config.vocab_size),
        max_positions=int(positions or 0) or None,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=sizes.queries,
        value_dim=0 if sizes.values == sizes.queries else sizes.values,
        latent_dim=sizes.latent,
        embedding_parameters=outside_blocks - count_entries(only_in_head),
        head_parameters=count_entries(head_parameters),
        attention_flops=float(attention_flops),
        scan_flops=scans,
        bidirectional=sees_later_tokens,
        first_position=position_of_first,
        vision_language=has_tower,
        trains_router=head in LM and trains_router(model),
        has_router_bias=has_router_bias(model),
        flops_per_image_token=flops_per_image_token,
        changes_logits=_changes_logits(model, text_config),
        caps_logits=getattr(text_config, LOGIT_CAP, None) is not None,
        keeps_scores=getattr(config, "_attn_implementation", None) == "eager",
        caps_scores=has_soft_caps(text_config),
        drops_scores=has_score_dropout(text_config),
        experts=experts.number,
        experts_per_token=experts.per_token,
        windows=_has_windows(text_config),
        drops_stream=any(getattr(text_config, key, None) for key in STREAM_DROPOUTS),
    )


def _require_shape(model: Any, text_config: Any) -> None:
    """Raise ModelError for a config without a key that sizes depend on."""
    for key in SHAPE_KEYS:
        if getattr(text_config, key, None) is None:
            what = f"the shapes of {type(model).__name__} are not known: its config has no {key}"
            fix = "give a model with a transformer's layers and heads"
            raise ModelError(what, where="model", fix=fix)


def _experts_of(text_config: Any) -> _Experts:
    """Return the experts of a config's mixtures, and how many of them take a token."""
    number = getattr(text_config, "num_local_experts", None)
    number = number or getattr(text_config, "num_experts", None) or 1
    per_token = getattr(text_config, "num_experts_per_tok", None)
    # Gemma 4 has a name of its own for it.
    per_token = per_token or getattr(text_config, "top_k_experts", None) or number
    return _Experts(int(number), min(int(number), int(per_token)))


def _product_flops(model: Any, experts: _Experts, has_tower: bool) -> float:
    """Return the FLOPs of a text token's matrix products with weights, forward and backward.

    An embedding that is no head is a look-up, and a vision tower works for image tokens alone.
    """
    not_multiplied: set[int] = set()
    if has_tower:
        not_multiplied |= {id(parameter) for parameter in vision_tower(model).parameters()}
    if not is_head_tied(model):
        not_multiplied.add(id(find_base_layer(model.get_input_embeddings()).weight))
    summands: list[float] = []
    for name, parameter in model.named_parameters():
        # This factor has a column for each token, which is looked up.
        is_looked_up = ".lora_embedding_A." in name
        if id(parameter) in not_multiplied or is_looked_up:
            continue
        flops_per_entry = FROZEN_FLOPS
        if parameter.requires_grad:
            flops_per_entry = TRAINABLE_FLOPS
        flops = flops_per_entry * parameter.numel()
        if ".experts." in name:
            summands.append(flops * experts.per_token / experts.number)
        else:
            summands.append(flops)
    return sum(summands)


def _head_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of the output head and the score head, each once."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for layer in (model.get_output_embeddings(), score_head(model)):
        if layer is not None:
            # By their ids, since the two heads may share a weight.
            for parameter in layer.parameters():
                parameters[id(parameter)] = parameter
    return list(parameters.values())


def _kv_heads(text_config: Any, heads: int) -> int:
    """Return the heads of keys and values.

    If layers differ, it is the greatest number that divides those of each.
    """
    numbers = [
        int(number or heads) for number in values_by_layer(text_config, "num_key_value_heads")
    ]
    return math.gcd(*numbers)


def _changes_logits(model: Any, text_config: Any) -> bool:
    """Return whether the logits are more than the head over the hidden states."""
    if any(getattr(text_config, key, None) not in (None, 1.0) for key in LOGIT_KEYS):
        return True
    # Trainable rows of a tied head are computed in its own forward.
    output_head = model.get_output_embeddings()
    return output_head is not None and find_base_layer(output_head) is not output_head


def _has_windows(text_config: Any) -> bool:
    """Return whether the attention of some layers sees a window."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        return not WINDOWED_LAYERS.isdisjoint(layer_types)
    # Without a kind for each layer, one window is that of all of them.
    return getattr(text_config, "sliding_window", None) is not None


def _cut_facts(model: Any) -> dict[str, Any]:
    """Return the fields of ModelFacts for how a model of text can be cut over ranks.

    Those for what it cannot do (`tp_failure`, `needs_mask`, `whole_stream`, `whole_sequences`,
    `uncut`) have the reason as a text, which is empty if it can.
    """
    plan = tensor_plan(model)
    # False if the projections of attention are gathered.
    cuts_heads = False
    for name, style in plan.items():
        is_in_attention = "attn" in name or "attention" in name
        if style == "colwise" and is_in_attention:
            cuts_heads = True
    return {
        "tp_styles": frozenset(plan.values()),
        "tp_cuts_heads": cuts_heads,
        "tp_failure": try_cut(model).failure,
        "needs_mask": reason_for_mask(model),
        "whole_stream": reason_against_sequence_parallelism(model),
        "whole_sequences": reason_against_context_parallelism(model),
        "uncut": reason_not_to_cut(model),
    }


def _facts_of_images(model: Any, side: int) -> ModelFacts:
    """Return the sizes of an image classifier on the meta device.

    A training row is one token, so `flops_per_token` is of one image. torch's FlopCounterMode
    counts the forward pass of one image of `side` × `side` (matrix products and convolutions, with
    attention). Backward costs twice that, once for the inputs and once for the trainable weights.
    Raises ModelError if the model does not take images of that size.
    """
    counter = FlopCounterMode(display=False)
    channels = int(getattr(model.config, "num_channels", 3))
    pixels = torch.empty(1, channels, side, side, device="meta")
    try:
        with counter, torch.no_grad():
            model.eval()(pixel_values=pixels)
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        what = f"{type(model).__name__} does not take images of {side} × {side}: {reason}"
        fix = "use the size that the model was made for"
        raise ModelError(what, where="algorithm.image_size", fix=fix) from None
    counts = common_facts(model)
    # Forward, the gradients of inputs, and the gradients of the trainable part of the weights.
    passes = 3.0 - counts["frozen"] / counts["parameters"]
    sizes = getattr(model.config, "hidden_sizes", None)
    if sizes:
        # One for each stage of a convolutional model.
        hidden = sizes[-1]
    else:
        hidden = getattr(model.config, "hidden_size", 0)
    depths = getattr(model.config, "depths", ())
    return ModelFacts(
        **counts,
        name=str(model.config.model_type),
        flops_per_token=counter.get_total_flops() * passes,
        vocab_size=0,
        max_positions=None,
        layers=len(counts["block_parameters"]) or int(sum(depths)),
        hidden=int(hidden),
    )


def check_fits(
    config: Any, tokenizer: Any, max_length: int, where: str = "model.tokenizer"
) -> None:
    """Raise ModelError if the tokenizer has more ids than the embedding has rows.

    Also if `max_length` exceeds the model's positions. `where`: the key that names the tokenizer.
    """
    text_config = config.get_text_config()
    rows = getattr(text_config, "vocab_size", None)
    positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(rows, int) or not isinstance(positions, int | None):
        what = "vocab_size or max_position_embeddings is no whole number"
        raise ModelError(what, where=f"{config.name_or_path or 'model'}: config.json")
    if len(tokenizer) > rows:
        what = f"the tokenizer has {len(tokenizer)} tokens but the embedding only {rows} rows"
        fix = "name the tokenizer's folder as model.tokenizer, and the embedding grows"
        if where != "model.tokenizer":
            fix = "give that model the policy's tokenizer or new_tokens, or name another model"
        raise ModelError(what, where=where, fix=fix)
    check_length(positions, max_length)
