"""Tasks of srun and mpirun become ranks, of what those programs really set (recorded from Slurm 22.05, Open MPI 4.1 and MPICH 4.0)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from drumline.errors import EnvironmentFault
from drumline.launch import tasks
from drumline.launch.tasks import (
    expand_hosts,
    join_tasks,
    require_rendezvous,
    srun_of_allocation,
    task_variables,
    tasks_of_nodes,
    torchrun_of_node,
)
from drumline.train.command import _trains_in_tasks
from tests.harness import ENV

PREFIXES = (
    "SLURM",
    "OMPI",
    "PMI",
    "MPI_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC",
    "DRUMLINE_JOINED",
)
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "localhost,n2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
}
STEP = {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "localhost,n2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
TASK = {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, *several: Mapping[str, str]) -> None:
    for each in several:
        for name, value in each.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,07],gpu1", ["n1", "n2", "n3", "n07", "gpu1"]),
        (
            "rack[1-2]-n[09-11]",
            ["rack1-n09", "rack1-n10", "rack1-n11", "rack2-n09", "rack2-n10", "rack2-n11"],
        ),
        ("a[1]b.example.org", ["a1b.example.org"]),
        ("", []),
    ],
)
def test_lists_of_hosts(hosts: str, names: list[str]) -> None:
    assert expand_hosts(hosts) == names


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1] and tasks_of_nodes("4") == [4]


@pytest.mark.claim("tasks of srun and mpirun are ranks")
def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, JOB, STEP, TASK, {"SLURM_RESTART_COUNT": "1"})
    join_tasks()
    wanted = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
    }
    assert {name: os.environ[name] for name in wanted} == wanted
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", (
        "a job that was requeued goes on with its run"
    )
    require_rendezvous()
    first = int(os.environ["MASTER_PORT"])
    others = {
        int(task_variables({**JOB, **STEP, **TASK, "SLURM_STEP_ID": str(step)})["MASTER_PORT"])
        for step in range(20)
    }
    assert first in others and len(others) > 18 and all(1024 < port < 32768 for port in others), (
        "each step has its own port"
    )


def test_on_one_host_ranks_meet_on_loopback() -> None:
    one = {
        "SLURM_STEP_NODELIST": "no-such-host",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }
    assert task_variables({**JOB, **STEP, **TASK, **one})["MASTER_ADDR"] == "127.0.0.1"


def test_what_the_user_has_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given(
        monkeypatch,
        JOB,
        STEP,
        TASK,
        {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "8"},
    )
    join_tasks()
    assert [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")] == [
        "head",
        "29500",
        "4",
    ]
    given(monkeypatch, {"RANK": "7", "WORLD_SIZE": "8"})
    join_tasks()
    assert os.environ["RANK"] == "7", "whoever sets all of them knows"


def test_a_node_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {**JOB, **STEP, **TASK, "SLURM_STEP_NODELIST": "no-such-host.invalid,n2"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"'no-such-host\.invalid' of rank 0 has no address"):
        task_variables(elsewhere)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho NodeName=$3 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=x Version=22.05.8\n"
    )
    scontrol.chmod(0o755)
    assert task_variables(elsewhere)["MASTER_ADDR"] == "10.1.2.3"


@pytest.mark.parametrize(
    "step",
    [str(0xFFFFFFFB), str(0xFFFFFFFA), None],
    ids=["batch script", "shell of salloc", "older salloc"],
)
def test_who_inherits_the_number_of_tasks_is_none_of_them(
    step: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, JOB, {"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "2"})
    given(monkeypatch, {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"} if step else {})
    assert task_variables(os.environ) == {}
    require_rendezvous()
    assert srun_of_allocation() == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=2"]


def test_one_task_trains_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert srun_of_allocation() == []
    # Srun --ntasks=1 in a job that has more.
    given(monkeypatch, JOB, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, TASK)
    assert srun_of_allocation() == [] and task_variables(os.environ) == {}
    require_rendezvous()
    monkeypatch.delenv("SLURM_STEP_ID")
    monkeypatch.setattr("socket.gethostname", lambda: "n1.example.org")
    given(monkeypatch, {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1"})
    assert srun_of_allocation() == [], "salloc of one task, on this host"
    given(monkeypatch, {"SLURM_JOB_NODELIST": "n2"})
    assert srun_of_allocation()[0] == "srun", "the shell of salloc is on the login host"


@pytest.mark.parametrize(
    ("launch", "steps"),
    [
        ("{}", True),
        ("{kind: slurm}", True),
        ("{kind: no-such}", True),
        ("{kind: ray}", False),
        ("{kind: ssh, hosts: [a]}", False),
    ],
)
def test_srun_is_for_ranks_that_are_its_tasks(launch: str, steps: bool, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"data: rows.jsonl\nlaunch: {launch}\n")
    assert _trains_in_tasks(config, [], None, None) == steps


def test_a_terminal_of_several_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, JOB, STEP, TASK, {"SLURM_PTY_PORT": "4711"})
    assert task_variables(os.environ) == {}
    with pytest.raises(
        EnvironmentFault, match=r"this terminal is one of the 4 tasks .* --ntasks=1"
    ):
        require_rendezvous()


def test_one_task_a_node_starts_its_ranks_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    given(monkeypatch, JOB, step, {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"})
    join_tasks()
    line = " ".join(torchrun_of_node(lambda: 8))
    assert (
        "--nnodes=2 --nproc-per-node=8 --rdzv-id=77 --node-rank=1 --master-addr=localhost --master-port="
        in line
    )
    assert torchrun_of_node(lambda: 1) == [], "the task is the rank"
    given(monkeypatch, {"WORLD_SIZE": "4"})
    assert torchrun_of_node(lambda: 8) == [], "a task a rank"


@pytest.mark.claim("tasks of srun and mpirun are ranks")
@pytest.mark.parametrize("env", [MPI, HYDRA], ids=["Open MPI", "MPICH"])
def test_a_task_of_mpirun_is_a_rank(env: dict[str, str]) -> None:
    rank = env.get("OMPI_COMM_WORLD_RANK") or env["PMI_RANK"]
    found = task_variables(env)
    wanted = {
        "RANK": rank,
        "WORLD_SIZE": "4",
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert {name: found[name] for name in wanted} == wanted
    # Of mpirun's own helpers.
    slurm = {
        **JOB,
        **STEP,
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    assert task_variables({**slurm, **env})["WORLD_SIZE"] == "4"


def test_ranks_below_scripts_of_their_own_have_one_port(tmp_path: Path) -> None:
    """`mpirun -np 2 bash run.sh`: a shell that waits stands between the proxy and each rank."""
    rank = "import os; from drumline.launch.tasks import task_variables; print(task_variables(os.environ)['MASTER_PORT'])"
    proxy = tmp_path / "hydra_pmi_proxy"
    started = """PMI_RANK=$r MPI_LOCALRANKID=$r bash -c '"$0" -c "$1"; true' "$1" "$2\""""
    proxy.write_text(f"#!/bin/sh\nfor r in 0 1; do {started}; done\n")
    proxy.chmod(0o755)
    env = {**ENV, "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    two = [
        subprocess.run(
            [proxy, sys.executable, rank],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        for _ in range(2)
    ]
    ports = [done.stdout.split() for done in two]
    assert (
        [len(each) for each in ports] == [2, 2]
        and all(len({*each}) == 1 for each in ports)
        and ports[0] != ports[1]
    )


def test_hosts_of_mpich_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {**HYDRA, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "head"}
    found = []
    for parent in (11, 12):  # another on each host
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        found.append(task_variables(several)["MASTER_PORT"])
    assert found[0] == found[1] != task_variables({**several, "PMI_SIZE": "8"})["MASTER_PORT"]
    assert task_variables({**several, "MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("env", [MPI, HYDRA], ids=["Open MPI 5", "MPICH"])
def test_mpirun_in_an_allocation_is_refused_without_an_address(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = {name: "2" for name in env if name.endswith(("LOCAL_SIZE", "LOCALNRANKS"))}
    helper = {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
    }
    given(monkeypatch, JOB, helper, {"SLURM_PROCID": "1"}, env, halves)
    assert task_variables(os.environ) == {}, "the helper's numbers are not the rank's"
    for name in helper:
        monkeypatch.delenv(name)  # those of mpirun's own host have no helper above them
    assert srun_of_allocation() == []
    with pytest.raises(SystemExit):
        require_rendezvous()
    given(monkeypatch, {name: "0" for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in env})
    with pytest.raises(EnvironmentFault, match=r"4 tasks.*-x MASTER_ADDR=HOST"):
        require_rendezvous()
    pmi2 = {**JOB, **STEP, **TASK, "PMI_SIZE": "4", "PMI_RANK": "2"}
    assert task_variables(pmi2)["DRUMLINE_JOINED"] == "srun", "srun --mpi=pmi2"


def test_several_hosts_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    uri = {
        "OMPI_MCA_orte_hnp_uri": "867631104.0;tcp://127.0.0.1,10.9.8.7,10.9.9.7:57907;tcp6://[fd00::2]:57229"
    }
    assert task_variables({**two, **uri})["MASTER_ADDR"] == "10.9.8.7"
    assert task_variables({**two, **uri, "OMPI_COMM_WORLD_RANK": "0"}) == {}, (
        "rank 0 sees that mpirun is elsewhere"
    )
    assert task_variables({**two, "MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"
    hydra = {**HYDRA, "MPI_LOCALNRANKS": "2", "PMI_RANK": "0"}
    for env in (two | {"OMPI_COMM_WORLD_RANK": "0"}, hydra):
        assert task_variables(env) == {}
        with monkeypatch.context() as patch:
            given(patch, env)
            with pytest.raises(EnvironmentFault, match=r"4 tasks.*-x MASTER_ADDR=HOST"):
                require_rendezvous()
    given(monkeypatch, {**hydra, "PMI_RANK": "3"})
    with pytest.raises(SystemExit) as ended:
        require_rendezvous()
    assert ended.value.code == 2, "task 0 reports it"


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="no program 'no-such-srun'"):
        tasks.become(["no-such-srun"])


def test_a_heterogeneous_job_is_refused_by_its_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, JOB, {"SLURM_HET_SIZE": "2"})
    with pytest.raises(EnvironmentFault, match="this job is heterogeneous"):
        srun_of_allocation()
    given(monkeypatch, STEP, {**TASK, "SLURM_PROCID": "0"})
    with pytest.raises(EnvironmentFault, match="this job is heterogeneous"):
        join_tasks()
    given(monkeypatch, TASK)
    with pytest.raises(SystemExit, match="2"):
        join_tasks()
