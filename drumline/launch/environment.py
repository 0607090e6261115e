"""What the launcher's and the machine's environment say. No torch here."""

from __future__ import annotations

import os
import socket

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_by() -> str | None:
    """Who started this process as one rank of several: `torchrun`, or `environment` for any launcher that sets the usual variables."""
    if not all(name in os.environ for name in REQUIRED):
        return None
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "environment"


def free_port() -> int:
    """A TCP port on loopback that nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """`pid 123 (python)` of the process that listens on a port; `another process` where we may not know."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"
