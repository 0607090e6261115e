"""Context parallelism: each rank runs the model on its part of every sequence.

Only attention, and recurrent layers (models.whole_rows), see the whole.

There are two methods:

- Ulysses (Jacobs et al. 2023): an all-to-all before attention gives each rank whole sequences for
  a share of the heads, and one after attention gives it back its part of the sequence for all
  heads.
- Ring (Liu et al. 2023): each rank keeps its queries, and keys and values go from rank to rank.
  This is torch's own `context_parallel`, which has kernels for GPUs, and takes only a causal mask.

Either is registered with transformers as an attention function and a mask function, under a name of
ours. So the model itself still decides which tokens may attend to which (causal, sliding windows,
chunks).

A vision-language model gets whole rows. Each rank runs all of the vision tower, whose features take
the places of their tokens in the whole row. Then the embeddings are cut, and the language part runs
on a part. So the gradients of the tower, too, are one summand a rank, and no rank waits for one
whose part has no image.

Shapes: B rows, T tokens of a sequence, t = T / N of a part, N ranks; H heads, of size D.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from drumline.errors import PlanError
from drumline.models.attention import has_batch, model_inputs
from drumline.models.blocks import (
    has_recurrent_layers,
    is_recurrent,
    reason_against_context_parallelism,
)
from drumline.models.classes import is_vision_language
from drumline.models.head import ForwardWithObjective
from drumline.models.image_tokens import trial_images
from drumline.models.recurrent import separated_layers
from drumline.models.recurrent_trial import mixing_layers
from drumline.models.sequence import SequencePart
from drumline.models.small import TrialTokens, is_close, try_small
from drumline.models.whole_rows import use_whole_rows
from drumline.plan.attention import RING_CHUNK, has_drumline_attention
from drumline.plan.rules import NO_CONTEXT_PARALLEL
from drumline.vendor.torch import all_to_all_single_autograd

# The numbers at the end of the names of attention functions.
NUMBERS = itertools.count()
# Tokens of a rank's part in the trial, which is in fp32. In a ring it has two chunks.
TRIAL_TOKENS = 8
TRIAL_TOKENS_OF_RING = 2 * RING_CHUNK
# Tokens of the second document of a pack in the trial. A part has more, so no document begins with
# one.
TRIAL_TOKENS_OF_SECOND_DOCUMENT = 5
Function = Callable[..., Any]
# torch's sdpa, which `_torch_ring` replaces.
WHOLE_ATTENTION = functional.scaled_dot_product_attention


def apply_context_parallel(
    module: ForwardWithObjective,
    model: Any,
    mesh: DeviceMesh,
    method: Literal["ulysses", "ring"],
    packing: bool,
) -> None:
    """Cut the sequences of `module`'s batches over the ranks of `mesh` (one dimension). Collective.

    Forward and backward must run in the context `module.sequence.around`.
    Raises PlanError for a model that mixes tokens elsewhere than in attention, or whose attention
    is not transformers' own.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    has_images = is_vision_language(model.config)
    if method == "ring":
        part = SequencePart(
            mesh.get_group(),
            folded=True,
            around=lambda: _torch_ring(mesh),
            cuts_embeddings=has_images,
        )
        attention = ring
        mask = no_mask
        tokens = TRIAL_TOKENS_OF_RING
    else:
        part = SequencePart(mesh.get_group(), cuts_embeddings=has_images)
        attention = ulysses
        mask = whole_mask
        tokens = TRIAL_TOKENS
    refused = f"context parallelism cannot run {type(model).__name__}: "
    reason = reason_against_context_parallelism(model)
    if reason:
        raise NO_CONTEXT_PARALLEL.error(refused + reason)
    before = model.config._attn_implementation
    # A name of its own: another model of this process looks its functions up by name, and has
    # another part of another sequence.
    base_name = before if has_drumline_attention(model) else "drumline_sequence"
    name = f"{base_name}_part_{next(NUMBERS)}"
    whole_attention = AttentionInterface()[before]
    whole_sequence_mask = AttentionMaskInterface()[before]
    AttentionInterface.register(name, _replace_if_cut(part, whole_attention, attention))
    AttentionMaskInterface.register(name, _replace_if_cut(part, whole_sequence_mask, mask))
    implementation: Any = name
    if has_images:
        implementation = {"text_config": name}
    if has_images and method == "ring":
        tower_name = f"{name}_tower"
        implementation["vision_config"] = tower_name
        AttentionInterface.register(tower_name, _outside_of_ring(whole_attention))
    recurrent = _recurrent_classes(model, mesh.device_type)
    _run_in_parts(model, part, implementation, recurrent)

    def run_in_parts(small: Any) -> None:
        _run_in_parts(small, part, implementation, recurrent)

    if not _same_in_parts(model, mesh.device_type, part, packing, tokens, run_in_parts):
        model.set_attn_implementation(before)
        raise NO_CONTEXT_PARALLEL.error(
            refused + "cut in parts it does not compute what it computes whole"
        )
    module.sequence = part


