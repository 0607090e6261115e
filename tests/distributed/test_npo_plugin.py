"""A package with an algorithm is installed, and Drumline knows of it without being told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.installing import install, interpret_drumline
from tests.distributed.setups import EIGHT_BY_TWO
from tests.harness import column, events, write_config
from tests.npo import PLUGIN
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(240)]


def test_npo_is_installed_and_trains(tmp_path: Path) -> None:
    path = install(PLUGIN, tmp_path)
    schema: Any = json.loads(interpret_drumline(path, "schema"))
    assert "keep_weight" in json.dumps(schema)
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        rows=24,
        run={"steps": 3},
        algorithm={"kind": "npo", "loss_chunk": 32},
        batch=EIGHT_BY_TWO,
        eval={"at_start": True},
    )
    interpret_drumline(path, "train", config)
    run = tmp_path / "run"
    forgotten = column(run, "forgotten")
    assert len(forgotten) == 3
    assert forgotten[0] == pytest.approx(0.0, abs=1e-4)
    evaluations = events(run, "eval")
    assert evaluations[-1]["forgotten"] > evaluations[0]["forgotten"]
    assert {"loss", "kept"} <= evaluations[-1].keys()
