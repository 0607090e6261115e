"""Environments of the package verifiers: turns, tools, rubrics, and what is refused.

CI does not have the package, whose requirements are some 100 MB. `make environments` installs it and runs these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.rollouts import VerifiersEnvironment
from drumline.errors import ConfigError
from drumline.rl.environments import Environments, Reply
from drumline.rl.episodes import BadReply
from tests.guessing import ANSWER, QUESTION, SYSTEM

pytest.importorskip("verifiers", reason="verifiers is not installed: make environments")
pytestmark = pytest.mark.slow
ROW = {"prompt": QUESTION, "messages": [{"role": "user", "content": QUESTION}], "answer": ANSWER}
FIRST = [{"role": "system", "content": SYSTEM}, *ROW["messages"]]
NO = [{"role": "user", "content": "No."}]
END: list[Any] = []


def environment(**options: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(
        id="tests.guessing", options=options, max_tokens=64, timeout_seconds=300.0
    )


def begun(**options: Any) -> Any:
    """An episode after its `reset`."""
    from drumline.rl.verifiers import load_environment

    begin, _ = load_environment(environment(**options), Path())
    episode = begin()
    assert episode.reset(ROW)[-1] == FIRST[-1]
    return episode


def say(episode: Any, text: str, **extra: Any) -> Any:
    return episode.step({"role": "assistant", "content": text, **extra})


def test_each_episode_has_a_process_of_its_own() -> None:
    environments = Environments(environment(), Path())
    environments._server.wait_until_ready(600.0)
    seeds = {0: 0, 1: 0, 2: 0}
    begun = environments.reset(dict.fromkeys(seeds, ROW), seeds)
    # A text as prompt gets the environment's system prompt.
    assert begun == dict.fromkeys(seeds, Reply(FIRST))
    texts = {0: ANSWER, 1: "3", 2: "raise"}
    messages = {}
    for number, text in texts.items():
        messages[number] = {"role": "assistant", "content": text}
    replies = environments.step(messages, seeds)
    assert replies[0] == Reply([], 1.0, True)
    assert replies[1] == Reply(NO)
    failure = replies[2].failure
    assert failure is not None and "ValueError" in failure and "not today" in failure
    assert environments.finish({1: 0}) == {1: Reply([], 0.0, True)}
    environments.close()


def test_an_episode_is_scored_at_its_end() -> None:
    episode = begun()
    assert say(episode, "3") == (NO, None, False)
    assert say(episode, ANSWER) == (END, 0.5, True)


def test_its_stop_conditions_hold() -> None:
    episode = begun(tries=2)
    assert say(episode, "3") == (NO, None, False)
    assert say(episode, "4") == (END, 0.0, True)


def test_an_episode_that_is_cut_is_scored() -> None:
    episode = begun()
    assert say(episode, "3") == (NO, None, False)
    assert episode.finish() == (END, 0.0, True)
    over = begun()
    assert say(over, ANSWER) == over.finish() == (END, 1.0, True)


def test_one_turn() -> None:
    assert say(begun(kind="single"), ANSWER) == (END, 1.0, True)


def test_an_episode_can_only_grow() -> None:
    with pytest.raises(BadReply, match="changed earlier messages"):
        say(begun(kind="forgetful"), "3")


def test_tools() -> None:
    from drumline.rl.verifiers import load_environment

    _, (schema,) = load_environment(environment(kind="tools"), Path())
    assert schema["function"]["name"] == "double"
    assert "number" in schema["function"]["parameters"]["properties"]
    function = {"name": "double", "arguments": {"number": 4}}
    call = {"id": "a", "type": "function", "function": function}
    episode = begun(kind="tools")
    messages, reward, done = say(episode, "", tool_calls=[call], unread_calls=["no JSON"])
    assert [message["role"] for message in messages] == ["tool", "tool"]
    assert (messages[0]["name"], messages[0]["content"]) == ("double", "8")
    assert (episode.tool_calls, episode.tool_errors, reward, done) == (2, 1, None, False)
    assert say(episode, ANSWER) == (END, 0.5, True)


def test_rows_are_those_of_its_dataset() -> None:
    from drumline.rl.verifiers import load_rows

    first, second = load_rows("tests.guessing")
    assert first["answer"] == ANSWER
    assert first["prompt"] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    assert [row["answer"] for row in load_rows("tests.guessing", split="eval", size=1)] == [ANSWER]
    assert second["answer"] == "3"
    with pytest.raises(ConfigError, match="no split 'test'"):
        next(load_rows("tests.guessing", split="test"))


@pytest.mark.parametrize(
    ("id", "options", "line"),
    [
        ("tests.nothing", {}, "Could not import"),
        ("tests.guessing", {"size": 3}, "unexpected keyword argument"),
        ("tests.guessing", {"kind": "group"}, "compares the episodes of a group"),
    ],
)
def test_what_cannot_be_loaded_is_refused(id: str, options: dict[str, Any], line: str) -> None:
    from drumline.rl.verifiers import load_environment

    config = VerifiersEnvironment(id=id, options=options, max_tokens=64)
    with pytest.raises(ConfigError, match=line):
        load_environment(config, Path())