def _recurrent_classes(model: Any, device: str) -> tuple[type[nn.Module], ...]:
    """Return the classes of a model's recurrent layers, which mix tokens without attention.

    Of a model that trains on packs they are known; else a small copy is tried on `device`.
    """
    if not has_recurrent_layers(model):
        return ()
    layers = separated_layers(model)
    if layers:
        return _classes_of_recurrent(layers)

    def trial(small: Any, ids_BT: Tensor) -> tuple[type[nn.Module], ...]:
        return _classes_of_recurrent(mixing_layers(small, ids_BT))

    return try_small(model, device, trial)


def _classes_of_recurrent(layers: Iterable[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the classes of the recurrent ones among layers that mix documents.

    Attention is another one if it has no mask that keeps documents apart.
    """
    return tuple(dict.fromkeys(type(layer) for layer in layers if is_recurrent(layer)))


def _run_in_parts(
    model: Any,
    part: SequencePart,
    implementation: Any,
    recurrent: tuple[type[nn.Module], ...],
) -> None:
    """Let a model run on parts of sequences.

    Its attention goes through registered functions, and recurrent layers run on whole rows. The
    decoder of a vision-language model also takes its part of the embeddings that it gets.

    Args:
        model: The model.
        part: This rank's part of sequences.
        implementation: The name of the attention functions, or names by section of its config.
        recurrent: Classes of its recurrent layers.
    """
    model.set_attn_implementation(implementation)
    use_whole_rows(model, part, recurrent)
    if not part.cuts_embeddings:
        return

    def cut(_decoder: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not part.active:
            return None
        return args, part.decoder_inputs(options)

    model.get_decoder().register_forward_pre_hook(cut, with_kwargs=True)


def _replace_if_cut(part: SequencePart, whole: Function, cut: Callable[..., Any]) -> Function:
    """Return a function for transformers: `cut(part, whole, …)` while sequences are cut, else `whole`."""

    def run(*given: Any, **options: Any) -> Any:
        if part.active:
            return cut(part, whole, *given, **options)
        return whole(*given, **options)

    return run


@dataclass
class _Heads:
    """What transformers' sdpa reads of an attention module.

    `num_key_value_groups`: query heads per key/value head, on this rank.
    """

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
    """Run attention over whole sequences: [B, H, t, D] in, [B, t, H, D] out.

    Key and value heads that N does not divide are repeated (each at most H / kv times), so that
    each rank gets the same number.
    """
    repeats = part.world_size // math.gcd(key.shape[1], part.world_size)
    if repeats > 1:
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    query, key, value = _exchange_tokens_for_heads(part, query, key, value)
    heads = _Heads(query.shape[1] // key.shape[1], getattr(module, "is_causal", True))
    out_BThD, _ = sdpa(heads, query, key, value, attention_mask, **options)
    # By the rank of the tokens: [N, B, t, H / N, D].
    sent_NBthD = out_BThD.unflatten(1, (part.world_size, -1)).transpose(0, 1).contiguous()
    # By the rank of the heads: [N, B, t, H / N, D].
    received_NBthD = _exchange(part, sent_NBthD)
    out_BtHD = received_NBthD.movedim(0, 2).flatten(2, 3)
    return out_BtHD, None


def _exchange_tokens_for_heads(part: SequencePart, *tensors_BHtD: Tensor) -> list[Tensor]:
    """Return [B, H / N, T, D] of each [B, H, t, D]: a share of the heads, all of the sequence.

    One all-to-all carries all tensors.
    """
    # Each [N, B, H / N, t, D], by the rank that the heads go to.
    shares = [tensor.unflatten(1, (part.world_size, -1)).transpose(0, 1) for tensor in tensors_BHtD]
    received = _exchange(part, torch.cat([share.flatten(1) for share in shares], 1))
    sizes = [share[0].numel() for share in shares]
    whole: list[Tensor] = []
    for flat, share in zip(received.split(sizes, 1), shares, strict=True):
        whole.append(flat.view(share.shape).movedim(0, 2).flatten(2, 3))
    return whole


def _exchange(part: SequencePart, by_rank: Tensor) -> Tensor:
    """Send entry i of dimension 0 to rank i, and return what comes from rank i as entry i.

    The gradient travels back the same way.
    """
    sizes = [1] * part.world_size
    received: Tensor = all_to_all_single_autograd(by_rank, sizes, sizes, part.group)
    return received


def whole_mask(part: SequencePart, mask: Function, **options: Any) -> Any:
    """Return the mask over whole sequences, made by the model's own function `mask`.

    It is bool[B, 1, T, T], or None if it is causal and nothing else; or `Documents` if the running
    batch names its documents (`has_batch`), which attention then keeps apart by itself. The model
    decides by position which tokens may attend to which (`mask_function`: causal, a window,
    chunks). Which documents they belong to follows from the positions of the whole sequence; the
    model has seen one part.
    """
    from drumline.vendor.transformers import packed_mask

    positions_BT = part.positions_BT
    assert positions_BT is not None
    documents_BT: Tensor | None = None
    if not has_batch():
        # Nothing else says which documents the tokens belong to.
        documents_BT = _number_documents(part, positions_BT)
    if documents_BT is not None:
        options["mask_function"] = packed_mask(options["mask_function"], positions_BT, documents_BT)
        options["allow_is_causal_skip"] = False
    length = positions_BT.shape[1]
    options["q_length"] = length
    options["kv_length"] = length
    options["attention_mask"] = None if part.mask_BT is None else part.mask_BT.bool()
    return mask(**options)


def _number_documents(part: SequencePart, positions_BT: Tensor) -> Tensor | None:
    """Return the number of each token's document in its row, int64[B, T]; None for one document a row.

    transformers reads from the device which of both it is, and the host waits. It need not if the
    batch has told how many documents its rows have.
    """
    from drumline.vendor.transformers import find_packed_sequence_indices

    if part.is_packed is None:
        numbers: Tensor | None = find_packed_sequence_indices(positions_BT)
        return numbers
    if not part.is_packed:
        return None
    # Positions count up by one within a document.
    before_first = positions_BT[:, :1] - 1
    increments_BT = torch.diff(positions_BT, prepend=before_first, dim=1)
    return (increments_BT != 1).cumsum(1)


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
    """Run attention with the arguments and results of `ulysses`, but by torch's ring.

    Within `_torch_ring`, sdpa itself is the ring. Every rank computes all heads.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    heads = _Heads(num_key_value_groups=1, is_causal=True)
    return sdpa(heads, query, key, value, None, **options)


def _outside_of_ring(attention: Function) -> Function:
    """Return an attention function that computes by torch's own sdpa also within `_torch_ring`.

    It is for a vision tower, which every rank runs whole.
    """

    @torch.compiler.disable
    def run(*given: Any, **options: Any) -> Any:
        in_ring = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = WHOLE_ATTENTION
        try:
            return attention(*given, **options)
        finally:
            functional.scaled_dot_product_attention = in_ring

    return run


def no_mask(part: SequencePart, mask: Function, **options: Any) -> Any:
    """Return None, which is a causal mask without windows or documents, for the ring.

    Raises PlanError if the model requires another mask.
    """
    has_window = options.get("local_size") is not None
    is_causal_only = options.get("allow_is_causal_skip", True)
    if has_window or not is_causal_only:
        what = "ring attention in torch takes no mask, and this model has layers with windows, or tokens that attend to later ones"
        raise PlanError(what, where="strategy", fix="use ulysses")
    return None


@contextlib.contextmanager
def _torch_ring(mesh: DeviceMesh) -> Iterator[None]:
    """Within, sdpa is a ring over `mesh`, in forward and in backward."""
    from torch.distributed.tensor.experimental import context_parallel

    # torch requires a tensor to cut; ours are cut already.
    stand_in = torch.empty(2 * mesh.size(), device=mesh.device_type)
    with context_parallel(
        mesh, buffers=[stand_in], buffer_seq_dims=[0], no_restore_buffers={stand_in}
    ):
        yield


def _same_in_parts(
    model: Any,
    device: str,
    part: SequencePart,
    packing: bool,
    tokens: int,
    run_in_parts: Callable[[Any], None],
) -> bool:
    """Return whether the model's hidden states come out the same in parts as whole. Collective.

    A small copy of the model is tried on `tokens` tokens for each rank; with `packing` they are two
    documents. `run_in_parts`: lets a model run on parts of sequences. Only a trial shows whether
    layers of other classes mix tokens without attention, too.
    """

    def trial(small: Any, ids_BT: Tensor) -> bool:
        run_in_parts(small)
        batch = _trial_batch(small, ids_BT, part.world_size * tokens, packing)
        trunk = small.get_decoder() or small
        if part.cuts_embeddings:
            trunk = small.base_model
        with model_inputs(small, batch) as inputs:
            whole_BTD = trunk(**inputs, use_cache=False)[0]
        with part.around(), model_inputs(small, batch, part) as inputs:
            part_BtD = trunk(**inputs, use_cache=False)[0]
        return is_close(part_BtD, part.cut(whole_BTD))

    is_same = try_small(model, device, trial)
    part.active = False
    ranks_that_agree = part.total(torch.tensor(float(is_same), device=device))
    return float(ranks_that_agree) == part.world_size


def _trial_batch(small: Any, ids_BT: Tensor, multiple: int, packing: bool) -> TrialTokens:
    """Return a batch of one row for a small copy of a model, with an image if it reads images.

    `ids_BT`: token ids, which are repeated. `multiple`: the row's length is a multiple of it. With
    `packing` the row has two documents.
    """
    images: dict[str, Tensor] = {}
    if is_vision_language(small.config):
        # Few tokens are left in the copy, and the one that stands for images has to be among them.
        image_id = small.config.get_text_config().vocab_size - 1
        small.config.image_token_id = image_id
        text_BT = ids_BT.clamp(max=image_id - 1)
        with_image_BT, _ = trial_images(small.config, text_BT)
        image_tokens = with_image_BT.shape[1] - text_BT.shape[1]
        length = math.ceil(with_image_BT.shape[1] / multiple) * multiple
        repeats = math.ceil(length / text_BT.shape[1])
        long_text_BT = text_BT.repeat(1, repeats)[:, : length - image_tokens]
        ids_BT, images = trial_images(small.config, long_text_BT)
    else:
        ids_BT = ids_BT.repeat(1, multiple // ids_BT.shape[1])
    length = ids_BT.shape[1]
    positions_BT = torch.arange(length, device=ids_BT.device)[None]
    documents: tuple[tuple[int, ...], ...] | None = None
    if packing:
        second = length - TRIAL_TOKENS_OF_SECOND_DOCUMENT
        positions_BT = torch.where(positions_BT < second, positions_BT, positions_BT - second)
        documents = ((second, TRIAL_TOKENS_OF_SECOND_DOCUMENT),)
    return TrialTokens(ids_BT, positions_BT, images=images, document_lengths=documents)
