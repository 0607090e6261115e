"""`launch.kind: ray` on a real Ray of two nodes on this machine, and a head without CPUs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.hosts.tests.runs import (
    read_rank,
    require_fault,
    start_endless,
    start_stepping,
    stop_after_restart,
)
from tests.faults.live import gone, kill
from tests.faults.test_launch import require_end
from tests.harness import ENV, column, losses, run_drumline, write_config
from tests.tiny import tiny_model_dir

ray = pytest.importorskip("ray", reason="the package ray is not installed")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
Launch = dict[str, Any]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    signal.signal(signal.SIGTERM, before)  # Ray's own waits half a minute
    try:
        made.add_node(**NODE)
        made.add_node(**NODE)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_model_dir(tmp_path / "model"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def launch(cluster: Any) -> Launch:
    """The section `launch` of a run with a rank on each node."""
    return {"kind": "ray", "address": cluster.address, "nodes": 2}


def test_same_losses_as_two_local_ranks(launch: Launch, config: Path, tmp_path: Path) -> None:
    on_ray = tmp_path / "ray"
    run_drumline("train", config, f"launch={json.dumps(launch)}", f"run.dir={on_ray}")

    local = tmp_path / "local"
    run_drumline("train", config, f"run.dir={local}", "--nproc", "2")
    assert losses(on_ray) == losses(local)
    assert gone(str(tmp_path), 3.0)


def test_a_ray_of_its_own(config: Path, tmp_path: Path) -> None:
    on_ray = tmp_path / "ray"
    launch = "launch={kind: ray, nodes: 2, placement: PACK}"
    done = run_drumline("train", config, launch, f"run.dir={on_ray}")
    assert sorted(losses(on_ray)) == [1, 2, 3, 4], done.err
    assert gone(str(tmp_path), 3.0)


def test_a_killed_rank_is_named_with_its_node_and_the_run_goes_on(
    cluster: Any, launch: Launch, run: Path
) -> None:
    behave = {"steps": 12, "kills": [[1, 7]]}
    process = start_stepping(run, behave, **launch, max_restarts=1)
    require_end(process, 0)

    fault = require_fault(run, rank=1, signal="SIGKILL", step=7)
    _, _, node = fault["host"].partition("/")
    assert node in {each.node_id[:8] for each in cluster.worker_nodes}
    assert column(run, "step", "restore") == [5]
    assert gone(str(run), 3.0)


def test_a_node_that_dies_is_named_and_another_takes_its_place(
    cluster: Any, launch: Launch, run: Path
) -> None:
    process = start_endless(run, **launch)
    spare = cluster.add_node(**NODE)
    lost = next(iter(cluster.worker_nodes - {spare}))
    cluster.remove_node(lost, allow_graceful=False)
    stop_after_restart(run, process)

    fault = require_fault(run)
    assert fault["host"].endswith(lost.node_id[:8]), fault
    assert "its node died" in fault["error"], fault
    assert gone(str(run), 3.0)


def test_an_actor_that_dies_is_named(launch: Launch, run: Path) -> None:
    process = start_endless(run, **launch)
    agent = read_rank(run, 1).parent()
    kill(agent.ppid())
    stop_after_restart(run, process)

    fault = require_fault(run, rank=1)
    assert "its actor" in fault["error"], fault
    assert gone(str(run), 3.0)
