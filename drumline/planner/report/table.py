"""The answer of the planner as tables in the terminal.

Groups of columns share a table as far as the terminal is wide, and no word is ever cut.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from drumline.hardware.catalog import usual_host_memory
from drumline.plan.estimate import HostMemory, Memory
from drumline.plan.explain import count, describe_recomputation
from drumline.plan.facts import ModelFacts
from drumline.planner.cost.fitted import group_of
from drumline.planner.report.output import needs_gb, overrides
from drumline.planner.search.advice import Change, ModeResult
from drumline.planner.search.answer import (
    CLEARLY_LESS,
    GB,
    Answer,
    Candidate,
    Question,
    gb,
    number,
    trust,
)
from drumline.planner.search.auto import (
    describe_faster_tight_plan,
    disagreements,
    export_left_out,
    risk,
)
from drumline.planner.search.choice import larger_batch_line, slow_lines
from drumline.planner.search.compiling import compile_speeds_up_step, describe_compile
from drumline.planner.search.pure_bf16 import PureBF16

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
# Shorter heads of columns, so that all categories fit into 80 characters.
SHORT_HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
}
# The colour of each verdict.
VERDICTS = {
    "fits": "green",
    "tight": "yellow",
    "no": "red",
}
# Heads of columns that several tables have.
VERDICT = "verdict\n(risk)"
NEEDS = "memory of\na device, GB"
STEP = "seconds\na step"
SPEED = "tokens/s\nof all\ndevices"
# Heads of columns of text; the others hold numbers.
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
    "what if",
    "term",
    "rented",
    "in time",
)
# The quantity whose largest fitting value the user asks for.
SizeLimit = Literal["max_length", "max_batch"]
# Columns of `main_cells` that the short tables have.
SHOWN = (VERDICT, NEEDS, SPEED)
UNKNOWN = "–"
BILLION = 1e9
# The title remarks on gradients that come after the peak if fewer than this share exist at the peak.
NEARLY_ALL = 0.99
# Characters of a line that is wider than any table. A table is measured in it without being cut.
UNLIMITED_WIDTH = 10_000

# Head of a column → one cell a row.
Columns = dict[str, Sequence[str | Text]]


class ColumnGroup(NamedTuple):
    """Columns that stay in one table, and what they are with their unit."""

    about: str
    columns: Columns


class RunLength(NamedTuple):
    """The length of a run for which a table shows hours and costs.

    `tokens`: of the run; None: those of the steps that a candidate's config sets.
    `unit`: text that follows `hours` or `cost` in the head of a column.
    """

    tokens: float | None
    unit: str


def run_length_to_show(candidates: Iterable[Candidate], tokens: float | None) -> RunLength:
    """Return the length of run to show hours and costs for: the run's own, else a billion tokens.

    `tokens`: of the whole run, if the user has given them.
    """
    for candidate in candidates:
        if candidate.hours(tokens) is not None:
            return RunLength(tokens, "")
    return RunLength(BILLION, " /\n1B tokens")


def show(
    answer: Answer,
    console: Console,
    changes: Sequence[Change],
    modes: Sequence[ModeResult],
    *,
    top: int,
    tokens: float | None = None,
    pure_bf16: PureBF16 | None = None,
) -> None:
    """Print all of an answer.

    These are the question, full training beside LoRA and QLoRA, the first `top` plans, the families
    that are out, heuristics that disagree, what would fit (`changes`), and remarks.

    `tokens`: of the whole run. `pure_bf16`: the best plan with weights and moments in bf16, if it
    differs much.
    """
    show_headline(answer.question, console)
    show_modes(modes, console, tokens)
    ranked = answer.ranked[:top]
    shown = [*ranked, *_best_of(modes)]
    show_ranges(shown, answer.question.facts, console)
    if ranked:
        for table in tables(answer.question, ranked, console, tokens):
            _print_titled(table, console)
    hidden = len(answer.ranked) - top
    if hidden > 0:
        console.print(f"{hidden} more: --top {len(answer.ranked)}\n", style="dim")
    if answer.refused:
        _show_refused(answer, console)
    if answer.ranked:
        # Where nothing fits, no heuristic does.
        show_heuristics(answer, console)
    show_changes(changes, console)
    if answer.ranked:
        _show_remarks(answer, modes, console, tokens, pure_bf16)


def _print_titled(table: Table, console: Console) -> None:
    """Print a table below its title. The table itself would wrap the title to its own width."""
    if table.title:
        console.print(table.title, style="italic")
        table.title = None
    console.print(table)
    console.print()


def _show_refused(answer: Answer, console: Console) -> None:
    """Print the families that are out, each reason once."""
    out = Table(
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    out.add_column(no_wrap=True, style="bold")
    # Reasons are sentences: they get the rest of the width, and wrap.
    out.add_column(ratio=1)
    by_reason = group_names((refused.reason, refused.name) for refused in answer.refused)
    for reason, names in by_reason.items():
        first, *alike = names
        text = reason
        if alike:
            text += f" (likewise {', '.join(alike)})"
        out.add_row(Text(first), Text(text))
    console.print(Text("Out:", style="bold"))
    console.print(out)
    console.print()


def show_short(
    answer: Answer,
    console: Console,
    modes: Sequence[ModeResult],
    *,
    top: int,
    tokens: float | None = None,
    pure_bf16: PureBF16 | None = None,
) -> None:
    """Print one screen of an answer.

    It has the question, full training, LoRA and QLoRA, the first `top` plans, and remarks.

    `tokens`: of the whole run. `pure_bf16`: the best plan with weights and moments in bf16, if it
    differs much.
    """
    show_headline(answer.question, console)
    _show_refused_choice(answer, console)
    show_modes(modes, console, tokens)
    rows = _rows_to_show(answer, top)
    shown = [answer.ranked[row] for row in rows]
    columns: Columns = {
        "#": [str(1 + row) for row in rows],
        "strategy": [candidate.name for candidate in shown],
    }
    columns |= _main_columns(shown)
    layout = _layout_columns(shown)
    # The name of a plan says what its mesh is.
    del layout["mesh"]
    table = _table(columns | layout)
    if not _fits_terminal(table, console):
        table = _table(columns)
    console.print(table)
    show_ranges([*shown, *_best_of(modes)], answer.question.facts, console)
    hidden = len(answer.ranked) - len(rows)
    more = ""
    if hidden > 0:
        more = f"{hidden} more, "
    console.print(
        f"{more}memory and seconds by category, what is out and why: --all\n",
        style="dim",
    )
    _show_remarks(answer, modes, console, tokens, pure_bf16)


def _show_refused_choice(answer: Answer, console: Console) -> None:
    """Print why the strategy that the user's config names is out, where it is."""
    names = answer.question.config.strategy.names(answer.question.cluster.world_size)
    for refused in answer.refused:
        if refused.name == names.family:
            console.print(
                f"{refused.name}, as the config has it, is out: {refused.reason}\n",
                style="yellow",
                markup=False,
            )


