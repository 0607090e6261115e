"""Distillation has the numbers of one process, however student and teacher are spread, and whether the
teacher is asked before training or in every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.errors import ModelError
from drumline.train.setup import Request, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    UNSAVED,
    chosen_params,
    claim,
    merge,
    plan_in,
    same_evaluations,
    slug,
    train,
)
from tests.distributed.setups import case as case_of
from tests.harness import Sections, column, events, losses, write_config
from tests.tiny import read_model, tiny_architecture_dir, tiny_model_dir

DISTILL: Sections = {"kind": "distill", "loss_chunk": 32}
CASES: dict[str, Sections] = {
    "likeliest, precomputed": {
        **DISTILL,
        "top_k": 8,
        "divergence": "jsd",
        "beta": 0.3,
        "temperature": 1.5,
        "cross_entropy_weight": 0.2,
    },
    "likeliest, live": {**DISTILL, "log_probs": "live", "top_k": 8, "divergence": "reverse_kl"},
    "whole vocabulary": {**DISTILL, "log_probs": "live", "top_k": 0, "divergence": "jsd"},
}
FIGURES = ("loss", "kl", "cross_entropy", "token_accuracy")
# The first test waits for the training of all.
pytestmark = pytest.mark.timeout(3000)


@dataclass(frozen=True)
class Way:
    """One way to spread the work over 2 processes, or `world_size`."""

    name: str
    sections: Sections
    world_size: int = 2


WAYS = [
    Way("ddp, accumulation", {"strategy": "ddp", "batch": {"micro_batch": 1}}),
    Way("fsdp2", {"strategy": "fsdp2"}),
    Way("tp", {"strategy": "tp", "batch": {"micro_batch": 8}}),
    Way("cp", {"strategy": "cp", "batch": {"micro_batch": 8}}),
    Way("pp", {"strategy": "pp", "batch": {"micro_batch": 2}}),
    Way("zero3", {"strategy": CUT}),
    Way("ddp 4", {"strategy": "ddp", "batch": {"micro_batch": 2}}, 4),
    Way("fsdp2 x tp, 4", {"strategy": {"kind": "fsdp2", "tp": 2}, "batch": {"micro_batch": 2}}, 4),
    Way("fsdp2 x pp, 4", {"strategy": {"kind": "fsdp2", "pp": 2}, "batch": {"micro_batch": 2}}, 4),
]
KEPT = {
    ("ddp, accumulation", "likeliest, precomputed"),
    ("fsdp2", "whole vocabulary"),
    ("tp", "likeliest, live"),
    ("tp", "whole vocabulary"),
}
BASE: Sections = {
    "batch": EIGHT_BY_FOUR,
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": UNSAVED,
    "run": {"steps": 3},
}


def pairs_of(
    ways: Sequence[Any], cases: Iterable[str], kept: Container[tuple[str, str]]
) -> list[Any]:
    """The parameters `way` and `case` of all pairs; those that are not `kept` are marked `full`."""
    found = []
    for way in ways:
        for case in cases:
            names = (way.name, case)
            found.append(case_of(way, case, id="-".join(names), full=names not in kept))
    return found


def pairs() -> list[Any]:
    return pairs_of(WAYS, CASES, KEPT)


def train_pairs(session: pytest.Session, file: str, root: Path, plan: Callable[..., Path]) -> None:
    """Train the chosen pairs of a file on several ranks, and each of their cases on one.

    `plan`: returns the plan of a run, by its name, world size, case, and sections.
    """
    spread = []
    alone = []
    for params in chosen_params(session, file):
        if "way" not in params:
            continue
        way = params["way"]
        case = params["case"]
        if not (root / slug(case)).exists():
            alone.append(plan(slug(case), 1, case, {"batch": {"micro_batch": 8}}))
        spread.append(plan(slug(way.name, case), way.world_size, case, way.sections))
    train(alone)
    train(spread)


def teacher_dir(root: Path) -> Path:
    """A teacher that is wider and deeper than its student, and surer of itself.

    A fresh model finds all tokens alike, and a divergence near 0 would be rounding alone.
    """
    folder = tiny_model_dir(root / "teacher", layers=4, seed=7, hidden=48)
    model = read_model(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distill")
    model = tiny_model_dir(root / "model")
    teacher = {"id": str(teacher_dir(root))}

    def plan(name: str, world_size: int, case: str, *sections: Sections) -> Path:
        algorithm = {"algorithm": {**CASES[case], "teacher": teacher}}
        settings = merge(BASE, algorithm, *sections)
        # Each run has a token cache of its own, so that each asks the teacher itself.
        folder = root / name
        folder.mkdir()
        return plan_in(folder, "one", world_size, model, **settings)

    train_pairs(request.session, __file__, root, plan)
    return root


@pytest.mark.parametrize(("way", "case"), pairs())
def test_same_numbers_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / slug(way.name, case) / "one" / "run"
    reference = runs / slug(case) / "one" / "run"
    apart = difference(mine, reference)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 3
    for key in FIGURES:
        same_evaluations(mine, reference, TOLERANCE, key)
    assert column(mine, "kl") == pytest.approx(column(reference, "kl"), rel=TOLERANCE)
    assert column(reference, "kl", "eval")[0] > 0.1


def plan_of(folder: Path, models: Path, resume: Resume | None = None, **algorithm: Any) -> Path:
    """A run of two ranks with checkpoints of steps 2 and 4."""
    folder.mkdir(exist_ok=True)
    path = write_config(
        folder,
        models / "model",
        rows=22,
        held_out=7,
        algorithm={**DISTILL, "top_k": 8, "teacher": {"id": str(models / "teacher")}, **algorithm},
        strategy="ddp",
        batch=EIGHT_BY_FOUR,
    )
    return claim(Request(load(path, []), world_size=2, resume=resume))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_model_dir(root / "model")
    teacher_dir(root)
    return root


def test_live_and_precomputed_say_the_same(tmp_path: Path, models: Path) -> None:
    precomputed = tmp_path / "precomputed"
    live = tmp_path / "live"
    plans = [plan_of(folder, models, log_probs=folder.name) for folder in (precomputed, live)]
    run_plans(plans, 2)
    table = losses(precomputed / "run")
    assert len(table) == 4
    assert table == pytest.approx(losses(live / "run"), rel=1e-5)
    assert table[4] < table[1]
    for key in FIGURES:
        asked = column(live / "run", key, "eval")
        assert np.allclose(column(precomputed / "run", key, "eval"), asked, rtol=1e-5)


@pytest.mark.parametrize("log_probs", ["live", "precomputed"])
def test_a_mixture_with_ep_learns_from_a_dense_teacher(
    tmp_path: Path, models: Path, log_probs: str
) -> None:
    """The teacher's weights are cut over the ranks of ep as under FSDP2, or whole as under DDP."""
    student = tiny_architecture_dir(tmp_path / "student", "qwen3_moe", layers=2)
    teacher = {"id": str(models / "teacher")}
    algorithm = {**DISTILL, "top_k": 8, "log_probs": log_probs, "teacher": teacher}
    strategies: dict[str, Any] = {
        "one": "single",
        "ddp": {"kind": "ddp", "ep": 2},
        "fsdp2": {"kind": "fsdp2", "ep": 2},
    }
    plans = []
    for name, strategy in strategies.items():
        world_size = 1 if name == "one" else 2
        settings = merge(BASE, {"algorithm": algorithm, "strategy": strategy})
        # Each run has a token cache of its own, so that each asks the teacher itself.
        folder = tmp_path / name
        folder.mkdir()
        plans.append(plan_in(folder, "one", world_size, student, **settings))
    train(plans)
    alone = tmp_path / "one" / "one" / "run"
    for name in ("ddp", "fsdp2"):
        spread = tmp_path / name / "one" / "run"
        apart = difference(spread, alone)
        assert apart.largest <= TOLERANCE, (name, apart)
        for key in FIGURES:
            same_evaluations(spread, alone, TOLERANCE, key)
    assert column(alone, "kl", "eval")[0] > 0.1


