"""Partial rollouts: what is due when, how segments are joined, and what a checkpoint holds of them."""

from __future__ import annotations

import json
import math

import pytest

from drumline.errors import ConfigError
from drumline.rl.ahead import ScheduledSampling
from drumline.rl.generate import Completion, StopRules
from drumline.rl.partial import (
    NOTHING_SAMPLED,
    PartialCompletion,
    PartialRollout,
    SegmentCall,
    VersionedTokens,
    join_segment,
    load_rollout,
    segment_tokens,
    tokens_due,
)
from drumline.rl.pending import PendingRollout
from tests.tiny import tiny_tokenizer
from tests.unit.test_rollout_config import algorithm

NO_STOP = StopRules(frozenset(), (), None)


class Sampled(ScheduledSampling):
    """A sampling whose completions are there, which counts how often it is asked for them."""

    def __init__(self, completions: list[Completion], gap: float | None = None) -> None:
        super().__init__(lambda: None)
        self.sampler_gap = gap
        self.sampled = completions
        self.times = 0

    def finish(self) -> list[Completion]:
        self.times += 1
        return self.sampled


@pytest.mark.parametrize(
    ("tokens", "ahead"), [(7, 3), (6, 2), (1, 2), (3, 8), (64, 8), (65, 8), (100, 7)]
)
def test_a_segment_is_due_in_each_call_until_the_completion_is_whole(
    tokens: int, ahead: int
) -> None:
    most = segment_tokens(tokens, ahead)
    assert most == math.ceil(tokens / ahead)

    sampled = 0
    for rollouts_before in range(ahead, 0, -1):
        due = tokens_due(tokens, ahead, rollouts_before)
        assert sampled <= due <= sampled + most
        sampled = due

    assert sampled == tokens
    # It is not drawn yet, or was to be learned from before.
    assert tokens_due(tokens, ahead, ahead + 1) == 0
    assert tokens_due(tokens, ahead, ahead + 5) == 0
    assert tokens_due(tokens, ahead, 0) == tokens


def test_segments_are_joined_with_the_versions_of_their_weights() -> None:
    first = join_segment(NOTHING_SAMPLED, Completion([5, 6], [-0.5, -0.25], False), 2, NO_STOP)
    assert first == PartialCompletion([5, 6], [-0.5, -0.25], False, (VersionedTokens(2, 2),))

    second = join_segment(first, Completion([7], [-1.0], True), 4, NO_STOP)
    parts = (VersionedTokens(2, 2), VersionedTokens(4, 1))
    assert second == PartialCompletion([5, 6, 7], [-0.5, -0.25, -1.0], True, parts)

    # A server that keeps its own weights samples all of it by the same ones.
    own = join_segment(NOTHING_SAMPLED, Completion([5, 6], [0.0, 0.0], False), None, NO_STOP)
    own = join_segment(own, Completion([7], [0.0], False), None, NO_STOP)
    assert own.versions == (VersionedTokens(None, 3),)


def test_a_stop_text_across_a_border_ends_the_completion_behind_it() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("keep in step with the drum: one, two", add_special_tokens=False)
    log_probs = [-float(index) for index in range(len(tokens))]
    # The text that three tokens in the middle have.
    stop = tokenizer.decode(tokens[3:6])
    rules = StopRules(frozenset(), (stop,), tokenizer)
    assert not rules.is_met(tokens[:5])
    for border in (4, 5):
        earlier = PartialCompletion(
            tokens[:border], log_probs[:border], False, (VersionedTokens(0, border),)
        )
        segment = Completion(tokens[border:], log_probs[border:], False)
        joined = join_segment(earlier, segment, 2, rules)

        assert joined.tokens == tokens[:6]
        assert joined.log_probs == log_probs[:6]
        assert joined.ended
        assert joined.versions == (VersionedTokens(0, border), VersionedTokens(2, 6 - border))

    # It is not there.
    other = StopRules(frozenset(), ("snare",), tokenizer)
    joined = join_segment(earlier, segment, 2, other)
    assert joined.tokens == tokens
    assert not joined.ended


def test_a_call_adds_its_segments_to_all_its_rollouts_once() -> None:
    near = PartialRollout([4, 4], [(0, 0), (0, 1)])
    far = PartialRollout([8, 8], [(1, 0), (1, 1)])
    assert near.unfinished(2) == [0, 1]
    assert near.unfinished(0) == []

    sampled = Sampled(
        [
            Completion([1, 2], [-0.1, -0.2], False),
            Completion([3], [-0.3], True),
            Completion([5, 6], [-0.5, -0.6], False),
        ],
        0.25,
    )
    call = SegmentCall(sampled, [(near, 0), (near, 1), (far, 1)], 2, NO_STOP)
    near.await_call(call)
    far.await_call(call)

    assert [completion.tokens for completion in near.completions] == [[1, 2], [3]]
    assert [completion.tokens for completion in far.completions] == [[], [5, 6]]
    assert sampled.times == 1
    assert near.unfinished(4) == [0], "the other one has ended"
    assert far.tokens_so_far(1) == [5, 6]

    for token, gap in ((9, 0.125), (11, None)):
        segment = Completion([token], [-0.9], token == 11)
        near.await_call(SegmentCall(Sampled([segment], gap), [(near, 0)], 4, NO_STOP))
        first, _ = near.completions
        assert near.sampler_gap == 0.25, "the largest of all calls"
    assert first.tokens == [1, 2, 9, 11]
    assert near.unfinished(8) == []


def test_a_checkpoint_holds_what_is_sampled_so_far() -> None:
    rollout = PartialRollout([4, 4], [(6, 0), (6, 1)], row_ids=[3])
    segments = [Completion([1, 2], [-0.1, -0.2], False), Completion([3], [-0.3], True)]
    call = SegmentCall(Sampled(segments, 0.5), [(rollout, 0), (rollout, 1)], 2, NO_STOP)
    rollout.await_call(call)
    # The state waits for the call.
    state = json.loads(json.dumps(rollout.state()))
    loaded = load_rollout(state, 0, samples_segments=True)

    assert isinstance(loaded, PartialRollout)
    assert loaded.completions == rollout.completions
    assert loaded.keys == [(6, 0), (6, 1)]
    assert loaded.prompt_ids == [4, 4]
    assert loaded.row_ids == [3]
    assert loaded.sampler_gap == 0.5
    assert loaded.unfinished(4) == [0]

    with pytest.raises(ConfigError, match="completions that are sampled in part"):
        load_rollout(state, 0, samples_segments=False)

    # That of a run that did not sample in segments is taken as it is.
    whole = PendingRollout([4], lambda: [Completion([7], [-0.5], False)], version=2)
    loaded = load_rollout(whole.state(), 0, samples_segments=True)
    assert not isinstance(loaded, PartialRollout)
    assert loaded.version == 2


def test_what_partial_requires_is_said() -> None:
    assert algorithm("grpo", ahead=3, partial=True).segments == 3
    assert algorithm("grpo", ahead=3).segments == 1
    for ahead in (0, 1):
        with pytest.raises(ConfigError, match="set ahead to 2 or more"):
            algorithm("grpo", ahead=ahead, partial=True)
