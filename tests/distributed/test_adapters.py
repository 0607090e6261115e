"""Kinds of adapters by the row of a strategy: the numbers of one process, bytes as planned, and a run that stops under one strategy and
goes on under another. What they are by themselves, and what is exported: tests/unit/test_adapters.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.config.load import load
from drumline.models import load as models
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import stage_of, state_of
from drumline.planner.cost.traffic import flows
from drumline.telemetry.events import last_measurement, read
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT
from tests.harness import events, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(1500)


class Kind(NamedTuple):
    """`within`: relative, of losses and gradient norms of three steps against one process."""

    adapter: dict[str, Any]
    within: float = 1e-5
    sections: dict[str, Any] = {}


ENDS = ["q_proj", "lm_head", "embed_tokens"]
UNTIED = {"init": "random", "config": {"tie_word_embeddings": False}}
MORE = {"feed": {"r": 2, "targets": ["up_proj", "down_proj"], "rslora": True}}
KINDS = {
    "dora": Kind({"dora": True, "rslora": True}),
    # Factors of size 1 in place of 0: rounding is larger against the same gradients.
    "pissa": Kind({"init": "pissa"}, 1e-4),
    "saved and tokens": Kind(
        {"modules_to_save": ["model.norm"], "trainable_tokens": [5, 70, 71], "targets": "attention"}
    ),
    "two": Kind({"more": MORE, "targets": "attention"}),
    # Tied in the tiny model: of a pipeline both stages hold the weight, and each its own factors.
    "ends": Kind({"targets": ENDS}),
    "untied ends": Kind({"targets": ENDS}, sections={"model": UNTIED}),
    "ends, bf16": Kind({"targets": ENDS}, 3e-2, {"precision": "bf16"}),
    # Scales of a whole matrix, whatever part of it a rank has: the same weights.
    "4bit": Kind({"quantize": "4bit"}),
    "8bit": Kind({"quantize": "8bit"}),
    "4bit, dora, pissa": Kind({"quantize": "4bit", "dora": True, "init": "pissa"}, 1e-4),
    "4bit, bf16": Kind({"quantize": "4bit"}, 3e-2, {"precision": "bf16"}),
    "4bit, pure bf16": Kind(
        {"quantize": "4bit"}, 3e-2, {"precision": {"kind": "bf16", "master": "bf16"}}
    ),
    "dora, pissa, bf16": Kind({"dora": True, "init": "pissa_fast"}, 3e-2, {"precision": "bf16"}),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
    "fsdp2 2, offload": (2, {"kind": "fsdp2", "offload": "cpu"}),
    "zero3 2": (2, CUT),
    "zero2 2": (2, "zero2"),
    "cp 2": (2, "cp"),
    "pp 2": (2, "pp"),
    "tp 2": (2, "tp"),
}
REFUSED = {(kind, "tp 2") for kind in KINDS if "dora" in kind or "bit" in kind or "tokens" in kind}
REFUSED |= {("4bit, pure bf16", name) for name in ("zero3 2", "zero2 2", "cp 2", "pp 2")}
OFTEN = ("fsdp2 2", "zero3 2")
# With --full.
REST = (
    "untied ends",
    "ends, bf16",
    "dora, pissa, bf16",
    "4bit, bf16",
    "4bit, pure bf16",
    "8bit",
    "pissa",
    "dora",
    "4bit",
    "two",
)
PAIRS = [
    pytest.param(
        kind,
        name,
        id=f"{kind}-{name}",
        marks=[] if name in OFTEN and kind not in REST else pytest.mark.full,
    )
    for kind in KINDS
    for name in SPREADS
    if name != "single" and (kind, name) not in REFUSED
]
MOVES = [
    pytest.param(
        kind,
        a,
        b,
        id=f"{kind}-{a} to {b}",
        marks=[] if b == "single" and kind not in REST else pytest.mark.full,
    )
    for kind in KINDS
    for a, b in (
        ("fsdp2 2", "single"),
        ("single", "zero3 2"),
        ("zero3 2", "ddp 2"),
        ("ddp 2", "fsdp2 2"),
    )
    if not {(kind, a), (kind, b)} & REFUSED
]


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two. The third is counted."""
    place = root / folder
    place.mkdir()
    ranks, strategy = SPREADS[spread]
    base: dict[str, Any] = {
        "data": {"packing": False},
        "batch": {"global_samples": 8, "micro_batch": 2},
        "checkpoint": {"every": 2, "asynchronous": False, "export": "none"},
        "eval": {"at_start": False},
        "run": {"steps": 3},
        # A fresh adapter's gradients are near nothing; a large epsilon keeps Adam from blowing their rounding up.
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
    }
    adapter = {"kind": "lora", "r": 4, **KINDS[kind].adapter}
    path = write_config(
        place,
        root / "model",
        rows=60,
        strategy=strategy,
        adapter=adapter,
        **base,
        **KINDS[kind].sections,
    )
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=ranks)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def slug(*names: str) -> str:
    return "-to-".join(names).replace(" ", "_").replace(",", "")


