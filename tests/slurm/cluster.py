"""A real Slurm of two nodes on this machine, all on loopback: munged, slurmctld and two slurmd, by Debian's packages.

`python -m tests.slurm.cluster FOLDER` keeps one running until its input ends, for a look by hand."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port
from tests.harness import ENV

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
START_SECONDS = 60
# Two partitions with the same nodes: jobs of `urgent` preempt those of `work`, which have some
# seconds to save. A job that is requeued waits until its old credentials have ended.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldParameters=enable_configless
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,defer_batch
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=work Nodes=n1,n2 Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 OverTimeLimit=1
PartitionName=urgent Nodes=n1,n2 MaxTime=60 PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None where its programs are installed, which this does where
    it may."""
    if os.geteuid() != 0:
        return "Slurm's daemons start tasks as root"
    if all(map(shutil.which, PROGRAMS)):
        return None
    if shutil.which("apt-get") is None:
        lacking = [name for name in PROGRAMS if not shutil.which(name)]
        return f"there is no {', '.join(lacking)}, and no apt-get to install it"
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"apt-get install failed: {done.stderr.strip()[-200:]}"


@dataclass
class Slurm:
    """What runs, and how to call it."""

    folder: Path
    env: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]]

    def call(
        self, *command: object, timeout: float = 120, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd,
        )

    def job(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        shown = self.call("scontrol", "show", "job", job, "--oneliner").stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: int | str, *states: str, timeout: float = 120) -> dict[str, str]:
        """Wait until a job is in one of `states`."""
        until = time.monotonic() + timeout
        while True:
            found = self.job(job)
            state = found.get("JobState")
            if state in states:
                return found
            if time.monotonic() > until:
                log = (self.folder / "slurmctld.log").read_text(errors="replace")
                why = f"job {job} is {state} ({found.get('Reason')}), not {states}"
                raise AssertionError(f"{why}\n{log[-2000:]}")
            time.sleep(0.3)

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.call("scancel", "--quiet", "--user=root", "--signal=KILL", "--full", timeout=20)
            self.call("scancel", "--quiet", "--user=root", timeout=20)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _end_steps(self.folder)


def _end_steps(folder: Path) -> None:
    """slurmstepd outlives slurmd; each has this cluster's folder open or in its environment."""
    import psutil

    for process in psutil.process_iter(["pid", "name"]):
        if process.info["name"] == "slurmstepd":
            with contextlib.suppress(psutil.Error):
                places = [file.path for file in process.open_files()]
                places.append(str(process.environ()))
                if any(str(folder) in place for place in places):
                    for child in process.children(recursive=True):
                        child.kill()
                    process.kill()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start it, and end it with all that it runs."""
    host = socket.gethostname().partition(".")[0]
    ports = [free_port() for _ in range(3)]
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    conf = folder / "slurm.conf"
    key = folder / "munge.key"
    conf.write_text(CONF.format(host=host, folder=folder, ports=ports))
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    env = {"SLURM_CONF": str(conf)}
    for name, value in ENV.items():
        if not name.startswith(("SLURM", "SBATCH")):
            env[name] = value
    env["PATH"] = f"{folder / 'bin'}:{env.get('PATH', '')}:/usr/sbin:/sbin"
    (folder / "bin").mkdir()
    # They would ask the munged of a cluster that this host may be in.
    for name in ("munge", "unmunge"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec /usr/bin/{name} --socket={folder}/munge.socket "$@"\n')
        program.chmod(0o755)
    munge = [
        f"--key-file={key}",
        f"--socket={folder / 'munge.socket'}",
        f"--pid-file={folder / 'munged.pid'}",
        f"--log-file={folder / 'munged.log'}",
        f"--seed-file={folder / 'munged.seed'}",
    ]
    commands = {
        "munged": ["munged", "--force", "--foreground", *munge],
        "slurmctld": ["slurmctld", "-D", "-f", str(conf)],
        "n1": ["slurmd", "-D", "-N", "n1", "-f", str(conf)],
        "n2": ["slurmd", "-D", "-N", "n2", "-f", str(conf)],
    }
    started = Slurm(folder, env, {})
    try:
        for name, command in commands.items():
            with (folder / f"{name}.out").open("wb") as out:
                # They die with this process, however it ends.
                tied = ["setpriv", "--pdeathsig", "KILL", *command]
                nowhere = subprocess.DEVNULL
                started.daemons[name] = subprocess.Popen(
                    tied, env=env, stdin=nowhere, stdout=out, stderr=out, start_new_session=True
                )
            if name == "munged":
                _until((folder / "munge.socket").exists, folder, name)

        def is_ready() -> bool:
            idle = started.call("sinfo", "-h", "-p", "work", "-t", "idle", "-o", "%D")
            return idle.stdout.strip() == "2"

        _until(is_ready, folder, "n2")
        yield started
    finally:
        started.end()


def _until(there: Callable[[], bool], folder: Path, name: str) -> None:
    until = time.monotonic() + START_SECONDS
    while not there():
        if time.monotonic() > until:
            logs = [f"{name} did not start"]
            for path in folder.glob("*.out"):
                text = path.read_text(errors="replace")
                logs.append(f"{path.name}: {text[-800:]}")
            raise AssertionError("\n".join(logs))
        time.sleep(0.1)


def require() -> None:
    """Skip, with the reason, where there can be none."""
    why = missing()
    if why is not None:
        pytest.skip(why)


if __name__ == "__main__":
    with slurm(Path(sys.argv[1])) as running:
        print(f"export SLURM_CONF={running.env['SLURM_CONF']}", flush=True)
        sys.stdin.read()
