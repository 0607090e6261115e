"""A YAML of Axolotl (0.18) → a config.

Many of its keys are transformers' arguments under the same name; the rest stand here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from drumline.compat.deepspeed import add_tracker
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
    read_number,
    reject,
    set_if_on,
    set_key,
)
from drumline.compat.sheet import AUTO, OldKey, Sheet, take_waiting, translation_error
from drumline.config.mistakes import split_synonyms
from drumline_convert.arguments import (
    CHECKPOINTING,
    LENGTHS,
    LOGS,
    NEUTRAL,
    OUTSIDE,
    SECRET,
    SUMS,
    set_optimizer,
    set_tracker_name,
    training_arguments,
)
from drumline_convert.defaults import Defaults
from drumline_convert.llama_factory import (
    KERNELS,
    LORA_PLUS,
    guess_stage,
    set_patience,
    set_pure_bf16,
)
from drumline_convert.mixtures import hold_out, note_unknown
from drumline_convert.sources import Dataset, put_sources, sources_of
from drumline_convert.trl import (
    IDLE,
    ROLLOUT,
    defaults_of,
    note_template,
    set_grpo_loss,
    set_rollouts,
)

WHAT = "Axolotl's config"
ALGORITHMS = {
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
    "grpo": "grpo",
}
FILES = "the model's files say it"
TOO_LONG = {"drop": "drop", "truncate": "right", "raise": "error"}


def _postpone_bf16(sheet: Sheet, old: OldKey) -> None:
    """Read bf16: true, auto or full, which keeps no fp32 weights."""
    if str(old.value).lower() == "full":
        set_pure_bf16(sheet, old)
    else:
        postpone("bf16")(sheet, old)


def _part_of_epoch(old: OldKey) -> str | None:
    """Return the interval for a number of times per epoch; None for 0."""
    times = read_number(old)
    if times <= 0:
        return None
    return f"{1 / times:.6g} epochs"


def _set_checkpointing(sheet: Sheet, old: OldKey) -> None:
    """Read gradient_checkpointing; with `offload`, what is kept moves to the host."""
    if str(old.value).lower() in ("offload", "offload_disk", "unsloth"):
        sheet.put("memory.activation_checkpointing", "full", old)
        sheet.put("memory.activation_offload", True, old)
    else:
        sheet.put("memory.activation_checkpointing", read_choice(CHECKPOINTING)(old), old)


def _set_wandb_project(sheet: Sheet, old: OldKey) -> None:
    """Read wandb_project: Axolotl logs to W&B if it is set."""
    if old.value:
        add_tracker("wandb")(sheet, old)
        set_tracker_name("project")(sheet, old)


def _trl_section(table: dict[str, Rule]) -> Rule:
    """Return the rule for the section of TRL's arguments, whose keys have rules in `table`."""

    def rule(sheet: Sheet, old: OldKey) -> None:
        apply_rules(table, sheet, old.children(), f"{WHAT}'s trl")

    return rule


def _postpone_template(sheet: Sheet, old: OldKey) -> None:
    """Note the chat template, and remember that the file names one."""
    note_template(sheet, old)
    sheet.waiting["chat_template"] = old


def _is_grpo(old: OldKey) -> bool:
    """Return True for `rl: grpo`."""
    return old.key == "rl" and str(old.value).lower() == "grpo"


