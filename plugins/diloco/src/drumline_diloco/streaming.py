"""Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512, algorithm 2).

Fragments of the weights take their outer steps in turn, and are exchanged while the inner steps go
on.

A fragment is an equal part of all trainable weights, end to end. It is sent after its step t, and
always used after step t + `delay`: a rank that gets there first waits, so all ranks take the same
course, whatever the network does. Then θ ← `keep` × θ + (1 − keep) × the outer weights (without a
delay: the outer weights).

In 8 bits (`engine.compress.encode`: block-wise, as Int8 there) there is no error feedback. The
outer gradient is the sum of a period's steps, and what rounding takes from it stays in the rank's
own weights if it keeps some of them (docs/explanations/slow_links.md has the distance).

Evaluation and a checkpoint first take the outer steps that are under way. So a checkpoint holds no
fragment that is on its way, and a run that is killed and resumed from it takes the same course.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from drumline.dist.mesh import side_group
from drumline.engine.compress import ALL_GATHER, decode, encode
from drumline.engine.native import NativeEngine
from drumline.engine.strategies.diloco.engine import DiLoCoEngine
from drumline.errors import ConfigError
from drumline.plan.wire import BLOCK
from drumline.vendor.torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub
from drumline_diloco.section import StreamingDiLoCoStrategy

# Flat views of some weights, one after another.
Parts = list[torch.Tensor]


class Exchange(NamedTuple):
    """The exchange of a fragment: the steps that were done when it was sent, and its mean."""

    sent_at: int
    mean: PendingMean


class StreamingEngine(DiLoCoEngine):
    """DiLoCo by fragments. `under_way` has the exchange of each fragment that is not yet used."""

    outer: StreamingDiLoCoStrategy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        number = self.outer.fragments
        weights = cut(self.weights, number)
        anchors = cut(self.anchors, number)
        moments = cut(self.moments, number)
        # For each fragment, its parts of the weights, of the outer weights and of their momentum.
        self.fragments = list(zip(weights, anchors, moments, strict=True))
        # What is sent is padded to a multiple of so many entries: whole blocks for each rank.
        self.multiple = 1
        if self.outer.bits == 8:
            self.multiple = self.ranks * BLOCK
        self.under_way: dict[int, Exchange] = {}
        self.shares_norm = True

    def enable_steps_without_peers(self) -> bool:
        """Let steps no longer wait for other ranks, if the strategy has a delay.

        Return whether that is so. Then the caller sums the norms of the ranks for its reports.
        """
        self.shares_norm = self.outer.delay == 0
        return not self.shares_norm

    def grad_norm(self) -> torch.Tensor:
        """Return the norm over all ranks, or this rank's own if steps wait for no other rank."""
        if self.shares_norm:
            return super().grad_norm()
        self.own_norm = self.shared_norm = NativeEngine.grad_norm(self)
        return self.own_norm

    def after_step(self) -> None:
        """Use the fragments that are due, and send the next one."""
        began = time.perf_counter()
        for number, exchange in list(self.under_way.items()):
            # All ranks send, send on and use a fragment after the same numbers of steps.
            age = self.steps - exchange.sent_at
            if age == self.outer.halfway:
                exchange.mean.send_on()
            if age == self.outer.delay:
                self._finish_exchange(number)

        due = self.outer.fragment_to_send(self.steps - 1)
        if due is not None:
            self._start_exchange(due)
        self.waited += time.perf_counter() - began

    def _start_exchange(self, number: int) -> None:
        """Begin the exchange of a fragment. Without a delay, also finish it."""
        weights, anchors, _ = self.fragments[number]
        outer_gradient = difference(anchors, weights, self.multiple)
        mean = PendingMean(outer_gradient, self.outer.bits, self.ranks)
        self.under_way[number] = Exchange(self.steps, mean)
        if not self.outer.delay:
            self._finish_exchange(number)

    def _finish_exchange(self, number: int) -> None:
        """Wait for the mean of a fragment, and take its outer step."""
        exchange = self.under_way.pop(number)
        mean = exchange.mean.wait()
        self._outer_step(number, mean)

    def _outer_step(self, number: int, flat: torch.Tensor, is_in: bool = True) -> None:
        """Take the outer step of a fragment.

        `flat`: fp32[N], the mean of its outer gradients, with padding. `is_in`: this rank's
        gradient is part of the mean. Otherwise its weights move with the outer ones, so that its
        outer gradient stays what it is.
        """
        weights, anchors, moments = self.fragments[number]
        sizes = [part.numel() for part in anchors]
        without_padding = flat[: sum(sizes)]
        deltas = list(without_padding.split(sizes))
        if not is_in:
            before = [part.clone() for part in anchors]
            self.outer_step(anchors, moments, deltas)
            moved = foreach_sub(anchors, before)
            foreach_add_(weights, moved)
            return

        self.outer_step(anchors, moments, deltas)
        if self.outer.delay and self.outer.keep:
            foreach_mul_(weights, self.outer.keep)
            foreach_add_(weights, anchors, alpha=1 - self.outer.keep)
        else:
            foreach_copy_(weights, anchors)

    def _finish_all_exchanges(self) -> None:
        """Take the outer steps of all fragments that are under way."""
        for number in list(self.under_way):
            self.is_synchronised = False
            self._finish_exchange(number)

    def _prepare_evaluation_weights(self) -> None:
        """Take all outer steps that are under way, then average the copies."""
        self._finish_all_exchanges()
        super()._prepare_evaluation_weights()

    def tensors(self) -> dict[str, torch.Tensor]:
        self._finish_all_exchanges()
        return super().tensors()


