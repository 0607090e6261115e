"""The answer as tables, and the other reports: the longest row, the largest micro-batch, other numbers of hosts, devices. Groups of columns
share a table as far as the terminal is wide; no word is ever cut."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from drumline.core.cluster import MOST_NODES
from drumline.core.estimate import HostMemory, Memory
from drumline.core.explain import checkpointing, count
from drumline.errors import PlanError, UserError
from drumline.hardware.catalog import (
    DEVICES,
    GIGA,
    HOST_NETWORK,
    LINKS,
    OTHER_NETWORK,
    TERA,
    usual_host_memory,
)
from drumline.planner.cost.fitted import group_of
from drumline.planner.report.output import VERSION, candidate, needs_gb, overrides
from drumline.planner.search.advice import Adapted, Change, max_batch, max_length, what_if
from drumline.planner.search.answer import CLEARLY_LESS, GB, Answer, Candidate, Question, gb, number
from drumline.planner.search.auto import disagreements, export_left_out, risk, with_little_room
from drumline.planner.search.choice import slow_lines
from drumline.planner.search.compiling import describe_compile, is_weighed

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "overhead",
)
SECONDS = ("compute", "communication", "bubble", "optimizer", "offload", "rollout")
# So that all categories stand in 80 columns.
SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
}
VERDICTS = {"fits": "green", "tight": "yellow", "no": "red"}
# Heads of columns of text; the others hold numbers.
VERDICT, NEEDS, STEP, SPEED = (
    "verdict\n(risk)",
    "memory of\na device, GB",
    "seconds\na step",
    "tokens/s\nof all\ndevices",
)
TEXT_COLUMNS = (
    "",
    "strategy",
    VERDICT,
    "mesh",
    "checkpointing",
    "compile",
    "change",
    "then",
    "device",
    "link",
    "usual link",
    "to host",
)
Kind = Literal["max_length", "max_batch"]
SHOWN = (VERDICT, NEEDS, SPEED)

Columns = dict[str, Sequence[str | Text]]  # head → one cell a row


def show(
    answer: Answer,
    console: Console,
    changes: Sequence[Change],
    adapted: Sequence[Adapted],
    *,
    top: int,
    tokens: float | None = None,
) -> None:
    """All of an answer: the question, full, LoRA and QLoRA, the ranked plans, the families that are out, heuristics that disagree, what
    would fit (`changes`), and remarks."""
    show_headline(answer.question, console)
    show_adapted(adapted, console, tokens)
    ranked = answer.ranked[:top]
    show_ranges([*ranked, *(each.best for each in adapted if each.best)], console)
    for table in tables(answer.question, ranked, console, tokens) if ranked else ():
        if table.title:  # not by the table, which would wrap it to its own width
            console.print(table.title, style="italic")
            table.title = None
        console.print(table)
        console.print()
    if len(answer.ranked) > top:
        console.print(f"{len(answer.ranked) - top} more: --top {len(answer.ranked)}\n", style="dim")
    if answer.refused:
        out = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        out.add_column(no_wrap=True, style="bold")
        out.add_column(ratio=1)
        for reason, (name, *alike) in grouped(
            (each.reason, each.name) for each in answer.refused
        ).items():
            likewise = f" (likewise {', '.join(alike)})" if alike else ""
            out.add_row(Text(name), Text(reason + likewise))
        console.print(Text("Out:", style="bold"))
        console.print(out)
        console.print()
    show_heuristics(answer, console)
    show_changes(changes, console)
    if answer.ranked:
        _show_remarks(answer, adapted, console, tokens)


def show_short(
    answer: Answer,
    console: Console,
    adapted: Sequence[Adapted],
    *,
    top: int,
    tokens: float | None = None,
) -> None:
    """A screen of an answer: the question, full, LoRA and QLoRA, the first few plans, and remarks."""
    show_headline(answer.question, console)
    given = answer.question.config.strategy
    for each in answer.refused:
        if each.name == given.names(answer.question.cluster.world_size).family:
            console.print(
                f"{each.name}, as the config has it, is out: {each.reason}\n",
                style="yellow",
                markup=False,
            )
    show_adapted(adapted, console, tokens)
    rows = _rows(answer, top)
    shown = [answer.ranked[row] for row in rows]
    names: Columns = {"#": [str(1 + row) for row in rows]}
    names["strategy"] = [c.name for c in shown]
    main, *_, (_, layout), _, _, _ = (group for group in _groups(answer.question, shown, tokens))
    both = names | main[1] | {head: column for head, column in layout.items() if head != "mesh"}
    console.print(table if _fits(table := _table(both), console) else _table(names | main[1]))
    show_ranges([*shown, *(each.best for each in adapted if each.best)], console)
    more = f"{rest} more, " if (rest := len(answer.ranked) - len(rows)) > 0 else ""
    console.print(
        f"{more}memory and seconds by category, what is out and why: --all\n", style="dim"
    )
    _show_remarks(answer, adapted, console, tokens)


def _rows(answer: Answer, top: int) -> list[int]:
    """The places in `ranked` of the plans to show: the first `top`, a tight one that is faster than the first, and the best that fits with
    room."""
    rows = set(range(min(top, len(answer.ranked))))
    for found in (answer.tight, answer.with_room):
        if found is not None:
            rows.add(answer.ranked.index(found))
    return sorted(rows)


def show_adapted(adapted: Sequence[Adapted], console: Console, tokens: float | None) -> None:
    """The best of full, LoRA and QLoRA: memory, speed, the time and cost of the run (or of a billion tokens), and the longest row."""
    best = [(each, each.best) for each in adapted if each.best]
    if not best:
        return
    known = any(c.hours(tokens) is not None for _, c in best)
    length, unit = (tokens, "") if known else (1e9, " /\n1B tokens")
    price = adapted[0].answer.question.cluster.price_per_device_hour
    columns: Columns = {"": [each.name for each, _ in best], "strategy": [c.name for _, c in best]}
    cells = [main_cells(c) for _, c in best]
    columns |= _coloured(cells, SHOWN)
    short = [needs_gb(c.estimate, 0) for _, c in best]
    fits = [bool(each.answer.ranked) for each, _ in best]
    columns[f"hours{unit}"] = [
        number(c.hours(length)) if fit else "–" for fit, (_, c) in zip(fits, best, strict=True)
    ]
    if price is not None:
        columns[f"cost{unit}"] = [
            number(c.cost(price, length)) if fit else "–"
            for fit, (_, c) in zip(fits, best, strict=True)
        ]
    if any(each.longest for each, _ in best):
        columns["longest\nrow"] = [
            f"{each.longest.number:,}" if each.longest else "–" for each, _ in best
        ]
    if not _fits(_table(columns), console):
        columns[NEEDS] = list(short)
    console.print(_table(columns, styles={"": "bold"}))
    if len(best) > 1:
        console.print(f"Rows at once (checkpointing): {_at_once(best)}", style="dim", markup=False)
    console.print()


def _at_once(best: Sequence[tuple[Adapted, Candidate]]) -> str:
    """Return the micro-batch and checkpointing of each, which explain its memory: `full 1 (full), LoRA 16 (none)`."""
    each = []
    for adapted, chosen in best:
        each.append(
            f"{adapted.name} {chosen.layout.batch.micro_batch} ({checkpointing(chosen.layout)})"
        )
    return ", ".join(each)


def show_ranges(candidates: Sequence[Candidate], console: Console) -> None:
    """How far seconds, and with them tokens/s, hours and cost, may be from the table's, by group."""
    by_ends = grouped(
        (f"{low - 1:+.0%} to {high - 1:+.0%}", group_of(c.layout))
        for c in candidates
        for low, high in [c.estimate.seconds_range]
    )
    each = [
        f"{', '.join(dict.fromkeys(groups))} {ends}"
        for ends, groups in by_ends.items()
        if ends != "+0% to +0%"
    ]
    if each:
        console.print(
            f"Measured seconds were off the predicted ones by: {'; '.join(each)}",
            style="dim",
            markup=False,
        )


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """What would fit, where nothing does."""
    if changes:
        console.print("What would fit:", style="bold")
        rows = [
            (change.what, change.found.name, f"{change.found.estimate.memory.reserved / GB:.1f}")
            for change in changes
        ]
        console.print(
            plain_table(console, ("change", "then", "needs GB"), rows, spare=("needs GB",))
        )
        console.print()


