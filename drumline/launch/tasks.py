"""Turn the tasks that srun or mpirun has started into ranks.

A task is one of the processes that srun or mpirun starts. The environment variables that those
programs set say which rank this process is, and on which host rank 0 is. This module does not
import torch.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from drumline.errors import EnvironmentFault
from drumline.system.process import output_of

LOOPBACK = "127.0.0.1"
# Ports from FIRST_PORT on: below the ports that Linux gives to clients (from 32768 on), and above
# the usual ones of services.
FIRST_PORT = 15000
PORTS = 17000
# Steps of Slurm that are not tasks of the user: the batch script, the shell of salloc, and two of
# Slurm's own (slurm.h).
NO_TASKS = {str(0xFFFFFFFF - number) for number in range(2, 6)}
SCONTROL_SECONDS = 30.0
JOINED = "DRUMLINE_JOINED"  # variable: srun or mpirun, whichever made this task a rank
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
REQUIRED = ("RANK", "WORLD_SIZE", *RENDEZVOUS)
# Variables with the number of tasks of the same command, and with the number of this task. Open MPI
# and MPICH come before Slurm: mpirun may have started its own helpers by srun, whose variables the
# tasks see as well.
TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
TASK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
PROXIES = ("hydra_", "pmi_proxy")  # of MPICH's and Intel's mpirun, one on each host


def join_tasks() -> None:
    """Make this process a rank, if it is one task of several.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, unless a
    launcher has set them.
    """
    if not is_joined_rank():
        os.environ.update(task_variables(os.environ))


def is_joined_rank() -> bool:
    """Return whether this process has all variables of a rank, as torchrun sets them."""
    return all(name in os.environ for name in REQUIRED)


def require_rendezvous() -> None:
    """Make sure that this process is not one of several tasks that do not know of each other.

    Each of them would train alone.

    Raises:
        EnvironmentFault: It is such a task.
        SystemExit: It is such a task, and another task reports the error.
    """
    tasks = max(_int_variable(os.environ, name) for name in TASKS)
    if tasks < 2 or is_joined_rank():
        return
    if "SLURM_PTY_PORT" in os.environ:
        what = f"this terminal is one of the {tasks} tasks of an srun --pty, and the rest do not hear what is typed"
        fix = "type it in the shell of salloc, or give srun --pty one task: --ntasks=1"
    elif _task_number() > 0:
        raise SystemExit(EnvironmentFault.exit_code)  # task 0 reports it
    else:
        what = f"srun or mpirun has started {tasks} tasks, and none of them knows where to meet the rest: each would train alone"
        fix = "set MASTER_ADDR to the host of rank 0 for all of them: mpirun -x MASTER_ADDR=HOST, with MPICH mpirun -genv MASTER_ADDR HOST"
    raise EnvironmentFault(what, where="launcher", fix=fix)


def _task_number() -> int:
    """Return the number of this task, from the first variable that is set; 0 if none is."""
    for name in TASK:
        if name in os.environ:
            return _int_variable(os.environ, name)
    return 0


def srun_of_allocation() -> list[str]:
    """Return the srun command that runs a program in all tasks of this Slurm allocation.

    The caller is the shell of salloc or a batch script. The command is empty if there is no
    allocation, if this process is a task of srun or mpirun already, and if the allocation has only
    one task, on this host.
    """
    env = os.environ
    if is_joined_rank() or _is_of_mpi(env) or "SLURM_JOB_ID" not in env:
        return []
    if env.get("SLURM_STEP_ID", "") not in {"", *NO_TASKS}:
        return []
    require_one_group()
    hosts = expand_hosts(env.get("SLURM_JOB_NODELIST", ""))
    full_name = socket.gethostname()
    own_names = {full_name, full_name.partition(".")[0], env.get("SLURMD_NODENAME")}
    is_one_task = len(hosts) < 2 and _int_variable(env, "SLURM_NTASKS") < 2
    if is_one_task and own_names & set(hosts):
        return []
    step = ["srun", "--kill-on-bad-exit=1"]
    cores = env.get("SLURM_CPUS_PER_TASK")
    if cores:
        # Since 22.05 srun does not take the allocation's own number.
        step.append(f"--cpus-per-task={cores}")
    return step


def is_requeued() -> bool:
    """Return whether a batch script that Slurm has requeued runs this command once more."""
    if is_joined_rank() or "SLURM_JOB_ID" not in os.environ:
        return False
    return _int_variable(os.environ, "SLURM_RESTART_COUNT") > 0


def require_one_group() -> None:
    """Refuse a heterogeneous job of Slurm.

    Raises:
        EnvironmentFault: The job is heterogeneous.
        SystemExit: The same, in tasks other than the first: one report is enough.
    """
    if _int_variable(os.environ, "SLURM_HET_SIZE") > 1:
        if _int_variable(os.environ, "SLURM_PROCID"):
            raise SystemExit(EnvironmentFault.exit_code)
        what = "this job is heterogeneous, and a run is planned for nodes that are alike"
        raise EnvironmentFault(
            what, where="launcher", fix="ask Slurm for one group of nodes, without ':' and hetjob"
        )


def torchrun_of_node(count: Callable[[], int]) -> list[str]:
    """Return the torchrun command that starts the ranks of this node.

    It is for srun with one task a node, if a node shall have several ranks. The command is empty in
    all other cases.

    Args:
        count: Returns the number of ranks a node. Called only if srun has started one task a node.
    """
    env = os.environ
    nodes = _int_variable(env, "SLURM_STEP_NUM_NODES")
    if env.get(JOINED) != "srun" or nodes != int(env["WORLD_SIZE"]):
        return []
    processes = count()
    if processes < 2:
        return []
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        f"--rdzv-id={env['SLURM_JOB_ID']}",
        f"--node-rank={env['RANK']}",
        f"--master-addr={env['MASTER_ADDR']}",
        f"--master-port={env['MASTER_PORT']}",
        "-m",
        "--",
    ]


def become(command: list[str]) -> NoReturn:
    """Replace this process by another program.

    Raises:
        EnvironmentFault: The program is not installed.
    """
    # The new program replaces the memory of this one, and what is still in the buffer with it.
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
    """Return the environment variables that make this task a rank.

    They are empty if this process is not one task of several, or cannot know where rank 0 is.
    MASTER_ADDR and MASTER_PORT stay as the user has set them.
    """
    if _is_of_mpi(env):
        variables = _variables_of_open_mpi(env) or _variables_of_hydra(env)
    else:
        variables = _variables_of_slurm(env)
    if variables:
        for name in RENDEZVOUS:
            if env.get(name):
                variables[name] = env[name]
    return variables


def _is_of_mpi(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of mpirun, and not one of srun.

    A task may have the variables of both. Mpirun starts its own helpers by srun, so its tasks have
    the variables of that step as well. And srun --mpi=pmi2 sets PMI_SIZE, but no local rank.
    """
    if _int_variable(env, "OMPI_COMM_WORLD_SIZE") > 1:
        return True
    return "MPI_LOCALRANKID" in env and _int_variable(env, "PMI_SIZE") > 1


