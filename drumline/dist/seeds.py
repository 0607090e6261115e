"""Random numbers as a function of (seed, step, rank): no generator state is saved, and a resumed step draws what it would have drawn."""

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
    generator = (
        torch.cuda.default_generators[torch.cuda.current_device()]
        if on_gpu
        else torch.default_generator
    )
    before = generator.get_state()
    try:
        if seed is not None:
            generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(before)


class Draws:
    """Random numbers of python, numpy and torch's CPU generator from a seed. They go on from one use to the next, whatever is drawn in
    between."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: Any = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within, what is drawn is drawn from here; afterwards the generators are as they were."""
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


def constructing(seed: int) -> contextlib.AbstractContextManager[None]:
    """Within, a constructor draws from `seed`, whichever of python, numpy and torch's CPU generator it draws from."""
    return Draws(seed).used()


def deterministic() -> None:
    """Only kernels that give the same bits each time. Call before CUDA starts (cuBLAS reads its variable then)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
