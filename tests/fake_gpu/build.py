"""Compile the stand-in: `VENV/bin/python -m tests.fake_gpu.build FOLDER`, VENV with a CUDA build of torch.

FOLDER gets `libfakecuda.so` (preloaded: cudart, the driver, cuBLAS, cuDNN and NCCL), `libcuda.so.1`
and `libnvidia-ml.so.1` (found by their names), and an `nvidia-smi` that fails. Every symbol that
torch needs and the stand-in does not define returns 0.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
PRELOADED = [source for source in sorted(NATIVE.glob("*.cpp")) if source.name != "nvml.cpp"]
# What the stand-in has to answer for. cuRAND, cuFFT, NVRTC, cuFile and CUPTI stay real: they are
# loaded, and nothing that the tests run calls them.
ANSWERED = re.compile(
    r"(?!cuFile)(cu[A-Z]|cuda|cublas|cudnn|cusolver|cusparse|nccl|nvshmem|__cuda)"
)
DRIVER = re.compile(r"cu[A-Z]")
# Lines of `nm`: a symbol with its version, and a function with its address.
UNDEFINED_SYMBOL = re.compile(r"^ +\w ([^@\s]+)", re.MULTILINE)
DEFINED_FUNCTION = re.compile(r"^[0-9a-f]+ T (\S+)$", re.MULTILINE)
# Headers that CUDA's own include, and that its wheels leave out; nothing of them is used.
EMPTY_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    build(folder.resolve(), Path(sysconfig.get_path("purelib")))


def build(folder: Path, packages: Path) -> None:
    """Compile all libraries into `folder` for the torch in `packages` (a site-packages)."""
    headers = write_empty_headers(folder)
    includes = [
        headers,
        packages / "nvidia/cu13/include",
        packages / "nvidia/nccl/include",
        folder / "headers/nvidia/cu13/include",
    ]
    objects = [compile_source(source, folder, includes) for source in PRELOADED]
    missing = needed_symbols(libraries_of_torch(packages)) - defined_functions(objects)
    rest = compile_stubs(folder / "stubs_of_the_rest.c", missing)
    preloaded = folder / "libfakecuda.so"
    link(preloaded, [*objects, rest], "-lrt", "-ldl", "-lpthread")

    # To be found by its name; what the preloaded library defines is looked up there.
    driver_symbols = filter(DRIVER.match, missing)
    driver = compile_stubs(folder / "stubs_of_the_driver.c", driver_symbols)
    link(folder / "libcuda.so.1", [driver], "-Wl,--no-as-needed", str(preloaded))
    nvml = compile_source(NATIVE / "nvml.cpp", folder, includes)
    link(folder / "libnvidia-ml.so.1", [nvml])
    write_failing_nvidia_smi(folder / "bin")


def libraries_of_torch(packages: Path) -> list[Path]:
    return [*packages.glob("torch/lib/*.so"), *packages.glob("nvidia/nccl/lib/*.so*")]


def needed_symbols(libraries: Iterable[Path]) -> set[str]:
    """Return what the libraries leave to others, of which the stand-in is to answer for."""
    listed = run("nm", "-D", "--undefined-only", *libraries)
    undefined = UNDEFINED_SYMBOL.findall(listed)
    return set(filter(ANSWERED.match, undefined))


def defined_functions(objects: Iterable[Path]) -> set[str]:
    listed = run("nm", "--defined-only", *objects)
    return set(DEFINED_FUNCTION.findall(listed))


def write_empty_headers(folder: Path) -> Path:
    headers = folder / "empty-headers"
    headers.mkdir(exist_ok=True)
    for name in EMPTY_HEADERS:
        (headers / name).touch()
    return headers


def compile_source(source: Path, folder: Path, includes: Iterable[Path]) -> Path:
    built = folder / f"{source.stem}.o"
    flags = ["-O1", "-std=c++17", "-fPIC", "-w", *(f"-I{path}" for path in includes)]
    run("g++", *flags, "-c", source, "-o", built)
    return built


def compile_stubs(source: Path, symbols: Iterable[str]) -> Path:
    """Compile a function for each of `symbols` that takes anything and returns 0: success."""
    lines = [f"long {name}() {{ return 0; }}\n" for name in sorted(symbols)]
    source.write_text("".join(lines))
    built = source.with_suffix(".o")
    run("gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", source, "-o", built)
    return built


def link(library: Path, objects: Iterable[Path], *flags: str) -> None:
    name = f"-Wl,-soname,{library.name}"
    run("g++", "-shared", "-fPIC", "-o", library, *objects, name, *flags)


def write_failing_nvidia_smi(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    command = folder / "nvidia-smi"
    command.write_text("#!/bin/sh\nexit 9\n")
    command.chmod(0o755)


def run(command: str, *arguments: str | Path) -> str:
    found = shutil.which(command)
    if found is None:
        purpose = "to build the stand-in of CUDA (Debian: build-essential)"
        sys.exit(f"error: {command} is needed {purpose}")
    ended = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"error: {command} failed:\n{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    main()
