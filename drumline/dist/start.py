"""Joining and leaving the process group of a run."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from drumline.core.munge import SECRET, seal, unseal
from drumline.core.network import CHOOSE, addresses, interface_of, interface_to, is_loopback
from drumline.core.process import SECRET_COMES
from drumline.core.sockets import for_store
from drumline.dist.roll_call import RollCall
from drumline.dist.timeouts import begin_timeouts, forget_timeouts
from drumline.errors import EnvironmentFault
from drumline.foreign import first_line
from drumline.vendor.torch import abort_process_group

LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERFACE = "lo" if sys.platform == "linux" else "lo0"  # of loopback; lo0 on macOS
CONNECT = timedelta(minutes=10)  # for rank 0 to be there: hosts of one job start minutes apart
ANSWER_SECONDS = 30.0  # for who listens at the port of rank 0 to be a store
A_DAY = 24 * 3600.0  # for what rank 0 publishes: it may be preparing data
POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0  # for one try
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGE = -1, -3, 2**31 - 1  # malloc.h; bytes
# A pipeline sends one tensor at a time between stages, on communicators that are made at the start. NCCL's group would warn on each rank
# that such sends wait for each other, which a pipeline's do by their order.
SERIALIZED_P2P = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
LEAVE_SECONDS = 2.0  # for tearing groups down after an error


@dataclass(frozen=True)
class Ranks:
    """Who this process is. `attempt` counts restarts by an elastic launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From the variables of torchrun and similar launchers; without them one process alone."""
        read = os.environ.get
        rank = int(read("RANK", "0"))
        return cls(
            rank,
            int(read("LOCAL_RANK", str(rank))),
            int(read("WORLD_SIZE", "1")),
            int(read("TORCHELASTIC_RESTART_COUNT", "0")),
        )


_store: dist.Store | None = None
_ended = (
    0  # runs of this process that are over; a script may train several, each with keys of its own
)
_leaving: threading.Thread | None = None


def rendezvous() -> dist.Store:
    """The ranks' common store, made once, within ten minutes. It listens on loopback alone when all ranks are on this machine.

    The keys are of this start only: those of a killed one must not be taken for this one's (measured to hang restarts under torchrun).
    """
    global _store
    if _store is not None:
        return dist.PrefixStore(str(_ended), _store) if _ended else _store
    ranks = Ranks.from_environment()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not addresses(host):
        fix = "give a name that resolves, or an IP address"
        raise EnvironmentFault(
            f"the host {host!r} of rank 0 has no address", where="MASTER_ADDR", fix=fix
        )
    # Who does not know it finds none of the keys.
    secret = (
        sys.stdin.readline().strip()
        if os.environ.pop(SECRET_COMES, "")
        else os.environ.get(SECRET, "")
    )
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = ranks.rank == 0 and not agent_has_it
    try:
        if listens and host in LOOPBACK:
            # The store has no authentication and would listen on all interfaces.
            six = host == "::1"
            listener = socket.create_server(
                (host if six else "127.0.0.1", port),
                family=socket.AF_INET6 if six else socket.AF_INET,
            )
            tcp = dist.TCPStore(
                host,
                port,
                ranks.world_size,
                True,
                CONNECT,
                False,
                master_listen_fd=for_store(listener),
                use_libuv=False,
            )
        elif listens:
            tcp = dist.TCPStore(host, port, ranks.world_size, True, CONNECT, False)
        else:
            tcp = _connected(host, port, ranks.world_size)
    except (OSError, RuntimeError) as error:
        taken = "EADDRINUSE" in str(error) or "Address already in use" in str(error)
        what = (
            f"port {port} is taken"
            if taken
            else f"no rendezvous at {host}:{port}: {first_line(error)}"
        )
        raise EnvironmentFault(what, where="MASTER_PORT", fix="choose another port") from None
    store = dist.PrefixStore(secret, tcp) if secret else tcp
    # Another's store may have seen starts before this one; one that rank 0 made is new.
    store = dist.PrefixStore(f"drumline-{_round(store, ranks) if agent_has_it else 'first'}", store)
    if not agent_has_it:
        _meet(store, ranks)
    _store = store if secret or "SLURM_JOB_ID" not in os.environ else _sealed(store, ranks)
    return _store


def _sealed(store: dist.Store, ranks: Ranks) -> dist.Store:
    """The same with a secret that rank 0 draws, and that munge hands to ranks of the same user; without one where rank 0 has no munge.
    Raises EnvironmentFault where it cannot be opened here."""
    if ranks.rank == 0:
        drawn = secrets.token_hex(16)
        sealed = seal(drawn) or ""
        store.set("sealed", sealed)
    else:
        sealed = _await(store, "sealed", time.monotonic() + CONNECT.total_seconds())
        drawn = (unseal(sealed) if sealed else None) or ""
    if sealed and not drawn:
        what, fix = (
            "munge does not open here what rank 0 has sealed",
            "run munged on all hosts, in containers too, or on none",
        )
        raise EnvironmentFault(what, where="rendezvous", fix=fix)
    return dist.PrefixStore(drawn, store) if sealed else store


def _meet(store: dist.Store, ranks: Ranks) -> None:
    """Rank 0 leaves a sign in the store. Raises EnvironmentFault for a rank that does not find it: it has another secret, or none."""
    if ranks.rank == 0:
        store.set("here", "")
        return
    try:
        _await(store, "here", time.monotonic() + ANSWER_SECONDS)
    except EnvironmentFault:
        fix = f"set {SECRET} to the same text on all hosts, or on none"
        raise EnvironmentFault(
            f"rank 0 has a secret that rank {ranks.rank} does not know", where="rendezvous", fix=fix
        ) from None


def _connected(host: str, port: int, world_size: int) -> dist.TCPStore:
    """Rank 0's store, once it is there. Raises EnvironmentFault where something else has the port: torch would wait silently."""
    until = time.monotonic() + CONNECT.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                what = f"rank 0 is not there after {CONNECT.total_seconds():g} s: {error.strerror or error}"
                raise EnvironmentFault(
                    what, where=f"{host}:{port}", fix="start it, or open the port to this host"
                ) from None
            time.sleep(POLL_SECONDS)
    made: list[dist.TCPStore] = []

    def connect() -> None:
        with suppress(OSError, RuntimeError):  # it has gone again, or answers otherwise
            made.append(dist.TCPStore(host, port, world_size, False, CONNECT, False))

    # torch waits for an answer as long as it takes, whatever its time limit.
    thread = threading.Thread(target=connect, daemon=True, name="drumline-connect")
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not made:
        what = f"something listens at {host}:{port} that is not rank 0"
        raise EnvironmentFault(what, where="MASTER_PORT", fix="choose another port")
    return made[0]


