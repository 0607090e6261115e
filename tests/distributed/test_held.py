"""What ranks hold and what lives on them in a step, on two real processes: exact bytes of parameters, gradients and optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from drumline.config.load import load
from drumline.models.load import facts, load_config
from drumline.plan.plan import Plan
from drumline.planner import trace as tracing
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_module
from tests.distributed.rows import CUT
from tests.harness import write_config
from tests.tiny import tiny_model_dir

# name → strategy, precision; parameters, gradients and optimizer of both ranks together, in bytes for each parameter.
# Everything whole on both: 2 × (4, 4, 8). ZeRO keeps fp32 copies of its part (4 / 2) beside the moments.
ROWS: dict[str, tuple[Any, str, tuple[int, int, int]]] = {
    "ddp": ("ddp", "fp32", (8, 8, 16)),
    "fsdp2": ("fsdp2", "fp32", (4, 4, 8)),
    "pp": ("pp", "fp32", (4, 4, 8)),
    "diloco": ("diloco", "fp32", (8, 8, 32)),
    "zero1, bf16": ("zero1", "bf16", (4, 12, 12)),
    "zero2, bf16": ("zero2", "bf16", (4, 4, 12)),
    "zero3": (CUT, "fp32", (4, 4, 12)),
}
# Strategies whose activations are traced as rank 0 of a process group that sends nothing.
CUTS: dict[str, tuple[Any, str]] = {"tp": ("tp", "fp32"), "cp": ("cp", "fp32")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("held")
    plans: dict[str, Path] = {}
    for number, (name, (strategy, precision, *_)) in enumerate((ROWS | CUTS).items()):
        folder = root / str(number)
        folder.mkdir()
        batch = {"global_samples": 1 if name in CUTS else 4, "micro_batch": 1}
        path = write_config(folder, model, strategy=strategy, precision=precision, batch=batch)
        request = Request(load(path, []), world_size=2)
        plans[name] = claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]
    run_module("tests.distributed.held_worker", list(plans.values()), 2)
    told: dict[str, Any] = {"plans": plans}
    return told | {
        name: [json.loads((plan.parent / f"{rank}.json").read_text()) for rank in (0, 1)]
        for name, plan in plans.items()
    }


def sizes(model: Path) -> dict[str, int]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", ROWS)
def test_ranks_hold_what_they_must(told: dict[str, Any], model: Path, name: str) -> None:
    entries = sizes(model)
    # Tied: both ends have it.
    number = sum(entries.values()) + (entries["model.embed_tokens.weight"] if name == "pp" else 0)
    both = [sum(rank["held"][i] for rank in told[name]) for i in range(3)]
    for got, each in zip(both, ROWS[name][2], strict=True):
        assert each * number <= got <= each * number + 256, name  # DeepSpeed's buffers are padded


@pytest.mark.parametrize("name", ROWS)
def test_a_step_gives_back_what_it_took(told: dict[str, Any], name: str) -> None:
    for rank in told[name]:
        parameters, gradients, optimizer = rank["held"]
        assert rank["peak"] == max(rank["peaks"].values()) == rank["peaks"][rank["in"]]
        assert rank["base"] >= parameters + optimizer and abs(rank["after"] - rank["base"]) < 16384
        assert rank["peaks"].keys() == {"forward", "backward", "clip", "step"}
        assert rank["peaks"]["clip"] >= parameters + gradients + optimizer
    if name == "ddp":
        # Its buckets, which gradients are views of, stay between steps; when backward starts, all activations are there.
        # A step's own numbers (the norm, whether it is finite) are some bytes.
        assert (
            told[name][0]["base"] >= sum(told[name][0]["held"])
            and 0 <= told[name][0]["peaks"]["step"] - told[name][0]["base"] < 64
        )


@pytest.mark.full
@pytest.mark.parametrize("name", CUTS)
def test_a_trace_of_one_rank_is_what_lives_on_it(told: dict[str, Any], name: str) -> None:
    """All layers, traced in a child without other ranks, against the first of two real ones: to 2%."""
    plan = Plan.load(told["plans"][name])
    config = plan.config
    known = facts(load_config(plan.model_path, config.model), config.data.max_length)
    question = tracing.question_of(config, plan.model_path, plan, known)
    (traced,) = tracing.trace_in_child({**question, "layers": [known.layers]})
    real = told[name][0]
    assert traced.peak == pytest.approx(
        max(real["peaks"]["forward"], real["peaks"]["backward"]) - real["base"], rel=0.02
    )
