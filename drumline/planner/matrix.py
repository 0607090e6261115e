"""The matrix of strategies and options, as text and as Markdown.

Each cell is filled by the rules that a run checks, so the matrix and a run cannot differ.
"""

from __future__ import annotations

from textwrap import fill
from typing import Any, NamedTuple

from pydantic import ValidationError

from drumline.config.config import Config
from drumline.config.registry import entry_points, kinds, nearest, package_of
from drumline.config.strategy import Precision, StrategyConfig
from drumline.errors import ConfigError, PlanError, UserError
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules

# The options of the table, each as sections of a config.
FEATURES: dict[str, dict[str, Any]] = {
    "tp": {"strategy": {"tp": 2}},
    "cp": {"strategy": {"cp": 2}},
    "pp": {"strategy": {"pp": 2}},
    "sequence parallel": {"strategy": {"tp": 2, "sequence_parallel": True}},
    "ep": {"strategy": {"ep": 2}},
    "sharded optimizer": {"strategy": {"shard_optimizer": True}},
    "tp × cp": {"strategy": {"tp": 2, "cp": 2}},
    "tp × pp": {"strategy": {"tp": 2, "pp": 2}},
    "cp × pp": {"strategy": {"cp": 2, "pp": 2}},
    "ep × tp": {"strategy": {"ep": 2, "tp": 2}},
    "ep × cp": {"strategy": {"ep": 2, "cp": 2}},
    "hybrid": {"strategy": {"replicate": 2}},
    "compression": {"strategy": {"compression": {"kind": "bf16"}}},
    "CPU offload": {"strategy": {"offload": "cpu"}},
    "NVMe offload": {"strategy": {"offload": "nvme"}},
    "LoRA": {"adapter": {"kind": "lora"}},
    "QLoRA": {"adapter": {"kind": "lora", "quantize": "4bit"}},
    "SyncBatchNorm": {"model": {"sync_batchnorm": True}},
    "checkpointing": {"memory": {"activation_checkpointing": "full"}},
    "selective": {"memory": {"activation_checkpointing": "selective"}},
    "compile": {"compile": {"enabled": True}},
    "bf16": {"precision": {"kind": "bf16"}},
    "fp16": {"precision": {"kind": "fp16"}},
}
# Ranks of the run for which rules are asked: enough for each option of the table.
PROCESSES = 8
# Columns of the text.
WIDTH = 80
# Columns of the reasons in Markdown.
MARKDOWN_WIDTH = 118
# A space at which no line is broken.
NO_BREAK = "\u00a0"
# Groups of entry points that packages may add to.
GROUPS = (
    "strategies",
    "algorithms",
    "sources",
    "models",
    "rewards",
    "environments",
    "trackers",
    "launchers",
)


class Cell(NamedTuple):
    """Why a strategy does not support an option and what to use instead.

    Both texts are empty if the strategy supports the option.
    """

    reason: str = ""
    instead: str = ""


# The cells by option, then by strategy.
Matrix = dict[str, dict[str, Cell]]


def matrix(device: str) -> Matrix:
    """Return the cells of the matrix for a device, `cpu` or `cuda`."""
    specs = strategies()
    table: Matrix = {}
    for option, sections in FEATURES.items():
        row = {}
        for kind, spec in specs.items():
            row[kind] = _cell(kind, spec, sections, device)
        table[option] = row
    return table


def strategies() -> dict[str, type[StrategyConfig]]:
    """Return the strategies by kind, except placeholders that the planner replaces, as `auto`."""
    return {kind: spec for kind, spec in kinds(StrategyConfig).items() if not spec.planned}


def _cell(kind: str, spec: type[StrategyConfig], sections: dict[str, Any], device: str) -> Cell:
    """Return whether a strategy supports an option, given as sections of a config."""
    strategy_keys = sections.get("strategy", {})
    names = set()
    for key, value in strategy_keys.items():
        if key == "offload":
            names.add(f"offload_{value}")
        else:
            names.add(key)
    for refusal in spec.lacks:
        if refusal.name in names:
            return Cell(refusal.reason, refusal.instead)
    values = {
        "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]},
        **sections,
        "strategy": spec.example(kind, strategy_keys),
    }
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        if strategy_keys:
            return Cell("it has no key for this", "another strategy")
        # The example alone is refused: the strategy's own keys have no defaults.
        raise ConfigError(
            f"no example of {kind}: {error.errors()[0]['msg']}",
            where="strategy",
            fix="override `example`",
        ) from None
    try:
        check_rules(_case(config, spec, device))
    except PlanError as error:
        # The message begins with the name of the strategy, which the table has as a column.
        _, _, reason = error.what.partition(": ")
        return Cell(reason or error.what, error.fix or "")
    return Cell()