class PendingMean:
    """The mean of a tensor over all ranks, while it is computed. One rank alone gets its own.

    In 8 bits it takes two collectives: first each rank gets the codes of its part from all ranks,
    then it sends their mean to all.
    """

    def __init__(self, flat: torch.Tensor, bits: int, ranks: int) -> None:
        """Begin the first collective.

        Args:
            flat: fp32[N], which is overwritten. In 8 bits N is a number of whole blocks for each
                rank.
            bits: 8 or 32.
            ranks: Number of ranks.
        """
        self.bits = bits
        self.ranks = ranks
        self.is_sent_on = False
        if bits == 8:
            # A row for each rank.
            self.sent = encode(flat.view(ranks, -1))
            self.received = self.sent
            if ranks > 1:
                self.received = torch.empty_like(self.sent)
            self.work = self._begin(dist.all_to_all_single, self.received, self.sent)
        else:
            self.sent = flat.div_(ranks)
            self.work = self._begin(dist.all_reduce, self.sent)

    def send_on(self) -> None:
        """Begin the second collective, if there is one."""
        if self.bits != 8 or self.ranks == 1 or self.is_sent_on:
            return

        self.is_sent_on = True
        self.work.wait()
        of_each_rank = decode(self.received)
        mean = of_each_rank.sum(0, keepdim=True).div_(self.ranks)
        self.sent = encode(mean)
        self.work = self._begin(ALL_GATHER, self.received, self.sent)

    def wait(self) -> torch.Tensor:
        """Return the mean, fp32[N]; it has the same bits on all ranks."""
        self.send_on()
        if self.work is not None:
            self.work.wait()
        if self.bits == 8:
            of_each_rank = decode(self.received)
            return of_each_rank.flatten()
        return self.sent

    def _begin(self, collective: Any, *tensors: torch.Tensor) -> Any:
        """Begin a collective and return its work; None if there is one rank."""
        if self.ranks == 1:
            return None
        # The exchange has its own group, so the loop's sums in each step do not queue behind it.
        group = side_group(dist.group.WORLD)
        return collective(*tensors, group=group, async_op=True)


def difference(anchors: Parts, weights: Parts, multiple: int) -> torch.Tensor:
    """Return anchors minus weights as one flat tensor, with zeros up to a multiple of `multiple`."""
    sizes = [anchor.numel() for anchor in anchors]
    total = sum(sizes)
    padded = math.ceil(total / multiple) * multiple
    flat = anchors[0].new_empty(padded)
    flat[total:] = 0
    parts = flat[:total].split(sizes)
    for part, anchor, weight in zip(parts, anchors, weights, strict=True):
        torch.sub(anchor, weight, out=part)
    return flat


def cut(tensors: Parts, number: int) -> list[Parts]:
    """Return flat views of `tensors` in `number` parts, whose sizes differ by at most one entry.

    Raises:
        ConfigError: There are fewer entries than parts.
    """
    total = sum(tensor.numel() for tensor in tensors)
    if total < number:
        what = f"{number} fragments of {total} trained weights"
        raise ConfigError(
            what, where="strategy.fragments", fix="take as many as there are weights at most"
        )
    stops = []
    parts: list[Parts] = []
    for fragment in range(1, number + 1):
        stops.append(total * fragment // number)
        parts.append([])

    # Number of entries that are in a part already, and the part that the next entries go to.
    position = 0
    index = 0
    for tensor in tensors:
        flat = _flat_view(tensor)
        while flat.numel():
            room = stops[index] - position
            piece = flat[:room]
            parts[index].append(piece)
            flat = flat[room:]
            position += piece.numel()
            if position == stops[index]:
                index += 1
    return parts


def _flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view in the order of the tensor's memory, which its anchor shares.

    A weight may be transposed, or of channels last.
    """
    strides = tensor.stride()
    by_stride = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(by_stride).view(-1)
