"""Finds the repeated blocks of a model, and how its weights and sequences can be cut over ranks.

Blocks are the units of checkpointing, compilation, sharding and adapters. A Hugging Face model's
class and config name its blocks and the styles by which tensor parallelism cuts its layers. Users
name the blocks of other modules by the argument `units` (`set_blocks`).
`common_facts` counts the weights for the planner.

Functions called `reason_…` return why something does not work for a model; empty if it works.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from drumline.errors import ModelError, PlanError
from drumline.models.classes import is_vision_language, reads_images
from drumline.models.direct_weights import directly_read_layers
from drumline.plan.facts import COLUMN_PARALLEL, Position, Weight
from drumline.vendor.torch import BatchNorm

# The classes of a model's blocks, or a function that finds them.
Units = Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]]


def set_blocks(model: nn.Module, units: Units | None) -> None:
    """Set the blocks of a module that is no Hugging Face model.

    `units`: names of their classes, or a function that picks them from the model. None takes the
    members of the model's outermost lists of modules (nn.ModuleList).
    Raises PlanError for a class that no module of the model has.
    """
    if units is None:
        chosen = _members_of_outer_lists(model)
    elif callable(units):
        chosen = list(units(model))
    else:
        chosen = _modules_of_classes(model, units)
    # A module may be in a list more than once.
    distinct = list(dict.fromkeys(chosen))
    # A plain list, so that the model does not get these modules as children a second time.
    model._drumline_blocks = distinct  # type: ignore[assignment]


def _members_of_outer_lists(model: nn.Module) -> list[nn.Module]:
    """Return the members of every nn.ModuleList that lies in no other one."""
    members: list[nn.Module] = []
    lists = _module_lists(model)
    prefixes = tuple(f"{name}." for name in lists)
    for name, module_list in lists.items():
        if name.startswith(prefixes):
            continue
        for member in module_list:
            if not isinstance(member, nn.ModuleList):
                members.append(member)
    return members


def _module_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return name → nn.ModuleList, in the model's order."""
    lists = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            lists[name] = module
    return lists


