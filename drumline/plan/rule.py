"""The case that a rule about combinations looks at, and questions that many rules ask. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.strategy import StrategyConfig
from drumline.plan.facts import ModelFacts


@dataclass(frozen=True)
class Case:
    """What the rules look at. `facts` None: the model is not known yet."""

    config: Config
    mesh: Mesh
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16", "fp16"]
    facts: ModelFacts | None

    @property
    def strategy(self) -> StrategyConfig:
        return self.config.strategy


def packed_bits(config: Config) -> int:
    """Bits of an entry of the linear layers of blocks, which QLoRA packs; 0 where it does not."""
    adapter = config.adapter
    return {"4bit": 4, "8bit": 8}.get(adapter.quantize, 0) if adapter.kind == "lora" else 0


def sees(case: Case) -> bool:
    """Whether images stand among the model's tokens."""
    return case.facts is not None and case.facts.vision_language


def plain(mesh: Mesh) -> bool:
    """Without tensor, context, pipeline and expert parallelism."""
    return mesh.tp * mesh.cp * mesh.pp * mesh.ep == 1


def recomputes_some(case: Case) -> bool:
    return case.config.memory.activation_checkpointing == "selective"
