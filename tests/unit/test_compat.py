"""Configs of accelerate and DeepSpeed: every key becomes something, is a note, or an error that names its line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drumline.compat import readers
from drumline.compat.accelerate import DEEPSPEED, FSDP, MEGATRON, PARALLELISM, TABLE
from drumline.compat.deepspeed import ENGINE_ONLY, OPTIMIZER, ZERO
from drumline.compat.deepspeed import TABLE as JSON_TABLE
from drumline.compat.readers import recognise
from drumline.compat.signs import has_only_own_keys
from drumline.config.load import load_text, make_draft
from drumline.config.registry import DISTRIBUTIONS
from drumline.errors import ConfigError

ACC = "compute_environment: LOCAL_MACHINE\n"
OWN = "data: {train: [{kind: file, path: x.jsonl}]}\n"


def translated(text: str) -> dict[str, Any]:
    draft = make_draft(text, "old.yaml", Path())
    assert draft.is_translated
    return draft.values


def at(values: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        values = values[key]
    return values


# (old text, dotted key → what it must be)
MEANINGS: list[tuple[str, dict[str, Any]]] = [
    (
        ACC + "distributed_type: NO\nnum_processes: 1\n",
        {"strategy.kind": "single", "launch.nproc": 1},
    ),
    (
        ACC + "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n",
        {"strategy.kind": "ddp", "launch.nproc": 2},
    ),
    (
        ACC + "distributed_type: MULTI_CPU\nmain_process_port: 29501\n",
        {"run.device": "cpu", "launch.port": 29501},
    ),
    (
        ACC + "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 0\n",
        {"strategy.kind": "ddp", "launch.nproc": 4},
    ),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", {"precision.kind": "bf16"}),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: no\n", {"precision.kind": "fp32"}),
    (ACC + "distributed_type: 'NO'\nfp16: true\n", {"precision.kind": "fp16"}),
    (
        ACC
        + "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune}\n",
        {"compile.enabled": True, "compile.mode": "max-autotune"},
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: true}\n",
        {
            "strategy.kind": "fsdp2",
            "strategy.reshard_after_forward": False,
            "strategy.offload": "cpu",
        },
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 1, fsdp_forward_prefetch: true}\n",
        {"strategy.reshard_after_forward": True, "strategy.prefetch": 1},
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_offload_params: false}\n",
        {"strategy": {"kind": "ddp"}},
    ),
    (
        ACC
        + "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
        {"strategy.replicate": 2, "strategy.reshard_after_forward": True, "launch.nproc": 4},
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false,"
        " fsdp_activation_checkpointing: true}\n",
        {"strategy.reshard_after_forward": False, "memory.activation_checkpointing": "full"},
    ),
    (
        ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: 'A,B'}\n",
        {"strategy.wrap": ["A", "B"]},
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_tp_size: 2,"
        " parallelism_config_dp_replicate_size: 2, parallelism_config_cp_size: 1}\n",
        {"strategy.tp": 2, "strategy.replicate": 2, "strategy.cp": 1},
    ),
    (
        ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n",
        {"strategy": {"kind": "zero1"}},
    ),
    (
        ACC
        + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: nvme,"
        " offload_param_nvme_path: /nvme, gradient_accumulation_steps: 4, gradient_clipping: 0.5}\n",
        {
            "strategy.kind": "zero3",
            "strategy.offload_optimizer": {"kind": "cpu"},
            "batch.accumulation": 4,
            "optimizer.max_grad_norm": 0.5,
            "strategy.offload_parameters": {"kind": "nvme", "path": "/nvme"},
        },
    ),
    (
        ACC
        + "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2,"
        " megatron_lm_recompute_activations: true}\n",
        {
            "strategy": {"kind": "ddp", "tp": 2, "pp": 2},
            "memory.activation_checkpointing": "selective",
        },
    ),
    (
        '{"train_batch_size": 16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},\n'
        ' "reduce_bucket_size": 5e8}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
        {
            "batch.global_samples": 16,
            "strategy.kind": "zero2",
            "strategy.offload_optimizer": {"kind": "cpu", "pin_memory": True},
            "strategy.options": {"zero_optimization": {"reduce_bucket_size": 5e8}},
            "precision.kind": "bf16",
        },
    ),
    (
        '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}, "fp16": {"enabled": true, "initial_scale_power": 8},\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1}},\n'
        ' "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},\n'
        ' "communication_data_type": "fp32"}',
        {
            "strategy.zeropp.quantized_weights": True,
            "precision.initial_scale": 256.0,
            "optimizer.betas": [0.9, 0.95],
            "schedule.kind": "linear",
            "schedule.warmup_steps": 10,
            "run.steps": 100,
            "strategy.options.communication_data_type": "fp32",
        },
    ),
    (
        ACC + "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: AO}\n",
        {"precision.kind": "fp8"},
    ),
]


@pytest.mark.parametrize(
    ("text", "wanted"), MEANINGS, ids=[f"{i} {next(iter(w))}" for i, (_, w) in enumerate(MEANINGS)]
)
def test_old_keys_in_new_words(text: str, wanted: dict[str, Any]) -> None:
    values = translated(text)
    for dotted, value in wanted.items():
        assert at(values, dotted) == value, dotted
    load_text(text, ["data.train=[{kind: file, path: x}]"], "old.yaml")


# (old text, what its one line must say)
MISTAKES: list[tuple[str, list[str]]] = [
    (
        ACC + "distributed_type: FSPD\n",
        ["old.yaml:2: distributed_type: no 'FSPD'", "did you mean 'fsdp'?"],
    ),
    (ACC + "distributed_type: XLA\n", ["old.yaml:2", "cuda"]),
    (
        ACC + "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding: FULL_SHARD\n",
        ["old.yaml:4: fsdp_config.fsdp_sharding", "did you"],
    ),
    (
        ACC
        + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD,"
        " fsdp_reshard_after_forward: false}\n",
        ["old.yaml:3: fsdp_config.fsdp_reshard_after_forward", "keep one"],
    ),
    (
        ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n",
        ["old.yaml:3: deepspeed_config.zero_stage", "0, 1, 2, 3"],
    ),
    (
        ACC
        + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: nvme}\n",
        ["nvme without nvme_path"],
    ),
    (
        ACC + "distributed_type: MULTI_GPU\nmixed_precision: fp4\n",
        ["old.yaml:3: mixed_precision", "bf16"],
    ),
    (
        ACC + "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n",
        ["do not divide over 2 machines"],
    ),
    (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n",
        ["old.yaml:1: compute_environment"],
    ),
    (ACC + "distributed_type: 'NO'\nnum_proceses: 1\n", ["did you mean 'num_processes'?"]),
    (
        '{"zero_optimization": {"stage": 2, "reduce_bucket_siz": 1}}',
        ["zero_optimization.reduce_bucket_siz", "did you mean"],
    ),
    (
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lamb"}}',
        ["optimizer.type: no 'Lamb'"],
    ),
    (
        '{"zero_optimization": {}, "fp16": {"enabled": true, "initial_scale_power": 5000}}',
        ["fp16.initial_scale_power: 5000 given"],
    ),
]


@pytest.mark.parametrize(
    ("text", "says"), MISTAKES, ids=[f"{i} {s[0][:40]}" for i, (_, s) in enumerate(MISTAKES)]
)
def test_a_mistake_names_the_old_line(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text, [], "old.yaml")
    line = error.value.line()
    assert "\n" not in line and all(part in line for part in says), line


JUNK = ([], {}, "junk", -1, True, None, [{"a": 1}], {"enabled": "maybe", "a": [1]})
WHOLE: list[tuple[dict[str, Any], list[str], Any]] = [
    ({"distributed_type": "NO"}, [], TABLE),
    ({"distributed_type": "FSDP"}, ["fsdp_config"], FSDP),
    ({"distributed_type": "DEEPSPEED"}, ["deepspeed_config"], DEEPSPEED),
    ({"distributed_type": "MEGATRON_LM"}, ["megatron_lm_config"], MEGATRON),
    ({"zero_optimization": {"stage": 2}}, [], {**JSON_TABLE, **ENGINE_ONLY}),
    ({"train_micro_batch_size_per_gpu": 1}, ["zero_optimization"], ZERO),
    ({"zero_optimization": {"stage": 1}}, ["optimizer", "params"], OPTIMIZER),
]


@pytest.mark.parametrize(
    ("rest", "place", "table"), WHOLE, ids=lambda v: "/".join(v) if isinstance(v, list) else ""
)
@pytest.mark.slow
def test_junk_in_any_key_is_one_line_or_nothing(
    rest: dict[str, Any], place: list[str], table: dict[str, Any]
) -> None:
    refused = 0
    for key in table:
        for junk in JUNK:
            inside: Any = {key: junk}
            for section in reversed(place):
                inside = {section: inside}
            try:
                load_text(
                    json.dumps({**rest, **inside}),
                    ["data.train=[{kind: file, path: x}]"],
                    "old.yaml",
                )
            except ConfigError as error:
                refused += 1
                assert "\n" not in error.line() and "old.yaml" in error.line(), error.line()
    assert refused > len(table)


def test_whose_file_it_is() -> None:
    assert recognise({"distributed_type": "NO"}) == "accelerate"
    assert recognise({"zero_optimization": {}, "train_batch_size": 3}) == "deepspeed"
    assert recognise({"model": {"id": "x"}, "optimizer": {"lr": 1}, "batch": {}}) is None
    own_with_mistake = {"data": {"train": [{"kind": "file"}]}, "learning_rate": 3}
    assert recognise(own_with_mistake) is None


# A file of each tool that the base does not read → how its line calls it.
FOREIGN = {
    "base_model: a/b\nsequence_len: 64\n": "a config of Axolotl",
    "stage: sft\nmodel_name_or_path: a/b\n": "a config of LLaMA-Factory",
    "dataset: songs\ntemplate: chatml\n": "a config of LLaMA-Factory",
    "model_name_or_path: a/b\nlearning_rate: 1\n": "a file of training arguments",
    "training: {output_dir: x}\n": "a file of training arguments",
}


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed that reads configs of other tools."""
    monkeypatch.setattr(readers, "entry_points", lambda group: {})


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_that_another_distribution_reads(text: str, no_package: None) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text, [], "old.yaml")
    line = error.value.line()
    assert line.startswith(f"old.yaml: is {FOREIGN[text]}")
    assert line.endswith("pip install drumline-convert")


