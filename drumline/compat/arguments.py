"""Training arguments in the style of Hugging Face, flat or in sections → a config. Names by transformers 5.23, TRL 1.16 and guides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from drumline.compat import accelerate as acc
from drumline.compat import groups
from drumline.compat.deepspeed import clip, found, new_path, power_of_two, tracker
from drumline.compat.groups import NO_SCHEDULES, SCHEDULES, step_count
from drumline.compat.mixtures import hold_out, mixture
from drumline.compat.preferences import PREFERENCES
from drumline.compat.rules import (
    Defaults,
    Rule,
    fill,
    flag,
    gone,
    if_on,
    later,
    name_list,
    number,
    one_of,
    only,
    read,
    switch,
    to,
    whole,
)
from drumline.compat.sheet import AUTO, Lacking, Old, Sheet, refuse
from drumline.core.mistakes import by_word
from drumline.core.section import MOST_SECONDS


def _backend(sheet: Sheet, old: Old) -> None:
    if str(old.value).lower() not in ("nccl", "gloo", "none", "auto"):
        raise refuse(old, f"no backend {old.value!r} here", "remove it: NCCL on GPUs, gloo on CPUs")
    sheet.note(old, "NCCL on GPUs, gloo on CPUs")


def _trackers(sheet: Sheet, old: Old) -> None:
    names = [name.lower() for name in name_list(old)]
    known = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
    for name in names:
        if name not in (*known, "none", "all", "false"):
            raise Lacking(
                f"no tracker {name!r} here", where=old.where, fix=f"there are {', '.join(known)}"
            )
    if "all" in names:
        sheet.note(old, "TensorBoard; name others one by one")
    given = ["tensorboard"] if "all" in names else [name for name in names if name in known]
    before = sheet.get("run.report_to", [])  # of switches for one tracker, which stand above
    sheet.put(
        "run.report_to", [*given, *(name for name in before if name not in given)], old, over=before
    )


def called(key: str) -> Rule:
    """The project or the name of the run in all trackers; the first of several keys."""

    def rule(sheet: Sheet, old: Old) -> None:
        name = re.sub(r"[/\\#?%:\x00-\x1f]", "-", str(old.value))[:128]
        if old.value in AUTO or not name:
            return
        if sheet.get(f"run.tracker.{key}") is None:
            sheet.put(f"run.tracker.{key}", name, old)
        elif sheet.get(f"run.tracker.{key}") != name:
            sheet.note(old, f"without effect: run.tracker.{key} has one value")

    return rule


def _resume(sheet: Sheet, old: Old) -> None:
    if old.value in (*AUTO, False, "", "false", "none"):
        return
    name = str(old.value).lower().rstrip("/").rpartition("/")[2].removeprefix("checkpoint-")
    sheet.resume = "newest" if name in ("true", "latest", "last", "newest") else str(old.value)
    sheet.note(
        old,
        "`--resume`"
        + ("" if sheet.resume == "newest" else f" {sheet.resume}")
        + " on the command line sets it",
    )


BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
PAGED = ("paged_adamw", "paged_adamw_32bit")


def optimizer(sheet: Sheet, old: Old) -> None:
    kinds = dict.fromkeys(
        (
            "adamw",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "adam",
            "fused_adam",
        ),
        "adamw",
    )
    more = {"sgd": "sgd", "lion": "lion", "lion_32bit": "lion", "adamw_torch_8bit": "adamw_8bit", "adamw_torch_4bit": "adamw_4bit",
            "schedule_free_adamw": "schedule_free", "adafactor": "adafactor", "muon": "muon", "ao_adamw_8bit": "adamw_8bit",
            "ao_adamw_4bit": "adamw_4bit", **dict.fromkeys(BITSANDBYTES, "adamw_8bit"), **dict.fromkeys(PAGED, "adamw")}  # fmt: skip
    if str(old.value).lower() in BITSANDBYTES:
        sheet.note(old, "adamw_8bit, torchao's, in the place of bitsandbytes'")
    if str(old.value).lower() in PAGED:
        sheet.note(old, "adamw: its states are fp32 as there, and stay on the device")
    sheet.put("optimizer.kind", one_of({**kinds, **more})(old), old)
    if str(old.value).lower() == "adamw_torch":
        sheet.put("optimizer.fused", False, old)


def _batch(sheet: Sheet, old: Old) -> None:
    """batch_size: guides for launchers give it to the loader of each process."""
    if old.value not in AUTO:
        sheet.put("batch.micro_batch", whole(old), old)
        sheet.note(
            old,
            "taken for the samples of one device, as guides for launchers mean it; of all devices it is global_batch_size",
        )


def _timeout(sheet: Sheet, old: Old) -> None:
    """Seconds that a collective may take. LLaMA-Factory's files have 180000000, more than the key of Drumline takes."""
    if old.value in AUTO:
        return
    seconds = number(old)
    if seconds > MOST_SECONDS:
        sheet.note(
            old,
            f"launch.timeout_seconds is at most {MOST_SECONDS:,} (four months), and is set to that",
        )
        seconds = float(MOST_SECONDS)
    sheet.put("launch.timeout_seconds", seconds, old)


