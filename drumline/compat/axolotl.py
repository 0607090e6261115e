"""A YAML of Axolotl (0.18) → a config. Many of its keys are transformers' arguments under the same name; the others stand here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from drumline.compat.arguments import (
    CHECKPOINTING,
    LENGTHS,
    LOGS,
    NEUTRAL,
    OUTSIDE,
    SECRET,
    SUMS,
    called,
    optimizer,
    training_arguments,
)
from drumline.compat.deepspeed import found, new_path, tracker
from drumline.compat.llama_factory import KERNELS, LORA_PLUS, guess_stage, patience, pure_bf16
from drumline.compat.mixtures import hold_out
from drumline.compat.rules import (
    Defaults,
    Rule,
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
from drumline.compat.sheet import AUTO, Old, Sheet, pop, refuse
from drumline.compat.trl import IDLE, ROLLOUT, defaults_of, grpo_loss, rollouts, template
from drumline.core.mistakes import by_word

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


def _bf16(sheet: Sheet, old: Old) -> None:
    """bf16: true, auto or full, which keeps no fp32 weights."""
    if str(old.value).lower() == "full":
        pure_bf16(sheet, old)
    else:
        later("bf16")(sheet, old)


def _part_of_epoch(old: Old) -> str | None:
    return f"{1 / number(old):.6g} epochs" if number(old) > 0 else None


def _checkpointing(sheet: Sheet, old: Old) -> None:
    """gradient_checkpointing: also `offload`, which moves what is kept to the host."""
    offload = str(old.value).lower() in ("offload", "offload_disk", "unsloth")
    sheet.put(
        "memory.activation_checkpointing", "full" if offload else one_of(CHECKPOINTING)(old), old
    )
    if offload:
        sheet.put("memory.activation_offload", True, old)


def _wandb(sheet: Sheet, old: Old) -> None:
    """wandb_project: with one Axolotl logs there."""
    if old.value:
        tracker("wandb")(sheet, old)
        called("project")(sheet, old)


def _trl(table: dict[str, Rule]) -> Rule:
    """The section of TRL's arguments."""
    return lambda sheet, old: read(table, sheet, old.inside(), f"{WHAT}'s trl")


def _template(sheet: Sheet, old: Old) -> None:
    template(sheet, old)
    sheet.waiting["chat_template"] = old