TABLE: dict[str, Rule] = LORA_PLUS | split_synonyms(
    {
        "datasets test_datasets pretraining_dataset val_set_size rl reward_model adapter": postpone(),
        "model_type tokenizer_type base_model_config tokenizer_use_fast tokenizer_legacy processor_type cls_model_config": drop(
            FILES
        ),
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model": drop(
            FILES
        ),
        "tokenizer_config": set_key("model.tokenizer"),
        "revision_of_model": set_key("model.revision"),
        "overrides_of_model_config": set_key("model.config"),
        "sequence_len": set_key("data.max_length", read_integer),
        "sample_packing": set_key("data.packing", read_flag),
        "excess_length_strategy": set_key("data.truncation", read_choice(TOO_LONG)),
        "eval_sample_packing pad_to_sequence_len sample_packing_group_size sample_packing_bin_size eval_sequence_len": drop(
            LENGTHS
        ),
        "sample_packing_sequentially multipack_real_batches sample_packing_eff_est": drop(LENGTHS),
        "eval_batch_size": set_key("eval.micro_batch", read_integer),
        "batch_size": reject(
            why="it is micro_batch_size × gradient_accumulation_steps", fix="set those"
        ),
        "optimizer": set_optimizer,
        "cosine_min_lr_ratio": set_key("schedule.min_ratio", read_number),
        "cosine_constant_lr_ratio lr_groups embedding_lr embedding_lr_scale lr_div_factor lr_quadratic_warmup": reject(
            why=NEUTRAL, fix="optimizer.groups gives parameters rates of their own"
        ),
        "bf16 bfloat16": _postpone_bf16,
        "float16": postpone("fp16"),
        "float32 low_cpu_mem_usage gpu_memory_limit max_memory": drop(
            "precision.kind and the plan decide it"
        ),
        "fp8": postpone(),
        "gradient_checkpointing": _set_checkpointing,
        "flash_attention": set_if_on("model.attention", "flash_attention_2"),
        "sdp_attention": set_if_on("model.attention", "sdpa"),
        "eager_attention": set_if_on("model.attention", "eager"),
        "flex_attention": set_if_on("model.attention", "flex_attention"),
        "xformers_attention s2_attention sage_attention": reject(
            why="there is no such kernel", fix="model.attention has others"
        ),
        "evals_per_epoch": set_key("eval.every", _part_of_epoch),
        "saves_per_epoch": set_key("checkpoint.every", _part_of_epoch),
        "save_first_step": drop("checkpoint.every saves at its multiples"),
        "lora_target_linear dp_replicate_size dp_shard_size": postpone(),
        "peft_use_dora": postpone("use_dora"),
        "peft_use_rslora": postpone("use_rslora"),
        "peft_init_lora_weights": set_key(
            "adapter.init", read_choice({"pissa": "pissa", "true": "zero", "gaussian": "zero"})
        ),
        "peft_trainable_token_indices": set_key("adapter.trainable_tokens"),
        "lora_model_dir": reject(
            why="training begins with a new adapter", fix="merge that one into the model first"
        ),
        "lora_fan_in_fan_out lora_on_cpu qlora_sharded_model_loading peft_autocast_adapter_dtype merge_lora": drop(
            "each layer tells it"
        ),
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel plugins cut_cross_entropy tiled_mlp": drop(
            KERNELS
        ),
        "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm": drop(KERNELS),
        "liger_cross_entropy unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o": drop(KERNELS),
        "liger_fused_linear_cross_entropy unsloth_cross_entropy_loss chunked_cross_entropy": drop(
            KERNELS
        ),
        "relora relora_prune_ratio peft_layers_to_transform loftq_config lora_rank_pattern": reject(
            why=NEUTRAL, fix="remove it"
        ),
        "unfrozen_parameters freeze_mm_modules": reject(
            why="what is trained is not named", fix="name what to freeze in model.freeze"
        ),
        "tokens": set_key("model.new_tokens"),
        "special_tokens added_tokens_overrides": reject(
            why="the tokenizer's own are used", fix="model.tokenizer names another"
        ),
        "chat_template": _postpone_template,
        "chat_template_jinja chat_template_kwargs eot_tokens default_system_message": reject(
            why="the model's own chat template is used",
            fix="write yours to a file: model.chat_template",
        ),
        "rl_beta dpo_beta orpo_alpha": set_key("algorithm.beta", read_number),
        "dpo_loss_type": postpone("loss_type"),
        "dpo_loss_weights": postpone("loss_weights"),
        "dpo_use_weighting dpo_norm_loss rpo_alpha": reject(
            why=NEUTRAL, fix="algorithm.sft_weight is the nearest to rpo_alpha"
        ),
        "kto_desirable_weight": set_key("algorithm.desirable_weight", read_number),
        "kto_undesirable_weight": set_key("algorithm.undesirable_weight", read_number),
        "center_rewards_coefficient": set_key("algorithm.center", read_number),
        "trl": _trl_section({**IDLE, "beta": set_key("algorithm.beta", read_number)}),
        "dataset_processes": set_key("data.workers", read_integer),
        "dataset_prepared_path dataset_keep_in_memory skip_prepare_dataset dataset_shard_idx": drop(
            "the cache is data.cache_dir"
        ),
        "shuffle_merged_datasets": set_key("data.order", choose_by_flag("shuffle", "sequential")),
        "dataset_exact_deduplication curriculum_sampling min_sample_len": reject(
            why=NEUTRAL, fix="see docs/reference/data.md"
        ),
        "early_stopping_patience": postpone("patience"),
        "fsdp_version fsdp_final_state_dict_type ddp trainer_cls": drop("strategy says it"),
        "strict": drop("every key is checked"),
        "sequence_parallel_degree": postpone("cp"),
        "heads_k_stride ring_attn_func": drop("strategy.cp_method says it"),
        "wandb_project": _set_wandb_project,
        "wandb_name mlflow_run_name": set_tracker_name("name"),
        "mlflow_experiment_name": set_tracker_name("project"),
        "wandb_run_id wandb_watch wandb_log_model wandb_mode": drop(OUTSIDE, None, ""),
        "use_mlflow": apply_if_on(add_tracker("mlflow")),
        "mlflow_tracking_uri hf_mlflow_log_artifacts": drop(OUTSIDE, None, ""),
        "use_comet comet_workspace comet_project_name comet_mode use_trackio trackio_project_name": drop(
            "trackers: run.report_to", None
        ),
        "comet_api_key hf_use_auth_token": drop(SECRET, None),
        "loss_watchdog_threshold loss_watchdog_patience": drop(
            "health.on_spike and health.spike_zscore"
        ),
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval eval_table_size eval_max_new_tokens generate_samples": drop(
            SUMS
        ),
        "gc_steps flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp experimental_skip_move_to_device": drop(
            KERNELS
        ),
        "include_tkps profiler_steps profiler_steps_start": drop(LOGS),
        "device_map device": drop("the strategy places the model"),
    }
)
DEFAULTS: Defaults = {
    "batch.micro_batch": (1, "micro_batch_size"),
    "schedule.kind": ("cosine", "lr_scheduler"),
    "run.epochs": (1.0, "num_epochs"),
    "precision.kind": ("auto", "bf16"),
    "data.max_length": (512, "sequence_len"),
    "data.truncation": ("drop", "excess_length_strategy"),
}


