"""What does not learn lies in the type that it is multiplied in, under every strategy: near one process in fp32, to the planned byte.

Real ranks over gloo, one process group for each world size; LoRA over all linear layers, and `model.freeze` of the embedding.
"""

from __future__ import annotations

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
from tests.harness import events, write_config
from tests.tiny import tiny_model_dir

LORA: dict[str, Any] = {"adapter": {"kind": "lora", "r": 4}}
FROZEN: dict[str, Any] = {"model": {"freeze": ["model.embed_tokens"]}}
# Losses and norms of bf16 against fp32, as tests/distributed/rows.py has them.
NEAR = {"loss": 2e-3, "grad_norm": 2e-2}


class Row(NamedTuple):
    strategy: Any
    ranks: int
    what: dict[str, Any] = LORA
    precision: str = "bf16"


ROWS = {
    "one process": Row("single", 1),
    "one process, frozen embedding": Row("single", 1, FROZEN),
    "ddp": Row("ddp", 2),
    "ddp, fp16": Row("ddp", 2, precision="fp16"),
    "fsdp2": Row("fsdp2", 2),
    "fsdp2, gathered in fp32": Row({"kind": "fsdp2", "param_dtype": "fp32"}, 2),
    "fsdp2, frozen embedding": Row("fsdp2", 2, FROZEN),
    "tp": Row("tp", 2),
    "cp": Row("cp", 2),
    "pp": Row("pp", 2),
    "zero2": Row("zero2", 2),
}
# With --full alone.
AGAIN = (
    "ddp, fp16",
    "fsdp2, gathered in fp32",
    "cp",
    "tp",
    "ddp",
    "fsdp2, frozen embedding",
    "pp",
)


def reference(row: Row) -> str:
    return "fp32, lora" if row.what is LORA else "fp32, frozen embedding"


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("frozen")
    model = tiny_model_dir(root / "model")
    found: dict[str, Path] = {}
    by_group: dict[tuple[int, str], list[Path]] = {}
    rows = {
        "fp32, lora": Row("single", 1, LORA, "fp32"),
        "fp32, frozen embedding": Row("single", 1, FROZEN, "fp32"),
        **ROWS,
    }
    for name in () if request.config.getoption("--full") else AGAIN:
        del rows[name]
    for number, (name, row) in enumerate(rows.items()):
        folder = root / str(number)
        folder.mkdir()
        base = {
            "optimizer": {"lr": 3e-3},
            "data": {"packing": True, "max_length": 96},
            "batch": {"global_samples": 4, "micro_batch": 2},
            "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
            "run": {"steps": 5},
        }
        path = write_config(
            folder,
            model,
            rows=60,
            strategy=row.strategy,
            precision=row.precision,
            **base,
            **row.what,
        )
        asked = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=row.ranks)
        plan_path, _ = claim_run_dir(plan := make_plan(asked, on_progress=lambda *_: None), asked)
        by_group.setdefault((row.ranks, plan.engine), []).append(plan_path)
        found[name] = plan_path.parent
    for (ranks, _), plans in by_group.items():
        run_plans(plans, ranks, counted=True)
    return found


@pytest.mark.claim("frozen weights lie in the type they compute in")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in AGAIN else []) for name in ROWS]
)
@pytest.mark.timeout(900)
def test_numbers_are_near_and_bytes_as_planned(runs: dict[str, Path], name: str) -> None:
    mine, other = (events(runs[each], "step") for each in (name, reference(ROWS[name])))
    for key, tolerance in NEAR.items():
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in other], rel=tolerance), key
    plan = Plan.load(runs[name] / "plan.json")
    config = plan.config
    hf = models.load_config(plan.model_path, config.model)
    facts = models.facts(
        hf, config.data.max_length, config.adapter, config.head, config.model.freeze
    )
    measured = last_measurement(read(runs[name] / "events.jsonl"))
    assert measured is not None
    states = [state_of(plan, facts, stage_of(plan, facts, stage)) for stage in range(plan.mesh.pp)]
    assert max(measured.by_rank["parameters"]) == max(state.parameters for state in states)
    if (
        plan.engine == "native"
        and plan.mesh.cp * plan.mesh.tp == 1
        and plan.data_parallel in ("ddp", "fsdp2")
    ):
        assert mine[-1]["sent_bytes"] == pytest.approx(
            flows(plan, facts, step=4).traffic().total, rel=1e-6, abs=1
        )


def test_two_bytes_fall_away_for_each_frozen_entry(runs: dict[str, Path]) -> None:
    """Of matrices: vectors are one entry in hundreds of this model, in thousands of others."""
    low, full = (
        last_measurement(read(runs[name] / "events.jsonl"))
        for name in ("one process", "fp32, lora")
    )
    assert low is not None and full is not None
    frozen = sum(p.numel() for p in models_weights(runs["one process"]) if p.ndim >= 2)
    assert full.memory["parameters"] - low.memory["parameters"] == 2 * frozen


def models_weights(run: Path) -> list[Any]:
    from drumline.models.build import build_model

    plan = Plan.load(run / "plan.json")
    return list(build_model(plan.model_path, plan.config.model, 0).parameters())
