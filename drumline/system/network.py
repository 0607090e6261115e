"""Names, addresses and network interfaces of hosts, and the variables by which they are chosen.

The variables are those of gloo and NCCL. No torch here.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from drumline.errors import EnvironmentFault
from drumline.system.redact import redact

# Prefixes of the user's variables that the launcher forwards to all ranks.
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS")
# Variables that choose the network's interface.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# A port to ask the kernel for the route to a host. Nothing is sent there.
ANY_PORT = 9
# Characters of a variable's value that are shown at most.
MOST_SHOWN = 60
# Limits of a collective in seconds if `launch.timeout_seconds` is not set: until the first step,
# and in a step (both as in torchtitan).
START_SECONDS = 300.0
STEP_SECONDS = 100.0
# The limit if one rank may work for long before it joins: evaluations, saves, rollouts, compiling.
LONG_SECONDS = 600.0


def addresses(host: str) -> list[str]:
    """Return the IP addresses of a name, version 4 first; none if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    version_4 = []
    version_6 = []
    for family, _, _, _, socket_address in found:
        address = str(socket_address[0])
        if family == socket.AF_INET:
            version_4.append(address)
        else:
            version_6.append(address)
    # The same address may come several times.
    return list(dict.fromkeys(version_4 + version_6))


def source_address(address: str) -> str | None:
    """Return the address of this host that reaches `address`; None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_here(address: str) -> bool:
    """Return whether an address is one of this host."""
    return is_loopback(address) or interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """Return the interface of this host that has an address; None if none has."""
    for name, own_addresses in _interfaces().items():
        if address in own_addresses:
            return name
    return None


def address_of(interface: str) -> str | None:
    """Return the first address of an interface of this host; None if it has none."""
    own_addresses = _interfaces().get(interface)
    if not own_addresses:
        return None
    return own_addresses[0]


def require_interface(name: str) -> str:
    """Return the first address of an interface.

    Raises EnvironmentFault if this host has no such interface.
    """
    address = address_of(name)
    if address is None:
        raise EnvironmentFault(
            f"this host has no interface {name!r} with an address",
            where="launch.interface",
            fix="see: ip addr",
        )
    return address


def interface_to(peers: list[str], wanted: str | None = None) -> str | None:
    """Return the interface of this host that leads to the first of `peers` that is on another host.

    `peers`: addresses. `wanted`: an interface that somebody named, which is returned then.
    """
    if wanted is not None:
        return wanted
    for address in peers:
        if not is_here(address):
            source = source_address(address)
            return None if source is None else interface_of(source)
    return None


def _interfaces() -> dict[str, list[str]]:
    """Return interface → its IP addresses, version 4 first."""
    import psutil

    interfaces: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        interfaces[name] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in entries:
                if entry.family == family:
                    address, _, _zone = entry.address.partition("%")
                    interfaces[name].append(address)
    return interfaces


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables for gloo, NCCL and the threads of a rank, which all ranks get."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(FORWARDED_PREFIXES)
    }


def explain_environment(
    environment: Mapping[str, str], timeout_seconds: float | None, interface: str | None
) -> list[str]:
    """Return lines of the plan's explanation: variables that all ranks get, and contradictions."""
    lines = []
    variables = forwarded_variables(environment)
    if variables:
        shown = []
        for name, value in variables.items():
            # Redacted before it is cut: a part of a secret would not be recognised.
            assignment = redact(f"{name}={value}")
            shown.append(assignment[: len(name) + 1 + MOST_SHOWN])
        lines.append(f"environment {' '.join(shown)}: handed on to all ranks")
    for contradiction in _contradictions(environment, timeout_seconds, interface):
        lines.append(f"environment {redact(contradiction)}")
    return lines


def _contradictions(
    environment: Mapping[str, str], timeout_seconds: float | None, interface: str | None
) -> list[str]:
    """Return the variables that have no effect, or work against the plan, and why."""
    found = []
    limit = "launch.timeout_seconds"
    most_seconds = LONG_SECONDS
    if timeout_seconds is not None:
        limit = f"launch.timeout_seconds={timeout_seconds:g}"
        most_seconds = timeout_seconds
    for name in ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT"):
        is_same = timeout_seconds is not None and environment.get(name) == f"{timeout_seconds:g}"
        if name in environment and not is_same:
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
    is_monitored = environment.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0"
    if is_monitored and heartbeat.isdecimal() and int(heartbeat) < most_seconds:
        found.append(
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} is less than {limit}: the monitor may end a rank before its collective"
        )
    if interface is not None:
        for name in INTERFACE_VARIABLES:
            if environment.get(name, interface) != interface:
                found.append(f"{name}={environment[name]} goes before launch.interface={interface}")
    return found
