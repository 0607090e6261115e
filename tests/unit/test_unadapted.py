"""What `all-linear` does not adapt and QLoRA does not pack: found in the facts of a model, and said by plan, train and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drumline.config.config import LoRAConfig, NoAdapter
from drumline.config.load import load
from drumline.models.load import facts
from drumline.plan.explain import explain
from drumline.plan.unadapted import describe_unadapted, find_unadapted
from drumline.report.facts import RunFacts
from drumline.report.sections import _remarks
from drumline.telemetry.events import EventLog
from drumline.train.entry import run_start
from drumline.train.setup import Request, make_plan
from tests.harness import write_config
from tests.tiny import ARCHITECTURES, tiny_architecture_dir
from tests.unit.conftest import Run
from tests.unit.test_report_progress import told

EXPERTS = "the experts (mlp.experts.down_proj)"


def lines(kind: str, adapter: dict[str, Any], **options: Any) -> list[str]:
    config = AutoConfig.for_model(
        kind, **{**ARCHITECTURES[kind], "vocab_size": 300, "num_hidden_layers": 2, **options}
    )
    lora = LoRAConfig(r=4, **adapter)
    return describe_unadapted(find_unadapted(facts(config, 64, lora), lora))


# Rows of 12 entries, which fill no whole entries of codes.
NARROW = {"moe_intermediate_size": 12}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_adapted_and_packed(kind: str) -> None:
    assert lines(kind, {}) == [] and lines(kind, {"quantize": "4bit"}) == []


def test_experts_that_cannot_be_packed_are_named_with_their_share() -> None:
    assert lines("qwen3_moe", {}, **NARROW) == [], "all-linear adapts them"
    for adapter in ({"quantize": "4bit"}, {"quantize": "8bit", "targets": ["q_proj"]}):
        (line,) = lines("qwen3_moe", adapter, **NARROW)
        assert line.startswith(f"QLoRA does not pack {EXPERTS}: ") and line.endswith("%")


def test_numbers_are_those_of_the_model() -> None:
    """Two layers of 4 experts of [32, 12]."""
    architecture = {**ARCHITECTURES["qwen3_moe"], **NARROW}
    config = AutoConfig.for_model("qwen3_moe", **architecture, vocab_size=300, num_hidden_layers=2)
    packed = LoRAConfig(r=4, quantize="4bit")
    (group,) = find_unadapted(facts(config, 64, packed), packed)
    assert group.parameters == 2 * 4 * 32 * 12
    assert group.total == facts(config, 64).parameters, "the adapter's own weights are not counted"


def test_a_dense_model_has_no_line() -> None:
    assert lines("qwen2", {}) == [] and lines("qwen2", {"quantize": "4bit"}) == []
    assert (
        find_unadapted(
            facts(AutoConfig.for_model("qwen2", **ARCHITECTURES["qwen2"]), 64), NoAdapter()
        )
        == []
    )


@pytest.mark.slow
def test_linear_layers_that_cannot_be_packed_and_the_vision_tower() -> None:
    (line,) = lines("qwen2", {"quantize": "4bit"}, hidden_size=36, intermediate_size=60)
    assert line.startswith("QLoRA does not pack the linear layers (self_attn.q_proj, ")
    (line,) = lines("qwen2", {"quantize": "4bit", "targets": ["q_proj"]}, intermediate_size=60)
    assert line.startswith("QLoRA does not pack the linear layers (mlp."), "there is no tower"
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }
    text = {**ARCHITECTURES["qwen2"], "vocab_size": 300, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_vl", vision_config=vision, text_config=text)
    (group,) = find_unadapted(facts(config, 64, LoRAConfig(r=4)), LoRAConfig(r=4))
    assert group.kind == "layers of the vision tower" and "attn.qkv" in group.names


def test_a_plan_says_it(run: Run) -> None:
    """Of a known shape, and as JSON."""
    args = ["plan", "--model", "qwen3-30b-a3b", "--cluster", "1xh100", "--adapter", "qlora"]
    code, out, err = run(*args, "--json")
    assert code == 0
    assert "note: the adapter has 642.5M parameters (2.10% of the model's), 629.1M" in err
    assert json.loads(out)["model"]["unadapted"] == []
    # Factors of rank 16 over [1536, 2048] and [2048, 768].
    in_experts = 48 * 128 * 16 * (1536 + 2048 + 2048 + 768)
    assert json.loads(out)["model"]["adapter"]["in_experts"] == in_experts


def test_a_run_and_its_page_say_it(tmp_path: Path) -> None:
    model = tiny_architecture_dir(tmp_path / "model", "qwen3_moe")
    sections = {
        "adapter": {"kind": "lora", "quantize": "4bit"},
        "model": {"init": "random", "config": NARROW},
    }
    config = load(write_config(tmp_path, model, rows=20, **sections), [])
    request = Request(config, world_size=1)
    plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
    assert f"adapter        QLoRA does not pack {EXPERTS}" in explain(plan)
    event = run_start(plan, None)
    _, printed = told(event.values())
    assert f"note: QLoRA does not pack {EXPERTS}" in printed
    EventLog(tmp_path / "events.jsonl").emit(event)
    assert any(EXPERTS in line for line in _remarks(RunFacts(tmp_path)))