def show_headline(question: Question, console: Console) -> None:
    """Print the headline on one line where there is room, else on three."""
    about = headline(question)
    console.print(
        (" · " if len(" · ".join(about)) <= console.width else "\n").join(about),
        style="bold",
        markup=False,
        end="\n\n",
    )


def headline(question: Question) -> tuple[str, str, str]:
    """The model, the task and the cluster as text."""
    facts, cluster, config = question.facts, question.cluster, question.config
    trainable = (
        "" if facts.trainable == facts.parameters else f", {count(facts.trainable)} trainable"
    )
    name = (
        (config.model.id or "written out").removeprefix("package:").rstrip("/").rpartition("/")[2]
    )
    hosts = f"{cluster.nodes} × " if cluster.nodes > 1 else ""
    links = cluster.intra.name + (
        f", {cluster.inter.name} between hosts" if cluster.nodes > 1 else ""
    )
    where = f"{hosts}{cluster.per_node} × {cluster.device.name} of {cluster.device.memory_bytes / GB:.1f} GB ({links})"
    if cluster.device.kind != "cpu" and cluster.host_memory_bytes is not None:
        assumed = " (assumed)" if cluster.host_memory_assumed else ""
        where += f", {cluster.host_memory_bytes / GB:,.0f} GB a host{assumed}"
    rows = (
        f"{config.algorithm.kind}, rows of {config.data.max_length} tokens"
        if not config.images_alone
        else config.algorithm.kind
    )
    return f"{name} ({count(facts.parameters)} parameters{trainable})", rows, where


