"""Sizes that follow from sizes that are known, without a model being built: of other sizes in a family that a known shape belongs to, and
under LoRA adapters. Equal to what `models.load.facts` counts, or None: then it has to count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from drumline.core.config import LoRAConfig
from drumline.core.facts import ModelFacts, Weight

MOST_LAYERS = 10**4
COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
          "max_position_embeddings")  # fmt: skip
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
# Further sizes of a family, each by the letter that `_dimensions` has for it.
MORE = {
    "mixtral": {"num_local_experts": "e", "num_experts_per_tok": "t"},
    "qwen3": {"head_dim": "d"},
    "qwen3_moe": {
        "head_dim": "d",
        "num_experts": "e",
        "num_experts_per_tok": "t",
        "moe_intermediate_size": "m",
    },
}
NUMBERS = ("initializer_range", "rms_norm_eps", "rope_theta", "router_aux_loss_coef")
NO_SIZES = {
    *NUMBERS,
    *[
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
    ],
    *[
        "max_window_layers",
        "norm_topk_prob",
        "is_llama_config",
        "rope_interleaved",
        "transformers.js_config",
    ],
}
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# Modules of a block → dimensions of their weights; a norm has the width alone.
MODULES = {
    "q_proj": "qh", "k_proj": "kh", "v_proj": "kh", "o_proj": "hq", "q_norm": "d", "k_norm": "d", "gate_proj": "ih", "up_proj": "ih",
    "down_proj": "hi", "gate": "eh", "embed_tokens": "vh", "lm_head": "vh", "experts.gate_up_proj": "ewh", "experts.down_proj": "ehm",
}  # fmt: skip


def of_family(
    values: Mapping[str, Any], known: Iterable[tuple[Mapping[str, Any], ModelFacts]], length: int
) -> ModelFacts | None:
    """Sizes of the model of a config, by a known one (its config, its sizes) that differs from it in sizes alone. `length`: tokens of a
    row. None for a config with any key or value that might decide something else, or that transformers might not take."""
    if (mine := _dimensions(values)) is None or (rest := _rest(values)) is None:
        return None
    for config, facts in known:
        if (of_known := _dimensions(config)) is not None and _rest(config) == rest:
            return _resized(facts, of_known, mine, length)
    return None


def _dimensions(values: Mapping[str, Any]) -> dict[str, int] | None:
    """The sizes of a config by one letter each, None where one is missing or none that a model has."""
    more = MORE.get(str(values.get("model_type")), {})
    numbers: list[Any] = [values.get(key) for key in (*COUNTS, *more)]
    if any(type(number) is not int or number < 1 for number in numbers):
        return None
    sizes: dict[str, int] = dict(
        zip(
            ("h", "i", "layers", "heads", "kv", "v", "positions", *more.values()),
            numbers,
            strict=True,
        )
    )
    head = values.get("head_dim") or (
        sizes["h"] // sizes["heads"] if sizes["h"] % sizes["heads"] == 0 else 0
    )
    padding = values.get("pad_token_id")
    taken = padding is None or (type(padding) is int and 0 <= padding < sizes["v"])
    if (
        type(head) is not int
        or head < 2
        or head % 2
        or sizes["heads"] % sizes["kv"]
        or sizes["layers"] > MOST_LAYERS
        or not taken
    ):
        return None
    sizes.setdefault("m", sizes["i"])
    return {
        **sizes,
        "d": head,
        "q": head * sizes["heads"],
        "k": head * sizes["kv"],
        "w": 2 * sizes["m"],
    }


def _rest(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """All that decides more than sizes, with defaults; None for a family that is not known."""
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        return None
    if any(type(values.get(key, 1)) not in (int, float) for key in NUMBERS):
        return None
    sized = {
        *COUNTS,
        *MORE.get(kind, ()),
        "pad_token_id",
        *(() if kind == "qwen2" else ("head_dim",)),
    }
    rest = {
        **FAMILIES[kind],
        **{key: value for key, value in values.items() if key not in sized and key not in NO_SIZES},
    }
    if rest.get("use_sliding_window") is False:
        rest.pop("sliding_window", None)
    if rest.get("layer_types") == ["full_attention"] * int(values["num_hidden_layers"]):
        del rest["layer_types"]
    for key in ("rope_scaling", "rope_parameters"):
        if key in rest and _plain_rotary(rest[key]):
            del rest[key]
    return rest


def _plain_rotary(rotary: Any) -> bool:
    """Whether these settings of rotary embeddings are complete, and decide no size."""
    if not isinstance(rotary, dict):
        return rotary is None
    kind, numbers = (
        rotary.get("rope_type", "default"),
        {key: value for key, value in rotary.items() if key not in ("rope_type", "rope_theta")},
    )
    whole = all(type(value) in (int, float) and value > 0 for value in numbers.values())
    return whole and (
        (kind == "default" and not numbers) or (kind == "llama3" and numbers.keys() == LLAMA3)
    )


def _shape(weight: Weight, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a weight for these sizes; empty for a module that is not known."""
    *path, last = weight.name.split(".")
    module = ".".join(path[-1:]) if last in ("weight", "bias") else ".".join([*path[-1:], last])
    letters = MODULES.get(module, "h" if module.endswith("norm") else "")
    return tuple(sizes.get(letter, 0) for letter in (letters[:1] if last == "bias" else letters))


