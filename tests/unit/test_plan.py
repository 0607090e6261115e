"""The batch arithmetic, the schedule and what the planner refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.config.config import BatchConfig, Config, ScheduleConfig
from drumline.engine.fp8 import has_aligned_tokens, has_only_token_inputs
from drumline.errors import PlanError
from drumline.hardware.detect import Device, Machine
from drumline.plan.batch import resolve_batch
from drumline.plan.explain import count, explain, plan_line, size
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, DataPlan, Plan
from drumline.plan.resolve import KnownModel, resolve
from tests.tiny import tiny_model_dir, tiny_vision_dir

CPU = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
TWO_H100 = Machine(
    devices=[Device("NVIDIA H100 80GB HBM3", 80 * 2**30)] * 2,
    cores=16,
    memory_bytes=2**37,
    device="cuda",
    bf16=True,
)
DATA = DataPlan(train_cache="c", train_samples=100, train_tokens=5000)
FACTS = ModelFacts("m", 10**6, 1.0, 320, 512, 4, 64, heads=8, kv_heads=8)


def rows(**options: Any) -> dict[str, Any]:
    """Return a section `data` of rows of 128 tokens."""
    return {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 128, **options}


def config(**sections: object) -> Config:
    return Config.model_validate({"data": rows(), **sections})


def plan(
    machine: Machine = CPU,
    world_size: int | None = None,
    data: DataPlan | None = DATA,
    **sections: object,
) -> Plan:
    return plan_of(config(**sections), machine, world_size, data)


def test_weights_that_no_checkpoint_has_are_drawn_on_the_cpu() -> None:
    """A resume or an export draws frozen weights again, maybe on another machine."""
    assert plan(TWO_H100).draw_device == "cuda"
    assert plan(TWO_H100, adapter={"kind": "lora"}).draw_device == "cpu"
    assert plan(TWO_H100, model={"freeze": ["model.embed_tokens"]}).draw_device == "cpu"


def plan_of(
    asked: Config,
    machine: Machine = CPU,
    world_size: int | None = None,
    data: DataPlan | None = DATA,
    facts: ModelFacts | None = None,
) -> Plan:
    """Return the plan of a config, for a model that is known by its path alone or by its facts."""
    return resolve(
        asked,
        run_dir="r",
        machine=machine,
        world_size=world_size,
        model=KnownModel(facts, "m"),
        data=data,
    )


def has_reason(resolved: Plan, words: str) -> bool:
    """Return whether a line of a plan's reasons has some words."""
    return any(words in line for line in resolved.why)


def assert_says(error: pytest.ExceptionInfo[PlanError], parts: list[str]) -> None:
    """Check that the line of an error has all of some parts."""
    line = error.value.line()
    for part in parts:
        assert part in line


def assert_batch(batch: BatchPlan, expected: tuple[int, int, int]) -> None:
    """`expected`: samples of a global batch, samples of a micro-batch, and accumulation."""
    assert (batch.global_samples, batch.micro_batch, batch.accumulation) == expected


@pytest.mark.parametrize(
    ("batch", "data_ranks", "expected"),
    [
        ({"global_samples": 16, "micro_batch": 2}, 2, (16, 2, 4)),
        ({"global_samples": 16, "accumulation": 2}, 2, (16, 4, 2)),
        ({"global_samples": 16, "micro_batch": 2, "accumulation": 4}, 2, (16, 2, 4)),
        ({"global_tokens": 128 * 8}, 4, (8, 2, 1)),
        ({"micro_batch": 3, "accumulation": 5}, 2, (30, 3, 5)),
        ({}, 3, (3, 1, 1)),
        ({"global_samples": 128}, 1, (128, 32, 4)),
        ({"global_samples": 34}, 2, (34, 17, 1)),
    ],
)
def test_batch_follows_the_product_rule(
    batch: dict[str, int], data_ranks: int, expected: tuple[int, int, int]
) -> None:
    resolved = resolve_batch(config(batch=batch), data_ranks)
    assert_batch(resolved, expected)
    assert resolved.global_samples == resolved.micro_batch * resolved.accumulation * data_ranks


