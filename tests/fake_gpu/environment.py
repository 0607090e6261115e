"""Where the stand-in lies, and the variables of a process that is to run over it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.harness import ENV, ROOT

FOLDER = ROOT / ".venv-fake-gpu"
PYTHON = FOLDER / "bin/python"
LIBRARIES = Path(os.environ.get("FAKE_GPU_LIBRARIES", FOLDER / "native"))


def environment(devices: int, shared_memory: Path, **settings: object) -> dict[str, str]:
    """Return the variables for `devices` GPUs. `shared_memory`: a folder in which NCCL's ranks meet.

    Further settings are those of native/settings.cpp, such as FAKE_GPU_BYTES.
    """
    own_path = os.pathsep.join([str(ROOT / "tests/fake_gpu/site"), str(ROOT)])
    values: dict[str, object] = {
        "LD_PRELOAD": LIBRARIES / "libfakecuda.so",
        "LD_LIBRARY_PATH": LIBRARIES,
        "PATH": f"{LIBRARIES / 'bin'}{os.pathsep}{ENV['PATH']}",
        "PYTHONPATH": own_path,
        "OMP_NUM_THREADS": 1,
        "FAKE_GPUS": devices,
        "FAKE_NCCL_FOLDER": shared_memory,
        **settings,
    }
    return {**ENV, **{name: str(value) for name, value in values.items()}}
