"""Find large weights of a model's blocks that LoRA does not adapt, or that QLoRA does not pack.

Both follow from the facts of the model under its adapter: a frozen weight is adapted if it is the
base layer of an adapter. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drumline.config.config import Adapter, LoRAConfig
from drumline.plan.explain import count
from drumline.plan.facts import ModelFacts, Weight, is_packed

# Groups with a smaller share of all weights, such as short convolutions, would be shown as 0%.
SMALLEST_SHARE = 0.005


class Unadapted(NamedTuple):
    """Weights of one kind that lack an adapter, packing, or both.

    `names`: the names inside their blocks. `parameters`: the number of their parameters in all blocks.
    `total`: the number of the whole model's parameters, without those of the adapter.
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


@dataclass
class _Group:
    """Names and number of parameters of an `Unadapted` while its weights are collected."""

    names: list[str] = field(default_factory=list)
    parameters: int = 0


def find_unadapted(facts: ModelFacts, adapter: Adapter) -> list[Unadapted]:
    """Return the large matrices of the blocks that lack an adapter or packing, the largest first.

    They lack an adapter under `all-linear` alone: targets that the user has named leave out what
    the user wants to be left out. They lack packing under QLoRA. Embeddings and heads are outside
    of the blocks, where neither promises anything. `facts`: of the model under `adapter`.
    """
    if not isinstance(adapter, LoRAConfig):
        return []
    groups: dict[tuple[str, bool, bool], _Group] = {}
    for block, number in facts.kinds_of_blocks:
        for weight in block:
            if weight.trainable or not _is_multiplied(weight):
                continue
            lacks_adapter = adapter.targets == "all-linear" and ".base_layer." not in weight.name
            lacks_packing = adapter.quantize != "none" and not is_packed(weight)
            if lacks_adapter or lacks_packing:
                # `all-linear` adapts every linear layer but those of a vision tower.
                kind = _kind(weight, lacks_adapter and facts.vision_language)
                group = groups.setdefault((kind, lacks_adapter, lacks_packing), _Group())
                name = weight.name.removesuffix(".weight").replace(".base_layer", "")
                group.names.append(name)
                group.parameters += number * weight.numel
    total = facts.parameters - _parameters_of_factors(facts)
    found = []
    for (kind, lacks_adapter, lacks_packing), group in groups.items():
        names = tuple(dict.fromkeys(group.names))
        found.append(Unadapted(kind, names, group.parameters, total, lacks_adapter, lacks_packing))
    large = [unadapted for unadapted in found if unadapted.share >= SMALLEST_SHARE]
    return sorted(large, key=lambda unadapted: -unadapted.parameters)


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
    """Return whether a weight is a matrix, or one for each expert, that transforms activations.

    An embedding looks rows up, and a router only chooses experts: nobody misses an adapter there.
    """
    dimensions = len(weight.shape) - (weight.style == "experts")
    owner = weight.owners[-1] if weight.owners else ""
    return dimensions >= 2 and owner != "Embedding" and "Router" not in owner


def _kind(weight: Weight, is_of_tower: bool) -> str:
    """Return the user's word for weights of this kind.

    `is_of_tower`: a linear layer with this weight is one of a vision tower.
    """
    if weight.style == "experts" or "expert" in weight.name:
        return "experts"
    if weight.is_of_linear_layer:
        return "layers of the vision tower" if is_of_tower else "linear layers"
    return "weights of other layers"


def _parameters_of_factors(facts: ModelFacts) -> int:
    """Return the number of the adapter's own parameters."""
    added = 0
    for block, number in facts.kinds_of_blocks:
        added += number * sum(weight.numel for weight in block if ".lora_" in weight.name)
    return added + sum(weight.numel for weight in facts.end_weights if ".lora_" in weight.name)
