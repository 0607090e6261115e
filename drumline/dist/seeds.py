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
    """Return a 63-bit seed that depends on all `parts`, as if it were drawn for them.

    The parts are joined by "/", so a part that contains one is the same as two parts. The number 1
    is the same as the text "1".
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, *stream: int) -> None:
    """Seed Python, NumPy and torch (on all devices) for one step.

    `step`: steps done before. `stream`: which stream of random numbers this rank draws from
    (`config.mesh.Mesh.rng_coordinates`). Ranks with the same one draw the same numbers.
    """
    value = derive(seed, step, *stream)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


@contextlib.contextmanager
def use_seed(seed: int | None, device: str = "cpu") -> Iterator[None]:
    """Draw from `seed` inside a `with` block, and restore the state of the generator at its end.

    Only torch's generator of `device` is touched: that of the CPU, or that of the present GPU for
    any "cuda" device. `seed` None: the block draws from the present state, and what is drawn after
    it is the same as without the block.

    torch.random.fork_rng would read the generators of all GPUs, also those of other ranks, which
    takes memory on each.
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
    """A sequence of random numbers of Python, NumPy and torch's CPU generator, from a seed.

    Each block of `use` continues the sequence, whatever is drawn between the blocks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: Any = None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Draw from the sequence inside a `with` block, and restore the generators at its end."""
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
    """Draw from `seed` inside a `with` block, by Python, NumPy and torch on the CPU.

    It is for constructors of modules. All three generators are restored at the end.
    """
    return Draws(seed).use()


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that compute the same bits each time.

    It must be called before CUDA starts, because cuBLAS then reads its environment variable.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
