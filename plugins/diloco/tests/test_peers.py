"""Hosts that train by themselves and average what they have learned: they come and go, and none waits for another."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import wait_for
from tests.forks import Forked
from tests.harness import ENV, ROOT, losses, weights, write_config
from tests.tiny import tiny_model_dir

SECONDS = 60.0


class Hosts:
    """Processes by seed; the first that is started gets the first port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running = dict[int, Forked]()
        self.peers = [f"127.0.0.1:{free_port()}" for _ in range(3)]

    def start(
        self, seed: int, seconds: float = 0.01, secret: str = "drum", peers: list[str] | None = None
    ) -> Forked:
        """Start a host whose steps take so many seconds. `peers`: its list, if it is another one."""
        if peers is None:
            peers = self.peers
        arguments = [self.folder, seed, seconds, *peers]
        environment = {**ENV, "PEERS_SECRET": secret}
        process = Forked("plugins.diloco.tests.peers_worker", *arguments, env=environment)
        self.running[seed] = process
        return process

    def kill(self, seed: int) -> None:
        """Kill a host, and wait for its end."""
        process = self.running.pop(seed)
        process.send_signal(signal.SIGKILL)
        process.wait(20)

    def rounds(self, seed: int) -> list[dict[str, Any]]:
        """Return the outer steps that a host has written down."""
        path = self.folder / f"{seed}.jsonl"
        if not path.exists():
            return []
        # The last line may be half written.
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait(self, seed: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first outer step from now on that is `wanted`."""
        until = time.monotonic() + SECONDS
        known = len(self.rounds(seed))
        while time.monotonic() < until:
            for found in self.rounds(seed)[known:]:
                if wanted(found):
                    return found
            for process in self.running.values():
                assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"no such outer step: {self.rounds(seed)[-3:]}")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts that a test starts. They are stopped at its end."""
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        (tmp_path / "stop").touch()
        for process in hosts.running.values():
            process.wait(20)


def of(*seeds: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether an outer step has as many hosts as there are seeds."""

    def has_as_many(found: dict[str, Any]) -> bool:
        hosts = found["hosts"]
        return len(hosts) == len(seeds)

    return has_as_many


@pytest.mark.full
def test_hosts_come_and_go_and_a_slow_one_holds_up_nobody(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    three.start(2)
    three.start(3, seconds=0.2)
    three.wait(3, lambda found: True)

    # The slow one takes several outer steps at a time, and writes the last of them alone.
    found = three.wait(1, of(1, 2, 3))
    slow_host = three.peers[three.rounds(3)[0]["index"]]
    fast_host = three.peers[found["index"]]
    steps = found["hosts"]
    assert steps[slow_host] < steps[fast_host], "it is in with fewer inner steps"

    three.kill(2)
    three.wait(1, of(1, 3))
    # The leader.
    three.kill(1)
    three.wait(3, of(3))

    # All that took an outer step have the same outer weights.
    sums = dict[int, int]()
    for seed in (1, 2, 3):
        for found in three.rounds(seed):
            number = found["round"]
            checksum = found["sums"]
            assert checksum == sums.setdefault(number, checksum)


def refused(number: int, hosts: Hosts, seed: int, peers: list[str]) -> str:
    """Start a host that is refused in one line, in a folder of its own, and return the line."""
    folder = hosts.folder / str(number)
    folder.mkdir()
    code, said = Hosts(folder).start(seed, peers=peers).told(60)
    assert code == 2, said
    assert "strategy.peers" in said
    assert "Traceback" not in said
    return said


@pytest.mark.full
def test_what_does_not_fit_is_refused_in_one_line(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    said = refused(0, three, 1, three.peers)
    assert "has run.seed=1, too: both would train on the same samples" in said
    others = ["127.0.0.1:1", *three.peers[:2]]
    assert "peers is" in refused(1, three, 5, others)
    elsewhere = ["198.51.100.1:29600"]
    assert "none of them is an address of this host" in refused(2, three, 6, elsewhere)
    assert "the ports of this host are taken" in refused(3, three, 7, three.peers[:1])


@pytest.mark.full
def test_a_host_without_the_secret_is_not_heard(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    code, said = three.start(2, secret="flute").told(60)
    assert code == 2, said
    assert "it has another strategy.secret" in said
    assert "Traceback" not in said
    three.running.pop(2)

    three.wait(1, of(1))
    for found in three.rounds(1) + three.rounds(2):
        assert len(found["hosts"]) == 1


@pytest.mark.full
def test_the_command_trains_to_its_end_is_killed_and_comes_back(tmp_path: Path) -> None:
    """As the page says it: one config, a seed for each host."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    strategy = {
        "kind": "diloco",
        "period": 6,
        "fragments": 3,
        "bits": 8,
        "delay": 2,
        "peers": peers,
        "secret": "${env:PEERS_SECRET}",
    }
    model = tiny_model_dir(tmp_path / "model")
    run = {"steps": 150, "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]}

    path = write_config(
        tmp_path,
        model,
        rows=60,
        data={"packing": False},
        launch={"nproc": 1},
        strategy=strategy,
        run=run,
        checkpoint={"every": 10},
        optimizer={"lr": 1e-3},
        eval={"every": 40},
    )

    environment = {**ENV, "PEERS_SECRET": "drum"}

    def start(seed: int, *more: str) -> Forked:
        folder = tmp_path / str(seed)
        overrides = [f"run.seed={seed}", f"run.dir={folder}"]
        return Forked("drumline", "train", path, *overrides, *more, env=environment)

    (tmp_path / "slow").touch()
    one = start(1)
    other = start(2)
    wait_for(tmp_path / "1", "step", 30, one)
    wait_for(tmp_path / "2", "step", 30, other)

    other.send_signal(signal.SIGKILL)
    other.wait(20)
    back = start(2, "--resume")
    wait_for(tmp_path / "2", "restore", 1, back)
    (tmp_path / "slow").unlink()
    for process in (one, back):
        code, said = process.told(120)
        assert code == 0, said
        assert "Traceback" not in said

    message = "on the mean of " + ", ".join(peers)
    for seed in ("1", "2"):
        logs = [log.read_text() for log in (tmp_path / seed).rglob("*.log")]
        assert message in "".join(logs), seed
    assert max(losses(tmp_path / "2")) == 150
    parts = set()
    for name in weights(tmp_path / "1"):
        part, _, _ = name.partition(".")
        parts.add(part)
    assert parts == {"model", "optim", "outer"}

    # The plan names the secret's variable, not the secret.
    assert "PEERS_SECRET" in path.read_text()
    plan = (tmp_path / "1" / "plan.json").read_text()
    assert "drum" not in plan.replace("drumline", "")