def _distributed(sheet: Sheet, old: Old) -> None:
    """The name of a strategy, or a guide's switch."""
    if isinstance(old.value, bool) or str(old.value).lower() in ("true", "false"):
        sheet.note(old, HOST)
    else:
        later("distributed_strategy")(sheet, old)


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

TABLE: dict[str, Rule] = by_word(
    {
        # model
        "model_name_or_path model_name base_model pretrained_model_name_or_path": to("model.id"),
        "model_revision": to("model.revision"),
        "tokenizer_name tokenizer_name_or_path": to("model.tokenizer"),
        "attn_implementation": to("model.attention", one_of(ATTENTION)),
        "use_flash_attention_2 use_flash_attention use_flash_attn": switch(
            "model.attention", "flash_attention_2"
        ),
        "trust_remote_code": to("model.trust_remote_code", flag),
        "chat_template_path": lambda sheet, old: sheet.put(
            "model.chat_template", new_path(sheet, found(sheet.base, str(old.value))), old
        ),
        "dtype torch_dtype": later("dtype"),
        "use_cache": gone("training keeps no cache of keys and values"),
        "cache_dir": gone("HF_HOME sets the folder of the hub's files"),
        "low_cpu_mem_usage": gone("weights are read where they are needed"),
        "device_map": gone("the strategy places the model"),
        "config_overrides": to("model.config"),
        "use_fast_tokenizer": gone("tokenizers are fast"),
        "padding_side": gone("rows are packed, or padded at their end"),
        "eos_token": only(why="the tokenizer's own is used", fix="remove it"),
        "pad_token": gone("padding carries no loss, so any token will do"),
        # batch
        "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu": to(
            "batch.micro_batch", whole
        ),
        "micro_batch_size batch_size_per_gpu batch_size_per_device": to("batch.micro_batch", whole),
        "gradient_accumulation_steps": to("batch.accumulation", whole),
        "batch_size": _batch,
        "train_batch_size global_batch_size": to("batch.global_samples", whole),
        "auto_find_batch_size": only(why=NEUTRAL, fix="set per_device_train_batch_size"),
        "average_tokens_across_devices": gone(
            "losses are divided by the tokens of the whole global batch"
        ),
        "split_batches": gone(
            "batch.global_samples is the number of samples of a step, on any number of devices"
        ),
        "accelerator_config": gone(
            "samples are dealt by a global order, the same on any number of devices"
        ),
        # optimizer, schedule, precision
        "learning_rate lr": later("learning_rate"),
        "base_learning_rate base_lr": later("base_learning_rate"),
        "use_linear_scaling linear_scaling": later("use_linear_scaling"),
        "base_batch_size": to("optimizer.lr_base_samples", whole),
        "weight_decay": to("optimizer.weight_decay", number),
        "adam_beta1 adam_beta2 lr_scheduler_kwargs warmup_ratio warmup_steps bf16 fp16": later(),
        "adam_betas": to("optimizer.betas"),
        "adam_epsilon": to("optimizer.eps", number),
        "momentum": to("optimizer.momentum", number),
        "optim": optimizer,
        "max_grad_norm gradient_clipping gradient_clip_val clip_grad_norm": to(
            "optimizer.max_grad_norm", clip
        ),
        "lr_scheduler_type lr_scheduler": to("schedule.kind", one_of(SCHEDULES, NO_SCHEDULES)),
        "min_lr_ratio min_lr_rate": to("schedule.min_ratio", number),
        "mixed_precision precision": later("mixed_precision"),
        "tf32": to("precision.tf32", flag),
        "initial_scale_power": to("precision.initial_scale", power_of_two),
        "gradient_checkpointing activation_checkpointing": to(
            "memory.activation_checkpointing", one_of(CHECKPOINTING), skip=()
        ),
        "torch_compile": to("compile.enabled", flag),
        "torch_compile_mode": to("compile.mode"),
        "torch_compile_backend": only(
            "inductor", why="blocks are compiled by torch's own backend", fix="remove it"
        ),
        # checkpoints, evaluation, figures
        "output_dir": to("run.dir"),
        "save_strategy": later(),
        "save_steps save_interval save_every": later("save_steps"),
        "save_total_limit": to("checkpoint.keep", whole),
        "load_best_model_at_end": to(
            "checkpoint.export", lambda old: "best" if flag(old) else "last"
        ),
        "metric_for_best_model greater_is_better": later(),
        "resume_from_checkpoint": _resume,
        "eval_strategy evaluation_strategy": later("eval_strategy"),
        "eval_steps eval_interval eval_every": later("eval_steps"),
        "eval_on_start": to("eval.at_start", flag),
        "per_device_eval_batch_size per_gpu_eval_batch_size": to("eval.micro_batch", whole),
        "logging_steps log_interval log_every": to("run.log_every", step_count),
        "use_wandb": if_on(tracker("wandb")),
        "use_tensorboard": if_on(tracker("tensorboard")),
        "report_to": _trackers,
        "max_steps": to(
            "run.steps", lambda old: whole(old) if whole(old) > 0 else None
        ),  # -1: Hugging Face counts by epochs
        "num_train_epochs num_epochs epochs max_epochs": to("run.epochs", number),
        "seed": to("run.seed", whole),
        "full_determinism": to("run.deterministic", flag),
        "device": to(
            "run.device", one_of({"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "auto": "auto"})
        ),
        "use_cpu no_cuda": switch("run.device", "cpu"),
        "do_train": only(True, why="`train` always trains", fix="set it to true"),
        # data
        "dataset_name dataset_test_split dataset_streaming max_train_samples max_eval_samples dataset_text_field prompt_column": later(),
        "dataset_config dataset_config_name": later("dataset_config"),
        "datasets dataset_mixture": mixture,
        "test_split_size": hold_out,
        "dataset_mixer dataset_splits dataset_configs": later(),
        "dataset_train_split dataset_split": later("dataset_train_split"),
        "train_file train_files train_data_path dataset_path data_path": later("train_file"),
        "validation_file eval_file": later("validation_file"),
        "test_file": gone("evaluation is on data.eval"),
        "completion_column response_column": later("completion_column"),
        "messages_column messages_field": later("messages_column"),
        "max_seq_length max_length max_seq_len block_size cutoff_len model_max_length": to(
            "data.max_length", whole
        ),
        "packing": to("data.packing", flag),
        "truncation_mode": to(
            "data.truncation", one_of({"keep_start": "right", "keep_end": "left"})
        ),
        "assistant_only_loss completion_only_loss": later("assistant_only_loss"),
        "train_on_inputs": to("data.learn_on", lambda old: "all" if flag(old) else "assistant"),
        "dataset_num_proc preprocessing_num_workers": to("data.workers", whole),
        "dataloader_prefetch_factor": to("data.prefetch", whole),
        "shuffle_dataset": to("data.order", lambda old: "shuffle" if flag(old) else "sequential"),
        # strategy
        "distributed_strategy zero_stage fsdp fsdp_config": later(),
        "distributed": _distributed,
        "distributed_backend ddp_backend": _backend,
        "ddp_timeout": _timeout,
        "ddp_bucket_cap_mb bucket_cap_mb": later("ddp.bucket_cap_mb"),
        "ddp_find_unused_parameters find_unused_parameters": later("ddp.find_unused_parameters"),
        "ddp_broadcast_buffers broadcast_buffers": later("ddp.broadcast_buffers"),
        "ddp_static_graph static_graph": later("ddp.static_graph"),
        "gradient_as_bucket_view": later("ddp.gradient_as_bucket_view"),
        "deepspeed deepspeed_config": later("deepspeed"),
        "fsdp_transformer_layer_cls_to_wrap": later("fsdp_layer"),
        "tensor_parallel_size": later("tp"),
        "pipeline_parallel_size": later("pp"),
        "context_parallel_size sequence_parallel_size": later("cp"),
        "world_size num_gpus n_gpu": later("num_processes"),
        "nproc_per_node": to("launch.nproc", whole),
        "sync_bn sync_batchnorm use_sync_bn": to("model.sync_batchnorm", flag),
        "sync_bn_group_size": later(),
        # adapters
        "use_peft use_lora": later("use_peft"),
        "lora_r lora_rank": later("lora_r"),
        "lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora load_in_4bit load_in_8bit": later(),
        "lora_bias": only("none", why="only the factors are trained", fix="set it to none"),
        "lora_target_parameters": only(
            [], why="adapters are on linear layers", fix="name layers in lora_target_modules"
        ),
        "lora_task_type": gone("the algorithm sets it"),
        "bnb_4bit_quant_type bnb_4bit_use_double_quant use_bnb_nested_quant": gone(
            "QLoRA is NF4 with double quantisation"
        ),
        "bnb_4bit_compute_dtype": gone("the compute type is the precision"),
        # what would change the numbers, and is not done
        "label_smoothing_factor": only(0, 0.0, why=NEUTRAL, fix="set it to 0"),
        "neftune_noise_alpha optim_target_modules": only(why=NEUTRAL, fix="remove it"),
        "router_aux_loss_coef": only(0, 0.0, why=NEUTRAL, fix="remove it"),
        "optim_args": only(why="no optimizer here takes any", fix="remove it"),
        "model_init_kwargs": only(
            {},
            why="values of the model's config go one by one",
            fix="write config_overrides: {key: value}",
        ),
        "dataset_kwargs": only(
            {}, why="each has a key of its own", fix="write it as a key under data"
        ),
        "validation_split_percentage": to("data.holdout", lambda old: number(old) / 100 or 0),
        "padding_free": gone("packing pads nothing"),
        "eval_packing": gone("as in training"),
        "activation_offloading": to(
            "memory.activation_offload",
            one_of({"true": True, "legacy": True, "disk": True, "no": False}),
        ),
        # what has no meaning any more
        "local_rank rank nnodes num_nodes node_rank master_addr master_port init_method dist_url rdzv_endpoint rdzv_id": gone(
            HOST
        ),
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_multiprocessing_context": gone(
            LOADER
        ),
        "dataloader_in_order persistent_workers": gone(LOADER),
        "dataloader_drop_last": gone("the last batch is filled up with rows that carry no weight"),
        "group_by_length length_column_name train_sampling_strategy pad_to_multiple_of packing_strategy padding": gone(
            LENGTHS
        ),
        "remove_unused_columns label_names": gone("columns are found by name"),
        "logging_dir logging_strategy logging_first_step log_level log_level_replica log_on_each_node disable_tqdm": gone(
            LOGS
        ),
        "logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics verbose debug": gone(
            LOGS
        ),
        "experiment_name": gone("the run folder is named by run.dir, or after the YAML"),
        "project wandb_project": called("project"),
        "run_name wandb_run_name": called("name"),
        "trackio_space_id trackio_bucket_id trackio_static_space_id wandb_entity": gone(OUTSIDE),
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant": gone(
            "blocks are run again without re-entering"
        ),
        "bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend half_precision_backend": gone(
            AS_TRAINING
        ),
        "eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics": gone(
            SUMS
        ),
        "batch_eval_metrics prediction_loss_only do_eval do_predict include_inputs_for_metrics": gone(
            SUMS
        ),
        "overwrite_output_dir": gone(
            "a run folder that is not empty is refused; --resume goes on with it"
        ),
        "save_only_model save_on_each_node save_safetensors restore_callback_states_from_checkpoint": gone(
            WHOLE
        ),
        "enable_jit_checkpoint": gone("SIGTERM saves, and --resume goes on"),
        "ignore_data_skip": gone("the position in the data is resumed exactly"),
        "data_seed": gone("run.seed fixes the order of the data, too"),
        "use_liger_kernel liger_kernel_config use_liger": gone(
            "the cross-entropy never makes all logits at once: algorithm.loss_chunk"
        ),
        "torch_empty_cache_steps": gone("torch keeps its own cache"),
        "hub_token token use_auth_token hf_token push_to_hub_token wandb_api_key api_key": gone(
            SECRET
        ),
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision": gone(
            HUB, *AUTO, False
        ),
    }
)


