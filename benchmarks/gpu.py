"""Fifteen minutes on a GPU, in parts that stop themselves after four: `make gpu`, or one of them with `make gpu PART=probe`.

    PYTHONPATH=. python benchmarks/gpu.py PART --out FILE.json

In order of worth:
probe    versions, which attention kernels run, one packed bf16 run against the CPU's losses (about 40 s)
tests    tests/gpu
speed    8B LoRA at 4,096 tokens and 1B full, eager and compiled: tokens/s, MFU, peak against the plan
memory   the memory sweep
kernels  each kernel's values and its effect on one shape, then rollouts of GRPO and PPO, and DPO
peers    calibration, and SFT against a bare loop and TRL

A part writes its file after each command, so that what was seen stays when the machine goes. Without a GPU the same parts run at tiny
sizes on the CPU, which shows that the commands work and nothing about a GPU.
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
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
SECONDS = 235.0  # of a part
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "pydantic",
    "datasets",
    "deepspeed",
    "trl",
)
Commands = dict[str, list[str]]  # name → command line


def probe_commands() -> Commands:
    return {"bf16 losses": [PYTHON, "benchmarks/gpu_losses.py"]}


def test_commands() -> Commands:
    losses = {"losses": [*PYTEST, "-n", "0", "tests/gpu/test_losses.py"]}
    if not CUDA:
        return losses
    rest = [*PYTEST, "-n", "4", "tests/gpu", "--ignore", "tests/gpu/test_losses.py"]
    return {**losses, "the other tests of tests/gpu": rest}


def speed_commands() -> Commands:
    if CUDA:
        return {"speed": [PYTHON, "benchmarks/gpu_memory_sweep.py", "--list", "speed"]}
    return {"speed": [PYTHON, "benchmarks/gpu_memory_sweep.py", "--smoke"]}


def memory_commands() -> Commands:
    if CUDA:
        return {"memory sweep": [PYTHON, "benchmarks/gpu_memory_sweep.py"]}
    return {"losses' memory": small_losses()}


def kernel_commands() -> Commands:
    """Each kernel's values, attention by documents, one shape with each of the others; rollouts."""
    packed_attention = [PYTHON, "benchmarks/packed_attention.py", "--model", "tiny"]
    commands: Commands = {}
    shape = "tiny"
    options: dict[str, list[str]] = {"plain": []}
    if CUDA:
        shape = "1b"
        files = ["tests/gpu/test_kernels.py", "tests/gpu/test_attention.py"]
        commands["values"] = [*PYTEST, "-n", "0", *files]
        commands["attention by documents"] = [*packed_attention, "--length", "4096"]
        options["fp8"] = ["--set=precision=fp8"]
        options["liger"] = ["--set=model.kernels=liger"]
        options["compiled"] = ["--set=compile.enabled=true"]
    else:
        commands["attention by documents"] = [*packed_attention, "--smoke"]
    commands["grpo"] = rl_command("grpo")
    for name, keys in options.items():
        commands[f"SFT {shape} {name}"] = sft_command(shape, *keys, contenders=["drumline"])
    commands["ppo"] = rl_command("ppo")
    commands["dpo"] = rl_command("dpo")
    return commands


def peer_commands() -> Commands:
    if not CUDA:
        tiny = sft_command("tiny", "--packed", "--lora", contenders=["drumline"])
        return {"SFT tiny packed LoRA": tiny, "losses": small_losses()}
    commands: Commands = {"calibrate": [PYTHON, "-m", "drumline", "calibrate", "--quick"]}
    contenders = ["drumline", "bare"]
    if find_spec("trl"):
        contenders.append("trl")
    for shape in ("1b", "8b"):
        checkpointing = ["--checkpointing"] if shape == "8b" else []
        for name, options in {"full": [], "LoRA": ["--lora"], "packed": ["--packed"]}.items():
            command = sft_command(shape, *options, *checkpointing, contenders=contenders)
            commands[f"SFT {shape} {name}"] = command
    commands["losses"] = [PYTHON, "benchmarks/chunked_cross_entropy.py"]
    return commands


# In order of worth: whoever has a machine for minutes runs the first ones.
PARTS: dict[str, Callable[[], Commands]] = {
    "probe": probe_commands,
    "tests": test_commands,
    "speed": speed_commands,
    "memory": memory_commands,
    "kernels": kernel_commands,
    "peers": peer_commands,
}


def rl_command(algorithm: str) -> list[str]:
    """Return the command of one round of an algorithm, against its peer if there is one."""
    contenders = "drumline"
    if algorithm == "ppo":
        contenders = "drumline,bare"  # TRL has no PPO any more
    elif find_spec("trl"):
        contenders = "drumline,trl"
    size = ["--shape", "1b", "--steps", "4"] if CUDA else ["--smoke"]
    command = [PYTHON, "benchmarks/rl_vs_peers.py", "--algorithm", algorithm, "--rounds", "1"]
    return [*command, "--contenders", contenders, *size]


