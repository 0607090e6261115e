"""Builds a model by Hugging Face's classes: without weights if possible, otherwise whole."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from drumline.config.model import Head, ModelConfig
from drumline.dist.seeds import use_seed
from drumline.errors import ModelError
from drumline.models.classes import WRITING, auto_class, set_classes
from drumline.models.files import call_loader, hub_options, silence_transformers
from drumline.models.load import (
    build_without_memory,
    config_around_text,
    load_config,
    load_grown,
    untie_unscaled_head,
)
from drumline.models.scores import add_head, extra_heads, remove_pooler
from drumline.models.shards import (
    DrawnWeights,
    NeedsFullModel,
    NothingToFill,
    Source,
    Values,
    find_weights_in_files,
    names_of_tensors,
    tied_weights_differ,
)
from drumline.models.text_part import TextNames, build_on_meta_device, take_text_part
from drumline.models.vocabulary import Growth, grow_whole, set_rows

logger = logging.getLogger(__name__)

# Formats of packed weights that transformers can unpack as it reads them.
UNPACKED = ("fp8", "mxfp4", "compressed-tensors")


@dataclass(frozen=True)
class ModelHead:
    """What a model ends in."""

    kind: Head = "lm"
    # The names of classes: a head of classes has a logit for each.
    labels: tuple[str, ...] = ()
    # Whether a head of classes, scores or values may be drawn at random, if the files lack it or
    # have it in another shape. If not, that raises ModelError: a frozen model needs a trained head.
    may_be_drawn: bool = True


LM_HEAD = ModelHead()


def lay_out(
    path: str | None,
    model: ModelConfig,
    seed: int,
    device: str = "cpu",
    dtype: Any = None,
    checkpoint_keys: frozenset[str] = frozenset(),
    head: ModelHead = LM_HEAD,
    draw_device: str | None = None,
) -> tuple[Any, Source]:
    """Return a model without weights, in fp32 or `dtype`, and the source of its weights.

    The weights are those of `path`, or drawn from `seed` if `init` is random. `draw_device`:
    torch's name of the device whose generator draws, such as cuda (see `DrawnWeights`); None:
    `device`.

    Parameters and persistent buffers are on the meta device, other buffers are real. A model whose
    weights cannot be read in parts is built whole on `device`; the reason is logged. Attention is
    transformers' own. If `model.attention` names none of transformers', it is the default: sdpa, or
    eager for a class without sdpa (`models.attention` replaces it).

    `checkpoint_keys`: names of tensors that a checkpoint will fill; if these are all, no file is
    read.
    Raises ModelError, also if the folder lacks weights of some part of the model (transformers
    would draw them).
    """
    silence_transformers()
    config, growth = load_grown(path, model)
    config = _request_unpacking(set_classes(config, head.kind, head.labels), model)
    # None: transformers' default. transformers does not know our own names of attention.
    implementation = None
    if model.attention not in ("auto", "documents", "varlen"):
        implementation = model.attention
    options = {
        "dtype": dtype or torch.float32,
        "attn_implementation": implementation,
    }
    pretrained = None
    if model.init == "pretrained":
        pretrained = path
    try:
        built = _build_on_meta(path, model, config, options, head.kind)
        if _has_all(checkpoint_keys, built):
            return built, NothingToFill()
        if pretrained is None:
            return built, DrawnWeights(built, seed, draw_device or device)
        heads = extra_heads(built)
        whole = None
        config_of_whole = config_around_text(pretrained, model)
        if config_of_whole is not None:
            whole = build_on_meta_device(config_of_whole)
        files = find_weights_in_files(pretrained, model, built, heads, growth, whole)
        # Heads that the files lack, such as the score of a reward model made of a causal LM.
        lacking = heads - files.places.keys()
        if not head.may_be_drawn:
            _require_heads(lacking, pretrained)
        if not lacking:
            return built, files
        drawn = DrawnWeights(built, seed, draw_device or device)
        return built, replace(files, rest=drawn)
    except NeedsFullModel as reason:
        logger.warning("the whole model is built on each rank: %s", reason)
    # Also if the weights are read: a head that the files lack is drawn, the same on each rank.
    with use_seed(seed):
        if pretrained is None:
            built = _draw_whole_model(path, model, config, options, head.kind)
        else:
            built = _read_whole_model(pretrained, model, config, options, head, growth)
    untie_unscaled_head(built)
    built = add_head(built, head.kind)
    built.config.use_cache = False
    return built.to(device), NothingToFill()


def _has_all(checkpoint_keys: frozenset[str], built: Any) -> bool:
    """Return whether a checkpoint fills each tensor of a model, under one of its names."""
    return all(checkpoint_keys.intersection(names) for names in names_of_tensors(built))


def _draw_whole_model(
    path: str | None, model: ModelConfig, config: Any, options: dict[str, Any], head: Head
) -> Any:
    """Return a whole model that its own initialisation draws from torch's random numbers."""

    def build() -> Any:
        make = auto_class(config, head).from_config
        return make(config, **options, trust_remote_code=model.trust_remote_code)

    return call_loader(path or "model.config", model, build)


