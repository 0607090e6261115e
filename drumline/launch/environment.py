"""What the launcher's and the machine's environment say. No torch here."""

from __future__ import annotations

import os
import shlex
import socket

from drumline.errors import EnvironmentFault
from drumline.report.redact import redact

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMAND_LENGTH = 100  # characters of a command line that are shown


def launched_by() -> str | None:
    """Who started this process as one rank of several: `torchrun`, or `environment` for any launcher that sets the usual variables."""
    if not all(name in os.environ for name in REQUIRED):
        return None
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "environment"


def listen(port: int | None) -> socket.socket:
    """A listening socket on loopback, on any free port when `port` is None. Held from now on, so that nobody can come in between.

    Raises EnvironmentFault that names the holder of a port that is taken.
    """
    try:
        return socket.create_server(("127.0.0.1", port or 0))
    except OSError as error:
        reason = f"is held by {port_holder(port)}" if port and port_holder(port) else f"cannot be had: {error.strerror}"
        raise EnvironmentFault(f"port {port} {reason}", where="launch.port", fix="end it, or leave launch.port out") from None


def port_holder(port: int) -> str | None:
    """`pid 123 (python -m http.server)`: the process that listens on a port; None where there is none, or we may not know."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS tells only root
        return None
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            try:
                command = shlex.join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                return f"pid {connection.pid}"
            return f"pid {connection.pid} ({redact(' '.join(command.split())[:COMMAND_LENGTH])})"
    return None
