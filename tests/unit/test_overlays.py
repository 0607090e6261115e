"""Configs of other tools printed as ours, and laid over ours: files, launchers' variables, names that guides give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.compat.overlay import from_environment, from_file
from drumline.compat.sheet import Sheet
from drumline.config.load import drafted, load
from drumline.errors import ConfigError
from drumline_convert.convert import convert
from tests.unit.test_compat import ACC, DATA, OWN, notes


def test_convert_prints_what_loads(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    old = tmp_path / "old.yaml"
    old.write_text(DATA + "learning_rate: 1e-4\nbf16: true\ndistributed_strategy: fsdp\n")
    made, _ = convert(old)
    new = tmp_path / "new.yaml"
    new.write_text(made)
    assert load(new, []).config == load(old, []).config
    assert "strategy: fsdp2\n" in made and "precision: bf16\n" in made
    elsewhere, _ = convert(old, tmp_path / "sub" / "new.yaml")
    assert str(tmp_path / "x.jsonl") in elsewhere, "a path that still finds the rows"


def test_convert_leaves_a_place_for_data(tmp_path: Path) -> None:
    old = tmp_path / "acc.yaml"
    old.write_text(ACC + "distributed_type: MULTI_GPU\n")
    made, messages = convert(old)
    assert "# data:" in made and any("data" in note for note in messages)
    with pytest.raises(ConfigError, match="no config of accelerate"):
        (tmp_path / "own.yaml").write_text(OWN)
        convert(tmp_path / "own.yaml")


def test_a_tabbed_json_and_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}, indent="\t"
        )
    )
    old = tmp_path / "old.yaml"
    old.write_text(DATA + "deepspeed: ds.json\n")
    config = load(old, []).config
    assert (config.strategy.kind, config.batch.micro_batch) == ("zero3", 2)
    given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    assert config.strategy.model_dump()["config"] == given
    old.write_text(DATA + "deepspeed: ds.json\nper_device_train_batch_size: 4\n")
    with pytest.raises(
        ConfigError,
        match=r"train_micro_batch_size_per_gpu: 2, but .*old.yaml:3: per_device_train_batch_size says 4|4, but",
    ):
        load(old, [])


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


@pytest.mark.parametrize("said", ["latest", "out/checkpoint-latest", "out/checkpoint-last/", True])
def test_the_newest_checkpoint_by_a_guides_names(said: Any) -> None:
    assert (
        drafted(DATA + f"resume_from_checkpoint: {said}\n", "old.yaml", Path()).resume == "newest"
    )
    assert (
        drafted(DATA + "resume_from_checkpoint: out/checkpoint-500\n", "old.yaml", Path()).resume
        == "out/checkpoint-500"
    )


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("batch_size: 8\n", "old.yaml:2: batch_size: 8: taken for the samples of one device"),
        (
            "training: {distributed: true}\n",
            "old.yaml:2: training.distributed: true: the launcher sets it",
        ),
        (
            "experiment_name: x\n",
            "old.yaml:2: experiment_name: 'x': the run folder is named by run.dir",
        ),
        (
            "base_learning_rate: 1e-5\nuse_linear_scaling: true\nnum_gpus: 4\n",
            "it is base_learning_rate × √num_gpus, as in guides",
        ),
        (
            "warmup_ratio: 0.1\ndeepspeed: {zero_optimization: {stage: 1}, scheduler: {type: WarmupLR, params: {warmup_num_steps: 7}}}\n",
            "old.yaml:2: warmup_ratio: 0.1: without effect: old.yaml:3: deepspeed.scheduler.params.warmup_num_steps says 7",
        ),
    ],
)
def test_what_a_guides_key_became_is_said(text: str, note: str) -> None:
    assert any(note in line for line in notes(DATA + text)), notes(DATA + text)
