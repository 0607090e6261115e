"""Environments on servers of OpenEnv, as episodes. It imports the package openenv, and no torch."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drumline.config.registry import find_object
from drumline.config.rollouts import OpenEnvEnvironment
from drumline.errors import EnvironmentFault
from drumline.foreign import import_quietly, require_package
from drumline.rl.environments import PACKAGES
from drumline.rl.episodes import WHERE, BadReply, LoadedEnvironment

_PACKAGE, _FIX = PACKAGES["openenv"]
require_package(_PACKAGE, WHERE, _FIX)
generic_client: Any = import_quietly("openenv.core.generic_client")
# Seconds in which a server must accept a connection.
CONNECT_SECONDS = 10.0
# Bits of the seed that a server gets. More do not fit into the integers of every language.
SEED_BITS = 31
MakeAction = Callable[[dict[str, Any]], Any]
ReadObservation = Callable[[dict[str, Any]], Any]


class SessionEpisode:
    """An episode in a session of its own on a server."""

    tool_calls = 0
    tool_errors = 0

    def __init__(
        self,
        config: OpenEnvEnvironment,
        make_action: MakeAction,
        read_observation: ReadObservation,
    ) -> None:
        """Prepare; `reset` connects.

        Args:
            config: The section `algorithm.environment`.
            make_action: Returns the action of a message of the model.
            read_observation: Returns the text of an observation.
        """
        self.columns = config.columns
        self.make_action = make_action
        self.read_observation = read_observation
        client = generic_client.GenericEnvClient(
            base_url=config.url, message_timeout_s=config.timeout_seconds
        )
        self.client = client.sync()

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin a session, and return the row's prompt followed by the first observation."""
        missing = [name for name in self.columns if name not in row]
        if missing:
            raise BadReply(f"the row has no column {missing[0]!r}, and columns names it")
        arguments = {name: row[name] for name in self.columns}
        # The worker seeded `random` for this call, with the same seed for all episodes of a group.
        result = self.client.reset(seed=random.getrandbits(SEED_BITS), **arguments)
        if result.done:
            raise BadReply("was over before the model's first turn")
        messages: list[dict[str, Any]] = list(row["messages"])
        text = self._text(result)
        if not text:
            return messages
        last = messages[-1]
        if last["role"] == "user":
            # Some templates refuse two messages of the user in a row.
            messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            messages.append({"role": "user", "content": text})
        return messages

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], Any, bool]:
        """Send the model's message as an action, and return the observation, reward and end."""
        action = self.make_action(message)
        if not isinstance(action, dict):
            raise BadReply(f"action returned a {type(action).__name__}, not a dictionary")
        result = self.client.step(action)
        return [{"role": "user", "content": self._text(result)}], result.reward, result.done

    def finish(self) -> tuple[list[dict[str, Any]], None, bool]:
        """Return no reward: the server has given them by turns."""
        return [], None, True

    def _text(self, result: Any) -> str:
        """Return the text of an observation. Raises BadReply for what is no text."""
        text = self.read_observation(result.observation)
        if not isinstance(text, str):
            raise BadReply(f"the observation is a {type(text).__name__}, not a text")
        return text


def load_environment(config: OpenEnvEnvironment, base_dir: Path) -> LoadedEnvironment:
    """Return the environment of a server, which has no tools.

    `base_dir`: the folder of the YAML. Raises ConfigError for a function that cannot be imported, and
    EnvironmentFault if no server accepts a connection.
    """
    if ":" in config.action:
        make_action: MakeAction = find_object(
            config.action, base_dir, f"{WHERE}.action", "function"
        )
    else:
        make_action = _action_by_field(config.action)
    if ":" in config.observation:
        read_observation: ReadObservation = find_object(
            config.observation, base_dir, f"{WHERE}.observation", "function"
        )
    else:
        read_observation = _observation_by_field(config.observation)
    _require_server(config.url)
    return LoadedEnvironment(lambda: SessionEpisode(config, make_action, read_observation), [])


def _action_by_field(name: str) -> MakeAction:
    """Return a function that puts the text of a message into a field of an action."""

    def make_action(message: dict[str, Any]) -> dict[str, Any]:
        return {name: message["content"]}

    return make_action


def _observation_by_field(name: str) -> ReadObservation:
    """Return a function that reads a field of an observation. It raises BadReply if there is none."""

    def read_observation(observation: dict[str, Any]) -> Any:
        if name not in observation:
            fields = ", ".join(observation) or "none"
            raise BadReply(f"the observation has no field {name!r}; its fields: {fields}")
        return observation[name]

    return read_observation


def _require_server(url: str) -> None:
    """Raise EnvironmentFault if nothing accepts a connection at a url."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(
            f"no server of OpenEnv can be reached at {url}: {error.strerror or error}",
            where=f"{WHERE}.url",
            fix="start it first",
        ) from error