def found_of(run: Path) -> list[bool]:
    """Of the last start: whether the tables of train and eval were there."""
    return [event["found"] for event in events(run, "teacher")[-2:]]


def test_a_resumed_run_reads_the_table_or_makes_it_anew(tmp_path: Path, models: Path) -> None:
    folder = tmp_path / "a"
    run = folder / "run"
    run_plans([plan_of(folder, models)], 2)
    whole = losses(run)
    assert found_of(run) == [False, False]
    for damage in (False, True):
        shutil.rmtree(run / "checkpoints" / "step-00000004", ignore_errors=True)
        tables = sorted((folder / "cache").rglob("log_probs.npy"))
        assert len(tables) == 2
        if damage:
            for table in tables:
                table.write_bytes(table.read_bytes()[:100])
        run_plans([plan_of(folder, models, Resume())], 2)
        assert found_of(run) == [not damage, not damage]
        assert losses(run) == pytest.approx(whole, rel=1e-6)


def test_a_teacher_with_other_tokens_is_refused_in_one_line(tmp_path: Path, models: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)
    path = write_config(
        tmp_path, models / "model", algorithm={**DISTILL, "teacher": {"id": str(other)}}
    )
    with pytest.raises(ModelError, match="its tokenizer is not the policy's") as refused:
        make_plan(Request(load(path, []), world_size=1), on_progress=lambda *_: None)
    line = refused.value.line()
    assert "algorithm.teacher" in line
    assert "\n" not in line
