"""Configs and sizes of models, by Hugging Face's classes; any failure becomes one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from drumline.core.config import Adapter, LoRAConfig
from drumline.core.facts import ModelFacts
from drumline.core.model import Head, ModelConfig
from drumline.core.registry import nearest
from drumline.errors import ModelError
from drumline.foreign import first_line, judged
from drumline.models import adapters
from drumline.models.attention import has_score_dropout, has_soft_caps
from drumline.models.blocks import (
    common_facts,
    expert_modules,
    is_head_tied,
    needs_mask,
    tensor_plan,
    tower_flops,
    uncut,
    vision_tower,
    whole_layer,
    whole_sequences,
    whole_stream,
)
from drumline.models.classes import (
    LM,
    auto_class,
    bidirectional,
    is_encoder,
    is_vision_language,
    of_layers,
)
from drumline.models.cut_trial import try_cut
from drumline.models.files import check_counts, check_folder, from_hub, hub_options
from drumline.models.freeze import freeze
from drumline.models.router import trains_router
from drumline.models.scores import first_position, is_bidirectional, score_head, with_head
from drumline.models.shapes import check_length, full_config
from drumline.models.vocabulary import Growth, growth_of, set_rows

# Config keys for the soft-capping and scaling of logits: Gemma 2, Cohere, Granite. `models.head.can_split` tries the model itself.
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# Config keys of GPT-2, Llama, BERT, OPT and StarCoder 2 for dropout over a block's outputs to the residual stream, and of Mixtral for
# noise on it before the router.
STREAM_DROPOUTS = (
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "router_jitter_noise",
)
# Keys that a model reads, though the class of its config does not declare them.
UNDECLARED = {"qwen3_moe": ("head_dim",)}
_NOT_TAKEN = (
    "transformers does not take this",
    "model.config",
    ModelError,
    "mend the values under model.config",
)


def load_config(path: str | None, model: ModelConfig) -> Any:
    """Return the Hugging Face config with the values of `model.config`, and rows for all tokens.

    `path` None: of these values alone (requires model_type). The vocabulary is large enough for
    `model.new_tokens` and `model.tokenizer`.
    Raises ModelError for a model_type, key or value that transformers does not take.
    """
    return load_grown(path, model)[0]


def load_grown(path: str | None, model: ModelConfig) -> tuple[Any, Growth | None]:
    """Return `load_config`, and its rows beside those of the model's files.

    These are None where the model asks for neither new tokens nor a tokenizer.
    """
    config = stored_config(path, model)
    growth = growth_of(config, path, model)
    if growth is not None and growth.added:
        set_rows(config, growth.rows)
    return config, growth


def stored_config(path: str | None, model: ModelConfig) -> Any:
    """The Hugging Face config of the model's files, with the values of `model.config`."""
    from transformers import AutoConfig, PreTrainedConfig

    check_counts(model.config, "model.config")
    if path is not None:
        check_folder(Path(path))

        def make() -> Any:
            options = hub_options(path, model)
            check_counts(
                PreTrainedConfig.get_config_dict(path, **options)[0], f"{path}: config.json"
            )
            return AutoConfig.from_pretrained(path, **options)

        return _lay_over(from_hub(path, model, make, "its config.json"), model.config)
    values = {**(full_config(model.shape) if model.shape else {}), **model.config}
    kind = values.get("model_type")
    if kind is None:
        what = "neither an id nor a config with model_type"
        raise ModelError(
            what, where="model", fix="set model.id, model.shape, or model.config.model_type"
        )
    try:
        config = AutoConfig.for_model(kind)
    except (ValueError, TypeError):
        what = f"transformers knows no model_type {kind!r}"
        raise ModelError(
            what, where="model.config.model_type", fix="use one such as llama, qwen3 or gpt2"
        ) from None
    values = {key: value for key, value in values.items() if key != "model_type"}
    _require_known(config, values)
    with judged(*_NOT_TAKEN):
        return AutoConfig.for_model(kind, **values)


