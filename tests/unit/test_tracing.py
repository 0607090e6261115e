"""What a trace without memory says of a micro-batch, held against the same micro-batch with memory,
under the tracker of live bytes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.algorithms.base import policy_objective
from drumline.engine.build import build_engine
from drumline.hardware.detect import Machine
from drumline.plan.estimate import Activations
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.planner import trace as tracing
from drumline.planner.cluster import cluster_of_machine
from drumline.planner.cost.memory import memory
from drumline.planner.trace import DepthTrace, Untraceable, trace_one_depth
from drumline.telemetry.memory_tracker import LiveBytes
from tests.distributed.promises import facts_of
from tests.harness import LETTERS, write_config
from tests.plans import resolve_plan, with_section
from tests.strategies import SingleStrategy
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow

ROWS = 2
LENGTH = 96
LAYERS = 8
CLUSTER = cluster_of_machine(Machine([], cores=1, memory_bytes=2**33, device="cpu", bf16=False), 1)
LORA = {"kind": "lora", "r": 8}
FULL = {"activation_checkpointing": "full"}
GRPO = {
    "kind": "grpo",
    "group_size": 2,
    "rewards": [LETTERS],
    "generator": {"kind": "hf", "max_new_tokens": 8},
}
CASES: dict[str, dict[str, Any]] = {
    "packs": {},
    "selective, bf16": {
        "memory": {"activation_checkpointing": "selective"},
        "precision": "bf16",
        "data": {"packing": False},
    },
    "LoRA, full recomputation, bf16": {"adapter": LORA, "memory": FULL, "precision": "bf16"},
    "all logits at once, bf16": {
        "algorithm": {"kind": "sft", "loss_chunk": 0},
        "precision": "bf16",
    },
    "eager attention": {"model": {"attention": "eager"}},
    "pairs": {"algorithm": {"kind": "dpo"}, "batch": {"global_samples": 1, "micro_batch": 1}},
    "episodes": {"algorithm": GRPO},
    "fsdp2, bf16": {"strategy": "fsdp2", "precision": "bf16"},
}

ONE = {"global_samples": 2, "micro_batch": 2}


class Planned(NamedTuple):
    plan: Plan
    facts: ModelFacts


Made = Callable[[str], Planned]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("tracing")
    model = tiny_model_dir(root / "model", layers=LAYERS, hidden=64)

    def make(name: str) -> Planned:
        folder = root / str(list(CASES).index(name))
        folder.mkdir(exist_ok=True)
        path = write_config(folder, model, **{"batch": ONE, **CASES[name]})
        plan = resolve_plan(path, world_size=1)
        return Planned(plan, facts_of(plan))

    return make


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def trace(layout: Plan, facts: ModelFacts) -> Activations | None:
    return tracing.trace_activations(layout.config, layout.model_path, layout, facts)


class Lived(NamedTuple):
    """Bytes on top of what was there, and with what the engine itself holds of that."""

    peak: int
    with_states: int


def measure(plan: Plan) -> Lived:
    """Return what lives at the peak of a real micro-batch."""
    engine = build_engine(plan, "cpu")
    gc.collect()
    live = LiveBytes()
    with live:
        algorithm = plan.config.algorithm
        batches = [algorithm.traced_batch(plan, ROWS, LENGTH, 3)]
        engine.forward_backward(batches, policy_objective(algorithm.build()), 1.0)

    held = engine.memory_stats()
    peak = live.peak - live.base
    return Lived(peak, peak + held.parameters + held.optimizer)


def trace_whole(plan: Plan) -> DepthTrace:
    """All layers, traced."""
    gathered = plan.precision if plan.data_parallel == "fsdp2" else None
    config = plan.config.model_copy(update={"strategy": SingleStrategy()})
    alone = plan.model_copy(update={"data_parallel": "none", "config": config})
    return trace_one_depth(alone, ROWS, LENGTH, gathered)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_what_lives(made: Made, name: str) -> None:
    """The whole model traced, to 1%; what 2 and 4 layers say of all 8, to 2%; and the planner's
    peak made of that, to 5%."""
    plan, facts = made(name)
    traced = trace_whole(plan)
    lived = measure(plan)

    assert traced.peak == pytest.approx(lived.peak, rel=0.01)

    layout = with_section(plan, "data", max_length=LENGTH)
    told = trace(layout, facts)

    assert told is not None
    assert told.source == "trace"
    assert layout.rows == ROWS

    tokens = layout.rows * LENGTH
    saved = traced.saved_at["loss"]
    told_saved = told.saved_ends + LAYERS * told.saved_block

    assert told_saved * tokens == pytest.approx(saved, rel=0.01)

    for place, on_top in (("loss", told.live_loss), ("-loss", told.live_loss_backward)):
        assert on_top is not None, place

        peak = max(saved, traced.peaks_at[place])
        assert saved + on_top * tokens == pytest.approx(peak, rel=0.02), place

    assert told.copies is not None

    of_block, of_ends = told.copies

    assert of_ends + LAYERS * of_block == traced.cast_bytes

    predicted = memory(layout, facts, CLUSTER, told).peak

    assert predicted == pytest.approx(lived.with_states, rel=0.05)


def test_an_answer_is_kept_by_its_content(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def traces(question: dict[str, Any]) -> list[DepthTrace]:
        asked.append(question["rows"])
        found = []
        for layers in question["layers"]:
            saved = {"loss": 100 * layers}
            peaks = {str(layer): 100 * layer for layer in range(layers)}
            found.append(DepthTrace(layers, layers, saved, {**peaks, **saved}))

        return found

    monkeypatch.setattr(tracing, "trace_depths", traces)
    plan, facts = made("packs")
    first = trace(plan, facts)

    assert trace(plan, facts) == first
    assert len(asked) == 1

    other_rate = with_section(plan, "optimizer", lr=1.0)

    assert tracing.trace_activations(other_rate.config, plan.model_path, plan, facts) == first
    assert len(asked) == 1

    shorter = with_section(plan, "data", max_length=48)
    tracing.trace_activations(plan.config, plan.model_path, shorter, facts)
    trace(plan.model_copy(update=FULL), facts)

    assert len(asked) == 3


def test_what_cannot_be_traced_says_why(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, facts = made("packs")

    def refuse(_: Any) -> list[DepthTrace]:
        raise Untraceable("it counts its tokens")

    monkeypatch.setattr(tracing, "trace_depths", refuse)
    with caplog.at_level(logging.WARNING):
        assert trace(plan, facts) is None
        assert trace(plan, replace(facts, vision_language=True)) is None
        assert trace(plan, replace(facts, layers=1)) is None

    reasons = [record.message.rpartition(": ")[2] for record in caplog.records]

    assert reasons == [
        "it counts its tokens",
        "it sees images of many sizes",
        "it has too few layers to go on from",
    ]


NEAR_AND_FAR = ["near", "near", "far"] * 4


@pytest.mark.parametrize(
    ("kinds", "layers", "expected"),
    [([], 32, (2, 4)), ([], 3, (1, 2)), (["full"] * 6, 6, (2, 4)), (NEAR_AND_FAR, 12, (3, 6))],
)
def test_numbers_of_layers(kinds: list[str], layers: int, expected: tuple[int, int]) -> None:
    assert tracing._layer_counts(kinds, layers) == expected


def test_layers_that_do_not_repeat_are_not_gone_on_from() -> None:
    with pytest.raises(Untraceable):
        tracing._layer_counts(["a"] + ["b"] * 11, 12)
