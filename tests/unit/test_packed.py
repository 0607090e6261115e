"""Weights in 4 and 8 bits: their format, what is lost, products and gradients."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from drumline.models.pack import pack
from drumline.models.packed import Bits, PackedLinear


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