def group(name: str) -> tuple[int, str]:
    return SPREADS[name][0], name[:4] if name.startswith(("zero", "pp")) else ""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mine = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    asked: list[dict[str, Any]] = [
        item.callspec.params for item in mine if hasattr(item, "callspec")
    ]
    moves = [(p["kind"], p["a"], p["b"]) for p in asked if "a" in p]
    whole = [(p["kind"], name) for p in asked for name in (p.get("name", p.get("a")), "single")]
    root = tmp_path_factory.mktemp("adapters")
    tiny_model_dir(root / "model", hidden=64)
    for each in dict.fromkeys(map(group, SPREADS)):
        if plans := [
            plan(root, slug(k, n), k, n) for k, n in dict.fromkeys(whole) if group(n) == each
        ]:
            run_plans(plans, each[0], counted=True)
    for each in dict.fromkeys(map(group, SPREADS)):
        plans = []
        for kind, a, b in moves:
            if group(b) == each:
                plans.append(plan(root, slug(kind, a, b), kind, b))
                stopped = root / slug(kind, a) / "run" / "checkpoints" / "step-00000002"
                shutil.copytree(stopped, plans[-1].parent / "checkpoints" / stopped.name)
        if plans:
            run_plans(plans, each[0])
    return root


def near(mine: list[dict[str, Any]], other: list[dict[str, Any]], kind: str) -> None:
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in mine] == pytest.approx(
            [e[key] for e in other], rel=KINDS[kind].within
        ), key


@pytest.mark.claim(
    "kinds of adapters train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_numbers_are_near_and_bytes_as_planned(runs: Path, kind: str, name: str) -> None:
    mine, other = (events(runs / slug(kind, n) / "run", "step") for n in (name, "single"))
    near(mine, other, kind)
    assert mine[-1]["loss"] < mine[0]["loss"]
    made = Plan.load(runs / slug(kind, name) / "run" / "plan.json")
    facts = models.facts(
        models.load_config(made.model_path, made.config.model),
        made.config.data.max_length,
        made.config.adapter,
    )
    memory = last_measurement(read(runs / slug(kind, name) / "run" / "events.jsonl"))
    assert memory is not None
    states = [state_of(made, facts, stage_of(made, facts, stage)) for stage in range(made.mesh.pp)]
    for part in ("parameters", "optimizer"):
        assert max(memory.by_rank[part]) == max(getattr(state, part) for state in states), part
    if made.data_parallel in ("ddp", "fsdp2") and made.mesh.pp == made.mesh.tp == made.mesh.cp == 1:
        assert mine[-1]["sent_bytes"] == pytest.approx(
            flows(made, facts, step=2).traffic().total, rel=1e-6, abs=1
        )


@pytest.mark.claim(
    "kinds of adapters train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "a", "b"), MOVES)
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    mine, other = (
        events(runs / name / "run", "step") for name in (slug(kind, a, b), slug(kind, "single"))
    )
    assert [e["step"] for e in mine] == [3]
    near(mine, other[2:], kind)
