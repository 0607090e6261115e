"""What the planner says of time: published runs, and what must be longer than what."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import pytest

from benchmarks.planner_fit import residuals
from benchmarks.planner_published import ROWS
from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.hardware import catalog
from drumline.hardware.cluster import Cluster
from drumline.models.load import facts, load_config
from drumline.plan.estimate import Seconds
from drumline.plan.facts import ModelFacts, Weight, with_length
from drumline.plan.plan import BatchPlan, Layout
from drumline.plan.stages import bubble, plan_pipeline
from drumline.planner.cost import fitted
from drumline.planner.cost.compute import compute_seconds
from drumline.planner.cost.fitted import RANGES, group_of
from drumline.planner.cost.times import estimate, seconds
from drumline.planner.cost.traffic import flows


def test_published_throughput() -> None:
    """Of runs that publish tokens/s, the planner's own choice of what they leave open.

    Each row's error is in docs/explanations/benchmarks.md.
    """
    rows = [row for row in ROWS if not row.without and "tokens_per_s" in row.measured]
    assert len(rows) >= 8 and median(abs(residuals(row)["speed"]) for row in rows) < 0.15


@lru_cache
def model(layers: int = 32) -> ModelFacts:
    shape = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": layers,
    }
    said = ModelConfig(config={**shape, "num_attention_heads": 32, "num_key_value_heads": 32})
    return facts(load_config(None, said), 2048)


def cluster(nodes: int = 1, intra: str = "nvlink4", inter: str = "400Gb") -> Cluster:
    device, links = (
        catalog.find_device("h100-80g"),
        [catalog.find_link(name) for name in (intra, inter, "pcie5")],
    )
    assert (
        device is not None
        and links[0] is not None
        and links[1] is not None
        and links[2] is not None
    )
    return Cluster(device, 8, nodes, links[0], links[1], links[2])


def layout(
    strategy: Any, world: int = 8, micro_batch: int = 2, accumulation: int = 4, **sections: Any
) -> Layout:
    config = Config.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": [{"kind": "file", "path": "rows"}], "max_length": 2048},
            "strategy": strategy,
            **sections,
        }
    )
    mesh: Mesh = config.strategy.mesh(world)
    batch = BatchPlan(
        global_samples=micro_batch * accumulation * mesh.data_ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        eval_micro_batch=micro_batch,
        rows_per_sample=config.algorithm.rows_per_sample,
    )
    return Layout(
        config=config,
        mesh=mesh,
        batch=batch,
        precision="bf16",
        device="cuda",
        engine=config.strategy.engine(mesh),
        data_parallel=config.strategy.data_parallel(mesh),
        activation_checkpointing=config.memory.activation_checkpointing,
        pipeline=plan_pipeline(mesh, config.strategy, batch, model(), []),
    )


def taken(strategy: Any, on: Cluster | None = None, **options: Any) -> Seconds:
    how, where = layout(strategy, **options), on or cluster()
    return seconds(how, model(), where, flows(how, model()))


def test_checkpointing_costs_what_is_computed_again() -> None:
    """Of a forward all of the blocks, or every second product. A forward is a third of what operators move, and of products."""
    none, selective, full = (
        taken("fsdp2", memory={"activation_checkpointing": kind}).compute
        for kind in ("none", "selective", "full")
    )
    assert none < selective < full
    # The head is not computed again.
    assert 1.25 < full / none < 4 / 3


def test_products_take_longer_where_power_is_the_limit() -> None:
    """An H100's products, which are not all of its time; an A100's clock does not fall as far."""
    hot = cluster()
    assert hot.device.is_power_limited
    cool = replace(hot, device=replace(hot.device, is_power_limited=False))
    longer = taken("fsdp2").compute / taken("fsdp2", cool).compute
    assert 1 + 0.6 * (fitted.POWER_LIMITED - 1) < longer < fitted.POWER_LIMITED
    for name, is_limited in (("a100-80g", False), ("4090", False), ("h200", True)):
        device = catalog.find_device(name)
        assert device is not None and device.is_power_limited == is_limited, name


def test_communication_hides_behind_enough_computing() -> None:
    """A gather beside a long forward costs one block's; where links are slow it cannot hide."""
    long, slow = (
        taken("fsdp2", micro_batch=8),
        taken("fsdp2", cluster(intra="pcie3"), micro_batch=1),
    )
    assert long.communication < 0.05 * long.compute
    assert slow.communication > slow.compute
    assert taken("fsdp2", cluster(nodes=2), world=16).communication > taken("fsdp2").communication


