"""The best plan that has what a user expected, beside the first plan of an answer. Pure.

`drumline plan --why-not` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from drumline.config.config import Config
from drumline.config.load import changed_values, load_values
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError, UserError
from drumline.planner.search.answer import (
    GB,
    Answer,
    Candidate,
    Question,
    risk_adjusted_speed,
    trust,
)
from drumline.planner.search.budget import CHECKPOINTING
from drumline.planner.search.search import search, search_space

# Keys that a mesh has, each a number of ranks.
DEGREES = ("tp", "cp", "pp", "ep", "replicate", "shard")
FORM = (
    "write tp=8 (or cp, pp, ep, replicate, shard), strategy=zero3, micro_batch=4, checkpointing=full,"
    " compile=true, or a key of a YAML such as memory.checkpointed_blocks=8, precision.master=bf16 or"
    " strategy.sequence_parallel=false"
)
# The least share of what a device sends that is shown.
LEAST_SENT = 1e-6
TRUTH = {"true": True, "false": False}
# Sections of a config that change neither the model nor the data.
SECTIONS = ("batch", "compile", "memory", "optimizer", "precision", "strategy")
# Keys of these sections that a search chooses; others stay as the config has them.
SEARCHED = (
    "batch.micro_batch",
    "compile.enabled",
    "memory.activation_checkpointing",
    "memory.checkpointed_blocks",
)


class Wanted(NamedTuple):
    """What a plan should have: a key and its value as they were written."""

    key: str
    value: str

    @property
    def text(self) -> str:
        """Return both: `tp=8`."""
        return f"{self.key}={self.value}"

    @property
    def is_choice_of_user(self) -> bool:
        """Return whether no plan has it unless the config says so."""
        section, _, rest = self.key.partition(".")
        return bool(rest) and section != "strategy" and self.key not in SEARCHED


@dataclass(frozen=True)
class Rival:
    """The best plan that has what is wanted, beside the first plan of all.

    `other`: None if rules or numbers refuse all such plans. `reason`: why all are refused; empty if
    one fits.
    """

    wanted: Wanted
    first: Candidate
    other: Candidate | None
    reason: str

    @property
    def is_first(self) -> bool:
        """Whether the first plan of all has what is wanted."""
        if self.other is None:
            return False
        first = self.first
        return self.other.name == first.name and self.other.estimate == first.estimate


class Term(NamedTuple):
    """A part of two estimates: its name, its value in the first plan and in the other one."""

    name: str
    first: float
    other: float

    @property
    def difference(self) -> float:
        """Return how much more the other plan needs."""
        return self.other - self.first


def parse_wanted(text: str) -> Wanted:
    """Return what the value of `--why-not` asks for. Raises UserError for another form."""
    key, _, value = text.partition("=")
    wanted = Wanted(key.strip(), value.strip())
    is_number = wanted.value.isdecimal() and int(wanted.value) > 0
    is_possible = {
        "strategy": bool(wanted.value),
        "checkpointing": wanted.value in CHECKPOINTING,
        "compile": wanted.value in TRUTH,
        "micro_batch": is_number,
        **dict.fromkeys(DEGREES, is_number),
    }
    section, _, rest = wanted.key.partition(".")
    is_key_of_config = section in SECTIONS and bool(rest) and bool(wanted.value)
    if rest and section in Config.model_fields and section not in SECTIONS:
        raise UserError(
            f"{wanted.key} changes what is trained or where it runs, not its layout",
            where="--why-not",
            fix=f"compare two plans: add {text!r} to the second, without --why-not",
        )
    if wanted.key == "compile" and wanted.value not in TRUTH:
        raise UserError(
            f"{text!r} is no question", where="--why-not", fix="write compile=true or compile=false"
        )
    if not is_key_of_config and not is_possible.get(wanted.key):
        raise UserError(f"{text!r} is no question", where="--why-not", fix=FORM)
    return wanted


def find_rival(answer: Answer, wanted: Wanted) -> Rival:
    """Return the best plan that has what is wanted, beside the first plan of an answer.

    The answer must have a plan that fits. Raises UserError if no layout of this cluster has it.
    """
    question = _with_wanted(answer.question, wanted)
    strategies = list(_strategies(question, wanted))
    if not strategies:
        raise _no_such_layout(question, wanted)
    found = search(question, strategies)
    first = answer.ranked[0]
    if found.ranked:
        return Rival(wanted, first, found.ranked[0], "")
    estimated = [refused for refused in found.refused if refused.best is not None]
    if not estimated:
        return Rival(wanted, first, None, found.refused[0].reason)
    nearest = min(estimated, key=lambda refused: _needs(refused.best))
    return Rival(wanted, first, nearest.best, nearest.reason)


def _needs(candidate: Candidate | None) -> int:
    """Return the bytes that a candidate needs on a device."""
    assert candidate is not None
    return candidate.estimate.memory.reserved


def _with_wanted(question: Question, wanted: Wanted) -> Question:
    """Return the question with the wanted value set, if it is one of the config and no strategy's."""
    if wanted.key == "micro_batch":
        return question.with_values("batch", micro_batch=int(wanted.value))
    if wanted.key == "checkpointing":
        return question.with_values("memory", activation_checkpointing=wanted.value)
    if wanted.key == "compile":
        return question.with_values("compile", enabled=TRUTH[wanted.value])
    section, _, rest = wanted.key.partition(".")
    if rest and section != "strategy":
        loaded = load_values(changed_values(question.config), [wanted.text])
        return replace(question, config=loaded.config)
    return question