@pytest.mark.parametrize(
    ("batch", "data_ranks", "in_flight", "expected"),
    [
        ({}, 4, 1, (8, 1, 2)),
        ({}, 3, 1, (24, 1, 8)),
        ({}, 1, 9, (16, 1, 16)),
        ({"micro_batch": 4}, 1, 1, (8, 4, 2)),
    ],
)
def test_an_open_batch_has_whole_groups(
    batch: dict[str, int], data_ranks: int, in_flight: int, expected: tuple[int, int, int]
) -> None:
    rewards = [{"kind": "length", "free": 4, "limit": 8}]
    grpo = {"kind": "grpo", "group_size": 8, "rewards": rewards}
    resolved = resolve_batch(config(batch=batch, algorithm=grpo), data_ranks, in_flight)
    assert_batch(resolved, expected)


@pytest.mark.parametrize(
    ("batch", "data_ranks", "says"),
    [
        (
            {"global_samples": 10, "micro_batch": 4},
            2,
            [
                "10 samples",
                "4 × 2 data ranks",
                "8 or 16",
            ],
        ),
        ({"global_samples": 3}, 2, ["3 / 2 = 1.50", "2 or 4"]),
        ({"global_samples": 1}, 4, ["nearest global batch: 4"]),
        ({"global_tokens": 1000}, 1, ["1000", "128", "896 or 1024"]),
        ({"global_samples": 16, "micro_batch": 2, "accumulation": 2}, 2, ["= 8", "leave one"]),
    ],
)
def test_batch_says_the_arithmetic_and_the_nearest(
    batch: dict[str, int], data_ranks: int, says: list[str]
) -> None:
    with pytest.raises(PlanError) as error:
        resolve_batch(config(batch=batch), data_ranks)
    assert_says(error, says)


def test_tokens_of_images_are_not_called_a_length() -> None:
    asked = config(
        algorithm={"kind": "classify", "modality": "image"}, batch={"global_tokens": 1000}
    )
    with pytest.raises(PlanError, match="multiple of the 128 tokens that an image counts as"):
        resolve_batch(asked, 1)


def test_both_globals_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        BatchConfig(global_samples=2, global_tokens=256)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"lr": 1e-3}, 1e-3),
        ({"lr": 1e-3, "lr_scaling": "linear"}, 4e-3),
        ({"lr": 1e-3, "lr_scaling": "sqrt"}, 2e-3),
        ({"lr": 1e-3, "lr_scaling": "sqrt", "lr_base_devices": 4}, 1e-3),
        ({"lr": 1e-3, "lr_scaling": "linear", "lr_base_samples": 2}, 4e-3),
    ],
)
def test_learning_rate_scales_against_its_base(
    optimizer: dict[str, object], expected: float
) -> None:
    resolved = plan(world_size=4, optimizer=optimizer, batch={"global_samples": 8})
    assert resolved.lr == pytest.approx(expected)
    assert has_reason(resolved, "scaling") == ("lr_scaling" in optimizer)


def test_steps_cover_every_sample_of_the_epochs() -> None:
    batch = {"global_samples": 16}
    assert plan(batch=batch).steps == math.ceil(100 / 16)
    assert plan(batch=batch, run={"epochs": 2.5}).steps == math.ceil(250 / 16)
    assert plan(batch=batch, run={"steps": 3}).steps == 3
    assert plan(data=None).steps is None


