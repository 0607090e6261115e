"""Rewards that get all completions of a prompt together: values, failures, limits and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from drumline.config.rollouts import FunctionReward
from drumline.errors import ConfigError
from drumline.rl.rewards import ENVIRONMENT, EpisodeText, Rewards, check_importable
from drumline.train.preview import what_rewards_get
from tests.unit.test_rollout_config import algorithm

pytestmark = pytest.mark.slow

FUNCTIONS = r"""
import os, time
import numpy

def ranks(prompt, completions, answer, scale=1.0):
    order = sorted(completions, key=len)
    return [scale * order.index(text) if text != answer else None for text in completions]

def array(prompt, completions):
    return numpy.arange(len(completions))

def number(prompt, completions):
    return 1.0

def pid(prompt, completions):
    return [os.getpid()] * len(completions)

def conversations(prompt, completions, messages):
    return [float(len(turns)) for turns in messages]

def naughty(prompt, completions):
    what = completions[0]
    if what == "raise": raise ValueError("not today")
    if what == "hang": time.sleep(60)
    if what == "crash": os.kill(os.getpid(), 11)
    if what == "short": return [1.0]
    if what == "text": return "ab"
    if what == "nan": return [1.0, float("nan")]
    if what == "huge": return [1e16, 1.0]
    if what == "texts": return [1.0, "b"]
    return [float(len(text)) for text in completions]

def length(prompt, completion):
    return float(len(completion))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def of_group(function: str, **values: Any) -> FunctionReward:
    return FunctionReward(path=f"mine.py:{function}", of="group", **values)


def items(*completions: str, **columns: Any) -> list[EpisodeText]:
    return [EpisodeText("what?", text, len(text), columns) for text in completions]


def test_each_group_is_seen_alone_and_whole(folder: Path) -> None:
    configs = [of_group("ranks", options={"scale": 2.0}, weight=0.5), of_group("array", weight=10)]
    episodes = [
        *items("ccc", "a", "bb", answer="no"),
        *items("a", "bb", "ccc", answer="bb"),
    ]
    with Rewards(configs, folder, workers=2) as rewards:
        scored = rewards.score(episodes, group_size=3)
        (alone,) = rewards.score(items("a", answer="no"))
    assert [one.value for one in scored] == [2, 10, 21, 0, 10, 22]
    not_given = scored[4]
    assert math.isnan(not_given.parts["ranks"])
    assert not_given.applies
    assert not_given.failures == {}
    assert alone.parts == {"ranks": 0.0, "array": 0.0}


def test_what_applies_to_nothing_is_left_out(folder: Path) -> None:
    with Rewards([of_group("ranks")], folder, workers=1) as rewards:
        left_out, given = rewards.score(items("a", "bb", answer="a"), group_size=2)
    assert not left_out.applies
    assert given.value == 1.0


def test_a_failure_costs_its_group_alone(folder: Path) -> None:
    reasons = {
        "raise": "raised ValueError in mine.py:23: not today",
        "hang": "timed out after 5 s",
        "crash": "crashed its process (SIGSEGV)",
        "short": "returned 1 values for 2 completions",
        "text": "returned a str, not a list of numbers",
        "nan": "returned nan for completion 2 of 2",
        "huge": "returned 1e+16, beyond ±1e+15 for completion 1 of 2",
        "texts": "returned a str, not a number for completion 2 of 2",
    }
    episodes = items("ok", "fine")
    for what in reasons:
        episodes += items(what, "other")
    episodes += items("fine", "ok")
    configs = [
        of_group("naughty", timeout_seconds=5.0),
        FunctionReward(path="mine.py:length", weight=0.5),
    ]
    with Rewards(configs, folder, workers=2) as rewards:
        scored = rewards.score(episodes, group_size=2)
    expected: list[str | None] = [None, None]
    for reason in reasons.values():
        expected += [reason, reason]
    expected += [None, None]
    assert [one.failures.get("naughty") for one in scored] == expected
    for episode, one in zip(episodes, scored, strict=True):
        length = len(episode.completion)
        assert one.parts["length"] == length, "the other reward is not hurt"
        if one.failures:
            assert math.isnan(one.value)
            assert math.isnan(one.parts["naughty"])
        else:
            assert one.value == 1.5 * length


def test_a_number_is_not_a_list(folder: Path) -> None:
    with Rewards([of_group("number")], folder, workers=1) as rewards:
        (one,) = rewards.score(items("a"))
    assert one.failures == {"number": "returned a float, not a list of numbers"}


