"""Who goes on with a run whose launcher has gone.

Hosts vote on loopback, or one heir gets the lease of a dead launcher.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
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
from drumline_hosts.vote import Place, Voter
from plugins.hosts.tests.standing import Starter, connect, elastic_hosts
from tests.loopback import until
from tests.unit.test_launch_lease import write

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
# Where launchers listen.
FIRST = ("10.0.0.1", 9)
SECOND = ("10.0.0.2", 8)
THIRD = ("10.0.0.3", 7)


def make_voters(names: str) -> list[Voter]:
    return [Voter(name, "127.0.0.1", "secret") for name in names]


def places(voters: Sequence[Voter]) -> dict[str, Place]:
    return {voter.name: voter.place for voter in voters}


@pytest.fixture
def voters(monkeypatch: Patch) -> list[Voter]:
    """The voters of hosts a to d, which have all confirmed their list and lost their launcher."""
    monkeypatch.setattr(vote, "FREE_SECONDS", -1.0)
    monkeypatch.setattr(vote, "OFFICE_SECONDS", -1.0)
    made = make_voters("abcd")
    for each in made:
        assert each.confirm((1, 1), places(made), {})
        each.lose()
    return made


def join(new: list[Voter], voters: list[Voter]) -> None:
    """Have new voters confirm a list with all, and lose their launcher. The others have not."""
    longer = places([*voters, *new])
    for each in new:
        assert each.confirm((1, 2), longer, voters[0].members)
        each.lose()


@pytest.mark.claim(
    "one launcher follows a dead one: the heir of its lease, or whom a majority votes for"
)
def test_a_majority_makes_one_launcher_and_no_second_one_in_its_term(voters: list[Voter]) -> None:
    a, b, c, d = voters
    a.at = FIRST  # it hears its launcher, and so has no vote to give
    assert b.win() == 2
    assert [each.promised for each in voters] == [0, 2, 2, 2]
    b.at = SECOND
    assert c.launcher() == SECOND
    assert d.launcher() == SECOND

    b.lose()
    assert not c.answer({"term": 2, "known": [1, 1], "trial": False})["granted"], "one vote a term"
    assert c.win() == 3, "the winner of a term may have gone, too"
    c.at = THIRD
    assert d.launcher() == THIRD
    assert b.launcher() == THIRD, "not that of a, whose term is over"
    assert not d.confirm((1, 2), d.members, {}), "a launcher of an earlier term is over"


def test_a_side_without_a_majority_makes_no_launcher_and_raises_no_term(
    voters: list[Voter],
) -> None:
    a, b, c, d = voters
    a.at = FIRST
    b.at = FIRST
    assert c.win() is None
    assert d.win() is None
    assert [each.promised for each in voters] == [0, 0, 0, 0]
    assert c.launcher() == FIRST, "the others have one still"


def test_a_vote_waits_for_the_launcher_to_be_gone_and_goes_to_no_older_list(
    voters: list[Voter], monkeypatch: Patch
) -> None:
    a, b, c, d = voters
    for each in (a, d):
        # The launcher went on with these.
        assert each.confirm((1, 2), places([a, d]), {})
    assert b.win() is None
    assert c.win() is None
    assert d.win() == 2, "a majority of a list of two is both"

    monkeypatch.setattr(vote, "FREE_SECONDS", 60.0)
    d.lose()
    assert not d.answer({"term": 9, "known": [9, 9], "trial": False})["granted"]


def test_a_list_that_grows_makes_no_two_majorities(voters: list[Voter], monkeypatch: Patch) -> None:
    """The launcher on a died when e to h had confirmed the longer list, and b to d had not.

    The shorter list decides for both.
    """
    a, b, *_ = voters
    a.at = FIRST
    new = make_voters("efgh")
    join(new, voters)
    monkeypatch.setattr(vote, "OFFICE_SECONDS", 60.0)
    assert new[0].win() == 2, "with the votes of b to d"
    assert b.win() is None, "they have given their votes"


def test_no_majority_of_the_longer_list_alone(voters: list[Voter]) -> None:
    new = make_voters("efghi")
    for each in voters:
        each.at = FIRST
    join(new, voters)
    assert new[0].win() is None, "five of nine, and none of the four before"

    for each in new:
        each.settle()
    assert new[0].win() == 2, "all have confirmed"


def test_a_stranger_has_no_vote(voters: list[Voter]) -> None:
    assert Voter("e", "127.0.0.1", "another").win() is None
    false = Voter("a", "127.0.0.1", "another")
    false.confirm((1, 1), voters[0].members, {})
    false.lose()
    assert false.win() is None
    assert voters[1].promised == 0


def write_dead_lease(folder: Path, monkeypatch: Patch, patience: float) -> Path:
    """Return a run folder with the lease of a dead launcher, for which heirs wait so long."""
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    return write(folder / "run", token="dead", host="elsewhere")


@pytest.mark.claim(
    "one launcher follows a dead one: the heir of its lease, or whom a majority votes for"
)
def test_the_lease_of_a_dead_launcher_goes_to_one_heir(tmp_path: Path, monkeypatch: Patch) -> None:
    run = write_dead_lease(tmp_path, monkeypatch, 0.6)
    with Lease(run, SECOND, after="dead"):
        assert place_of(run) == SECOND
        require_no_lease(run, "another host has taken it over")
    # What was given back is nobody's to follow.
    require_no_lease(run, "the run has ended")
    assert place_of(run) is None


def require_no_lease(run: Path, why: str) -> None:
    with pytest.raises(EnvironmentFault, match=why), Lease(run, after="dead"):
        raise AssertionError("a second heir has the lease")


def test_an_heir_need_not_look_for_as_long_as_its_agent_has(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    run = write_dead_lease(tmp_path, monkeypatch, 3600.0)
    seen = (lease.text_of(run), time.monotonic() - 3600.0)
    with Lease(run, SECOND, "dead", seen):
        assert place_of(run) == SECOND


def test_an_agent_that_is_told_to_end_looks_for_no_launcher(
    tmp_path: Path, capsys: Capture
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
    with elastic_hosts(Starter(), least=1, own="a") as made:
        made.require = lambda name: None
        made.run = {"run_dir": str(tmp_path), "token": "mine"}
        made.members = dict.fromkeys("abc")
        yield made


def test_before_the_first_ranks_a_busy_host_is_not_given_up(elastic: ElasticHosts) -> None:
    connect(elastic, "a")
    remote = elastic.remotes["a"]
    assert remote.link is not None
    remote.link.heard = time.monotonic() - 20.0
    time.sleep(0.5)
    assert elastic.connected_hosts() == ["a"]

    elastic.first_start = time.monotonic() - 20.0
    until(lambda: not elastic.connected_hosts())
    assert "no sign for 6 s" in remote.gone


@pytest.mark.claim(
    "a launcher without half of its hosts, or without the lease, writes nothing more"
)
def test_a_launcher_without_half_of_its_hosts_ends(elastic: ElasticHosts) -> None:
    elastic.shared = False
    connect(elastic, "a", "b", "c")
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
    elastic: ElasticHosts, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.0)
    connect(elastic, "a")
    write(tmp_path, token="mine", pid=os.getpid())
    elastic._require_leadership()

    write(tmp_path, token="another", pid=os.getpid())
    end = time.monotonic() + 10
    with pytest.raises(DrumlineError, match="has taken the run over"):
        elastic._require_leadership()
    assert time.monotonic() < end


def test_a_host_that_called_by_itself_is_asked_for_when_it_is_lost(monkeypatch: Patch) -> None:
    """After a takeover no agent was started from here."""
    monkeypatch.setattr(hosts_elastic, "RECALL_SECONDS", 0.05)
    monkeypatch.setattr(hosts_elastic, "AGENTS_SECONDS", 0.05)
    started = []

    class Called(SSH):
        def start(self, name: str, settings: Any) -> None:
            started.append(name)

    known = {"secret": "s", "term": 2, "members": dict.fromkeys("abc"), "host": "a", "name": "b"}
    starter = Called(SSHLauncher(hosts=("a", "b", "c")), set())
    with elastic_hosts(starter, least=1, own="b", known=known) as made:
        connect(made, "b", "c")
        made.await_agents()
        made.remotes["c"].link = None
        until(lambda: "c" in started)


def test_a_host_that_is_told_to_end_leaves_the_rest(elastic: ElasticHosts, capsys: Capture) -> None:
    connect(elastic, "a", "b", "c")
    assert not elastic._drop_leaving_hosts(set())
    elastic.least = 3
    assert not elastic._drop_leaving_hosts({"b"}), "too few are left: the run ends, saved"

    elastic.least = 2
    assert elastic._drop_leaving_hosts({"b"})
    assert elastic.connected_hosts() == ["a", "c"]
    assert "goes on without host b: it was asked to end, and has saved" in capsys.readouterr().err
    rest = elastic._resting_until["b"]
    assert rest > time.monotonic(), "it may be going down: it is not asked for at once"


def test_heirs_learn_that_the_run_has_saved(elastic: ElasticHosts, tmp_path: Path) -> None:
    """It was to begin at another folder's checkpoint; only the launcher's host has the events."""
    connect(elastic, "a", "b")
    elastic._hosts_at_choice = ["a", "b"]
    elastic._is_checkpoint_named = True
    elastic._events = tmp_path / "events.jsonl"
    link: Any = elastic.remotes["b"].link
    assert not elastic.may_pause()
    assert not hasattr(link, "last")

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
    assert not elastic.may_pause()
    assert link.last == {"do": "saved"}

    elastic.counts = {"a": 1}
    elastic._next_look = 0.0
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
    }
    fresh = {**order, "resume": None}
    joins = {**order, "resume": "newest"}
    run_id = tmp_path / RUN_ID
    refusal = "has checkpoints of another run"
    assert heir.confirm({**fresh, "number": 1}) == ""
    assert heir.confirm({**joins, "number": 2}) == ""

    (tmp_path / "checkpoints" / "step-00005000").mkdir(parents=True)
    assert refusal in heir.confirm({**fresh, "number": 3})
    assert heir.confirm({**joins, "number": 3}) == "", "its own, of this run"
    run_id.write_text("older")
    assert refusal in heir.confirm({**joins, "number": 4})
    run_id.unlink()
    assert refusal in heir.confirm({**joins, "number": 5})


def test_a_host_without_gpus_does_not_join_those_with(monkeypatch: Patch) -> None:
    known = facts()
    with_gpus = {**known, "machine": {**known["machine"], "device": "cuda"}}
    checkpoint = SimpleNamespace(every_steps=None)
    plan: Any = SimpleNamespace(run_dir="/nowhere", config=SimpleNamespace(checkpoint=checkpoint))
    remotes = {
        "a": SimpleNamespace(link=object(), facts=with_gpus),
        "b": SimpleNamespace(link=object(), facts=known),
    }
    hosts: Any = SimpleNamespace(counts={"a": 1}, remotes=remotes, run={})
    monkeypatch.setattr(ssh_start, "create_whole", lambda path, data: True)
    spec = SSHLauncher(hosts=("a", "b"))
    ssh_start.set_elastic_run(spec, plan, Path("plan.json"), hosts, lambda ranks: True)
    with pytest.raises(EnvironmentFault, match="host a has GPUs, and host b has none"):
        hosts.require("b")


def test_a_host_that_is_lost_while_it_is_compared_may_come_back(elastic: ElasticHosts) -> None:
    def require(name: str) -> None:
        if name == "b":
            elastic.remotes[name].link = None
        raise EnvironmentFault(f"host {name}: gives no answer, or differs")

    connect(elastic, "a", "b", "c")
    elastic.require = require
    elastic._refuse(["b", "c"])
    assert elastic._refused == {"c"}