def test_tensor_parallel_messages_never_hide() -> None:
    how = layout("tp")
    sent = flows(how, model()).traffic().total
    assert taken("tp").communication > 0.9 * sent / cluster().intra.bandwidth
    assert 8 * taken("tp").total > taken("fsdp2").total, "which has eight times the tokens"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_the_schedules(schedule: str) -> None:
    found = taken({"kind": "pp", "schedule": schedule}, accumulation=16)
    idle = bubble(schedule, 8, 2 if schedule == "interleaved" else 1, 16)
    least = idle / (1 - idle) * found.compute
    assert least <= found.bubble < least + 0.5 * found.compute, (
        "and what the slowest stage takes longer"
    )


PINNED = {"kind": "cpu", "pin_memory": True}


def test_copies_to_the_host_go_at_the_rate_that_pinned_memory_reaches() -> None:
    """Gradients in fp32 to the device and back in each of four micro-batches, and to the host once more; not at the rate of collectives
    over the same link. Of eight GPUs two share a link to the host. Weights come in bf16 from memory that stage 3 never pins."""
    offloaded = taken({"kind": "zero3", "offload_optimizer": PINNED})
    entries = model().trainable / 8
    gradients = 2 * (4 * 8 + 4) * entries / (0.8 * 63e9)
    assert offloaded.offload == pytest.approx(gradients + 2 * entries / 5.7e9, rel=1e-3)


def test_copies_of_memory_that_is_not_pinned_are_no_faster_than_a_core() -> None:
    entries = model().trainable / 8
    offloaded = taken({"kind": "zero3", "offload_optimizer": "cpu"})
    up, down = (4 * 4 + 2) * entries, (4 * 4 + 4) * entries
    assert offloaded.offload == pytest.approx(up / 5.7e9 + down / 9.6e9, rel=1e-3)
    slow_link = catalog.find_link("pcie3")
    assert slow_link is not None
    slow = replace(cluster(), host_link=slow_link)
    assert taken({"kind": "zero3", "offload_optimizer": "cpu"}, slow).offload == pytest.approx(
        max(2 * up / (0.8 * 15.75e9), up / 5.7e9) + max(2 * down / (0.8 * 15.75e9), down / 9.6e9),
        rel=1e-3,
    )


def test_sums_of_gradients_that_stay_on_the_device_are_copied_once() -> None:
    """DeepSpeed's stage 2 keeps fp32 sums on the device, and bf16 sums of whole weights on the host."""
    entries = model().trainable / 8
    bf16 = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    fp32_sums, bf16_sums = (
        taken({"kind": "zero2", "offload_optimizer": PINNED, "options": options}).offload
        for options in ({}, bf16)
    )
    assert fp32_sums == pytest.approx(2 * (4 + 2) * entries / (0.8 * 63e9), rel=0.01)
    assert bf16_sums > fp32_sums + 2 * 4 * 2 * 2 * entries / (0.8 * 63e9)
    once = taken(
        {"kind": "zero2", "offload_optimizer": PINNED, "options": bf16}, accumulation=1
    ).offload
    assert once == pytest.approx(fp32_sums, rel=0.01), "nothing to add up"


def test_weights_on_the_host_come_for_each_gathering() -> None:
    """And none goes to the device after the step."""
    offloaded = {"offload_optimizer": PINNED, "offload_parameters": PINNED}
    one, two = (
        taken({"kind": "zero3", **offloaded}, accumulation=number).offload for number in (1, 2)
    )
    # Each more micro-batch: gradients both ways, and weights for forward at least.
    entries = model().trainable / 8
    assert two - one > 2 * (8 + 2) * entries / (0.8 * 63e9) * 0.99


