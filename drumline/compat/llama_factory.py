"""A YAML of LLaMA-Factory (0.9) → a config. Its arguments are transformers' and its own; its datasets are named in dataset_info.json."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat.arguments import (
    HUB,
    LOGS,
    NEUTRAL,
    OUTSIDE,
    SECRET,
    called,
    training_arguments,
)
from drumline.compat.deepspeed import load_file, new_path, tracker
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
    switch,
    to,
    whole,
)
from drumline.compat.sheet import AUTO, Old, Sheet, pop, refuse, shown
from drumline.compat.trl import ROLLOUT, rollouts, template
from drumline.core.mistakes import by_word
from drumline.core.registry import nearest
from drumline.foreign import expanded

STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward", "pt": "pretrain", "ppo": "ppo"}
ATTENTION = {
    "auto": "auto",
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
KERNELS = "it only saves time or memory: docs/speed.md"
SERVING = "it is for inference, not for training"
KINDS = "another optimizer here is optimizer.kind"


def bits(sheet: Sheet, old: Old) -> None:
    """quantization_bit, by the names of transformers."""
    if str(old.value) in ("4", "8"):
        sheet.waiting[f"load_in_{old.value}bit"] = replace(old, value=True)
    elif old.value not in AUTO:
        sheet.lacks(old, "packed weights have 4 or 8 bits", "adapter.quantize: 4bit")


def waits_as(name: str, value: Any) -> Rule:
    """The key waits under another name, and with another value."""
    return lambda sheet, old: sheet.waiting.__setitem__(name, replace(old, value=value(old)))


def pure_bf16(sheet: Sheet, old: Old) -> None:
    """No weights in fp32."""
    sheet.put("precision.kind", "bf16", old)
    sheet.put("precision.master", "bf16", old)


LORA_PLUS: dict[str, Rule] = {
    "loraplus_lr_ratio": to(
        "optimizer.groups", lambda old: [{"match": ["*.lora_B.*"], "lr_ratio": number(old)}]
    ),
    "loraplus_lr_embedding": gone("embeddings have no adapter"),
}
TABLE: dict[str, Rule] = LORA_PLUS | by_word(
    {
        "stage finetuning_type dataset eval_dataset dataset_dir val_size max_samples": later(),
        "template": template,
        "train_on_prompt": to("data.learn_on", lambda old: "all" if flag(old) else "assistant"),
        "mask_history": only(why="every answer is learned", fix="give the messages before the last answer weight: 0"),
        "neat_packing": switch("data.packing", True),
        "streaming data_shared_file_system": gone("rows go into a token cache on disk as they are read"),
        "buffer_size preprocessing_batch_size overwrite_cache tokenized_path": gone("the token cache is named by what it is made of"),
        "mix_strategy": only("concat", why="sources are concatenated", fix="see docs/data_reference.md on weights"),
        "interleave_probs": only(why="sources are concatenated", fix="see docs/data_reference.md on weights"),
        "default_system": only(why="rows have their own system messages", fix="write it into the chat template"),
        "tool_format enable_thinking preserve_thinking": gone("the chat template decides"),
        "media_dir": only(why="images are named from the folder of their data file", fix="put them there"),
        "disable_shuffling": to("data.order", lambda old: "sequential" if flag(old) else "shuffle"),
        "ignore_pad_token_for_loss eval_on_each_dataset compute_accuracy": gone("padding has no loss, and token_accuracy is measured"),
        "lora_target": waits_as("lora_target_modules", lambda old: "all-linear" if old.value == "all" else old.value),
        "additional_target": waits_as("lora_modules_to_save", name_list),
        "quantization_bit": bits,
        "quantization_method": only("bnb", "bitsandbytes", why="codes are Drumline's own", fix="remove it"),
        "quantization_type": only("nf4", why="4 bits are NF4", fix="set it to nf4"),
        "double_quantization quantization_device_map": gone("QLoRA is NF4 with double quantisation"),
        "pissa_init": switch("adapter.init", "pissa_fast"),
        "pissa_iter pissa_convert create_new_adapter": gone("an adapter is exported as it was trained"),
        "adapter_name_or_path": only(why="training begins with a new adapter", fix="merge that one into the model first"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules": only(why=NEUTRAL, fix="see model.freeze"),
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model": if_on(
            gone("of a vision-language model: model.freeze: [model.visual]")
        ),
        "use_llama_pro use_dft_loss use_asft_loss use_eaft_loss shift_attn mixture_of_depths": only(why=NEUTRAL, fix="remove it"),
        "use_galore use_apollo use_badam use_adam_mini": only(why=NEUTRAL, fix=KINDS),
        "use_muon": switch("optimizer.kind", "muon"),
        "pure_bf16": if_on(pure_bf16),
        "fp8": later(),
        "flash_attn": to("model.attention", one_of(ATTENTION)),
        "disable_gradient_checkpointing": to("memory.activation_checkpointing", lambda old: "none" if flag(old) else "full", skip=()),
        "use_reentrant_gc use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels": gone(KERNELS),
        "train_from_scratch": switch("model.init", "random"),
        "rope_scaling": only(why="it is a part of the model's config", fix="write model.config: {rope_parameters: …}"),
        "add_tokens": to("model.new_tokens", name_list),
        "add_special_tokens": only(
            why="new tokens are plain ones", fix="add them to the tokenizer, and name its folder as model.tokenizer"
        ),
        "resize_vocab": gone("the embedding grows where its rows are too few"),
        "moe_aux_loss_coef pref_bco_weight ppo_score_norm ppo_whiten_rewards ld_alpha": only(0, 0.0, 1, 1.0, why=NEUTRAL, fix="remove it"),
        "upcast_layernorm upcast_lmhead_output": gone("master weights are fp32"),
        "kto_chosen_weight": to("algorithm.desirable_weight", number),
        "kto_rejected_weight": to("algorithm.undesirable_weight", number),
        "ref_model": to("algorithm.reference_model.id", lambda old: str(old.value)),
        "ref_model_adapters reward_model_adapters": only(why="a model is whole", fix="merge its adapter into it"),
        "ref_model_quantization_bit reward_model_quantization_bit": gone("models beside the policy are not packed"),
        "ppo_target": to("algorithm.kl.target", number),
        "ppo_buffer_size": to("algorithm.minibatches", whole),
        "reward_model_type": only("full", why="a reward model is a folder or a hub id", fix="merge its adapter into it"),
        "max_new_tokens": to("algorithm.generator.max_new_tokens", whole),
        "do_sample num_beams length_penalty skip_special_tokens predict_with_generate": gone(SERVING),
        "infer_backend infer_dtype offload_folder use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_config": gone(SERVING),
        "export_dir export_size export_device export_quantization_bit export_legacy_format": gone("`drumline export` writes a run's model"),
        "export_hub_model_id": gone(HUB),
        "image_max_pixels": to("data.image_max_pixels", whole),
        "plot_loss": gone("the report (RUN/report.html) has the plot", False),
        "print_param_status include_effective_tokens_per_second": gone(LOGS),
        "early_stopping_steps": later("patience"),
        "use_swanlab": if_on(tracker("swanlab")),
        "swanlab_project": called("project"),
        "swanlab_run_name": called("name"),
        "swanlab_workspace swanlab_mode swanlab_logdir": gone(OUTSIDE),
        "hf_hub_token ms_hub_token om_hub_token swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url": gone(SECRET),
    }
)  # fmt: skip
# Columns and tags of sharegpt's rows → the names that Drumline reads. Where the messages' own column is mapped, of tags the last alone.
READ = {
    "system": ("system", "system_prompt", "system_message"), "chosen": ("chosen",), "rejected": ("rejected",),
    "kto_tag": ("label", "kto_tag"), "role_tag": ("from", "role"), "content_tag": ("value", "content"),
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",),
    "observation_tag": ("function", "observation", "tool"), "function_tag": ("tool_call", "function_call"),
}  # fmt: skip
DEFAULTS: Defaults = {
    "data.max_length": (2048, "cutoff_len"),
    "adapter.r": (8, "lora_rank"),
    "adapter.alpha": (16, "lora_alpha"),
    "adapter.targets": ("all-linear", "lora_target"),
    "memory.activation_checkpointing": ("full", "disable_gradient_checkpointing"),
}
# Of stage ppo: its files have these keys for inference, too.
SAMPLING: Defaults = {
    "algorithm.generator.max_new_tokens": (1024, "max_new_tokens"),
    "algorithm.generator.temperature": (0.95, "temperature"),
    "algorithm.generator.top_p": (0.7, "top_p"),
    "algorithm.generator.top_k": (50, "top_k"),
}


def llama_factory(sheet: Sheet, olds: list[Old]) -> None:
    """Put a whole file on the sheet. Raises ConfigError by the old file's line."""
    olds = [old for old in olds if old.value is not None] or olds
    stage = next(
        (old for old in olds if old.key == "stage"),
        replace(olds[0], key="stage", value="sft", place=("stage",)),
    )
    kind = one_of(STAGES)(stage)
    table = (
        {**ROLLOUT, **TABLE, "cutoff_len": later("max_prompt_length")} if kind == "ppo" else TABLE
    )
    if kind != "ppo":  # its files have them for inference
        table = {
            **dict.fromkeys(
                ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens"),
                gone(SERVING),
            ),
            **table,
        }
        table["max_new_tokens"] = gone(SERVING)
    defaults = DEFAULTS | (
        SAMPLING
        if kind == "ppo"
        else {"data.packing": (True, "packing")}
        if kind == "pretrain"
        else {}
    )
    training_arguments(
        sheet,
        olds,
        table,
        "LLaMA-Factory's arguments",
        lambda sheet: _combine(sheet, stage, kind),
        defaults,
    )


