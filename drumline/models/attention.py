"""Attention by documents: the lengths of a batch's documents take the place of a mask over all pairs of tokens.

Laid under a model by transformers' own seam, an attention function and a mask function under a name of ours. The model decides what a
layer attends to (all, a sliding window); the mask function gives `Documents` in the place of a mask, which each block hands to the
attention function, when it is computed again too. Where no batch is in hand (generation, trials) both are the model's own.
B rows, T tokens of a row, H heads, of size D; N documents of a batch, padding at the end of a row among them.
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
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drumline.core.attention import Kernel, by_documents, choose, has_padding, name_of
from drumline.core.plan import Layout
from drumline.core.threads import on_this_gpu
from drumline.foreign import first_line
from drumline.models.blocks import needs_mask
from drumline.models.classes import of_layers
from drumline.models.sequence import SequencePart

logger = logging.getLogger(__name__)
# Config keys of GPT-2, Llama and BERT for dropout over attention's scores.
SCORE_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_batch: ContextVar[Any] = ContextVar("batch")  # the one that a model runs on


@dataclass(eq=False)
class Pattern:
    """Which tokens of rows may meet, as numbers of the host.

    `lengths`: of each row's documents, without padding. `width`: tokens of a row. A token sees its
    own document: with `causal` what stands up to it, with `window` only the nearest so many tokens.
    With `branches` each document continues the first of its row, which it sees.
    """

    lengths: tuple[tuple[int, ...], ...]
    width: int
    causal: bool
    window: int | None
    branches: bool


class Documents(Pattern):
    """What a layer attends to, in the place of a mask.

    `bounds_N`: int32[N + 1], where documents begin in all rows end to end; the last is B × T.
    `longest`: tokens of the longest document, paddings among them. `kernel`: takes the lengths of
    this batch in one call; None: each document by itself.
    """

    def __init__(self, batch: Any, causal: bool, window: int | None) -> None:
        width = batch.input_ids_BT.shape[1]
        super().__init__(batch.documents, width, causal, window, getattr(batch, "branches", False))
        self.bounds_N: Tensor = batch.bounds_N
        self.longest = 0
        for row in self.lengths:
            self.longest = max(self.longest, *row, width - sum(row))
        self.kernel: Callable[..., Tensor] | None = None

    @cached_property
    def block_mask(self) -> Any:
        """flex_attention's mask over all rows end to end, made once for all layers."""
        return block_mask(self)

    @cached_property
    def lengths_BN(self) -> Tensor:  # noqa: N802 - letters of dimensions
        """`lengths` as int64[B, N] in host memory, filled up with -1 (see `attend`).

        There are two columns at least: a size of 1 would be compiled by itself.
        """
        columns = max([2, *(len(row) for row in self.lengths)])
        return torch.tensor([[*row, *[-1] * (columns - len(row))] for row in self.lengths])

    def prepare(self, kernel: Kernel, dtype: torch.dtype, head_dim: int) -> None:
        """Choose how to attend, before any block runs: within a compiled one nothing can be tried.

        `kernel`: the one of the policy. `dtype`, `head_dim`: of queries.
        """
        is_usable = kernel != "documents" and not self.branches
        if is_usable and _works(kernel, self.bounds_N.device, dtype, head_dim):
            self.kernel = KERNELS[kernel]
        if self.kernel is None:
            self.lengths_BN  # noqa: B018 - is kept
        elif kernel == "flex_attention":
            self.block_mask  # noqa: B018 - is kept


