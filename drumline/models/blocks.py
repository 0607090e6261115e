"""The repeated blocks of a model (units of checkpointing, compilation, sharding and adapters), and its weights one by one. The planner
counts by shapes, by what is trainable, and by how tensor parallelism cuts: a Hugging Face model's class and config have the style of each
module."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from drumline.core.facts import ROWS_CUT, Place, Weight
from drumline.errors import ModelError, PlanError
from drumline.models.classes import reads_images
from drumline.vendor.torch import BatchNorm

Units = Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]]


def set_blocks(model: nn.Module, units: Units | None) -> None:
    """Set the blocks of a module that is no Hugging Face model: by their classes, or by a function that picks them; None: all in its
    outermost lists of modules (nn.ModuleList). Raises PlanError for a class that it does not have."""
    if units is None:
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
        }
        outer = [
            module
            for name, module in lists.items()
            if not any(name.startswith(f"{other}.") for other in lists)
        ]
        chosen = [
            block for found in outer for block in found if not isinstance(block, nn.ModuleList)
        ]
    elif callable(units):
        chosen = [*units(model)]
    else:
        classes = {type(module).__name__ for module in model.modules()}
        if absent := sorted({*units} - classes):
            fix = f"there are {', '.join(sorted(classes))}"
            raise PlanError(
                f"the model has no module of class {', '.join(absent)}", where="units", fix=fix
            )
        chosen = [module for module in model.modules() if type(module).__name__ in units]
    # A module that stands in a list more than once is one unit.
    model._drumline_blocks = list(dict.fromkeys(chosen))  # type: ignore[assignment]  # a plain list: they stay where they are


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names in `_no_split_modules` of Hugging Face models, or by `set_blocks`."""
    if hasattr(model, "_drumline_blocks"):
        return list(model._drumline_blocks)  # type: ignore[arg-type]
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 puts its name before those of the classes that it wraps.
    return [
        module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names
    ]


def block_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Name and list of a model's blocks: the only ModuleList of nothing but `_no_split_modules`; None where it is not just one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(block).__name__ in names for block in module)
    ]
    return found[0] if len(found) == 1 else None


def uncut(model: Any) -> str:
    """Why its blocks cannot be stages; empty where they may be. Two stages would train two copies of a weight that blocks share."""
    found = block_list(model)
    if found is None:
        return f"{type(model).__name__} has no single list of blocks to cut into stages"
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.removeprefix(found[0]).split(".")[1] if name.startswith(f"{found[0]}.") else ""
        if owners.setdefault(id(parameter), block) != block:
            return f"blocks of {type(model).__name__} share weights"
    return ""


# Layers by these names (a config's layer_types) mix tokens in attention alone.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def whole_sequences(model: Any) -> str:
    """Why a rank cannot have a part of each sequence, by the model's class and config; empty if it can."""
    if not all(
        getattr(model, flag, False) for flag in ("_supports_attention_backend", "_supports_sdpa")
    ):
        return "its attention does not go through transformers' attention interface with sdpa"
    mixing = sorted(
        {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - ATTENTION_LAYERS
    )
    return f"its layers of kind {mixing[0]} mix tokens without attention" if mixing else ""


def needs_mask(model: Any) -> str:
    """Why its attention takes a mask and not the lengths of documents, by the model's class and config; empty where lengths will do."""
    module = sys.modules.get(type(model).__module__)
    if not getattr(model, "_supports_attention_backend", False) or not hasattr(
        module, "eager_attention_forward"
    ):
        return "its attention does not go through transformers' attention interface"
    if getattr(model.config, "vision_config", None) is not None or getattr(
        model.config, "is_encoder_decoder", False
    ):
        return "it is no model of text alone"
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - {
        "full_attention",
        "sliding_attention",
        "attention",
    }
    return f"it has layers of kind {min(kinds)}" if kinds else ""


def counted(model: Any) -> dict[str, Any]:
    """The fields of ModelFacts that every model has."""
    found = block_list(model)
    block_weights, end_weights = _weights_of(model)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "batch_norms": sum(isinstance(module, BatchNorm) for module in model.modules()),
        "classes": frozenset(type(module).__name__ for module in model.modules()),
        "block_parameters": tuple(sum(p.numel() for p in block.parameters()) for block in found[1])
        if found
        else (),
        "block_weights": block_weights,
        "end_weights": end_weights,
        "recomputes": bool(getattr(model, "supports_gradient_checkpointing", False)),
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    }