# Sections that guides sort the same arguments into, and what they call things there.
SECTIONS: dict[str, dict[str, str]] = by_word({
    "training train training_args training_arguments trainer args general logging hardware memory performance run environment": {},
    "model_args": {},
    "model": by_word({"name path id name_or_path": "model_name_or_path", "revision": "model_revision", "tokenizer": "tokenizer_name",
                      "attention": "attn_implementation"}),
    "data dataset data_args": by_word({
        "train train_path path file": "train_file", "eval eval_path validation val_file val_path": "validation_file",
        "name": "dataset_name", "config": "dataset_config_name", "split": "dataset_train_split", "num_workers": "dataloader_num_workers",
        "prefetch_factor": "dataloader_prefetch_factor", "pin_memory": "dataloader_pin_memory", "drop_last": "dataloader_drop_last",
        "text_field text_column": "dataset_text_field", "shuffle": "shuffle_dataset", "num_proc": "dataset_num_proc",
        "seed": "data_seed", "streaming": "dataset_streaming"}),
    "optimizer": by_word({"type name kind": "optim", "betas": "adam_betas", "eps": "adam_epsilon", "beta1": "adam_beta1",
                          "beta2": "adam_beta2"}),
    "scheduler lr_scheduler": by_word({"type name kind": "lr_scheduler_type", "num_warmup_steps": "warmup_steps"}),
    "distributed parallelism": by_word({
        "strategy type": "distributed_strategy", "backend": "distributed_backend", "timeout": "ddp_timeout",
        "tp tensor_parallel": "tensor_parallel_size", "pp pipeline_parallel": "pipeline_parallel_size",
        "cp context_parallel": "context_parallel_size"}),
    "ddp": {"backend": "ddp_backend", "timeout": "ddp_timeout", "broadcast_buffers": "ddp_broadcast_buffers"},
    "lora peft": by_word({"r rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "lora_target_modules",
                          "enabled": "use_peft", "bias": "lora_bias", "task_type": "lora_task_type",
                          "modules_to_save": "lora_modules_to_save"}),
    "dataloader": {"batch_size": "per_device_train_batch_size", "num_workers": "dataloader_num_workers",
                   "pin_memory": "dataloader_pin_memory", "prefetch_factor": "dataloader_prefetch_factor",
                   "drop_last": "dataloader_drop_last", "shuffle": "shuffle_dataset"},
    "evaluation eval": {"strategy": "eval_strategy", "steps": "eval_steps", "batch_size": "per_device_eval_batch_size"},
    "checkpoint checkpointing": {"strategy": "save_strategy", "steps": "save_steps", "dir": "output_dir",
                                 "resume": "resume_from_checkpoint"},
})  # fmt: skip


