"""Mixed sources, a curriculum and a stream: a run that goes on with other ranks, and without any block on the disk, sees the same
rows as one that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import Request, load
from drumline.train.setup import claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import chat_rows, events, write_config, write_rows
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.full]
SOURCES = [
    {"kind": "file", "path": "train.jsonl", "weight": 3},
    {"kind": "file", "path": "more.jsonl", "weight": 1, "where": "length(prompt) > 8"},
]
DATA: dict[str, dict[str, Any]] = {
    "mixed": {"curriculum": {"by": "length", "epochs": 1}, "packing": False},
    "packed": {"duplicates": "near", "max_length": 64},
    "streamed": {"stream": {"rows": 16, "blocks": 2}, "packing": False},
    "streamed packs in order": {
        "stream": {"rows": 24, "blocks": 2},
        "curriculum": "length",
        "max_length": 64,
    },
}


def plan(root: Path, name: str, world_size: int, resumed: bool) -> Path:
    place = root / f"{name}-{world_size}-{resumed}".replace(" ", "-")
    place.mkdir()
    path = write_config(
        place,
        root / "model",
        rows=30,
        data={"train": SOURCES, "cache_dir": str(place / "cache"), **DATA[name]},
        batch={"global_samples": 8, "micro_batch": 2},
        optimizer={"lr": 3e-3},
        run={"steps": 8},
        checkpoint={"every": 4, "asynchronous": False, "export": "none"},
        eval={"at_start": False},
    )
    write_rows(place / "more.jsonl", chat_rows(20, seed=5))
    request = Request(load(path, []), world_size=world_size)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("mixed")
    tiny_model_dir(root / "model")
    whole = {name: plan(root, name, 2, False) for name in DATA}
    run_plans(list(whole.values()), 2)
    parts = {}
    for name in DATA:
        parts[name] = plan(root, name, 1, True)
        stopped = whole[name].parent / "checkpoints" / "step-00000004"
        shutil.copytree(stopped, parts[name].parent / "checkpoints" / stopped.name)
    run_plans(list(parts.values()), 1)
    return {name: (whole[name].parent, parts[name].parent) for name in DATA}


@pytest.mark.parametrize("name", DATA)
def test_goes_on_with_the_same_rows(runs: dict[str, tuple[Path, Path]], name: str) -> None:
    whole, part = (events(run, "step") for run in runs[name])
    assert [event["step"] for event in part] == [5, 6, 7, 8]
    for key in ("tokens", "samples"):
        assert [event[key] for event in part] == [event[key] for event in whole][4:], key
    assert [event["loss"] for event in part] == pytest.approx(
        [event["loss"] for event in whole][4:], rel=1e-4
    )
