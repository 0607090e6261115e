"""Hosts that are lost, or answer late, while the launcher plans.

Connections are real, on loopback, and there are no ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.errors import EnvironmentFault
from drumline.launch.postmortem import RankEnd
from drumline.system.signals import LauncherSignals
from drumline_hosts import elastic as hosts_elastic
from drumline_hosts.agent import _end_values
from drumline_hosts.coordinator import Attempt, Hosts
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.link import Message, call
from plugins.hosts.tests.standing import Starter, compare, elastic_hosts
from tests.loopback import free_ports, until

Answer = Callable[[Message], Message | None]
Patch = pytest.MonkeyPatch
RANK = ["worker", "plan.json"]
REFUSED = {"refused": "cannot reach port 7", "attempt": "attempt-1"}


class Called:
    """One agent, which beats, keeps its orders and answers them by what it shall `do`."""

    def __init__(self, hosts: Hosts, name: str, **answers: Answer) -> None:
        self.hosts = hosts
        self.name = name
        self.orders: list[Message] = []
        self.answers = answers
        # The first message says who calls.
        self.link = call(*hosts.place, hosts.secret)
        self.link.send({"hello": name, "process": name, "votes": [name, 1]})
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        until(lambda: hosts.remotes[name].link)

    def leave(self) -> None:
        """Close the connection, and wait until the launcher has noticed it."""
        self.link.close()
        until(lambda: self.hosts.remotes[self.name].link is None)

    def _listen(self) -> None:
        order = self.link.receive()
        while order is not None:
            if "do" in order:
                self.orders.append(order)
                self._answer(order)
            order = self.link.receive()

    def _answer(self, order: Message) -> None:
        make_answer = self.answers.get(order["do"])
        if make_answer is None:
            return
        answer = make_answer(order)
        if answer is not None:
            self.link.send(answer)

    def _beat(self) -> None:
        while {"do": "end"} not in self.orders:
            self.link.send({"beat": time.monotonic(), "clock": time.time()})
            time.sleep(0.2)


@pytest.fixture
def starter() -> Starter:
    return Starter()


@pytest.fixture
def elastic(tmp_path: Path, starter: Starter, monkeypatch: Patch) -> Iterator[ElasticHosts]:
    monkeypatch.setattr(hosts_elastic, "RECALL_SECONDS", 0.05)
    with elastic_hosts(starter, least=2, own="a") as made:
        made.require = lambda name: compare(made, name)
        plan = str(tmp_path / "plan.json")
        made.run = {"run_dir": str(tmp_path), "plan": plan, "token": "mine"}
        yield made


def call_agents(hosts: Hosts, names: str, **answers: Answer) -> list[Called]:
    """Connect an agent for each of these hosts."""
    return [Called(hosts, name, **answers) for name in names]


def choose_hosts(elastic: ElasticHosts) -> None:
    """Have the launcher choose who takes part. No signal has come."""
    elastic._choose_hosts(LauncherSignals())


def attempt(hosts: Hosts, folder: Path, number: int) -> list[RankEnd]:
    """Run an attempt without a signal, and return how its ranks ended."""
    logs = folder / "logs" / f"attempt-{number}"
    return hosts.attempt(RANK, logs, LauncherSignals())


def confirm(order: Message) -> Message:
    """Answer the question who takes part: there is no mistake."""
    return {"known": "", "of": order["id"]}


def end_rank(rank: int, code: int = 0) -> Answer:
    """Return the answer of a host whose rank ends as soon as it has started."""

    def answer(order: Message) -> Message:
        log = Path(order["logs"]) / f"rank-{rank}.log"
        end = RankEnd(rank, code, None, log, at=time.time())
        return {"ends": [_end_values(end)], "leaves": False, "attempt": order["attempt"]}

    return answer


def test_a_host_that_is_lost_while_the_plan_is_made_leaves_the_rest(
    elastic: ElasticHosts, starter: Starter, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(elastic, "_require_leadership", lambda: None)
    Called(elastic, "a", know=confirm, start=end_rank(0))
    b = Called(elastic, "b", know=confirm, start=end_rank(-1))
    Called(elastic, "c", know=confirm, start=end_rank(1))
    elastic._begin_recall()

    def resize(ranks: int) -> bool:
        if "b" not in starter.why:
            starter.why["b"] = "ssh has ended"
            b.link.close()
            until(lambda: starter.started)  # it is asked for again
        return True

    elastic.counts = {"a": 1}
    elastic.resize = resize

    ends = attempt(elastic, tmp_path, 0)

    assert [end.exitcode for end in ends] == [0, 0]
    assert list(elastic.counts) == ["a", "c"]
    assert elastic.members == {"a": ["a", 1], "c": ["c", 1]}


def test_one_who_takes_part_and_is_lost_has_not_confirmed(elastic: ElasticHosts) -> None:
    _, b, _ = call_agents(elastic, "abc", know=confirm)

    choose_hosts(elastic)
    b.leave()

    with pytest.raises(EnvironmentFault, match="host b: the agent of its host has ended"):
        elastic._have_members_confirmed(RANK)
    assert not elastic.members


def test_a_host_that_calls_by_itself_is_not_started_again(
    elastic: ElasticHosts, starter: Starter, monkeypatch: Patch
) -> None:
    calls: list[Called] = []

    def end(name: str) -> str | None:
        if name != "b":
            return None
        if not calls:
            calls.append(Called(elastic, "b"))
        return "ssh has ended"

    monkeypatch.setattr(starter, "why_ended", end)

    elastic._begin_recall()
    until(lambda: calls)
    time.sleep(0.3)

    assert not starter.started
    assert elastic.remotes["b"].facts["votes"] == ["b", 1]


def test_a_plan_that_fails_leaves_the_ranks_of_the_one_that_is_there(elastic: ElasticHosts) -> None:
    call_agents(elastic, "ab")

    counts = {"a": 1, "b": 1, "c": 1}
    elastic.counts = counts.copy()
    elastic.resize = lambda ranks: False

    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="no plan takes the same steps on 2 to 2 hosts"):
            choose_hosts(elastic)
        assert elastic.counts == counts


def test_hosts_that_are_lost_while_they_are_compared_are_waited_for(
    elastic: ElasticHosts, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(hosts_elastic, "BACK_SECONDS", 0.5)
    _, b = call_agents(elastic, "ab")

    def require(name: str) -> None:
        if name == "b":
            b.leave()
            raise EnvironmentFault("host b: gives no answer")
        compare(elastic, name)

    elastic.require = require

    with pytest.raises(EnvironmentFault, match="1 host is there, and at least 2 are needed"):
        choose_hosts(elastic)


def test_an_answer_is_to_its_own_question(elastic: ElasticHosts) -> None:
    orders: list[Message] = []
    agents = call_agents(elastic, "ab", know=orders.append)
    Called(elastic, "c").link.close()

    with pytest.raises(EnvironmentFault, match="host c"):
        elastic.ask({"do": "know", "number": 1}, "known", ["a", "b", "c"])
    until(lambda: len(orders) == 2)

    def answer_another(order: Message) -> Message:
        return {"known": "another", "of": order["id"]}

    for agent in agents:
        agent.link.send(confirm(orders[0]))  # too late, to the first question
        agent.answers = {"know": answer_another}

    answers = elastic.ask({"do": "know", "number": 2}, "known", ["a", "b"])
    assert answers == {"a": "another", "b": "another"}


@pytest.fixture
def hosts(starter: Starter) -> Iterator[Hosts]:
    made = Hosts(["a", "b"], starter, "127.0.0.1", None, None, [])
    made.counts = {"a": 1, "b": 1}
    made._has_run_attempt = True
    yield made
    made.close()


def test_what_belongs_to_an_earlier_attempt_does_not_count(hosts: Hosts, tmp_path: Path) -> None:
    started: list[Message] = []
    a = Called(hosts, "a", start=started.append)
    b = Called(hosts, "b", start=lambda order: REFUSED)

    (first,) = attempt(hosts, tmp_path, 1)
    assert first.message == "host b cannot reach port 7"
    elsewhere = {"do": "elsewhere", "attempt": "attempt-1", "codes": [1]}
    until(lambda: elsewhere in a.orders)

    def answer_late(order: Message) -> Message | None:
        """Send two messages of the first attempt before the answer."""
        a.link.send(end_rank(0, 1)(started[0]))
        a.link.send({"failed": [1], "attempt": "attempt-1"})
        return end_rank(0)(order)

    a.answers = {"start": answer_late}
    b.answers = {"start": end_rank(1)}

    second = attempt(hosts, tmp_path, 2)

    assert [end.exitcode for end in second] == [0, 0]
    assert [end.log.parent.name for end in second] == ["attempt-2", "attempt-2"]
    for order in a.orders + b.orders:
        if order["do"] == "elsewhere":
            assert order["attempt"] != "attempt-2"


def test_attempts_that_follow_each_other_have_names_of_their_own(
    elastic: ElasticHosts, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Their folders may be seen late, as over NFS."""
    names: list[str] = []

    def run(one: Attempt, rank: list[str]) -> list[RankEnd]:
        names.append(one.logs.name)
        code = 1
        if len(names) == 1:  # a host has come
            one.paused = True
            code = 75

        log = one.logs / "rank-0.log"
        return [RankEnd(0, code, None, log)]

    monkeypatch.setattr(Attempt, "run", run)
    monkeypatch.setattr(elastic, "_require_leadership", lambda: None)
    monkeypatch.setattr(elastic, "_have_members_confirmed", lambda rank: None)
    call_agents(elastic, "ab")

    for _ in range(2):
        attempt(elastic, tmp_path, 4)
    assert names == ["attempt-4", "attempt-5", "attempt-6"]


def test_a_second_launch_of_one_process_has_the_same_port() -> None:
    port = free_ports(1)[0] - 1
    for _ in range(2):
        made = Hosts(["a"], Starter(), "127.0.0.1", port, None, [])
        link = call(*made.place, made.secret)

        made.close()
        link.close()
