"""What a rule about combinations is made of. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drumline.core import strategies as s
from drumline.core.config import Config, LoRAConfig
from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """What the rules look at. `facts` None: the model is not known yet."""

    config: Config
    mesh: Mesh
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16", "fp16"]
    facts: ModelFacts | None

    @property
    def strategy(self) -> s.AnyStrategy:
        return self.config.strategy


@dataclass(frozen=True)
class Rule:
    """One combination that is refused. `name` is how the matrix of `drumline strategies` calls it: `first × second`. Words may be made
    from the numbers of the case."""

    name: str
    refuses: Callable[[Case], bool]
    reason: str | Callable[[Case], str]
    instead: str | Callable[[Case], str]
    where: str = "strategy"


def offloads(strategy: s.AnyStrategy) -> tuple[str, str]:
    """Where the optimizer's states lie, and weights that are not used: none (on the device), cpu or nvme."""
    if isinstance(strategy, s.ZeroStrategy):
        return strategy.offload_optimizer.kind, strategy.offload_parameters.kind if isinstance(strategy, s.Zero3Strategy) else "none"
    return (strategy.offload, strategy.offload) if isinstance(strategy, s.FSDP2Strategy) else ("none", "none")


def quantizes(config: Config) -> bool:
    """Whether QLoRA packs the linear layers of blocks."""
    return isinstance(config.adapter, LoRAConfig) and config.adapter.quantize != "none"


def cp_method(strategy: s.AnyStrategy) -> Literal["ulysses", "ring"]:
    """How context parallelism is done; `ulysses` where there is none."""
    if isinstance(strategy, s.CPStrategy):
        return strategy.method
    return strategy.cp_method if isinstance(strategy, s.DDPStrategy | s.FSDP2Strategy) else "ulysses"
