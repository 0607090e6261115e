"""Refuse a combination of options, with the error that a user sees. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.errors import PlanError

# Options of `no_option` that stand for the values cpu and nvme of the key `offload`.
VALUES_OF_OFFLOAD = ("offload_cpu", "offload_nvme")


@dataclass(frozen=True)
class Refusal:
    """Why a combination of options is refused.

    Attributes:
        name: The combination as an error line names it: `first × second`. For an option that a
            strategy has no key for, it is the option (see `no_option`).
        reason: Why it is refused.
        instead: What to use in its place.
        where: Key of the YAML that the error names.
    """

    name: str
    reason: str
    instead: str
    where: str = "strategy"

    def error(self, reason: str = "") -> PlanError:
        """Return the error of this refusal.

        Args:
            reason: Replaces the refusal's own reason, if only a run can tell it. `train.setup`
                tries a small copy of the model before any rank starts, and a rank raises the error
                if several ranks or a GPU are needed to tell.
        """
        return PlanError(
            f"{self.name}: {reason or self.reason}", where=self.where, fix=self.instead
        )


def no_option(options: str, reason: str, instead: str) -> tuple[Refusal, ...]:
    """Return a refusal of each option that a strategy has no key for, because it cannot have it.

    Args:
        options: Keys of `strategy`, or values of its key `offload` (VALUES_OF_OFFLOAD), with
            spaces between them.
        reason: Why the strategy cannot have them.
        instead: What to use in their place.
    """
    refusals = []
    for option in options.split():
        key = option
        if option in VALUES_OF_OFFLOAD:
            key = "offload"
        refusals.append(Refusal(option, reason, instead, f"strategy.{key}"))
    return tuple(refusals)
