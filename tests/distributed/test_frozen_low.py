"""What does not learn lies in the type that it is multiplied in, under every strategy: near one
process in fp32, to the planned byte.

Real ranks over gloo, one process group for each world size; LoRA over all linear layers, and
`model.freeze` of the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.plan.plan import Plan
from tests.distributed.promises import held_as_planned, measurement_of, sent_as_planned
from tests.distributed.setups import asked_for, cases, train_table
from tests.harness import Sections, column
from tests.tiny import tiny_model_dir

LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
FROZEN: Sections = {"model": {"freeze": ["model.embed_tokens"]}}
# Losses and norms of bf16 against fp32, as tests/distributed/rows.py has them.
NEAR = {"loss": 2e-3, "grad_norm": 2e-2}


def row(strategy: Any, ranks: int, learns: Sections, precision: str) -> Sections:
    return {"strategy": strategy, "ranks": ranks, "precision": precision, **learns}


ROWS = {
    "one process": row("single", 1, LORA, "bf16"),
    "one process, frozen embedding": row("single", 1, FROZEN, "bf16"),
    "ddp": row("ddp", 2, LORA, "bf16"),
    "ddp, fp16": row("ddp", 2, LORA, "fp16"),
    "fsdp2": row("fsdp2", 2, LORA, "bf16"),
    "fsdp2, gathered in fp32": row({"kind": "fsdp2", "param_dtype": "fp32"}, 2, LORA, "bf16"),
    "fsdp2, frozen embedding": row("fsdp2", 2, FROZEN, "bf16"),
    "tp": row("tp", 2, LORA, "bf16"),
    "cp": row("cp", 2, LORA, "bf16"),
    "pp": row("pp", 2, LORA, "bf16"),
    "zero2": row("zero2", 2, LORA, "bf16"),
}
# With --full alone.
AGAIN = (
    "ddp, fp16",
    "fsdp2, gathered in fp32",
    "cp",
    "tp",
    "ddp",
    "fsdp2, frozen embedding",
    "pp",
    "zero2",
)


REFERENCES = {
    "fp32, lora": row("single", 1, LORA, "fp32"),
    "fp32, frozen embedding": row("single", 1, FROZEN, "fp32"),
}


def reference(name: str) -> str:
    if "frozen embedding" in name:
        return "fp32, frozen embedding"
    return "fp32, lora"


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("frozen")
    tiny_model_dir(root / "model")
    return train_table(root, {**REFERENCES, **asked_for(request, ROWS, AGAIN)})


@pytest.mark.claim("frozen weights lie in the type they compute in")
@pytest.mark.parametrize("name", cases(ROWS, AGAIN))
@pytest.mark.timeout(900)
def test_numbers_are_near_and_bytes_as_planned(runs: dict[str, Path], name: str) -> None:
    run = runs[name]
    other = runs[reference(name)]
    for key, tolerance in NEAR.items():
        expected = column(other, key)
        assert column(run, key) == pytest.approx(expected, rel=tolerance), key
    held_as_planned(run, ["parameters"])
    plan = Plan.load(run / "plan.json")
    is_cut = plan.mesh.cp * plan.mesh.tp > 1
    if plan.engine == "native" and not is_cut and plan.data_parallel in ("ddp", "fsdp2"):
        sent_as_planned(run, step=4)


def test_two_bytes_fall_away_for_each_frozen_entry(runs: dict[str, Path]) -> None:
    """Of matrices: vectors are one entry in hundreds of this model, in thousands of others."""
    low = measurement_of(runs["one process"])
    full = measurement_of(runs["fp32, lora"])
    frozen = 0
    for parameter in models_weights(runs["one process"]):
        if parameter.ndim >= 2:
            frozen += parameter.numel()
    assert full.memory["parameters"] - low.memory["parameters"] == 2 * frozen


def models_weights(run: Path) -> list[Any]:
    from drumline.models.build import build_model

    plan = Plan.load(run / "plan.json")
    model = build_model(plan.model_path, plan.config.model, 0)
    return list(model.parameters())
