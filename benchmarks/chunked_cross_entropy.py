"""The chunked cross-entropy against the plain one: peak memory and time of loss and gradients, each case in a fresh process.

    python benchmarks/chunked_cross_entropy.py [--tokens 4096] [--vocabulary 49152] [--hidden 576] [--chunk 1024] [--learned 1.0]
                                               [--device cpu] [--precision fp32] [--repeats 3] [--rounds 3] [--smoke] [--out FILE]

Plain: logits = hidden @ weightᵀ, in fp32 for torch's cross_entropy, and autograd's backward. Chunked: drumline.models.losses.
Both start from the same fp32 hidden states and weight and end with their gradients; bf16 and fp16 run under autocast. `--learned` is the
part of the tokens that carry loss (1 in pretraining, less in SFT); the chunked one leaves the others out before the product.

Peak memory is what a case takes on top of hidden states and weight: on a CPU the growth of the resident set's high-water mark (Linux), on
a GPU that of the allocator. Plain and chunked take turns for `--rounds`; the seconds given are the least of `--repeats` after one warm-up,
and of all rounds: whatever else runs on the machine can only add to them. cpu_seconds are the process's own, summed over its threads.
`runs` has all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common

CASES = ("plain", "chunked")
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--learned", type=float, default=1.0)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU where there is one"
    )
    parser.add_argument(
        "--precision", choices=("fp32", *AUTOCAST), help="default: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = common.parse(
        parser, tokens=64, vocabulary=256, hidden=16, chunk=32, repeats=1, rounds=1
    )
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    if options.case:
        print(json.dumps(measure(options)))
        return
    report = compare(options)
    print(json.dumps(report, indent=2))
    common.write(report, options.out)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cases in turn; the least of each figure, and ratios of those."""
    setting = {
        key: getattr(options, key)
        for key in (
            "tokens",
            "vocabulary",
            "hidden",
            "chunk",
            "learned",
            "device",
            "precision",
            "repeats",
        )
    }
    flags = [part for key, value in setting.items() for part in (f"--{key}", str(value))]
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(options.rounds):
        for case in CASES:
            done = subprocess.run(
                [sys.executable, __file__, "--case", case, *flags],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
            runs[case].append(json.loads(done.stdout.splitlines()[-1]))
            print(case, runs[case][-1], file=sys.stderr)
    best = {
        case: {key: min(run[key] for run in rows) for key in rows[0]} for case, rows in runs.items()
    }
    plain, chunked = best["plain"], best["chunked"]
    return {
        "setting": setting | {"rounds": options.rounds},
        "least": best,
        "ratios": {
            f"{key} chunked / plain": chunked[key] / plain[key]
            for key in ("seconds", "cpu_seconds", "peak_bytes")
        },
        "relative differences": {
            key: abs(chunked[key] - plain[key]) / abs(plain[key])
            for key in ("loss_sum", "grad_norm")
        },
        "runs": runs,
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One case, in this process: peak_bytes, seconds, and the loss and gradient norm that it came to."""
    import torch

    from drumline.models.losses import LinearHead, linear_cross_entropy

    device = options.device
    common.use_device(device)
    torch.manual_seed(0)
    hidden_ND = torch.randn(options.tokens, options.hidden, device=device).requires_grad_()
    weight_VD = (
        0.02 * torch.randn(options.vocabulary, options.hidden, device=device)
    ).requires_grad_()
    targets_N = torch.randint(options.vocabulary, (options.tokens,), device=device)
    targets_N[torch.rand(options.tokens, device=device) >= options.learned] = -100
    chunk = options.chunk if options.case == "chunked" else 0
    dtype = getattr(torch, AUTOCAST[options.precision]) if options.precision in AUTOCAST else None

    def step() -> float:
        with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
            loss_sum, _ = linear_cross_entropy(hidden_ND, LinearHead(weight_VD), targets_N, chunk)
        loss_sum.backward()
        return loss_sum.item()

    high_water = _peak_of(device)
    seconds, cpu_seconds = [], []
    for _ in range(options.repeats + 1):
        hidden_ND.grad = weight_VD.grad = None
        began, cpu_began = time.perf_counter(), time.process_time()
        loss_sum = step()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    assert hidden_ND.grad is not None and weight_VD.grad is not None
    norm = float(torch.stack([hidden_ND.grad.norm(), weight_VD.grad.norm()]).norm())
    times = {"seconds": min(seconds[1:]), "cpu_seconds": min(cpu_seconds[1:])}
    return {"peak_bytes": high_water(), **times, "loss_sum": loss_sum, "grad_norm": norm}


def _peak_of(device: str) -> Callable[[], float]:
    """Start to watch memory; calling the result gives the bytes that the peak lay above what was in use at the start."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        return lambda: float(torch.cuda.max_memory_allocated() - start)
    # Writing 5 sets the kernel's high-water mark back to the present resident set (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    start = common.status_bytes("VmHWM")
    return lambda: float(common.status_bytes("VmHWM") - start)


if __name__ == "__main__":
    main()