def attend_by_documents(model: Any, layout: Layout, on_host: bool = False) -> None:
    """Let a Hugging Face model attend by documents on the layout's devices, if it can.

    `on_host`: the model only runs on a CPU, for a trial before the launch. No kernel of the
    layout's devices is tried there, so no line says that one does not work.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    size = max(size or 0 for size in of_layers(text, "head_dim")) or (
        getattr(text, "hidden_size", 0) // heads if heads else 0
    )
    (caps, drops), before = caps_and_drops(text), model.config._attn_implementation
    kernel, _ = choose(
        layout, size, caps, drops or (before == "eager" and not caps), needs_mask(model)
    )
    if kernel == "masked":
        return
    if on_host:
        kernel = "documents"
    name = name_of(kernel, before)
    whole = None if before == "eager" else AttentionInterface()[before]
    AttentionInterface.register(name, partial(attention, whole))
    AttentionMaskInterface.register(name, partial(mask, kernel, size, before))
    model.set_attn_implementation(name)


def caps_and_drops(text: Any) -> tuple[bool, bool]:
    """Whether the scores of attention are soft-capped, and have dropout, by a config."""
    return bool(getattr(text, "attn_logit_softcapping", None)), any(
        getattr(text, key, None) for key in SCORE_DROPOUTS
    )


def batch_in_hand() -> bool:
    """Whether a model runs on a batch whose documents are known."""
    return _batch.get(None) is not None


@contextlib.contextmanager
def attending(
    model: Any, batch: Any, sequence: SequencePart | None = None
) -> Iterator[dict[str, Any]]:
    """The arguments of a model for a batch, or for this rank's part of it, and a context for its forward.

    A mask of ones, or no positions, keep transformers from looking for documents in the positions, for which the host would wait.
    """
    inputs, rows = (
        batch.inputs() if sequence is None else sequence.inputs(batch),
        getattr(batch, "documents", None),
    )
    if rows is None or not by_documents(model):
        if (
            rows is not None and sequence is None and all(len(row) <= 1 for row in rows)
        ):  # 0, 1, 2, … in each: the model's own
            inputs = {
                name: tensor
                for name, tensor in inputs.items()
                if name != "position_ids" or tensor.ndim > 2
            }
        yield inputs
        return
    token = _batch.set(batch)
    try:
        yield {"attention_mask": torch.ones_like(batch.input_ids_BT)} | inputs
    finally:
        _batch.reset(token)


def mask(kernel: Kernel, head_dim: int, before: str, **options: Any) -> Any:
    """In the place of a mask function of transformers: `Documents` of the batch in hand; None where is_causal says it all. Without a
    batch, and for patterns that are neither all tokens nor causal ones nor a window of these, the mask of `before`."""
    from transformers import AttentionMaskInterface

    from drumline.vendor.transformers import find_packed_sequence_indices, packed_mask

    batch, window = _batch.get(None), options.get("local_size")
    causal = options.get("allow_is_causal_skip", True)
    everything = options.get("allow_is_bidirectional_skip", False) and window is None
    if batch is not None and (causal or everything):
        documents = Documents(batch, not everything, window)
        # Padding stands behind all others, where no causal token sees it.
        alone = all(
            row == (documents.width,) if everything else len(row) <= 1 for row in documents.lengths
        )
        if alone and before == "sdpa" and (window is None or window >= documents.width):
            return None
        dtype = options.get("dtype", torch.float32)
        documents.prepare(kernel, _autocast_type(batch.bounds_N.device.type) or dtype, head_dim)
        return documents
    if batch is not None and getattr(batch, "attention_mask_BT", None) is None:
        options["attention_mask"], positions_BT = None, batch.position_ids_BT
        if (documents_BT := find_packed_sequence_indices(positions_BT)) is not None:
            options["mask_function"] = packed_mask(
                options["mask_function"], positions_BT, documents_BT
            )
    is_padded = has_padding()
    if batch is None and is_padded is True:
        options["allow_is_causal_skip"] = False
    elif batch is None and is_padded is False:
        options["attention_mask"] = None
    return AttentionMaskInterface()[before](**options)


def _autocast_type(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def attention(
    whole: Callable[..., Any] | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """In the place of an attention function of transformers. Can be traced as a part of one graph.

    `whole`: that function; None: the eager one of the module's own class. `query`, `key` and
    `value` are [B, H, T, D], the result is [B, T, H, D]. Tokens of padding get zeros, or numbers
    that mean nothing.
    """
    if not isinstance(attention_mask, Documents):
        function: Any = _eager(module) if whole is None else whole
        made: tuple[Tensor, Any] = function(module, query, key, value, attention_mask, **options)
        return made
    documents, cap, scale = attention_mask, options.get("softcap"), options.get("scaling")
    low = _autocast_type(query.device.type)
    if low is not None:
        # Rotary positions leave queries and keys in fp32, values not; autocast knows no operator
        # but torch's own scaled_dot_product_attention, which casts them like this.
        query, key, value = query.to(low), key.to(low), value.to(low)
    has_own = bool(options.get("dropout")) or (whole is None and cap is None)  # sinks, for one
    is_of_one_size = query.shape[-1] == value.shape[-1]
    if documents.kernel is not None and not has_own and is_of_one_size:
        return documents.kernel(query, key, value, documents, scale, cap), None
    is_additive = whole is None or cap is not None
    if not torch.compiler.is_compiling():
        return _by_function(module, is_additive, documents, query, key, value, options), None
    if is_additive or has_own or documents.kernel is not None:
        return _out_of_graph(module, is_additive, documents, query, key, value, options), None
    arguments = documents.lengths_BN, documents.causal, documents.window, documents.branches
    out: Tensor = torch.ops.drumline.attend(query, key, value, *arguments, scale)
    return out, None


def _eager(module: Any) -> Any:
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _by_function(
    module: Any,
    is_additive: bool,
    documents: Pattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Each document by a function of transformers.

    sdpa has no soft caps, and none of what a class without sdpa does besides.
    """
    from drumline.vendor.transformers import sdpa_attention_forward

    function = partial(_eager(module) if is_additive else sdpa_attention_forward, module)
    return one_by_one(function, documents, is_additive, query, key, value, **options)


