"""What every benchmark has: its arguments, `--smoke` among them, and the head of its results file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from drumline.system.files import write_whole

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "peft",
    "reasoning-gym",
    "trl",
    "triton",
)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a benchmark's docstring as help and knows `--smoke` and `--out`."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--smoke",
        action="store_true",
        help="a size of seconds on a CPU: it shows that the benchmark runs, and nothing else",
    )
    made.add_argument("--out", type=Path, help="write the figures as JSON")
    return made


def parse(given: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """The arguments of this process. Under `--smoke` the values of `smoke` take the place of the defaults."""
    options = given.parse_args()
    if options.smoke:
        given.set_defaults(**smoke)
        options = given.parse_args()
    return options


def heading() -> dict[str, Any]:
    """What a results file says first: the command, the commit, the hardware and the versions that its figures are of."""
    from drumline.hardware.cluster import processor_name
    from drumline.hardware.detect import detect

    machine = detect()
    script = Path(sys.argv[0]).resolve()
    threads = (
        [f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"]
        if "OMP_NUM_THREADS" in os.environ
        else []
    )
    return {
        "command": " ".join([*threads, "python", os.path.relpath(script, ROOT), *sys.argv[1:]]),
        "commit": commit(),
        "hardware": {
            "cpu": processor_name(),
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "gpus": [device.name for device in machine.devices],
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
    }


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in the status of a process (proc(5)): VmHWM, RssAnon; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit(root: Path = ROOT) -> str:
    """The commit that `root` is a work tree of, with `-dirty` after it where a tracked file differs; "unknown" outside a repository."""
    command = [
        "git",
        # Without this git says nothing about a tree that another user owns, such as one in a container.
        "-c",
        f"safe.directory={root}",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        # No repository that only lies around `root` is asked.
        told = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},
        )
    except FileNotFoundError:  # no git
        return "unknown"
    return told.stdout.strip() or "unknown"


def use_device(device: str) -> None:
    """Choose the first GPU, if the device is a GPU, before the first tensor, as every rank does."""
    if device == "cuda":
        import torch

        torch.cuda.set_device(0)


def write(figures: dict[str, Any], out: Path | None) -> None:
    """The figures under their heading, to `out` where there is one; the results are whole or not there."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(heading() | figures, indent=1) + "\n")
