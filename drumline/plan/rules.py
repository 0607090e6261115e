"""What cannot be combined: one table, each row with its reason and the nearest thing that works. Read before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drumline.config import strategies as s
from drumline.config.schema import Config
from drumline.errors import PlanError
from drumline.plan.facts import ModelFacts
from drumline.plan.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """What the rules look at. `facts` None: the model is not known yet."""

    config: Config
    mesh: Mesh
    device: str
    precision: str
    facts: ModelFacts | None


@dataclass(frozen=True)
class Rule:
    """One combination that is refused. `name` is how the matrix of `drumline strategies` calls it: `first × second`."""

    name: str
    refuses: Callable[[Case], bool]
    reason: str
    instead: str
    where: str = "strategy"


RULES: tuple[Rule, ...] = (
    Rule(
        "ring × CPU",
        lambda c: c.mesh.cp > 1 and c.device == "cpu" and cp_method(c.config.strategy) == "ring",
        "ring attention has no CPU kernel in torch",
        "use cp_method=ulysses",
    ),
)


def check_rules(case: Case) -> None:
    """Raises PlanError by the first rule that refuses."""
    for rule in RULES:
        if rule.refuses(case):
            raise PlanError(f"{rule.name}: {rule.reason}", where=rule.where, fix=rule.instead)


def cp_method(strategy: s.AnyStrategy) -> Literal["ulysses", "ring"]:
    """How context parallelism is done; `ulysses` where there is none."""
    if isinstance(strategy, s.CPStrategy):
        return strategy.method
    return strategy.cp_method if isinstance(strategy, s.DDPStrategy | s.FSDP2Strategy) else "ulysses"
