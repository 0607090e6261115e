"""The launch lines of training guides over two hosts: torchrun, torch.distributed.launch, accelerate, and deepspeed by pdsh."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, events, losses, write_config
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full
PYTHON = sys.executable
MAIN = ["main.py", "--mode", "train", "--config", "CONFIG", "--algorithm", "sft"]
# name → the line of each host, which differ by NUMBER alone
LINES = {
    "torchrun": [
        PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "7", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "a:29500", *MAIN,
    ],
    "torchrun, static": [
        PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--node_rank=NUMBER", "--nproc_per_node=1", "--master_addr=a",
        "--master_port=29501", *MAIN,
    ],
    "torch.distributed.launch": [
        PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node=1", "--nnodes=2", "--node_rank=NUMBER", "--master_addr=a",
        "--master_port=29502", *MAIN,
    ],
    "accelerate launch": [
        PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2",
        "--machine_rank", "NUMBER", "--main_process_ip", "a", "--main_process_port", "29503", *MAIN,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b"]) as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    model, batch = tiny_model_dir(folder / "model"), {"micro_batch": None}  # which a launcher's file may say
    return write_config(folder, model, data={"packing": False, "eval": []}, batch=batch, run={"steps": 3}, checkpoint={"every": None})


@pytest.fixture(scope="module")
def own(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks of one machine."""
    run = tmp_path_factory.mktemp("own") / "run"
    line = [PYTHON, "-m", "drumline", "train", str(config), f"run.dir={run}", "launch.nproc=2"]
    subprocess.run(line, env=ENV, cwd=ROOT, check=True, capture_output=True, timeout=280)
    return losses(run)


def environment(config: Path) -> dict[str, str]:
    """accelerate's default config must not decide; nor a host's GPUs, which all hosts of a test share."""
    return {**ENV, "HF_HOME": str(config.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_each_host(name: str, two: dict[str, Host], config: Path, own: dict[int, float], tmp_path: Path) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    run, processes = tmp_path / "run", []
    for number, host in enumerate(two.values()):
        line = [word.replace("NUMBER", str(number)).replace("CONFIG", str(config)) for word in LINES[name]]
        processes.append(host.start(*line, f"run.dir={run}", env=environment(config)))
    for process in processes:
        code, out = ended(process, 280)
        assert code == 0, out
    (start,) = events(run, "run_start")
    assert start["world_size"] == 2
    assert losses(run) == pytest.approx(own, rel=1e-5)


def test_deepspeed_with_a_hostfile(two: dict[str, Host], config: Path, own: dict[int, float], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if shutil.which("pdsh") is None and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "pdsh"], capture_output=True, timeout=300, check=False)
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is missing")
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    zero = ROOT / "examples" / "compat" / "ds_zero2.json"
    line = [PYTHON, "-m", "deepspeed.launcher.runner", "--hostfile", tmp_path / "hostfile", "--master_addr", "a", "--master_port", "29504"]
    main = [word.replace("CONFIG", str(config)) for word in MAIN]
    env = {**environment(config), "PDSH_SSH_ARGS_APPEND": f"-F {two['a'].ssh_config}"}
    run = tmp_path / "run"
    code, out = ended(two["a"].start(*line, *main, "--deepspeed", "--deepspeed_config", zero, f"run.dir={run}", env=env), 280)
    assert code == 0, out
    (start,) = events(run, "run_start")
    assert (start["world_size"], start["strategy"]) == (2, "zero2")
    assert losses(run) == pytest.approx(own, rel=1e-5)


def test_a_host_of_rank_0_without_an_address_is_one_line(two: dict[str, Host], config: Path, tmp_path: Path) -> None:
    line = [PYTHON, "-m", "drumline", "train", str(config), f"run.dir={tmp_path / 'run'}"]
    usual = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29505"}
    code, out = ended(two["b"].start(*line, env={**ENV, **usual}), 120)
    assert code == 2 and re.search("the host 'no-such-host.invalid' of rank 0 has no address", out) and "Traceback" not in out, out
