"""Fill in the defaults of another tool for keys that an old file leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drumline.compat.sheet import OldKey, Sheet, format_value

# Defaults by `section.key` of the new config: the value, and the key's name in the old file.
Defaults = dict[str, tuple[Any, str]]


def fill_defaults(sheet: Sheet, old: OldKey, defaults: Defaults, whose: str) -> None:
    """Set a tool's own defaults where the old file sets nothing, with one note for all.

    `old` is any key of the file. `whose` names the tool in the note.
    """
    filled = []
    for dotted, (value, name) in defaults.items():
        if not _needs_default(sheet, dotted):
            continue
        sheet.put(dotted, value, replace(old, key=name, value=value, place=(name,)))
        text = format_value(value)
        if isinstance(value, list):
            text = str(value)
        filled.append(f"{dotted} {text}")
    if filled:
        sheet.notes.append(
            f"{old.source.name}: not set there, so {whose} own defaults: {', '.join(filled)}"
        )


def _needs_default(sheet: Sheet, dotted: str) -> bool:
    """Return True if a tool's default for `section.key` counts for this sheet."""
    if sheet.get(dotted) is not None:
        return False
    section = dotted.partition(".")[0]
    if dotted == "run.epochs":
        return not sheet.get("run.steps")
    if section == "batch":
        return not sheet.get("batch.global_samples")
    if section == "adapter":
        return section in sheet.values
    return True
