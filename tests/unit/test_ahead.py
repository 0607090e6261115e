"""Rollouts that are sampled in the background: one at a time, in order, each by the weights that were set aside for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from drumline.errors import ConfigError
from drumline.rl.ahead import BackgroundSampling
from drumline.rl.conversations import Conversation, Turn
from drumline.rl.generate import Completion, InferenceCopy, Request
from drumline.rl.pending import PendingRollout
from drumline.rl.restarts import CheckedSampling
from drumline.rl.rollouts import load_pending, require_same_groups
from drumline.telemetry.events import Rollout
from tests.tiny import read_model
from tests.unit.report_runs import story
from tests.unit.test_report_progress import START, told
from tests.unit.test_rollout_config import algorithm

REQUESTS = [Request([5, 6, 7], (0, 0))]


class Weights:
    """A generator that samples the version of its weights, once it is let."""

    def __init__(self) -> None:
        self.version = 0
        self.may_end = [Event() for _ in range(4)]

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        before = self.version
        assert self.may_end[step].wait(60)
        assert self.version == before, "the weights stay until all is sampled"
        return [Completion([self.version], [0.0], True) for _ in requests]

    def begin(self, version: int, step: int) -> CheckedSampling:
        self.version = version
        return CheckedSampling(self, REQUESTS, step, in_background=True)


def test_rollouts_are_sampled_one_after_another_by_their_own_weights() -> None:
    weights = Weights()
    queue = BackgroundSampling()

    assert queue.is_free()

    first = queue.add(partial(weights.begin, 10, 0))
    queue.start_next_if_free()

    assert first.sampling is not None
    assert not queue.is_free()

    second = queue.add(partial(weights.begin, 20, 1))
    third = queue.add(partial(weights.begin, 30, 2))
    queue.start_next_if_free()

    assert second.sampling is None, "the first is still being sampled"
    assert weights.version == 10

    weights.may_end[0].set()
    queue.finish()

    assert not queue.is_free(), "two are waiting"

    queue.start_next_if_free()

    assert second.sampling is not None
    assert third.sampling is None

    for event in weights.may_end:
        event.set()

    # Its result is asked for first; the second is sampled before it nevertheless.
    assert third.finish()[0].tokens == [30]
    assert second.finish()[0].tokens == [20]
    assert first.finish()[0].tokens == [10]
    assert queue.is_free()


def test_an_error_is_raised_where_the_completions_are_asked_for() -> None:
    class Broken(Weights):
        def generate(self, requests: list[Request], step: int) -> list[Completion]:
            raise ValueError("broken")

    broken = Broken()
    queue = BackgroundSampling()
    scheduled = queue.add(partial(broken.begin, 1, 0))
    queue.start_next()

    with pytest.raises(ValueError, match="broken"):
        scheduled.finish()


def test_weights_that_are_set_aside_are_those_of_that_moment(model: Path) -> None:
    learned = read_model(model)
    copy = InferenceCopy(lambda: read_model(model).to(torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in learned.state_dict().items()}
    hand_over = copy.hold(learned.named_parameters())

    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.mul_(1.5)

    copy.refresh(learned.named_parameters())
    hand_over()

    for name, tensor in copy.model.state_dict().items():
        assert torch.equal(tensor, before[name].bfloat16())


def state_of(version: int | None) -> dict[str, Any]:
    pending = PendingRollout(
        [4, 4], lambda: [Completion([7], [-0.5], True)] * 2, 0.25, version=version
    )
    return pending.state()


def test_pending_rollouts_come_back_from_a_checkpoint() -> None:
    first, second = load_pending([state_of(2), state_of(4)], 6, 2)

    assert [first.version, second.version] == [2, 4]
    assert first.completions == [Completion([7], [-0.5], True)] * 2
    assert first.prompt_ids == [4, 4]
    assert first.sampler_gap == 0.25

    (unknown,) = load_pending([state_of(None)], 6, 2)

    assert unknown.version is None, "a server kept its own weights"
    assert not load_pending([], 6, 2)


def test_pending_groups_of_another_size_are_refused() -> None:
    """Advantages would compare completions of several prompts, or miss some of a prompt."""
    require_same_groups({"group_size": 4}, 4)
    require_same_groups({}, 4)

    with pytest.raises(ConfigError, match="sampled ahead, 4 completions of each prompt"):
        require_same_groups({"group_size": 4}, 8)


def test_a_pending_episode_of_turns_comes_back_from_a_checkpoint() -> None:
    episode = Conversation(
        tokens=[5, 6, 7],
        log_probs=[-0.5, 0.0, -0.25],
        ended=True,
        prompt=[1, 2],
        sampled=[True, False, True],
        messages=[{"role": "assistant", "content": "a"}],
        turns=[Turn(1, 0, 0.5, tool_calls=2), Turn(1, 2)],
        answer="a",
        failure="timed out",
    )
    saved = json.loads(json.dumps(PendingRollout([4], lambda: [episode], version=2).state()))
    (loaded,) = load_pending([saved], 6, 2)

    assert loaded.completions == [episode]


def test_an_older_checkpoint_has_one_pending_rollout_without_its_version() -> None:
    old = state_of(None)
    del old["version"], old["row_ids"], old["sampler_gap"]
    (rollout,) = load_pending(old, 6, 2)

    assert rollout.version == 4, "the weights before the rollout that was learned from last"
    assert rollout.prompt_ids == [4, 4]
    assert rollout.row_ids == []
    assert rollout.sampler_gap is None

    (first,) = load_pending(old, 2, 2)

    assert first.version == 0


def test_how_far_ahead_may_be_set() -> None:
    for ahead in (0, 1, 8):
        assert algorithm("grpo", ahead=ahead).lookahead == ahead

    assert algorithm("grpo", ahead=3).importance == "token"
    assert algorithm("grpo", ahead=3, importance="sequence").importance == "sequence"
    assert not algorithm("grpo", ahead=3).on_policy

    for ahead in (-1, 9):
        with pytest.raises(ConfigError, match="ahead"):
            algorithm("grpo", ahead=ahead)

    with pytest.raises(ConfigError, match="dynamic_sampling chooses prompts by rewards"):
        algorithm("grpo", ahead=2, dynamic_sampling=1)

    with pytest.raises(ConfigError, match="ahead samples by older weights"):
        algorithm("grpo", ahead=2, importance="none")


def test_which_other_algorithms_sample_ahead() -> None:
    """Those whose loss does not ask which weights have sampled."""
    pairs = algorithm("online_dpo", ahead=3)
    taught = algorithm("gkd", teacher={"id": "teacher"}, ahead=3)
    for spec in (pairs, taught):
        assert spec.lookahead == 3
        assert not spec.needs_old_log_probs, "nothing is weighted by them"

    with pytest.raises(ConfigError, match="dynamic_sampling chooses prompts by rewards"):
        algorithm("online_dpo", ahead=2, dynamic_sampling=1)

    with pytest.raises(ConfigError, match="ahead"):
        algorithm("ppo", ahead=1)


def test_episodes_of_turns_are_sampled_ahead_but_not_in_segments() -> None:
    environment = {"kind": "tools", "functions": ["a.py:f"], "turns": 2, "max_tokens": 4096}
    for kind, options in (
        ("grpo", {}),
        ("online_dpo", {}),
        ("gkd", {"teacher": {"id": "teacher"}}),
    ):
        assert algorithm(kind, **options, ahead=1, environment=environment).lookahead == 1

    with pytest.raises(ConfigError, match="partial continues completions of one turn"):
        algorithm("grpo", ahead=2, partial=True, environment=environment)


def test_the_line_of_a_rollout_shows_how_old_the_weights_are() -> None:
    event = next(event for event in story(20) if isinstance(event, Rollout))
    rollout = {**vars(event), "kind": "rollout", "staleness": 4}
    del rollout["metrics"]

    assert "sampled 4 steps earlier" in told(START, rollout)[1]

    rollout["staleness"] = 0

    assert "earlier" not in told(START, rollout)[1]
