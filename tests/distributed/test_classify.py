"""Classifiers give the same numbers on two processes as on one: texts that look ahead and that do not, images with a synchronised batch
norm. The last batch of the texts is not full, and the held-out samples fill no batch: what fills them up changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.test_parity import merge
from tests.harness import events, labelled_rows, write_config, write_rows
from tests.tiny import tiny_model_dir

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENCODER = {
    **SMALL,
    "vocab_size": 320,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
IMAGES = {
    "algorithm": {"kind": "classify", "modality": "image", "image_size": 16},
    "data": {
        "train": [{"kind": "digits", "limit": 30}],
        "eval": [{"kind": "digits", "split": "test", "limit": 11}],
    },
}


def encoder(kind: str, **config: Any) -> dict[str, Any]:
    """A bias on keys moves all scores of a query alike, which softmax does not see: its gradient is rounding, of which Adam makes steps."""
    keys = [f"{kind}.encoder.layer.{layer}.attention.self.key.bias" for layer in range(4)]
    return {
        "model": {"id": None, "config": {"model_type": kind, **ENCODER, **config}, "freeze": keys}
    }


CASES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "bert": encoder("bert"),
    "roberta": encoder("roberta", max_position_embeddings=120),
    "lora": {"adapter": {"kind": "lora", "r": 4}},
    "resnet": {**IMAGES, "model": {"id": None, "config": RESNET, "sync_batchnorm": True}},
    "vit": {
        **IMAGES,
        "optimizer": {"lr": 1e-3},
        "model": {
            "id": None,
            "config": {
                "model_type": "vit",
                **SMALL,
                "image_size": 16,
                "patch_size": 4,
                "qkv_bias": False,
            },
        },
    },
}


@dataclass(frozen=True)
class Way:
    name: str
    sections: dict[str, Any]
    cases: tuple[str, ...] = ("decoder", "bert", "resnet")


WAYS = [
    Way("ddp", {"strategy": "ddp"}, ("decoder", "bert", "resnet", "vit")),
    Way("fsdp2", {"strategy": "fsdp2"}, ("decoder", "bert", "resnet", "vit")),
    Way("zero2", {"strategy": "zero2"}),
    Way("zero3", {"strategy": CUT}),
    Way(
        "ddp, accumulation",
        {"strategy": "ddp", "batch": {"micro_batch": 1}},
        ("decoder", "bert", "vit"),
    ),
    Way("tp", {"strategy": "tp", "batch": {"micro_batch": 8}}, ("decoder",)),
    Way("pp", {"strategy": "pp", "batch": {"micro_batch": 2}}, ("decoder", "bert")),
    Way(
        "pp, zero bubble",
        {"strategy": {"kind": "pp", "schedule": "zero_bubble"}, "batch": {"micro_batch": 2}},
        ("decoder",),
    ),
    Way("fsdp2, LoRA", {"strategy": "fsdp2"}, ("lora",)),
    Way("zero3, LoRA", {"strategy": CUT}, ("lora",)),
    Way("cp", {"strategy": "cp", "batch": {"micro_batch": 8}}, ("decoder", "bert", "roberta")),
    Way("tp, its own plan", {"strategy": "tp", "batch": {"micro_batch": 8}}, ("bert", "roberta")),
    Way(
        "tp, whole stream",
        {"strategy": {"kind": "tp", "sequence_parallel": False}, "batch": {"micro_batch": 8}},
        ("bert", "decoder"),
    ),
]
BASE: dict[str, Any] = {
    "algorithm": {"kind": "classify", "label_smoothing": 0.1},
    "data": {"max_length": 48, "packing": False},
    "batch": {"global_samples": 8, "micro_batch": 4},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "run": {"steps": None, "epochs": 1.0},
    "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
}
ASKED = [(way, case) for way in WAYS for case in way.cases]
# One case of every other way, in turn; the others are for `--full`.
KEPT = {
    (way.name, way.cases[index % len(way.cases)])
    for index, way in enumerate(WAYS)
    if index % 2 == 0
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked_of = [
        (way, case)
        for way, case in ASKED
        if any(p.get("way") is way and p.get("case") == case for p in chosen)
    ]
    root = tmp_path_factory.mktemp("classify")
    model = tiny_model_dir(root / "model", layers=4)
    write_rows(root / "train.jsonl", labelled_rows(30))
    write_rows(root / "eval.jsonl", labelled_rows(11, seed=1))
    texts = {
        key: [{"kind": "file", "path": str(root / f"{key}.jsonl")}] for key in ("train", "eval")
    }

    def plan(name: str, world_size: int, *sections: dict[str, Any]) -> tuple[str, Path]:
        folder = root / name.replace(" ", "_").replace(",", "")
        folder.mkdir()
        settings = merge(
            {"data": {**texts, "cache_dir": str(root / "cache")}},
            BASE,
            {"model": {"tokenizer": str(model)}},
            *sections,
        )
        settings["algorithm"].pop("loss_chunk", None)
        path = write_config(folder, model, **settings)
        asked = Request(load(path, []), world_size=world_size)
        made = make_plan(asked, on_progress=lambda *_: None)
        return made.engine, claim_run_dir(made, asked)[0]

    run_plans(
        [
            plan(case, 1, sections, {"batch": {"micro_batch": 8}})[1]
            for case, sections in CASES.items()
        ],
        1,
    )
    plans = [plan(f"{way.name}-{case}", 2, CASES[case], way.sections) for way, case in asked_of]
    for engine in ("native", "deepspeed", "pipeline"):
        if mine := [path for name, path in plans if name == engine]:
            run_plans(mine, 2)
    return root


@pytest.mark.claim("classification, vision and rollouts also have the numbers of one process")
@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(
            w, c, id=f"{w.name}-{c}", marks=[] if (w.name, c) in KEPT else [pytest.mark.full]
        )
        for w, c in ASKED
    ],
)
def test_same_numbers_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine, reference = (
        runs / f"{way.name}-{case}".replace(" ", "_").replace(",", "") / "run",
        runs / case / "run",
    )
    apart = difference(mine, reference)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 4
    for key in ("loss", "accuracy", "macro_f1"):
        held_out = [[e[key] for e in events(run, "eval")] for run in (mine, reference)]
        assert held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE), key


def test_each_sample_counts_once(runs: Path) -> None:
    """Texts: 30 and two fillers. Images: 30, and the first two of another epoch, since a batch norm would see fillers."""
    samples = {case: [e["samples"] for e in events(runs / case / "run", "step")] for case in CASES}
    assert samples == {case: [8, 8, 8, 8 if case in ("resnet", "vit") else 6] for case in CASES}
    assert all(e["samples"] == 11 for case in CASES for e in events(runs / case / "run", "eval"))


def test_the_references_learn(runs: Path) -> None:
    for case in CASES.keys() - {"vit"}:  # which learns nothing that generalises in four steps
        first, last = [e["loss"] for e in events(runs / case / "run", "eval")]
        assert last < first, case
