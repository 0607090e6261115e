"""A teacher on servers, and the model's own base, teach what the same model teaches in this process,
on any number of ranks and after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    UNSAVED,
    claim,
    merge,
    plan_in,
    train,
)
from tests.distributed.test_distill import teacher_dir
from tests.harness import Sections, column, events, losses, same_weights, write_config
from tests.tiny import read_model, tiny_model_dir
from tests.vllm_stub import StubServer

DISTILL: Sections = {"kind": "distill", "loss_chunk": 32, "top_k": 8, "cross_entropy_weight": 0.2}
GKD: Sections = {
    "kind": "gkd",
    "loss_chunk": 32,
    "top_k": 8,
    # Its gradient does not depend on a tiny rest, which a server's log-probs do not tell.
    "divergence": "jsd",
    "on_policy_share": 0.5,
    "minibatches": 2,
    "epochs": 2,
    "generator": {"kind": "hf", "max_new_tokens": 6},
}
# At first the model is its own teacher, and the divergence has a gradient of rounding errors alone. The
# cross-entropy and eps outweigh them.
LORA: Sections = {
    "adapter": {"kind": "lora", "r": 4, "targets": "attention"},
    "optimizer": {"lr": 1e-2, "eps": 1e-4},
    "algorithm": {"cross_entropy_weight": 0.5},
}
LIVE: Sections = {"log_probs": "live", "top_k": 0, "divergence": "jsd"}
TWO_RANKS: Sections = {"strategy": "fsdp2", "batch": {"micro_batch": 1}}
BASE: Sections = {
    "batch": {**EIGHT_BY_FOUR, "micro_batch": 8},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {**UNSAVED, "every": 4},
    "run": {"steps": 4},
}
pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_model_dir(root / "model")
    teacher_dir(root)
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[StubServer]:
    with StubServer(read_model(models / "teacher")) as stub:
        yield stub


def served(server: StubServer) -> dict[str, Any]:
    return {"kind": "server", "url": server.url, "model": "tiny"}


def train_three(
    root: Path, models: Path, alike: Any, other: Any, algorithm: Sections, more: Sections
) -> tuple[Path, Path, Path]:
    """Train with the teacher `alike` on one rank, and with the teacher `other` on one and on two.

    Returns the three run folders. Each run has a token cache of its own.
    """
    plans = {}
    for name, world_size, teacher in (("alike", 1, alike), ("one", 1, other), ("two", 2, other)):
        sections = merge(BASE, {"algorithm": {**algorithm, "teacher": teacher}}, more)
        if world_size > 1:
            sections = merge(sections, TWO_RANKS)
        folder = root / name
        folder.mkdir()
        plans[name] = plan_in(folder, "one", world_size, models / "model", **sections)
    train([plans["alike"], plans["one"]])
    train([plans["two"]])
    alike_run, one, two = (root / name / "one" / "run" for name in plans)
    return alike_run, one, two


def assert_same_numbers(mine: Path, reference: Path) -> None:
    apart = difference(mine, reference)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 4
    assert column(mine, "kl") == pytest.approx(column(reference, "kl"), rel=TOLERANCE, abs=1e-6)
    for key in ("loss", "kl"):
        expected = column(reference, key, "eval")
        assert column(mine, key, "eval") == pytest.approx(expected, rel=TOLERANCE, abs=1e-6), key
    same_weights(mine, reference, 1e-5)


@pytest.mark.parametrize("algorithm", [DISTILL, GKD], ids=["distill", "gkd"])
def test_a_server_teaches_what_its_model_teaches_here(
    tmp_path: Path, models: Path, server: StubServer, algorithm: Sections
) -> None:
    here = {"id": str(models / "teacher")}
    alike, one, two = train_three(tmp_path, models, here, served(server), algorithm, {})
    assert_same_numbers(one, alike)
    assert_same_numbers(two, one)
    assert column(one, "kl", "eval")[0] > 0.1


@pytest.mark.parametrize("algorithm", [DISTILL, {**DISTILL, **LIVE}], ids=["precomputed", "live"])
def test_the_base_teaches_what_the_model_teaches_before_training(
    tmp_path: Path, models: Path, algorithm: Sections
) -> None:
    here = {"id": str(models / "model")}
    alike, one, two = train_three(tmp_path, models, here, "base", algorithm, LORA)
    assert_same_numbers(one, alike)
    assert_same_numbers(two, one)
    # The model is its own teacher at first, and the rows take it away from there.
    assert column(one, "kl")[0] == pytest.approx(0, abs=1e-6)
    assert column(one, "kl")[-1] > 1e-5


def plan_of(
    folder: Path, models: Path, teacher: Any, algorithm: Sections, resume: Resume | None = None
) -> Path:
    """A run of two ranks with checkpoints of steps 2 and 4."""
    folder.mkdir(exist_ok=True)
    path = write_config(
        folder,
        models / "model",
        algorithm={**algorithm, "teacher": teacher},
        strategy="ddp",
        batch=EIGHT_BY_FOUR,
    )
    return claim(Request(load(path, []), world_size=2, resume=resume))


@pytest.mark.parametrize("kind", ["distill", "gkd"])
def test_a_resumed_run_has_the_same_numbers(
    tmp_path: Path, models: Path, server: StubServer, kind: str
) -> None:
    algorithm = DISTILL if kind == "distill" else {**GKD, "minibatches": 1, "epochs": 1}
    folder = tmp_path / "a"
    run = folder / "run"
    run_plans([plan_of(folder, models, served(server), algorithm)], 2)
    whole = losses(run)
    assert len(whole) == 4
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    # What was asked before training is on disk, and the server may be gone.
    asked = server.completed
    run_plans([plan_of(folder, models, served(server), algorithm, Resume())], 2)
    assert [event["step"] for event in events(run, "restore")] == [2]
    assert losses(run) == pytest.approx(whole, rel=1e-6)
    if kind == "distill":
        assert server.completed == asked
    else:
        assert server.completed > asked
