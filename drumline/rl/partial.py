"""Partial rollouts: long completions are sampled in segments, each by newer weights than the one before.

With `algorithm.partial` and `ahead: N`, a completion has up to N segments of K = ⌈max_new_tokens / N⌉
tokens each. Before rollout t is learned from, one call samples by the present weights the first segment
of rollout t + N, the second one of rollout t + N − 1, and so on to the last one of rollout t + 1. It goes
on while rollout t is learned from. So learning waits for K tokens and never for the longest completion,
and segment s of rollout r is sampled by the weights left after max(0, r − N + s) rollouts: no token is
sampled by older weights than without `partial`.

At the beginning of a run several segments of a completion are due at once. Rollout 0 is sampled whole,
and the first call has all segments of rollout r ≤ N that the initial weights sample, N − r + 1 of them.

What is sampled by which weights is a function of the step. Random numbers depend on the step of the call
and on the position of the prompt in the run, so a resumed run samples the same tokens. (Partial
rollouts: Kimi k1.5, Kimi Team 2025.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drumline.errors import ConfigError
from drumline.rl.ahead import ScheduledSampling
from drumline.rl.generate import Completion, StopRules
from drumline.rl.pending import PendingRollout


class VersionedTokens(NamedTuple):
    """Tokens of a completion that the same weights sampled, one after another."""

    # The optimizer steps after which the weights were exported; None if that is not known.
    version: int | None
    tokens: int


@dataclass(frozen=True)
class PartialCompletion(Completion):
    """What is sampled so far for a request."""

    # The versions of the weights that sampled it, from its first token to its last one.
    versions: tuple[VersionedTokens, ...]


NOTHING_SAMPLED = PartialCompletion([], [], False, ())


def segment_tokens(max_new_tokens: int, segments: int) -> int:
    """Return the most tokens that one call samples of a completion that has so many segments."""
    return math.ceil(max_new_tokens / segments)


def tokens_due(max_new_tokens: int, segments: int, rollouts_before: int) -> int:
    """Return the most tokens that a completion has once the present weights have sampled its segments.

    Args:
        max_new_tokens: The most tokens of a completion.
        segments: The most segments of a completion, which is `ahead`.
        rollouts_before: Rollouts that are learned from before this one is, the present one included.
    """
    segments_due = max(0, min(segments, segments - rollouts_before + 1))
    return min(max_new_tokens, segments_due * segment_tokens(max_new_tokens, segments))


def join_segment(
    earlier: PartialCompletion, segment: Completion, version: int | None, rules: StopRules
) -> PartialCompletion:
    """Return a completion with the next segment behind it.

    A stop text may begin in one segment and end in the next one. The completion is then cut behind the
    token that completes the text.

    Args:
        earlier: What was sampled before; it has not ended.
        segment: What was sampled behind it.
        version: Of the weights that sampled the segment, see `VersionedTokens`.
        rules: They have the stop texts.
    """
    tokens = [*earlier.tokens, *segment.tokens]
    log_probs = [*earlier.log_probs, *segment.log_probs]
    kept = len(tokens)
    ended = segment.ended
    if earlier.tokens:
        # A generator that was given the earlier tokens as a prompt has not searched them.
        for length in range(len(earlier.tokens) + 1, len(tokens) + 1):
            if length - len(earlier.tokens) > rules.tail:
                break
            if rules.is_met(tokens[max(0, length - rules.tail) : length]):
                kept = length
                ended = True
                break
    versions = list(earlier.versions)
    new_tokens = kept - len(earlier.tokens)
    if versions and versions[-1].version == version:
        new_tokens += versions.pop().tokens
    versions.append(VersionedTokens(version, new_tokens))
    return PartialCompletion(tokens[:kept], log_probs[:kept], ended, tuple(versions))


class PartialRollout(PendingRollout):
    """A rollout whose completions are sampled in segments.

    Attributes:
        keys: Of the random numbers of each completion, see `Request.key`.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        keys: list[tuple[int, ...]],
        so_far: Sequence[PartialCompletion] | None = None,
        sampler_gap: float | None = None,
        row_ids: Sequence[int] = (),
    ) -> None:
        """Store the prompts, and what is sampled so far; None: nothing.

        The other arguments are those of PendingRollout. `sampler_gap` is the largest of all calls.
        """
        super().__init__(prompt_ids, self._sampled_so_far, sampler_gap, row_ids)
        self.keys = keys
        if so_far is None:
            so_far = [NOTHING_SAMPLED] * len(prompt_ids)
        self._so_far: list[PartialCompletion] = list(so_far)
        # The call that samples the next segment of its completions; None if none is under way.
        self._call: SegmentCall | None = None

    @property
    def completions(self) -> list[Completion]:
        """What is sampled so far for each of `prompt_ids`. Waits for the call under way. Collective."""
        return self._sampled_so_far()

    def _sampled_so_far(self) -> list[Completion]:
        """Wait for the call under way, and return what is sampled so far. Collective."""
        self.finish_call()
        return list(self._so_far)

    def finish_call(self) -> None:
        """Wait for the call under way, if there is one. Collective."""
        if self._call is not None:
            self._call.finish()

    def unfinished(self, due: int) -> list[int]:
        """Return the indices of the completions that have not ended and have fewer tokens than `due`."""
        indices = []
        for index, completion in enumerate(self._so_far):
            if not completion.ended and completion.length < due:
                indices.append(index)
        return indices

    def tokens_so_far(self, index: int) -> list[int]:
        """Return the tokens that are sampled so far of a completion."""
        return self._so_far[index].tokens

    def await_call(self, call: SegmentCall) -> None:
        """Note the call that samples the next segment of its completions."""
        self._call = call

    def add_segment(self, index: int, segment: Completion, call: SegmentCall) -> None:
        """Add a segment that a call has sampled, and note the gap of its weights."""
        self._call = None
        known = [self._sampler_gap, call.scheduled.sampler_gap]
        self._sampler_gap = max((gap for gap in known if gap is not None), default=None)
        self._so_far[index] = join_segment(self._so_far[index], segment, call.version, call.rules)

    def state(self) -> dict[str, Any]:
        """Wait for the call under way, and return the rollout as a checkpoint holds it. Collective."""
        state = super().state()
        versions = []
        for completion in self._so_far:
            versions.append([list(part) for part in completion.versions])
        return {**state, "keys": [list(key) for key in self.keys], "versions": versions}

    @classmethod
    def from_segments(cls, state: Mapping[str, Any]) -> PartialRollout:
        """Return the rollout whose method `state` returned this."""
        so_far = []
        for fields, versions in zip(state["completions"], state["versions"], strict=True):
            parts = tuple(VersionedTokens(*part) for part in versions)
            tokens, log_probs, ended = fields
            so_far.append(PartialCompletion(tokens, log_probs, ended, parts))
        keys = [tuple(key) for key in state["keys"]]
        return cls(state["ids"], keys, so_far, state["sampler_gap"], state["row_ids"])


