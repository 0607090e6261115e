"""Extra reports: the longest row, the largest micro-batch, other numbers of hosts; the heuristics; what would fit; devices."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rich.console import Console

from drumline.core.cluster import MOST_NODES
from drumline.core.config import LoRAConfig
from drumline.core.facts import with_lora
from drumline.errors import PlanError, UserError
from drumline.hardware.catalog import DEVICES, GIGA, LINKS, TERA
from drumline.planner.report.as_json import VERSION, candidate
from drumline.planner.report.table import GB, grouped, hours, main_cells, number, plain_table, show_headline
from drumline.planner.report.yaml_output import overrides
from drumline.planner.search.advice import Change, max_batch, max_length, what_if
from drumline.planner.search.answer import Answer, Question
from drumline.planner.search.auto import disagreements, with_little_room
from drumline.planner.search.search import search

Kind = Literal["max_length", "max_batch"]
SHOWN = ("verdict", "needs\nGB", "tokens/s")
TITLES: dict[Kind, tuple[str, str]] = {
    "max_length": ("longest row\nin tokens", "data.max_length"),
    "max_batch": ("largest\nmicro-batch", "batch.micro_batch"),
}


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """All changes that would make it fit, the smallest first."""
    if changes:
        console.print("What would fit:", style="bold")
        rows = [(change.what, change.found.name, f"{change.found.estimate.memory.reserved / GB:.1f}") for change in changes]
        console.print(plain_table(console, ("change", "then", "needs GB"), rows, spare=("needs GB",)))
        console.print()


def show_heuristics(answer: Answer, console: Console) -> None:
    """The usual heuristics that would do worse, each with its number."""
    by_reason = grouped((each.reason, f"{each.heuristic}: {each.says}") for each in disagreements(answer))
    if by_reason:
        console.print("Heuristics that the numbers disagree with:", style="bold")
        for reason, theirs in by_reason.items():
            console.print(f"  {'; '.join(theirs)} — {reason}", markup=False)
        console.print()


def show_remarks(answer: Answer, console: Console) -> None:
    """The tight candidate that is faster than all that fit, and the keys that choose it; that the memory of a host is not set, where that
    might matter; what adapters would give, where training all weights needs offloading or leaves little room."""
    question, first = answer.question, answer.ranked[0]
    if (line := with_little_room(answer)) and answer.tight is not None:
        console.print(f"{line[0].upper()}{line[1:]}. To take it:", markup=False)
        console.print(f"  {shlex.join(overrides(question.config, answer.tight))}\n", markup=False)
    if question.cluster.host_memory_bytes is None and (needs := first.estimate.host.most / GB) > 64:
        line = f"A host's memory is not known: the first wants {needs:.0f} GB. cluster.host_memory_gb=… says what there is."
        console.print(f"{line}\n", markup=False)
    config, adapter = question.config, LoRAConfig()
    if config.adapter.kind != "none" or config.head != "lm" or not ("offload" in first.name or first.estimate.verdict == "tight"):
        return
    facts = with_lora(question.facts, adapter)
    found = search(replace(question, config=config.model_copy(update={"adapter": adapter}), facts=facts)) if facts else None
    if found is not None and found.ranked:
        best = found.ranked[0].estimate
        speed = best.tokens_per_s / first.estimate.tokens_per_s
        text = f"{best.memory.reserved / GB:.1f} GB a device, {best.tokens_per_s:,.0f} tokens/s ({speed:.1f} ×)"
        console.print(f"With adapter=lora: {found.ranked[0].name}, {text}, {best.host.most / GB:.0f} GB of a host.\n", markup=False)


# ------------------------------------------------------------------------------------------------------------------ most


def report_most(question: Question, kind: Kind, console: Console, top: int, as_json: bool) -> None:
    """For each family the longest row, or the largest micro-batch. Raises PlanError where nothing fits."""
    found = max_length(question) if kind == "max_length" else max_batch(question)
    if not found:
        where = f"--{kind.replace('_', '-')}"
        raise PlanError("nothing fits, however small", where=where, fix="see `drumline plan` for what comes nearest")
    if as_json:
        sizes = [{"number": each.number, "candidate": candidate(question, each.found)} for each in found]
        print(json.dumps({"version": VERSION, kind: sizes}, indent=2))
        return
    title, key = TITLES[kind]
    show_headline(question, console)
    rows = []
    for each in found[:top]:
        cells = main_cells(each.found)
        rows.append([each.found.name, f"{each.number:,}", *(cells[head] for head in SHOWN), each.found.layout.activation_checkpointing])
    heads = ("strategy", title, *SHOWN, "checkpointing")
    console.print(plain_table(console, heads, rows, spare=("verdict", "checkpointing")))
    console.print(f"\nThe largest: {key}={found[0].number} under {found[0].found.name}", markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- what if


def parse_what_if(text: str) -> list[int]:
    """`nodes=2,4,8`. Raises UserError."""
    key, _, values = text.partition("=")
    parts = [part.strip() for part in values.split(",") if part.strip()]
    if key.strip() != "nodes" or not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{text!r} is no question", where="--what-if", fix="write nodes=2,4,8: the hosts to plan for instead")
    numbers = [int(part) for part in parts]
    if max(numbers) > MOST_NODES:
        raise UserError(f"{max(numbers)} hosts are more than anybody has", where="--what-if", fix=f"at most {MOST_NODES}")
    return numbers


def report_what_if(question: Question, hosts: Sequence[int], console: Console, tokens: float | None, as_json: bool) -> None:
    """The first plan on each number of hosts, and what more devices gain."""
    answers = what_if(question, hosts)
    if as_json:
        found = []
        for answer in answers:
            cluster, best = answer.question.cluster, candidate(answer.question, answer.ranked[0], tokens) if answer.ranked else None
            found.append({"nodes": cluster.nodes, "devices": cluster.world_size, "best": best})
        print(json.dumps({"version": VERSION, "what_if": found}, indent=2))
        return
    show_headline(answers[0].question, console)
    base = next((a for a in answers if a.ranked), None)
    rows = []
    for answer in answers:
        cluster = answer.question.cluster
        near = min((r.best for r in answer.refused if r.best), key=lambda c: c.estimate.memory.reserved, default=None)
        first = answer.ranked[0] if answer.ranked else near
        cells, gain = [main_cells(first)[head] for head in SHOWN] if first else ["no", "–", "–"], ["–", "–", "–"]
        if answer.ranked and first and base:
            speed = first.estimate.tokens_per_s / base.ranked[0].estimate.tokens_per_s
            each = speed * base.question.cluster.world_size / cluster.world_size
            time = number(hours(first, tokens) if tokens or first.layout.steps else hours(first, 1e9))
            gain = [f"{speed:.2f}", f"{each:.0%}", time]
        else:
            cells[2] = "–"
        rows.append([str(cluster.nodes), str(cluster.world_size), first.name if first else "–", *cells, *gain])
    known = any(a.ranked and hours(a.ranked[0], tokens) is not None for a in answers)
    heads = ("hosts", "devices", "strategy", *SHOWN, "speed", "of\nlinear", "hours" if known else "hours /\n1B tokens")
    console.print(plain_table(console, heads, rows, spare=(heads[-1], "verdict", "devices")))


# --------------------------------------------------------------------------------------------------------------- devices


def show_devices(console: Console) -> None:
    """Datasheet rates with their sources, and how to describe what is not there."""
    devices = []
    for spec in DEVICES.values():
        half, full = (f"{spec.flops[kind] / TERA:g}" if kind in spec.flops else "–" for kind in ("bf16", "fp32"))
        size, rate = f"{spec.memory_bytes / GIGA:.1f}", f"{spec.bandwidth / GIGA:,.0f}"
        devices.append((spec.name, size, rate, half, full, spec.intra, spec.host_link))
    links = [(link.name, f"{link.bandwidth / GIGA:g}", f"{link.efficiency:.0%}", f"{link.latency * 1e6:g}") for link in LINKS.values()]
    console.print(plain_table(console, ("device", "GB", "GB/s", "bf16 TFLOP/s", "fp32", "usual link", "to host"), devices))
    console.print()
    console.print(plain_table(console, ("link", "GB/s one way", "reached", "latency µs"), links))
    console.print("\nBetween hosts, by rate: 100Gb, 400Gb, 8x400Gb (cards of one host). cpu: this machine's own rates.\n", markup=False)
    console.print("Sources", style="bold")
    for each in (*DEVICES.values(), *LINKS.values()):
        console.print(f"  {each.name:<16} {each.source}", markup=False, soft_wrap=True)
    console.print(
        "\nWhat is not here is described in the YAML: cluster: {devices: {NAME: {memory_gb: …, bandwidth_gb_s: …, bf16_tflops: …,"
        " fp32_tflops: …}}, device: NAME, per_node: 8}",
        markup=False,
    )
