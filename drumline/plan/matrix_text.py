"""The matrix of strategies in print: for a terminal, and as Markdown for the docs."""

from __future__ import annotations

from drumline.plan.matrix import FEATURES, KINDS, Cell, matrix


def as_text(device: str) -> str:
    """A row for each option, a column for each strategy; what does not go together has the number of a reason below."""
    rows, notes = _numbered(device)
    first, widths = max(map(len, FEATURES)), [max(len(kind), 3) for kind in KINDS]
    lines = [_padded("", KINDS, first, widths)]
    lines += [_padded(feature, marks, first, widths) for feature, marks in rows.items()]
    return "\n".join([*lines, "", *(f"{number:>3}  {reason}; instead: {instead}" for (reason, instead), number in notes.items())])


def as_markdown(device: str) -> str:
    """The same as a table, the reasons as a list."""
    rows, notes = _numbered(device)
    lines = ["| | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    lines += [f"| {feature} | " + " | ".join(marks) + " |" for feature, marks in rows.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}; instead: {instead}" for (reason, instead), number in notes.items())])


def _padded(name: str, marks: list[str] | tuple[str, ...], first: int, widths: list[int]) -> str:
    return (name.ljust(first) + "  " + "  ".join(mark.ljust(width) for mark, width in zip(marks, widths, strict=True))).rstrip()


def _numbered(device: str) -> tuple[dict[str, list[str]], dict[tuple[str, str], int]]:
    """Option → marks of the strategies (yes, or the number of the reason), and the reasons with their numbers in order of appearance."""
    notes: dict[tuple[str, str], int] = {}

    def mark(cell: Cell) -> str:
        return "yes" if cell.works else str(notes.setdefault((cell.reason, cell.instead), len(notes) + 1))

    return {feature: [mark(row[index]) for row in matrix(device)] for index, feature in enumerate(FEATURES)}, notes