def _rows_to_show(answer: Answer, top: int) -> list[int]:
    """Return the indices in `ranked` of the plans of one screen.

    These are the first `top`, a tight plan that is faster than the first, and the best that fits
    with room.
    """
    rows = set(range(min(top, len(answer.ranked))))
    for candidate in (answer.tight, answer.best_that_fits):
        if candidate is not None:
            rows.add(answer.ranked.index(candidate))
    return sorted(rows)


def _best_of(modes: Sequence[ModeResult]) -> list[Candidate]:
    """Return the best candidate of full training, LoRA and QLoRA, of those that have one."""
    best = []
    for each in modes:
        candidate = each.best
        if candidate is not None:
            best.append(candidate)
    return best


def show_modes(modes: Sequence[ModeResult], console: Console, tokens: float | None) -> None:
    """Print a table of the best plans of full training, LoRA and QLoRA.

    It has memory and speed, hours and cost of the run (or of a billion tokens), and the longest row
    that fits.

    `tokens`: of the whole run.
    """
    shown = [each for each in modes if each.best is not None]
    if not shown:
        return
    best = _best_of(shown)
    columns: Columns = {
        "": [each.name for each in shown],
        "strategy": [candidate.name for candidate in best],
    }
    cells = [main_cells(candidate) for candidate in best]
    columns |= _colour_verdicts(cells, SHOWN)
    columns |= _adapted_run_columns(shown, best, tokens)
    if any(each.longest is not None for each in shown):
        columns["longest\nrow"] = [_longest_cell(each) for each in shown]
    if not _fits_terminal(_table(columns), console):
        # The ranges without decimal places.
        columns[NEEDS] = [needs_gb(candidate.estimate, 0) for candidate in best]
    console.print(_table(columns, styles={"": "bold"}))
    if len(shown) > 1:
        at_once = _describe_batches(shown, best)
        console.print(f"Rows at once (checkpointing): {at_once}", style="dim", markup=False)
    console.print()


