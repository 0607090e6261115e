"""Low-rank adapters (LoRA, Hu et al. 2021) by PEFT, injected into a model in place: its class and its blocks stay the same. An adapted
layer `q_proj` becomes PEFT's layer of that name with `base_layer` (frozen), `lora_A.default` and `lora_B.default`: y = base(x) + alpha / r
· B(A(dropout(x))). B starts at zero, so a fresh adapter changes nothing. Nor do DoRA's lengths of rows, PiSSA's factors (what they are is
taken off the base layer) and rows of tokens: these begin as functions of a whole weight (`begin`), whichever part of it a rank has."""

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

from drumline.core.config import LoRAConfig, LoRAFactors
from drumline.core.registry import nearest
from drumline.dist.seeds import derive, drawing
from drumline.errors import DrumlineError, ModelError
from drumline.foreign import require_package
from drumline.models.blocks import blocks, is_head_tied, vocabulary, whole_layer
from drumline.models.classes import reads_images
from drumline.models.packed import PackedLinear
from drumline.models.scores import extra_heads

logger = logging.getLogger(__name__)

NAME = "default"
A, B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
# The end of a factor's name: its adapter and `weight`, or for an embedding its adapter alone.
FACTOR = re.compile(
    r"\.(lora_A|lora_B|lora_magnitude_vector)\.([^.]+)\.weight$"
    r"|\.(lora_embedding_A|lora_embedding_B)\.([^.]+)$"
)
TRAINED = re.compile(FACTOR.pattern + r"|\.trainable_tokens_delta\.[^.]+$")
WHERE = "adapter.targets"
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# PEFT's warning of adapters over tied ends, which `merge` makes two weights.
TIED = "Model has `tie_word_embeddings=True`"
ROUNDS = 16  # of subspace iteration for `pissa_fast`
PROBES = 16  # products that a merged layer is compared by
ROWS_AT_ONCE = 4096  # of an embedding, in fp64
UNMERGED = "drumline export RUN --to FOLDER --adapter writes the adapter by itself"


def target_names(model: Any, adapter: LoRAFactors, trained: Iterable[str] = ()) -> list[str]:
    """Return the full names of the layers that get an adapter, in the model's order.

    These are linear layers of the blocks, and embedding and head where the targets name them.
    `trained`: names of parameters that are trained whole, whose layers get no adapter.
    Raises ModelError if a target names no layer.
    """
    is_named = isinstance(adapter.targets, list)
    candidates = _linear_layers(model, with_tower=is_named)
    all_layers = candidates | _ends_of_vocabulary(model)
    # Of tied weights `trained` has the first name.
    first_name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    trained_whole = set(trained)
    candidates = {
        name: layer
        for name, layer in candidates.items()
        if first_name_of.get(id(layer.weight)) not in trained_whole
    }
    if not candidates:
        what = f"{type(model).__name__} has no linear layers in its blocks"
        raise ModelError(what, where=WHERE, fix="use adapter=none for this model")
    if adapter.targets == "all-linear":
        return list(candidates)
    if adapter.targets == "attention":
        return _layers_of_attention(model, candidates)
    for name, layer in _ends_of_vocabulary(model).items():
        if first_name_of.get(id(layer.weight)) not in trained_whole:
            candidates[name] = layer
    return _layers_by_endings(model, adapter.targets, candidates, all_layers)


def _linear_layers(model: Any, with_tower: bool) -> dict[str, Any]:
    """Return name → linear layer (also GPT-2's Conv1D) of the blocks.

    Of a model that declares no blocks: of all of it but its head. `with_tower`: also those of a
    vision tower, which as usual get no adapters unless a user names them.
    """
    from drumline.vendor.transformers import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = set()
    for block in blocks(model) or [model]:
        inside |= {id(module) for module in block.modules()}
    inside.discard(id(head))
    if not with_tower and getattr(model.config, "vision_config", None) is not None:
        inside &= {id(module) for module in model.get_decoder().modules()}
    found = {}
    for name, module in model.named_modules():
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D):
            found[name] = module
    return found


