"""What a rule about combinations is made of. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from drumline.config.mesh import Mesh
from drumline.errors import PlanError

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.config.strategy import StrategySpec
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
    def strategy(self) -> StrategySpec:
        return self.config.strategy


@dataclass(frozen=True)
class Refusal:
    """Why one combination is refused. `name` is how an error line calls it: `first × second`."""

    name: str
    reason: str
    instead: str
    where: str = "strategy"

    def error(self, reason: str = "") -> PlanError:
        """`reason`: in the place of its own, where only a run shows it. `train.setup` tries a small copy of the model before any
        rank starts; a rank raises it where several ranks or a GPU are needed."""
        return PlanError(
            f"{self.name}: {reason or self.reason}", where=self.where, fix=self.instead
        )


def no_option(options: str, reason: str, instead: str) -> tuple[Refusal, ...]:
    """Options that cannot go with a strategy, so it has no key for them. offload_cpu and offload_nvme stand for `offload` by its value."""
    return tuple(
        Refusal(option, reason, instead, f"strategy.{option}") for option in options.split()
    )


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
