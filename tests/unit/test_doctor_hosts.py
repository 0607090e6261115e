"""`drumline doctor` of several hosts: what each answers, what differs between them, and an all-reduce of their ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from drumline.config.launcher import Reached
from drumline.doctor import host
from drumline.doctor.check import HostReport
from drumline.doctor.host import Question
from drumline.doctor.hosts import compare_hosts, examine_hosts, preflight
from drumline.errors import EnvironmentFault
from drumline.system.process import run_module
from tests.unit.test_doctor import CPU, RESULT


@pytest.fixture(autouse=True)
def little_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WRITTEN", host.MIB)


def answering(
    torch: str = "2.13", found: str = "free", verdict: str = "ok", clocks: float = 0.01
) -> Reached:
    """A host that answers without being there."""

    def run(module: str, question: str, seconds: float) -> tuple[int | None, str, str]:
        values = json.loads(question)
        if module == "drumline.doctor.host":
            checks = [{"name": "port", "found": found, "verdict": verdict, "fix": "end it"}]
            return (
                0,
                json.dumps(
                    {
                        "name": "vm",
                        "checks": checks,
                        "facts": {"torch": torch},
                        "ranks": 2,
                        "port": 1234,
                    }
                ),
                "",
            )
        assert (
            values["address"] == "10.0.0.1"
            and values["port"] == 1234
            and values["hosts"] == ["a", "a", "b", "b"]
        )
        ends = [
            (
                0,
                json.dumps({**RESULT, "clocks": clocks, "pairs": []})
                if values["first"] == 0
                else "",
                "",
            )
        ] * values["count"]
        return 0, json.dumps(ends), ""

    return Reached("10.0.0.1", run)


def before(**hosts: Reached) -> list[str]:
    return preflight(hosts, Question(), CPU, "100Gb")


def test_preflight_of_two_hosts() -> None:
    assert before(a=answering(), b=answering()) == []
    (clock,) = before(a=answering(clocks=9.0), b=answering())
    assert clock.startswith("all: clocks: 9.000 s apart — have all hosts' clocks set by NTP")
    with pytest.raises(EnvironmentFault, match=r"host b: port: held — end it"):
        before(a=answering(), b=answering(found="held", verdict="fail"))
    with pytest.raises(
        EnvironmentFault, match=r"preflight: torch: differs: 2\.13 on a, 2\.11 on b"
    ):
        before(a=answering(), b=answering(torch="2.11"))
    dead = Reached("", lambda *_: (255, "", "ssh: connect to host b port 22: Connection refused\n"))
    with pytest.raises(EnvironmentFault, match=r"host b: host: ssh: connect to host b"):
        before(a=answering(), b=dead)


def test_a_host_that_prints_nothing_has_a_failed_check() -> None:
    (found,) = examine_hosts({"a": Reached("", lambda *_: (0, "\n", ""))}, Question())
    (check,) = found.checks
    assert (check.verdict, check.found) == ("fail", "no answer, exit code 0")


def test_late_ranks_are_named_beside_a_host_that_could_not_start_its_own() -> None:
    late = json.dumps([(0, "", ""), (None, "", "")])
    reached = {
        "a": Reached("", lambda *_: (1, "", "")),
        "b": Reached("", lambda *_: (0, late, "")),
        "c": Reached("", lambda *_: (None, "", "")),
    }
    hosts = [HostReport(name, (), {}, ranks=2) for name in reached]
    both = compare_hosts(reached, hosts, CPU, "100Gb", None)
    assert both.checks[-1].found == "6 ranks: rank 3, 4, 5 did not end within 120 s"


@pytest.mark.full
def test_two_hosts_that_are_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real processes: each host's checks, and an all-reduce of a rank on each."""
    hosts: Mapping[str, Reached] = dict.fromkeys(("a", "b"), Reached("127.0.0.1", run_module))
    found = examine_hosts(hosts, Question())
    assert [each.name for each in found] == ["a", "b"] and all(each.ranks == 1 for each in found)
    both = compare_hosts(hosts, found, CPU, "100Gb", "lo", bandwidth=True)
    assert [check.name for check in both.checks] == ["hosts", "all-reduce", "clocks", "a ↔ b"], both
    assert [check.verdict for check in both.checks[:3]] == ["ok"] * 3
