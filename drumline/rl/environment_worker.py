"""The processes that environments live in, below `guard`. They import no torch.

    rank ── guard ── this one, which imports the user's code ── a fork of it for each episode

The first process receives the settings over its socket and answers whether they could be loaded. Then
it takes a new socket with each message {"token": …} that it is sent, forks, and answers {"token": …,
"pid": …}. For {"token": …, "end": pid} it kills the fork, and answers how that ended: {"token": …,
"code": …}.

A fork serves one episode over its own socket, and ends when the other end is closed:

    {"token": …, "seed": …, "row": {}}      →  {"token": …, "messages": []}
    {"token": …, "seed": …, "message": {}}  →  {"token": …, "messages": [], "reward": …, "done": …, …}
    {"token": …, "seed": …, "finish": true} →  the same: the rank has ended the episode

or {"token": …, "failure": reason}. An environment may do anything here: the rank watches the time.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drumline.config.registry import find_installed, find_object
from drumline.config.rollouts import (
    ClassEnvironment,
    Environment,
    OpenEnvEnvironment,
    ToolsEnvironment,
)
from drumline.errors import ConfigError
from drumline.foreign import class_and_line
from drumline.rl.episodes import WHERE, BadReply, Episode, LoadedEnvironment
from drumline.rl.reward_worker import LONGEST_REASON, load_or_refuse, open_channel
from drumline.rl.rewards import LARGEST_REWARD, LONGEST_ANSWER, Channel
from drumline.rl.tool_calls import Call
from drumline.rl.tools import ToolBox, load_tools
from drumline.system.redact import redact, redacted_streams

# Seconds between looks at a fork that is about to end.
LOOK_SECONDS = 0.01
# The most characters of an environment's messages as JSON, which leaves room for the rest of an answer.
MOST_CHARACTERS = LONGEST_ANSWER // 2
# What to do if no package has an environment of this name.
FIX = "write module:Class or file.py:Class, or install the package that has it"
# NumPy's seeds are below this.
NUMPY_SEEDS = 2**32


class ClassEpisode:
    """An episode of a class of the user's, which has given its rewards by turns."""

    tool_calls = 0
    tool_errors = 0

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def reset(self, row: dict[str, Any]) -> Any:
        return self.environment.reset(row)

    def step(self, message: dict[str, Any]) -> Any:
        return self.environment.step(message)

    def finish(self) -> Any:
        return [], None, True


class ToolsEpisode:
    """An episode with tools, which give no rewards."""

    def __init__(self, tools: ToolBox) -> None:
        self.tools = tools
        self.tool_calls = 0
        self.tool_errors = 0

    def reset(self, row: dict[str, Any]) -> Any:
        return row["messages"]

    def step(self, message: dict[str, Any]) -> Any:
        calls = []
        for call in message.get("tool_calls", []):
            function = call["function"]
            calls.append(Call(function["name"], function["arguments"], call.get("id")))
        messages, errors = self.tools.answer(calls)
        unread = message.get("unread_calls", [])
        for error in unread:
            messages.append({"role": "tool", "name": "unknown", "content": f"error: {error}"})
        self.tool_calls = len(messages)
        self.tool_errors = errors + len(unread)
        return messages, None, not messages

    def finish(self) -> Any:
        return [], None, True


@redacted_streams()
def main(fd: int) -> None:
    """Serve requests from the socket `fd` until its other end is closed."""
    channel = open_channel(fd)
    loaded = load_or_refuse(channel, _load)
    if loaded is None:
        return
    begin, schemas = loaded
    channel.send({"ready": True, "tools": schemas})
    while True:
        received, fds, _, _ = socket.recv_fds(channel.end, 2**12, 1)
        if not received:
            return
        request = json.loads(received)
        answer: dict[str, Any]
        if "end" in request:
            answer = {"code": _end_fork(request["end"], request["patience"])}
        else:
            answer = {"pid": _fork(channel, fds[0], begin)}
        channel.send({"token": request["token"], **answer})


def _load(task: dict[str, Any]) -> LoadedEnvironment:
    """Return the environment of a task. Raises ConfigError or EnvironmentFault."""
    adapter: TypeAdapter[Environment] = TypeAdapter(Environment)
    config = adapter.validate_python(task["environment"])
    base_dir = Path(task["base_dir"])
    if isinstance(config, ToolsEnvironment):
        tools = ToolBox(load_tools(config.functions, base_dir, f"{WHERE}.functions"))
        return LoadedEnvironment(lambda: ToolsEpisode(tools), tools.schemas)
    if isinstance(config, ClassEnvironment):
        return LoadedEnvironment(_load_class(config, base_dir), [])
    # Each of these modules imports a package that may not be installed.
    if isinstance(config, OpenEnvEnvironment):
        from drumline.rl import openenv

        return openenv.load_environment(config, base_dir)
    from drumline.rl import verifiers

    return verifiers.load_environment(config, base_dir)