def _modules_of_classes(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose class has one of these names, in the model's order.

    Raises PlanError for a name without a module.
    """
    present = {type(module).__name__ for module in model.modules()}
    absent = sorted(set(class_names) - present)
    if absent:
        what = f"the model has no module of class {', '.join(absent)}"
        fix = f"there are {', '.join(sorted(present))}"
        raise PlanError(what, where="units", fix=fix)
    return [module for module in model.modules() if type(module).__name__ in class_names]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, in its order.

    `set_blocks` sets them for any module. A Hugging Face model names their classes in
    `_no_split_modules`.
    """
    if hasattr(model, "_drumline_blocks"):
        return list(model._drumline_blocks)  # type: ignore[arg-type]
    block_classes = _block_classes(model)
    found = []
    for module in model.modules():
        # FSDP2 puts its name before those of the classes that it wraps.
        if type(module).__name__.removeprefix("FSDP") in block_classes:
            found.append(module)
    return found


def text_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a model without those of a vision tower, in its order."""
    config = getattr(model, "config", None)
    if getattr(config, "vision_config", None) is None or not is_vision_language(config):
        return blocks(model)
    return blocks(model.get_decoder())


def _block_classes(model: nn.Module) -> set[str]:
    """Return the class names of a Hugging Face model's blocks; none for any other module."""
    names: Any = getattr(model, "_no_split_modules", None)
    config: Any = getattr(model, "config", None)
    if not names and getattr(config, "is_encoder_decoder", False):
        # Pegasus and others name none: the members of the lists of both stacks are their blocks.
        names = [type(member).__name__ for member in _members_of_outer_lists(model)]
    return set(names or ())


def block_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Return name and nn.ModuleList of a model's blocks; None unless there is exactly one list.

    It is the list that has only blocks as members.
    """
    block_classes = _block_classes(model)
    found = []
    for name, module_list in _module_lists(model).items():
        member_classes = {type(member).__name__ for member in module_list}
        if member_classes and member_classes <= block_classes:
            found.append((name, module_list))
    if len(found) != 1:
        return None
    return found[0]


def reason_not_to_cut(model: Any) -> str:
    """Return why a model's blocks cannot be cut into pipeline stages; empty if they can.

    They must not share weights: two stages would train two copies of a shared one.
    """
    found = block_list(model)
    if found is None:
        return f"{type(model).__name__} has no single list of blocks to cut into stages"
    list_name, _ = found
    prefix = f"{list_name}."
    # Parameter → number of its block in the list; empty outside of the list.
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block_number = ""
        if name.startswith(prefix):
            block_number, *_ = name.removeprefix(prefix).split(".")
        # A tied parameter has several names: all of them must lie in the same block.
        owner = owners.setdefault(id(parameter), block_number)
        if owner != block_number:
            return f"blocks of {type(model).__name__} share weights"
    return ""


# Kinds of layers (a config's `layer_types`) that mix tokens only in attention.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Those of them whose attention can be computed from the lengths of documents alone.
LAYERS_BY_LENGTHS = {"full_attention", "sliding_attention", "attention"}
# The kind of layers that have attention and a recurrent layer.
HYBRID_LAYER = "hybrid"
# Kinds of layers without attention, which take no mask of pairs of tokens.
LAYERS_WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "mlp", "moe"}


def _layer_kinds(model: Any) -> set[str]:
    """Return the kinds of layers that a language model's config lists (`layer_types`)."""
    text_config = model.config.get_text_config()
    return set(getattr(text_config, "layer_types", None) or ())


def has_recurrent_layers(model: Any) -> bool:
    """Return whether a language model has recurrent layers: each has a convolution along the row."""
    return any(is_recurrent(block) for block in text_blocks(model))


def is_recurrent(layer: nn.Module) -> bool:
    """Return whether a layer mixes tokens by a convolution along the row, and maybe by a state."""
    return any(isinstance(module, nn.Conv1d) for module in layer.modules())


def layers_with_attention(model: Any) -> int:
    """Return how many layers of a language model have attention, by the kinds that its config lists."""
    text_config = model.config.get_text_config()
    layers = int(text_config.num_hidden_layers)
    kinds = getattr(text_config, "layer_types", None) or ()
    return layers - sum(kind in LAYERS_WITHOUT_ATTENTION for kind in kinds)


# FLOPs for each number in the state of a recurrent layer and each token: it decays, takes a product
# of key and value in, and is read. That is 6 in forward, and twice as many in backward.
SCAN_FLOPS = 18


def scan_flops(model: nn.Module) -> float:
    """Return the FLOPs of a token in the scans of recurrent layers, besides products with weights.

    They do not depend on the length. The state of Mamba-2 has `ssm_state_size` numbers for each
    inner one, that of gated DeltaNet has the width of a key. Other layers are not counted.
    """
    total = 0
    for module in model.modules():
        if not isinstance(getattr(module, "A_log", None), nn.Parameter):
            continue
        depth = _first_number(module, "ssm_state_size", "head_k_dim")
        width = _first_number(module, "value_dim", "intermediate_size")
        total += SCAN_FLOPS * depth * width
    return float(total)


def _first_number(module: nn.Module, *names: str) -> int:
    """Return the first attribute of these names that the module has; 0 without any."""
    for name in names:
        if hasattr(module, name):
            return int(getattr(module, name))
    return 0


def reason_against_context_parallelism(model: Any) -> str:
    """Return why context parallelism cannot cut a model's sequences; empty if it can.

    The answer follows from the model's class and config.
    """
    supports_interface = getattr(model, "_supports_attention_backend", False)
    if has_recurrent_layers(model):
        # Classes of hybrid models use the interface, and do not say so.
        module = sys.modules.get(type(model).__module__)
        supports_interface = hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    supports_sdpa = getattr(model, "_supports_sdpa", False)
    if not (supports_interface and supports_sdpa):
        return "its attention does not go through transformers' attention interface with sdpa"
    known = {*ATTENTION_LAYERS, "mlp", "moe"}
    if has_recurrent_layers(model):
        known |= {*LAYERS_WITHOUT_ATTENTION, HYBRID_LAYER}
    unknown = _layer_kinds(model) - known
    if unknown:
        return f"its layers of kind {min(unknown)} are not known to run on parts or on whole rows"
    return ""


def reason_for_mask(model: Any) -> str:
    """Return why a model's attention takes a mask; empty if it can take the lengths of documents.

    The answer follows from the model's class and config.
    """
    module = sys.modules.get(type(model).__module__)
    supports_interface = getattr(model, "_supports_attention_backend", False)
    if not supports_interface or not hasattr(module, "eager_attention_forward"):
        return "its attention does not go through transformers' attention interface"
    has_vision = getattr(model.config, "vision_config", None) is not None
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    if has_vision or has_encoder:
        return "it is no model of text alone"
    unknown = _layer_kinds(model) - LAYERS_BY_LENGTHS - LAYERS_WITHOUT_ATTENTION
    if unknown:
        return f"it has layers of kind {min(unknown)}"
    return ""


def common_facts(model: Any) -> dict[str, Any]:
    """Return the fields of ModelFacts that every model has, by name.

    The model may be on the meta device.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    batch_norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    class_names = {type(module).__name__ for module in model.modules()}
    block_parameters: list[int] = []
    found = block_list(model)
    if found is not None:
        _, module_list = found
        block_parameters = [count_entries(block.parameters()) for block in module_list]
    block_weights, end_weights = _weights_by_block(model)
    can_recompute = getattr(model, "supports_gradient_checkpointing", False)
    return {
        "parameters": count_entries(model.parameters()),
        "frozen": count_entries(frozen),
        "batch_norms": len(batch_norms),
        "classes": frozenset(class_names),
        "block_parameters": tuple(block_parameters),
        "block_weights": block_weights,
        "tower_blocks": len(block_weights) - len(text_blocks(model)),
        "end_weights": end_weights,
        "recomputes": bool(can_recompute),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
    }


def count_entries(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many numbers some parameters hold."""
    return sum(parameter.numel() for parameter in parameters)


def _weights_by_block(model: Any) -> tuple[tuple[tuple[Weight, ...], ...], tuple[Weight, ...]]:
    """Return (the weights of each block, the weights outside of all blocks); tied ones once.

    The model may be on the meta device.
    """
    all_blocks = blocks(model)
    block_index = {id(block): index for index, block in enumerate(all_blocks)}
    in_blocks: list[list[Weight]] = [[] for _ in all_blocks]
    outside: list[Weight] = []
    styles = _styles_by_layer(model)
    directly_read = {id(layer) for layer in directly_read_layers(model)}
    in_both_ends = _parameters_in_both_ends(model)
    modules = dict(model.named_modules())
    has_passed_blocks = False
    for name, parameter in model.named_parameters():
        path = name.split(".")
        enclosing = _enclosing_modules(modules, path)
        style = ""
        if enclosing:
            style = styles.get(id(enclosing[-1]), "")
        # If blocks are nested, the weight belongs to the innermost one only.
        depths = [depth for depth, module in enumerate(enclosing) if id(module) in block_index]
        depth_of_owner = max(depths, default=0)
        owners = tuple(type(module).__name__ for module in enclosing[depth_of_owner:])
        shape = tuple(parameter.shape)
        if depths:
            has_passed_blocks = True
            name_in_block = ".".join(path[depth_of_owner + 1 :])
            weight = Weight(
                name_in_block,
                shape,
                parameter.requires_grad,
                style,
                owners,
                is_read_directly=id(enclosing[-1]) in directly_read,
            )
            index = block_index[id(enclosing[depth_of_owner])]
            in_blocks[index].append(weight)
            continue
        # Parameters come in the model's order, so a weight before those of the first block is used
        # before the blocks.
        position: Position = "before"
        if id(parameter) in in_both_ends:
            position = "both"
        elif has_passed_blocks:
            position = "after"
        outside.append(Weight(name, shape, parameter.requires_grad, style, owners, position))
    return _share_equal_blocks(in_blocks), tuple(outside)


def _enclosing_modules(modules: dict[str, nn.Module], path: list[str]) -> list[nn.Module]:
    """Return the modules around a parameter, the outermost first, without the model itself.

    `modules`: by their names. `path`: the parts of the parameter's name.
    """
    enclosing = []
    for depth in range(1, len(path)):
        module_name = ".".join(path[:depth])
        enclosing.append(modules[module_name])
    return enclosing


def _share_equal_blocks(in_blocks: list[list[Weight]]) -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of each block as tuples.

    Equal blocks share one tuple: a model has up to a hundred of them.
    """
    distinct: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    block_weights = []
    for weights in in_blocks:
        as_tuple = tuple(weights)
        block_weights.append(distinct.setdefault(as_tuple, as_tuple))
    return tuple(block_weights)


def _parameters_in_both_ends(model: Any) -> set[int]:
    """Return Python's ids of the parameters that embedding and head share, beneath adapters too."""
    if reads_images(model):
        return set()
    embedding, head = embedding_and_head(model)
    embedding_weight = _own_weight(embedding)
    if embedding_weight is None or embedding_weight is not _own_weight(head):
        return set()
    shared = {id(embedding_weight)}
    # Trainable rows of tokens lie over both ends, too.
    token_rows = embedding._modules.get("token_adapter")
    if token_rows is not None:
        shared |= {id(rows) for rows in token_rows.trainable_tokens_delta.values()}
    return shared


def _own_weight(layer: Any) -> Any:
    """Return the weight of a layer beneath its adapters.

    None for no layer, or one without a weight.
    """
    if layer is None:
        return None
    return getattr(find_base_layer(layer), "weight", None)


def vision_tower(model: Any) -> Any:
    """Return the vision tower of a model.

    Raises ModelError if it has none of transformers' names for it.
    """
    for part in (model.base_model, model):
        for name in ("visual", "vision_tower", "vision_model"):
            if hasattr(part, name):
                return getattr(part, name)
    what = f"the vision tower of {type(model).__name__} is not known"
    raise ModelError(what, where="model", fix="use a model of text alone")


def tower_flops(model: Any) -> float:
    """Return the FLOPs of the vision tower for one image token, forward and backward.

    Those of attention are left out. A trainable parameter costs 6 FLOPs for each patch: 2 in
    forward, and 2 each for the gradients of inputs and weights. A frozen parameter costs 4. In a
    frozen tower, which has no backward, it costs 2. The merger joins the patches of a token, so its
    parameters count once a token.
    """
    tower = vision_tower(model)
    patches = _patches_per_token(model.config)
    is_tower_trainable = any(parameter.requires_grad for parameter in tower.parameters())
    total = 0.0
    for name, parameter in tower.named_parameters():
        if "merger" in name:
            uses = 1
        elif name == "pos_embed.weight":
            # It is looked up and added, not multiplied.
            uses = 0
        else:
            uses = patches
        if parameter.requires_grad:
            flops_per_use = 6
        elif is_tower_trainable:
            flops_per_use = 4
        else:
            flops_per_use = 2
        total += uses * parameter.numel() * flops_per_use
    return total


def _patches_per_token(config: Any) -> int:
    """Return how many patches of an image become one token of the language model."""
    vision = config.vision_config
    merge = getattr(vision, "spatial_merge_size", None)
    if merge is not None:
        return int(merge**2)
    tokens_per_image = getattr(config, "mm_tokens_per_image", None)
    if tokens_per_image is not None:
        patches_per_image = (vision.image_size // vision.patch_size) ** 2
        return int(patches_per_image // tokens_per_image)
    # Idefics 3 and SmolVLM.
    scale = getattr(config, "scale_factor", None)
    if scale is not None:
        return int(scale**2)
    # InternVL, or Llama 4.
    ratio = getattr(config, "downsample_ratio", getattr(vision, "pixel_shuffle_ratio", 1.0))
    return round(1 / ratio**2)


def _styles_by_layer(model: Any) -> dict[int, str]:
    """Return Python's id of each layer that tensor parallelism cuts → its style.

    The styles are those of engine.tensor_parallel. Embedding and head are always cut by the
    vocabulary, and experts by their number, whether a plan names them or not.
    """
    experts: dict[int, str] = {}
    for name in expert_modules(model):
        for holder in expert_holders(model.get_submodule(name)):
            experts[id(holder)] = "experts"
    if reads_images(model):
        return experts
    plan = tensor_plan(model)
    if not plan:
        return experts
    styles: dict[int, str] = {}
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if name in modules:
            for layer in cut_layers(modules[name], style):
                styles[id(layer)] = style
    embedding, head = embedding_and_head(model)
    if head is not None:
        styles[id(find_base_layer(head))] = "head"
    # After the plan's styles, which may name experts too: these win.
    styles |= experts
    styles[id(find_base_layer(embedding))] = "embedding"
    return styles


# Type of model → our plan, for classes of transformers without one. GPT-2's queries, keys and
# values are one layer, whose output is gathered: each rank computes all heads.
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
    """Return name of a module (or of a single parameter) → its style of tensor parallelism.

    It is empty for a model without a plan. Embedding and head are left out, since they are always
    cut by the vocabulary. Experts are cut by their number, whatever the plan has for them.
    """
    styles = _planned_styles(model)
    experts = []
    if "moe_tp_experts" in styles.values():
        experts = expert_modules(model)
        styles |= dict.fromkeys(experts, "experts")
    inside_experts = tuple(f"{name}." for name in experts)
    plan = {}
    for name, style in styles.items():
        is_inside_experts = name.startswith(inside_experts)
        if style is not None and not is_inside_experts:
            plan[name] = style
    return plan


def _planned_styles(model: Any) -> dict[str, str | None]:
    """Return name → style of each module and parameter.

    The styles are those of the model's plan, or of ours for its type. The style is None if the plan
    does not name it.
    """
    by_vocabulary = embedding_and_head(model)
    names = [name for name, module in model.named_modules() if module not in by_vocabulary]
    names += [name for name, _ in model.named_parameters()]
    plan = getattr(model, "_tp_plan", None) or {}
    is_huggingface = hasattr(model, "get_input_embeddings")
    # Plans of a user's own module and ours have patterns like those of file names.
    is_plan_of_patterns = not is_huggingface
    if not plan:
        model_type = getattr(getattr(model, "config", None), "model_type", "")
        plan = OWN_PLANS.get(model_type, {})
        is_plan_of_patterns = True
    styles: dict[str, str | None] = {}
    for name in names:
        if is_plan_of_patterns:
            # With its numbers: a user's plan may name some of the numbered layers only.
            styles[name] = _style_by_pattern(plan, name)
        else:
            # transformers writes `layers.*.mlp.up_proj` for the layers of all numbers.
            without_numbers = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            styles[name] = plan.get(without_numbers)
    return styles


def _style_by_pattern(plan: dict[str, str], name: str) -> str | None:
    """Return the style of the first pattern that a name matches; None if it matches none."""
    for pattern, style in plan.items():
        if fnmatchcase(name, pattern):
            return style
    return None


# Styles that give each rank a layer's whole output.
WHOLE_OUTPUTS = {
    "colwise_gather_output",
    "colwise_rep",
    "replicate",
    "replicated_with_grad_allreduce",
}


def column_parallel_modules(model: Any) -> list[str]:
    """Return the names of modules that begin with column-parallel layers.

    These are attentions and feed-forward parts.
    """
    outer_names = []
    for name, style in tensor_plan(model).items():
        if style in COLUMN_PARALLEL:
            outer_name, _, _ = name.rpartition(".")
            outer_names.append(outer_name)
    return list(dict.fromkeys(outer_names))


def blocks_in_a_row(model: nn.Module) -> dict[str, nn.Module]:
    """Return name → block for the blocks that are members of a list of modules.

    They pass hidden states to each other. In a stage of a pipeline the list may lack some members.
    """
    block_ids = {id(block) for block in blocks(model)}
    in_a_row = {}
    for list_name, module_list in _module_lists(model).items():
        for number, member in module_list.named_children():
            if id(member) in block_ids:
                in_a_row[f"{list_name}.{number}"] = member
    return in_a_row


def expert_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that compute all experts of a layer.

    Such a module holds tensors [experts, …]. If it has adapters, it is the outermost module of
    these.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_inside_another = bool(names) and name.startswith(f"{names[-1]}.")
        if not is_inside_another and _holds_experts(find_base_layer(module)):
            names.append(name)
    return names


def expert_holders(layer: nn.Module) -> list[Any]:
    """Return the modules that hold tensors [experts, …], for one of `expert_modules`.

    These are the module of the experts' own weights and those of the factors of adapters.
    """
    return [module for module in layer.modules() if _holds_experts(module)]


# Classes whose experts get the rows of one expert after another, as many for each. They have the
# inputs of their tensors first, and do not say so.
GETS_EQUAL_ROWS = ("Llama4TextExperts",)


def takes_adapters(base: nn.Module) -> bool:
    """Return whether `models.expert_layers` can compute a module of experts and their adapters.

    It knows the classes that transformers computes by grouped products, and GETS_EQUAL_ROWS.
    """
    return hasattr(base, "is_concatenated") or type(base).__name__ in GETS_EQUAL_ROWS


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module without its children's."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _holds_experts(module: Any) -> bool:
    """Return whether a module holds all experts of a layer.

    Each of its own parameters then has an entry for each expert, and one has a matrix for each.
    """
    number = getattr(module, "num_experts", None)
    if number is None:
        return False
    own = _own_parameters(module)
    if any(parameter.shape[:1] != (number,) for parameter in own):
        return False
    return any(parameter.ndim == 3 for parameter in own)


def reason_against_sequence_parallelism(model: Any) -> str:
    """Return why sequence parallelism is not possible; empty if it is.

    Under it each tensor-parallel rank holds a part of the tokens between the cut layers
    (Korthikanti et al. 2022).
    """
    plan = tensor_plan(model)
    if block_list(model) is None or not plan:
        return "it has no single list of blocks, or no plan for them"
    modules = dict(model.named_modules())
    region_names = column_parallel_modules(model)
    for region in region_names:
        prefix = f"{region}."
        styles = {style for layer, style in plan.items() if layer.startswith(prefix)}
        if styles and styles <= WHOLE_OUTPUTS:
            return f"{type(modules[region]).__name__} of its blocks gives whole sequences"
    inside_cut: set[int] = set()
    if region_names:
        inside_cut = _ids_inside(modules, [*region_names, *plan])
    for block in blocks_in_a_row(model).values():
        if any(modules[region] is block for region in region_names):
            return "the layers of its blocks are in no modules of their own"
        for module in block.modules():
            if id(module) not in inside_cut and _may_mix_tokens(module):
                name = type(module).__name__
                return f"{name} of its blocks is not cut, and may need whole sequences"
    return ""


def _ids_inside(modules: dict[str, nn.Module], names: Iterable[str]) -> set[int]:
    """Return the ids of the modules with these names and of all modules in them.

    Names of single parameters, which a plan may have, are left out.
    """
    ids: set[int] = set()
    for name in names:
        if name in modules:
            ids |= {id(module) for module in modules[name].modules()}
    return ids


def _may_mix_tokens(module: nn.Module) -> bool:
    """Return whether a module may compute a token's result from other tokens.

    It may if it has a matrix of its own and is no router. Routers and norms, whose weights are
    vectors, compute each token by itself.
    """
    if "Router" in type(module).__name__:
        return False
    return any(parameter.ndim > 1 for parameter in _own_parameters(module))


def embedding_and_head(model: Any) -> tuple[Any, Any]:
    """Return embedding and head of a Hugging Face model.

    Each is None if the model lacks it, and both for any other module.
    """
    if not hasattr(model, "get_input_embeddings"):
        return None, None
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # transformers' answer for models of images and sounds
        return None, None
    return embedding, model.get_output_embeddings()


def is_head_tied(model: Any) -> bool:
    """Return whether the head's weight is the embedding's, beneath adapters."""
    embedding, head = embedding_and_head(model)
    head_weight = _own_weight(head)
    return head_weight is not None and head_weight is _own_weight(embedding)


def find_base_layer(module: nn.Module) -> Any:
    """Return the layer beneath its adapters; a layer without adapters itself.

    Trainable rows of tokens may be an adapter over another one, and the experts of a mixture have
    an adapter for each of their tensors, one inside the other.
    """
    layer: Any = module._modules.get("token_adapter") or module
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


def cut_layers(module: nn.Module, style: str) -> list[nn.Module]:
    """Return the layers that a style cuts: the module itself, or two layers of a LoRA layer.

    These are the base layer and the factor on the cut side. The other factor and its gradient stay
    whole, since the numbers between the factors are whole.
    """
    layers = [find_base_layer(module)]
    cut_factor = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    if cut_factor is not None:
        factors = getattr(module, cut_factor, None)
        if factors is not None:
            layers += factors.values()
    return layers
