"""Environments in real processes: what one that misbehaves costs, and what is refused before training."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.config.rollouts import ClassEnvironment, OpenEnvEnvironment, ToolsEnvironment
from drumline.errors import ConfigError, EnvironmentFault
from drumline.rl.environments import (
    FORKING_PROCESS_KILLED,
    Environments,
    Reply,
    check_importable,
)
from drumline.rl.rewards import START_SECONDS

pytestmark = pytest.mark.slow


def environment(path: str, timeout_seconds: float = 60.0, **options: Any) -> ClassEnvironment:
    return ClassEnvironment(path=path, max_tokens=64, timeout_seconds=timeout_seconds, **options)


@pytest.fixture
def naughty() -> Iterator[Environments]:
    environments = Environments(environment("tests.episodes:Naughty"), Path())
    assert environments.tools() == []
    yield environments
    environments.close()


def replies_to(environments: Environments, dos: list[str]) -> list[Reply]:
    """What environments reply to the first step, or to `reset` if that fails."""
    rows = {number: {"do": do} for number, do in enumerate(dos)}
    seeds = dict.fromkeys(rows, 7)
    begun = environments.reset(rows, seeds)
    messages = {}
    for number, reply in begun.items():
        if reply.failure is None:
            assert reply.messages == [{"role": "user", "content": "hello"}]
            messages[number] = {"role": "assistant", "content": "hm"}
    stepped = environments.step(messages, seeds)
    environments.end(list(rows))
    return [stepped.get(number, begun[number]) for number in rows]


def test_an_environment_that_fails_costs_its_episode_alone(naughty: Environments) -> None:
    failures = {
        "raise": "raised ValueError",
        "exit": "ended its process (exit code 3)",
        "crash": "crashed its process (SIGSEGV)",
        "close": "wrote on a file descriptor that is not its own, or closed it",
        "nan": "step returned nan as reward",
        "text": "step returned a str as reward",
        "pair": "step returned a tuple, not (messages, reward, done)",
        "no role": "a message that is not {role: text, content: text}",
        "reset raise": "raised ValueError",
        "reset exit": "ended its process (exit code 3)",
        "reset nothing": "reset returned no message",
    }
    replies = replies_to(naughty, ["well", *failures, "well"])
    good = Reply([{"role": "user", "content": "go on"}], 1.0, False)
    assert replies[0] == replies[-1] == good
    for (do, failure), reply in zip(failures.items(), replies[1:-1], strict=True):
        assert reply.failure is not None, do
        # Where it closed its socket, how that looks depends on which call noticed it.
        assert do == "close" or failure in reply.failure, (do, reply.failure)
    assert replies_to(naughty, ["well"]) == [good]


def test_an_environment_that_hangs_is_ended() -> None:
    hanging = environment("tests.episodes:Naughty", timeout_seconds=1.0)
    environments = Environments(hanging, Path())
    environments.tools()
    (reply,) = replies_to(environments, ["hang"])
    environments.close()
    assert reply.failure == "timed out after 1 s"


def test_random_numbers_depend_on_the_seed_alone(naughty: Environments) -> None:
    first, second = replies_to(naughty, ["random", "random"])
    assert first == second
    assert replies_to(naughty, ["random"]) == [first]


def test_nothing_is_left_behind(naughty: Environments) -> None:
    replies_to(naughty, ["well"])
    naughty.reset({0: {"do": "well"}, 1: {"do": "well"}}, {0: 0, 1: 0})
    guard = psutil.Process(naughty._server.process.pid)
    family = guard.children(recursive=True)
    assert len(family) == 3, "the process that imports, and two forks"
    naughty.end([0, 1])
    assert len(guard.children(recursive=True)) == 1
    naughty.reset({0: {"do": "well"}}, {0: 0})
    family = guard.children(recursive=True)
    naughty.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_the_process_that_imports_is_replaced(
    naughty: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies_to(naughty, ["well"])
    granted: list[float] = []
    monkeypatch.setattr("drumline.system.heartbeat.alive", granted.append)
    guard = psutil.Process(naughty._server.process.pid)
    (server,) = guard.children()
    server.kill()
    deadline = time.monotonic() + 10
    while naughty._server.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    (reply,) = replies_to(naughty, ["well"])
    assert reply.failure is None
    # Before anything else, the new process gets the time that its import may take.
    assert granted[0] > 2 * START_SECONDS


def test_a_process_that_was_started_by_a_thread_outlives_it(naughty: Environments) -> None:
    """Episodes that are sampled ahead are played in a thread of their rollout."""
    (server,) = psutil.Process(naughty._server.process.pid).children()
    server.kill()
    naughty._server.process.wait(timeout=10)
    with ThreadPoolExecutor(1) as rollout:
        (reply,) = rollout.submit(replies_to, naughty, ["well"]).result()
    assert reply.failure is None
    guard = naughty._server.process
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(timeout=1)
    (reply,) = replies_to(naughty, ["well"])
    assert reply.failure is None
    assert naughty._server.process is guard


def test_an_episode_says_that_the_process_of_all_was_killed(naughty: Environments) -> None:
    naughty.reset({0: {"do": "well"}}, {0: 0})
    (server,) = psutil.Process(naughty._server.process.pid).children()
    server.kill()
    naughty._server.process.wait(timeout=10)
    reply = naughty.step({0: {"role": "assistant", "content": "hm"}}, {0: 0})[0]
    assert reply.failure == FORKING_PROCESS_KILLED


def test_sets_of_texts_have_one_order_in_all_processes(naughty: Environments) -> None:
    other = Environments(environment("tests.episodes:Naughty"), Path())
    other.tools()
    (first,) = replies_to(naughty, ["set"])
    (second,) = replies_to(other, ["set"])
    other.close()
    assert first.failure is None
    assert first.messages == second.messages


def test_half_of_a_surrogate_pair_is_no_text(naughty: Environments) -> None:
    """A model's call may have one as an escape of JSON, and an environment may repeat it."""
    (reply,) = replies_to(naughty, ["half"])
    assert reply.messages == [{"role": "user", "content": "a\ufffdb 🥁"}]


