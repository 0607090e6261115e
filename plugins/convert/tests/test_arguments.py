"""Training arguments, as transformers and guides have them: every key becomes something, is a note, or an error that names its line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drumline.compat.accelerate import TABLE as ACCELERATE
from drumline.compat.readers import recognise
from drumline.config.load import load, load_text, make_draft
from drumline.config.resume import Resume
from drumline.errors import ConfigError
from drumline.plan.resolve import warmup_steps
from drumline_convert.arguments import TABLE
from drumline_convert.convert import convert
from tests.unit.test_compat import ACC, JUNK, OWN, at, translated

DATA = "train_file: x.jsonl\n"


def notes(text: str) -> list[str]:
    return make_draft(text, "old.yaml", Path()).notes


# (old text, dotted key → what it must be)
MEANINGS: list[tuple[str, dict[str, Any]]] = [
    (
        "model: ./m\ndata: x.jsonl\nepochs: 3\nlr: 1e-4\n",
        {"model.id": "./m", "run.epochs": 3, "optimizer.lr": 1e-4},
    ),
    (
        DATA + "per_device_train_batch_size: 4\nlearning_rate: '2e-5'\n",
        {"batch.micro_batch": 4, "optimizer.lr": 2e-5, "run.seed": 42},
    ),
    (
        DATA + "learning_rate: 1e-4\nbase_learning_rate: 1e-5\nuse_linear_scaling: true\n",
        {"optimizer.lr": 1e-5, "optimizer.lr_scaling": "linear"},
    ),
    (
        DATA + "learning_rate: 1e-4\nbase_learning_rate: 1e-5\nuse_linear_scaling: false\n",
        {"optimizer.lr": 1e-4},
    ),
    (
        DATA + "base_learning_rate: 1e-5\nuse_linear_scaling: true\nnum_gpus: 4\n",
        {"optimizer.lr": 1e-5, "optimizer.lr_scaling": "sqrt", "launch.nproc": 4},
    ),
    (
        DATA
        + "training: {distributed: true, dataloader: {batch_size: 4, num_workers: 2, pin_memory: true}}\n",
        {"batch.micro_batch": 4},
    ),
    (DATA + "distributed: false\nexperiment_name: x\nbatch_size: 8\n", {"batch.micro_batch": 8}),
    (DATA + "distributed: ddp\n", {"strategy.kind": "ddp"}),
    (
        DATA + "warmup_steps: 0\nwarmup_ratio: 0.1\n",
        {"schedule": {"warmup_ratio": 0.1, "warmup_from_zero": True, "kind": "linear"}},
    ),
    (
        DATA + "warmup_steps: 0.2\n",
        {"schedule": {"warmup_ratio": 0.2, "warmup_from_zero": True, "kind": "linear"}},
    ),
    (
        DATA
        + "lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1e-3\nlr_scheduler_kwargs: {min_lr: 1e-4}\n",
        {"schedule.kind": "cosine", "schedule.min_ratio": 0.1},
    ),
    (DATA + "max_grad_norm: 0\n", {"optimizer.max_grad_norm": None}),
    (DATA + "max_steps: -1\nnum_train_epochs: 2\n", {"run.epochs": 2, "run.steps": None}),
    (DATA + "max_steps: 7\n", {"run.steps": 7}),
    (DATA + "bf16: true\nfp16: false\n", {"precision.kind": "bf16"}),
    (DATA + "torch_dtype: bfloat16\n", {"precision.kind": "bf16"}),
    (DATA + "report_to: none\n", {"run.report_to": []}),
    (DATA + "report_to: [wandb, tensorboard]\n", {"run.report_to": ["wandb", "tensorboard"]}),
    (
        "model_name_or_path: ./m\nbeta: 0.1\ndataset_mixture:\n  datasets:\n"
        "  - {id: a/b, config: default, split: train_prefs, weight: 0.5}\n"
        "  - {id: c/d, config: en, split: train}\n  test_split_size: 100\n",
        {
            "algorithm": {"kind": "dpo", "beta": 0.1},
            "data.holdout": 100,
            "data.train": [
                {"kind": "hub", "id": "a/b", "split": "train_prefs[:50%]"},
                {"kind": "hub", "id": "c/d", "name": "en", "split": "train"},
            ],
        },
    ),
    (
        "model_name_or_path: ./m\ndataset_mixer: {a/b: 0.25, c/d: 1.0}\ndataset_splits: [train_sft, test_sft]\n",
        {
            "data.train": [
                {"kind": "hub", "id": "a/b", "split": "train_sft[:25%]"},
                {"kind": "hub", "id": "c/d", "split": "train_sft"},
            ],
            "data.eval": [
                {"kind": "hub", "id": "a/b", "split": "test_sft"},
                {"kind": "hub", "id": "c/d", "split": "test_sft"},
            ],
        },
    ),
    (
        "model_name_or_path: ./m\ndatasets:\n- {path: a/b, name: c}\n- {path: d/e}\ntest_split_size: 0.1\n",
        {
            "data.train": [{"kind": "hub", "id": "a/b", "name": "c"}, {"kind": "hub", "id": "d/e"}],
            "data.holdout": 0.1,
        },
    ),
    (DATA + "save_strategy: steps\n", {"checkpoint.every": 500}),
    (
        DATA + "save_strategy: epoch\neval_strategy: epoch\n",
        {"checkpoint.every": "1 epoch", "eval.every": "1 epoch"},
    ),
    (
        DATA + "save_steps: 0.1\neval_steps: 0.25\nnum_train_epochs: 2\n",
        {"checkpoint.every": "0.2 epochs", "eval.every": "0.5 epochs"},
    ),
    (DATA + "save_steps: 0.1\nmax_steps: 25\n", {"checkpoint.every": 3}),
    (DATA + "activation_offloading: true\n", {"memory.activation_offload": True}),
    (DATA + "optim: paged_adamw_32bit\n", {"optimizer.kind": "adamw"}),
    (
        DATA
        + "gradient_checkpointing: false\nfsdp: full_shard auto_wrap\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD,"
        " fsdp_activation_checkpointing: true}\n",
        {
            "strategy.kind": "fsdp2",
            "strategy.reshard_after_forward": True,
            "memory.activation_checkpointing": "full",
        },
    ),
    (
        DATA
        + "eval_strategy: steps\neval_steps: 20\nmetric_for_best_model: eval_loss\ngreater_is_better: false\n",
        {"eval.every": 20, "eval.metric": "loss", "eval.mode": "min"},
    ),
    (
        DATA + "metric_for_best_model: eval_token_accuracy\n",
        {"eval.metric": "token_accuracy", "eval.mode": "max"},
    ),
    (
        DATA + "metric_for_best_model: eval_loss\ngreater_is_better: null\n",
        {"eval.metric": "loss", "eval.mode": "min"},
    ),
    (
        DATA + "greater_is_better: false\nmetric_for_best_model: exact_match\n",
        {"eval.metric": "exact_match", "eval.mode": "min"},
    ),
    (
        DATA
        + "fsdp: full_shard auto_wrap offload\nfsdp_config: {transformer_layer_cls_to_wrap: [A], backward_prefetch: backward_pre}\n",
        {
            "strategy.kind": "fsdp2",
            "strategy.offload": "cpu",
            "strategy.wrap": ["A"],
            "strategy.backward_prefetch": 1,
        },
    ),
    (
        DATA + "distributed_strategy: fsdp\nfsdp: {sharding_strategy: SHARD_GRAD_OP}\n",
        {"strategy.reshard_after_forward": False},
    ),
    (DATA + "distributed_strategy: deepspeed_zero3\n", {"strategy": {"kind": "zero3"}}),
    (
        DATA
        + "distributed_strategy: deepspeed\ndeepspeed: {stage: 3, offload_param_device: cpu}\n",
        {"strategy": {"kind": "zero3", "offload_parameters": {"kind": "cpu"}}},
    ),
    (
        DATA
        + "deepspeed: {zero_optimization: {stage: 1}, gradient_accumulation_steps: auto}\ngradient_accumulation_steps: 3\n",
        {"strategy.kind": "zero1", "batch.accumulation": 3},
    ),
    (
        DATA + "ddp_bucket_cap_mb: 5\nddp_find_unused_parameters: true\n",
        {"strategy": {"kind": "ddp", "bucket_cap_mb": 5, "find_unused_parameters": True}},
    ),
    (
        DATA + "sync_bn: true\nsync_bn_group_size: 2\n",
        {"model.sync_batchnorm": True, "model.sync_batchnorm_ranks": 2},
    ),
    (
        DATA + "report_to: tensorboard\nuse_wandb: true\nlog_interval: 5\n",
        {"run.report_to": ["tensorboard", "wandb"], "run.log_every": 5},
    ),
    (DATA + "use_wandb: true\nreport_to: none\n", {"run.report_to": ["wandb"]}),
    (DATA + "completion_only_loss: false\nassistant_only_loss: false\n", {"data.learn_on": "all"}),
    (
        DATA
        + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: '{\"min_lr_rate\": 0.1}'\n",
        {"schedule.min_ratio": 0.1},
    ),
    (
        DATA
        + "max_steps: 50\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 10}\n",
        {"schedule": {"kind": "wsd", "decay_ratio": 0.2}},
    ),
    (
        DATA
        + "fsdp: {enabled: false, sharding_strategy: FULL_SHARD}\ndeepspeed: {enabled: true, stage: 1}\n",
        {"strategy.kind": "zero1"},
    ),
    (
        "train_file: x\ndistributed: {strategy: ddp, backend: nccl, tensor_parallel: 2}\n",
        {"strategy": {"kind": "ddp", "tp": 2}},
    ),
    (DATA + "tensor_parallel_size: 2\n", {"strategy": {"kind": "ddp", "tp": 2}}),
    (
        DATA
        + "use_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.1\nlora_target_modules: q_proj,v_proj\nload_in_4bit: true\n",
        {
            "adapter": {
                "kind": "lora",
                "r": 8,
                "alpha": 16.0,
                "dropout": 0.1,
                "targets": ["q_proj", "v_proj"],
                "quantize": "4bit",
            }
        },
    ),
    (
        DATA + "use_peft: true\nuse_dora: true\nuse_rslora: false\nlora_modules_to_save: lm_head\n",
        {
            "adapter": {
                "kind": "lora",
                "dora": True,
                "modules_to_save": ["lm_head"],
                "targets": ["q_proj", "v_proj"],
            }
        },
    ),
    (
        "dataset_name: a/b\ndataset_config: c\ndataset_test_split: test\nmax_train_samples: 9\nnum_train_epochs: 1\n",
        {
            "data.train": [{"kind": "hub", "id": "a/b", "name": "c", "limit": 9}],
            "data.eval": [{"kind": "hub", "id": "a/b", "name": "c", "split": "test"}],
        },
    ),
    (
        "model: {name: m}\ndata: {path: x.jsonl, max_length: 64}\noptimizer: {type: adamw, lr: 1e-3, betas: [0.9, 0.99]}\n"
        "scheduler: {type: cosine, warmup_steps: 5}\nlora: {r: 4}\ntraining: {num_epochs: 2}\n",
        {
            "model.id": "m",
            "data.max_length": 64,
            "optimizer.lr": 1e-3,
            "optimizer.betas": [0.9, 0.99],
            "schedule.warmup_steps": 5,
            "adapter.r": 4,
            "run.epochs": 2,
        },
    ),
    (DATA + "loss_type: nll\n", {"optimizer.lr": 5e-5}),
    (
        DATA + "loss_type: robust\nbeta: 0.2\nlabel_smoothing: 0.1\n",
        {
            "algorithm": {"kind": "dpo", "loss": "robust", "beta": 0.2, "label_smoothing": 0.1},
            "optimizer.lr": 1e-6,
        },
    ),
    (
        DATA
        + "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nlearning_rate: 1e-5\n",
        {
            "algorithm": {
                "kind": "dpo",
                "loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2},
                "sft_weight": 1.0,
            },
            "optimizer.lr": 1e-5,
        },
    ),
    (
        DATA + "loss_type: simpo\nbeta: 2.5\nsimpo_gamma: 0.5\ncpo_alpha: 0.0\n",
        {"algorithm": {"kind": "simpo", "beta": 2.5, "gamma": 0.5}},
    ),
    (DATA + "pref_loss: orpo\npref_beta: 0.2\n", {"algorithm": {"kind": "orpo", "beta": 0.2}}),
]


@pytest.mark.parametrize(("text", "wanted"), MEANINGS, ids=range(len(MEANINGS)))
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
    for said, means in (
        ("true", Resume()),
        ("null", None),
        ("false", None),
        ("runs/x", Resume("runs/x")),
    ):
        old.write_text(DATA + f"resume_from_checkpoint: {said}\n")
        assert load(old, []).resume == means


# (old text, what its one line must say)
MISTAKES: list[tuple[str, list[str]]] = [
    (
        DATA + "bf16: true\nfp16: true\n",
        ["old.yaml:3: fp16: true, but old.yaml:2: bf16 says true", "keep one"],
    ),
    (
        DATA + "bf16: true\nmixed_precision: fp16\n",
        ["old.yaml:3: mixed_precision: 'fp16', but old.yaml:2: bf16"],
    ),
    (
        DATA + "learning_rat: 1\nlearning_rate: 2\n",
        ["old.yaml:2: learning_rat", "did you mean 'learning_rate'?"],
    ),
    (
        "training:\n  output_dir: x\n  save_step: 4\n",
        ["old.yaml:3: training.save_step", "did you mean 'save_steps'?"],
    ),
    (DATA + "zzz: 1\n", ["old.yaml:2: zzz: unknown key", "drumline schema"]),
    (
        DATA + "learning_rate: fast\n",
        ["old.yaml:2: learning_rate: 'fast' given, a number is wanted"],
    ),
    (DATA + "save_steps: 0.1\n", ["old.yaml:2: save_steps", "a number of steps"]),
    (
        DATA + "gradient_accumulation_steps: 0\n",
        ["old.yaml:2: gradient_accumulation_steps", "greater than 0"],
    ),
    (
        DATA + "logging_steps: 0.1\n",
        ["old.yaml:2: logging_steps: 0.1 of all steps", "a number of steps"],
    ),
    (DATA + "learning_rate: .inf\n", ["old.yaml:2: learning_rate: inf given, a number is wanted"]),
    (
        DATA + "lr_scheduler_kwargs: 'power 2'\n",
        ["old.yaml:2: lr_scheduler_kwargs: 'power 2' given, keys and values are wanted"],
    ),
    (DATA + "optim: adadelta\n", ["old.yaml:2: optim: no 'adadelta' here", "adamw"]),
    (
        DATA + "lr_scheduler_type: inverse_sqrt\n",
        ["'inverse_sqrt' cannot be translated", "linear, cosine"],
    ),
    (
        DATA + "max_length: 4\nmax_seq_length: 8\n",
        ["old.yaml:3: max_seq_length: 8, but old.yaml:2: max_length says 4"],
    ),
    (DATA + "label_smoothing_factor: 0.1\n", ["old.yaml:2", "does not do that"]),
    (
        "model_name_or_path: ./m\ndataset_mixer: {a/b: 0.001}\n",
        ["a/b: 0.001 given, a split is cut to whole percents"],
    ),
    (
        "model_name_or_path: ./m\ndatasets: a/b\n",
        ["old.yaml:2: datasets: 'a/b' given, a list of datasets is wanted"],
    ),
    (
        "model_name_or_path: ./m\ndataset_mixture: {datasets: [{split: a}]}\n",
        ["old.yaml:2: dataset_mixture.datasets.0: names no dataset"],
    ),
    (DATA + "report_to: neptune\n", ["no tracker 'neptune'", "wandb"]),
    (
        DATA + "distributed_strategy: ddp\nfsdp: full_shard\n",
        ["old.yaml:3: fsdp", "distributed_strategy says 'ddp'"],
    ),
    (
        DATA + "distributed_strategy: zero2\ndeepspeed: {stage: 3}\n",
        ["distributed_strategy", "'zero2', but old.yaml:3: deepspeed.stage"],
    ),
    (DATA + "distributed_strategy: dpp\n", ["did you mean"]),
    (DATA + "distributed_backend: mpi\n", ["no backend 'mpi'", "NCCL on GPUs"]),
    (
        DATA + "deepspeed: none-there.json\n",
        ["old.yaml:2: deepspeed: 'none-there.json' cannot be read: no such file"],
    ),
    ("output_dir: x\n", ["old.yaml: says nothing of data", "data=rows.jsonl"]),
    (DATA + "loss_type: ''\n", ["old.yaml:2: loss_type: no loss ''"]),
    (
        DATA + "loss_type: [sigmoid, ipo]\nloss_weights: [a, 1]\n",
        ["old.yaml:3: loss_weights: 'a' given, a number is wanted"],
    ),
    (
        DATA + "learning_rate: 0\nlr_scheduler_kwargs: {min_lr: 1e-6}\n",
        ["old.yaml:2: learning_rate", "greater than 0"],
    ),
    (
        DATA + "deepspeed: {stage: 2, zero_stage: 3}\n",
        ["deepspeed.zero_stage: 3, but old.yaml:2: deepspeed.stage says 2", "keep one"],
    ),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_names_the_old_line(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text, [], "old.yaml")
    line = error.value.line()
    assert "\n" not in line
    for part in says:
        assert part in line


@pytest.mark.full
@pytest.mark.slow
def test_junk_in_any_key_is_one_line_or_nothing() -> None:
    refused = 0
    for key in TABLE:
        for junk in JUNK:
            text = json.dumps({"train_file": "x", key: junk})
            try:
                load_text(text, ["data.train=[{kind: file, path: x}]"], "old.yaml")
            except ConfigError as error:
                refused += 1
                assert "\n" not in error.line() and "old.yaml" in error.line(), error.line()
    assert refused > len(TABLE)


def test_every_key_without_a_meaning_gets_a_line() -> None:
    text = (
        DATA
        + "dataloader_num_workers: 4\nlocal_rank: 0\nhub_token: hf_sEcReT12345\npush_to_hub: true\nlogging_dir: x\n"
    )
    told = "\n" + "\n".join(notes(text))
    for line, key in enumerate(
        ("dataloader_num_workers", "local_rank", "hub_token", "push_to_hub", "logging_dir"), start=2
    ):
        assert f"\nold.yaml:{line}: {key}: " in told
    assert "hf_sEcReT12345" not in told


def test_what_the_trainer_would_have_taken_is_said() -> None:
    (told,) = notes(DATA + "learning_rate: 1e-5\n")
    assert (
        "schedule.kind 'linear'" in told and "run.epochs 3.0" in told and "optimizer.lr" not in told
    )


def test_whose_file_it_is() -> None:
    assert recognise({"distributed_type": "NO"}) == "accelerate"
    assert recognise({"zero_optimization": {}, "train_batch_size": 3}) == "deepspeed"
    assert recognise({"zero_optimization": {}, "learning_rate": 3}) == "training"
    assert recognise({"distributed_type": "NO", "learning_rate": 3}) == "training"
    assert recognise({"training": {"output_dir": "x"}}) == "training"
    assert recognise({"learning_rate": 1}) == "training"
    assert recognise({"optimizer": {"learning_rate": 3}}) == "training"
    own_with_mistake = {"model": "x", "data": {"path": "y"}, "run": {"steps": 2}}
    assert recognise(own_with_mistake) is None


def test_the_table_knows_every_training_argument() -> None:
    """The installed transformers is asked for its keys, so a new release shows what is missing."""
    transformers = pytest.importorskip("transformers")
    arguments = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    missing = arguments - TABLE.keys() - ACCELERATE.keys()
    assert not missing


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
    assert "# data:" in made
    assert "says nothing of data" in "\n".join(messages)
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


@pytest.mark.parametrize("said", ["latest", "out/checkpoint-latest", "out/checkpoint-last/", True])
def test_the_newest_checkpoint_by_a_guides_names(said: Any) -> None:
    assert (
        make_draft(DATA + f"resume_from_checkpoint: {said}\n", "old.yaml", Path()).resume
        == Resume()
    )
    assert make_draft(
        DATA + "resume_from_checkpoint: out/checkpoint-500\n", "old.yaml", Path()
    ).resume == Resume("out/checkpoint-500")


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
    assert note in "\n".join(notes(DATA + text))


FILE = {"kind": "file", "path": "rows.jsonl"}
# (keys of the data, whether the files are there) → data.train and data.eval
DATASETS: list[tuple[str, dict[str, Any]]] = [
    ("dataset_name: rows.jsonl\n", {"train": [FILE]}),
    ("dataset_name: ./rows.jsonl\nmax_train_samples: 3\n", {"train": [{**FILE, "limit": 3}]}),
    ("dataset_name: none.csv\n", {"train": [{"kind": "file", "path": "none.csv"}]}),
    ("dataset_name: folder\n", {"train": [{"kind": "file", "path": "folder"}]}),
    (
        "dataset_name: folder\ndataset_test_split: test\n",
        {
            "train": [{"kind": "file", "path": "folder"}],
            "eval": [{"kind": "file", "path": "folder", "split": "test"}],
        },
    ),
    ("dataset_name: saved\n", {"train": [{"kind": "saved", "path": "saved"}]}),
    ("dataset_name: a/b-v1.5\n", {"train": [{"kind": "hub", "id": "a/b-v1.5"}]}),
    ("dataset_name: json\ndata_files: rows.jsonl\n", {"train": [FILE]}),
    ("data_files: [rows.jsonl]\n", {"train": [FILE]}),
    (
        "dataset_name: json\ndata_files: {train: rows.jsonl, test: held.jsonl}\n",
        {"train": [FILE], "eval": [{"kind": "file", "path": "held.jsonl"}]},
    ),
    (
        "dataset_name: folder\ndata_files: x.jsonl\n",
        {"train": [{"kind": "file", "path": "folder/x.jsonl"}]},
    ),
    (
        "dataset_name: a/b\ndata_files: x.jsonl\n",
        {"train": [{"kind": "file", "path": "hf://datasets/a/b/x.jsonl"}]},
    ),
    ("datasets: [{path: rows.jsonl}]\n", {"train": [FILE]}),
    ("datasets: [{path: json, data_files: rows.jsonl}]\n", {"train": [FILE]}),
    (
        "datasets: [{id: null, path: a/b, name: en, config: null}]\n",
        {"train": [{"kind": "hub", "id": "a/b", "name": "en"}]},
    ),
    (
        "datasets: [{path: a/b, data_dir: en, split: test}]\n",
        {"train": [{"kind": "file", "path": "hf://datasets/a/b/en", "split": "test"}]},
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of rows, a folder of such, and one of save_to_disk."""
    for name in ("folder", "saved"):
        (tmp_path / name).mkdir()
    for name in ("rows.jsonl", "held.jsonl", "folder/x.jsonl", "saved/state.json"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize(("text", "wanted"), DATASETS, ids=range(len(DATASETS)))
def test_a_dataset_is_found_as_its_library_does(
    text: str, wanted: dict[str, Any], folder: Path
) -> None:
    draft = make_draft("learning_rate: 1e-4\n" + text, "old.yaml", folder)
    data = draft.values["data"]
    for part in ("train", "eval"):
        assert data.get(part) == wanted.get(part)


def test_a_split_that_a_file_does_not_have_is_no_data(folder: Path) -> None:
    text = "learning_rate: 1e-4\ndataset_name: rows.jsonl\ndataset_test_split: test\n"
    with pytest.raises(ConfigError, match="dataset_test_split: 'test' given: files are one split"):
        make_draft(text, "old.yaml", folder)
    draft = make_draft(text, "old.yaml", folder, lenient=True)
    assert "eval" not in draft.values["data"]
    assert "dataset_test_split: 'test': left out" in "\n".join(draft.notes)


def test_what_an_entry_of_a_mixture_has_besides_is_said(folder: Path) -> None:
    text = "learning_rate: 1e-4\ndatasets: [{path: a/b, columns: [x]}]\n"
    draft = make_draft(text, "old.yaml", folder)
    assert "datasets.0.columns: a list: unknown here" in "\n".join(draft.notes)
    text = "learning_rate: 1e-4\ndataset_mixture: {datasets: [{path: a/b}], streaming: true}\n"
    draft = make_draft(text, "old.yaml", folder)
    assert "dataset_mixture.streaming: true: unknown here" in "\n".join(draft.notes)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "dataset_name: a/b\ndataset_config: main\ndata_files: x.jsonl\n",
            "dataset_config: 'main': without effect: the files are read by their names",
        ),
        (
            "datasets: [{path: a/b, name: en, data_dir: sub}]\n",
            "datasets.0.name: 'en': without effect: the files are read by their names",
        ),
        (
            "datasets: [{path: a/b, id: a/c}]\n",
            "datasets.0.id: 'a/c': without effect: path is read",
        ),
    ],
)
def test_what_has_no_effect_on_files_is_said(text: str, note: str, folder: Path) -> None:
    draft = make_draft("learning_rate: 1e-4\n" + text, "old.yaml", folder)
    assert note in "\n".join(draft.notes)


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\ndatasets: [{path: rows.jsonl, type: chat_template, split: test}]\n",
        "learning_rate: 1e-4\ndatasets: [{path: rows.jsonl, split: test}]\n",
    ],
)
def test_a_list_without_sources_is_left_out_with_its_note(text: str, folder: Path) -> None:
    draft = make_draft(text, "old.yaml", folder, lenient=True)
    assert "train" not in draft.values.get("data", {})
    assert "split: 'test': left out: files are one split" in "\n".join(draft.notes)
