"""The checks of one host: `python -m drumline.doctor.host` reads a Question and prints a HostReport.

Both are JSON. If standard input is empty or a terminal, the question has its defaults. torch is
imported only if there is a GPU, since its import takes seconds.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil

from drumline.doctor.check import Check, HostReport, Verdict, fail_if, warn_if
from drumline.hardware.detect import Groups, Machine, cache_dir, detect, free_bytes, likely_gpus
from drumline.system.files import digest
from drumline.system.munge import SECRET, seal
from drumline.system.network import addresses, is_loopback, source_address
from drumline.system.process import output_of
from drumline.version import __version__

INFINIBAND = Path("/sys/class/infiniband")
SHM = Path("/dev/shm")
MIB, GIB = 2**20, 2**30
# Loader workers and NCCL run out of shared memory and open files below these limits. Containers
# have 64 MB, and shells 1024 files.
SHM_BYTES = GIB
OPEN_FILES = 4096
# A disk with fewer free bytes has no room for any checkpoint.
FEW_BYTES = GIB
# A disk with fewer free bytes has room for only a few checkpoints of a small model.
SCARCE_BYTES = 20 * GIB
# Bytes that are written to measure a disk.
WRITTEN = 64 * MIB
# Bytes/s of a disk below which saves take noticeable time.
SLOW = 100e6
# Bytes of free memory that any host needs, with or without GPUs.
FEW_MEMORY_BYTES = 2 * GIB
# Prefixes of the kinds of file systems that several hosts can mount. FUSE drivers append their name
# to `fuse.`.
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
# Seconds that nvidia-smi may take. It hangs if the driver does.
SMI = 20.0
# The fact of a thing that the host lacks.
NONE = "none"


@dataclass(frozen=True)
class Question:
    """What a run needs of a host, so that it can be checked. All paths are paths of that host."""

    run_dir: str = "."
    # Folder for tokenised data; None for the default of the host.
    cache_dir: str | None = None
    # Folder of the model; None for a model of the hub.
    model: str | None = None
    # Files of training and evaluation rows.
    data: tuple[str, ...] = ()
    # Port at which the ranks meet; None for any free one.
    port: int | None = None
    # Addresses of the other hosts.
    peers: tuple[str, ...] = ()
    # The value of `launch.interface`.
    interface: str | None = None
    # Names of the CHECK_FUNCTIONS to call, without `check_`; all if it is empty.
    only: tuple[str, ...] = ()

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Question:
        """Return the question that was sent as JSON."""
        fields: dict[str, Any] = {}
        for name, value in values.items():
            # JSON has no tuples.
            if isinstance(value, list):
                value = tuple(value)
            fields[name] = value
        return Question(**fields)


def examine(question: Question) -> HostReport:
    """Check this host, and return the report.

    A check function that raises becomes a warning, so that the others are still called.
    """
    machine = detect()
    checks: list[Check] = []
    facts: dict[str, str] = {}
    for check_function in CHECK_FUNCTIONS:
        name = check_function.__name__.removeprefix("check_")
        if question.only and name not in question.only:
            continue
        try:
            checks += check_function(question, machine, facts)
        except Exception as error:  # noqa: BLE001 - the rest may still say something
            name = name.replace("_", " ")
            found = f"cannot be looked at: {error}"
            checks.append(Check(name, found, "warn", "look by hand"))
    # The all-reduce over all hosts needs a port even if the config sets none. Every host names one
    # that is free, since it is not known here which host will be the first.
    with socket.create_server(("", 0)) as server:
        free_port = server.getsockname()[1]
    name = socket.gethostname()
    # A host without a GPU takes part with one rank on its processor.
    ranks = max(1, len(machine.devices))
    port = question.port or free_port
    return HostReport(name, tuple(checks), facts, ranks, port)


# A function that yields the checks of one subject. It may add to the facts, the third argument,
# which are compared between hosts.
CheckFunction = Callable[[Question, Machine, dict[str, str]], Iterator[Check]]


def check_versions(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Report the versions of Drumline, Python, torch, transformers, CUDA, NCCL and the driver.

    The check fails if the machine has a GPU that torch cannot use. All versions become facts.
    """
    facts["drumline"] = __version__
    # Patch releases of Python may differ between hosts.
    facts["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("torch", "transformers"):
        facts[name] = metadata.version(name)
    # Facts are compared by name, so a host without a GPU has these as well.
    for name in ("CUDA", "NCCL", "driver"):
        facts[name] = NONE
    if likely_gpus() or machine.devices:
        import torch

        facts["CUDA"] = torch.version.cuda or NONE
        if machine.devices:
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        # All GPUs of a host have the same driver. A query that fails gives no line.
        driver_versions = _smi("driver_version")
        if driver_versions:
            facts["driver"] = driver_versions[0]
    found = ", ".join(f"{name} {value}" for name, value in facts.items())
    is_unused = likely_gpus() > 0 and not machine.devices
    fix = "a GPU is here and torch cannot use it: install a CUDA build of torch, and a driver that is new enough"
    yield Check("versions", found, fail_if(is_unused), fix)


def _smi(field: str) -> list[str]:
    """Return a field of each GPU, as nvidia-smi reports it.

    The list is empty if nvidia-smi is missing, fails, or takes longer than SMI.
    """
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    output = output_of(command, SMI) or ""
    return [line.strip() for line in output.splitlines()]


def check_gpus(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check that the GPUs are alike, have no memory errors, and can access each other's memory."""
    if not machine.devices:
        yield Check("GPUs", "none: this host computes on its processor")
        return
    yield Check(
        "GPU checks", "experimental, as is NCCL's all-reduce: no test has run them on a GPU yet"
    )
    names = []
    for device in machine.devices:
        gib = device.memory_bytes / GIB
        names.append(f"{device.name} {gib:.0f} GiB")
    facts["GPUs"] = f"{len(names)} × {names[0]}"
    numbers = Counter(names)
    found = ", ".join(f"{number} × {name}" for name, number in numbers.items())
    if len(numbers) == 1:
        yield Check("GPUs", found)
    else:
        yield Check("GPUs", found, "warn", "ranks wait for the slowest and smallest: leave it out")
    yield _memory_errors()
    if len(names) > 1:
        yield _peer_access(len(names))


def _memory_errors() -> Check:
    """Check that no GPU has memory errors since the last reboot that could not be corrected."""
    errors = {}
    for index, count in enumerate(_smi("ecc.errors.uncorrected.volatile.total")):
        # A GPU without ECC memory reports "[N/A]", and still has its index.
        if count.isdecimal():
            errors[index] = int(count)
    faulty = [str(index) for index, count in errors.items() if count > 0]
    if errors:
        found = f"{sum(errors.values())} uncorrected"
    else:
        found = "not reported by the driver"
    fix = f"reset GPU {', '.join(faulty)} or reboot; see `nvidia-smi -q -d ECC`"
    return Check("ECC errors", found, fail_if(bool(faulty)), fix)


def _peer_access(number: int) -> Check:
    """Check how many ordered pairs of the host's `number` GPUs can read each other's memory."""
    import torch

    # Ordered pairs: access may be possible in one direction alone.
    pairs = list(permutations(range(number), 2))
    connected = 0
    for device, peer in pairs:
        if torch.cuda.can_device_access_peer(device, peer):
            connected += 1
    found = f"{connected} of {len(pairs)} pairs"
    has_gaps = connected < len(pairs)
    fix = "slower, and NCCL may hang: turn off ACS and the IOMMU, or set NCCL_P2P_DISABLE=1"
    return Check("peer access", found, warn_if(has_gaps), fix)


def check_infiniband(
    question: Question, machine: Machine, facts: dict[str, str]
) -> Iterator[Check]:
    """Check that all InfiniBand ports are active, by the files of the kernel in /sys."""
    ports = []
    down = []
    # The paths end with DEVICE/ports/PORT.
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        device = port.parts[-3]
        name = f"{device}:{port.name}"
        state = (port / "state").read_text().strip()
        rate = (port / "rate").read_text().strip()
        # A state is a number and a word: "4: ACTIVE".
        state_word = state.partition(": ")[2]
        ports.append(f"{name} {state_word} {rate}")
        if "ACTIVE" not in state:
            down.append(name)
    found = ", ".join(ports) or NONE
    fix = f"{', '.join(down)}: cable, switch and subnet manager (`ibstat`); NCCL_IB_HCA leaves ports out"
    yield Check("InfiniBand", found, warn_if(bool(down)), fix)


def check_names(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check that this host's name and those of its peers resolve.

    Its own name must resolve to an address that the peers can use, since Gloo sends it to them. A
    loopback address is enough if all peers have one, too: then they are all this machine.
    """
    yield _own_name(question)
    for peer in question.peers:
        resolved = addresses(peer)
        if resolved:
            yield Check("peer name", f"{peer} is {resolved[0]}")
        else:
            fix = "give an IP address, or add it to /etc/hosts"
            yield Check("peer name", f"{peer} does not resolve", "fail", fix)


def _own_name(question: Question) -> Check:
    """Check that this host's name resolves to an address that its peers can use."""
    own = socket.gethostname()
    try:
        entries = socket.getaddrinfo(own, None)
    except OSError as error:
        # A run on this host alone meets at 127.0.0.1 and needs no name.
        verdict: Verdict = "fail" if question.peers else "warn"
        found = f"{own} does not resolve: {error}"
        return Check("host name", found, verdict, f"add {own} to /etc/hosts")
    # The last part of an entry is the socket's address, and its first part the host.
    known = sorted({str(entry[4][0]) for entry in entries})
    is_loopback_alone = all(map(is_loopback, known))
    are_peers_local = all(map(is_loopback, question.peers))
    is_unreachable = is_loopback_alone and not are_peers_local
    fix = "other hosts would get a loopback address: give the host its address in /etc/hosts or DNS"
    return Check("host name", f"{own} is {', '.join(known)}", fail_if(is_unreachable), fix)


def check_ports(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check that the port of the config is free; if it sets none, that any port is free."""
    # Port 0 lets the kernel choose.
    try:
        socket.create_server(("", question.port or 0)).close()
    except OSError as error:
        fix = f"`ss -ltnp` says who has it; end that, or choose another launch.port than {question.port}"
        yield Check("port", f"{question.port}: {error.strerror}", "fail", fix)
        return
    if question.port:
        found = f"{question.port} is free"
    else:
        found = "any free one: there are"
    yield Check("port", found)


def check_secret(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Report by which secret the ranks of a run recognise each other. The check never fails."""
    has_secret = bool(os.environ.get(SECRET))
    if has_secret:
        found = f"{SECRET} is set: ranks that have it meet, and no others"
    elif seal("") is not None:
        found = "by munge for ranks in a job of Slurm"
    else:
        found = "Drumline's launchers make one for each run"
    if not has_secret:
        found += f"; under torchrun, mpirun and Kubernetes none, unless {SECRET} is set on all hosts: whoever reaches MASTER_PORT can join"
    yield Check("secret", found)


def check_interfaces(
    question: Question, machine: Machine, facts: dict[str, str]
) -> Iterator[Check]:
    """Report which network interface ranks use, and check that one that is set is up.

    `launch.interface` of the config takes precedence over NCCL_SOCKET_IFNAME, and that over
    GLOO_SOCKET_IFNAME. If none is set, the kernel's route to the first peer decides.
    """
    interface_of = _interface_by_address()
    peer = question.peers[0] if question.peers else "127.0.0.1"
    own_address = source_address(peer) or ""
    used = interface_of.get(own_address, "?")
    set_here = (
        question.interface
        or os.environ.get("NCCL_SOCKET_IFNAME")
        or os.environ.get("GLOO_SOCKET_IFNAME")
    )
    listed = ", ".join(f"{name} {address}" for address, name in interface_of.items())
    if set_here and not _is_up(set_here, interface_of.values()):
        found = f"{listed}; {set_here} is set"
        fix = f"no interface {set_here} is up here: name one of these"
        yield Check("interfaces", found, "fail", fix)
    else:
        yield Check("interfaces", f"{listed}; used: {set_here or used}")


def _interface_by_address() -> dict[str, str]:
    """Return address → name of its interface, for the network interfaces that are up."""
    states = psutil.net_if_stats()
    interface_of = {}
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        for entry in entries:
            # The other addresses of an interface are hardware addresses.
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                # An address of IPv6 may end with the name of the interface: fe80::1%eth0.
                address, _, _ = entry.address.partition("%")
                interface_of[address] = name
    return interface_of


def _is_up(set_here: str, names: Iterable[str]) -> bool:
    """Return whether an interface that is up matches a value of NCCL_SOCKET_IFNAME.

    Args:
        set_here: Prefixes of names with commas; after `=` whole names. After `^` it lists the
            interfaces that are not used, so any other interface matches.
        names: The names of the interfaces that are up.
    """
    if set_here.startswith("^"):
        return True
    listed = tuple(set_here.removeprefix("=").split(","))
    if set_here.startswith("="):
        return any(name in listed for name in names)
    return any(name.startswith(listed) for name in names)


def check_shared_memory(
    question: Question, machine: Machine, facts: dict[str, str]
) -> Iterator[Check]:
    """Check that shared memory has room for loader workers and NCCL."""
    # macOS has no such folder.
    if not SHM.is_dir():
        return
    size = shutil.disk_usage(SHM)
    total = size.total / GIB
    free = size.free / GIB
    found = f"{total:.1f} GiB, {free:.1f} free"
    is_small = size.free < SHM_BYTES
    fix = "docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir with medium Memory at /dev/shm"
    yield Check("/dev/shm", found, warn_if(is_small), fix)


def check_limits(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check the soft limits of open files and of locked memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = 0 <= files < OPEN_FILES  # -1: unlimited
    fix = "`ulimit -n 65536` before the start"
    yield Check("open files", _limit(files, 1, ""), warn_if(is_few), fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_infiniband = any(INFINIBAND.glob("*"))
    is_too_little = has_infiniband and locked != resource.RLIM_INFINITY
    fix = "`ulimit -l unlimited`: InfiniBand locks what it sends"
    yield Check("locked memory", _limit(locked, MIB, " MiB"), warn_if(is_too_little), fix)


def _limit(value: int, unit: int, name: str) -> str:
    """Return a limit of the kernel as text.

    Args:
        value: The limit in bytes or files.
        unit: How many of them are one unit of the text.
        name: The name of the unit, with a space before it; may be empty.
    """
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value // unit:,}{name}"


def check_run_folder(
    question: Question, machine: Machine, facts: dict[str, str]
) -> Iterator[Check]:
    """Check the disk of the run folder."""
    yield _disk("run folder", Path(question.run_dir), needs_sharing=bool(question.peers))


def check_cache(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check the disk of the cache of tokenised data."""
    yield _disk("cache", Path(question.cache_dir or cache_dir()), needs_sharing=False)


def _disk(what: str, path: Path, needs_sharing: bool) -> Check:
    """Check that a folder can be written to, has free space, is fast, and is shared if needed.

    Args:
        what: The name of the check.
        path: The folder. If it does not exist, the nearest one above it is measured.
        needs_sharing: Whether several hosts write to it.
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    kind = _file_system(place)
    is_shared = kind.startswith(NETWORK_DISKS)
    sharing = "shared between hosts" if is_shared else "of this host alone"
    where = f"{place} ({kind}, {sharing})"
    free = free_bytes(place)
    speed = 0.0
    try:
        # The measurement must not fill the disk. With less space the check fails below anyway.
        if free > WRITTEN * 4:
            speed = write_speed(place)
    except OSError as error:
        found = f"{where}: cannot be written to: {error.strerror}"
        return Check(what, found, "fail", "choose another folder, or chown this one")
    found = f"{where}: {free / GIB:,.0f} GiB free, written at {speed / 1e6:,.0f} MB/s"
    if free < FEW_BYTES:
        return Check(what, found, "fail", "free some space, or choose another folder")
    # One check has one fix: the most urgent.
    fix = ""
    if free < SCARCE_BYTES:
        fix = "little for checkpoints: free some space, or keep fewer (checkpoint.keep)"
    elif speed < SLOW:
        fix = "saves will be slow: another disk, or checkpoint.asynchronous"
    elif needs_sharing and not is_shared:
        fix = "several hosts need a folder that all of them see, or checkpoint.replicas"
    return Check(what, found, warn_if(bool(fix)), fix)


def _file_system(place: Path) -> str:
    """Return the kind of the file system that holds a folder, or ? if it is not known."""
    above = []
    for mount in psutil.disk_partitions(all=True):
        if place.is_relative_to(mount.mountpoint):
            above.append(mount)
    if not above:
        return "?"
    # All of them are prefixes of one path, so the longest is the nearest.
    nearest = max(above, key=lambda mount: len(mount.mountpoint))
    return nearest.fstype


def write_speed(folder: Path) -> float:
    """Return the bytes/s at which a file of WRITTEN bytes is written to the disk, not to its cache.

    Raises OSError if the folder cannot be written to.
    """
    # Random bytes, because a file system that compresses would write zeros too fast.
    data = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN // MIB):
            file.write(data)
        file.flush()
        # Without fsync the page cache would be measured.
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    return WRITTEN / seconds


def check_memory(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check that free host memory is at least half of the GPUs' memory, and at least 2 GiB.

    Loading and saving need about as much host memory as the model has bytes, and a model rarely
    takes more than half of its devices. A control group, such as that of a container, may allow
    less than the machine has; how much of its limit is already used is not counted.
    """
    seen = psutil.virtual_memory()
    limit = Groups.from_this_process().memory_bytes()
    group = "no limit by a control group"
    if limit < seen.total:
        group = f"control group {limit / GIB:.0f} GiB"
    total = seen.total / GIB
    available = seen.available / GIB
    found = f"{total:.0f} GiB, {available:.0f} available; {group}"
    on_devices = sum(device.memory_bytes for device in machine.devices)
    needed = max(FEW_MEMORY_BYTES, on_devices / 2)
    is_little = min(limit, seen.available) < needed
    fix = "loading and saving need about as much as the model: fewer ranks on this host, or a larger limit"
    yield Check("host memory", found, warn_if(is_little), fix)


def check_digests(question: Question, machine: Machine, facts: dict[str, str]) -> Iterator[Check]:
    """Check that the model and the data are on this host, and make their digests facts.

    Hosts with different files would train on different numbers without an error.
    """
    if question.model:
        yield _digest("model", [question.model], facts)
    if question.data:
        yield _digest("data", question.data, facts)


def _digest(what: str, paths: Sequence[str], facts: dict[str, str]) -> Check:
    """Check that paths exist, and add one digest of all their contents to the facts.

    Args:
        what: The name of the check and of the fact.
        paths: Files and folders.
        facts: The facts to add to.
    """
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        fix = "copy it to this host under the same path, or use a shared folder"
        return Check(what, f"{missing[0]} is not here", "fail", fix)
    digests_of_paths = [digest(Path(path)) or "" for path in paths]
    joined = "".join(digests_of_paths)
    # Twelve digits are enough to tell hosts apart, and fit into a table.
    facts[what] = hashlib.sha256(joined.encode()).hexdigest()[:12]
    return Check(what, f"{facts[what]} ({', '.join(paths)})")


# All check functions, in the order in which the table shows their checks.
CHECK_FUNCTIONS: tuple[CheckFunction, ...] = (
    check_versions,
    check_gpus,
    check_infiniband,
    check_names,
    check_ports,
    check_secret,
    check_interfaces,
    check_shared_memory,
    check_limits,
    check_run_folder,
    check_cache,
    check_memory,
    check_digests,
)


def main() -> None:
    """Read a Question from standard input, unless that is a terminal, and print the HostReport."""
    text = ""
    if not sys.stdin.isatty():
        text = sys.stdin.read()
    question = Question.from_json(json.loads(text or "{}"))
    host = examine(question)
    print(json.dumps(host.to_json()))


if __name__ == "__main__":
    main()
