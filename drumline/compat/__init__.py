"""Configs of other tools → the same in Drumline's words.

Those of accelerate and DeepSpeed are read here, by tables that have a rule for each key. Nothing is
dropped silently: a key without a meaning gets a note. One whose effect Drumline lacks is an error,
or on a lenient sheet a note. Configs of LLaMA-Factory, Axolotl, TRL and transformers are read by
the distribution drumline-convert, with the same sheet and rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.compat.readers import reading, recognise
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
    """Return a sheet with the values of an old file under Drumline's keys; None for any other file.

    Args:
        values: the keys and values of the file.
        lines: the line of each key.
        name: names the file in messages.
        base: the folder that files are named from; the current one is the second.
        folder: the folder that new paths are relative to.
        lenient: notes in the place of errors, as the sheet's.

    Raises ConfigError with the old file's line, or if the package that reads it is not installed.
    """
    tool = recognise(values)
    if tool is None:
        return None
    read = reading(tool, name)
    sheet = Sheet(base, folder, lenient=lenient)
    read(sheet, section_keys(dict(values), Source(name, lines)))
    return sheet
