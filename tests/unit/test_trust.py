"""A model's own code runs where the command line allows it; files of a run, which may be a stranger's, do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.algorithms.dpo.spec import DPOConfig
from drumline.config.load import load
from drumline.errors import ConfigError
from drumline.inference.evaluate import find_weights, run_folder
from drumline.models.export import plan_of
from tests.harness import ENV, ROOT, write_config
from tests.tiny import tiny_model_dir

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\nmodel: {trust_remote_code: true}\n"
ALLOWED = "model.trust_remote_code=true"
# A module named as one of the standard library, which is imported early.
SHADOW = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').write_text('x')\n"


def test_a_file_that_is_not_trusted_allows_no_code(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(DATA)
    assert load(path, []).config.model.trust_remote_code
    assert not load(path, [], trusted=False).config.model.trust_remote_code
    assert load(path, [ALLOWED], trusted=False).config.model.trust_remote_code
    assert load(
        path, ["model={id: x, trust_remote_code: true}"], trusted=False
    ).config.model.trust_remote_code
    weights = find_weights(path, [], None, tmp_path / "run")
    assert not weights.loaded.config.model.trust_remote_code


def test_an_evaluation_runs_no_code_beside_a_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(DATA + "strategy: mine.py:Mine\n")
    (tmp_path / "mine.py").write_text(SHADOW)
    with pytest.raises(ConfigError, match="code that lies beside the config"):
        run_folder(path, [])
    assert not list(tmp_path.glob("*.ran"))


def test_a_folder_is_evaluated_by_a_config_of_a_shape(tmp_path: Path) -> None:
    path, folder = tmp_path / "c.yaml", tiny_model_dir(tmp_path / "export")
    path.write_text(
        DATA.partition("\n")[0]
        + "\nmodel: {shape: {layers: 2, hidden: 32, heads: 4, vocabulary: 64}}\n"
    )
    model = find_weights(path, [], folder, tmp_path / "run").loaded.config.model
    assert model.id == str(folder) and model.shape is None


def test_models_besides_the_policy_too(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        DATA.partition("\n")[0]
        + "\nalgorithm: {kind: dpo, reference_model: {id: x, trust_remote_code: true}}\n"
    )
    algorithm = load(path, [], trusted=False).config.algorithm
    assert isinstance(algorithm, DPOConfig) and algorithm.reference_model is not None
    assert not algorithm.reference_model.trust_remote_code


def test_a_runs_plan_allows_no_code(tmp_path: Path) -> None:
    from drumline.train.setup import Request, make_plan

    config = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), model={"trust_remote_code": True}
    )
    plan = make_plan(Request(load(config, [])), on_progress=lambda *_: None, dry_run=True)
    assert plan.config.model.trust_remote_code
    (tmp_path / "run").mkdir(exist_ok=True)
    plan.save(tmp_path / "run" / "plan.json")
    assert (
        json.loads((tmp_path / "run" / "plan.json").read_text())["config"]["model"][
            "trust_remote_code"
        ]
        is True
    )
    assert not plan_of(tmp_path / "run", trust_remote_code=False).config.model.trust_remote_code
    assert plan_of(tmp_path / "run", trust_remote_code=True).config.model.trust_remote_code


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "drumline", "--version"],
        ["-m", "drumline.system.process"],
        ["-m", "drumline.rl.guard"],
        [str(ROOT / "main.py"), "--help"],
        [str(ROOT / "run.py"), "--help"],
        [str(ROOT / "scripts" / "run_distributed.py"), "--help"],
    ],
    ids=lambda command: command[0] + command[1],
)
def test_the_current_folder_shadows_nothing(tmp_path: Path, command: list[str]) -> None:
    names = (
        "statistics",
        "logging",
        "typing",
        "json",
        "yaml",
        "typer",
        "ctypes",
        "torch",
        "psutil",
        "argparse",
    )
    for name in names:
        (tmp_path / f"{name}.py").write_text(SHADOW)
    subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert not list(tmp_path.glob("*.ran"))
    code = "import sys; sys.argv = ['-m']; import logging"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert list(tmp_path.glob("logging.ran")), "the bait works"
