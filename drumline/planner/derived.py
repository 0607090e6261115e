"""Derive the sizes of a model from those of a known model, so that no model has to be built.

Counting the sizes (`models.load.facts`) builds the model on the meta device, and importing torch and
transformers for it takes seconds. Two cases follow from known sizes without it:

- another size of a known family, such as a Llama with more layers (`derive_from_family`);
- a known model under LoRA adapters (`with_lora`).

The result equals what `models.load.facts` would count, to the last weight. If that is not certain,
the functions return None and the caller has to count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from drumline.config.config import LoRAConfig
from drumline.plan.facts import ModelFacts, Weight, has_ending, names_attention

# More layers than any model has. `_resize` makes a tuple with an entry for each layer.
MOST_LAYERS = 10**4
# FLOPs of a weight's entry for each token: a multiplication and an addition in forward, twice as
# many in backward.
FLOPS_PER_ENTRY = 6
# The same if the weight is frozen: backward computes the gradient of the input alone.
FLOPS_PER_FROZEN_ENTRY = 4
# FLOPs of attention for each token, row position and channel: scores and values are two products
# of FLOPS_PER_ENTRY each (PaLM, Chowdhery et al. 2022, appendix B).
FLOPS_PER_SCORE = 12
# Bytes for each channel of a head: rotary embeddings keep two fp32 tables, each for half of the
# channels.
ROTARY_BYTES = 4

# Keys of a config that hold sizes → the dimension that they set.
SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
}
# Further keys of a family that hold sizes.
MORE_SIZES = {
    "mixtral": {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
    "qwen3": {"head_dim": "head"},
    "qwen3_moe": {
        "head_dim": "head",
        "num_experts": "experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert",
    },
}
# Defaults of transformers that all families share, and those of the Qwen families.
_DENSE = {"tie_word_embeddings": False, "hidden_act": "silu", "attention_dropout": 0.0}
_QWEN = {**_DENSE, "use_sliding_window": False}
# The families whose sizes can be derived. For each: the keys that decide more than sizes, with the
# defaults of transformers. A config that leaves a key out has its default, so that both compare equal.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_DENSE, "sliding_window": 4096},
    "mixtral": {**_DENSE, "sliding_window": None, "output_router_logits": False},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "attention_bias": False},
    "qwen3_moe": {
        **_QWEN,
        "attention_bias": False,
        "output_router_logits": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
# Keys whose values are numbers that change what a model computes, and none of its sizes.
NUMERIC_KEYS = ("initializer_range", "rms_norm_eps", "rope_theta", "router_aux_loss_coef")
# Keys that decide no size, so two configs that differ in them have the same sizes.
KEYS_WITHOUT_EFFECT_ON_SIZES = {
    *NUMERIC_KEYS,
    "model_type",
    "architectures",
    "_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
    "max_window_layers",
    "norm_topk_prob",
    "is_llama_config",
    "rope_interleaved",
    "transformers.js_config",
}
# Settings of rotary embeddings of type llama3; transformers needs all of them.
LLAMA3 = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}
# The dimensions of the weights of each module, as torch stores them: (outputs, inputs) of a linear
# layer. A norm that is not here has one weight of the hidden width.
MODULES = {
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
    "gate": ("experts", "hidden"),
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "experts.gate_up_proj": ("experts", "gate_and_up", "hidden"),
    "experts.down_proj": ("experts", "hidden", "expert"),
}

# Classes of experts whose adapters are known here → whether their tensors have the inputs first.
EXPERTS = {
    "DeepseekV32Experts": False,
    "DeepseekV3Experts": False,
    "Gemma4TextExperts": False,
    "Glm4MoeExperts": False,
    "GptOssExperts": True,
    "Llama4TextExperts": True,
    "MiniMaxM2Experts": False,
    "MixtralExperts": False,
    "NemotronHExperts": False,
    "Qwen3MoeExperts": False,
    "Qwen3VLMoeTextExperts": False,
    "Qwen3_5MoeExperts": False,
}
# Classes of modules that adapters over experts add.
ADAPTED_CLASSES = {"AdaptedExperts", "ExpertFactor"}

# The name of a dimension, such as hidden or queries → its size.
Dimensions = Mapping[str, int]


def derive_from_family(
    values: Mapping[str, Any], known: Iterable[tuple[Mapping[str, Any], ModelFacts]], length: int
) -> ModelFacts | None:
    """Return the sizes of a config's model, from a known model that differs from it in sizes alone.

    `values`: the keys of the model's config.json.
    `known`: configs with the sizes of their models.
    `length`: tokens of a row, which the FLOPs of attention depend on.

    None if no known model is of the same family. Also None for a config with a key or value that
    might decide something else, or that transformers might refuse.
    """
    dimensions = _dimensions(values)
    other_keys = _other_keys(values)
    if dimensions is None or other_keys is None:
        return None
    for config, facts in known:
        known_dimensions = _dimensions(config)
        if known_dimensions is None:
            continue
        if _other_keys(config) == other_keys:
            return _resize(facts, known_dimensions, dimensions, length)
    return None


def _dimensions(values: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the dimensions of a config's model; None if one is missing or cannot be.

    Besides the dimensions that the config names, the result has those that follow from them: the
    widths of all queries, of all keys, and of an expert's gate and up together.
    """
    kind = str(values.get("model_type"))
    keys_of_sizes = SIZES | MORE_SIZES.get(kind, {})
    sizes: dict[str, int] = {}
    for key, dimension in keys_of_sizes.items():
        size = values.get(key)
        # By type, since True is an instance of int.
        if type(size) is not int or size < 1:
            return None
        sizes[dimension] = size
    head = _head_dim(values, sizes)
    if head is None:
        return None
    if sizes["heads"] % sizes["kv_heads"] != 0:
        # Each head of keys and values serves the same number of query heads.
        return None
    if sizes["layers"] > MOST_LAYERS:
        return None
    padding = values.get("pad_token_id")
    if not _is_padding_valid(padding, sizes["vocabulary"]):
        return None
    # Mixtral has no key for it: its experts are as wide as a dense feed-forward part.
    sizes.setdefault("expert", sizes["intermediate"])
    sizes["head"] = head
    sizes["queries"] = head * sizes["heads"]
    sizes["keys"] = head * sizes["kv_heads"]
    sizes["gate_and_up"] = 2 * sizes["expert"]
    return sizes


