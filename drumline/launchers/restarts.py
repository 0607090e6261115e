"""Whether to start again after a rank died."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Addresses, sizes and counts differ between two tellings of the same failure.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)
# Python's own words for what another start runs into again: code or values that do not fit.
_CERTAIN = re.compile(r"(Type|Attribute|Name|NotImplemented|Import|ModuleNotFound|Syntax|Indentation|UnboundLocal|ZeroDivision)Error\b")


@dataclass
class Restarts:
    """A budget that progress fills up again, and an eye for a run that fails in the same way at the same step."""

    limit: int
    left: int = -1
    reached: int = -1
    last: tuple[int, int, str] | None = None

    def __post_init__(self) -> None:
        self.left = self.limit

    def decide(self, reached: int, failed_at: int, rank: int, message: str) -> str | None:
        """None: start again. Otherwise the reason not to.

        `reached`: the last step that any attempt finished. `failed_at`: the last one that this attempt finished (it may have started
        again from an earlier one), -1 if none. `message`: what `rank` died of.
        """
        if reached > self.reached:
            self.left, self.reached = self.limit, reached
        if _CERTAIN.match(message):
            return "another start would not help: it is an error of code or of values"
        this = (failed_at, rank, _NUMBER.sub("#", message))
        if self.last == this:
            when = f"after step {failed_at}" if failed_at >= 0 else "before the first step"
            return f"the same failure came twice {when}: another start would not help"
        self.last = this
        if self.left == 0:
            return "no restart is allowed" if self.limit == 0 else f"{self.limit} restarts without progress"
        self.left -= 1
        return None
