"""The batch arithmetic, the schedule and what the planner refuses."""

from __future__ import annotations

import json
import math
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
from drumline.plan.plan import DataPlan, Plan
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


def config(**sections: object) -> Config:
    return Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 128}, **sections}
    )


def plan(
    machine: Machine = CPU,
    world_size: int | None = None,
    data: DataPlan | None = DATA,
    **sections: object,
) -> Plan:
    return resolve(
        config(**sections),
        run_dir="r",
        machine=machine,
        world_size=world_size,
        model=KnownModel(path="m"),
        data=data,
    )


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
    assert (resolved.global_samples, resolved.micro_batch, resolved.accumulation) == expected
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
    resolved = resolve_batch(
        config(batch=batch, algorithm={"kind": "grpo", "group_size": 8, "rewards": rewards}),
        data_ranks,
        in_flight,
    )
    assert (resolved.global_samples, resolved.micro_batch, resolved.accumulation) == expected


@pytest.mark.parametrize(
    ("batch", "data_ranks", "says"),
    [
        (
            {"global_samples": 10, "micro_batch": 4},
            2,
            ["10 samples", "4 × 2 data ranks", "8 or 16"],
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
    assert all(part in error.value.line() for part in says), error.value.line()


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
    assert any("scaling" in line for line in resolved.why) == ("lr_scaling" in optimizer)


def test_steps_cover_every_sample_of_the_epochs() -> None:
    assert plan(batch={"global_samples": 16}).steps == math.ceil(100 / 16)
    assert plan(batch={"global_samples": 16}, run={"epochs": 2.5}).steps == math.ceil(250 / 16)
    assert plan(batch={"global_samples": 16}, run={"steps": 3}).steps == 3
    assert plan(data=None).steps is None


def test_every_in_epochs_becomes_steps() -> None:
    found = plan(
        batch={"global_samples": 16}, checkpoint={"every": "2 epochs"}, eval={"every": "0.5 epochs"}
    )
    assert (found.config.checkpoint.steps, found.config.eval.steps) == (
        round(200 / 16),
        round(50 / 16),
    )
    assert "eval.every 0.5 epochs: 3 steps" in found.why
    assert plan(data=None, eval={"every": "0.5 epochs"}).config.eval.every == "0.5 epochs", (
        "the data is not prepared yet"
    )
    for text in ("0 epochs", "epoch", "one epoch", "1 step", "1e99 epochs"):
        with pytest.raises(
            ValueError, match=f"'{text}' given, a number of steps or of epochs is wanted"
        ):
            plan(eval={"every": text})


def test_auto_picks_and_says_why() -> None:
    one, two = plan(), plan(TWO_H100)
    assert (one.mesh.world_size, one.precision, one.backend) == (1, "fp32", "gloo")
    assert (two.mesh.replicate, two.precision, two.backend, two.device) == (
        2,
        "bf16",
        "nccl",
        "cuda",
    )
    assert two.predicted.peak_flops_per_device and two.predicted.peak_flops_per_device > 5e14
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
    assert all(part in error.value.line() for part in says), error.value.line()


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
    facts = ModelFacts(
        "m",
        10**6,
        1.0,
        320,
        512,
        4,
        8 * heads,
        heads=heads,
        kv_heads=1,
        tp_styles=frozenset({"colwise"}),
    )
    asked = config(strategy=strategy, batch={"global_samples": 16})
    told = {
        "run_dir": "r",
        "machine": CPU,
        "world_size": world_size,
        "model": KnownModel(facts, "m"),
        "data": DATA,
    }
    if says is None:
        assert resolve(asked, **told).mesh.cp == 2
        return
    with pytest.raises(PlanError) as error:
        resolve(asked, **told)
    assert all(part in error.value.line() for part in says), error.value.line()


def test_a_ring_cuts_each_part_in_two() -> None:
    rows = {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 126, "packing": False}
    asked = config(strategy={"kind": "cp", "method": "ring"}, data=rows)
    with pytest.raises(
        PlanError, match=r"126 tokens do not divide into 4 parts.*nearest: 124 or 128"
    ):
        resolve(
            asked,
            run_dir="r",
            machine=TWO_H100,
            world_size=None,
            model=KnownModel(path="m"),
            data=DATA,
        )


def test_a_ring_in_fp32_has_chunks_that_torch_can_merge_and_is_experimental() -> None:
    """The kernel for fp32 pads its log-sum-exps to multiples of 32 tokens."""
    rows = {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 96, "packing": False}
    asked = config(strategy={"kind": "cp", "method": "ring"}, data=rows, precision="fp32")
    facts = ModelFacts("m", 10**6, 1.0, 320, 512, 4, 64, heads=8, kv_heads=8)
    told = {
        "run_dir": "r",
        "machine": TWO_H100,
        "world_size": None,
        "model": KnownModel(facts, "m"),
        "data": DATA,
    }
    with pytest.raises(PlanError, match=r"4 parts of a multiple of 32 tokens.*nearest: 128"):
        resolve(asked, **told)
    longer = config(
        strategy={"kind": "cp", "method": "ring"},
        data={**rows, "max_length": 128},
        precision="fp32",
    )
    assert any("ring attention (experimental" in line for line in resolve(longer, **told).why)


def test_dp_says_why_ddp_is_better() -> None:
    two, one = plan(TWO_H100, strategy="dp", batch={"global_samples": 4}), plan(strategy="dp")
    assert (two.mesh.world_size, two.devices_per_rank, two.data_parallel) == (1, 2, "dp")
    assert "on 2 × cuda" in plan_line(two) and any("cut over 2 GPUs" in line for line in two.why)
    assert one.devices_per_rank == 1 and any("the same as single" in line for line in one.why)
    assert all(any("strategy ddp has none of that" in line for line in p.why) for p in (one, two))


def test_fsdp2_shards_over_the_ranks_of_a_sequence_too() -> None:
    resolved = plan(world_size=2, strategy={"kind": "fsdp2", "cp": 2})
    assert "fsdp2 × cp 2" in plan_line(resolved) and "pretrain cp 2 on" not in plan_line(resolved)
    assert "cp 2 on 2" in plan_line(plan(world_size=2, strategy="cp"))


def test_more_processes_than_samples() -> None:
    with pytest.raises(PlanError, match="4 data ranks but only 3 training samples"):
        plan(world_size=4, data=DataPlan(train_cache="c", train_samples=3))


def test_plan_survives_its_file(tmp_path: Path) -> None:
    resolved = plan(world_size=2, strategy={"kind": "ddp", "bucket_cap_mb": 1})
    resolved.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == resolved


def test_words_hold_the_numbers() -> None:
    resolved = plan(world_size=2, batch={"global_samples": 8, "micro_batch": 2})
    assert "8 samples = 2 micro-batch × 2 accumulation × 2 data ranks" in plan_line(resolved)
    for schedule, warm_up in (
        ({"warmup_ratio": 0.03}, "3%"),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, "7"),
        ({}, "0"),
    ):
        assert f"known once the data is prepared, {warm_up} of them warm-up" in explain(
            plan(data=None, schedule=schedule)
        )
    assert "replicate 2" in explain(resolved) and "100 training samples" in explain(resolved)
    assert (size(3 * 2**30), count(134_515_008)) == ("3.00 GiB", "134.5M")


def course(kind: str, steps: int = 10, warmup: int = 0, **options: Any) -> list[float]:
    schedule = ScheduleConfig(kind=kind, **options)
    return [schedule.rate(s, steps, warmup) for s in range(steps)]


def test_schedules() -> None:
    assert course("constant") == [1.0] * 10
    assert course("linear") == pytest.approx([1 - s / 10 for s in range(10)])
    assert course("cosine")[5] == pytest.approx(0.5) and course("cosine")[0] == 1.0
    assert course("cosine", min_ratio=0.2)[-1] > 0.2
    assert course("wsd", decay_ratio=0.2)[:8] == [1.0] * 8 and course("wsd", decay_ratio=0.2)[
        9
    ] == pytest.approx(0.5)
    warm = course("constant", warmup=4)
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(
        0 < rate <= 1
        for kind in ("linear", "cosine", "wsd", "constant")
        for rate in course(kind, warmup=3)
    )
    assert course("constant", warmup=4, warmup_from_zero=True)[:5] == [0, 0.25, 0.5, 0.75, 1.0]


def test_keys_of_older_plans_are_read() -> None:
    """A plan.json keeps its version where only names changed."""
    resolved = plan().model_copy(update={"data": DataPlan(train_cache="t", eval_caches={"": "e"})})
    old = json.loads(resolved.model_dump_json())
    old["looks_ahead"] = not old.pop("bidirectional")
    old["data"]["eval_cache"] = old["data"].pop("eval_caches")[""]
    old["predicted"]["learned"] = old["predicted"].pop("trainable")
    assert Plan.model_validate(old) == resolved.model_copy(update={"bidirectional": True})


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
    sections = dict(sections)
    data = {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 128}
    for key in ("packing", "max_length"):
        if key in sections:
            data[key] = sections.pop(key)
    sections.setdefault("compile", {"enabled": False})
    planned = resolve(
        config(data=data, **sections),
        run_dir="r",
        machine=TWO_H100,
        world_size=ranks,
        model=KnownModel(path="m"),
        data=DATA,
    )
    assert planned.fixed_width == width
    assert has_aligned_tokens(planned) is not pads_products


def test_patches_are_tokens_that_no_width_aligns(tmp_path: Path) -> None:
    """A batch without images has one of zeros, so the rows of a model that sees images never count."""
    from transformers import AutoConfig

    planned = plan(TWO_H100, 1, precision="fp8")
    sees = SimpleNamespace(config=AutoConfig.from_pretrained(tiny_vision_dir(tmp_path / "sees")))
    reads = SimpleNamespace(config=AutoConfig.from_pretrained(tiny_model_dir(tmp_path / "reads")))
    assert has_only_token_inputs(reads, planned)
    assert not has_only_token_inputs(sees, planned)
