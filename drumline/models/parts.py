"""The parts of a vision-language model by name, for keys that freeze or adapt them.

`vision` is the tower that turns pixels into features, `projector` what brings its features to the
width of the language model, and `language` all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from drumline.errors import ModelError
from drumline.models.blocks import vision_tower
from drumline.models.classes import is_text_alone

PARTS = ("vision", "projector", "language")
# transformers' names of a projector beside the tower: modules, and a parameter of LLaVA-OneVision.
PROJECTORS = ("multi_modal_projector", "connector", "image_newline")
# Qwen's projectors are modules of its tower, whose names begin with one of these.
PROJECTORS_IN_TOWER = ("merger", "deepstack_merger_list")


def is_part(model: nn.Module, name: str) -> bool:
    """Return whether a name stands for a part of a model. A module of that name has precedence."""
    if name not in PARTS:
        return False
    children = {child for child, _ in model.named_children()}
    return name not in children


def names_in_part(model: Any, part: str, names: Iterable[str], where: str) -> list[str]:
    """Return those of some names of modules or parameters that belong to a part of a model.

    Args:
        model: the model.
        part: one of `PARTS`.
        names: full names, as `model.named_parameters()` has them.
        where: the key that names the part.

    Raises ModelError for a model without a vision tower.
    """
    config = getattr(model, "config", None)
    if getattr(config, "vision_config", None) is None:
        what = f"{type(model).__name__} has no vision tower, and so no part called {part!r}"
        raise ModelError(what, where=where, fix="name modules as model.named_modules() has them")
    tower = vision_tower(model)
    (tower_name,) = [name for name, module in model.named_modules() if module is tower]
    projectors = [f"{tower_name}.{name}" for name in PROJECTORS_IN_TOWER]
    prefix, _, _ = tower_name.rpartition(".")
    for name in PROJECTORS:
        projectors.append(f"{prefix}.{name}".removeprefix("."))
    found = []
    for name in names:
        if _is_below(name, projectors):
            own_part = "projector"
        elif _is_below(name, [tower_name]):
            own_part = "vision"
        else:
            own_part = "language"
        if own_part == part:
            found.append(name)
    return found


def unread_names(model: Any) -> list[str]:
    """Return the names of a tower's modules whose output the rest of the model does not read.

    LLaVA takes the features of an image behind a block of the tower (`vision_feature_layer`, as a
    place among the hidden states). What follows gets no gradients, for which DDP would wait. Nor does
    what is beside the language model, if images are not read at all. Empty for all other models.
    """
    config = getattr(model, "config", None)
    if config is not None and is_text_alone(config):
        return names_beside_text(model)
    layers = getattr(config, "vision_feature_layer", None)
    if layers is None:
        return []
    tower = vision_tower(model)
    (tower_name,) = [name for name, module in model.named_modules() if module is tower]
    children = dict(tower.named_children())
    # Towers that end otherwise give their last output, whose norm is read.
    if "post_layernorm" not in children:
        return []
    unread = [f"{tower_name}.post_layernorm"]
    if "head" in children:
        unread.append(f"{tower_name}.head")
    count = len(tower.encoder.layers)
    if isinstance(layers, int):
        layers = [layers]
    # One more hidden state than blocks: the first is what enters the first block.
    last_read = max(layer % (count + 1) for layer in layers)
    for index in range(last_read, count):
        unread.append(f"{tower_name}.encoder.layers.{index}")
    return unread


def names_beside_text(model: Any) -> list[str]:
    """Return the names of the modules that a vision-language model has beside its language model."""
    of_text = {
        module
        for module in (
            model.get_decoder(),
            model.get_input_embeddings(),
            model.get_output_embeddings(),
        )
        if module is not None
    }
    found: list[str] = []
    _add_modules_beside(model, "", of_text, found)
    return found


def _add_modules_beside(
    module: nn.Module, prefix: str, kept: set[nn.Module], found: list[str]
) -> None:
    """Add the names of the outermost modules within `module` that have none of `kept` in them."""
    for name, child in module.named_children():
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            found.append(f"{prefix}{name}")
        else:
            _add_modules_beside(child, f"{prefix}{name}.", kept, found)


def _is_below(name: str, outer_names: list[str]) -> bool:
    """Return whether a name is one of some names, or lies in a module with one of them."""
    return any(name == outer or name.startswith(f"{outer}.") for outer in outer_names)
