"""`launch.kind: ray` on a real Ray of two nodes on this machine, and a head that computes nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.faults.test_launch import end, toy
from tests.forks import Forked
from tests.harness import ENV, ROOT, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir

ray = pytest.importorskip("ray", reason="the package ray is not installed")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
WORKER = "tests.faults.stepping_worker"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    signal.signal(signal.SIGTERM, before)  # Ray's own waits half a minute
    try:
        for _ in range(2):
            made.add_node(**NODE)
        yield made
    finally:
        made.shutdown()


def stepping(cluster: Any, folder: Path, behave: dict[str, Any], **launch: Any) -> Forked:
    """The launcher with two stepping ranks, each on a node of its own."""
    plan = toy(folder, json.dumps(behave), kind="ray", address=cluster.address, nodes=2, **launch)
    return Forked("plugins.hosts.tests.launcher", plan, WORKER, env=ENV, cwd=ROOT)


def stopped_after_restart(run: Path, process: Forked) -> tuple[int, str]:
    """Stop the run by SIGTERM once it goes on after its fault."""
    again = wait_for(run, "restore", 0, process)
    wait_for(run, "eval", again["step"] + 1, process, after=again["t"])
    process.send_signal(signal.SIGTERM)
    return end(process)


def test_same_losses_as_two_local_ranks(cluster: Any, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    done = drumline(
        "train",
        config,
        f"launch={{kind: ray, address: '{cluster.address}', nodes: 2}}",
        f"run.dir={tmp_path / 'ray'}",
    )
    assert done.code == 0, done.err
    assert drumline("train", config, f"run.dir={tmp_path / 'local'}", "--nproc", "2").code == 0
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    assert gone(str(tmp_path), 3.0)


def test_a_ray_of_its_own(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    done = drumline(
        "train",
        config,
        "launch={kind: ray, nodes: 2, placement: PACK}",
        f"run.dir={tmp_path / 'ray'}",
    )
    assert done.code == 0 and sorted(losses(tmp_path / "ray")) == [1, 2, 3, 4], done.err
    assert gone(str(tmp_path), 3.0)


def test_a_killed_rank_is_named_with_its_node_and_the_run_goes_on(
    cluster: Any, tmp_path: Path
) -> None:
    code, said = end(
        stepping(cluster, tmp_path / "run", {"steps": 12, "kills": [[1, 7]]}, max_restarts=1)
    )
    assert code == 0, said
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["rank"], fault["signal"], fault["step"]) == (1, "SIGKILL", 7)
    assert fault["host"].partition("/")[2] in {node.node_id[:8] for node in cluster.worker_nodes}
    assert [e["step"] for e in events(tmp_path / "run", "restore")] == [5]
    assert gone(str(tmp_path / "run"), 3.0)


def test_a_node_that_dies_is_named_and_another_takes_its_place(
    cluster: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = stepping(cluster, run, {"steps": 100000}, max_restarts=2)
    wait_for(run, "eval", 3, process)
    spare = cluster.add_node(**NODE)
    lost = next(iter(cluster.worker_nodes - {spare}))
    name = lost.node_id[:8]
    cluster.remove_node(lost, allow_graceful=False)
    code, said = stopped_after_restart(run, process)
    assert code == 75, said
    (fault,) = events(run, "fault")
    assert fault["host"].endswith(name) and "its node died" in fault["error"], fault
    assert gone(str(run), 3.0)


def test_an_actor_that_dies_is_named(cluster: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = stepping(cluster, run, {"steps": 100000}, max_restarts=2)
    wait_for(run, "eval", 3, process)
    agent = _parent(int((run / "pid-1").read_text()))
    kill(_parent(agent))
    code, said = stopped_after_restart(run, process)
    assert code == 75, said
    (fault,) = events(run, "fault")
    assert fault["rank"] == 1 and "its actor" in fault["error"], fault
    assert gone(str(run), 3.0)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
