"""The DeepSpeed config of a plan: what the user wrote, filled in; every contradiction with the YAML refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.config.config import Config
from drumline.config.load import load
from drumline.config.strategies.zero import Zero3Strategy
from drumline.errors import ConfigError, PlanError
from drumline.hardware.detect import Machine
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve

FACTS = ModelFacts(
    name="llama",
    parameters=1000,
    flops_per_token=6000.0,
    vocab_size=320,
    max_positions=512,
    layers=2,
    hidden=32,
)


def plan(strategy: dict[str, Any], **sections: Any) -> Plan:
    sections = {"batch": {"global_samples": 8, "micro_batch": 2}} | sections
    config = Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x"}]}, "strategy": strategy, **sections}
    )
    machine = Machine(device="cpu", devices=[], cores=2, memory_bytes=2**30, bf16=False)
    return resolve(
        config,
        run_dir="runs/x",
        machine=machine,
        world_size=2,
        model=KnownModel(FACTS),
        data=None,
    )


def made(strategy: dict[str, Any], **sections: Any) -> dict[str, Any]:
    config = plan(strategy, **sections).deepspeed
    assert config is not None
    return config


def test_the_plans_numbers() -> None:
    config = made(
        {"kind": "zero3", "offload_optimizer": "cpu", "offload_parameters": "cpu"}, precision="bf16"
    )
    assert (
        config["train_batch_size"],
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    ) == (8, 2, 2)
    assert (
        config["gradient_clipping"] == 1.0
        and config["bf16"]["enabled"]
        and not config["fp16"]["enabled"]
    )
    assert config["communication_data_type"] == "fp32"
    zero = config["zero_optimization"]
    assert (
        zero["stage"] == 3
        and zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    )
    assert zero["reduce_bucket_size"] == 1000, "no larger than all gradients"


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_auto_is_filled_in_and_the_rest_is_kept() -> None:
    config = made({"kind": "zero3", "config": AUTO})
    zero = config["zero_optimization"]
    assert (
        zero["reduce_bucket_size"],
        zero["stage3_prefetch_bucket_size"],
        zero["stage3_param_persistence_threshold"],
    ) == (1024, 921, 320)
    assert zero["overlap_comm"] is True and config["train_batch_size"] == 8
    assert (
        "optimizer" not in config and "scheduler" not in config and "auto" not in json.dumps(config)
    )


def test_what_only_the_file_says_is_adopted() -> None:
    own = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "zero_hpz_partition_size": 2,
        },
    }
    adopted = plan({"kind": "zero3", "config": own}, batch={})
    assert (adopted.batch.global_samples, adopted.precision, adopted.offload) == (24, "bf16", "cpu")
    strategy = adopted.config.strategy
    assert isinstance(strategy, Zero3Strategy)
    assert strategy.zeropp.hierarchical_partition == 2
    assert strategy.offload_optimizer.pin_memory, "DeepSpeed's default"
    again = Plan.model_validate(json.loads(adopted.model_dump_json()))
    assert again.deepspeed == adopted.deepspeed


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            {"train_batch_size": 16},
            "train_batch_size is 16 in the DeepSpeed config, but the YAML says 8",
        ),
        (
            {"train_micro_batch_size_per_gpu": 1},
            "train_micro_batch_size_per_gpu is 1 .* YAML says 2",
        ),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1 .* YAML says 2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5 .* YAML says 1.0"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true .* YAML says false"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3 .* YAML says 2"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb" .* YAML says "AdamW"'),
        (
            {"optimizer": {"params": {"lr": 1e-3}}},
            "optimizer.params.lr is 0.001 .* YAML says 2e-05",
        ),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "optimizer.params.betas is"),
        (
            {"optimizer": {"params": {"amsgrad": True}}},
            "optimizer.params.amsgrad has no place here",
        ),
        ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type is "OneCycle" .* "WarmupCosineLR"'),
        ({"scheduler": {"params": {"warmup_max_lr": 1}}}, "scheduler.params.warmup_max_lr is 1"),
        ({"amp": {"enabled": True}}, "amp.enabled true does not go with"),
        ({"fp16": {"loss_scale": 128}}, "fp16.loss_scale 128 does not go with"),
        (
            {"bf16": {"check_grad_overflow": False}},
            "bf16.check_grad_overflow false does not go with",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "offload_param.device is for stage 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            "NVMe",
        ),
        (
            {"zero_optimization": {"allgather_bucket_size": "auto"}},
            "the plan has no value for auto",
        ),
        ({"fp16": True}, "fp16 is true in the DeepSpeed config, and not a section"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_contradictions_are_refused_by_name(own: dict[str, Any], said: str) -> None:
    for strategy in ({"kind": "zero2", "config": own}, {"kind": "zero2", "options": own}):
        with pytest.raises(PlanError, match=said):
            made(strategy, precision="fp32")


def test_the_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"overlap_comm": true}}')
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        "data: {train: [{kind: file, path: x}]}\nstrategy: {kind: zero2, config: ds.json}\n"
    )
    assert load(yaml, []).config.strategy.config == {"zero_optimization": {"overlap_comm": True}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("[1]", "no keys and values"),
        ('{"a":\n1,}', r"ds\.json:2: not JSON"),
        ('{"a": 1, "a": 2}', "'a' twice"),
    ],
    ids=["missing", "a list", "a comma", "twice"],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        "data: {train: [{kind: file, path: x}]}\nstrategy: {kind: zero2, config: ds.json}\n"
    )
    with pytest.raises(ConfigError, match=said):
        load(yaml, [])


@pytest.mark.parametrize(
    ("strategy", "sections", "said"),
    [
        ({"kind": "zero3"}, {"compile": {"enabled": True}}, "zero3 × compile"),
        (
            {"kind": "zero3", "zeropp": {"quantized_weights": True}},
            {},
            "ZeRO\\+\\+ quantisation × CPU",
        ),
        ({"kind": "zero3", "zeropp": {"hierarchical_partition": 3}}, {}, "hierarchical_partition"),
        ({"kind": "zero1", "offload_optimizer": {"kind": "nvme", "path": "/n"}}, {}, "NVMe"),
    ],
    ids=["compile", "quantised", "hpz", "nvme"],
)
def test_rules(strategy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(strategy, **sections)
