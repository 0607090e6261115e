"""A model's own files, looked at before transformers reads them: nothing in their folder that never ends, no config that never ends."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

from drumline.errors import ModelError
from drumline.foreign import first_line, read_object

# JSON that transformers reads whole. Of the tokenizer's own (tokenizer.json, vocab.json) its Rust library is the judge.
READ = ("*config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "*.index.json")
# Keys that say how many parts are built one by one, or named.
COUNTS = re.compile(r"(^|_)(layers?|depths?|blocks?|stages?|experts?|labels|codebooks|towers?|groups)(_|$)")
MOST_PARTS = 10_000


def check_folder(folder: Path) -> None:
    """Raises ModelError that names the file, for a pipe or device, JSON that is none, and counts that nothing can be built of. What is no
    local folder is passed over."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        modes = {entry: entry.stat().st_mode for entry in entries if entry.exists()}
    except OSError as error:
        raise ModelError(f"cannot be read: {first_line(error)}", where=str(folder)) from None
    for entry, mode in modes.items():
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ModelError("it is a device, pipe or socket, a file is wanted", where=str(entry), fix="take it out of the model's folder")
        if any(entry.match(pattern) for pattern in READ):
            said = read_object(
                entry, ModelError, "it is one JSON object, as save_pretrained writes it", numbers=entry.name == "config.json"
            )
            if entry.name == "config.json":
                check_counts(said, str(entry))


def check_counts(values: Any, where: str) -> None:
    """Raises ModelError for a count of parts beyond all models: building them would not come to an end."""
    left = [("", values)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(str(name), inside) for name, inside in value.items()]
        elif isinstance(value, list):
            left += [(key, inside) for inside in value]
        elif isinstance(value, int | float) and COUNTS.search(key) and value > MOST_PARTS:
            raise ModelError(f"{key} is {value:g}: no model has more than {MOST_PARTS}", where=where, fix="write the number that is meant")