def training_arguments(
    sheet: Sheet,
    olds: list[Old],
    more: Mapping[str, Rule] | None = None,
    what: str = "training arguments",
    first: Callable[[Sheet], None] = lambda sheet: None,
    defaults: Defaults | None = None,
) -> None:
    """Put training arguments on the sheet. `more`: rules of a tool that lie over the table; `first`: what it does before groups are
    combined; `defaults`: its own, over transformers'. Raises ConfigError by the old file's line."""
    flat = [each for old in olds for each in flatten(old)]
    read({**acc.TABLE, **TABLE, **PREFERENCES, **(more or {})}, sheet, flat, what)
    first(sheet)
    groups.combine(sheet)
    acc.combine(sheet)
    fill(
        sheet,
        flat[0],
        {**DEFAULTS, **(defaults or {})},
        "transformers'" if defaults is None else "its",
    )


def flatten(old: Old) -> list[Old]:
    """The arguments of a section under the names that the table knows; anything else is one argument. `model: ID` is its path."""
    if isinstance(old.value, str) and old.key in ("model", "data"):
        return [replace(old, key=SECTIONS[old.key]["path"])]
    if (
        not isinstance(old.value, dict)
        or old.key not in SECTIONS
        or old.key in ("fsdp", "deepspeed")
    ):
        return [old]
    names = SECTIONS[old.key]
    return [
        each
        for one in old.inside()
        for each in flatten(replace(one, key=names.get(one.key, one.key)))
    ]


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
