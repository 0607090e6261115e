"""A loop of the user's own trains the same on one process and on two, however its model is spread;
it goes on to the bit after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.bench.verify import difference
from drumline.checkpoint.load import check, load_tensors, newest
from tests.distributed.ranks import run_module
from tests.distributed.session_worker import STEPS
from tests.distributed.setups import case, same_evaluations
from tests.harness import column, events

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
    ("vit", "fsdp2"),
    ("resnet", "fsdp2"),
    ("gpt", "zero3"),
    ("gpt", "zero2"),
]
# By its stages, and by a plan.
CUT = [("mlp", strategy) for strategy in ("pp", "model_parallel", "tp")]
GANS = ("ddp", "fsdp2", "local_sgd")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows that are asked for, in one process group of two and one of one."""
    folder = tmp_path_factory.mktemp("sessions")
    names = ("vit", "resnet", "gpt", "gan", "mlp")
    run_module(WORKER, [folder, *(f"{name}:single" for name in names)], 1)
    rows = ROWS
    if not request.config.getoption("--full"):
        rows = [row for row in ROWS if row not in AGAIN]
    rows = [*rows, *CUT, *(("gan", strategy) for strategy in GANS)]
    run_module(WORKER, [folder, *map(":".join, rows)], 2)
    return folder


SPREAD = [case(*row, id="-".join(row), full=row in AGAIN) for row in (*ROWS, *CUT)]


@pytest.mark.parametrize(("name", "strategy"), SPREAD)
def test_same_numbers_as_one_process(runs: Path, name: str, strategy: str) -> None:
    mine = runs / f"{name}-{strategy}"
    reference = runs / f"{name}-single"
    apart = difference(mine, reference)
    assert len(events(mine, "step")) == STEPS
    assert max(apart.loss, apart.grad_norm, apart.weights) <= TOLERANCE, apart
    same_evaluations(mine, reference, TOLERANCE)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, by name."""
    path = newest(run / "checkpoints", verify=True, collective=False).path
    assert path is not None
    tensors = {}
    for name, stored in check(path, False, collective=False).tensors.items():
        if "/model." in name:
            tensors[name] = torch.empty(stored.shape)
    load_tensors(path, tensors, collective=False, allow_partial=True)
    return tensors


@pytest.mark.parametrize("strategy", GANS)
def test_two_models_with_an_optimizer_each(runs: Path, strategy: str) -> None:
    mine = runs / f"gan-{strategy}"
    reference = runs / "gan-single"
    found = weights(mine)
    expected = weights(reference)
    assert found.keys() == expected.keys()
    assert {"d/model.1.weight", "g/model.0.weight"} <= found.keys()
    if strategy == "local_sgd":  # each rank trains by itself in between
        return
    for key in ("d_loss", "g_loss", "d_grad_norm", "g_grad_norm"):
        figures = column(mine, key)
        assert len(figures) == STEPS
        assert figures == pytest.approx(column(reference, key), rel=TOLERANCE), key
    for name, tensor in expected.items():
        distance = torch.linalg.vector_norm(found[name] - tensor)
        size = torch.linalg.vector_norm(tensor).clamp_min(1e-2)
        assert distance <= 2 * TOLERANCE * size, name
