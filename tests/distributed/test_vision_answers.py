"""DPO, reward models and GRPO with images: a run that stops under one strategy and goes on under
another has the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.train.setup import Request
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    SAVED_TWICE,
    case,
    chosen_params,
    claim,
    merge,
    run_of,
    same_steps,
    train_kinds,
)
from tests.distributed.test_vision_families import GRPO, interleaved
from tests.harness import (
    Sections,
    column,
    events,
    same_weights,
    vision_pair_rows,
    vision_rows,
    write_config,
    write_rows,
)
from tests.tiny import tiny_vision_dir

pytestmark = pytest.mark.timeout(900)
BASE: Sections = {
    # In order, a row with an image and one without: of two ranks one has text alone, always.
    "data": {"packing": False, "order": "sequential", "max_length": 256},
    "batch": {"global_samples": 2, "micro_batch": 1},
    # Some gradients are near nothing. A large epsilon keeps Adam from blowing their rounding up.
    "optimizer": {"lr": 3e-3, "eps": 1e-4},
    "checkpoint": SAVED_TWICE,
    "run": {"steps": 4},
}
KINDS: dict[str, Sections] = {
    "dpo": {"algorithm": {"kind": "dpo"}},
    "reward": {"algorithm": {"kind": "reward"}},
    "grpo": GRPO,
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
}
MOVES = [
    ("single", "ddp 2"),
    ("single", "fsdp2 2"),
    ("ddp 2", "single"),
    ("fsdp2 2", "single"),
]
# The rest runs with --full.
KEPT = {
    ("dpo", "single", "fsdp2 2"),
    ("reward", "fsdp2 2", "single"),
    ("grpo", "single", "ddp 2"),
}


def moves() -> list[Any]:
    found = []
    for kind in KINDS:
        for before, after in MOVES:
            names = (kind, before, after)
            found.append(case(*names, id=f"{kind}-{before} to {after}", full=names not in KEPT))
    return found


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of four steps, with a checkpoint after two."""
    ranks, strategy = SPREADS[spread]
    place = root / folder
    place.mkdir()
    sections = merge(BASE, KINDS[kind], {"strategy": strategy})
    rows = "texts" if kind == "grpo" else "pairs"
    overrides = [
        f"data.train=[{{kind: file, path: {root / rows}.jsonl}}]",
        "data.eval=[]",
        f"data.cache_dir={root / 'cache'}",
    ]
    path = write_config(place, root / "model", **sections)
    return claim(Request(load(path, overrides), world_size=ranks))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("answers")
    tiny_vision_dir(root / "model")
    write_rows(root / "texts.jsonl", interleaved(vision_rows(root, 24)))
    write_rows(root / "pairs.jsonl", interleaved(vision_pair_rows(root, 24)))
    train_kinds(root, chosen_params(request.session, __file__), plan)
    return root


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@pytest.mark.parametrize(("kind", "a", "b"), moves())
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    mine = run_of(runs, kind, a, b)
    reference = run_of(runs, kind, "single")
    assert column(mine, "step") == [3, 4]
    # It learns: otherwise all would be equal.
    assert len(set(column(reference, "loss"))) == 4
    same_steps(mine, reference, TOLERANCE, skip=2)
    same_weights(mine, reference, TOLERANCE)
    if kind == "grpo":
        rewards = [event["reward"] for event in events(reference, "rollout")]
        assert [event["reward"] for event in events(mine, "rollout")] == rewards[2:]