def test_launchers_files_need_no_other_distribution(no_package: None) -> None:
    assert translated(ACC + "distributed_type: FSDP\n")["strategy"]["kind"] == "fsdp2"
    assert translated('{"zero_optimization": {"stage": 3}}')["strategy"]["kind"] == "zero3"
    assert load_text(OWN + "strategy: ddp\n", []).strategy.kind == "ddp"


def test_a_title_for_each_reader_of_a_distribution() -> None:
    assert readers.TITLES.keys() == DISTRIBUTIONS["config_readers"].keys()


OWN_YAMLS = (
    "data: rows.jsonl\nmodel: gpt2\n",
    "data: {train: rows.jsonl, max_length: 64}\nstrategy: {kind: zero3, config: ds.json}\n",
    "data: rows.jsonl\nadapter: {kind: lora, r: 4}\nlaunch: {kind: ssh, hosts: [a]}\n",
)


@pytest.mark.parametrize("text", OWN_YAMLS)
def test_no_reader_is_looked_for_beside_own_keys(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_points(group: str) -> None:
        raise AssertionError(f"looked for drumline.{group}")

    monkeypatch.setattr(readers, "entry_points", entry_points)
    assert not make_draft(text, "own.yaml", Path()).is_translated


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": {"learning_rate": 1}},
        {"model": {"name": "x"}},
        {"data": {"path": "x"}},
        {"seed": 1},
    ],
)
def test_keys_that_are_not_drumline_s_own(values: dict[str, Any]) -> None:
    assert not has_only_own_keys(values)


def test_the_tables_know_every_key_of_the_launchers() -> None:
    """The installed accelerate is asked for its keys, so a new release shows what is missing."""
    config = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    known = {field.name for field in dataclasses.fields(config)}
    assert known <= TABLE.keys(), sorted(known - TABLE.keys())
    parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    flags = {action.dest for action in parser._actions}
    for prefix, table in (
        ("fsdp_", FSDP),
        ("megatron_lm_", MEGATRON),
        ("parallelism_config_", PARALLELISM),
    ):
        wanted = {flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)}
        assert wanted <= table.keys(), sorted(wanted - table.keys())
    zero = {flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_"))}
    assert zero <= DEEPSPEED.keys(), sorted(zero - DEEPSPEED.keys())
