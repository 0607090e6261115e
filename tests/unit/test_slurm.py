"""The launch section of Slurm, the plan for nodes that are not here, and the batch script. tests/slurm runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from drumline.config.load import load, load_values
from drumline.config.resume import Resume
from drumline.errors import ConfigError, EnvironmentFault, UserError
from drumline.hardware.catalog import DEVICES
from drumline.hardware.detect import Device, Machine
from drumline.launch import runs
from drumline.launch.lease import Lease
from drumline.launch.slurm import job, queue, spec
from drumline.launch.slurm.script import script
from drumline.launch.slurm.spec import SlurmLauncher
from drumline.train.command import _with_machine
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.harness import ENV, ROOT, write_config
from tests.tiny import tiny_model_dir

DATA = {"data": {"train": [{"kind": "digits"}]}}


def launch(**values: Any) -> SlurmLauncher:
    return SlurmLauncher.model_validate({"kind": "slurm", **values})


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a 'quoted' 100% folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    options = launch(
        nodes=2,
        gpus=4,
        partition="long",
        time="1-12:00:00",
        cpus=8,
        extra=["--mem=0", "--exclusive"],
        grace_seconds=90.5,
    )
    text = script(options, Path("runs/x y/plan.json"), "newest")
    lines = text.splitlines()
    for wanted in (
        "nodes=2",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "partition=long",
        "time=1-12:00:00",
        "cpus-per-task=8",
        "mem=0",
    ):
        assert f"#SBATCH --{wanted}" in lines
    assert (
        "#SBATCH --exclusive" in lines
        and "#SBATCH --requeue" in lines
        and "#SBATCH --job-name=drumline-x-y" in lines
    )
    assert "#SBATCH --signal=B:USR1@151" in lines, (
        "to the batch script, 60 s before the ranks must have saved"
    )
    assert (
        f'#SBATCH --output="{folder}/runs/x y/logs/job-%j.log"'.replace(
            "100% folder", "100%% folder"
        )
        in lines
    )
    # The shell comes to the folder and to the command as they are.
    code = "\n".join(lines[lines.index("") :]).replace("exec ", "pwd; printf '%s\\n' ")
    shown = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True, timeout=20
    ).stdout.splitlines()
    assert shown[0] == str(folder) and shown[2:] == [
        "-m",
        "drumline.train.slurm_job",
        "runs/x y/plan.json",
        "--resume",
        "newest",
    ]
    bare = script(launch(requeue=False), Path("run/plan.json"), None)
    assert "--no-requeue" in bare and "--resume" not in bare and "partition" not in bare


@pytest.mark.parametrize(
    "kind", [{}, {"kind": "slurm"}, {"kind": "ray"}, {"kind": "kubernetes", "image": "x"}], ids=str
)
def test_hosts_come_and_go_under_ssh_alone(kind: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"launch: nodes: \{min, max\} is for launch.kind: ssh"):
        load_values({**DATA, "launch": {**kind, "nodes": {"min": 1, "max": 2}}}, [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"extra": ["--array=0-3"]}, "--array cannot stand here: a run is one job"),
        ({"extra": ["-a", "0-3"]}, "--array cannot stand here"),
        ({"extra": ["--nodes=3"]}, "--nodes cannot stand here: set launch.nodes"),
        ({"extra": ["--mem=0\n#SBATCH --array=1"]}, "would not stay on its line"),
        ({"extra": ["exclusive"]}, "is no option of sbatch: write --name=value"),
        ({"extra": [""]}, "is no option of sbatch"),
        ({"extra": ["--comment='a"]}, "No closing quotation"),
        ({"extra": ["--mem=0 --array=0-3"]}, "is more than one option: write each by itself"),
        ({"extra": ["-H -a 0-3"]}, "is more than one option"),
        ({"extra": ["-Ha0-3"]}, "is more than one option"),
        ({"extra": ["--arr=0-3"]}, "--array cannot stand here"),
        ({"extra": ["--ntasks-per-n=7"]}, "--ntasks-per-node cannot stand here"),
        ({"extra": ["--gpus=16"]}, "--gpus cannot stand here: set launch.gpus, of each node"),
        ({"extra": ["-G16"]}, "--gpus cannot stand here"),
        ({"extra": ["--gpus-per-task=1"]}, "--gpus-per-task cannot stand here: set launch.gpus"),
        (
            {"extra": ["--clusters=gpu2"]},
            "--clusters cannot stand here: submit on a login host of that cluster",
        ),
        ({"extra": ["-Mgpu2"]}, "--clusters cannot stand here"),
        ({"partition": "a b"}, "launch.partition"),
        ({"time": "soon"}, "launch.time"),
        ({"nodes": 0}, "launch.nodes"),
        ({"node": 2}, "launch.node"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        load_values({**DATA, "launch": {"kind": "slurm", **values}}, [])
    assert message in mistake.value.line() and len(mistake.value.line().splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "gpus", "ranks"),
    [
        ({}, 0, 1),
        ({"nproc": 3}, 0, 3),
        ({"gpus": 8}, 8, 8),
        ({"gpus": 8, "nproc": 1}, 8, 1),
        ({"gres": "gpu:a100:4"}, 4, 4),
        ({"gres": "gpu:2(S:0),fast:1"}, 2, 2),
        ({"gres": "gpu"}, 1, 1),
        ({"gres": "gpu:a100,shard:10"}, 1, 1),
        ({"gres": "license:3"}, 0, 1),
    ],
)
def test_ranks_of_a_node(values: dict[str, Any], gpus: int, ranks: int) -> None:
    options = launch(nodes=3, **values)
    assert (options.gpus_of_node, options.ranks_of_node, options.processes()) == (
        gpus,
        ranks,
        3 * ranks,
    )


def test_a_node_is_what_the_yaml_says_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine([], 8, 64 * 10**9, "cpu", False)
    monkeypatch.setattr(spec, "detect", lambda: here)
    options = launch(nodes=2, gpus=8)
    described = load_values({**DATA, "cluster": "2x8xh100-80g"}, []).config
    node = options.machine(described)
    assert len(node.devices) == 8 and node.device == "cuda" and node.bf16
    assert node.devices[0] == Device("h100-80g", DEVICES["h100-80g"].memory_bytes)
    nothing = load_values(DATA, []).config
    with pytest.raises(
        EnvironmentFault, match=r"what the 8 GPUs of a node are — set them, such as cluster: 2x8x"
    ):
        options.machine(nothing)
    assert options.machine(load_values(DATA, ["run.device=cpu"]).config) == here
    monkeypatch.setattr(
        spec,
        "detect",
        lambda: Machine([Device("NVIDIA H100", 80 * 10**9)], 8, 64 * 10**9, "cuda", True),
    )
    assert len(options.machine(nothing).devices) == 8, "nodes are as this host"


@pytest.mark.claim("a job of Slurm is planned for its nodes")
@pytest.mark.slow
def test_a_plan_for_nodes_that_are_not_here(tmp_path: Path) -> None:
    sections = {
        "run": {"device": "auto"},
        "batch": {"global_samples": 16, "micro_batch": 1},
        "cluster": "2x8xh100-80g",
    }
    options = {"kind": "slurm", "nodes": 2, "gpus": 8}
    loaded = load(
        write_config(tmp_path, tiny_model_dir(tmp_path / "model"), launch=options, **sections), []
    )
    request = _with_machine(Request(loaded, loaded.config.launch.processes()))
    plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
    assert (plan.mesh.world_size, plan.device, plan.backend, plan.precision) == (
        16,
        "cuda",
        "nccl",
        "bf16",
    )
    assert plan.predicted.peak_flops_per_device == DEVICES["h100-80g"].flops["bf16"]
    assert not any("is not the one here" in why for why in plan.why)
    assert "#SBATCH --ntasks-per-node=8" in plan.config.launch.submission(
        plan, Path(plan.run_dir) / "plan.json", None
    )


def test_options_that_may_stand_in_extra() -> None:
    extra = (
        "--mem=0",
        "--exclude n[1-2],n7",
        "-x n3",
        "-H",
        "-J name",
        "--comment='a b'",
        "--time-min=10",
        "--wait-all-nodes=1",
        "-s",
    )
    assert launch(extra=extra).extra == extra


@pytest.mark.parametrize("name", ["a\ntouch here", "a\rb"])
def test_a_run_folder_that_would_be_a_line_of_the_script_is_refused(
    name: str, tmp_path: Path
) -> None:
    plan_path = tmp_path / name / "plan.json"
    for call in (
        lambda: script(launch(), plan_path, None),
        lambda: launch().early(load_values(DATA, []).config, plan_path),
    ):
        with pytest.raises(
            ConfigError, match=r"^run\.dir: .* would not stay on its line of the batch script"
        ) as mistake:
            call()
        assert len(mistake.value.line().splitlines()) == 1


def test_no_job_outside_of_slurm_and_none_in_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.faults.test_launch import toy

    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    path = toy(tmp_path / "run", "steps", kind="slurm")
    plan = job.Plan.load(path)
    with pytest.raises(EnvironmentFault, match="batch script of one job — submit it alone"):
        job.run(plan, path, None, lambda out, step: ("", None), "x")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "3")
    with pytest.raises(EnvironmentFault, match="this one is of an array"):
        job.run(plan, path, None, lambda out, step: ("", None), "x")
    elsewhere = "submit to another cluster"
    for name, would in (
        ("SBATCH_ARRAY_INX", "make an array"),
        ("SBATCH_CLUSTERS", elsewhere),
        ("SLURM_CLUSTERS", elsewhere),
    ):
        with (
            monkeypatch.context() as patch,
            pytest.raises(EnvironmentFault, match=f"{name} would {would}"),
        ):
            patch.setenv(name, "x")
            queue.submit(launch(), path, None)
    with Lease(tmp_path / "run"):  # it is not held
        pass


def test_variables_of_sbatch_do_not_overrule_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.faults.test_launch import toy

    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv | grep ^SBATCH > {tmp_path}/given\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (
        "SBATCH_ACCOUNT",
        "SBATCH_PARTITION",
        "SBATCH_SIGNAL",
        "SBATCH_WAIT",
        "SBATCH_RESERVATION",
    ):
        monkeypatch.setenv(name, "other")
    assert (
        queue.submit(launch(account="mine"), toy(tmp_path / "run", "steps", kind="slurm"), None)
        == "7"
    )
    given = (tmp_path / "given").read_text().splitlines()
    assert sorted(given) == ["SBATCH_PARTITION=other", "SBATCH_RESERVATION=other"], (
        "nothing was said of the partition"
    )
    assert (
        "SBATCH_ACCOUNT, SBATCH_SIGNAL would overrule the launch section" in capsys.readouterr().err
    )


def test_without_slurm_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="there is no sbatch on this host"):
        launch().require()
    with pytest.raises(EnvironmentFault, match="squeue gives no answer"):
        queue.state_of("3")
    assert queue.job_of(tmp_path) is None
    (tmp_path / "job.json").write_text("[]")
    assert queue.job_of(tmp_path) is None


def fake_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what sets Slurm's answer about each job; a mistake begins with `error:`."""
    answer, program = tmp_path / "answer", tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$(cat {answer})" in error:*) cat {answer} >&2; exit 1;; esac\ncat {answer}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def answers(text: str) -> None:
        answer.write_text(f"{text}\n")

    return answers


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return fake_squeue(tmp_path, monkeypatch)