def tables(
    question: Question, ranked: Sequence[Candidate], console: Console, tokens: float | None = None
) -> list[Table]:
    """As few tables as the width allows, each with the rows' numbers; the first one with their names, the others where there is room."""
    numbers: Columns = {"#": [str(number) for number in range(1, len(ranked) + 1)]}
    names: Columns = {"strategy": [c.name for c in ranked]}

    def joined(groups: Sequence[tuple[str, Columns]], names: Columns = names) -> Table:
        columns = numbers | names
        for _, group in groups:
            columns |= group
        return _table(
            columns,
            "; ".join(about for about, _ in groups if about) or None,
            {"#": "dim", "strategy": "bold"},
        )

    shared: list[list[tuple[str, Columns]]] = [[]]
    for group in _groups(question, ranked, tokens):
        if shared[-1] and not _fits(joined([*shared[-1], group]), console):
            shared.append([])
        shared[-1].append(group)
    named = [joined(groups) for groups in shared]
    return [
        table if not n or _fits(table, console) else joined(shared[n], {})
        for n, table in enumerate(named)
    ]


def _groups(
    question: Question, ranked: Sequence[Candidate], tokens: float | None
) -> list[tuple[str, Columns]]:
    """(what they are and their unit, columns that stay together)."""
    cells, memories = [main_cells(c) for c in ranked], [c.estimate.memory for c in ranked]
    main = _coloured(cells, tuple(cells[0]))
    # Hours and cost of the run where its length is known, else of a billion tokens.
    known = any(c.hours(tokens) is not None for c in ranked)
    length, unit = (tokens, "") if known else (1e9, " /\n1B tokens")
    run: Columns = {f"hours{unit}": [number(c.hours(length)) for c in ranked]}
    if (price := question.cluster.price_per_device_hour) is not None:
        run[f"cost{unit}"] = [number(c.cost(price, length)) for c in ranked]
    if len({c.devices for c in ranked}) > 1:
        run["devices"] = [str(c.devices) for c in ranked]
    degrees = [
        [f"{name} {size}" for name, size in c.layout.mesh.model_dump().items() if size > 1]
        for c in ranked
    ]
    layout: Columns = {
        "mesh": [" · ".join(parts) or "1" for parts in degrees],
        "micro ×\nacc": [
            f"{c.layout.batch.micro_batch} × {c.layout.batch.accumulation}" for c in ranked
        ],
        "checkpointing": [checkpointing(c.layout) for c in ranked],
    }
    if any(c.config.compile.enabled for c in ranked):
        layout["compile"] = ["on" if c.config.compile.enabled else "off" for c in ranked]
    later = any(gradients_at_peak(memory) < 0.99 * memory.gradients for memory in memories)
    peak = "GB of a device at its peak" + (
        " (grads: all, some of which come after it)" if later else ""
    )
    parts = (*CATEGORIES, "peak")
    memory: Columns = {
        SHORT.get(part, part): [f"{getattr(memory, part) / GB:.1f}" for memory in memories]
        for part in parts
    }
    host: Columns = {
        f"host\n{part}": [f"{getattr(c.estimate.host, part) / GB:.1f}" for c in ranked]
        for part in HostMemory.model_fields
    }
    spent = {part: [getattr(c.estimate.seconds, part) for c in ranked] for part in SECONDS}
    seconds: Columns = {
        part: [number(value) for value in values] for part, values in spent.items() if any(values)
    }
    seconds["sent\nGB"] = [number(c.estimate.traffic.total / GB) for c in ranked]
    about = "seconds of a step, and what a device sends in it"
    return [
        ("", main),
        ("", run),
        ("", layout),
        (peak, memory),
        ("GB of a host", host),
        (about, seconds),
    ]


