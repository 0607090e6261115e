"""Defaults that the planner tells apart: FSDP2 without resharding in a pipeline, sequence parallelism with tensor parallelism, and the
embedding and the head as FSDP units of their own."""

from __future__ import annotations

import pytest

from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.plan.estimate import Estimate
from drumline.planner.public import plan
from drumline.planner.search.search import evaluate


def estimated(strategy: str, model: str = "llama-3.1-8b") -> Estimate:
    overrides = [
        f"strategy={strategy}",
        "memory.activation_checkpointing=full",
        "batch.global_samples=32",
        "compile=false",
    ]
    question = plan(
        model=model, cluster="8xh100-80g", length=4096, overrides=overrides
    ).answer.question
    return evaluate(question, question.config, "").estimate


def test_a_pipeline_that_does_not_reshard_sends_less_and_holds_more() -> None:
    resharded = estimated("{kind: fsdp2, pp: 2, reshard_after_forward: true}")
    kept = estimated("{kind: fsdp2, pp: 2}")
    assert kept.traffic.all_gather < resharded.traffic.all_gather
    assert kept.seconds.total < resharded.seconds.total
    assert kept.memory.peak > resharded.memory.peak


def test_tensor_parallelism_with_a_stream_in_parts_holds_less() -> None:
    whole = estimated("{kind: fsdp2, tp: 4, sequence_parallel: false}")
    in_parts = estimated("{kind: fsdp2, tp: 4}")
    assert in_parts == estimated("{kind: fsdp2, tp: 4, sequence_parallel: true}")
    assert in_parts.memory.activations < whole.memory.activations
    assert in_parts.seconds.compute < whole.seconds.compute
    # Of a ring an all-reduce is a reduce-scatter and an all-gather.
    assert in_parts.traffic.all_reduce < whole.traffic.all_reduce
    assert in_parts.traffic.reduce_scatter > whole.traffic.reduce_scatter


@pytest.mark.slow
def test_ends_of_their_own_are_gone_while_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = estimated("fsdp2")
    tied = estimated("fsdp2", "llama-3.2-1b")
    monkeypatch.setattr(FSDP2Strategy, "gathers_ends_apart", lambda *_: False)
    with_root = estimated("fsdp2")
    end = 2 * 128256 * 4096  # bytes of the embedding, or of the head, in bf16
    assert with_root.memory.phases["forward"] - apart.memory.phases["forward"] == pytest.approx(
        2 * end
    )
    assert with_root.memory.phases["loss"] - apart.memory.phases["loss"] == pytest.approx(end)
    assert apart.traffic == with_root.traffic, "backward reads no embedding, so it is gathered once"
    assert estimated("fsdp2", "llama-3.2-1b").model_dump() == tied.model_dump()
