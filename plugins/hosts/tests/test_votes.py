"""Who goes on with a run whose launcher has gone: votes on loopback, and the lease of a dead one, which one heir gets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.errors import DrumlineError, EnvironmentFault
from drumline.launch import lease
from drumline.launch.lease import Lease, place_of
from drumline.telemetry.events import EventLog, Save
from drumline_hosts import elastic as hosts_elastic
from drumline_hosts import vote
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.facts import facts
from drumline_hosts.ssh import start as ssh_start
from drumline_hosts.ssh.spec import SSHLauncher
from drumline_hosts.ssh.start import SSH
from drumline_hosts.takeover import RUN_ID, StandbyLauncher
from drumline_hosts.vote import Voter
from plugins.hosts.tests.test_elastic import Starter, there
from tests.unit.test_launch_lease import write


@pytest.fixture
def voters(monkeypatch: pytest.MonkeyPatch) -> list[Voter]:
    """Of hosts a to d, all of which have confirmed their list, and have lost their launcher."""
    for name in ("FREE_SECONDS", "OFFICE_SECONDS"):
        monkeypatch.setattr(vote, name, -1.0)
    made = [Voter(name, "127.0.0.1", "secret") for name in "abcd"]
    members = {each.name: each.place for each in made}
    for each in made:
        assert each.confirm((1, 1), members, {})
        each.lose()
    return made


@pytest.mark.claim(
    "one launcher follows a dead one: the heir of its lease, or whom a majority votes for"
)
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
    assert not d.confirm((1, 2), d.members, {}), (
        "a launcher of an earlier term is not followed any more"
    )


def test_a_side_without_a_majority_makes_no_launcher_and_raises_no_term(
    voters: list[Voter],
) -> None:
    a, b, c, d = voters
    for each in (a, b):
        each.at = ("10.0.0.1", 9)
    assert c.win() is None and d.win() is None
    assert [each.promised for each in voters] == [0, 0, 0, 0]
    assert c.launcher() == ("10.0.0.1", 9), "the others have one still"


def test_a_vote_waits_for_the_launcher_to_be_gone_and_goes_to_no_older_list(
    voters: list[Voter], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d = voters
    two = {each.name: each.place for each in (a, d)}
    # The launcher went on with these.
    assert a.confirm((1, 2), two, {}) and d.confirm((1, 2), two, {})
    assert b.win() is None and c.win() is None
    assert d.win() == 2, "a majority of a list of two is both"
    monkeypatch.setattr(vote, "FREE_SECONDS", 60.0)
    d.lose()
    assert not d.answer({"term": 9, "known": [9, 9], "trial": False})["granted"]


def test_a_list_that_grows_makes_no_two_majorities(
    voters: list[Voter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher on a died when e to h had confirmed the longer list, and b to d had not: the shorter list decides for both."""
    a, *others = voters
    a.at = ("10.0.0.1", 9)
    new = [Voter(name, "127.0.0.1", "secret") for name in "efgh"]
    longer = {each.name: each.place for each in (*voters, *new)}
    for each in new:
        assert each.confirm((1, 2), longer, a.members)
        each.lose()
    monkeypatch.setattr(vote, "OFFICE_SECONDS", 60.0)
    assert new[0].win() == 2, "with the votes of b to d"
    assert others[0].win() is None, "they have given their votes"


def test_no_majority_of_the_longer_list_alone(voters: list[Voter]) -> None:
    new = [Voter(name, "127.0.0.1", "secret") for name in "efghi"]
    longer = {each.name: each.place for each in (*voters, *new)}
    for each in voters:
        each.at = ("10.0.0.1", 9)
    for each in new:
        assert each.confirm((1, 2), longer, voters[0].members)
        each.lose()
    assert new[0].win() is None, "five of nine, and none of the four before"
    for each in new:
        each.settle()
    assert new[0].win() == 2, "all have confirmed"


def test_a_stranger_has_no_vote(voters: list[Voter]) -> None:
    assert Voter("e", "127.0.0.1", "another").win() is None
    false = Voter("a", "127.0.0.1", "another")
    false.confirm((1, 1), voters[0].members, {})
    false.lose()
    assert false.win() is None and voters[1].promised == 0


