"""Write the reference pages: `python -m scripts.reference`. With `--check` say which are stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from scripts.reference.commands import commands_page
from scripts.reference.distributions import missing_distribution
from scripts.reference.events import events_page, exit_codes_page
from scripts.reference.keys import keys_page
from scripts.reference.python import python_page

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "keys.md": keys_page,
    "commands.md": commands_page,
    "events.md": events_page,
    "exit_codes.md": exit_codes_page,
    "python_functions.md": python_page,
}


def stale_pages() -> dict[str, str]:
    """Return the pages that are not what the code says now: their names and new texts."""
    stale = {}
    for name, make_page in PAGES.items():
        path = DOCS / name
        text = make_page()
        if not path.exists() or path.read_text() != text:
            stale[name] = text
    return stale


def main() -> int:
    """Write the stale pages, or with `--check` only name them. Return the exit code."""
    missing = missing_distribution()
    if missing is not None:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/reference/{name} is stale: run `python -m scripts.reference`")
        return 1 if stale else 0
    for name, text in stale.items():
        (DOCS / name).write_text(text)
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
