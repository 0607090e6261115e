"""Low-rank adapters (LoRA, Hu et al. 2021) by PEFT, injected into a model in place.

The model's class and its blocks stay the same. An adapted layer `q_proj` becomes PEFT's layer of
that name with `base_layer` (frozen), `lora_A.default` and `lora_B.default`:

    y = base(x) + alpha / r · B(A(dropout(x)))

B starts at zero, so a fresh adapter does not change what the model computes. The same holds for
DoRA's lengths of rows, PiSSA's factors (whose product is subtracted from the base layer) and
trained rows of tokens. The first values of these three are computed from a whole weight
(`derive_first_values`), also if a rank has only a part of it.

The experts of a mixture lie in tensors [experts, …], over which PEFT has layers of another kind
(models.adapted_experts).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from drumline.config.config import LoRAConfig, LoRAFactors
from drumline.config.registry import nearest
from drumline.dist.seeds import derive, use_seed
from drumline.errors import DrumlineError, ModelError
from drumline.foreign import read_object, require_package
from drumline.models.blocks import (
    blocks,
    embedding_and_head,
    expert_modules,
    find_base_layer,
    is_head_tied,
    takes_adapters,
)
from drumline.models.classes import ends_in_hidden_states, is_seq2seq, reads_images
from drumline.models.direct_weights import directly_read_layers
from drumline.models.packed import PackedLinear, PackedTensor, packings_of
from drumline.models.parts import is_part, names_in_part, unread_names
from drumline.models.scores import extra_heads
from drumline.plan.facts import has_ending, names_attention

logger = logging.getLogger(__name__)

# PEFT's name for a model's only adapter; further ones have names of their own.
NAME = "default"
# The ends of the names of the two factors.
A = f".lora_A.{NAME}.weight"
B = f".lora_B.{NAME}.weight"
# The end of a factor's name, which has the name of its adapter.
FACTOR = re.compile(
    r"\.(lora_A|lora_B|lora_magnitude_vector)\.([^.]+)\.weight$"
    r"|\.(lora_embedding_A|lora_embedding_B)\.([^.]+)$"
)
# The end of the name of any parameter of an adapter: a factor, or trained rows of tokens.
TRAINED = re.compile(FACTOR.pattern + r"|\.trainable_tokens_delta\.[^.]+$")
WHERE = "adapter.targets"
FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# PEFT's warning of adapters over a tied embedding and head. `merge` unties them.
TIED = "Model has `tie_word_embeddings=True`"
# Rounds of subspace iteration for `pissa_fast`.
ROUNDS = 16
# How many products compare a merged layer with the adapted one.
PROBES = 16
# Rows of an embedding that are in memory in fp64 at once.
ROWS_AT_ONCE = 4096
UNMERGED = "drumline export RUN --to FOLDER --adapter writes the adapter by itself"


def target_names(model: Any, adapter: LoRAFactors, trained: Iterable[str] = ()) -> list[str]:
    """Return the full names of what gets an adapter, in the model's order.

    These are linear layers of the blocks, embedding and head where the targets name them, and after
    the layers the tensors of a mixture's experts.
    `trained`: names of parameters that are trained whole, whose layers get no adapter.
    A target may also be a part of a vision-language model, see `models.parts`.
    Raises ModelError if a target names no layer.
    """
    is_named = isinstance(adapter.targets, list)
    linear_layers = _linear_layers(model, with_tower=is_named)
    ends = _ends_of_vocabulary(model)
    trained_whole = set(trained)
    candidates = _drop_trained_layers(model, linear_layers, trained_whole)
    expert_tensors = _expert_tensors(model)
    experts = [name for name in expert_tensors if name not in trained_whole]
    if not candidates and not experts:
        what = f"{type(model).__name__} has no linear layers in its blocks"
        raise ModelError(what, where=WHERE, fix="use adapter=none for this model")
    if adapter.targets == "all-linear":
        return [*candidates, *experts]
    if adapter.targets == "attention":
        return _layers_of_attention(model, candidates)
    endings = []
    chosen: set[str] = set()
    for target in adapter.targets:
        if is_part(model, target):
            chosen.update(_layers_of_part(model, target, [*candidates, *experts]))
        else:
            endings.append(target)
    candidates |= _drop_trained_layers(model, ends, trained_whole)
    all_layers = [*linear_layers, *ends, *expert_tensors]
    chosen |= _layers_by_endings(model, endings, candidates, experts, all_layers)
    in_order = [name for name, _ in model.named_modules() if name in chosen]
    return in_order + [name for name in experts if name in chosen]


def _expert_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → tensor of a mixture's experts, with a matrix for each of them.

    Those of classes that `models.expert_layers` does not know are left out.
    """
    found = {}
    for path in expert_modules(model):
        module = model.get_submodule(path)
        if not takes_adapters(module):
            continue
        for name, tensor in module.named_parameters(path, recurse=False):
            if tensor.ndim == 3:
                found[name] = tensor
    return found


def _drop_trained_layers(
    model: Any, layers: dict[str, Any], trained: Collection[str]
) -> dict[str, Any]:
    """Return those of some layers whose weight is not in `trained`, the names of parameters."""
    # Of tied weights `trained` has the first name.
    first_name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {}
    for name, layer in layers.items():
        if first_name_of.get(id(layer.weight)) not in trained:
            kept[name] = layer
    return kept


def _linear_layers(model: Any, with_tower: bool) -> dict[str, Any]:
    """Return name → linear layer (also GPT-2's Conv1D) of the blocks.

    If a model declares no blocks these are all linear layers but its head. Those of
    `_modules_without_adapters` are left out. `with_tower`: whether the layers of a vision tower are
    included. They only get adapters if a user names layers.
    """
    from drumline.vendor.transformers import Conv1D

    inside = set()
    for block in blocks(model) or [model]:
        inside |= {id(module) for module in block.modules()}
    if hasattr(model, "get_output_embeddings"):
        inside.discard(id(model.get_output_embeddings()))
    has_tower = getattr(model.config, "vision_config", None) is not None
    if has_tower and not with_tower:
        inside &= {id(module) for module in model.get_decoder().modules()}
    elif has_tower:
        # A projector is no block.
        names = [name for name, _ in model.named_modules()]
        for name in names_in_part(model, "projector", names, WHERE):
            inside.add(id(model.get_submodule(name)))
    for module in _modules_without_adapters(model):
        inside -= {id(part) for part in module.modules()}
    found = {}
    for name, module in model.named_modules():
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D):
            found[name] = module
    return found


