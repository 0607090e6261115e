"""Attention by documents: lengths of documents replace a mask over all pairs of tokens.

transformers lets us register an attention function and a mask function under a name of our own. The
model decides what a layer attends to (all tokens, a sliding window). Our mask function returns
`Documents` instead of a mask, and each block hands them to our attention function, also in a
recomputation. While no batch is set (generation, trials) both call the model's own functions.

B rows, T tokens of a row, H heads, of size D; N documents of a batch, padding at the end of a row
among them.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from drumline.foreign import first_line
from drumline.models.blocks import reason_for_mask
from drumline.models.classes import values_by_layer
from drumline.models.recurrent import BORDERS, borders_of
from drumline.models.sequence import SequencePart
from drumline.plan.attention import (
    Kernel,
    choose,
    has_drumline_attention,
    has_padding,
    interface_name,
)
from drumline.plan.plan import Layout
from drumline.system.threads import bind_to_gpu
from drumline.vendor.torch import autograd_key, exclude_dispatch_key

logger = logging.getLogger(__name__)
# Config keys of GPT-2, Llama and BERT for dropout over attention's scores.
SCORE_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
# The batch that the model runs on now, see `model_inputs`.
_batch: ContextVar[Any] = ContextVar("batch")
# Whether documents attend one by one, whatever the kernel; see `without_kernels`.
_has_no_kernels: ContextVar[bool] = ContextVar("has_no_kernels", default=False)


@dataclass(eq=False)
class Pattern:
    """Which tokens of a batch attend to each other, as numbers in host memory.

    `lengths`: the lengths of each row's documents, without padding. `width`: tokens of a row. A
    token attends to its own document: with `causal` up to itself, with `window` only to that many
    of the nearest tokens. With `branches` each document continues the first of its row, and attends
    to it too.
    """

    lengths: tuple[tuple[int, ...], ...]
    width: int
    causal: bool
    window: int | None
    branches: bool


class Documents(Pattern):
    """What a layer attends to. It is passed through the model instead of a mask.

    `cu_seqlens_N`: int32[N + 1], where documents begin in all rows end to end; the last is B × T.
    `longest`: tokens of the longest document, or of the longest padding. `kernel`: computes all
    documents of this batch in one call; None: each document is computed by itself.
    """

    def __init__(self, batch: Any, causal: bool, window: int | None) -> None:
        width = batch.input_ids_BT.shape[1]
        branches = getattr(batch, "has_shared_prefix", False)
        super().__init__(batch.document_lengths, width, causal, window, branches)
        self.cu_seqlens_N: Tensor = batch.cu_seqlens_N
        self.longest = 0
        for row in self.lengths:
            padding = width - sum(row)
            self.longest = max(self.longest, *row, padding)
        self.kernel: Callable[..., Tensor] | None = None

    @cached_property
    def block_mask(self) -> Any:
        """flex_attention's mask over all rows end to end, made once for all layers."""
        return block_mask(self)

    @cached_property
    def lengths_BN(self) -> Tensor:  # noqa: N802 - letters of dimensions
        """`lengths` as int64[B, N] in host memory, filled up with -1 (see `sdpa_by_documents`).

        There are two columns at least: a size of 1 would be compiled by itself.
        """
        columns = 2
        for row in self.lengths:
            columns = max(columns, len(row))
        filled = []
        for row in self.lengths:
            fillers = [-1] * (columns - len(row))
            filled.append([*row, *fillers])
        return torch.tensor(filled)

    def prepare(self, kernel: Kernel, dtype: torch.dtype, head_dim: int) -> None:
        """Choose the kernel before any block runs: within a compiled block none can be tried.

        `kernel`: the kernel that the plan has chosen. `dtype`, `head_dim`: those of queries.
        """
        # No kernel for variable lengths lets a document attend to another one, as branches do.
        is_usable = kernel != "documents" and not self.branches and not _has_no_kernels.get()
        if is_usable and _works(kernel, self.cu_seqlens_N.device, dtype, head_dim):
            self.kernel = KERNELS[kernel]
        if self.kernel is None:
            self.lengths_BN  # noqa: B018 - computed now and kept
        elif kernel == "flex_attention":
            self.block_mask  # noqa: B018 - computed now and kept