def of_job(tmp_path: Path) -> Path:
    """A run whose job is 7."""
    from tests.faults.test_launch import toy

    path = toy(tmp_path / "run", "steps", kind="slurm")
    (path.parent / "job.json").write_text('{"job": "7"}')
    return path


def noted(run: Path, code: int) -> None:
    (run / "job-end.json").write_text(json.dumps({"job": "7", "exit_code": code}))


def test_slurm_that_is_busy_does_not_make_a_job_go_away(
    tmp_path: Path, squeue: Callable[[str], None]
) -> None:
    run = of_job(tmp_path).parent
    squeue("error: slurm_load_jobs error: Socket timed out on send/recv operation")
    for command in (runs.stop, lambda folder: runs.follow(folder, lambda event: None)):
        with pytest.raises(EnvironmentFault, match="Socket timed out"):
            command(run)
    assert [each.state for each in runs.states(run)] == ["unknown"] and (run / "job.json").is_file()
    squeue("RUNNING None")
    assert [each.state for each in runs.states(run)] == ["queued"]


@pytest.mark.slow
def test_the_note_of_an_end_may_come_late(
    tmp_path: Path, squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_job(tmp_path).parent
    squeue("COMPLETED None")
    late = threading.Timer(1.5, noted, (run, 0))
    late.start()
    assert queue.follow(run, "7", lambda event: None) == 0
    late.join()
    (run / "job-end.json").unlink()
    monkeypatch.setattr(queue, "NOTE_SECONDS", 0.0)
    assert queue.follow(run, "7", lambda event: None) == 1, "there is none"


def test_a_job_that_is_refused_notes_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_job(tmp_path)
    plan = job.Plan.load(path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    with Lease(path.parent), pytest.raises(EnvironmentFault, match="run"):
        job.run(plan, path, None, lambda out, step: ("", None), "x")
    assert queue.end_of(path.parent) == 2
    noted(path.parent, 0)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(EnvironmentFault, match="srun cannot start"):
        job.run(plan, path, None, lambda out, step: ("", None), "x")
    assert queue.end_of(path.parent) == 2


def test_a_new_start_forgets_the_job_of_the_one_before(
    tmp_path: Path, squeue: Callable[[str], None]
) -> None:
    run = of_job(tmp_path).parent
    squeue("PENDING Priority")
    with pytest.raises(EnvironmentFault, match="job 7 of this run is PENDING"):
        queue.forget_job(run)
    noted(run, 1)
    for name in ("job.json", "job-end.json"):
        assert (run / name).is_file()
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), run={"dir": str(run)})
    request = Request(load(config, []), 1, resume=Resume())
    claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
    assert (
        queue.job_of(run) is None
        and queue.end_of(run) is None
        and not (run / "job-end.json").exists()
    )


