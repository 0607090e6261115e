"""The strategy of a launcher, laid over a config: accelerate's and DeepSpeed's files, and launchers' variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.compat.overlay import from_environment, from_file
from drumline.compat.sheet import Sheet
from drumline.config.load import load
from drumline.errors import ConfigError
from tests.unit.test_compat import ACC, OWN


def laid(text: str, over: Sheet | None, tmp_path: Path) -> Any:
    (tmp_path / "c.yaml").write_text(text)
    return load(tmp_path / "c.yaml", [], over).config


def test_an_accelerate_file_is_laid_over_a_config(tmp_path: Path) -> None:
    acc = tmp_path / "acc.yaml"
    acc.write_text(
        ACC
        + "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
    )
    config = laid(OWN + "run: {steps: 3}\n", from_file(acc), tmp_path)
    assert (config.strategy.kind, config.strategy.reshard_after_forward) == ("fsdp2", False)
    assert (config.precision.kind, config.launch.nproc, config.run.steps) == ("bf16", 2, 3)
    assert laid(
        OWN + "strategy: {kind: fsdp2, reshard_after_forward: true}\n", from_file(acc), tmp_path
    ).strategy.reshard_after_forward
    with pytest.raises(
        ConfigError,
        match=r"c.yaml:2: strategy.kind: 'ddp', but .*acc.yaml:5: fsdp_config.fsdp_sharding_strategy",
    ):
        laid(OWN + "strategy: ddp\n", from_file(acc), tmp_path)
    with pytest.raises(
        ConfigError, match=r"c.yaml:2: precision.*'fp16', but .*acc.yaml:4: mixed_precision"
    ):
        laid(OWN + "precision: fp16\n", from_file(acc), tmp_path)
    with pytest.raises(ConfigError, match="neither an accelerate config"):
        (tmp_path / "own.yaml").write_text(OWN)
        from_file(tmp_path / "own.yaml")


def test_a_deepspeed_json_is_laid_over_a_config(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(
        '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "bf16": {"enabled": "auto"}}'
    )
    config = laid(OWN, from_file(ds), tmp_path)
    assert (
        config.strategy.kind,
        config.strategy.config["zero_optimization"],
        config.batch.accumulation,
    ) == ("zero2", {"stage": 2}, 2)


def test_a_section_that_is_its_kind_alone_gets_the_keys_of_an_overlay(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.002}}}'
    )
    config = laid(OWN + "optimizer: adamw\n", from_file(ds), tmp_path)
    assert (config.optimizer.kind, config.optimizer.lr) == ("adamw", 0.002)


def test_an_empty_deepspeed_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    acc = tmp_path / "acc.yaml"
    acc.write_text(
        ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    with pytest.raises(
        ConfigError, match=r"acc.yaml:3: .*deepspeed_config_file: .*ds.json' is empty"
    ):
        from_file(acc)


LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
}
FSDP_LAUNCHED = {
    **LAUNCHED, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_FORWARD_PREFETCH": "false",
}  # fmt: skip


def test_accelerate_launch_chooses_the_strategy(tmp_path: Path) -> None:
    assert from_environment({}) is None
    assert laid(OWN, from_environment(LAUNCHED), tmp_path).strategy.kind == "auto"
    assert (
        laid(OWN + "strategy: fsdp2\n", from_environment(LAUNCHED), tmp_path).strategy.kind
        == "fsdp2"
    )
    assert laid(OWN, from_environment(FSDP_LAUNCHED), tmp_path).strategy.reshard_after_forward
    grad_op = from_environment({**FSDP_LAUNCHED, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"})
    assert not laid(OWN, grad_op, tmp_path).strategy.reshard_after_forward
    second = from_environment(
        {**FSDP_LAUNCHED, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    )
    assert not laid(OWN, second, tmp_path).strategy.reshard_after_forward
    zero = {
        **LAUNCHED,
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }
    config = laid(OWN, from_environment(zero), tmp_path)
    assert (config.strategy.kind, config.optimizer.max_grad_norm) == ("zero3", 0.5)
    with pytest.raises(
        ConfigError,
        match=r"c.yaml:2: strategy.*'ddp', but accelerate launch: FSDP_SHARDING_STRATEGY makes it 'fsdp2'",
    ):
        laid(OWN + "strategy: ddp\n", from_environment(FSDP_LAUNCHED), tmp_path)


def test_a_precision_of_the_config_knows_better_than_accelerates_default(tmp_path: Path) -> None:
    assert laid(OWN, from_environment(LAUNCHED), tmp_path).precision.kind == "fp32"
    assert (
        laid(OWN + "precision: bf16\n", from_environment(LAUNCHED), tmp_path).precision.kind
        == "bf16"
    )
    with pytest.raises(
        ConfigError, match="'fp16', but accelerate launch: ACCELERATE_MIXED_PRECISION"
    ):
        laid(
            OWN + "precision: fp16\n",
            from_environment({**LAUNCHED, "ACCELERATE_MIXED_PRECISION": "bf16"}),
            tmp_path,
        )
