"""What every part of a plan has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A part of a plan: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)
