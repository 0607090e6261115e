"""Join and leave the process group of a run."""

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

from drumline.dist.roll_call import RollCall
from drumline.dist.timeouts import begin_timeouts, forget_timeouts
from drumline.errors import EnvironmentFault
from drumline.foreign import first_line
from drumline.system.munge import SECRET, seal, unseal
from drumline.system.network import (
    INTERFACE_VARIABLES,
    addresses,
    interface_of,
    interface_to,
    is_loopback,
)
from drumline.system.process import SECRET_ON_STDIN
from drumline.system.sockets import detach_for_store
from drumline.vendor.torch import abort_process_group

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
# How long ranks wait for rank 0 to be there: hosts of one job start minutes apart.
JOIN_TIMEOUT = timedelta(minutes=10)
# How long one attempt to connect to rank 0 may take.
ATTEMPT_SECONDS = 5.0
# How long a listener at the port of rank 0 may take to answer as a store does.
ANSWER_SECONDS = 30.0
# How long ranks wait for what rank 0 publishes: it may be preparing data.
PUBLISH_SECONDS = 24 * 3600.0
# The pause between two looks at the store.
POLL_SECONDS = 0.1
# How long tearing groups down after an error may take.
LEAVE_SECONDS = 2.0
# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# A threshold above any block, in bytes.
UNLIMITED_BYTES = 2**31 - 1
# The largest threshold that older versions of glibc accept, in bytes. They ignore a larger one.
MOST_BYTES_OF_OLD_GLIBC = 32 << 20
# A pipeline sends one tensor at a time between stages, on communicators that are made at the start.
# NCCL's group would warn on each rank that such sends wait for each other, which a pipeline's do by
# their order.
SERIALIZED_P2P = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


