"""All ways of spreading a run over a cluster that the rules allow, each with its estimate, the best first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.cluster.cluster import Cluster
from drumline.cluster.detect import Device, Machine
from drumline.config.schema import Config
from drumline.config.strategies import AnyStrategy, DDPStrategy, FSDP2Strategy, SingleStrategy, Zero1Strategy, Zero2Strategy, Zero3Strategy
from drumline.errors import PlanError
from drumline.plan.estimate import estimate
from drumline.plan.explain import size
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Estimate
from drumline.plan.layout import Layout
from drumline.plan.plan import DataPlan, RolePlan
from drumline.plan.resolve import resolve


@dataclass(frozen=True)
class Question:
    """What a search is asked: a config (its strategy may be auto; what the user left out of it is free), the cluster, and what is known."""

    config: Config
    cluster: Cluster
    facts: ModelFacts
    data: DataPlan | None = None
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    role_facts: Mapping[str, ModelFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """`name`: short and unique in an answer (`fsdp2 × tp 2`); `config`: what to train with to get it, every choice written in."""

    name: str
    config: Config
    layout: Layout
    estimate: Estimate


@dataclass(frozen=True)
class Refused:
    """A family that is out, and why, with its number: `zero2`, `91.3 GB > 80 GB`, or the rule's words. `best`: its nearest candidate."""

    name: str
    reason: str
    best: Candidate | None = None


@dataclass(frozen=True)
class Answer:
    """`ranked`: those that fit or are tight, the one to take first; `refused`: the others, one a family."""

    question: Question
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]


FAMILIES: tuple[AnyStrategy, ...] = (SingleStrategy(), DDPStrategy(), FSDP2Strategy(), Zero1Strategy(), Zero2Strategy(), Zero3Strategy())


def search(question: Question) -> Answer:
    """The best of each family."""
    ranked, refused = list[Candidate](), list[Refused]()
    for strategy in FAMILIES:
        config = question.config.model_copy(update={"strategy": strategy})
        try:
            candidate = evaluate(question, config, strategy.kind)
        except PlanError as error:
            refused.append(Refused(strategy.kind, error.what))
            continue
        held, limit = candidate.estimate.memory.reserved, candidate.estimate.limit
        if candidate.estimate.verdict == "no":
            refused.append(Refused(strategy.kind, f"{size(held)} > {size(limit)}", candidate))
        else:
            ranked.append(candidate)
    ranked.sort(key=lambda c: (c.estimate.verdict != "fits", -c.estimate.tokens_per_s))
    return Answer(question, tuple(ranked), tuple(refused))


def evaluate(question: Question, config: Config, name: str) -> Candidate:
    """One config, its strategy said, on the question's cluster. Raises PlanError where a rule or the arithmetic refuses it."""
    cluster = question.cluster
    device = cluster.device
    machine = Machine(
        [Device(device.name, device.memory_bytes)] * cluster.per_node if device.kind == "cuda" else [],
        cores=1,
        memory_bytes=cluster.host_memory_bytes or 0,
        device=device.kind,
        bf16="bf16" in device.flops,
    )
    plan = resolve(
        config,
        run_dir="",
        machine=machine,
        world_size=1 if config.strategy.kind in ("single", "dp") else cluster.world_size,
        facts=question.facts,
        model_path=None,
        data=question.data,
        roles=dict(question.roles),
        role_facts=dict(question.role_facts),
    )
    layout = Layout.of(plan, question.role_facts)
    return Candidate(name, plan.config, layout, estimate(layout, question.facts, cluster))
