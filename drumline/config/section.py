"""What every part of the config has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from drumline.foreign import path_mistake

# Limits of what a person may mean: more is a slip of the keyboard, and would end in an overflow, or never.
MOST_SAMPLES = 10**9  # rows, tokens, samples of a step
MOST_STEPS = 10**12
MOST_RANKS = 2**20
MOST_SECONDS = 10**7  # four months
MOST_SEED = 2**63 - 1
MOST_WEIGHT = 10**6  # of a term of a loss or reward


def _possible(path: str) -> str:
    if mistake := path_mistake(path):
        raise ValueError(mistake)
    return path


PathText = Annotated[str, AfterValidator(_possible)]  # a path, or an id of a hub


class Section(BaseModel):
    """A part of the config: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)


def kind_from_string(value: Any) -> Any:
    """`strategy: ddp` is short for `strategy: {kind: ddp}`."""
    return {"kind": value} if isinstance(value, str) else value
