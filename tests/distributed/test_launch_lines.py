"""The launch lines of training guides, each with two real processes on the tiny model: the losses
are those of Drumline's own launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import gone, wait_for
from tests.harness import ENV, ROOT, column, losses, write_config
from tests.tiny import tiny_model_dir

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCH = [PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node", "2"]
TORCHRUN += ["--master-port", "PORT"]
LAUNCH += ["--master_port", "PORT"]
DEEPSPEED = [PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "PORT"]
ACCELERATE = [PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"]
ACCELERATE += ["--main_process_port", "PORT"]
MAIN = ["main.py", "--mode", "train", "--config", "CONFIG", "--algorithm", "sft"]
EXAMPLES = ROOT / "examples" / "compat"

# name → (the line, the strategy that it must come to)
LINES: dict[str, tuple[list[str], str]] = {
    "torchrun": ([*TORCHRUN, *MAIN], "ddp"),
    "torch.distributed.launch": ([*LAUNCH, *MAIN], "ddp"),
    "torch.distributed.launch --use-env, run.py": (
        [*LAUNCH, "--use-env", "run.py", "CONFIG"],
        "ddp",
    ),
    "deepspeed": (
        [*DEEPSPEED, *MAIN, "--deepspeed", "--deepspeed_config", str(EXAMPLES / "ds_zero2.json")],
        "zero2",
    ),
    "accelerate launch": ([*ACCELERATE, "--multi_gpu", "--num_processes", "2", *MAIN], "ddp"),
    "accelerate launch, FSDP": (
        [*ACCELERATE, "--config_file", str(EXAMPLES / "accelerate_fsdp.yaml"), "run.py", "CONFIG"],
        "fsdp2",
    ),
    "accelerate launch, DeepSpeed": (
        [*ACCELERATE, "--config_file", str(EXAMPLES / "accelerate_zero3.yaml"), *MAIN],
        "zero3",
    ),
    "run_distributed": (
        [
            PYTHON,
            "scripts/run_distributed.py",
            "--nproc_per_node",
            "2",
            "--config",
            "CONFIG",
            "--algorithm",
            "sft",
        ],
        "ddp",
    ),
    "run_distributed, torchrun": (
        [
            PYTHON,
            "scripts/run_distributed.py",
            "--nproc_per_node",
            "2",
            "--config",
            "CONFIG",
            "--use_torchrun",
            "--nnodes",
            "1",
            "--node_rank",
            "0",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            "PORT",
        ],
        "ddp",
    ),
}


@contextmanager
def started(line: list[str], config: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A launch line, under way from the root of the repository. What is left of its process group
    is killed at the end."""
    places = {"CONFIG": str(config), "PORT": str(free_port())}
    command = [places.get(word, word) for word in line]
    command += overrides
    # Its own folder for accelerate's default config: this machine's own must not decide.
    env = {**ENV, "HF_HOME": str(config.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ran(line: list[str], config: Path, *overrides: str, timeout: float = 280) -> tuple[int, str]:
    """A launch line, to its end."""
    with started(line, config, *overrides) as process:
        out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        data={"packing": False, "eval": []},
        batch={"micro_batch": None},  # a launcher's file may say it
        run={"steps": 3},
        checkpoint={"every": None},
    )


@pytest.fixture(scope="module")
def own(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses under `python main.py` alone, which is Drumline's own launcher."""
    run = tmp_path_factory.mktemp("own") / "run"
    code, out = ran([PYTHON, *MAIN], config, f"run.dir={run}", "launch.nproc=2")
    assert code == 0, out
    return losses(run)


# torchrun has tests of its own, and what each launcher sets is joined in test_launch_join.
@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_a_launch_line(name: str, config: Path, own: dict[int, float], tmp_path: Path) -> None:
    line, strategy = LINES[name]
    for tool in ("deepspeed", "accelerate"):
        if name.startswith(tool):
            pytest.importorskip(tool)
    run = tmp_path / "run"
    code, out = ran(line, config, f"run.dir={run}")
    assert code == 0, out
    assert column(run, "world_size", "run_start") == [2]
    assert column(run, "strategy", "run_start") == [strategy]
    assert losses(run) == pytest.approx(own, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchrun", "deepspeed", "accelerate launch"])
def test_ranks_die_with_their_launcher(name: str, config: Path, tmp_path: Path) -> None:
    """The outermost process gets a SIGKILL. deepspeed has two launchers, one in the other."""
    if name != "torchrun":
        pytest.importorskip(name.partition(" ")[0])
    line, _ = LINES[name]
    run = tmp_path / "run"
    overrides = (f"run.dir={run}", "run.steps=100000", "checkpoint.every=null")
    with started(line, config, *overrides) as launcher:
        wait_for(run, "step", 3, launcher, timeout=280)
        ranks = []
        for process in psutil.Process(launcher.pid).children(recursive=True):
            is_watcher = "drumline.launch.watcher" in process.cmdline()
            if "RANK" in process.environ() and not is_watcher:
                ranks.append(process)
        launcher.kill()
        launcher.wait(60)
        assert len(ranks) == 2
        _, left = psutil.wait_procs(ranks, timeout=3 * 1.0)
        for rank in left:
            assert rank.status() == psutil.STATUS_ZOMBIE
    assert gone(str(run), 60), (
        "deepspeed's own inner launcher ends when it has seen that its ranks are gone"
    )


@pytest.mark.full
def test_a_launcher_that_contradicts_the_config(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(config.read_text() + "strategy: ddp\n")
    run = tmp_path / "run"
    line, _ = LINES["accelerate launch, FSDP"]
    code, out = ran(line, path, f"run.dir={run}")
    assert code != 0
    contradiction = "'ddp', but accelerate launch: FSDP_SHARDING_STRATEGY makes it 'fsdp2'"
    assert f"strategy.kind: {contradiction}" in out
    assert not run.exists()


@pytest.mark.full
def test_a_mistake_on_main_s_own_line(config: Path) -> None:
    code, out = ran([*TORCHRUN, "main.py", "--config", "CONFIG", "--mode", "no"], config)
    assert code != 0
    assert out.count("main.py: error: argument --mode: invalid choice: 'no'") == 1, out
    code, _ = ran([PYTHON, "main.py", "--config", "no.yaml"], config)
    assert code == 2
    code, out = ran([PYTHON, *MAIN, "--deepspeed_config", "no.json"], config)
    assert code == 2
    assert "error: command line: --accelerate-config: 'no.json' cannot be read" in out
    assert "Traceback" not in out