def use_document_attention(model: Any, layout: Layout, on_host: bool = False) -> None:
    """Make a Hugging Face model attend by documents on the layout's devices, if it can.

    `on_host`: the model only runs on a CPU, for a trial before the launch. No kernel of the
    layout's devices is tried there, so no line says that one does not work.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    text_config = model.config.get_text_config()
    head_dim = head_sizes(text_config).queries
    has_caps = has_soft_caps(text_config)
    implementation = model.config._attn_implementation
    has_dropout = has_score_dropout(text_config)
    is_plain_eager = implementation == "eager" and not has_caps
    has_own_scores = has_dropout or is_plain_eager
    kernel, _ = choose(layout, head_dim, has_caps, has_own_scores, reason_for_mask(model))
    if kernel == "masked":
        return
    if on_host:
        kernel = "documents"
    name = interface_name(kernel, implementation)
    # transformers registers no eager function: each class has its own (see `_eager_function`).
    function = None
    if implementation != "eager":
        function = AttentionInterface()[implementation]
    AttentionInterface.register(name, partial(documents_attention, function))
    AttentionMaskInterface.register(name, partial(documents_mask, kernel, head_dim, implementation))
    model.set_attn_implementation(name)


class HeadSizes(NamedTuple):
    """The entries of a model's largest attention heads.

    `queries`: of queries and keys. `values`: of values, and so of the outputs. `latent`: the
    entries that a cache of compressed keys and values has of a token for all heads together
    (multi-head latent attention, DeepSeek-V2, 2024); 0 if it has whole keys and values.
    """

    queries: int
    values: int
    latent: int = 0


def head_sizes(text_config: Any) -> HeadSizes:
    """Return the sizes of a model's attention heads.

    They are 0 if they are not in the config: then a kernel fails its trial (`_works`), and each
    document is computed by itself.
    """
    value_size = getattr(text_config, "v_head_dim", None)
    without_positions = getattr(text_config, "qk_nope_head_dim", None)
    if value_size and without_positions is not None:
        # `head_dim` of such a config is the part of a head that has rotary positions.
        with_positions = text_config.qk_rope_head_dim
        latent = text_config.kv_lora_rank + with_positions
        return HeadSizes(without_positions + with_positions, value_size, latent)
    largest: int = max(size or 0 for size in values_by_layer(text_config, "head_dim"))
    heads = getattr(text_config, "num_attention_heads", None)
    if not largest and heads:
        largest = getattr(text_config, "hidden_size", 0) // heads
    return HeadSizes(largest, value_size or largest)


def has_soft_caps(text_config: Any) -> bool:
    """Return whether a config soft-caps the scores of attention."""
    return bool(getattr(text_config, "attn_logit_softcapping", None))


def has_score_dropout(text_config: Any) -> bool:
    """Return whether a config sets dropout over the scores of attention."""
    return any(getattr(text_config, key, None) for key in SCORE_DROPOUTS)


def has_batch() -> bool:
    """Return whether a model is running on a batch whose documents are known."""
    return _batch.get(None) is not None


@contextlib.contextmanager
def model_inputs(
    model: Any, batch: Any, sequence: SequencePart | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a model for a batch. The model's forward must run in this context.

    With `sequence` they are those for this rank's part of the batch. transformers would search the
    positions for documents, and the host would wait for the device. This is prevented as follows:
    - A model that attends by documents gets a mask of ones.
    - Any other gets no positions, if no row has more than one document.
    - Otherwise the arguments are left as they are, and transformers has to search.

    A model with separated layers (`models.recurrent`) also gets the borders of documents.
    """
    if sequence is None:
        inputs = batch.inputs()
    else:
        inputs = sequence.inputs(batch)
    borders = borders_of(model, batch, may_use_kernels=not _has_no_kernels.get())
    if borders is not None:
        inputs = {**inputs, BORDERS: borders}
    rows = getattr(batch, "document_lengths", None)
    if rows is not None and has_drumline_attention(model):
        token = _batch.set(batch)
        try:
            yield {"attention_mask": torch.ones_like(batch.input_ids_BT)} | inputs
        finally:
            _batch.reset(token)
        return
    if rows is not None and sequence is None and all(len(row) <= 1 for row in rows):
        # Positions 0, 1, 2, … in each row, which the model makes itself. Those of a vision-language
        # model have a third dimension, and are no such count.
        positions = inputs.get("position_ids")
        if positions is not None and positions.ndim <= 2:
            inputs = dict(inputs)
            del inputs["position_ids"]
    yield inputs


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let documents attend one by one in this context, whatever kernel was chosen.

    For trials in fp32, which most kernels do not take: each would be refused with a warning. Kernels
    of recurrent layers may round products to TF32.
    """
    token = _has_no_kernels.set(True)
    try:
        yield
    finally:
        _has_no_kernels.reset(token)


def documents_mask(
    kernel: Kernel, head_dim: int, original_implementation: str, **options: Any
) -> Any:
    """Return `Documents` of the current batch: replaces a mask function of transformers.

    Returns None if attention only has to be causal. Without a batch, or for a pattern other than
    all tokens, causal or a causal window, returns the mask of `original_implementation`, which is
    the name of the implementation of attention that was replaced. `head_dim`: size of a head.
    `options`: the arguments of a mask function of transformers.
    """
    batch = _batch.get(None)
    if batch is None:
        return _mask_without_batch(original_implementation, options)
    window = options.get("local_size")
    # These arguments show which pattern transformers wants: it allows to skip a mask only if the
    # argument `is_causal` of attention would mean the same.
    is_causal = options.get("allow_is_causal_skip", True)
    sees_everything = options.get("allow_is_bidirectional_skip", False) and window is None
    if not (is_causal or sees_everything):
        return _mask_of_other_pattern(original_implementation, batch, options)
    documents = Documents(batch, causal=not sees_everything, window=window)
    if sees_everything:
        has_one_per_row = all(row == (documents.width,) for row in documents.lengths)
    else:
        # Padding stands behind all others, where no causal token sees it.
        has_one_per_row = all(len(row) <= 1 for row in documents.lengths)
    is_within_window = window is None or window >= documents.width
    if has_one_per_row and original_implementation == "sdpa" and is_within_window:
        return None
    # The type that queries will have.
    dtype = _autocast_type(batch.cu_seqlens_N.device.type)
    if dtype is None:
        dtype = options.get("dtype", torch.float32)
    documents.prepare(kernel, dtype, head_dim)
    return documents


def _mask_without_batch(original_implementation: str, options: dict[str, Any]) -> Any:
    """Return the mask of the replaced implementation of attention while no batch is set."""
    from transformers import AttentionMaskInterface

    # None: it is not known, and transformers looks at the mask itself.
    is_padded = has_padding()
    if is_padded is True:
        options["allow_is_causal_skip"] = False
    elif is_padded is False:
        options["attention_mask"] = None
    return AttentionMaskInterface()[original_implementation](**options)


def _mask_of_other_pattern(
    original_implementation: str, batch: Any, options: dict[str, Any]
) -> Any:
    """Return the replaced implementation's mask, with which documents of a batch stay apart."""
    from transformers import AttentionMaskInterface

    from drumline.vendor.transformers import find_packed_sequence_indices, packed_mask

    if getattr(batch, "attention_mask_BT", None) is None:
        # The mask of ones that `model_inputs` gives says nothing.
        options["attention_mask"] = None
        positions_BT = batch.position_ids_BT
        documents_BT = find_packed_sequence_indices(positions_BT)
        if documents_BT is not None:
            mask_function = options["mask_function"]
            options["mask_function"] = packed_mask(mask_function, positions_BT, documents_BT)
    return AttentionMaskInterface()[original_implementation](**options)


