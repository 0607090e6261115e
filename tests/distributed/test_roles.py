"""Engines answer without learning: `infer`, `whole_weights`, frozen models beside the one that
learns, and two that learn as one.

Each strategy against one process: what is read of each row of a global batch (by its tokens,
wherever it was dealt to) before and after a step, with and without the adapter; and every weight,
whole, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.config.model import ModelConfig
from drumline.models.load import facts, load_config
from drumline.plan.plan import Plan, RolePlan
from drumline.plan.stages import stage_layers
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_module
from tests.distributed.rows import CUT, FOURS, Row
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    EIGHT_BY_TWO,
    by_engine,
    case,
    chosen_params,
    slug,
)
from tests.distributed.test_heads import Said, near
from tests.harness import Sections, same_tensors, write_config
from tests.tiny import tiny_model_dir

Told = Callable[[Row], list[Said]]
pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-5
ONE = Row("one process", 1, {"batch": {"global_samples": 8, "micro_batch": 8}})
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
ONE_LORA = Row("one process, lora", 1, {**ONE.sections, **LORA})
# First words of rows whose ranks hold a model that can be called.
WHOLE = (
    "one",
    "dp",
    "ddp",
    "zero1",
    "zero2",
    "local",
    "diloco",
)
ROWS = [
    Row("dp", 1, {"strategy": "dp"}),
    Row("ddp 2", 2, {"strategy": "ddp"}),
    Row("fsdp2 2, offload", 2, {"strategy": {"kind": "fsdp2", "offload": "cpu"}}),
    Row("fsdp2 2, grad-op", 2, {"strategy": {"kind": "fsdp2", "reshard_after_forward": False}}),
    Row(
        "fsdp2 hybrid 2 x 2",
        4,
        {
            "strategy": {"kind": "fsdp2", "replicate": 2},
            "batch": EIGHT_BY_TWO,
        },
    ),
    Row("tp 2", 2, {"strategy": "tp"}),
    Row("cp 2", 2, {"strategy": "cp"}),
    Row(
        "fsdp2 2 x tp 2",
        4,
        {"strategy": {"kind": "fsdp2", "tp": 2}, "batch": EIGHT_BY_TWO},
    ),
    Row("pp 2, interleaved", 2, {"strategy": {"kind": "pp", "schedule": "interleaved"}, **FOURS}),
    Row("tp 2 x pp 2", 4, {"strategy": {"kind": "ddp", "tp": 2, "pp": 2}, **FOURS}),
    Row(
        "fsdp2 2 x pp 2, interleaved",
        4,
        {"strategy": {"kind": "fsdp2", "pp": 2, "pipeline": {"schedule": "interleaved"}}, **FOURS},
    ),
    Row("zero1 2", 2, {"strategy": "zero1"}),
    Row("zero2 2, offload", 2, {"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}}),
    Row(
        "zero3 2, nothing kept whole, offload",
        2,
        {"strategy": {**CUT, "offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    ),
    Row("fsdp2 2, lora", 2, {"strategy": "fsdp2", **LORA}),
    Row("tp 2, lora", 2, {"strategy": "tp", **LORA}),
    Row("pp 2, lora", 2, {"strategy": "pp", **LORA, **FOURS}),
    Row("zero3 2, lora", 2, {"strategy": CUT, **LORA}),
]
# What ranks hold is not one process's: told apart below.
LOCAL = [
    Row("local sgd 2", 2, {"strategy": {"kind": "local_sgd", "period": 4}}),
    Row("diloco 2", 2, {"strategy": "diloco"}),
]
# Near one process in fp32, not equal; what is handed out is still what is kept, in fp32.
LOW = [
    Row("fsdp2 2, bf16", 2, {"strategy": "fsdp2", "precision": "bf16"}),
    Row("pp 2, bf16", 2, {"strategy": "pp", "precision": "bf16", **FOURS}),
    Row("zero2 2, bf16", 2, {"strategy": "zero2", "precision": "bf16"}),
]


# Two degrees at once and offloading are parity's, too (its DPO and PPO cases have models beside the
# policy): here with --full alone.
AGAIN = (
    "fsdp2 2, grad-op",
    "tp 2, lora",
    "pp 2, lora",
    "fsdp2 2, offload",
    "fsdp2 hybrid 2 x 2",
    "fsdp2 2 x tp 2",
    "tp 2 x pp 2",
    "fsdp2 2 x pp 2, interleaved",
    "zero2 2, offload",
    "dp",
    "zero1 2",
    "diloco 2",
    "fsdp2 2, lora",
    "cp 2",
    "pp 2, bf16",
    "fsdp2 2, bf16",
    "zero3 2, lora",
)


def marked(rows: list[Row]) -> list[Any]:
    return [case(row, id=row.name, full=row.name in AGAIN) for row in rows]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank of a row said: the chosen rows, one process group for each world size and
    engine."""
    root = tmp_path_factory.mktemp("roles")
    model = tiny_model_dir(root / "model", layers=4)
    other = tiny_model_dir(root / "other", layers=6, hidden=48, seed=1)
    rows = {ONE: None, ONE_LORA: None}
    for params in chosen_params(request.session, __file__):
        rows[params["row"]] = None
    plans = [plan_of(root, model, other, row) for row in rows]
    for world_size, paths in by_engine(plans):
        run_module("tests.distributed.roles_worker", paths, world_size)

    def said(row: Row) -> list[Said]:
        run = root / slug(row.name) / "run"
        ranks = range(row.world_size)
        return [torch.load(run / f"{rank}.pt", weights_only=True) for rank in ranks]

    return said