def test_every_in_epochs_becomes_steps() -> None:
    each_half = {"every": "0.5 epochs"}
    resolved = plan(batch={"global_samples": 16}, checkpoint={"every": "2 epochs"}, eval=each_half)
    assert resolved.config.checkpoint.every_steps == round(200 / 16)
    assert resolved.config.eval.every_steps == round(50 / 16)
    assert "eval.every 0.5 epochs: 3 steps" in resolved.why

    unprepared = plan(data=None, eval=each_half)
    assert unprepared.config.eval.every == "0.5 epochs", "the data is not prepared yet"

    for text in ("0 epochs", "epoch", "one epoch", "1 step", "1e99 epochs"):
        says = f"'{text}' given, a number of steps or of epochs is wanted"
        with pytest.raises(ValueError, match=says):
            plan(eval={"every": text})


def test_auto_picks_and_says_why() -> None:
    one = plan()
    assert one.mesh.world_size == 1
    assert one.precision == "fp32"
    assert one.backend == "gloo"

    two = plan(TWO_H100)
    assert two.mesh.replicate == 2
    assert two.precision == "bf16"
    assert two.backend == "nccl"
    assert two.device == "cuda"
    assert two.predicted.peak_flops_per_device
    assert two.predicted.peak_flops_per_device > 5e14
    assert any(line.startswith("strategy auto: ddp") for line in two.why)


@pytest.mark.parametrize(
    ("machine", "sections", "says"),
    [
        (TWO_H100, {"launch": {"nproc": 4}}, ["4 processes", "2 GPUs found", "--nproc 2"]),
        (
            CPU,
            {"launch": {"nproc": 500}},
            ["500 processes take 195.31 GiB", "this machine has 16.00 GiB", "--nproc 40 or fewer"],
        ),
        (CPU, {"run": {"device": "cuda"}}, ["no GPU was found"]),
        (CPU, {"strategy": "single", "launch": {"nproc": 2}}, ["single runs one process", "ddp"]),
        (CPU, {"strategy": "dp", "launch": {"nproc": 2}}, ["dp runs one process", "ddp"]),
        (
            CPU,
            {"strategy": {"kind": "ddp", "tp": 2, "ep": 3}, "launch": {"nproc": 8}},
            ["4 data ranks do not divide into groups of ep 3", "one of 1, 2, 4"],
        ),
        (CPU, {"strategy": "dp", "compile": {"enabled": True}}, ["dp × compile", "strategy=ddp"]),
        (
            CPU,
            {"strategy": "cp", "launch": {"nproc": 3}},
            ["data.max_length", "128 tokens do not divide into 3 parts", "126 or 129"],
        ),
        (
            TWO_H100,
            {"strategy": {"kind": "cp", "method": "ring"}},
            ["ring × packing", "ulysses, or data.packing=false"],
        ),
        (
            CPU,
            {"strategy": {"kind": "cp", "method": "ring"}, "launch": {"nproc": 2}},
            ["ring × CPU"],
        ),
        (
            CPU,
            {"strategy": "cp", "model": {"attention": "eager"}, "launch": {"nproc": 2}},
            ["not around eager", "model.attention=auto"],
        ),
        (CPU, {"strategy": {"kind": "ddp", "cp": 2, "pp": 2}, "launch": {"nproc": 4}}, ["cp × pp"]),
    ],
)
def test_impossible_plans_are_refused(
    machine: Machine, sections: dict[str, object], says: list[str]
) -> None:
    with pytest.raises(PlanError) as error:
        plan(machine, **sections)
    assert_says(error, says)


@pytest.mark.parametrize(
    ("heads", "strategy", "world_size", "says"),
    [
        (9, "cp", 2, ["9 attention heads do not divide by cp 2", "use cp=1"]),
        (
            12,
            {"kind": "fsdp2", "cp": 8},
            8,
            ["12 attention heads do not divide by cp 8", "use cp=6"],
        ),
        (
            8,
            {"kind": "ddp", "cp": 4, "tp": 4},
            16,
            ["8 attention heads do not divide by cp 4 × tp 4", "use cp=2"],
        ),
        (8, {"kind": "ddp", "cp": 2, "tp": 4}, 8, None),
    ],
)
def test_heads_are_shared_out_over_the_ranks_of_a_sequence(
    heads: int, strategy: object, world_size: int, says: list[str] | None
) -> None:
    facts = replace(
        FACTS, hidden=8 * heads, heads=heads, kv_heads=1, tp_styles=frozenset({"colwise"})
    )
    asked = config(strategy=strategy, batch={"global_samples": 16})
    if says is None:
        assert plan_of(asked, world_size=world_size, facts=facts).mesh.cp == 2
        return

    with pytest.raises(PlanError) as error:
        plan_of(asked, world_size=world_size, facts=facts)
    assert_says(error, says)


