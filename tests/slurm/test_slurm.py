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
from tests.harness import ENV, Finished, drumline, events, losses, survivors, write_config
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
    sections: dict[str, Any] = {
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
    done = drumline("train", config, f"run.dir={run}", "--nproc", 2)
    assert done.code == 0, done.err
    return losses(run)


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").call("scancel", "--quiet", "--user=root")
    for number in survivors(str(tmp_path)):
        kill(number)


def start(cluster: Slurm, *command: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)],
        env={**cluster.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout: float = 300) -> Finished:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args!r} took over {timeout} s:\n{out}\n{err}") from None
    return Finished(process.returncode, out, err)


def job_of(run: Path) -> str:
    number: str = json.loads((run / "job.json").read_text())["job"]
    return number


def task_of(run: Path, number: int) -> int:
    """The process of one task of srun."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                "train" in each.cmdline()
                and str(run) in " ".join(each.cmdline())
                and each.environ().get("SLURM_PROCID") == str(number)
            ):
                return each.pid
    raise AssertionError(f"there is no task {number}")


def walk(
    cluster: Slurm,
    run: Path,
    launch: dict[str, Any] | None = None,
    worker: str = "stepping_worker",
    **behave: Any,
) -> str:
    """A job of two ranks without a model; its number."""
    path = plan_of(
        run,
        {"steps": 60, **behave},
        **{"kind": "slurm", "nodes": 2, "preflight": False, "max_restarts": 3, **(launch or {})},
    )
    (run / "logs").mkdir()
    text = (
        script(Plan.load(path).config.launch, path, None).rstrip("\n")
        + f" --worker tests.faults.{worker}\n"
    )
    (run / "job.sh").write_text(text)
    job = cluster.call("sbatch", "--parsable", run / "job.sh").stdout.strip()
    assert job.isdecimal()
    (run / "job.json").write_text(json.dumps({"job": job}))
    return job


# ------------------------------------------------------------------------------------------------------------- joining


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
    tmp_path: Path,
    program: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    done = end(
        start(cluster, *program, *DRUMLINE, "train", config, f"run.dir={tmp_path / 'run'}", *more)
    )
    assert done.code == 0, done.out + done.err
    assert done.out.count(f"Finished {STEPS} steps") == 1, "rank 0 alone shows the run"
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)
    assert events(tmp_path / "run", "run_start")[0]["world_size"] == (4 if more else 2)


def test_a_mistake_under_srun_is_one_line(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    done = end(
        start(
            cluster,
            "srun",
            "-N1",
            "-n2",
            *DRUMLINE,
            "train",
            config,
            f"run.dir={tmp_path / 'run'}",
            "launch.nproc=3",
        )
    )
    assert done.code == 2 and done.err.count("error: launch") == 1, done.err
    assert "launch.nproc is 3, but srun has started 2 processes" in done.err


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_batch_script_of_the_user_s_own_goes_on_when_it_is_requeued(
    cluster: Slurm, config: Path, tmp_path: Path, nodes: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
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
    assert restored["path"] and "not empty" not in log.read_text(), log.read_text()


def test_a_heterogeneous_job_is_one_line(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    line = (*DRUMLINE, "train", config, f"run.dir={tmp_path / 'run'}")
    for program in (("salloc", "-N1", ":", "-N1"), ("srun", "-N1", "-n1", ":", "-N1", "-n1")):
        done = end(start(cluster, *program, *line))
        assert (
            done.code == 2 and done.err.count("error: launcher: this job is heterogeneous") == 1
        ), done.err
        assert not (tmp_path / "run").exists()


def test_only_ranks_of_this_user_meet(cluster: Slurm) -> None:
    """By munge: what rank 0 has sealed opens for this user alone, also twice on one host."""
    from_input = (
        "from drumline.system.munge import seal, unseal; s = seal('a1b2');"
        " print(unseal(s), unseal(s), unseal('x'), unseal(input()))"
    )
    options: dict[str, Any] = {
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
    stranger = end(start(cluster, sys.executable, "-c", rank, RANK="1", PATH="/nowhere", **usual))
    assert (
        stranger.code == 1 and "munge does not open here what rank 0 has sealed" in stranger.err
    ), stranger.err
    assert (
        end(start(cluster, sys.executable, "-c", rank, RANK="1", **usual)).code
        == 0
        == end(first).code
    )


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
    assert losses(tmp_path / "run") == reference


# ------------------------------------------------------------------------------------------------------------ as a job


def test_a_job_of_two_nodes_trains_as_two_local_ranks(
    cluster: Slurm, config: Path, reference: dict[int, float], tmp_path: Path
) -> None:
    run = tmp_path / "a run"  # with a space in its name
    line = (*DRUMLINE, "train", config, f"run.dir={run}", *LAUNCH)
    planned = end(start(cluster, *line, "--dry-run"))
    assert planned.code == 0 and "#SBATCH --nodes=2" in planned.out and not run.exists(), (
        planned.err
    )
    done = end(start(cluster, *line, "launch.preflight=true"))
    assert done.code == 0, done.out + done.err
    assert f"Finished {STEPS} steps" in done.out and losses(run) == reference
    assert planned.out.rstrip().endswith((run / "job.sh").read_text().rstrip())
    shown = end(start(cluster, *DRUMLINE, "logs", run, "--rank", 1))
    assert shown.code == 0, shown.err
    assert "finished" in end(start(cluster, *DRUMLINE, "ps", tmp_path)).out
    again = end(start(cluster, *line))
    assert again.code == 2 and "the run folder is not empty" in again.err


def test_a_preflight_that_fails_ends_the_job(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    line = (
        *DRUMLINE,
        "train",
        config,
        f"run.dir={tmp_path / 'run'}",
        *LAUNCH,
        "launch.preflight=true",
    )
    done = end(start(cluster, *line, GLOO_SOCKET_IFNAME="none0"))
    assert (
        done.code == 2 and "error: host n1: interfaces: " in done.err and "none0 is set" in done.err
    ), done.err
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_detached_then_followed_then_stopped(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = (*DRUMLINE, "train", config, f"run.dir={run}", *LAUNCH, "run.steps=100000")
    done = end(start(cluster, *line, "--detach"))
    assert done.code == 0 and f"job {job_of(run)}: " in done.err, done.err
    wait_for(run, "step", 3)
    again = end(start(cluster, *line, "--resume"))
    assert again.code == 2 and f"job {job_of(run)} of this run is RUNNING" in again.err, again.err
    listed = end(start(cluster, *DRUMLINE, "ps", tmp_path)).out
    assert "running" in listed and f"job {job_of(run)}" in listed
    left = start(cluster, *DRUMLINE, "follow", run)
    time.sleep(10)
    left.send_signal(signal.SIGINT)
    seen = end(left)
    assert seen.code == 130 and "goes on: drumline follow" in seen.err and "step 1/" in seen.out, (
        seen.err
    )
    following = start(cluster, *DRUMLINE, "follow", run)
    time.sleep(5)
    stopped = end(start(cluster, *DRUMLINE, "stop", run))
    assert stopped.code == 0, stopped.err
    seen = end(following)
    assert seen.code == 75 and "stopped and saved" in seen.err, seen.err
    found = cluster.wait(job_of(run), *ENDED)
    assert found["ExitCode"] == "75:0" and found["Restarts"] == "0", "it is not requeued"
    assert events(run, "run_end")[-1]["status"] == "preempted"


@pytest.mark.parametrize("how", ["time limit", "preemption"])
def test_requeued_it_goes_on_with_the_same_losses(
    cluster: Slurm, config: Path, reference: dict[int, float], tmp_path: Path, how: str
) -> None:
    run = tmp_path / "run"
    process = start(
        cluster, *DRUMLINE, "train", config, f"run.dir={run}", *LAUNCH, "launch.extra=[--exclusive]"
    )
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
    assert done.code == 0, done.out + done.err
    assert losses(run) == reference
    assert cluster.job(job_of(run))["Restarts"] == "1"
    (restored,) = events(run, "restore")
    saved = [event["step"] for event in events(run, "preempt")]
    assert saved == [restored["step"]], "saved where it was stopped, and nothing done twice"


def test_the_time_limit_itself(cluster: Slurm, tmp_path: Path) -> None:
    """Slurm counts in minutes: the warning comes 61 seconds before the second one ends."""
    run = tmp_path / "run"
    job = walk(cluster, run, {"time": 2, "grace_seconds": 1.0}, steps=10**6)
    restored = wait_for(run, "restore", 5)
    found = cluster.job(job)
    assert found["Restarts"] == "1" and found["JobState"] == "RUNNING"
    saved = [event["step"] for event in events(run, "save") if event["t"] < restored["t"]]
    assert restored["step"] == saved[-1]


def test_cancelled_it_saves_first(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        cluster, *DRUMLINE, "train", config, f"run.dir={run}", *LAUNCH, "run.steps=100000"
    )
    wait_for(run, "step", 5, process)
    cluster.call("scancel", job_of(run))
    done = end(process)
    assert done.code == 75 and "stopped and saved" in done.err, done.err
    assert (
        cluster.job(job_of(run))["JobState"] == "CANCELLED"
        and cluster.job(job_of(run))["Restarts"] == "0"
    )
    steps = events(run, "run_end")[-1]["step"] + 2
    resumed = drumline(
        "train",
        config,
        f"run.dir={run}",
        f"run.steps={steps}",
        "--nproc",
        2,
        "--resume",
        "--allow",
        "all",
    )
    assert resumed.code == 0, resumed.err


def test_a_job_that_waits_is_cancelled(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        cluster,
        *DRUMLINE,
        "train",
        config,
        f"run.dir={run}",
        *LAUNCH,
        "launch.extra=[--begin=now+1hour]",
    )
    until = time.monotonic() + 120
    while not (run / "job.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert "queued" in end(start(cluster, *DRUMLINE, "ps", tmp_path)).out
    assert end(start(cluster, *DRUMLINE, "stop", run)).code == 0
    done = end(process)
    assert done.code == 1 and f"job {job_of(run)} is cancelled" in done.err, done.err


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_killed_rank_is_named_with_its_host_and_the_run_goes_on(
    cluster: Slurm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = walk(cluster, run)
    wait_for(run, "eval", 12)
    kill(int((run / "pid-1").read_text()))
    found = cluster.wait(job, *ENDED)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert found["JobState"] == "COMPLETED", log
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["host"], fault["signal"], fault["action"]) == (
        1,
        "n2",
        "SIGKILL",
        "restart",
    ), log
    assert (
        "rank 1 on host n2: killed by SIGKILL" in log
        and "starting again from the newest checkpoint" in log
    )
    (restored,) = events(run, "restore")
    assert restored["step"] >= 10 and events(run, "eval")[-1]["step"] == 60


def test_a_hang_is_named_with_its_host_and_the_run_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = walk(cluster, run, {"max_restarts": 1}, "hanging_worker", how="data", rank=1, at=20)
    found = cluster.wait(job, *ENDED)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert found["JobState"] == "COMPLETED", log
    (hang,), (fault,) = events(run, "hang"), events(run, "fault")
    assert (hang["rank"], hang["host"], hang["phase"], hang["step"], fault["action"]) == (
        1,
        "n2",
        "data",
        20,
        "restart",
    ), log
    assert "rank 1 on host n2: hangs in data at step 21" in log and "in endless" in log
    assert events(run, "eval")[-1]["step"] == 60 and not list(
        Path("/dev/shm").glob("drumline-*-n[12]-*")
    )


def test_a_hang_of_tasks_that_joined_is_named(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("run.steps=100000", "health.hang_seconds=2")
    process = start(
        cluster, "srun", "-N2", "-n2", *DRUMLINE, "train", config, f"run.dir={run}", *more
    )
    wait_for(run, "step", 5, process)
    kill(task_of(run, 1), signal.SIGSTOP)
    done = end(process)
    assert (
        done.code
        and "rank 1 on host n2: hangs in" in done.err
        and "it is suspended (SIGSTOP)" in done.err
    ), done.err
    # The other host's ranks may have waited for too long before they ended, too.
    hang = events(run, "hang")[0]
    assert (hang["rank"], hang["host"]) == (1, "n2")
    assert (
        events(run, "fault")[0]["action"]
        == "stop: its ranks are killed, and srun decides about another start"
    )


def test_a_rank_that_fails_again_ends_the_job(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = walk(cluster, run, how="raise", rank=1, at=7, attempts=9)
    found = cluster.wait(job, *ENDED)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert found["ExitCode"] == "1:0", log
    said = r"error: rank 1 on host n2 failed after step 7: ValueError in stepping_worker\.py:\d+: rank 1 does not like step 7"
    assert re.search(said, log)
    assert (
        log.count("Traceback (most recent call last)") == 2 and "the same failure came twice" in log
    )
    followed = end(start(cluster, *DRUMLINE, "follow", run))
    assert followed.code == 1


def test_a_rank_that_hangs_is_killed_after_the_grace(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = walk(cluster, run, {"grace_seconds": 2.0, "max_restarts": 0}, steps=10**6)
    wait_for(run, "eval", 5)
    kill(int((run / "pid-1").read_text()), signal.SIGSTOP)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    found = cluster.wait(job, *ENDED)
    log = (run / "logs" / f"job-{job}.log").read_text()
    assert found["ExitCode"] == "1:0", log
    assert "did not save in time and were killed" in log or "rank" in log
