"""Translate configs of other tools into Drumline's config.

A `Sheet` is the new config while it is made. For each key of the old file a rule writes on the
sheet what the key means here. No key is dropped silently: a key without a meaning here gets a note,
and a key whose effect Drumline lacks is an error, or on a lenient sheet a note.

Configs of accelerate and DeepSpeed are read here. Those of LLaMA-Factory, Axolotl, TRL and
transformers are read by the distribution drumline-convert, with the same sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.compat.readers import find_reader, recognise
from drumline.compat.sheet import Sheet, Source, section_keys
from drumline.system.yaml_lines import Place


def translate(
    values: Mapping[Any, Any],
    lines: Mapping[Place, int],
    name: str,
    base: Path,
    folder: Path,
    lenient: bool,
) -> Sheet | None:
    """Return the sheet for a config of another tool; None for Drumline's own, and for any other file.

    Args:
        values: Keys and values of the file.
        lines: Position of each key → its line.
        name: Name of the file in messages.
        base: Folder that paths in the file are relative to; the current folder is tried second.
        folder: Folder that paths in the new config are relative to.
        lenient: Whether a key whose effect Drumline lacks gets a note in place of an error.

    Raises:
        ConfigError: A key is refused (with the old file's line), or the package that reads the file
            is not installed.
    """
    tool = recognise(values)
    if tool is None:
        return None
    read = find_reader(tool, name)
    sheet = Sheet(base, folder, lenient=lenient)
    read(sheet, section_keys(dict(values), Source(name, lines)))
    return sheet
