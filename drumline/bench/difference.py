"""The difference of two runs: of their losses, gradient norms, and every tensor of their last checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import CheckpointError
from drumline.telemetry.events import read, series

PORTION = 64 * 2**20  # entries read at once
SMALLEST_NORM = 1e-12  # a tensor of zeros has no relative difference
# The loss of a policy is a mean of advantages, which cancel to nothing at the first step: what is left is rounding.
SMALLEST_LOSS = 0.1
# A tensor with so small a share of the gradient's norm has nothing but rounding for a gradient.
ROUNDING = 1e-5
SECOND = ".exp_avg_sq"


@dataclass(frozen=True)
class Difference:
    """Largest relative differences. Of metrics: |a − b| / |b| of a step. Of tensors: ‖a − b‖ / ‖b‖ (L2 norms, in fp64) of one tensor.

    `moments` None: the optimizer has none. `worst`: the name of the tensor with the largest distance. `noise`: weights whose true gradient
    is 0, such as the biases of attention's keys, which cancel in softmax. Adam makes full steps of their rounding, which differ with the
    strategy and change no output; so the distance of such weights is multiplied by their share of the gradient, that of their moments is
    relative to the norm of all moments. Such entries of a vector (GPT-2 has one bias of queries, keys and values) are left out.
    """

    loss: float
    grad_norm: float
    weights: float
    moments: float | None
    worst: str
    noise: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.weights, self.moments or 0.0)


def difference(run: Path, reference: Path) -> Difference:
    """The difference of two finished runs of the same work. It reads checkpoints in portions: two models need not fit into memory.
    Raises CheckpointError where one has no whole checkpoint, or another set of tensors."""
    past, expected = read(run / "events.jsonl"), read(reference / "events.jsonl")
    partly: list[str] = []
    by_tensor, noise = _distances(list(_tensors(run, reference, partly)))
    # Of the policy, and of another trainable model (value/model.…).
    weights = {name: d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("model.")}
    moments = [d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("optim.")]
    return Difference(
        loss=_largest_difference(series(past, "loss"), series(expected, "loss"), SMALLEST_LOSS),
        grad_norm=_largest_difference(series(past, "grad_norm"), series(expected, "grad_norm"), 1e-30),
        weights=max(weights.values()),
        moments=max(moments) if moments else None,
        worst=max(by_tensor, key=lambda name: by_tensor[name]),
        noise=tuple(sorted({*noise, *partly})),
    )


def _distances(tensors: list[tuple[str, float, float, float]]) -> tuple[dict[str, float], tuple[str, ...]]:
    """(name, ‖a − b‖, ‖b‖, Σ|b|) of all tensors → the relative difference of each, and those weights whose gradient is `noise`."""
    squares = {name.removesuffix(SECOND): total for name, _, _, total in tensors if name.endswith(SECOND)}
    whole = sum(squares.values())
    shares = {name.replace("optim.", "model.", 1): math.sqrt(square / whole) for name, square in squares.items() if whole}
    noise = {name: share for name, share in shares.items() if share <= ROUNDING}
    all_of_slot: dict[str, float] = {}
    for name, _, norm, _ in tensors:
        slot = name.rpartition(".")[2]
        all_of_slot[slot] = math.hypot(all_of_slot.get(slot, 0.0), norm)
    distances = {}
    for name, apart, norm, _ in tensors:
        weight, _, slot = name.replace("optim.", "model.", 1).rpartition(".")
        if name in noise:
            distances[name] = apart * noise[name]
        elif name.rpartition("/")[2].startswith("optim.") and weight in noise:
            distances[name] = apart / max(all_of_slot[slot], SMALLEST_NORM)
        else:
            distances[name] = apart / max(norm, SMALLEST_NORM)
    return distances, tuple(sorted(noise))


def _largest_difference(mine: dict[int, float], reference: dict[int, float], floor: float) -> float:
    """Relative to the reference, or to `floor` where that is larger. Infinite where a step is missing on one side, or a number is not
    finite."""
    if mine.keys() != reference.keys() or not mine:
        return float("inf")
    apart = [abs(mine[step] - value) / max(abs(value), floor) for step, value in reference.items()]
    return max((d if d == d else float("inf")) for d in apart)


def _tensors(run: Path, reference: Path, partly: list[str]) -> Iterator[tuple[str, float, float, float]]:
    """(name, ‖a − b‖, ‖b‖, Σ|b|); entries of vectors whose gradient is rounding count as 0, and `partly` names these vectors."""
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
        rounded = {n.removesuffix(SECOND): _rounded(pair[1][n]) for n in together if n.endswith(SECOND) and pair[1][n].ndim == 1}
        partly += [_weight(f"{n}{SECOND}") for n, mask in rounded.items() if mask.any()]
        for name in together:
            mine, expected = (side[name].double() for side in pair)
            mask = rounded.get(_weight(name).replace("model.", "optim.", 1))
            if mask is not None and mask.shape == mine.shape:
                mine, expected = mine.masked_fill(mask, 0.0), expected.masked_fill(mask, 0.0)
            norm = float(torch.linalg.vector_norm(expected))
            yield name, float(torch.linalg.vector_norm(mine - expected)), norm, float(expected.abs().sum())


def _weight(name: str) -> str:
    """The weight that a tensor is, or is a moment of."""
    return name if "optim." not in name else name.replace("optim.", "model.", 1).rpartition(".")[0]


def _rounded(second: Any) -> Any:
    """bool: entries whose gradient is rounding beside the largest of their tensor, as in one bias of queries, keys and values."""
    return (second > 0) & (second <= ROUNDING**2 * second.max())


def _portions(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    """Names in portions of at most PORTION entries, a weight with its moments at least."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(_weight(name), []).append(name)
    portion, entries = list[str](), 0
    for names in groups.values():
        size = sum(math.prod(shapes[name]) for name in names)
        if portion and entries + size > PORTION:
            yield portion
            portion, entries = [], 0
        portion += names
        entries += size
    yield portion