def _round(store: dist.Store, ranks: Ranks) -> str:
    """A text that the ranks of this start have in common, and no start before it had.

    Launchers' counts of restarts differ by host, so rank 0 draws one. What other ranks read may be an earlier rank 0's: it holds once
    the one that is there now has answered to it with what each of them drew itself.
    """
    mine, until = secrets.token_hex(8), time.monotonic() + CONNECT.total_seconds()
    if ranks.rank == 0:
        store.set("drumline-round", mine)
        for rank in range(1, ranks.world_size):
            store.set(f"{mine}-answer-{rank}", _await(store, f"{mine}-hello-{rank}", until))
        return mine
    while True:
        drawn = _await(store, "drumline-round", until)
        store.set(f"{drawn}-hello-{ranks.rank}", mine)
        while store.get("drumline-round").decode() == drawn:
            if (
                store.check([f"{drawn}-answer-{ranks.rank}"])
                and store.get(f"{drawn}-answer-{ranks.rank}").decode() == mine
            ):
                return drawn
            _pause(until)


def _await(store: dist.Store, key: str, until: float) -> str:
    """The text at `key`, once it is there. Not by the store's own waiting, during which no signal is handled."""
    while not store.check([key]):
        _pause(until)
    return store.get(key).decode()


def _pause(until: float) -> None:
    """Raises EnvironmentFault at `until` (seconds of the monotonic clock)."""
    if time.monotonic() > until:
        raise EnvironmentFault(
            "the other ranks did not come in time",
            where="rendezvous",
            fix="look at the log of each host",
        )
    time.sleep(POLL_SECONDS)


