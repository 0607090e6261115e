"""How far two runs lie apart: their losses, gradient norms, and every tensor of their last checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import CheckpointError
from drumline.report.events import read, series

PORTION = 64 * 2**20  # entries read at once
SMALLEST_NORM = 1e-12  # a tensor of zeros has no relative difference
# The loss of a policy is a mean of advantages, which cancel to nothing at the first step: what is left is rounding.
SMALLEST_LOSS = 0.1


@dataclass(frozen=True)
class Difference:
    """Largest relative differences. Of figures: |a − b| / |b| of a step. Of tensors: ‖a − b‖ / ‖b‖ (L2 norms, in fp64) of one tensor.

    `moments` None: the optimizer has none. `worst`: the name of the tensor that lies furthest apart.
    """

    loss: float
    grad_norm: float
    weights: float
    moments: float | None
    worst: str

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.weights, self.moments or 0.0)


def difference(run: Path, reference: Path) -> Difference:
    """Of two finished runs of the same work. Raises CheckpointError where one of them has no whole checkpoint, or another set of tensors.

    Checkpoints are read in portions: two models need not fit into memory.
    """
    past, expected = read(run / "events.jsonl"), read(reference / "events.jsonl")
    least = {"loss": SMALLEST_LOSS, "grad_norm": 1e-30}
    figures = {key: _figures(series(past, key), series(expected, key), floor) for key, floor in least.items()}
    by_tensor = dict(_tensors(run, reference))
    # Of the policy, and of another role that learns (value/model.…).
    weights = {name: d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("model.")}
    moments = [d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("optim.")]
    return Difference(
        loss=figures["loss"],
        grad_norm=figures["grad_norm"],
        weights=max(weights.values()),
        moments=max(moments) if moments else None,
        worst=max(by_tensor, key=lambda name: by_tensor[name]),
    )


def _figures(mine: dict[int, float], reference: dict[int, float], floor: float) -> float:
    """Relative to the reference, or to `floor` where that is larger. Infinite where a step is missing on one side, or a figure is not
    finite."""
    if mine.keys() != reference.keys() or not mine:
        return float("inf")
    apart = [abs(mine[step] - value) / max(abs(value), floor) for step, value in reference.items()]
    return max((d if d == d else float("inf")) for d in apart)


def _tensors(run: Path, reference: Path) -> Iterator[tuple[str, float]]:
    import torch

    from drumline.checkpoint.load import check, load, newest

    folders = []
    for folder in (run, reference):
        path = newest(folder / "checkpoints", verify=True, alone=True).path
        if path is None:
            raise CheckpointError("the run left no whole checkpoint", where=str(folder))
        folders.append(path)
    named = [check(path, verify=False, alone=True).tensors for path in folders]
    # What a strategy keeps for itself (DiLoCo's outer momentum) has no match in one process.
    names = [{n for n in tensors if n.startswith(("model.", "optim."))} for tensors in named]
    if names[0] != names[1]:
        apart = sorted(names[0] ^ names[1])
        raise CheckpointError(f"one of the checkpoints lacks {apart[0]} ({len(apart)} such)", where=str(run))
    for together in _portions({name: named[1][name].shape for name in sorted(names[0])}):
        pair = []
        for path, tensors in zip(folders, named, strict=True):
            read = {n: torch.empty(tensors[n].shape, dtype=getattr(torch, tensors[n].dtype)) for n in together}
            load(path, read, alone=True, partly=True)
            pair.append(read)
        for name in together:
            mine, expected = (side[name].double() for side in pair)
            norm = float(torch.linalg.vector_norm(expected))
            yield name, float(torch.linalg.vector_norm(mine - expected)) / max(norm, SMALLEST_NORM)


def _portions(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    """Names in portions of at most PORTION entries, one at least."""
    portion: list[str] = []
    entries = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if portion and entries + size > PORTION:
            yield portion
            portion, entries = [], 0
        portion.append(name)
        entries += size
    yield portion
