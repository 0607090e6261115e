"""A YAML of LLaMA-Factory (0.9) → a config.

Its arguments are transformers' and its own; its datasets are named in dataset_info.json.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat.deepspeed import add_tracker, load_file, new_path
from drumline.compat.rules import (
    Converter,
    Rule,
    apply_if_on,
    choose_by_flag,
    drop,
    postpone,
    read_as_text,
    read_choice,
    read_integer,
    read_names,
    read_number,
    reject,
    set_if_on,
    set_key,
)
from drumline.compat.sheet import AUTO, OldKey, Sheet, format_value, take_waiting, translation_error
from drumline.config.mistakes import split_synonyms
from drumline.config.registry import nearest
from drumline.foreign import expand_home
from drumline_convert.arguments import (
    HUB,
    LOGS,
    NEUTRAL,
    OUTSIDE,
    SECRET,
    set_tracker_name,
    training_arguments,
)
from drumline_convert.defaults import Defaults
from drumline_convert.mixtures import hold_out
from drumline_convert.trl import ROLLOUT, note_template, set_rollouts

STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward", "pt": "pretrain", "ppo": "ppo"}
ATTENTION = {
    "auto": "auto",
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
KERNELS = "it only saves time or memory: docs/explanations/speed.md"
SERVING = "it is for inference, not for training"
KINDS = "another optimizer here is optimizer.kind"


def postpone_bits(sheet: Sheet, old: OldKey) -> None:
    """Let quantization_bit wait under transformers' name, load_in_4bit or load_in_8bit."""
    if str(old.value) in ("4", "8"):
        sheet.waiting[f"load_in_{old.value}bit"] = replace(old, value=True)
    elif old.value not in AUTO:
        sheet.report_unsupported(old, "packed weights have 4 or 8 bits", "adapter.quantize: 4bit")


def postpone_as(name: str, convert: Converter) -> Rule:
    """Return a rule that lets the converted value wait under another name."""

    def rule(sheet: Sheet, old: OldKey) -> None:
        sheet.waiting[name] = replace(old, value=convert(old))

    return rule


def set_pure_bf16(sheet: Sheet, old: OldKey) -> None:
    """Set bf16 for the weights, too: no copy of them is kept in fp32."""
    sheet.put("precision.kind", "bf16", old)
    sheet.put("precision.master", "bf16", old)


def _lora_plus_group(old: OldKey) -> list[dict[str, Any]]:
    """Return the optimizer group that gives LoRA+ its own rate for the B matrices."""
    return [{"match": ["*.lora_B.*"], "lr_ratio": read_number(old)}]


LORA_PLUS: dict[str, Rule] = {
    "loraplus_lr_ratio": set_key("optimizer.groups", _lora_plus_group),
    "loraplus_lr_embedding": drop("embeddings have no adapter"),
}


def _adapter_targets(old: OldKey) -> Any:
    """Return PEFT's word for all linear layers in the place of LLaMA-Factory's `all`."""
    if old.value == "all":
        return "all-linear"
    return old.value


