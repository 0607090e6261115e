"""What preparation did not take as it stands, in words."""

from __future__ import annotations

from typing import Any


def left_out(name: str, info: dict[str, Any]) -> list[str]:
    """One line, or none: how many rows of a pass over sources were cut, dropped or skipped. `info`: of a token cache of that pass."""
    read = f"of {info['rows_read']:,} rows"
    parts = []
    if info["truncated"]:
        parts.append(f"{info['truncated']:,} {read} cut at {info['limit']:,} tokens")
    if info["dropped_too_long"]:
        parts.append(f"{info['dropped_too_long']:,} {read} dropped: longer than {info['limit']:,} tokens")
    if info["dropped_unlearned"]:
        parts.append(f"{info['dropped_unlearned']:,} {read} skipped: nothing to learn")
    return [f"data.{name}: {'; '.join(parts)}"] if parts else []
