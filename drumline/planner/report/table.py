"""The answer as tables. Groups of columns share a table as far as the terminal is wide; no word is ever cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from drumline.core.estimate import HostMemory, Memory
from drumline.core.explain import count
from drumline.planner.search.answer import Answer, Candidate, Question

GB = 1e9
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
SECONDS = ("compute", "communication", "bubble", "optimizer", "offload", "rollout")
SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}  # so that all categories stand in 80 columns
VERDICTS = {"fits": "green", "tight": "yellow", "no": "red"}
# Heads of columns of words; the others hold numbers.
WORDS = ("strategy", "verdict", "mesh", "checkpointing", "change", "then", "device", "link", "usual link", "to host")
Columns = dict[str, Sequence[str | Text]]  # head → one cell a row


def show(answer: Answer, console: Console, *, top: int, tokens: float | None = None) -> None:
    """The question, the ranked plans, and the families that are out."""
    show_headline(answer.question, console)
    ranked = answer.ranked[:top]
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
        for reason, (name, *alike) in grouped((each.reason, each.name) for each in answer.refused).items():
            likewise = f" (likewise {', '.join(alike)})" if alike else ""
            out.add_row(Text(name), Text(reason + likewise))
        console.print(Text("Out:", style="bold"))
        console.print(out)
        console.print()


def show_headline(question: Question, console: Console) -> None:
    """Print the headline on one line where there is room, else on three."""
    about = headline(question)
    console.print((" · " if len(" · ".join(about)) <= console.width else "\n").join(about), style="bold", markup=False, end="\n\n")


def headline(question: Question) -> tuple[str, str, str]:
    """The model, the task and the cluster as text."""
    facts, cluster, config = question.facts, question.cluster, question.config
    trainable = "" if facts.trainable == facts.parameters else f", {count(facts.trainable)} trainable"
    name = (config.model.id or "written out").removeprefix("package:").rstrip("/").rpartition("/")[2]
    hosts = f"{cluster.nodes} × " if cluster.nodes > 1 else ""
    links = cluster.intra.name + (f", {cluster.inter.name} between hosts" if cluster.nodes > 1 else "")
    where = f"{hosts}{cluster.per_node} × {cluster.device.name} of {cluster.device.memory_bytes / GB:.1f} GB ({links})"
    rows = f"{config.algorithm.kind}, rows of {config.data.max_length} tokens" if not config.images_alone else config.algorithm.kind
    return f"{name} ({count(facts.parameters)} parameters{trainable})", rows, where


def tables(question: Question, ranked: Sequence[Candidate], console: Console, tokens: float | None = None) -> list[Table]:
    """As few tables as the width allows, each with the rows' numbers; the first one with their names, the others where there is room."""
    numbers: Columns = {"#": [str(number) for number in range(1, len(ranked) + 1)]}
    names: Columns = {"strategy": [c.name for c in ranked]}

    def joined(groups: Sequence[tuple[str, Columns]], names: Columns = names) -> Table:
        columns = numbers | names
        for _, group in groups:
            columns |= group
        return _table(columns, "; ".join(about for about, _ in groups if about) or None, {"#": "dim", "strategy": "bold"})

    shared: list[list[tuple[str, Columns]]] = [[]]
    for group in _groups(question, ranked, tokens):
        if shared[-1] and not _fits(joined([*shared[-1], group]), console):
            shared.append([])
        shared[-1].append(group)
    named = [joined(groups) for groups in shared]
    return [table if not n or _fits(table, console) else joined(shared[n], {}) for n, table in enumerate(named)]