def sft_command(shape: str, *options: str, contenders: list[str]) -> list[str]:
    """Return the command of one round of SFT of a shape by each of the contenders."""
    size = ["--length", "2048", "--steps", "6"] if CUDA else ["--length", "64", "--steps", "2"]
    command = [PYTHON, "benchmarks/sft_vs_peers.py", "--shape", shape, "--rounds", "1"]
    return [*command, "--contenders", ",".join(contenders), *size, *options]


def small_losses() -> list[str]:
    sizes = ["--tokens", "64", "--vocabulary", "256", "--hidden", "16", "--chunk", "32"]
    return [
        PYTHON,
        "benchmarks/chunked_cross_entropy.py",
        *sizes,
        "--repeats",
        "1",
        "--rounds",
        "1",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument(
        "--out", type=Path, required=True, help="the figures as JSON, written after each command"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the part stops itself after this long"
    )
    parser.add_argument("--only", default="", help="only commands with this in their names")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    rows: list[dict[str, object]] = []
    figures: dict[str, object] = {
        "part": options.part,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "versions": installed_versions(),
        "runs": rows,
    }

    def write() -> None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")

    if options.part == "probe":
        figures["attention"] = attention_kernels()
        write()
    for name, command in PARTS[options.part]().items():
        if options.only not in name:
            continue
        rows.append(run(name, command, ends - time.monotonic()))
        write()
    figures_of_part = {key: value for key, value in figures.items() if key != "runs"}
    print(json.dumps(figures_of_part, indent=1))
    for row in rows:
        print(f"{row['name']:40} {row['end']:>10} {row['seconds']!s:>8} s  {row['last']}")
    has_failed = any(row["end"] != "0" for row in rows)
    sys.exit(has_failed)


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def attention_kernels() -> dict[str, object]:
    """Return which attention kernels run for each kind of call and which torch takes by itself.

    Also the seconds of the first call at twenty new lengths, as torch chooses and without cuDNN,
    which builds a plan for each new shape.
    """
    results: dict[str, object] = {}
    calls = {"plain": (64, 64, False), "masked": (64, 64, True), "decoding": (1, 64, False)}
    for name, (queries, keys, is_masked) in calls.items():
        results[name] = {
            "able": able_kernels(queries, keys, is_masked),
            "by default": default_kernels(queries, keys, is_masked),
        }
    lengths = range(513, 533) if CUDA else range(17, 20)
    results["first calls, as torch chooses"] = first_call_seconds(lengths)
    torch.backends.cuda.enable_cudnn_sdp(False)
    new_lengths = range(lengths.start + 100, lengths.stop + 100)
    results["first calls, without cuDNN"] = first_call_seconds(new_lengths)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return results


def able_kernels(queries: int, keys: int, is_masked: bool) -> list[str]:
    backends = (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )
    able = []
    for backend in backends:
        try:
            with sdpa_kernel(backend):
                attention_seconds(queries, keys, is_masked)
        except RuntimeError:  # this kernel does not take this call
            continue
        able.append(backend.name)
    return able


class AttentionOperators(TorchDispatchMode):
    """Notes the attention operators that torch calls inside a `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator._schema.name
        if "scaled_dot_product" in name:
            self.names.add(name)
        return operator(*args, **(kwargs or {}))


def default_kernels(queries: int, keys: int, is_masked: bool) -> list[str]:
    with AttentionOperators() as operators:
        attention_seconds(queries, keys, is_masked)
    return sorted(operators.names)


def first_call_seconds(lengths: range) -> list[float]:
    return [round(attention_seconds(length, length, False), 6) for length in lengths]


def attention_seconds(queries: int, keys: int, is_masked: bool) -> float:
    """Return the wall seconds of one call of attention: 8 heads of 64, one sequence."""
    device = "cuda" if CUDA else "cpu"
    dtype = torch.bfloat16 if CUDA else torch.float32
    query = torch.randn(1, 8, queries, 64, device=device, dtype=dtype)
    key = torch.randn(1, 8, keys, 64, device=device, dtype=dtype)
    mask = None
    if is_masked:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    is_causal = not is_masked and queries == keys
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=is_causal)
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run(name: str, command: list[str], seconds: float) -> dict[str, object]:
    """Run a command in a process group of its own, which is killed when its time is up."""
    if seconds <= 1:
        return {"name": name, "end": "not begun", "seconds": 0.0, "last": "", "output": ""}
    start = time.monotonic()
    path = str(Path.cwd())
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        end = str(process.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        end = "time is up"
    lines = output.strip().splitlines()
    last_line = lines[-1] if lines else ""
    return {
        "name": name,
        "end": end,
        "seconds": round(time.monotonic() - start, 1),
        "last": last_line[: shutil.get_terminal_size().columns],
        "output": output[-8000:],
    }


if __name__ == "__main__":
    main()