RING = {"kind": "cp", "method": "ring"}


def test_a_ring_cuts_each_part_in_two() -> None:
    data = rows(max_length=126, packing=False)
    says = r"126 tokens do not divide into 4 parts.*nearest: 124 or 128"
    with pytest.raises(PlanError, match=says):
        plan_of(config(strategy=RING, data=data), TWO_H100)


def test_a_ring_in_fp32_has_chunks_that_torch_can_merge_and_is_experimental() -> None:
    """The kernel for fp32 pads its log-sum-exps to multiples of 32 tokens."""

    def plan_ring(length: int) -> Plan:
        data = rows(max_length=length, packing=False)
        asked = config(strategy=RING, data=data, precision="fp32")
        return plan_of(asked, TWO_H100, facts=FACTS)

    with pytest.raises(PlanError, match=r"4 parts of a multiple of 32 tokens.*nearest: 128"):
        plan_ring(96)

    longer = plan_ring(128)
    assert has_reason(longer, "ring attention (experimental")


def test_dp_says_why_ddp_is_better() -> None:
    two = plan(TWO_H100, strategy="dp", batch={"global_samples": 4})
    assert two.mesh.world_size == 1
    assert two.devices_per_rank == 2
    assert two.data_parallel == "dp"
    assert "on 2 × cuda" in plan_line(two)
    assert has_reason(two, "cut over 2 GPUs")
    assert has_reason(two, "strategy ddp has none of that")

    one = plan(strategy="dp")
    assert one.devices_per_rank == 1
    assert has_reason(one, "the same as single")
    assert has_reason(one, "strategy ddp has none of that")


def test_an_optimizer_on_the_host_is_said_to_be_offloaded() -> None:
    offloaded = plan(strategy="ddp", optimizer={"offload": True})
    assert "offload optimizer states" in explain(offloaded)
    assert "offload none" in explain(plan(strategy="ddp"))


def test_fsdp2_shards_over_the_ranks_of_a_sequence_too() -> None:
    sharded = plan_line(plan(world_size=2, strategy={"kind": "fsdp2", "cp": 2}))
    assert "fsdp2 × cp 2" in sharded
    assert "pretrain cp 2 on" not in sharded

    alone = plan_line(plan(world_size=2, strategy="cp"))
    assert "cp 2 on 2" in alone


def test_more_processes_than_samples() -> None:
    with pytest.raises(PlanError, match="4 data ranks but only 3 training samples"):
        plan(world_size=4, data=DataPlan(train_cache="c", train_samples=3))

    # Two tensor-parallel ranks take the same sample.
    few = DataPlan(train_cache="c", train_samples=1)
    with pytest.raises(PlanError, match="2 data ranks but only 1 training samples") as raised:
        plan(world_size=4, strategy={"kind": "ddp", "tp": 2}, data=few)
    assert raised.value.fix is not None
    assert "--nproc 2" in raised.value.fix


def test_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    resolved = plan(world_size=2, strategy={"kind": "ddp", "bucket_cap_mb": 1})
    resolved.save(path)
    assert Plan.load(path) == resolved


def test_words_hold_the_numbers() -> None:
    resolved = plan(world_size=2, batch={"global_samples": 8, "micro_batch": 2})
    assert "8 samples = 2 micro-batch × 2 accumulation × 2 data ranks" in plan_line(resolved)

    explanation = explain(resolved)
    assert "replicate 2" in explanation
    assert "100 training samples" in explanation

    for schedule, warm_up in (
        ({"warmup_ratio": 0.03}, "3%"),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, "7"),
        ({}, "0"),
    ):
        explanation = explain(plan(data=None, schedule=schedule))
        assert f"known once the data is prepared, {warm_up} of them warm-up" in explanation

    assert size(3 * 2**30) == "3.00 GiB"
    assert count(134_515_008) == "134.5M"


