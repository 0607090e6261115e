"""Parameters of a model one by one, as the planner's arithmetic wants them: shape, who learns, how they may be cut."""

from __future__ import annotations

from typing import Any

from torch import nn

from drumline.models.blocks import blocks
from drumline.models.classes import reads_images
from drumline.models.tensor_plan import cut_layers, tensor_plan, whole_layer
from drumline.plan.facts import Place, Weight


def weights_of(model: Any) -> tuple[tuple[tuple[Weight, ...], ...], tuple[Weight, ...]]:
    """The weights of each block, and those outside of all blocks. Tied ones are there once. `model` may lie on the meta device."""
    found, styles = blocks(model), _styles(model)
    inside = {id(module): index for index, module in enumerate(found)}
    of_blocks: list[list[Weight]] = [[] for _ in found]
    rest: list[Weight] = []
    modules, passed = dict(model.named_modules()), False
    tied = None if reads_images(model) else _tied(model)
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        around = [modules[".".join(path[: i + 1])] for i in range(len(path))]
        # The innermost block: what it takes is no part of an outer one.
        depth = max((i for i, module in enumerate(around) if id(module) in inside), default=None)
        shape, style = tuple(parameter.shape), styles.get(id(around[-1]) if around else 0, "")
        owners = tuple(type(module).__name__ for module in around[depth or 0 :])
        if depth is not None:
            block, passed = of_blocks[inside[id(around[depth])]], True
            block.append(Weight(".".join([*path[depth + 1 :], last]), shape, parameter.requires_grad, style, owners))
        else:
            place: Place = "both" if parameter is tied else "after" if passed else "before"
            rest.append(Weight(name, shape, parameter.requires_grad, style, owners, place))
    same: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    return tuple(same.setdefault(block, block) for block in map(tuple, of_blocks)), tuple(rest)


def buffer_bytes(model: nn.Module) -> int:
    """Of all buffers, those too that are not saved."""
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def _tied(model: Any) -> nn.Parameter | None:
    """The weight that embedding and head share."""
    embedding = getattr(whole_layer(model.get_input_embeddings()), "weight", None)
    head = model.get_output_embeddings()
    return embedding if head is not None and getattr(whole_layer(head), "weight", None) is embedding else None


def _styles(model: Any) -> dict[int, str]:
    """Layer → how tensor parallelism cuts it (see strategies.tensor_parallel); embedding and head by the vocabulary."""
    if reads_images(model) or not (plan := tensor_plan(model)):
        return {}
    modules = dict(model.named_modules())
    styles = {id(layer): style for name, style in plan.items() if name in modules for layer in cut_layers(modules[name], style)}
    head = model.get_output_embeddings()
    if head is not None:
        styles[id(whole_layer(head))] = "head"
    return styles | {id(whole_layer(model.get_input_embeddings())): "embedding"}
