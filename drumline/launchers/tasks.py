"""Tasks that srun or mpirun has started, as ranks: which one this process is, and where rank 0 is, by what those programs set. No torch
here."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import NoReturn

from drumline.core.process import output_of
from drumline.errors import EnvironmentFault

LOOPBACK = "127.0.0.1"
# Below the ports that Linux gives to clients (from 32768 on), and above what services take.
FIRST_PORT, PORTS = 15000, 17000
# Steps of Slurm that are no tasks of the user's: the batch script, the shell of salloc, and two of Slurm's own (slurm.h).
NO_TASKS = {str(0xFFFFFFFF - number) for number in range(2, 6)}
SCONTROL_SECONDS = 30.0
JOINED = "DRUMLINE_JOINED"  # of a task: by whose variables it has become a rank
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
REQUIRED = ("RANK", "WORLD_SIZE", *RENDEZVOUS)
# How many processes have been started of the same command, and which one this is; mpirun may have started its own helpers by srun.
TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
TASK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
PROXIES = ("hydra_", "pmi_proxy")  # of MPICH's and Intel's mpirun, one on each host


def join_tasks() -> None:
    """Where this process is one task of several, have it join the rest as a rank: sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. Those of a launcher that has set them are left as they are."""
    if not joined():
        os.environ.update(task_variables(os.environ))


def joined() -> bool:
    """Whether this process is a rank: it has the variables of torchrun and similar launchers."""
    return all(name in os.environ for name in REQUIRED)


def require_rendezvous() -> None:
    """Raises EnvironmentFault where this is one of several tasks that do not know of each other: each would train alone."""
    tasks = max(_number(os.environ, name) for name in TASKS)
    if tasks < 2 or joined():
        return
    if "SLURM_PTY_PORT" in os.environ:
        what = f"this terminal is one of the {tasks} tasks of an srun --pty, and the rest do not hear what is typed"
        fix = "type it in the shell of salloc, or give srun --pty one task: --ntasks=1"
    elif next((_number(os.environ, name) for name in TASK if name in os.environ), 0):
        raise SystemExit(EnvironmentFault.exit_code)  # task 0 reports it
    else:
        what = f"srun or mpirun has started {tasks} tasks, and none of them knows where to meet the rest: each would train alone"
        fix = "set MASTER_ADDR to the host of rank 0 for all of them: mpirun -x MASTER_ADDR=HOST, with MPICH mpirun -genv MASTER_ADDR HOST"
    raise EnvironmentFault(what, where="launcher", fix=fix)


def step_of_allocation() -> list[str]:
    """The srun that runs a command in all tasks of the allocation that it is called in, by salloc's shell or a batch script. Empty where
    there is no allocation, where this is a task of it or of mpirun, and where it has one task alone, on this host."""
    env = os.environ
    if (
        joined()
        or _of_mpi(env)
        or "SLURM_JOB_ID" not in env
        or env.get("SLURM_STEP_ID", "") not in {"", *NO_TASKS}
    ):
        return []
    require_one_group()
    hosts = expand(env.get("SLURM_JOB_NODELIST", ""))
    here = {
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
        env.get("SLURMD_NODENAME"),
    }
    if len(hosts) < 2 and _number(env, "SLURM_NTASKS") < 2 and here & set(hosts):
        return []
    # Since 22.05 srun does not take the allocation's own.
    cores = [f"--cpus-per-task={number}" for number in [env.get("SLURM_CPUS_PER_TASK")] if number]
    return ["srun", "--kill-on-bad-exit=1", *cores]


def requeued() -> bool:
    """Whether this is a command of a batch script that Slurm runs once more, so that a run of it has been started before."""
    return (
        not joined()
        and "SLURM_JOB_ID" in os.environ
        and _number(os.environ, "SLURM_RESTART_COUNT") > 0
    )


def require_one_group() -> None:
    """Raises EnvironmentFault in a heterogeneous job of Slurm, by its first task."""
    if _number(os.environ, "SLURM_HET_SIZE") > 1:
        if _number(os.environ, "SLURM_PROCID"):
            raise SystemExit(EnvironmentFault.exit_code)
        what = "this job is heterogeneous, and a run is planned for nodes that are alike"
        raise EnvironmentFault(
            what, where="launcher", fix="ask Slurm for one group of nodes, without ':' and hetjob"
        )


def torchrun_of_node(count: Callable[[], int]) -> list[str]:
    """Where srun has started one task a node, and each node shall have `count()` ranks, which are more: the torchrun that starts those of
    this node. Empty elsewhere."""
    env = os.environ
    nodes = _number(env, "SLURM_STEP_NUM_NODES")
    if env.get(JOINED) != "srun" or nodes != int(env["WORLD_SIZE"]) or (processes := count()) < 2:
        return []
    place = [
        f"--node-rank={env['RANK']}",
        f"--master-addr={env['MASTER_ADDR']}",
        f"--master-port={env['MASTER_PORT']}",
    ]
    each = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        f"--rdzv-id={env['SLURM_JOB_ID']}",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *each, *place, "-m", "--"]


def become(command: list[str]) -> NoReturn:
    """Go on as another program. Raises EnvironmentFault where it is not installed."""
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise EnvironmentFault(
            f"there is no program {command[0]!r}",
            where="PATH",
            fix="call drumline where it is installed",
        ) from None


def task_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of this rank; empty where this process is no task of several, or cannot know where rank 0 is. MASTER_ADDR and
    MASTER_PORT stay as the user has set them."""
    found = (_of_open_mpi(env) or _of_hydra(env)) if _of_mpi(env) else _of_slurm(env)
    return found and found | {name: env[name] for name in RENDEZVOUS if env.get(name)}


