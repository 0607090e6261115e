"""Which kernel attends: by device, type, head size and what the model's attention does. Planner and ranks ask alike. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout

# masked: transformers' own way, under a mask of all pairs of a row. The rest get the lengths of documents, and no mask.
Kernel = Literal[
    "masked", "documents", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
]
PACKAGES: dict[Kernel, str] = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn",
}
PREFIX, ELSE = "drumline_by_", "_else_"
# The memory-efficient kernel, which is the one for fp32 on GPUs, pads its log-sum-exps to this many tokens. torch's ring merges those of
# chunks by the lengths of these, so a chunk has to be a multiple.
RING_CHUNK = 32
LARGEST_HEAD = 256  # entries of a head that FlashAttention's kernels take, in steps of 8
_is_padded: ContextVar[bool | None] = ContextVar("is_padded", default=None)  # see known_padding


class Choice(NamedTuple):
    """A kernel, and why it was chosen."""

    kernel: Kernel
    why: str

    @property
    def line(self) -> str:
        """For the plan. Kernels for GPUs have run on none here."""
        label = "" if self.kernel in ("masked", "documents") else " (experimental)"
        return f"{self.kernel}{label}: {self.why}"


@cache
def installed(package: str) -> bool:
    """Whether a package can be imported here; a search asks thousands of times."""
    return find_spec(package) is not None


def choose(layout: Layout, head_dim: int, caps: bool, own: bool, needs_mask: str) -> Choice:
    """The kernel of a layout's policy. `caps`: its scores are soft-capped; `own`: they have dropout, or its class does with them what sdpa
    cannot. `needs_mask`: why documents cannot be given to its attention by their lengths; empty where they can."""
    wanted = layout.config.model.attention
    if wanted in ("sdpa", "eager"):
        return Choice("masked", f"model.attention is {wanted}")
    if layout.devices_per_rank > 1:
        needs_mask = "dp cuts the rows of a batch that is collated already"
    if layout.mesh.cp > 1 and layout.strategy.context_method() == "ring":
        needs_mask = "ring attention (experimental: no GPU has run it yet) has a kernel of its own"
    if needs_mask:
        return Choice("masked", needs_mask)
    if wanted != "auto":
        return Choice(wanted, "model.attention sets it")  # type: ignore[arg-type]
    if not layout.config.packs and layout.config.head != "text":
        return Choice("documents", "a row is one, and what stands behind it needs no mask")
    if layout.device == "cpu":
        return Choice("documents", "each by itself, which spares the pairs of tokens between them")
    if layout.precision == "fp32" or own:
        return Choice(
            "documents",
            "the model's own function computes scores"
            if own
            else "kernels for variable lengths take 16 bits alone",
        )
    if head_dim <= LARGEST_HEAD and head_dim % 8 == 0:
        for kernel, package in PACKAGES.items():
            if installed(package):
                return Choice(kernel, f"{package} is installed")
        if not caps:
            return Choice(
                "varlen", "torch's own kernel for variable lengths takes heads of this size"
            )
    return Choice(
        "flex_attention",
        "scores are soft-capped" if caps else f"no other kernel takes heads of {head_dim}",
    )


def choice_of(layout: Layout, facts: ModelFacts) -> Choice:
    """The kernel of a layout's policy, by its sizes."""
    own = facts.drops_scores or (facts.keeps_scores and not facts.caps_scores)
    return choose(layout, facts.head_dim, facts.caps_scores, own, facts.needs_mask)


def name_of(kernel: Kernel, before: str) -> str:
    """The name of transformers' interface that a model has under this kernel, in the place of `before`."""
    # By "flash" transformers would know a kernel of its own.
    short = kernel.replace("flash_attention_", "fa").removesuffix("_attention")
    return f"{PREFIX}{short}{ELSE}{before}"


def by_documents(model: Any) -> bool:
    """Whether the model attends by documents where a batch has them."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", "")).startswith(
        PREFIX
    )


@contextlib.contextmanager
def known_padding(is_padded: bool) -> Iterator[None]:
    """Say of a batch without documents whether rows have padding.

    transformers would look at the mask on the device before each token, and the host would wait.
    """
    token = _is_padded.set(is_padded)
    try:
        yield
    finally:
        _is_padded.reset(token)


def has_padding() -> bool | None:
    """Return what `known_padding` said around this call; None where nothing is known."""
    return _is_padded.get()


@contextlib.contextmanager
def as_before(model: Any) -> Iterator[None]:
    """The model with transformers' own attention, for code that looks at its name."""
    if not by_documents(model):
        yield
        return
    name = model.config._attn_implementation
    model.set_attn_implementation(name.partition(ELSE)[2])
    try:
        yield
    finally:
        model.set_attn_implementation(name)