def _autocast_type(device_type: str) -> torch.dtype | None:
    """Return autocast's type on a kind of device; None if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def documents_attention(
    original_function: Callable[..., Any] | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Compute attention by documents: replaces an attention function of transformers.

    It can be traced as a part of one graph. `original_function`: the replaced function; None: the
    eager one of the module's own class. `query`, `key` and `value` are [B, H, T, D], the result is
    [B, T, H, D] and None for the scores. Tokens of padding get zeros, or numbers that mean nothing.

    Without `Documents` the original function computes. With them it is one of these:
    - The batch's kernel computes all documents, if it can compute what the class does.
    - Otherwise, within a compiled graph, the operator `drumline::attend` (`sdpa_by_documents`), if
      sdpa can compute what the class does.
    - Otherwise a function of transformers computes one document after another, out of the graph.
    """
    if not isinstance(attention_mask, Documents):
        function: Any = original_function
        if original_function is None:
            function = _eager_function(module)
        result: tuple[Tensor, Any] = function(module, query, key, value, attention_mask, **options)
        return result
    documents = attention_mask
    cap = options.get("softcap")
    scale = options.get("scaling")
    low = _autocast_type(query.device.type)
    if low is not None:
        # Rotary positions leave queries and keys in fp32, but not values. Autocast casts them for
        # torch's own scaled_dot_product_attention only; other kernels need it done here.
        query = query.to(low)
        key = key.to(low)
        value = value.to(low)
    # No kernel computes dropout. A class with only an eager function, and without soft caps, has
    # something else of its own, such as sinks, which no kernel computes either.
    needs_splitting = bool(options.get("dropout")) or (original_function is None and cap is None)
    is_of_one_size = query.shape[-1] == value.shape[-1]
    if documents.kernel is not None and not needs_splitting and is_of_one_size:
        return documents.kernel(query, key, value, documents, scale, cap), None
    # sdpa has no soft caps.
    needs_eager_function = original_function is None or cap is not None
    arguments = (module, needs_eager_function, documents, query, key, value, options)
    if not torch.compiler.is_compiling():
        return _attend_one_by_one(*arguments), None
    if needs_eager_function or needs_splitting or documents.kernel is not None:
        return _out_of_graph(*arguments), None
    pattern = (documents.lengths_BN, documents.causal, documents.window, documents.branches)
    out: Tensor = torch.ops.drumline.attend(query, key, value, *pattern, scale)
    return out, None