def course(kind: str, steps: int = 10, warmup: int = 0, **options: Any) -> list[float]:
    schedule = ScheduleConfig(kind=kind, **options)
    return [schedule.rate(step, steps, warmup) for step in range(steps)]


def test_schedules() -> None:
    assert course("constant") == [1.0] * 10
    assert course("linear") == pytest.approx([1 - step / 10 for step in range(10)])

    cosine = course("cosine")
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.5)
    assert course("cosine", min_ratio=0.2)[-1] > 0.2

    decaying = course("wsd", decay_ratio=0.2)
    assert decaying[:8] == [1.0] * 8
    assert decaying[9] == pytest.approx(0.5)

    warm = course("constant", warmup=4)
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])

    from_zero = course("constant", warmup=4, warmup_from_zero=True)
    assert from_zero[:5] == [0, 0.25, 0.5, 0.75, 1.0]

    for kind in ("linear", "cosine", "wsd", "constant"):
        for rate in course(kind, warmup=3):
            assert 0 < rate <= 1


def test_keys_of_older_plans_are_read() -> None:
    """A plan.json keeps its version where only names changed."""
    data = DataPlan(train_cache="t", eval_caches={"": "e"})
    resolved = plan().model_copy(update={"data": data})
    old = json.loads(resolved.model_dump_json())
    old["looks_ahead"] = not old.pop("bidirectional")
    old["data"]["eval_cache"] = old["data"].pop("eval_caches")[""]
    old["predicted"]["learned"] = old["predicted"].pop("trainable")

    expected = resolved.model_copy(update={"bidirectional": True})
    assert Plan.model_validate(old) == expected


@pytest.mark.parametrize(
    ("sections", "ranks", "width", "pads_products"),
    [
        ({}, 1, None, True),
        ({"compile": {"enabled": True}}, 1, 128, False),
        ({"strategy": "pp"}, 2, 128, False),
        ({"strategy": "cp"}, 2, 128, False),
        ({"precision": "fp8"}, 1, 128, False),
        ({"precision": "fp8", "memory": {"mlp_chunk": 40}}, 1, 128, True),
        ({"precision": "fp8", "packing": False}, 1, None, True),
        ({"precision": "fp8", "max_length": 120}, 1, 120, True),
    ],
)
def test_width_of_batches_and_products_in_fp8(
    sections: dict[str, Any], ranks: int, width: int | None, pads_products: bool
) -> None:
    """`torch._scaled_mm` sums over multiples of 16 tokens, so packs have their full width in fp8."""
    sections = {"compile": {"enabled": False}, **sections}
    data = rows()
    for key in ("packing", "max_length"):
        if key in sections:
            data[key] = sections.pop(key)

    planned = plan_of(config(data=data, **sections), TWO_H100, ranks)
    assert planned.fixed_width == width
    assert has_aligned_tokens(planned) is not pads_products


def stand_in_for_model(folder: Path) -> Any:
    """Return what stands for a model of a folder: its config."""
    from transformers import AutoConfig

    return SimpleNamespace(config=AutoConfig.from_pretrained(folder))


def test_patches_are_tokens_that_no_width_aligns(tmp_path: Path) -> None:
    """A batch of text has an image of zeros for a vision model, so its tokens are not all inputs."""
    planned = plan(TWO_H100, 1, precision="fp8")
    sees = stand_in_for_model(tiny_vision_dir(tmp_path / "sees"))
    reads = stand_in_for_model(tiny_model_dir(tmp_path / "reads"))
    assert has_only_token_inputs(reads, planned)
    assert not has_only_token_inputs(sees, planned)
