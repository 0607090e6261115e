"""Weights in 4 and 8 bits: their format, what is lost, products and gradients."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from drumline.errors import ModelError
from drumline.models.pack import pack
from drumline.models.packed import Bits, PackedLinear, PackedTensor


def layer(
    bits: Bits,
    storage: torch.dtype = torch.float32,
    rows: int = 96,
    columns: int = 128,
) -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows).requires_grad_(False)
    return linear, PackedLinear(linear, bits, storage)


@pytest.mark.claim(
    "packed weights lose a part of a code, and are multiplied as what they unpack to"
)
@pytest.mark.parametrize(("bits", "lost"), [("4bit", 0.11), ("8bit", 0.008)])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_lost_is_a_part_of_a_code(
    bits: Bits,
    lost: float,
    storage: torch.dtype,
) -> None:
    linear, layer_of_codes = layer(bits, storage)
    codes = layer_of_codes.packed

    largest = linear.weight.view(-1, 64).abs().amax(1).max()
    error = layer_of_codes.weight - linear.weight
    assert error.abs().max() < 1.4 * lost * largest

    bits_of_weight = int(bits[0])
    assert codes.dtype == storage
    assert codes.nbytes == linear.weight.numel() * bits_of_weight // 8

    on_meta = nn.Linear(128, 96, device="meta").requires_grad_(False)
    again = PackedLinear(on_meta, bits, storage).pack_weight(linear.weight)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.claim(
    "packed weights lose a part of a code, and are multiplied as what they unpack to"
)
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_products_and_gradients_are_those_of_the_unpacked_weight(bits: Bits) -> None:
    linear, packed = layer(bits)
    inputs = torch.randn(2, 5, 128, requires_grad=True)

    out = packed(inputs)
    expected = nn.functional.linear(
        inputs,
        packed.weight,
        linear.bias,
    )
    torch.testing.assert_close(out, expected)

    (gradient,) = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(gradient, 2 * out.detach() @ packed.weight)

    with torch.autocast("cpu", torch.bfloat16):
        assert packed(inputs).dtype == torch.bfloat16


def assert_parts_are_of_the_whole(
    weight: torch.Tensor, bits: Bits, dimension: int, parts: int
) -> None:
    """Each rank unpacks its part of the codes to its part of the whole packed weight, bit for bit."""
    shape = weight.shape
    whole = PackedTensor("weight", shape, bits, torch.float32)
    codes = whole.pack_weight(weight)
    expected = whole.unpack(torch.float32, codes)
    assert expected.shape == shape

    found = []
    for part in range(parts):
        of_rank = PackedTensor("weight", shape, bits, torch.float32)
        of_rank.cut(dimension, part, parts)
        # As bytes: some codes are no numbers in the type that they are stored in.
        packed = of_rank.pack_weight(weight).view(torch.uint8)
        assert torch.equal(packed, codes.view(torch.uint8))
        local_codes = codes.chunk(parts, dimension)[part].contiguous()
        unpacked = of_rank.unpack(torch.float32, local_codes)
        assert unpacked.shape == of_rank.local_shape
        found.append(unpacked)
    assert torch.equal(torch.cat(found, dimension), expected)


@pytest.mark.claim("packed weights that are cut over ranks have the values of whole ones")
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(16, 2048), (96, 160), (64, 32), (256, 96)],
    ids=["whole blocks", "cut within blocks", "several rows a block", "blocks over rows"],
)
def test_a_rank_unpacks_its_part_bit_for_bit(
    shape: tuple[int, int], dimension: int, parts: int, bits: Bits
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    assert_parts_are_of_the_whole(weight, bits, dimension, parts)


def test_a_part_is_of_whole_codes() -> None:
    packing = PackedTensor("weight", (64, 40), "4bit", torch.float32)
    with pytest.raises(
        ModelError, match=r"adapter\.quantize: 40 entries of a packed weight do not"
    ):
        packing.cut(1, 0, 2)
    with pytest.raises(ModelError, match=r"64 entries of a packed weight do not divide into 3"):
        packing.cut(0, 0, 3)


def test_only_frozen_layers_whose_shape_can_be_packed_are() -> None:
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.Linear(64, 64),
        nn.Linear(60, 64),
    )
    model[1:].requires_grad_(False)

    pack(model, "4bit", torch.float32)

    kinds = [type(each) for each in model]
    assert kinds == [nn.Linear, PackedLinear, nn.Linear]


@pytest.mark.skipif(
    find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes (it has a CPU build); it is not installed",
)
def test_the_format_is_that_of_bitsandbytes() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    linear, packed = layer("4bit", rows=256, columns=256)
    codes, state = quantize_4bit(
        linear.weight.data,
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
    )

    mine = packed.packed.view(torch.uint8).flatten()
    is_same = codes.flatten() == mine
    assert is_same.float().mean() > 0.9999

    unpacked = dequantize_4bit(codes, state)
    torch.testing.assert_close(packed.weight, unpacked, rtol=0, atol=1e-5)