def _lay_over(config: Any, values: dict[str, Any]) -> Any:
    """The config with values set. Keys that follow from them are updated unless they are set too: a head size from width and heads, the
    kinds of layers from their number (the pattern is cut, or repeated)."""
    if not values:
        return config
    kind = values.get("model_type", config.model_type)
    if kind != config.model_type:
        what = f"the model's files are of type {config.model_type}, not {kind}"
        fix = "leave it out, or set model.id: null for a new model of model.config alone"
        raise ModelError(what, where="model.config.model_type", fix=fix)
    _require_known(config, values)
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    followed = bool(width and heads and of_layers(config, "head_dim") == [width // heads])

    with judged(*_NOT_TAKEN):
        for key, value in values.items():
            setattr(config, key, value)
        if followed and "head_dim" not in values:
            config.head_dim = config.hidden_size // config.num_attention_heads
        kinds, layers = (
            getattr(config, "layer_types", None),
            getattr(config, "num_hidden_layers", None),
        )
        if kinds and layers and "layer_types" not in values:
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
        if hasattr(config, "validate"):
            config.validate()
    return config


def _require_known(config: Any, values: dict[str, Any]) -> None:
    """Raises ModelError for an unknown key. transformers takes any key silently, so a typing error would train another model."""
    for key in values:
        if (
            of_layers(config, key) == [None]
            and not hasattr(config, key)
            and key not in UNDECLARED.get(config.model_type, ())
        ):
            guess = nearest(key, [name for name in config.to_dict() if not name.startswith("_")])
            fix = f"did you mean {guess}?" if guess else "see the model's config.json for its keys"
            raise ModelError(
                f"the config of {config.model_type} has no key {key!r}",
                where=f"model.config.{key}",
                fix=fix,
            )


def facts(
    config: Any,
    length: int,
    adapter: Adapter | None = None,
    head: Head = "lm",
    frozen_names: Sequence[str] = (),
) -> ModelFacts:
    """Sizes of the model that a config describes, built on the meta device: no memory, no weights. `length`: tokens of a training row.
    `adapter`: injected first; raises ModelError if its targets are not in the model. `head` image: `length` is the side of a square image,
    and a training row counts as one token. `frozen_names`: see `models.freeze`; parameters without requires_grad are frozen.

    FLOPs of a token, forward and backward: 6 for each parameter in a matrix product (Kaplan et al. 2020; the embedding is a look-up, a tied
    one counts once as the head), and 12·layers·width·length of attention (PaLM, Chowdhery et al. 2022, appendix B; width is heads × head
    size). PaLM counts all pairs of positions of a row, causal or not, one document or several. A frozen parameter has no gradient, so it
    counts 4. A token uses only the experts that its router chooses. A vision tower works for image tokens alone: its products are counted
    apart, without its attention, which depends on the sizes of images.

    Raises ModelError for a model whose shapes are not known.
    """
    model = on_meta(config, head)
    with _judged(config):
        freeze(model, frozen_names)
        if isinstance(adapter, LoRAConfig):
            adapters.inject(model, adapter, seed=0)
        if head == "image":
            return _facts_of_images(model, length)
        if head in LM and is_encoder(model):
            raise bidirectional(model)
        return _facts_of_text(model, length, head)


def on_meta(
    config: Any,
    head: Head = "lm",
    path: str = "model.config",
    source: ModelConfig | None = None,
    **options: Any,
) -> Any:
    """The model of a config, without memory. `path`, `source`: its origin, for errors. `options`: of `from_config`. Raises ModelError."""
    # A class of the model's own code: loading this config required the agreement to run that.
    remote = type(config).__module__.startswith("transformers_modules")
    with _judged(config):
        with torch.device("meta"):
            make = auto_class(config, head).from_config
            model: Any = from_hub(
                path,
                source or ModelConfig(),
                lambda: make(config, trust_remote_code=remote, **options),
            )
        for tensor in model.state_dict(keep_vars=True).values():
            if (
                not tensor.is_meta
            ):  # its class makes it by what takes no notice of the device, such as torch.normal
                there = torch.empty_like(tensor, device="meta")
                weight = isinstance(tensor, torch.nn.Parameter)
                torch.utils.swap_tensors(
                    tensor, torch.nn.Parameter(there, tensor.requires_grad) if weight else there
                )
        return with_head(model, head)


def _judged(config: Any) -> AbstractContextManager[None]:
    place = getattr(config, "name_or_path", None) or "model.config"
    return judged(
        "its config describes no model that can be built",
        f"{place}",
        ModelError,
        "mend its config.json",
    )


def _facts_of_text(model: Any, length: int, head: Head) -> ModelFacts:
    config, text, counts = model.config, model.config.get_text_config(), common_facts(model)
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(text, key, None) is None:
            what = f"the shapes of {type(model).__name__} are not known: its config has no {key}"
            raise ModelError(
                what, where="model", fix="give a model with a transformer's layers and heads"
            )
    outside = counts["parameters"] - sum(counts["block_parameters"])
    embedding = whole_layer(model.get_input_embeddings()).weight
    output_head = model.get_output_embeddings()
    tied = is_head_tied(model)
    layers, hidden, heads = (
        int(text.num_hidden_layers),
        int(text.hidden_size),
        int(text.num_attention_heads),
    )
    width = heads * max(int(size or hidden // heads) for size in of_layers(text, "head_dim"))
    tower = (
        {id(p) for p in vision_tower(model).parameters()}
        if head in LM and is_vision_language(config)
        else set()
    )
    at_end = {
        id(p): p
        for module in (output_head, score_head(model))
        if module is not None
        for p in module.parameters()
    }.values()
    ahead = head == "text" and is_bidirectional(model)
    # Matrix products: the tower works for image tokens alone, and an embedding that is no head is a look-up.
    apart = tower if tied else {*tower, id(embedding)}
    experts = int(
        getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    )
    chosen = min(experts, int(getattr(text, "num_experts_per_tok", None) or experts))
    flops = {}
    for name, p in model.named_parameters():
        is_looked_up = ".lora_embedding_A." in name  # a factor with a column for each token
        if id(p) not in apart and not is_looked_up:
            flops[name] = (6 if p.requires_grad else 4) * p.numel()
    products = sum(
        number * chosen / experts if ".experts." in name else number
        for name, number in flops.items()
    )
    # Where the config has no kind for each layer, one window is that of all of them.
    all_layers = [
        "full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"
    ]
    return ModelFacts(
        **counts,
        **_cuts(model),
        name=str(text.model_type),
        flops_per_token=float(products + 12 * layers * width * length),
        vocab_size=int(text.vocab_size),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 0) or None,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=math.gcd(
            *(int(number or heads) for number in of_layers(text, "num_key_value_heads"))
        ),
        head_dim=width // heads,
        embedding_parameters=outside - sum(p.numel() for p in at_end if p is not embedding),
        head_parameters=sum(p.numel() for p in at_end),
        attention_flops=float(12 * width * length),
        bidirectional=ahead,
        first_position=first_position(model) if ahead else 0,
        vision_language=bool(tower),
        trains_router=head in LM and trains_router(model),
        flops_per_image_token=tower_flops(model) if tower else 0.0,
        # Trainable rows of a tied head are laid over it in its own forward.
        changes_logits=any(getattr(text, key, None) not in (None, 1.0) for key in LOGIT_KEYS)
        or (output_head is not None and whole_layer(output_head) is not output_head),
        keeps_scores=getattr(config, "_attn_implementation", None) == "eager",
        caps_scores=has_soft_caps(text),
        drops_scores=has_score_dropout(text),
        experts=experts if expert_modules(model) else 0,
        experts_per_token=chosen if expert_modules(model) else 0,
        windows=bool(
            {"sliding_attention", "chunked_attention"}.intersection(
                getattr(text, "layer_types", None) or all_layers
            )
        ),
        drops_stream=any(getattr(text, key, None) for key in STREAM_DROPOUTS),
    )


def _cuts(model: Any) -> dict[str, Any]:
    """How a model of text can be cut, and why not."""
    cut = tensor_plan(model)
    return {
        "tp_styles": frozenset(cut.values()),
        # False where the projections of attention are gathered.
        "tp_cuts_heads": any(
            style == "colwise" and ("attn" in name or "attention" in name)
            for name, style in cut.items()
        ),
        "tp_failure": try_cut(model).failure,
        "needs_mask": needs_mask(model),
        "whole_stream": whole_stream(model),
        "whole_sequences": whole_sequences(model),
        "uncut": uncut(model),
    }


def _facts_of_images(model: Any, side: int) -> ModelFacts:
    """Sizes of an image classifier on the meta device. A training row is one token, so `flops_per_token` is of one image.

    torch's FlopCounterMode counts the forward pass (matrix products and convolutions, with attention) of one image of `side` × `side`;
    backward costs twice that, once for the inputs and once for the trainable weights. Raises ModelError if the model does not take images
    of that size.
    """
    counter = FlopCounterMode(display=False)
    pixels = torch.empty(
        1, int(getattr(model.config, "num_channels", 3)), side, side, device="meta"
    )
    try:
        with counter, torch.no_grad():
            model.eval()(pixel_values=pixels)
    except (RuntimeError, ValueError) as error:
        what = (
            f"{type(model).__name__} does not take images of {side} × {side}: {first_line(error)}"
        )
        raise ModelError(
            what, where="algorithm.image_size", fix="use the size that the model was made for"
        ) from None
    counts = common_facts(model)
    sizes = getattr(model.config, "hidden_sizes", None)
    return ModelFacts(
        **counts,
        name=str(model.config.model_type),
        flops_per_token=counter.get_total_flops() * (3.0 - counts["frozen"] / counts["parameters"]),
        vocab_size=0,
        max_positions=None,
        layers=len(counts["block_parameters"]) or int(sum(getattr(model.config, "depths", ()))),
        hidden=int(sizes[-1] if sizes else getattr(model.config, "hidden_size", 0)),
    )


def check_fits(
    config: Any, tokenizer: Any, max_length: int, where: str = "model.tokenizer"
) -> None:
    """Raises ModelError if the tokenizer has more ids than the embedding has rows, or `max_length` exceeds the model's positions."""
    text = config.get_text_config()
    if not all(
        isinstance(getattr(text, key, None), kind)
        for key, kind in (("vocab_size", int), ("max_position_embeddings", int | None))
    ):
        raise ModelError(
            "vocab_size or max_position_embeddings is no whole number",
            where=f"{config.name_or_path or 'model'}: config.json",
        )
    if len(tokenizer) > text.vocab_size:
        what = f"the tokenizer has {len(tokenizer)} tokens but the embedding only {text.vocab_size} rows"
        fix = "name the tokenizer's folder as model.tokenizer, and the embedding grows"
        if where != "model.tokenizer":
            fix = "give that model the policy's tokenizer or new_tokens, or name another model"
        raise ModelError(what, where=where, fix=fix)
    check_length(getattr(text, "max_position_embeddings", None), max_length)
