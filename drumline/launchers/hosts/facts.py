"""What hosts must have in common: versions, and the files of model and data. No torch where there is no GPU."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drumline import __version__
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Device, Machine, detect

PACKAGES = ("torch", "transformers")
PIECE, PIECES = 2**20, 16  # of a large file so many pieces of a MiB are read, evenly spaced: it may lie on a network


def facts() -> dict[str, Any]:
    """This host's versions and devices, for JSON."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"versions": {"python": python, "drumline": __version__, **_versions()}, "machine": asdict(detect())}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def machine_of(values: Mapping[str, Any]) -> Machine:
    """The host that `facts` described."""
    return Machine(**{**values["machine"], "devices": [Device(**each) for each in values["machine"]["devices"]]})


def require_same_versions(own: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises EnvironmentFault that names the first host with another version, and what differs. `own`: the facts of this host."""
    for host, theirs in hosts.items():
        for package, here in own["versions"].items():
            there = theirs["versions"].get(package)
            if there != here:
                what = f"host {host} has {package} {there}, and this one {here}"
                raise EnvironmentFault(what, where="launch.hosts", fix="install the same on all hosts, or name another launch.python")
    kinds = {theirs["machine"]["device"]: host for host, theirs in hosts.items()}
    if len(kinds) > 1:
        what = f"host {kinds['cuda']} has GPUs, and host {kinds['cpu']} has none"
        raise EnvironmentFault(what, where="launch.hosts", fix="name hosts with the same devices, or use run.device=cpu on hosts without")


def digest(path: Path) -> str | None:
    """Of the names, sizes and contents of a file, or of all in a folder; None where there is none. Of a large file pieces are read."""
    if not path.exists():
        return None
    whole = hashlib.sha256()
    for file in sorted(each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()):
        name = str(file.relative_to(path)) if path.is_dir() else ""
        if any(part.startswith(".") for part in Path(name).parts):  # what a download keeps for itself
            continue
        size = file.stat().st_size
        whole.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as content:
            for start in _starts(size):
                content.seek(start)
                whole.update(content.read(PIECE))
    return whole.hexdigest()


def _starts(size: int) -> Sequence[int]:
    if size <= PIECE * PIECES:
        return range(0, size, PIECE)
    return [(size - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
