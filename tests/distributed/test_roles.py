"""Engines answer without learning: `infer`, `whole_weights`, frozen models beside the one that learns, and two that learn as one.

Each strategy against one process: what is read of each row of a global batch (by its tokens, wherever it was dealt to) before and after
a step, with and without the adapter; and every weight, whole, on every rank.
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
from tests.harness import write_config
from tests.tiny import tiny_model_dir

Told = Callable[[Row], list[dict[str, Any]]]
pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-5
ONE = Row("one process", 1, {"batch": {"global_samples": 8, "micro_batch": 8}})
LORA = {"adapter": {"kind": "lora", "r": 4}}
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
            "batch": {"global_samples": 8, "micro_batch": 2},
        },
    ),
    Row("tp 2", 2, {"strategy": "tp"}),
    Row("cp 2", 2, {"strategy": "cp"}),
    Row(
        "fsdp2 2 x tp 2",
        4,
        {"strategy": {"kind": "fsdp2", "tp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
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
    *(
        Row(f"{name}, lora", ranks, {"strategy": strategy, **LORA, **more})
        for name, ranks, strategy, more in (
            ("fsdp2 2", 2, "fsdp2", {}),
            ("tp 2", 2, "tp", {}),
            ("pp 2", 2, "pp", FOURS),
            ("zero3 2", 2, CUT, {}),
        )
    ),
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


# Two degrees at once and offloading are parity's, too (its DPO and PPO cases have models beside the policy): here with --full alone.
AGAIN = ("fsdp2 2, grad-op", "tp 2, lora", "pp 2, lora", "fsdp2 2, offload", "fsdp2 hybrid 2 x 2", "fsdp2 2 x tp 2", "tp 2 x pp 2",
         "fsdp2 2 x pp 2, interleaved", "zero2 2, offload", "dp", "zero1 2", "diloco 2", "fsdp2 2, lora", "cp 2", "pp 2, bf16",
         "fsdp2 2, bf16", "zero3 2, lora")  # fmt: skip


def marked(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(row, id=row.name, marks=pytest.mark.full if row.name in AGAIN else [])
        for row in rows
    ]


def slug(row: Row) -> str:
    return row.name.replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank of a row said: the chosen rows, one process group for each world size and engine."""
    root = tmp_path_factory.mktemp("roles")
    model, other = (
        tiny_model_dir(root / "model", layers=4),
        tiny_model_dir(root / "other", layers=6, hidden=48, seed=1),
    )
    lora = Row(f"{ONE.name}, lora", 1, {**ONE.sections, **LORA})
    params = [
        getattr(getattr(item, "callspec", None), "params", None) for item in request.session.items
    ]
    chosen = [p["row"] for p in params if p and p.get("row") in (*ROWS, *LOCAL, *LOW)]
    groups: dict[tuple[int, str], list[Path]] = {}
    for row in dict.fromkeys([ONE, lora, *chosen]):
        (root / slug(row)).mkdir()
        # Plain steps, clipped hard: they say how long the gradient was thought to be.
        optimizer = {"kind": "sgd", "max_grad_norm": 0.3}
        base = {
            "batch": {"global_samples": 8, "micro_batch": 4},
            "data": {"packing": False},
            "optimizer": optimizer,
        }
        path = write_config(root / slug(row), model, rows=48, **base | row.sections)
        asked = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=row.world_size)
        plan = with_roles(make_plan(asked, on_progress=lambda *_: None), other)
        groups.setdefault((row.world_size, plan.engine), []).append(claim_run_dir(plan, asked)[0])
    for (world_size, _), plans in groups.items():
        run_module("tests.distributed.roles_worker", plans, world_size)
    return lambda row: [
        torch.load(root / slug(row) / "run" / f"{rank}.pt", weights_only=True)
        for rank in range(row.world_size)
    ]


