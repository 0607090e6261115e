"""Translate training arguments in the style of Hugging Face, flat or in sections.

The names are those of transformers 5.23, TRL 1.16 and guides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from drumline.compat import accelerate as acc
from drumline.compat.deepspeed import (
    add_tracker,
    locate_file,
    new_path,
    read_clip,
    read_power_of_two,
)
from drumline.compat.rules import (
    Rule,
    apply_if_on,
    apply_rules,
    choose_by_flag,
    drop,
    postpone,
    read_choice,
    read_flag,
    read_integer,
    read_names,
    read_number,
    reject,
    set_if_on,
    set_key,
)
from drumline.compat.sheet import AUTO, OldKey, Sheet, Unsupported, translation_error
from drumline.config.mistakes import split_synonyms
from drumline.config.resume import Resume
from drumline.config.section import MOST_SECONDS
from drumline_convert import groups
from drumline_convert.defaults import Defaults, fill_defaults
from drumline_convert.groups import NO_SCHEDULES, SCHEDULES, step_count
from drumline_convert.mixtures import hold_out, read_mixture
from drumline_convert.preferences import PREFERENCES


def _note_backend(sheet: Sheet, old: OldKey) -> None:
    """Note the backend, which the devices decide. Raises ConfigError for one that is not here."""
    if str(old.value).lower() not in ("nccl", "gloo", "none", "auto"):
        raise translation_error(
            old, f"no backend {old.value!r} here", "remove it: NCCL on GPUs, gloo on CPUs"
        )
    sheet.note(old, "NCCL on GPUs, gloo on CPUs")


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def _set_trackers(sheet: Sheet, old: OldKey) -> None:
    """Set run.report_to. Raises ConfigError for a tracker that is not here."""
    names = [name.lower() for name in read_names(old)]
    for name in names:
        if name not in (*TRACKERS, "none", "all", "false"):
            raise Unsupported(
                f"no tracker {name!r} here", where=old.where, fix=f"there are {', '.join(TRACKERS)}"
            )
    if "all" in names:
        sheet.note(old, "TensorBoard; name others one by one")
        trackers = ["tensorboard"]
    else:
        trackers = [name for name in names if name in TRACKERS]
    # Switches for one tracker may stand above this key.
    before = sheet.get("run.report_to", [])
    for name in before:
        if name not in trackers:
            trackers.append(name)
    sheet.put("run.report_to", trackers, old, over=before)


# Characters that some tracker does not take in a name, and how many it takes.
NOT_IN_NAMES = re.compile(r"[/\\#?%:\x00-\x1f]")


MOST_NAME_CHARACTERS = 128


def set_tracker_name(key: str) -> Rule:
    """Return a rule that sets the name of the run or its project in all trackers.

    `key` is name or project. The first of several old keys is used.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        name = NOT_IN_NAMES.sub("-", str(old.value))[:MOST_NAME_CHARACTERS]
        if old.value in AUTO or not name:
            return
        before = sheet.get(f"run.tracker.{key}")
        if before is None:
            sheet.put(f"run.tracker.{key}", name, old)
        elif before != name:
            sheet.note(old, f"without effect: run.tracker.{key} has one value")

    return rule


def _set_resume(sheet: Sheet, old: OldKey) -> None:
    """Read resume_from_checkpoint, which is an option of the command line here."""
    if old.value in (*AUTO, False, "", "false", "none"):
        return
    folder = str(old.value).lower().rstrip("/").rpartition("/")[2]
    if folder.removeprefix("checkpoint-") in ("true", "latest", "last", "newest"):
        sheet.resume = Resume()
        sheet.note(old, "`--resume` on the command line sets it")
    else:
        sheet.resume = Resume(str(old.value))
        sheet.note(old, f"`--resume` {sheet.resume} on the command line sets it")


BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
PAGED = ("paged_adamw", "paged_adamw_32bit")


# Kinds of optimizer by their names in transformers.
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adam": "adamw",
    "fused_adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "lion_32bit": "lion",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_4bit",
    "schedule_free_adamw": "schedule_free",
    "adafactor": "adafactor",
    "muon": "muon",
    "ao_adamw_8bit": "adamw_8bit",
    "ao_adamw_4bit": "adamw_4bit",
    **dict.fromkeys(BITSANDBYTES, "adamw_8bit"),
    **dict.fromkeys(PAGED, "adamw"),
}