def _modules_without_adapters(model: Any) -> list[nn.Module]:
    """Return the routers of experts, which stay frozen, and layers that an adapter would not change.

    These are the ones whose output the model does not read, and those of `models.direct_weights`.
    """
    found = [model.get_submodule(name) for name in unread_names(model)]
    found += directly_read_layers(model)
    for module in model.modules():
        if "Router" in type(module).__name__:
            found.append(module)
    return found


def _layers_of_part(model: Any, part: str, candidates: Collection[str]) -> list[str]:
    """Return the names of the candidates in a part of a vision-language model.

    Raises ModelError if the part has none.
    """
    chosen = names_in_part(model, part, candidates, WHERE)
    if not chosen:
        what = f"the part {part!r} of {type(model).__name__} has no layer that can get an adapter"
        raise ModelError(what, where=WHERE, fix="take it out")
    return chosen


def _last_names(names: Iterable[str]) -> list[str]:
    """Return the last parts of some names of layers, sorted and each once."""
    last_names = set()
    for name in names:
        _, _, last_name = name.rpartition(".")
        last_names.add(last_name)
    return sorted(last_names)


def _layers_of_attention(model: Any, candidates: Collection[str]) -> list[str]:
    """Return the names of candidates inside modules whose class is named an attention."""
    outer_names = []
    for name, module in model.named_modules():
        if names_attention(type(module).__name__):
            outer_names.append(f"{name}.")
    prefixes = tuple(outer_names)
    chosen = [name for name in candidates if name.startswith(prefixes)]
    if not chosen:
        what = f"{type(model).__name__} has no linear layers in an attention"
        offer = f"there are {', '.join(_last_names(candidates))}"
        raise ModelError(what, where=WHERE, fix=offer)
    return chosen


def _layers_by_endings(
    model: Any,
    endings: Sequence[str],
    layers: Collection[str],
    experts: Collection[str],
    all_layers: Collection[str],
) -> set[str]:
    """Return the names of layers and of tensors of experts with one of the endings.

    `all_layers`: these, and what is trained whole. An ending that layers and tensors of experts
    have (`down_proj`) means the layers; `experts.down_proj` means the experts.
    Raises ModelError for an ending that none of them has.
    """
    chosen: set[str] = set()
    for ending in endings:
        with_ending = {name for name in layers if has_ending(name, ending)}
        with_ending = with_ending or {name for name in experts if has_ending(name, ending)}
        chosen |= with_ending
        if with_ending:
            continue
        if any(has_ending(name, ending) for name in all_layers):
            what = f"the weight of {ending} is trained whole, and gets no adapter"
            fix = f"take {ending} out here, or its weight out of adapter.modules_to_save"
            raise ModelError(what, where=WHERE, fix=fix)
        _refuse_without_adapter(model, ending)
        last_names = _last_names([*layers, *experts])
        guess = nearest(ending, last_names)
        what = f"no layer of {type(model).__name__} that can get an adapter is named {ending!r}"
        fix = f"there are {', '.join(last_names)}"
        if guess:
            fix = f"did you mean {guess}?"
        raise ModelError(what, where=WHERE, fix=fix)
    return chosen


def _refuse_without_adapter(model: Any, ending: str) -> None:
    """Raise ModelError if layers with this ending exist, but are of those that get no adapter."""
    directly_read = {id(layer) for layer in directly_read_layers(model)}
    is_router = False
    for name, module in model.named_modules():
        is_router = is_router or ("Router" in type(module).__name__ and has_ending(name, ending))
        if id(module) in directly_read and has_ending(name, ending):
            owner, _, _ = name.rpartition(".")
            reader = type(model.get_submodule(owner)).__name__
            what = f"{reader} reads the weight of {ending} itself, past an adapter"
            fix = f"take {ending} out, or name it in adapter.modules_to_save to train it whole"
            raise ModelError(what, where=WHERE, fix=fix)
    if is_router:
        what = f"{ending} is a router of experts, which gets no adapter"
        fix = f"take {ending} out, or name it in adapter.modules_to_save to train it whole"
        raise ModelError(what, where=WHERE, fix=fix)


def find_targets(model: Any, adapter: LoRAConfig) -> tuple[dict[str, list[str]], set[str]]:
    """Return what each adapter is laid on, and the names of the parameters that are trained whole.

    The former are names of layers and of tensors of experts. The model may lie on the meta device,
    and PEFT need not be installed.
    Raises ModelError for a layer, module or token that the model does not have, and for what an
    embedding, a head or experts cannot get.
    """
    unread = tuple(f"{name}." for name in unread_names(model))
    trained = set()
    for name in _parameters_below(model, adapter.modules_to_save):
        # Weights that the model does not read would get no gradients.
        if not name.startswith(unread):
            trained.add(name)
    names = {NAME: target_names(model, adapter, trained)}
    for adapter_name, options in adapter.more.items():
        names[adapter_name] = target_names(model, options, trained)
    _require_rows(model, adapter.trainable_tokens)
    _require_ends(model, adapter, names)
    _require_plain_experts(model, adapter, names)
    return names, trained


def _require_plain_experts(
    model: nn.Module, adapter: LoRAConfig, names: dict[str, list[str]]
) -> None:
    """Raise ModelError for DoRA, PiSSA or several adapters over different tensors of experts.

    PEFT has none of these over tensors. `names`: the layers and tensors of each adapter.
    """
    tensors = _expert_tensors(model).keys()
    sets = []
    for chosen in names.values():
        experts = {name for name in chosen if name in tensors}
        if experts:
            sets.append(experts)
    if not sets:
        return
    instead = "name the layers, without experts: adapter.targets=attention, or a list"
    if adapter.dora:
        what = "PEFT has no DoRA over the experts of a mixture, which these targets include"
        raise ModelError(what, where="adapter.dora", fix=f"{instead}; or dora=false")
    if adapter.init != "zero":
        what = "PEFT has no PiSSA over the experts of a mixture, which these targets include"
        raise ModelError(what, where="adapter.init", fix=f"{instead}; or init=zero")
    if any(experts != sets[0] for experts in sets):
        what = "PEFT wants all adapters over experts to be over the same of their tensors"
        fix = "let each adapter name the same tensors of experts, or none"
        raise ModelError(what, where="adapter.more", fix=fix)


