"""Runs as jobs and steps of a real Slurm of two nodes, and as tasks of real mpirun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.launch.slurm.script import script
from drumline.plan.plan import Plan
from tests.distributed.ranks import free_port
from tests.faults.live import kill, wait_for
from tests.faults.test_hangs import plan_of
from tests.harness import (
    ENV,
    Finished,
    Sections,
    column,
    events,
    losses,
    read_json,
    run_drumline,
    survivors,
    write_config,
)
from tests.slurm.cluster import Slurm, require, slurm
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full
STEPS = 200
DRUMLINE = (sys.executable, "-m", "drumline")
LAUNCH = (
    "launch.kind=slurm",
    "launch.nodes=2",
    "launch.grace_seconds=20",
    "launch.preflight=false",
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require()
    with slurm(tmp_path_factory.mktemp("slurm") / "c") as running:
        yield running


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    sections: Sections = {
        "data": {"packing": False},
        "run": {"steps": STEPS},
        "checkpoint": {"every": 20},
        "optimizer": {"lr": 1e-3},
    }
    return write_config(folder, tiny_model_dir(folder / "model"), rows=90, **sections)


@pytest.fixture(scope="module")
def reference(config: Path) -> dict[int, float]:
    """Losses of two ranks of the local launcher."""
    run = config.parent / "reference"
    run_drumline("train", config, f"run.dir={run}", "--nproc", 2)
    return losses(run)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that is not there yet."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").call("scancel", "--quiet", "--user=root")
    for number in survivors(str(tmp_path)):
        kill(number)


def start(cluster: Slurm, *command: object, **env: str) -> subprocess.Popen[str]:
    """Start a command that finds the cluster."""
    return subprocess.Popen(
        list(map(str, command)),
        env={**cluster.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout: float = 300) -> Finished:
    """Wait for a process that `start` started; it is killed when the time is up."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args!r} took over {timeout} s:\n{out}\n{err}") from None
    return Finished(process.returncode, out, err)


def call(cluster: Slurm, *command: object, **env: str) -> Finished:
    """Run a command to its end."""
    return end(start(cluster, *command, **env))


def train(config: Path, run: Path, *more: object) -> list[object]:
    """The command that trains into a run folder."""
    return [*DRUMLINE, "train", config, f"run.dir={run}", *more]


def told(done: Finished, code: int, *parts: str) -> None:
    """A process ended with this code, and its standard error has these parts."""
    assert done.code == code, done.out + done.err
    for part in parts:
        assert part in done.err, done.err


def wait_for_end(cluster: Slurm, run: Path, job: str, key: str, value: str) -> str:
    """Wait for a job, which must end with this value of what Slurm says of it. Returns its log."""
    found = cluster.wait(job, *ENDED)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert found[key] == value, log
    return log


def job_of(run: Path) -> str:
    """The number of the job that a run is."""
    number: str = read_json(run / "job.json")["job"]
    return number


