"""Make a Drumline YAML of another tool's config or command, and check that it loads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from drumline.compat.sheet import Sheet
from drumline.config.config import Config
from drumline.config.load import Draft, has_data, make_draft, read_text, validate_draft
from drumline.errors import ConfigError
from drumline.system.yaml_lines import write_yaml
from drumline_convert.trl import command_in, trl_command

ROWS = {"train": [{"kind": "file", "path": "rows.jsonl"}]}
TOOLS = "accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl"


def convert(old: Path | list[str], new: Path | None = None) -> tuple[str, list[str]]:
    """Return the text of a Drumline YAML for another tool's config or command, and its notes.

    The text has the notes as comments: a line for each key that has no meaning any more.

    Args:
        old: A file, or the words of a command.
        new: Path of the new config, to which its paths are relative; None puts it beside `old`.

    Raises:
        ConfigError: A key of `old` is refused, or the new config would not load.
    """
    if isinstance(old, list):
        name = "command"
        draft = _draft_of_command(shlex.join(old), "command", Path(), new)
    else:
        name = old.name
        draft = _draft_of_file(old, new)
    if not draft.is_translated:
        raise ConfigError(
            f"is no config of {TOOLS}", where=str(old), fix="Drumline's own need no conversion"
        )
    names_data = has_data(draft.values)
    data = draft.values.get("data", {})
    if not names_data:
        data = {**ROWS, **data}
        draft.values["data"] = data
    validate_draft(draft, [])
    text = f"# {name}, by `drumline convert`\n" + _comments(draft, name)
    text += _sections(draft, with_data=names_data)
    notes = draft.notes
    if not names_data:
        text += "# What to train on; `drumline schema` has all kinds of sources.\n"
        for line in write_yaml({"data": data}).splitlines():
            text += f"# {line}\n"
        notes = [*notes, f"{draft.name}: says nothing of data: fill the `data` section in"]
    return text, notes


def _draft_of_file(old: Path, new: Path | None) -> Draft:
    """Return the draft of a config in YAML or JSON, or of a script with a command of TRL."""
    text = read_text(old)
    if old.suffix not in (".yaml", ".yml", ".json"):
        return _draft_of_command(text, str(old), old.parent, new)
    folder = new.parent if new else old.parent
    return make_draft(text, str(old), old.parent, folder=folder, lenient=True)


def _draft_of_command(text: str, name: str, base: Path, new: Path | None) -> Draft:
    """Return the draft of a command of TRL. Raises ConfigError for a text without one."""
    command = command_in(text)
    if command is None:
        fix = (
            "trl sft --model_name_or_path …; a config of another tool ends in .yaml, .yml or .json"
        )
        raise ConfigError("there is no command of TRL in it", where=name, fix=fix)
    sheet = Sheet(base, new.parent if new else base, lenient=True)
    trl_command(sheet, command, name)
    return Draft(
        name,
        sheet.values,
        {},
        sheet.set_at,
        notes=sheet.notes,
        resume=sheet.resume,
        is_translated=True,
    )


def _comments(draft: Draft, name: str) -> str:
    """Return the notes of a draft as lines of comments, with the short name of the old file."""
    lines = ""
    for note in draft.notes:
        tokens = note.replace(draft.name, name).split()
        lines += f"# {' '.join(tokens)}\n"
    return lines


def _sections(draft: Draft, with_data: bool) -> str:
    """Return the sections of a draft as YAML, in the order of the config."""
    sections = {}
    for name in Config.model_fields:
        if name in draft.values and (with_data or name != "data"):
            sections[name] = _shorten(draft.values[name])
    if not sections:
        return ""
    return write_yaml(sections)


def _shorten(section: Any) -> Any:
    """Return `{kind: ddp}` as `ddp`, and any other section with its kind first."""
    if not isinstance(section, dict) or "kind" not in section:
        return section
    if len(section) == 1:
        return section["kind"]
    return {"kind": section["kind"], **section}