def inject(model: Any, adapter: LoRAConfig, seed: int) -> None:
    """Inject adapters into what `find_targets` names, and freeze all else.

    `modules_to_save` and heads that no language model has (scores, values, classes) stay fully
    trainable. The values depend on `seed` and the weights alone, not on the number of ranks. A
    model on the meta device gets adapters there, to be filled with `first_values` and
    `derive_first_values`.
    """
    require_package("peft", "adapter")
    names, trained = find_targets(model, adapter)
    is_on_meta = next(model.parameters()).is_meta
    _inject_layers(model, adapter, names, trained, is_on_meta)
    for path, layer in _peft_layers(model):
        if hasattr(layer, "token_indices"):
            # PEFT's copies of the original rows, which the base layer has too.
            layer.trainable_tokens_original.clear()
            continue
        # All adapters are on, and train together.
        layer.set_adapter(list(names))
        # `adapter.init` is for the first adapter alone; further ones begin at zero.
        layer.starts_at = "zero"
        if NAME in layer.lora_A:
            layer.starts_at = adapter.init
        layer.draws_by = derive(seed, "adapter", path)
    whole_names = extra_heads(model) | trained
    for name, parameter in model.named_parameters():
        is_of_adapter = is_adapter(name)
        parameter.requires_grad_(is_of_adapter or name in whole_names)
        if is_of_adapter and not is_on_meta:
            value = first_values(name, parameter.shape, seed)
            parameter.data.copy_(value)
    if not is_on_meta:
        _fill_from_weights(model)


def _inject_layers(
    model: Any,
    adapter: LoRAConfig,
    names: dict[str, list[str]],
    trained: Collection[str],
    is_on_meta: bool,
) -> None:
    """Put PEFT's layers into a model.

    `names`, `trained`: as `find_targets` returns them. `is_on_meta`: the model has no memory, and
    its adapters get none.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from drumline.models.adapted_experts import adopt_layers

    tensors = _expert_tensors(model).keys()
    adapted: set[str] = set()
    for chosen in names.values():
        adapted.update(chosen)
    token_rows = _token_rows(model, adapter.trainable_tokens, trained, adapted)
    peft_configs = {}
    task_type = "CAUSAL_LM"
    if is_seq2seq(model):
        task_type = "SEQ_2_SEQ_LM"
    for adapter_name, chosen in names.items():
        is_first = adapter_name == NAME
        options: LoRAFactors = adapter
        if not is_first:
            options = adapter.more[adapter_name]
        layers = [name for name in chosen if name not in tensors]
        experts = [name for name in chosen if name in tensors]
        layer_classes = {type(model.get_submodule(name)).__name__ for name in layers}
        peft_configs[adapter_name] = LoraConfig(
            r=options.r,
            lora_alpha=_to_int_if_whole(options.alpha),
            use_rslora=options.rslora,
            use_dora=is_first and adapter.dora,
            # PEFT wants none over tensors: `_set_dropout` sets it afterwards.
            lora_dropout=0.0 if experts else options.dropout,
            target_modules=_shorten_names(model, layers),
            target_parameters=_shorten_tensor_names(model, experts) or None,
            trainable_token_indices=token_rows if is_first else None,
            fan_in_fan_out=layer_classes == {"Conv1D"},
            task_type=task_type,
        )
    # PEFT draws first values, which `inject` replaces: `use_seed` keeps the run's random state.
    with use_seed(None), warnings.catch_warnings(), _keep_named_targets():
        # Blocks with layers of both kinds: PEFT resolves it by layer.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        # Of the adapter before.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message=TIED)
        for adapter_name, peft_config in peft_configs.items():
            inject_adapter_in_model(
                peft_config, model, adapter_name=adapter_name, low_cpu_mem_usage=is_on_meta
            )
    adopt_layers(model)
    _set_dropout(model, adapter)


def _set_dropout(model: nn.Module, adapter: LoRAConfig) -> None:
    """Give each layer of PEFT's the dropout that its adapters have in the config."""
    rates = {NAME: adapter.dropout}
    for adapter_name, options in adapter.more.items():
        rates[adapter_name] = options.dropout
    for _, layer in _peft_layers(model):
        for adapter_name in getattr(layer, "lora_dropout", {}):
            if rates[adapter_name]:
                layer.lora_dropout[adapter_name] = nn.Dropout(rates[adapter_name])


def _fill_from_weights(model: Any) -> None:
    """Fill the adapters of a whole model that begin as functions of its weights.

    Each layer keeps its first factors, which `save_adapter` needs.
    """
    for path, layer in layers_derived_from_weights(model):
        base_weight = layer.get_base_layer().weight
        values = derive_first_values(layer, base_weight.detach().float())
        for name, value in values.items():
            model.get_parameter(f"{path}.{name}").data.copy_(value)
        layer.first = {name: value for name, value in values.items() if "lora_" in name}


@contextlib.contextmanager
def _keep_named_targets() -> Iterator[None]:
    """Within, PEFT adapts the modules that a config names and nothing else.

    For most mixtures PEFT takes `gate_proj`, `up_proj` and `down_proj` for the experts, which had
    these names before transformers 5: it would leave out the dense layers and the shared experts
    that have them now, and adapt the experts instead.
    """
    from drumline.vendor.peft import weight_conversion

    with mock.patch.object(
        weight_conversion, "convert_peft_config_for_transformers", lambda *_, **__: None
    ):
        yield


def _targets_taken_for_experts(options: Any, model: Any) -> list[str]:
    """Return the targets that PEFT, reading these files, would take for a mixture's experts.

    `options`: PEFT's config, as it is about to be saved.
    """
    from drumline.vendor.peft import weight_conversion

    # The conversion changes the config in place.
    read = copy.deepcopy(options)
    try:
        weight_conversion.convert_peft_config_for_transformers(read, model=model, conversions=None)
    except ValueError:  # gate_proj without up_proj: PEFT refuses to read it
        return sorted(options.target_modules)
    taken = set(options.target_modules) - set(read.target_modules)
    return sorted(taken)