def _coloured(cells: Sequence[Mapping[str, str]], heads: Sequence[str]) -> Columns:
    """Columns of `main_cells`, with verdicts in their colours."""
    columns: Columns = {}
    for head in heads:
        styles = [
            VERDICTS.get(row[head].partition(" ")[0], "") if head == VERDICT else ""
            for row in cells
        ]
        columns[head] = [
            Text(row[head], style=style) for row, style in zip(cells, styles, strict=True)
        ]
    return columns


def _fits(table: Table, console: Console) -> bool:
    return (
        Measurement.get(console, console.options.update(width=10_000), table).maximum
        <= console.width
    )


def _table(
    columns: Columns, title: str | None = None, styles: Mapping[str, str] | None = None
) -> Table:
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
        padding=(0, 1, 0, 0),
    )
    for head in columns:
        # Where the terminal is too narrow, names take two lines, and each number is whole.
        justify: JustifyMethod = "left" if head in TEXT_COLUMNS else "right"
        table.add_column(
            head, justify=justify, no_wrap=head != "strategy", style=(styles or {}).get(head, "")
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def plain_table(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], spare: Sequence[str] = ()
) -> Table:
    """A table in the same style. `spare`: heads of columns to drop where the terminal is narrow, in that order."""
    columns: Columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    for head in spare:
        if not _fits(_table(columns), console):
            del columns[head]
    return _table(columns)


def main_cells(candidate: Candidate) -> dict[str, str]:
    """Head → cell of the main columns."""
    estimate = candidate.estimate
    return {
        VERDICT: f"tight {estimate.risk:.0%}" if estimate.verdict == "tight" else estimate.verdict,
        NEEDS: needs_gb(estimate),
        STEP: number(estimate.seconds.total),
        SPEED: f"{estimate.tokens_per_s:,.0f}",
        "MFU": "–" if estimate.mfu is None else f"{estimate.mfu:.0%}",
    }


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason → all that have it, in their order."""
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason, []).append(name)
    return found


def gradients_at_peak(memory: Memory) -> int:
    """Bytes of gradients at the peak: before backward's end not all exist. `memory.gradients` counts all."""
    rest = sum(
        getattr(memory, name) for name in CATEGORIES if name not in ("gradients", "overhead")
    )
    return min(memory.gradients, max(0, memory.peak - rest))


def show_heuristics(answer: Answer, console: Console) -> None:
    """The usual heuristics that would do worse, each with its number."""
    by_reason = grouped(
        (each.reason, f"{each.heuristic}: {each.says}") for each in disagreements(answer)
    )
    if by_reason:
        console.print("Heuristics that the numbers disagree with:", style="bold")
        for reason, theirs in by_reason.items():
            console.print(f"  {'; '.join(theirs)} — {reason}", markup=False)
        console.print()


def _show_remarks(
    answer: Answer, adapted: Sequence[Adapted], console: Console, tokens: float | None
) -> None:
    """Why a slow plan is row 1 and what is faster, what a tight plan risks and how to take one that is not row 1, and what was assumed of
    the host's memory."""
    for line in slow_lines(answer, adapted, tokens):
        console.print(line, markup=False)
    question, first = answer.question, answer.ranked[0]
    is_open = question.config.compile.enabled is None
    if is_open and is_weighed(first.layout, question.facts, question.cluster):
        steps = (
            first.layout.steps if tokens is None else round(tokens / first.layout.tokens_per_step)
        )
        line = describe_compile(first.layout, question.facts, question.cluster, steps)
        console.print(f"{line}.\n", markup=False)
    if first.estimate.verdict == "tight":
        console.print(f"Row 1 is tight: {risk(first)}.{_safer(answer)}\n", markup=False)
    tight = answer.tight
    if tight is not None:
        console.print(
            f"Row {1 + answer.ranked.index(tight)} is {with_little_room(answer)}. To take it:",
            markup=False,
        )
        console.print(f"  {shlex.join(overrides(question.config, tight))}\n", markup=False)
    if question.cluster.host_memory_assumed and _host_matters(answer):
        console.print(f"{assumed_host(answer)}\n", markup=False)
    estimate = first.estimate
    without = export_left_out(question.config, first)
    if without:
        console.print(f"Row 1: {without}.\n", markup=False)
    elif estimate.host_limit is not None and estimate.host.export > estimate.host_limit:
        needs = gb(estimate.host.export)
        line = f"The export at the end of row 1 needs {needs} of host memory; checkpoint.export=none leaves it out"
        console.print(
            f"{line} (`drumline export` writes it later, on another machine).\n", markup=False
        )


