"""Fifteen minutes on a GPU, in parts that stop themselves after four: `make gpu`, or one of them with `make gpu PART=probe`.

    PYTHONPATH=. python benchmarks/gpu.py PART --out FILE.json [--smoke] [--only WORD]

In order of worth:
probe    versions, which attention kernels run, one packed bf16 run against the CPU's losses (about 40 s)
tests    tests/gpu
speed    8B LoRA at 4,096 tokens and 1B full, eager and compiled: tokens/s, MFU, peak against the plan
memory   the memory sweep
kernels  each kernel's values and its effect on one shape, then rollouts of GRPO and PPO, and DPO
peers    calibration, and SFT against a bare loop and TRL

A part writes its file anew whenever a command has printed a line or written figures, also while the command runs: what was seen stays
when the machine goes. `--smoke` runs the same commands at tiny sizes, also on a GPU: tests/fake_gpu/test_gpu_parts.py does so over the
stand-in of one. Without a GPU sizes are always tiny, which shows that the commands work and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN, WITHOUT_NUMBERS

CUDA = torch.cuda.is_available()
SECONDS = 235.0  # of a part
PYTHON = sys.executable
# With a line for each test as soon as it has ended.
PYTEST = [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
# Some tests that the stand-in of a GPU runs in seconds; tests/fake_gpu/test_gpu_tests.py runs all.
QUICK_TESTS = "pinned or stop_the_host or noise"
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
POLL_SECONDS = 0.5
OUTPUT_CHARACTERS = 40_000  # of a command's output, from its end, go into the file


class Command(NamedTuple):
    """`words`: the command line; that of a benchmark gets `--out` when it runs."""

    words: list[str]
    skipped: str = ""  # why it does not run here
    variables: dict[str, str] = {}  # of its environment, besides those of this process


Commands = dict[str, Command]  # by their names
Row = dict[str, Any]  # of the file: what is known of one command


def probe_commands(is_small: bool) -> Commands:
    options = ["--smoke"] if is_small else []
    return {"bf16 losses": Command([PYTHON, "benchmarks/gpu_losses.py", *options])}


def test_commands(is_small: bool) -> Commands:
    losses = {"losses": Command([*PYTEST, "-n", "0", "tests/gpu/test_losses.py"])}
    if not CUDA:
        return losses
    chosen = ["-k", QUICK_TESTS] if is_small else []
    rest = [*PYTEST, "-n", "4", "tests/gpu", "--ignore", "tests/gpu/test_losses.py", *chosen]
    return {**losses, "the other tests of tests/gpu": Command(rest)}


def speed_commands(is_small: bool) -> Commands:
    return {"speed": sweep_command("speed", is_small)}


def memory_commands(is_small: bool) -> Commands:
    if CUDA:
        return {"memory sweep": sweep_command("memory", is_small)}
    return {"losses' memory": losses_command(is_small)}


def kernel_commands(is_small: bool) -> Commands:
    """Each kernel's values, attention by documents, one shape with each of the others; rollouts."""
    shape = "tiny" if is_small else "1b"
    commands: Commands = {}
    if CUDA:
        values = ["tests/gpu/test_kernels.py", "tests/gpu/test_attention.py"]
        chosen = ["-k", QUICK_TESTS] if is_small else []
        commands["values"] = Command([*PYTEST, "-n", "0", *values, *chosen])
    size = ["--smoke"] if is_small else ["--length", "4096"]
    packed_attention = [PYTHON, "benchmarks/packed_attention.py", "--model", "tiny", *size]
    commands["attention by documents"] = Command(packed_attention)
    commands["grpo"] = rl_command("grpo", is_small)
    for name, (key, skipped) in kernels_beside_torchs().items():
        command = sft_command(shape, *key, contenders=["drumline"], is_small=is_small)
        commands[f"SFT {shape} {name}"] = command._replace(skipped=skipped)
    commands["ppo"] = rl_command("ppo", is_small)
    commands["dpo"] = rl_command("dpo", is_small)
    return commands


