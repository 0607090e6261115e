"""An algorithm of the user's own, in a file beside the YAML: it is planned, trained and verified as one of ours."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from drumline.core.algorithm import AlgorithmSpec
from drumline.core.load import load
from drumline.core.registry import _own
from tests.harness import drumline, losses, write_config
from tests.tiny import tiny_model_dir

OWN = """
from typing import ClassVar

from pydantic import Field

from drumline.algorithms.specs import TextSpec


class Scaled(TextSpec):
    columns: ClassVar[str] = "`text`"
    rate: ClassVar[float] = 7e-4
    metrics: ClassVar[tuple[str, ...]] = ("loss", "token_accuracy")
    best_by: ClassVar[dict[str, str]] = {"metric": "token_accuracy", "mode": "max"}
    scale: float = Field(2.0, gt=0, le=100, description="The loss is multiplied by this.")

    def build(self):
        from dataclasses import replace

        from drumline.algorithms.tokens.objective import NextToken

        class Objective(NextToken):
            def objective(self, outputs, batch):
                out = super().objective(outputs, batch)
                return replace(out, loss_sum=out.loss_sum * scale)

        scale = self.scale
        return Objective(self.loss_chunk, answers=False)
"""
SGD = {"optimizer": {"kind": "sgd", "lr": 1e-3, "max_grad_norm": None}, "run": {"steps": 2}, "rows": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def test_trains_is_planned_and_verified(tmp_path: Path, model: Path) -> None:
    theirs, ours = tmp_path / "sft", tmp_path / "own"
    for folder in (theirs, ours):
        folder.mkdir()
    (ours / "mine.py").write_text(OWN)
    sft = write_config(theirs, model, **SGD, algorithm={"kind": "sft", "loss_chunk": 32})
    own = write_config(ours, model, **SGD, algorithm={"kind": "mine.py:Scaled", "loss_chunk": 32, "scale": 3.0})
    for path, more in ((sft, ()), (own, ("launch.nproc=2", "strategy=ddp"))):
        done = drumline("train", path, *more)
        assert done.code == 0, done.err
    assert losses(ours / "run")[1] == pytest.approx(3 * losses(theirs / "run")[1], rel=1e-6)
    assert load(own, []).config.eval.metric == "token_accuracy"
    for command in (
        ("plan", own),
        ("verify", own, "--steps", 1, "strategy=ddp", "launch.nproc=2"),
        ("train", own, "--resume", "--dry-run"),
    ):
        done = drumline(*command)
        assert done.code == 0, (command, done.err)


def test_another_process_finds_it_by_its_kind(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    algorithm = load(write_config(tmp_path, model, algorithm={"kind": "mine.py:Scaled", "scale": 5.0}), []).config.algorithm
    pickled = pickle.dumps(algorithm)
    _own.clear()  # as in a process that has not read the YAML
    again = pickle.loads(pickled)  # noqa: S301 - our own
    assert isinstance(again, AlgorithmSpec) and again.model_dump() == algorithm.model_dump() and again.model_dump()["scale"] == 5.0