def _case(config: Config, spec: type[StrategyConfig], device: str) -> Case:
    """Return the run of a config, of a model that is not known, for which the rules are asked."""
    if spec.one_process:
        mesh = config.strategy.mesh(1)
    else:
        mesh = config.strategy.mesh(PROCESSES)
    kind = config.precision.kind
    precision: Precision
    if kind == "auto":
        precision = "fp32"
    elif kind == "fp8":
        precision = "bf16"
    else:
        precision = kind
    if device == "cuda":
        return Case(config, mesh, "cuda", precision, None)
    return Case(config, mesh, "cpu", precision, None)


def as_text(device: str) -> str:
    """Return a line for each strategy with the options that it supports, then what packages add.

    Lines have at most 80 columns.
    """
    left = max(map(len, strategies())) + 2
    lines = ["strategy".ljust(left) + "goes with"]
    table = matrix(device)
    for kind in strategies():
        supported = []
        for option, row in table.items():
            if not row[kind].reason:
                supported.append(option)
        lines.append(_wrap_beside_name(kind, _join_options(supported), left))
    unsupported = []
    for option, row in table.items():
        if all(cell.reason for cell in row.values()):
            unsupported.append(option)
    if unsupported:
        lines.append(_wrap_beside_name("none of them", _join_options(unsupported), left))
    lines.append("")
    lines.append("`drumline strategies NAME` says why it lacks an option, and what to use instead.")
    for group in GROUPS:
        offered = []
        for name, point in entry_points(group).items():
            offered.append(f"{name} ({package_of(point)})")
        if offered:
            line = f"{group} of installed packages: {', '.join(offered)}"
            lines.append("\n" + fill(line, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def as_text_of(kind: str, device: str) -> str:
    """Return the options that a strategy supports, and for each other one why, and what to use.

    Raises UserError for an unknown strategy.
    """
    known = strategies()
    if kind not in known:
        guess = nearest(kind, known)
        if guess:
            hint = f"did you mean {guess!r}?"
        else:
            hint = f"one of {', '.join(known)}"
        raise UserError(f"there is no strategy {kind!r}", where="drumline strategies", fix=hint)
    column = {option: row[kind] for option, row in matrix(device).items()}
    left = max(map(len, FEATURES)) + 2
    supported = [option for option, cell in column.items() if not cell.reason]
    if device == "cuda":
        heading = f"{kind} on GPUs"
    else:
        heading = f"{kind} on a CPU"
    lines = [heading, "", _wrap_beside_name("goes with", _join_options(supported), left)]
    for option, cell in column.items():
        if cell.reason:
            lines.append("")
            lines.append(_wrap_beside_name(option, f"no: {cell.reason}", left))
            lines.append(_wrap_beside_name("", f"instead: {cell.instead}", left))
    return "\n".join(lines)


def _join_options(options: list[str]) -> str:
    """Return options with commas between them. No option is broken at the end of a line."""
    return ", ".join(option.replace(" ", NO_BREAK) for option in options)


def _wrap_beside_name(name: str, text: str, left: int) -> str:
    """Return a name in a column of `left` characters, and a text wrapped beside it."""
    wrapped = fill(
        text,
        WIDTH,
        initial_indent=name.ljust(left),
        subsequent_indent=" " * left,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(NO_BREAK, " ")


def as_markdown(device: str) -> str:
    """Return the matrix as a table in Markdown, and the reasons as a numbered list below it."""
    heads = [f"`{kind}`" for kind in strategies()]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    # The number of each reason, in order of appearance.
    numbers: dict[Cell, int] = {}
    for option, row in matrix(device).items():
        marks = []
        for cell in row.values():
            if cell.reason:
                number = numbers.setdefault(cell, len(numbers) + 1)
                marks.append(str(number))
            else:
                marks.append("yes")
        lines.append(f"| {option} | " + " | ".join(marks) + " |")
    lines.append("")
    for cell, number in numbers.items():
        text = f"{number}. {cell.reason}; instead: {cell.instead}"
        lines.append(fill(text, MARKDOWN_WIDTH, subsequent_indent="   "))
    return "\n".join(lines)
