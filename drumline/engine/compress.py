"""Compression of the gradients that DDP averages.

A compressor is given a bucket of gradients, and replaces them by their average over the ranks, or
nearly. The gradients are accumulated over the micro-batches, and scaled to a mean over the global
batch.

Some compressors keep the error of a step, and add it to the gradients of the next. Errors are kept
per parameter, because DDP may move a parameter to another bucket. They belong to this rank, are not
saved, and start from zero when a run resumes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from drumline.config.strategy import Compression
from drumline.plan.wire import BLOCK, is_halved

# Entries that are coded at once on a CPU, so that they stay in its cache.
PIECE = 2**16
# The largest code of a signed byte.
LARGEST_CODE = 127
# A block's scale is an fp32 number.
SCALE_BYTES = 4
# torch 2.13 has renamed it.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def compress_ddp(
    ddp: DistributedDataParallel, options: Compression, seed: int
) -> Compressor | None:
    """Let DDP average its buckets by a compressor, and return that; None if `options` sets none.

    `options`: the section `compression` of the strategy. `seed`: of random bases, the same on all
    ranks.
    """
    if options.kind == "none":
        return None
    compressor = KINDS[options.kind](ddp.process_group, options, seed)
    # DDP requires an argument of this name, and no annotation but the class itself.
    ddp.register_comm_hook(compressor, lambda compressor, bucket: compressor.hook(bucket))
    return compressor


class Compressor:
    """One way to average gradients over the ranks of `group`. Subclasses implement `average`.

    `step`: how many steps of the run are done; the caller sets it.

    Each collective has ended when its call returns: with callbacks, gloo would start the next
    collectives in another order on each rank. On a GPU they run on a stream of their own, so
    backward goes on meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        self.group = group
        self.size = group.size()
        self.options = options
        self.seed = seed
        self.step = 0
        # How long a CPU waited for collectives since the last `take_seconds`.
        self.seconds = 0.0
        self._stream: torch.cuda.Stream | None = None

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Replace `flat` by its average over the ranks, or nearly.

        `flat`: fp32[N], the gradients of `parameters`, one after another.
        """
        raise NotImplementedError

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP; the future that DDP waits for is set on return."""
        flat = bucket.buffer()
        devices: list[int | str | torch.device] = []
        if flat.is_cuda:
            # A future with a device records the stream on which it is set, and DDP waits for that
            # stream.
            devices.append(flat.device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        with self._own_stream(flat), torch.no_grad():
            if self.options.compresses(self.step):
                self.average(flat, bucket.parameters())
            else:
                # Divided first, as DDP does it without a compressor.
                flat.div_(self.size)
                self._all_reduce(flat)
            future.set_result(flat)
        return future

    def take_seconds(self) -> float:
        """Return how many seconds a CPU waited in collectives since the last call.

        On a GPU they run beside backward and nothing waits here: 0.
        """
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in place, and return it."""
        self._call(dist.all_reduce, tensor)
        return tensor

    def _call(self, collective: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Run a collective over the group, and count the seconds that a CPU waits in it."""
        start = time.perf_counter()
        collective(*tensors, group=self.group)
        if not tensors[0].is_cuda:
            self.seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def _own_stream(self, flat: torch.Tensor) -> Iterator[None]:
        """Run a `with` block on the compressor's stream, after the work of the current stream."""
        if not flat.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        # The bucket is filled on the current stream, and must be full before it is read here.
        current = torch.cuda.current_stream(flat.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield


class Cast(Compressor):
    """Sums gradients in bf16 or fp16, which halves the bytes.

    They are divided before they are summed, so that the sum stays in fp16's range.
    """

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        dtype = torch.float16
        if self.options.kind == "bf16":
            dtype = torch.bfloat16
        low = flat.div_(self.size).to(dtype)
        self._all_reduce(low)
        flat.copy_(low)


class Int8(Compressor):
    """Averages gradients in 8 bits, which takes a quarter of the bytes.

    Blocks of 256 entries are coded as round(x / s) with s = max |x| / 127 in fp32 (after Dettmers
    2016, with even steps). That takes 1.0156 bytes an entry, with an error of at most s / 2.

    Both halves of an all-reduce are coded. By an all-to-all, rank r gets the r-th part of every
    rank's gradients, decodes them, and averages them in fp32. It codes the average, and an
    all-gather hands it to all. So an entry is rounded twice, whatever the number of ranks. (ZeRO++,
    Wang et al. 2023, codes the first half in 4 bits.)

    All ranks decode the same bytes, so weights stay equal. No error is kept. A block with an entry
    that is not finite comes out as NaN.
    """

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        entries = flat.numel()
        # A part for each rank, in whole blocks.
        blocks_a_rank = math.ceil(entries / (self.size * BLOCK))
        part = blocks_a_rank * BLOCK
        padded = flat.new_zeros(self.size * part)
        padded[:entries] = flat

        # The reduce-scatter: row r of `sent` goes to rank r, and row r of `received` came from it.
        sent = encode(padded.view(self.size, part))
        received = torch.empty_like(sent)
        self._call(dist.all_to_all_single, received, sent)
        sums = decode(received).sum(0, keepdim=True)
        average = sums.div_(self.size)

        # The all-gather. Like the other ranks, this one decodes its own part too: otherwise its
        # copy of the weights would differ from theirs.
        own_part = encode(average)
        all_parts = torch.empty_like(sent)
        self._call(ALL_GATHER, all_parts, own_part)
        whole = decode(all_parts).flatten()
        flat.copy_(whole[:entries])


def encode(rows: torch.Tensor) -> torch.Tensor:
    """Return rows coded in 8 bits: fp32[R, C] → uint8[R, C + C / 64]. C is a multiple of BLOCK.

    A coded row has the codes of its entries, followed by the scales of its blocks.
    """
    columns = rows.shape[1]
    scales_bytes = columns // (BLOCK // SCALE_BYTES)
    packed = rows.new_empty((len(rows), columns + scales_bytes), dtype=torch.uint8)
    # A block of zeros has the scale 0, and 0 / 0 would be NaN.
    smallest = torch.finfo(torch.float32).tiny
    for values, codes, scales in _pieces(packed, rows):
        torch.amax(values.abs(), -1, out=scales)
        scales.div_(LARGEST_CODE)
        divisors = scales.clamp_min(smallest)[:, None]
        quotients = values / divisors
        codes.copy_(quotients.round_())
    return packed


def decode(packed: torch.Tensor) -> torch.Tensor:
    """Return the rows of `encode`, up to rounding: fp32[R, C]."""
    columns = packed.shape[1] * BLOCK // (BLOCK + SCALE_BYTES)
    rows = packed.new_empty((len(packed), columns), dtype=torch.float32)
    for values, codes, scales in _pieces(packed, rows):
        values.copy_(codes).mul_(scales[:, None])
    return rows


class _Piece(NamedTuple):
    """Views of some blocks: values fp32[N, BLOCK], codes int8[N, BLOCK], scales fp32[N]."""

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


def _pieces(packed: torch.Tensor, rows: torch.Tensor) -> Iterator[_Piece]:
    """Yield the blocks of all rows: on a CPU in pieces that fit its cache, else a row at a time."""
    columns = rows.shape[1]
    size = columns
    if rows.device.type == "cpu":
        size = PIECE
    for row, packed_row in zip(rows, packed, strict=True):
        # Views of the bytes: what is written into them is in `packed`.
        codes = packed_row[:columns].view(torch.int8)
        scales = packed_row[columns:].view(torch.float32)
        row_pieces = row.split(size)
        code_pieces = codes.split(size)
        scale_pieces = scales.split(size // BLOCK)
        for values, piece_codes, piece_scales in zip(
            row_pieces, code_pieces, scale_pieces, strict=True
        ):
            yield _Piece(values.view(-1, BLOCK), piece_codes.view(-1, BLOCK), piece_scales)


def split_by_parameter(
    flat: torch.Tensor, parameters: list[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Return each parameter's entries of a bucket, as views of it."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = flat.split(sizes)
    return dict(zip(parameters, parts, strict=True))


class ErrorFeedback(Compressor):
    """A base of compressors that add what a step did not send to the next step's gradients.

    So no gradient is lost, only delayed (Stich et al. 2018, Karimireddy et al. 2019). The errors
    take 4 bytes a parameter on each rank.
    """

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        super().__init__(group, options, seed)
        # What was not sent of each parameter, fp32[its entries].
        self.errors: dict[torch.Tensor, torch.Tensor] = {}

    def add_errors(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Add what earlier steps did not send to the gradients."""
        for parameter, part in split_by_parameter(flat, parameters).items():
            if parameter in self.errors:
                part += self.errors[parameter]

    def keep_errors(self, unsent: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Keep what this step did not send.

        NaN and infinity are kept as 0: all ranks skip such a step, and later ones must not suffer.
        """
        finite = unsent.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self.errors |= split_by_parameter(finite, parameters)


class TopK(ErrorFeedback):
    """Sends the largest entries of each bucket, a share `ratio` of them, as index and value.

    From Lin et al. 2018, without their momentum correction. Each rank gathers the entries of all
    others, 8 bytes each: (ranks − 1) × 8 × ratio bytes a parameter.
    """

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.add_errors(flat, parameters)
        # At least one entry, also of a bucket that is smaller than 1 / ratio.
        count = max(1, round(self.options.ratio * flat.numel()))
        indices = flat.abs().topk(count, sorted=False).indices
        # The bits of the values travel as integers, so that one collective carries both.
        values_as_int = flat[indices].view(torch.int32)
        sent = torch.cat([indices.to(torch.int32), values_as_int])
        received = sent.new_empty(self.size * 2 * count)
        self._call(ALL_GATHER, received, sent)

        flat[indices] = 0
        self.keep_errors(flat, parameters)
        flat.zero_()
        # Rank by rank: in one scatter the order of equal indices, and so the last bit, could differ
        # between GPUs.
        for their_indices, their_values in received.view(self.size, 2, count):
            flat.index_add_(0, their_indices, their_values.view(torch.float32))
        flat /= self.size


class PowerSGD(ErrorFeedback):
    """Sends each gradient matrix M[n, m] as P[n, rank] Qᵀ, found by one step of subspace iteration.

    The iteration starts from the Q of the step before (Vogels et al. 2019, algorithm 1). Vectors,
    and matrices that would not take half the bytes, are sent whole.

    torch's powerSGD_hook does the same with a state for each bucket. Here there is one for each
    parameter, so this need not wait two steps until DDP has rebuilt its buckets. It also runs over
    gloo.
    """

    def __init__(self, group: dist.ProcessGroup, options: Compression, seed: int) -> None:
        super().__init__(group, options, seed)
        # Q of a parameter, the same on all ranks.
        self.bases: dict[torch.Tensor, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def average(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.add_errors(flat, parameters)
        matrices: dict[torch.Tensor, torch.Tensor] = {}
        sent_whole: list[torch.Tensor] = []
        for parameter, part in split_by_parameter(flat, parameters).items():
            if is_halved(parameter.shape, self.options.rank):
                matrices[parameter] = part.view(parameter.shape[0], -1)
            else:
                sent_whole.append(part)
        for parameter, matrix in matrices.items():
            if parameter not in self.bases:
                self.bases[parameter] = self._random_basis(matrix)

        # P = M Q, averaged and made orthonormal. What is sent whole goes along.
        own_lefts = [matrix @ self.bases[parameter] for parameter, matrix in matrices.items()]
        averages = self._average_together([*sent_whole, *own_lefts])
        averages_of_whole = averages[: len(sent_whole)]
        lefts = orthonormal(averages[len(sent_whole) :])

        # Q = Mᵀ P, averaged.
        own_rights = []
        for matrix, left in zip(matrices.values(), lefts, strict=True):
            own_rights.append(matrix.T @ left)
        rights = self._average_together(own_rights)

        # The bucket gets the averages. What was in it before, minus these, is this rank's error.
        error = flat.clone()
        for part, average in zip(sent_whole, averages_of_whole, strict=True):
            part.copy_(average)
        for (parameter, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            torch.mm(left, right.T, out=matrix)
            # A step with NaN is passed over, and the next one must not start from its NaN.
            self.bases[parameter] = right.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        error -= flat
        for parameter, part in split_by_parameter(error, parameters).items():
            # What was sent whole leaves no error.
            part *= parameter in matrices
        self.keep_errors(error, parameters)

    def _random_basis(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the Q that the first step starts from: [columns of the matrix, rank].

        It is drawn on the host, so that it does not depend on the device. All ranks draw for the
        same matrices in the same order.
        """
        basis = torch.randn(matrix.shape[1], self.options.rank, generator=self.generator)
        return basis.to(matrix)

    def _average_together(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages over the ranks, by one collective."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._all_reduce(flat)
        flat.div_(self.size)
        sizes = [tensor.numel() for tensor in tensors]
        parts = flat.split(sizes)
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def orthonormal(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return Q of each matrix's QR decomposition, in the order of `matrices`.

    Matrices of one shape are decomposed in one batch, since starting the kernels takes most of the
    time of a small one.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    bases: dict[int, torch.Tensor] = {}
    for indices in by_shape.values():
        batch = torch.stack([matrices[index] for index in indices])
        batch_of_bases = torch.linalg.qr(batch).Q
        for index, basis in zip(indices, batch_of_bases, strict=True):
            bases[index] = basis
    return [bases[index] for index in range(len(matrices))]


# A new kind also needs config.strategy.Compression.kind, WITH_MEMORY there if it keeps errors, and
# its bytes in planner.cost.terms.
KINDS: dict[str, type[Compressor]] = {
    "bf16": Cast,
    "fp16": Cast,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}
