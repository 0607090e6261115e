"""Hosts on one machine: a network, UTS, mount and PID namespace each, joined by veth pairs to a
bridge, with a real sshd in each.

Names resolve in all of them (a hosts file of their own is mounted over /etc/hosts); the disk is
shared, as by a network file system. All of it is made and removed here; it needs root, `unshare`,
`ip` and openssh-server.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ENV, ROOT

SSHD = "/usr/sbin/sshd"
PACKAGES = ("openssh-server", "iproute2")
READY_SECONDS = 30.0
INSTALL_SECONDS = 300.0


def missing() -> str | None:
    """Why there can be no hosts here; None where there can. Installs Debian's packages where it is
    root and may."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("unshare") or not shutil.which("nsenter"):
        return "util-linux is missing: unshare, nsenter"
    if not (Path(SSHD).exists() and shutil.which("ip")) and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", *PACKAGES],
            capture_output=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    if not (Path(SSHD).exists() and shutil.which("ip")):
        return f"packages are missing: {', '.join(PACKAGES)}"
    trial = subprocess.run(
        ["unshare", "-nump", "--fork", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"no namespaces here: {trial.stderr.strip()}" if trial.returncode else None


class Host:
    """One of them. `pid`: of its first process, in this machine's counting; `ssh_config`: for `ssh
    -F`, the same for all."""

    def __init__(self, name: str, address: str, veth: str, bridge: str, folder: Path) -> None:
        self.name, self.address, self.veth, self.bridge, self.folder = (
            name,
            address,
            veth,
            bridge,
            folder,
        )
        self.ssh_config = folder / "ssh_config"

    def boot(self) -> None:
        """Namespaces, a cable to the bridge, and sshd."""
        script = f"mount --bind {self.folder}/hosts-{self.name} /etc/hosts && mkdir -p /run/sshd && exec sleep infinity"
        self.starter = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "-num",
                "-p",
                "--mount-proc",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                script,
            ],
            stdin=subprocess.DEVNULL,
        )
        self.pid = _first_process(self.starter.pid)
        # It stays, as that of a real card.
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        _ip(
            "link",
            "add",
            self.veth,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            mac,
            "netns",
            str(self.pid),
        )
        _ip("link", "set", self.veth, "master", self.bridge, "up")
        self.run("hostname", self.name)
        for command in (
            ["addr", "add", f"{self.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            self.run("ip", *command)
        self.run(
            SSHD, "-f", self.folder / "sshd_config", "-E", self.folder / f"sshd-{self.name}.log"
        )

    def die(self) -> None:
        """As without power: the cable first, so that nothing is said to the others, and then all
        that runs there."""
        self.link(up=False)
        self.starter.kill()  # and with the first process all of its namespace
        self.starter.wait()
        subprocess.run(
            ["ip", "link", "del", self.veth], capture_output=True, check=False, timeout=20
        )

    @property
    def dead(self) -> bool:
        return self.starter.poll() is not None

    def command(self, *command: object) -> list[str]:
        """What runs `command` there, in the folder that this process is in."""
        return [
            "nsenter",
            "-t",
            str(self.pid),
            "-n",
            "-u",
            "-m",
            "-p",
            f"--wd={ROOT}",
            *map(str, command),
        ]

    def run(self, *command: object, timeout: float = 60) -> str:
        return subprocess.run(
            self.command(*command),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
            env=ENV,
        ).stdout

    def start(
        self, *command: object, env: Mapping[str, str] = ENV, **options: Any
    ) -> subprocess.Popen[str]:
        """Its output is joined, for `ended`."""
        return subprocess.Popen(
            self.command(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(env),
            start_new_session=True,
            **options,
        )

    def link(self, up: bool) -> None:
        """Its cable; none of a host that has died."""
        subprocess.run(
            ["ip", "link", "set", self.veth, "up" if up else "down"],
            check=up,
            capture_output=True,
            timeout=20,
        )

    def has(self, pid: int) -> bool:
        """Whether a process of this machine's counting runs there."""
        return _network(pid) == _network(self.pid)

    def processes(self, marker: str) -> list[str]:
        """Command lines there that hold `marker`."""
        lines = []
        for each in self.run("ps", "-ww", "-eo", "args", "--no-headers").splitlines():
            if marker in each and not each.startswith("ps "):
                lines.append(each)
        return lines


def ended(process: subprocess.Popen[str], timeout: float) -> tuple[int, str]:
    """Exit code and output of one that `Host.start` started; its session is killed when the time is
    up."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}") from None
    return process.returncode, out


@contextmanager
def hosts(
    folder: Path, names: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Host]]:
    """Hosts by these names, removed at the end with all that runs there; `env`: variables of who
    comes by ssh. The test is skipped, with the reason, where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"{os.getpid() % 10**5:05d}"
    made = dict[str, Host]()
    bridge = f"dl{tag}"
    net = f"10.{66 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    _make_keys(folder, {"OMP_NUM_THREADS": "1", **(env or {})})  # all hosts share these cores
    known = "".join(f"{net}.{number} {name}\n" for number, name in enumerate(names, 2))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 2):
            (folder / f"hosts-{name}").write_text(f"127.0.0.1 localhost\n{known}")
            address = f"{net}.{number}"
            device = f"v{tag}{number}"
            made[name] = Host(name, address, device, bridge, folder)
            made[name].boot()
        for host in made.values():
            await_sshd(host)
        yield made
    finally:
        for host in made.values():
            host.die()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False, timeout=20)


def _network(pid: int) -> str:
    """The network namespace of a process; nothing of one that has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


def _first_process(starter: int) -> int:
    """The child of `unshare --fork`, once it is there and has done its mount."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        children = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
        if children and "sleep" in Path(f"/proc/{children[0]}/cmdline").read_text():
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("unshare started nothing")


def _make_keys(folder: Path, env: Mapping[str, str]) -> None:
    for key in ("host_key", "id"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)],
            check=True,
            timeout=60,
        )
    (folder / "authorized_keys").write_text((folder / "id.pub").read_text())
    for name in ("authorized_keys", "id", "host_key"):
        (folder / name).chmod(0o600)
    host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"* {host_key}\n")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        "PermitRootLogin yes\nUsePAM no\nPidFile none\nMaxStartups 100\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in env.items())}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/id\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )


def await_sshd(host: Host) -> None:
    until = time.monotonic() + READY_SECONDS
    while "LISTEN" not in host.run("ss", "-Hltn", "sport = :22"):
        assert time.monotonic() < until, "sshd does not listen"
        time.sleep(0.05)
    assert socket.gethostname() != host.name
