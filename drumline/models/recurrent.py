"""Recurrent layers by documents: nothing passes from one document of a pack to the next.

Layers such as Mamba-2 (Dao and Gu 2024), gated DeltaNet (Yang et al. 2024) and short convolutions
mix the tokens of a row without attention, so no mask keeps documents apart. There are two ways to
give them the borders:

- Kernels of flash-linear-attention, causal-conv1d and mamba-ssm take the borders as arguments, and
  compute all rows in one call.
- transformers' torch code takes no borders. Each document becomes a row of its own, with padding
  behind it, which no causal layer sees. Documents of similar lengths run together.

`models.recurrent_trial` finds the layers and chooses the way.

B rows, T tokens of a row; N documents of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.dist.copies import copy_to_device
from drumline.models.blocks import blocks
from drumline.vendor.torch import tree_flatten, tree_unflatten

# The argument by which a model hands the borders of documents to its layers.
BORDERS = "drumline_borders"
# Documents whose lengths are equal after rounding up to a multiple of this run together. A larger
# one saves calls and computes more padding.
LENGTH_STEP = 32


@dataclass(frozen=True)
class SeparatedLayers:
    """Which layers of a model run by documents.

    `classes`: of the layers. `by_kernels`: their kernels take the borders of documents.
    """

    classes: tuple[type[nn.Module], ...]
    by_kernels: bool


@dataclass(frozen=True, eq=False)
class Borders:
    """Where documents lie in the rows of a batch.

    `lengths`: tokens of each document, all rows end to end. Padding behind the last document of a
    row counts to it. `rows`, `width`: B and T. `by_kernels`: see `SeparatedLayers`. `device`: of
    the batch.
    """

    lengths: tuple[int, ...]
    rows: int
    width: int
    by_kernels: bool
    device: torch.device

    @cached_property
    def bounds_N(self) -> Tensor:  # noqa: N802 - letters of dimensions
        """Where documents begin in all rows end to end, and B × T at the end: int32[N + 1]."""
        bounds = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        return copy_to_device(self.device, bounds)

    @cached_property
    def document_1T(self) -> Tensor:  # noqa: N802 - letters of dimensions
        """The number of each token's document, int32[1, B × T]."""
        places = torch.arange(self.rows * self.width, dtype=torch.int32, device=self.device)
        numbers = torch.bucketize(places, self.bounds_N, right=True, out_int32=True) - 1
        return numbers[None]

    def groups(self) -> dict[int, list[int]]:
        """Return length → numbers of the documents that run together, padded to that length."""
        groups: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            steps = -(-length // LENGTH_STEP)
            padded_length = min(steps * LENGTH_STEP, self.width)
            groups.setdefault(padded_length, []).append(number)
        return groups


def borders_of(model: Any, batch: Any, may_use_kernels: bool = True) -> Borders | None:
    """Return the borders that a model's layers need for a batch.

    None if no layer is separated (`separate`), or if no row has a second document. Without
    `may_use_kernels` documents run one by one.
    """
    separated: SeparatedLayers | None = getattr(model, "_drumline_separated", None)
    rows = getattr(batch, "document_lengths", None)
    if separated is None or rows is None or all(len(row) <= 1 for row in rows):
        return None
    row_count, width = batch.input_ids_BT.shape
    lengths: list[int] = []
    for row in rows:
        padding = width - sum(row)
        *before, last = row or (0,)
        lengths += [*before, last + padding]
    by_kernels = separated.by_kernels and may_use_kernels
    return Borders(tuple(lengths), row_count, width, by_kernels, batch.input_ids_BT.device)


def separate(model: Any, separated: SeparatedLayers) -> None:
    """Let the layers of some classes run by documents if the model is given `Borders`."""
    model._drumline_separated = separated
    for layer in separated_layers(model):
        layer.forward = partial(_run_by_documents, layer.forward)


def separated_layers(model: nn.Module) -> list[Any]:
    """Return the layers that run by documents."""
    separated: SeparatedLayers | None = getattr(model, "_drumline_separated", None)
    if separated is None:
        return []
    return layers_of_classes(model, separated.classes)


def layers_of_classes(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[Any]:
    """Return the layers within blocks that are of some classes.

    Each is there once, although a block may lie within another one.
    """
    found: dict[nn.Module, None] = {}
    for block in blocks(model):
        for layer in block.modules():
            if isinstance(layer, classes):
                found[layer] = None
    return list(found)


def modules_in_separated_layers(model: nn.Module) -> set[nn.Module]:
    """Return the modules within layers that run by documents.

    In one forward they run once for each length of documents, on each rank a different number of
    times. So a strategy must not gather weights or wait for other ranks when one of them runs.
    """
    within: set[nn.Module] = set()
    for layer in separated_layers(model):
        within |= set(layer.modules()) - {layer}
    return within


def separate_alike(model: Any, copy: Any) -> None:
    """Let the layers of a copy of a model run by documents as those of the model do."""
    separated: SeparatedLayers | None = getattr(model, "_drumline_separated", None)
    if separated is not None:
        separate(copy, separated)


def describe_layers(model: Any) -> list[str]:
    """Return in one line, for the user, what code a model's recurrent layers run; none without any.

    It says what this host has installed: on a GPU, a rank tries the kernels.
    """
    from drumline.vendor.transformers import kernel_packages

    packages = kernel_packages(type(model))
    separated: SeparatedLayers | None = getattr(model, "_drumline_separated", None)
    missing = sorted(name for name, is_used in packages.items() if not is_used)
    if packages and not missing:
        return [f"recurrent layers run kernels of {' and '.join(sorted(packages))}"]
    parts = []
    if missing:
        parts.append(
            f"recurrent layers run transformers' own torch code; install {' and '.join(missing)}"
            " for faster kernels on a GPU"
        )
    if separated is not None:
        names = sorted(layer.__name__ for layer in separated.classes)
        parts.append(f"{' and '.join(names)} runs on each document of a pack by itself")
    if not parts:
        return []
    return ["; ".join(parts)]


def _run_by_documents(forward: Any, *args: Any, **options: Any) -> Any:
    """Run the forward of a layer, by documents if `options` has borders."""
    borders: Borders | None = options.pop(BORDERS, None)
    if borders is None:
        return forward(*args, **options)
    if borders.by_kernels:
        return _run_uncompiled(run_with_borders, forward, borders, args, options)
    return _run_uncompiled(run_each_document, forward, borders, args, options)


@torch.compiler.disable
def _run_uncompiled(function: Any, *args: Any) -> Any:
    """Call a function outside of a compiled graph: each pack has documents of other lengths."""
    return function(*args)


def run_with_borders(
    forward: Any, borders: Borders, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run a layer on all rows end to end as one, and give its kernels the borders.

    `args`, `options`: the layer's arguments.
    """
    leaves, structure = tree_flatten((args, options))
    _require_rows(leaves, borders)
    joined = []
    for leaf in leaves:
        if is_by_token(leaf, borders):
            leaf = _rows_end_to_end(leaf, borders)[None]
        joined.append(leaf)
    joined_args, joined_options = tree_unflatten(joined, structure)
    joined_options["cu_seq_lens_q"] = borders.bounds_N
    joined_options["seq_idx"] = borders.document_1T
    out = forward(*joined_args, **joined_options)
    by_token = first_tensor(out)[0]
    return replace_first(out, by_token.unflatten(0, (borders.rows, borders.width)))


def run_each_document(
    forward: Any, borders: Borders, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run a layer on each document by itself, and return the results in the batch's rows.

    `args`, `options`: the layer's arguments. Raises ValueError for an argument that is of a whole
    row, such as a mask of pairs of tokens, or of a class that is not known.
    """
    leaves, structure = tree_flatten((args, options))
    _require_rows(leaves, borders)
    # For each argument its documents; None for one that all documents share.
    by_document: list[Sequence[Tensor] | None] = []
    for leaf in leaves:
        if is_by_token(leaf, borders):
            by_document.append(_rows_end_to_end(leaf, borders).split(borders.lengths))
        else:
            _require_shared(leaf, borders.width)
            by_document.append(None)
    results: dict[int, Tensor] = {}
    out: Any = None
    for length, numbers in borders.groups().items():
        of_group = []
        for leaf, documents in zip(leaves, by_document, strict=True):
            if documents is not None:
                leaf = _stack_padded([documents[number] for number in numbers], length)
            of_group.append(leaf)
        group_args, group_options = tree_unflatten(of_group, structure)
        out = forward(*group_args, **group_options)
        for number, padded in zip(numbers, first_tensor(out).unbind(), strict=True):
            results[number] = padded[: borders.lengths[number]]
    in_order = torch.cat([results[number] for number in range(len(borders.lengths))])
    return replace_first(out, in_order.unflatten(0, (borders.rows, borders.width)))


def is_by_token(value: Any, borders: Borders) -> bool:
    """Return whether a layer's argument has an entry for each token: [B, T, …] or [1, T, …]."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return False
    rows, width = value.shape[:2]
    return width == borders.width and rows in (1, borders.rows)


def _require_rows(leaves: Sequence[Any], borders: Borders) -> None:
    """Raise ValueError if no argument of a layer has the rows that the borders are of."""
    if not any(is_by_token(leaf, borders) for leaf in leaves):
        raise ValueError(f"no argument has {borders.rows} rows of {borders.width} tokens")


def _require_shared(value: Any, width: int) -> None:
    """Raise ValueError for an argument of a layer that documents do not share.

    Such are tensors of pairs of tokens or of places in a row, and objects whose meaning is not
    known.
    """
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if shape[-1:] == (width,):
            raise ValueError(f"an argument of shape {shape} is of a whole row's tokens")
    elif not isinstance(value, bool | int | float | str | None):
        raise ValueError(f"an argument of class {type(value).__name__} cannot be cut")


def _rows_end_to_end(value: Tensor, borders: Borders) -> Tensor:
    """Return [B × T, …] of [B, T, …], or of [1, T, …], which all rows share."""
    return value.expand(borders.rows, *value.shape[1:]).flatten(0, 1)


def _stack_padded(documents: Sequence[Tensor], length: int) -> Tensor:
    """Return documents [n, …] as rows of `length` tokens, with zeros behind each."""
    rows = []
    for document in documents:
        # Two numbers for each dimension, the last dimension first.
        behind = [0, 0] * (document.ndim - 1)
        missing = length - len(document)
        rows.append(functional.pad(document, [*behind, 0, missing]))
    return torch.stack(rows)


def first_tensor(out: Any) -> Tensor:
    """Return what a layer returns: a tensor, or the first entry of a tuple."""
    if isinstance(out, tuple):
        out = out[0]
    result: Tensor = out
    return result


def replace_first(out: Any, tensor: Tensor) -> Any:
    """Return `tensor` in the place of `first_tensor(out)`. The rest of a tuple is dropped."""
    if not isinstance(out, tuple):
        return tensor
    dropped = len(out) - 1
    return (tensor, *[None] * dropped)