def _adapted_run_columns(
    shown: Sequence[ModeResult], best: Sequence[Candidate], tokens: float | None
) -> Columns:
    """Return the columns of hours and cost. Of a plan that does not fit they are unknown."""
    length, unit = run_length_to_show(best, tokens)
    price = shown[0].answer.question.cluster.price_per_device_hour
    hours = []
    costs = []
    for each, candidate in zip(shown, best, strict=True):
        if each.answer.ranked:
            hours.append(number(candidate.hours(length)))
            costs.append(number(candidate.cost(price, length)))
        else:
            hours.append(UNKNOWN)
            costs.append(UNKNOWN)
    columns: Columns = {f"hours{unit}": hours}
    if price is not None:
        columns[f"cost{unit}"] = costs
    return columns


def _longest_cell(each: ModeResult) -> str:
    """Return the tokens of the longest row that fits, as a cell."""
    if each.longest is None:
        return UNKNOWN
    return f"{each.longest.number:,}"


def _describe_batches(shown: Sequence[ModeResult], best: Sequence[Candidate]) -> str:
    """Return the micro-batch and checkpointing of each, such as `full 1 (full), LoRA 16 (none)`.

    They explain why an adapter may need as much memory as full training: it takes more rows at once.
    """
    described = []
    for mode, chosen in zip(shown, best, strict=True):
        layout = chosen.layout
        rows = layout.batch.micro_batch
        described.append(f"{mode.name} {rows} ({describe_recomputation(layout)})")
    return ", ".join(described)


def show_ranges(candidates: Sequence[Candidate], facts: ModelFacts, console: Console) -> None:
    """Print how far measured seconds were from predicted ones, by group of layouts.

    Speed, hours and cost in the table may be off by as much.
    """
    pairs = []
    for candidate in candidates:
        low, high = candidate.estimate.seconds_range
        bounds = f"{low - 1:+.0%} to {high - 1:+.0%}"
        pairs.append((bounds, group_of(candidate.layout, is_mixture=facts.experts > 0)))
    described = []
    for bounds, groups in group_names(pairs).items():
        if bounds == "+0% to +0%":
            continue
        # Each group once, in the order of the table.
        names = ", ".join(dict.fromkeys(groups))
        described.append(f"{names} {bounds}")
    if described:
        console.print(
            f"Measured seconds were off the predicted ones by: {'; '.join(described)}",
            style="dim",
            markup=False,
        )


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """Print the changes after which a plan would fit; nothing without any."""
    if not changes:
        return
    console.print("What would fit:", style="bold")
    rows = []
    for change in changes:
        needed = change.candidate.estimate.memory.reserved / GB
        rows.append((change.what, change.candidate.name, f"{needed:.1f}"))
    heads = ("change", "then", "needs GB")
    console.print(plain_table(console, heads, rows, spare=("needs GB",)))
    console.print()


def show_headline(question: Question, console: Console) -> None:
    """Print the headline on one line if the terminal is wide enough, else on three."""
    parts = headline(question)
    line = " · ".join(parts)
    if len(line) > console.width:
        line = "\n".join(parts)
    console.print(line, style="bold", markup=False, end="\n\n")