def _head_dim(values: Mapping[str, Any], sizes: Dimensions) -> int | None:
    """Return the width of a head; None if it is no even number, as rotary embeddings need it."""
    head = values.get("head_dim")
    if not head:
        # transformers' default.
        if sizes["hidden"] % sizes["heads"] != 0:
            return None
        head = sizes["hidden"] // sizes["heads"]
    if type(head) is not int or head < 2 or head % 2 != 0:
        return None
    return head


def _is_padding_valid(padding: Any, vocabulary: int) -> bool:
    """Return whether the id of the padding token is in the vocabulary, or not set.

    torch's embedding refuses an id outside of its rows.
    """
    if padding is None:
        return True
    return type(padding) is int and 0 <= padding < vocabulary


def _other_keys(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return all keys of a config that decide more than sizes, with their defaults.

    Two configs whose results are equal differ in sizes alone. None for an unknown family.
    Settings that say what is the default anyway are left out, so that they make no difference.
    """
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        return None
    for key in NUMERIC_KEYS:
        if type(values.get(key, 1)) not in (int, float):
            return None
    keys_of_sizes = {*SIZES, *MORE_SIZES.get(kind, ()), "pad_token_id"}
    # Qwen2's code has no key for the width of a head, so it would be an unknown key there.
    if kind != "qwen2":
        keys_of_sizes.add("head_dim")
    keys = dict(FAMILIES[kind])
    for key, value in values.items():
        if key in keys_of_sizes or key in KEYS_WITHOUT_EFFECT_ON_SIZES:
            continue
        keys[key] = value
    _remove_ineffective(keys, int(values["num_hidden_layers"]))
    return keys


def _remove_ineffective(keys: dict[str, Any], layers: int) -> None:
    """Remove the settings of attention and rotary embeddings that say what is so without them."""
    if keys.get("use_sliding_window") is False:
        # Qwen's configs name the width of a window that is switched off.
        keys.pop("sliding_window", None)
    all_full = ["full_attention"] * layers
    if keys.get("layer_types") == all_full:
        del keys["layer_types"]
    for key in ("rope_scaling", "rope_parameters"):
        if key in keys and _is_plain_rotary(keys[key]):
            del keys[key]


def _is_plain_rotary(rotary: Any) -> bool:
    """Return whether these settings of rotary embeddings are complete, and decide no size."""
    if not isinstance(rotary, dict):
        return rotary is None
    kind = rotary.get("rope_type", "default")
    names = set()
    for name, value in rotary.items():
        if name in ("rope_type", "rope_theta"):
            continue
        # Not `value <= 0`, which a NaN would pass.
        if type(value) not in (int, float) or not value > 0:
            return False
        names.add(name)
    if kind == "default":
        return not names
    return kind == "llama3" and names == LLAMA3


def _shape(weight: Weight, sizes: Dimensions) -> tuple[int, ...]:
    """Return the shape of a weight for these dimensions; empty for an unknown module."""
    ahead, _, last = weight.name.rpartition(".")
    module = ahead.rpartition(".")[2]
    if last not in ("weight", "bias"):
        # A parameter with a name of its own, such as `experts.down_proj`. Without a module around
        # it, its name is all there is.
        module = f"{module}.{last}".removeprefix(".")
    dimensions: tuple[str, ...] = MODULES.get(module, ())
    if not dimensions and module.endswith("norm"):
        dimensions = ("hidden",)
    if last == "bias":
        # A bias has the outputs of its layer.
        dimensions = dimensions[:1]
    return tuple(sizes.get(dimension, 0) for dimension in dimensions)


def _resize(facts: ModelFacts, old: Dimensions, new: Dimensions, length: int) -> ModelFacts | None:
    """Return known sizes with the dimensions `new` in place of `old`.

    None if the shapes of the known weights do not follow from `old`: then the family has something
    that this module does not know. `length`: tokens of a row.
    """
    if len(facts.kinds_of_blocks) != 1:
        return None
    old_block = facts.block_weights[0]
    for weight in (*old_block, *facts.end_weights):
        if _shape(weight, old) != weight.shape:
            return None
    block = _reshape(old_block, new)
    ends = _reshape(facts.end_weights, new)
    experts = new.get("experts", 1)
    # transformers lets a token choose all experts at most.
    experts_per_token = min(new.get("experts_per_token", 1), experts)
    layers = new["layers"]
    in_block = sum(weight.numel for weight in block)
    outside = sum(weight.numel for weight in ends)
    head = new["vocabulary"] * new["hidden"]
    embedding = outside
    is_tied = any(weight.position == "both" for weight in ends)
    if not is_tied:
        embedding -= head
    # Matrix products, as models.load.facts counts them: those of the blocks and of the head. The head
    # has as many entries as the embedding, tied or not. (An untied embedding is a look-up, which has
    # no FLOPs.)
    products = layers * _block_flops(block, experts_per_token, experts)
    products += FLOPS_PER_ENTRY * embedding
    attention = FLOPS_PER_SCORE * new["queries"] * length
    is_mixture = facts.experts > 0
    return replace(
        facts,
        parameters=layers * in_block + outside,
        flops_per_token=float(products + layers * attention),
        vocab_size=new["vocabulary"],
        max_positions=new["positions"],
        layers=layers,
        hidden=new["hidden"],
        heads=new["heads"],
        kv_heads=new["kv_heads"],
        head_dim=new["head"],
        block_parameters=(in_block,) * layers,
        embedding_parameters=embedding,
        head_parameters=head,
        attention_flops=float(attention),
        block_weights=(block,) * layers,
        end_weights=ends,
        experts=experts if is_mixture else 0,
        experts_per_token=experts_per_token if is_mixture else 0,
        buffer_bytes=facts.buffer_bytes + ROTARY_BYTES * (new["head"] - old["head"]),
    )


def _reshape(weights: Iterable[Weight], sizes: Dimensions) -> tuple[Weight, ...]:
    """Return the weights with the shapes that they have for these dimensions."""
    return tuple(weight._replace(shape=_shape(weight, sizes)) for weight in weights)


def _block_flops(block: Iterable[Weight], experts_per_token: int, experts: int) -> float:
    """Return the FLOPs of a block's products for a token, which passes through some experts alone."""
    # An int as long as no expert is added: float(…) of the sum is then exact.
    flops: float = 0
    for weight in block:
        products = FLOPS_PER_ENTRY * weight.numel
        if ".experts." in weight.name:
            flops += products * experts_per_token / experts
        else:
            flops += products
    return flops


def with_lora(facts: ModelFacts, adapter: LoRAConfig) -> ModelFacts | None:
    """Return the sizes of a model with LoRA adapters on linear layers and experts of its blocks.

    The adapters lie where `models.adapters` lays them; everything else is frozen.

    None for a model that has adapters or frozen parts already, or whose weights are not known one
    by one, or with experts of another class than EXPERTS, and for an adapter that trains more than
    its factors, or whose list of targets may name parts of a vision tower.
    """
    if facts.frozen or not facts.block_weights or facts.batch_norms:
        return None
    if facts.vision_language and isinstance(adapter.targets, list):
        return None
    if adapter.dora or adapter.more or adapter.modules_to_save or adapter.trainable_tokens:
        return None
    targeted = _targeted_names(facts, adapter)
    if not targeted or not _are_experts_known(facts, targeted):
        return None
    # Equal blocks are adapted once: a model of 126 layers has one kind of block.
    adapted_kinds: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    for block in _kinds_of_text_blocks(facts):
        adapted_kinds[block] = tuple(_adapt_weights(block, adapter))
    targets = adapter.targets
    if isinstance(targets, list) and not _are_targets_in_blocks(
        targets, targeted, facts.end_weights
    ):
        return None
    tower = tuple(_freeze(block) for block in facts.block_weights[: facts.tower_blocks])
    text = tuple(adapted_kinds[block] for block in facts.block_weights[facts.tower_blocks :])
    blocks = tower + text
    factors = [weight for block in blocks for weight in block if weight.trainable]
    added = sum(weight.numel for weight in factors)
    # A token goes through the factors of its own experts alone.
    multiplied = sum(weight.numel * _share_of_token(weight, facts) for weight in factors)
    parameters_of_blocks = [sum(weight.numel for weight in block) for block in blocks]
    # `block_parameters` leaves out blocks that are not of the language model. They come first.
    ahead = len(blocks) - len(facts.block_parameters)
    # Attention and scans have no weights that could be frozen.
    without_weights = facts.layers * facts.attention_flops + facts.scan_flops
    products = facts.flops_per_token - without_weights
    frozen_products = products * FLOPS_PER_FROZEN_ENTRY / FLOPS_PER_ENTRY
    # What is outside of the blocks that a pipeline cuts: all of a model without such blocks.
    embedding_parameters = facts.embedding_parameters
    if not facts.block_parameters:
        embedding_parameters += added
    # PEFT has a module for dropout before the factors, also if nothing is dropped.
    dropout = "Dropout" if adapter.dropout else "Identity"
    classes = {"ModuleDict", "ParameterDict", dropout}
    for weight in factors:
        classes |= set(weight.owners) & ADAPTED_CLASSES
    return replace(
        facts,
        parameters=facts.parameters + added,
        embedding_parameters=embedding_parameters,
        frozen=facts.parameters,
        flops_per_token=frozen_products + FLOPS_PER_ENTRY * multiplied + without_weights,
        # A frozen tower has no backward.
        flops_per_image_token=facts.flops_per_image_token / 3,
        classes=facts.classes | classes,
        block_weights=blocks,
        block_parameters=tuple(parameters_of_blocks[ahead:]),
        end_weights=_freeze(facts.end_weights),
    )


def _freeze(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the weights without gradients."""
    return tuple(weight._replace(trainable=False) for weight in weights)


def _kinds_of_text_blocks(facts: ModelFacts) -> Iterable[tuple[Weight, ...]]:
    """Return the blocks that are not of a vision tower; equal ones once."""
    return dict.fromkeys(facts.block_weights[facts.tower_blocks :])


def _targeted_names(facts: ModelFacts, adapter: LoRAConfig) -> set[str]:
    """Return the names of the layers and of the experts' tensors of blocks that get factors.

    `facts`: without adapters.
    """
    names = set()
    for block in _kinds_of_text_blocks(facts):
        for weight in block:
            name = _target_name(weight)
            if _takes_factors(weight) and _is_targeted(name, weight.owners, adapter, block):
                names.add(name)
    return names


def _target_name(weight: Weight) -> str:
    """Return the name by which an adapter's targets name a weight.

    It is that of its layer, or of the tensor itself if it has a matrix for each expert.
    """
    if weight.style == "experts":
        return weight.name
    return _layer_name(weight)


def _takes_factors(weight: Weight) -> bool:
    """Return whether a weight may get factors: a linear layer's, or a matrix for each expert."""
    if weight.style == "experts":
        return len(weight.shape) == 3
    if weight.is_read_directly or any("Router" in owner for owner in weight.owners):
        return False
    return weight.owners[-1:] == ("Linear",) and weight.name.endswith(".weight")


def _are_experts_known(facts: ModelFacts, targeted: Collection[str]) -> bool:
    """Return whether all experts that get factors are of a class in EXPERTS."""
    for block, _ in facts.kinds_of_blocks:
        for weight in block:
            is_of_experts = weight.style == "experts" and weight.name in targeted
            if is_of_experts and weight.owners[-1] not in EXPERTS:
                return False
    return True


def _share_of_token(weight: Weight, facts: ModelFacts) -> float:
    """Return the share of a weight's entries that a token goes through."""
    if weight.style == "experts":
        return facts.experts_per_token / facts.experts
    return 1


def _are_targets_in_blocks(
    targets: Iterable[str], layers: Iterable[str], end_weights: Iterable[Weight]
) -> bool:
    """Return whether each target names something in the blocks, and none the embedding or the head.

    `layers`: the adapted layers and tensors of experts of the blocks.
    """
    outside = [_layer_name(weight) for weight in end_weights]
    for target in targets:
        if any(has_ending(name, target) for name in outside):
            return False
        if not any(has_ending(name, target) for name in layers):
            return False
    return True


def _layer_name(weight: Weight) -> str:
    """Return the name of the module that a weight belongs to."""
    return weight.name.rpartition(".")[0]


def _adapt_weights(block: tuple[Weight, ...], adapter: LoRAConfig) -> Iterator[Weight]:
    """Yield a block's weights, frozen, with two factors for each adapted layer or tensor of experts.

    Names, order and owners are those of PEFT's modules, which `models.load.facts` would count.
    """
    for layer, parts in groupby(block, _layer_name):
        weights = _freeze(parts)
        targeted = []
        for weight in weights:
            name = _target_name(weight)
            if _takes_factors(weight) and _is_targeted(name, weight.owners, adapter, block):
                targeted.append(weight)
        if not targeted:
            yield from weights
        elif targeted[0].style == "experts":
            yield from _adapted_experts(layer, weights, targeted, adapter.r)
        else:
            for weight in weights:
                _, _, name = weight.name.rpartition(".")
                owners = (*weight.owners, "Linear")
                yield weight._replace(name=f"{layer}.base_layer.{name}", owners=owners)
            yield from _factors(layer, targeted[0], adapter.r)


def _adapted_experts(
    layer: str, weights: Iterable[Weight], targeted: list[Weight], rank: int
) -> Iterator[Weight]:
    """Yield the weights of a layer of experts with adapters over the tensors `targeted`.

    PEFT has a layer for each of these, one inside the other. The innermost is that of the first.
    """
    *around, own = targeted[0].owners
    depth = len(targeted)
    for weight in weights:
        _, _, name = weight.name.rpartition(".")
        owners = (*around, *["AdaptedExperts"] * depth, own)
        yield weight._replace(name=f"{layer}{'.base_layer' * depth}.{name}", owners=owners)
    for inner, weight in enumerate(targeted):
        experts, outputs, inputs = weight.shape
        if EXPERTS[own]:
            inputs, outputs = outputs, inputs
        outer = depth - inner
        path = f"{layer}{'.base_layer' * (outer - 1)}"
        owners = (*around, *["AdaptedExperts"] * outer, "ModuleDict", "ExpertFactor")
        shapes = {"lora_A": (experts, rank, inputs), "lora_B": (experts, outputs, rank)}
        for factor, shape in shapes.items():
            yield Weight(f"{path}.{factor}.default.weight", shape, True, "experts", owners)


def _factors(layer: str, weight: Weight, rank: int) -> Iterator[Weight]:
    """Yield the two factors of a linear layer's weight: A of rank × inputs, B of outputs × rank.

    Under tensor parallelism the factor beside the dimension that is cut is cut like it, and the
    other one is whole on each rank.
    """
    rows, columns = weight.shape
    owners = (*weight.owners, "ModuleDict", "Linear")
    style_of_a = weight.style if weight.style == "rowwise" else ""
    style_of_b = weight.style if weight.style == "colwise" else ""
    yield Weight(f"{layer}.lora_A.default.weight", (rank, columns), True, style_of_a, owners)
    yield Weight(f"{layer}.lora_B.default.weight", (rows, rank), True, style_of_b, owners)


def _is_targeted(
    name: str, owners: tuple[str, ...], adapter: LoRAConfig, block: Iterable[Weight]
) -> bool:
    """Return whether an adapter's targets include a linear layer or a tensor of experts.

    `name`: of the layer or the tensor. `owners`: the classes that it lies in, and its own.
    `block`: all weights of its block.
    """
    targets = adapter.targets
    if targets == "all-linear":
        return True
    if not isinstance(targets, list):
        # The only other word is "attention": the linear layers of attention.
        return any(names_attention(owner) for owner in owners[:-1])
    meant = [target for target in targets if has_ending(name, target)]
    if owners[-1:] != ("Linear",):
        # An ending of linear layers means these, not the experts.
        meant = [target for target in meant if not _names_layer(target, block)]
    return bool(meant)


def _names_layer(target: str, block: Iterable[Weight]) -> bool:
    """Return whether a target is the end of the name of a linear layer of a block."""
    for weight in block:
        is_of_layer = weight.style != "experts" and _takes_factors(weight)
        if is_of_layer and has_ending(_layer_name(weight), target):
            return True
    return False
