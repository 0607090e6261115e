"""Embedding models and rerankers have the numbers of one process, however they are spread, and also
where a run stops under one strategy and goes on under another.

Encoders that read both ways (BERT, ModernBERT) are here; `test_parity` has a causal model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    SAVED_TWICE,
    UNSAVED,
    chosen_params,
    copy_checkpoint,
    merge,
    plan_in,
    same_evaluations,
    same_steps,
    slug,
    train,
)
from tests.distributed.setups import case as case_of
from tests.harness import Sections, column, events, retrieval_rows, same_weights, write_rows
from tests.tiny import tiny_model_dir

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
# The gradient of their biases of keys is 0 but for rounding, of which Adam makes steps.
KEYS = [f"encoder.layer.{layer}.attention.self.key.bias" for layer in range(2)]
BERT = {"id": None, "config": {"model_type": "bert", **SIZES}, "freeze": KEYS}
MODERN = {"id": None, "config": {"model_type": "modernbert", **SIZES, "pad_token_id": 0}}
# Rerankers keep dropout, for which each rank draws other numbers.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EMBED = {"kind": "embed", "negatives": 1, "matryoshka": [16]}
RERANK = {"kind": "rerank", "negatives": 2}
CASES: dict[str, Sections] = {
    "bert": {"algorithm": EMBED, "model": BERT},
    "modernbert": {"algorithm": EMBED, "model": MODERN},
    "lora": {"algorithm": EMBED, "adapter": {"kind": "lora", "r": 4}},
    "rerank, bert": {
        "algorithm": {**RERANK, "loss": "pointwise"},
        "model": {
            "id": None,
            "config": {"model_type": "bert", **SIZES, **NO_DROPOUT},
            "freeze": [f"bert.{key}" for key in KEYS],
        },
    },
    "rerank, decoder": {"algorithm": {**RERANK, "loss": "listwise"}},
}


# The first test waits for the training of all.
pytestmark = pytest.mark.timeout(3000)


@dataclass(frozen=True)
class Way:
    name: str
    sections: Sections
    cases: tuple[str, ...]


ALL = tuple(CASES)
WAYS = [
    Way("ddp, accumulation", {"strategy": "ddp", "batch": {"micro_batch": 1}}, ALL),
    Way("fsdp2", {"strategy": "fsdp2"}, ALL),
    Way("zero3", {"strategy": CUT}, ALL),
    Way("zero2", {"strategy": "zero2"}, ("bert", "rerank, decoder")),
    Way("cp", {"strategy": "cp", "batch": {"micro_batch": 8}}, ("bert",)),
    Way("tp", {"strategy": "tp", "batch": {"micro_batch": 8}}, ("bert", "rerank, decoder")),
]
KEPT = {("ddp, accumulation", "bert"), ("fsdp2", "rerank, bert"), ("zero3", "modernbert")}
BASE: Sections = {
    "data": {"max_length": 48},
    "batch": EIGHT_BY_FOUR,
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "run": {"steps": None, "epochs": 1.0},
    "checkpoint": UNSAVED,
}


def pairs() -> list[Any]:
    found = []
    for way in WAYS:
        for case in way.cases:
            names = (way.name, case)
            found.append(case_of(way, case, id="-".join(names), full=names not in KEPT))
    return found


class Planner:
    """Plans runs of one model or another on one set of rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = tiny_model_dir(root / "model")
        # Its tokenizer tells a query from a text, as BERT's does.
        file = self.model / "tokenizer_config.json"
        options = json.loads(file.read_text())
        names = ["input_ids", "token_type_ids", "attention_mask"]
        file.write_text(json.dumps({**options, "model_input_names": names}))
        self.texts = {}
        for name, rows in (("train", retrieval_rows(30)), ("eval", retrieval_rows(11, seed=1))):
            path = write_rows(root / f"{name}.jsonl", rows)
            self.texts[name] = [{"kind": "file", "path": str(path)}]

    def plan(self, name: str, world_size: int, *sections: Sections) -> Path:
        tokenizer = {"model": {"tokenizer": str(self.model)}}
        settings = merge({"data": self.texts}, BASE, tokenizer, *sections)
        return plan_in(self.root, name, world_size, self.model, **settings)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("retrieval")
    plan = Planner(root).plan
    spread = []
    alone = []
    for params in chosen_params(request.session, __file__):
        if "way" not in params:
            continue
        way = params["way"]
        case = params["case"]
        if not (root / slug(case)).exists():
            alone.append(plan(slug(case), 1, CASES[case], {"batch": {"micro_batch": 8}}))
        spread.append(plan(slug(way.name, case), 2, CASES[case], way.sections))
    train(alone)
    train(spread)
    return root


@pytest.mark.parametrize(("way", "case"), pairs())
def test_same_numbers_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / slug(way.name, case) / "run"
    reference = runs / slug(case) / "run"
    apart = difference(mine, reference)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 4
    for key in ("loss", "accuracy", "ndcg@10"):
        same_evaluations(mine, reference, TOLERANCE, key)


# Stopped after two steps under the first of two strategies, gone on with under the second.
ALONE = "one process"
STRATEGIES: dict[str, Sections] = {
    ALONE: {},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2", "batch": {"micro_batch": 2}},
    "zero3": {"strategy": CUT},
}
MOVES = [
    (ALONE, "ddp"),
    (ALONE, "fsdp2"),
    ("ddp", ALONE),
    ("fsdp2", ALONE),
    ("ddp", "fsdp2"),
    ("fsdp2", "ddp"),
    (ALONE, "zero3"),
    ("zero3", "fsdp2"),
]
MOVES_KEPT = {
    ("bert", ALONE, "fsdp2"),
    ("rerank, bert", "ddp", ALONE),
}


def moves() -> list[Any]:
    found = []
    for case in CASES:
        for before, after in MOVES:
            names = (case, before, after)
            found.append(case_of(*names, id="-".join(names), full=names not in MOVES_KEPT))
    return found


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs that stopped under one strategy and went on under another."""
    root = tmp_path_factory.mktemp("resumed")
    planner = Planner(root)
    chosen = [each for each in chosen_params(request.session, __file__) if "before" in each]

    def plan(name: str, case: str, strategy: str) -> Path:
        world_size = 1 if strategy == ALONE else 2
        sections = (CASES[case], {"checkpoint": SAVED_TWICE}, STRATEGIES[strategy])
        return planner.plan(name, world_size, *sections)

    whole: dict[tuple[str, str], Path] = {}
    for each in chosen:
        for strategy in (ALONE, each["before"]):
            key = (each["case"], strategy)
            if key not in whole:
                whole[key] = plan(slug(*key), *key)
    train(whole.values())
    moved = []
    for each in chosen:
        case, before, after = each["case"], each["before"], each["after"]
        path = plan(slug(case, before, after), case, after)
        copy_checkpoint(whole[case, before].parent, path)
        moved.append(path)
    train(moved)
    return root


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@pytest.mark.parametrize(("case", "before", "after"), moves())
def test_goes_on_under_another(resumed: Path, case: str, before: str, after: str) -> None:
    mine = resumed / slug(case, before, after) / "run"
    reference = resumed / slug(case, ALONE) / "run"
    assert column(mine, "step") == [3, 4]
    same_steps(mine, reference, TOLERANCE, skip=2)
    same_weights(mine, reference, TOLERANCE)
    for key in ("loss", "accuracy", "ndcg@10"):
        expected = column(reference, key, "eval")[-1]
        assert column(mine, key, "eval")[-1] == pytest.approx(expected, rel=TOLERANCE), key
