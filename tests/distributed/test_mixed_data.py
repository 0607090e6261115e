"""Mixed sources, a curriculum and a stream: a run that goes on with other ranks, and without any
block on the disk, sees the same rows as one that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_plans
from tests.distributed.setups import EIGHT_BY_TWO, SAVED_TWICE, copy_checkpoint, plan_run
from tests.harness import Sections, chat_rows, column, write_config, write_rows
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.full]
SOURCES = [
    {"kind": "file", "path": "train.jsonl", "weight": 3},
    {"kind": "file", "path": "more.jsonl", "weight": 1, "where": "length(prompt) > 8"},
]
DATA: dict[str, Sections] = {
    "mixed": {"curriculum": {"by": "length", "epochs": 1}, "packing": False},
    "packed": {"duplicates": "near", "max_length": 64},
    "streamed": {"stream": {"rows": 16, "blocks": 2}, "packing": False},
    "streamed packs in order": {
        "stream": {"rows": 24, "blocks": 2},
        "curriculum": "length",
        "max_length": 64,
    },
}


def plan(root: Path, name: str, world_size: int) -> Path:
    place = root / f"{name}-{world_size}".replace(" ", "-")
    place.mkdir()
    path = write_config(
        place,
        root / "model",
        rows=30,
        data={"train": SOURCES, "cache_dir": str(place / "cache"), **DATA[name]},
        batch=EIGHT_BY_TWO,
        optimizer={"lr": 3e-3},
        run={"steps": 8},
        checkpoint={**SAVED_TWICE, "every": 4},
        eval={"at_start": False},
    )
    write_rows(place / "more.jsonl", chat_rows(20, seed=5))
    return plan_run(path, world_size)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("mixed")
    tiny_model_dir(root / "model")
    whole = {}
    parts = {}
    for name in DATA:
        whole[name] = plan(root, name, 2)
        parts[name] = plan(root, name, 1)
    run_plans(list(whole.values()), 2)
    found = {}
    for name in DATA:
        copy_checkpoint(whole[name].parent, parts[name], step=4)
        found[name] = (whole[name].parent, parts[name].parent)
    run_plans(list(parts.values()), 1)
    return found


@pytest.mark.parametrize("name", DATA)
def test_goes_on_with_the_same_rows(runs: dict[str, tuple[Path, Path]], name: str) -> None:
    whole, part = runs[name]
    assert column(part, "step") == [5, 6, 7, 8]
    for key in ("tokens", "samples"):
        assert column(part, key) == column(whole, key)[4:], key
    expected = column(whole, "loss")[4:]
    assert column(part, "loss") == pytest.approx(expected, rel=1e-4)
