"""`Case`: what a rule about combinations looks at; and questions that many rules ask of it.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.strategy import StrategyConfig
from drumline.plan.facts import ModelFacts


@dataclass(frozen=True)
class Case:
    """What the rules look at: a run whose strategy and devices are known.

    `facts` describes the policy, or the role that is checked (`rules.check_role_rules`). It is None
    while the model is not known.
    """

    config: Config
    mesh: Mesh
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16", "fp16"]
    facts: ModelFacts | None

    @property
    def strategy(self) -> StrategyConfig:
        return self.config.strategy


def packed_bits(config: Config) -> int:
    """Return the bits of an entry of the linear layers that QLoRA packs; 0 if nothing is packed."""
    adapter = config.adapter
    if adapter.kind != "lora":
        return 0
    return {"4bit": 4, "8bit": 8}.get(adapter.quantize, 0)


def is_vision_language(case: Case) -> bool:
    """Return whether the policy is a vision-language model: images stand among its tokens."""
    return case.facts is not None and case.facts.vision_language


def is_data_parallel_only(mesh: Mesh) -> bool:
    """Return whether a mesh has no tensor, context, pipeline or expert parallelism."""
    return mesh.tp * mesh.cp * mesh.pp * mesh.ep == 1


def uses_selective_checkpointing(case: Case) -> bool:
    """Return whether blocks recompute some of their activations, and keep the others."""
    return case.config.memory.activation_checkpointing == "selective"
