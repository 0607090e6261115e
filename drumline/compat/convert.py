"""`drumline convert`: another tool's config or command as a Drumline YAML, checked before it is shown."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from drumline.compat.sheet import Sheet
from drumline.compat.trl import command_in, trl_command
from drumline.core.config import Config
from drumline.core.load import Draft, drafted, has_data, read_text, validated
from drumline.core.yaml_lines import write_yaml
from drumline.errors import ConfigError

ROWS = {"train": [{"kind": "file", "path": "rows.jsonl"}]}
TOOLS = "accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl"


def convert(old: Path | list[str], new: Path | None = None) -> tuple[str, list[str]]:
    """The text of the new YAML of `old` (a file, or the words of a command), for a config at `new` (None: beside it), and a line for each
    key that has no meaning any more, which stands in the text, too. Raises ConfigError, also where the result would not load."""
    if isinstance(old, list):
        name, draft = "command", _of_command(shlex.join(old), "command", Path(), new)
    else:
        name, text = old.name, read_text(old)
        script = old.suffix not in (".yaml", ".yml", ".json")
        draft = _of_command(text, str(old), old.parent, new) if script else drafted(
            text, str(old), old.parent, folder=new.parent if new else old.parent, lenient=True
        )  # fmt: skip
    if not draft.old:
        raise ConfigError(
            f"is no config of {TOOLS}", where=str(old), fix="Drumline's own need no conversion"
        )
    given, other = has_data(draft.values), draft.values.get("data", {})
    if not given:
        draft.values["data"] = {**ROWS, **other}
    validated(draft, [])
    sections = {
        name: _short(draft.values[name])
        for name in Config.model_fields
        if name in draft.values and (given or name != "data")
    }
    comments = "".join(
        f"# {' '.join(note.replace(draft.name, name).split())}\n" for note in draft.notes
    )
    text = f"# {name}, by `drumline convert`\n{comments}{write_yaml(sections) if sections else ''}"
    if given:
        return text, draft.notes
    commented = "".join(
        f"# {line}\n" for line in write_yaml({"data": {**ROWS, **other}}).splitlines()
    )
    note = f"{draft.name}: says nothing of data: fill the `data` section in"
    return f"{text}# What to train on; `drumline schema` has all kinds of sources.\n{commented}", [
        *draft.notes,
        note,
    ]


def _of_command(text: str, name: str, base: Path, new: Path | None) -> Draft:
    """Of a command of TRL. Raises ConfigError for a text without one."""
    command = command_in(text)
    if command is None:
        fix = (
            "trl sft --model_name_or_path …; a config of another tool ends in .yaml, .yml or .json"
        )
        raise ConfigError("there is no command of TRL in it", where=name, fix=fix)
    sheet = Sheet(base, new.parent if new else base, lenient=True)
    trl_command(sheet, *command, name)
    return Draft(
        name, sheet.values, {}, sheet.set_at, notes=sheet.notes, resume=sheet.resume, old=True
    )


def _short(section: Any) -> Any:
    """`{kind: ddp}` as `ddp`, and the kind first."""
    if not isinstance(section, dict) or "kind" not in section:
        return section
    return section["kind"] if len(section) == 1 else {"kind": section["kind"], **section}