class SegmentCall:
    """A call that samples the next segments of several rollouts by the same weights."""

    def __init__(
        self,
        scheduled: ScheduledSampling,
        targets: list[tuple[PartialRollout, int]],
        version: int | None,
        rules: StopRules,
    ) -> None:
        """Store what is sampled.

        Args:
            scheduled: The handle to the segments.
            targets: For each segment, its rollout and the index of its completion there.
            version: Of the weights, see `VersionedTokens`.
            rules: They have the stop texts.
        """
        self.scheduled = scheduled
        self.targets = targets
        self.version = version
        self.rules = rules

    def finish(self) -> None:
        """Wait for the segments, and add them to their completions. Collective, and called once."""
        segments = self.scheduled.finish()
        for (rollout, index), segment in zip(self.targets, segments, strict=True):
            rollout.add_segment(index, segment, self)


def load_rollout(
    state: Mapping[str, Any], default_version: int, samples_segments: bool
) -> PendingRollout:
    """Return the pending rollout of a checkpoint.

    Args:
        state: What `PendingRollout.state` or `PartialRollout.state` returned.
        default_version: The version of its weights if `state` does not have it.
        samples_segments: Whether the run samples completions in segments.

    Raises ConfigError if it has partial completions that the run would not continue.
    """
    if "versions" not in state:
        return PendingRollout.from_state(state, default_version)
    if not samples_segments:
        raise ConfigError(
            "the checkpoint has completions that are sampled in part",
            where="algorithm.partial",
            fix="set it to true, as it was when the checkpoint was saved",
        )
    return PartialRollout.from_segments(state)
