"""What the first minutes on a GPU are for, in parts that stop themselves after nine: `make gpu PART=tests|memory|speed|kernels|rl`.

    PYTHONPATH=. python benchmarks/gpu.py PART --out FILE.json

Each part runs its commands in order of worth, writes what it has after each, and prints a table. Without a GPU the same parts run at
tiny sizes on the CPU, which says that the commands work and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CUDA = torch.cuda.is_available()
SECONDS = 540.0  # of a part
PYTHON = sys.executable
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "pydantic", "datasets", "deepspeed", "trl")


def commands(part: str) -> dict[str, list[str]]:
    """Name → command of what a part runs after its probe, in order of worth."""
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if part == "tests":
        losses = {"losses": [*tests, "-n", "0", "tests/gpu/test_losses.py"]}
        others = {"every other test of tests/gpu": [*tests, "-n", "4", "tests/gpu", "--ignore", "tests/gpu/test_losses.py"]}
        return {**losses, **sft("packed run", "tiny", "--packed", alone=True), **(others if CUDA else {})}
    if part == "memory":
        return {"memory sweep": [PYTHON, "benchmarks/gpu_memory_sweep.py"]} if CUDA else {"losses' memory": small_losses()}
    if part == "kernels":
        return kernels()
    if part == "rl":
        return {name: reinforced(name) for name in ("grpo", "ppo", "dpo")}
    calibrate = {"calibrate": [PYTHON, "-m", "drumline", "calibrate", "--quick"]}
    if not CUDA:
        return {**sft("tiny packed LoRA", "tiny", "--packed", "--lora", alone=True), "losses": small_losses()}
    planner = {"planner": [PYTHON, "benchmarks/gpu_memory_sweep.py", "--runs", "llama"]}
    ways = {"full": (), "LoRA": ("--lora",), "packed": ("--packed",)}
    matches: dict[str, list[str]] = {}
    for shape in ("1b", "8b"):
        for way, options in ways.items():
            matches |= sft(f"{shape} {way}", shape, *options, *(["--checkpointing"] if shape == "8b" else []))
    return {**calibrate, **matches, **planner, "losses": [PYTHON, "benchmarks/chunked_cross_entropy.py"]}


def kernels() -> dict[str, list[str]]:
    """Each kernel's values, then attention by documents against the mask, and one shape with each of the others."""
    values = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "tests/gpu/test_kernels.py", "tests/gpu/test_attention.py"]
    attention = [PYTHON, "benchmarks/packed_attention.py", *(["--length", "4096"] if CUDA else ["--smoke"]), "--model", "tiny"]
    made = {"values": values} | {"attention by documents": attention} if CUDA else {"attention by documents": attention}
    options = {"plain": [], "fp8": ["precision=fp8"], "liger": ["model.kernels=liger"], "compiled": ["compile.enabled=true"]}
    for name, keys in (options if CUDA else {"plain": []}).items():
        made |= sft(f"1b {name}", "1b" if CUDA else "tiny", *(f"--set={key}" for key in keys), alone=True)
    return made


def reinforced(algorithm: str) -> list[str]:
    """One round of an algorithm against its peer."""
    size = ["--shape", "1b", "--steps", "4"] if CUDA else ["--smoke"]
    contenders = "drumline,bare" if algorithm == "ppo" else "drumline,trl" if find_spec("trl") else "drumline"
    return [PYTHON, "benchmarks/rl_vs_peers.py", "--algorithm", algorithm, "--rounds", "1", "--contenders", contenders, *size]


def sft(name: str, shape: str, *options: str, alone: bool = False) -> dict[str, list[str]]:
    """One round of SFT by Drumline, and if not `alone` by the bare loop and by TRL where that is installed."""
    peers = ["drumline"] if alone else ["drumline", "bare", *(["trl"] if find_spec("trl") else [])]
    size = {"--length": "2048", "--steps": "6"} if CUDA else {"--length": "64", "--steps": "2"}
    sizes = [word for pair in size.items() for word in pair]
    command = [PYTHON, "benchmarks/sft_vs_peers.py", "--shape", shape, "--rounds", "1", "--contenders", ",".join(peers), *sizes, *options]
    return {f"SFT {name}": command}