def _combine(sheet: Sheet, stage: Old, kind: str) -> None:
    old = pop(
        sheet,
        "stage",
        "finetuning_type",
        "dataset",
        "eval_dataset",
        "dataset_dir",
        "val_size",
        "max_samples",
    )
    tuning = old.get("finetuning_type", replace(stage, key="finetuning_type", value="lora"))
    if tuning.value not in ("lora", "full"):
        sheet.lacks(
            tuning, "all weights are trained, or LoRA's", "name what to freeze in model.freeze"
        )
    sheet.waiting["use_peft"] = replace(
        tuning, key="finetuning_type: lora", value=tuning.value == "lora"
    )
    if (rank := sheet.waiting.get("lora_r")) is not None and "lora_alpha" not in sheet.waiting:
        sheet.waiting["lora_alpha"] = replace(rank, value=2 * whole(rank))
    if kind != "dpo" and (loss := sheet.waiting.pop("pref_loss", None)) is not None:
        sheet.note(loss, f"without effect: stage is {stage.value}")
    if "learning_rate" not in sheet.waiting:
        # Also where losses of pairs have another default.
        sheet.put("optimizer.lr", 5e-5, replace(stage, key="learning_rate"))
    if "pref_loss" not in sheet.waiting:
        sheet.put("algorithm.kind", kind, stage)
    if kind == "ppo":
        rollouts(
            sheet,
            stage,
            SAMPLING["algorithm.generator.max_new_tokens"][0],
            DEFAULTS["data.max_length"][0],
        )
    guess_stage(sheet)
    patience(sheet)
    for part, key in (("train", "dataset"), ("eval", "eval_dataset")):
        if key in old and old[key].value not in AUTO:
            sheet.put(
                f"data.{part}",
                _sources(sheet, old[key], old.get("dataset_dir"), old.get("max_samples"), kind),
                old[key],
            )
    hold_out(sheet, old.get("val_size"))


