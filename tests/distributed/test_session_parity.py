"""A loop of the user's own trains the same on one process and on two, however its model is spread; it goes on to the bit after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.bench.verify import difference
from drumline.checkpoint.load import check, load, newest
from tests.distributed.ranks import run_module
from tests.distributed.session_worker import STEPS
from tests.harness import events

pytestmark = [
    pytest.mark.claim(
        "any module trains the same however it is spread, by a config and in a loop of one's own"
    )
]

WORKER = "tests.distributed.session_worker"
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
ROWS = [(name, strategy) for name in ("vit", "resnet", "gpt") for strategy in STRATEGIES]
# With --full.
AGAIN = [
    ("vit", "zero2"),
    ("vit", "ddp"),
    ("resnet", "zero3"),
    ("resnet", "zero2"),
    ("gpt", "ddp"),
]
# By its stages, and by a plan.
CUT = [("mlp", strategy) for strategy in ("pp", "model_parallel", "tp")]
GANS = ("ddp", "fsdp2", "local_sgd")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows that are asked for, in one process group of two and one of one."""
    folder = tmp_path_factory.mktemp("sessions")
    run_module(
        WORKER, [folder, *(f"{name}:single" for name in ("vit", "resnet", "gpt", "gan", "mlp"))], 1
    )
    rows = [row for row in ROWS if row not in AGAIN or request.config.getoption("--full")]
    run_module(
        WORKER,
        [
            folder,
            *(
                f"{name}:{strategy}"
                for name, strategy in [*rows, *CUT, *(("gan", strategy) for strategy in GANS)]
            ),
        ],
        2,
    )
    return folder


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(*row, id="-".join(row), marks=pytest.mark.full if row in AGAIN else [])
        for row in (*ROWS, *CUT)
    ],
)
def test_same_numbers_as_one_process(runs: Path, name: str, strategy: str) -> None:
    mine, reference = runs / f"{name}-{strategy}", runs / f"{name}-single"
    apart = difference(mine, reference)
    assert len(events(mine, "step")) == STEPS
    assert max(apart.loss, apart.grad_norm, apart.weights) <= TOLERANCE, apart
    evals = [[e["loss"] for e in events(run, "eval")] for run in (mine, reference)]
    assert evals[0] == pytest.approx(evals[1], rel=TOLERANCE)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, by name."""
    path = newest(run / "checkpoints", verify=True, alone=True).path
    assert path is not None
    tensors = {
        name: torch.empty(t.shape)
        for name, t in check(path, False, alone=True).tensors.items()
        if "/model." in name
    }
    load(path, tensors, alone=True, partly=True)
    return tensors


@pytest.mark.parametrize("strategy", GANS)
def test_two_models_with_an_optimizer_each(runs: Path, strategy: str) -> None:
    mine, reference = runs / f"gan-{strategy}", runs / "gan-single"
    found, expected = weights(mine), weights(reference)
    assert (
        found.keys() == expected.keys() and {"d/model.1.weight", "g/model.0.weight"} <= found.keys()
    )
    if strategy == "local_sgd":  # each rank trains by itself in between
        return
    for key in ("d_loss", "g_loss", "d_grad_norm", "g_grad_norm"):
        figures = [[e[key] for e in events(run, "step")] for run in (mine, reference)]
        assert len(figures[0]) == STEPS and figures[0] == pytest.approx(
            figures[1], rel=TOLERANCE
        ), key
    for name, tensor in expected.items():
        assert torch.linalg.vector_norm(
            found[name] - tensor
        ) <= 2 * TOLERANCE * torch.linalg.vector_norm(tensor).clamp_min(1e-2), name
