"""What DDP sends instead of fp32 gradients: each compressor takes a bucket and leaves the ranks' average in it.

Gradients arrive accumulated over the micro-batches and scaled as the engine scales them (mean over the global batch), so errors that
are kept from one step to the next are in the units of an update. They are kept per parameter: DDP may deal its buckets anew. They are
this rank's own, are not saved, and start from zero where a run goes on from a checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from drumline.core.cost import BLOCK, is_halved
from drumline.core.strategy import Compression

PIECE = 2**16  # entries
# Its name from torch 2.13 on, and before.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def compress_ddp(
    ddp: DistributedDataParallel, options: Compression, seed: int
) -> Compressor | None:
    """The compressor by which DDP now averages its buckets; None where it sends them as they are. `seed`: the same on all ranks."""
    if options.kind == "none":
        return None
    compressor = KINDS[options.kind](ddp.process_group, options, seed)
    # DDP requires an argument of this name, and no annotation but the class itself.
    ddp.register_comm_hook(compressor, lambda compressor, bucket: compressor.hook(bucket))
    return compressor


class Compressor:
    """One way of averaging over the ranks of `group`. `step`: steps of the run that are done; the caller sets it.

    Collectives are waited for where they are called: over gloo, callbacks would start the next ones in another order on each rank. On a
    GPU all of it goes to a stream of its own, so that backward runs on.
    """

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        self.group, self.size, self.options, self.seed = group, group.size(), options, seed
        self.step = 0
        self.seconds = 0.0  # that a CPU waited for collectives since the last `take_seconds`
        self._stream: torch.cuda.Stream | None = None

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Replace `flat` (fp32[N]: the parameters' gradients, one after another) by its average over the ranks, or nearly."""
        raise NotImplementedError

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        exact = not self.options.compresses(self.step)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if flat.is_cuda else []
        )
        with self._aside(flat), torch.no_grad():
            if exact:
                self._all_reduce(flat.div_(self.size))
            else:
                self.average(flat, bucket.parameters())
            future.set_result(flat)
        return future

    def take_seconds(self) -> float:
        """Seconds that a CPU waited in collectives since the last call. On a GPU they run beside backward, and nothing waits here."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._call(dist.all_reduce, tensor)
        return tensor

    def _call(self, collective: Callable[..., Any], *tensors: torch.Tensor) -> None:
        began = time.perf_counter()
        collective(*tensors, group=self.group)
        self.seconds += 0.0 if tensors[0].is_cuda else time.perf_counter() - began

    @contextlib.contextmanager
    def _aside(self, flat: torch.Tensor) -> Iterator[None]:
        if not flat.is_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(flat.device)
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            yield


class Cast(Compressor):
    """Half the bytes: summed in bf16 or fp16. Divided first, so that the sum stays in fp16's range."""

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        dtype = torch.bfloat16 if self.options.kind == "bf16" else torch.float16
        flat.copy_(self._all_reduce(flat.div_(self.size).to(dtype)))