def _sources(
    sheet: Sheet, names: Old, folder: Old | None, most: Old | None, kind: str
) -> list[dict[str, Any]]:
    """The sources that dataset_info.json has under some names. Raises ConfigError where it is not there, or lacks a name."""
    limit = {"limit": whole(most)} if most is not None and whole(most) > 0 else {}
    where = "data" if folder is None else str(folder.value)
    if where == "ONLINE":
        return [{"kind": "hub", "id": name, **limit} for name in name_list(names)]
    path = beside(sheet.base, f"{where}/dataset_info.json")
    if path is None:
        raise refuse(
            folder or names,
            f"there is no {where}/dataset_info.json, which says what {shown(names.value)} is",
            "put it there",
        )
    known = {old.key: old for old in load_file(path, names)}
    made = []
    for name in name_list(names):
        if name not in known:
            guess = nearest(name, list(known))
            raise refuse(
                names,
                f"{path} has no dataset {name!r}",
                f"did you mean {guess!r}?" if guess else "add it there",
            )
        entry = known[name].by_key()
        limits = [
            *limit.values(),
            *(
                [whole(entry["num_samples"])]
                if "num_samples" in entry and entry["num_samples"].value
                else []
            ),
        ]
        source = _place(sheet, known[name], entry, path.parent)
        columns = _columns(sheet, known[name], entry, kind)
        made.append(
            {
                **source,
                **({"limit": min(limits)} if limits else {}),
                **({"columns": columns} if columns else {}),
            }
        )
    return made