def test_why_no_rank_has_started_is_in_the_log_of_the_job(
    tmp_path: Path, squeue: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_job(tmp_path).parent
    squeue("FAILED NonZeroExitCode")
    (run / "logs").mkdir()
    with pytest.raises(UserError, match="has no logs"):
        runs.print_logs(run, None)
    log = run / "logs" / "job-7.log"
    log.write_text("/x/python: No such file or directory\n")
    runs.print_logs(run, None)
    assert capsys.readouterr().out == log.read_text()
    with pytest.raises(UserError, match="has no logs"):
        runs.print_logs(run, 0)
    assert runs.follow(run, lambda event: None) == 1
    assert capsys.readouterr().err == f"{run}: not started; see {log}\n"


def test_ends_are_read_from_the_notes_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "rank-0.end").write_text(
        '{"exitcode": -9, "host": "n1", "time": 5.0, "kills": [0, 1]}'
    )
    (tmp_path / "srun.log").write_text(
        "srun: Job step created\nsrun: error: Node failure on n2\nsrun: error: more\n"
    )
    first, second = (job._end(rank, tmp_path, killed=False, stopped_by=0) for rank in (0, 1))
    assert (first.exitcode, first.host, first.message, first.name) == (
        -9,
        "n1",
        "killed by SIGKILL",
        "rank 0 on host n1",
    )
    assert first.kills == (0, 1), "memory ran out on its host"
    assert (second.exitcode, second.message) == (1, "lost: Node failure on n2")
    assert job._end(1, tmp_path, killed=True, stopped_by=0).killed
    assert job._end(1, tmp_path, killed=False, stopped_by=10).signal == "SIGUSR1", (
        "its task did not listen yet"
    )


