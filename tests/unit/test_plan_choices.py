"""Which plan is the first, and what stands beside it, for the questions that users ask most."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.conftest import Run


def _plan(run: Run, model: str, cluster: str, *more: str) -> dict[str, Any]:
    code, out, _ = run("plan", "--model", model, "--cluster", cluster, "--json", *more)
    assert code == 0
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.full
def test_a_larger_batch_is_advised_where_each_step_waits_for_the_optimizer(run: Run) -> None:
    """An update on the host takes as long for 8 samples as for 256, so the comparison with LoRA is made at both."""
    question = ("plan", "--model", "llama-3.1-70b", "--cluster", "8xh100-80g", "--length", "4096")
    _, out, _ = run(*question, columns=200)
    shown = re.search(
        r"LoRA is ([\d.]+) times as fast with 8 samples a step, and ([\d.]+) times with (\d+)\.",
        out,
    )
    assert shown is not None
    assert float(shown[1]) > 5 * float(shown[2])
    advised = re.search(rf"^  --batch {shown[3]}: fsdp2 offload, ([\d,]+) tokens/s", out, re.M)
    assert advised is not None
    larger = _plan(run, "llama-3.1-70b", "8xh100-80g", "--length", "4096", "--batch", shown[3])
    assert f"{larger['ranked'][0]['tokens_per_s']:,.0f}" == advised[1], (
        "the plan with that batch says the same"
    )


def test_offloading_goes_first_only_where_it_is_much_faster(run: Run) -> None:
    ranked = _plan(run, "llama-3-8b", "1x4090", "--adapter", "lora")["ranked"]
    offloaded = next(plan for plan in ranked if "offload" in plan["name"])
    assert ranked[0]["name"] == "single"
    assert offloaded["tokens_per_s"] > ranked[0]["tokens_per_s"], (
        "by less than such predictions were off"
    )


@pytest.mark.slow
def test_frozen_weights_are_not_held_by_the_host_of_each_rank(run: Run) -> None:
    """ZeRO 1 and 2 move each block to the device: what stays is less than one copy of the weights in 16 bits."""
    plans = _plan(run, "llama-3-8b", "4x4090", "--adapter", "lora")["ranked"]
    loads = {plan["name"]: plan["host"]["load"] for plan in plans}
    assert loads["zero2"] / 4 < 2 * 8.03e9
    assert loads["zero2"] < 8 * loads["ddp"]


@pytest.mark.slow
@pytest.mark.full
def test_a_plan_exports_what_the_memory_of_its_host_allows(run: Run) -> None:
    """The merged model of 70B takes 282 GB, and four 3090 are assumed to have 275 GB; what a user sets stays."""
    question = ("plan", "--model", "llama-3-70b", "--cluster", "4x3090", "--adapter", "qlora")
    _, out, _ = run(*question, columns=120)
    assert "export_adapter: true" in out and "the adapter alone is exported" in out
    plans = _plan(run, "llama-3-70b", "4x3090", "--adapter", "qlora")["ranked"]
    assert all(plan["host"]["export"] < plan["host_limit"] for plan in plans)
    _, out, _ = run(*question, "checkpoint.export=best", columns=120)
    assert (
        "export_adapter: true" not in out
        and "of host memory; checkpoint.export=none leaves it out" in out
    )