def set_optimizer(sheet: Sheet, old: OldKey) -> None:
    """Set the kind of optimizer by transformers' name."""
    name = str(old.value).lower()
    if name in BITSANDBYTES:
        sheet.note(old, "adamw_8bit, torchao's, in the place of bitsandbytes'")
    if name in PAGED:
        sheet.note(old, "adamw: its states are fp32 as there, and stay on the device")
    sheet.put("optimizer.kind", read_choice(OPTIMIZERS)(old), old)
    if name == "adamw_torch":
        sheet.put("optimizer.fused", False, old)


def _set_micro_batch(sheet: Sheet, old: OldKey) -> None:
    """Read batch_size, which guides for launchers give to the loader of each process."""
    if old.value not in AUTO:
        sheet.put("batch.micro_batch", read_integer(old), old)
        sheet.note(
            old,
            "taken for the samples of one device, as guides for launchers mean it; of all devices it is global_batch_size",
        )


def _set_timeout(sheet: Sheet, old: OldKey) -> None:
    """Set how many seconds a collective may take.

    LLaMA-Factory's files have 180000000, which is more than Drumline's key takes.
    """
    if old.value in AUTO:
        return
    seconds = read_number(old)
    if seconds > MOST_SECONDS:
        sheet.note(
            old,
            f"launch.timeout_seconds is at most {MOST_SECONDS:,} (four months), and is set to that",
        )
        seconds = float(MOST_SECONDS)
    sheet.put("launch.timeout_seconds", seconds, old)


def _read_distributed(sheet: Sheet, old: OldKey) -> None:
    """Read `distributed`: the name of a strategy, or a guide's switch."""
    if isinstance(old.value, bool) or str(old.value).lower() in ("true", "false"):
        sheet.note(old, HOST)
    else:
        postpone("distributed_strategy")(sheet, old)


def _set_template_file(sheet: Sheet, old: OldKey) -> None:
    """Set the file of the chat template."""
    path = locate_file(sheet.base, str(old.value))
    sheet.put("model.chat_template", new_path(sheet, path), old)


def _read_max_steps(old: OldKey) -> int | None:
    """Return the number of steps; None for -1, with which Hugging Face counts by epochs."""
    steps = read_integer(old)
    if steps <= 0:
        return None
    return steps


def _read_percentage(old: OldKey) -> float:
    """Return the fraction of the rows to hold out, for a percentage."""
    return read_number(old) / 100 or 0


def _do_nothing_first(sheet: Sheet) -> None:
    """Combine nothing: transformers' own arguments need no preparation."""


SECRET = "secrets belong in the environment (HF_TOKEN), not in a config"
ATTENTION = {
    name: name
    for name in (
        "auto",
        "sdpa",
        "eager",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    )
}
CHECKPOINTING = {
    "true": "full",
    "full": "full",
    "selective": "selective",
    "false": "none",
    "none": "none",
    "no": "none",
}
HOST = "the launcher sets it: torchrun's flags, or --nproc"
HUB = "`drumline push RUN --to ORG/NAME` sends a run to the hub"
LENGTHS = "rows of similar length share a micro-batch in any case"
LOADER = "a thread collates ahead (data.prefetch); there are no loader processes"
LOGS = "events.jsonl has every figure; the display is one line a step"
NEUTRAL = "Drumline does not do that"
OUTSIDE = "the tracker's own environment variables set it"
SUMS = "evaluation sums the loss over all held-out rows"
AS_TRAINING = "evaluation runs in the precision of training"
WHOLE = "a checkpoint has all that is needed to go on, and any strategy reads it"