def axolotl(sheet: Sheet, olds: list[OldKey]) -> None:
    """Put a whole file of Axolotl on the sheet. Raises ConfigError with the file's line."""
    # Its files have many keys without a value.
    given = [old for old in olds if old.value is not None]
    table = TABLE
    defaults = DEFAULTS
    if any(_is_grpo(old) for old in given):
        rollout_rules = {
            **ROLLOUT,
            "beta": set_key("algorithm.kl.coefficient", read_number),
            "loss_type": set_grpo_loss,
        }
        table = {**TABLE, "trl": _trl_section(rollout_rules)}
        defaults = dict(DEFAULTS)
        for dotted, default in defaults_of("grpo").items():
            if dotted.startswith("algorithm."):
                defaults[dotted] = default
    training_arguments(sheet, given, table, WHAT, lambda sheet: _combine(sheet, given[0]), defaults)


def _combine(sheet: Sheet, first: OldKey) -> None:
    """Set what several keys decide together. `first` is the first key of the file."""
    old = take_waiting(
        sheet,
        "datasets",
        "test_datasets",
        "pretraining_dataset",
        "val_set_size",
        "rl",
        "reward_model",
        "adapter",
    )
    _postpone_adapter(sheet, old.get("adapter"), first)
    algorithm, reason = _algorithm(sheet, old)
    decisive = reason or first
    if "loss_type" not in sheet.waiting:
        sheet.put("algorithm.kind", algorithm, decisive)
    if algorithm == "pretrain" and sheet.get("data.truncation") is None:
        sheet.put("data.truncation", "right", decisive)
    if algorithm == "grpo":
        set_rollouts(sheet, decisive)
    _postpone_warmup(sheet, first)
    _postpone_lora_targets(sheet)
    _set_copies(sheet)
    guess_stage(sheet)
    set_patience(sheet)
    _set_alpaca_template(sheet, algorithm, old.get("datasets"))
    for part, key in (("train", "datasets"), ("eval", "test_datasets")):
        if key in old and old[key].value:
            put_sources(sheet, part, _sources(sheet, old[key], algorithm), old[key])
    hold_out(sheet, old.get("val_set_size"))