TABLE: dict[str, Rule] = LORA_PLUS | by_word(
    {
        "datasets test_datasets pretraining_dataset val_set_size rl reward_model adapter": later(),
        "model_type tokenizer_type base_model_config tokenizer_use_fast tokenizer_legacy processor_type cls_model_config": gone(FILES),
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model": gone(FILES),
        "tokenizer_config": to("model.tokenizer"),
        "revision_of_model": to("model.revision"),
        "overrides_of_model_config": to("model.config"),
        "sequence_len": to("data.max_length", whole),
        "sample_packing": to("data.packing", flag),
        "excess_length_strategy": to("data.truncation", one_of(TOO_LONG)),
        "eval_sample_packing pad_to_sequence_len sample_packing_group_size sample_packing_bin_size eval_sequence_len": gone(LENGTHS),
        "sample_packing_sequentially multipack_real_batches sample_packing_eff_est": gone(LENGTHS),
        "eval_batch_size": to("eval.micro_batch", whole),
        "batch_size": only(why="it is micro_batch_size × gradient_accumulation_steps", fix="set those"),
        "optimizer": optimizer,
        "cosine_min_lr_ratio": to("schedule.min_ratio", number),
        "cosine_constant_lr_ratio lr_groups embedding_lr embedding_lr_scale lr_div_factor lr_quadratic_warmup": only(
            why=NEUTRAL, fix="optimizer.groups gives parameters rates of their own"
        ),
        "bf16 bfloat16": _bf16,
        "float16": later("fp16"),
        "float32 low_cpu_mem_usage gpu_memory_limit max_memory": gone("precision.kind and the plan decide it"),
        "fp8": later(),
        "gradient_checkpointing": _checkpointing,
        "flash_attention": switch("model.attention", "flash_attention_2"),
        "sdp_attention": switch("model.attention", "sdpa"),
        "eager_attention": switch("model.attention", "eager"),
        "flex_attention": switch("model.attention", "flex_attention"),
        "xformers_attention s2_attention sage_attention": only(why="there is no such kernel", fix="model.attention has others"),
        "evals_per_epoch": to("eval.every", _part_of_epoch),
        "saves_per_epoch": to("checkpoint.every", _part_of_epoch),
        "save_first_step": gone("checkpoint.every saves at its multiples"),
        "lora_target_linear dp_replicate_size dp_shard_size": later(),
        "peft_use_dora": later("use_dora"),
        "peft_use_rslora": later("use_rslora"),
        "peft_init_lora_weights": to("adapter.init", one_of({"pissa": "pissa", "true": "zero", "gaussian": "zero"})),
        "peft_trainable_token_indices": to("adapter.trainable_tokens"),
        "lora_model_dir": only(why="training begins with a new adapter", fix="merge that one into the model first"),
        "lora_fan_in_fan_out lora_on_cpu qlora_sharded_model_loading peft_autocast_adapter_dtype merge_lora": gone("each layer tells it"),
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel plugins cut_cross_entropy tiled_mlp": gone(KERNELS),
        "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm": gone(KERNELS),
        "liger_cross_entropy unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o": gone(KERNELS),
        "liger_fused_linear_cross_entropy unsloth_cross_entropy_loss chunked_cross_entropy": gone(KERNELS),
        "relora relora_prune_ratio peft_layers_to_transform loftq_config lora_rank_pattern": only(why=NEUTRAL, fix="remove it"),
        "unfrozen_parameters freeze_mm_modules": only(why="what is trained is not named", fix="name what to freeze in model.freeze"),
        "tokens": to("model.new_tokens"),
        "special_tokens added_tokens_overrides": only(why="the tokenizer's own are used", fix="model.tokenizer names another"),
        "chat_template": _template,
        "chat_template_jinja chat_template_kwargs eot_tokens default_system_message": only(
            why="the model's own chat template is used", fix="write yours to a file: model.chat_template"
        ),
        "rl_beta dpo_beta orpo_alpha": to("algorithm.beta", number),
        "dpo_loss_type": later("loss_type"),
        "dpo_loss_weights": later("loss_weights"),
        "dpo_use_weighting dpo_norm_loss rpo_alpha": only(why=NEUTRAL, fix="algorithm.sft_weight is the nearest to rpo_alpha"),
        "kto_desirable_weight": to("algorithm.desirable_weight", number),
        "kto_undesirable_weight": to("algorithm.undesirable_weight", number),
        "center_rewards_coefficient": to("algorithm.center", number),
        "trl": _trl({**IDLE, "beta": to("algorithm.beta", number)}),
        "dataset_processes": to("data.workers", whole),
        "dataset_prepared_path dataset_keep_in_memory skip_prepare_dataset dataset_shard_idx": gone("the cache is data.cache_dir"),
        "shuffle_merged_datasets": to("data.order", lambda old: "shuffle" if flag(old) else "sequential"),
        "dataset_exact_deduplication curriculum_sampling min_sample_len": only(why=NEUTRAL, fix="see docs/data_reference.md"),
        "early_stopping_patience": later("patience"),
        "fsdp_version fsdp_final_state_dict_type ddp trainer_cls": gone("strategy says it"),
        "strict": gone("every key is checked"),
        "sequence_parallel_degree": later("cp"),
        "heads_k_stride ring_attn_func": gone("strategy.cp_method says it"),
        "wandb_project": _wandb,
        "wandb_name mlflow_run_name": called("name"),
        "mlflow_experiment_name": called("project"),
        "wandb_run_id wandb_watch wandb_log_model wandb_mode": gone(OUTSIDE, None, ""),
        "use_mlflow": if_on(tracker("mlflow")),
        "mlflow_tracking_uri hf_mlflow_log_artifacts": gone(OUTSIDE, None, ""),
        "use_comet comet_workspace comet_project_name comet_mode use_trackio trackio_project_name": gone("trackers: run.report_to", None),
        "comet_api_key hf_use_auth_token": gone(SECRET, None),
        "loss_watchdog_threshold loss_watchdog_patience": gone("health.on_spike and health.spike_zscore"),
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval eval_table_size eval_max_new_tokens generate_samples": gone(SUMS),
        "gc_steps flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp experimental_skip_move_to_device": gone(KERNELS),
        "include_tkps profiler_steps profiler_steps_start": gone(LOGS),
        "device_map device": gone("the strategy places the model"),
    }
)  # fmt: skip
DEFAULTS: Defaults = {
    "batch.micro_batch": (1, "micro_batch_size"),
    "schedule.kind": ("cosine", "lr_scheduler"),
    "run.epochs": (1.0, "num_epochs"),
    "precision.kind": ("auto", "bf16"),
    "data.max_length": (512, "sequence_len"),
    "data.truncation": ("drop", "excess_length_strategy"),
}


