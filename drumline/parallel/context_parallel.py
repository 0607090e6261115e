"""Context parallelism: each rank runs the model on its part of every sequence; only attention sees the whole of it.

Ulysses (Jacobs et al. 2023): before attention the ranks exchange parts of the sequence for heads (one all-to-all), attention runs over
whole sequences for a share of the heads, and a second all-to-all changes back. Ring (Liu et al. 2023): each rank keeps its queries,
keys and values go round; torch's own `context_parallel`, which has kernels for GPUs and takes no mask but the causal one.
Either is laid under a model by transformers' own seam, an attention function and a mask function under a name of ours, so the model
decides which tokens may meet (causal, sliding windows, chunks).
B rows, T tokens of a sequence, t = T / N of a part, N ranks; H heads, of size D.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from drumline.core.attention import RING_CHUNK, by_documents
from drumline.core.rules import NO_PARTS
from drumline.errors import PlanError
from drumline.models.attention import batch_in_hand
from drumline.models.blocks import whole_sequences
from drumline.models.head import ForwardWithObjective
from drumline.models.sequence import SequencePart
from drumline.models.small import Tokens, close, try_small
from drumline.vendor.torch import all_to_all_single_autograd

NUMBERS = itertools.count()
# Tokens of a rank's part in the trial, which is in fp32. In a ring it has two chunks.
TRIAL_TOKENS, TRIAL_TOKENS_OF_RING = 8, 2 * RING_CHUNK
Function = Callable[..., Any]


def apply_context_parallel(
    module: ForwardWithObjective,
    model: Any,
    mesh: DeviceMesh,
    method: Literal["ulysses", "ring"],
    packing: bool,
) -> None:
    """Cut the sequences of `module`'s batches over the ranks of `mesh` (one dimension). Collective.

    Forward and backward must run in `module.sequence.around`.

    Raises PlanError for a model whose tokens meet elsewhere than in attention, or whose attention is not transformers' own.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if method == "ring":
        part = SequencePart(mesh.get_group(), folded=True, around=lambda: _torch_ring(mesh))
        attention, mask = ring, no_mask
    else:
        part = SequencePart(mesh.get_group())
        attention, mask = ulysses, whole_mask
    refused = f"context parallelism cannot run {type(model).__name__}: "
    if why := whole_sequences(model):
        raise NO_PARTS.error(refused + why)
    # A name of its own: another model of this process looks its functions up by name, and has another part of another sequence.
    before = model.config._attn_implementation
    name = f"{before if by_documents(model) else 'drumline_sequence'}_part_{next(NUMBERS)}"
    AttentionInterface.register(name, _where_cut(part, AttentionInterface()[before], attention))
    AttentionMaskInterface.register(name, _where_cut(part, AttentionMaskInterface()[before], mask))
    model.set_attn_implementation(name)
    tokens = TRIAL_TOKENS_OF_RING if method == "ring" else TRIAL_TOKENS
    if not _same_in_parts(model, mesh.device_type, part, packing, tokens):
        model.set_attn_implementation(before)
        raise NO_PARTS.error(refused + "cut in parts it does not compute what it computes whole")
    module.sequence = part


def _where_cut(part: SequencePart, whole: Function, cut: Callable[..., Any]) -> Function:
    """A function of transformers' interface: `whole`, and where the sequence is cut in its place `cut(part, whole, …)`."""

    def run(*given: Any, **options: Any) -> Any:
        return cut(part, whole, *given, **options) if part.active else whole(*given, **options)

    return run


@dataclass
class _Heads:
    """What transformers' sdpa reads of an attention module: query heads to one of keys, as they are on this rank."""

    num_key_value_groups: int
    is_causal: bool