def start(
    device: str, backend: str, timeout_seconds: float | None, interface: str | None = None
) -> Ranks:
    """Join the run: the default process group with gloo for CPU tensors and, on GPUs, NCCL for the rest. One process alone needs none.

    A collective that waits longer than `timeout_seconds` fails; None: a limit that may change (`dist.timeouts`).
    `interface`: the one between hosts; None: that of the route to rank 0's.
    Raises EnvironmentFault where the rendezvous cannot be had.
    """
    ranks = Ranks.from_environment()
    if device == "cuda":
        torch.cuda.set_device(gpu(ranks))
    elif device == "cpu":
        keep_freed_memory()
    if ranks.world_size == 1:
        return ranks
    if os.environ["MASTER_ADDR"] in LOOPBACK or os.environ.get("LOCAL_WORLD_SIZE") == str(
        ranks.world_size
    ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", INTERFACE)
    elif chosen := _between_hosts(interface):
        for name in CHOOSE:
            os.environ.setdefault(name, chosen)
    # What makes further groups (the device mesh, DeepSpeed) gives them none of its own.
    timeout = begin_timeouts(timeout_seconds)
    if backend == "nccl":
        os.environ.setdefault(SERIALIZED_P2P, "false")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=dist.PrefixStore("group", rendezvous()),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=torch.device("cuda", gpu(ranks)) if device == "cuda" else None,
    )
    if os.environ.get("LOCAL_WORLD_SIZE") != str(ranks.world_size):
        RollCall(rendezvous())
    return ranks


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of this process for its next step. By default it gives large ones back, and the kernel clears each
    page of the next one anew (docs/benchmarks.md has what that takes). Other C libraries have no such call."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, LARGE)):
        if change is not None:
            change(parameter, value)


def _between_hosts(wanted: str | None) -> str | None:
    """The interface that leads to the host of rank 0, or has its address; None where that does not tell it."""
    first = addresses(os.environ["MASTER_ADDR"])[:1]
    here = None if not first or is_loopback(first[0]) else interface_of(first[0])
    return here if wanted is None and here is not None else interface_to(first, wanted)


def gpu(ranks: Ranks) -> int:
    """The number of this rank's GPU among those that it sees, which may be its own alone. Raises EnvironmentFault where it sees too few."""
    seen = torch.cuda.device_count()
    if seen > 1 and ranks.local_rank >= seen:
        what = f"local rank {ranks.local_rank} sees {seen} GPUs"
        raise EnvironmentFault(
            what, where="launcher", fix="start at most one process a GPU on each host"
        )
    return ranks.local_rank if seen > 1 else 0


def stop(failed: bool = False) -> None:
    """Leave the process groups, if there are any. After an error (`failed`) without waiting for other ranks; see
    `leave_process`."""
    global _leaving, _ended
    if not dist.is_initialized():
        return
    forget_timeouts()
    if not failed:
        dist.destroy_process_group()
        _ended += 1
        return
    _leaving = threading.Thread(target=abort_process_group, daemon=True)
    _leaving.start()
    _leaving.join(LEAVE_SECONDS)


def leave_process(code: int) -> NoReturn:
    """End this process. Where gloo still waits for a peer the interpreter could not end in order: it ends without."""
    if _leaving is not None and _leaving.is_alive():
        with suppress(OSError):  # logs on a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def publish(text: str, name: str = "text") -> None:
    """Before `start`: a text for other ranks, under a name of this rank's choice."""
    rendezvous().set(name, text)


def receive(name: str = "text", seconds: float = A_DAY) -> str:
    """Wait for a text that another rank publishes, by default for a day: it may be preparing data. Raises EnvironmentFault after that."""
    return _await(rendezvous(), name, time.monotonic() + seconds)


def drawn(name: str) -> str:
    """Before `start`: 16 random hexadecimal digits that all ranks have in common."""
    ranks, mine = Ranks.from_environment(), secrets.token_hex(8)
    if ranks.world_size > 1 and ranks.rank > 0:
        return receive(name, CONNECT.total_seconds())
    if ranks.world_size > 1:
        publish(mine, name)
    return mine
