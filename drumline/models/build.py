"""The model, by Hugging Face's classes: laid out without weights if possible, otherwise built whole."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch

from drumline.core.model import Head, ModelConfig
from drumline.dist.seeds import drawing
from drumline.errors import ModelError
from drumline.models.classes import LM, auto_class, with_classes
from drumline.models.files import from_hub, hub_options, quiet
from drumline.models.load import load_grown, on_meta
from drumline.models.scores import extra_heads, with_head
from drumline.models.shards import Drawn, Loaded, Source, Values, Whole, aliases, from_files, torn
from drumline.models.vocabulary import Growth, grow_whole, set_rows

logger = logging.getLogger(__name__)

# Methods of packing that transformers undoes as it reads weights.
UNPACKED = ("fp8", "mxfp4", "compressed-tensors")


def lay_out(
    path: str | None,
    model: ModelConfig,
    seed: int,
    device: str = "cpu",
    dtype: Any = None,
    checkpoint_keys: frozenset[str] = frozenset(),
    head: Head = "lm",
    labels: tuple[str, ...] = (),
    draws: bool = True,
    draw_device: str | None = None,
) -> tuple[Any, Source]:
    """A model in fp32 (or `dtype`) without weights, and the source of its weights: `path`, or `seed` if init is random.

    It ends in `head`; a head of classes has as many logits as there are `labels`. If the files have no head of classes, scores or values,
    or one of another shape, it is drawn; with `draws` False that is an error, since a frozen model needs a trained head.

    Parameters and persistent buffers are on the meta device, other buffers are real. A model whose weights cannot be read in parts is
    built whole on `device`; the reason is logged. Attention is transformers' own, where it has no such: its default, sdpa, or eager for a
    class without sdpa (`models.attention` lays ours over it).
    `draw_device`: the device that the run trains on, whose generator draws; None: `device`.
    `checkpoint_keys`: names of tensors that a checkpoint will fill; if these are all, no file is read.
    Raises ModelError, also if the folder lacks weights of some part of the model (transformers would draw them).
    """
    quiet()
    config, growth = load_grown(path, model)
    config = _unpacked(with_classes(config, head, labels), model)
    own = model.attention in ("auto", "documents", "varlen")
    options = {
        "dtype": dtype or torch.float32,
        "attn_implementation": None if own else model.attention,
    }
    pretrained = path if model.init == "pretrained" else None
    try:
        built = _without_weights(path, model, config, options, head)
        if all(checkpoint_keys.intersection(names) for names in aliases(built)):
            return built, Loaded()
        if pretrained is None:
            return built, Drawn(built, seed, draw_device or device)
        fresh = extra_heads(built)
        files = from_files(pretrained, model, built, fresh, growth)
        lacking = fresh - files.places.keys()
        if not draws:
            _require_heads(lacking, pretrained)
        return built, replace(
            files, rest=Drawn(built, seed, draw_device or device)
        ) if lacking else files
    except Whole as reason:
        logger.warning("the whole model is built on each rank: %s", reason)
    with drawing(seed):
        if pretrained is None:
            remote = {"trust_remote_code": model.trust_remote_code}
            built = from_hub(
                path or "model.config",
                model,
                lambda: auto_class(config, head).from_config(config, **options, **remote),
            )
        else:
            built = _pretrained(pretrained, model, config, options, head, draws, growth)
    built = with_head(built, head)
    built.config.use_cache = False
    return built.to(device), Loaded()


def build_model(
    path: str | None,
    model: ModelConfig,
    seed: int,
    device: str = "cpu",
    head: Head = "lm",
    labels: tuple[str, ...] = (),
    checkpoint_keys: frozenset[str] = frozenset(),
) -> Any:
    """`lay_out`, filled: the whole model on `device`."""
    built, source = lay_out(
        path, model, seed, device, checkpoint_keys=checkpoint_keys, head=head, labels=labels
    )
    Values(source, device, seed, checkpoint_keys).fill(built)
    return built


def _unpacked(config: Any, model: ModelConfig) -> Any:
    """The config, by which transformers unpacks weights of fp8 or mxfp4 as it reads them, on a GPU too, since they learn in another type;
    where none are read, it says nothing of packed weights."""
    packed = getattr(config, "quantization_config", None)
    if packed is not None and model.init == "random":
        del config.quantization_config
    elif isinstance(packed, dict) and packed.get("quant_method") in UNPACKED:
        packed["dequantize"] = True
    return config


def _without_weights(
    path: str | None, model: ModelConfig, config: Any, options: dict[str, Any], head: Head
) -> Any:
    """The model on the meta device, apart from the buffers that no file holds. Raises Whole if that is not reliable."""
    if type(config).__module__.startswith("transformers_modules"):
        raise Whole("it brings code of its own")
    if getattr(config, "quantization_config", None) is not None:
        raise Whole("its weights are quantised")
    built = on_meta(config, head, path or "model.config", model, **options)
    # As from_pretrained does it: the model's own rules write what is not marked as initialised.
    stored = {id(tensor): tensor for tensor in built.state_dict(keep_vars=True).values()}
    for tensor in stored.values():
        tensor._is_hf_initialized = True
    for name, buffer in list(built.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        built.get_submodule(owner)._buffers[key] = torch.empty_like(buffer, device="cpu")
    built.initialize_weights()
    for tensor in stored.values():
        del tensor._is_hf_initialized
    built.config.use_cache = False
    return built


def _pretrained(
    path: str,
    model: ModelConfig,
    config: Any,
    options: dict[str, Any],
    head: Head,
    draws: bool,
    growth: Growth | None,
) -> Any:
    stored = config
    if growth is not None and growth.added:
        stored = deepcopy(config)
        set_rows(stored, growth.stored)
    plain, options = (
        options,
        options | hub_options(path, model) | {"config": stored, "output_loading_info": True},
    )
    options |= {"ignore_mismatched_sizes": True} if head not in LM else {}
    built, report = from_hub(
        path, model, lambda: cast(Any, auto_class(config, head).from_pretrained(path, **options))
    )
    if growth is not None and growth.changes_rows:
        grow_whole(built, growth)
    lacking = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if not draws:
        _require_heads(extra_heads(built) & lacking, path)
    if missing := lacking - extra_heads(built):
        first, more = min(missing), f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        larger = "model.config asks for a larger model than this: take it back, or set model.init: random"
        raise ModelError(
            f"has no weights for {first}{more}",
            where=path,
            fix=larger if model.config else "name a whole model",
        )
    _as_laid_out(built, on_meta(config, head, path, model, **plain), path)
    return built


def _as_laid_out(built: Any, laid_out: Any, where: str) -> None:
    """Freeze what the model's own class freezes, such as the bias of a router: as transformers reads weights, all of them learn. Raises
    ModelError where it did not tie what the config ties."""
    frozen = {
        name for name, parameter in laid_out.named_parameters() if not parameter.requires_grad
    }
    read = dict(built.named_parameters(remove_duplicate=False))
    for name in frozen & read.keys():
        read[name].requires_grad_(False)
    for first, *rest in aliases(laid_out):
        for other in rest:
            if first in read and other in read and read[first] is not read[other]:
                raise torn(first, other, where)


def _require_heads(lacking: frozenset[str], path: str) -> None:
    if lacking:
        what = f"has no weights for {min(lacking)}, and a frozen model keeps them as they are drawn"
        raise ModelError(
            what,
            where=path,
            fix="name a model whose head was trained, such as RUN/export of a reward run",
        )
