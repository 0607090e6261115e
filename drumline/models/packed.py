"""Frozen linear layers whose weights are packed in 4 or 8 bits (QLoRA, Dettmers et al. 2023).

They work under every strategy. The codes of a weight are the bits of a parameter whose type is the
one in which weights are gathered, as in FSDP-QLoRA. So sharding and gathering move these bits and
cast nothing. The scales are whole on each rank; they take an eighth of a bit for each entry of the
weight. Tensor and expert parallelism cut the codes alone, so a rank's part has the values that it
has in the whole weight, even if the cut goes through a block of entries that share a scale.

- 4bit is the format of bitsandbytes: NormalFloat in blocks of 64 entries along the rows, two codes
  a byte. The mean of the blocks' scales is subtracted from them. The rest is stored in bytes of
  bitsandbytes' dynamic map, and every 256 of them share an fp32 scale.
- 8bit: whole numbers from -127 to 127 times an fp32 scale for every 256 entries.

A product unpacks the weight in the type that it computes in, and backward unpacks it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from drumline.errors import ModelError
from drumline.models.containers import product_dtype
from drumline.plan.facts import divides_when_packed

# Entries of a 4-bit weight that share a scale.
BLOCK = 64
# Scales of a 4-bit weight that share another scale; entries of an 8-bit weight that share a scale.
GROUP = 256
LARGEST_INT8 = 127
# Blocks that are packed or unpacked at once: the fp32 copies of all experts of a layer would take
# gigabytes.
ROWS_AT_ONCE = 2**18
# Replaces the scale of a block of zeros as a divisor.
SMALLEST_SCALE = 1e-30
# The 16 values of NormalFloat, sorted, as bitsandbytes has them: a weight's code is a place in this
# list.
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
Bits = Literal["4bit", "8bit"]
# Rows float[S, I] and a matrix for each expert, float[E, O, I] → float[S, O].
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Stretches(NamedTuple):
    """Where the entries that a rank holds lie in a whole weight, whose entries are counted row by row.

    There are `number` stretches of `length` entries. The first one begins at entry `start`, each
    other one `stride` entries after the one before it.
    """

    start: int
    number: int
    stride: int
    length: int

    @property
    def stop(self) -> int:
        """The entry behind the last one."""
        return self.start + (self.number - 1) * self.stride + self.length

    def run_length(self, block: int) -> int:
        """Return the entries of a run. The stretches consist of equal runs, each within one block.

        `block`: the entries that share a scale.
        """
        return math.gcd(self.start, self.stride, self.length, block)

    def scales_of_runs(self, scales: torch.Tensor, block: int) -> torch.Tensor:
        """Return the scale of each run of `run_length(block)` entries, fp32[runs].

        `scales`: fp32[blocks], those of the blocks from that of the first entry on.
        """
        run = self.run_length(block)
        if self.number == 1 and run == block:
            # The blocks are whole and in a row.
            return scales
        first_block = self.start // block
        device = scales.device
        starts = self.start + self.stride * torch.arange(self.number, device=device)
        within = torch.arange(0, self.length, run, device=device)
        entries = starts[:, None] + within
        return scales[entries.flatten() // block - first_block]


class PackedTensor:
    """How a weight is packed: its bits, its shape and its scales. It has no codes.

    `name`: of the weight in its module. `shape`: [R, C], or [E, R, C] of a mixture's experts.
    """

    def __init__(self, name: str, shape: Iterable[int], bits: Bits, storage: torch.dtype) -> None:
        """`storage`: the type that weights are gathered in, which the codes are stored in."""
        self.name = name
        self.shape = torch.Size(shape)
        self.bits: Bits = bits
        self.storage = storage
        # These are no buffers: DDP would send buffers before each step.
        self.scales: tuple[torch.Tensor, ...] = ()
        # The shape of this rank's part of the weight, and which of the equal parts along
        # `cut_dimension` it is.
        self.local_shape = self.shape
        self.cut_dimension = 0
        self.part = 0

    @property
    def parameter_name(self) -> str:
        """The name of the parameter that takes the place of the weight."""
        return f"{self.name}_packed"

    @property
    def packed_shape(self) -> torch.Size:
        """The shape of the codes: that of the weight, with fewer columns."""
        *ahead, columns = self.shape
        bits_per_entry = int(self.bits.removesuffix("bit"))
        return torch.Size((*ahead, columns * bits_per_entry // 8 // self.storage.itemsize))

    def cut(self, dimension: int, part: int, parts: int) -> None:
        """Note that this rank holds the codes of one of some equal parts of a dimension.

        The scales stay whole, as they are for any cut of a weight: 256 of them share another one,
        which may be of several ranks' parts. Raises ModelError if the dimension does not divide
        into parts of whole codes.
        """
        size = self.shape[dimension]
        if not divides_when_packed(self.shape, dimension, parts):
            raise ModelError(
                f"{size} entries of a packed {self.name} do not divide into {parts} parts of whole codes",
                where="adapter.quantize",
                fix="use strategy=fsdp2, or adapter.quantize=none",
            )
        local_shape = list(self.shape)
        local_shape[dimension] = size // parts
        self.local_shape = torch.Size(local_shape)
        self.cut_dimension = dimension
        self.part = part

    def _local_stretches(self) -> _Stretches:
        """Return where the entries that this rank holds lie in the whole weight."""
        number = 1
        stride = 0
        if self.cut_dimension == len(self.shape) - 1 and self.local_shape != self.shape:
            # A part of each row.
            number = self.shape[:-1].numel()
            stride = self.shape[-1]
        length = self.local_shape.numel() // number
        return _Stretches(self.part * length, number, stride, length)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack a whole weight: keep its scales and return its codes, in the type of storage."""
        matrix = weight.float().flatten(0, -2)
        if self.bits == "4bit":
            codes, self.scales = _pack_4bit(matrix)
        else:
            codes, self.scales = _pack_8bit(matrix)
        return codes.view(self.storage).view(self.packed_shape)

    def unpack(self, dtype: torch.dtype, packed: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the unpacked weight in `dtype`; the whole one if nothing is cut.

        `packed`: the codes of that part.
        """
        codes = packed.detach().view(torch.uint8)
        # The scales are no buffers, so `model.to(device)` leaves them behind.
        self.scales = tuple(scale.to(codes.device) for scale in self.scales)
        if self.bits == "8bit":
            return self._unpack_8bit(codes, dtype)
        return self._unpack_4bit(codes, dtype)

    def _unpack_8bit(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of codes, uint8[…, C], as `_pack_8bit` packed it."""
        (scales_of_all,) = self.scales
        stretches = self._local_stretches()
        first_block = stretches.start // GROUP
        last_block = -(-stretches.stop // GROUP)
        scales = stretches.scales_of_runs(scales_of_all[first_block:last_block], GROUP)
        grouped = codes.view(torch.int8).view(len(scales), -1)
        weight = torch.empty(grouped.shape, dtype=dtype, device=codes.device)
        for first in range(0, len(grouped), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            weight[rows] = grouped[rows] * scales[rows, None]
        return weight.view(self.local_shape)

    def _unpack_4bit(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of codes, uint8[…, C / 2], as `_pack_4bit` packed it."""
        stretches = self._local_stretches()
        scales = stretches.scales_of_runs(self._scales_of_blocks(stretches), BLOCK)
        run_length = stretches.run_length(BLOCK)
        if codes.is_cuda and run_length == BLOCK and _has_kernel():
            from bitsandbytes.functional import QuantState, dequantize_4bit

            table = _code_table(codes.device)
            state = QuantState(scales, self.local_shape, table, BLOCK, "nf4", dtype)
            weight: torch.Tensor = dequantize_4bit(codes.view(-1, 1), state)
            return weight
        bytes_of_runs = codes.view(len(scales), -1)
        unpacked = torch.empty(len(scales), run_length, dtype=dtype, device=codes.device)
        for first in range(0, len(scales), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            # One look-up for the two codes of a byte.
            pairs = _pair_table(codes.device)[bytes_of_runs[rows].int()]
            unpacked[rows] = pairs.flatten(1) * scales[rows, None]
        return unpacked.view(self.local_shape)

    def _scales_of_blocks(self, stretches: _Stretches) -> torch.Tensor:
        """Return the scales of the 4-bit blocks from that of the first entry on, fp32[blocks].

        They go to the block of the last entry.
        """
        numbers, largest, mean = self.scales
        first_block = stretches.start // BLOCK
        last_block = -(-stretches.stop // BLOCK)
        # The groups of 256 scales that these blocks are in, the first and the last perhaps in part.
        first_group = first_block // GROUP
        last_group = -(-last_block // GROUP)
        numbers_of_groups = numbers[first_group * GROUP : last_group * GROUP]
        differences = _dynamic_map(numbers.device)[numbers_of_groups.int()]
        largest_of_groups = largest[first_group:last_group]
        scaled_differences = _pad_to_groups(differences) * largest_of_groups[:, None]
        scales = scaled_differences.flatten() + mean
        start = first_block - first_group * GROUP
        return scales[start : start + last_block - first_block]


class PackedLinear(nn.Module):
    """A linear layer (or GPT-2's Conv1D) whose weight [R, C] is packed.

    `packed`: the codes, a frozen parameter [R, C × bits / 8 / bytes of an entry]. It is on the meta
    device until it is filled with the result of `pack_weight`.
    """

    def __init__(self, layer: Any, bits: Bits, storage: torch.dtype) -> None:
        super().__init__()
        self.bias = layer.bias
        self.shape = torch.Size(layer.weight.shape)
        self.has_inputs_first = not isinstance(layer, nn.Linear)
        if self.has_inputs_first:
            self.in_features, self.out_features = self.shape
        else:
            self.out_features, self.in_features = self.shape
        self.packing = PackedTensor("weight", self.shape, bits, storage)
        codes = torch.empty(self.packing.packed_shape, dtype=storage, device="meta")
        if not layer.weight.is_meta:
            codes = self.pack_weight(layer.weight.detach())
        self.packed = nn.Parameter(codes, requires_grad=False)

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """The scales of the weight, which are no parameters."""
        return self.packing.scales

    @property
    def weight(self) -> torch.Tensor:
        """The unpacked weight, [R, C] in fp32. DoRA takes the lengths of its rows."""
        return self.unpack(torch.float32)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack a whole weight, float[R, C]: keep its scales and return its codes.

        The codes are what `packed` holds over all ranks, in its type.
        """
        return self.packing.pack_weight(weight)

    def unpack(self, dtype: torch.dtype, packed: torch.Tensor | None = None) -> torch.Tensor:
        """Return the unpacked weight, [R, C] in `dtype`; if it is cut, this rank's part.

        `packed`: the codes to unpack; None: those that this layer holds, which must be gathered.
        """
        if packed is None:
            packed = _local_part(self.packed)
        return self.packing.unpack(dtype, packed)

    @torch.compiler.disable
    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs @ weightᵀ in autocast's type, else in that of the inputs.

        If the weight is cut, that is the product with this rank's part.
        """
        product: torch.Tensor = _Product.apply(inputs.to(product_dtype(inputs)), self)
        return product

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs @ weightᵀ + bias in autocast's type, else in that of the inputs."""
        out = self.multiply(inputs)
        if self.bias is None:
            return out
        return out + self.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """The product of inputs and a packed weight. It saves no unpacked weight for backward.

    Backward unpacks the weight again, after the strategy has gathered the packed one again.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        """Return inputs @ weightᵀ in the type of the inputs."""
        ctx.layer = layer
        weight = layer.unpack(inputs.dtype)
        if layer.has_inputs_first:
            return inputs @ weight
        return inputs @ weight.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the inputs; the weight is frozen."""
        weight = ctx.layer.unpack(grad.dtype)
        if ctx.layer.has_inputs_first:
            return grad @ weight.T, None
        return grad @ weight, None


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the scales of all packed layers, which these keep besides their parameters."""
    scales: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, PackedLinear):
            scales += module.scales
        for packing in packings_of(module).values():
            scales += packing.scales
    return scales


def packings_of(module: Any) -> dict[str, PackedTensor]:
    """Return name of a tensor → how it is packed, for the experts of a mixture; else {}."""
    packings: dict[str, PackedTensor] = getattr(module, "packings", {})
    return packings


@torch.compiler.disable
def multiply_packed(
    rows: torch.Tensor, base: Any, packing: PackedTensor, multiply: Multiply, is_transposed: bool
) -> torch.Tensor:
    """Return the product of rows with a packed tensor of experts, in autocast's type or their own.

    `rows`: float[S, I]. `base`: the module of the experts. `multiply`: (rows, float[E, O, I]) →
    products float[S, O]. `is_transposed`: the tensor is [E, I, O].
    """
    dtype = product_dtype(rows)
    product: torch.Tensor = _ExpertProduct.apply(
        rows.to(dtype), base, packing, multiply, is_transposed
    )
    return product


def _local_codes(base: Any, packing: PackedTensor) -> torch.Tensor:
    """Return the codes of the experts that this rank holds, which a module of experts has.

    A forward over cut experts replaces their DTensor, a backward finds it in its place.
    """
    return _local_part(getattr(base, packing.parameter_name))


def _local_part(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes that this rank holds; codes that are not cut, as they are."""
    if isinstance(codes, DTensor):
        return codes.to_local()
    return codes


class _ExpertProduct(torch.autograd.Function):
    """The product of `multiply_packed`. It saves no unpacked tensor for backward.

    Backward takes the codes from the module again, after the strategy has gathered them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        base: Any,
        packing: PackedTensor,
        multiply: Multiply,
        is_transposed: bool,
    ) -> torch.Tensor:
        """Return the products in the type of the rows."""
        ctx.base = base
        ctx.packing = packing
        ctx.multiply = multiply
        ctx.is_transposed = is_transposed
        weight = packing.unpack(rows.dtype, _local_codes(base, packing))
        if is_transposed:
            weight = weight.transpose(-2, -1)
        return multiply(rows, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the rows; the tensor is frozen."""
        weight = ctx.packing.unpack(grad.dtype, _local_codes(ctx.base, ctx.packing))
        if not ctx.is_transposed:
            weight = weight.transpose(-2, -1)
        return ctx.multiply(grad.contiguous(), weight), None, None, None, None


def _pack_4bit(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return codes, uint8[R, C / 2], and scales of a weight, fp32[R, C].

    The first entry of two is in the upper bits of a byte. The scales are numbers of the dynamic
    map, uint8[blocks]; the fp32 scale of every 256 of these; and the mean of the blocks' scales.
    """
    device = weight.device
    blocked = weight.reshape(-1, BLOCK)
    # No copy of the absolute values.
    largest = torch.linalg.vector_norm(blocked, math.inf, dim=1)
    codes = _nearest_in_table(blocked, largest, _code_table(device))
    # All scales are positive: without their mean they use both signs of the map.
    mean = largest.mean()
    differences = _pad_to_groups(largest - mean)
    largest_difference = differences.abs().amax(1)
    numbers = _nearest_in_table(differences, largest_difference, _dynamic_map(device))
    pairs = codes.view(len(weight), -1, 2)
    packed = (pairs[:, :, 0] << 4) | pairs[:, :, 1]
    # The clone leaves out the memory of the padding.
    numbers_of_blocks = numbers.flatten()[: len(largest)].clone()
    return packed, (numbers_of_blocks, largest_difference, mean)


def _pack_8bit(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return codes, int8[R, C], and fp32 scales of a weight, fp32[R, C]."""
    grouped = weight.reshape(-1, GROUP)
    scales = torch.linalg.vector_norm(grouped, math.inf, dim=1) / LARGEST_INT8
    divisors = scales.clamp_min(SMALLEST_SCALE)
    codes = torch.empty(grouped.shape, dtype=torch.int8, device=weight.device)
    for first in range(0, len(grouped), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        codes[rows] = (grouped[rows] / divisors[rows, None]).round()
    return codes.view(weight.shape), (scales,)


def _nearest_in_table(
    rows: torch.Tensor, scales: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Return the number of the nearest entry of a sorted table for each value, uint8.

    Each value is divided by its row's scale first. `rows`: fp32[n, entries]. `scales`: fp32[n].
    """
    # An entry is the nearest one between the midpoints to its neighbours.
    midpoints = (table[1:] + table[:-1]) / 2
    divisors = scales.clamp_min(SMALLEST_SCALE)
    numbers = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        scaled = rows[some] / divisors[some, None]
        numbers[some] = torch.bucketize(scaled, midpoints, out_int32=True)
    return numbers


def _pad_to_groups(values: torch.Tensor) -> torch.Tensor:
    """Return values [n] in rows [groups, GROUP]; zeros fill the last row."""
    missing = -len(values) % GROUP
    padded = functional.pad(values, (0, missing))
    return padded.view(-1, GROUP)


@lru_cache
def _has_kernel() -> bool:
    """Return whether bitsandbytes is installed, whose kernel unpacks 4-bit weights on a GPU."""
    return find_spec("bitsandbytes") is not None


@lru_cache
def _code_table(device: torch.device) -> torch.Tensor:
    """Return the values of NormalFloat, fp32[16]."""
    return torch.tensor(CODES, device=device)


@lru_cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """Return the values of the two codes in each byte, fp32[256, 2]."""
    byte = torch.arange(256, device=device)
    upper = byte >> 4
    lower = byte & 15
    codes = torch.stack([upper, lower], 1)
    return _code_table(device)[codes]


@lru_cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """Return bitsandbytes' dynamic map of a byte with a sign, fp32[256], sorted.

    The map is that of Dettmers et al. 2022. It has seven powers of ten, each cut into twice as many
    parts as the one below it, and 0 and 1.
    """
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1)
        centres = (edges[1:] + edges[:-1]) / 2
        factor = 10.0 ** (power - 6)
        positive = (centres * factor).tolist()
        values += positive
        values += [-value for value in positive]
    return torch.tensor(sorted(values), device=device)