# A class's own eager function may have dropout, or weights of its own: nobody can register it.
_out_of_graph = torch.compiler.disable(_by_function)


def one_by_one(
    whole: Callable[..., Any],
    documents: Pattern,
    additive: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> Tensor:
    """Each document by `whole`, a function of transformers, which gives [1, n, H, D]. `additive`: it takes a mask of numbers and nothing
    else. Rows and documents are split and put together again: the gradient of a slice would be as large as what it is cut from.

    A row of padding alone, which fills up the last batch, counts as a document: each parameter gets its gradient in each micro-batch, or
    DDP would not reduce it."""
    rows = []
    for of_documents, *of_row in zip(
        documents.lengths, query.split(1), key.split(1), value.split(1), strict=True
    ):
        lengths = of_documents or (documents.width,)
        padding = documents.width - sum(lengths)
        queries, *seen = (tensor.split([*lengths, padding], 2)[: len(lengths)] for tensor in of_row)
        if documents.branches:
            seen = [
                (first, *(torch.cat([first, part], 2) for part in rest)) for first, *rest in seen
            ]
        made = [
            out
            for part in zip(queries, *seen, strict=True)
            for out in _of_one(whole, documents, additive, options, *part)
        ]
        if padding:
            made.append(query.new_zeros(1, padding, query.shape[1], value.shape[-1]))
        rows.append(torch.cat(made, 1) if len(made) > 1 else made[0])
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _of_one(
    whole: Callable[..., Any],
    documents: Pattern,
    additive: bool,
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Iterator[Tensor]:
    """A document's attention, with a window in stretches of so many queries, each with the keys that they see. Keys before its own are
    those of what it goes on from."""
    length, keys, window = query.shape[2], key.shape[2], documents.window
    before = keys - length
    if window is None or window >= keys:
        allowed = (
            band(length, keys, before, None, query, additive)
            if (additive or before) and documents.causal
            else None
        )
        yield whole(
            query, key, value, allowed, **options | {"is_causal": documents.causal and not before}
        )[0]
        return
    for start in range(before, keys, window):
        stop, first = min(start + window, keys), max(0, start - window + 1)
        allowed = band(stop - start, stop - first, start - first, window, query, additive)
        part = (
            query[:, :, start - before : stop - before],
            key[:, :, first:stop],
            value[:, :, first:stop],
        )
        yield whole(*part, allowed, **options | {"is_causal": False})[0]


def band(
    queries: int, keys: int, offset: int, window: int | None, like: Tensor, additive: bool
) -> Tensor:
    """Which keys a query sees, [1, 1, queries, keys]: those up to it, of these the last `window`. Query i stands at key i + `offset`.
    bool, or `additive` numbers, of the type of `like`."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(offset)
    if window is not None:
        seen = seen.triu(offset - window + 1)
    if not additive:
        return seen[None, None]
    return like.new_zeros(1, 1, queries, keys).masked_fill(~seen, torch.finfo(like.dtype).min)


# ------------------------------------------------------------------------------------------------- the operator of compiled blocks
# Low-level names: the kernel of a `custom_op` runs below autograd, and the backward here needs it.
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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths_BN: Tensor,
    causal: bool,
    window: int | None,
    branches: bool,
    scale: float | None,
) -> Tensor:
    """Each document by torch's scaled_dot_product_attention: [B, H, T, D] in, [B, T, H, D] out.

    `lengths_BN`: see `Documents`; a tensor, so that other lengths are not compiled anew.
    """
    from drumline.vendor.transformers import sdpa_attention_forward

    rows = lengths_BN.tolist()  # in host memory: nobody waits for a device
    lengths = tuple(tuple(length for length in row if length >= 0) for row in rows)
    pattern = Pattern(lengths, query.shape[2], causal, window, branches)
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    function = partial(sdpa_attention_forward, module)
    with torch.autocast(query.device.type, enabled=False):
        out = one_by_one(function, pattern, False, query, key, value, scaling=scale)
    return out.contiguous()


@torch.library.register_fake("drumline::attend")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    rows, heads, length, _size = query.shape
    return query.new_empty(rows, length, heads, value.shape[-1])


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *pattern: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value. Computes the forward again, of which nothing is kept."""
    again: list[Any] = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        out = attend(*again, *pattern)
    gradients = torch.autograd.grad(out, again, grad)
    return tuple(gradient.contiguous() for gradient in gradients)


@torch.library.register_fake("drumline::attend_backward")
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, lengths_BN, *ctx.pattern = inputs
    ctx.save_for_backward(query, key, value, lengths_BN)


def _go_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, lengths_BN = ctx.saved_tensors
    backward = torch.ops.drumline.attend_backward
    gradients = backward(grad, query, key, value, lengths_BN, *ctx.pattern)
    return (*gradients, None, None, None, None, None)


torch.library.impl("drumline::attend", ("cpu", "cuda"), attend)
torch.library.impl("drumline::attend_backward", ("cpu", "cuda"), attend_backward)
torch.library.register_autograd("drumline::attend", _go_back, setup_context=_keep_inputs)


# ------------------------------------------------------------------------------------------------- kernels for variable lengths
Numbers = float | None


def _ends_to_end(*tensors_BHTD: Tensor) -> list[Tensor]:
    """[B × T, H, D] of each."""
    return [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors_BHTD]


def _in_rows(out_NHD: Tensor, like_BHTD: Tensor) -> Tensor:
    """[B, T, H, D] of the rows end to end."""
    return out_NHD.reshape(like_BHTD.shape[0], like_BHTD.shape[2], *out_NHD.shape[1:])


def _reach(documents: Documents) -> tuple[int, int]:
    """Tokens to the left and to the right that a token sees, -1 for all."""
    return (-1 if documents.window is None else documents.window - 1), (
        0 if documents.causal else -1
    )


def varlen(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: Numbers, cap: Numbers
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert cap is None, "it has no soft caps"
    options: dict[str, Any] = {"scale": scale, "window_size": _reach(documents)}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            key, value = (
                tensor.repeat_interleave(query.shape[1] // key.shape[1], 1)
                for tensor in (key, value)
            )
    bounds, longest = documents.bounds_N, documents.longest
    q, k, v = _ends_to_end(query, key, value)
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    return _in_rows(out, query)


_packages: dict[str, Any] = {}


def flash(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: Numbers,
    cap: Numbers,
) -> Tensor:
    """FlashAttention 2 (`flash_attn`) or 3 (`flash_attn_interface`)."""
    if module not in _packages:
        # At the trial: in a graph nothing can be imported.
        _packages[module] = import_module(module)
    function = _packages[module]
    bounds, longest = documents.bounds_N, documents.longest
    options = {
        "softmax_scale": scale,
        "causal": documents.causal,
        "window_size": _reach(documents),
        "softcap": cap or 0.0,
    }
    out = function.flash_attn_varlen_func(
        *_ends_to_end(query, key, value), bounds, bounds, longest, longest, **options
    )
    return _in_rows(out[0] if isinstance(out, tuple) else out, query)


def flex(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: Numbers, cap: Numbers
) -> Tensor:
    """flex_attention, compiled on a GPU; on a CPU it has no gradients there, and runs as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (tensor.transpose(0, 1)[None] for tensor in _ends_to_end(query, key, value))
    capped = None if cap is None else partial(_capped, cap)
    compiles = query.is_cuda and not torch.compiler.is_compiling()  # else it is a part of a graph
    run: Any = _compiled(flex_attention) if compiles else flex_attention
    grouped = query.shape[1] != key.shape[1]
    out: Any = run(
        q, k, v, score_mod=capped, block_mask=documents.block_mask, scale=scale, enable_gqa=grouped
    )
    return _in_rows(out[0].transpose(0, 1), query)


def _capped(cap: float, score: Tensor, *_place: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


def block_mask(documents: Documents) -> Any:
    """flex_attention's mask: which blocks of pairs of all tokens hold some that may meet."""
    from torch.nn.attention.flex_attention import create_block_mask

    bounds_N, total = documents.bounds_N, len(documents.lengths) * documents.width
    places_T = torch.arange(total, device=bounds_N.device, dtype=bounds_N.dtype)
    owner_T = torch.bucketize(places_T, bounds_N, right=True)

    def meet(_row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = owner_T[q] == owner_T[k]
        if documents.causal:
            seen = seen & (q >= k)
        return seen if documents.window is None else seen & (q - k < documents.window)

    return create_block_mask(
        meet, None, None, total, total, device=str(bounds_N.device), _compile=bounds_N.is_cuda
    )


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "varlen": varlen,
    "flash_attention_2": partial(flash, "flash_attn"),
    "flash_attention_3": partial(flash, "flash_attn_interface"),
    "flex_attention": flex,
}


@lru_cache
def _works(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a kernel gives what documents one by one give, and their gradients, tried on 48 tokens; a line in the log where not.

    Tried in a thread of its own, where nothing of a model's forward holds: it may be one that is computed again, whose hooks would take the
    trial for a part of it, or one under autocast."""
    with ThreadPoolExecutor(1, "drumline-trial") as thread:
        return thread.submit(on_this_gpu(_agrees), kernel, device, dtype, head_dim).result()


def _agrees(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(2, 4, 24, head_dim, device=device, generator=generator)
        .to(dtype)
        .requires_grad_()
        for _ in range(3)
    ]
    bounds_N = torch.tensor([0, 9, 22, 24, 48], dtype=torch.int32, device=device)
    documents = Documents(
        SimpleNamespace(
            documents=((9, 13), (24,)), bounds_N=bounds_N, input_ids_BT=inputs[0][:, 0, :, 0]
        ),
        True,
        None,
    )

    def plain(q: Tensor, k: Tensor, v: Tensor, _: None, is_causal: bool) -> tuple[Tensor]:
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2),
        )

    def answers(out_BTHD: Tensor) -> list[Tensor]:
        real = torch.cat([out_BTHD[0, :22], out_BTHD[1]]).float()
        return [
            real,
            *(gradient.float() for gradient in torch.autograd.grad(real.square().sum(), inputs)),
        ]

    try:
        with torch.enable_grad():
            theirs = answers(KERNELS[kernel](*inputs, documents, None, None))
            ours = answers(one_by_one(plain, documents, False, *inputs))
        far = max(
            float((one - other).detach().abs().max() / other.detach().abs().max())
            for one, other in zip(theirs, ours, strict=True)
        )
        reason = f"it is {far:.1g} off" if not far <= 16 * torch.finfo(dtype).eps else ""
    except Exception as error:  # noqa: BLE001 - kernels of others raise what they like
        reason = first_line(error)
    if reason:
        logger.warning(
            "attention by %s does not work here: %s; each document by itself instead",
            kernel,
            reason,
        )
    return not reason
