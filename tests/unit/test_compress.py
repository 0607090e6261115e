"""Compressors by themselves: what the 8-bit code loses, and that kept errors come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from drumline.engine.compress import BLOCK, KINDS, Compressor, decode, encode, orthonormal
from drumline.telemetry.traffic import CommunicatedBytes
from tests.strategies import Compression


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one rank: compressors send to themselves, and the arithmetic is all there."""
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    assert dist.group.WORLD is not None

    yield dist.group.WORLD
    dist.destroy_process_group()


def compressor(group: dist.ProcessGroup, kind: str, **options: float) -> Compressor:
    settings = Compression.model_validate({"kind": kind, **options})
    return KINDS[kind](group, settings, seed=0)


PARAMETERS = [torch.zeros(64, 48), torch.zeros(100)]
MATRIX = 64 * 48
SIZE = MATRIX + 100


def gradients(step: int = 0) -> torch.Tensor:
    """Return gradients of `PARAMETERS`, one after the other."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(SIZE, generator=draw)


def test_the_8_bit_code_is_off_by_half_a_step_at_most() -> None:
    scales = torch.logspace(-8, 8, 4).repeat_interleave(BLOCK)
    rows = torch.randn(3, 4 * BLOCK) * scales
    packed = encode(rows)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 4 * (BLOCK + 4))

    blocks = rows.view(3, 4, BLOCK)
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    errors = (decode(packed) - rows).view(3, 4, BLOCK)
    limits = steps / 2 * 1.0001
    assert (errors.abs() <= limits).all()

    zeros = torch.zeros(1, BLOCK)
    assert torch.equal(decode(encode(zeros)), zeros)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_8_bit_code_does_not_hide_what_is_not_finite(bad: float) -> None:
    rows = torch.ones(1, 2 * BLOCK)
    rows[0, 3] = bad
    seen = decode(encode(rows))
    assert not seen[0, :BLOCK].isfinite().any()
    assert torch.equal(seen[0, BLOCK:], rows[0, BLOCK:])


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 2**-8), ("fp16", 2**-10), ("int8", 1e-2)])
def test_near_the_gradient(group: dist.ProcessGroup, kind: str, tolerance: float) -> None:
    flat = gradients()
    seen = flat.clone()
    compressor(group, kind).average(seen, PARAMETERS)
    error = (seen - flat).norm() / flat.norm()
    assert 0 < float(error) < tolerance


@pytest.mark.parametrize(
    ("kind", "options"), [("topk", {"ratio": 0.05}), ("powersgd", {"rank": 2})]
)
def test_nothing_is_lost_but_time(
    group: dist.ProcessGroup, kind: str, options: dict[str, float]
) -> None:
    made = compressor(group, kind, **options)
    sent = torch.zeros(SIZE)
    given = torch.zeros(SIZE)
    for step in range(6):
        flat = gradients(step)
        given += flat
        made.average(flat, PARAMETERS)
        sent += flat

    errors = torch.cat([made.errors[p] for p in PARAMETERS])  # type: ignore[attr-defined]
    assert float(errors.norm()) > 1
    torch.testing.assert_close(
        sent + errors,
        given,
        rtol=1e-5,
        atol=1e-4,
    )


def test_top_k_sends_the_largest(group: dist.ProcessGroup) -> None:
    flat = gradients()
    seen = flat.clone()
    compressor(group, "topk", ratio=0.01).average(seen, PARAMETERS)
    is_kept = seen != 0
    kept = seen[is_kept]
    left = flat[~is_kept]
    assert kept.numel() == round(0.01 * flat.numel())
    assert torch.equal(kept, flat[is_kept])
    assert float(kept.abs().min()) >= float(left.abs().max())


def test_powersgd_finds_a_matrix_of_its_rank_and_sends_vectors_whole(
    group: dist.ProcessGroup,
) -> None:
    made = compressor(group, "powersgd", rank=3)
    flat = gradients()
    matrix = torch.randn(64, 3) @ torch.randn(3, 48)
    flat[:MATRIX] = matrix.flatten()
    seen = flat.clone()
    made.average(seen, PARAMETERS)
    torch.testing.assert_close(
        seen,
        flat,
        rtol=1e-4,
        atol=1e-4,
    )
    assert torch.equal(seen[MATRIX:], flat[MATRIX:])


def test_bases_of_equal_shapes_are_made_together() -> None:
    matrices = [
        torch.randn(6, 2),
        torch.randn(4, 2),
        torch.randn(6, 2),
    ]
    for matrix, base in zip(matrices, orthonormal(matrices), strict=True):
        expected, _ = torch.linalg.qr(matrix)
        torch.testing.assert_close(base, expected)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_step_with_nan_is_not_remembered(group: dist.ProcessGroup, kind: str) -> None:
    made = compressor(group, kind, ratio=0.05, rank=2)
    for step in range(4):
        flat = gradients(step)
        if step == 1:
            flat[7] = torch.nan
        made.average(flat, PARAMETERS)
        assert bool(flat.isfinite().all()) == (step != 1)


def test_sent_bytes_counts_what_is_called_by_the_ring(group: dist.ProcessGroup) -> None:
    with CommunicatedBytes() as mode:
        dist.all_reduce(torch.ones(10))
        dist.all_gather_into_tensor(torch.ones(10), torch.ones(10))
    assert mode.total == 0, "one rank sends nothing"
