"""Vision-language SFT spread over processes: the numbers of one process, also where some ranks have
text alone in every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.train.setup import Request
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.setups import (
    SAVED_TWICE,
    chosen_params,
    claim,
    copy_checkpoint,
    merge,
    same_evaluations,
    train,
)
from tests.distributed.setups import case as case_of
from tests.harness import (
    Sections,
    column,
    events,
    same_weights,
    vision_rows,
    write_config,
    write_rows,
)
from tests.tiny import tiny_vision_dir

pytestmark = pytest.mark.timeout(600)
BASE = {
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": SAVED_TWICE,
    "eval": {"at_start": False},
}
# In order, an image row and a text row a step: of two ranks one sees text alone, always.
APART = {
    "data": {"packing": False, "order": "sequential"},
    "batch": {"global_samples": 2, "micro_batch": 1},
}
PACKED = {
    "data": {"packing": True, "max_length": 128},
    "batch": {"global_samples": 4, "micro_batch": 1},
}
LORA = {**PACKED, "adapter": {"kind": "lora", "r": 4}, "optimizer": {"lr": 1e-2}}
FROZEN = {**PACKED, "model": {"freeze": ["model.visual"]}}
SGD = {**APART, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.0, "max_grad_norm": None}}
CASES: dict[str, Sections] = {
    "text apart": APART,
    "sgd": SGD,
    "packed": PACKED,
    "lora": LORA,
    "tower frozen": FROZEN,
}

ALL = ("text apart", "packed", "lora", "tower frozen")


@dataclass(frozen=True, eq=False)
class Way:
    name: str
    sections: Sections = field(default_factory=dict)
    cases: tuple[str, ...] = ("text apart",)


WAYS = [
    Way("ddp", {"strategy": "ddp"}, ALL),
    Way(
        "ddp, activation checkpointing",
        {"strategy": "ddp", "memory": {"activation_checkpointing": "full"}},
    ),
    Way("fsdp2", {"strategy": "fsdp2"}, ALL),
    Way(
        "fsdp2, activation checkpointing",
        {"strategy": "fsdp2", "memory": {"activation_checkpointing": "full"}},
    ),
    Way(
        "fsdp2, activations offloaded",
        {"strategy": "fsdp2", "memory": {"activation_offload": True}},
    ),
    # Each rank runs the tower, and has a part of each row.
    Way("cp", {"strategy": "cp"}, ("text apart", "packed")),
    Way("fsdp2 x cp", {"strategy": {"kind": "fsdp2", "cp": 2}}, ("tower frozen",)),
    Way("ddp, compiled", {"strategy": "ddp", "compile": {"enabled": True}}, ("text apart",)),
    # Without momentum or clipping, the mean of weights after one step is the weights after the mean
    # gradient.
    Way(
        "local SGD, averaged each step", {"strategy": {"kind": "local_sgd", "period": 1}}, ("sgd",)
    ),
    Way("zero2", {"strategy": "zero2"}),
    Way("zero3", {"strategy": CUT}, ("text apart", "lora", "tower frozen")),
]
ASKED = [(way, case) for way in WAYS for case in way.cases]
# Stopped in one process after two steps, gone on with in two.
RESUMED = [
    (Way("zero2", {"strategy": "zero2"}), "text apart"),
    (Way("zero3", {"strategy": CUT}), "tower frozen"),
    (Way("fsdp2", {"strategy": "fsdp2"}), "tower frozen"),
]
# Each case and each way has another that stays; `--full` has these.
AGAIN = [
    ("ddp", "packed"),
    ("ddp", "lora"),
    ("fsdp2", "tower frozen"),
    ("ddp, activation checkpointing", "text apart"),
    ("zero3", "lora"),
    ("fsdp2", "text apart"),
    ("ddp", "tower frozen"),
    ("zero3", "text apart"),
    ("fsdp2", "lora"),
    ("zero2", "text apart"),
    ("fsdp2, activation checkpointing", "text apart"),
    ("fsdp2, activations offloaded", "text apart"),
    ("cp", "text apart"),
    ("fsdp2 x cp", "tower frozen"),
    ("ddp, compiled", "text apart"),
    ("local SGD, averaged each step", "sgd"),
    ("zero3", "tower frozen"),
]


def pairs() -> list[Any]:
    found = []
    for way, case in ASKED:
        names = (way.name, case)
        found.append(case_of(way, case, id="-".join(names), full=names in AGAIN))
    return found


class Planner:
    """Plans runs of one model on one set of rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = tiny_vision_dir(root / "model")
        # An image, none, an image, ….
        some = [row for row in vision_rows(root, 48) if "images" not in row]
        rows = []
        for pair in zip(some[::2], some[1::2], strict=True):
            rows += pair
        train = write_rows(root / "train.jsonl", rows)
        held_out = write_rows(root / "eval.jsonl", rows[:5])
        self.overrides = [
            f"data.train=[{{kind: file, path: {train}}}]",
            f"data.eval=[{{kind: file, path: {held_out}}}]",
            f"data.cache_dir={root / 'cache'}",
        ]

    def plan(self, name: str, world_size: int, *sections: Sections) -> Path:
        folder = self.root / name
        folder.mkdir()
        path = write_config(folder, self.model, **merge(BASE, *sections))
        loaded = load(path, self.overrides)
        return claim(Request(loaded, world_size=world_size))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    planner = Planner(root)
    chosen = chosen_params(request.session, __file__)
    asked = {params["case"] for params in chosen}
    train([planner.plan(case, 1, CASES[case]) for case in CASES if case in asked])
    plans = []
    for params in chosen:
        way = params["way"]
        case = params["case"]
        if (way, case) in ASKED:
            plans.append(planner.plan(f"{way.name}-{case}", 2, CASES[case], way.sections))
        else:
            path = planner.plan(f"{way.name}-resumed-{case}", 2, CASES[case], way.sections)
            copy_checkpoint(root / case / "run", path)
            plans.append(path)
    train(plans)
    return root


@pytest.mark.claim("classification, vision and rollouts also have the numbers of one process")
@pytest.mark.parametrize(("way", "case"), pairs())
def test_same_numbers_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / f"{way.name}-{case}" / "run"
    reference = runs / case / "run"
    apart = difference(mine, reference)
    largest = apart.largest
    if case == "sgd":  # each rank of local SGD has a gradient of its own
        largest = max(apart.loss, apart.weights)
    assert largest <= TOLERANCE, apart
    same_evaluations(mine, reference, TOLERANCE)
    assert len(events(mine, "step")) == 4


@pytest.mark.parametrize(
    ("way", "case"),
    [
        case_of(way, case, id=f"{way.name}-{case}", full=way.name == "fsdp2")
        for way, case in RESUMED
    ],
)
def test_goes_on_from_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / f"{way.name}-resumed-{case}" / "run"
    reference = runs / case / "run"
    assert column(mine, "step") == [3, 4]
    expected = column(reference, "loss")[2:]
    assert column(mine, "loss") == pytest.approx(expected, rel=TOLERANCE)
    same_weights(mine, reference, TOLERANCE)
