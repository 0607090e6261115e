"""Any text as the name of a file or folder."""

from __future__ import annotations

import hashlib
import re

# Characters of a name; a longer one is cut and gets a hash.
MOST_NAME = 100
CUT_NAME = 90
HASH_LENGTH = 8


def as_name(text: str, whole: str = "") -> str:
    """Return a text as the name of a file.

    It gets a hash, of `whole` or else of the text, if it is no name of a file, or a long one.
    """
    name = re.sub(r"[^\w.=+,-]+", "_", text, flags=re.ASCII)
    if name == text and len(name) <= MOST_NAME:
        return name
    digest = hashlib.sha256((whole or text).encode()).hexdigest()
    return f"{name[:CUT_NAME]}-{digest[:HASH_LENGTH]}"


def name_of_strategy_folder(strategy: str) -> str:
    """Return the name of the folder of a strategy's runs: `fsdp2 tp=2` → `fsdp2-tp2`.

    A strategy of the user's own is written as the path of a file, which becomes a single name.
    """
    return as_name(strategy.replace(" ", "-").replace("=", ""))