def _weights_of(model: Any) -> tuple[tuple[tuple[Weight, ...], ...], tuple[Weight, ...]]:
    """The weights of each block, and those outside of all blocks; tied ones once. `model` may be on the meta device."""
    found, styles = blocks(model), _styles(model)
    inside = {id(module): index for index, module in enumerate(found)}
    of_blocks: list[list[Weight]] = [[] for _ in found]
    rest: list[Weight] = []
    modules, passed = dict(model.named_modules()), False
    ends = (None, None) if reads_images(model) else vocabulary(model)
    embedding, head = (
        None if layer is None else getattr(whole_layer(layer), "weight", None) for layer in ends
    )
    of_both_ends = set[int]()
    if embedding is not None and embedding is head:
        of_both_ends.add(id(embedding))
        # Trainable rows of tokens lie over both ends, too.
        token_rows: Any = ends[0] and ends[0]._modules.get("token_adapter")
        if token_rows is not None:
            of_both_ends |= {id(rows) for rows in token_rows.trainable_tokens_delta.values()}
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        around = [modules[".".join(path[: i + 1])] for i in range(len(path))]
        # The innermost block: its weights are no part of an outer one.
        depth = max((i for i, module in enumerate(around) if id(module) in inside), default=None)
        shape, style = tuple(parameter.shape), styles.get(id(around[-1]) if around else 0, "")
        owners = tuple(type(module).__name__ for module in around[depth or 0 :])
        if depth is not None:
            block, passed = of_blocks[inside[id(around[depth])]], True
            block.append(
                Weight(
                    ".".join([*path[depth + 1 :], last]),
                    shape,
                    parameter.requires_grad,
                    style,
                    owners,
                )
            )
        else:
            place: Place = (
                "both" if id(parameter) in of_both_ends else "after" if passed else "before"
            )
            rest.append(Weight(name, shape, parameter.requires_grad, style, owners, place))
    same: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    return tuple(same.setdefault(block, block) for block in map(tuple, of_blocks)), tuple(rest)


def vision_tower(model: Any) -> Any:
    """The vision tower of a model. Raises ModelError if it has none of transformers' names for it."""
    for part in (model.base_model, model):
        for name in ("visual", "vision_tower", "vision_model"):
            if hasattr(part, name):
                return getattr(part, name)
    what = f"the vision tower of {type(model).__name__} is not known"
    raise ModelError(what, where="model", fix="use a Qwen3-VL, or a model of text alone")


def tower_flops(model: Any) -> float:
    """FLOPs of the tower for one image token, forward and backward, without attention: for each parameter 6 (4 if it is frozen, 2 if the
    whole tower is) times the patches of a token; parameters behind the merger count once."""
    tower, total, vision = vision_tower(model), 0.0, model.config.vision_config
    if (merge := getattr(vision, "spatial_merge_size", None)) is not None:
        patches = merge**2
    elif (tokens := getattr(model.config, "mm_tokens_per_image", None)) is not None:
        patches = (vision.image_size // vision.patch_size) ** 2 // tokens
    else:
        patches = round(1 / getattr(vision, "pixel_shuffle_ratio", 1.0) ** 2)
    trainable = any(p.requires_grad for p in tower.parameters())
    for name, parameter in tower.named_parameters():
        times = 1 if "merger" in name else 0 if name == "pos_embed.weight" else patches
        total += (
            times * parameter.numel() * (6 if parameter.requires_grad else 4 if trainable else 2)
        )
    return total


def _styles(model: Any) -> dict[int, str]:
    """Layer → its style of tensor parallelism (see parallel.tensor_parallel); embedding and head are cut by the vocabulary, and experts by
    their number, also where no plan names them."""
    experts = {id(model.get_submodule(name)): "experts" for name in expert_modules(model)}
    if reads_images(model) or not (plan := tensor_plan(model)):
        return experts
    modules, (embedding, head) = dict(model.named_modules()), vocabulary(model)
    styles = {
        id(layer): style
        for name, style in plan.items()
        if name in modules
        for layer in cut_layers(modules[name], style)
    }
    if head is not None:
        styles[id(whole_layer(head))] = "head"
    return styles | experts | {id(whole_layer(embedding)): "embedding"}


# Plans for classes that carry none, by type of model. GPT-2's queries, keys and values lie in one layer: all heads are on each rank.
_BERT = {"*.attention.self.query": "colwise", "*.attention.self.key": "colwise", "*.attention.self.value": "colwise",
         "*.intermediate.dense": "colwise", "*.output.dense": "rowwise"}  # fmt: skip
OWN_PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    "distilbert": {
        "*.attention.q_lin": "colwise", "*.attention.k_lin": "colwise", "*.attention.v_lin": "colwise",
        "*.attention.out_lin": "rowwise", "*.ffn.lin1": "colwise", "*.ffn.lin2": "rowwise",
    },
    "gpt2": {"*.attn.c_attn": "colwise_gather_output", "*.attn.c_proj": "rowwise_split_input",
             "*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise"},
}  # fmt: skip


