"""Where measurements of a machine lie: one file for each kind of device and version of the software, below the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.cluster.calibration import Calibration, Measured, Product, Rate
from drumline.cluster.detect import Machine, cache_dir
from drumline.errors import EnvironmentFault
from drumline.foreign import read_bytes


class _File(BaseModel):
    """The file's own form. `measured`: when, in words; `quick`: with --quick."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=1, le=1)]
    hardware: str
    software: str
    measured: str
    quick: bool
    matmul: dict[str, Rate]
    products: dict[str, tuple[Product, ...]]
    memory: Rate | None
    collectives: dict[str, dict[Annotated[int, Field(ge=2)], Measured]]
    host: dict[str, Measured]
    disk: dict[str, Measured]


def hardware(machine: Machine) -> str:
    """The kind of device: a GPU's name, or the processor's and how many of its cores may be used."""
    return machine.devices[0].name if machine.devices else f"{processor_name()}, {machine.cores} cores"


def software(machine: Machine) -> str:
    """torch's version and what its ranks talk through."""
    return f"torch {metadata.version('torch')}, {'nccl' if machine.devices else 'gloo'}"


def place(machine: Machine) -> Path:
    """The file of this machine's measurements, be it there or not."""
    kind, versions = hardware(machine), software(machine)
    key = hashlib.sha256(f"{kind}\n{versions}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return cache_dir() / "calibration" / f"{slug}-{key}.json"


def calibration_for(machine: Machine) -> Calibration | None:
    """What `drumline calibrate` measured of machines like this one with this software; None where it did not run.

    Raises EnvironmentFault for a damaged file.
    """
    path = place(machine)
    if not path.exists():
        return None
    calibration = read(path)
    return calibration if (calibration.hardware, calibration.software) == (hardware(machine), software(machine)) else None


def read(path: Path) -> Calibration:
    """Raises EnvironmentFault for a file that is not there, cannot be read, or does not say what a calibration says."""
    try:
        said = _File.model_validate_json(read_bytes(path, EnvironmentFault, "give the path of a file that `drumline calibrate` wrote"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inside = ".".join(str(part) for part in first["loc"])
        what = first["msg"][0].lower() + first["msg"][1:]
        fix = "remove it, and run `drumline calibrate` again"
        raise EnvironmentFault("is no calibration: " + (f"{inside}: " if inside else "") + what, where=str(path), fix=fix) from None
    return Calibration(
        hardware=said.hardware,
        software=said.software,
        matmul=said.matmul,
        memory=said.memory,
        collectives={(kind, ranks): line for kind, lines in said.collectives.items() for ranks, line in lines.items()},
        host=said.host,
        disk=said.disk,
        products=said.products,
    )


def write(calibration: Calibration, path: Path, *, measured: str, quick: bool) -> None:
    """Whole or not at all. Raises EnvironmentFault where it cannot be written."""
    collectives: dict[str, dict[str, Any]] = {}
    for (kind, ranks), line in sorted(calibration.collectives.items()):
        collectives.setdefault(kind, {})[str(ranks)] = vars(line)
    values = {"version": 1, "measured": measured, "quick": quick, **asdict(calibration), "collectives": collectives}
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(values, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        if part.exists():
            part.unlink()
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path), fix="choose another place") from None


def processor_name() -> str:
    """As the kernel names it; where it does not, as macOS, the architecture."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", listing.read_text(), re.MULTILINE) if listing.exists() else []
    return names[0].strip() if names else os.uname().machine