def task_of(run: Path, number: int) -> int:
    """The process of one task of srun."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = each.cmdline()
            is_mine = "train" in line and str(run) in " ".join(line)
            if is_mine and each.environ().get("SLURM_PROCID") == str(number):
                return each.pid
    raise AssertionError(f"there is no task {number}")


def walk(
    cluster: Slurm,
    run: Path,
    launch: Sections | None = None,
    worker: str = "stepping_worker",
    **behave: Any,
) -> str:
    """A job of two ranks without a model; its number."""
    usual = {"kind": "slurm", "nodes": 2, "preflight": False, "max_restarts": 3}
    path = plan_of(run, {"steps": 60, **behave}, **{**usual, **(launch or {})})
    (run / "logs").mkdir()
    text = script(Plan.load(path).config.launch, path, None).rstrip("\n")
    (run / "job.sh").write_text(f"{text} --worker tests.faults.{worker}\n")
    job = cluster.call("sbatch", "--parsable", run / "job.sh").stdout.strip()
    assert job.isdecimal()
    (run / "job.json").write_text(json.dumps({"job": job}))
    return job


@pytest.mark.parametrize(
    ("program", "more"),
    [
        (("srun", "-N2", "-n2"), ()),
        (("srun", "-N1", "-n2"), ()),
        (("salloc", "-N2"), ()),
        (("salloc", "-N1", "-n2"), ()),
        # One task a node, and two ranks of each: the same samples a step, by half the micro-batch.
        (("srun", "-N2", "-n2"), ("--nproc", "2", "batch.micro_batch=1")),
    ],
    ids=[
        "srun, two nodes",
        "srun, one node",
        "salloc, two nodes",
        "salloc, two tasks",
        "one task a node",
    ],
)
def test_joins_without_being_told(
    cluster: Slurm,
    config: Path,
    reference: dict[int, float],
    run: Path,
    program: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    done = call(cluster, *program, *train(config, run, *more))
    told(done, 0)
    assert done.out.count(f"Finished {STEPS} steps") == 1, "rank 0 alone shows the run"
    assert losses(run) == pytest.approx(reference, rel=1e-5)
    world_size = 4 if more else 2
    assert events(run, "run_start")[0]["world_size"] == world_size


def test_a_mistake_under_srun_is_one_line(cluster: Slurm, config: Path, run: Path) -> None:
    line = train(config, run, "launch.nproc=3")
    done = call(cluster, "srun", "-N1", "-n2", *line)
    told(done, 2, "launch.nproc is 3, but srun has started 2 processes")
    assert done.err.count("error: launch") == 1, done.err


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_batch_script_of_the_user_s_own_goes_on_when_it_is_requeued(
    cluster: Slurm, config: Path, run: Path, tmp_path: Path, nodes: int
) -> None:
    log = tmp_path / "log"
    body = (
        f"#!/bin/bash\n{sys.executable} -m drumline train {config} run.dir={run} run.steps=2000\n"
    )
    (tmp_path / "own.sh").write_text(body)
    options = (
        "--parsable",
        f"--nodes={nodes}",
        "--requeue",
        "--open-mode=append",
        f"--output={log}",
    )
    job = cluster.call("sbatch", *options, tmp_path / "own.sh").stdout.strip()
    wait_for(run, "save", 20)
    cluster.call("scontrol", "requeue", job)
    restored = wait_for(run, "restore", 20)
    assert restored["path"], log.read_text()
    assert "not empty" not in log.read_text(), log.read_text()


def test_a_heterogeneous_job_is_one_line(cluster: Slurm, config: Path, run: Path) -> None:
    line = train(config, run)
    for program in (("salloc", "-N1", ":", "-N1"), ("srun", "-N1", "-n1", ":", "-N1", "-n1")):
        done = call(cluster, *program, *line)
        assert done.code == 2, done.err
        assert done.err.count("error: launcher: this job is heterogeneous") == 1, done.err
        assert not run.exists()


def test_only_ranks_of_this_user_meet(cluster: Slurm) -> None:
    """By munge: what rank 0 has sealed opens for this user alone, also twice on one host."""
    from_input = (
        "from drumline.system.munge import seal, unseal; s = seal('a1b2');"
        " print(unseal(s), unseal(s), unseal('x'), unseal(input()))"
    )
    options: Sections = {
        "env": cluster.env,
        "capture_output": True,
        "text": True,
        "check": True,
    }
    other = subprocess.run(["munge", "--restrict-uid=65534"], input="c3", **options).stdout
    shown = subprocess.run([sys.executable, "-c", from_input], input=other, **options).stdout
    assert shown.split() == ["a1b2", "a1b2", "None", "None"]

    rank = "import os; from drumline.dist import start; start.rendezvous().set(os.environ['RANK'], '1'); start.receive('1', 60)"
    usual = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SLURM_JOB_ID": "1",
    }
    first = start(cluster, sys.executable, "-c", rank, RANK="0", **usual)
    stranger = call(cluster, sys.executable, "-c", rank, RANK="1", PATH="/nowhere", **usual)
    told(stranger, 1, "munge does not open here what rank 0 has sealed")

    second = start(cluster, sys.executable, "-c", rank, RANK="1", **usual)
    for process in (second, first):
        done = end(process)
        told(done, 0)


@pytest.mark.parametrize(
    ("program", "options", "package"),
    [
        ("mpirun.openmpi", ("--allow-run-as-root", "--oversubscribe"), "openmpi-bin"),
        ("mpirun.mpich", (), "mpich"),
    ],
)
def test_joins_under_mpirun(
    config: Path,
    reference: dict[int, float],
    run: Path,
    tmp_path: Path,
    program: str,
    options: tuple[str, ...],
    package: str,
) -> None:
    if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
            capture_output=True,
            check=False,
        )
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}, and {package} could not be installed")
    command = [
        program,
        *options,
        "-np",
        "2",
        *DRUMLINE,
        "train",
        str(config),
        f"run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        command, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == reference


def test_a_job_of_two_nodes_trains_as_two_local_ranks(
    cluster: Slurm, config: Path, reference: dict[int, float], tmp_path: Path
) -> None:
    run = tmp_path / "a run"  # with a space in its name
    line = train(config, run, *LAUNCH)
    planned = call(cluster, *line, "--dry-run")
    told(planned, 0)
    assert "#SBATCH --nodes=2" in planned.out
    assert not run.exists()

    done = call(cluster, *line, "launch.preflight=true")
    told(done, 0)
    assert f"Finished {STEPS} steps" in done.out
    assert losses(run) == reference
    assert planned.out.rstrip().endswith((run / "job.sh").read_text().rstrip())

    shown = call(cluster, *DRUMLINE, "logs", run, "--rank", 1)
    told(shown, 0)
    assert "finished" in call(cluster, *DRUMLINE, "ps", tmp_path).out

    again = call(cluster, *line)
    told(again, 2, "the run folder is not empty")


def test_a_preflight_that_fails_ends_the_job(cluster: Slurm, config: Path, run: Path) -> None:
    line = train(config, run, *LAUNCH, "launch.preflight=true")
    done = call(cluster, *line, GLOO_SOCKET_IFNAME="none0")
    told(done, 2, "error: host n1: interfaces: ", "none0 is set")
    assert not (run / "events.jsonl").exists()


def test_detached_then_followed_then_stopped(
    cluster: Slurm, config: Path, run: Path, tmp_path: Path
) -> None:
    line = train(config, run, *LAUNCH, "run.steps=100000")
    done = call(cluster, *line, "--detach")
    told(done, 0, f"job {job_of(run)}: ")

    wait_for(run, "step", 3)
    again = call(cluster, *line, "--resume")
    told(again, 2, f"job {job_of(run)} of this run is RUNNING")

    listed = call(cluster, *DRUMLINE, "ps", tmp_path).out
    assert "running" in listed
    assert f"job {job_of(run)}" in listed

    left = start(cluster, *DRUMLINE, "follow", run)
    time.sleep(10)
    left.send_signal(signal.SIGINT)
    seen = end(left)
    told(seen, 130, "goes on: drumline follow")
    assert "step 1/" in seen.out, seen.err

    following = start(cluster, *DRUMLINE, "follow", run)
    time.sleep(5)
    stopped = call(cluster, *DRUMLINE, "stop", run)
    told(stopped, 0)

    seen = end(following)
    told(seen, 75, "stopped and saved")

    found = cluster.wait(job_of(run), *ENDED)
    # It is not requeued.
    assert found["ExitCode"] == "75:0"
    assert found["Restarts"] == "0"
    assert events(run, "run_end")[-1]["status"] == "preempted"


@pytest.mark.parametrize("how", ["time limit", "preemption"])
def test_requeued_it_goes_on_with_the_same_losses(
    cluster: Slurm, config: Path, reference: dict[int, float], run: Path, how: str
) -> None:
    process = start(cluster, *train(config, run, *LAUNCH, "launch.extra=[--exclusive]"))
    wait_for(run, "step", 5, process)
    if how == "time limit":  # what Slurm sends then: test_the_time_limit_itself
        cluster.call("scancel", "--batch", "--signal=USR1", job_of(run))
    else:
        options = (
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--parsable",
            "--output=/dev/null",
        )
        cluster.call("sbatch", *options, "--wrap", "sleep 1")
    done = end(process)
    told(done, 0)
    assert losses(run) == reference
    assert cluster.job(job_of(run))["Restarts"] == "1"

    # Saved where it was stopped, and nothing done twice.
    saved = column(run, "step", "preempt")
    assert len(saved) == 1
    assert column(run, "step", "restore") == saved


def test_the_time_limit_itself(cluster: Slurm, run: Path) -> None:
    """Slurm counts in minutes: the warning comes 61 seconds before the second one ends."""
    job = walk(cluster, run, {"time": 2, "grace_seconds": 1.0}, steps=10**6)
    restored = wait_for(run, "restore", 5)
    found = cluster.job(job)
    assert found["Restarts"] == "1"
    assert found["JobState"] == "RUNNING"

    saved = [event["step"] for event in events(run, "save") if event["t"] < restored["t"]]
    assert restored["step"] == saved[-1]


def test_cancelled_it_saves_first(cluster: Slurm, config: Path, run: Path) -> None:
    process = start(cluster, *train(config, run, *LAUNCH, "run.steps=100000"))
    wait_for(run, "step", 5, process)
    cluster.call("scancel", job_of(run))
    done = end(process)
    told(done, 75, "stopped and saved")
    assert cluster.job(job_of(run))["JobState"] == "CANCELLED"
    assert cluster.job(job_of(run))["Restarts"] == "0"

    steps = events(run, "run_end")[-1]["step"] + 2
    more = (f"run.steps={steps}", "--nproc", 2, "--resume", "--allow", "all")
    run_drumline("train", config, f"run.dir={run}", *more)


def test_a_job_that_waits_is_cancelled(
    cluster: Slurm, config: Path, run: Path, tmp_path: Path
) -> None:
    line = train(config, run, *LAUNCH, "launch.extra=[--begin=now+1hour]")
    process = start(cluster, *line)
    until = time.monotonic() + 120
    while not (run / "job.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert "queued" in call(cluster, *DRUMLINE, "ps", tmp_path).out
    assert call(cluster, *DRUMLINE, "stop", run).code == 0

    done = end(process)
    told(done, 1, f"job {job_of(run)} is cancelled")


def test_a_killed_rank_is_named_with_its_host_and_the_run_goes_on(
    cluster: Slurm, run: Path
) -> None:
    job = walk(cluster, run)
    wait_for(run, "eval", 12)
    kill(int((run / "pid-1").read_text()))
    log = wait_for_end(cluster, run, job, "JobState", "COMPLETED")
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["host"], fault["signal"], fault["action"]) == (
        1,
        "n2",
        "SIGKILL",
        "restart",
    ), log
    assert "rank 1 on host n2: killed by SIGKILL" in log
    assert "starting again from the newest checkpoint" in log

    (restored,) = events(run, "restore")
    assert restored["step"] >= 10
    assert events(run, "eval")[-1]["step"] == 60


def test_a_hang_is_named_with_its_host_and_the_run_goes_on(cluster: Slurm, run: Path) -> None:
    job = walk(cluster, run, {"max_restarts": 1}, "hanging_worker", how="data", rank=1, at=20)
    log = wait_for_end(cluster, run, job, "JobState", "COMPLETED")
    (hang,) = events(run, "hang")
    (fault,) = events(run, "fault")
    assert (hang["rank"], hang["host"], hang["phase"], hang["step"], fault["action"]) == (
        1,
        "n2",
        "data",
        20,
        "restart",
    ), log
    assert "rank 1 on host n2: hangs in data at step 21" in log
    assert "in endless" in log
    assert events(run, "eval")[-1]["step"] == 60
    assert not list(Path("/dev/shm").glob("drumline-*-n[12]-*"))


def test_a_hang_of_tasks_that_joined_is_named(cluster: Slurm, config: Path, run: Path) -> None:
    more = ("run.steps=100000", "health.hang_seconds=2")
    process = start(cluster, "srun", "-N2", "-n2", *train(config, run, *more))
    wait_for(run, "step", 5, process)
    kill(task_of(run, 1), signal.SIGSTOP)
    done = end(process)
    assert done.code, done.err
    assert "rank 1 on host n2: hangs in" in done.err, done.err
    assert "it is suspended (SIGSTOP)" in done.err, done.err

    # The other host's ranks may have waited for too long before they ended, too.
    hang = events(run, "hang")[0]
    assert (hang["rank"], hang["host"]) == (1, "n2")
    assert (
        events(run, "fault")[0]["action"]
        == "stop: its ranks are killed, and srun decides about another start"
    )


def test_a_rank_that_fails_again_ends_the_job(cluster: Slurm, run: Path) -> None:
    job = walk(cluster, run, how="raise", rank=1, at=7, attempts=9)
    log = wait_for_end(cluster, run, job, "ExitCode", "1:0")
    said = r"error: rank 1 on host n2 failed after step 7: ValueError in stepping_worker\.py:\d+: rank 1 does not like step 7"
    assert re.search(said, log)
    assert log.count("Traceback (most recent call last)") == 2
    assert "the same failure came twice" in log

    followed = call(cluster, *DRUMLINE, "follow", run)
    assert followed.code == 1


def test_a_rank_that_hangs_is_killed_after_the_grace(cluster: Slurm, run: Path) -> None:
    job = walk(cluster, run, {"grace_seconds": 2.0, "max_restarts": 0}, steps=10**6)
    wait_for(run, "eval", 5)
    kill(int((run / "pid-1").read_text()), signal.SIGSTOP)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    log = wait_for_end(cluster, run, job, "ExitCode", "1:0")
    assert "did not save in time and were killed" in log or "rank" in log
