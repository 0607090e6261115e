"""Who goes on with a run whose launcher has gone: votes on loopback, and the lease of a dead one, which one heir gets."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.errors import DrumlineError, EnvironmentFault
from drumline.launchers import lease
from drumline.launchers.hosts import vote
from drumline.launchers.hosts.elastic import ElasticHosts
from drumline.launchers.hosts.vote import Voter
from drumline.launchers.lease import Lease, place_of
from tests.hosts.test_elastic import Starter, there
from tests.unit.test_launch_lease import write


@pytest.fixture
def voters(monkeypatch: pytest.MonkeyPatch) -> list[Voter]:
    """Of hosts a to d, all of which have confirmed their list, and have lost their launcher."""
    for name in ("FREE_SECONDS", "OFFICE_SECONDS"):
        monkeypatch.setattr(vote, name, -1.0)
    made = [Voter(name, "127.0.0.1", "secret") for name in "abcd"]
    members = {each.name: each.place for each in made}
    for each in made:
        assert each.confirm((1, 1), members)
        each.lose()
    return made


def test_a_majority_makes_one_launcher_and_no_second_one_in_its_term(voters: list[Voter]) -> None:
    a, b, c, d = voters
    a.at = ("10.0.0.1", 9)  # it hears its launcher, and so has no vote to give
    assert b.win() == 2 and [each.promised for each in voters] == [0, 2, 2, 2]
    b.at = ("10.0.0.2", 8)
    assert c.launcher() == d.launcher() == b.at
    b.lose()
    assert not c.answer({"term": 2, "known": [1, 1], "trial": False})["granted"], "one vote a term"
    assert c.win() == 3, "the winner of a term may have gone, too"
    c.at = ("10.0.0.3", 7)
    assert d.launcher() == c.at and b.launcher() == c.at, "not that of a, whose term is over"
    assert not d.confirm((1, 2), d.members), "a launcher of an earlier term is not followed any more"


def test_a_side_without_a_majority_makes_no_launcher_and_raises_no_term(voters: list[Voter]) -> None:
    a, b, c, d = voters
    for each in (a, b):
        each.at = ("10.0.0.1", 9)
    assert c.win() is None and d.win() is None
    assert [each.promised for each in voters] == [0, 0, 0, 0]
    assert c.launcher() == ("10.0.0.1", 9), "the others have one still"


def test_a_vote_waits_for_the_launcher_to_be_gone_and_goes_to_no_older_list(voters: list[Voter], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c, d = voters
    two = {each.name: each.place for each in (a, d)}
    assert a.confirm((1, 2), two) and d.confirm((1, 2), two)  # the launcher went on with these
    assert b.win() is None and c.win() is None
    assert d.win() == 2, "a majority of a list of two is both"
    monkeypatch.setattr(vote, "FREE_SECONDS", 60.0)
    d.lose()
    assert not d.answer({"term": 9, "known": [9, 9], "trial": False})["granted"]


def test_a_stranger_has_no_vote(voters: list[Voter]) -> None:
    assert Voter("e", "127.0.0.1", "another").win() is None
    false = Voter("a", "127.0.0.1", "another")
    false.confirm((1, 1), voters[0].members)
    false.lose()
    assert false.win() is None and voters[1].promised == 0


def test_the_lease_of_a_dead_launcher_goes_to_one_heir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    run = write(tmp_path / "run", token="dead", host="elsewhere")
    with Lease(run, ("10.0.0.2", 7), after="dead"):
        assert place_of(run) == ("10.0.0.2", 7)
        with pytest.raises(EnvironmentFault, match="another host has taken it over"), Lease(run, after="dead"):
            raise AssertionError("it was had")
    with pytest.raises(EnvironmentFault, match="the run has ended"), Lease(run, after="dead"):
        raise AssertionError("what was given back is nobody's to follow")
    assert place_of(run) is None


def test_an_heir_need_not_look_for_as_long_as_its_agent_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    run = write(tmp_path / "run", token="dead", host="elsewhere")
    with Lease(run, ("10.0.0.2", 7), "dead", (lease.text_of(run), time.monotonic() - 3600.0)):
        assert place_of(run) == ("10.0.0.2", 7)


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[ElasticHosts]:
    made = ElasticHosts(["a", "b", "c"], Starter(), "127.0.0.1", None, None, [], least=1, most=3, own="a")
    made.size, made.require, made.resize = lambda name: 1, lambda name: None, lambda ranks: True
    made.run, made.members = {"run_dir": str(tmp_path), "token": "mine"}, ["a", "b", "c"]
    try:
        yield made
    finally:
        made.close()


def test_before_the_first_ranks_a_busy_host_is_not_given_up(elastic: ElasticHosts) -> None:
    there(elastic, "a")
    link = elastic.remotes["a"].link
    assert link is not None
    link.heard = time.monotonic() - 20.0
    time.sleep(0.5)
    assert elastic.there() == ["a"]
    elastic.since, until = time.monotonic() - 20.0, time.monotonic() + 60
    while elastic.there() and time.monotonic() < until:
        time.sleep(0.05)
    assert not elastic.there() and "no sign for 6 s" in elastic.remotes["a"].gone


def test_a_launcher_without_half_of_its_hosts_ends(elastic: ElasticHosts) -> None:
    elastic.shared = False
    there(elastic, "a", "b", "c")
    elastic.compared = {name: elastic.remotes[name].link for name in "ab"}  # the agent of c is a new one, which may belong to another side
    elastic._require_right()
    elastic.remotes["b"].link = None
    with pytest.raises(DrumlineError, match="1 of the 3 hosts"):
        elastic._require_right()
    elastic.members = ["a", "b"]
    elastic._require_right()  # of two hosts the launcher's side goes on


def test_a_launcher_without_the_lease_ends_before_it_writes(elastic: ElasticHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.0)
    there(elastic, "a")
    write(Path(elastic.run["run_dir"]), token="mine", pid=os.getpid())
    elastic._require_right()
    write(Path(elastic.run["run_dir"]), token="another", pid=os.getpid())
    until = time.monotonic() + 10
    with pytest.raises(DrumlineError, match="has taken the run over"):
        elastic._require_right()
    assert time.monotonic() < until


def test_a_host_that_is_lost_while_it_is_compared_may_come_back(elastic: ElasticHosts) -> None:
    def require(name: str) -> None:
        if name == "b":
            elastic.remotes[name].link = None
        raise EnvironmentFault(f"host {name}: gives no answer, or differs")

    there(elastic, "a", "b", "c")
    elastic.require = require
    elastic._refuse(["b", "c"])
    assert elastic._refused == {"c"}
