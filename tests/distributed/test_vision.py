"""Vision-language SFT spread over processes: the numbers of one process, also where some ranks have text alone in every step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.test_parity import merge
from tests.harness import events, same_weights, vision_rows, write_config, write_rows
from tests.tiny import tiny_vision_dir

pytestmark = pytest.mark.timeout(600)
BASE = {
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": 2, "asynchronous": False, "export": "none"},
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
CASES: dict[str, dict[str, Any]] = {
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
    sections: dict[str, Any] = field(default_factory=dict)
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
    # Without momentum or clipping, the mean of weights after one step is the weights after the mean gradient.
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
]
# Each case and each way has another that stays; `--full` has these.
AGAIN = [("ddp", "packed"), ("ddp", "lora"), ("fsdp2", "tower frozen"), ("ddp, activation checkpointing", "text apart"), ("zero3", "lora"),
         ("fsdp2", "text apart"), ("ddp", "tower frozen"), ("zero3", "text apart"), ("fsdp2", "lora"), ("zero2", "text apart"),
         ("fsdp2, activation checkpointing", "text apart")]  # fmt: skip
RESUMED += [(Way("fsdp2", {"strategy": "fsdp2"}), "tower frozen")]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    chosen: list[dict[str, Any]] = [
        item.callspec.params
        for item in items
        if item.originalname == "test_same_numbers_as_one_process"
    ]
    root = tmp_path_factory.mktemp("vision")
    model = tiny_vision_dir(root / "model")
    # An image, none, an image, ….
    rows = [row for row in vision_rows(root, 48) if "images" not in row]
    rows = [row for pair in zip(rows[::2], rows[1::2], strict=True) for row in pair]

    def plan(name: str, sections: dict[str, Any], world_size: int) -> tuple[str, Path]:
        folder = root / name
        folder.mkdir()
        path = write_config(folder, model, **merge(BASE, sections))
        for file in ("train", "eval"):
            (folder / f"{file}.jsonl").unlink()
        data = {
            "train": write_rows(root / "train.jsonl", rows),
            "eval": write_rows(root / "eval.jsonl", rows[:5]),
        }
        told = [f"data.{key}=[{{kind: file, path: {value}}}]" for key, value in data.items()]
        asked = Request(
            load(path, [*told, f"data.cache_dir={root / 'cache'}"]), world_size=world_size
        )
        made = make_plan(asked, on_progress=lambda *_: None)
        return made.engine, claim_run_dir(made, asked)[0]

    run_plans([plan(case, sections, 1)[1] for case, sections in CASES.items()], 1)
    plans = [
        plan(f"{way.name}-{case}", merge(CASES[case], way.sections), 2)
        for way, case in ((c["way"], c["case"]) for c in chosen)
    ]
    for way, case in RESUMED:
        plans.append(plan(f"{way.name}-resumed-{case}", merge(CASES[case], way.sections), 2))
        stopped = root / case / "run" / "checkpoints" / "step-00000002"
        shutil.copytree(stopped, plans[-1][1].parent / "checkpoints" / stopped.name)
    for engine in ("native", "deepspeed"):
        run_plans([path for name, path in plans if name == engine], 2)
    return root


@pytest.mark.claim("classification, vision and rollouts also have the numbers of one process")
@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(
            w, c, id=f"{w.name}-{c}", marks=pytest.mark.full if (w.name, c) in AGAIN else []
        )
        for w, c in ASKED
    ],
)
def test_same_numbers_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine, reference = runs / f"{way.name}-{case}" / "run", runs / case / "run"
    apart = difference(mine, reference)
    # Each rank of local SGD has a gradient of its own.
    largest = max(apart.loss, apart.weights) if case == "sgd" else apart.largest
    assert largest <= TOLERANCE, apart
    held_out = [[e["loss"] for e in events(run, "eval")] for run in (mine, reference)]
    assert (
        held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE) and len(events(mine, "step")) == 4
    )


@pytest.mark.parametrize(
    ("way", "case"), RESUMED, ids=[f"{way.name}-{case}" for way, case in RESUMED]
)
def test_goes_on_from_one_process(runs: Path, way: Way, case: str) -> None:
    mine, reference = runs / f"{way.name}-resumed-{case}" / "run", runs / case / "run"
    steps = events(mine, "step")
    assert [e["step"] for e in steps] == [3, 4]
    assert [e["loss"] for e in steps] == pytest.approx(
        [e["loss"] for e in events(reference, "step")][2:], rel=TOLERANCE
    )
    same_weights(mine, reference, TOLERANCE)