def axolotl(sheet: Sheet, olds: list[Old]) -> None:
    """Put a whole file on the sheet. Raises ConfigError by the old file's line."""
    # Its files have many keys without a value.
    given = [old for old in olds if old.value is not None]
    table, defaults = TABLE, DEFAULTS
    if any(old.key == "rl" and str(old.value).lower() == "grpo" for old in given):
        table = {
            **TABLE,
            "trl": _trl(
                {**ROLLOUT, "beta": to("algorithm.kl.coefficient", number), "loss_type": grpo_loss}
            ),
        }
        defaults = DEFAULTS | {
            dotted: each
            for dotted, each in defaults_of("grpo").items()
            if dotted.startswith("algorithm.")
        }
    training_arguments(sheet, given, table, WHAT, lambda sheet: _combine(sheet, given[0]), defaults)


def _combine(sheet: Sheet, first: Old) -> None:
    old = pop(
        sheet,
        "datasets",
        "test_datasets",
        "pretraining_dataset",
        "val_set_size",
        "rl",
        "reward_model",
        "adapter",
    )
    adapter = old.get("adapter", replace(first, key="adapter", value=None))
    kind = (
        one_of({"lora": "lora", "qlora": "qlora", "no": None, "none": None})(adapter)
        if adapter.value
        else None
    )
    sheet.waiting["use_peft"] = replace(adapter, key="adapter: lora", value=kind is not None)
    if kind == "qlora" and "load_in_8bit" not in sheet.waiting:
        sheet.waiting.setdefault("load_in_4bit", replace(adapter, value=True))
    algorithm, rl = "sft", old.get("rl")
    if rl is not None and rl.value not in AUTO:
        algorithm = one_of(ALGORITHMS)(rl)
        if rl.value == "ipo":
            sheet.waiting.setdefault("loss_type", replace(rl, value="ipo"))
    elif "reward_model" in old and flag(old["reward_model"]):
        rl, algorithm = old["reward_model"], "reward"
    elif "pretraining_dataset" in old and old["pretraining_dataset"].value:
        rl, algorithm = old["pretraining_dataset"], "pretrain"
        old.setdefault("datasets", rl)
    elif "loss_type" not in sheet.waiting and _all_are(old.get("datasets"), DOCUMENTS, short=True):
        rl, algorithm = old["datasets"], "pretrain"
        sheet.put("data.packing", True, rl, over=False)
        sheet.note(
            rl,
            "all are documents: algorithm pretrain, which cuts them into pieces of data.max_length",
        )
    if "loss_type" not in sheet.waiting:
        sheet.put("algorithm.kind", algorithm, rl or first)
    if algorithm == "pretrain" and sheet.get("data.truncation") is None:
        sheet.put("data.truncation", "right", rl or first)
    if algorithm == "grpo":
        rollouts(sheet, rl or first)
    _defaults(sheet, first)
    _copies(sheet)
    guess_stage(sheet)
    patience(sheet)
    styled = sheet.waiting.pop("chat_template", None)
    if algorithm == "sft" and styled is None and _all_are(old.get("datasets"), INSTRUCTIONS):
        sheet.put("model.chat_template", "alpaca", old["datasets"])
        sheet.note(old["datasets"], "all have Alpaca's prompt, as there: model.chat_template")
    for part, key in (("train", "datasets"), ("eval", "test_datasets")):
        if key in old and old[key].value:
            sheet.put(f"data.{part}", _sources(sheet, old[key], algorithm), old[key])
    hold_out(sheet, old.get("val_set_size"))


