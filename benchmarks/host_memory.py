"""Peak host memory of each rank while something runs: shared by load_memory.py and checkpoint_memory.py. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import status_bytes, write


class Peak:
    """Bytes above what was in use at the start. `anonymous`: memory of the process's own, sampled each millisecond; `resident`: with the
    pages of mapped files (the kernel's own high-water mark), which it gives back when memory is short."""

    def __init__(self) -> None:
        self.anonymous = self.resident = 0


@contextlib.contextmanager
def watched() -> Iterator[Peak]:
    peak, done = Peak(), threading.Event()
    # Writing 5 sets the kernel's high-water mark back to the present resident set (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    resident, anonymous = status_bytes("VmHWM"), status_bytes("RssAnon")

    def sample() -> None:
        while not done.wait(0.001):
            peak.anonymous = max(peak.anonymous, status_bytes("RssAnon") - anonymous)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.resident = status_bytes("VmHWM") - resident


def save_random_model(folder: Path, parameters: float, dtype: str) -> int:
    """Save a random Llama of about that many parameters (21 million at least) as safetensors of `dtype`; returns its bytes in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=max(1, round((parameters - 8192 * 1024) / 12.6e6)),
        num_attention_heads=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(p.numel() * 4 for p in model.parameters())


def on_ranks(script: str, ranks: int, *arguments: object) -> list[dict[str, Any]]:
    """Run `script --rank-work ARGUMENTS` as `ranks` processes over gloo; the JSON that each prints last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, script, "--rank-work", *map(str, arguments)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{script} {arguments} failed on a rank")
    return [json.loads(out.splitlines()[-1]) for out in outs]


def report(setting: dict[str, Any], figures: dict[str, Any], out: Path | None) -> None:
    whole = {"setting": setting, **figures}
    print(json.dumps(whole, indent=2))
    write(whole, out)
