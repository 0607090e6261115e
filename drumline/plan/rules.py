"""What cannot be combined: one table, each row with its reason and the nearest thing that works. Read before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drumline.config import strategies as s
from drumline.config.schema import Config
from drumline.errors import PlanError
from drumline.plan.facts import TP_STYLES, ModelFacts
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
    Rule(
        "tp × no plan",
        lambda c: c.mesh.tp > 1 and c.facts is not None and not c.facts.tp_styles,
        "this model's class carries no tensor-parallel plan in transformers",
        "use strategy=fsdp2",
    ),
    Rule(
        "tp × mixture of experts",
        lambda c: c.mesh.tp > 1 and c.facts is not None and not c.facts.tp_styles <= TP_STYLES,
        "this model's tensor-parallel plan has styles for experts, which are not built",
        "use strategy=fsdp2",
    ),
    Rule(
        "tp × heads",
        lambda c: c.facts is not None and c.facts.tp_cuts_heads and bool(c.facts.heads % c.mesh.tp or c.facts.kv_heads % c.mesh.tp),
        "the attention heads, and those of keys and values, must divide by tp",
        "choose a tp that divides both numbers",
    ),
    Rule(
        "tp × small vocabulary",
        lambda c: c.facts is not None and -(-c.facts.vocab_size // c.mesh.tp) * (c.mesh.tp - 1) >= c.facts.vocab_size,
        "some rank would hold no row of the vocabulary",
        "use a smaller tp",
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
