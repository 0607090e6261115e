"""The report of `drumline plan --why-not`: a plan beside the first one, term by term."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from drumline.planner.report.output import VERSION, candidate_as_json
from drumline.planner.report.table import (
    CATEGORIES,
    NEEDS,
    SPEED,
    STEP,
    VERDICT,
    gradients_at_peak,
    main_cells,
    plain_table,
    show_headline,
)
from drumline.planner.search.answer import GB, Answer, Candidate, number
from drumline.planner.search.rival import (
    Rival,
    Term,
    Wanted,
    find_rival,
    terms_of,
    time_terms,
    traffic_terms,
    why_worse,
)

# A smaller share of a term is shown as no difference.
NEGLIGIBLE = 1e-3


def report_why_not(answer: Answer, wanted: Wanted, console: Console, as_json: bool) -> None:
    """Print why the best plan that has what is wanted is not the first one.

    The answer must have a plan that fits. Raises UserError if no layout has it.
    """
    rival = find_rival(answer, wanted)
    if as_json:
        print(json.dumps({"version": VERSION, "why_not": _as_json(answer, rival)}, indent=2))
        return
    show_headline(answer.question, console)
    name = rival.wanted.text
    if rival.other is not None:
        name = f"{name} ({rival.other.name})"
    console.print(f"{name}: {why_worse(rival, number)}\n", markup=False)
    if rival.other is None or rival.is_first:
        return
    first, other = (_break_name(plan.name) for plan in (rival.first, rival.other))
    heads = ("term", f"row 1:\n{first}", f"asked for:\n{other}", "more")
    console.print(plain_table(console, heads, _rows(rival)))


def _break_name(name: str) -> str:
    """Return the name of a layout with a line for each of its parts, so that its column is narrow."""
    return name.replace(" × ", " ×\n")


def _rows(rival: Rival) -> list[list[str]]:
    """Return the rows of the table: both plans as a whole, then term by term."""
    assert rival.other is not None
    first = main_cells(rival.first)
    other = main_cells(rival.other)
    rows = []
    for head in (VERDICT, NEEDS, STEP, SPEED):
        rows.append([head.replace("\n", " "), first[head], other[head], ""])
    sections = {
        "GB at the fullest device's peak": _memory_terms(rival),
        "seconds for a million tokens": time_terms(rival),
        "GB sent for a million tokens": traffic_terms(rival),
    }
    for title, terms in sections.items():
        if terms:
            rows.append([title, "", "", ""])
            rows += _rows_of_terms(terms)
    return rows


def _memory_terms(rival: Rival) -> list[Term]:
    """Return the GB of both plans on the fullest device, which add up to what must fit."""
    assert rival.other is not None
    return terms_of(_gb_at_peak(rival.first), _gb_at_peak(rival.other))


def _gb_at_peak(candidate: Candidate) -> dict[str, float]:
    """Return the GB of a device at its peak, by category, with what the allocator cannot reuse."""
    memory = candidate.estimate.memory
    values = {category: getattr(memory, category) / GB for category in CATEGORIES}
    values["gradients"] = gradients_at_peak(memory) / GB
    values["gaps between tensors"] = (memory.reserved - memory.overhead - memory.peak) / GB
    return values


def _rows_of_terms(terms: Sequence[Term]) -> list[list[str]]:
    """Return the rows of some terms and of their sum."""
    total = Term("in all", sum(term.first for term in terms), sum(term.other for term in terms))
    rows = []
    for term in (*terms, total):
        difference = "0"
        if abs(term.difference) > NEGLIGIBLE * max(term.first, term.other):
            sign = "+" if term.difference > 0 else ""
            difference = f"{sign}{number(term.difference)}"
        rows.append([f"  {term.name}", number(term.first), number(term.other), difference])
    return rows


def _as_json(answer: Answer, rival: Rival) -> dict[str, Any]:
    """Return both plans, and their terms, each as the values of the first and of the other plan."""
    question = answer.question
    other = None
    terms: dict[str, dict[str, list[float]]] = {}
    if rival.other is not None:
        other = candidate_as_json(question, rival.other)
        terms = {
            "seconds_per_million_tokens": _pairs(time_terms(rival)),
            "gb_at_peak": _pairs(_memory_terms(rival)),
            "gb_sent_per_million_tokens": _pairs(traffic_terms(rival)),
        }
    return {
        "wanted": rival.wanted.text,
        "first": candidate_as_json(question, rival.first),
        "other": other,
        "why": why_worse(rival, number),
        "terms": terms,
    }


def _pairs(terms: Sequence[Term]) -> dict[str, list[float]]:
    """Return the values of terms by name: of the first plan, and of the other one."""
    return {term.name: [term.first, term.other] for term in terms}