def tensor_plan(model: Any) -> dict[str, str]:
    """Name of a module (or of a single parameter) → style, for all modules of the plan that the model has; {} without a plan. Embedding and
    head are left out: they are always cut by vocabulary. Experts are cut by their number, whatever the plan has for them."""
    plan = getattr(model, "_tp_plan", None) or {}
    by_vocabulary = vocabulary(model)
    names = [name for name, module in model.named_modules() if module not in by_vocabulary]
    names += [name for name, _ in model.named_parameters()]
    styles = {name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in names}
    own = (
        {} if plan else OWN_PLANS.get(getattr(getattr(model, "config", None), "model_type", ""), {})
    )
    if own or not hasattr(
        model, "get_input_embeddings"
    ):  # a user's plan may have some of the numbered layers
        plan = own or plan
        styles = {
            name: next((plan[key] for key in plan if fnmatchcase(name, key)), None)
            for name in names
        }
    experts = expert_modules(model) if "moe_tp_experts" in styles.values() else []
    styles = {
        name: style
        for name, style in styles.items()
        if not any(name.startswith(f"{module}.") for module in experts)
    }
    return {
        name: style
        for name, style in (styles | dict.fromkeys(experts, "experts")).items()
        if style is not None
    }


# A module of such layers alone gives each rank all that it computes.
WHOLE_OUTPUTS = {
    "colwise_gather_output",
    "colwise_rep",
    "replicate",
    "replicated_with_grad_allreduce",
}


def regions(model: Any) -> list[str]:
    """The modules whose layers begin with columns of a tensor-parallel plan: attentions and feed-forwards."""
    starts = (
        name.rpartition(".")[0] for name, style in tensor_plan(model).items() if style in ROWS_CUT
    )
    return list(dict.fromkeys(starts))


def blocks_in_a_row(model: nn.Module) -> dict[str, nn.Module]:
    """Name → block, of those that hand on a stream to each other: members of a list, also where a stage of a pipeline lacks some."""
    found = {id(block) for block in blocks(model)}
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    return {
        f"{name}.{number}": block
        for name, members in lists
        for number, block in members.named_children()
        if id(block) in found
    }


def expert_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold all experts of a layer, each tensor by their number first."""

    def holds(module: Any) -> bool:
        number, own = (
            getattr(module, "num_experts", None),
            [p for p in module._parameters.values() if p is not None],
        )
        return (
            bool(own)
            and all(p.shape[:1] == (number,) for p in own)
            and any(p.ndim == 3 for p in own)
        )

    return [name for name, module in model.named_modules() if holds(module)]


def whole_stream(model: Any) -> str:
    """Why tensor-parallel ranks cannot have a part of the tokens between the layers that are cut; empty where they can."""
    if block_list(model) is None or not (plan := tensor_plan(model)):
        return "it has no single list of blocks, or no plan for them"
    modules, inside = dict(model.named_modules()), regions(model)
    for name in inside:
        styles = {style for layer, style in plan.items() if layer.startswith(f"{name}.")}
        if styles and styles <= WHOLE_OUTPUTS:
            return f"{type(modules[name]).__name__} of its blocks gives whole sequences"
    for block in blocks_in_a_row(model).values():
        if any(modules[name] is block for name in inside):
            return "the layers of its blocks are in no modules of their own"
        # A plan may name single parameters.
        cut = [modules[name] for name in (*inside, *plan) if name in modules]
        within = {id(module) for layer in cut for module in layer.modules()} if inside else set()
        for module in block.modules():
            mixes = (
                any(p is not None and p.ndim > 1 for p in module._parameters.values())
                and "Router" not in type(module).__name__
            )
            if id(module) not in within and mixes:
                return f"{type(module).__name__} of its blocks is not cut, and may need whole sequences"
    return ""


def vocabulary(model: Any) -> tuple[Any, Any]:
    """Return embedding and head of a Hugging Face model; None for what it lacks, and for any other module."""
    if not hasattr(model, "get_input_embeddings"):
        return None, None
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # transformers' answer for models of images and sounds
        return None, None
    return embedding, model.get_output_embeddings()


def is_head_tied(model: Any) -> bool:
    """Return whether the head's weight is the embedding's, beneath adapters."""
    embedding, head = vocabulary(model)
    if embedding is None or head is None:
        return False
    weight = getattr(whole_layer(head), "weight", None)
    return weight is not None and weight is getattr(whole_layer(embedding), "weight", None)


def whole_layer(module: nn.Module) -> Any:
    """The base layer of one of PEFT's layers, also beneath trainable rows of tokens; any other layer itself."""
    module = module._modules.get("token_adapter") or module
    return getattr(module, "base_layer", module)


def cut_layers(module: nn.Module, style: str) -> list[nn.Module]:
    """The layers that a style cuts: the module, or the base layer of a LoRA layer and the LoRA factor on the cut side. The other factor
    stays whole, and so does its gradient, since the hidden state between them is whole."""
    factors = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    inner = getattr(module, factors, None) if factors else None
    return [whole_layer(module), *(inner.values() if inner is not None else ())]
