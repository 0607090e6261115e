"""The same model otherwise: its facts under a LoRA adapter, or on rows of another length. Pure: `models.load.facts` builds and counts."""

from __future__ import annotations

from dataclasses import replace

from drumline.config.schema import LoRAConfig
from drumline.plan.facts import ModelFacts, Weight

LINEAR = "Linear"


def with_length(facts: ModelFacts, old: int, new: int) -> ModelFacts:
    """Training rows of `new` tokens in place of `old`: attention looks at as many more (PaLM's count, see models.load.facts)."""
    attention = facts.attention_flops * new / old
    flops = facts.flops_per_token + facts.layers * (attention - facts.attention_flops)
    return replace(facts, attention_flops=attention, flops_per_token=flops)


def with_lora(facts: ModelFacts, adapter: LoRAConfig) -> ModelFacts | None:
    """An adapter over all linear layers in the blocks, as PEFT lays it, everything else frozen. None for a model that has adapters or
    frozen parts already, or whose weights are not known one by one."""
    if facts.frozen or not facts.block_weights or facts.sees:
        return None
    blocks = tuple(tuple(part for weight in block for part in _adapted(weight, adapter.r)) for block in facts.block_weights)
    added = sum(weight.numel for block in blocks for weight in block if weight.learned)
    if not added:
        return None
    ahead = len(blocks) - len(facts.block_parameters)
    products = facts.flops_per_token - facts.layers * facts.attention_flops
    return replace(
        facts,
        parameters=facts.parameters + added,
        frozen=facts.parameters,
        flops_per_token=products * 4 / 6 + 6 * added + facts.layers * facts.attention_flops,
        block_weights=blocks,
        block_parameters=tuple(sum(weight.numel for weight in block) for block in blocks[ahead:]),
        end_weights=tuple(weight._replace(learned=False) for weight in facts.end_weights),
    )


def _is_linear(weight: Weight) -> bool:
    return len(weight.shape) == 2 and weight.owners[-1:] == (LINEAR,)


def _adapted(weight: Weight, rank: int) -> list[Weight]:
    """A weight, frozen; of a linear layer also the two factors, the one beside the cut dimension cut like it."""
    still = weight._replace(learned=False)
    if not _is_linear(weight):
        return [still]
    layer, owners = weight.name.removesuffix(".weight"), (*weight.owners, "ModuleDict", LINEAR)
    rows, columns = weight.shape
    by_row = weight.style.startswith("rowwise")
    first = Weight(f"{layer}.lora_A.default.weight", (rank, columns), True, weight.style if by_row else "", owners)
    second = Weight(f"{layer}.lora_B.default.weight", (rows, rank), True, "" if by_row else weight.style, owners)
    return [still._replace(name=f"{layer}.base_layer.weight", owners=(*weight.owners, LINEAR)), first, second]