@pytest.mark.claim(
    "one launcher follows a dead one: the heir of its lease, or whom a majority votes for"
)
def test_the_lease_of_a_dead_launcher_goes_to_one_heir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    run = write(tmp_path / "run", token="dead", host="elsewhere")
    with Lease(run, ("10.0.0.2", 7), after="dead"):
        assert place_of(run) == ("10.0.0.2", 7)
        with (
            pytest.raises(EnvironmentFault, match="another host has taken it over"),
            Lease(run, after="dead"),
        ):
            raise AssertionError("it was had")
    with pytest.raises(EnvironmentFault, match="the run has ended"), Lease(run, after="dead"):
        raise AssertionError("what was given back is nobody's to follow")
    assert place_of(run) is None


def test_an_heir_need_not_look_for_as_long_as_its_agent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    run = write(tmp_path / "run", token="dead", host="elsewhere")
    with Lease(run, ("10.0.0.2", 7), "dead", (lease.text_of(run), time.monotonic() - 3600.0)):
        assert place_of(run) == ("10.0.0.2", 7)


def test_an_agent_that_is_told_to_end_looks_for_no_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heir = StandbyLauncher({"name": "b", "secret": "s"}, "127.0.0.1")
    heir.known = {
        "run_dir": str(tmp_path),
        "members": dict.fromkeys("ab"),
        "host": "a",
        "shared": False,
    }
    looks = iter([0, signal.SIGTERM, signal.SIGTERM])
    assert heir.find(lambda: next(looks)) is None
    assert "found no launcher" not in capsys.readouterr().err


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[ElasticHosts]:
    made = ElasticHosts(
        ["a", "b", "c"], Starter(), "127.0.0.1", None, None, [], least=1, most=3, own="a"
    )
    made.size, made.require, made.resize = lambda name: 1, lambda name: None, lambda ranks: True
    made.run, made.members = {"run_dir": str(tmp_path), "token": "mine"}, dict.fromkeys("abc")
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
    assert elastic.connected_hosts() == ["a"]
    elastic.first_start, until = time.monotonic() - 20.0, time.monotonic() + 60
    while elastic.connected_hosts() and time.monotonic() < until:
        time.sleep(0.05)
    assert not elastic.connected_hosts() and "no sign for 6 s" in elastic.remotes["a"].gone


@pytest.mark.claim(
    "a launcher without half of its hosts, or without the lease, writes nothing more"
)
def test_a_launcher_without_half_of_its_hosts_ends(elastic: ElasticHosts) -> None:
    elastic.shared = False
    there(elastic, "a", "b", "c")
    # The agent of c is a new one, which may belong to another side.
    elastic.compared = {name: elastic.remotes[name].link for name in "ab"}
    elastic._require_leadership()
    elastic.remotes["b"].link = None
    with pytest.raises(DrumlineError, match="1 of the 3 hosts"):
        elastic._require_leadership()
    elastic.members = dict.fromkeys("ab")
    elastic._require_leadership()  # of two hosts the launcher's side goes on


@pytest.mark.claim(
    "a launcher without half of its hosts, or without the lease, writes nothing more"
)
def test_a_launcher_without_the_lease_ends_before_it_writes(
    elastic: ElasticHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.0)
    there(elastic, "a")
    write(Path(elastic.run["run_dir"]), token="mine", pid=os.getpid())
    elastic._require_leadership()
    write(Path(elastic.run["run_dir"]), token="another", pid=os.getpid())
    until = time.monotonic() + 10
    with pytest.raises(DrumlineError, match="has taken the run over"):
        elastic._require_leadership()
    assert time.monotonic() < until


