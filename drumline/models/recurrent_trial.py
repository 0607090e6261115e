"""Finds the layers of a model that would mix the documents of a pack, by a small copy of it.

The copy runs a pack of two documents, and the trial records what each layer is given. A layer that
is called again with other tokens in the first document, and then computes something else for the
second one, mixes them. It gets the borders of documents (`models.recurrent`), by its kernels if
these keep the documents apart. Attention that keeps documents apart passes the trial.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.foreign import first_line
from drumline.models.attention import model_inputs
from drumline.models.blocks import blocks
from drumline.models.recurrent import (
    Borders,
    SeparatedLayers,
    first_tensor,
    is_by_token,
    run_each_document,
    run_with_borders,
    separate,
)
from drumline.models.small import DOCUMENT_TOKENS, is_close, pack_of_two, try_small
from drumline.vendor.torch import tree_map_only

# How far kernels may be from torch's code, relative to the largest value: they may round products
# to TF32, whose eps is 2^-11.
KERNEL_TOLERANCE = 2.0**-7
logger = logging.getLogger(__name__)


@dataclass
class _LayerCall:
    """A call of a layer: its arguments and its result."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Any


def separate_recurrent_layers(model: Any, device: str) -> str:
    """Let the layers of a model that would mix documents run by documents.

    The trial runs on `device`. Returns why the kernels of these layers are not given the borders of
    documents; empty if they are, or if attention is all that mixes tokens. A model with a layer
    that cannot run by documents stays as it is: `head.require_next_token` refuses it.
    """

    def trial(small: Any, ids_BT: Tensor) -> tuple[tuple[type[nn.Module], ...], str]:
        calls = mixing_layers(small, ids_BT)
        classes = tuple(dict.fromkeys(type(layer) for layer in calls))
        if not calls or not _runs_separated(small, ids_BT, classes):
            return (), ""
        return classes, _reason_against_kernels(calls)

    classes, reason = try_small(model, device, trial)
    if classes:
        separate(model, SeparatedLayers(classes, by_kernels=not reason))
    return reason


def mixing_layers(small: Any, ids_BT: Tensor) -> dict[nn.Module, _LayerCall]:
    """Return layer → call of the layers within blocks that mix the documents of a pack.

    A layer within such a layer is left out. `ids_BT`: one row of eight tokens.
    """
    calls: dict[nn.Module, _LayerCall] = {}

    def record(layer: nn.Module, args: Any, options: dict[str, Any], out: Any) -> None:
        calls[layer] = _LayerCall(args, options, out)

    layers = set()
    for block in blocks(small):
        layers |= set(block.modules()) - {block}
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    _run_pack(small, ids_BT)
    for hook in hooks:
        hook.remove()
    all_blocks = blocks(small)
    mixing: dict[nn.Module, _LayerCall] = {}
    for block in all_blocks:
        # A block within this one, such as Zamba2's, has a turn of its own.
        other_blocks = set(all_blocks) - {block}
        _add_mixing_layers(block, calls, other_blocks, mixing)
    return mixing


def _add_mixing_layers(
    module: nn.Module,
    calls: dict[nn.Module, _LayerCall],
    left_out: set[nn.Module],
    mixing: dict[nn.Module, _LayerCall],
) -> None:
    """Add the layers within a module that mix documents to `mixing`, the outermost alone."""
    for child in module.children():
        if child in left_out:
            continue
        call = calls.get(child)
        if call is not None and _mixes_documents(child, call):
            mixing[child] = call
        else:
            _add_mixing_layers(child, calls, left_out, mixing)


def _mixes_documents(layer: nn.Module, call: _LayerCall) -> bool:
    """Return whether the first document's tokens change what a layer computes for the second."""
    before = first_tensor(call.out)
    if not isinstance(before, Tensor) or before.shape[:2] != (1, 2 * DOCUMENT_TOKENS):
        return False
    args, options = _with_other_first_document(call)
    after = first_tensor(layer(*args, **options))
    # The experts of a mixture may take other numbers of tokens now, and round differently.
    return not is_close(before[:, DOCUMENT_TOKENS:], after[:, DOCUMENT_TOKENS:])