def build_model(
    path: str | None,
    model: ModelConfig,
    seed: int,
    device: str = "cpu",
    head: Head = "lm",
    labels: tuple[str, ...] = (),
    checkpoint_keys: frozenset[str] = frozenset(),
) -> Any:
    """Return the model of `lay_out` with its weights, whole on `device`."""
    built, source = lay_out(
        path, model, seed, device, checkpoint_keys=checkpoint_keys, head=ModelHead(head, labels)
    )
    Values(source, device, seed, checkpoint_keys).fill(built)
    return built


def _request_unpacking(config: Any, model: ModelConfig) -> Any:
    """Return a config with which transformers unpacks packed weights as it reads them.

    It would not on a GPU, but the weights are trained in another type. If no weights are read the
    config gets no entry about packed ones.
    """
    packed = getattr(config, "quantization_config", None)
    if packed is not None and model.init == "random":
        del config.quantization_config
    elif isinstance(packed, dict) and packed.get("quant_method") in UNPACKED:
        packed["dequantize"] = True
    return config


def _build_on_meta(
    path: str | None, model: ModelConfig, config: Any, options: dict[str, Any], head: Head
) -> Any:
    """Return the model on the meta device; buffers that are in no file have values.

    Raises NeedsFullModel for a model of which this may not be right.
    """
    if type(config).__module__.startswith("transformers_modules"):
        raise NeedsFullModel("it brings code of its own")
    if getattr(config, "quantization_config", None) is not None:
        raise NeedsFullModel("its weights are quantised")
    built = build_without_memory(config, head, path or "model.config", model, **options)
    # As in from_pretrained, the model initialises only tensors without this mark.
    stored = {id(tensor): tensor for tensor in built.state_dict(keep_vars=True).values()}
    for tensor in stored.values():
        tensor._is_hf_initialized = True
    # These buffers, such as rotary frequencies, are in no file: the model's rules write them anew.
    for name, buffer in list(built.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        built.get_submodule(owner)._buffers[key] = torch.empty_like(buffer, device="cpu")
    built.initialize_weights()
    for tensor in stored.values():
        del tensor._is_hf_initialized
    built.config.use_cache = False
    return built


def _read_whole_model(
    path: str,
    model: ModelConfig,
    config: Any,
    options: dict[str, Any],
    head: ModelHead,
    growth: Growth | None,
) -> Any:
    """Return a whole model that transformers reads from a folder or hub id.

    Raises ModelError if the files lack weights of a language model, or of a head that may not be
    drawn.
    """
    # transformers reads the files by a config of their own number of rows; `grow_whole` adds the
    # rest.
    stored = config
    if growth is not None and growth.added_rows:
        stored = deepcopy(config)
        set_rows(stored, growth.stored)
    reading = options | hub_options(path, model)
    reading |= {"config": stored, "output_loading_info": True}
    if head.kind not in WRITING:
        # The files may have a head of other classes, which is drawn anew.
        reading["ignore_mismatched_sizes"] = True

    config_of_whole = config_around_text(path, model)
    if config_of_whole is not None:
        reading["config"] = _request_unpacking(config_of_whole, model)
        text = build_without_memory(stored, head.kind, path, model, **options)
        built, lacking = _read_text_part(path, model, reading, text)
    else:
        loader = auto_class(config, head.kind)
        built, lacking = _read_all(path, model, reading, loader)
    if growth is not None and growth.changes_rows:
        grow_whole(built, growth)
    heads = extra_heads(built)
    if not head.may_be_drawn:
        _require_heads(heads & lacking, path)
    missing = lacking - heads
    if head.kind == "embedding":
        remove_pooler(built)
        missing &= built.state_dict().keys()
    if missing:
        raise _missing_error(missing, path, model)
    _match_layout(built, build_without_memory(config, head.kind, path, model, **options), path)
    return built


def _read_all(
    path: str, model: ModelConfig, reading: dict[str, Any], loader: Any
) -> tuple[Any, set[str]]:
    """Return a model that an Auto class of transformers reads, and the weights that it has drawn.

    These are the missing and the mismatched ones, of which transformers only warns. `reading`: the
    arguments of `from_pretrained`.
    """

    def read() -> Any:
        return cast(Any, loader.from_pretrained(path, **reading))

    built, report = call_loader(path, model, read)
    lacking = set(report["missing_keys"])
    for name, *_ in report["mismatched_keys"]:
        lacking.add(name)
    return built, lacking


def _read_text_part(
    path: str, model: ModelConfig, reading: dict[str, Any], text: Any
) -> tuple[Any, set[str]]:
    """Return the language model within the vision-language model of some files.

    `text`: the language model on the meta device, which gets its weights. Returns it, and the names
    of its weights that the files lack.
    """
    from transformers import AutoModelForImageTextToText

    whole, lacking_in_whole = _read_all(path, model, reading, AutoModelForImageTextToText)
    names = TextNames(whole, text)
    lacking = take_text_part(whole, text)
    for name in lacking_in_whole:
        own_name = names.name_in_text_model(name)
        if own_name is not None:
            lacking.add(own_name)
    return text, lacking


def read_pretrained(path: str, model: ModelConfig, reading: dict[str, Any]) -> tuple[Any, set[str]]:
    """Return a language model of a folder or hub id, and the names of weights that its files lack.

    `reading`: the arguments of `from_pretrained`. Of a vision-language model whose images are not
    read here it is the language model within it.
    """
    config = load_config(path, model)
    config_of_whole = config_around_text(path, model)
    if config_of_whole is None:
        return _read_all(path, model, reading, auto_class(config))
    text = build_without_memory(config, "lm", path, model, dtype=reading["dtype"])
    return _read_text_part(path, model, {**reading, "config": config_of_whole}, text)


def _missing_error(missing: set[str], path: str, model: ModelConfig) -> ModelError:
    """Return the error for files that lack weights of a model. `missing`: their names."""
    what = f"has no weights for {min(missing)}"
    if len(missing) > 1:
        what += f" and {len(missing) - 1} more"
    fix = "name a whole model"
    if model.config:
        fix = (
            "model.config asks for a larger model than this:"
            " take it back, or set model.init: random"
        )
    return ModelError(what, where=path, fix=fix)


def _match_layout(built: Any, laid_out: Any, where: str) -> None:
    """Freeze the weights that the model's own class freezes, such as the bias of a router.

    transformers makes all weights trainable when it reads them. `laid_out`: the same model on the
    meta device. Raises ModelError if transformers did not tie weights that the config ties.
    """
    frozen = set()
    for name, parameter in laid_out.named_parameters():
        if not parameter.requires_grad:
            frozen.add(name)
    read = dict(built.named_parameters(remove_duplicate=False))
    for name in frozen & read.keys():
        read[name].requires_grad_(False)
    for first, *rest in names_of_tensors(laid_out):
        for other in rest:
            # `read` has parameters alone, but names of tied tensors may be buffers' too.
            if first not in read or other not in read:
                continue
            if read[first] is not read[other]:
                raise tied_weights_differ(first, other, where)


def _require_heads(lacking: frozenset[str], path: str) -> None:
    """Raise ModelError if a frozen model lacks weights of its head."""
    if lacking:
        what = f"has no weights for {min(lacking)}, and a frozen model keeps them as they are drawn"
        fix = "name a model whose head was trained, such as RUN/export of a reward run"
        raise ModelError(what, where=path, fix=fix)
