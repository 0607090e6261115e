"""Names, addresses and interfaces of hosts, and the variables by which gloo and NCCL choose among them. No torch here."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from drumline.core.redact import redact
from drumline.errors import EnvironmentFault

HANDED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS")
CHOOSE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ANY_PORT = 9  # for a look at the route to a host: nothing is sent there
MOST_SHOWN = 60  # characters of a variable's value
# Seconds of a collective where `launch.timeout_seconds` is not set; torchtitan's are the first two.
START_SECONDS = 300.0  # until the first step
STEP_SECONDS = 100.0  # of a step
LONG_SECONDS = 600.0  # where one rank may work for long before it comes: an evaluation, a save, a rollout, compiling


def addresses(host: str) -> list[str]:
    """The IP addresses of a name, version 4 first; none where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in ordered))


def source_address(address: str) -> str | None:
    """The address of this host that what it sends to `address` comes from; None where there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as look:
            look.connect((address, ANY_PORT))
            return str(look.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_here(address: str) -> bool:
    """Whether an address is one of this host."""
    return is_loopback(address) or interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """The interface of this host that has an address."""
    return next((name for name, theirs in _interfaces().items() if address in theirs), None)


def address_of(interface: str) -> str | None:
    """The first address of an interface of this host."""
    return next(iter(_interfaces().get(interface, [])), None)


def require_interface(name: str) -> str:
    """Its first address. Raises EnvironmentFault where this host has no such interface."""
    address = address_of(name)
    if address is None:
        raise EnvironmentFault(
            f"this host has no interface {name!r} with an address",
            where="launch.interface",
            fix="see: ip addr",
        )
    return address


def interface_to(peers: list[str], wanted: str | None = None) -> str | None:
    """The interface of this host that leads to the first of `peers` (addresses) that is not here: `wanted`, where somebody named one."""
    if wanted is not None:
        return wanted
    other = next((address for address in peers if not is_here(address)), None)
    source = None if other is None else source_address(other)
    return None if source is None else interface_of(source)


def _interfaces() -> dict[str, list[str]]:
    """Interface → its IP addresses, version 4 first."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            each.address.partition("%")[0]
            for family in families
            for each in theirs
            if each.family == family
        ]
        for name, theirs in psutil.net_if_addrs().items()
    }


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The user's variables for gloo, NCCL and the threads of a rank, which all ranks get."""
    return {
        name: value for name, value in sorted(environment.items()) if name.startswith(HANDED_ON)
    }


def why(
    environment: Mapping[str, str], timeout_seconds: float | None, interface: str | None
) -> list[str]:
    """Lines for the plan: what is handed on, and what of it contradicts the plan."""
    theirs = handed_on(environment)
    shown = " ".join(f"{name}={value[:MOST_SHOWN]}" for name, value in theirs.items())
    lines = [f"environment {redact(shown)}: handed on to all ranks"] if theirs else []
    return [*lines, *_contradictions(environment, timeout_seconds, interface)]


def _contradictions(
    environment: Mapping[str, str], timeout_seconds: float | None, interface: str | None
) -> list[str]:
    found = []
    limit = "launch.timeout_seconds"
    most = LONG_SECONDS
    if timeout_seconds is not None:
        limit = f"launch.timeout_seconds={timeout_seconds:g}"
        most = timeout_seconds
    for name in ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT"):
        if name in environment and (
            timeout_seconds is None or environment[name] != f"{timeout_seconds:g}"
        ):
            found.append(
                f"{name}={environment[name]} is read by nobody: {limit} is the limit of a collective"
            )
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        found.append(
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING=0 contradicts {limit}: a collective that hangs would never end"
        )
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
        found.append(
            "TORCH_NCCL_BLOCKING_WAIT contradicts the overlap of the plan: the host would wait for each collective"
        )
    heartbeat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if (
        heartbeat.isdecimal()
        and int(heartbeat) < most
        and environment.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0"
    ):
        found.append(
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} is less than {limit}: the monitor may end a rank before its collective"
        )
    for name in CHOOSE:
        if interface is not None and environment.get(name, interface) != interface:
            found.append(f"{name}={environment[name]} goes before launch.interface={interface}")
    return [f"environment {redact(line)}" for line in found]