def _safer(answer: Answer) -> str:
    """The best plan that fits with room, as a sentence; empty where none does."""
    found = answer.with_room
    if found is None:
        return " No plan fits with more room."
    times = answer.ranked[0].estimate.tokens_per_s / found.estimate.tokens_per_s
    return f" The best that fits with room is row {1 + answer.ranked.index(found)}, {found.name}: row 1 is {number(times)} × as fast."


def _host_matters(answer: Answer) -> bool:
    """Whether another memory of hosts could change the answer: the first plan takes a quarter of it, or something is out by it."""
    limit = answer.question.cluster.host_memory_bytes
    assert limit is not None
    if answer.ranked[0].estimate.host.running > CLEARLY_LESS * limit:
        return True
    return any(
        refused.best is not None and not refused.best.estimate.host_fits
        for refused in answer.refused
    )


def assumed_host(answer: Answer) -> str:
    """The host memory that the plan assumes, the key that sets it, and what row 1 takes if that is much."""
    cluster = answer.question.cluster
    each, _ = usual_host_memory(cluster.device)
    gb_each, gb_host = each / GB, (cluster.host_memory_bytes or 0) / GB
    assumed = f"{gb_host:,.0f} GB assumed, {gb_each:,.0f} GB for each {cluster.device.name} (--devices has the source)"
    line = f"Memory of a host: {assumed}; cluster.host_memory_gb=… sets it."
    if not answer.ranked or not cluster.host_memory_bytes:
        return line
    host = answer.ranked[0].estimate.host
    if host.running <= CLEARLY_LESS * cluster.host_memory_bytes:
        return line
    phases = {
        "while weights are loaded": host.load,
        "while it trains": host.train,
        "while it saves": host.save,
    }
    most = max(phases, key=lambda phase: phases[phase])
    return f"{line} Row 1 takes {gb(phases[most])} of it {most}."


def report_most(question: Question, kind: Kind, console: Console, top: int, as_json: bool) -> None:
    """For each family the longest row, or the largest micro-batch. Raises PlanError where nothing fits."""
    found = max_length(question) if kind == "max_length" else max_batch(question)
    if not found:
        where = {"max_length": "--max-seq", "max_batch": "--max-batch"}[kind]
        raise PlanError(
            "nothing fits, however small",
            where=where,
            fix="see `drumline plan` for what comes nearest",
        )
    if as_json:
        sizes = [
            {"number": each.number, "candidate": candidate(question, each.found)} for each in found
        ]
        print(json.dumps({"version": VERSION, kind: sizes}, indent=2))
        return
    length = kind == "max_length"
    title, key = (
        ("longest row\nin tokens", "data.max_length")
        if length
        else ("largest\nmicro-batch", "batch.micro_batch")
    )
    show_headline(question, console)
    rows = []
    for each in found[:top]:
        cells = main_cells(each.found)
        rows.append(
            [
                each.found.name,
                f"{each.number:,}",
                *(cells[head] for head in SHOWN),
                checkpointing(each.found.layout),
            ]
        )
    heads = ("strategy", title, *SHOWN, "checkpointing")
    console.print(plain_table(console, heads, rows, spare=("checkpointing", VERDICT)))
    console.print(
        f"\nThe largest: {key}={found[0].number} under {found[0].found.name}",
        markup=False,
        soft_wrap=True,
    )


def parse_what_if(text: str) -> list[int]:
    """`nodes=2,4,8`. Raises UserError."""
    key, _, values = text.partition("=")
    parts = [part.strip() for part in values.split(",") if part.strip()]
    if (
        key.strip() != "nodes"
        or not parts
        or not all(part.isdecimal() and int(part) > 0 for part in parts)
    ):
        raise UserError(
            f"{text!r} is no question",
            where="--what-if",
            fix="write nodes=2,4,8: the hosts to plan for instead",
        )
    numbers = [int(part) for part in parts]
    if max(numbers) > MOST_NODES:
        raise UserError(
            f"{max(numbers)} hosts are more than anybody has",
            where="--what-if",
            fix=f"at most {MOST_NODES}",
        )
    return numbers


