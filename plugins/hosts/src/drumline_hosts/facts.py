"""Compare what hosts must have in common: versions and devices.

Torch is imported only if there is a GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Device, Machine, detect
from drumline.version import __version__

PACKAGES = ("torch", "transformers")


def facts() -> dict[str, Any]:
    """Return this host's versions and devices, for JSON."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "versions": {"python": python, "drumline": __version__, **_versions()},
        "machine": asdict(detect()),
    }


def _versions() -> dict[str, str]:
    """Return the version of each of PACKAGES; `none` for one that is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def machine_of(values: Mapping[str, Any]) -> Machine:
    """Return the machine that `facts` has described."""
    fields = dict(values["machine"])
    fields["devices"] = [Device(**each) for each in fields["devices"]]
    return Machine(**fields)


def require_same_versions(own: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise EnvironmentFault that names the first host with another version, and what differs.

    Args:
        own: The facts of this host.
        hosts: The facts of each other host.
    """
    for host, theirs in hosts.items():
        for package, here in own["versions"].items():
            there = theirs["versions"].get(package)
            if there != here:
                what = f"host {host} has {package} {there}, and this one {here}"
                raise EnvironmentFault(
                    what,
                    where="launch.hosts",
                    fix="install the same on all hosts, or name another launch.python",
                )
    by_device = {theirs["machine"]["device"]: host for host, theirs in hosts.items()}
    if len(by_device) > 1:
        if by_device.keys() == {"cuda", "cpu"}:
            what = f"host {by_device['cuda']} has GPUs, and host {by_device['cpu']} has none"
        else:
            (device, host), (other_device, other_host), *_ = by_device.items()
            what = f"host {host} has the device {device}, and host {other_host} {other_device}"
        raise EnvironmentFault(
            what,
            where="launch.hosts",
            fix="name hosts with the same devices, or use run.device=cpu on hosts without",
        )
