"""Sizes of a model that follow from known ones, so that no model has to be built.

They are the sizes of another model in the family of a known shape, and those of a known model under LoRA adapters. They equal what
`models.load.facts` counts, or are None: then it has to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from drumline.config.config import LoRAConfig
from drumline.plan.facts import ModelFacts, Weight, has_ending

MOST_LAYERS = 10**4
# FLOPs of a weight's entry for each token: a multiplication and an addition in forward, twice as many in backward.
FLOPS_PER_ENTRY = 6
# The same where the weight is frozen: backward computes the gradient of the input alone.
FLOPS_PER_FROZEN_ENTRY = 4
# FLOPs of attention for each token, row position and channel: scores and values, two products of FLOPS_PER_ENTRY.
FLOPS_PER_SCORE = 12
# Of each channel of a head: rotary embeddings keep two tables of fp32, each for half of the channels.
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
_DENSE = {"tie_word_embeddings": False, "hidden_act": "silu", "attention_dropout": 0.0}
_QWEN = {**_DENSE, "use_sliding_window": False}
# Families: keys that decide more than sizes, with the values that transformers gives them.
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
# Keys that change what a model computes, and none of its sizes.
NUMBERS = ("initializer_range", "rms_norm_eps", "rope_theta", "router_aux_loss_coef")
# Keys that decide no size.
NO_SIZES = {
    *NUMBERS,
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
# Settings of rotary embeddings of type llama3; all of them are needed.
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# Modules of a block → the dimensions of their weights. A norm that is not here has the hidden width alone.
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

Dimensions = Mapping[str, int]  # name → size


def of_family(
    values: Mapping[str, Any], known: Iterable[tuple[Mapping[str, Any], ModelFacts]], length: int
) -> ModelFacts | None:
    """Return the sizes of a config's model by a known model that differs from it in sizes alone.

    `known`: configs with the sizes of their models; `length`: tokens of a row. None for a config with a key or
    value that might decide something else, or that transformers might not take.
    """
    dimensions = _dimensions(values)
    other_keys = _other_keys(values)
    if dimensions is None or other_keys is None:
        return None
    for config, facts in known:
        known_dimensions = _dimensions(config)
        if known_dimensions is not None and _other_keys(config) == other_keys:
            return _resized(facts, known_dimensions, dimensions, length)
    return None


def _dimensions(values: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the dimensions of a config's model; None if one is missing, or is none that a model can have."""
    kind = str(values.get("model_type"))
    sizes: dict[str, int] = {}
    for key, dimension in (SIZES | MORE_SIZES.get(kind, {})).items():
        size = values.get(key)
        # By type, since True is an instance of int.
        if type(size) is not int or size < 1:
            return None
        sizes[dimension] = size
    head = _head_dim(values, sizes)
    if head is None or sizes["heads"] % sizes["kv_heads"] != 0 or sizes["layers"] > MOST_LAYERS:
        return None
    if not _is_padding_valid(values.get("pad_token_id"), sizes["vocabulary"]):
        return None
    sizes.setdefault("expert", sizes["intermediate"])
    sizes["head"] = head
    sizes["queries"] = head * sizes["heads"]
    sizes["keys"] = head * sizes["kv_heads"]
    sizes["gate_and_up"] = 2 * sizes["expert"]
    return sizes


def _head_dim(values: Mapping[str, Any], sizes: Dimensions) -> int | None:
    """Return the width of a head; None if rotary embeddings do not take it, since it is odd or no number."""
    head = values.get("head_dim")
    if not head:
        if sizes["hidden"] % sizes["heads"] != 0:
            return None
        head = sizes["hidden"] // sizes["heads"]
    if type(head) is not int or head < 2 or head % 2 != 0:
        return None
    return head


def _is_padding_valid(padding: Any, vocabulary: int) -> bool:
    """Return whether the id of the padding token is one of the vocabulary, or not set."""
    if padding is None:
        return True
    return type(padding) is int and 0 <= padding < vocabulary