def test_a_host_that_called_by_itself_is_asked_for_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a takeover no agent was started from here."""
    monkeypatch.setattr(hosts_elastic, "RECALL_SECONDS", 0.05)
    monkeypatch.setattr(hosts_elastic, "AGENTS_SECONDS", 0.05)
    started = []

    class Called(SSH):
        def start(self, name: str, settings: Any) -> None:
            started.append(name)

    known = {"secret": "s", "term": 2, "members": dict.fromkeys("abc"), "host": "a", "name": "b"}
    starter = Called(SSHLauncher(hosts=("a", "b", "c")), set())
    made = ElasticHosts(
        ["a", "b", "c"], starter, "127.0.0.1", None, None, [], least=1, most=3, own="b", known=known
    )
    try:
        there(made, "b", "c")
        made.await_agents()
        made.remotes["c"].link = None
        until = time.monotonic() + 30
        while "c" not in started and time.monotonic() < until:
            time.sleep(0.05)
        assert "c" in started
    finally:
        made.close()


def test_a_host_that_is_told_to_end_leaves_the_rest(
    elastic: ElasticHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    there(elastic, "a", "b", "c")
    assert not elastic._drop_leaving_hosts(set())
    elastic.least = 3
    assert not elastic._drop_leaving_hosts({"b"}), "too few are left: the run ends, saved"
    elastic.least = 2
    assert elastic._drop_leaving_hosts({"b"}) and elastic.connected_hosts() == ["a", "c"]
    assert "goes on without host b: it was asked to end, and has saved" in capsys.readouterr().err
    assert elastic._resting_until["b"] > time.monotonic(), (
        "it may be going down: it is not asked for at once"
    )


def test_heirs_learn_that_the_run_has_saved(elastic: ElasticHosts, tmp_path: Path) -> None:
    """It was to begin at a checkpoint of another folder; only the launcher's host has the events."""
    there(elastic, "a", "b")
    elastic._hosts_at_choice, elastic._is_checkpoint_named, elastic._events = (
        ["a", "b"],
        True,
        tmp_path / "events.jsonl",
    )
    link: Any = elastic.remotes["b"].link
    assert not elastic.may_pause() and not hasattr(link, "last")
    saved = Save(
        step=5,
        path=str(tmp_path / "step-00000005"),
        bytes=1,
        seconds=0.0,
        blocked_seconds=0.0,
        error=None,
    )
    EventLog(elastic._events).emit(saved)
    elastic._next_look = 0.0
    assert not elastic.may_pause() and link.last == {"do": "saved"}
    elastic.counts, elastic._next_look = {"a": 1}, 0.0
    elastic._hosts_at_choice = ["a"]
    assert elastic.may_pause(), "and b may join there"


def test_a_host_with_another_run_s_checkpoints_does_not_join(tmp_path: Path) -> None:
    heir = StandbyLauncher({"name": "c", "secret": "s"}, "127.0.0.1")
    heir.own = True
    order = {
        "run_dir": str(tmp_path),
        "members": {},
        "before": {},
        "shared": False,
        "files": {RUN_ID: "mine"},
        "term": 1,
        "number": 2,
    }
    fresh, joins = {**order, "number": 1, "resume": None}, {**order, "resume": "newest"}
    assert heir.confirm(fresh) == heir.confirm(joins) == ""
    (tmp_path / "checkpoints" / "step-00005000").mkdir(parents=True)
    assert "has checkpoints of another run" in heir.confirm({**fresh, "number": 3})
    assert heir.confirm({**joins, "number": 3}) == "", "its own, of this run"
    for number, foreign in enumerate(
        (lambda: (tmp_path / RUN_ID).write_text("older"), (tmp_path / RUN_ID).unlink), 4
    ):
        foreign()
        assert "has checkpoints of another run" in heir.confirm({**joins, "number": number})


def test_a_host_without_gpus_does_not_join_those_with(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts()
    with_gpus = {**known, "machine": {**known["machine"], "device": "cuda"}}
    plan: Any = SimpleNamespace(
        run_dir="/nowhere", config=SimpleNamespace(checkpoint=SimpleNamespace(steps=None))
    )
    remotes = {
        name: SimpleNamespace(link=object(), facts=each)
        for name, each in (("a", with_gpus), ("b", known))
    }
    hosts: Any = SimpleNamespace(counts={"a": 1}, remotes=remotes, run={})
    monkeypatch.setattr(ssh_start, "create_whole", lambda path, data: True)
    ssh_start.set_elastic_run(
        SSHLauncher(hosts=("a", "b")), plan, Path("plan.json"), hosts, lambda ranks: True
    )
    with pytest.raises(EnvironmentFault, match="host a has GPUs, and host b has none"):
        hosts.require("b")


def test_a_host_that_is_lost_while_it_is_compared_may_come_back(elastic: ElasticHosts) -> None:
    def require(name: str) -> None:
        if name == "b":
            elastic.remotes[name].link = None
        raise EnvironmentFault(f"host {name}: gives no answer, or differs")

    there(elastic, "a", "b", "c")
    elastic.require = require
    elastic._refuse(["b", "c"])
    assert elastic._refused == {"c"}