def _postpone_adapter(sheet: Sheet, adapter: OldKey | None, first: OldKey) -> None:
    """Translate `adapter` for the group of the adapter; without it, all weights are trained."""
    if adapter is None:
        adapter = replace(first, key="adapter", value=None)
    kind = None
    if adapter.value:
        kinds = {"lora": "lora", "qlora": "qlora", "no": None, "none": None}
        kind = read_choice(kinds)(adapter)
    sheet.waiting["use_peft"] = replace(adapter, key="adapter: lora", value=kind is not None)
    if kind == "qlora" and "load_in_8bit" not in sheet.waiting:
        sheet.waiting.setdefault("load_in_4bit", replace(adapter, value=True))


def _algorithm(sheet: Sheet, old: dict[str, OldKey]) -> tuple[str, OldKey | None]:
    """Return the kind of algorithm and the key that decides it, if any but the default does.

    The datasets of `old` are those of pretraining if only these are given.
    """
    rl = old.get("rl")
    if rl is not None and rl.value not in AUTO:
        algorithm = read_choice(ALGORITHMS)(rl)
        if rl.value == "ipo":
            sheet.waiting.setdefault("loss_type", replace(rl, value="ipo"))
        return algorithm, rl
    if "reward_model" in old and read_flag(old["reward_model"]):
        return "reward", old["reward_model"]
    if "pretraining_dataset" in old and old["pretraining_dataset"].value:
        pretraining = old["pretraining_dataset"]
        old.setdefault("datasets", pretraining)
        return "pretrain", pretraining
    datasets = old.get("datasets")
    if datasets is not None and "loss_type" not in sheet.waiting and _are_documents(datasets):
        sheet.put("data.packing", True, datasets, over=False)
        sheet.note(
            datasets,
            "all are documents: algorithm pretrain, which cuts them into pieces of data.max_length",
        )
        return "pretrain", datasets
    return "sft", rl


MOST_WARMUP_STEPS = 100
WARMUP_RATIO = 0.03


def _postpone_warmup(sheet: Sheet, first: OldKey) -> None:
    """Let Axolotl's default warm-up wait if nothing sets one: 3 % of all steps, 100 at most."""
    kind = sheet.origins.get(("schedule", "kind"))
    if kind is not None and kind.value == "constant":
        return
    if "warmup_steps" in sheet.waiting or "warmup_ratio" in sheet.waiting:
        return
    steps = sheet.get("run.steps")
    if steps:
        key = "warmup_steps"
        value: float = min(int(WARMUP_RATIO * steps), MOST_WARMUP_STEPS)
        note = "not set there, so Axolotl's own default"
    else:
        key = "warmup_ratio"
        value = WARMUP_RATIO
        note = "not set there, so Axolotl's own default; Axolotl takes 100 steps at most"
    default = replace(first, key=key, value=value, place=(key,))
    sheet.waiting[key] = default
    sheet.note(default, note)


def _postpone_lora_targets(sheet: Sheet) -> None:
    """Let all linear layers wait as LoRA's targets if lora_target_linear is on."""
    linear = sheet.waiting.pop("lora_target_linear", None)
    if linear is None or not read_flag(linear):
        return
    named = sheet.waiting.get("lora_target_modules")
    if named is not None and named.value != "all-linear":
        sheet.note(named, "without effect: lora_target_linear takes all linear layers")
    sheet.waiting["lora_target_modules"] = replace(linear, value="all-linear")


