"""Large weights of a model's blocks that an adapter does not reach or that QLoRA leaves unpacked,
and how a user is told. No torch here.

The facts of a model under its adapter know both: a frozen weight is adapted if it is the base layer
of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from drumline.core.config import Adapter, LoRAConfig
from drumline.core.explain import count
from drumline.core.facts import LINEAR, ModelFacts, Weight, is_packed

# A group below this share of all weights would be shown as 0%. Short convolutions are.
SMALLEST_SHARE = 0.005


class Unadapted(NamedTuple):
    """Weights of one kind that lack the same.

    `names`: inside their blocks; `parameters`: of all blocks together; `total`: of the whole model,
    without the adapter's own.
    """

    kind: str
    names: tuple[str, ...]
    parameters: int
    total: int
    lacks_adapter: bool
    lacks_packing: bool

    @property
    def share(self) -> float:
        return self.parameters / self.total


def find_unadapted(facts: ModelFacts, adapter: Adapter) -> list[Unadapted]:
    """Return the large matrices of the blocks that lack an adapter or packing, the largest first.

    They lack an adapter under `all-linear` alone: targets that the user has named leave out what
    the user wants to be left out. They lack packing under QLoRA. Embeddings and heads are outside
    of the blocks, where neither promises anything. `facts`: of the model under `adapter`.
    """
    if not isinstance(adapter, LoRAConfig):
        return []
    names: dict[tuple[str, bool, bool], list[str]] = {}
    parameters: dict[tuple[str, bool, bool], int] = {}
    for block, number in facts.kinds_of_blocks:
        for weight in block:
            if weight.trainable or not _is_multiplied(weight):
                continue
            lacks_adapter = adapter.targets == "all-linear" and ".base_layer." not in weight.name
            lacks_packing = adapter.quantize != "none" and not is_packed(weight)
            if lacks_adapter or lacks_packing:
                group = (_kind(weight), lacks_adapter, lacks_packing)
                name = weight.name.removesuffix(".weight").removesuffix(".base_layer")
                names.setdefault(group, []).append(name)
                parameters[group] = parameters.get(group, 0) + number * weight.numel
    total = facts.parameters - _parameters_of_factors(facts)
    found = []
    for (kind, lacks_adapter, lacks_packing), size in parameters.items():
        shown = tuple(dict.fromkeys(names[kind, lacks_adapter, lacks_packing]))
        found.append(Unadapted(kind, shown, size, total, lacks_adapter, lacks_packing))
    large = [group for group in found if group.share >= SMALLEST_SHARE]
    return sorted(large, key=lambda group: -group.parameters)


def describe_unadapted(found: Sequence[Unadapted]) -> list[str]:
    """Return one line for each group."""
    lines = []
    for group in found:
        weights = f"the {group.kind} ({', '.join(group.names)})"
        if group.lacks_adapter and group.lacks_packing:
            what = f"all-linear does not adapt {weights}, and QLoRA does not pack them"
        elif group.lacks_adapter:
            what = f"all-linear does not adapt {weights}"
        else:
            what = f"QLoRA does not pack {weights}"
        lines.append(
            f"{what}: {count(group.parameters)} of {count(group.total)} weights, {group.share:.0%}"
        )
    return lines


def _is_multiplied(weight: Weight) -> bool:
    """Return whether a weight is a matrix, or a matrix for each expert, that transforms activations.

    An embedding looks rows up, and a router only chooses experts: nobody misses an adapter there.
    """
    dimensions = len(weight.shape) - (weight.style == "experts")
    owner = weight.owners[-1] if weight.owners else ""
    return dimensions >= 2 and owner != "Embedding" and "Router" not in owner


def _kind(weight: Weight) -> str:
    """Name a weight's layer in words that a user knows.

    A linear layer that `all-linear` passes over is one of a vision tower.
    """
    if weight.style == "experts" or "expert" in weight.name:
        return "experts"
    if weight.owners[-1:] in {(name,) for name in LINEAR}:
        return "linear layers" if ".base_layer." in weight.name else "layers of the vision tower"
    return "weights of other layers"


def _parameters_of_factors(facts: ModelFacts) -> int:
    """Parameters that the adapter has added."""
    added = 0
    for block, number in facts.kinds_of_blocks:
        added += number * sum(weight.numel for weight in block if ".lora_" in weight.name)
    return added + sum(weight.numel for weight in facts.end_weights if ".lora_" in weight.name)
