"""`drumline convert`: another tool's config as a Drumline YAML, checked before it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.load import drafted, has_data, read_text, validated
from drumline.core.yaml_lines import write_yaml
from drumline.errors import ConfigError

ROWS = {"train": [{"kind": "file", "path": "rows.jsonl"}]}


def convert(old: Path, new: Path | None = None) -> tuple[str, list[str]]:
    """The text of the new YAML of `old`, for a config at `new` (None: beside it), and a line for each key that has no meaning any more.
    Raises ConfigError, also where the result would not load."""
    draft = drafted(read_text(old), str(old), old.parent, folder=new.parent if new else old.parent)
    if not draft.old:
        raise ConfigError("is no config of accelerate, DeepSpeed or transformers", where=str(old), fix="Drumline's own need no conversion")
    given, other = has_data(draft.values), draft.values.get("data", {})
    if not given:
        draft.values["data"] = {**ROWS, **other}
    validated(draft, [])
    sections = {name: _short(draft.values[name]) for name in Config.model_fields if name in draft.values and (given or name != "data")}
    text = f"# {old.name}, by `drumline convert`\n{write_yaml(sections) if sections else ''}"
    if given:
        return text, draft.notes
    commented = "".join(f"# {line}\n" for line in write_yaml({"data": {**ROWS, **other}}).splitlines())
    note = f"{old}: says nothing of data: fill the `data` section in"
    return f"{text}# What to train on; `drumline schema` has all kinds of sources.\n{commented}", [*draft.notes, note]


def _short(section: Any) -> Any:
    """`{kind: ddp}` as `ddp`, and the kind first."""
    if not isinstance(section, dict) or "kind" not in section:
        return section
    return section["kind"] if len(section) == 1 else {"kind": section["kind"], **section}