def _load_class(config: ClassEnvironment, base_dir: Path) -> Callable[[], Episode]:
    """Return a function that begins an episode of the user's class. Raises ConfigError."""
    where = f"{WHERE}.path"
    if ":" in config.path:
        found = find_object(config.path, base_dir, where)
    else:
        found = find_installed(config.path, "environments", where, "an environment", FIX)
    if not inspect.isclass(found):
        raise ConfigError(f"{config.path} is no class", where=where)
    for name in ("reset", "step"):
        if not callable(getattr(found, name, None)):
            what = f"{config.path} has no method {name}"
            raise ConfigError(what, where=where, fix="define reset(self, row), step(self, message)")
    try:
        inspect.signature(found).bind(**config.options)
    except TypeError as error:
        what = f"{config.path} cannot be made with the options: {error}"
        raise ConfigError(what, where=f"{WHERE}.options") from error
    except ValueError:  # some builtins have no signature
        pass
    return lambda: ClassEpisode(found(**config.options))


def _fork(channel: Channel, fd: int, begin: Callable[[], Episode]) -> int:
    """Fork a process that serves an episode over the socket `fd`, and return its id."""
    child = os.fork()
    if child:
        os.close(fd)
        return child
    status = 1
    try:
        # A group of its own, so that what an environment starts is ended with it.
        os.setpgid(0, 0)
        channel.end.close()
        own = Channel(socket.socket(fileno=fd))
        own.end.set_inheritable(False)
        with suppress(EOFError, OSError):  # the rank closed its end
            _serve(own, begin)
        status = 0
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_fork(pid: int, patience: float) -> int | None:
    """End a fork and what it started, and wait for it.

    Return its exit code, if it ended within `patience` seconds by itself; None if it was killed.
    """
    deadline = time.monotonic() + patience
    code = None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOK_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        # The fork may not have its own group yet.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code


def _serve(channel: Channel, begin: Callable[[], Episode]) -> None:
    """Serve one episode. Raises EOFError when the other end is closed."""
    episode: Episode | None = None
    while True:
        request = channel.receive()
        _seed(request["seed"])
        try:
            if episode is None:
                episode = begin()
                messages = _checked_messages(episode.reset(request["row"]), needs_one=True)
                reply: dict[str, Any] = {"messages": messages}
            else:
                if "finish" in request:
                    returned = episode.finish()
                else:
                    returned = episode.step(request["message"])
                reply = _checked_step(returned)
                reply["tool_calls"] = episode.tool_calls
                reply["tool_errors"] = episode.tool_errors
        except BadReply as error:
            reply = {"failure": f"{error}"[:LONGEST_REASON]}
        except BaseException as error:  # noqa: BLE001 — SystemExit of an environment is a failure like others
            reason = redact(f"{class_and_line(error)}: {error}")
            reply = {"failure": f"raised {reason}"[:LONGEST_REASON]}
        channel.send({"token": request["token"], **reply})


def _seed(seed: int) -> None:
    """Seed Python's random numbers, and NumPy's if it is imported."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % NUMPY_SEEDS)


def _checked_step(returned: Any) -> dict[str, Any]:
    """Return what `step` returned as a reply. Raises BadReply."""
    is_triple = isinstance(returned, tuple | list) and len(returned) == 3
    if not is_triple:
        raise BadReply(f"step returned a {type(returned).__name__}, not (messages, reward, done)")
    messages, reward, done = returned
    return {
        "messages": _checked_messages(messages, needs_one=False),
        "reward": _checked_reward(reward),
        "done": bool(done),
    }


def _checked_reward(reward: Any) -> float | None:
    """Return a reward as a number; None for none. Raises BadReply."""
    if reward is None:
        return None
    if not hasattr(reward, "__float__"):
        raise BadReply(f"step returned a {type(reward).__name__} as reward, not a number")
    value = float(reward)
    if math.isnan(value) or abs(value) > LARGEST_REWARD:
        raise BadReply(f"step returned {value:g} as reward, beyond ±{LARGEST_REWARD:g}")
    return value


def _checked_messages(messages: Any, needs_one: bool) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; a text is one of the user. Raises BadReply."""
    if messages is None:
        messages = []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        raise BadReply(f"returned a {type(messages).__name__} as messages, not a list")
    for message in messages:
        has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not has_role or not isinstance(message.get("content"), str):
            raise BadReply("returned a message that is not {role: text, content: text}")
    if needs_one and not messages:
        raise BadReply("reset returned no message")
    # Types that JSON lacks become text.
    text = json.dumps(list(messages), default=str)
    if len(text) > MOST_CHARACTERS:
        raise BadReply(f"returned messages of {len(text)} characters, more than {MOST_CHARACTERS}")
    checked: list[dict[str, Any]] = json.loads(_without_lone_surrogates(text))
    return checked


def _without_lone_surrogates(text: str) -> str:
    """Return a JSON text with U+FFFD in place of halves of surrogate pairs.

    Such a half may come from a call of the model, as an escape in JSON. No tokenizer takes it.
    """
    unescaped = json.dumps(json.loads(text), ensure_ascii=False)
    halves = unescaped.encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "replace")
