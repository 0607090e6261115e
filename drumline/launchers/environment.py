"""The environment of the launcher and of this machine. No torch here."""

from __future__ import annotations

import ctypes
import io
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path

from drumline.core.process import ProcessId, die_with, process
from drumline.core.redact import redact
from drumline.errors import EnvironmentFault
from drumline.launchers.tasks import JOINED, joined

REPORT_SECONDS = 2.0  # for rank 0 to be as far as the others
NVML = "libnvidia-ml.so.1"  # the name that torch opens
COMMAND_LENGTH = 100  # characters of a command line that are shown
# What starts a process in the background and may end before it: no launchers.
SHELLS = {
    "sh",
    "bash",
    "dash",
    "zsh",
    "ksh",
    "fish",
    "tcsh",
    "csh",
    "busybox",
    "tmux",
    "screen",
    "sshd",
    "login",
    "su",
    "sudo",
    "systemd",
}


def launched_by() -> str | None:
    """Who started this process as one rank of several: `torchrun`, `srun`, `mpirun`, or `environment` for any launcher that sets the usual
    variables."""
    if not joined():
        return None
    return (
        "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get(JOINED, "environment")
    )


def first_rank() -> bool:
    """Whether this process reports for all: rank 0, or alone."""
    return launched_by() is None or os.environ["RANK"] == "0"


@contextmanager
def first_rank_reports() -> Iterator[None]:
    """Around what ends in the same mistake on all ranks: rank 0 reports it, other ranks exit silently after it, since launchers
    end all ranks when one goes."""
    with nullcontext() if first_rank() else redirect_stderr(io.StringIO()):
        try:
            yield
        except SystemExit:
            time.sleep(0 if first_rank() else REPORT_SECONDS)
            raise


def expandable_segments() -> None:
    """Have CUDA's allocator grow its segments, unless the user has set it; it is read as CUDA starts, and ranks inherit it.

    Not where NVML is missing, as in containers with compute capability alone: torch asks NVML about
    the device before its first such segment, by a null pointer (c10/cuda/PeerToPeerAccess.cpp).
    """
    is_set = bool(os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
    if not is_set and _loads(NVML):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
            "expandable_segments:True"  # torch 2.11 to 2.13 know this name and the newer
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def other_rank_runs(command: str) -> bool:
    """Whether another rank of the launcher runs this `command`: only training takes them all; data are prepared once on each host."""
    who = {"train": None, "prepare": "LOCAL_RANK"}.get(command, "RANK")
    return (
        launched_by() is not None
        and who is not None
        and os.environ.get(who, os.environ["RANK"]) != "0"
    )


def die_with_launchers() -> None:
    """Have this process killed when one of those that launched it dies, however it dies: nobody would look after it any more."""
    die_with(launchers())


def launchers() -> list[ProcessId]:
    """The processes above this one that launched it: whoever has its arguments at the end of its own, as torchrun, deepspeed and
    accelerate have, and as deepspeed has twice; of a rank also its parent, unless that is a shell."""
    import psutil

    own = [
        argument
        for argument in sys.argv[1:]
        if not argument.startswith(("--local_rank", "--local-rank"))
    ]
    found = []
    for above in psutil.Process().parents():
        try:
            line, name = above.cmdline(), above.name()
        except psutil.Error:  # somebody else's
            continue
        handed_on = own and line and "python" in Path(line[0]).name and line[-len(own) :] == own
        started = (
            launched_by() is not None
            and above.pid == os.getppid()
            and above.pid > 1
            and name.lstrip("-") not in SHELLS
        )
        if handed_on or started:
            found.append(process(above.pid))
    return found


def listen(
    port: int | None, address: str = "127.0.0.1", where: str = "launch.port"
) -> socket.socket:
    """A listening socket on loopback or another `address` of this host, on any free port when `port` is None. It is taken from now on, so
    that nobody can come in between.

    Raises EnvironmentFault that names the process that has a taken port.
    """
    try:
        return socket.create_server(
            (address, port or 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError as error:
        reason = (
            f"is held by {port_holder(port)}"
            if port and port_holder(port)
            else f"cannot be had: {error.strerror}"
        )
        fix = (
            "end it, or leave launch.port out"
            if where == "launch.port"
            else "end it, or name another port"
        )
        raise EnvironmentFault(f"port {port} {reason}", where=where, fix=fix) from None


def port_holder(port: int) -> str | None:
    """`pid 123 (python -m http.server)`: the process that listens on a port; None where there is none, or we may not know."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS answers only root
        return None
    for connection in connections:
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            try:
                command = shlex.join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                return f"pid {connection.pid}"
            return f"pid {connection.pid} ({redact(' '.join(command.split())[:COMMAND_LENGTH])})"
    return None