def layers_derived_from_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of each layer whose first values are computed from a whole weight.

    The layer is one of PEFT's, whose base layer has the weight, or a packed layer without an
    adapter. For packed tensors of experts it is a `PackedTensor`, and the name that of the module
    that holds it. Of two layers that share a weight only one is yielded.
    """
    tuned = {layer for _, layer in _peft_layers(model)}
    if not tuned:
        return
    for path, layer in model.named_modules():
        for packing in packings_of(layer).values():
            yield path, packing
        is_packed = isinstance(find_base_layer(layer), PackedLinear)
        if layer in tuned:
            if _begins_from_weight(layer, is_packed):
                yield path, layer
        elif is_packed and not path.endswith(".base_layer"):
            yield path, layer


def _begins_from_weight(layer: Any, is_packed: bool) -> bool:
    """Return whether first values of one of PEFT's layers are computed from its base's weight."""
    if getattr(layer, "tied_adapter", None) is not None:
        return False
    has_token_rows = hasattr(layer, "token_indices")
    is_pissa = getattr(layer, "starts_at", "zero") != "zero"
    is_dora = bool(getattr(layer, "lora_magnitude_vector", ()))
    return has_token_rows or is_packed or is_pissa or is_dora


def borrowed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield (layer, parameter) for each parameter that is used by a module that does not own it.

    DoRA's magnitudes use the weights of the base layer and of A. Rows of tokens and the factors of
    an embedding are owned by dictionaries of parameters. The layer around a mixture's experts uses
    all tensors within.
    """
    for _, layer in _layers_of_experts(model):
        for parameter in layer.parameters():
            yield layer, parameter
    for _, layer in _peft_layers(model):
        for parameter in _parameters_in_dictionaries(layer):
            yield layer, parameter
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            for parameter in layer.get_base_layer().parameters():
                yield magnitude, parameter
            for parameter in layer.lora_A.parameters():
                yield magnitude, parameter


