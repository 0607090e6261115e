"""A slow link between two hosts of `tests.hosts.namespaces`, beside the one they have: a rate and a
delay in both directions.

By netem on a veth pair where the kernel has it. Elsewhere each host has a TUN device whose rate `tc
tbf` limits, and a process that has both devices open holds each packet for the delay: `python -m
tests.hosts.slow_link PID PID NAME SECONDS`. Packets are as large as a network card gets them from
the kernel, so that this process and each packet's timers take little of a core: at the full rate in
both directions two busy processes beside it run 0.92 times as fast, and 0.84 times with packets of
9,000 bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.namespaces import Host

TUNSETIFF = 0x400454CA
IFF_TUN = 0x1
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
MTU = 60000
QUEUE_MS = 100  # of the rate limiter: what waits longer is dropped, and TCP slows down


def has_netem(host: Host) -> bool:
    add = subprocess.run(
        host.command("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"),
        capture_output=True,
        timeout=20,
    )
    if add.returncode == 0:
        host.run("tc", "qdisc", "del", "dev", "lo", "root")
    return add.returncode == 0


@contextmanager
def slow_link(
    one: Host, other: Host, mbit: float = 100, delay: float = 0.05, number: int = 0
) -> Iterator[tuple[str, str]]:
    """The addresses of `one` and `other` on a link of its own, whose device is `slow{number}` in
    both. `delay`: seconds, of each way."""
    device = f"slow{number}"
    relay = None
    addresses = f"10.251.{number}.1", f"10.251.{number}.2"
    if has_netem(one):
        peer = ("peer", "name", device, "netns", str(other.pid))
        subprocess.run(
            ["ip", "link", "add", device, "netns", str(one.pid), "type", "veth", *peer],
            check=True,
            timeout=20,
        )
        shape: tuple[object, ...] = (
            "netem",
            "delay",
            f"{delay * 1000:g}ms",
            "rate",
            f"{mbit:g}mbit",
            "limit",
            10000,
        )
    else:
        command = [
            sys.executable,
            "-m",
            "tests.hosts.slow_link",
            str(one.pid),
            str(other.pid),
            device,
            str(delay),
        ]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert relay.stdout is not None, "the relay has ended"
        assert relay.stdout.readline(), "the relay has ended"
        shape = ("tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", f"{QUEUE_MS}ms")
    try:
        for host, address in zip((one, other), addresses, strict=True):
            host.run("ip", "addr", "add", f"{address}/24", "dev", device)
            host.run("ip", "link", "set", device, "mtu", MTU, "up")
            host.run("tc", "qdisc", "add", "dev", device, "root", *shape)
        yield addresses
    finally:
        if relay is not None:
            relay.kill()  # and with it the devices
            relay.wait()
        else:
            one.run("ip", "link", "del", device)


def device(pid: int, name: str) -> int:
    """A TUN device in the network of a process: a file that gives and takes its packets."""
    with Path(f"/proc/{pid}/ns/net").open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def relay(one: int, other: int, delay: float, stop: int) -> None:
    """Until `stop` can be read: its other end has gone."""
    other_side = {one: other, other: one}
    held = deque[tuple[float, int, bytes]]()
    while True:
        wait = None if not held else max(0.0, held[0][0] - time.monotonic())
        readable, _, _ = select.select([one, other, stop], [], [], wait)
        if stop in readable:
            return
        for tun in readable:
            try:
                for _ in range(64):
                    held.append((time.monotonic() + delay, other_side[tun], os.read(tun, MTU)))
            except (BlockingIOError, OSError):  # none left; or the device is not up
                continue
        while held and held[0][0] <= time.monotonic():
            _, to, packet = held.popleft()
            try:
                os.write(to, packet)
            except OSError:  # a full queue drops it, as a network does
                continue


if __name__ == "__main__":
    first = device(int(sys.argv[1]), sys.argv[3])
    second = device(int(sys.argv[2]), sys.argv[3])
    print("ready", flush=True)
    relay(first, second, float(sys.argv[4]), sys.stdin.fileno())