TABLE: dict[str, Rule] = split_synonyms(
    {
        # model
        "model_name_or_path model_name base_model pretrained_model_name_or_path": set_key(
            "model.id"
        ),
        "model_revision": set_key("model.revision"),
        "tokenizer_name tokenizer_name_or_path": set_key("model.tokenizer"),
        "attn_implementation": set_key("model.attention", read_choice(ATTENTION)),
        "use_flash_attention_2 use_flash_attention use_flash_attn": set_if_on(
            "model.attention", "flash_attention_2"
        ),
        "trust_remote_code": set_key("model.trust_remote_code", read_flag),
        "chat_template_path": _set_template_file,
        "dtype torch_dtype": postpone("dtype"),
        "use_cache": drop("training keeps no cache of keys and values"),
        "cache_dir": drop("HF_HOME sets the folder of the hub's files"),
        "low_cpu_mem_usage": drop("weights are read where they are needed"),
        "device_map": drop("the strategy places the model"),
        "config_overrides": set_key("model.config"),
        "use_fast_tokenizer": drop("tokenizers are fast"),
        "padding_side": drop("rows are packed, or padded at their end"),
        "eos_token": reject(why="the tokenizer's own is used", fix="remove it"),
        "pad_token": drop("padding carries no loss, so any token will do"),
        # batch
        "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu": set_key(
            "batch.micro_batch", read_integer
        ),
        "micro_batch_size batch_size_per_gpu batch_size_per_device": set_key(
            "batch.micro_batch", read_integer
        ),
        "gradient_accumulation_steps": set_key("batch.accumulation", read_integer),
        "batch_size": _set_micro_batch,
        "train_batch_size global_batch_size": set_key("batch.global_samples", read_integer),
        "auto_find_batch_size": reject(why=NEUTRAL, fix="set per_device_train_batch_size"),
        "average_tokens_across_devices": drop(
            "losses are divided by the tokens of the whole global batch"
        ),
        "split_batches": drop(
            "batch.global_samples is the number of samples of a step, on any number of devices"
        ),
        "accelerator_config": drop(
            "samples are dealt by a global order, the same on any number of devices"
        ),
        # optimizer, schedule, precision
        "learning_rate lr": postpone("learning_rate"),
        "base_learning_rate base_lr": postpone("base_learning_rate"),
        "use_linear_scaling linear_scaling": postpone("use_linear_scaling"),
        "base_batch_size": set_key("optimizer.lr_base_samples", read_integer),
        "weight_decay": set_key("optimizer.weight_decay", read_number),
        "adam_beta1 adam_beta2 lr_scheduler_kwargs warmup_ratio warmup_steps bf16 fp16": postpone(),
        "adam_betas": set_key("optimizer.betas"),
        "adam_epsilon": set_key("optimizer.eps", read_number),
        "momentum": set_key("optimizer.momentum", read_number),
        "optim": set_optimizer,
        "max_grad_norm gradient_clipping gradient_clip_val clip_grad_norm": set_key(
            "optimizer.max_grad_norm", read_clip
        ),
        "lr_scheduler_type lr_scheduler": set_key(
            "schedule.kind", read_choice(SCHEDULES, NO_SCHEDULES)
        ),
        "min_lr_ratio min_lr_rate": set_key("schedule.min_ratio", read_number),
        "mixed_precision precision": postpone("mixed_precision"),
        "tf32": set_key("precision.tf32", read_flag),
        "initial_scale_power": set_key("precision.initial_scale", read_power_of_two),
        "gradient_checkpointing activation_checkpointing": set_key(
            "memory.activation_checkpointing", read_choice(CHECKPOINTING), skip=()
        ),
        "torch_compile": set_key("compile.enabled", read_flag),
        "torch_compile_mode": set_key("compile.mode"),
        "torch_compile_backend": reject(
            "inductor", why="blocks are compiled by torch's own backend", fix="remove it"
        ),
        # checkpoints, evaluation, figures
        "output_dir": set_key("run.dir"),
        "save_strategy": postpone(),
        "save_steps save_interval save_every": postpone("save_steps"),
        "save_total_limit": set_key("checkpoint.keep", read_integer),
        "load_best_model_at_end": set_key("checkpoint.export", choose_by_flag("best", "last")),
        "metric_for_best_model greater_is_better": postpone(),
        "resume_from_checkpoint": _set_resume,
        "eval_strategy evaluation_strategy": postpone("eval_strategy"),
        "eval_steps eval_interval eval_every": postpone("eval_steps"),
        "eval_on_start": set_key("eval.at_start", read_flag),
        "per_device_eval_batch_size per_gpu_eval_batch_size": set_key(
            "eval.micro_batch", read_integer
        ),
        "logging_steps log_interval log_every": set_key("run.log_every", step_count),
        "use_wandb": apply_if_on(add_tracker("wandb")),
        "use_tensorboard": apply_if_on(add_tracker("tensorboard")),
        "report_to": _set_trackers,
        "max_steps": set_key("run.steps", _read_max_steps),
        "num_train_epochs num_epochs epochs max_epochs": set_key("run.epochs", read_number),
        "seed": set_key("run.seed", read_integer),
        "full_determinism": set_key("run.deterministic", read_flag),
        "device": set_key(
            "run.device", read_choice({"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "auto": "auto"})
        ),
        "use_cpu no_cuda": set_if_on("run.device", "cpu"),
        "do_train": reject(True, why="`train` always trains", fix="set it to true"),
        # data
        "dataset_name dataset_test_split dataset_streaming max_train_samples max_eval_samples dataset_text_field prompt_column": postpone(),
        "data_files": postpone(),
        "dataset_config dataset_config_name": postpone("dataset_config"),
        "datasets dataset_mixture": read_mixture,
        "test_split_size": hold_out,
        "dataset_mixer dataset_splits dataset_configs": postpone(),
        "dataset_train_split dataset_split": postpone("dataset_train_split"),
        "train_file train_files train_data_path dataset_path data_path": postpone("train_file"),
        "validation_file eval_file": postpone("validation_file"),
        "test_file": drop("evaluation is on data.eval"),
        "completion_column response_column": postpone("completion_column"),
        "messages_column messages_field": postpone("messages_column"),
        "max_seq_length max_length max_seq_len block_size cutoff_len model_max_length": set_key(
            "data.max_length", read_integer
        ),
        "packing": set_key("data.packing", read_flag),
        "truncation_mode": set_key(
            "data.truncation", read_choice({"keep_start": "right", "keep_end": "left"})
        ),
        "assistant_only_loss completion_only_loss": postpone("assistant_only_loss"),
        "train_on_inputs": set_key("data.learn_on", choose_by_flag("all", "assistant")),
        "dataset_num_proc preprocessing_num_workers": set_key("data.workers", read_integer),
        "dataloader_prefetch_factor": set_key("data.prefetch", read_integer),
        "shuffle_dataset": set_key("data.order", choose_by_flag("shuffle", "sequential")),
        # strategy
        "distributed_strategy zero_stage fsdp fsdp_config": postpone(),
        "distributed": _read_distributed,
        "distributed_backend ddp_backend": _note_backend,
        "ddp_timeout": _set_timeout,
        "ddp_bucket_cap_mb bucket_cap_mb": postpone("ddp.bucket_cap_mb"),
        "ddp_find_unused_parameters find_unused_parameters": postpone("ddp.find_unused_parameters"),
        "ddp_broadcast_buffers broadcast_buffers": postpone("ddp.broadcast_buffers"),
        "ddp_static_graph static_graph": postpone("ddp.static_graph"),
        "gradient_as_bucket_view": postpone("ddp.gradient_as_bucket_view"),
        "deepspeed deepspeed_config": postpone("deepspeed"),
        "fsdp_transformer_layer_cls_to_wrap": postpone("fsdp_layer"),
        "tensor_parallel_size": postpone("tp"),
        "pipeline_parallel_size": postpone("pp"),
        "context_parallel_size sequence_parallel_size": postpone("cp"),
        "world_size num_gpus n_gpu": postpone("num_processes"),
        "nproc_per_node": set_key("launch.nproc", read_integer),
        "sync_bn sync_batchnorm use_sync_bn": set_key("model.sync_batchnorm", read_flag),
        "sync_bn_group_size": postpone(),
        # adapters
        "use_peft use_lora": postpone("use_peft"),
        "lora_r lora_rank": postpone("lora_r"),
        "lora_alpha lora_dropout lora_target_modules lora_target_parameters": postpone(),
        "lora_modules_to_save use_rslora use_dora load_in_4bit load_in_8bit": postpone(),
        "lora_bias": reject("none", why="only the factors are trained", fix="set it to none"),
        "lora_task_type": drop("the algorithm sets it"),
        "bnb_4bit_quant_type bnb_4bit_use_double_quant use_bnb_nested_quant": drop(
            "QLoRA is NF4 with double quantisation"
        ),
        "bnb_4bit_compute_dtype": drop("the compute type is the precision"),
        # what would change the numbers, and is not done
        "label_smoothing_factor": reject(0, 0.0, why=NEUTRAL, fix="set it to 0"),
        "neftune_noise_alpha optim_target_modules": reject(why=NEUTRAL, fix="remove it"),
        "router_aux_loss_coef": reject(0, 0.0, why=NEUTRAL, fix="remove it"),
        "optim_args": reject(why="no optimizer here takes any", fix="remove it"),
        "model_init_kwargs": reject(
            {},
            why="values of the model's config go one by one",
            fix="write config_overrides: {key: value}",
        ),
        "dataset_kwargs": reject(
            {}, why="each has a key of its own", fix="write it as a key under data"
        ),
        "validation_split_percentage": set_key("data.holdout", _read_percentage),
        "padding_free": drop("packing pads nothing"),
        "eval_packing": drop("as in training"),
        "activation_offloading": set_key(
            "memory.activation_offload",
            read_choice({"true": True, "legacy": True, "disk": True, "no": False}),
        ),
        # what has no meaning any more
        "local_rank rank nnodes num_nodes node_rank master_addr master_port init_method dist_url rdzv_endpoint rdzv_id": drop(
            HOST
        ),
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_multiprocessing_context": drop(
            LOADER
        ),
        "dataloader_in_order persistent_workers": drop(LOADER),
        "dataloader_drop_last": drop("the last batch is filled up with rows that carry no weight"),
        "group_by_length length_column_name train_sampling_strategy pad_to_multiple_of packing_strategy padding": drop(
            LENGTHS
        ),
        "remove_unused_columns label_names": drop("columns are found by name"),
        "logging_dir logging_strategy logging_first_step log_level log_level_replica log_on_each_node disable_tqdm": drop(
            LOGS
        ),
        "logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics verbose debug": drop(
            LOGS
        ),
        "experiment_name": drop("the run folder is named by run.dir, or after the YAML"),
        "project wandb_project": set_tracker_name("project"),
        "run_name wandb_run_name": set_tracker_name("name"),
        "trackio_space_id trackio_bucket_id trackio_static_space_id wandb_entity": drop(OUTSIDE),
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant": drop(
            "blocks are run again without re-entering"
        ),
        "bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend half_precision_backend": drop(
            AS_TRAINING
        ),
        "eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics": drop(
            SUMS
        ),
        "batch_eval_metrics prediction_loss_only do_eval do_predict include_inputs_for_metrics": drop(
            SUMS
        ),
        "overwrite_output_dir": drop(
            "a run folder that is not empty is refused; --resume goes on with it"
        ),
        "save_only_model save_on_each_node save_safetensors restore_callback_states_from_checkpoint": drop(
            WHOLE
        ),
        "enable_jit_checkpoint": drop("SIGTERM saves, and --resume goes on"),
        "ignore_data_skip": drop("the position in the data is resumed exactly"),
        "data_seed": drop("run.seed fixes the order of the data, too"),
        "use_liger_kernel liger_kernel_config use_liger": drop(
            "the cross-entropy never makes all logits at once: algorithm.loss_chunk"
        ),
        "torch_empty_cache_steps": drop("torch keeps its own cache"),
        "hub_token token use_auth_token hf_token push_to_hub_token wandb_api_key api_key": drop(
            SECRET
        ),
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision": drop(
            HUB, *AUTO, False
        ),
    }
)