def test_a_metric_that_fails_leaves_the_sum_known(folder: Path) -> None:
    configs = [of_group("naughty", weight=0), FunctionReward(path="mine.py:length")]
    with Rewards(configs, folder, workers=1) as rewards:
        scored = rewards.score(items("raise", "no"), group_size=2)
    assert [one.value for one in scored] == [5, 2]
    assert all("naughty" in one.failures for one in scored)


def test_the_process_of_a_late_group_alone_is_lost(folder: Path) -> None:
    configs = [of_group("pid"), of_group("naughty", timeout_seconds=0.5)]
    episodes = items("ok", "ok", "hang", "ok", "ok", "ok")
    with Rewards(configs, folder, workers=1) as rewards:
        pids = [one.parts["pid"] for one in rewards.score(episodes, group_size=2)]
    assert len(set(pids[:4])) == 1
    assert len(set(pids[4:])) == 1
    assert pids[3] != pids[4]


def test_conversations_are_seen_without_those_that_broke(folder: Path) -> None:
    """An environment that failed costs its episode, and no other of the group."""

    def episode(turns: int, failure: str | None = None) -> EpisodeText:
        messages = [{"role": "user", "content": "hello"}] * turns
        return EpisodeText("what?", "x", 1, {"a": 1}, failure=failure, messages=messages)

    group = [episode(3), episode(1, "crashed its process"), episode(5)]
    with Rewards([of_group("conversations")], folder, workers=1) as rewards:
        first, broken, last = rewards.score(group, group_size=3)
        unseen = rewards.score([episode(1, "crashed its process")] * 2, group_size=2)
    assert (first.value, last.value) == (3.0, 5.0)
    assert (first.outcome, last.outcome) == (3.0, 5.0)
    for one in (broken, *unseen):
        assert one.failures == {ENVIRONMENT: "crashed its process"}
        assert math.isnan(one.value)


def test_a_single_conversation_is_a_column_of_its_own(folder: Path) -> None:
    (folder / "one.py").write_text("def turns(prompt, completion, messages): return len(messages)")
    messages = [{"role": "user", "content": "hello"}] * 2
    episode = EpisodeText("what?", "x", 1, {}, messages=messages)
    with Rewards([FunctionReward(path="one.py:turns")], folder, workers=1) as rewards:
        (one,) = rewards.score([episode])
    assert one.value == 2.0


def test_a_group_is_refused_by_a_function_of_one_completion(folder: Path) -> None:
    check_importable([of_group("ranks")], folder, {"answer"})
    with pytest.raises(ConfigError) as refused:
        check_importable([of_group("length")], folder)
    message = str(refused.value)
    assert "cannot be called with prompt, completions" in message
    assert "define it as f(prompt, completions, **columns)" in message
    with pytest.raises(ConfigError, match="cannot be called with prompt, completion"):
        check_importable([FunctionReward(path="mine.py:ranks")], folder)
    with pytest.raises(ConfigError, match="missing a required argument: 'answer'"):
        check_importable([of_group("ranks")], folder, {"letter"})


@pytest.mark.parametrize(
    ("kind", "options", "is_refused"),
    [
        ("ppo", {}, True),
        ("ppo", {"group_size": 4}, False),
        ("grpo", {}, False),
        ("online_dpo", {}, False),
        ("gkd", {"teacher": "gpt2"}, True),
    ],
)
def test_a_prompt_needs_several_completions(
    kind: str, options: dict[str, Any], is_refused: bool
) -> None:
    rewards = [{"kind": "function", "path": "mine.py:ranks", "of": "group"}]
    if not is_refused:
        assert algorithm(kind, **{**options, "rewards": rewards}).rewards[0].of == "group"
        return
    with pytest.raises(ConfigError, match="each prompt is completed once: set group_size to 2"):
        algorithm(kind, **{**options, "rewards": rewards})


def test_a_preview_says_what_rewards_get() -> None:
    of_completion = {"kind": "function", "path": "mine.py:length"}
    group = {**of_completion, "of": "group"}

    def shown(*rewards: dict[str, Any]) -> str:
        return what_rewards_get(algorithm("grpo", rewards=list(rewards)).rewards)

    assert shown(of_completion) == "the completion"
    assert shown(group) == "all completions of the prompt"
    assert shown(of_completion, group) == "the completion, or with `of: group` all of the prompt,"