def _place(sheet: Sheet, old: Old, entry: dict[str, Old], folder: Path) -> dict[str, Any]:
    rest = {
        ours: str(entry[theirs].value)
        for ours, theirs in (("name", "subset"), ("split", "split"))
        if theirs in entry
    }
    if "folder" in entry and entry["folder"].value and {"hf_hub_url", "ms_hub_url"} & entry.keys():
        sheet.lacks(
            entry["folder"],
            "all files of the dataset are read",
            "{kind: file, path: hf://datasets/OWNER/NAME/FOLDER}",
        )
    for key, prefix in (("hf_hub_url", ""), ("ms_hub_url", "modelscope:")):
        if key in entry:
            return {"kind": "hub", "id": f"{prefix}{entry[key].value}", **rest}
    if "file_name" not in entry:
        raise refuse(
            old, "has neither file_name nor hf_hub_url", "give one of them: no script is run"
        )
    path = folder / str(entry["file_name"].value)
    return {"kind": "file", "path": new_path(sheet, path)}


def _columns(sheet: Sheet, old: Old, entry: dict[str, Old], kind: str) -> dict[str, str]:
    """What `columns` of Drumline would say: nothing for names that formats have anyway."""
    olds, tags = (entry[part].by_key() if part in entry else {} for part in ("columns", "tags"))
    given = {key: str(each.value) for key, each in olds.items() if each.value}
    for key in given.keys() & {"videos", "audios"}:
        sheet.lacks(entry["columns"], f"there are no {key} here", "take these rows out")
    own = {key: given[key] for key in ("images", "tools") if given.get(key, key) != key}
    if "formatting" in entry and entry["formatting"].value in ("sharegpt", "openai"):
        name = given.get("messages", "conversations")
        by_role = entry["formatting"].value == "openai" or (
            "role_tag" in tags and tags["role_tag"].value == "role"
        )
        if not by_role and name not in ("conversations", "conversation"):
            sheet.lacks(
                old,
                f"turns of {{from, value}} stand under `conversations` here, not {name!r}",
                "rename the column",
            )
        maps = by_role and name not in ("messages", "conversations")
        for key, names in READ.items():
            each = olds.get(key) or tags.get(key)
            read = names if not maps else names[-1:] if key in tags else ()
            if each is not None and each.value and each.value not in read:
                why = (
                    f"it is {' or '.join(read)} here"
                    if read
                    else f"nothing is read beside messages under {name}"
                )
                sheet.lacks(
                    each, why, "rename it in the rows" if read else "rename those to conversations"
                )
        return own | ({"messages": name} if maps else {})
    usual = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
             "chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}  # fmt: skip
    if kind == "pretrain":
        return {"text": given.get("prompt", "instruction")}
    renamed = {
        key: name for key, name in given.items() if usual.get(key, name) != name and key not in own
    }
    if not renamed:
        return own
    ours = {
        "prompt": "prompt",
        "response": "completion",
        "chosen": "chosen",
        "rejected": "rejected",
        "kto_tag": "label",
    }
    if given.keys() - ours.keys() - {"images", "tools"}:
        sheet.lacks(
            old,
            f"columns under other names: {', '.join(renamed.values())}",
            "rename them to instruction, input, output, history, system",
        )
    return own | {ours[key]: name for key, name in given.items() if key in ours}


def beside(base: Path, name: str) -> Path | None:
    """A file that an old one names, from its folder, from those above it, or the current one: files lie deep in a tool's folder."""
    here = base.absolute()
    places = [folder / expanded(name) for folder in (here, *list(here.parents)[:3], Path.cwd())]
    return next((path for path in places if path.is_file()), None)


def guess_stage(sheet: Sheet) -> None:
    """A DeepSpeed JSON that lies elsewhere in the tool's folder; of one that is nowhere the name tells the stage."""
    old = sheet.waiting.get("deepspeed")
    if old is None or not isinstance(old.value, str) or not old.value:
        return
    if (path := beside(sheet.base, old.value)) is not None:
        sheet.waiting["deepspeed"] = replace(old, value=str(path))
    elif sheet.lenient and (stage := re.search(r"z(?:ero)?_?([0-3])", Path(old.value).name)):
        del sheet.waiting["deepspeed"]
        sheet.put("strategy.kind", {"0": "ddp"}.get(stage[1], f"zero{stage[1]}"), old)
        sheet.note(old, "is not there: the stage is taken from its name, and nothing else of it")


def patience(sheet: Sheet) -> None:
    """Evaluations without a better one, which are counted where they come each N steps or epochs."""
    old, strategy = (
        sheet.waiting.pop("patience", None),
        getattr(sheet.waiting.get("eval_strategy"), "value", "steps"),
    )
    regular = (
        sheet.get("eval.every")
        or strategy == "epoch"
        or (strategy == "steps" and "eval_steps" in sheet.waiting)
    )
    if old is not None and regular:
        sheet.put("eval.patience", whole(old), old)
    elif old is not None:
        sheet.lacks(
            old,
            "evaluations are counted where they come each N steps or epochs",
            "set eval.every and eval.patience",
        )
