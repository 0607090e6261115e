"""What a rule about combinations is made of. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from drumline.core.mesh import Mesh
from drumline.errors import PlanError

if TYPE_CHECKING:
    from drumline.core.config import Config
    from drumline.core.facts import ModelFacts
    from drumline.core.strategy import StrategySpec

# When a rule can be checked: schema: the option is no key of the strategy; plan: config, mesh and device are known; model: so is the model.
Phase = Literal["schema", "plan", "model"]


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
        """`reason`: in the place of its own, where only a run shows it: raised by `train.setup` of a small copy of the model, before any
        rank is started, or by a rank, where it takes several of them or a GPU."""
        return PlanError(f"{self.name}: {reason or self.reason}", where=self.where, fix=self.instead)


@dataclass(frozen=True)
class Rule:
    """One combination that a strategy refuses; in phase schema `name` is the option. The texts may be made from the numbers of the case. A
    rule of phase model is checked where `facts` are known."""

    name: str
    refuses: Callable[[Case], object]
    reason: str | Callable[[Case], str]
    instead: str | Callable[[Case], str]
    where: str = "strategy"
    phase: Phase = "plan"

    def check(self, case: Case) -> None:
        """Raises PlanError where it refuses."""
        if self.phase == "schema" or (self.phase == "model" and case.facts is None) or not self.refuses(case):
            return
        reason, instead = (text if isinstance(text, str) else text(case) for text in (self.reason, self.instead))
        raise Refusal(self.name, reason, instead, self.where).error()


def no_option(options: str, reason: str, instead: str) -> tuple[Rule, ...]:
    """Options that a strategy has no key for, because the two cannot go together. offload_cpu and offload_nvme stand for its own way of
    saying it."""
    return tuple(Rule(option, lambda _: True, reason, instead, f"strategy.{option}", "schema") for option in options.split())


def quantizes(config: Config) -> bool:
    """Whether QLoRA packs the linear layers of blocks."""
    return getattr(config.adapter, "quantize", "none") != "none"


def sees(case: Case) -> bool:
    """Whether images stand among the model's tokens."""
    return case.facts is not None and case.facts.vision_language


def plain(mesh: Mesh) -> bool:
    """Without tensor, context and pipeline parallelism."""
    return mesh.tp * mesh.cp * mesh.pp == 1


def recomputes_some(case: Case) -> bool:
    return case.config.memory.activation_checkpointing == "selective"