def small_losses() -> list[str]:
    sizes = {"tokens": 64, "vocabulary": 256, "hidden": 16, "chunk": 32, "repeats": 1, "rounds": 1}
    return [PYTHON, "benchmarks/chunked_cross_entropy.py", *(str(word) for name, value in sizes.items() for word in (f"--{name}", value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tests", "memory", "speed", "kernels", "rl"))
    parser.add_argument("--out", type=Path, required=True, help="the figures as JSON, written anew after each command")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the part stops itself after this long")
    parser.add_argument("--only", default="", help="only commands with this in their names")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    rows: list[dict[str, object]] = []
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    figures: dict[str, object] = {"part": options.part, "device": device, "versions": versions(), "runs": rows}
    if options.part == "tests":
        figures["attention"] = attention()
    for name, command in commands(options.part).items():
        if options.only not in name:
            continue
        rows.append(run(name, command, ends - time.monotonic()))
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({key: value for key, value in figures.items() if key != "runs"}, indent=1))
    for row in rows:
        print(f"{row['name']:40} {row['end']:>10} {row['seconds']!s:>8} s  {row['last']}")
    sys.exit(any(row["end"] != "0" for row in rows))


def versions() -> dict[str, str]:
    there = {}
    for name in PACKAGES:
        try:
            there[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            there[name] = "not installed"
    return there


def attention() -> dict[str, object]:
    """Which kernels of attention run, and the seconds of the first call at each of new lengths, as torch chooses and without cuDNN."""
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    lengths = range(513, 533) if CUDA else range(17, 20)

    def call(queries: int, keys: int, masked: bool) -> float:
        q, k = (torch.randn(1, 8, length, 64, device=device, dtype=dtype) for length in (queries, keys))
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril() if masked else None
        began = time.perf_counter()
        scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=not masked and queries == keys)
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def chosen(queries: int, keys: int, masked: bool) -> list[str]:
        """The operators of attention that torch takes by itself."""
        with torch.profiler.profile() as profile:
            call(queries, keys, masked)
        return sorted({event.key for event in profile.key_averages() if event.key.startswith("aten::_scaled_dot_product")})

    runs: dict[str, object] = {}
    for name, (queries, keys, masked) in {"plain": (64, 64, False), "masked": (64, 64, True), "decoding": (1, 64, False)}.items():
        able = []
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            try:
                with sdpa_kernel(backend):
                    call(queries, keys, masked)
                able.append(backend.name)
            except RuntimeError:  # this kernel does not take this
                continue
        runs[name] = {"able": able, "by default": chosen(queries, keys, masked)}
    runs["first calls, as torch chooses"] = [round(call(length, length, False), 6) for length in lengths]
    torch.backends.cuda.enable_cudnn_sdp(False)
    runs["first calls, without cuDNN"] = [round(call(length + 100, length + 100, False), 6) for length in lengths]
    torch.backends.cuda.enable_cudnn_sdp(True)
    return runs


def run(name: str, command: list[str], seconds: float) -> dict[str, object]:
    """A command in a process group of its own, which ends with its time."""
    if seconds <= 1:
        return {"name": name, "end": "not begun", "seconds": 0.0, "last": "", "output": ""}
    began = time.monotonic()
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        end = str(process.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, end = process.communicate()[0], "time is up"
    lines = output.strip().splitlines()
    last = lines[-1][: shutil.get_terminal_size().columns] if lines else ""
    return {"name": name, "end": end, "seconds": round(time.monotonic() - began, 1), "last": last, "output": output[-8000:]}


if __name__ == "__main__":
    main()