def with_roles(plan: Plan, other: Path) -> Plan:
    """A larger reference, and a second model of that kind that learns, at half the rate."""
    model = ModelConfig(id=str(other))
    layers = stage_layers(
        plan.mesh, plan.config.strategy, facts(load_config(str(other), model), 96)
    )
    frozen = RolePlan(model=model, model_path=str(other), head="lm", layers=layers)
    learning = frozen.model_copy(update={"trainable": True, "lr_ratio": 0.5})
    return plan.model_copy(update={"roles": {"reference": frozen, "value": learning}})


def reference(told: Told, row: Row) -> dict[str, Any]:
    (one,) = told(Row(f"{ONE.name}, lora" if "lora" in row.name else ONE.name, 1))
    return one


def together(ranks: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Rows of all ranks; those that share samples must say the same."""
    said: dict[str, float] = {}
    for rank in ranks:
        for tokens, value in rank[key].items():
            assert said.setdefault(tokens, value) == value
    return said


@pytest.mark.claim("models beside the policy answer as in one process")
@pytest.mark.parametrize("row", marked(ROWS))
def test_answers_as_one_process(told: Told, row: Row) -> None:
    one, ranks = reference(told, row), told(row)
    for key in ("before", "after", "without", "value", "reference"):
        assert together(ranks, key) == pytest.approx(one[key], rel=TOLERANCE), key
    assert one["without"] == pytest.approx(
        one["before" if "lora" in row.name else "after"], rel=1e-6
    )
    assert one["after"] != pytest.approx(one["before"], rel=1e-3) and one["value"] != pytest.approx(
        one["reference"], rel=1e-3
    )
    for rank in ranks:
        assert rank["modes"] == [True, True, False]
        assert rank["norm"] == pytest.approx(one["norm"], rel=TOLERANCE)


@pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
def test_answers_in_low_precision_are_near(told: Told, row: Row) -> None:
    one, ranks = reference(told, row), told(row)
    for key in ("before", "after", "value", "reference"):
        assert together(ranks, key) == pytest.approx(one[key], rel=2e-3), key


@pytest.mark.parametrize("row", marked([ONE, *ROWS, *LOCAL, *LOW]))
def test_every_rank_is_handed_every_weight(told: Told, row: Row) -> None:
    one, ranks = reference(told, row), told(row)
    for key in ("first weights", "weights", "value weights", "reference weights"):
        still = key.startswith("first") or (key.startswith("reference") and row not in LOW)
        for rank in ranks:
            assert list(rank[key]) == list(ranks[0][key]) and rank[key].keys() == one[key].keys()
            for name, tensor in rank[key].items():
                assert torch.equal(tensor, ranks[0][key][name]), name
                assert not still or torch.equal(tensor, one[key][name]), name
                if row in ROWS:
                    assert float((tensor - one[key][name]).norm()) <= TOLERANCE * float(
                        one[key][name].norm()
                    ), name
    for rank in ranks:
        handed = rank["weights"] | {
            f"value/{name}": tensor for name, tensor in rank["value weights"].items()
        }
        assert {tensor.dtype for tensor in (*handed.values(), *rank["kept"].values())} == {
            torch.float32
        }
        for name, part in rank["kept"].items():  # what a checkpoint would hold of it, to the bit
            assert part.numel() < handed[name].numel() or torch.equal(
                part.flatten(), handed[name].flatten()
            ), name
        learns, frozen = row.name.startswith(WHOLE), row.name.startswith((*WHOLE, "zero1", "zero2"))
        assert rank["live"] == [learns, learns, frozen]


@pytest.mark.parametrize("row", LOCAL, ids=lambda row: row.name)
def test_copies_that_differ_answer_with_their_mean(told: Told, row: Row) -> None:
    ranks = told(row)
    differing = 0
    for name, mean in ranks[0]["weights"].items():
        copies = torch.stack([rank["copy"][name] for rank in ranks])
        differing += not torch.equal(copies[0], copies[1])
        torch.testing.assert_close(mean, copies.mean(0), rtol=1e-6, atol=1e-7)
        assert all(torch.equal(rank["copy again"][name], rank["copy"][name]) for rank in ranks), (
            name
        )
    assert differing
