"""What was asked of `drumline train`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.load import Loaded


@dataclass(frozen=True)
class Request:
    """One `drumline train`: the config, how many processes there are (None: as config and machine say), and where to go on from."""

    loaded: Loaded
    world_size: int | None = None
    resume: str | None = None
    allow: tuple[str, ...] = ()
