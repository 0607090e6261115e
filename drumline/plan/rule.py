"""The case that a rule about combinations looks at, and questions that many rules ask.

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

    `facts`: of the policy; None: the model is not known yet.
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


def sees(case: Case) -> bool:
    """Return whether images stand among the model's tokens."""
    return case.facts is not None and case.facts.vision_language


def plain(mesh: Mesh) -> bool:
    """Return whether a mesh has no tensor, context, pipeline or expert parallelism."""
    return mesh.tp * mesh.cp * mesh.pp * mesh.ep == 1


def recomputes_some(case: Case) -> bool:
    """Return whether blocks recompute some of their activations, and keep the others."""
    return case.config.memory.activation_checkpointing == "selective"