def headline(question: Question) -> tuple[str, str, str]:
    """Return the model, the task and the cluster as text."""
    return _describe_model(question), _describe_task(question), _describe_cluster(question)


def _describe_model(question: Question) -> str:
    """Return the model's name and its number of parameters."""
    facts = question.facts
    path = question.config.model.id or "written out"
    name = path.removeprefix("package:").rstrip("/").rpartition("/")[2]
    trainable = ""
    if facts.trainable != facts.parameters:
        trainable = f", {count(facts.trainable)} trainable"
    return f"{name} ({count(facts.parameters)} parameters{trainable})"


def _describe_task(question: Question) -> str:
    """Return the algorithm and the length of its rows. Images have no length."""
    config = question.config
    if config.images_alone:
        return config.algorithm.kind
    return f"{config.algorithm.kind}, rows of {config.data.max_length} tokens"


def _describe_cluster(question: Question) -> str:
    """Return the devices with their memory and links, and the memory of a host."""
    cluster = question.cluster
    device = cluster.device
    hosts = ""
    links = cluster.intra.name
    if cluster.nodes > 1:
        hosts = f"{cluster.nodes} × "
        links += f", {cluster.inter.name} between hosts"
    memory = f"{device.memory_bytes / GB:.1f} GB"
    text = f"{hosts}{cluster.per_node} × {device.name} of {memory} ({links})"
    if device.kind != "cpu" and cluster.host_memory_bytes is not None:
        text += f", {cluster.host_memory_bytes / GB:,.0f} GB a host"
        if cluster.host_memory_assumed:
            text += " (assumed)"
    return text


def tables(
    question: Question, ranked: Sequence[Candidate], console: Console, tokens: float | None = None
) -> list[Table]:
    """Return the ranked plans in as few tables as the terminal's width allows.

    Each table has the numbers of the rows. The first one also has their names, and so have the others
    if there is room.
    """
    numbers: Columns = {"#": [str(place) for place in range(1, len(ranked) + 1)]}
    named = numbers | {"strategy": [candidate.name for candidate in ranked]}
    # The groups of columns of each table. A group that does not fit begins the next table.
    shared: list[list[ColumnGroup]] = [[]]
    for group in _column_groups(question, ranked, tokens):
        groups = shared[-1]
        if groups and not _fits_terminal(_join_columns(named, [*groups, group]), console):
            shared.append([])
        shared[-1].append(group)
    made = []
    for index, groups in enumerate(shared):
        table = _join_columns(named, groups)
        if index > 0 and not _fits_terminal(table, console):
            table = _join_columns(numbers, groups)
        made.append(table)
    return made


def _join_columns(first: Columns, groups: Sequence[ColumnGroup]) -> Table:
    """Return one table of the first columns and those of all groups, under what the groups are about."""
    columns = dict(first)
    for group in groups:
        columns |= group.columns
    title = "; ".join(group.about for group in groups if group.about)
    return _table(columns, title or None, {"#": "dim", "strategy": "bold"})


def _column_groups(
    question: Question, ranked: Sequence[Candidate], tokens: float | None
) -> list[ColumnGroup]:
    """Return all columns of the ranked plans, in groups that each stay in one table."""
    about_peak = "GB of a device at its peak"
    memories = [candidate.estimate.memory for candidate in ranked]
    if any(_has_later_gradients(memory) for memory in memories):
        about_peak += " (grads: all, some of which come after it)"
    about_step = "seconds of a step, and what a device sends in it"
    return [
        ColumnGroup("", _main_columns(ranked)),
        ColumnGroup("", _run_columns(question, ranked, tokens)),
        ColumnGroup("", _layout_columns(ranked)),
        ColumnGroup(about_peak, _memory_columns(memories)),
        ColumnGroup("GB of a host", _host_columns(ranked)),
        ColumnGroup(about_step, _seconds_columns(ranked)),
    ]


def _has_later_gradients(memory: Memory) -> bool:
    """Return whether more than a hundredth of the gradients come after the peak."""
    return gradients_at_peak(memory) < NEARLY_ALL * memory.gradients


