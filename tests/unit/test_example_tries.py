"""The environment of examples/tries: what a try is worth, and when an episode ends."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.config.registry import find_object
from tests.harness import ROOT

pytest.importorskip("reasoning_gym")
ENTRY = {"question": "4 + 3 =", "answer": "7", "metadata": {}}
ROW: dict[str, Any] = {
    "task": "chain_sum",
    "options": {"min_terms": 2, "max_terms": 2},
    "entry": ENTRY,
    "messages": [{"role": "user", "content": "4 + 3 ="}],
}


def begun(**options: Any) -> Any:
    tries = find_object("tries.py:Tries", ROOT / "examples" / "tries", "path")
    episode = tries(**options)
    assert episode.reset(ROW) == ROW["messages"]
    return episode


def answer(episode: Any, text: str) -> tuple[str, float, bool]:
    """The hint, the reward, and whether the episode is over."""
    messages, reward, done = episode.step({"role": "assistant", "content": text})
    hint = " ".join(message["content"] for message in messages)
    return hint, reward, done


def test_a_right_answer_ends_the_episode() -> None:
    assert answer(begun(), " 7 ") == ("", 1.0, True)


def test_a_wrong_one_gets_a_hint_and_another_try() -> None:
    episode = begun(discount=0.5)
    assert answer(episode, "8") == ("That is wrong. Try again.", 0.0, False)
    assert answer(episode, "7") == ("", 0.5, True)


def test_a_try_is_worth_what_it_gains() -> None:
    episode = begun(tries=4, discount=0.5)
    hint, first, _ = answer(episode, "it is 7")
    assert hint == "The right answer is in there. Write it alone."
    assert 0 < first < 1
    # The same again, or worse, gains nothing.
    assert answer(episode, "it is 7")[1] == 0
    assert answer(episode, "8")[1] == 0
    _, last, done = answer(episode, "7")
    assert done
    assert last == pytest.approx((1 - first) / 8)


def test_tries_are_used_up() -> None:
    episode = begun(tries=2)
    assert not answer(episode, "no idea")[2]
    assert answer(episode, "") == ("", 0.0, True)
