"""Joining and leaving the process group of a run."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from drumline.errors import EnvironmentFault

LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERFACE = "lo" if sys.platform == "linux" else "lo0"  # of loopback; lo0 on macOS
CONNECT = timedelta(minutes=10)  # for rank 0 to be there: hosts of one job start minutes apart
A_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """Who this process is. `attempt` counts restarts by an elastic launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """As torchrun and its kin say it; without their variables one process alone."""
        read = os.environ.get
        rank = int(read("RANK", "0"))
        return cls(rank, int(read("LOCAL_RANK", str(rank))), int(read("WORLD_SIZE", "1")), int(read("TORCHELASTIC_RESTART_COUNT", "0")))


_store: dist.Store | None = None


def rendezvous() -> dist.Store:
    """The ranks' common store, made once, within ten minutes. It listens on loopback alone when all ranks are on this machine.

    The keys are of this attempt only: those of a killed one must not be taken for this one's (measured to hang restarts under torchrun).
    """
    global _store
    if _store is not None:
        return _store
    ranks = Ranks.from_environment()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror:
        raise EnvironmentFault(
            f"the host {host!r} of rank 0 has no address", where="MASTER_ADDR", fix="give a name that resolves, or an IP address"
        ) from None
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = ranks.rank == 0 and not agent_has_it
    try:
        if listens and host in LOOPBACK:
            # The store has no authentication and would listen on all interfaces.
            listener = socket.create_server(("127.0.0.1", port))
            tcp = dist.TCPStore(host, port, ranks.world_size, True, CONNECT, False, master_listen_fd=listener.detach(), use_libuv=False)
        else:
            tcp = dist.TCPStore(host, port, ranks.world_size, listens, CONNECT, False)
    except (OSError, RuntimeError) as error:
        held = "EADDRINUSE" in str(error) or "Address already in use" in str(error)
        what = f"port {port} is taken" if held else f"no rendezvous at {host}:{port}: {str(error).splitlines()[0]}"
        raise EnvironmentFault(what, where="MASTER_PORT", fix="choose another port") from None
    _store = dist.PrefixStore(f"drumline-attempt-{ranks.attempt}", tcp)
    return _store


def start(device: str, backend: str, timeout_seconds: float) -> Ranks:
    """Join the run: the default process group with gloo for CPU tensors and, on GPUs, NCCL for the rest. One process alone needs none.

    A collective that waits longer than `timeout_seconds` fails. Raises EnvironmentFault where the rendezvous cannot be had.
    """
    ranks = Ranks.from_environment()
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world_size == 1:
        return ranks
    if os.environ["MASTER_ADDR"] in LOOPBACK or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", INTERFACE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=dist.PrefixStore("group", rendezvous()),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device("cuda", ranks.local_rank) if device == "cuda" else None,
    )
    return ranks


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def publish(text: str) -> None:
    """Rank 0, before `start`: a text for all ranks."""
    rendezvous().set("text", text)


def receive() -> str:
    """The other ranks: wait for rank 0's text (a day: it may be preparing data)."""
    store = rendezvous()
    store.wait(["text"], A_DAY)
    return store.get("text").decode()
