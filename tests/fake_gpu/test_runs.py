"""Whole runs over the stand-in, by the commands a user types: launchers, faults, memory, an export."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.setups import merge
from tests.fake_gpu.environment import PYTHON, environment
from tests.fake_gpu.running import (
    NEEDS_STAND_IN,
    drumline,
    end,
    free_port,
    run_ranks,
    said,
    shared_memory,
    start,
)
from tests.faults.live import kill, ranks_of, wait_for
from tests.harness import (
    ROOT,
    Sections,
    column,
    events,
    losses,
    run_drumline,
    survivors,
    write_config,
)
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, NEEDS_STAND_IN]
TORCHRUN = ("-m", "torch.distributed.run")
BASE: Sections = {
    "rows": 60,
    "data": {"packing": False},
    "batch": {"global_samples": 4, "micro_batch": 2},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "precision": "fp32",
    "run": {"steps": 6, "device": "cuda"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def on_cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of `config` in one process on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    run_drumline("train", config(folder, model, run={"device": "cpu"}))
    return folder / "run"


def config(folder: Path, model: Path, **sections: Any) -> Path:
    return write_config(folder, model, **merge(BASE, sections))


def train(path: Path, *options: object, devices: int = 1, **settings: object) -> None:
    """Train over the stand-in; the run has to end well."""
    ended_run = drumline("train", path, *options, devices=devices, **settings)
    assert ended_run.code == 0, ended_run.out


def has_losses_of(run: Path, reference: Path, tolerance: float = 1e-5) -> None:
    assert losses(run) == pytest.approx(losses(reference), rel=tolerance)


def finish(process: subprocess.Popen[str], timeout: float = 300) -> None:
    """Wait for a run to end well. If it runs over the time, it is killed with all it started."""
    try:
        code = process.wait(timeout)
    finally:
        end(process)
    assert code == 0, said(process)


def test_two_devices_stop_one_goes_on_and_exports(model: Path, tmp_path: Path) -> None:
    path = config(tmp_path, model, schedule={"kind": "constant"}, checkpoint={"export": "last"})
    no_export = "checkpoint.export=none"
    run_drumline("train", path, "run.device=cpu", f"run.dir={tmp_path / 'cpu'}", no_export)

    train(path, "run.steps=4", "strategy=fsdp2", no_export, devices=2)
    allowed = ("--allow", "run.steps,strategy,checkpoint.export")
    train(path, "strategy=single", "--resume", *allowed)

    has_losses_of(tmp_path / "run", tmp_path / "cpu")
    (export,) = events(tmp_path / "run", "export")
    assert export["error"] is None
    assert (tmp_path / "run/export/model.safetensors").exists()


def test_torchrun(model: Path, on_cpu: Path, tmp_path: Path) -> None:
    path = config(tmp_path, model, strategy="ddp")
    with shared_memory() as meeting:
        options = ("--standalone", "--nproc-per-node=2")
        line = [*TORCHRUN, *options, "-m", "drumline", "train", path]
        finish(start(line, environment(2, meeting)))
    has_losses_of(tmp_path / "run", on_cpu)


@pytest.fixture(scope="module")
def hurt(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two devices of which one rank was killed, and later suspended."""
    folder = tmp_path_factory.mktemp("hurt")
    path = config(
        folder,
        model,
        strategy="ddp",
        run={"callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]},
        checkpoint={"every": 3},
        health={"hang_seconds": 3.0},
        launch={"nproc": 2, "max_restarts": 3},
    )
    run = folder / "run"
    pace = folder / "slow"
    pace.write_text("1.0")
    with shared_memory() as meeting:
        process = start(["-m", "drumline", "train", path], environment(2, meeting))
        # A checkpoint is whole a step after it was taken.
        wait_for(run, "save", 3)
        kill(ranks_of(run)[1])
        restored = wait_for(run, "restore", 3)
        wait_for(run, "step", 4, after=restored["t"])
        kill(ranks_of(run)[1], signal.SIGSTOP)
        wait_for(run, "hang", 0)
        pace.write_text("0")
        finish(process)
    return run


def test_a_killed_and_a_suspended_rank_are_named_and_the_run_goes_on(
    hurt: Path, on_cpu: Path
) -> None:
    killed, hung = events(hurt, "fault")
    assert killed["rank"] == hung["rank"] == 1
    assert killed["action"] == hung["action"] == "restart"
    assert killed["signal"] == "SIGKILL"
    (hang,) = events(hurt, "hang")
    assert hang["rank"] == 1
    assert hang["why"] == "it is suspended (SIGSTOP)"
    has_losses_of(hurt, on_cpu)
    assert not survivors(str(hurt))


def test_of_a_hang_the_collective_of_nccl_is_named(hurt: Path) -> None:
    (hang,) = events(hurt, "hang")
    # As a rule that of DDP's buffers, the first of a step.
    assert "default_pg, NCCL)" in hang["waits"][0], hang["waits"]


def test_out_of_memory_is_planned_anew(tmp_path: Path) -> None:
    """The stand-in refuses allocations above a size; torch raises its own OutOfMemoryError."""
    path = config(
        tmp_path,
        tiny_model_dir(tmp_path / "model", layers=2, hidden=256),
        rows=600,
        data={"max_length": 256, "packing": True},
        precision="bf16",
        batch={"global_samples": 16, "micro_batch": 16},
        run={"steps": 2},
        checkpoint={"every": 1, "keep": 1},
        eval={"at_start": False},
    )
    enough = tmp_path / "enough"
    replan = tmp_path / "replan"
    train(path, f"run.dir={enough}")
    taken = max(column(enough, "memory_bytes")[-1])
    less = int(0.9 * taken)
    train(path, f"run.dir={replan}", "memory.on_oom=replan", FAKE_GPU_BYTES=less)

    replanned = column(replan, "predicted_bytes", "replan")
    assert replanned
    for predicted in replanned:
        assert predicted["to"] < predicted["from"]
    has_losses_of(replan, enough, tolerance=3e-2)


def test_a_session(tmp_path: Path) -> None:
    """Two devices against one: a user's own module is initialised on the device, by its generator."""
    script = ROOT / "tests/fake_gpu/session_loop.py"
    for strategy, devices in (("fsdp2", 2), ("single", 1)):
        own = ("--nproc", devices, "--", strategy, tmp_path / strategy, "cuda")
        launched = drumline("launch", script, *own, devices=devices)
        assert launched.code == 0, launched.out
    has_losses_of(tmp_path / "fsdp2", tmp_path / "single")


def test_groups_have_the_limit_of_the_run_and_stages_bring_no_line_of_nccl() -> None:
    failed = run_ranks("tests.fake_gpu.groups", [], world_size=2, timeout=120)
    assert not failed, failed


def test_doctor() -> None:
    checked = drumline("doctor", devices=2)
    assert "H100" in checked.out
    assert "NCCL" in checked.out
    assert "Traceback" not in checked.out


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b"]) as made:
        yield made


def test_two_hosts(model: Path, on_cpu: Path, two_hosts: dict[str, Host], tmp_path: Path) -> None:
    """A device each, in network namespaces; the rendezvous and gloo go over their link."""
    path = config(tmp_path, model, strategy="fsdp2")
    meet = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=a", f"--master-port={free_port()}")
    processes = []
    with shared_memory() as meeting:
        env = environment(1, meeting)
        for number, host in enumerate(two_hosts.values()):
            options = (*meet, f"--node-rank={number}")
            line = [PYTHON, *TORCHRUN, *options, "-m", "drumline", "train", path]
            processes.append(host.start(*line, env=env))
        results = [ended(process, 280) for process in processes]
    for code, _ in results:
        assert code == 0, results
    has_losses_of(tmp_path / "run", on_cpu)