def _strategies(question: Question, wanted: Wanted) -> Iterator[StrategyConfig]:
    """Yield the strategies of the search space that have what is wanted."""
    section, _, key = wanted.key.partition(".")
    if section == "strategy" and key:
        yield from _with_key(question, key, wanted.value)
        return
    for strategy in search_space(question):
        if _has(question, strategy, wanted):
            yield strategy


def _with_key(question: Question, key: str, value: str) -> Iterator[StrategyConfig]:
    """Yield each strategy of the search space that has a key, with this value of it."""
    seen: list[StrategyConfig] = []
    for strategy in search_space(question):
        if key not in type(strategy).model_fields:
            continue
        values = strategy.model_dump() | {key: yaml.safe_load(value)}
        with suppress(ValidationError):
            changed = type(strategy).model_validate(values)
            if changed not in seen:
                seen.append(changed)
                yield changed


def _has(question: Question, strategy: StrategyConfig, wanted: Wanted) -> bool:
    """Return whether a strategy has what is wanted; each has it if it is a value of the config."""
    if wanted.key in DEGREES:
        return _degree(question, strategy, wanted.key) == int(wanted.value)
    if wanted.key == "strategy":
        names = strategy.names(question.cluster.world_size)
        return wanted.value in (strategy.kind, names.name, names.family)
    return True


def _degree(question: Question, strategy: StrategyConfig, key: str) -> int | None:
    """Return the number of ranks along an axis of a strategy's mesh; None if it has no mesh here."""
    world_size = 1 if strategy.one_process else question.cluster.world_size
    with suppress(PlanError):
        degree: int = getattr(strategy.mesh(world_size), key)
        return degree
    return None


def _no_such_layout(question: Question, wanted: Wanted) -> UserError:
    """Return the error that no layout has what is wanted, with the values that there are."""
    values = set[str]()
    if "." in wanted.key:
        what = f"no strategy takes {wanted.text}"
        fix = "`drumline strategies` or docs/reference/keys.md list the keys of each"
        return UserError(what, where="--why-not", fix=fix)
    devices = question.cluster.world_size
    for strategy in search_space(question):
        if wanted.key == "strategy":
            values.add(strategy.kind)
            family = strategy.names(devices).family
            # There are too many combinations to list.
            if " × " not in family:
                values.add(family)
        else:
            degree = _degree(question, strategy, wanted.key)
            values.add(str(degree or 1))
    ordered = sorted(values, key=lambda value: (len(value), value))
    devices = question.cluster.world_size
    return UserError(
        f"no layout of {devices} devices has {wanted.text}",
        where="--why-not",
        fix=f"there are {wanted.key}={', '.join(ordered)}",
    )


