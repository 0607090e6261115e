"""Hosts without agents, for tests of the launcher alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drumline_hosts.elastic import ElasticHosts


class Standing:
    """A link that is there, and keeps the last message."""

    heard = float("inf")

    def send(self, message: dict[str, Any]) -> None:
        self.last = message

    def close(self) -> None:
        self.last = {}


class Starter:
    """Starts nothing. An agent has ended if `why` has its name."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self.started: list[str] = []

    def start(self, name: str, settings: dict[str, Any]) -> None:
        self.started.append(name)

    def why_ended(self, name: str) -> str | None:
        return self.why.get(name)

    def close(self) -> None:
        self.why.clear()


@contextmanager
def elastic_hosts(starter: Any, least: int, **options: Any) -> Iterator[ElasticHosts]:
    """Yield hosts a, b and c, which come and go. Each has one rank, and every number has a plan."""
    made = ElasticHosts(
        ["a", "b", "c"], starter, "127.0.0.1", None, None, [], least=least, most=3, **options
    )
    made.size = lambda name: 1
    made.resize = lambda ranks: True
    try:
        yield made
    finally:
        made.close()


def compare(hosts: ElasticHosts, name: str) -> None:
    """Note that a host is the same as this one."""
    hosts.compared[name] = hosts.remotes[name].link


def connect(hosts: ElasticHosts, *names: str) -> None:
    """Make these the hosts that are there."""
    for name, remote in hosts.remotes.items():
        remote.link = Standing() if name in names else None