def _with_other_first_document(call: _LayerCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with other numbers for the tokens of the first document."""

    def change(value: Tensor) -> Tensor:
        if not is_by_token(value, _borders(value.device)) or not value.is_floating_point():
            return value
        changed = value.clone()
        changed[:, :DOCUMENT_TOKENS] += 1
        return changed

    changed: tuple[tuple[Any, ...], dict[str, Any]]
    changed = tree_map_only(Tensor, change, (call.args, call.options))
    return changed


def _borders(device: torch.device) -> Borders:
    """Return the borders of the trial's pack."""
    lengths = (DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    return Borders(lengths, 1, sum(lengths), by_kernels=False, device=device)


def _runs_separated(small: Any, ids_BT: Tensor, classes: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a small copy runs a pack if the layers of some classes run by documents.

    Layers of these classes stay separated. There may be others of them, with other arguments, than
    those that were found to mix documents.
    """
    separate(small, SeparatedLayers(classes, by_kernels=False))
    try:
        _run_pack(small, ids_BT)
    except Exception as error:  # noqa: BLE001 - layers of others raise what they like
        names = ", ".join(layer_class.__name__ for layer_class in classes)
        logger.info("%s cannot run on each document by itself: %s", names, first_line(error))
        return False
    return True


def _run_pack(small: Any, ids_BT: Tensor) -> None:
    """Run a small copy on a pack of two documents. `ids_BT`: one row of eight tokens."""
    with model_inputs(small, pack_of_two(small, ids_BT)) as inputs:
        small(**inputs, use_cache=False)


def _device_of(call: _LayerCall) -> torch.device:
    """Return the device of a call's result."""
    return first_tensor(call.out).device


def _reason_against_kernels(calls: dict[nn.Module, _LayerCall]) -> str:
    """Return why the kernels of some layers cannot be given borders; empty if they can.

    They are tried as in training and as in evaluation: layers may have a kernel for each.
    """
    for layer, call in calls.items():
        for trains in (True, False):
            layer.train(trains)
            try:
                reason = _kernel_failure(layer, call)
            except Exception as error:  # noqa: BLE001 - kernels of others raise what they like
                reason = first_line(error)
            if reason:
                return reason
    return ""


def _kernel_failure(layer: nn.Module, call: _LayerCall) -> str:
    """Return what is wrong with a layer's result if its kernels get borders; empty if nothing is."""
    borders = _borders(_device_of(call))
    out = first_tensor(run_with_borders(layer, borders, call.args, dict(call.options)))
    args, options = _with_other_first_document(call)
    changed = first_tensor(run_with_borders(layer, borders, args, options))
    if not is_close(out[:, DOCUMENT_TOKENS:], changed[:, DOCUMENT_TOKENS:]):
        return "borders do not keep documents apart in its code"
    if _has_gradient_across(layer, borders, call):
        return "gradients pass from a document to the one before in its code"
    expected = first_tensor(run_each_document(layer, borders, call.args, dict(call.options)))
    difference = float((out - expected).abs().max())
    largest = float(expected.abs().max())
    # Not `difference > …`, which NaN would pass.
    if difference <= KERNEL_TOLERANCE * largest:
        return ""
    return f"with borders it is {difference / largest:.1g} off"


def _has_gradient_across(layer: nn.Module, borders: Borders, call: _LayerCall) -> bool:
    """Return whether the second document's result has a gradient in the first document."""
    leaves: list[Tensor] = []

    def require_gradient(value: Tensor) -> Tensor:
        if not is_by_token(value, borders) or not value.is_floating_point():
            return value
        leaf = value.detach().requires_grad_()
        leaves.append(leaf)
        return leaf

    args, options = tree_map_only(Tensor, require_gradient, (call.args, call.options))
    with torch.enable_grad():
        out = first_tensor(run_with_borders(layer, borders, args, options))
        second = out[:, DOCUMENT_TOKENS:].float()
        gradients = torch.autograd.grad(second.square().sum(), leaves, allow_unused=True)
    known = [gradient for gradient in gradients if gradient is not None]
    return any(bool(gradient[:, :DOCUMENT_TOKENS].any()) for gradient in known)
