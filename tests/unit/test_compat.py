"""Configs of accelerate, DeepSpeed and transformers: every key becomes something, is a note, or an error that names its line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drumline.compat import recognise
from drumline.compat.accelerate import DEEPSPEED, FSDP, MEGATRON, PARALLELISM, TABLE
from drumline.compat.deepspeed import ENGINE_ONLY, OPTIMIZER, ZERO
from drumline.compat.deepspeed import TABLE as JSON_TABLE
from drumline.config.load import drafted, load, load_text
from drumline.errors import ConfigError
from drumline.plan.resolve import warmup_steps
from drumline_convert.arguments import TABLE as ARGUMENTS

ACC = "compute_environment: LOCAL_MACHINE\n"
DATA = "train_file: x.jsonl\n"
OWN = "data: {train: [{kind: file, path: x.jsonl}]}\n"


def translated(text: str) -> dict[str, Any]:
    draft = drafted(text, "old.yaml", Path())
    assert draft.old
    return draft.values


def notes(text: str) -> list[str]:
    return drafted(text, "old.yaml", Path()).notes


def at(values: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        values = values[key]
    return values


# (old text, dotted key → what it must be)
MEANINGS: list[tuple[str, dict[str, Any]]] = [
    # accelerate
    (ACC + "distributed_type: NO\nnum_processes: 1\n", {"strategy.kind": "single", "launch.nproc": 1}),
    (ACC + "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n", {"strategy.kind": "ddp", "launch.nproc": 2}),
    (ACC + "distributed_type: MULTI_CPU\nmain_process_port: 29501\n", {"run.device": "cpu", "launch.port": 29501}),
    (ACC + "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 0\n", {"strategy.kind": "ddp", "launch.nproc": 4}),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", {"precision.kind": "bf16"}),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: no\n", {"precision.kind": "fp32"}),
    (ACC + "distributed_type: 'NO'\nfp16: true\n", {"precision.kind": "fp16"}),
    (ACC + "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune}\n",
     {"compile.enabled": True, "compile.mode": "max-autotune"}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: true}\n",
     {"strategy.kind": "fsdp2", "strategy.reshard_after_forward": False, "strategy.offload": "cpu"}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 1, fsdp_forward_prefetch: true}\n",
     {"strategy.reshard_after_forward": True, "strategy.prefetch": 1}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_offload_params: false}\n",
     {"strategy": {"kind": "ddp"}}),
    (ACC + "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
     {"strategy.replicate": 2, "strategy.reshard_after_forward": True, "launch.nproc": 4}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false,"
     " fsdp_activation_checkpointing: true}\n",
     {"strategy.reshard_after_forward": False, "memory.activation_checkpointing": "full"}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: 'A,B'}\n", {"strategy.wrap": ["A", "B"]}),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_tp_size: 2,"
     " parallelism_config_dp_replicate_size: 2, parallelism_config_cp_size: 1}\n",
     {"strategy.tp": 2, "strategy.replicate": 2, "strategy.cp": 1}),
    ("model: ./m\ndata: x.jsonl\nepochs: 3\nlr: 1e-4\n", {"model.id": "./m", "run.epochs": 3, "optimizer.lr": 1e-4}),
    (ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n", {"strategy": {"kind": "zero1"}}),
    (ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: nvme,"
     " offload_param_nvme_path: /nvme, gradient_accumulation_steps: 4, gradient_clipping: 0.5}\n",
     {"strategy.kind": "zero3", "strategy.offload_optimizer": {"kind": "cpu"}, "batch.accumulation": 4, "optimizer.max_grad_norm": 0.5,
      "strategy.offload_parameters": {"kind": "nvme", "path": "/nvme"}}),
    (ACC + "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2,"
     " megatron_lm_recompute_activations: true}\n",
     {"strategy": {"kind": "ddp", "tp": 2, "pp": 2}, "memory.activation_checkpointing": "selective"}),
    # DeepSpeed by itself
    ('{"train_batch_size": 16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},\n'
     ' "reduce_bucket_size": 5e8}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
     {"batch.global_samples": 16, "strategy.kind": "zero2", "strategy.offload_optimizer": {"kind": "cpu", "pin_memory": True},
      "strategy.options": {"zero_optimization": {"reduce_bucket_size": 5e8}}, "precision.kind": "bf16"}),
    ('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}, "fp16": {"enabled": true, "initial_scale_power": 8},\n'
     ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1}},\n'
     ' "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},\n'
     ' "communication_data_type": "fp32"}',
     {"strategy.zeropp.quantized_weights": True, "precision.initial_scale": 256.0, "optimizer.betas": [0.9, 0.95],
      "schedule.kind": "linear", "schedule.warmup_steps": 10, "run.steps": 100, "strategy.options.communication_data_type": "fp32"}),
    # training arguments
    (DATA + "per_device_train_batch_size: 4\nlearning_rate: '2e-5'\n", {"batch.micro_batch": 4, "optimizer.lr": 2e-5, "run.seed": 42}),
    (DATA + "learning_rate: 1e-4\nbase_learning_rate: 1e-5\nuse_linear_scaling: true\n",
     {"optimizer.lr": 1e-5, "optimizer.lr_scaling": "linear"}),
    (DATA + "learning_rate: 1e-4\nbase_learning_rate: 1e-5\nuse_linear_scaling: false\n", {"optimizer.lr": 1e-4}),
    (DATA + "base_learning_rate: 1e-5\nuse_linear_scaling: true\nnum_gpus: 4\n",
     {"optimizer.lr": 1e-5, "optimizer.lr_scaling": "sqrt", "launch.nproc": 4}),
    (DATA + "training: {distributed: true, dataloader: {batch_size: 4, num_workers: 2, pin_memory: true}}\n", {"batch.micro_batch": 4}),
    (DATA + "distributed: false\nexperiment_name: x\nbatch_size: 8\n", {"batch.micro_batch": 8}),
    (DATA + "distributed: ddp\n", {"strategy.kind": "ddp"}),
    (DATA + "warmup_steps: 0\nwarmup_ratio: 0.1\n", {"schedule": {"warmup_ratio": 0.1, "warmup_from_zero": True, "kind": "linear"}}),
    (DATA + "warmup_steps: 0.2\n", {"schedule": {"warmup_ratio": 0.2, "warmup_from_zero": True, "kind": "linear"}}),
    (DATA + "lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1e-3\nlr_scheduler_kwargs: {min_lr: 1e-4}\n",
     {"schedule.kind": "cosine", "schedule.min_ratio": 0.1}),
    (DATA + "max_grad_norm: 0\n", {"optimizer.max_grad_norm": None}),
    (DATA + "max_steps: -1\nnum_train_epochs: 2\n", {"run.epochs": 2, "run.steps": None}),
    (DATA + "max_steps: 7\n", {"run.steps": 7}),
    (DATA + "bf16: true\nfp16: false\n", {"precision.kind": "bf16"}),
    (DATA + "torch_dtype: bfloat16\n", {"precision.kind": "bf16"}),
    (DATA + "report_to: none\n", {"run.report_to": []}),
    (DATA + "report_to: [wandb, tensorboard]\n", {"run.report_to": ["wandb", "tensorboard"]}),
    ("model_name_or_path: ./m\nbeta: 0.1\ndataset_mixture:\n  datasets:\n  - {id: a/b, config: default, split: train_prefs, weight: 0.5}\n"
     "  - {id: c/d, config: en, split: train}\n  test_split_size: 100\n",
     {"algorithm": {"kind": "dpo", "beta": 0.1}, "data.holdout": 100, "data.train": [
         {"kind": "hub", "id": "a/b", "split": "train_prefs[:50%]"}, {"kind": "hub", "id": "c/d", "name": "en", "split": "train"}]}),
    ("model_name_or_path: ./m\ndataset_mixer: {a/b: 0.25, c/d: 1.0}\ndataset_splits: [train_sft, test_sft]\n",
     {"data.train": [{"kind": "hub", "id": "a/b", "split": "train_sft[:25%]"}, {"kind": "hub", "id": "c/d", "split": "train_sft"}],
      "data.eval": [{"kind": "hub", "id": "a/b", "split": "test_sft"}, {"kind": "hub", "id": "c/d", "split": "test_sft"}]}),
    ("model_name_or_path: ./m\ndatasets:\n- {path: a/b, name: c}\n- {path: d/e}\ntest_split_size: 0.1\n",
     {"data.train": [{"kind": "hub", "id": "a/b", "name": "c"}, {"kind": "hub", "id": "d/e"}], "data.holdout": 0.1}),
    (DATA + "save_strategy: steps\n", {"checkpoint.every": 500}),
    (DATA + "save_strategy: epoch\neval_strategy: epoch\n", {"checkpoint.every": "1 epoch", "eval.every": "1 epoch"}),
    (DATA + "save_steps: 0.1\neval_steps: 0.25\nnum_train_epochs: 2\n", {"checkpoint.every": "0.2 epochs", "eval.every": "0.5 epochs"}),
    (DATA + "save_steps: 0.1\nmax_steps: 25\n", {"checkpoint.every": 3}),
    (DATA + "activation_offloading: true\n", {"memory.activation_offload": True}),
    (DATA + "optim: paged_adamw_32bit\n", {"optimizer.kind": "adamw"}),
    (DATA + "gradient_checkpointing: false\nfsdp: full_shard auto_wrap\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD,"
     " fsdp_activation_checkpointing: true}\n",
     {"strategy.kind": "fsdp2", "strategy.reshard_after_forward": True, "memory.activation_checkpointing": "full"}),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: AO}\n", {"precision.kind": "fp8"}),
    (DATA + "eval_strategy: steps\neval_steps: 20\nmetric_for_best_model: eval_loss\ngreater_is_better: false\n",
     {"eval.every": 20, "eval.metric": "loss", "eval.mode": "min"}),
    (DATA + "metric_for_best_model: eval_token_accuracy\n", {"eval.metric": "token_accuracy", "eval.mode": "max"}),
    (DATA + "metric_for_best_model: eval_loss\ngreater_is_better: null\n", {"eval.metric": "loss", "eval.mode": "min"}),
    (DATA + "greater_is_better: false\nmetric_for_best_model: exact_match\n", {"eval.metric": "exact_match", "eval.mode": "min"}),
    (DATA + "fsdp: full_shard auto_wrap offload\nfsdp_config: {transformer_layer_cls_to_wrap: [A], backward_prefetch: backward_pre}\n",
     {"strategy.kind": "fsdp2", "strategy.offload": "cpu", "strategy.wrap": ["A"], "strategy.backward_prefetch": 1}),
    (DATA + "distributed_strategy: fsdp\nfsdp: {sharding_strategy: SHARD_GRAD_OP}\n", {"strategy.reshard_after_forward": False}),
    (DATA + "distributed_strategy: deepspeed_zero3\n", {"strategy": {"kind": "zero3"}}),
    (DATA + "distributed_strategy: deepspeed\ndeepspeed: {stage: 3, offload_param_device: cpu}\n",
     {"strategy": {"kind": "zero3", "offload_parameters": {"kind": "cpu"}}}),
    (DATA + "deepspeed: {zero_optimization: {stage: 1}, gradient_accumulation_steps: auto}\ngradient_accumulation_steps: 3\n",
     {"strategy.kind": "zero1", "batch.accumulation": 3}),
    (DATA + "ddp_bucket_cap_mb: 5\nddp_find_unused_parameters: true\n",
     {"strategy": {"kind": "ddp", "bucket_cap_mb": 5, "find_unused_parameters": True}}),
    (DATA + "sync_bn: true\nsync_bn_group_size: 2\n", {"model.sync_batchnorm": True, "model.sync_batchnorm_ranks": 2}),
    (DATA + "report_to: tensorboard\nuse_wandb: true\nlog_interval: 5\n", {"run.report_to": ["tensorboard", "wandb"], "run.log_every": 5}),
    (DATA + "use_wandb: true\nreport_to: none\n", {"run.report_to": ["wandb"]}),
    (DATA + "completion_only_loss: false\nassistant_only_loss: false\n", {"data.learn_on": "all"}),
    (DATA + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: '{\"min_lr_rate\": 0.1}'\n", {"schedule.min_ratio": 0.1}),
    (DATA + "max_steps: 50\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 10}\n",
     {"schedule": {"kind": "wsd", "decay_ratio": 0.2}}),
    (DATA + "fsdp: {enabled: false, sharding_strategy: FULL_SHARD}\ndeepspeed: {enabled: true, stage: 1}\n", {"strategy.kind": "zero1"}),
    ("train_file: x\ndistributed: {strategy: ddp, backend: nccl, tensor_parallel: 2}\n", {"strategy": {"kind": "ddp", "tp": 2}}),
    (DATA + "tensor_parallel_size: 2\n", {"strategy": {"kind": "ddp", "tp": 2}}),
    (DATA + "use_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.1\nlora_target_modules: q_proj,v_proj\nload_in_4bit: true\n",
     {"adapter": {"kind": "lora", "r": 8, "alpha": 16.0, "dropout": 0.1, "targets": ["q_proj", "v_proj"], "quantize": "4bit"}}),
    (DATA + "use_peft: true\nuse_dora: true\nuse_rslora: false\nlora_modules_to_save: lm_head\n",
     {"adapter": {"kind": "lora", "dora": True, "modules_to_save": ["lm_head"], "targets": ["q_proj", "v_proj"]}}),
    ("dataset_name: a/b\ndataset_config: c\ndataset_test_split: test\nmax_train_samples: 9\nnum_train_epochs: 1\n",
     {"data.train": [{"kind": "hub", "id": "a/b", "name": "c", "limit": 9}],
      "data.eval": [{"kind": "hub", "id": "a/b", "name": "c", "split": "test"}]}),
    ("model: {name: m}\ndata: {path: x.jsonl, max_length: 64}\noptimizer: {type: adamw, lr: 1e-3, betas: [0.9, 0.99]}\n"
     "scheduler: {type: cosine, warmup_steps: 5}\nlora: {r: 4}\ntraining: {num_epochs: 2}\n",
     {"model.id": "m", "data.max_length": 64, "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.99], "schedule.warmup_steps": 5,
      "adapter.r": 4, "run.epochs": 2}),
    (DATA + "loss_type: nll\n", {"optimizer.lr": 5e-5}),
    (DATA + "loss_type: robust\nbeta: 0.2\nlabel_smoothing: 0.1\n",
     {"algorithm": {"kind": "dpo", "loss": "robust", "beta": 0.2, "label_smoothing": 0.1}, "optimizer.lr": 1e-6}),
    (DATA + "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nlearning_rate: 1e-5\n",
     {"algorithm": {"kind": "dpo", "loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2}, "sft_weight": 1.0}, "optimizer.lr": 1e-5}),
    (DATA + "loss_type: simpo\nbeta: 2.5\nsimpo_gamma: 0.5\ncpo_alpha: 0.0\n", {"algorithm": {"kind": "simpo", "beta": 2.5, "gamma": 0.5}}),
    (DATA + "pref_loss: orpo\npref_beta: 0.2\n", {"algorithm": {"kind": "orpo", "beta": 0.2}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wanted"), MEANINGS, ids=[f"{i} {next(iter(w))}" for i, (_, w) in enumerate(MEANINGS)]
)
def test_old_keys_in_new_words(text: str, wanted: dict[str, Any]) -> None:
    values = translated(text)
    for dotted, value in wanted.items():
        assert at(values, dotted) == value, dotted
    load_text(text, ["data.train=[{kind: file, path: x}]"], "old.yaml")


@pytest.mark.parametrize("warmup", ["warmup_steps: 0", "warmup_steps: 4", "warmup_ratio: 0.25"])
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant_with_warmup", {}),
        ("constant", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ],
)
def test_the_rates_of_training_arguments_are_those_of_transformers(
    kind: str, kwargs: dict[str, float], warmup: str
) -> None:
    import torch
    from transformers import get_scheduler

    text = (
        DATA
        + f"learning_rate: 1e-3\nlr_scheduler_type: {kind}\nlr_scheduler_kwargs: {json.dumps(kwargs)}\nmax_steps: 12\n{warmup}\n"
    )
    config = load_text(text, ["data.train=[{kind: file, path: x}]"], "old.yaml")
    steps, schedule = config.run.steps or 0, config.schedule
    rates = [
        config.optimizer.lr * schedule.rate(step, steps, warmup_steps(schedule, steps))
        for step in range(steps)
    ]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    warm = {"warmup_steps: 0": 0, "warmup_steps: 4": 4, "warmup_ratio: 0.25": 3}[warmup]
    theirs = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=warm,
        num_training_steps=12,
        scheduler_specific_kwargs=kwargs or None,
    )
    expected = []
    for _ in range(steps):
        expected += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_resume_is_the_old_files_word_for_it(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    for said, means in (("true", "newest"), ("null", None), ("false", None), ("runs/x", "runs/x")):
        old.write_text(DATA + f"resume_from_checkpoint: {said}\n")
        assert load(old, []).resume == means


# (old text, what its one line must say)
MISTAKES: list[tuple[str, list[str]]] = [
    (DATA + "bf16: true\nfp16: true\n", ["old.yaml:3: fp16: true, but old.yaml:2: bf16 says true", "keep one"]),
    (DATA + "bf16: true\nmixed_precision: fp16\n", ["old.yaml:3: mixed_precision: 'fp16', but old.yaml:2: bf16"]),
    (DATA + "learning_rat: 1\nlearning_rate: 2\n", ["old.yaml:2: learning_rat", "did you mean 'learning_rate'?"]),
    ("training:\n  output_dir: x\n  save_step: 4\n", ["old.yaml:3: training.save_step", "did you mean 'save_steps'?"]),
    (DATA + "zzz: 1\n", ["old.yaml:2: zzz: unknown key", "drumline schema"]),
    (DATA + "learning_rate: fast\n", ["old.yaml:2: learning_rate: 'fast' given, a number is wanted"]),
    (DATA + "save_steps: 0.1\n", ["old.yaml:2: save_steps", "a number of steps"]),
    (DATA + "gradient_accumulation_steps: 0\n", ["old.yaml:2: gradient_accumulation_steps", "greater than 0"]),
    (DATA + "logging_steps: 0.1\n", ["old.yaml:2: logging_steps: 0.1 of all steps", "a number of steps"]),
    (DATA + "learning_rate: .inf\n", ["old.yaml:2: learning_rate: inf given, a number is wanted"]),
    (DATA + "lr_scheduler_kwargs: 'power 2'\n", ["old.yaml:2: lr_scheduler_kwargs: 'power 2' given, keys and values are wanted"]),
    (DATA + "optim: adadelta\n", ["old.yaml:2: optim: no 'adadelta' here", "adamw"]),
    (DATA + "lr_scheduler_type: inverse_sqrt\n", ["'inverse_sqrt' cannot be translated", "linear, cosine"]),
    (DATA + "max_length: 4\nmax_seq_length: 8\n", ["old.yaml:3: max_seq_length: 8, but old.yaml:2: max_length says 4"]),
    (DATA + "label_smoothing_factor: 0.1\n", ["old.yaml:2", "does not do that"]),
    ("model_name_or_path: ./m\ndataset_mixer: {a/b: 0.001}\n", ["a/b: 0.001 given, a split is cut to whole percents"]),
    ("model_name_or_path: ./m\ndatasets: a/b\n", ["old.yaml:2: datasets: 'a/b' given, a list of datasets is wanted"]),
    ("model_name_or_path: ./m\ndataset_mixture: {datasets: [{split: a}]}\n", ["old.yaml:2: dataset_mixture.datasets.0: names no dataset"]),
    (DATA + "report_to: neptune\n", ["no tracker 'neptune'", "wandb"]),
    (DATA + "distributed_strategy: ddp\nfsdp: full_shard\n", ["old.yaml:3: fsdp", "distributed_strategy says 'ddp'"]),
    (DATA + "distributed_strategy: zero2\ndeepspeed: {stage: 3}\n", ["distributed_strategy", "'zero2', but old.yaml:3: deepspeed.stage"]),
    (DATA + "distributed_strategy: dpp\n", ["did you mean"]),
    (DATA + "distributed_backend: mpi\n", ["no backend 'mpi'", "NCCL on GPUs"]),
    (DATA + "deepspeed: none-there.json\n", ["old.yaml:2: deepspeed: 'none-there.json' cannot be read: no such file"]),
    ("output_dir: x\n", ["old.yaml: says nothing of data", "data=rows.jsonl"]),
    (ACC + "distributed_type: FSPD\n", ["old.yaml:2: distributed_type: no 'FSPD'", "did you mean 'fsdp'?"]),
    (ACC + "distributed_type: XLA\n", ["old.yaml:2", "cuda"]),
    (ACC + "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding: FULL_SHARD\n", ["old.yaml:4: fsdp_config.fsdp_sharding", "did you"]),
    (ACC + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD,"
     " fsdp_reshard_after_forward: false}\n",
     ["old.yaml:3: fsdp_config.fsdp_reshard_after_forward", "keep one"]),
    (ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n", ["old.yaml:3: deepspeed_config.zero_stage", "0, 1, 2, 3"]),
    (ACC + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: nvme}\n", ["nvme without nvme_path"]),
    (ACC + "distributed_type: MULTI_GPU\nmixed_precision: fp4\n", ["old.yaml:3: mixed_precision", "bf16"]),
    (ACC + "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n", ["do not divide over 2 machines"]),
    ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n", ["old.yaml:1: compute_environment"]),
    (ACC + "distributed_type: 'NO'\nnum_proceses: 1\n", ["did you mean 'num_processes'?"]),
    ('{"zero_optimization": {"stage": 2, "reduce_bucket_siz": 1}}', ["zero_optimization.reduce_bucket_siz", "did you mean"]),
    ('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lamb"}}', ["optimizer.type: no 'Lamb'"]),
    ('{"zero_optimization": {}, "fp16": {"enabled": true, "initial_scale_power": 5000}}', ["fp16.initial_scale_power: 5000 given"]),
    (DATA + "loss_type: ''\n", ["old.yaml:2: loss_type: no loss ''"]),
    (DATA + "loss_type: [sigmoid, ipo]\nloss_weights: [a, 1]\n", ["old.yaml:3: loss_weights: 'a' given, a number is wanted"]),
    (DATA + "learning_rate: 0\nlr_scheduler_kwargs: {min_lr: 1e-6}\n", ["old.yaml:2: learning_rate", "greater than 0"]),
    (DATA + "deepspeed: {stage: 2, zero_stage: 3}\n", ["deepspeed.zero_stage: 3, but old.yaml:2: deepspeed.stage says 2", "keep one"]),
]  # fmt: skip


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
    ({"train_file": "x"}, [], ARGUMENTS),
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


def test_every_key_without_a_meaning_gets_a_line() -> None:
    text = (
        DATA
        + "dataloader_num_workers: 4\nlocal_rank: 0\nhub_token: hf_sEcReT12345\npush_to_hub: true\nlogging_dir: x\n"
    )
    told = notes(text)
    for line, key in enumerate(
        ("dataloader_num_workers", "local_rank", "hub_token", "push_to_hub", "logging_dir"), start=2
    ):
        assert any(note.startswith(f"old.yaml:{line}: {key}: ") for note in told), key
    assert "hf_sEcReT12345" not in " ".join(told)


def test_what_the_trainer_would_have_taken_is_said() -> None:
    (told,) = notes(DATA + "learning_rate: 1e-5\n")
    assert (
        "schedule.kind 'linear'" in told and "run.epochs 3.0" in told and "optimizer.lr" not in told
    )


def test_whose_file_it_is() -> None:
    assert recognise({"distributed_type": "NO"}) == "accelerate"
    assert recognise({"zero_optimization": {}, "train_batch_size": 3}) == "deepspeed"
    assert (
        recognise({"training": {"output_dir": "x"}})
        == recognise({"learning_rate": 1})
        == "training"
    )
    assert recognise({"model": {"id": "x"}, "optimizer": {"lr": 1}, "batch": {}}) is None
    assert recognise({"data": {"train": [{"kind": "file"}]}, "learning_rate": 3}) is None, (
        "Drumline's own, with a mistake"
    )
    assert recognise({"model": "x", "data": {"path": "y"}, "run": {"steps": 2}}) is None, (
        "Drumline's own, with a mistake"
    )
    assert recognise({"optimizer": {"learning_rate": 3}}) == "training"


def test_the_tables_know_every_key_of_the_other_tools() -> None:
    """The installed accelerate, transformers and TRL are asked for their keys, so a new release shows what is missing."""
    transformers = pytest.importorskip("transformers")
    arguments = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert arguments <= ARGUMENTS.keys() | TABLE.keys(), sorted(
        arguments - ARGUMENTS.keys() - TABLE.keys()
    )
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
