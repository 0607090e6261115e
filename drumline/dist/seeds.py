"""Random numbers as a function of (seed, step, rank).

No state of a generator is saved: a resumed step draws what it would have drawn anyhow.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed for any parts: equal for equal parts, independent for different ones."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, *stream: int) -> None:
    """Seed python, numpy and torch (all devices) for one step.

    `stream`: of random numbers, one for each rank that draws its own (`plan.mesh.Mesh.stream`).
    """
    value = derive(seed, step, *stream)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


@contextlib.contextmanager
def use_seed(seed: int | None, device: str = "cpu") -> Iterator[None]:
    """Let what is drawn on `device` inside the block come from `seed`; then restore the generator.

    `seed` None: the block draws as it would without this. Other generators are not touched, above
    all those of other ranks' GPUs: to read the state of one takes memory on that GPU.
    """
    generator = torch.default_generator
    if torch.device(device).type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_state()
    try:
        if seed is not None:
            generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(before)


class Draws:
    """Random numbers of Python, NumPy and torch's CPU generator from a seed.

    They go on from one use to the next, whatever is drawn in between.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: Any = None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Draw from these numbers inside the block, and restore the generators then."""
        before = _states()
        if self.states is None:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.default_generator.manual_seed(self.seed)
        else:
            _restore(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _restore(before)


def _states() -> Any:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def use_host_seed(seed: int) -> contextlib.AbstractContextManager[None]:
    """Let a constructor inside the block draw from `seed`: by Python, NumPy or torch on the CPU."""
    return Draws(seed).use()


def use_deterministic_kernels() -> None:
    """Use only kernels that give the same bits each time.

    Call it before CUDA starts, which is when cuBLAS reads its variable.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
