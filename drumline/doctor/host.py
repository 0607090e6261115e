"""The checks of one host: `python -m drumline.doctor.host` reads a Question (JSON) from standard input, if it has one, and prints a Host.

No torch here, but where there is a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from drumline import __version__
from drumline.core.files import digest
from drumline.core.munge import SECRET, seal
from drumline.core.network import addresses, is_loopback, source_address
from drumline.core.process import output_of
from drumline.doctor.check import Check, Host, Verdict
from drumline.hardware.detect import Groups, Machine, cache_dir, detect, free_bytes, likely_gpus

INFINIBAND, SHM = Path("/sys/class/infiniband"), Path("/dev/shm")
MIB, GIB = 2**20, 2**30
# Below: loader workers and NCCL run out; containers have 64 MB, shells 1024.
SHM_BYTES, OPEN_FILES = (
    GIB,
    4096,
)
# Free on a disk: nothing fits; a few checkpoints of a small model do.
FEW_BYTES, SCARCE_BYTES = (
    GIB,
    20 * GIB,
)
# Bytes that are written to measure a disk, and bytes/s below which saves stand out.
WRITTEN, SLOW = (
    64 * MIB,
    100e6,
)
NETWORK_DISKS = (
    "nfs",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "glusterfs",
    "cifs",
    "smb",
    "afs",
    "fuse.",
    "9p",
    "virtiofs",
    "wekafs",
    "pvfs",
)
SMI = 20.0  # seconds that nvidia-smi may take
NONE = "none"


@dataclass(frozen=True)
class Question:
    """What is meant to run here. Paths are of this host; `peers`: names of the other hosts; `interface`: of `launch.interface`;
    `only`: names of the LOOKS to take; nothing: all."""

    run_dir: str = "."
    cache_dir: str | None = None
    model: str | None = None
    data: tuple[str, ...] = ()
    port: int | None = None
    peers: tuple[str, ...] = ()
    interface: str | None = None
    only: tuple[str, ...] = ()

    @staticmethod
    def of(values: Mapping[str, Any]) -> Question:
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return Question(**read)


def examine(question: Question) -> Host:
    """All checks of this host. One that raises is itself a finding."""
    machine, checks, facts = detect(), list[Check](), dict[str, str]()
    for look in LOOKS:
        if question.only and look.__name__ not in question.only:
            continue
        try:
            checks += look(question, machine, facts)
        except Exception as error:  # noqa: BLE001 - the rest may still say something
            checks.append(
                Check(
                    look.__name__.replace("_", " "),
                    f"cannot be looked at: {error}",
                    "warn",
                    "look by hand",
                )
            )
    with socket.create_server(("", 0)) as server:
        free = server.getsockname()[1]
    return Host(
        socket.gethostname(),
        tuple(checks),
        facts,
        max(1, len(machine.devices)),
        question.port or free,
    )


Look = Callable[[Question, Machine, dict[str, str]], Iterator[Check]]


def versions(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    facts |= {"drumline": __version__, "Python": ".".join(map(str, sys.version_info[:2]))}
    facts |= {name: metadata.version(name) for name in ("torch", "transformers")}
    facts |= {"CUDA": NONE, "NCCL": NONE, "driver": NONE}
    if likely_gpus() or machine.devices:
        import torch

        facts["CUDA"] = torch.version.cuda or NONE
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if machine.devices else NONE
        facts["driver"] = next(iter(_smi("driver_version")), NONE)
    found = ", ".join(f"{name} {value}" for name, value in facts.items())
    unused = likely_gpus() > 0 and not machine.devices
    mend = "a GPU is here and torch cannot use it: install a CUDA build of torch, and a driver that is new enough"
    yield Check("versions", found, "fail" if unused else "ok", mend)


def _smi(field: str) -> list[str]:
    """A field of each GPU, as its driver reports it; nothing where it does not."""
    return [
        line.strip()
        for line in (
            output_of(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"], SMI) or ""
        ).splitlines()
    ]


def gpus(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    if not machine.devices:
        yield Check("GPUs", "none: this host computes on its processor")
        return
    yield Check(
        "GPU checks", "experimental, as is NCCL's all-reduce: no test has run them on a GPU yet"
    )
    names = [f"{device.name} {device.memory_bytes / GIB:.0f} GiB" for device in machine.devices]
    facts["GPUs"] = f"{len(names)} × {names[0]}"
    alike: tuple[Verdict, str] = (
        ("ok", "")
        if len(set(names)) == 1
        else ("warn", "ranks wait for the slowest and smallest: leave it out")
    )
    yield Check(
        "GPUs", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)), *alike
    )
    errors = [
        int(count) for count in _smi("ecc.errors.uncorrected.volatile.total") if count.isdecimal()
    ]
    bad = [number for number, count in enumerate(errors) if count]
    mend = f"reset GPU {', '.join(map(str, bad))} or reboot; see `nvidia-smi -q -d ECC`"
    yield Check(
        "ECC errors",
        f"{sum(errors)} uncorrected" if errors else "not reported by the driver",
        "fail" if bad else "ok",
        mend,
    )
    import torch

    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        mend = "slower, and NCCL may hang: turn off ACS and the IOMMU, or set NCCL_P2P_DISABLE=1"
        yield Check(
            "peer access",
            f"{len(pairs) - len(apart)} of {len(pairs)} pairs",
            "warn" if apart else "ok",
            mend,
        )


def infiniband(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    ports = sorted(INFINIBAND.glob("*/ports/*"))
    states = {
        f"{port.parts[-3]}:{port.name}": [
            (port / name).read_text().strip() for name in ("state", "rate")
        ]
        for port in ports
    }
    down = [name for name, (state, _) in states.items() if "ACTIVE" not in state]
    found = (
        ", ".join(
            f"{name} {state.partition(': ')[2]} {rate}" for name, (state, rate) in states.items()
        )
        or NONE
    )
    mend = f"{', '.join(down)}: cable, switch and subnet manager (`ibstat`); NCCL_IB_HCA leaves ports out"
    yield Check("InfiniBand", found, "warn" if down else "ok", mend)


def names(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    own = socket.gethostname()
    try:
        known = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(own, None)})
        alone = all(map(is_loopback, known)) and not all(map(is_loopback, question.peers))
        mend = "other hosts would get a loopback address: give the host its address in /etc/hosts or DNS"
        yield Check("host name", f"{own} is {', '.join(known)}", "fail" if alone else "ok", mend)
    except OSError as error:
        yield Check(
            "host name",
            f"{own} does not resolve: {error}",
            "fail" if question.peers else "warn",
            f"add {own} to /etc/hosts",
        )
    for peer in question.peers:
        if found := addresses(peer):
            yield Check("peer name", f"{peer} is {found[0]}")
        else:
            yield Check(
                "peer name",
                f"{peer} does not resolve",
                "fail",
                "give an IP address, or add it to /etc/hosts",
            )


def ports(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    try:
        socket.create_server(("", question.port or 0)).close()
        yield Check(
            "port", f"{question.port} is free" if question.port else "any free one: there are"
        )
    except OSError as error:
        mend = f"`ss -ltnp` says who has it; end that, or choose another launch.port than {question.port}"
        yield Check("port", f"{question.port}: {error.strerror}", "fail", mend)


def secret(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    if os.environ.get(SECRET):
        found = f"{SECRET} is set: ranks that have it meet, and no others"
    elif seal("") is not None:
        found = "by munge for ranks in a job of Slurm"
    else:
        found = "our own launchers draw one"
    more = f"; under torchrun, mpirun and Kubernetes none, unless {SECRET} is set on all hosts: whoever reaches MASTER_PORT can join"
    yield Check("secret", found + more * (SECRET not in os.environ))


def interfaces(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    both = (socket.AF_INET, socket.AF_INET6)
    there = (
        (name, entry)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up
    )
    of = {entry.address.partition("%")[0]: name for name, entry in there if entry.family in both}
    used = of.get(source_address(question.peers[0] if question.peers else "127.0.0.1") or "", "?")
    set_here = (
        question.interface
        or os.environ.get("NCCL_SOCKET_IFNAME")
        or os.environ.get("GLOO_SOCKET_IFNAME")
    )
    listed = ", ".join(f"{name} {address}" for address, name in of.items())
    if (
        set_here
        and not any(name.startswith(set_here.lstrip("=").split(",")[0]) for name in of.values())
        and not set_here.startswith("^")
    ):
        yield Check(
            "interfaces",
            f"{listed}; {set_here} is set",
            "fail",
            f"no interface {set_here} is up here: name one of these",
        )
    else:
        yield Check("interfaces", f"{listed}; used: {set_here or used}")


def shared_memory(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    if SHM.is_dir():
        size = shutil.disk_usage(SHM)
        mend = "docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir with medium Memory at /dev/shm"
        found = f"{size.total / GIB:.1f} GiB, {size.free / GIB:.1f} free"
        yield Check("/dev/shm", found, "warn" if size.free < SHM_BYTES else "ok", mend)


def limits(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    files, locked = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    yield Check(
        "open files",
        _limit(files, 1, ""),
        "warn" if 0 <= files < OPEN_FILES else "ok",
        "`ulimit -n 65536` before the start",
    )
    needed = any(INFINIBAND.glob("*")) and locked != resource.RLIM_INFINITY
    mend = "`ulimit -l unlimited`: InfiniBand locks what it sends"
    yield Check("locked memory", _limit(locked, MIB, " MiB"), "warn" if needed else "ok", mend)


def _limit(value: int, unit: int, name: str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit:,}{name}"


def run_folder(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    yield _disk("run folder", Path(question.run_dir), needs_sharing=bool(question.peers))


def cache(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    yield _disk("cache", Path(question.cache_dir or cache_dir()), needs_sharing=False)


def _disk(what: str, path: Path, needs_sharing: bool) -> Check:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    above = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if place.is_relative_to(mount.mountpoint)
    ]
    kind = max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else "?"
    shared = kind.startswith(NETWORK_DISKS)
    where = f"{place} ({kind}, {'shared between hosts' if shared else 'of this host alone'})"
    free = free_bytes(place)
    try:
        speed = write_speed(place) if free > WRITTEN * 4 else 0.0
    except OSError as error:
        return Check(
            what,
            f"{where}: cannot be written to: {error.strerror}",
            "fail",
            "choose another folder, or chown this one",
        )
    found = f"{where}: {free / GIB:,.0f} GiB free, written at {speed / 1e6:,.0f} MB/s"
    if free < FEW_BYTES:
        return Check(what, found, "fail", "free some space, or choose another folder")
    if free < SCARCE_BYTES:
        return Check(
            what,
            found,
            "warn",
            "little for checkpoints: free some space, or keep fewer (checkpoint.keep)",
        )
    if speed < SLOW:
        return Check(
            what, found, "warn", "saves will be slow: another disk, or checkpoint.asynchronous"
        )
    if needs_sharing and not shared:
        return Check(
            what,
            found,
            "warn",
            "several hosts need a folder that all of them see, or checkpoint.replicas",
        )
    return Check(what, found)


def write_speed(folder: Path) -> float:
    """Bytes/s of a file written until it is on the disk. Raises OSError."""
    data = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN // MIB):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN / (time.perf_counter() - began)


def memory(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    seen, limit = psutil.virtual_memory(), Groups.of_this_process().memory_bytes()
    group = (
        f"control group {limit / GIB:.0f} GiB"
        if limit < seen.total
        else "no limit by a control group"
    )
    devices = sum(device.memory_bytes for device in machine.devices)
    little = min(limit, seen.available) < max(2 * GIB, devices / 2)
    mend = "loading and saving need about as much as the model: fewer ranks on this host, or a larger limit"
    found = f"{seen.total / GIB:.0f} GiB, {seen.available / GIB:.0f} available; {group}"
    yield Check("host memory", found, "warn" if little else "ok", mend)


def digests(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    for what, paths in (
        ("model", [question.model] if question.model else []),
        ("data", list(question.data)),
    ):
        if not paths:
            continue
        missing = [path for path in paths if not Path(path).exists()]
        if missing:
            yield Check(
                what,
                f"{missing[0]} is not here",
                "fail",
                "copy it to this host under the same path, or use a shared folder",
            )
            continue
        whole = "".join(digest(Path(path)) or "" for path in paths)
        facts[what] = hashlib.sha256(whole.encode()).hexdigest()[:12]
        yield Check(what, f"{facts[what]} ({', '.join(paths)})")


LOOKS: tuple[Look, ...] = (
    versions,
    gpus,
    infiniband,
    names,
    ports,
    secret,
    interfaces,
    shared_memory,
    limits,
    run_folder,
    cache,
    memory,
    digests,
)


def main() -> None:
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    print(json.dumps(examine(Question.of(json.loads(text or "{}"))).values()))


if __name__ == "__main__":
    main()
