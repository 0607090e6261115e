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
        self.folder, self.running = folder, dict[int, Forked]()
        self.peers = [f"127.0.0.1:{free_port()}" for _ in range(3)]

    def start(
        self, seed: int, seconds: float = 0.01, secret: str = "drum", peers: list[str] | None = None
    ) -> Forked:
        arguments = [self.folder, seed, seconds, *(peers or self.peers)]
        self.running[seed] = Forked(
            "tests.hosts.peers_worker", *arguments, env={**ENV, "PEERS_SECRET": secret}
        )
        return self.running[seed]

    def kill(self, seed: int) -> None:
        process = self.running.pop(seed)
        process.send_signal(signal.SIGKILL)
        process.wait(20)

    def rounds(self, seed: int) -> list[dict[str, Any]]:
        path = self.folder / f"{seed}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, seed: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first outer step from now on that is `wanted`."""
        until, known = time.monotonic() + SECONDS, len(self.rounds(seed))
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
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        (tmp_path / "stop").touch()
        for process in hosts.running.values():
            process.wait(20)


def of(*numbers: int) -> Callable[[dict[str, Any]], bool]:
    return lambda found: len(found["hosts"]) == len(numbers)


@pytest.mark.full
def test_hosts_come_and_go_and_a_slow_one_holds_up_nobody(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    three.start(2)
    three.start(3, seconds=0.2)
    three.wait(3, lambda found: True)
    # The slow one takes several outer steps at a time, and writes the last of them alone.
    found = three.wait(1, of(1, 2, 3))
    slow, fast = (
        found["hosts"][three.peers[index]]
        for index in (three.rounds(3)[0]["index"], found["index"])
    )
    assert slow < fast, "it is in with fewer inner steps"
    three.kill(2)
    three.wait(1, of(1, 3))
    three.kill(1)  # the leader
    three.wait(3, of(3))
    sums: dict[int, set[int]] = {}
    for found in three.rounds(1) + three.rounds(2) + three.rounds(3):
        sums.setdefault(found["round"], set()).add(found["sums"])
    assert max(map(len, sums.values())) == 1, (
        "all that took an outer step have the same outer weights"
    )


@pytest.mark.full
def test_what_does_not_fit_is_refused_in_one_line(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    for number, (seed, options, says) in enumerate(
        [
            (1, {}, "has run.seed=1, too: both would train on the same samples"),
            (5, {"peers": ["127.0.0.1:1", *three.peers[:2]]}, "peers is"),
            (6, {"peers": ["198.51.100.1:29600"]}, "none of them is an address of this host"),
            (7, {"peers": three.peers[:1]}, "the ports of this host are taken"),
        ]
    ):
        (three.folder / str(number)).mkdir()
        other = Hosts(three.folder / str(number))
        code, said = other.start(seed, **{"peers": three.peers, **options}).told(60)
        assert (
            code == 2 and says in said and "strategy.peers" in said and "Traceback" not in said
        ), said


@pytest.mark.full
def test_a_host_without_the_secret_is_not_heard(three: Hosts) -> None:
    three.start(1)
    three.wait(1, of(1))
    code, said = three.start(2, secret="flute").told(60)
    assert code == 2 and "it has another strategy.secret" in said and "Traceback" not in said, said
    three.running.pop(2)
    three.wait(1, of(1))
    assert not any(len(found["hosts"]) > 1 for found in three.rounds(1) + three.rounds(2))


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
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        rows=60,
        data={"packing": False},
        launch={"nproc": 1},
        strategy=strategy,
        run={"steps": 150, "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]},
        checkpoint={"every": 10},
        optimizer={"lr": 1e-3},
        eval={"every": 40},
    )

    def start(seed: int, *more: str) -> Forked:
        arguments = ["train", path, f"run.seed={seed}", f"run.dir={tmp_path / str(seed)}", *more]
        return Forked("drumline", *arguments, env={**ENV, "PEERS_SECRET": "drum"})

    (tmp_path / "slow").touch()
    one, other = start(1), start(2)
    wait_for(tmp_path / "1", "step", 30, one)
    wait_for(tmp_path / "2", "step", 30, other)
    other.send_signal(signal.SIGKILL)
    other.wait(20)
    back = start(2, "--resume")
    wait_for(tmp_path / "2", "restore", 1, back)
    (tmp_path / "slow").unlink()
    for process in (one, back):
        code, said = process.told(120)
        assert code == 0 and "Traceback" not in said, said
    for seed in ("1", "2"):
        assert any(
            "on the mean of " + ", ".join(peers) in log.read_text()
            for log in (tmp_path / seed).rglob("*.log")
        ), seed
    assert max(losses(tmp_path / "2")) == 150
    assert {"model", "optim", "outer"} == {name.split(".")[0] for name in weights(tmp_path / "1")}
    assert "PEERS_SECRET" in path.read_text() and "drum" not in (
        tmp_path / "1" / "plan.json"
    ).read_text().replace("drumline", "")