def test_offloading_and_several_kernels_take_longer() -> None:
    plain, offloaded = (
        taken("zero3"),
        taken({"kind": "zero3", "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    )
    assert plain.offload == 0 < offloaded.offload and offloaded.optimizer > plain.optimizer
    assert (
        taken({"kind": "zero3", "offload_optimizer": {"kind": "nvme", "path": "d"}}).offload
        > offloaded.offload
    )
    assert (
        taken("ddp", optimizer={"fused": False}).optimizer
        > 2 * taken("ddp").optimizer
        > 12 * taken("fsdp2").optimizer
    )


def test_threads_pay_for_every_micro_batch() -> None:
    how = layout("dp", world=1).model_copy(update={"devices_per_rank": 8})
    found = seconds(how, model(), cluster(), flows(how, model()))
    assert found.communication > 4 * 2 * 4 * model().parameters * 7 / 8 / cluster().intra.bandwidth


def test_sampling_is_bound_by_memory() -> None:
    """Every token of a batch reads all weights once."""
    algorithm = {
        "kind": "grpo",
        "group_size": 8,
        "generator": {"kind": "vllm", "max_new_tokens": 512},
        "rewards": [{"kind": "math"}],
    }
    found = taken("ddp", algorithm=algorithm)
    assert found.rollout > 512 * 2 * model().parameters / cluster().device.bandwidth
    slower = taken(
        "ddp", algorithm={**algorithm, "generator": {"kind": "hf", "max_new_tokens": 512}}
    )
    assert slower.rollout > found.rollout, "the host starts every kernel of every token"
    kept = taken(
        "fsdp2",
        algorithm={
            **algorithm,
            "generator": {**algorithm["generator"], "url": "http://there", "weights": "none"},
        },
    )
    handed = taken("fsdp2", algorithm=algorithm)
    assert handed.rollout > kept.rollout, "who keeps its own weights is sent none"
    ahead = taken("ddp", algorithm={**algorithm, "ahead": 4})
    segments = taken("ddp", algorithm={**algorithm, "ahead": 4, "partial": True})
    assert segments.rollout < ahead.rollout, "a call reads the weights for a quarter of the tokens"
    whole, live = (
        taken(kind, algorithm={**algorithm, "generator": {"kind": "hf"}}).rollout
        for kind in ("zero2", "ddp")
    )
    assert whole <= live, "neither gathers: the whole model is on each rank"


def test_a_model_of_no_known_blocks_is_gathered_at_once() -> None:
    one = replace(
        model(), block_weights=(), end_weights=(Weight("w", (4096, 4096), position="before"),)
    )
    how = layout("zero3")
    assert seconds(how, one, cluster(), flows(how, one)).communication > 0


def test_an_image_counts_as_one_token() -> None:
    data = {"train": [{"kind": "file", "path": "rows"}]}
    config = Config.model_validate(
        {"model": {"id": "m"}, "data": data, "algorithm": {"kind": "classify", "modality": "image"}}
    )
    text, images = layout("ddp"), layout("ddp").model_copy(update={"config": config})
    assert images.tokens_per_row == 1.0 < text.tokens_per_row


def test_what_each_cause_costs() -> None:
    """Attention has a rate of its own, and on short rows hooks in Python cost more than computing."""
    device = cluster().device
    assert device.attention is not None and device.attention < 0.5 * device.efficiency
    assert cluster().attention_rate("bf16") == pytest.approx(
        device.attention * device.flops["bf16"]
    )
    long = with_length(model(), 2048, 32768)
    assert (
        compute_seconds(layout("fsdp2"), long, cluster()).backward
        > 1.5 * compute_seconds(layout("fsdp2"), model(), cluster()).backward
    )
    tiny: dict[str, Any] = {
        "micro_batch": 1,
        "data": {"train": [{"kind": "file", "path": "rows"}], "max_length": 128},
    }
    assert taken("zero3", **tiny).compute > 1.5 * taken("zero2", **tiny).compute


def test_ranges_follow_the_group_and_a_plan_fits_where_its_upper_end_does() -> None:
    groups = [
        group_of(layout(kind))
        for kind in ("ddp", "tp", {"kind": "zero3", "offload_optimizer": "cpu"})
    ]
    assert groups == ["full", "tp, cp or pp", "offload"]
    assert group_of(layout("tp"), is_mixture=True) == "mixture"
    how = layout("fsdp2")
    found = estimate(how, model(), cluster())
    assert (found.memory_range, found.seconds_range) == RANGES["full"]
    needs = found.memory.reserved
    low, high = found.memory_range
    assert low <= 1 <= high and found.needs == (low * needs, high * needs)
    limits = {
        int(high * needs) + 1: "fits",
        int(high * needs) - 1: "tight",
        needs: "tight",
        needs - 1: "no",
    }
    assert {limit: found.model_copy(update={"limit": limit}).verdict for limit in limits} == limits
