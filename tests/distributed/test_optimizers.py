"""Optimizers besides AdamW and SGD, by the row of a strategy: the numbers of one process within a bound, bytes as planned, and a run that
stops under one strategy and goes on under another. Their own steps against formulas: tests/unit/test_optimizers.py."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from drumline.config.load import load
from drumline.models import load as models
from drumline.models.export import read_run
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import stage_of, state_of
from drumline.planner.cost.traffic import flows
from drumline.telemetry.events import last_measurement, read
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.test_parity import merge
from tests.harness import events, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(1500)


class Kind(NamedTuple):
    """`within`: relative, of losses and gradient norms of three steps against one process."""

    options: dict[str, Any]
    within: float
    sections: dict[str, Any] = {}


GROUPS = [
    {"match": ["*norm*", "*embed*"], "lr_ratio": 0.1, "weight_decay": 0.0},
    {"match": ["*mlp*"], "lr_ratio": 2.0},
]
KINDS = {
    "groups": Kind({"kind": "adamw", "groups": GROUPS}, 1e-5),
    "lion": Kind({"kind": "lion", "lr": 3e-4, "betas": [0.9, 0.99]}, 1e-5),
    # A code of 8 bits is up to 1.4% from its value, one of 4 bits 8%, and a shard may begin blocks where the whole does not.
    "adamw_8bit": Kind({"kind": "adamw_8bit"}, 2e-3),
    "adamw_4bit": Kind({"kind": "adamw_4bit"}, 2e-2),
    "adafactor": Kind({"kind": "adafactor", "lr": 1e-2}, 1e-5),
    # Newton-Schulz in bf16: an entry is rounded by up to 0.4%, and where gradients differ by 1e-7 some go the other way.
    "muon": Kind({"kind": "muon", "momentum": 0.95}, 2e-3),
    # Weights, gradients and moments in bf16; noise is by the place in a part, so a shard's is another's.
    "bf16, stochastic": Kind({}, 2e-2, {"precision": {"kind": "bf16", "master": "bf16"}}),
    "bf16, kahan": Kind(
        {}, 2e-2, {"precision": {"kind": "bf16", "master": "bf16", "rounding": "kahan"}}
    ),
    "schedule_free": Kind({"kind": "schedule_free"}, 1e-5, {"schedule": "constant"}),
    "in backward": Kind(
        {"in_backward": True, "max_grad_norm": None},
        1e-5,
        {"batch": {"accumulation": 1, "micro_batch": None}},
    ),
    "on host": Kind({"offload": True}, 1e-5),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "fsdp2 2": (2, "fsdp2"),
    "ddp 2": (2, "ddp"),
    "tp 2": (2, "tp"),
    "pp 2": (2, "pp"),
    "fsdp2 2, offload": (2, {"kind": "fsdp2", "offload": "cpu"}),
    "fsdp2 2 x tp 2": (4, {"kind": "fsdp2", "tp": 2}),
}
ONLY = {
    "in backward": ("single", "fsdp2 2", "tp 2", "fsdp2 2, offload"),
    "on host": ("single", "ddp 2", "fsdp2 2", "tp 2"),
}
# The units have what is theirs alone.
REST = (
    "groups",
    "adamw_4bit",
    "bf16, kahan",
    "schedule_free",
    "in backward",
    "lion",
    "adafactor",
    "on host",
)
AGAIN = pytest.mark.full
LOW = ("single", "ddp 2", "fsdp2 2", "fsdp2 2, offload")  # of these alone is pure bf16 asked
PAIRS = [
    pytest.param(
        kind,
        name,
        id=f"{kind}-{name}",
        marks=[] if name == "fsdp2 2" and kind not in REST else AGAIN,
    )
    for kind in KINDS
    for name in SPREADS
    if name in (LOW if "bf16" in kind else ONLY.get(kind, SPREADS))
    and (name != "fsdp2 2 x tp 2" or kind in ("muon", "adafactor"))
]
ROUND = ("fsdp2 2", "single", "tp 2", "pp 2", "ddp 2", "fsdp2 2")
LOW_ROUND = ("fsdp2 2", "single", "ddp 2", "fsdp2 2")
MOVES = [
    pytest.param(
        kind,
        a,
        b,
        id=f"{kind}-{a} to {b}",
        marks=[] if a == "fsdp2 2" and kind not in REST else AGAIN,
    )
    for kind in KINDS
    for a, b in pairwise(
        LOW_ROUND if "bf16" in kind else [name for name in ROUND if name in ONLY.get(kind, ROUND)]
    )
]


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two. The third is counted."""
    place = root / folder
    place.mkdir()
    base = {
        "data": {"packing": False},
        "batch": {"global_samples": 8, "micro_batch": 2},
        "checkpoint": {"every": 2, "asynchronous": False, "export": "none"},
        "eval": {"at_start": False},
        "run": {"steps": 3},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6},
    }
    ranks, strategy = SPREADS[spread]
    sections = merge(base, {"optimizer": KINDS[kind].options}, KINDS[kind].sections)
    path = write_config(place, root / "model", rows=60, strategy=strategy, **sections)
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=ranks)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def slug(*names: str) -> str:
    return "-to-".join(names).replace(" ", "_").replace(",", "")


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
    root = tmp_path_factory.mktemp("optimizers")
    # Some tensors have 4,096 entries on a rank of two, and some fewer.
    tiny_model_dir(root / "model", layers=2, hidden=64)
    for ranks in (1, 2, 4):
        if plans := [
            plan(root, slug(k, n), k, n) for k, n in dict.fromkeys(whole) if SPREADS[n][0] == ranks
        ]:
            run_plans(plans, ranks, counted=True)
    for ranks in (1, 2):
        plans = []
        for kind, a, b in moves:
            if SPREADS[b][0] == ranks:
                plans.append(plan(root, slug(kind, a, b), kind, b))
                stopped = root / slug(kind, a) / "run" / "checkpoints" / "step-00000002"
                shutil.copytree(stopped, plans[-1].parent / "checkpoints" / stopped.name)
        if plans:
            run_plans(plans, ranks)
    return root


