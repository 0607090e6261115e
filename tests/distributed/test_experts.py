"""Experts on several ranks in pure bf16, and packed by QLoRA: near one process, or equal to it; bytes
as planned; and a run that stops under one spread and goes on under another. In fp32, with LoRA and
compiled: the rows of test_parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from drumline.models.export import export
from tests.distributed.promises import held_as_planned
from tests.distributed.setups import (
    SHORT,
    case,
    chosen_params,
    goes_on_from,
    merge,
    plan_in,
    run_of,
    same_steps,
    slug,
    train,
    train_kinds,
)
from tests.harness import Sections, column
from tests.tiny import tiny_architecture_dir

pytestmark = pytest.mark.timeout(1500)


class Kind(NamedTuple):
    """`within`: relative, of losses and gradient norms of three steps against one process."""

    sections: Sections
    within: float


PURE = {"kind": "bf16", "master": "bf16"}
# A stage of a pipeline has the routers of some layers alone, a rank that cuts the stream some tokens.
NO_ROUTER_LOSS: Sections = {"model": {"config": {"output_router_logits": False}}}
KINDS = {
    # Weights, gradients and moments in bf16, and a sum over experts in another order.
    "bf16, stochastic": Kind({"precision": PURE}, 3e-2),
    "bf16, without a router loss": Kind({"precision": PURE, **NO_ROUTER_LOSS}, 3e-2),
    "bf16, kahan": Kind({"precision": {**PURE, "rounding": "kahan"}}, 3e-2),
    "4bit": Kind({"adapter": {"kind": "lora", "quantize": "4bit"}}, 1e-5),
    "8bit": Kind({"adapter": {"kind": "lora", "quantize": "8bit"}}, 1e-5),
    "4bit, without a router loss": Kind(
        {"adapter": {"kind": "lora", "quantize": "4bit"}, **NO_ROUTER_LOSS}, 1e-5
    ),
    "8bit, without a router loss": Kind(
        {"adapter": {"kind": "lora", "quantize": "8bit"}, **NO_ROUTER_LOSS}, 1e-5
    ),
    "4bit, bf16": Kind({"adapter": {"kind": "lora", "quantize": "4bit"}, "precision": PURE}, 3e-2),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ep 2": (2, {"kind": "ddp", "ep": 2}),
    "fsdp2 2 x ep 2": (4, {"kind": "fsdp2", "ep": 2}),
    "fsdp2, ep 2 x cp 2": (4, {"kind": "fsdp2", "ep": 2, "cp": 2}),
    "fsdp2, ep 2 x pp 2": (4, {"kind": "fsdp2", "ep": 2, "pp": 2}),
    "fsdp2, ep 2 x tp 2": (4, {"kind": "fsdp2", "ep": 2, "tp": 2}),
    "tp 2": (2, "tp"),
    "tp 2, whole stream": (2, {"kind": "tp", "sequence_parallel": False}),
    "fsdp2 2 x tp 2": (4, {"kind": "fsdp2", "tp": 2}),
}
# Spreads of the kinds without a router loss, which have no others.
IN_PARTS = (
    "fsdp2, ep 2 x pp 2",
    "fsdp2, ep 2 x tp 2",
    "tp 2",
    "tp 2, whole stream",
    "fsdp2 2 x tp 2",
)
OFTEN = [
    ("bf16, stochastic", "ep 2"),
    ("4bit", "ep 2"),
    ("4bit, without a router loss", "tp 2"),
]


def spreads_of(kind: str) -> list[str]:
    if kind.endswith("without a router loss"):
        return list(IN_PARTS)
    return [name for name in SPREADS if name not in ("single", *IN_PARTS)]


def pairs() -> list[Any]:
    found = []
    for kind in KINDS:
        for name in spreads_of(kind):
            often = (kind, name) in OFTEN
            found.append(case(kind, name, id=f"{kind}-{name}", full=not often))
    return found


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    base = {
        **SHORT,
        "run": {"steps": 3},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6},
    }
    ranks, strategy = SPREADS[spread]
    sections = merge(base, KINDS[kind].sections)
    return plan_in(root, folder, ranks, root / "model", strategy=strategy, **sections)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    tiny_architecture_dir(root / "model", "mixtral", layers=2)
    train_kinds(root, chosen_params(request.session, __file__), plan)
    return root


@pytest.mark.claim("experts on several ranks train in pure bf16 and packed as in one process")
@pytest.mark.parametrize(("kind", "name"), pairs())
def test_numbers_are_near_and_bytes_as_planned(runs: Path, kind: str, name: str) -> None:
    run = run_of(runs, kind, name)
    same_steps(run, run_of(runs, kind, "single"), KINDS[kind].within)
    losses = column(run, "loss")
    assert losses[-1] < losses[0]
    held_as_planned(run, ("parameters", "optimizer"))


@pytest.mark.full
def test_exports_are_those_of_one_process(tmp_path: Path) -> None:
    """The adapter of packed experts and layers that two ranks have cut, and the merged model."""
    model = tiny_architecture_dir(
        tmp_path / "model", "mixtral", layers=2, output_router_logits=False
    )
    sections = merge(
        SHORT,
        {"run": {"steps": 2}, "optimizer": {"lr": 3e-3, "eps": 1e-4}},
        KINDS["4bit"].sections,
    )
    runs = []
    for spread in ("single", "tp 2"):
        ranks, strategy = SPREADS[spread]
        plan = plan_in(tmp_path, slug(spread), ranks, model, strategy=strategy, **sections)
        train([plan])
        runs.append(plan.parent)
    alone, cut = runs
    for adapter in (False, True):
        expected = tensors_of(alone, adapter)
        found = tensors_of(cut, adapter)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def tensors_of(run: Path, adapter: bool) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's export."""
    folder = run / f"export-{adapter}"
    export(run, folder, which="last", adapter=adapter)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    assert tensors
    return tensors


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        case("bf16, stochastic", "fsdp2 2 x ep 2", "single", id="bf16", full=True),
        case("bf16, kahan", "single", "ep 2", id="kahan", full=True),
        case("4bit", "ep 2", "fsdp2 2 x ep 2", id="4bit", full=True),
        case("4bit, without a router loss", "tp 2", "single", id="4bit, tp", full=True),
        case(
            "8bit, without a router loss",
            "fsdp2 2 x tp 2",
            "fsdp2, ep 2 x tp 2",
            id="8bit, tp",
            full=True,
        ),
    ],
)
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, KINDS[kind].within)