TABLE: dict[str, Rule] = LORA_PLUS | split_synonyms(
    {
        "stage finetuning_type dataset eval_dataset dataset_dir val_size max_samples": postpone(),
        "template": note_template,
        "train_on_prompt": set_key("data.learn_on", choose_by_flag("all", "assistant")),
        "mask_history": reject(
            why="every answer is learned", fix="give the messages before the last answer weight: 0"
        ),
        "neat_packing": set_if_on("data.packing", True),
        "streaming data_shared_file_system": drop(
            "rows go into a token cache on disk as they are read"
        ),
        "buffer_size preprocessing_batch_size overwrite_cache tokenized_path": drop(
            "the token cache is named by what it is made of"
        ),
        "mix_strategy": reject(
            "concat", why="sources are concatenated", fix="see docs/reference/data.md on weights"
        ),
        "interleave_probs": reject(
            why="sources are concatenated", fix="see docs/reference/data.md on weights"
        ),
        "default_system": reject(
            why="rows have their own system messages", fix="write it into the chat template"
        ),
        "tool_format enable_thinking preserve_thinking": drop("the chat template decides"),
        "media_dir": reject(
            why="images are named from the folder of their data file", fix="put them there"
        ),
        "disable_shuffling": set_key("data.order", choose_by_flag("sequential", "shuffle")),
        "ignore_pad_token_for_loss eval_on_each_dataset compute_accuracy": drop(
            "padding has no loss, and token_accuracy is measured"
        ),
        "lora_target": postpone_as("lora_target_modules", _adapter_targets),
        "additional_target": postpone_as("lora_modules_to_save", read_names),
        "quantization_bit": postpone_bits,
        "quantization_method": reject(
            "bnb", "bitsandbytes", why="codes are Drumline's own", fix="remove it"
        ),
        "quantization_type": reject("nf4", why="4 bits are NF4", fix="set it to nf4"),
        "double_quantization quantization_device_map": drop(
            "QLoRA is NF4 with double quantisation"
        ),
        "pissa_init": set_if_on("adapter.init", "pissa_fast"),
        "pissa_iter pissa_convert create_new_adapter": drop(
            "an adapter is exported as it was trained"
        ),
        "adapter_name_or_path": reject(
            why="training begins with a new adapter", fix="merge that one into the model first"
        ),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules": reject(
            why=NEUTRAL, fix="see model.freeze"
        ),
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model": apply_if_on(
            drop("of a vision-language model: model.freeze: [vision, projector]")
        ),
        "use_llama_pro use_dft_loss use_asft_loss use_eaft_loss shift_attn mixture_of_depths": reject(
            why=NEUTRAL, fix="remove it"
        ),
        "use_galore use_apollo use_badam use_adam_mini": reject(why=NEUTRAL, fix=KINDS),
        "use_muon": set_if_on("optimizer.kind", "muon"),
        "pure_bf16": apply_if_on(set_pure_bf16),
        "fp8": postpone(),
        "flash_attn": set_key("model.attention", read_choice(ATTENTION)),
        "disable_gradient_checkpointing": set_key(
            "memory.activation_checkpointing",
            choose_by_flag("none", "full"),
            skip=(),
        ),
        "use_reentrant_gc use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels": drop(
            KERNELS
        ),
        "train_from_scratch": set_if_on("model.init", "random"),
        "rope_scaling": reject(
            why="it is a part of the model's config", fix="write model.config: {rope_parameters: …}"
        ),
        "add_tokens": set_key("model.new_tokens", read_names),
        "add_special_tokens": reject(
            why="new tokens are plain ones",
            fix="add them to the tokenizer, and name its folder as model.tokenizer",
        ),
        "resize_vocab": drop("the embedding grows where its rows are too few"),
        "moe_aux_loss_coef pref_bco_weight ppo_score_norm ppo_whiten_rewards ld_alpha": reject(
            0, 0.0, 1, 1.0, why=NEUTRAL, fix="remove it"
        ),
        "upcast_layernorm upcast_lmhead_output": drop("master weights are fp32"),
        "kto_chosen_weight": set_key("algorithm.desirable_weight", read_number),
        "kto_rejected_weight": set_key("algorithm.undesirable_weight", read_number),
        "ref_model": set_key("algorithm.reference_model.id", read_as_text),
        "ref_model_adapters reward_model_adapters": reject(
            why="a model is whole", fix="merge its adapter into it"
        ),
        "ref_model_quantization_bit reward_model_quantization_bit": drop(
            "models beside the policy are not packed"
        ),
        "ppo_target": set_key("algorithm.kl.target", read_number),
        "ppo_buffer_size": set_key("algorithm.minibatches", read_integer),
        "reward_model_type": reject(
            "full", why="a reward model is a folder or a hub id", fix="merge its adapter into it"
        ),
        "max_new_tokens": set_key("algorithm.generator.max_new_tokens", read_integer),
        "do_sample num_beams length_penalty skip_special_tokens predict_with_generate": drop(
            SERVING
        ),
        "infer_backend infer_dtype offload_folder use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_config": drop(
            SERVING
        ),
        "export_dir export_size export_device export_quantization_bit export_legacy_format": drop(
            "`drumline export` writes a run's model"
        ),
        "export_hub_model_id": drop(HUB),
        "image_max_pixels": set_key("data.image_max_pixels", read_integer),
        "plot_loss": drop("the report (RUN/report.html) has the plot", False),
        "print_param_status include_effective_tokens_per_second": drop(LOGS),
        "early_stopping_steps": postpone("patience"),
        "use_swanlab": apply_if_on(add_tracker("swanlab")),
        "swanlab_project": set_tracker_name("project"),
        "swanlab_run_name": set_tracker_name("name"),
        "swanlab_workspace swanlab_mode swanlab_logdir": drop(OUTSIDE),
        "hf_hub_token ms_hub_token om_hub_token swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url": drop(
            SECRET
        ),
    }
)
# The keys of an entry of dataset_info.json that map columns and tags → the names that Drumline
# reads. If the column of the messages is mapped too, only the last name of a tag is read.
READ = {
    "system": ("system", "system_prompt", "system_message"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "kto_tag": ("label", "kto_tag"),
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("function", "observation", "tool"),
    "function_tag": ("tool_call", "function_call"),
}
DEFAULTS: Defaults = {
    "data.max_length": (2048, "cutoff_len"),
    "adapter.r": (8, "lora_rank"),
    "adapter.alpha": (16, "lora_alpha"),
    "adapter.targets": ("all-linear", "lora_target"),
    "memory.activation_checkpointing": ("full", "disable_gradient_checkpointing"),
}
# Further defaults of stage ppo: files of other stages have these keys for inference only.
SAMPLING: Defaults = {
    "algorithm.generator.max_new_tokens": (1024, "max_new_tokens"),
    "algorithm.generator.temperature": (0.95, "temperature"),
    "algorithm.generator.top_p": (0.7, "top_p"),
    "algorithm.generator.top_k": (50, "top_k"),
}


SAMPLING_KEYS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")


def llama_factory(sheet: Sheet, olds: list[OldKey]) -> None:
    """Put a whole file of LLaMA-Factory on the sheet. Raises ConfigError with the file's line."""
    keys_with_value = [old for old in olds if old.value is not None]
    if keys_with_value:
        olds = keys_with_value
    stage = _find_key("stage", olds)
    if stage is None:
        stage = replace(olds[0], key="stage", value="sft", place=("stage",))
    kind = read_choice(STAGES)(stage)
    training_arguments(
        sheet,
        olds,
        _table_for(kind),
        "LLaMA-Factory's arguments",
        lambda sheet: _combine(sheet, stage, kind),
        _defaults_for(kind),
    )


def _find_key(name: str, olds: list[OldKey]) -> OldKey | None:
    """Return the first old key of that name; None if there is none."""
    for old in olds:
        if old.key == name:
            return old
    return None


def _table_for(kind: str) -> dict[str, Rule]:
    """Return the rules for a kind of algorithm."""
    if kind == "ppo":
        return {**ROLLOUT, **TABLE, "cutoff_len": postpone("max_prompt_length")}
    serving = dict.fromkeys(SAMPLING_KEYS, drop(SERVING))
    return {**serving, **TABLE, "max_new_tokens": drop(SERVING)}


def _defaults_for(kind: str) -> Defaults:
    """Return LLaMA-Factory's own defaults for a kind of algorithm."""
    if kind == "ppo":
        return DEFAULTS | SAMPLING
    if kind == "pretrain":
        return DEFAULTS | {"data.packing": (True, "packing")}
    return DEFAULTS


def _combine(sheet: Sheet, stage: OldKey, kind: str) -> None:
    """Set what several keys decide together. `stage`: its key; `kind`: of the algorithm."""
    _combine_tuning(sheet, stage)
    if kind != "dpo":
        loss = sheet.waiting.pop("pref_loss", None)
        if loss is not None:
            sheet.note(loss, f"without effect: stage is {stage.value}")
    if "learning_rate" not in sheet.waiting:
        # Set here, before the losses of pairs set another default.
        sheet.put("optimizer.lr", 5e-5, replace(stage, key="learning_rate"))
    if "pref_loss" not in sheet.waiting:
        sheet.put("algorithm.kind", kind, stage)
    if kind == "ppo":
        completion, _ = SAMPLING["algorithm.generator.max_new_tokens"]
        prompt, _ = DEFAULTS["data.max_length"]
        set_rollouts(sheet, stage, completion, prompt)
    guess_stage(sheet)
    set_patience(sheet)
    _combine_datasets(sheet, kind)


def _combine_tuning(sheet: Sheet, stage: OldKey) -> None:
    """Translate finetuning_type and LoRA's rank for the group of the adapter."""
    tuning = sheet.waiting.pop("finetuning_type", None)
    if tuning is None:
        tuning = replace(stage, key="finetuning_type", value="lora")
    if tuning.value not in ("lora", "full"):
        sheet.report_unsupported(
            tuning, "all weights are trained, or LoRA's", "name what to freeze in model.freeze"
        )
    sheet.waiting["use_peft"] = replace(
        tuning, key="finetuning_type: lora", value=tuning.value == "lora"
    )
    rank = sheet.waiting.get("lora_r")
    if rank is not None and "lora_alpha" not in sheet.waiting:
        sheet.waiting["lora_alpha"] = replace(rank, value=2 * read_integer(rank))


def _combine_datasets(sheet: Sheet, kind: str) -> None:
    """Set the sources of training and evaluation, and the rows to hold out."""
    old = take_waiting(
        sheet, "stage", "dataset", "eval_dataset", "dataset_dir", "val_size", "max_samples"
    )
    for part, key in (("train", "dataset"), ("eval", "eval_dataset")):
        if key in old and old[key].value not in AUTO:
            sources = _sources(
                sheet, old[key], old.get("dataset_dir"), old.get("max_samples"), kind
            )
            sheet.put(f"data.{part}", sources, old[key])
    hold_out(sheet, old.get("val_size"))


def _sources(
    sheet: Sheet, names: OldKey, folder: OldKey | None, most: OldKey | None, kind: str
) -> list[dict[str, Any]]:
    """Return the sources of data for some names of dataset_info.json.

    Args:
        names: the key that names datasets.
        folder: the key of the folder of dataset_info.json; None means `data`.
        most: the key that limits the rows of each dataset, if any.
        kind: the kind of algorithm.

    Raises ConfigError if the file is missing or lacks a name.
    """
    limit: int | None = None
    if most is not None and read_integer(most) > 0:
        limit = read_integer(most)
    folder_name = "data" if folder is None else str(folder.value)
    if folder_name == "ONLINE":
        return [_with_limit({"kind": "hub", "id": name}, limit) for name in read_names(names)]
    path = find_nearby(sheet.base, f"{folder_name}/dataset_info.json")
    if path is None:
        raise translation_error(
            folder or names,
            f"there is no {folder_name}/dataset_info.json, which says what"
            f" {format_value(names.value)} is",
            "put it there",
        )
    known = {old.key: old for old in load_file(path, names)}
    sources = []
    for name in read_names(names):
        if name not in known:
            guess = nearest(name, list(known))
            fix = f"did you mean {guess!r}?" if guess else "add it there"
            raise translation_error(names, f"{path} has no dataset {name!r}", fix)
        sources.append(_source(sheet, known[name], path.parent, limit, kind))
    return sources


def _with_limit(source: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Return a source with its limit of rows, if there is one."""
    if limit is None:
        return source
    return {**source, "limit": limit}


def _source(
    sheet: Sheet, dataset: OldKey, folder: Path, limit: int | None, kind: str
) -> dict[str, Any]:
    """Return the source of data for one entry of the dataset_info.json in `folder`."""
    entry = dataset.children_by_key()
    if "num_samples" in entry and entry["num_samples"].value:
        own_limit = read_integer(entry["num_samples"])
        limit = own_limit if limit is None else min(limit, own_limit)
    source = _location(sheet, dataset, entry, folder)
    columns = _columns(sheet, dataset, entry, kind)
    source = _with_limit(source, limit)
    if columns:
        source["columns"] = columns
    return source


def _location(sheet: Sheet, old: OldKey, entry: dict[str, OldKey], folder: Path) -> dict[str, Any]:
    """Return the hub's dataset or the file of an entry. Raises ConfigError if it has neither."""
    has_hub_url = "hf_hub_url" in entry or "ms_hub_url" in entry
    if "folder" in entry and entry["folder"].value and has_hub_url:
        sheet.report_unsupported(
            entry["folder"],
            "all files of the dataset are read",
            "{kind: file, path: hf://datasets/OWNER/NAME/FOLDER}",
        )
    for key, prefix in (("hf_hub_url", ""), ("ms_hub_url", "modelscope:")):
        if key in entry:
            source = {"kind": "hub", "id": f"{prefix}{entry[key].value}"}
            if "subset" in entry:
                source["name"] = str(entry["subset"].value)
            if "split" in entry:
                source["split"] = str(entry["split"].value)
            return source
    if "file_name" not in entry:
        raise translation_error(
            old, "has neither file_name nor hf_hub_url", "give one of them: no script is run"
        )
    path = folder / str(entry["file_name"].value)
    return {"kind": "file", "path": new_path(sheet, path)}


# The names of alpaca's columns that Drumline's formats read without a mapping.
USUAL_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "kto_tag",
}


# The keys of `columns` there → the keys of `columns` here.
MAPPED_COLUMNS = {
    "prompt": "prompt",
    "response": "completion",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}


def _columns(sheet: Sheet, old: OldKey, entry: dict[str, OldKey], kind: str) -> dict[str, str]:
    """Return Drumline's `columns` for an entry; nothing for names that its formats read anyway."""
    columns = entry["columns"].children_by_key() if "columns" in entry else {}
    tags = entry["tags"].children_by_key() if "tags" in entry else {}
    given = {key: str(each.value) for key, each in columns.items() if each.value}
    if "audios" in given:
        sheet.report_unsupported(
            entry["columns"], "there are no audios here", "take these rows out"
        )
    if given.get("videos", "videos") != "videos":
        sheet.report_unsupported(
            entry["columns"], "videos are read of a column `videos`", "rename the column"
        )
    own = {key: given[key] for key in ("images", "tools") if given.get(key, key) != key}
    form = entry["formatting"].value if "formatting" in entry else "alpaca"
    if form in ("sharegpt", "openai"):
        return own | _message_columns(sheet, old, columns, tags, form)
    if kind == "pretrain":
        return {"text": given.get("prompt", "instruction")}
    return own | _alpaca_columns(sheet, old, given)


def _message_columns(
    sheet: Sheet, old: OldKey, columns: dict[str, OldKey], tags: dict[str, OldKey], form: str
) -> dict[str, str]:
    """Return `columns` for rows of messages; reports names that Drumline does not read.

    `columns` and `tags` are the keys of these sections of the entry; `form` is sharegpt or openai.
    """
    name = "conversations"
    if "messages" in columns and columns["messages"].value:
        name = str(columns["messages"].value)
    has_roles = form == "openai"
    if "role_tag" in tags and tags["role_tag"].value == "role":
        has_roles = True
    if not has_roles and name not in ("conversations", "conversation"):
        sheet.report_unsupported(
            old,
            f"turns of {{from, value}} stand under `conversations` here, not {name!r}",
            "rename the column",
        )
    is_mapped = has_roles and name not in ("messages", "conversations")
    for key, names in READ.items():
        each = columns.get(key) or tags.get(key)
        if each is None or not each.value:
            continue
        readable: tuple[str, ...] = names
        if is_mapped:
            readable = names[-1:] if key in tags else ()
        if each.value in readable:
            continue
        if readable:
            sheet.report_unsupported(
                each, f"it is {' or '.join(readable)} here", "rename it in the rows"
            )
        else:
            sheet.report_unsupported(
                each,
                f"nothing is read beside messages under {name}",
                "rename those to conversations",
            )
    return {"messages": name} if is_mapped else {}


def _alpaca_columns(sheet: Sheet, old: OldKey, given: dict[str, str]) -> dict[str, str]:
    """Return `columns` for rows in alpaca's format; nothing if they have their usual names."""
    renamed = []
    for key, name in given.items():
        if key not in ("images", "tools") and USUAL_COLUMNS.get(key, name) != name:
            renamed.append(name)
    if not renamed:
        return {}
    if given.keys() - MAPPED_COLUMNS.keys() - {"images", "tools"}:
        sheet.report_unsupported(
            old,
            f"columns under other names: {', '.join(renamed)}",
            "rename them to instruction, input, output, history, system",
        )
    return {MAPPED_COLUMNS[key]: name for key, name in given.items() if key in MAPPED_COLUMNS}


# Files lie deep in a tool's folder: so many folders above the old file are searched.
MOST_FOLDERS_ABOVE = 3


def find_nearby(base: Path, name: str) -> Path | None:
    """Return a file that an old file names; None if it is nowhere.

    It is looked for in the folder of the old file, in the folders above, and in the current one.
    """
    here = base.absolute()
    for folder in (here, *list(here.parents)[:MOST_FOLDERS_ABOVE], Path.cwd()):
        path = folder / expand_home(name)
        if path.is_file():
            return path
    return None


def guess_stage(sheet: Sheet) -> None:
    """Find a DeepSpeed JSON in the tool's folder, or take the ZeRO stage from its name.

    The name counts only on a lenient sheet, if the file is nowhere.
    """
    old = sheet.waiting.get("deepspeed")
    if old is None or not isinstance(old.value, str) or not old.value:
        return
    path = find_nearby(sheet.base, old.value)
    if path is not None:
        sheet.waiting["deepspeed"] = replace(old, value=str(path))
        return
    match = re.search(r"z(?:ero)?_?([0-3])", Path(old.value).name)
    if sheet.lenient and match:
        del sheet.waiting["deepspeed"]
        stage = match[1]
        kind = "ddp" if stage == "0" else f"zero{stage}"
        sheet.put("strategy.kind", kind, old)
        sheet.note(old, "is not there: the stage is taken from its name, and nothing else of it")


def set_patience(sheet: Sheet) -> None:
    """Set after how many evaluations without a better one the run stops.

    They are counted if evaluations come every N steps or epochs.
    """
    old = sheet.waiting.pop("patience", None)
    if old is None:
        return
    if _evaluates_regularly(sheet):
        sheet.put("eval.patience", read_integer(old), old)
    else:
        sheet.report_unsupported(
            old,
            "evaluations are counted where they come each N steps or epochs",
            "set eval.every and eval.patience",
        )


def _evaluates_regularly(sheet: Sheet) -> bool:
    """Return True if the old file sets an interval between evaluations."""
    if sheet.get("eval.every"):
        return True
    strategy = sheet.waiting.get("eval_strategy")
    name = "steps" if strategy is None else strategy.value
    if name == "epoch":
        return True
    return name == "steps" and "eval_steps" in sheet.waiting
