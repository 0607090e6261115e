"""The interface between an episode and the process that runs it (`environment_worker`). No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

WHERE = "algorithm.environment"


class BadReply(Exception):
    """An environment returned something invalid.

    The message is a predicate: its subject is the environment.
    """


class Episode(Protocol):
    """An episode of an environment.

    Attributes:
        tool_calls: Number of calls of the last turn, those that could not be read included.
        tool_errors: Number of them that failed.
    """

    tool_calls: int
    tool_errors: int

    def reset(self, row: dict[str, Any]) -> Any:
        """Begin, and return the messages before the model's first turn."""

    def step(self, message: dict[str, Any]) -> Any:
        """Return (messages, reward or None, done) for the model's message."""

    def finish(self) -> Any:
        """Score an episode that the rank has cut, and return what `step` returns."""


class LoadedEnvironment(NamedTuple):
    """An environment whose code is imported."""

    # Returns an episode before its `reset`.
    start_episode: Callable[[], Episode]
    # The JSON schemas of the tools that an episode has; empty without any.
    tool_schemas: list[dict[str, Any]]
