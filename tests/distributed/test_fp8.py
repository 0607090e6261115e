"""precision fp8, emulated: near one process in fp32, bytes of states and of traffic as planned, and
start-up in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.promises import held_as_planned, sent_as_planned
from tests.distributed.setups import asked_for, cases, train_table
from tests.harness import Sections, column
from tests.tiny import tiny_model_dir

pytest.importorskip("torchao")
# Of five steps against fp32, where 2.3e-4 and 2.3e-3 were measured: a value of three bits after the
# point is up to 6% from its own.
NEAR = {"loss": 1e-3, "grad_norm": 1e-2}


FP8 = {"kind": "fp8"}
TENSORWISE = {**FP8, "scaling": "tensorwise"}
ROWS: dict[str, Sections] = {
    "one process, rowwise": {"strategy": "single", "ranks": 1, "precision": FP8},
    "one process, tensorwise": {"strategy": "single", "ranks": 1, "precision": TENSORWISE},
    "ddp": {"strategy": "ddp", "ranks": 2, "precision": FP8},
    "fsdp2": {"strategy": "fsdp2", "ranks": 2, "precision": FP8},
    "fsdp2, gathered in fp8": {
        "strategy": "fsdp2",
        "ranks": 2,
        "precision": {**TENSORWISE, "gather": "fp8"},
    },
}
AGAIN = ("one process, tensorwise", "ddp", "fsdp2")  # with --full alone


FP32 = {"strategy": "single", "ranks": 1, "precision": "fp32"}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8")
    tiny_model_dir(root / "model")
    return train_table(root, {"fp32": FP32, **asked_for(request, ROWS, AGAIN)})


@pytest.mark.claim("products in fp8 stay near fp32, and send and hold what is planned")
@pytest.mark.parametrize("name", cases(ROWS, AGAIN))
@pytest.mark.timeout(900)
def test_numbers_are_near_and_bytes_as_planned(runs: dict[str, Path], name: str) -> None:
    run = runs[name]
    for key, most in NEAR.items():
        found = column(run, key)
        expected = column(runs["fp32"], key)
        apart = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        print(name, key, apart)
        assert 0 < apart < most, key
    held_as_planned(run, ("parameters", "gradients", "optimizer"))
    if ROWS[name]["ranks"] > 1:
        sent_as_planned(run, step=4)
    parts = column(run, "seconds", "started")[0]
    assert list(parts) == ["imports and plan", "model", "data", "first step"]
    assert min(parts.values()) >= 0