TOOLS = '''
import os, time

def double(number: int) -> int:
    """Double a number."""
    return 2 * number
'''


def test_tools_answer_calls(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOLS)
    config = ToolsEnvironment(functions=("mine.py:double",), max_tokens=64)
    (schema,) = check_importable(config, tmp_path)
    assert schema["function"]["name"] == "double"
    environments = Environments(config, tmp_path)
    environments.tools()
    question = [{"role": "user", "content": "2 * 4?"}]
    assert environments.reset({0: {"messages": question}}, {0: 0})[0].messages == question
    call = {"function": {"name": "double", "arguments": {"number": 4}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call], "unread_calls": ["no"]}
    reply = environments.step({0: message}, {0: 0})[0]
    assert [each["content"] for each in reply.messages] == ["8", "error: no"]
    assert (reply.tool_calls, reply.tool_errors, reply.done) == (2, 1, False)
    last = environments.step({0: {"role": "assistant", "content": "8"}}, {0: 0})[0]
    assert last == Reply(done=True)
    environments.close()


@pytest.mark.parametrize(
    ("path", "options", "line"),
    [
        ("tests.episodes:None_", {}, "has no class 'None_'"),
        ("tests.episodes:random", {}, "is no class"),
        ("pathlib:Path", {}, "has no method reset"),
        ("tests.episodes:Vowels", {"size": 3}, "cannot be made with the options"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(
    path: str, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        check_importable(environment(path, options=options), Path())


INSTALLED = """
class Countdown:
    def __init__(self, turns):
        self.turns = turns

    def reset(self, row):
        return [{"role": "user", "content": row["text"]}]

    def step(self, message):
        self.turns -= 1
        return [], 1.0, self.turns == 0
"""


def test_an_installed_package_offers_an_environment_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_countdown.py").write_text(INSTALLED)
    info = tmp_path / "made_countdown-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-countdown\nVersion: 1.0\n")
    points = "[drumline.environments]\ncountdown = made_countdown:Countdown\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    environments = Environments(environment("countdown", options={"turns": 2}), Path())
    assert environments.tools() == []

    begun = environments.reset({0: {"text": "Go."}}, {0: 0})
    message = {"role": "assistant", "content": "2"}
    first = environments.step({0: message}, {0: 0})
    second = environments.step({0: message}, {0: 0})
    environments.close()

    assert begun[0].messages == [{"role": "user", "content": "Go."}]
    assert first[0] == Reply(reward=1.0, done=False)
    assert second[0] == Reply(reward=1.0, done=True)

    with pytest.raises(ConfigError) as refused:
        check_importable(environment("countdwon"), Path())
    assert refused.value.line().startswith(
        "algorithm.environment.path: no installed package offers an environment 'countdwon';"
        " did you mean 'countdown'?"
    )


def test_a_package_may_take_longer_to_import_than_the_user_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages verifiers and openenv import hundreds of modules."""
    monkeypatch.setattr("drumline.rl.environments.START_SECONDS", 0.01)
    slow = Environments(environment("tests.episodes:Naughty"), Path())
    with pytest.raises(EnvironmentFault, match=r"takes more than 0\.01 s"):
        slow.tools()
    package = tmp_path / "openenv" / "core"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "generic_client.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = OpenEnvEnvironment(url=url, action="a", observation="o", max_tokens=64)
        environments = Environments(config, tmp_path)
        assert environments.tools() == []
        environments.close()
