"""On-policy distillation samples, scores and learns the same however student and teacher are spread,
and after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.errors import ModelError
from drumline.train.setup import Request, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    UNSAVED,
    claim,
    merge,
    plan_in,
    same_evaluations,
    slug,
)
from tests.distributed.test_distill import WAYS, Way, pairs_of, teacher_dir, train_pairs
from tests.harness import Sections, column, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

VOWELS = {"kind": "regex", "pattern": "[aeiou]", "full": False}
GKD: Sections = {
    "kind": "gkd",
    "loss_chunk": 32,
    "generator": {"kind": "hf", "max_new_tokens": 6},
}
CASES: dict[str, Sections] = {
    "on policy": {**GKD, "rewards": [VOWELS]},
    "half of the rows": {
        **GKD,
        "on_policy_share": 0.5,
        "divergence": "jsd",
        "beta": 0.3,
        "temperature": 1.5,
        "minibatches": 2,
    },
    "likeliest, in turns": {
        **GKD,
        "top_k": 8,
        "generator": {**GKD["generator"], "stop": list("aeiou")},
        "environment": {
            "kind": "class",
            "path": "tests.episodes:Vowels",
            "turns": 3,
            "max_tokens": 48,
        },
    },
}
pytestmark = pytest.mark.timeout(3000)


KEPT = {("ddp, accumulation", "half of the rows"), ("fsdp2", "on policy")}
BASE: Sections = {
    "batch": EIGHT_BY_FOUR,
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {**UNSAVED, "every": 4},
    "run": {"steps": 4},
}


def pairs() -> list[Any]:
    return pairs_of(WAYS, CASES, KEPT)


def data_of(case: str) -> Sections:
    """The section `data` of a case: episodes of several turns are longer."""
    if "environment" not in CASES[case]:
        return {}
    return {"data": {"max_length": 128}}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gkd")
    model = tiny_model_dir(root / "model")
    teacher = {"id": str(teacher_dir(root))}

    def plan(name: str, world_size: int, case: str, *sections: Sections) -> Path:
        algorithm = {"algorithm": {**CASES[case], "teacher": teacher}}
        settings = merge(BASE, data_of(case), algorithm, *sections)
        folder = root / name
        folder.mkdir()
        return plan_in(folder, "one", world_size, model, **settings)

    train_pairs(request.session, __file__, root, plan)
    return root


@pytest.mark.claim("on-policy distillation has the numbers of one process on any number of them")
@pytest.mark.parametrize(("way", "case"), pairs())
def test_same_episodes_losses_and_weights_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / slug(way.name, case) / "one" / "run"
    alone = runs / slug(case) / "one" / "run"
    apart = difference(mine, alone)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 4
    for key in ("kl", "tokens", "samples"):
        assert column(mine, key) == pytest.approx(column(alone, key), rel=TOLERANCE), key
    for key in ("length", "ended", "episodes", "drawn", "from_rows", "failures"):
        assert column(mine, key, "rollout") == column(alone, key, "rollout"), key
    for key in ("loss", "kl", "length"):
        same_evaluations(mine, alone, TOLERANCE, key)
    same_weights(mine, alone, 1e-5)
    assert column(alone, "kl", "eval")[0] > 0.1
    shares = column(alone, "from_rows", "rollout")
    if "on_policy_share" in CASES[case]:
        assert 0 < sum(shares) < 4 * 8
        assert len(shares) == 2
    else:
        assert shares == [0] * 4


def plan_of(folder: Path, models: Path, resume: Resume | None = None) -> Path:
    """A run of two ranks with checkpoints of steps 2 and 4."""
    folder.mkdir(exist_ok=True)
    path = write_config(
        folder,
        models / "model",
        algorithm={
            **CASES["half of the rows"],
            "minibatches": 1,
            "teacher": {"id": str(models / "teacher")},
        },
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


def test_a_resumed_run_has_the_same_numbers(tmp_path: Path, models: Path) -> None:
    folder = tmp_path / "a"
    run = folder / "run"
    run_plans([plan_of(folder, models)], 2)
    whole = losses(run)
    rollouts = column(run, "length", "rollout")
    evaluated = column(run, "kl", "eval")
    assert len(whole) == 4
    assert whole[4] < whole[1]
    shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    run_plans([plan_of(folder, models, Resume())], 2)
    assert [event["step"] for event in events(run, "restore")] == [2]
    assert losses(run) == whole
    assert column(run, "length", "rollout") == [*rollouts, *rollouts[2:]]
    assert column(run, "kl", "eval")[-1] == evaluated[-1]
    same_weights(run, tmp_path / "whole", 0.0)


def test_a_teacher_with_other_tokens_is_refused_in_one_line(tmp_path: Path, models: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)
    path = write_config(
        tmp_path, models / "model", algorithm={**GKD, "teacher": {"id": str(other)}}
    )
    with pytest.raises(ModelError, match="its tokenizer is not the policy's") as refused:
        make_plan(Request(load(path, []), world_size=1), on_progress=lambda *_: None)
    line = refused.value.line()
    assert "algorithm.teacher" in line
    assert "\n" not in line
