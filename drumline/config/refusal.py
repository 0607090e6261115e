"""A refusal of one combination of options, and the error that a user sees for it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.errors import PlanError


@dataclass(frozen=True)
class Refusal:
    """Why one combination is refused. `name` is how an error line calls it: `first × second`."""

    name: str
    reason: str
    instead: str
    where: str = "strategy"

    def error(self, reason: str = "") -> PlanError:
        """`reason`: in the place of its own, where only a run shows it. `train.setup` tries a small copy of the model before any
        rank starts; a rank raises it where several ranks or a GPU are needed."""
        return PlanError(
            f"{self.name}: {reason or self.reason}", where=self.where, fix=self.instead
        )


def no_option(options: str, reason: str, instead: str) -> tuple[Refusal, ...]:
    """Options that cannot go with a strategy, so it has no key for them. offload_cpu and offload_nvme stand for `offload` by its value."""
    return tuple(
        Refusal(option, reason, instead, f"strategy.{option}") for option in options.split()
    )
