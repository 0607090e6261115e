"""The doctor on what real programs print: torchrun's ranks that die, full mounts, our own launcher; and 50 runs without a fault."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.doctor.diagnose import Finding, diagnose, order_findings, search
from drumline.doctor.hosts import all_reduce
from drumline.hardware.detect import Machine
from tests.distributed.ranks import free_port
from tests.faults.test_launch import begin, end, toy
from tests.forks import Forked
from tests.harness import ENV, ROOT, drumline, write_config
from tests.tiny import tiny_model_dir

STEPPING = "tests.faults.stepping_worker"
RUNS = {"drumline's launcher": 25, "torchrun": 22, "drumline train": 3}  # without a fault


def names(findings: list[Finding]) -> list[str]:
    return [finding.signature.name for finding in findings]


def read(text: str) -> list[Finding]:
    return order_findings(search(io.BytesIO(text.encode()), "x.log"))


def torchrun(kind: str, *options: str, steps: int = 6, **env: str) -> Forked:
    options = ("--standalone", "--nproc-per-node=2", *options)
    return Forked(
        "torch.distributed.run",
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
    findings = read(said)
    assert code != 0 and names(findings)[0] == cause, said
    follows = {finding.signature.name: finding.follows for finding in findings}
    assert cause in follows["child-failed"], said
    # On a busy machine torchrun may end the other rank before it writes what it met.
    assert cause in follows.get(consequence, [cause]), said


@pytest.mark.full
def test_shapes_that_differ() -> None:
    """gloo ends the process."""
    _, said = torchrun("shapes").told(120)
    assert names(read(said))[0] == "collective-mismatch", said


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGHUP, "hangup"), (signal.SIGTERM, "terminated")]
)
def test_torchrun_is_ended(number: signal.Signals, name: str, tmp_path: Path) -> None:
    process = torchrun("wait", "--log-dir", str(tmp_path), "--redirects", "3")
    until = time.monotonic() + 60
    while not any("waiting" in path.read_text() for path in tmp_path.rglob("stdout.log")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, number)
    _, said = process.told(90)
    assert names(read(said))[0] == name, said


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
    arguments = [sys.executable, *work.replace("SCRIPT", str(script)).split(" ", 1)]
    command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs {mount} && exec "$@"', "sh"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0 and names(read(done.stderr))[0] == name, done.stderr


@pytest.mark.full
def test_deepspeed() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    with pytest.raises(Exception, match="minimum") as scale:
        scaler = DynamicLossScaler(
            1.0, scale_window=10, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
        )
        scaler.update_scale(True)
    assert names(read(f"Exception: {scale.value}"))[0] == "scale-minimum"
    sizes = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    with pytest.raises(AssertionError) as batch:
        deepspeed.DeepSpeedConfig(sizes)
    assert names(read(f"AssertionError: {batch.value}"))[0] == "batch-arithmetic"


@pytest.mark.full
def test_our_own_launcher(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = toy(run, json.dumps({"steps": 20, "kills": [[1, 7]]}), max_restarts=0)
    assert end(begin(plan, STEPPING))[0] == 1
    done = drumline("doctor", run, "--json")
    found = json.loads(done.out)["findings"]
    assert done.code == 1 and found[0]["name"] == "killed" and found[0]["ranks"] == [1], done.out
    assert all(other["consequence_of"] for other in found[1:])


@pytest.mark.slow
def test_an_all_reduce_of_real_ranks() -> None:
    checks = all_reduce(["a", "a"], Machine([], 2, 2**34, "cpu", False), True, "100Gb", free_port())
    assert [check.name for check in checks] == ["all-reduce", "rank 0 ↔ 1"] and checks[
        0
    ].verdict == "ok", checks


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_false_alarm_on_fifty_runs(tmp_path: Path) -> None:
    healthy = 0
    for number in range(RUNS["drumline's launcher"]):
        run = tmp_path / f"stepping-{number}"
        code, said = end(begin(toy(run, json.dumps({"steps": 6 + number})), STEPPING))
        assert code == 0, said
        (run / "shown.log").write_text(said)
        assert diagnose(str(run)) == []
        healthy += 1
    for number in range(RUNS["torchrun"]):
        logs = tmp_path / f"torchrun-{number}"
        levels = (
            {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "LOGLEVEL": "INFO"}
            if number % 2
            else {}
        )
        code, said = torchrun(
            "healthy", "--log-dir", str(logs), "--redirects", "3", steps=4 + number, **levels
        ).told(120)
        assert code == 0, said
        (logs / "shown.log").write_text(said)
        assert (
            any("loss" in path.read_text() for path in logs.rglob("std*.log"))
            and diagnose(str(logs)) == []
        )
        healthy += 1
    model = tiny_model_dir(tmp_path / "model")
    for number, strategy in enumerate(["ddp", "fsdp2", "single"][: RUNS["drumline train"]]):
        folder = tmp_path / f"train-{number}"
        folder.mkdir()
        config = write_config(
            folder,
            model,
            strategy={"kind": strategy},
            launch={"nproc": 1 if strategy == "single" else 2},
        )
        done = drumline("train", config, cwd=folder)
        assert done.code == 0, done.err
        (folder / "run" / "shown.log").write_text(done.out + done.err)
        assert diagnose(str(folder / "run")) == []
        healthy += 1
    assert healthy == sum(RUNS.values()) == 50
