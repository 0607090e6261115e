"""Whole runs over the stand-in, by the commands a user types: launchers, faults, memory, an export."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu.environment import PYTHON, environment
from tests.fake_gpu.running import drumline, end, free_port, run_ranks, said, shared_memory, start
from tests.faults.live import kill, ranks_of, wait_for
from tests.harness import ROOT, events, losses, survivors, write_config
from tests.harness import drumline as drumline_on_cpu
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the CUDA build of torch: make fake-gpu"),
]
TOLERANCE = 1e-5
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def on_cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of `config` in one process on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    path = config(folder, model, run={"device": "cpu"})
    ended_run = drumline_on_cpu("train", path)
    assert ended_run.code == 0, ended_run.err
    return folder / "run"


def config(folder: Path, model: Path, **sections: Any) -> Path:
    base: dict[str, Any] = {
        "rows": 60,
        "data": {"packing": False},
        "batch": {"global_samples": 4, "micro_batch": 2},
        "optimizer": {"lr": 3e-3, "eps": 1e-6},
        "precision": "fp32",
        "run": {"steps": 6, "device": "cuda"},
    }
    for name, values in sections.items():
        is_laid_over = isinstance(values, dict) and isinstance(base.get(name), dict)
        base[name] = {**base[name], **values} if is_laid_over else values
    return write_config(folder, model, **base)


def has_losses_of(run: Path, reference: Path) -> None:
    expected = losses(reference)
    assert losses(run) == pytest.approx(expected, rel=TOLERANCE)
    assert losses(run).keys() == expected.keys()


def test_two_devices_stop_one_goes_on_and_exports(
    model: Path, on_cpu: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, model, schedule={"kind": "constant"}, checkpoint={"export": "last"})
    constant = drumline_on_cpu(
        "train", path, "run.device=cpu", f"run.dir={tmp_path / 'cpu'}", "checkpoint.export=none"
    )
    assert constant.code == 0, constant.err
    stopped = drumline(
        "train", path, "run.steps=4", "strategy=fsdp2", "checkpoint.export=none", devices=2
    )
    assert stopped.code == 0, stopped.out
    allowed = ("--allow", "run.steps,strategy,checkpoint.export")
    went_on = drumline("train", path, "strategy=single", "--resume", *allowed)
    assert went_on.code == 0, went_on.out
    has_losses_of(tmp_path / "run", tmp_path / "cpu")
    (export,) = events(tmp_path / "run", "export")
    assert export["error"] is None
    assert (tmp_path / "run/export/model.safetensors").exists()


def test_torchrun(model: Path, on_cpu: Path, tmp_path: Path) -> None:
    path = config(tmp_path, model, strategy="ddp")
    with shared_memory() as meeting:
        options = ("--standalone", "--nproc-per-node=2")
        line = [*TORCHRUN, *options, "-m", "drumline", "train", path]
        process = start(line, environment(2, meeting))
        assert finish(process) == 0, said(process)
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
        wait_for(run, "step", 4)
        kill(ranks_of(run)[1])
        restored = wait_for(run, "restore", 3)
        wait_for(run, "step", 4, after=restored["t"])
        kill(ranks_of(run)[1], signal.SIGSTOP)
        wait_for(run, "hang", 0)
        pace.write_text("0")
        assert finish(process) == 0, said(process)
    return run


def test_a_killed_and_a_suspended_rank_are_named_and_the_run_goes_on(
    hurt: Path, on_cpu: Path
) -> None:
    killed, hung = events(hurt, "fault")
    assert (hung["rank"], hung["action"]) == (1, "restart")
    assert (killed["rank"], killed["signal"], killed["action"]) == (1, "SIGKILL", "restart")
    (hang,) = events(hurt, "hang")
    assert (hang["rank"], hang["why"]) == (1, "it is suspended (SIGSTOP)")
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
    enough = drumline("train", path, f"run.dir={tmp_path / 'enough'}")
    assert enough.code == 0, enough.out
    taken = max(events(tmp_path / "enough", "step")[-1]["memory_bytes"])
    replan = ("memory.on_oom=replan", f"run.dir={tmp_path / 'replan'}")
    again = drumline("train", path, *replan, FAKE_GPU_BYTES=int(0.9 * taken))
    assert again.code == 0, again.out
    replanned = events(tmp_path / "replan", "replan")
    assert replanned, again.out
    assert all(e["predicted_bytes"]["to"] < e["predicted_bytes"]["from"] for e in replanned)
    assert losses(tmp_path / "replan") == pytest.approx(losses(tmp_path / "enough"), rel=3e-2)


def test_a_session(tmp_path: Path) -> None:
    """Two devices against one: a user's own module is initialised on the device, by its generator."""
    script = ROOT / "tests/fake_gpu/session_loop.py"
    two, one = tmp_path / "two", tmp_path / "one"
    spread = drumline("launch", script, "--nproc", 2, "--", "fsdp2", two, "cuda", devices=2)
    assert spread.code == 0, spread.out
    alone = drumline("launch", script, "--nproc", 1, "--", "single", one, "cuda")
    assert alone.code == 0, alone.out
    has_losses_of(two, one)


def test_groups_have_the_limit_of_the_run_and_stages_bring_no_line_of_nccl() -> None:
    failed = run_ranks("tests.fake_gpu.groups", [], devices=2, timeout=120)
    assert not failed, failed


def test_doctor() -> None:
    checked = drumline("doctor", devices=2)
    assert "H100" in checked.out and "NCCL" in checked.out, checked.out
    assert "Traceback" not in checked.out


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b"]) as made:
        yield made


def test_two_hosts(model: Path, on_cpu: Path, two_hosts: dict[str, Host], tmp_path: Path) -> None:
    """A device each, in network namespaces; the rendezvous and gloo go over their link."""
    path = config(tmp_path, model, strategy="fsdp2")
    port = free_port()
    with shared_memory() as meeting:
        env = environment(1, meeting)
        processes = []
        for number, host in enumerate(two_hosts.values()):
            options = ("--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}")
            meet = ("--master-addr=a", f"--master-port={port}")
            line = [PYTHON, *TORCHRUN, *options, *meet, "-m", "drumline", "train", path]
            processes.append(host.start(*line, env=env))
        results = [ended(process, 280) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    has_losses_of(tmp_path / "run", on_cpu)


def finish(process: subprocess.Popen[str], timeout: float = 300) -> int:
    """Return the exit code; a process that runs over the time is killed with all it started."""
    try:
        return process.wait(timeout)
    finally:
        end(process)
