"""Whether to start again after a rank died."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Restarts:
    """A budget that progress fills up again, and an eye for a run that fails in the same way at the same step."""

    limit: int
    left: int = -1
    reached: int = -1
    last: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.left = self.limit

    def decide(self, step: int, cause: str) -> str | None:
        """None: start again. Otherwise the reason not to. `step`: the last one that any attempt finished."""
        if step > self.reached:
            self.left, self.reached = self.limit, step
        if self.last == (step, cause):
            return f"the same failure came twice after step {step}: another start would not help"
        self.last = (step, cause)
        if self.left == 0:
            return "no restart is allowed" if self.limit == 0 else f"{self.limit} restarts without progress"
        self.left -= 1
        return None