def _variables_of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of srun; empty for any other process."""
    # In a terminal of srun (--pty) commands are typed in one task; the rest of the step does not
    # hear them.
    if "SLURM_PTY_PORT" in env or env.get("SLURM_STEP_ID") in NO_TASKS:
        return {}
    if _int_variable(env, "SLURM_STEP_NUM_TASKS") < 2:
        return {}
    require_one_group()
    node = int(env.get("SLURM_NODEID", "0"))
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
    tasks = tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"])
    numbers = _RankNumbers(
        env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"], str(tasks[node])
    )
    if len(hosts) == 1:
        host = LOOPBACK
    else:
        host = env.get("MASTER_ADDR") or address(hosts[0])
    variables = _rank_variables(
        "srun", numbers, host, f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    )
    # A job that was requeued goes on with its run.
    variables["TORCHELASTIC_RESTART_COUNT"] = env.get("SLURM_RESTART_COUNT", "0")
    return variables


def _variables_of_open_mpi(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of Open MPI's mpirun.

    They are empty for any other process, and if the host of rank 0 cannot be found.
    """
    numbers = _rank_numbers(
        env,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    if numbers is None:
        return {}
    hosts = _hosts_of_mpirun(env)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    if numbers.local_world_size == numbers.world_size:
        host: str | None = LOOPBACK
    else:
        host = env.get("MASTER_ADDR") or next(iter(hosts), None)
    if host is None:
        return {}
    # Rank 0 may be mapped to another host than mpirun's own. It notices, and reports that a
    # MASTER_ADDR is needed.
    if numbers.rank == "0" and host in hosts and not _is_own_address(host):
        return {}
    return _rank_variables("mpirun", numbers, host, job)


def _hosts_of_mpirun(env: Mapping[str, str]) -> list[str]:
    """Return the addresses of the host of Open MPI's mpirun, most likely the host of rank 0.

    Mpirun fills its own host first. The variable is `JOB.0;tcp://ADDRESS,ADDRESS:PORT;tcp6://…`.
    """
    mpirun = re.search(r";tcp://([^:;]+):\d+", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if mpirun is None:
        return []
    return [host for host in mpirun[1].split(",") if not host.startswith("127.")]


def _variables_of_hydra(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of MPICH's or Intel's mpirun.

    They are empty for any other process, and if the host of rank 0 cannot be found. These programs
    do not name it, so on several hosts the user must set MASTER_ADDR.

    On several hosts the port is derived from that host, the number of ranks and the user. Two runs
    of one user that have all of these in common need a MASTER_PORT each.
    """
    numbers = _rank_numbers(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if numbers is None:
        return {}
    if numbers.local_world_size == numbers.world_size:
        return _rank_variables("mpirun", numbers, LOOPBACK, str(_id_of_start()))
    host = env.get("MASTER_ADDR")
    if not host:
        return {}
    return _rank_variables("mpirun", numbers, host, f"{host}.{numbers.world_size}.{os.getuid()}")


def _id_of_start() -> int:
    """Return a number that the ranks of this host share and no other start has: a process id.

    It is that of mpirun's nearest proxy, which is above all ranks of the host, with scripts perhaps
    between it and the rank. Without a proxy it is that of the parent.
    """
    import psutil

    for above in psutil.Process().parents():
        try:
            if above.name().startswith(PROXIES):
                return above.pid
        except psutil.Error:  # another user's process
            continue
    return os.getppid()


class _RankNumbers(NamedTuple):
    """The numbers of a rank, as the text of its variables."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


def _rank_numbers(env: Mapping[str, str], *names: str) -> _RankNumbers | None:
    """Return the numbers of a rank from four variables, named in the order of `_RankNumbers`.

    None if a variable is missing, or if the process is the only one.
    """
    if not all(name in env for name in names):
        return None
    numbers = _RankNumbers(*(env[name] for name in names))
    _, size_name, _, _ = names
    if _int_variable(env, size_name) < 2:
        return None
    return numbers


def _rank_variables(program: str, numbers: _RankNumbers, host: str, job: str) -> dict[str, str]:
    """Return the variables of a rank.

    Args:
        program: The program that has started it: srun or mpirun.
        numbers: Its numbers among the ranks.
        host: The host of rank 0.
        job: A text that all ranks of this start share, and no other start has. The port is derived
            from it, so that runs on one host do not meet each other.
    """
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return {
        "RANK": numbers.rank,
        "WORLD_SIZE": numbers.world_size,
        "LOCAL_RANK": numbers.local_rank,
        "LOCAL_WORLD_SIZE": numbers.local_world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        JOINED: program,
    }


def _int_variable(env: Mapping[str, str], name: str) -> int:
    """Return the number in an environment variable; 0 if it is not set, or not a number."""
    if env.get(name, "").isdecimal():
        return int(env[name])
    return 0


def _is_own_address(address: str) -> bool:
    """Return whether an address is one of this host."""
    import psutil

    own: set[str] = set()
    for addresses in psutil.net_if_addrs().values():
        own.update(each.address for each in addresses)
    return address in own


def expand_hosts(hosts: str) -> list[str]:
    """Return the hosts of Slurm's list: `n[1-3,07],gpu1` is n1, n2, n3, n07 and gpu1."""
    found = []
    # A comma within brackets does not end an item.
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        names = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            if part.startswith("["):
                endings = _expand_ranges(part[1:-1])
            else:
                endings = [part]
            names = [name + ending for name in names for ending in endings]
        found += names
    return found


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers of ranges: `1-3,07` is 1, 2, 3, 07. Zeros in front are kept."""
    found = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            found.append(str(number).zfill(len(first)))
    return found


def tasks_of_nodes(counts: str) -> list[int]:
    """Return Slurm's count of tasks, node by node: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for number, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(number)] * int(repeated or 1)
    return found


def address(node: str) -> str:
    """Return a name or an address at which a node of Slurm can be reached.

    It is the node's name if that can be resolved, and else the address that Slurm itself uses.

    Raises:
        EnvironmentFault: There is neither.
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except socket.gaierror:
        pass
    command = ["scontrol", "show", "node", node, "--oneliner"]
    shown = output_of(command, SCONTROL_SECONDS) or ""
    node_address = re.search(r"\bNodeAddr=(\S+)", shown)
    if node_address is not None:
        return node_address[1]
    fix = "set MASTER_ADDR to a name or an address of the first host"
    raise EnvironmentFault(
        f"the host {node!r} of rank 0 has no address", where="SLURM_STEP_NODELIST", fix=fix
    )