@pytest.mark.parametrize("page", ["slurm.md", "slurm.zh.md"])
def test_the_page_s_yaml_is_a_config(page: str) -> None:
    text = (ROOT / "docs" / "guides" / page).read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = load_values({**DATA, **yaml.safe_load(block)}, []).config
    assert (
        isinstance(config.launch, SlurmLauncher)
        and config.launch.processes() == 32
        and config.launch.time == "1-00:00:00"
    )
    assert len(config.launch.machine(config).devices) == 8
    named = {
        key
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert named <= SlurmLauncher.model_fields.keys() and {"nodes", "requeue", "extra"} <= named


RANK = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_ERROR_FILE"], *sys.argv[1:], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 5), (signal.SIGKILL, -9)])
def test_a_task_hands_signals_on_and_notes_how_its_rank_ended(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_PROCID": "1",
    }
    where = {
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "n2",
        "MASTER_ADDR": "n1",
    }
    command = [
        sys.executable,
        "-m",
        "drumline.launch.slurm.task",
        str(tmp_path),
        str(tmp_path / "rank.py"),
        "PLAN",
    ]
    with subprocess.Popen(
        command, env={**ENV, **step, **where}, stdout=subprocess.PIPE, text=True
    ) as task:
        assert task.stdout and task.stdout.readline().split() == [
            "1",
            "2",
            str(tmp_path / "rank-1.json"),
            "PLAN",
        ]
        if number == signal.SIGKILL:
            (rank,) = psutil.Process(task.pid).children()
            rank.kill()
        else:
            task.send_signal(number)
        assert task.wait(30) == (code if code > 0 else 128 + number)
    noted = json.loads((tmp_path / "rank-1.end").read_text())
    assert (noted["exitcode"], noted["host"]) == (code, "n2") and len(noted["kills"]) == 2