def _defaults(sheet: Sheet, first: Old) -> None:
    """Warm-up where nothing sets it, and all linear layers where they are on."""
    constant = getattr(sheet.origins.get(("schedule", "kind")), "value", None) == "constant"
    if not {"warmup_steps", "warmup_ratio"} & sheet.waiting.keys() and not constant:
        steps = sheet.get("run.steps")
        key, value = (
            ("warmup_steps", min(int(0.03 * steps), 100)) if steps else ("warmup_ratio", 0.03)
        )
        sheet.waiting[key] = made = replace(first, key=key, value=value, place=(key,))
        sheet.note(
            made,
            "not set there, so its own default" + ("" if steps else ", which is 100 steps at most"),
        )
    linear, named = (
        sheet.waiting.pop("lora_target_linear", None),
        sheet.waiting.get("lora_target_modules"),
    )
    if linear is not None and flag(linear):
        if named is not None and named.value != "all-linear":
            sheet.note(named, "without effect: lora_target_linear takes all linear layers")
        sheet.waiting["lora_target_modules"] = replace(linear, value="all-linear")


def _copies(sheet: Sheet) -> None:
    """dp_replicate_size copies of dp_shard_size shards: FSDP, or DDP where nothing is cut."""
    old = pop(sheet, "dp_replicate_size", "dp_shard_size")
    copies, shards = old.get("dp_replicate_size"), old.get("dp_shard_size")
    cut = bool({"fsdp", "fsdp_config"} & sheet.waiting.keys()) or (
        shards is not None and whole(shards) > 1
    )
    if copies is not None and whole(copies) > 1:
        if cut:
            sheet.put("strategy.kind", "fsdp2", copies)
            sheet.put("strategy.replicate", whole(copies), copies)
        elif "deepspeed" not in sheet.waiting:
            sheet.put("strategy.kind", "ddp", copies)
    if shards is not None:
        sheet.note(shards, "shards go over all processes that tp, cp and replicate leave")


DOCUMENTS = ("completion", "pretrain")
# Types of datasets that have Alpaca's prompt.
INSTRUCTIONS = (
    "alpaca",
    "gpteacher",
    "jeopardy",
    "oasst",
)


def _all_are(old: Old | None, types: tuple[str, ...], short: bool = False) -> bool:
    """Whether all datasets have one of these types; `short`: or a variant of it, as `completion:name`."""
    items = old.value if old is not None and isinstance(old.value, list) else []
    kinds = [str(item.get("type")) if isinstance(item, dict) else "" for item in items]
    return bool(kinds) and {re.split(r"[.:]", kind)[0] if short else kind for kind in kinds} <= set(
        types
    )


def _sources(sheet: Sheet, old: Old, algorithm: str) -> list[dict[str, Any]]:
    items = old.value if isinstance(old.value, list) else [old.value]
    made: list[dict[str, Any]] = []
    for number_, item in enumerate(items):
        entry = replace(
            old,
            value={"path": item} if isinstance(item, str) else item,
            place=(*old.place, str(number_)),
        ).by_key()
        if "path" not in entry or not isinstance(entry["path"].value, str):
            raise refuse(
                old, f"dataset {number_ + 1} has no path", "give a file, a folder, or a hub id"
            )
        columns = _columns(sheet, entry, algorithm)
        made += [
            {**place, **({"columns": columns} if columns else {})}
            for place in _places(sheet, entry)
        ]
        for key in (
            entry.keys() - KNOWN - {k for k in entry if entry[k].value in (None, "", [], False)}
        ):
            sheet.note(
                entry[key], "unknown here: rows are read by their format (docs/data_reference.md)"
            )
    return made


KNOWN = {"path", "type", "data_files", "ds_type", "split", "name", "revision", "field", "field_messages", "text_column",
         "message_field_role", "message_field_content", "message_property_mappings", "field_chosen", "field_rejected"}  # fmt: skip


