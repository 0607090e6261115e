"""What ranks hold and what lives on them in a step, on two real processes: exact bytes of
parameters, gradients and optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from drumline.plan.plan import Plan
from drumline.planner import trace as tracing
from tests.distributed.promises import facts_of
from tests.distributed.ranks import run_module
from tests.distributed.rows import CUT
from tests.distributed.setups import asked_for, cases, plan_in, slug
from tests.harness import read_json
from tests.tiny import tiny_model_dir

# name → strategy, precision; parameters, gradients and optimizer of both ranks together, in bytes
# for each parameter. Everything whole on both: 2 × (4, 4, 8). ZeRO keeps fp32 copies of its part (4
# / 2) beside the moments.
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
# With --full alone.
AGAIN = ("pp", "diloco", "zero1, bf16", *CUTS)


Told = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Told:
    root = tmp_path_factory.mktemp("held")
    plans: dict[str, Path] = {}
    for name, (strategy, precision, *_) in asked_for(request, ROWS | CUTS, AGAIN).items():
        batch = {"global_samples": 4, "micro_batch": 1}
        if name in CUTS:
            batch["global_samples"] = 1
        sections = {"strategy": strategy, "precision": precision, "batch": batch}
        plans[name] = plan_in(root, slug(name), 2, model, **sections)
    run_module("tests.distributed.held_worker", list(plans.values()), 2)
    told: Told = {"plans": plans}
    for name, plan in plans.items():
        told[name] = [read_json(plan.parent / f"{rank}.json") for rank in (0, 1)]
    return told


def sizes(model: Path) -> dict[str, int]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", cases(ROWS, AGAIN))
def test_ranks_hold_what_they_must(told: Told, model: Path, name: str) -> None:
    entries = sizes(model)
    number = sum(entries.values())
    if name == "pp":  # tied: both ends have it
        number += entries["model.embed_tokens.weight"]
    held = [rank["held"] for rank in told[name]]
    for first, second, each in zip(*held, ROWS[name][2], strict=True):
        more = first + second - each * number
        assert 0 <= more <= 256, name  # DeepSpeed's buffers are padded


@pytest.mark.parametrize("name", cases(ROWS, AGAIN))
def test_a_step_gives_back_what_it_took(told: Told, name: str) -> None:
    for rank in told[name]:
        parameters, gradients, optimizer = rank["held"]
        peaks = rank["peaks"]
        base = rank["base"]
        assert peaks.keys() == {"forward", "backward", "clip", "step"}
        assert rank["peak"] == max(peaks.values())
        assert rank["peak"] == peaks[rank["in"]]
        assert base >= parameters + optimizer
        assert abs(rank["after"] - base) < 16384
        assert peaks["clip"] >= parameters + gradients + optimizer
    if name == "ddp":
        # Its buckets, which gradients are views of, stay between steps; when backward starts, all
        # activations are there. A step's own numbers (the norm, whether it is finite) are some
        # bytes.
        first = told[name][0]
        assert first["base"] >= sum(first["held"])
        assert 0 <= first["peaks"]["step"] - first["base"] < 64


@pytest.mark.full
@pytest.mark.parametrize("name", CUTS)
def test_a_trace_of_one_rank_is_what_lives_on_it(told: Told, name: str) -> None:
    """All layers, traced in a child without other ranks, against the first of two real ones: to 2%."""
    plan = Plan.load(told["plans"][name])
    known = facts_of(plan)
    question = tracing.trace_inputs(plan.config, plan.model_path, plan, known)
    question = {**question, "layers": [known.layers]}
    (traced,) = tracing.trace_in_child(question)
    real = told[name][0]
    peaks = real["peaks"]
    peak = max(peaks["forward"], peaks["backward"])
    assert traced.peak == pytest.approx(peak - real["base"], rel=0.02)