def _of_mpi(env: Mapping[str, str]) -> bool:
    """Whether this is a task of mpirun. It starts its own helpers by srun, so that its tasks see the variables of such a step, too; and
    srun --mpi=pmi2 sets PMI_SIZE without the local rank."""
    return _number(env, "OMPI_COMM_WORLD_SIZE") > 1 or (
        "MPI_LOCALRANKID" in env and _number(env, "PMI_SIZE") > 1
    )


def _of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    # In a terminal of srun (--pty) commands are typed in one task; the rest of the step does not hear them.
    if (
        "SLURM_PTY_PORT" in env
        or env.get("SLURM_STEP_ID") in NO_TASKS
        or _number(env, "SLURM_STEP_NUM_TASKS") < 2
    ):
        return {}
    require_one_group()
    job, step, node = env["SLURM_JOB_ID"], env["SLURM_STEP_ID"], int(env.get("SLURM_NODEID", "0"))
    hosts, tasks = (
        expand(env["SLURM_STEP_NODELIST"]),
        tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"]),
    )
    # A job that was requeued goes on with its run.
    return _rank(
        "srun",
        (env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"], str(tasks[node])),
        LOOPBACK if len(hosts) == 1 else env.get("MASTER_ADDR") or address(hosts[0]),
        f"{job}.{step}",
    ) | {"TORCHELASTIC_RESTART_COUNT": env.get("SLURM_RESTART_COUNT", "0")}


def _of_open_mpi(env: Mapping[str, str]) -> dict[str, str]:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not all(name in env for name in names) or _number(env, names[1]) < 2:
        return {}
    # `JOB.0;tcp://ADDRESS,ADDRESS:PORT;tcp6://…`: where mpirun itself is, which puts rank 0 on its own host first.
    mpirun = re.search(r";tcp://([^:;]+):\d+", env.get("OMPI_MCA_orte_hnp_uri", ""))
    hosts = [host for host in mpirun[1].split(",") if not host.startswith("127.")] if mpirun else []
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    rank, size, local_rank, local_size = (env[name] for name in names)
    host = LOOPBACK if local_size == size else env.get("MASTER_ADDR") or next(iter(hosts), None)
    if host is None or (rank == "0" and host in hosts and not _is_here(host)):
        return {}
    return _rank("mpirun", (rank, size, local_rank, local_size), host, job)


def _of_hydra(env: Mapping[str, str]) -> dict[str, str]:
    """MPICH's and Intel's mpirun. They do not say where rank 0 is, so several hosts need a MASTER_ADDR; nor have these a text of this start
    alone, so that two runs of one user there, of as many ranks, need a MASTER_PORT."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not all(name in env for name in names) or _number(env, "PMI_SIZE") < 2:
        return {}
    rank, size, local_rank, local_size = (env[name] for name in names)
    numbers = (rank, size, local_rank, local_size)
    if local_size == size:
        return _rank("mpirun", numbers, LOOPBACK, str(_proxy()))
    host = env.get("MASTER_ADDR")
    return _rank("mpirun", numbers, host, f"{host}.{size}.{os.getuid()}") if host else {}


def _proxy() -> int:
    """The process above all ranks of this host: the nearest proxy of mpirun, with scripts in between; else the parent."""
    import psutil

    for above in psutil.Process().parents():
        try:
            if above.name().startswith(PROXIES):
                return above.pid
        except psutil.Error:  # somebody else's
            continue
    return os.getppid()


def _rank(program: str, numbers: tuple[str, str, str, str], host: str, job: str) -> dict[str, str]:
    """`job`: a text that all ranks of this start have, and other starts do not."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return dict(zip(names, numbers, strict=True)) | {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        JOINED: program,
    }


def _number(env: Mapping[str, str], name: str) -> int:
    return int(env[name]) if env.get(name, "").isdecimal() else 0


def _is_here(address: str) -> bool:
    import psutil

    return any(
        address == each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
    )


def expand(hosts: str) -> list[str]:
    """Slurm's list of hosts, one by one: `n[1-3,07],gpu1` is n1, n2, n3, n07 and gpu1."""
    found = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        names = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            names = [
                name + each
                for name in names
                for each in (_numbers(part[1:-1]) if part.startswith("[") else [part])
            ]
        found += names
    return found


def _numbers(ranges: str) -> list[str]:
    """`1-3,07`: 1, 2, 3, 07. Zeros in front are kept."""
    found = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        found += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return found


def tasks_of_nodes(counts: str) -> list[int]:
    """Slurm's count of tasks, node by node: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for number, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(number)] * int(repeated or 1)
    return found


def address(node: str) -> str:
    """A name or an address by which a node of Slurm is found: its own name, else what Slurm itself calls it by. Raises EnvironmentFault."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except socket.gaierror:
        pass
    command = ["scontrol", "show", "node", node, "--oneliner"]
    if found := re.search(r"\bNodeAddr=(\S+)", output_of(command, SCONTROL_SECONDS) or ""):
        return found[1]
    fix = "set MASTER_ADDR to a name or an address of the first host"
    raise EnvironmentFault(
        f"the host {node!r} of rank 0 has no address", where="SLURM_STEP_NODELIST", fix=fix
    )