def _parameters_in_dictionaries(layer: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of one of PEFT's layers that dictionaries of parameters own."""
    if hasattr(layer, "token_indices"):
        yield from layer.parameters()
    for factors in ("lora_embedding_A", "lora_embedding_B"):
        yield from getattr(layer, factors, {}).values()


def derive_first_values(layer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name within a layer → first value, for a layer of `layers_derived_from_weights`.

    They are fp32, or for a packed layer its codes. `weight`: the whole weight of the base layer, as
    its file has it. If PiSSA changes it, the changed weight is among the values
    (base_layer.weight). PiSSA (Meng et al. 2024): U√(S/s) and √(S/s)Vᵀ of the r largest singular
    values S; s is the scale. DoRA (Liu et al. 2024): the length of each row of base and factors
    together, as the base is kept.
    """
    if hasattr(layer, "token_indices"):
        values = {}
        for name, rows in layer.token_indices.items():
            values[f"trainable_tokens_delta.{name}"] = weight[rows]
        return values
    if isinstance(layer, PackedLinear):
        return {"packed": layer.pack_weight(weight)}
    if isinstance(layer, PackedTensor):
        return {layer.parameter_name: layer.pack_weight(weight)}
    return _first_factors(layer, weight)


def _first_factors(layer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `derive_first_values` for one of PEFT's layers that has factors.

    The order matters: first PiSSA subtracts its product from the weight, then the rest is packed,
    and last DoRA measures base and factors as they will be stored.
    """
    values: dict[str, torch.Tensor] = {}
    base = find_base_layer(layer)
    is_packed = isinstance(base, PackedLinear)
    # What the factors add to the base at first. This is 0, except for PiSSA.
    product = torch.zeros((), device=weight.device)
    if layer.starts_at != "zero":
        # [out, in]: GPT-2's Conv1D has inputs first.
        matrix = weight
        if layer.fan_in_fan_out:
            matrix = weight.T
        rank = layer.r[NAME]
        scale = layer.scaling[NAME]
        seed = None
        if layer.starts_at == "pissa_fast":
            seed = layer.draws_by
        first, second = _principal(matrix, rank, scale, seed)
        product = scale * second @ first
        weight = matrix - product
        if layer.fan_in_fan_out:
            weight = weight.T
        # Names within the layer have no dot ahead.
        values[A[1:]] = first
        values[B[1:]] = second
        if not is_packed:
            values["base_layer.weight"] = weight
    if is_packed:
        values["base_layer.packed"] = base.pack_weight(weight)
    if layer.lora_magnitude_vector:
        # The base as it is stored, which rounds it.
        if is_packed:
            kept = base.unpack(torch.float32, values["base_layer.packed"])
        else:
            kept = weight.to(base.weight.dtype).float()
        has_inputs_first = layer.fan_in_fan_out or isinstance(base, nn.Embedding)
        if has_inputs_first:
            kept = kept.T
        together = kept + product
        values[f"lora_magnitude_vector.{NAME}.weight"] = together.norm(dim=1)
    return values


def _principal(
    matrix: torch.Tensor, rank: int, scale: float, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, in] and B [out, r] of the best approximation of a matrix by rank r.

    `scale` · BA is the part of `matrix` [out, in] that belongs to its r largest singular values.
    `seed`: these are found approximately, by subspace iteration from random numbers; None: exactly.
    """
    rows, columns = matrix.shape
    if seed is None:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        most = min(rank, rows, columns)
        left, sizes, right = _approximate_svd(matrix, most, seed)
    root = (sizes[:rank] / scale).sqrt()
    # A matrix may have fewer singular values than the factors have rows: the others stay zero.
    found = len(root)
    first = matrix.new_zeros(rank, columns)
    second = matrix.new_zeros(rows, rank)
    first[:found] = root[:, None] * right[:rank]
    second[:, :found] = left[:, :rank] * root
    return first, second


def _approximate_svd(
    matrix: torch.Tensor, count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return U [out, count], S [count] and Vᵀ [count, in] of the largest singular values.

    They are found by randomised subspace iteration (Halko et al. 2009, algorithms 4.4 and 5.1), as
    by torch.svd_lowrank. That would draw on the matrix's device. Here the CPU draws, since GPUs
    give other numbers, from which the iteration would end at other factors. The base without their
    product is frozen, and in no checkpoint: an export computes it again, maybe without a GPU.
    """
    is_wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix
    if is_wide:
        tall = matrix.T
    with use_seed(seed):
        start = torch.randn(tall.shape[1], count, dtype=matrix.dtype)
    basis = torch.linalg.qr(tall @ start.to(matrix.device)).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(tall.T @ basis).Q
        basis = torch.linalg.qr(tall @ basis).Q
    left, sizes, right = torch.linalg.svd(basis.T @ tall, full_matrices=False)
    left = basis @ left
    if is_wide:
        return right.T, sizes, left.T
    return left, sizes, right


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return TRAINED.search(name) is not None


def first_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the initial value of an adapter's parameter, unsharded, fp32 on the CPU.

    A is drawn as a linear layer (uniform, ±1/√in), B of an embedding from a normal distribution as
    PEFT has it; all else is zero. Each name has its own random numbers: a rank with a part of the
    model draws the same as one with all of it.
    """
    values = torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive(seed, "adapter", name))
    if ".lora_A." in name:
        # That of experts has a matrix for each of them.
        rows = values.view(-1, values.shape[-1])
        nn.init.kaiming_uniform_(rows, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        nn.init.normal_(values, generator=generator)
    return values


@contextlib.contextmanager
def switch_adapters(model: nn.Module, on: bool) -> Iterator[None]:
    """Turn the adapters off within the context unless `on`: the model is the base model then.

    With `on` nothing changes: adapters that a context around this one has turned off stay off.
    PEFT's own switch would also change which parameters are trainable, which FSDP2, DDP and
    DeepSpeed do not notice.
    """
    if on or not hasattr(model, "peft_config"):
        yield
        return
    was_disabled = []
    for _, layer in _peft_layers(model):
        was_disabled.append((layer, layer._disable_adapters))
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, before in was_disabled:
            layer._disable_adapters = before


@torch.no_grad()
def merge(model: Any) -> None:
    """Add each adapter to its base layer, and put that layer back in its place.

    If the embedding or a head tied to it has an adapter, these become two weights, and the config
    says so. Low-rank factors are merged in fp64, so only the last step rounds: an entry of the
    merged weight is off by half a unit in its last place at most, whatever kind the adapter has.
    That takes the room of a few fp64 copies of one layer at a time. The model must be in host
    memory. The result is held against the
    layer's own forward, which is what was trained (`_require_same_products`). Trained rows of
    tokens are copied as they are.

    Raises ModelError for an adapter that is not finite, and DrumlineError for a merged layer that
    is not the trained one.
    """
    _untie_adapted_ends(model)
    # A list, since the loop puts base layers in the places of adapted ones.
    for name, layer in list(_peft_layers(model)):
        is_inside_another = _is_over_experts(layer) and name.endswith(".base_layer")
        if is_inside_another or not _is_mergeable(layer):
            continue
        base: Any = layer.get_base_layer()
        if hasattr(layer, "token_indices"):
            _merge_layer(name, layer)
        elif _is_over_experts(layer):
            _merge_experts(name, layer)
        else:
            dtype = base.weight.dtype
            layer.eval().double()
            # Before the merge, which changes the base's weight in place.
            products = _products(layer, base)
            _merge_layer(name, layer)
            base.to(dtype)
            _require_same_products(name, base, products)
        # Trained rows lie in a wrapper inside the layer, whose place the base takes.
        replaced_name = name.removesuffix(".token_adapter")
        outer_name, _, own_name = replaced_name.rpartition(".")
        outer = model.get_submodule(outer_name)
        setattr(outer, own_name, base)
    del model.peft_config


def merge_loaded(over: Any) -> Any:
    """Return the plain model of what `load_adapters` has returned, with its adapters merged.

    Layers that `inject` can make are merged by `merge`. PEFT merges the others: modules that were
    trained whole, and layers of other tools.
    """
    merge(over.get_base_model())
    return over.merge_and_unload()


def _is_mergeable(layer: Any) -> bool:
    """Return whether a layer of PEFT's is of a kind that `inject` makes."""
    from drumline.vendor.transformers import Conv1D

    if hasattr(layer, "token_indices"):
        return True
    if not is_tuned(layer):
        return False
    base = layer.get_base_layer()
    return isinstance(base, nn.Linear | nn.Embedding | Conv1D) or _is_over_experts(layer)


def _is_over_experts(layer: nn.Module) -> bool:
    """Return whether a layer of PEFT's is over a tensor of experts."""
    from drumline.models.adapted_experts import AdaptedExperts

    return isinstance(layer, AdaptedExperts)


def _layers_of_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of PEFT's outermost layer around each layer of experts."""
    for name, layer in _peft_layers(model):
        if _is_over_experts(layer) and not name.endswith(".base_layer"):
            yield name, layer


def _merge_layer(name: str, layer: Any) -> None:
    """Add a layer's adapter to its base layer. Raises ModelError if the adapter is not finite."""
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"the adapter of {name} cannot be merged: {error}", where=WHERE) from None


def _merge_experts(name: str, layer: Any) -> None:
    """Add the adapters over a layer of experts to its tensors, one expert at a time.

    Raises ModelError for an adapter that is not finite, and DrumlineError for a merged matrix that
    is not the trained one.
    """
    from drumline.models.adapted_experts import (
        layers_over_experts,
        merge_expert,
        products_of_expert,
    )
    from drumline.models.expert_layers import has_inputs_first

    layer.eval()
    base = layer.get_base_layer()
    for over_tensor in layers_over_experts(layer):
        tensor = getattr(base, over_tensor.parameter_name)
        for expert in range(len(tensor)):
            what = f"{name}.{over_tensor.parameter_name} of expert {expert}"
            merged = merge_expert(over_tensor, expert)
            if not bool(merged.isfinite().all()):
                raise ModelError(f"the adapter of {what} is not finite", where=WHERE)
            matrix = tensor[expert]
            if has_inputs_first(base):
                matrix = matrix.T
            signs = _signs(matrix.shape[1])
            # Before the merge, which changes the tensor in place.
            products = products_of_expert(over_tensor, expert, signs)
            tensor[expert] = merged
            weight = matrix.double()
            sizes = weight.abs().sum(1)
            _require_rounding(
                what, signs @ weight.T, products, sizes, matrix.shape[1], tensor.dtype
            )


def _signs(width: int) -> torch.Tensor:
    """Return random rows of 1 and -1, float64[PROBES, width] on the CPU, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (PROBES, width), generator=generator)
    return 2.0 * bits.double() - 1.0


def _products(layer: Any, base: Any) -> torch.Tensor:
    """Return the products of `_signs` and a layer's weight in fp64, by the layer's own forward.

    `layer`: `base` with its adapter, or `base` itself. The result is [PROBES, out] for a linear
    layer. For an embedding it is [PROBES, width], the sums of its rows with these signs.
    """
    if isinstance(base, nn.Linear):
        return layer(_signs(base.in_features))
    if not isinstance(base, nn.Embedding):
        # GPT-2's Conv1D has inputs first.
        inputs = base.weight.shape[0]
        return layer(_signs(inputs))
    rows = base.num_embeddings
    signs = _signs(rows)
    products = torch.zeros(PROBES, base.embedding_dim, dtype=torch.float64)
    for first in range(0, rows, ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, rows)
        tokens = torch.arange(first, stop)
        products += signs[:, tokens] @ layer(tokens)
    return products


def _require_same_products(name: str, base: Any, products: torch.Tensor) -> None:
    """Raise DrumlineError unless a merged layer gives the products of the adapted layer.

    `products`: `_products` of the adapted layer. They may differ by the rounding of the merged
    weight. A row of random signs fails to show a wrong weight with a probability of at most a half
    (Freivalds, 1977). If u is the unit of roundoff of the weight's type, an entry w of the merged
    weight is off by at most u|w|. So a product with ±1 is off by at most the sum of u|w| over its
    inputs. Half as much is added for the arithmetic in fp64, and the smallest normal number for
    entries below that number.
    """
    dtype = base.weight.dtype
    base.double()
    merged = _products(base, base)
    weight = base.weight
    # The dimension of inputs: GPT-2's Conv1D and embeddings are [in, out].
    inputs_dim = 0
    if isinstance(base, nn.Linear):
        inputs_dim = 1
    # Gemma's embedding multiplies what it looks up.
    scale = float(getattr(base, "embed_scale", 1.0))
    sizes = weight.abs().sum(inputs_dim) * scale
    inputs = weight.shape[inputs_dim] * scale
    base.to(dtype)
    _require_rounding(name, merged, products, sizes, inputs, dtype)


def _require_rounding(
    name: str,
    merged: torch.Tensor,
    products: torch.Tensor,
    sizes: torch.Tensor,
    inputs: float,
    dtype: torch.dtype,
) -> None:
    """Raise DrumlineError if products with a merged weight are further off than by its rounding.

    `merged`, `products`: of the merged weight and of the adapted layer, fp64[PROBES, out]. `sizes`:
    the sum of |w| over the inputs of each output. `inputs`: how many there are. `dtype`: the
    weight's type.
    """
    limits = torch.finfo(dtype)
    # `eps` is the distance of 1 to the next number, twice the unit of roundoff.
    allowed = 1.5 * limits.eps / 2 * sizes + limits.tiny * inputs
    differences = (merged - products).abs()
    worst = float((differences / allowed).max())
    # Not `worst > 1`, which NaN would pass.
    if not worst <= 1:
        what = (
            f"the merged weight of {name} is not the trained one:"
            f" its products are {worst:.3g} times as far off as rounding allows"
        )
        raise DrumlineError(what, where=WHERE, fix=UNMERGED)


def require_trained(model: nn.Module) -> None:
    """Raise ModelError for a model without adapters, or with adapters that all add zero."""
    # The factors that begin at zero: of linear layers, and of an embedding.
    zero_at_first = (".lora_B.", ".lora_embedding_A.")
    factors = []
    for name, parameter in model.named_parameters():
        if is_adapter(name) and any(part in name for part in zero_at_first):
            factors.append(parameter)
    if not factors:
        raise ModelError(
            "the model has no adapter",
            where="adapter",
            fix="name a run that was trained with adapter=lora",
        )
    if not any(bool(factor.any()) for factor in factors):
        raise ModelError(
            "the adapter is empty: every lora_B is zero",
            where="adapter",
            fix="train for a step first",
        )


def save_adapter(model: Any, folder: Path, base: str, revision: str | None) -> None:
    """Write PEFT's own files (adapter_config.json, adapter_model.safetensors, fp32) to `folder`.

    Further adapters are written to subfolders with their names; `load_adapters` reads them all.
    PiSSA has subtracted its first factors from the base layer. They are written as part of factors
    of twice the rank, so that the adapter fits the base's own files: W − sB₀A₀ + sBA. `base`: the
    folder or hub id of the frozen model, `revision` its revision on the hub.

    The model's own `peft_config` is changed to what is written, so this can be called only once.
    """
    from peft import get_peft_model_state_dict

    require_trained(model)
    # PEFT's names are those within a PeftModel, which has the model as base_model.model.
    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    options = model.peft_config[NAME]
    _name_targets_for_peft(model, options)
    whole = _names_trained_whole(model)
    if whole:
        # PEFT keeps whole modules under the names that they have in the model.
        values = model.state_dict()
        state |= {name: values[name] for name in values.keys() & whole}
        _name_whole_modules(model, options, whole)
    if _began_in_base_layer(model):
        state = _join_first_factors(model, state)
        options.r = 2 * options.r
        # The scale stays: it is alpha / r, or with rsLoRA alpha / √r.
        growth: float = 2
        if options.use_rslora:
            growth = math.sqrt(2)
        options.lora_alpha = _to_int_if_whole(options.lora_alpha * growth)
    states = {NAME: state}
    for adapter_name in model.peft_config.keys() - {NAME}:
        states[adapter_name] = _factors_of(model, adapter_name)
    for tensors in states.values():
        _reorder_experts(model, tensors)
    # PEFT would leave out a tensor under an unknown name silently.
    adapter_parameters = [name for name, _ in model.named_parameters() if is_adapter(name)]
    trained = len(whole) + len(adapter_parameters)
    saved = sum(len(tensors) for tensors in states.values())
    assert saved == trained, f"{saved} of {trained} trained tensors would be saved"
    for adapter_name, tensors in states.items():
        target = folder
        if adapter_name != NAME:
            target = folder / adapter_name
        target.mkdir(exist_ok=True)
        peft_config = model.peft_config[adapter_name]
        peft_config.base_model_name_or_path = base
        peft_config.revision = revision
        peft_config.inference_mode = True
        peft_config.save_pretrained(target)
        # Copies, since safetensors refuses tensors that share memory, as tied ones do.
        copies = {}
        for name, value in tensors.items():
            copies[f"base_model.model.{name}"] = value.detach().clone().contiguous()
        save_file(copies, target / FILE, metadata={"format": "pt"})


def name_in_files(name: str) -> str:
    """Return the name that PEFT's files give a factor of a model's only adapter.

    `name`: of the parameter, such as `layers.0.q_proj.lora_A.default.weight`.
    """
    own_name = name.replace(f".{NAME}.weight", ".weight")
    # PEFT's names are those within a PeftModel, which has the model as base_model.model.
    return f"base_model.model.{own_name}"


def _name_targets_for_peft(model: Any, options: Any) -> None:
    """Name targets so that PEFT, reading these files, takes none for a mixture's experts.

    It would do so by the names of linear layers (`gate_proj`). A linear layer that is named by its
    weight has the same factors, and no old name. Warns if that is not possible: PEFT has neither
    DoRA over a weight nor several adapters over different weights.
    """
    misread = _targets_taken_for_experts(options, model)
    if misread and not options.use_dora and len(model.peft_config) == 1:
        by_weight = {f"{name}.weight" for name in misread}
        options.target_parameters = sorted(by_weight | set(options.target_parameters or ()))
        options.target_modules = set(options.target_modules) - set(misread)
        # PEFT refuses it over weights. Whoever loads the adapter does not drop anything.
        options.lora_dropout = 0.0
        misread = []
    if misread:
        logger.warning(
            "PEFT itself would take the targets %s for the experts of %s"
            " and leave out the layers that were trained:"
            " load this adapter with Drumline, or export the merged model",
            ", ".join(misread),
            model.config.model_type,
        )


def _reorder_experts(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the factors of experts by what PEFT's files have, in place.

    `tensors`: those of one adapter, by PEFT's names in files.
    """
    from drumline.models.adapted_experts import join_experts, layers_over_experts

    for path, outermost in _layers_of_experts(model):
        for depth, layer in enumerate(layers_over_experts(outermost)):
            name_a = f"{path}{'.base_layer' * depth}{_drop_adapter_name(A)}"
            name_b = f"{path}{'.base_layer' * depth}{_drop_adapter_name(B)}"
            if name_a in tensors:
                file_a, file_b = join_experts(layer, tensors[name_a], tensors[name_b])
                tensors[name_a] = file_a
                tensors[name_b] = file_b


def _names_trained_whole(model: Any) -> set[str]:
    """Return the names of parameters that are trained and are no adapter's; tied ones by all names.

    PEFT reads tied ones by both names.
    """
    whole = set(extra_heads(model))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and not is_adapter(name):
            whole.add(name)
    return whole


def _name_whole_modules(model: Any, options: Any, whole: set[str]) -> None:
    """Set in PEFT's config the modules that are trained whole, and whether some are tied.

    `whole`: names of the parameters that are trained whole.
    """
    if extra_heads(model):
        # PEFT's name for models with heads that no language model has.
        options.task_type = "SEQ_CLS"
    elif ends_in_hidden_states(model):
        options.task_type = "FEATURE_EXTRACTION"
    options.modules_to_save = sorted({name.rpartition(".")[0] for name in whole})
    named = list(model.named_parameters(remove_duplicate=False))
    names_per_parameter = Counter(id(parameter) for _, parameter in named)
    options.ensure_weight_tying = False
    for name, parameter in named:
        if name in whole and names_per_parameter[id(parameter)] > 1:
            options.ensure_weight_tying = True


def _began_in_base_layer(model: Any) -> bool:
    """Return whether the first factors of a layer were subtracted from its base layer (PiSSA)."""
    for _, layer in _peft_layers(model):
        first = getattr(layer, "first", {})
        if A[1:] in first or B[1:] in first:
            return True
    return False


def _factors_of(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Return the factors of one adapter by PEFT's names in files, which leave the adapter's out."""
    factors = {}
    for name, value in model.state_dict().items():
        found = FACTOR.search(name)
        if found is None:
            continue
        linear_part, linear_adapter, embedding_part, embedding_adapter = found.groups()
        if linear_adapter == adapter:
            factors[f"{name[: found.start()]}.{linear_part}.weight"] = value
        elif embedding_adapter == adapter:
            factors[f"{name[: found.start()]}.{embedding_part}"] = value
    return factors


def load_adapters(base: Any, folder: Path, all_of_them: bool = True) -> Any:
    """Return PEFT's model of a base and the adapters in a folder, all of them on.

    `all_of_them` False: only the adapter in the folder itself. In a folder of another tool
    subfolders may have older states of the same adapter.
    """
    from peft import PeftModel

    from drumline.models.adapted_experts import adopt_layers

    targets: contextlib.AbstractContextManager[None] = _keep_named_targets()
    if _names_experts_as_layers(folder):
        # As with transformers 4; PEFT's conversion finds the experts.
        targets = contextlib.nullcontext()
    with warnings.catch_warnings(), targets:
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses old names of transformers
        warnings.filterwarnings("ignore", message=TIED)
        model: Any = PeftModel.from_pretrained(base, str(folder))
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        extra_folders: list[Path] = []
        if all_of_them:
            # Sorted: the order in which a file system lists folders is not defined.
            extra_folders = sorted(path.parent for path in folder.glob(f"*/{FILE}"))
        for extra_folder in extra_folders:
            model.load_adapter(str(extra_folder), adapter_name=extra_folder.name)
        if extra_folders:
            names = [extra_folder.name for extra_folder in extra_folders]
            model.base_model.set_adapter([NAME, *names])
    adopt_layers(model)
    return model.eval()


def _names_experts_as_layers(folder: Path) -> bool:
    """Return whether an adapter over experts names no tensors of them, but layers (`gate_proj`)."""
    path = folder / FILE
    options = read_object(folder / CONFIG, ModelError)
    if options.get("target_parameters") or not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if "experts" in name.split("."):
                return True
    return False


def _join_first_factors(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PEFT's state with each factor of PiSSA joined to its first value.

    The rows of A are followed by those of A₀, and the columns of B by those of −B₀: the product is
    BA − B₀A₀.
    """
    for path, layer in _peft_layers(model):
        first = getattr(layer, "first", {})
        first_a = first.get(A[1:])
        if first_a is not None:
            name = path + _drop_adapter_name(A)
            state[name] = torch.cat([state[name], first_a], 0)
        first_b = first.get(B[1:])
        if first_b is not None:
            name = path + _drop_adapter_name(B)
            state[name] = torch.cat([state[name], -first_b], 1)
    return state


def _drop_adapter_name(ending: str) -> str:
    """Return the end of a factor's name as PEFT's files have it, without the adapter."""
    return ending.replace(f".{NAME}.", ".")


def _peft_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of PEFT's layers.

    There are none if nothing has imported PEFT, which may not be installed.
    """
    if sys.modules.get("peft") is None:
        return
    from drumline.vendor.peft import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _parameters_below(model: nn.Module, endings: Iterable[str]) -> set[str]:
    """Return the names of the parameters below modules with these endings.

    Of tied parameters it is the first name. Raises ModelError for an ending without a parameter.
    """
    first_name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    module_names = [name for name, _ in model.named_modules()]
    for ending in endings:
        prefixes = tuple(f"{name}." for name in module_names if has_ending(name, ending))
        below = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name.startswith(prefixes):
                below.add(first_name_of[id(parameter)])
        if not below:
            guess = nearest(ending, _last_names(module_names))
            fix = "name modules as model.named_modules() has them"
            if guess:
                fix = f"did you mean {guess}?"
            what = f"{type(model).__name__} has no module {ending!r} with weights"
            raise ModelError(what, where="adapter.modules_to_save", fix=fix)
        found |= below
    return found


def _require_rows(model: Any, tokens: Sequence[int]) -> None:
    """Raise ModelError for a token that the embedding has no row for."""
    if not tokens:
        return
    embedding: Any = find_base_layer(model.get_input_embeddings())
    rows = len(embedding.weight)
    if max(tokens) >= rows:
        what = f"token {max(tokens)} has no row: the embedding has {rows}"
        fix = "name ids below that, which a tokenizer of your own may give to new tokens"
        raise ModelError(what, where="adapter.trainable_tokens", fix=fix)


def _ends_of_vocabulary(model: Any) -> dict[str, Any]:
    """Return name → layer of the embedding and the head, if PEFT has adapters for their class."""
    if reads_images(model):
        return {}
    layers = embedding_and_head(model)
    found = {}
    for name, module in model.named_modules():
        if module in layers and isinstance(module, nn.Embedding | nn.Linear):
            found[name] = module
    return found


def _require_ends(model: Any, adapter: LoRAConfig, names: dict[str, list[str]]) -> None:
    """Raise ModelError for PiSSA or trained rows on an adapted embedding, or on a head tied to one.

    `names`: the layers of each adapter.
    """
    ends = _ends_of_vocabulary(model)
    is_tied = bool(ends) and is_head_tied(model)
    for adapter_name, chosen in names.items():
        key = f"adapter.more.{adapter_name}.targets"
        if adapter_name == NAME:
            key = "adapter.targets"
        for name in chosen:
            if name not in ends:
                continue
            is_looked_up = is_tied or isinstance(ends[name], nn.Embedding)
            if not is_looked_up:
                continue
            if adapter.init != "zero" and adapter_name == NAME:
                what = f"PiSSA would change the weight of {name}, which the embedding looks up"
                fix = f"take {name} out of {key}, or remove adapter.init"
                raise ModelError(what, where="adapter.init", fix=fix)
            if adapter.trainable_tokens:
                what = f"{name} has an adapter, and rows of its weight are trained by themselves"
                fix = f"take {name} out of {key}, or remove adapter.trainable_tokens"
                raise ModelError(what, where="adapter.trainable_tokens", fix=fix)


def _untie_adapted_ends(model: Any) -> None:
    """Give a head that is tied to the embedding its own weight if one of the two has an adapter."""
    embedding, output_head = embedding_and_head(model)
    if not is_head_tied(model):
        return
    if not (hasattr(embedding, "lora_A") or hasattr(output_head, "lora_A")):
        return
    head = find_base_layer(output_head)
    own_weight = head.weight.detach().clone()
    head.weight = nn.Parameter(own_weight, requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def copy_without_factors(layer: Any) -> Any:
    """Return a copy of one of PEFT's layers over the same base layer, with no adapter on it."""
    copied = copy.copy(layer)
    # A dictionary of its own: a shallow copy would take the factors from the layer itself.
    copied._modules = dict(layer._modules)
    factors = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    for name in factors:
        if name in copied._modules:
            copied._modules[name] = type(layer._modules[name])()
    return copied


def is_tuned(layer: nn.Module) -> bool:
    """Return whether a layer is one of PEFT's, with factors over a base layer."""
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def _token_rows(
    model: Any, tokens: Sequence[int], trained: Collection[str], adapted: Collection[str]
) -> list[int] | dict[str, list[int]] | None:
    """Return the rows of embedding and head that PEFT trains: those of `tokens`.

    A list stands for the embedding and a head that is tied to it. Layers whose weights are in
    `trained`, and layers in `adapted`, which have factors, get none.
    Raises ModelError for a head with a bias, which PEFT would leave out.
    """
    if not tokens:
        return None
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    is_tied = is_head_tied(model)
    if is_tied and f"{names[id(embedding)]}.weight" in trained:
        return None
    layers = []
    for layer in (embedding, head):
        name = names.get(id(layer))
        if name is not None and name not in adapted and f"{name}.weight" not in trained:
            layers.append(layer)
    if head in layers and getattr(head, "bias", None) is not None:
        what = f"the head of {type(model).__name__} has a bias, which PEFT leaves out over rows"
        both = f"[{names[id(embedding)]}, {names[id(head)]}]"
        fix = f"train both whole: adapter.modules_to_save={both}"
        raise ModelError(what, where="adapter.trainable_tokens", fix=fix)
    if is_tied or layers == [embedding]:
        return [*tokens]
    if not layers:
        return None
    return {names[id(layer)]: [*tokens] for layer in layers}


def trains_rows(model: Any, adapter: LoRAConfig) -> bool:
    """Return whether an adapter trains embedding and head without `trainable_tokens`.

    `modules_to_save` may have their weights, or the targets of an adapter their names. An embedding
    with factors gets no rows of its own.
    Raises ModelError for such an embedding beside a head that is not trained.
    """
    trained = _parameters_below(model, adapter.modules_to_save)
    trained_weights = {id(model.get_parameter(name)) for name in trained}
    targets: list[str] = []
    for options in (adapter, *adapter.more.values()):
        if isinstance(options.targets, list):
            targets += options.targets
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = embedding_and_head(model)
    layers = [layer for layer in (embedding, head) if layer is not None]
    adapted = []
    trained_layers = []
    for layer in layers:
        name = names[id(layer)]
        is_adapted = any(has_ending(name, target) for target in targets)
        if is_adapted:
            adapted.append(layer)
        if is_adapted or id(layer.weight) in trained_weights:
            trained_layers.append(layer)
    if is_head_tied(model):
        return bool(trained_layers)
    if trained_layers == [embedding] and adapted == [embedding] and head is not None:
        own = names[id(embedding)]
        other = names[id(head)]
        what = f"{own} has an adapter and {other} has none, which cannot learn the new tokens"
        fix = f"name {other} in adapter.targets, too, or take {own} out"
        raise ModelError(what, where=WHERE, fix=fix)
    return len(trained_layers) == len(layers)


def _to_int_if_whole(alpha: float) -> Any:
    """Return a whole number as an int, which other readers of the file require."""
    if float(alpha).is_integer():
        return int(alpha)
    return alpha


def _shorten_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return the last parts of the names if they mean the same layers; else the full names.

    Users write last parts, and other readers expect them.
    """
    last_names = _last_names(names)
    meant = set()
    for name, _ in model.named_modules():
        if any(has_ending(name, ending) for ending in last_names):
            meant.add(name)
    if meant == set(names):
        return last_names
    return names


def _shorten_tensor_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return the ends of the names of experts' tensors, such as `experts.gate_up_proj`.

    If these mean other tensors, too, the result has the full names.
    """
    endings = set()
    for name in names:
        _, owner, own_name = name.rsplit(".", 2)
        endings.add(f"{owner}.{own_name}")
    meant = set()
    for name, _ in model.named_parameters():
        if any(has_ending(name, ending) for ending in endings):
            meant.add(name)
    if meant == set(names):
        return sorted(endings)
    return names
