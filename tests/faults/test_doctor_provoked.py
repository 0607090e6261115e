"""The doctor on what real programs print: torchrun's ranks that die, full mounts, our own launcher;
and 50 runs without a fault."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.doctor.diagnose import Finding, diagnose, order_findings, search
from drumline.doctor.hosts import all_reduce
from drumline.hardware.detect import Machine
from tests.distributed.ranks import free_port
from tests.faults.live import wait_until
from tests.faults.test_launch import begin, require_end, toy
from tests.forks import Forked
from tests.harness import ENV, ROOT, drumline, run_drumline, write_config

STEPPING = "tests.faults.stepping_worker"
RUNS = {"drumline's launcher": 25, "torchrun": 22, "drumline train": 3}  # without a fault
LEVELS = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "LOGLEVEL": "INFO"}


def read(text: str) -> list[Finding]:
    """What the doctor finds in a log, the cause first."""
    return order_findings(search(io.BytesIO(text.encode()), "x.log"))


def cause_of(text: str) -> str:
    """The name of what the doctor takes for the cause."""
    return read(text)[0].signature.name


def torchrun(kind: str, *options: str, steps: int = 6, **env: str) -> Forked:
    return Forked(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *options,
        "-m",
        "tests.faults.doctor_worker",
        kind,
        steps,
        env={**ENV, **env},
        cwd=ROOT,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "cause", "consequence"),
    [
        ("raise", "python-error", "peer-closed"),
        ("kill", "killed", "peer-closed"),
        ("models", "ddp-parameters", "child-failed"),
    ],
)
def test_torchrun(kind: str, cause: str, consequence: str) -> None:
    code, said = torchrun(kind).told(120)
    assert code != 0
    assert cause_of(said) == cause, said
    follows = {finding.signature.name: finding.caused_by for finding in read(said)}
    assert cause in follows["child-failed"], said
    # On a busy machine torchrun may end the other rank before it writes what it met.
    assert cause in follows.get(consequence, [cause]), said


@pytest.mark.full
def test_shapes_that_differ() -> None:
    """gloo ends the process."""
    _, said = torchrun("shapes").told(120)
    assert cause_of(said) == "collective-mismatch", said


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGHUP, "hangup"), (signal.SIGTERM, "terminated")]
)
def test_torchrun_is_ended(number: signal.Signals, name: str, tmp_path: Path) -> None:
    process = torchrun("wait", "--log-dir", str(tmp_path), "--redirects", "3")

    def is_waiting() -> bool:
        return any("waiting" in path.read_text() for path in tmp_path.rglob("stdout.log"))

    wait_until(is_waiting, 60, process)
    assert is_waiting()
    os.kill(process.pid, number)
    _, said = process.told(90)
    assert cause_of(said) == name, said


LOADER = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for batch in DataLoader(torch.zeros(64, 2**18), batch_size=16, num_workers=1):
        pass
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mount", "work"),
    [
        ("dev-shm", "-o size=2m none /dev/shm", "SCRIPT"),
        ("read-only", "-o ro none /mnt", "-c open('/mnt/x','w')"),
        ("disk-full", "-o size=64k none /mnt", "-c open('/mnt/x','wb').write(bytes(2**20))"),
    ],
)
def test_mounts(name: str, mount: str, work: str, tmp_path: Path) -> None:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    work = work.replace("SCRIPT", str(script))
    shell = f'mount -t tmpfs {mount} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, *work.split(" ", 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert cause_of(done.stderr) == name, done.stderr


@pytest.mark.full
def test_deepspeed() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    with pytest.raises(Exception, match="minimum") as scale:
        scaler = DynamicLossScaler(
            1.0, scale_window=10, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
        )
        scaler.update_scale(True)
    assert cause_of(f"Exception: {scale.value}") == "scale-minimum"

    sizes = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    with pytest.raises(AssertionError) as batch:
        deepspeed.DeepSpeedConfig(sizes)
    assert cause_of(f"AssertionError: {batch.value}") == "batch-arithmetic"


@pytest.mark.full
def test_our_own_launcher(run_dir: Path) -> None:
    behave = json.dumps({"steps": 20, "kills": [[1, 7]]})
    process = begin(toy(run_dir, behave, max_restarts=0), STEPPING)
    require_end(process, 1)

    done = drumline("doctor", run_dir, "--json")
    assert done.code == 1, done.out
    cause, *others = json.loads(done.out)["findings"]
    assert cause["name"] == "killed", done.out
    assert cause["ranks"] == [1], done.out
    for other in others:
        assert other["consequence_of"]


@pytest.mark.slow
def test_an_all_reduce_of_real_ranks() -> None:
    machine = Machine([], 2, 2**34, "cpu", False)
    checks = all_reduce(["a", "a"], machine, True, "100Gb", free_port())
    assert [check.name for check in checks] == ["all-reduce", "rank 0 ↔ 1"]
    assert checks[0].verdict == "ok", checks


def run_launcher(folder: Path, number: int) -> Path:
    """A run of stepping ranks without a fault; returns the folder of its logs."""
    run = folder / f"stepping-{number}"
    behave = json.dumps({"steps": 6 + number})
    process = begin(toy(run, behave), STEPPING)
    said = require_end(process, 0)
    (run / "shown.log").write_text(said)
    return run


def run_torchrun(folder: Path, number: int) -> Path:
    """A run under torchrun without a fault, every second one with more of torch's own messages;
    returns the folder of its logs."""
    logs = folder / f"torchrun-{number}"
    options = ("--log-dir", str(logs), "--redirects", "3")
    levels = {}
    if number % 2:
        levels = LEVELS
    process = torchrun("healthy", *options, steps=4 + number, **levels)
    code, said = process.told(120)
    assert code == 0, said
    (logs / "shown.log").write_text(said)
    assert any("loss" in path.read_text() for path in logs.rglob("std*.log"))
    return logs


def run_train(folder: Path, model: Path, strategy: str) -> Path:
    """A run of `drumline train` without a fault; returns its folder."""
    folder = folder / f"train-{strategy}"
    folder.mkdir()
    nproc = 2
    if strategy == "single":
        nproc = 1
    config = write_config(folder, model, strategy={"kind": strategy}, launch={"nproc": nproc})
    done = run_drumline("train", config, cwd=folder)
    (folder / "run" / "shown.log").write_text(done.out + done.err)
    return folder / "run"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_false_alarm_on_fifty_runs(model: Path, tmp_path: Path) -> None:
    assert sum(RUNS.values()) == 50
    for number in range(RUNS["drumline's launcher"]):
        assert diagnose(str(run_launcher(tmp_path, number))) == []
    for number in range(RUNS["torchrun"]):
        assert diagnose(str(run_torchrun(tmp_path, number))) == []
    strategies = ["ddp", "fsdp2", "single"]
    assert len(strategies) == RUNS["drumline train"]
    for strategy in strategies:
        assert diagnose(str(run_train(tmp_path, model, strategy))) == []