def _main_columns(ranked: Sequence[Candidate]) -> Columns:
    """Return verdict, memory, seconds, speed and MFU."""
    cells = [main_cells(candidate) for candidate in ranked]
    return _colour_verdicts(cells, tuple(cells[0]))


def _run_columns(question: Question, ranked: Sequence[Candidate], tokens: float | None) -> Columns:
    """Return hours and cost of the run (or of a billion tokens), and the devices if they differ."""
    length, unit = run_length_to_show(ranked, tokens)
    price = question.cluster.price_per_device_hour
    hours = [number(each.hours(length)) for each in ranked]
    columns: Columns = {f"hours{unit}": hours}
    if price is not None:
        columns[f"cost{unit}"] = [number(each.cost(price, length)) for each in ranked]
    # A plan may leave some devices of the cluster unused.
    devices = [candidate.devices for candidate in ranked]
    if len(set(devices)) > 1:
        columns["devices"] = [str(each) for each in devices]
    return columns


def _layout_columns(ranked: Sequence[Candidate]) -> Columns:
    """Return mesh, batch and checkpointing, and compilation if any plan compiles."""
    meshes = []
    batches = []
    recomputation = []
    compilation = []
    for candidate in ranked:
        layout = candidate.layout
        meshes.append(_describe_mesh(candidate))
        batches.append(f"{layout.batch.micro_batch} × {layout.batch.accumulation}")
        recomputation.append(describe_recomputation(layout))
        compilation.append("on" if candidate.config.compile.enabled else "off")
    columns: Columns = {
        "mesh": meshes,
        "micro ×\nacc": batches,
        "checkpointing": recomputation,
    }
    if "on" in compilation:
        columns["compile"] = compilation
    return columns


def _describe_mesh(candidate: Candidate) -> str:
    """Return the dimensions of the mesh that are larger than 1: `fsdp 4 · tp 2`."""
    parts = []
    for name, size in candidate.layout.mesh.model_dump().items():
        if size > 1:
            parts.append(f"{name} {size}")
    return " · ".join(parts) or "1"


def _memory_columns(memories: Sequence[Memory]) -> Columns:
    """Return the GB of a device by category, and at the peak."""
    columns: Columns = {}
    for part in (*CATEGORIES, "peak"):
        head = SHORT_HEADS.get(part, part)
        columns[head] = [f"{getattr(memory, part) / GB:.1f}" for memory in memories]
    return columns


def _host_columns(ranked: Sequence[Candidate]) -> Columns:
    """Return the GB of a host by phase of the run."""
    hosts = [candidate.estimate.host for candidate in ranked]
    columns: Columns = {}
    for part in HostMemory.model_fields:
        columns[f"host\n{part}"] = [f"{getattr(host, part) / GB:.1f}" for host in hosts]
    return columns


def _seconds_columns(ranked: Sequence[Candidate]) -> Columns:
    """Return the seconds of a step by part, and the GB that a device sends in it.

    A part that takes no time in any plan has no column.
    """
    columns: Columns = {}
    for part in SECONDS:
        spent = [getattr(candidate.estimate.seconds, part) for candidate in ranked]
        if any(spent):
            columns[part] = [number(value) for value in spent]
    sent = [candidate.estimate.traffic.total / GB for candidate in ranked]
    columns["sent\nGB"] = [number(value) for value in sent]
    return columns


def _colour_verdicts(cells: Sequence[Mapping[str, str]], heads: Sequence[str]) -> Columns:
    """Return columns of `main_cells`, with verdicts in their colours."""
    columns: Columns = {}
    for head in heads:
        column = []
        for row in cells:
            cell = row[head]
            style = ""
            if head == VERDICT:
                # Without the risk: `tight 11%`.
                verdict = cell.partition(" ")[0]
                style = VERDICTS.get(verdict, "")
            column.append(Text(cell, style=style))
        columns[head] = column
    return columns


def _fits_terminal(table: Table, console: Console) -> bool:
    """Return whether a table is no wider than the terminal."""
    unlimited = console.options.update(width=UNLIMITED_WIDTH)
    return Measurement.get(console, unlimited, table).maximum <= console.width


