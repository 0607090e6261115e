"""`launch: {kind: ssh, nodes: {min, max}}`: hosts go and come, and the run is that of one host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from drumline.config.load import Request, load_values
from drumline.dist.start import RankInfo
from drumline.errors import EnvironmentFault
from drumline.plan.plan import Plan
from drumline.train.replan import Replanner
from drumline_hosts import elastic as hosts_elastic
from drumline_hosts.coordinator import Hosts, Remote
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.timing import SILENT_SECONDS
from plugins.hosts.tests.runs import (
    SLOW,
    TRAIN,
    require_end,
    require_no_ranks,
    same_as_alone,
    write_elastic_config,
)
from plugins.hosts.tests.standing import Starter, compare, connect, elastic_hosts
from tests.faults.live import wait_for
from tests.harness import column, write_config
from tests.hosts.namespaces import Host, hosts
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b", "c", "d"]) as made:
        yield made


@pytest.mark.full
def test_a_host_goes_and_comes_back_and_the_run_is_that_of_one_host(
    four: dict[str, Host], tmp_path: Path
) -> None:
    path = write_elastic_config(tmp_path, four["a"].ssh_config)
    run = tmp_path / "run"
    slow = tmp_path / "slow"
    slow.write_text(SLOW)
    process = four["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)

    four["d"].link(up=False)
    try:
        cut = time.time()
        left = wait_for(run, "fault", 0, process)
        assert left["host"] == "d"
        assert left["t"] - cut < 3 * 10
        assert left["action"] == "restart"
        assert SILENT_SECONDS < 10
        require_no_ranks(four["d"])
        shrunk = wait_for(run, "run_start", 0, process, after=left["t"])
        assert shrunk["world_size"] == 3
        again = wait_for(run, "save", 0, process, after=shrunk["t"])
    finally:
        four["d"].link(up=True)

    grown = wait_for(run, "run_start", 0, process, after=again["t"])
    assert grown["world_size"] == 4
    slow.unlink()
    out = require_end(process, 0, 280)
    assert "goes on with 3 of 4 hosts: a, b, c\n" in out
    assert "goes on with 4 of 4 hosts: a, b, c, d\n" in out
    assert rank_counts(run, "to") == ["3 ranks", "4 ranks"]
    same_as_alone(path, run)


def rank_counts(run: Path, side: str) -> list[str]:
    """Return how many ranks each new plan of a run was made `to` or `from`."""
    return [plan.split(",")[0] for plan in column(run, side, "replan")]


@pytest.mark.full
def test_too_few_hosts_end_the_start_in_one_line(four: dict[str, Host], tmp_path: Path) -> None:
    path = write_elastic_config(tmp_path, four["a"].ssh_config, nodes={"min": 4})
    four["c"].link(up=False)
    try:
        out = require_end(four["a"].start(*TRAIN, path), 2)
    finally:
        four["c"].link(up=True)
    assert "3 hosts are there, and at least 4 are needed" in out
    assert not (tmp_path / "run").exists()


class Quiet:
    """No signal has come."""

    number = 0
    at_once = False


@pytest.fixture
def elastic() -> Iterator[ElasticHosts]:
    with elastic_hosts(Starter(), least=1) as made:
        made.size = lambda name: 2
        made.require = lambda name: compare(made, name)
        yield made


def choose_hosts(elastic: ElasticHosts, *names: str) -> dict[str, int]:
    """Return the ranks of each host that takes part if these are there."""
    connect(elastic, *names)
    elastic._choose_hosts(Quiet())
    return elastic.counts


def test_who_takes_part(elastic: ElasticHosts) -> None:
    assert choose_hosts(elastic, "a", "b", "c") == {"a": 2, "b": 2, "c": 2}
    assert choose_hosts(elastic, "a", "c") == {"a": 2, "c": 2}
    counts = choose_hosts(elastic, "a", "b", "c")
    assert list(counts) == ["a", "c", "b"], "rank 0 stays on its host"

    elastic.resize = lambda ranks: ranks != 4  # of two hosts there is no plan
    assert list(choose_hosts(elastic, "b", "c")) == ["c"]

    elastic.most = 1
    elastic.resize = lambda ranks: False
    with pytest.raises(EnvironmentFault, match="no plan takes the same steps"):
        choose_hosts(elastic, "a")


class TooFew(NamedTuple):
    there: int
    least: int
    message: str


TOO_FEW = (
    TooFew(0, 1, "0 hosts are there, and at least 1 is needed"),
    TooFew(0, 2, "0 hosts are there, and at least 2 are needed"),
    TooFew(1, 2, "1 host is there, and at least 2 are needed"),
    TooFew(2, 3, "2 hosts are there, and at least 3 are needed"),
)


@pytest.mark.parametrize("case", TOO_FEW, ids=lambda case: f"{case.there} of {case.least}")
def test_a_message_counts_the_hosts_that_are_there(
    elastic: ElasticHosts, monkeypatch: pytest.MonkeyPatch, case: TooFew
) -> None:
    monkeypatch.setattr(hosts_elastic, "BACK_SECONDS", -1.0)
    elastic.least = case.least
    names = list(elastic.remotes)[: case.there]
    with pytest.raises(EnvironmentFault) as fault:
        choose_hosts(elastic, *names)
    assert fault.value.what == case.message

    monkeypatch.setattr(Hosts, "_start_missing_agents", lambda *given: {"c": "ssh has ended"})
    with pytest.raises(EnvironmentFault) as fault:
        elastic.gather()
    assert fault.value.what == f"host c: ssh has ended; {case.message}"


def test_a_launcher_that_leaves_a_run_says_how_many_hosts_are_there(
    elastic: ElasticHosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    elastic.members = dict.fromkeys("abcde")
    connect(elastic, "a")
    with pytest.raises(SystemExit):
        elastic._step_down()
    assert capsys.readouterr().err == "error: 1 host of 5 is there: left to the others\n"

    connect(elastic, "a", "b")
    with pytest.raises(SystemExit):
        elastic._step_down()
    assert capsys.readouterr().err == "error: 2 hosts of 5 are there: left to the others\n"


def test_a_host_that_comes_and_differs_is_sent_away(
    elastic: ElasticHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    def require(name: str) -> None:
        if name == "b":
            raise EnvironmentFault("host b has torch 9.9, and this one 2.13")
        compare(elastic, name)

    elastic.require = require
    assert choose_hosts(elastic, "a", "b") == {"a": 2}
    other = elastic.remotes["b"]
    assert isinstance(other, Remote)
    assert other.link is None
    assert elastic._refused == {"b"}
    assert "note: goes on without it: host b has torch 9.9" in capsys.readouterr().err


def test_under_torchrun_hosts_do_not_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.train.launched import _require_as_launched

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    launch = {"kind": "ssh", "hosts": ["a", "b"], "nodes": {"min": 1}}
    loaded = load_values({"data": {"train": [{"kind": "digits"}]}, "launch": launch}, [])
    with pytest.raises(EnvironmentFault, match=r"launch\.nodes: torchrun has started the ranks"):
        _require_as_launched(Request(loaded), RankInfo(0, 0, 1))


@pytest.mark.claim("another number of ranks takes the same steps")
def test_another_number_of_ranks_takes_the_same_steps(tmp_path: Path) -> None:
    """The planner keeps global batch, learning rate and steps in a new plan.json."""
    plan = plan_three_ranks(tmp_path)
    run = Path(plan.run_dir)
    run.mkdir()
    place = run / "plan.json"
    plan.save(place)
    replanner = Replanner(plan, place)

    assert replanner.resize(3)
    assert not (run / "plan-0.json").exists()

    assert replanner.resize(2)
    two = Plan.load(place)
    assert two.mesh.world_size == 2
    assert two.batch.global_samples == 6
    assert two.batch.micro_batch * two.batch.accumulation == 3
    assert two.lr == plan.lr
    assert two.steps == plan.steps
    assert two.config.batch == plan.config.batch

    assert replanner.resize(3)
    assert Plan.load(place).batch == plan.batch
    assert replanner.resize(1)
    assert Plan.load(place).mesh.world_size == 1
    assert rank_counts(run, "from") == ["3 ranks", "2 ranks", "3 ranks"]

    assert replanner.resize(4), "six samples are not shared by four, so it is another strategy"
    four = Plan.load(place)
    assert four.mesh.data_ranks < 4
    assert four.mesh.world_size == 4
    assert four.batch.global_samples == 6
    assert four.lr == plan.lr


def plan_three_ranks(folder: Path) -> Plan:
    from drumline.config.load import load
    from drumline.train.setup import make_plan

    path = write_config(
        folder,
        tiny_model_dir(folder / "model"),
        launch={"nproc": 3},
        batch={"global_samples": 6, "micro_batch": 2},
        data={"packing": False, "eval": []},
        optimizer={"lr": 1e-2, "lr_scaling": "linear"},
    )
    request = Request(load(path, []))
    return make_plan(request, on_progress=lambda *_: None, dry_run=True)