def report_what_if(
    question: Question, hosts: Sequence[int], console: Console, tokens: float | None, as_json: bool
) -> None:
    """The first plan on each number of hosts, and what more devices gain."""
    answers = what_if(question, hosts)
    if as_json:
        found = []
        for answer in answers:
            cluster, best = (
                answer.question.cluster,
                candidate(answer.question, answer.ranked[0], tokens) if answer.ranked else None,
            )
            found.append({"nodes": cluster.nodes, "devices": cluster.world_size, "best": best})
        print(json.dumps({"version": VERSION, "what_if": found}, indent=2))
        return
    show_headline(answers[0].question, console)
    base = next((a for a in answers if a.ranked), None)
    rows = []
    for answer in answers:
        cluster = answer.question.cluster
        near = min(
            (r.best for r in answer.refused if r.best),
            key=lambda c: c.estimate.memory.reserved,
            default=None,
        )
        first = answer.ranked[0] if answer.ranked else near
        cells, gain = (
            [main_cells(first)[head] for head in SHOWN] if first else ["no", "–", "–"],
            ["–", "–", "–"],
        )
        if answer.ranked and first and base:
            speed = first.estimate.tokens_per_s / base.ranked[0].estimate.tokens_per_s
            each = speed * base.question.cluster.world_size / cluster.world_size
            time = number(first.hours(tokens if tokens or first.layout.steps else 1e9))
            gain = [f"{speed:.2f}", f"{each:.0%}", time]
        else:
            cells[2] = "–"
        rows.append(
            [
                str(cluster.nodes),
                str(cluster.world_size),
                first.name if first else "–",
                *cells,
                *gain,
            ]
        )
    known = any(a.ranked and a.ranked[0].hours(tokens) is not None for a in answers)
    heads = (
        "hosts",
        "devices",
        "strategy",
        *SHOWN,
        "speed",
        "of\nlinear",
        "hours" if known else "hours /\n1B tokens",
    )
    console.print(plain_table(console, heads, rows, spare=(heads[-1], VERDICT, "devices")))


def show_devices(console: Console) -> None:
    """Datasheet rates with their sources, and how to describe what is not there."""
    devices = []
    for spec in DEVICES.values():
        half, full = (
            f"{spec.flops[kind] / TERA:g}" if kind in spec.flops else "–"
            for kind in ("bf16", "fp32")
        )
        size, rate = f"{spec.memory_bytes / GIGA:.1f}", f"{spec.bandwidth / GIGA:,.0f}"
        devices.append((spec.name, size, rate, half, full, spec.intra, spec.host_link))
    links = [
        (
            link.name,
            f"{link.bandwidth / GIGA:g}",
            f"{link.efficiency:.0%}",
            f"{link.latency * 1e6:g}",
        )
        for link in LINKS.values()
    ]
    console.print(
        plain_table(
            console,
            ("device", "GB", "GB/s", "bf16 TFLOP/s", "fp32", "usual link", "to host"),
            devices,
        )
    )
    console.print()
    console.print(plain_table(console, ("link", "GB/s one way", "reached", "latency µs"), links))
    console.print(
        "\nBetween hosts, by rate: 100Gb, 400Gb, 8x400Gb (cards of one host). cpu: this machine's own rates.\n",
        markup=False,
    )
    console.print("Sources", style="bold")
    for name, source in [(s.name, s.source) for s in DEVICES.values()] + [
        (link.name, link.source) for link in LINKS.values()
    ]:
        console.print(f"  {name:<16} {source}", markup=False, soft_wrap=True)
    console.print(
        "\nHost memory assumed for each device where cluster.host_memory_gb is not set, GB",
        style="bold",
    )
    for spec in DEVICES.values():
        host_bytes, source = usual_host_memory(spec)
        console.print(
            f"  {spec.name:<16} {host_bytes / GB:.0f}, {source}", markup=False, soft_wrap=True
        )
    console.print(
        "\nNetwork assumed between hosts of eight where cluster.inter is not set, by the link of their devices",
        style="bold",
    )
    for intra, (network, source) in HOST_NETWORK.items():
        console.print(f"  {intra:<16} {network}, {source}", markup=False, soft_wrap=True)
    console.print(f"  {'other hosts':<16} {OTHER_NETWORK}", markup=False)
    console.print(
        "\nWhat is not here is described in the YAML: cluster: {devices: {NAME: {memory_gb: …, bandwidth_gb_s: …, bf16_tflops: …,"
        " fp32_tflops: …}}, device: NAME, per_node: 8}",
        markup=False,
    )