# Sections that guides sort the same arguments into, and what they call things there.
SECTIONS: dict[str, dict[str, str]] = split_synonyms(
    {
        "training train training_args training_arguments trainer args general logging hardware memory performance run environment": {},
        "model_args": {},
        "model": split_synonyms(
            {
                "name path id name_or_path": "model_name_or_path",
                "revision": "model_revision",
                "tokenizer": "tokenizer_name",
                "attention": "attn_implementation",
            }
        ),
        "data dataset data_args": split_synonyms(
            {
                "train train_path path file": "train_file",
                "eval eval_path validation val_file val_path": "validation_file",
                "name": "dataset_name",
                "config": "dataset_config_name",
                "split": "dataset_train_split",
                "num_workers": "dataloader_num_workers",
                "prefetch_factor": "dataloader_prefetch_factor",
                "pin_memory": "dataloader_pin_memory",
                "drop_last": "dataloader_drop_last",
                "text_field text_column": "dataset_text_field",
                "shuffle": "shuffle_dataset",
                "num_proc": "dataset_num_proc",
                "seed": "data_seed",
                "streaming": "dataset_streaming",
            }
        ),
        "optimizer": split_synonyms(
            {
                "type name kind": "optim",
                "betas": "adam_betas",
                "eps": "adam_epsilon",
                "beta1": "adam_beta1",
                "beta2": "adam_beta2",
            }
        ),
        "scheduler lr_scheduler": split_synonyms(
            {"type name kind": "lr_scheduler_type", "num_warmup_steps": "warmup_steps"}
        ),
        "distributed parallelism": split_synonyms(
            {
                "strategy type": "distributed_strategy",
                "backend": "distributed_backend",
                "timeout": "ddp_timeout",
                "tp tensor_parallel": "tensor_parallel_size",
                "pp pipeline_parallel": "pipeline_parallel_size",
                "cp context_parallel": "context_parallel_size",
            }
        ),
        "ddp": {
            "backend": "ddp_backend",
            "timeout": "ddp_timeout",
            "broadcast_buffers": "ddp_broadcast_buffers",
        },
        "lora peft": split_synonyms(
            {
                "r rank": "lora_r",
                "alpha": "lora_alpha",
                "dropout": "lora_dropout",
                "target_modules": "lora_target_modules",
                "enabled": "use_peft",
                "bias": "lora_bias",
                "task_type": "lora_task_type",
                "modules_to_save": "lora_modules_to_save",
            }
        ),
        "dataloader": {
            "batch_size": "per_device_train_batch_size",
            "num_workers": "dataloader_num_workers",
            "pin_memory": "dataloader_pin_memory",
            "prefetch_factor": "dataloader_prefetch_factor",
            "drop_last": "dataloader_drop_last",
            "shuffle": "shuffle_dataset",
        },
        "evaluation eval": {
            "strategy": "eval_strategy",
            "steps": "eval_steps",
            "batch_size": "per_device_eval_batch_size",
        },
        "checkpoint checkpointing": {
            "strategy": "save_strategy",
            "steps": "save_steps",
            "dir": "output_dir",
            "resume": "resume_from_checkpoint",
        },
    }
)