def _set_copies(sheet: Sheet) -> None:
    """Set the strategy for dp_replicate_size copies of dp_shard_size shards.

    It is FSDP, or DDP if nothing is sharded.
    """
    old = take_waiting(sheet, "dp_replicate_size", "dp_shard_size")
    copies = old.get("dp_replicate_size")
    shards = old.get("dp_shard_size")
    is_sharded = "fsdp" in sheet.waiting or "fsdp_config" in sheet.waiting
    if not is_sharded and shards is not None:
        is_sharded = read_integer(shards) > 1
    if copies is not None and read_integer(copies) > 1:
        if is_sharded:
            sheet.put("strategy.kind", "fsdp2", copies)
            sheet.put("strategy.replicate", read_integer(copies), copies)
        elif "deepspeed" not in sheet.waiting:
            sheet.put("strategy.kind", "ddp", copies)
    if shards is not None:
        sheet.note(shards, "shards go over all processes that tp, cp and replicate leave")


def _set_alpaca_template(sheet: Sheet, algorithm: str, datasets: OldKey | None) -> None:
    """Set the chat template to Alpaca's if all datasets have its prompt and the file names none."""
    named = sheet.waiting.pop("chat_template", None)
    if algorithm != "sft" or named is not None or datasets is None:
        return
    types = _dataset_types(datasets)
    if types and set(types) <= set(INSTRUCTIONS):
        sheet.put("model.chat_template", "alpaca", datasets)
        sheet.note(datasets, "all have Alpaca's prompt, as there: model.chat_template")


# Types of datasets of plain documents.
DOCUMENTS = ("completion", "pretrain")
# Types of datasets that have Alpaca's prompt.
INSTRUCTIONS = ("alpaca", "gpteacher", "jeopardy", "oasst")


# Further types whose rows need no note.
KNOWN_TYPES = ("", "alpaca_chat", "sharegpt", "chat_template", "chatml", "llama3", *INSTRUCTIONS)


def _dataset_types(datasets: OldKey) -> list[str]:
    """Return the type of each dataset in a list; none if it is not a list."""
    if not isinstance(datasets.value, list):
        return []
    types = []
    for item in datasets.value:
        if isinstance(item, dict):
            types.append(str(item.get("type")))
        else:
            types.append("")
    return types


def _base_type(name: str) -> str:
    """Return a type of datasets without its variant: `completion` for `completion:name`."""
    return re.split(r"[.:]", name)[0]


def _are_documents(datasets: OldKey) -> bool:
    """Return True if all datasets have plain documents."""
    types = [_base_type(name) for name in _dataset_types(datasets)]
    return bool(types) and set(types) <= set(DOCUMENTS)


def _sources(sheet: Sheet, old: OldKey, algorithm: str) -> list[dict[str, Any]]:
    """Return the sources of data for a list of datasets, or for one.

    Raises ConfigError if a dataset has no path.
    """
    items = old.value if isinstance(old.value, list) else [old.value]
    sources: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        value = {"path": item} if isinstance(item, str) else item
        entry = replace(old, value=value, place=(*old.place, str(index))).children_by_key()
        if "path" not in entry or not isinstance(entry["path"].value, str):
            raise translation_error(
                old, f"dataset {index + 1} has no path", "give a file, a folder, or a hub id"
            )
        columns = _columns(sheet, entry, algorithm)
        for source in _locations(sheet, entry):
            if columns:
                source["columns"] = columns
            sources.append(source)
        note_unknown(sheet, entry, KNOWN)
    return sources


# The keys of a dataset that are translated here.
KNOWN = {
    "path",
    "type",
    "data_files",
    "ds_type",
    "split",
    "name",
    "revision",
    "field",
    "field_messages",
    "text_column",
    "message_field_role",
    "message_field_content",
    "message_property_mappings",
    "field_chosen",
    "field_rejected",
}


def _locations(sheet: Sheet, entry: dict[str, OldKey]) -> list[dict[str, Any]]:
    """Return the files or the hub's dataset of an entry, as sources of data."""
    dataset = Dataset(
        entry["path"],
        entry.get("name"),
        entry.get("split"),
        revision=entry.get("revision"),
        files=entry.get("data_files"),
    )
    return sources_of(sheet, dataset)


