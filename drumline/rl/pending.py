"""Rollouts that are drawn and not learned from yet, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from drumline.rl.ahead import ScheduledSampling
from drumline.rl.conversations import Conversation
from drumline.rl.generate import Completion


class PendingRollout:
    """The prompts of a rollout whose completions may not be sampled yet."""

    def __init__(
        self,
        prompt_ids: list[int],
        complete: Callable[[], list[Completion]],
        sampler_gap: float | None = None,
        row_ids: Sequence[int] = (),
        version: int | None = None,
        scheduled: ScheduledSampling | None = None,
    ) -> None:
        """Store the prompts, and the function that waits for their completions.

        Args:
            prompt_ids: The prompts' numbers in the cache, each as often as it is completed.
            complete: Waits for the completions and returns them; called once, on the first access.
            sampler_gap: SamplerCheck.gap when sampling ahead began, of a rollout that a checkpoint holds.
            row_ids: Numbers in the cache of prompts that are learned with the completion in their row.
            version: The optimizer steps after which the weights were exported that sample it; None if
                that is not known, as a server keeps its own weights.
            scheduled: The handle to the completions if they are sampled ahead; it has the gap.
        """
        self.prompt_ids = prompt_ids
        self.row_ids = list(row_ids)
        self._complete = complete
        self._completions: list[Completion] | None = None
        self._sampler_gap = sampler_gap
        self._scheduled = scheduled
        self.version = version

    @property
    def sampler_gap(self) -> float | None:
        """`SamplerCheck.gap` when sampling ahead began.

        None if nothing is sampled ahead, if it has not begun yet, or if the sampler was not free, so that
        its weights were set aside and not checked.
        """
        if self._scheduled is not None:
            return self._scheduled.sampler_gap
        return self._sampler_gap

    @property
    def completions(self) -> list[Completion]:
        """The completions, one for each of `prompt_ids`. The first access is collective."""
        if self._completions is None:
            self._completions = self._complete()
        return self._completions

    def state(self) -> dict[str, Any]:
        """Wait for the completions, and return them and the prompts as a checkpoint holds them."""
        return {
            "ids": self.prompt_ids,
            "completions": [_state_of(completion) for completion in self.completions],
            "sampler_gap": self.sampler_gap,
            "row_ids": self.row_ids,
            "version": self.version,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], default_version: int) -> PendingRollout:
        """Return the rollout whose method `state` returned this.

        `default_version`: the version of its weights if `state` does not have it.
        """

        def complete() -> list[Completion]:
            return [_load_completion(fields) for fields in state["completions"]]

        # Older checkpoints lack the last three keys.
        return cls(
            state["ids"],
            complete,
            state.get("sampler_gap"),
            state.get("row_ids", ()),
            state.get("version", default_version),
        )


def _state_of(completion: Completion) -> Any:
    """Return a completion as a checkpoint holds it: all fields of an episode of turns, else a list."""
    if isinstance(completion, Conversation):
        return asdict(completion)
    return [completion.tokens, completion.log_probs, completion.ended]


def _load_completion(state: Any) -> Completion:
    """Return the completion of which `_state_of` made this."""
    if isinstance(state, Mapping):
        return Conversation.from_state(state)
    return Completion(*state)
