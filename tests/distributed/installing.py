"""Packages that a user may install: pip puts them into a folder of the test, and interpreters of
their own find them there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness import ENV

PIP = [sys.executable, "-m", "pip", "install", "--quiet"]
WITHOUT_NETWORK = ["--no-index", "--no-deps", "--no-build-isolation"]


def install(package: Path, folder: Path) -> str:
    """Install a copy of a package below `folder`, without a network. Returns the PYTHONPATH that
    has it."""
    source = folder / "source"
    site = folder / "site"
    shutil.copytree(package, source)  # pip builds in the folder of the package
    command = [*PIP, *WITHOUT_NETWORK, "--target", str(site), str(source)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    return os.pathsep.join([ENV["PYTHONPATH"], str(site)])


def interpret_drumline(path: str, *arguments: object) -> str:
    """Run the command line in an interpreter of its own, which has looked for no installed package
    before. Returns what it prints."""
    command = [sys.executable, "-m", "drumline", *map(str, arguments)]
    env = {**ENV, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