def near(mine: list[dict[str, Any]], other: list[dict[str, Any]], kind: str) -> None:
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in mine] == pytest.approx(
            [e[key] for e in other], rel=KINDS[kind].within
        ), key


@pytest.mark.claim(
    "optimizers besides AdamW train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_numbers_are_near_and_bytes_as_planned(runs: Path, kind: str, name: str) -> None:
    mine, other = (events(runs / slug(kind, n) / "run", "step") for n in (name, "single"))
    near(mine, other, kind)
    assert mine[-1]["loss"] < mine[0]["loss"] - 0.01
    made = Plan.load(runs / slug(kind, name) / "run" / "plan.json")
    facts = models.facts(
        models.load_config(made.model_path, made.config.model),
        made.config.data.max_length,
        made.config.adapter,
    )
    memory = last_measurement(read(runs / slug(kind, name) / "run" / "events.jsonl"))
    assert memory is not None
    states = [state_of(made, facts, stage_of(made, facts, stage)) for stage in range(made.mesh.pp)]
    assert max(memory.by_rank["optimizer"]) == max(state.optimizer for state in states)
    if made.data_parallel in ("ddp", "fsdp2") and made.mesh.pp == made.mesh.tp == 1:
        assert mine[-1]["sent_bytes"] == pytest.approx(
            flows(made, facts, step=2).traffic().total, rel=1e-6, abs=1
        )
    assert max(memory.by_rank["parameters"]) == max(state.parameters for state in states)


@pytest.mark.claim(
    "optimizers besides AdamW train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "a", "b"), MOVES)
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    mine, other = (
        events(runs / name / "run", "step") for name in (slug(kind, a, b), slug(kind, "single"))
    )
    assert [e["step"] for e in mine] == [3]
    near(mine, other[2:], kind)


@pytest.mark.parametrize(
    ("kind", "name"), [("schedule_free", "fsdp2 2"), ("bf16, stochastic", "fsdp2 2")]
)
def test_what_is_exported_is_fp32_and_what_was_evaluated(runs: Path, kind: str, name: str) -> None:
    """The mean of a schedule-free run, not the weights that it learns at."""
    one, other = (
        dict(read_run(runs / slug(kind, n) / "run")[0].named_parameters()) for n in (name, "single")
    )
    for key, weight in one.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(
            weight, other[key], rtol=KINDS[kind].within, atol=5e-3 if "bf16" in kind else 1e-5
        )
