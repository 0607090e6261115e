"""Frozen linear layers in 4 or 8 bits (QLoRA, Dettmers et al. 2023), by which strategy ever they are spread: codes lie in a tensor of the
type that weights are gathered in, as FSDP-QLoRA has it, so what shards or gathers it moves bits and casts nothing; scales, an eighth of a
bit for each entry, are whole on each rank.

4bit is the format of bitsandbytes: NormalFloat in blocks of 64 along the rows, two codes a byte; the blocks' scales, less their mean, in
bytes of its dynamic map, of which every 256 share an fp32 one. 8bit: whole numbers up to 127 times an fp32 scale for every 256 entries.
A product is made of the weight in the type that it computes in, unpacked for it, and again for backward.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from drumline.core.facts import packs
from drumline.models.blocks import blocks

# Entries that share a scale; scales that share another, and entries of 8 bits that share one.
BLOCK, GROUP = (
    64,
    256,
)
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
Bits = Literal["4bit", "8bit"]


class PackedLinear(nn.Module):
    """A linear layer (or GPT-2's Conv1D) whose weight [R, C] is packed. `packed`: [R, C × bits / 8 / bytes of an entry], a frozen
    parameter, on the meta device until it is filled with what `take` gives."""

    def __init__(self, layer: Any, bits: Bits, storage: torch.dtype) -> None:
        super().__init__()
        self.bits: Bits = bits
        self.turned, self.bias = not isinstance(layer, nn.Linear), layer.bias
        self.shape = torch.Size(layer.weight.shape)
        self.in_features, self.out_features = self.shape if self.turned else self.shape[::-1]
        self.scales: tuple[
            torch.Tensor, ...
        ] = ()  # no buffers: DDP would send them before each step
        width = self.shape[1] * int(bits[0]) // 8 // storage.itemsize
        empty = torch.empty(self.shape[0], width, dtype=storage, device="meta")
        self.packed = nn.Parameter(empty, requires_grad=False)
        if not layer.weight.is_meta:
            self.packed = nn.Parameter(
                self.take(layer.weight.detach().float()), requires_grad=False
            )

    @property
    def weight(self) -> torch.Tensor:
        """What is multiplied, [R, C] in fp32: DoRA takes its lengths."""
        return self.unpacked(torch.float32)

    def take(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack a whole weight, float[R, C]: keep its scales, and give what `packed` holds of all ranks."""
        codes, self.scales = (_four if self.bits == "4bit" else _eight)(weight.float())
        return codes.view(self.packed.dtype)

    def unpacked(self, dtype: torch.dtype, packed: torch.Tensor | None = None) -> torch.Tensor:
        """The weight in `dtype`, of `packed` or what this layer holds, which must be whole by now."""
        codes = (self.packed if packed is None else packed).detach().view(torch.uint8)
        self.scales = tuple(each.to(codes.device) for each in self.scales)
        if self.bits == "8bit":
            values = codes.view(torch.int8).view(-1, GROUP) * self.scales[0][:, None]
            return values.view(self.shape).to(dtype)
        numbers, largest, mean = self.scales
        wide = functional.pad(_map(codes.device)[numbers.int()], (0, -len(numbers) % GROUP)).view(
            -1, GROUP
        )
        scales = (wide * largest[:, None]).flatten()[: len(numbers)] + mean
        if codes.is_cuda and _has_kernel():
            from bitsandbytes.functional import QuantState, dequantize_4bit

            state = QuantState(scales, self.shape, _table(codes.device), BLOCK, "nf4", dtype)
            whole: torch.Tensor = dequantize_4bit(codes.view(-1, 1), state)
            return whole
        pairs = _pairs(codes.device)[codes.flatten().int()]
        return (pairs.view(-1, BLOCK) * scales[:, None]).view(self.shape).to(dtype)

    @torch.compiler.disable
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        out: torch.Tensor = _Product.apply(inputs.to(dtype), self)
        return out if self.bias is None else out + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """Nothing is kept for backward: the weight is unpacked again, when whoever shards it has gathered it again."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        weight = layer.unpacked(inputs.dtype)
        return inputs @ (weight if layer.turned else weight.T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = ctx.layer.unpacked(grad.dtype)
        return grad @ (weight.T if ctx.layer.turned else weight), None


def pack(model: Any, bits: Bits, storage: torch.dtype) -> None:
    """Put `PackedLinear` in the place of each frozen linear layer in the blocks whose shape can be packed, also beneath adapters. A layer
    on the meta device is to be filled. `storage`: the type that weights are gathered in."""
    from drumline.vendor.transformers import Conv1D

    for block in blocks(model) or [model]:
        for owner in list[Any](block.modules()):
            for name, layer in list(owner.named_children()):
                if (
                    isinstance(layer, nn.Linear | Conv1D)
                    and not layer.weight.requires_grad
                    and packs(tuple(layer.weight.shape))
                ):
                    setattr(owner, name, PackedLinear(layer, bits, storage))
                    for lengths in (
                        ()
                        if layer.weight.is_meta
                        else getattr(owner, "lora_magnitude_vector", {}).values()
                    ):
                        whole = owner.base_layer.weight + owner.get_delta_weight("default")
                        lengths.weight.data.copy_(whole.norm(dim=int(not owner.fan_in_fan_out)))


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    """What packed layers keep besides parameters."""
    return [
        scale
        for module in model.modules()
        if isinstance(module, PackedLinear)
        for scale in module.scales
    ]


def _four(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Codes, uint8[R, C / 2], the first entry of two in the upper bits; numbers of the map, their fp32 scales, and the mean."""
    blocked = weight.reshape(-1, BLOCK)
    largest = blocked.abs().amax(1)
    codes = torch.bucketize(
        blocked / largest.clamp_min(1e-30)[:, None], _between(_table(weight.device)), out_int32=True
    ).to(torch.uint8)
    mean = largest.mean()
    apart = functional.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    most = apart.abs().amax(1)
    numbers = torch.bucketize(
        apart / most.clamp_min(1e-30)[:, None], _between(_map(weight.device)), out_int32=True
    ).to(torch.uint8)
    pairs = codes.view(len(weight), -1, 2)
    return (pairs[:, :, 0] << 4) | pairs[:, :, 1], (
        numbers.flatten()[: len(largest)].clone(),
        most,
        mean,
    )


def _eight(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Codes, int8[R, C], and fp32 scales."""
    blocked = weight.reshape(-1, GROUP)
    scales = blocked.abs().amax(1) / 127
    codes = (blocked / scales.clamp_min(1e-30)[:, None]).round().to(torch.int8)
    return codes.view(weight.shape), (scales,)


@lru_cache
def _has_kernel() -> bool:
    return find_spec("bitsandbytes") is not None


def _between(table: torch.Tensor) -> torch.Tensor:
    return (table[1:] + table[:-1]) / 2


@lru_cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor(CODES, device=device)


@lru_cache
def _pairs(device: torch.device) -> torch.Tensor:
    """float[256, 2]: what the two codes of a byte mean."""
    byte = torch.arange(256, device=device)
    return _table(device)[torch.stack([byte >> 4, byte & 15], 1)]


@lru_cache
def _map(device: torch.device) -> torch.Tensor:
    """bitsandbytes' dynamic map of a byte with a sign (Dettmers et al. 2022): seven powers of ten, each cut into twice as many parts as the
    one below it; 0 and 1."""
    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1)
        parts = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (power - 6)).tolist()
        found += [*parts, *(-part for part in parts)]
    return torch.tensor(sorted(found), device=device)