def training_arguments(
    sheet: Sheet,
    olds: list[OldKey],
    more: Mapping[str, Rule] | None = None,
    what: str = "training arguments",
    first: Callable[[Sheet], None] = _do_nothing_first,
    defaults: Defaults | None = None,
) -> None:
    """Put training arguments on the sheet. Raises ConfigError with the old file's line.

    Args:
        olds: the keys of the file or command, flat or in sections.
        more: rules of another tool, which replace those of the table.
        what: names the arguments in messages.
        first: what the tool combines before the groups are combined.
        defaults: the tool's own defaults, which replace transformers'.
    """
    flat: list[OldKey] = []
    for old in olds:
        flat += flatten(old)
    rules = {**acc.TABLE, **TABLE, **PREFERENCES}
    if more is not None:
        rules |= more
    apply_rules(rules, sheet, flat, what)
    first(sheet)
    groups.combine(sheet)
    acc.combine_waiting_keys(sheet)
    if defaults is None:
        fill_defaults(sheet, flat[0], DEFAULTS, "transformers'")
    else:
        fill_defaults(sheet, flat[0], DEFAULTS | defaults, "its")


def flatten(old: OldKey) -> list[OldKey]:
    """Return the arguments of a section under the names that the table knows.

    Any other key is one argument. `model: ID` is its path.
    """
    if isinstance(old.value, str) and old.key in ("model", "data"):
        return [replace(old, key=SECTIONS[old.key]["path"])]
    is_section = isinstance(old.value, dict) and old.key in SECTIONS
    if not is_section or old.key in ("fsdp", "deepspeed"):
        return [old]
    names = SECTIONS[old.key]
    arguments: list[OldKey] = []
    for each in old.children():
        arguments += flatten(replace(each, key=names.get(each.key, each.key)))
    return arguments


# Defaults of transformers' Trainer (5.23) that differ from Drumline's.
DEFAULTS: Defaults = {
    "batch.micro_batch": (8, "per_device_train_batch_size"),
    "batch.accumulation": (1, "gradient_accumulation_steps"),
    "optimizer.lr": (5e-5, "learning_rate"),
    "schedule.kind": ("linear", "lr_scheduler_type"),
    "run.epochs": (3.0, "num_train_epochs"),
    "run.seed": (42, "seed"),
    "precision.kind": ("fp32", "bf16"),
    "data.packing": (False, "packing"),
}
