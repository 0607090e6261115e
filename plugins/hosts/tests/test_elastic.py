"""`launch: {kind: ssh, nodes: {min, max}}`: hosts go and come, and the run is that of one host left alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import Request, load_values
from drumline.dist.start import Ranks
from drumline.errors import EnvironmentFault
from drumline.train.replan import Replanner
from drumline_hosts.coordinator import Remote
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.timing import SILENT_SECONDS
from tests.faults.live import wait_for
from tests.harness import ENV, ROOT, events, losses, same_weights, write_config
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

TRAIN = (sys.executable, "-m", "drumline", "train")
STEPS = 60


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b", "c", "d"]) as made:
        yield made


def config(folder: Path, ssh: Path, **launch: Any) -> Path:
    model = tiny_model_dir(folder / "model")
    over = {
        "kind": "ssh",
        "hosts": ["a:1", "b:1", "c:1", "d:1"],
        "nodes": {"min": 1},
        "options": ["-F", str(ssh)],
        **launch,
    }
    run, batch = (
        {"steps": STEPS, "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]},
        {"global_samples": 12, "micro_batch": 3},
    )
    data = {"packing": False, "eval": []}
    return write_config(
        folder,
        model,
        rows=60,
        launch=over,
        data=data,
        run=run,
        batch=batch,
        checkpoint={"every": 3},
        optimizer={"lr": 1e-3},
    )


def alone(path: Path, run: Path) -> Path:
    """The same run by one process."""
    path.with_name("alone.yaml").write_text(
        re.sub(r"launch:\n(  .*\n|- .*\n)*", "launch: {nproc: 1}\n", path.read_text())
    )
    line = [*TRAIN, str(path.with_name("alone.yaml")), f"run.dir={run}"]
    done = subprocess.run(line, env=ENV, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return run


def same_as_alone(path: Path, run: Path) -> None:
    """Every sample once, in the same order and with the same learning rate: the losses and weights are those of one process."""
    reference = alone(path, path.with_name("alone"))
    for name in ("lr", "tokens", "samples"):
        assert {e["step"]: e[name] for e in events(run, "step")} == {
            e["step"]: e[name] for e in events(reference, "step")
        }
    assert losses(run).keys() == set(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    same_weights(run, reference, 1e-5)


def without_ranks(host: Host) -> None:
    """The ranks of a host that is cut off end by themselves."""
    until = time.time() + 3 * SILENT_SECONDS
    while host.processes("drumline.train.entry"):
        assert time.time() < until
        time.sleep(0.2)


@pytest.mark.full
def test_a_host_goes_and_comes_back_and_the_run_is_that_of_one_host(
    four: dict[str, Host], tmp_path: Path
) -> None:
    path, run = config(tmp_path, four["a"].ssh_config), tmp_path / "run"
    (tmp_path / "slow").write_text("2")  # seconds of a step, for as long as hosts go and come
    process = four["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    four["d"].link(up=False)
    try:
        cut = time.time()
        left = wait_for(run, "fault", 0, process)
        assert left["host"] == "d" and left["t"] - cut < 3 * 10 and left["action"] == "restart"
        assert SILENT_SECONDS < 10
        without_ranks(four["d"])
        shrunk = wait_for(run, "run_start", 0, process, after=left["t"])
        assert shrunk["world_size"] == 3
        again = wait_for(run, "save", 0, process, after=shrunk["t"])
    finally:
        four["d"].link(up=True)
    grown = wait_for(run, "run_start", 0, process, after=again["t"])
    assert grown["world_size"] == 4
    (tmp_path / "slow").unlink()
    code, out = ended(process, 280)
    assert code == 0, out
    assert (
        "goes on with 3 of 4 hosts: a, b, c\n" in out
        and "goes on with 4 of 4 hosts: a, b, c, d\n" in out
    )
    assert [event["to"].split(",")[0] for event in events(run, "replan")] == ["3 ranks", "4 ranks"]
    same_as_alone(path, run)


@pytest.mark.full
def test_too_few_hosts_end_the_start_in_one_line(four: dict[str, Host], tmp_path: Path) -> None:
    four["c"].link(up=False)
    try:
        path = config(tmp_path, four["a"].ssh_config, nodes={"min": 4})
        code, out = ended(four["a"].start(*TRAIN, path), 120)
    finally:
        four["c"].link(up=True)
    assert (
        code == 2 and "3 of at least 4 hosts are there" in out and not (tmp_path / "run").exists()
    ), out


class Standing:
    """A link that is there."""

    heard = float("inf")

    def send(self, message: dict[str, Any]) -> None:
        self.last = message

    def close(self) -> None:
        self.last = {}


class Starter:
    def start(self, name: str, settings: dict[str, Any]) -> None:
        self.started = name

    def ended(self, name: str) -> str | None:
        return None

    def close(self) -> None:
        self.started = ""


class Quiet:
    number, at_once = 0, False


def compared(hosts: ElasticHosts, name: str) -> None:
    hosts.compared[name] = hosts.remotes[name].link


@pytest.fixture
def elastic() -> Iterator[ElasticHosts]:
    made = ElasticHosts(["a", "b", "c"], Starter(), "127.0.0.1", None, None, [], least=1, most=3)
    made.size, made.require, made.resize = (
        lambda name: 2,
        lambda name: compared(made, name),
        lambda ranks: True,
    )
    try:
        yield made
    finally:
        made.close()


def there(hosts: ElasticHosts, *names: str) -> None:
    for name in hosts.remotes:
        hosts.remotes[name].link = Standing() if name in names else None


def test_who_takes_part(elastic: ElasticHosts) -> None:
    there(elastic, "a", "b", "c")
    elastic._choose_hosts(Quiet())
    assert elastic.counts == {"a": 2, "b": 2, "c": 2}
    there(elastic, "a", "c")
    elastic._choose_hosts(Quiet())
    assert elastic.counts == {"a": 2, "c": 2}
    there(elastic, "a", "b", "c")
    elastic._choose_hosts(Quiet())
    assert list(elastic.counts) == ["a", "c", "b"], "rank 0 stays where it is"
    elastic.resize = lambda ranks: ranks != 4  # of two hosts there is no plan
    there(elastic, "b", "c")
    elastic._choose_hosts(Quiet())
    assert list(elastic.counts) == ["c"]
    elastic.most, elastic.resize = 1, lambda ranks: False
    there(elastic, "a")
    with pytest.raises(EnvironmentFault, match="no plan takes the same steps"):
        elastic._choose_hosts(Quiet())


def test_a_host_that_comes_and_differs_is_sent_away(
    elastic: ElasticHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    def require(name: str) -> None:
        if name == "b":
            raise EnvironmentFault("host b has torch 9.9, and this one 2.13")
        compared(elastic, name)

    elastic.require = require
    there(elastic, "a", "b")
    elastic._choose_hosts(Quiet())
    assert elastic.counts == {"a": 2} and elastic.remotes["b"].link is None
    assert "note: goes on without it: host b has torch 9.9" in capsys.readouterr().err
    assert isinstance(elastic.remotes["b"], Remote) and elastic._refused == {"b"}


def test_under_torchrun_hosts_do_not_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.train.launched import _require_as_launched

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    launch = {"kind": "ssh", "hosts": ["a", "b"], "nodes": {"min": 1}}
    loaded = load_values({"data": {"train": [{"kind": "digits"}]}, "launch": launch}, [])
    with pytest.raises(EnvironmentFault, match=r"launch\.nodes: torchrun has started the ranks"):
        _require_as_launched(Request(loaded), Ranks(0, 0, 1))


@pytest.mark.claim("another number of ranks takes the same steps")
def test_another_number_of_ranks_takes_the_same_steps(tmp_path: Path) -> None:
    """By the planner: same global batch, learning rate and steps, in a new plan.json."""
    from drumline.config.load import load
    from drumline.plan.plan import Plan
    from drumline.train.setup import Request, make_plan

    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), launch={"nproc": 3}, batch={"global_samples": 6, "micro_batch": 2},
        data={"packing": False, "eval": []}, optimizer={"lr": 1e-2, "lr_scaling": "linear"},
    )  # fmt: skip
    plan = make_plan(Request(load(path, [])), on_progress=lambda *_: None, dry_run=True)
    Path(plan.run_dir).mkdir()
    place = Path(plan.run_dir) / "plan.json"
    plan.save(place)
    replanner = Replanner(plan, place)
    assert replanner.resize(3) and not (place.parent / "plan-0.json").exists()
    assert replanner.resize(2)
    two = Plan.load(place)
    assert (
        two.mesh.world_size,
        two.batch.global_samples,
        two.batch.micro_batch * two.batch.accumulation,
    ) == (2, 6, 3)
    assert (two.lr, two.steps, two.config.batch) == (plan.lr, plan.steps, plan.config.batch)
    assert replanner.resize(3) and Plan.load(place).batch == plan.batch
    assert replanner.resize(1) and Plan.load(place).mesh.world_size == 1
    assert [event["from"].split(",")[0] for event in events(place.parent, "replan")] == [
        "3 ranks",
        "2 ranks",
        "3 ranks",
    ]
    assert replanner.resize(4), "six samples are not shared by four, so it is another strategy"
    four = Plan.load(place)
    assert four.mesh.data_ranks < four.mesh.world_size == 4 and (
        four.batch.global_samples,
        four.lr,
    ) == (6, plan.lr)