def kernels_beside_torchs() -> dict[str, tuple[list[str], str]]:
    """Return by name the options of sft_vs_peers.py, and why they cannot run here, if they cannot."""
    kernels: dict[str, tuple[list[str], str]] = {"plain": ([], "")}
    if CUDA:
        needs_compiled_code = f"needs {COMPILED_CODE}" if IS_STAND_IN else ""
        needs_liger = missing("liger_kernel") or needs_compiled_code
        kernels["fp8"] = (["--set=precision=fp8"], missing("torchao"))
        kernels["liger"] = (["--set=model.kernels=liger"], needs_liger)
        kernels["compiled"] = (["--set=compile.enabled=true"], needs_compiled_code)
    return kernels


def missing(package: str) -> str:
    """Return that a package is not installed; nothing if it is."""
    return "" if find_spec(package) else f"{package} is not installed"


def why_without_trl() -> str:
    """Return why nothing is compared with TRL, whose trainers take kernels of Triton on a GPU."""
    return missing("trl") or (f"needs {COMPILED_CODE}" if IS_STAND_IN else "")


def peer_commands(is_small: bool) -> Commands:
    if not CUDA:
        tiny = sft_command("tiny", "--packed", "--lora", contenders=["drumline"], is_small=True)
        return {"SFT tiny packed LoRA": tiny, "losses": losses_command(is_small)}
    calibrate = [PYTHON, "-m", "drumline", "calibrate", "--quick"]
    commands: Commands = {"calibrate": Command(calibrate, variables=WITHOUT_NUMBERS)}
    contenders = ["drumline", "bare"]
    if not why_without_trl():
        contenders.append("trl")
    for name in ("1b", "8b"):
        shape = "tiny" if is_small else name
        checkpointing = ["--checkpointing"] if name == "8b" else []
        for kind, options in {"full": [], "LoRA": ["--lora"], "packed": ["--packed"]}.items():
            commands[f"SFT {name} {kind}"] = sft_command(
                shape, *options, *checkpointing, contenders=contenders, is_small=is_small
            )
    commands["losses"] = losses_command(is_small)
    return commands


# In order of worth: whoever has a machine for minutes runs the first ones.
PARTS: dict[str, Callable[[bool], Commands]] = {
    "probe": probe_commands,
    "tests": test_commands,
    "speed": speed_commands,
    "memory": memory_commands,
    "kernels": kernel_commands,
    "peers": peer_commands,
}


def sweep_command(runs: str, is_small: bool) -> Command:
    """Return the command of a list of runs against their plans."""
    size = ["--smoke"] if is_small else []
    return Command([PYTHON, "benchmarks/gpu_memory_sweep.py", "--list", runs, *size])


def rl_command(algorithm: str, is_small: bool) -> Command:
    """Return the command of one round of an algorithm, against its peer if there is one."""
    contenders = "drumline"
    if algorithm == "ppo":
        contenders = "drumline,bare"  # TRL has no PPO any more
    elif not why_without_trl():
        contenders = "drumline,trl"
    size = ["--smoke"] if is_small else ["--shape", "1b", "--steps", "4"]
    words = [PYTHON, "benchmarks/rl_vs_peers.py", "--algorithm", algorithm, "--rounds", "1"]
    return Command([*words, "--contenders", contenders, *size])


def sft_command(shape: str, *options: str, contenders: list[str], is_small: bool) -> Command:
    """Return the command of one round of SFT of a shape by each of the contenders."""
    size = ["--length", "64", "--steps", "2"] if is_small else ["--length", "2048", "--steps", "6"]
    words = [PYTHON, "benchmarks/sft_vs_peers.py", "--shape", shape, "--rounds", "1"]
    return Command([*words, "--contenders", ",".join(contenders), *size, *options])


