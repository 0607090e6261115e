"""Which strategy supports which option, as text and as Markdown. The rules that a run checks fill each cell, so the two cannot differ."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from pydantic import ValidationError

from drumline.core.config import Config
from drumline.core.registry import entry_points, kinds, nearest, package_of
from drumline.core.rule import Case
from drumline.core.rules import check_rules
from drumline.core.strategy import Precision, StrategySpec
from drumline.errors import ConfigError, PlanError, UserError

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
PROCESSES = 8
WIDTH = 80  # columns of the text
NO_BREAK = "\u00a0"  # a space at which no line is broken
# That packages may add to.
GROUPS = (
    "strategies",
    "algorithms",
    "sources",
    "models",
    "rewards",
    "trackers",
    "launchers",
)


def matrix(device: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Option → strategy → (why not, what to use instead), both empty where the two go together. `device`: cpu or cuda."""
    specs = strategies()
    return {
        option: {kind: _refusal(kind, spec, values, device) for kind, spec in specs.items()}
        for option, values in FEATURES.items()
    }


def strategies() -> dict[str, type[StrategySpec]]:
    """All but those in whose place the planner takes another."""
    return {kind: spec for kind, spec in kinds(StrategySpec).items() if not spec.planned}


def _refusal(
    kind: str, spec: type[StrategySpec], values: dict[str, Any], device: str
) -> tuple[str, str]:
    keys = {
        f"offload_{value}" if key == "offload" else key
        for key, value in values.get("strategy", {}).items()
    }
    for refusal in spec.lacks:
        if refusal.name in keys:
            return refusal.reason, refusal.instead
    options = spec.example(kind, values.get("strategy", {}))
    sections = {name: section for name, section in values.items() if name != "strategy"}
    try:
        config = Config.model_validate(
            {
                "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]},
                "strategy": options,
                **sections,
            }
        )
    except ValidationError as error:
        if not keys:  # its own keys have no defaults
            raise ConfigError(
                f"no example of {kind}: {error.errors()[0]['msg']}",
                where="strategy",
                fix="override `example`",
            ) from None
        return "it has no key for this", "another strategy"
    try:
        mesh = config.strategy.mesh(1 if spec.one_process else PROCESSES)
        kind = config.precision.kind
        low: Precision = "fp32" if kind == "auto" else "bf16" if kind == "fp8" else kind
        check_rules(Case(config, mesh, "cuda" if device == "cuda" else "cpu", low, None))
    except PlanError as refusal:
        return refusal.what.partition(": ")[2] or refusal.what, refusal.fix or ""
    return "", ""


def as_text(device: str) -> str:
    """A line for each strategy with the options that it goes with, in at most 80 columns; then what packages add."""
    left = max(map(len, strategies())) + 2
    lines = ["strategy".ljust(left) + "goes with"]
    table = matrix(device)
    for kind in strategies():
        supported = [option for option, row in table.items() if not row[kind][0]]
        lines.append(_beside(kind, _listed(supported), left))
    unsupported = [
        option for option, row in table.items() if all(reason for reason, _ in row.values())
    ]
    if unsupported:
        lines.append(_beside("none of them", _listed(unsupported), left))
    lines += [
        "",
        "`drumline strategies NAME` says why it lacks an option, and what to use instead.",
    ]
    for group in GROUPS:
        offered = [f"{name} ({package_of(point)})" for name, point in entry_points(group).items()]
        if offered:
            lines.append(f"\n{group} of installed packages: {', '.join(offered)}")
    return "\n".join(lines)


def as_text_of(kind: str, device: str) -> str:
    """What one strategy goes with, and for each other option the reason and what to use instead. Raises UserError for an unknown one."""
    known = strategies()
    if kind not in known:
        guess = nearest(kind, known)
        hint = f"did you mean {guess!r}?" if guess else f"one of {', '.join(known)}"
        raise UserError(f"there is no strategy {kind!r}", where="drumline strategies", fix=hint)
    column = {option: row[kind] for option, row in matrix(device).items()}
    left = max(map(len, FEATURES)) + 2
    supported = [option for option, (reason, _) in column.items() if not reason]
    place = "GPUs" if device == "cuda" else "a CPU"
    lines = [f"{kind} on {place}", "", _beside("goes with", _listed(supported), left)]
    for option, (reason, instead) in column.items():
        if reason:
            lines += [
                "",
                _beside(option, f"no: {reason}", left),
                _beside("", f"instead: {instead}", left),
            ]
    return "\n".join(lines)


def _listed(options: list[str]) -> str:
    """Options with commas between them; none is broken at the end of a line."""
    return ", ".join(option.replace(" ", NO_BREAK) for option in options)


def _beside(name: str, text: str, left: int) -> str:
    """A name in a column of its own, and a text wrapped beside it."""
    indent = " " * left
    wrapped = fill(
        text,
        WIDTH,
        initial_indent=name.ljust(left),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(NO_BREAK, " ")


def as_markdown(device: str) -> str:
    """The same as a table, the reasons as a list."""
    rows, notes = _numbered(device)
    lines = [
        "| | " + " | ".join(f"`{kind}`" for kind in strategies()) + " |",
        "|---|" + "---|" * len(strategies()),
    ]
    lines += [f"| {feature} | " + " | ".join(marks) + " |" for feature, marks in rows.items()]
    reasons = (
        fill(f"{number}. {reason}; instead: {instead}", 118, subsequent_indent="   ")
        for (reason, instead), number in notes.items()
    )
    return "\n".join([*lines, "", *reasons])


def _numbered(device: str) -> tuple[dict[str, list[str]], dict[tuple[str, str], int]]:
    """Option → marks of the strategies (yes, or the number of the reason), and the reasons with their numbers in order of appearance."""
    notes: dict[tuple[str, str], int] = {}

    def mark(refusal: tuple[str, str]) -> str:
        return str(notes.setdefault(refusal, len(notes) + 1)) if refusal[0] else "yes"

    return {
        option: [mark(refusal) for refusal in row.values()]
        for option, row in matrix(device).items()
    }, notes