def plan_of(root: Path, model: Path, other: Path, row: Row) -> Path:
    folder = root / slug(row.name)
    folder.mkdir()
    base = {
        "batch": EIGHT_BY_FOUR,
        "data": {"packing": False},
        # Plain steps, clipped hard: they say how long the gradient was thought to be.
        "optimizer": {"kind": "sgd", "max_grad_norm": 0.3},
    }
    path = write_config(folder, model, rows=48, **base | row.sections)
    loaded = load(path, [f"data.cache_dir={root / 'cache'}"])
    request = Request(loaded, world_size=row.world_size)
    plan = make_plan(request, on_progress=lambda *_: None)
    return claim_run_dir(with_roles(plan, other), request)[0]


def with_roles(plan: Plan, other: Path) -> Plan:
    """A larger reference, and a second model of that kind that learns, at half the rate."""
    model = ModelConfig(id=str(other))
    sizes = facts(load_config(str(other), model), 96)
    layers = stage_layers(plan.mesh, plan.config.strategy, sizes)
    frozen = RolePlan(model=model, model_path=str(other), head="lm", layers=layers)
    learning = frozen.model_copy(update={"trainable": True, "lr_ratio": 0.5})
    return plan.model_copy(update={"roles": {"reference": frozen, "value": learning}})


def reference(told: Told, row: Row) -> Said:
    (one,) = told(ONE_LORA if "lora" in row.name else ONE)
    return one


def together(ranks: list[Said], key: str) -> dict[str, float]:
    """Rows of all ranks; those that share samples must say the same."""
    said: dict[str, float] = {}
    for rank in ranks:
        for tokens, value in rank[key].items():
            assert said.setdefault(tokens, value) == value
    return said


@pytest.mark.claim("models beside the policy answer as in one process")
@pytest.mark.parametrize("row", marked(ROWS))
def test_answers_as_one_process(told: Told, row: Row) -> None:
    one = reference(told, row)
    ranks = told(row)
    for key in ("before", "after", "without", "value", "reference"):
        assert together(ranks, key) == pytest.approx(one[key], rel=TOLERANCE), key
    # Without an adapter nothing is taken away.
    whole = "after"
    if "lora" in row.name:
        whole = "before"
    assert one["without"] == pytest.approx(one[whole], rel=1e-6)
    assert one["after"] != pytest.approx(one["before"], rel=1e-3)
    assert one["value"] != pytest.approx(one["reference"], rel=1e-3)
    for rank in ranks:
        assert rank["modes"] == [True, True, False]
        assert rank["norm"] == pytest.approx(one["norm"], rel=TOLERANCE)


@pytest.mark.parametrize("row", marked(LOW))
def test_answers_in_low_precision_are_near(told: Told, row: Row) -> None:
    one = reference(told, row)
    ranks = told(row)
    for key in ("before", "after", "value", "reference"):
        assert together(ranks, key) == pytest.approx(one[key], rel=2e-3), key


@pytest.mark.parametrize("row", marked([ONE, *ROWS, *LOCAL, *LOW]))
def test_every_rank_is_handed_every_weight(told: Told, row: Row) -> None:
    one = reference(told, row)
    ranks = told(row)
    for key in ("first weights", "weights", "value weights", "reference weights"):
        is_still = key.startswith("first") or (key.startswith("reference") and row not in LOW)
        first = ranks[0][key]
        expected = one[key]
        assert first.keys() == expected.keys()
        for rank in ranks:
            assert list(rank[key]) == list(first)
            same_tensors(rank[key], first)
        if is_still:
            same_tensors(first, expected)
        if row in ROWS:
            for name, tensor in first.items():
                assert near(tensor, expected[name]), name
    for rank in ranks:
        check_handed_weights(rank)
        learns = row.name.startswith(WHOLE)
        frozen = row.name.startswith((*WHOLE, "zero1", "zero2"))
        assert rank["live"] == [learns, learns, frozen]


def check_handed_weights(rank: Said) -> None:
    """What is handed out is fp32, and is what a checkpoint would hold of it, to the bit."""
    handed = dict(rank["weights"])
    for name, tensor in rank["value weights"].items():
        handed[f"value/{name}"] = tensor
    kept = rank["kept"]
    assert {tensor.dtype for tensor in (*handed.values(), *kept.values())} == {torch.float32}
    for name, part in kept.items():
        if part.numel() >= handed[name].numel():
            assert torch.equal(part.flatten(), handed[name].flatten()), name


@pytest.mark.parametrize("row", marked(LOCAL))
def test_copies_that_differ_answer_with_their_mean(told: Told, row: Row) -> None:
    ranks = told(row)
    differing = 0
    for name, mean in ranks[0]["weights"].items():
        copies = torch.stack([rank["copy"][name] for rank in ranks])
        differing += not torch.equal(copies[0], copies[1])
        torch.testing.assert_close(mean, copies.mean(0), rtol=1e-6, atol=1e-7)
        for rank in ranks:
            assert torch.equal(rank["copy again"][name], rank["copy"][name]), name
    assert differing