def _table(
    columns: Columns, title: str | None = None, styles: Mapping[str, str] | None = None
) -> Table:
    """Return a table in the planner's style. `styles`: head → style of its column."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
        padding=(0, 1, 0, 0),
    )
    styles = styles or {}
    for head in columns:
        justify: JustifyMethod = "left" if head in TEXT_COLUMNS else "right"
        # If the terminal is too narrow, names take two lines, and each number is whole.
        can_wrap = head == "strategy"
        table.add_column(head, justify=justify, no_wrap=not can_wrap, style=styles.get(head, ""))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def plain_table(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], spare: Sequence[str] = ()
) -> Table:
    """Return a table in the same style as the answer's.

    `spare`: heads of columns to drop if the terminal is too narrow, in that order.
    """
    cells_by_column = zip(*rows, strict=True)
    columns: Columns = dict(zip(heads, cells_by_column, strict=True))
    for head in spare:
        if not _fits_terminal(_table(columns), console):
            del columns[head]
    return _table(columns)


def main_cells(candidate: Candidate) -> dict[str, str]:
    """Return the cells of the main columns, by the heads of these."""
    estimate = candidate.estimate
    verdict: str = estimate.verdict
    if verdict == "tight":
        verdict = f"tight {estimate.risk:.0%}"
    elif verdict == "no" and estimate.memory.reserved <= estimate.limit:
        # The device has enough memory.
        verdict = "no (host)"
    mfu = UNKNOWN
    if estimate.mfu is not None:
        mfu = f"{estimate.mfu:.0%}"
    return {
        VERDICT: verdict,
        NEEDS: needs_gb(estimate),
        STEP: number(estimate.seconds.total),
        SPEED: f"{estimate.tokens_per_s:,.0f}",
        "MFU": mfu,
    }


def group_names(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return reason → names that have it, in their order. `pairs`: (reason, name)."""
    names_of: dict[str, list[str]] = {}
    for reason, name in pairs:
        names_of.setdefault(reason, []).append(name)
    return names_of


def gradients_at_peak(memory: Memory) -> int:
    """Return the bytes of gradients that exist at the peak.

    `memory.gradients` counts all of them, and before the end of backward not all exist.
    """
    rest = 0
    for name in CATEGORIES:
        # The peak is of tensors, which the overhead has none of.
        if name not in ("gradients", "overhead"):
            rest += getattr(memory, name)
    return min(memory.gradients, max(0, memory.peak - rest))


def show_heuristics(answer: Answer, console: Console) -> None:
    """Print the usual heuristics that would do worse, each with its number."""
    pairs = []
    for each in disagreements(answer):
        pairs.append((each.reason, f"{each.heuristic}: {each.says}"))
    if not pairs:
        return
    console.print("Heuristics that the numbers disagree with:", style="bold")
    for reason, proposals in group_names(pairs).items():
        console.print(f"  {'; '.join(proposals)} — {reason}", markup=False)
    console.print()


def _show_remarks(
    answer: Answer,
    modes: Sequence[ModeResult],
    console: Console,
    tokens: float | None,
    pure_bf16: PureBF16 | None,
) -> None:
    """Print remarks on the first plan.

    They say why it is slow and what is faster, whether compilation pays, what a tight plan risks and
    how to take one that is not row 1, what was assumed of the host's memory, and what weights and
    moments in bf16, or a larger batch, would gain.
    """
    lines = slow_lines(answer, modes, tokens, pure_bf16)
    for line in lines:
        console.print(line, markup=False)
    question = answer.question
    first = answer.ranked[0]
    # The user has not said whether to compile.
    is_open = question.config.compile.enabled is None
    if is_open and compile_speeds_up_step(first.layout, question.facts, question.cluster):
        steps = first.layout.steps
        if tokens is not None:
            steps = round(tokens / first.layout.tokens_per_step)
        line = describe_compile(first.layout, question.facts, question.cluster, steps)
        console.print(f"{line}.\n", markup=False)
    _show_tight(answer, console)
    if question.cluster.host_memory_assumed and _host_matters(answer):
        console.print(f"{assumed_host(answer)}\n", markup=False)
    _show_export(answer, console)
    if lines:
        # What follows stands there already, among what to do instead.
        return
    if pure_bf16 is not None:
        console.print(f"{pure_bf16.line}\n", markup=False)
    larger = larger_batch_line(answer, tokens)
    if larger:
        console.print(f"{larger}\n", markup=False)