def losses_command(is_small: bool) -> Command:
    """Return the command of the chunked cross-entropy against the plain one."""
    size = ["--smoke"] if is_small else []
    return Command([PYTHON, "benchmarks/chunked_cross_entropy.py", *size])


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
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, also on a GPU; the commands are the same"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the command
    ends = time.monotonic() + options.seconds
    rows: list[Row] = []
    figures: dict[str, Any] = {
        "part": options.part,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "versions": installed_versions(),
        "without_trl": why_without_trl(),
    }
    if options.part == "probe":
        write({**figures, "runs": rows}, options.out)
        figures["attention"] = attention_kernels()
    write({**figures, "runs": rows}, options.out)
    print(json.dumps(figures, indent=1), flush=True)

    def note(row: Row) -> None:
        write({**figures, "runs": [*rows, row]}, options.out)

    is_small = options.smoke or not CUDA
    for name, command in PARTS[options.part](is_small).items():
        if options.only not in name:
            continue
        row = run(name, command, ends - time.monotonic(), note)
        rows.append(row)
        print(f"{name:40} {row['end']:>10} {row['seconds']!s:>8} s  {row['last']}", flush=True)
    has_failed = any(row["end"] not in ("0", "skipped") for row in rows)
    sys.exit(has_failed)


def write(figures: dict[str, Any], out: Path) -> None:
    """Write the figures so that the file is whole at any moment, also when the machine goes."""
    beside = out.with_name(out.name + ".part")
    with beside.open("w") as file:
        file.write(json.dumps(figures, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(out)


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


def run(name: str, command: Command, seconds: float, note: Callable[[Row], None]) -> Row:
    """Run a command in a process group of its own, which is killed when its time is up.

    `note` gets what is known so far, whenever the command has printed or written something new.
    """
    row: Row = {"name": name, "end": "", "seconds": 0.0, "last": "", "output": ""}
    if command.skipped:
        row |= {"end": "skipped", "last": command.skipped}
    elif seconds <= 1:
        row["end"] = "not begun"
    else:
        with tempfile.TemporaryDirectory() as folder:
            row = follow(row, command, seconds, note, Path(folder))
    note(row)
    return row


def follow(
    row: Row, command: Command, seconds: float, note: Callable[[Row], None], folder: Path
) -> Row:
    """Return what is known of a command when it has ended or its time is up."""
    start = time.monotonic()
    output = folder / "output.txt"
    figures = folder / "figures.json"
    words = command.words
    if any(word.startswith("benchmarks/") for word in words):
        words = [*words, "--out", str(figures)]
    with output.open("w") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.variables, **variables()},
            start_new_session=True,
        )
    end = "running"
    seen = None
    try:
        while end == "running":
            try:
                end = str(process.wait(POLL_SECONDS))
            except subprocess.TimeoutExpired:
                if time.monotonic() > start + seconds:
                    end = "time is up"
                    break
            told = (read(output), read(figures))
            if told != seen:
                seen = told
                note(described(row, end, start, *told))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return described(row, end, start, read(output), read(figures))


def variables() -> dict[str, str]:
    """Return what each command's environment has: this checkout first, lines as they are printed."""
    path = str(Path.cwd())
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def read(path: Path) -> str:
    """Return the text of a file, or nothing where it is not there yet."""
    if not path.exists():
        return ""
    return path.read_text(errors="replace")


def described(row: Row, end: str, start: float, output: str, figures: str) -> Row:
    """Return a row with how its command ended, its output, and its figures if it gave any so far."""
    lines = [line for line in output.splitlines() if len(line.strip()) > 2]  # brackets say nothing
    last_line = lines[-1] if lines else ""
    described = {
        **row,
        "end": end,
        "seconds": round(time.monotonic() - start, 1),
        "last": last_line[: shutil.get_terminal_size().columns],
        "output": output[-OUTPUT_CHARACTERS:],
    }
    if figures:
        described["figures"] = json.loads(figures)
    return described


if __name__ == "__main__":
    main()