def _places(sheet: Sheet, entry: dict[str, Old]) -> list[dict[str, Any]]:
    path, files = str(entry["path"].value), entry.get("data_files")
    if files is not None and files.value:
        base = found(sheet.base, path)
        names = [
            base / name if base.is_dir() else found(sheet.base, name) for name in name_list(files)
        ]
        if path in ("json", "csv", "parquet", "text") or base.is_dir():
            return [{"kind": "file", "path": new_path(sheet, each)} for each in names]
        sheet.note(files, "all files of the dataset are read")
    local = found(sheet.base, path)
    if "://" not in path and (
        local.exists() or local.suffix in (".json", ".jsonl", ".csv", ".parquet", ".txt")
    ):
        return [{"kind": "file", "path": new_path(sheet, local)}]
    if "://" in path:
        return [{"kind": "file", "path": path}]
    keys: dict[str, Any] = {
        key: str(entry[key].value)
        for key in ("name", "split", "revision")
        if key in entry and entry[key].value
    }
    return [{"kind": "hub", "id": path, **keys}]


def _columns(sheet: Sheet, entry: dict[str, Old], algorithm: str) -> dict[str, str]:
    """What `columns` of Drumline would say: nothing for types whose names formats have anyway."""
    given = {key: str(each.value) for key, each in entry.items() if key in KNOWN and each.value}
    kind = entry.get("type")
    if kind is not None and isinstance(kind.value, dict):
        inner = {each.key: str(each.value) for each in kind.inside() if each.value}
        ours = {"field_instruction": "prompt", "field_output": "completion", "field_prompt": "prompt", "field_completion": "completion",
                "field_chosen": "chosen", "field_rejected": "rejected", "field_label": "label"}  # fmt: skip
        if rest := sorted(inner.keys() - ours.keys()):
            sheet.lacks(
                kind,
                f"{', '.join(rest)}: prompts are made by the chat template",
                "rename the columns",
            )
        return {ours[key]: name for key, name in inner.items() if key in ours}
    word = "" if kind is None else re.split(r"[.:]", str(kind.value))[0]
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
    if word not in (
        "",
        "alpaca_chat",
        "sharegpt",
        "chat_template",
        "chatml",
        "llama3",
        *INSTRUCTIONS,
    ):
        sheet.note(
            entry["type"],
            "unknown here: the columns tell the format, or data.train[N].columns (docs/data_reference.md)",
        )
    sides = {
        part: given[f"field_{part}"]
        for part in ("chosen", "rejected")
        if given.get(f"field_{part}", part) != part
    }
    return _of_chats(sheet, entry, given, algorithm, sides) if word == "chat_template" else sides


# Columns of messages that are found without a mapping, in any form of messages.
TALKS = ("conversations", "conversation", "messages", "dialogue", "dialog", "trajectory", "chat")
PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}


def _of_chats(
    sheet: Sheet,
    entry: dict[str, Old],
    given: dict[str, str],
    algorithm: str,
    sides: dict[str, str],
) -> dict[str, str]:
    """`columns` of rows for a chat template: of pairs the messages are the prompt, unless both answers are whole conversations."""
    name, made = given.get("field_messages", "messages"), dict[str, str]()
    if algorithm in ("dpo", "orpo", "simpo", "reward") and (sides or name not in TALKS):
        whole_talks = "argilla" in given["type"]
        made = {
            **({} if whole_talks else {"prompt": name}),
            "chosen": "chosen",
            "rejected": "rejected",
            **sides,
        }
    elif name not in TALKS:
        made = {"messages" if algorithm == "sft" else "prompt": name}
    maps = (
        entry["message_property_mappings"].by_key() if "message_property_mappings" in entry else {}
    )
    old_names = {
        part: entry[f"message_field_{part}"]
        for part in PROPERTIES
        if f"message_field_{part}" in entry
    }
    for part, each in {**old_names, **maps}.items():
        # Mapped columns hold messages as they are here.
        names = PROPERTIES.get(part, (part,))[: 1 if made else None]
        if each.value and each.value not in names:
            sheet.lacks(each, f"it is {' or '.join(names)} here", "rename it in the rows")
    return made
