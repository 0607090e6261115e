"""An algorithm of the user's own, in a file beside the YAML: it is planned, trained and verified as
one of ours."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.load import load
from drumline.config.registry import _users_specs
from tests.harness import ROOT, losses, run_drumline, write_config
from tests.tiny import tiny_model_dir

PAGE = (ROOT / "docs" / "guides" / "own_algorithm.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SGD = {
    "optimizer": {"kind": "sgd", "lr": 1e-3, "max_grad_norm": None},
    "run": {"steps": 2},
    "rows": 8,
}


def write_files(folder: Path) -> None:
    """The algorithm of docs/guides/own_algorithm.md."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.claim("an algorithm of one's own trains, is planned and verified")
def test_trains_is_planned_and_verified(tmp_path: Path, model: Path) -> None:
    theirs = tmp_path / "sft"
    ours = tmp_path / "own"
    for folder in (theirs, ours):
        folder.mkdir()
    write_files(ours)
    plain = {"kind": "sft", "loss_chunk": 32}
    # With γ 0 it is the cross-entropy.
    focal = {"kind": "focal.py:Focal", "loss_chunk": 32, "gamma": 0}
    sft = write_config(theirs, model, **SGD, algorithm=plain)
    own = write_config(ours, model, **SGD, algorithm=focal)
    pair = ("launch.nproc=2", "strategy=ddp")
    run_drumline("train", sft)
    run_drumline("train", own, *pair)
    expected = losses(theirs / "run")
    assert losses(ours / "run") == pytest.approx(expected, rel=1e-5)
    run_drumline("plan", own)
    run_drumline("verify", own, "--steps", 1, *pair)
    run_drumline("train", own, "--resume", "--dry-run")


def test_another_process_finds_it_by_its_kind(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path)
    path = write_config(tmp_path, model, algorithm={"kind": "focal.py:Focal", "gamma": 5.0})
    algorithm = load(path, []).config.algorithm
    pickled = pickle.dumps(algorithm)
    _users_specs.clear()  # as in a process that has not read the YAML
    again = pickle.loads(pickled)  # noqa: S301 - our own
    assert isinstance(again, AlgorithmSpec)
    assert again.model_dump() == algorithm.model_dump()
    assert again.model_dump()["gamma"] == 5.0