@dataclass(frozen=True)
class RankInfo:
    """The place of this process among the ranks of a run.

    `rank`: its number among all ranks. `local_rank`: its number among those of its host.
    `world_size`: the number of all ranks. `attempt`: how often an elastic launcher has restarted
    it.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> RankInfo:
        """Return the place that torchrun or a similar launcher has put in the environment.

        Without its variables this is the only process.
        """
        read = os.environ.get
        rank = int(read("RANK", "0"))
        return cls(
            rank,
            int(read("LOCAL_RANK", str(rank))),
            int(read("WORLD_SIZE", "1")),
            int(read("TORCHELASTIC_RESTART_COUNT", "0")),
        )


_store: dist.Store | None = None
# Runs of this process that are over. A script may train several, each with keys of its own.
_runs_ended = 0
_leaving: threading.Thread | None = None


def rendezvous() -> dist.Store:
    """Return the common store of the ranks, which the first call makes or connects to.

    The store of rank 0 listens on loopback alone if MASTER_ADDR is a loopback address. Its keys
    belong to this start only: if keys of a killed start were taken for those of this one, restarts
    under torchrun would hang. Raises EnvironmentFault if there is no store within ten minutes, or
    if something else answers.
    """
    global _store
    if _store is None:
        _store = _make_store()
        return _store
    if _runs_ended:
        return dist.PrefixStore(str(_runs_ended), _store)
    return _store


def _make_store() -> dist.Store:
    """Return the store of this start, with a secret in front of its keys if there is one."""
    ranks = RankInfo.from_environment()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if not addresses(host):
        raise EnvironmentFault(
            f"the host {host!r} of rank 0 has no address",
            where="MASTER_ADDR",
            fix="give a name that resolves, or an IP address",
        )
    secret = _read_secret()
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = ranks.rank == 0 and not agent_has_store
    store = _open_store(host, port, ranks.world_size, listens)
    if secret:
        # A process that does not know the secret finds none of the keys.
        store = dist.PrefixStore(secret, store)
    if agent_has_store:
        # torchrun's agent has made the store, and earlier starts may have used it.
        store = dist.PrefixStore(f"drumline-{_agree_on_start(store, ranks)}", store)
    else:
        # Rank 0 has made the store, so it is new.
        store = dist.PrefixStore("drumline-first", store)
        _require_same_secret(store, ranks)
    if secret or "SLURM_JOB_ID" not in os.environ:
        return store
    return _with_sealed_secret(store, ranks)


def _read_secret() -> str:
    """Return the secret of a run, from stdin or from the environment; empty without one."""
    if os.environ.pop(SECRET_ON_STDIN, ""):
        return sys.stdin.readline().strip()
    return os.environ.get(SECRET, "")


def _open_store(host: str, port: int, world_size: int, listens: bool) -> dist.Store:
    """Return the store of rank 0, which this process makes if it `listens`, or connects to.

    Raises EnvironmentFault if that fails.
    """
    try:
        if not listens:
            return _connect(host, port, world_size)
        if host in LOOPBACK:
            return _listen_on_loopback(host, port, world_size)
        return dist.TCPStore(host, port, world_size, True, JOIN_TIMEOUT, False)
    except (OSError, RuntimeError) as error:
        is_taken = "EADDRINUSE" in str(error) or "Address already in use" in str(error)
        what = f"no rendezvous at {host}:{port}: {first_line(error)}"
        if is_taken:
            what = f"port {port} is taken"
        raise EnvironmentFault(what, where="MASTER_PORT", fix="choose another port") from None


def _listen_on_loopback(host: str, port: int, world_size: int) -> dist.TCPStore:
    """Return a new store that listens on loopback alone.

    The store has no authentication, and by itself it would listen on all interfaces.
    """
    address = "127.0.0.1"
    family = socket.AF_INET
    if host == "::1":
        address = host
        family = socket.AF_INET6
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        host,
        port,
        world_size,
        True,
        JOIN_TIMEOUT,
        False,
        master_listen_fd=detach_for_store(listener),
        use_libuv=False,
    )


def _with_sealed_secret(store: dist.Store, ranks: RankInfo) -> dist.Store:
    """Return the store with a secret, which rank 0 draws, in front of its keys.

    Munge gives the secret only to ranks of the same user. If rank 0 has no munge, the store is
    returned as it is. Raises EnvironmentFault if the secret cannot be opened on this host.
    """
    if ranks.rank == 0:
        secret = secrets.token_hex(16)
        sealed = seal(secret) or ""
        store.set("sealed", sealed)
    else:
        sealed = _await_text(store, "sealed", time.monotonic() + JOIN_TIMEOUT.total_seconds())
        secret = ""
        if sealed:
            secret = unseal(sealed) or ""
    if not sealed:
        return store
    if not secret:
        raise EnvironmentFault(
            "munge does not open here what rank 0 has sealed",
            where="rendezvous",
            fix="run munged on all hosts, in containers too, or on none",
        )
    return dist.PrefixStore(secret, store)


def _require_same_secret(store: dist.Store, ranks: RankInfo) -> None:
    """Write a key to the store on rank 0, and look for it on the other ranks.

    Raises EnvironmentFault on a rank that does not find it, because it has another secret or none.
    """
    if ranks.rank == 0:
        store.set("here", "")
        return
    try:
        _await_text(store, "here", time.monotonic() + ANSWER_SECONDS)
    except EnvironmentFault:
        raise EnvironmentFault(
            f"rank 0 has a secret that rank {ranks.rank} does not know",
            where="rendezvous",
            fix=f"set {SECRET} to the same text on all hosts, or on none",
        ) from None


def _connect(host: str, port: int, world_size: int) -> dist.TCPStore:
    """Return rank 0's store, once it is there.

    Raises EnvironmentFault if another program has the port, for which torch would wait silently.
    """
    _await_listener(host, port)
    connected: list[dist.TCPStore] = []

    def connect() -> None:
        # The listener may have gone again, or answer in another way than a store.
        with suppress(OSError, RuntimeError):
            connected.append(dist.TCPStore(host, port, world_size, False, JOIN_TIMEOUT, False))

    # torch waits for an answer as long as it takes, whatever its time limit.
    thread = threading.Thread(target=connect, daemon=True, name="drumline-connect")
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not connected:
        what = f"something listens at {host}:{port} that is not rank 0"
        raise EnvironmentFault(what, where="MASTER_PORT", fix="choose another port")
    return connected[0]


def _await_listener(host: str, port: int) -> None:
    """Wait until something listens at a port. Raises EnvironmentFault after ten minutes."""
    seconds = JOIN_TIMEOUT.total_seconds()
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), ATTEMPT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise EnvironmentFault(
                    f"rank 0 is not there after {seconds:g} s: {error.strerror or error}",
                    where=f"{host}:{port}",
                    fix="start it, or open the port to this host",
                ) from None
            time.sleep(POLL_SECONDS)


def _agree_on_start(store: dist.Store, ranks: RankInfo) -> str:
    """Return a nonce that all ranks of this start have in common, and no earlier start had.

    The store may hold keys of an earlier start, and launchers' counts of restarts differ by host.
    So each rank draws a nonce, and that of rank 0 names the start:

    1. Rank 0 writes its nonce S to `drumline-round`.
    2. Rank r reads S, and writes its own nonce to `S-hello-r`.
    3. Rank 0 copies that to `S-answer-r`.

    If rank r reads its own nonce there, S is of the present rank 0. While it waits for that, it
    looks whether `drumline-round` has changed: then S was of an earlier start, and it begins again
    at 2. Raises EnvironmentFault after ten minutes.
    """
    own_nonce = secrets.token_hex(8)
    until = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    if ranks.rank == 0:
        store.set("drumline-round", own_nonce)
        for rank in range(1, ranks.world_size):
            nonce_of_rank = _await_text(store, f"{own_nonce}-hello-{rank}", until)
            store.set(f"{own_nonce}-answer-{rank}", nonce_of_rank)
        return own_nonce
    while True:
        start_nonce = _await_text(store, "drumline-round", until)
        answer_key = f"{start_nonce}-answer-{ranks.rank}"
        store.set(f"{start_nonce}-hello-{ranks.rank}", own_nonce)
        while store.get("drumline-round").decode() == start_nonce:
            if store.check([answer_key]) and store.get(answer_key).decode() == own_nonce:
                return start_nonce
            _pause(until)


def _await_text(store: dist.Store, key: str, until: float) -> str:
    """Wait for a text at `key` of the store, and return it.

    Raises EnvironmentFault at `until` (seconds of the monotonic clock).
    """
    # The store's own `wait` handles no signals.
    while not store.check([key]):
        _pause(until)
    return store.get(key).decode()


def _pause(until: float) -> None:
    """Sleep for a moment.

    Raises EnvironmentFault after `until` (seconds of the monotonic clock).
    """
    if time.monotonic() > until:
        raise EnvironmentFault(
            "the other ranks did not come in time",
            where="rendezvous",
            fix="look at the log of each host",
        )
    time.sleep(POLL_SECONDS)


def start(
    device: str, backend: str, timeout_seconds: float | None, interface: str | None = None
) -> RankInfo:
    """Join the run: make the default process group, and return the place of this process in it.

    The group has gloo for CPU tensors and, with the `backend` "nccl", NCCL for those on GPUs. A
    single process needs no group.

    `timeout_seconds`: a collective that waits longer fails; None: a limit that may change
    (`dist.timeouts`). `interface`: the network interface between hosts; None: the one that leads to
    rank 0's host. Raises EnvironmentFault if there is no rendezvous.
    """
    ranks = RankInfo.from_environment()
    if device == "cuda":
        torch.cuda.set_device(gpu(ranks))
    elif device == "cpu":
        keep_freed_memory()
    if ranks.world_size == 1:
        return ranks
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size)
    if is_one_host or os.environ["MASTER_ADDR"] in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    else:
        _choose_interface(interface)
    # Further groups (of the device mesh, of DeepSpeed) are made without a limit of their own.
    timeout = begin_timeouts(timeout_seconds)
    backends = "gloo"
    if backend == "nccl":
        backends = "cpu:gloo,cuda:nccl"
        os.environ.setdefault(SERIALIZED_P2P, "false")
    device_id: torch.device | None = None
    if device == "cuda":
        device_id = torch.device("cuda", gpu(ranks))
    dist.init_process_group(
        backends,
        store=dist.PrefixStore("group", rendezvous()),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device_id,
    )
    if not is_one_host:
        # The threads of `system.heartbeat` keep it.
        RollCall(rendezvous())
    return ranks


def _choose_interface(wanted: str | None) -> None:
    """Let gloo and NCCL use the interface between hosts, unless the user has chosen one."""
    chosen = _interface_between_hosts(wanted)
    if chosen:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, chosen)


def _interface_between_hosts(wanted: str | None) -> str | None:
    """Return the interface that leads to the host of rank 0, or has its address.

    None if the address of rank 0 does not show which one that is. `wanted`: the interface that the
    user has set.
    """
    first = addresses(os.environ["MASTER_ADDR"])[:1]
    own: str | None = None
    if first and not is_loopback(first[0]):
        own = interface_of(first[0])
    if wanted is None and own is not None:
        return own
    return interface_to(first, wanted)


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of this process for its next step.

    By default glibc returns large blocks to the kernel, which then clears each page of the next one
    (docs/explanations/benchmarks.md has what that costs). Other C libraries have no such call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    is_accepted = mallopt(M_MMAP_THRESHOLD, UNLIMITED_BYTES)
    if not is_accepted:
        mallopt(M_MMAP_THRESHOLD, MOST_BYTES_OF_OLD_GLIBC)
    mallopt(M_TRIM_THRESHOLD, UNLIMITED_BYTES)


def gpu(ranks: RankInfo) -> int:
    """Return the index of this rank's GPU among those that it sees.

    Raises EnvironmentFault if it sees too few.
    """
    seen = torch.cuda.device_count()
    # A launcher may let each rank see only its own GPU.
    if seen <= 1:
        return 0
    if ranks.local_rank >= seen:
        raise EnvironmentFault(
            f"local rank {ranks.local_rank} sees {seen} GPUs",
            where="launcher",
            fix="start at most one process a GPU on each host",
        )
    return ranks.local_rank


def stop(failed: bool = False) -> None:
    """Leave the process groups, if there are any.

    `failed`: this rank had an error, so it does not wait for the other ranks (see `leave_process`).
    """
    global _leaving, _runs_ended
    if not dist.is_initialized():
        return
    forget_timeouts()
    if not failed:
        dist.destroy_process_group()
        _runs_ended += 1
        return
    _leaving = threading.Thread(target=abort_process_group, daemon=True)
    _leaving.start()
    _leaving.join(LEAVE_SECONDS)


def leave_process(code: int) -> NoReturn:
    """End this process with an exit code."""
    # While gloo waits for a peer, the interpreter cannot end in order.
    if _leaving is not None and _leaving.is_alive():
        # The logs may be on a full disk.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def publish(text: str, name: str = "text") -> None:
    """Give a text to the other ranks, which read it by `receive`. It is called before `start`."""
    rendezvous().set(name, text)


def receive(name: str = "text", seconds: float = PUBLISH_SECONDS) -> str:
    """Wait until another rank has published a text, and return it.

    Raises EnvironmentFault after so many `seconds`. By default that is a day, because the other
    rank may be preparing data.
    """
    return _await_text(rendezvous(), name, time.monotonic() + seconds)


def draw_nonce(name: str) -> str:
    """Return 16 random hexadecimal digits that all ranks have in common.

    `name`: of this nonce, the same on all ranks. It is called before `start`.
    """
    ranks = RankInfo.from_environment()
    own = secrets.token_hex(8)
    if ranks.world_size == 1:
        return own
    if ranks.rank > 0:
        return receive(name, JOIN_TIMEOUT.total_seconds())
    publish(own, name)
    return own