def _resized(
    facts: ModelFacts, old: Mapping[str, int], new: Mapping[str, int], length: int
) -> ModelFacts | None:
    """The sizes with `new` dimensions in place of `old` ones; None if the known weights are not of the old ones."""
    block, ends = facts.block_weights[0], facts.end_weights
    if len(facts.kinds_of_blocks) != 1 or any(
        _shape(weight, old) != weight.shape for weight in (*block, *ends)
    ):
        return None
    block, ends = (
        tuple(weight._replace(shape=_shape(weight, new)) for weight in part)
        for part in (block, ends)
    )
    experts, chosen = new.get("e", 1), min(new.get("t", 1), new.get("e", 1))
    layers, vocabulary, tied = (
        new["layers"],
        new["v"] * new["h"],
        any(weight.place == "both" for weight in ends),
    )
    in_block, outside = sum(weight.numel for weight in block), sum(weight.numel for weight in ends)
    # Matrix products, as models.load.facts counts them: an embedding that is no head is a look-up.
    products = layers * sum(
        6 * w.numel * chosen / experts if ".experts." in w.name else 6 * w.numel for w in block
    )
    products += 6 * (outside - (0 if tied else vocabulary))
    attention = 12 * new["q"] * length
    return replace(
        facts,
        parameters=layers * in_block + outside,
        flops_per_token=float(products + layers * attention),
        vocab_size=new["v"],
        max_positions=new["positions"],
        layers=layers,
        hidden=new["h"],
        heads=new["heads"],
        kv_heads=new["kv"],
        head_dim=new["d"],
        block_parameters=(in_block,) * layers,
        embedding_parameters=outside - (0 if tied else vocabulary),
        head_parameters=vocabulary,
        attention_flops=float(attention),
        block_weights=(block,) * layers,
        end_weights=ends,
        experts=experts if facts.experts else 0,
        experts_per_token=chosen if facts.experts else 0,
        buffer_bytes=facts.buffer_bytes
        + 4 * (new["d"] - old["d"]),  # two tables of rotary embeddings, fp32
    )


def with_lora(facts: ModelFacts, adapter: LoRAConfig) -> ModelFacts | None:
    """An adapter over linear layers in the blocks, as PEFT lays it, everything else frozen. None for a model that has adapters or frozen
    parts already, whose weights are not known one by one, or where more than factors is trained."""
    if facts.frozen or not facts.block_weights or facts.vision_language or facts.batch_norms:
        return None
    if adapter.dora or adapter.more or adapter.modules_to_save or adapter.trainable_tokens:
        return None
    kinds = {block: tuple(_adapted(block, adapter)) for block, _ in facts.kinds_of_blocks}
    blocks = tuple(kinds[block] for block in facts.block_weights)
    names = {
        weight.name.rpartition(".lora_A.")[0]
        for block in kinds.values()
        for weight in block
        if ".lora_A." in weight.name
    }
    experts = any(".experts." in weight.name for block in kinds for weight in block)
    if not names or (experts and any(name.startswith(("mlp.", "feed_forward.")) for name in names)):
        return None  # of a mixture PEFT adapts the experts, too, where its other feed-forward parts have names that theirs had
    if isinstance(adapter.targets, list):
        outside = [weight.name.rpartition(".")[0] for weight in facts.end_weights]
        if any(_ends(name, target) for name in outside for target in adapter.targets):
            return None  # the embedding or the head
        if not all(any(_ends(name, target) for name in names) for target in adapter.targets):
            return None
    added = sum(weight.numel for block in blocks for weight in block if weight.trainable)
    ahead = len(blocks) - len(facts.block_parameters)
    products = facts.flops_per_token - facts.layers * facts.attention_flops
    return replace(
        facts,
        parameters=facts.parameters + added,
        frozen=facts.parameters,
        flops_per_token=products * 4 / 6 + 6 * added + facts.layers * facts.attention_flops,
        classes=facts.classes
        | {"ModuleDict", "ParameterDict", "Dropout" if adapter.dropout else "Identity"},
        block_weights=blocks,
        block_parameters=tuple(sum(weight.numel for weight in block) for block in blocks[ahead:]),
        end_weights=tuple(weight._replace(trainable=False) for weight in facts.end_weights),
    )


def _adapted(block: tuple[Weight, ...], adapter: LoRAConfig) -> Iterator[Weight]:
    """A block's weights, frozen; behind those of a linear layer that is adapted the two factors, the one beside the cut dimension cut like
    it."""
    for layer, parts in groupby(block, lambda weight: weight.name.rpartition(".")[0]):
        weights = [weight._replace(trainable=False) for weight in parts]
        own, owners = (
            {weight.name.rpartition(".")[2]: weight for weight in weights},
            weights[0].owners,
        )
        if (
            owners[-1:] != ("Linear",)
            or "weight" not in own
            or not _targeted(layer, owners, adapter.targets)
        ):
            yield from weights
            continue
        for last, weight in own.items():
            yield weight._replace(name=f"{layer}.base_layer.{last}", owners=(*owners, "Linear"))
        (rows, columns), style = own["weight"].shape, own["weight"].style
        owners = (*owners, "ModuleDict", "Linear")
        yield Weight(
            f"{layer}.lora_A.default.weight",
            (adapter.r, columns),
            True,
            style if style == "rowwise" else "",
            owners,
        )
        yield Weight(
            f"{layer}.lora_B.default.weight",
            (rows, adapter.r),
            True,
            style if style == "colwise" else "",
            owners,
        )


def _targeted(layer: str, owners: tuple[str, ...], targets: str | list[str]) -> bool:
    if isinstance(targets, list):
        return any(_ends(layer, target) for target in targets)
    return targets == "all-linear" or any("attention" in owner.lower() for owner in owners[:-1])


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
