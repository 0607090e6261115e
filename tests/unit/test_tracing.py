"""What a trace without memory says of a micro-batch, held against the same micro-batch with memory, under the tracker of live bytes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.algorithms.base import policy_objective
from drumline.config.load import load
from drumline.engine.build import build_engine
from drumline.hardware.detect import Machine
from drumline.models.load import facts, load_config
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.planner import trace as tracing
from drumline.planner.cluster import cluster_of_machine
from drumline.planner.cost.memory import memory
from drumline.planner.trace import DepthTrace, Untraceable, trace_one_depth
from drumline.telemetry.memory_tracker import LiveBytes
from drumline.train.setup import Request, make_plan
from tests.harness import LETTERS, write_config
from tests.strategies import SingleStrategy
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow

ROWS, LENGTH, LAYERS = 2, 96, 8
CLUSTER = cluster_of_machine(Machine([], cores=1, memory_bytes=2**33, device="cpu", bf16=False), 1)
LORA = {"kind": "lora", "r": 8}
FULL = {"activation_checkpointing": "full"}
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
    "episodes": {
        "algorithm": {
            "kind": "grpo",
            "group_size": 2,
            "rewards": [LETTERS],
            "generator": {"kind": "hf", "max_new_tokens": 8},
        }
    },
    "fsdp2, bf16": {"strategy": "fsdp2", "precision": "bf16"},
}

ONE = {"global_samples": 2, "micro_batch": 2}

Made = Callable[[str], tuple[Plan, ModelFacts]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("tracing")
    model = tiny_model_dir(root / "model", layers=LAYERS, hidden=64)

    def make(name: str) -> tuple[Plan, ModelFacts]:
        folder = root / str(list(CASES).index(name))
        folder.mkdir(exist_ok=True)
        plan = make_plan(
            Request(
                load(write_config(folder, model, **{"batch": ONE, **CASES[name]}), []), world_size=1
            ),
            on_progress=lambda *_: None,
        )
        config = plan.config
        return plan, facts(
            load_config(plan.model_path, config.model),
            LENGTH,
            config.adapter,
            config.head,
            config.model.freeze,
        )

    return make


def lived(plan: Plan) -> tuple[int, int]:
    """Bytes on top of what was there, at the peak of a real micro-batch; and with what the engine itself holds of that."""
    engine = build_engine(plan, "cpu")
    gc.collect()
    live = LiveBytes()
    with live:
        algorithm = plan.config.algorithm
        engine.forward_backward(
            [algorithm.traced_batch(plan, ROWS, LENGTH, 3)],
            policy_objective(algorithm.build()),
            1.0,
        )
    held = engine.memory_stats()
    return live.peak - live.base, live.peak - live.base + held.parameters + held.optimizer


def of_length(plan: Plan, tokens: int) -> Plan:
    config = plan.config
    return plan.model_copy(
        update={
            "config": config.model_copy(
                update={"data": config.data.model_copy(update={"max_length": tokens})}
            )
        }
    )


def whole(plan: Plan) -> DepthTrace:
    """All layers, traced."""
    alone = {
        "data_parallel": "none",
        "config": plan.config.model_copy(update={"strategy": SingleStrategy()}),
    }
    gathered = plan.precision if plan.data_parallel == "fsdp2" else None
    return trace_one_depth(plan.model_copy(update=alone), ROWS, LENGTH, gathered)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_what_lives(
    made: Made, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole model traced, to 1%; what 2 and 4 layers say of all 8, to 2%; and the planner's peak made of that, to 5%."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan, known = made(name)
    traced, (real, with_states) = whole(plan), lived(plan)
    assert traced.peak == pytest.approx(real, rel=0.01)
    layout = of_length(plan, LENGTH)
    told = tracing.trace_activations(plan.config, plan.model_path, layout, known)
    assert (
        told is not None
        and told.source == "trace"
        and told.live_loss is not None
        and told.live_loss_backward is not None
    )
    tokens, saved = layout.rows * LENGTH, traced.saved_at["loss"]
    assert layout.rows == ROWS
    assert (told.saved_ends + LAYERS * told.saved_block) * tokens == pytest.approx(saved, rel=0.01)
    for place, on_top in (("loss", told.live_loss), ("-loss", told.live_loss_backward)):
        assert saved + on_top * tokens == pytest.approx(
            max(saved, traced.peaks_at[place]), rel=0.02
        ), place
    assert told.copies is not None and told.copies[1] + LAYERS * told.copies[0] == traced.cast_bytes
    assert memory(layout, known, CLUSTER, told).peak == pytest.approx(with_states, rel=0.05)


def test_an_answer_is_kept_by_its_content(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []

    def traces(question: dict[str, Any]) -> list[DepthTrace]:
        asked.append(question["rows"])
        return [
            DepthTrace(
                n, {"loss": 100 * n}, {str(i): 100 * i for i in range(n)} | {"loss": 100 * n}
            )
            for n in question["layers"]
        ]

    monkeypatch.setattr(tracing, "trace_depths", traces)
    plan, known = made("packs")
    first = tracing.trace_activations(plan.config, plan.model_path, plan, known)
    assert (
        first == tracing.trace_activations(plan.config, plan.model_path, plan, known)
        and len(asked) == 1
    )
    other_rate = plan.config.model_copy(
        update={"optimizer": plan.config.optimizer.model_copy(update={"lr": 1.0})}
    )
    assert (
        first == tracing.trace_activations(other_rate, plan.model_path, plan, known)
        and len(asked) == 1
    )
    tracing.trace_activations(plan.config, plan.model_path, of_length(plan, 48), known)
    tracing.trace_activations(
        plan.config,
        plan.model_path,
        plan.model_copy(update={"activation_checkpointing": "full"}),
        known,
    )
    assert len(asked) == 3


def test_what_cannot_be_traced_says_why(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan, known = made("packs")

    def refuse(_: Any) -> list[DepthTrace]:
        raise Untraceable("it counts its tokens")

    monkeypatch.setattr(tracing, "trace_depths", refuse)
    with caplog.at_level(logging.WARNING):
        assert tracing.trace_activations(plan.config, plan.model_path, plan, known) is None
        assert (
            tracing.trace_activations(
                plan.config, plan.model_path, plan, replace(known, vision_language=True)
            )
            is None
        )
        assert (
            tracing.trace_activations(plan.config, plan.model_path, plan, replace(known, layers=1))
            is None
        )
    said = [record.message for record in caplog.records]
    assert [line.rpartition(": ")[2] for line in said] == [
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
