"""The constants of compiled blocks are those that Inductor's schedule gives here (benchmarks/compiled_bytes.py)."""

from __future__ import annotations

import pytest

from benchmarks.compiled_bytes import Block, count_compiled, count_eager, gated_product, llama_block
from drumline.planner.cost import fitted

pytestmark = [pytest.mark.full, pytest.mark.slow]
# The versions of torch and transformers fuse and copy a little differently.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def block() -> dict[str, Block]:
    work = llama_block("cpu")
    return {"eager": count_eager(work), "compiled": count_compiled(work)}


def test_bytes_that_compiling_saves(block: dict[str, Block]) -> None:
    saved = block["eager"].moved - block["compiled"].moved
    assert saved == pytest.approx(fitted.BYTES_SAVED_BY_COMPILING, rel=TOLERANCE)
    # The planner takes a third of the bytes for forward.
    for counted in block.values():
        assert counted.forward.moved / counted.moved == pytest.approx(1 / 3, abs=0.07)


@pytest.mark.parametrize(
    ("kind", "constants"),
    [("eager", fitted.KERNELS), ("compiled", fitted.KERNELS_COMPILED)],
)
def test_kernels_of_a_block(block: dict[str, Block], kind: str, constants: tuple[int, int]) -> None:
    counted = block[kind]
    assert counted.forward.kernels == pytest.approx(constants[0], rel=TOLERANCE)
    assert counted.backward.kernels == pytest.approx(constants[1], rel=TOLERANCE)


def test_checkpointing_moves_the_bytes_of_the_forward_again(block: dict[str, Block]) -> None:
    eager = count_eager(llama_block("cpu").with_checkpointing())
    again = eager.backward.moved - block["eager"].backward.moved
    assert again == pytest.approx(block["eager"].forward.moved, rel=TOLERANCE)

    compiled = count_compiled(llama_block("cpu").with_checkpointing())
    again = compiled.backward.moved - block["compiled"].backward.moved
    # What the last residual sum gives is needed by nobody in backward, and not computed again.
    forward = block["compiled"].forward.moved
    assert 0.8 * forward < again < forward


def test_bytes_of_experts_that_stay_eager() -> None:
    work = gated_product("cpu")
    saved = count_eager(work).moved - count_compiled(work).moved
    assert saved == pytest.approx(fitted.BYTES_OF_EAGER_EXPERTS, rel=0.01)