def ulysses(
    part: SequencePart,
    sdpa: Function,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over whole sequences: [B, H, t, D] in, [B, t, H, D] out.

    Key and value heads that N does not divide are repeated (each at most H / kv times), so that each rank gets the same number.
    """
    repeats = part.parts // math.gcd(key.shape[1], part.parts)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = heads_for_parts(part, query, key, value)
    heads = _Heads(query.shape[1] // key.shape[1], getattr(module, "is_causal", True))
    out_BThD, _ = sdpa(heads, query, key, value, attention_mask, **options)
    # [N, B, t, H / N, D].
    stretches = out_BThD.unflatten(1, (part.parts, -1)).transpose(0, 1).contiguous()
    return _exchange(part, stretches).movedim(0, 2).flatten(2, 3), None  # [B, t, H, D]


def heads_for_parts(part: SequencePart, *tensors_BHtD: Tensor) -> list[Tensor]:
    """[B, H / N, T, D] of each [B, H, t, D]: a share of the heads, all of the sequence. One all-to-all for all tensors."""
    # [N, B, H / N, t, D].
    shares = [tensor.unflatten(1, (part.parts, -1)).transpose(0, 1) for tensor in tensors_BHtD]
    received = _exchange(part, torch.cat([share.flatten(1) for share in shares], 1))
    whole = received.split([share[0].numel() for share in shares], 1)
    return [
        flat.view(share.shape).movedim(0, 2).flatten(2, 3)
        for flat, share in zip(whole, shares, strict=True)
    ]


def _exchange(part: SequencePart, by_rank: Tensor) -> Tensor:
    """Entry i of dimension 0 goes to rank i; what comes from rank i is entry i. Its gradient travels back the same way."""
    received: Tensor = all_to_all_single_autograd(
        by_rank, [1] * part.parts, [1] * part.parts, part.group
    )
    return received


def whole_mask(part: SequencePart, mask: Function, **options: Any) -> Any:
    """The mask over whole sequences: bool[B, 1, T, T], or `Documents` where attention takes these, or None for the plain causal one.

    The model decides by place which tokens may meet (`mask_function`: causal, a window, chunks). Which documents they belong to
    depends on the positions of the whole sequence; the model has seen one part.
    """
    from drumline.vendor.transformers import find_packed_sequence_indices, packed_mask

    positions_BT = part.positions_BT
    assert positions_BT is not None
    documents_BT = None if batch_in_hand() else find_packed_sequence_indices(positions_BT)
    if documents_BT is not None:
        options["mask_function"] = packed_mask(options["mask_function"], positions_BT, documents_BT)
        options["allow_is_causal_skip"] = False
    length, there_BT = positions_BT.shape[1], None if part.mask_BT is None else part.mask_BT.bool()
    return mask(**options | {"q_length": length, "kv_length": length, "attention_mask": there_BT})


def ring(
    part: SequencePart,
    sdpa: Function,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as `ulysses`, for inside torch's ring: every rank has all heads, and sdpa itself is torch's ring."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return sdpa(_Heads(1, True), query, key, value, None, **options)


def no_mask(part: SequencePart, mask: Function, **options: Any) -> Any:
    """For the ring: None, the plain causal mask. Raises PlanError where the model requires another."""
    if options.get("local_size") is not None or not options.get("allow_is_causal_skip", True):
        what = "ring attention in torch takes no mask, and this model has layers with windows of their own"
        raise PlanError(what, where="strategy", fix="use ulysses")
    return None


@contextlib.contextmanager
def _torch_ring(mesh: DeviceMesh) -> Iterator[None]:
    """sdpa is a ring over `mesh`, in forward and in backward. torch requires a tensor to cut; ours are cut already."""
    from torch.distributed.tensor.experimental import context_parallel

    stand_in = torch.empty(2 * mesh.size(), device=mesh.device_type)
    with context_parallel(
        mesh, buffers=[stand_in], buffer_seq_dims=[0], no_restore_buffers={stand_in}
    ):
        yield


def _same_in_parts(model: Any, device: str, part: SequencePart, packing: bool, tokens: int) -> bool:
    """Whether the model's hidden states come out the same in parts as whole, tried on so many tokens a rank (two documents, where
    rows are packs). State-space and other recurrent layers mix tokens without attention, and no flag of a class shows it."""

    def trial(small: Any, ids_BT: Tensor) -> bool:
        trunk = small.get_decoder() or small
        ids_BT = ids_BT.repeat(1, part.parts * tokens // ids_BT.shape[1])
        length = ids_BT.shape[1]
        positions_BT = torch.arange(length, device=ids_BT.device)[None]
        if packing:
            positions_BT = torch.where(
                positions_BT < length - 5, positions_BT, positions_BT - (length - 5)
            )
        whole = trunk(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)[0]
        batch = Tokens(ids_BT, positions_BT)
        with part.around():
            in_part = trunk(**part.inputs(batch), use_cache=False)[0]
        return close(in_part, part.cut(whole))

    same = torch.tensor(float(try_small(model, device, trial)), device=device)
    part.active = False
    return float(part.total(same)) == part.parts