def _last_names(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _layers_of_attention(model: Any, candidates: Collection[str]) -> list[str]:
    """Return the names of candidates inside modules whose class is named an attention."""
    outer_names = []
    for name, module in model.named_modules():
        if "attention" in type(module).__name__.lower():
            outer_names.append(f"{name}.")
    chosen = [name for name in candidates if name.startswith(tuple(outer_names))]
    if not chosen:
        what = f"{type(model).__name__} has no linear layers in an attention"
        offer = f"there are {', '.join(_last_names(candidates))}"
        raise ModelError(what, where=WHERE, fix=offer)
    return chosen


def _layers_by_endings(
    model: Any, endings: Sequence[str], candidates: Collection[str], all_layers: Collection[str]
) -> list[str]:
    """Return the names of candidates with one of the endings, in the model's order.

    `all_layers`: candidates, and layers that are trained whole. Raises ModelError for an ending of
    no candidate's.
    """
    for ending in endings:
        if any(_ends(name, ending) for name in candidates):
            continue
        if any(_ends(name, ending) for name in all_layers):
            what = f"the weight of {ending} is trained whole, and gets no adapter"
            fix = f"take {ending} out here, or its weight out of adapter.modules_to_save"
            raise ModelError(what, where=WHERE, fix=fix)
        last_names = _last_names(candidates)
        guess = nearest(ending, last_names)
        what = f"no layer of {type(model).__name__} that can get an adapter is named {ending!r}"
        fix = f"did you mean {guess}?" if guess else f"there are {', '.join(last_names)}"
        raise ModelError(what, where=WHERE, fix=fix)
    chosen = {name for name in candidates if any(_ends(name, ending) for ending in endings)}
    return [name for name, _ in model.named_modules() if name in chosen]


def find_targets(model: Any, adapter: LoRAConfig) -> tuple[dict[str, list[str]], set[str]]:
    """Return the names of each adapter's layers, and of the parameters that are trained whole.

    The model may lie on the meta device, and PEFT need not be installed.
    Raises ModelError for a layer, module or token that the model does not have, and for what an
    embedding or a head cannot get.
    """
    trained = _named_below(model, adapter.modules_to_save)
    wanted = {NAME: adapter, **adapter.more}
    names = {each: target_names(model, options, trained) for each, options in wanted.items()}
    _require_rows(model, adapter.trainable_tokens)
    _require_ends(model, adapter, names)
    return names, trained


def inject(model: Any, adapter: LoRAConfig, seed: int) -> None:
    """Inject adapters into `target_names`, and freeze all else but `modules_to_save` and heads that no language model has (scores, values,
    classes), which stay fully trainable. The values depend on `seed` and the weights alone, not on the number of ranks. A model on the meta
    device gets adapters there, to be filled with `first_values` and `begin`."""
    require_package("peft", "adapter")
    from peft import LoraConfig, inject_adapter_in_model

    names, trained = find_targets(model, adapter)
    wanted = {NAME: adapter, **adapter.more}
    adapted = {name for chosen in names.values() for name in chosen}
    token_rows = _token_rows(model, adapter.trainable_tokens, trained, adapted)
    made = {
        each: LoraConfig(
            r=options.r,
            lora_alpha=_number(options.alpha),
            use_rslora=options.rslora,
            use_dora=options is adapter and adapter.dora,
            lora_dropout=options.dropout,
            target_modules=_short(model, names[each]),
            trainable_token_indices=token_rows if options is adapter else None,
            fan_in_fan_out=all(
                type(model.get_submodule(name)).__name__ == "Conv1D" for name in names[each]
            ),
            task_type="CAUSAL_LM",
        )
        for each, options in wanted.items()
    }
    meta = next(model.parameters()).is_meta
    with drawing(None), warnings.catch_warnings(), _targets_as_named():
        # Blocks with layers of both kinds: PEFT mends it by layer.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        # Of the adapter before.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message=TIED)
        for each, options in made.items():
            inject_adapter_in_model(options, model, adapter_name=each, low_cpu_mem_usage=meta)
    heads = extra_heads(model)
    for path, layer in _tuned(model):
        if hasattr(layer, "token_indices"):
            layer.trainable_tokens_original.clear()  # what PEFT would put back; the base layer has it
        else:
            layer.set_adapter([*made])
            layer.starts_at = adapter.init if NAME in layer.lora_A else "zero"
            layer.draws_by = derive(seed, "adapter", path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name in heads or name in trained)
        if is_adapter(name) and not meta:
            parameter.data.copy_(first_values(name, parameter.shape, seed))
    for path, layer in () if meta else starting(model):
        values = begin(layer, layer.get_base_layer().weight.detach().float())
        for name, value in values.items():
            model.get_parameter(f"{path}.{name}").data.copy_(value)
        layer.first = {name: value for name, value in values.items() if "lora_" in name}


@contextlib.contextmanager
def _targets_as_named() -> Iterator[None]:
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
    """Return the targets that PEFT, reading these files, would take for a mixture's experts."""
    from drumline.vendor.peft import weight_conversion

    read = copy.deepcopy(options)
    try:
        weight_conversion.convert_peft_config_for_transformers(read, model=model, conversions=None)
    except ValueError:  # gate_proj without up_proj: PEFT refuses to read it
        return sorted(options.target_modules)
    return sorted(set(options.target_modules) - set(read.target_modules))


def starting(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of each layer, PEFT's or a packed one by itself, whose values begin as functions of the weight in it or beneath it.
    Once, where two share a weight."""
    tuned = {layer: path for path, layer in _tuned(model)}
    for path, layer in model.named_modules() if tuned else ():
        packed = isinstance(whole_layer(layer), PackedLinear)
        if layer in tuned:
            begins = (
                packed
                or getattr(layer, "starts_at", "zero") != "zero"
                or getattr(layer, "lora_magnitude_vector", ())
            )
            if (begins or hasattr(layer, "token_indices")) and getattr(
                layer, "tied_adapter", None
            ) is None:
                yield path, layer
        elif packed and not path.endswith(".base_layer"):
            yield path, layer


def borrowed(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield (layer, parameter) of layers that compute with a parameter of another layer.

    DoRA does so with weights, and rows of tokens and the factors of an embedding lie in dictionaries.
    """
    for _, layer in _tuned(model):
        if hasattr(layer, "token_indices"):
            yield from ((layer, parameter) for parameter in layer.parameters())
        for factors in ("lora_embedding_A", "lora_embedding_B"):
            yield from ((layer, parameter) for parameter in getattr(layer, factors, {}).values())
        for length in getattr(layer, "lora_magnitude_vector", {}).values():
            yield from (
                (length, parameter)
                for part in (layer.get_base_layer(), layer.lora_A)
                for parameter in part.parameters()
            )


def begin(layer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The first values, by their names within a layer of `starting`, fp32; of a packed one its codes. `weight`: the base layer's, whole, as
    its file has it; one that changes is among the values (base_layer.weight). PiSSA (Meng et al. 2024): U√(S/s) and √(S/s)Vᵀ of the r
    largest singular values S, s the scale; DoRA (Liu et al. 2024): the length of each row of base and factors together, as the base is
    kept."""
    if hasattr(layer, "token_indices"):
        return {
            f"trainable_tokens_delta.{name}": weight[rows]
            for name, rows in layer.token_indices.items()
        }
    if isinstance(layer, PackedLinear):
        return {"packed": layer.take(weight)}
    values, base, product = (
        dict[str, torch.Tensor](),
        whole_layer(layer),
        torch.zeros((), device=weight.device),
    )
    matrix = weight.T if layer.fan_in_fan_out else weight
    if layer.starts_at != "zero":
        first, second = _principal(
            matrix,
            layer.r[NAME],
            layer.scaling[NAME],
            layer.draws_by if layer.starts_at == "pissa_fast" else None,
        )
        product = layer.scaling[NAME] * second @ first
        matrix = matrix - product
        weight = matrix.T if layer.fan_in_fan_out else matrix
        values = {A[1:]: first, B[1:]: second, "base_layer.weight": weight}
    if isinstance(base, PackedLinear):
        values.pop("base_layer.weight", None)
        values["base_layer.packed"] = base.take(weight)
    if layer.lora_magnitude_vector:
        packed = isinstance(base, PackedLinear)
        kept = (
            base.unpacked(torch.float32, values["base_layer.packed"])
            if packed
            else weight.to(base.weight.dtype).float()
        )
        has_inputs_first = layer.fan_in_fan_out or isinstance(base, nn.Embedding)
        rows_are_outputs = kept.T if has_inputs_first else kept
        values[f"lora_magnitude_vector.{NAME}.weight"] = (rows_are_outputs + product).norm(dim=1)
    return values


def _principal(
    matrix: torch.Tensor, rank: int, scale: float, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] and B [out, r] whose product times `scale` is the part of a matrix with its r largest singular values. `seed`: these are
    found by subspace iteration from random numbers; None: exactly."""
    if seed is None:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with drawing(seed, matrix.device.type):
            left, sizes, right_T = torch.svd_lowrank(matrix, min(rank, *matrix.shape), niter=ROUNDS)
        right = right_T.T
    root = (sizes[:rank] / scale).sqrt()
    first, second = matrix.new_zeros(rank, matrix.shape[1]), matrix.new_zeros(matrix.shape[0], rank)
    first[: len(root)], second[:, : len(root)] = root[:, None] * right[:rank], left[:, :rank] * root
    return first, second


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
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
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        nn.init.normal_(values, generator=generator)
    return values


@contextlib.contextmanager
def switched(model: nn.Module, on: bool) -> Iterator[None]:
    """Within, adapters are on; with `on` False they add nothing, and the model is the base model. PEFT's own switch would also change which
    parameters are trainable, which FSDP2, DDP and DeepSpeed do not notice."""
    if on or not hasattr(model, "peft_config"):
        yield
        return
    before = [(layer, layer._disable_adapters) for _, layer in _tuned(model)]
    for layer, _ in before:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in before:
            layer._disable_adapters = disabled


@torch.no_grad()
def merge(model: Any) -> None:
    """Add each adapter to its base layer, and put that layer back in its place.

    If the embedding or a head tied to it has an adapter, these become two weights, and the config
    says so. Low-rank factors are merged in fp64, so only the last step rounds: an entry of the
    merged weight is off by half a unit in its last place at most, whatever kind the adapter has.
    That takes the room of a few fp64 copies of one layer at a time. The result is held against the
    layer's own forward, which is what was trained (`_require_same_products`). Trained rows of
    tokens are copied as they are.

    Raises ModelError for an adapter that is not finite, and DrumlineError for a merged layer that
    is not the trained one.
    """
    _untie_adapted_ends(model)
    for name, layer in list(_tuned(model)):
        if not _is_mergeable(layer):
            continue
        base: Any = layer.get_base_layer()
        if hasattr(layer, "token_indices"):
            _merge_layer(name, layer)
        else:
            dtype = base.weight.dtype
            layer.eval().double()
            products = _products(layer, base)
            _merge_layer(name, layer)
            base.to(dtype)
            _require_same_products(name, base, products)
        outer, _, own = name.removesuffix(".token_adapter").rpartition(".")
        setattr(model.get_submodule(outer), own, base)
    del model.peft_config


def merge_read(over: Any) -> Any:
    """Return the plain model of a PEFT model that `read_over` has read, its adapters merged.

    `merge` merges what `inject` makes. PEFT does the rest: modules that were trained whole, and
    layers of other tools.
    """
    merge(over.get_base_model())
    return over.merge_and_unload()


def _is_mergeable(layer: Any) -> bool:
    """Return whether a layer of PEFT's is of a kind that `inject` makes."""
    from drumline.vendor.transformers import Conv1D

    if hasattr(layer, "token_indices"):
        return True
    return is_tuned(layer) and isinstance(layer.get_base_layer(), nn.Linear | nn.Embedding | Conv1D)


def _merge_layer(name: str, layer: Any) -> None:
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"the adapter of {name} cannot be merged: {error}", where=WHERE) from None


def _signs(width: int) -> torch.Tensor:
    """Return random rows of 1 and -1, float64[PROBES, width], always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(0, 2, (PROBES, width), generator=generator).double() - 1.0


def _products(layer: Any, base: Any) -> torch.Tensor:
    """Return what rows of `_signs` give in fp64, multiplied with a layer's weight by its forward.

    `layer`: `base` with its adapter, or `base` alone: a linear layer [PROBES, in] → [PROBES, out],
    or an embedding, whose rows are added up with their signs: [PROBES, width].
    """
    if not isinstance(base, nn.Embedding):
        width = base.in_features if isinstance(base, nn.Linear) else base.weight.shape[0]
        return layer(_signs(width))
    signs = _signs(base.num_embeddings)
    products = torch.zeros(PROBES, base.embedding_dim, dtype=torch.float64)
    for first in range(0, base.num_embeddings, ROWS_AT_ONCE):
        tokens = torch.arange(first, min(first + ROWS_AT_ONCE, base.num_embeddings))
        products += signs[:, tokens] @ layer(tokens)
    return products


def _require_same_products(name: str, base: Any, products: torch.Tensor) -> None:
    """Raise DrumlineError unless a merged layer gives the products of the adapted layer, up to the
    rounding of its own weight.

    `products`: `_products` of the adapted layer. A row of random signs misses a weight that is
    another one with a probability of a half at most (Freivalds, 1977). With the unit of roundoff u
    of its type an entry w of the merged weight is off by u|w| at most, so a product with ±1 is off
    by the sum of u|w| over its inputs; half as much again is for the arithmetic in fp64, and the
    smallest normal number for the entries below it.
    """
    dtype = base.weight.dtype
    limits = torch.finfo(dtype)
    base.double()
    merged = _products(base, base)
    weight = base.weight
    inputs = 1 if isinstance(base, nn.Linear) else 0  # GPT-2's Conv1D and embeddings: [in, out]
    # Gemma's embedding multiplies what it looks up.
    scale = float(getattr(base, "embed_scale", 1.0))
    allowed = 1.5 * limits.eps / 2 * weight.abs().sum(inputs) + limits.tiny * weight.shape[inputs]
    worst = float(((merged - products).abs() / (allowed * scale)).max())
    base.to(dtype)
    if not worst <= 1:
        what = f"the merged weight of {name} is not the trained one: its products are {worst:.3g} times as far off as rounding allows"
        raise DrumlineError(what, where=WHERE, fix=UNMERGED)


def require_trained(model: nn.Module) -> None:
    """Raises ModelError for a model without adapters, or with adapters that all add zero."""
    # The factors that begin at zero: of linear layers, and of an embedding.
    zero_at_first = re.compile(r"\.lora_B\.|\.lora_embedding_A\.")
    factors = []
    for name, parameter in model.named_parameters():
        if is_adapter(name) and zero_at_first.search(name):
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
    """Write PEFT's own files (adapter_config.json, adapter_model.safetensors, fp32) to `folder`, those of further adapters to folders in it
    by their names; `read_over` reads them. Factors that began in the base layer are written as ones of twice the rank, over the weights
    that the base has in its files: W − sB₀A₀ + sBA. `base`: the folder or hub id of the frozen model."""
    from peft import get_peft_model_state_dict

    require_trained(model)
    # PEFT's names are those within a PeftModel, which has the model as base_model.model.
    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    options, heads = model.peft_config[NAME], extra_heads(model)
    misread = _targets_taken_for_experts(options, model)
    if misread:
        logger.warning(
            "PEFT itself would take the targets %s for the experts of %s and leave out the layers that were trained: "
            "load this adapter with Drumline, or export the merged model",
            ", ".join(misread),
            model.config.model_type,
        )
    # PEFT reads tied ones by both names.
    named = list(model.named_parameters(remove_duplicate=False))
    whole = heads | {
        name for name, parameter in named if parameter.requires_grad and not is_adapter(name)
    }
    trained = len(whole) + sum(is_adapter(name) for name, _ in model.named_parameters())
    if whole:  # PEFT keeps whole modules under the names that they have in the model
        state |= {name: tensor for name, tensor in model.state_dict().items() if name in whole}
        options.task_type = "SEQ_CLS" if heads else options.task_type
        options.modules_to_save = sorted({name.rpartition(".")[0] for name in whole})
        often = Counter(id(parameter) for _, parameter in named)
        options.ensure_weight_tying = any(
            often[id(parameter)] > 1 for name, parameter in named if name in whole
        )
    if any(getattr(layer, "first", {}).keys() & {A[1:], B[1:]} for _, layer in _tuned(model)):
        state, options.r = _over_files(model, state), 2 * options.r
        options.lora_alpha = _number(
            options.lora_alpha * (math.sqrt(2) if options.use_rslora else 2)
        )
    states = {NAME: state}
    for each in model.peft_config.keys() - {NAME}:
        states[each] = _factors_of(model, each)
    assert (saved := sum(map(len, states.values()))) == trained, (
        f"{saved} of {trained} trained tensors would be saved"
    )
    for each, tensors in states.items():
        place, own = folder if each == NAME else folder / each, model.peft_config[each]
        place.mkdir(exist_ok=True)
        own.base_model_name_or_path, own.revision, own.inference_mode = base, revision, True
        own.save_pretrained(place)
        copies = {
            f"base_model.model.{name}": value.detach().clone().contiguous()
            for name, value in tensors.items()
        }
        save_file(copies, place / FILE, metadata={"format": "pt"})


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


def read_over(base: Any, folder: Path, all_of_them: bool = True) -> Any:
    """PEFT's model of a base and the adapters that `save_adapter` wrote, which are on. `all_of_them` False: the first alone, since in a
    folder of another tool's those in folders in it are older ones."""
    from peft import PeftModel

    targets = contextlib.nullcontext() if _adapts_experts(folder) else _targets_as_named()
    with warnings.catch_warnings(), targets:
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses old names of transformers
        warnings.filterwarnings("ignore", message=TIED)
        model: Any = PeftModel.from_pretrained(base, str(folder))
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        more = sorted(path.parent for path in folder.glob(f"*/{FILE}") if all_of_them)
        for place in more:
            model.load_adapter(str(place), adapter_name=place.name)
        if more:
            model.base_model.set_adapter([NAME, *(place.name for place in more)])
    return model.eval()


def _adapts_experts(folder: Path) -> bool:
    """Return whether an adapter of another tool has factors for the experts of a mixture."""
    path = folder / FILE
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        return any("experts" in name.split(".") for name in file.keys())  # noqa: SIM118 — not a dictionary


def _over_files(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The factors of PiSSA beside those that they began as."""
    for path, layer in _tuned(model):
        for key, sign, dim in ((A, 1, 0), (B, -1, 1)):
            if (first := getattr(layer, "first", {}).get(key[1:])) is not None:
                name = f"{path}{key.replace(f'.{NAME}.', '.')}"
                state[name] = torch.cat([state[name], sign * first], dim)
    return state


def _tuned(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers, by name. Where nothing has imported PEFT, which may not be installed, there are none."""
    if sys.modules.get("peft") is None:
        return iter(())
    from drumline.vendor.peft import BaseTunerLayer

    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    )


def _named_below(model: nn.Module, endings: Iterable[str]) -> set[str]:
    """Names of the parameters below modules whose names end so; of tied ones the first name. Raises ModelError where there is none."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    for ending in endings:
        chosen = [f"{name}." for name, _ in model.named_modules() if _ends(name, ending)]
        below = {
            first[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if name.startswith(tuple(chosen))
        }
        if not below:
            guess = nearest(
                ending, sorted({name.rpartition(".")[2] for name, _ in model.named_modules()})
            )
            fix = (
                f"did you mean {guess}?"
                if guess
                else "name modules as model.named_modules() has them"
            )
            raise ModelError(
                f"{type(model).__name__} has no module {ending!r} with weights",
                where="adapter.modules_to_save",
                fix=fix,
            )
        found |= below
    return found


def _require_rows(model: Any, tokens: Sequence[int]) -> None:
    """Raises ModelError for a token that the embedding has no row for."""
    embedding: Any = whole_layer(model.get_input_embeddings()) if tokens else None
    if tokens and max(tokens) >= (rows := len(embedding.weight)):
        what = f"token {max(tokens)} has no row: the embedding has {rows}"
        raise ModelError(
            what,
            where="adapter.trainable_tokens",
            fix="name ids below that, which a tokenizer of your own may give to new tokens",
        )


def _ends_of_vocabulary(model: Any) -> dict[str, Any]:
    """Return name → layer, of the embedding and the head that PEFT has adapters for."""
    if reads_images(model):
        return {}
    ends = [layer for layer in vocabulary(model) if isinstance(layer, nn.Embedding | nn.Linear)]
    return {name: module for name, module in model.named_modules() if module in ends}


def _require_ends(model: Any, adapter: LoRAConfig, names: dict[str, list[str]]) -> None:
    """Raise ModelError for what an adapted embedding, or a head tied to one, cannot get.

    `names`: the layers of each adapter.
    """
    ends = _ends_of_vocabulary(model)
    is_tied = bool(ends) and is_head_tied(model)
    for adapter_name, chosen in names.items():
        key = "adapter.targets" if adapter_name == NAME else f"adapter.more.{adapter_name}.targets"
        for name in chosen:
            if name not in ends or not (is_tied or isinstance(ends[name], nn.Embedding)):
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
    ends = vocabulary(model)
    if not is_head_tied(model) or not any(hasattr(layer, "lora_A") for layer in ends):
        return
    head = whole_layer(ends[1])
    own_weight = head.weight.detach().clone()
    head.weight = nn.Parameter(own_weight, requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def without_factors(layer: Any) -> Any:
    """Return a copy of one of PEFT's layers over the same base layer, with no adapter on it."""
    copied = copy.copy(layer)
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
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
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
    return {names[id(layer)]: [*tokens] for layer in layers} or None


def trains_rows(model: Any, adapter: LoRAConfig) -> bool:
    """Return whether an adapter trains embedding and head without `trainable_tokens`.

    `modules_to_save` may have their weights, or the targets of an adapter their names. An embedding
    with factors gets no rows of its own.
    Raises ModelError for such an embedding beside a head that does not learn.
    """
    trained = _named_below(model, adapter.modules_to_save)
    trained_weights = {id(model.get_parameter(name)) for name in trained}
    targets: list[str] = []
    for options in (adapter, *adapter.more.values()):
        if isinstance(options.targets, list):
            targets += options.targets
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = vocabulary(model)
    layers = [layer for layer in (embedding, head) if layer is not None]
    adapted = [layer for layer in layers if any(_ends(names[id(layer)], end) for end in targets)]
    learning = [
        layer for layer in layers if layer in adapted or id(layer.weight) in trained_weights
    ]
    if is_head_tied(model):
        return bool(learning)
    if learning == [embedding] and adapted == [embedding] and head is not None:
        own, other = names[id(embedding)], names[id(head)]
        what = f"{own} has an adapter and {other} has none, which cannot learn the new tokens"
        fix = f"name {other} in adapter.targets, too, or take {own} out"
        raise ModelError(what, where=WHERE, fix=fix)
    return len(learning) == len(layers)


def _number(alpha: float) -> Any:
    """As other readers of the file require it: whole where it is."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _short(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names if they mean the same layers, as users write them and other readers expect them; else the full names."""
    own = sorted({name.rpartition(".")[2] for name in names})
    meant = {
        name for name, _ in model.named_modules() if any(_ends(name, ending) for ending in own)
    }
    return own if meant == set(names) else names
