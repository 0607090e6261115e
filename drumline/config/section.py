"""What every part of the config has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)


def kind_from_string(value: Any) -> Any:
    """`strategy: ddp` is short for `strategy: {kind: ddp}`."""
    return {"kind": value} if isinstance(value, str) else value