def _groups(question: Question, ranked: Sequence[Candidate], tokens: float | None) -> list[tuple[str, Columns]]:
    """(what they are and their unit, columns that stay together)."""
    cells, memories = [main_cells(c) for c in ranked], [c.estimate.memory for c in ranked]
    main: Columns = {head: [Text(row[head], style=VERDICTS.get(row[head], "")) for row in cells] for head in cells[0]}
    # Hours and cost of the run where its length is known, else of a billion tokens.
    known = any(hours(c, tokens) is not None for c in ranked)
    length, unit = (tokens, "") if known else (1e9, " /\n1B tokens")
    run: Columns = {f"hours{unit}": [number(hours(c, length)) for c in ranked]}
    if question.cluster.price_per_device_hour is not None:
        run[f"cost{unit}"] = [number(cost(question, c, length)) for c in ranked]
    if len({devices(c) for c in ranked}) > 1:
        run["devices"] = [str(devices(c)) for c in ranked]
    degrees = [[f"{name} {size}" for name, size in c.layout.mesh.model_dump().items() if size > 1] for c in ranked]
    layout: Columns = {
        "mesh": [" · ".join(parts) or "1" for parts in degrees],
        "micro ×\nacc": [f"{c.layout.batch.micro_batch} × {c.layout.batch.accumulation}" for c in ranked],
        "checkpointing": [c.layout.activation_checkpointing for c in ranked],
    }
    later = any(gradients_at_peak(memory) < 0.99 * memory.gradients for memory in memories)
    peak = "GB of a device at its peak" + (" (grads: all, some of which come after it)" if later else "")
    parts = (*CATEGORIES, "peak")
    memory: Columns = {SHORT.get(part, part): [f"{getattr(memory, part) / GB:.1f}" for memory in memories] for part in parts}
    host: Columns = {f"host\n{part}": [f"{getattr(c.estimate.host, part) / GB:.1f}" for c in ranked] for part in HostMemory.model_fields}
    spent = {part: [getattr(c.estimate.seconds, part) for c in ranked] for part in SECONDS}
    seconds: Columns = {part: [number(value) for value in values] for part, values in spent.items() if any(values)}
    seconds["sent\nGB"] = [number(c.estimate.traffic.total / GB) for c in ranked]
    about = "seconds of a step, and what a device sends in it"
    return [("", main), ("", run), ("", layout), (peak, memory), ("GB of a host", host), (about, seconds)]


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(width=10_000), table).maximum <= console.width


def _table(columns: Columns, title: str | None = None, styles: Mapping[str, str] | None = None) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    for head in columns:
        table.add_column(head, justify="left" if head in WORDS else "right", no_wrap=True, style=(styles or {}).get(head, ""))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def plain_table(console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], spare: Sequence[str] = ()) -> Table:
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
        "verdict": estimate.verdict,
        "needs\nGB": f"{estimate.memory.reserved / GB:.1f}",
        "step\ns": number(estimate.seconds.total),
        "tokens/s": f"{estimate.tokens_per_s:,.0f}",
        "MFU": "–" if estimate.mfu is None else f"{estimate.mfu:.0%}",
    }


def hours(candidate: Candidate, tokens: float | None = None) -> float | None:
    """Hours of the run: for `tokens` where given, else for its steps; None where neither is known."""
    estimate, steps = candidate.estimate, candidate.layout.steps
    if tokens is not None:
        return tokens / estimate.tokens_per_s / 3600
    return None if steps is None else steps * estimate.seconds.total / 3600


def cost(question: Question, candidate: Candidate, tokens: float | None = None) -> float | None:
    """The cost of the run in the currency of the price; None where price or length of the run is not known."""
    price, time = question.cluster.price_per_device_hour, hours(candidate, tokens)
    return None if price is None or time is None else price * time * devices(candidate)


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason → all that have it, in their order."""
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason, []).append(name)
    return found


def devices(candidate: Candidate) -> int:
    return candidate.layout.mesh.world_size * candidate.layout.devices_per_rank


def gradients_at_peak(memory: Memory) -> int:
    """Bytes of gradients at the peak: before backward's end not all exist. `memory.gradients` counts all."""
    rest = sum(getattr(memory, name) for name in CATEGORIES if name not in ("gradients", "overhead"))
    return min(memory.gradients, max(0, memory.peak - rest))


def number(value: float | None) -> str:
    """Three digits, or whole where there are more: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
