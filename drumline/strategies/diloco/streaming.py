"""Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512, algorithm 2): fragments of the weights take their outer steps in turn, and are
exchanged while the inner steps go on.

A fragment is an equal part of all trainable weights, end to end. After its step t it is sent, and after t + `delay` steps used, always: a
rank that comes there first waits, so all ranks take the same course, whatever the network does. Then θ ← `keep` × θ + (1 − keep) × the
outer weights (without a delay: the outer weights).

In 8 bits (`parallel.compress.encode`: block-wise, as Int8 there) no error feedback is kept: the outer gradient is the sum of a period's
steps, and what rounding takes from it stays in the rank's own weights where it keeps some of them (docs/slow_links.md has the distance).

Evaluation and a checkpoint first take the outer steps of what is under way, so a checkpoint holds no piece, and a run that is killed and
goes on from it takes the same course.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from drumline.core.cost import BLOCK
from drumline.dist.mesh import side_group
from drumline.errors import ConfigError
from drumline.parallel.compress import ALL_GATHER, decode, encode
from drumline.parallel.native import NativeEngine
from drumline.strategies.diloco.engine import DiLoCoEngine
from drumline.vendor.torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub

Parts = list[torch.Tensor]  # flat views of some weights, one after another


class StreamingEngine(DiLoCoEngine):
    """`under_way`: fragment → steps done when it was sent, and its mean over the ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        each = (
            cut(tensors, self.outer.fragments)
            for tensors in (self.weights, self.anchors, self.moments)
        )
        self.fragments = list(zip(*each, strict=True))
        # What is sent is of a multiple of so many entries.
        self.whole = self.ranks * BLOCK if self.outer.bits == 8 else 1
        self.under_way: dict[int, tuple[int, Mean]] = {}
        self.shares_norm = True

    def go_alone(self) -> bool:
        """From now on a step waits for no other rank, where the strategy has a delay; whether it is so. The caller shares the norm."""
        self.shares_norm = self.outer.delay == 0
        return not self.shares_norm

    def grad_norm(self) -> torch.Tensor:
        if self.shares_norm:
            return super().grad_norm()
        self.own_norm = self.shared_norm = NativeEngine.grad_norm(self)
        return self.own_norm

    def after_step(self) -> None:
        began = time.perf_counter()
        for number, (sent, mean) in list(self.under_way.items()):
            if self.steps - sent == self.outer.halfway:
                mean.send_on()
            if self.steps - sent == self.outer.delay:
                self._take(number)
        if (due := self.outer.sends(self.steps - 1)) is not None:
            weights, anchors, _ = self.fragments[due]
            self.under_way[due] = (
                self.steps,
                Mean(difference(anchors, weights, self.whole), self.outer.bits, self.ranks),
            )
            if not self.outer.delay:
                self._take(due)
        self.waited += time.perf_counter() - began

    def _take(self, number: int) -> None:
        _, mean = self.under_way.pop(number)
        self._outer_step(number, mean.wait())

    def _outer_step(self, number: int, flat: torch.Tensor, is_in: bool = True) -> None:
        """Of a fragment. `flat`: the mean of its outer gradients. Where this rank's is not in it, its weights move with the outer ones, so
        that its outer gradient stays what it is."""
        weights, anchors, moments = self.fragments[number]
        sizes = [part.numel() for part in anchors]
        deltas = list(flat[: sum(sizes)].split(sizes))
        before = [] if is_in else [part.clone() for part in anchors]
        self.outer_step(anchors, moments, deltas)
        if not is_in:
            foreach_add_(weights, foreach_sub(anchors, before))
        elif self.outer.delay and self.outer.keep:
            foreach_mul_(weights, self.outer.keep)
            foreach_add_(weights, anchors, alpha=1 - self.outer.keep)
        else:
            foreach_copy_(weights, anchors)

    def _drain(self) -> None:
        for number in list(self.under_way):
            self.together = False
            self._take(number)

    def _come_together(self) -> None:
        self._drain()
        super()._come_together()

    def tensors(self) -> dict[str, torch.Tensor]:
        self._drain()
        return super().tensors()


class Mean:
    """The mean of fp32[N] over all ranks, on its way; of one process alone what it comes with. In 8 bits it takes two collectives, and N is
    of whole blocks for each rank."""

    def __init__(self, flat: torch.Tensor, bits: int, ranks: int) -> None:
        self.bits, self.ranks = bits, ranks
        self.on = False  # the second collective is begun
        if bits == 8:
            self.sent = encode(flat.view(ranks, -1))
            self.received = torch.empty_like(self.sent) if ranks > 1 else self.sent
            self.work = self._begin(dist.all_to_all_single, self.received, self.sent)
        else:
            self.sent = flat.div_(ranks)
            self.work = self._begin(dist.all_reduce, self.sent)

    def send_on(self) -> None:
        """Begin the second collective, where there is one."""
        if self.bits == 8 and self.ranks > 1 and not self.on:
            self.on = True
            self.work.wait()
            self.sent = encode(decode(self.received).sum(0, keepdim=True).div_(self.ranks))
            self.work = self._begin(ALL_GATHER, self.received, self.sent)

    def wait(self) -> torch.Tensor:
        """The mean, the same bits on all ranks."""
        self.send_on()
        if self.work is not None:
            self.work.wait()
        return decode(self.received).flatten() if self.bits == 8 else self.sent

    def _begin(self, collective: Any, *tensors: torch.Tensor) -> Any:
        # In a group of its own: what the loop sums up in each step does not queue behind it.
        return (
            collective(*tensors, group=side_group(dist.group.WORLD), async_op=True)
            if self.ranks > 1
            else None
        )


def difference(anchors: Parts, weights: Parts, whole: int) -> torch.Tensor:
    """Anchors minus weights, end to end, and behind them zeros up to a multiple of `whole` entries."""
    sizes = [anchor.numel() for anchor in anchors]
    flat = anchors[0].new_empty(-(-sum(sizes) // whole) * whole)
    flat[sum(sizes) :] = 0
    for part, anchor, weight in zip(flat[: sum(sizes)].split(sizes), anchors, weights, strict=True):
        torch.sub(anchor, weight, out=part)
    return flat


def cut(tensors: Parts, number: int) -> list[Parts]:
    """Views of `tensors`, end to end, in `number` parts of as many entries, give or take one. Raises ConfigError where there are fewer."""
    total = sum(tensor.numel() for tensor in tensors)
    if total < number:
        what = f"{number} fragments of {total} trained weights"
        raise ConfigError(
            what, where="strategy.fragments", fix="take as many as there are weights at most"
        )
    stops = [total * (part + 1) // number for part in range(number)]
    parts, at, part = [Parts() for _ in range(number)], 0, 0
    for tensor in tensors:
        # In the order of its memory, which its anchor shares: a weight may be transposed, or of channels last.
        strides = tensor.stride()
        flat = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis])).view(-1)
        while flat.numel():
            parts[part].append(flat[: stops[part] - at])
            flat, at = flat[stops[part] - at :], at + parts[part][-1].numel()
            part += at == stops[part]
    return parts
