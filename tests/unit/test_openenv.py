"""Environments on a real server of OpenEnv on loopback: turns, rewards, seeds, and what is refused.

CI does not have the package, whose requirements are some 200 MB. `make environments` installs it and runs these tests.
"""

from __future__ import annotations

import random
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drumline.config.rollouts import OpenEnvEnvironment
from drumline.errors import EnvironmentFault
from drumline.rl.environments import Environments, Reply
from drumline.rl.episodes import BadReply
from tests.guessing import ANSWER, make_app
from tests.harness import ROOT
from tests.loopback import free_ports, until

pytest.importorskip("openenv", reason="openenv is not installed: make environments")
pytestmark = pytest.mark.slow
ROW = {"prompt": "Guess.", "messages": [{"role": "user", "content": "Guess."}], "answer": ANSWER}


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """The address of a server of an app."""
    import uvicorn

    (port,) = free_ports(1)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of the game in tests.guessing."""
    with serve(make_app()) as address:
        yield address


def environment(url: str, **options: Any) -> OpenEnvEnvironment:
    values = {"action": "text", "observation": "text", "columns": ["answer"], **options}
    return OpenEnvEnvironment(url=url, max_tokens=64, timeout_seconds=300.0, **values)


@contextmanager
def session(url: str, **options: Any) -> Iterator[Any]:
    """An episode before its `reset`."""
    from drumline.rl.openenv import load_environment

    episode: Any = load_environment(environment(url, **options), Path()).start_episode()
    yield episode
    episode.client.close()


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_each_episode_has_a_session_of_its_own(url: str) -> None:
    running = Environments(environment(url), Path())
    running._server.wait_until_ready(600.0)
    seeds = {0: 0, 1: 0, 2: 0, 3: 0}
    rows = {**dict.fromkeys(seeds, ROW), 1: {**ROW, "answer": "3"}, 3: {"messages": []}}
    begun = running.reset(rows, seeds)
    assert begun[0] == Reply(user("Guess.\n\nIt is below 12."))
    assert begun[1] == Reply(user("Guess.\n\nIt is below 8."))
    assert begun[3].failure == "the row has no column 'answer', and columns names it"
    replies = running.step({0: say("3"), 1: say("3"), 2: say("raise")}, seeds)
    assert replies[0] == Reply(user("Not 3."), -0.1, False)
    assert replies[1] == Reply(user("Yes."), 1.0, True)
    assert replies[2].failure is not None and "not today" in replies[2].failure
    assert running.step({0: say(ANSWER)}, seeds)[0] == Reply(user("Yes."), 1.0, True)
    running.close()


def test_functions_make_actions_and_read_observations(url: str) -> None:
    functions = {"action": "tests.guessing:shout", "observation": "tests.guessing:whisper"}
    with session(url, **functions) as episode:
        assert episode.reset(ROW) == user("Guess.\n\nit is below 12.")
        assert episode.step(say("I say 3")) == (user("not 3."), -0.1, False)


def test_sessions_with_one_seed_begin_alike(url: str) -> None:
    first_words = []
    for seed in (5, 5, 6, 7, 8, 9):
        random.seed(seed)
        with session(url, columns=[]) as episode:
            first_words.append(episode.reset(ROW))
    assert first_words[0] == first_words[1]
    assert any(words != first_words[0] for words in first_words)


def test_an_observation_without_its_field_fails(url: str) -> None:
    with session(url, observation="words") as episode:
        with pytest.raises(BadReply, match="has no field 'words'; its fields: metadata, text"):
            episode.reset(ROW)


def test_a_server_that_is_not_there_is_refused() -> None:
    from drumline.rl.openenv import load_environment

    (port,) = free_ports(1)
    with pytest.raises(EnvironmentFault, match="no server of OpenEnv can be reached"):
        load_environment(environment(f"http://127.0.0.1:{port}"), Path())


def test_the_example_is_a_game_in_each_session() -> None:
    path = ROOT / "examples" / "openenv" / "server.py"
    with serve(runpy.run_path(str(path))["app"]) as url:
        options = {"action": "guess", "observation": "hint", "columns": []}
        with session(url, **options) as first, session(url, **options) as second:
            for episode in (first, second):
                random.seed(5)
                assert episode.reset(ROW) == user("Guess.\n\nYou have four guesses.")
            replies = [first.step(say(f"Is it {number}?")) for number in range(1, 10)]
            assert replies.count((user("Right."), 1.0, True)) == 1
            assert replies.count((user("Wrong. Guess again."), 0.0, False)) == 8
            number = replies.index((user("Right."), 1.0, True)) + 1
            assert second.step(say(str(number))) == (user("Right."), 1.0, True), "one seed"
