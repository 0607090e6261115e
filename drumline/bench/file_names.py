"""Turn a text, such as a strategy or the values of a sweep, into the name of a file or folder."""

from __future__ import annotations

import hashlib
import re

# The most characters of a name. Of a longer text the first CUT_NAME are kept, and a hash follows.
MOST_NAME = 100
CUT_NAME = 90
HASH_LENGTH = 8


def as_name(text: str, whole: str = "") -> str:
    """Return the name of a file or folder that stands for a text.

    The text itself is the name if it has at most MOST_NAME characters and none that a name may not
    have. Otherwise such characters become `_`, and a hash is added, so that two texts never get the
    same name.

    Args:
        text: What the name shows.
        whole: What is hashed, if the text is only a part of it; empty for the text.
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
