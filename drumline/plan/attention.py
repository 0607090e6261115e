"""Choose the kernel that computes attention, by device, precision, head size and the model.

The planner asks for the layouts that it estimates, and each rank for the model that it has built.
No torch here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout

# masked: transformers' own attention, under a mask of all pairs of a row's tokens. All others get
# the lengths of documents in place of a mask. documents: torch's sdpa, called for each document.
Kernel = Literal[
    "masked", "documents", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
]
# The package of each FlashAttention, the preferred one first. The first is built for Hopper
# GPUs and is only installed on these.
PACKAGES: dict[Kernel, str] = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn",
}
# Name of the attention interface: PREFIX, the kernel, ELSE, the name of the one that was before.
PREFIX = "drumline_by_"
ELSE = "_else_"
# For fp32 on GPUs, torch's ring uses the memory-efficient kernel, which pads its log-sum-exps to a
# multiple of this many tokens. The ring merges the log-sum-exps of chunks by their padded lengths,
# so a chunk must have such a length by itself.
RING_CHUNK = 32
# Entries of a head that FlashAttention's kernels take at most. They take multiples of 8.
LARGEST_HEAD = 256
# The argument of `known_padding` inside its block; None outside.
_is_padded: ContextVar[bool | None] = ContextVar("is_padded", default=None)


class Choice(NamedTuple):
    """A kernel, and why it was chosen, as a line of the plan says it."""

    kernel: Kernel
    why: str

    @property
    def line(self) -> str:
        """Return the choice as a line of the plan.

        Kernels for GPUs are experimental, since they have run on none here.
        """
        label = ""
        if self.kernel not in ("masked", "documents"):
            label = " (experimental)"
        return f"{self.kernel}{label}: {self.why}"


@cache
def is_installed(package: str) -> bool:
    """Return whether a package can be imported. It is cached, as a search asks thousands of times."""
    return find_spec(package) is not None


def choose(
    layout: Layout, head_dim: int, caps_scores: bool, has_own_scores: bool, needs_mask: str
) -> Choice:
    """Return the kernel of a layout's policy.

    It is `masked` if the strategy or the model needs a mask, even if model.attention names a kernel.

    `head_dim`: entries of an attention head. `caps_scores`: its scores are soft-capped.
    `has_own_scores`: its scores have dropout, or its class computes them as sdpa cannot.
    `needs_mask`: why its attention takes a mask; empty if the lengths of documents are enough.
    """
    wanted = layout.config.model.attention
    if wanted in ("sdpa", "eager"):
        return Choice("masked", f"model.attention is {wanted}")
    mask_reason = _reason_for_mask(layout) or needs_mask
    if mask_reason:
        return Choice("masked", mask_reason)
    if wanted != "auto":
        return Choice(wanted, "model.attention sets it")  # type: ignore[arg-type]
    documents_reason = _reason_for_documents(layout, has_own_scores)
    if documents_reason:
        return Choice("documents", documents_reason)
    return _choose_on_gpu(head_dim, caps_scores)


def _reason_for_mask(layout: Layout) -> str:
    """Return why the strategy needs a mask with any model; empty if lengths of documents do."""
    if layout.mesh.cp > 1 and layout.strategy.context_method() == "ring":
        return "ring attention (experimental: no GPU has run it yet) has a kernel of its own"
    if layout.devices_per_rank > 1:
        return "dp cuts the rows of a batch that is collated already"
    return ""


def _reason_for_documents(layout: Layout, has_own_scores: bool) -> str:
    """Return why sdpa is called for each document; empty if one kernel can take a whole batch."""
    if not layout.config.packs and layout.config.head not in ("text", "embedding"):
        return "each row is one document, and causal attention needs no mask for padding after it"
    if layout.device == "cpu":
        return "each is computed by itself, without pairs of tokens of two documents"
    if has_own_scores:
        return "the model's own function computes scores"
    if layout.precision == "fp32":
        return "kernels for variable lengths take 16 bits alone"
    return ""


def _choose_on_gpu(head_dim: int, caps_scores: bool) -> Choice:
    """Return the kernel for packed documents in 16 bits on a GPU."""
    flash_takes_heads = head_dim <= LARGEST_HEAD and head_dim % 8 == 0
    if flash_takes_heads:
        for kernel, package in PACKAGES.items():
            if is_installed(package):
                return Choice(kernel, f"{package} is installed")
    if flash_takes_heads and not caps_scores:
        why = "torch's own kernel for variable lengths takes heads of this size"
        return Choice("varlen", why)
    if caps_scores:
        return Choice("flex_attention", "scores are soft-capped")
    return Choice("flex_attention", f"no other kernel takes heads of {head_dim}")


def choose_by_facts(layout: Layout, facts: ModelFacts) -> Choice:
    """Return the kernel of a layout's policy, whose model has these facts."""
    keeps_uncapped_scores = facts.keeps_scores and not facts.caps_scores
    has_own_scores = facts.drops_scores or keeps_uncapped_scores
    return choose(layout, facts.head_dim, facts.caps_scores, has_own_scores, facts.needs_mask)


def row_multiple(
    cp: int, method: Literal["ulysses", "ring"], precision: str, device: Literal["cpu", "cuda"]
) -> int:
    """Return the number that the tokens of a row must be a multiple of, to divide over `cp` ranks."""
    if cp == 1 or method == "ulysses":
        return cp
    # With two parts each, from both ends of the sequence, ranks have as much causal work.
    parts = 2 * cp
    if precision == "fp32" and device != "cpu":
        return parts * RING_CHUNK
    return parts


def interface_name(kernel: Kernel, before: str) -> str:
    """Return the name under which a kernel is registered as transformers' attention interface.

    `before`: the name of the interface that the model had. `original_attention` restores it.
    """
    # transformers takes a name with "flash" in it for a kernel of its own.
    short = kernel.replace("flash_attention_", "fa").removesuffix("_attention")
    return f"{PREFIX}{short}{ELSE}{before}"


def has_drumline_attention(model: Any) -> bool:
    """Return whether a model's attention is one of Drumline's kernels, which take documents."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", "")
    return str(implementation).startswith(PREFIX)


@contextlib.contextmanager
def known_padding(is_padded: bool) -> Iterator[None]:
    """State, for attention inside the block, whether rows of a batch without documents are padded.

    Without it transformers reads the mask on the device at each token, and the host waits.
    """
    token = _is_padded.set(is_padded)
    try:
        yield
    finally:
        _is_padded.reset(token)


def has_padding() -> bool | None:
    """Return the argument of the `known_padding` around this call; None if there is none."""
    return _is_padded.get()


@contextlib.contextmanager
def original_attention(model: Any) -> Iterator[None]:
    """Give the model its original attention inside the block, for code that reads its name."""
    if not has_drumline_attention(model):
        yield
        return
    name = model.config._attn_implementation
    model.set_attn_implementation(name.partition(ELSE)[2])
    try:
        yield
    finally:
        model.set_attn_implementation(name)
