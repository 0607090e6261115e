"""Find which program launched this process, set variables for its ranks, and take ports.

This module does not import torch.
"""

from __future__ import annotations

import ctypes
import io
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path

from drumline.errors import EnvironmentFault
from drumline.launch.tasks import JOINED, is_joined_rank
from drumline.system.process import ProcessId, die_with, process
from drumline.system.redact import redact

REPORT_SECONDS = 2.0  # for rank 0 to come as far as the other ranks
NVML = "libnvidia-ml.so.1"  # the name that torch opens
COMMAND_LENGTH = 100  # characters of a command line that are shown
# These start a process in the background and may end before it, so they are no launchers.
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
    """Return the program that started this process as one rank of several; None if none did.

    The program is `torchrun`, `srun`, `mpirun`, or `environment` for any other launcher that sets
    the usual variables.
    """
    if not is_joined_rank():
        return None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return os.environ.get(JOINED, "environment")


def is_first_rank() -> bool:
    """Return whether this process reports for all ranks: it is rank 0, or the only process."""
    return launched_by() is None or os.environ["RANK"] == "0"


@contextmanager
def first_rank_reports() -> Iterator[None]:
    """Within the block, let only rank 0 report a mistake that all ranks meet.

    The other ranks exit silently after rank 0, since launchers end all ranks when one exits.
    """
    if is_first_rank():
        output: AbstractContextManager[object] = nullcontext()
    else:
        output = redirect_stderr(io.StringIO())
    with output:
        try:
            yield
        except SystemExit:
            # Asked again, because this process may have become a rank meanwhile.
            if not is_first_rank():
                time.sleep(REPORT_SECONDS)
            raise


def use_expandable_segments() -> None:
    """Make CUDA's allocator use expandable segments, unless the user has set an allocator option.

    This sets an environment variable, which the allocator reads as CUDA starts and ranks inherit.

    Nothing is set if the library NVML is missing, as in containers with compute capability alone.
    Torch asks NVML about the device before its first expandable segment, and would crash without it
    (c10/cuda/PeerToPeerAccess.cpp).
    """
    is_set = bool(os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
    if not is_set and _loads(NVML):
        # Torch 2.11 to 2.13 know this name of the variable and the newer one.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _loads(library: str) -> bool:
    """Return whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def is_left_to_another_rank(command: str) -> bool:
    """Return whether this rank shall not run `command`, because another rank does.

    All ranks run `train`. The first rank of each host runs `prepare`, and rank 0 alone any other
    command.
    """
    if command == "train" or launched_by() is None:
        return False
    rank = os.environ["RANK"]
    if command == "prepare":
        rank = os.environ.get("LOCAL_RANK", rank)
    return rank != "0"


def die_with_launchers() -> None:
    """Have this process killed when a launcher above it dies, since nobody else would end it."""
    die_with(launchers())


def launchers() -> list[ProcessId]:
    """Return the processes above this one that launched it.

    A launcher has this process's arguments at the end of its own, as torchrun, deepspeed (twice)
    and accelerate have. The parent of a rank is its launcher as well, unless it is a shell.
    """
    import psutil

    own = []
    for argument in sys.argv[1:]:
        if not argument.startswith(("--local_rank", "--local-rank")):
            own.append(argument)
    found = []
    for above in psutil.Process().parents():
        try:
            line = above.cmdline()
            name = above.name()
        except psutil.Error:  # another user's process
            continue
        if _passes_on_arguments(line, own) or _is_starter(above.pid, name):
            found.append(process(above.pid))
    return found


def _passes_on_arguments(line: list[str], arguments: list[str]) -> bool:
    """Return whether a command line is Python's and ends with these arguments."""
    if not arguments or not line:
        return False
    return "python" in Path(line[0]).name and line[-len(arguments) :] == arguments


def _is_starter(pid: int, name: str) -> bool:
    """Return whether a process is the parent of this rank, and is not a shell."""
    if launched_by() is None or pid != os.getppid() or pid <= 1:
        return False
    return name.lstrip("-") not in SHELLS


def listen(
    port: int | None, address: str = "127.0.0.1", where: str = "launch.port"
) -> socket.socket:
    """Return a listening socket on an address of this host.

    From now on the port is taken, so no other process can take it before the ranks use it.

    Args:
        port: TCP port; None for any free port.
        address: IPv4 or IPv6 address of this host.
        where: Configuration key that an error names.

    Raises:
        EnvironmentFault: The port cannot be had. The message names the process that has it.
    """
    if ":" in address:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    try:
        return socket.create_server((address, port or 0), family=family)
    except OSError as error:
        holder = None
        if port:
            holder = port_holder(port)
        if holder:
            reason = f"is held by {holder}"
        else:
            reason = f"cannot be had: {error.strerror}"
        if where == "launch.port":
            fix = "end it, or leave launch.port out"
        else:
            fix = "end it, or name another port"
        raise EnvironmentFault(f"port {port} {reason}", where=where, fix=fix) from None


def port_holder(port: int) -> str | None:
    """Return the process that listens on a TCP port, as `pid 123 (python -m http.server)`.

    None if no process does, or if the system does not tell this user.
    """
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS answers only root
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.pid:
            continue
        if connection.laddr and connection.laddr.port == port:
            return _process_name(connection.pid)
    return None


def _process_name(pid: int) -> str:
    """Return a process as `pid 123 (python -m http.server)`, with secrets redacted.

    The command is left out if it cannot be read.
    """
    import psutil

    try:
        command = shlex.join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return f"pid {pid}"
    line = " ".join(command.split())
    return f"pid {pid} ({redact(line[:COMMAND_LENGTH])})"
