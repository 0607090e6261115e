"""What is set for a GPU, as far as a CPU can tell: kernels, generators, the allocator, the peaks of a step, what a compressor waits for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.dist.seeds import use_seed
from drumline.launch import environment as environment_of_launchers
from drumline.train import build
from tests.harness import ROOT, environment, source_path


def a_plan(tf32: bool, compiled: bool, rolls_out: bool) -> Any:
    algorithm = SimpleNamespace(rollout=SimpleNamespace() if rolls_out else None)
    config = SimpleNamespace(
        precision=SimpleNamespace(tf32=tf32),
        algorithm=algorithm,
        compile=SimpleNamespace(enabled=compiled),
    )
    return SimpleNamespace(config=config, fixed_width=8 if compiled else None)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize(
    ("compiled", "rolls_out", "cudnn"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_kernels(tf32: bool, compiled: bool, rolls_out: bool, cudnn: bool) -> None:
    """TF32 is said to products and to convolutions; cuDNN's attention is kept where all batches are of one width."""
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    try:
        build.set_kernels(a_plan(tf32, compiled, rolls_out))
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
        torch.backends.cuda.enable_cudnn_sdp(before[2])


def test_drawing_touches_one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any, **__: Any) -> None:
        raise AssertionError("a GPU's generator was asked")

    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, taken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.get_rng_state()
    with use_seed(3):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with use_seed(3):
        assert torch.equal(torch.rand(4), first)
    package = Path(build.__file__).parents[1]
    of_gpus = re.compile(r"fork_rng\((?!devices=\[\]\))")
    assert not [path.name for path in package.rglob("*.py") if of_gpus.search(path.read_text())]


@pytest.mark.parametrize("said", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("nvml", ["libc.so.6", "libnot-there.so.1"])
def test_segments_expand_unless_somebody_said_otherwise(
    said: str | None, nvml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where NVML cannot be loaded, without which torch crashes at the first segment."""
    from drumline.cli import main

    monkeypatch.setattr(environment_of_launchers, "NVML", nvml)

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    if said:
        monkeypatch.setenv(said, "max_split_size_mb:64")
    with pytest.raises(SystemExit):
        main(["--version"])
    set_to = {name: value for name, value in os.environ.items() if name.endswith("_ALLOC_CONF")}
    expected: dict[str, str] = {}
    if said:
        expected = {said: "max_split_size_mb:64"}
    elif nvml == "libc.so.6":
        expected = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert set_to == expected


def test_processes_of_tests_keep_the_path_that_was_given() -> None:
    there = environment({"PYTHONPATH": "/wheels", "HOME": "/h"}, gpu=True)
    assert (
        there["PYTHONPATH"] == f"{source_path(ROOT)}{os.pathsep}/wheels"
        and "OMP_NUM_THREADS" not in there
        and there["HOME"] == "/h"
    )
    assert (
        environment({}, gpu=False)["PYTHONPATH"] == source_path(ROOT)
        and environment({}, gpu=False)["OMP_NUM_THREADS"] == "1"
    )
