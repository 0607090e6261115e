"""Set up the stand-in: `python -m tests.fake_gpu.install FOLDER`, from the project's own environment.

FOLDER becomes a virtual environment with the CUDA build of torch (2.5 GB to fetch, 5 GB on disk);
every other package comes from the environment that runs this. `FOLDER/native` gets the libraries.
What is there already is left as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Headers of CUDA that torch's wheels leave out.
HEADERS = "nvidia-cuda-crt==13.0.88"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if not has_cuda_build(python):
        print(f"setting up {folder.name} (once, about five minutes: the CUDA build of torch)")
        pip_install(python, pinned_torch(), "numpy")
    share_packages(python)
    headers = folder / "native/headers"
    if not headers.exists():
        pip_install(python, "--no-deps", "--target", str(headers), HEADERS)
    run(python, "-m", "tests.fake_gpu.build", str(folder / "native"))


def pinned_torch() -> str:
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = re.search(r"^torch==\S+$", constraints, re.MULTILINE)
    assert pinned is not None, "constraints.txt pins no torch"
    return pinned.group()


def has_cuda_build(python: Path) -> bool:
    look = "import importlib.metadata as m; m.version('nvidia-nccl-cu13'); m.version('torch')"
    ended = subprocess.run([str(python), "-I", "-c", look], capture_output=True)
    return ended.returncode == 0


def pip_install(python: Path, *arguments: str) -> None:
    """Without the user's configuration of pip, which may prefer a CPU build that is on disk."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env["PIP_CONFIG_FILE"] = os.devnull
    quiet = ["-q", "--disable-pip-version-check"]
    run(python, "-m", "pip", "install", *quiet, *arguments, env=env)


def share_packages(python: Path) -> None:
    """Let `python` see the packages of the environment that runs this, after its own.

    `addsitedir` reads that environment's .pth files, too, which lead to packages under development.
    """
    look = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ended = subprocess.run([str(python), "-c", look], capture_output=True, text=True, check=True)
    shared = Path(ended.stdout.strip()) / "zz-project.pth"
    shared.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def run(python: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    ended = subprocess.run([str(python), *arguments], env=env, cwd=ROOT)
    if ended.returncode != 0:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