class Int8(Compressor):
    """A quarter of the bytes: both halves of an all-reduce, the reduce-scatter and the all-gather, in 8 bits (as ZeRO++, Wang et al.
    2023, does the first half in 4; block-wise codes after Dettmers 2016, with even steps).

    Blocks of 256 entries are coded as round(x / s) with s = max |x| / 127 in fp32: 1.0156 bytes an entry, an error of at most s / 2.
    Rank r gets everybody's code of the r-th part (all-to-all), adds up in fp32, divides, codes the average and hands it to all
    (all-gather): two roundings an entry, whatever the number of ranks. All ranks decode the same bytes, so weights stay equal. Nothing
    is kept from step to step. A block with an entry that is not finite comes out as NaN.
    """

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        chunk = -(-flat.numel() // (self.size * BLOCK)) * BLOCK
        padded = flat.new_zeros(self.size * chunk)
        padded[: flat.numel()] = flat
        sent = encode(padded.view(self.size, chunk))
        received = torch.empty_like(sent)
        self._call(dist.all_to_all_single, received, sent)
        mine = encode(decode(received).sum(0, keepdim=True).div_(self.size))
        everyone = torch.empty_like(sent)
        self._call(ALL_GATHER, everyone, mine)
        flat.copy_(decode(everyone).flatten()[: flat.numel()])


def encode(rows: torch.Tensor) -> torch.Tensor:
    """fp32[R, C] (C in whole blocks) → uint8[R, C + C / 64]: the codes of a row, and behind them its blocks' scales."""
    packed = rows.new_empty(
        (len(rows), rows.shape[1] + rows.shape[1] // (BLOCK // 4)), dtype=torch.uint8
    )
    for values, codes, scales in _in_pieces(packed, rows):
        torch.amax(values.abs(), -1, out=scales).div_(127)
        codes.copy_((values / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())
    return packed


def decode(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`, up to rounding: fp32[R, C]."""
    rows = packed.new_empty(
        (len(packed), packed.shape[1] * BLOCK // (BLOCK + 4)), dtype=torch.float32
    )
    for values, codes, scales in _in_pieces(packed, rows):
        values.copy_(codes).mul_(scales[:, None])
    return rows


def _in_pieces(
    packed: torch.Tensor, rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views: values fp32[N, BLOCK], codes int8[N, BLOCK], scales fp32[N]. On a CPU of so few blocks that they stay in its cache."""
    columns = rows.shape[1]
    piece = PIECE if rows.device.type == "cpu" else columns
    for row, coded in zip(rows, packed, strict=True):
        codes, scales = coded[:columns].view(torch.int8), coded[columns:].view(torch.float32)
        for values, part, of_part in zip(
            row.split(piece), codes.split(piece), scales.split(piece // BLOCK), strict=True
        ):
            yield values.view(-1, BLOCK), part.view(-1, BLOCK), of_part


def by_parameter(
    flat: torch.Tensor, parameters: list[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Parameter → its entries of a bucket, as views."""
    return dict(zip(parameters, flat.split([p.numel() for p in parameters]), strict=True))


class ErrorFeedback(Compressor):
    """What a step does not send is added to the next one's gradient, so that nothing is lost but time (Stich et al. 2018, Karimireddy
    et al. 2019). Costs 4 bytes a parameter on each rank."""

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        super().__init__(group, options, seed)
        self.errors: dict[torch.Tensor, torch.Tensor] = {}  # parameter → fp32[its entries]

    def recall(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Add what was left to the gradients."""
        for parameter, part in by_parameter(flat, parameters).items():
            if parameter in self.errors:
                part += self.errors[parameter]

    def keep(self, left: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Remember what was not sent. A step with NaN is passed over by all ranks, and must not be remembered for ever."""
        self.errors |= by_parameter(left.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), parameters)


class TopK(ErrorFeedback):
    """The largest entries of each bucket by magnitude, `ratio` of them, as index and value (Lin et al. 2018, without their momentum
    correction). 8 bytes an entry sent, gathered from all ranks: (ranks − 1) × 8 × ratio bytes a parameter."""

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.recall(flat, parameters)
        count = max(1, round(self.options.ratio * flat.numel()))
        indices = flat.abs().topk(count, sorted=False).indices
        sent = torch.cat([indices.to(torch.int32), flat[indices].view(torch.int32)])
        everyone = sent.new_empty(self.size * 2 * count)
        self._call(ALL_GATHER, everyone, sent)
        flat[indices] = 0
        self.keep(flat, parameters)
        flat.zero_()
        # Rank by rank: in one scatter the order of equal indices, and so the last bit, could differ between GPUs.
        for theirs in everyone.view(self.size, 2, count):
            flat.index_add_(0, theirs[0], theirs[1].view(torch.float32))
        flat /= self.size


class PowerSGD(ErrorFeedback):
    """Each gradient matrix M[n, m] as P[n, rank] Qᵀ by one step of subspace iteration that starts from the Q of the step before (Vogels
    et al. 2019, algorithm 1). Vectors, and matrices that this would not halve, are sent whole.

    torch's powerSGD_hook, with its state kept per parameter instead of per bucket: it need not wait two steps for DDP to
    rebuild its buckets, and works over gloo.
    """

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        super().__init__(group, options, seed)
        self.bases: dict[torch.Tensor, torch.Tensor] = {}  # parameter → Q, the same on all ranks
        self.generator = torch.Generator().manual_seed(seed)

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.recall(flat, parameters)
        parts = by_parameter(flat, parameters)
        matrices = {
            p: part.view(p.shape[0], -1)
            for p, part in parts.items()
            if is_halved(p.shape, self.options.rank)
        }
        whole = [part for p, part in parts.items() if p not in matrices]
        for (
            p,
            matrix,
        ) in (
            matrices.items()
        ):  # the Q to start from: that of the step before, at first a random one
            if p not in self.bases:
                self.bases[p] = torch.randn(
                    matrix.shape[1], self.options.rank, generator=self.generator
                ).to(matrix)
        lefts = [matrix @ self.bases[p] for p, matrix in matrices.items()]
        averaged = self._average_together([*whole, *lefts])
        lefts = orthonormal(averaged[len(whole) :])
        rights = self._average_together(
            [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        )
        error = flat.clone()
        for part, value in zip(whole, averaged, strict=False):
            part.copy_(value)
        for (p, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            torch.mm(left, right.T, out=matrix)
            self.bases[p] = right.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        error -= flat
        for p, part in by_parameter(error, parameters).items():
            part *= p in matrices
        self.keep(error, parameters)

    def _average_together(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The averages over ranks, by one collective."""
        if not tensors:
            return []
        flat = self._all_reduce(torch.cat([t.flatten() for t in tensors])).div_(self.size)
        return [
            part.view_as(t)
            for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
        ]


def orthonormal(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Q of each matrix's QR; those of one shape in one batch, since a small QR is mostly the start of its kernels."""
    by_shape: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(place)
    made: dict[int, torch.Tensor] = {}
    for places in by_shape.values():
        made |= zip(
            places,
            torch.linalg.qr(torch.stack([matrices[place] for place in places])).Q,
            strict=True,
        )
    return [made[place] for place in range(len(matrices))]


KINDS: dict[str, type[Compressor]] = {
    "bf16": Cast,
    "fp16": Cast,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}