def time_terms(rival: Rival) -> list[Term]:
    """Return the seconds of both plans for a million tokens, by what they are spent on.

    The two may take different numbers of tokens in a step. Terms that are 0 in both are left out.
    """
    assert rival.other is not None
    by_plan = []
    for candidate in (rival.first, rival.other):
        # `forward` is a part of `compute`.
        seconds = candidate.estimate.seconds.model_dump(exclude={"forward"})
        share = 1e6 / candidate.layout.tokens_per_step
        by_plan.append({name: share * value for name, value in seconds.items()})
    return terms_of(*by_plan)


def traffic_terms(rival: Rival) -> list[Term]:
    """Return the GB that a device of both plans sends for a million tokens, by kind of collective.

    Kinds that are less than a millionth of all in both, such as sums of single numbers, are left out.
    """
    assert rival.other is not None
    by_plan = []
    for candidate in (rival.first, rival.other):
        volumes = candidate.estimate.traffic.model_dump()
        share = 1e6 / candidate.layout.tokens_per_step / 1e9
        named = {}
        for name, bytes_ in volumes.items():
            is_shown = bytes_ > LEAST_SENT * candidate.estimate.traffic.total
            named[name.replace("_", "-")] = share * bytes_ * is_shown
        by_plan.append(named)
    return terms_of(*by_plan)


def terms_of(first: dict[str, float], other: dict[str, float]) -> list[Term]:
    """Return the terms of two plans, by their names, that are not 0 in both."""
    terms = []
    for name, value in first.items():
        if value or other[name]:
            terms.append(Term(name, value, other[name]))
    return terms


def why_worse(rival: Rival, show: Callable[[float], str]) -> str:
    """Return in words why the other plan does not come first. `show`: writes a number."""
    if rival.reason:
        return f"it does not fit: {rival.reason}."
    assert rival.other is not None
    if rival.is_first:
        return "row 1 has it."
    first, other = rival.first, rival.other
    slower = first.estimate.tokens_per_s / other.estimate.tokens_per_s
    more = [term for term in time_terms(rival) if term.difference > 0]
    more.sort(key=lambda term: -term.difference)
    parts = [f"{term.name} {show(term.difference)}" for term in more]
    text = "it is not slower"
    if slower > 1:
        text = f"it takes {show(slower)} × as long: for a million tokens"
        text += f" {' and '.join(parts[:2])} more seconds"
    remarks = []
    share = trust(other.layout)
    if share < trust(first.layout):
        remarks.append(
            f"its speed counts {show(share)} ×, since hardly a measured run has confirmed it"
        )
    if other.estimate.risk > first.estimate.risk:
        remarks.append(f"it runs out of memory with a chance of {other.estimate.risk:.0%}")
    if slower <= 1 and risk_adjusted_speed(other) >= risk_adjusted_speed(first):
        if rival.wanted.is_choice_of_user:
            remarks.append(_choice_of_user(rival.wanted, first, other))
        else:
            remarks.append("another is as fast, simpler or smaller")
    return "; ".join([text, *remarks]) + "."


def _choice_of_user(wanted: Wanted, first: Candidate, other: Candidate) -> str:
    """Return what a value of the config would gain, which no plan takes by itself."""
    saved = first.estimate.memory.reserved - other.estimate.memory.reserved
    gain = ""
    if saved > 0:
        gain = f"it needs {saved / GB:.1f} GB less; "
    return f"{gain}no plan sets {wanted.key} by itself, since it changes what the run computes"