def _other_keys(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return all keys of a config that decide more than sizes, with defaults; None for an unknown family."""
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        return None
    if any(type(values.get(key, 1)) not in (int, float) for key in NUMBERS):
        return None
    of_sizes = {*SIZES, *MORE_SIZES.get(kind, ()), "pad_token_id"}
    if kind != "qwen2":
        of_sizes.add("head_dim")
    keys = dict(FAMILIES[kind])
    for key, value in values.items():
        if key not in of_sizes and key not in NO_SIZES:
            keys[key] = value
    if keys.get("use_sliding_window") is False:
        keys.pop("sliding_window", None)
    all_full = ["full_attention"] * int(values["num_hidden_layers"])
    if keys.get("layer_types") == all_full:
        del keys["layer_types"]
    for key in ("rope_scaling", "rope_parameters"):
        if key in keys and _is_plain_rotary(keys[key]):
            del keys[key]
    return keys


def _is_plain_rotary(rotary: Any) -> bool:
    """Return whether these settings of rotary embeddings are complete, and decide no size."""
    if not isinstance(rotary, dict):
        return rotary is None
    kind = rotary.get("rope_type", "default")
    numbers = {key: rotary[key] for key in rotary if key not in ("rope_type", "rope_theta")}
    for value in numbers.values():
        if type(value) not in (int, float) or not value > 0:
            return False
    if kind == "default":
        return not numbers
    return kind == "llama3" and numbers.keys() == LLAMA3


def _shape(weight: Weight, sizes: Dimensions) -> tuple[int, ...]:
    """Return the shape of a weight for these dimensions; empty for an unknown module."""
    path = weight.name.split(".")
    owner, last = path[-2:-1], path[-1]
    if last in ("weight", "bias"):
        module = ".".join(owner)
    else:  # a parameter with a name of its own, as those of experts
        module = ".".join([*owner, last])
    dimensions: tuple[str, ...] = MODULES.get(module, ())
    if not dimensions and module.endswith("norm"):
        dimensions = ("hidden",)
    if last == "bias":
        dimensions = dimensions[:1]
    return tuple(sizes.get(dimension, 0) for dimension in dimensions)


def _resized(facts: ModelFacts, old: Dimensions, new: Dimensions, length: int) -> ModelFacts | None:
    """Return known sizes with the dimensions `new` in place of `old`; None if the known weights do not follow from `old`."""
    old_block = facts.block_weights[0]
    if len(facts.kinds_of_blocks) != 1:
        return None
    for weight in (*old_block, *facts.end_weights):
        if _shape(weight, old) != weight.shape:
            return None
    block = tuple(weight._replace(shape=_shape(weight, new)) for weight in old_block)
    ends = tuple(weight._replace(shape=_shape(weight, new)) for weight in facts.end_weights)
    experts = new.get("experts", 1)
    experts_per_token = min(new.get("experts_per_token", 1), experts)
    layers = new["layers"]
    in_block = sum(weight.numel for weight in block)
    outside = sum(weight.numel for weight in ends)
    head = new["vocabulary"] * new["hidden"]
    embedding = outside
    if not any(weight.place == "both" for weight in ends):
        embedding -= head
    # Matrix products, as models.load.facts counts them: an embedding that is no head is a look-up.
    products = layers * _block_flops(block, experts_per_token, experts)
    products += FLOPS_PER_ENTRY * embedding
    attention = FLOPS_PER_SCORE * new["queries"] * length
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
        experts=experts if facts.experts else 0,
        experts_per_token=experts_per_token if facts.experts else 0,
        buffer_bytes=facts.buffer_bytes + ROTARY_BYTES * (new["head"] - old["head"]),
    )


def _block_flops(block: Iterable[Weight], experts_per_token: int, experts: int) -> float:
    """Return the FLOPs of a block's products for a token, which passes through some of the experts alone."""
    flops: float = 0
    for weight in block:
        products = FLOPS_PER_ENTRY * weight.numel
        if ".experts." in weight.name:
            flops += products * experts_per_token / experts
        else:
            flops += products
    return flops


def with_lora(facts: ModelFacts, adapter: LoRAConfig) -> ModelFacts | None:
    """Return the sizes of a model with LoRA adapters on linear layers of its blocks, everything else frozen.

    The adapters lie where PEFT lays them. None for a model that has adapters or frozen parts already, or whose
    weights are not known one by one, and for an adapter that trains more than its factors.
    """
    if facts.frozen or not facts.block_weights or facts.vision_language or facts.batch_norms:
        return None
    if adapter.dora or adapter.more or adapter.modules_to_save or adapter.trainable_tokens:
        return None
    kinds = {block: tuple(_adapted(block, adapter)) for block, _ in facts.kinds_of_blocks}
    layers = _adapted_layers(kinds.values())
    if not layers or _adapts_experts(kinds, layers):
        return None
    if isinstance(adapter.targets, list) and not _are_targets_in_blocks(
        adapter.targets, layers, facts.end_weights
    ):
        return None
    blocks = tuple(kinds[block] for block in facts.block_weights)
    added = 0
    for block in blocks:
        added += sum(weight.numel for weight in block if weight.trainable)
    # The first blocks may be without a place in `block_parameters`.
    ahead = len(blocks) - len(facts.block_parameters)
    attention = facts.layers * facts.attention_flops
    products = facts.flops_per_token - attention
    frozen_products = products * FLOPS_PER_FROZEN_ENTRY / FLOPS_PER_ENTRY
    dropout = "Dropout" if adapter.dropout else "Identity"
    return replace(
        facts,
        parameters=facts.parameters + added,
        frozen=facts.parameters,
        flops_per_token=frozen_products + FLOPS_PER_ENTRY * added + attention,
        classes=facts.classes | {"ModuleDict", "ParameterDict", dropout},
        block_weights=blocks,
        block_parameters=tuple(sum(weight.numel for weight in block) for block in blocks[ahead:]),
        end_weights=tuple(weight._replace(trainable=False) for weight in facts.end_weights),
    )


def _adapted_layers(blocks: Iterable[Iterable[Weight]]) -> set[str]:
    """Return the names of the layers in these blocks that have factors."""
    layers = set()
    for block in blocks:
        for weight in block:
            if ".lora_A." in weight.name:
                layers.add(weight.name.rpartition(".lora_A.")[0])
    return layers


def _adapts_experts(blocks: Iterable[Iterable[Weight]], layers: Iterable[str]) -> bool:
    """Return whether PEFT adapts the experts of a mixture, too.

    It does if other parts of its feed-forward layers have names that the experts' had before.
    """
    has_experts = any(".experts." in weight.name for block in blocks for weight in block)
    return has_experts and any(layer.startswith(("mlp.", "feed_forward.")) for layer in layers)


def _are_targets_in_blocks(
    targets: Iterable[str], layers: Iterable[str], end_weights: Iterable[Weight]
) -> bool:
    """Return whether each target names a layer of the blocks (`layers`), and none the embedding or the head."""
    outside = [weight.name.rpartition(".")[0] for weight in end_weights]
    for target in targets:
        if any(has_ending(name, target) for name in outside):
            return False
        if not any(has_ending(name, target) for name in layers):
            return False
    return True


def _layer_name(weight: Weight) -> str:
    return weight.name.rpartition(".")[0]


def _adapted(block: tuple[Weight, ...], adapter: LoRAConfig) -> Iterator[Weight]:
    """Yield a block's weights, frozen, with two factors behind the weights of each layer that is adapted."""
    for layer, parts in groupby(block, _layer_name):
        weights = [part._replace(trainable=False) for part in parts]
        owners = weights[0].owners
        by_name = {weight.name.rpartition(".")[2]: weight for weight in weights}
        is_linear = owners[-1:] == ("Linear",) and "weight" in by_name
        if not is_linear or not _is_targeted(layer, owners, adapter.targets):
            yield from weights
            continue
        for name, weight in by_name.items():
            yield weight._replace(name=f"{layer}.base_layer.{name}", owners=(*owners, "Linear"))
        yield from _factors(layer, by_name["weight"], adapter.r)


def _factors(layer: str, weight: Weight, rank: int) -> Iterator[Weight]:
    """Yield the two factors of a linear layer's weight.

    Under tensor parallelism the factor beside the dimension that is cut is cut like it.
    """
    rows, columns = weight.shape
    owners = (*weight.owners, "ModuleDict", "Linear")
    style_of_a = weight.style if weight.style == "rowwise" else ""
    style_of_b = weight.style if weight.style == "colwise" else ""
    yield Weight(f"{layer}.lora_A.default.weight", (rank, columns), True, style_of_a, owners)
    yield Weight(f"{layer}.lora_B.default.weight", (rows, rank), True, style_of_b, owners)


def _is_targeted(layer: str, owners: tuple[str, ...], targets: str | list[str]) -> bool:
    """Return whether an adapter's targets include a linear layer. `owners`: the classes that it lies in, and its own."""
    if isinstance(targets, list):
        return any(has_ending(layer, target) for target in targets)
    if targets == "all-linear":
        return True
    return any("attention" in owner.lower() for owner in owners[:-1])
