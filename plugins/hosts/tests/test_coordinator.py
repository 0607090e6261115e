"""Hosts that are lost, or answer late, while the launcher plans: real connections on loopback, without ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import EnvironmentFault
from drumline.launch.postmortem import RankEnd
from drumline.system.signals import LauncherSignals
from drumline_hosts import elastic as hosts_elastic
from drumline_hosts.agent import _end_values
from drumline_hosts.coordinator import Attempt, Hosts
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.link import Message, call
from tests.loopback import free_ports, until


class Starter:
    """Agents are ended where `why` says so."""

    def __init__(self) -> None:
        self.why, self.started = dict[str, str](), list[str]()

    def start(self, name: str, settings: Message) -> None:
        self.started.append(name)

    def ended(self, name: str) -> str | None:
        return self.why.get(name)

    def close(self) -> None:
        self.why.clear()


class Called:
    """One agent: what it was told, and its answers by what it shall do. It beats."""

    def __init__(
        self,
        hosts: Hosts,
        name: str,
        answers: dict[str, Callable[[Message], Message | None]] | None = None,
    ) -> None:
        self.link, self.told, self.answers = (
            call(*hosts.place, hosts.secret),
            list[Message](),
            answers or {},
        )
        self.link.send({"hello": name, "process": name, "votes": [name, 1]})
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()
        until(lambda: hosts.remotes[name].link)

    def _listen(self) -> None:
        while (order := self.link.receive()) is not None:
            if "do" in order:
                self.told.append(order)
                if (answer := self.answers.get(order["do"], lambda order: None)(order)) is not None:
                    self.link.send(answer)

    def _beat(self) -> None:
        while {"do": "end"} not in self.told:
            self.link.send({"beat": time.monotonic(), "clock": time.time()})
            time.sleep(0.2)


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticHosts]:
    monkeypatch.setattr(hosts_elastic, "RECALL_SECONDS", 0.05)
    made = ElasticHosts(
        ["a", "b", "c"], Starter(), "127.0.0.1", None, None, [], least=2, most=3, own="a"
    )
    made.size, made.resize = lambda name: 1, lambda ranks: True
    made.require = lambda name: made.compared.update({name: made.remotes[name].link})
    made.run = {"run_dir": str(tmp_path), "plan": str(tmp_path / "plan.json"), "token": "mine"}
    try:
        yield made
    finally:
        made.close()


def confirms(order: Message) -> Message:
    return {"known": "", "of": order["id"]}


def ends(rank: int, code: int = 0) -> Callable[[Message], Message]:
    def answer(order: Message) -> Message:
        end = RankEnd(rank, code, None, Path(order["logs"]) / f"rank-{rank}.log", at=time.time())
        return {"ends": [_end_values(end)], "leaves": False, "attempt": order["attempt"]}

    return answer


def test_a_host_that_is_lost_while_the_plan_is_made_leaves_the_rest(
    elastic: ElasticHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_require_leadership", lambda: None)
    agents = {
        name: Called(elastic, name, {"know": confirms, "start": ends("ac".find(name))})
        for name in "abc"
    }
    starter: Any = elastic.starter
    elastic._begin_recall()

    def resize(ranks: int) -> bool:
        if "b" not in starter.why:
            starter.why["b"] = "ssh has ended"
            agents["b"].link.close()
            until(lambda: starter.started)  # it is asked for again
        return True

    elastic.counts, elastic.resize = {"a": 1}, resize
    found = elastic.attempt(
        ["worker", "plan.json"], tmp_path / "logs" / "attempt-0", LauncherSignals()
    )
    assert [end.exitcode for end in found] == [0, 0] and list(elastic.counts) == ["a", "c"]
    assert elastic.members == {"a": ["a", 1], "c": ["c", 1]}


def test_one_who_takes_part_and_is_lost_has_not_confirmed(elastic: ElasticHosts) -> None:
    agents = {name: Called(elastic, name, {"know": confirms}) for name in "abc"}
    elastic._choose_hosts(LauncherSignals())
    agents["b"].link.close()
    until(lambda: elastic.remotes["b"].link is None)
    with pytest.raises(EnvironmentFault, match="host b: the agent of its host has ended"):
        elastic._have_members_confirmed(["worker", "plan.json"])
    assert not elastic.members


def test_a_host_that_calls_by_itself_is_not_started_again(elastic: ElasticHosts) -> None:
    calls = list[Called]()

    def ended(name: str) -> str | None:
        if name == "b" and not calls:
            calls.append(Called(elastic, "b"))
        return "ssh has ended" if name == "b" else None

    starter: Any = elastic.starter
    starter.ended = ended
    elastic._begin_recall()
    until(lambda: calls)
    time.sleep(0.3)
    assert not starter.started and elastic.remotes["b"].facts["votes"] == ["b", 1]


def test_a_plan_that_fails_leaves_the_ranks_of_the_one_that_is_there(elastic: ElasticHosts) -> None:
    for name in "ab":
        Called(elastic, name)
    elastic.counts, elastic.resize = {"a": 1, "b": 1, "c": 1}, lambda ranks: False
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="no plan takes the same steps on 2 to 2 hosts"):
            elastic._choose_hosts(LauncherSignals())
        assert elastic.counts == {"a": 1, "b": 1, "c": 1}


def test_hosts_that_are_lost_while_they_are_compared_are_waited_for(
    elastic: ElasticHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_elastic, "BACK_SECONDS", 0.5)
    agents = {name: Called(elastic, name) for name in "ab"}

    def require(name: str) -> None:
        if name == "b":
            agents["b"].link.close()
            until(lambda: elastic.remotes["b"].link is None)
            raise EnvironmentFault("host b: gives no answer")
        elastic.compared[name] = elastic.remotes[name].link

    elastic.require = require
    with pytest.raises(EnvironmentFault, match="1 of at least 2 hosts are there"):
        elastic._choose_hosts(LauncherSignals())


def test_an_answer_is_to_its_own_question(elastic: ElasticHosts) -> None:
    orders = list[Message]()
    agents = {
        name: Called(elastic, name, {"know": lambda order: orders.append(order)}) for name in "ab"
    }
    Called(elastic, "c").link.close()
    with pytest.raises(EnvironmentFault, match="host c"):
        elastic.ask({"do": "know", "number": 1}, "known", ["a", "b", "c"])
    until(lambda: len(orders) == 2)
    for agent in agents.values():  # too late, to the first
        agent.link.send(confirms(orders[0]))
        agent.answers = {"know": lambda order: {"known": "another", "of": order["id"]}}
    assert elastic.ask({"do": "know", "number": 2}, "known", ["a", "b"]) == {
        "a": "another",
        "b": "another",
    }


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(["a", "b"], Starter(), "127.0.0.1", None, None, [])
    made.counts, made._has_run_attempt = {"a": 1, "b": 1}, True
    yield made
    made.close()


def test_what_belongs_to_an_earlier_attempt_does_not_count(hosts: Hosts, tmp_path: Path) -> None:
    started = list[Message]()
    a = Called(hosts, "a", {"start": lambda order: started.append(order)})
    b = Called(
        hosts,
        "b",
        {"start": lambda order: {"refused": "cannot reach port 7", "attempt": order["attempt"]}},
    )
    (first,) = hosts.attempt(["worker"], tmp_path / "logs" / "attempt-1", LauncherSignals())
    assert first.message == "host b cannot reach port 7"
    until(lambda: {"do": "elsewhere", "attempt": "attempt-1", "codes": [1]} in a.told)

    def late(order: Message) -> Message:
        a.link.send(ends(0, 1)(started[0]))
        a.link.send({"failed": [1], "attempt": "attempt-1"})
        return ends(0)(order)

    a.answers, b.answers = {"start": late}, {"start": ends(1)}
    second = hosts.attempt(["worker"], tmp_path / "logs" / "attempt-2", LauncherSignals())
    assert [(end.exitcode, end.log.parent.name) for end in second] == [(0, "attempt-2")] * 2
    assert not any(
        order.get("attempt") == "attempt-2" and order["do"] == "elsewhere"
        for order in a.told + b.told
    )


def test_attempts_that_follow_each_other_have_names_of_their_own(
    elastic: ElasticHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their folders are seen late, as over NFS."""
    names = list[str]()

    def run(attempt: Attempt, rank: list[str]) -> list[RankEnd]:
        names.append(attempt.logs.name)
        attempt.paused = len(names) == 1  # a host has come
        return [RankEnd(0, 75 if attempt.paused else 1, None, attempt.logs / "rank-0.log")]

    monkeypatch.setattr(Attempt, "run", run)
    for name in ("_require_leadership", "_have_members_confirmed"):
        monkeypatch.setattr(elastic, name, lambda *given: None)
    for name in "ab":
        Called(elastic, name)
    for _ in range(2):
        elastic.attempt(["worker", "plan.json"], tmp_path / "logs" / "attempt-4", LauncherSignals())
    assert names == ["attempt-4", "attempt-5", "attempt-6"]


def test_a_second_launch_of_one_process_has_the_same_port() -> None:
    port = free_ports(1)[0] - 1
    for _ in range(2):
        made = Hosts(["a"], Starter(), "127.0.0.1", port, None, [])
        link = call(*made.place, made.secret)
        made.close()
        link.close()