def _show_tight(answer: Answer, console: Console) -> None:
    """Print what the first plan risks if it is tight, and how to take a faster one that is tight."""
    first = answer.ranked[0]
    if first.estimate.verdict == "tight":
        console.print(f"Row 1 is tight: {risk(first)}.{_describe_safer(answer)}\n", markup=False)
    tight = answer.tight
    if tight is not None:
        row = 1 + answer.ranked.index(tight)
        console.print(
            f"Row {row} is {describe_faster_tight_plan(answer)}. To take it:", markup=False
        )
        command = shlex.join(overrides(answer.question.config, tight))
        console.print(f"  {command}\n", markup=False)


def _show_export(answer: Answer, console: Console) -> None:
    """Print that the export of the first plan is left out, or needs more memory than its host has."""
    first = answer.ranked[0]
    estimate = first.estimate
    without = export_left_out(answer.question.config, first)
    if without:
        console.print(f"Row 1: {without}.\n", markup=False)
    elif estimate.host_limit is not None and estimate.host.export > estimate.host_limit:
        needs = gb(estimate.host.export)
        line = (
            f"The export at the end of row 1 needs {needs} of host memory;"
            " checkpoint.export=none leaves it out"
        )
        console.print(
            f"{line} (`drumline export` writes it later, on another machine).\n",
            markup=False,
        )


def _describe_safer(answer: Answer) -> str:
    """Return the best plan that fits with room, as a sentence that follows another."""
    found = answer.best_that_fits
    if found is None:
        return " No plan fits with more room."
    first = answer.ranked[0]
    row = 1 + answer.ranked.index(found)
    times = first.estimate.tokens_per_s / found.estimate.tokens_per_s
    text = (
        f" The best that fits with room is row {row}, {found.name}:"
        f" row 1 is {number(times)} × as fast"
    )
    if times < 1 and trust(found.layout) < trust(first.layout):
        text += f", but hardly a measured run has confirmed the speed of row {row}"
    return f"{text}."


def _host_matters(answer: Answer) -> bool:
    """Return whether another size of host memory could change the answer.

    It could if the first plan takes more than a quarter of it, or if a family is out for want of it.
    """
    limit = answer.question.cluster.host_memory_bytes
    assert limit is not None
    if answer.ranked[0].estimate.host.running > CLEARLY_LESS * limit:
        return True
    nearest = [refused.best for refused in answer.refused if refused.best is not None]
    return any(not candidate.estimate.host_fits for candidate in nearest)


def assumed_host(answer: Answer) -> str:
    """Return the host memory that the plan assumes, as a line that names the key that sets it.

    If row 1 takes much of it, the line also says how much, and in which phase of the run.
    """
    cluster = answer.question.cluster
    host_bytes = cluster.host_memory_bytes or 0
    bytes_a_device, _ = usual_host_memory(cluster.device)
    of_device = f"{bytes_a_device / GB:,.0f} GB for each {cluster.device.name}"
    assumed = f"{host_bytes / GB:,.0f} GB assumed, {of_device}"
    line = (
        f"Memory of a host: {assumed} (--devices has the source); cluster.host_memory_gb=… sets it."
    )
    if not answer.ranked or not host_bytes:
        return line
    host = answer.ranked[0].estimate.host
    if host.running <= CLEARLY_LESS * host_bytes:
        return line
    phases = {
        "while weights are loaded": host.load,
        "while it trains": host.train,
        "while it saves": host.save,
    }
    most = max(phases, key=phases.__getitem__)
    return f"{line} Row 1 takes {gb(phases[most])} of it {most}."