def _eager_function(module: Any) -> Any:
    """Return the eager attention function beside a module's class; None if there is none."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _attend_one_by_one(
    module: Any,
    needs_eager_function: bool,
    documents: Pattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Compute each document by a function of transformers, [B, T, H, D].

    `needs_eager_function`: by the eager function of the module's own class, which takes a mask of
    numbers. Otherwise by sdpa, which has no soft caps and nothing else that a class may add.
    """
    from drumline.vendor.transformers import sdpa_attention_forward

    function = sdpa_attention_forward
    if needs_eager_function:
        function = _eager_function(module)
    of_module = partial(function, module)
    return attend_each_document(
        of_module, documents, needs_eager_function, query, key, value, **options
    )


# A class's own eager function may have dropout, or weights of its own: nobody can register it.
_out_of_graph = torch.compiler.disable(_attend_one_by_one)


def attend_each_document(
    attention_function: Callable[..., Any],
    documents: Pattern,
    additive: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> Tensor:
    """Compute each document by a function of transformers, and return all, [B, T, H, D].

    `attention_function`: called for one document, of which it returns [1, n, H, D]. `additive`: it
    takes a mask of numbers that are added to scores, not of booleans. Rows and documents are split
    and joined again: the gradient of a slice would be as large as the tensor that it is cut from.

    A row of only padding, which completes the last batch, counts as a document. So each parameter
    has a gradient in each micro-batch; otherwise DDP would not reduce it.
    """
    rows = []
    by_row = zip(documents.lengths, query.split(1), key.split(1), value.split(1), strict=True)
    for row_lengths, row_query, row_key, row_value in by_row:
        lengths = row_lengths or (documents.width,)
        padding = documents.width - sum(lengths)
        queries = _split_documents(row_query, lengths, padding)
        keys = _split_documents(row_key, lengths, padding)
        values = _split_documents(row_value, lengths, padding)
        if documents.branches:
            keys = _join_to_first(keys)
            values = _join_to_first(values)
        outs: list[Tensor] = []
        for document in zip(queries, keys, values, strict=True):
            outs += _attend_within_document(
                attention_function, documents, additive, options, *document
            )
        if padding:
            outs.append(query.new_zeros(1, padding, query.shape[1], value.shape[-1]))
        rows.append(_join_parts(outs, 1))
    return _join_parts(rows, 0)


def _join_parts(parts: list[Tensor], dim: int) -> Tensor:
    """Return the parts joined in a dimension; a single one as it is, without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


def _split_documents(row: Tensor, lengths: tuple[int, ...], padding: int) -> tuple[Tensor, ...]:
    """Return the documents of a row [1, H, T, D], without the padding at its end."""
    parts = row.split([*lengths, padding], 2)
    return parts[: len(lengths)]


def _join_to_first(documents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the first document, and the others joined to it: [1, H, n, D] each."""
    first, *rest = documents
    joined = [torch.cat([first, document], 2) for document in rest]
    return (first, *joined)


def _attend_within_document(
    attention_function: Callable[..., Any],
    documents: Pattern,
    additive: bool,
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Iterator[Tensor]:
    """Yield a document's attention, [1, n, H, D] in one or more parts.

    With a window the queries are cut into stretches as long as the window, each with the keys that
    it sees. If the document continues another one, the keys of that one come first.
    """
    length = query.shape[2]
    keys = key.shape[2]
    window = documents.window
    # Keys of the document that this one continues.
    prefix_keys = keys - length
    if window is None or window >= keys:
        allowed = None
        if documents.causal and (additive or prefix_keys):
            allowed = causal_band(length, keys, prefix_keys, None, query, additive)
        # `is_causal` aligns the first query with the first key: with keys ahead only a mask tells.
        is_causal = documents.causal and not prefix_keys
        out, *_ = attention_function(
            query, key, value, allowed, **options | {"is_causal": is_causal}
        )
        yield out
        return
    for start in range(prefix_keys, keys, window):
        stop = min(start + window, keys)
        # The first key that the first query of the stretch sees.
        first = max(0, start - window + 1)
        allowed = causal_band(stop - start, stop - first, start - first, window, query, additive)
        queries = query[:, :, start - prefix_keys : stop - prefix_keys]
        seen_keys = key[:, :, first:stop]
        seen_values = value[:, :, first:stop]
        masked = options | {"is_causal": False}
        out, *_ = attention_function(queries, seen_keys, seen_values, allowed, **masked)
        yield out


def causal_band(
    queries: int, keys: int, offset: int, window: int | None, like: Tensor, additive: bool
) -> Tensor:
    """Return which keys each query sees, [1, 1, queries, keys]: those up to it, at most `window`.

    Query i stands at key i + `offset`. The result is bool. With `additive` it has numbers of the
    type of `like`: 0 for a key that is seen, and the least number of the type for any other.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(offset)
    if window is not None:
        seen = seen.triu(offset - window + 1)
    if not additive:
        return seen[None, None]
    least = torch.finfo(like.dtype).min
    zeros = like.new_zeros(1, 1, queries, keys)
    return zeros.masked_fill(~seen, least)


# The operator of compiled blocks. Low-level names: the kernel of a `custom_op` runs below autograd,
# and the backward here needs it.
torch.library.define(
    "drumline::attend",
    "(Tensor query, Tensor key, Tensor value, Tensor lengths_BN, bool causal, SymInt? window,"
    " bool branches, float? scale) -> Tensor",
)
torch.library.define(
    "drumline::attend_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor lengths_BN, bool causal,"
    " SymInt? window, bool branches, float? scale) -> (Tensor, Tensor, Tensor)",
)


def sdpa_by_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths_BN: Tensor,
    causal: bool,
    window: int | None,
    branches: bool,
    scale: float | None,
) -> Tensor:
    """Compute each document by torch's scaled_dot_product_attention.

    `query`, `key`, `value`: [B, H, T, D]; the result is [B, T, H, D]. `lengths_BN`: see
    `Documents`; a tensor, so that other lengths are not compiled anew.
    """
    from drumline.vendor.transformers import sdpa_attention_forward

    lengths = []
    # In host memory: nobody waits for a device.
    for row in lengths_BN.tolist():
        lengths.append(tuple(length for length in row if length >= 0))
    pattern = Pattern(tuple(lengths), query.shape[2], causal, window, branches)
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    function = partial(sdpa_attention_forward, module)
    with torch.autocast(query.device.type, enabled=False):
        out = attend_each_document(function, pattern, False, query, key, value, scaling=scale)
    return out.contiguous()


@torch.library.register_fake("drumline::attend")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return a tensor of the shape that `sdpa_by_documents` returns, while a graph is traced."""
    rows, heads, length, _size = query.shape
    return query.new_empty(rows, length, heads, value.shape[-1])


def sdpa_by_documents_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *pattern: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value.

    The forward, which keeps nothing but its inputs, is computed again. `pattern`: the arguments of
    `sdpa_by_documents` behind `value`.
    """
    again: list[Any] = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    # A dispatch mode, such as that of the memory tracker, calls operators without autograd.
    with exclude_dispatch_key(autograd_key, False), torch.enable_grad():
        out = sdpa_by_documents(*again, *pattern)
        gradients = torch.autograd.grad(out, again, grad)
    return tuple(gradient.contiguous() for gradient in gradients)


@torch.library.register_fake("drumline::attend_backward")
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes of the three gradients, while a graph is traced."""
    grad_query = query.new_empty(query.shape)
    grad_key = key.new_empty(key.shape)
    grad_value = value.new_empty(value.shape)
    return grad_query, grad_key, grad_value


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the arguments of `sdpa_by_documents` for its backward."""
    query, key, value, lengths_BN, *ctx.pattern = inputs
    ctx.save_for_backward(query, key, value, lengths_BN)


def _gradients_by_documents(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `sdpa_by_documents`; None for all but three."""
    query, key, value, lengths_BN = ctx.saved_tensors
    backward = torch.ops.drumline.attend_backward
    gradients = backward(grad, query, key, value, lengths_BN, *ctx.pattern)
    return (*gradients, None, None, None, None, None)


torch.library.impl("drumline::attend", ("cpu", "cuda"), sdpa_by_documents)
torch.library.impl("drumline::attend_backward", ("cpu", "cuda"), sdpa_by_documents_backward)
torch.library.register_autograd(
    "drumline::attend", _gradients_by_documents, setup_context=_keep_inputs
)


def _join_rows(*tensors_BHTD: Tensor) -> list[Tensor]:
    """Return each tensor with its rows end to end, [B × T, H, D]."""
    return [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors_BHTD]


def _split_into_rows(out_NHD: Tensor, like_BHTD: Tensor) -> Tensor:
    """Return rows that are end to end as [B, T, H, D]. `like_BHTD`: a tensor of that B and T."""
    return out_NHD.reshape(like_BHTD.shape[0], like_BHTD.shape[2], *out_NHD.shape[1:])


def _window_size(documents: Documents) -> tuple[int, int]:
    """Return how many tokens to the left and to the right a token sees; -1: all."""
    left = -1
    if documents.window is not None:
        # The token itself is one of the window's.
        left = documents.window - 1
    right = -1
    if documents.causal:
        right = 0
    return left, right


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float | None,
    cap: float | None,
) -> Tensor:
    """Compute attention by torch's own kernel for documents of different lengths.

    `scale`: of the scores; None: the kernel's default. `cap`: the soft cap of the scores; None:
    none.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert cap is None, "this kernel cannot compute soft caps"
    options: dict[str, Any] = {"scale": scale, "window_size": _window_size(documents)}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            # Older versions of torch require as many heads of keys as of queries.
            queries_per_key = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(queries_per_key, 1)
            value = value.repeat_interleave(queries_per_key, 1)
    bounds = documents.cu_seqlens_N
    longest = documents.longest
    q, k, v = _join_rows(query, key, value)
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    return _split_into_rows(out, query)


# Name → module of FlashAttention, once it is imported.
_packages: dict[str, Any] = {}


def flash(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float | None,
    cap: float | None,
) -> Tensor:
    """Compute attention by FlashAttention 2 (`flash_attn`) or 3 (`flash_attn_interface`)."""
    if module not in _packages:
        # This happens in the trial of the kernel: within a graph nothing can be imported.
        _packages[module] = import_module(module)
    package = _packages[module]
    bounds = documents.cu_seqlens_N
    longest = documents.longest
    options = {
        "softmax_scale": scale,
        "causal": documents.causal,
        "window_size": _window_size(documents),
        "softcap": cap or 0.0,
    }
    q, k, v = _join_rows(query, key, value)
    out = package.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, **options)
    # Some versions also return the log-sum-exp.
    if isinstance(out, tuple):
        out = out[0]
    return _split_into_rows(out, query)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float | None,
    cap: float | None,
) -> Tensor:
    """Compute attention by flex_attention, compiled on a GPU.

    On a CPU it is not compiled, since it has no gradients when compiled there.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # [1, H, B × T, D]: all rows are one.
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in _join_rows(query, key, value))
    score_mod = None
    if cap is not None:
        score_mod = partial(_apply_soft_cap, cap)
    function: Any = flex_attention
    # While a graph is compiled, this is a part of it.
    if query.is_cuda and not torch.compiler.is_compiling():
        function = _compile_once(flex_attention)
    out: Any = function(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=documents.block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return _split_into_rows(out[0].transpose(0, 1), query)


def _apply_soft_cap(cap: float, score: Tensor, *_place: Tensor) -> Tensor:
    """Return a score soft-capped to ±cap, as Gemma 2 has it."""
    return cap * torch.tanh(score / cap)


def block_mask(documents: Documents) -> Any:
    """Return flex_attention's mask of a batch.

    It tells which blocks of token pairs hold some that attend to each other.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    cu_seqlens_N = documents.cu_seqlens_N
    total = len(documents.lengths) * documents.width
    places_T = torch.arange(total, device=cu_seqlens_N.device, dtype=cu_seqlens_N.dtype)
    # The number of each token's document.
    owner_T = torch.bucketize(places_T, cu_seqlens_N, right=True)

    def meet(_row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_seen = owner_T[q] == owner_T[k]
        if documents.causal:
            is_seen = is_seen & (q >= k)
        if documents.window is not None:
            is_seen = is_seen & (q - k < documents.window)
        return is_seen

    return create_block_mask(
        meet,
        None,
        None,
        total,
        total,
        device=str(cu_seqlens_N.device),
        _compile=cu_seqlens_N.is_cuda,
    )


@lru_cache
def _compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function. Each is compiled once."""
    return torch.compile(function)


# A new kernel also needs a name in `plan.attention.Kernel`, and a case in `plan.attention.choose`.
KERNELS: dict[str, Callable[..., Tensor]] = {
    "varlen": varlen,
    "flash_attention_2": partial(flash, "flash_attn"),
    "flash_attention_3": partial(flash, "flash_attn_interface"),
    "flex_attention": flex,
}


@lru_cache
def _works(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a kernel gives the results and gradients of documents one by one.

    It is tried on 48 tokens, for causal attention alone, whatever the model adds: a window, soft
    caps or fewer heads of keys. If it does not work, a warning is logged.

    The trial has a thread of its own, since a model's forward may be running in this one. Its
    autocast would change the trial, and the hooks of a recomputation would take the trial for a
    part of it.
    """
    with ThreadPoolExecutor(1, "drumline-trial") as thread:
        trial = thread.submit(bind_to_gpu(_agrees), kernel, device, dtype, head_dim)
        return trial.result()


# The trial's two rows of 24 tokens: two documents and padding, and one document.
_TRIAL_WIDTH = 24
_TRIAL_LENGTHS = ((9, 13), (24,))
_TRIAL_BOUNDS = (0, 9, 22, 24, 48)


def _agrees(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Try a kernel in this thread (see `_works`)."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = []
    for _ in range(3):
        tensor = torch.randn(2, 4, _TRIAL_WIDTH, head_dim, device=device, generator=generator)
        inputs.append(tensor.to(dtype).requires_grad_())
    batch = SimpleNamespace(
        document_lengths=_TRIAL_LENGTHS,
        cu_seqlens_N=torch.tensor(_TRIAL_BOUNDS, dtype=torch.int32, device=device),
        input_ids_BT=inputs[0][:, 0, :, 0],
    )
    documents = Documents(batch, causal=True, window=None)
    try:
        with torch.enable_grad():
            difference = _trial_difference(kernel, documents, inputs)
        allowed = 16 * torch.finfo(dtype).eps
        # Not `difference > allowed`, which NaN would pass.
        reason = f"it is {difference:.1g} off"
        if difference <= allowed:
            reason = ""
    except Exception as error:  # noqa: BLE001 - kernels of others raise what they like
        reason = first_line(error)
    if reason:
        logger.warning(
            "attention by %s does not work here: %s; each document by itself instead",
            kernel,
            reason,
        )
    return not reason


def _trial_difference(kernel: Kernel, documents: Documents, inputs: list[Tensor]) -> float:
    """Return how far a kernel's results and gradients are from those of documents one by one.

    It is the largest difference relative to the largest value of the same tensor. `inputs`: query,
    key and value.
    """
    attend_by_kernel = KERNELS[kernel]
    scale = cap = None
    theirs = _trial_results(attend_by_kernel(*inputs, documents, scale, cap), inputs)
    ours = _trial_results(attend_each_document(_plain_attention, documents, False, *inputs), inputs)
    differences = []
    for one, other in zip(theirs, ours, strict=True):
        largest_difference = (one - other).detach().abs().max()
        largest_value = other.detach().abs().max()
        differences.append(float(largest_difference / largest_value))
    return max(differences)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, _: None, is_causal: bool) -> tuple[Tensor]:
    """Call torch's scaled_dot_product_attention as a function of transformers is called."""
    out_BHTD = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return (out_BHTD.transpose(1, 2),)


def _trial_results(out_BTHD: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return a trial's results without padding, and their gradients, all in fp32.

    The gradients are those of the sum of the results' squares. Padding is left out, since its
    numbers mean nothing.
    """
    real_tokens = sum(_TRIAL_LENGTHS[0])
    first_row = out_BTHD[0, :real_tokens]
    second_row = out_BTHD[1]
    real = torch.cat([first_row, second_row]).float()
    gradients = torch.autograd.grad(real.square().sum(), inputs)
    return [real, *(gradient.float() for gradient in gradients)]
