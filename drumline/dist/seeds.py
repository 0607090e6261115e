"""Random numbers as a function of (seed, step, rank): no generator state is saved, and a resumed step draws what it would have drawn."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from any parts; equal parts give equal seeds, different parts independent ones."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, *stream: int) -> None:
    """Seed python, numpy and torch (all devices) for one step of one stream of random numbers (`plan.mesh.Mesh.stream`)."""
    value = derive(seed, step, *stream)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


@contextlib.contextmanager
def drawing(seed: int | None, device: str = "cpu") -> Iterator[None]:
    """Within, what is drawn on `device` comes from `seed` (None: from wherever it would); afterwards its generator is as it was. Other
    generators, those of other ranks' GPUs above all, are not touched: reading the state of one takes hold of the device."""
    on_gpu = torch.device(device).type == "cuda"  # the meta device draws nothing
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else torch.default_generator
    before = generator.get_state()
    try:
        if seed is not None:
            generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(before)


@contextlib.contextmanager
def constructing(seed: int) -> Iterator[None]:
    """Within, a constructor draws from `seed`, whichever of python, numpy and torch's CPU generator it draws from."""
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with drawing(seed):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def deterministic() -> None:
    """Only kernels that give the same bits each time. Call before CUDA starts (cuBLAS reads its variable then)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