# Keys of a type that is a section → the keys of `columns` here.
TYPE_COLUMNS = {
    "field_instruction": "prompt",
    "field_output": "completion",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_label": "label",
}


def _columns(sheet: Sheet, entry: dict[str, OldKey], algorithm: str) -> dict[str, str]:
    """Return Drumline's `columns` for a dataset; nothing for names that its formats read anyway."""
    given = {key: str(each.value) for key, each in entry.items() if key in KNOWN and each.value}
    kind = entry.get("type")
    if kind is not None and isinstance(kind.value, dict):
        return _columns_of_type(sheet, kind)
    word = "" if kind is None else _base_type(str(kind.value))
    if algorithm == "pretrain" or word in DOCUMENTS:
        if algorithm != "pretrain":
            sheet.note(
                entry["type"],
                "beside chats a long document is not cut into pieces: data.truncation drops it, or its end",
            )
        return {"text": given.get("field", given.get("text_column", "text"))}
    if algorithm == "sft" and word in INSTRUCTIONS and sheet.get("model.chat_template") is None:
        sheet.note(
            entry["type"],
            "the prompt is made by the chat template; Axolotl's is model.chat_template: alpaca",
        )
    if word not in KNOWN_TYPES:
        sheet.note(
            entry["type"],
            "unknown here: the columns tell the format, or data.train[N].columns (docs/reference/data.md)",
        )
    sides = {}
    for part in ("chosen", "rejected"):
        name = given.get(f"field_{part}", part)
        if name != part:
            sides[part] = name
    if word == "chat_template":
        return _chat_columns(sheet, entry, given, algorithm, sides)
    return sides


def _columns_of_type(sheet: Sheet, kind: OldKey) -> dict[str, str]:
    """Return `columns` for a type that is a section with the names of columns."""
    names = {each.key: str(each.value) for each in kind.children() if each.value}
    unknown = sorted(names.keys() - TYPE_COLUMNS.keys())
    if unknown:
        sheet.report_unsupported(
            kind,
            f"{', '.join(unknown)}: prompts are made by the chat template",
            "rename the columns",
        )
    return {TYPE_COLUMNS[key]: name for key, name in names.items() if key in TYPE_COLUMNS}


# Columns of messages that are found without a mapping, in any form of messages.
TALKS = ("conversations", "conversation", "messages", "dialogue", "dialog", "trajectory", "chat")
# The parts of a message → the names that Drumline reads.
PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}


def _chat_columns(
    sheet: Sheet,
    entry: dict[str, OldKey],
    given: dict[str, str],
    algorithm: str,
    sides: dict[str, str],
) -> dict[str, str]:
    """Return `columns` for rows of a chat template; reports properties that cannot be read.

    In pairs the messages are the prompt, unless both answers are whole conversations.

    Args:
        entry: the keys of the dataset.
        given: their values as text.
        sides: the columns of the two answers of a pair, if they have other names than usual.
    """
    name = given.get("field_messages", "messages")
    columns: dict[str, str] = {}
    if algorithm in ("dpo", "orpo", "simpo", "reward") and (sides or name not in TALKS):
        if "argilla" not in given["type"]:
            columns["prompt"] = name
        columns |= {"chosen": "chosen", "rejected": "rejected", **sides}
    elif name not in TALKS:
        key = "messages" if algorithm == "sft" else "prompt"
        columns[key] = name
    for part, each in _message_properties(entry).items():
        names = PROPERTIES.get(part, (part,))
        if columns:
            # Mapped columns hold messages under Drumline's own names only.
            names = names[:1]
        if each.value and each.value not in names:
            sheet.report_unsupported(
                each, f"it is {' or '.join(names)} here", "rename it in the rows"
            )
    return columns


def _message_properties(entry: dict[str, OldKey]) -> dict[str, OldKey]:
    """Return the keys that name the parts of a message, by part."""
    properties = {}
    for part in PROPERTIES:
        if f"message_field_{part}" in entry:
            properties[part] = entry[f"message_field_{part}"]
    if "message_property_mappings" in entry:
        properties |= entry["message_property_mappings"].children_by_key()
    return properties
