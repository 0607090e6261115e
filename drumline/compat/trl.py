"""Arguments of TRL's scripts (1.10): a YAML for `trl --config`, or a command line such as `trl dpo --beta 0.1`. They are training
arguments; what a trainer adds stands here."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

from drumline.compat.arguments import LOGS, NEUTRAL, training_arguments
from drumline.compat.deepspeed import found, load_file
from drumline.compat.preferences import kto_loss
from drumline.compat.rules import (
    Defaults,
    Rule,
    fill,
    flag,
    gone,
    later,
    name_list,
    number,
    one_of,
    only,
    switch,
    to,
    whole,
)
from drumline.compat.sheet import Old, Sheet, Source, pop
from drumline.core.mistakes import by_word
from drumline.core.model import TEMPLATES
from drumline.core.redact import redact
from drumline.core.yaml_lines import read_yaml
from drumline.errors import ConfigError

TRAINERS = {"sft": "sft", "dpo": "dpo", "grpo": "grpo", "rloo": "grpo", "reward": "reward", "kto": "kto", "ppo": "ppo", "orpo": "orpo",
            "reward_modeling": "reward"}  # fmt: skip
# By its name, or by its file's.
COMMAND = re.compile(rf"(?:^|[\s/;&|])(trl\s|trl\.scripts\.)?({'|'.join(TRAINERS)})(\.py)?(?=\s|$)")


def scaled(old: Old) -> str:
    """scale_rewards: true is per group."""
    return {"true": "group", "false": "none"}.get(str(old.value).lower()) or str(
        one_of({n: n for n in ("group", "batch", "none")})(old)
    )


def template(sheet: Sheet, old: Old) -> None:
    """A chat template by name: models for chats have their own."""
    near = next(
        (
            name
            for name in TEMPLATES
            if str(old.value).replace("llama3", "llama-3").startswith(name)
        ),
        None,
    )
    base = (
        f"; for a base model write model.chat_template: {near}"
        if near
        else "; model.chat_template sets another"
    )
    sheet.note(old, f"the model's own chat template is used{base}")


GENERATOR = "algorithm.generator"
VLLM = (
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_gpu_memory_utilization",
)
# Tokens that a prompt may have where nobody sets a limit, and TRL's default for its completion.
PROMPT, COMPLETION = (
    1024,
    512,
)
# What trainers with rollouts add; Axolotl's section `trl` and LLaMA-Factory's ppo have some of it, too.
ROLLOUT: dict[str, Rule] = by_word(
    {
        "num_generations": to("algorithm.group_size", whole),
        "max_completion_length response_length": to(f"{GENERATOR}.max_new_tokens", whole),
        "temperature": to(f"{GENERATOR}.temperature", number),
        "top_p": to(f"{GENERATOR}.top_p", number),
        "top_k": to(f"{GENERATOR}.top_k", whole),
        "num_iterations num_ppo_epochs ppo_epochs": to("algorithm.epochs", whole),
        "epsilon cliprange": to("algorithm.clip", number),
        "epsilon_high": to("algorithm.clip_high", number),
        "delta": to("algorithm.delta", number),
        "importance_sampling_level": to(
            "algorithm.ratio", one_of({"token": "token", "sequence": "sequence"})
        ),
        "scale_rewards": to("algorithm.scale", scaled, skip=()),
        "mask_truncated_completions": to("algorithm.mask_truncated", flag),
        "entropy_coef": to("algorithm.entropy_weight", number),
        "kl_coef": to("algorithm.kl.coefficient", number),
        "kl_estimator": to("algorithm.kl.estimator", one_of({"k1": "k1", "k3": "k3"})),
        "cliprange_value": to("algorithm.value_clip", number),
        "vf_coef": to("algorithm.value_weight", number),
        "gamma lam": lambda sheet, old: sheet.put(f"algorithm.{old.key}", number(old), old),
        "missing_eos_penalty": to("algorithm.missing_stop_penalty", number),
        "reward_funcs reward_weights reward_model_name_or_path reward_model_path reward_model": later(),
        f"use_vllm {' '.join(VLLM)}": later(),
        "use_transformers_continuous_batching": switch(f"{GENERATOR}.kind", "continuous"),
        "min_p repetition_penalty generation_kwargs reward_clip_range off_policy_mask_threshold": only(
            1.0, 1, why=NEUTRAL, fix="remove it"
        ),
        "sync_ref_model use_bias_correction_kl whiten_rewards normalize_advantages": only(
            why=NEUTRAL, fix="remove it"
        ),
        "top_entropy_quantile": only(1.0, 1, why=NEUTRAL, fix="remove it"),
        "steps_per_generation generation_batch_size": gone(
            "a rollout has algorithm.minibatches × batch.global_samples episodes"
        ),
        "max_prompt_length": later(),
        "num_mini_batches": to("algorithm.minibatches", whole),
        "log_completions num_completions_to_print log_unique_prompts log_multimodal num_sample_generations": gone(
            LOGS
        ),
        "ds3_gather_for_generation cache_implementation vllm_enable_sleep_mode vllm_model_impl": gone(
            "the generator sees to it"
        ),
    }
)
# The same where nothing is sampled.
IDLE: dict[str, Rule] = {
    **dict.fromkeys(
        ROLLOUT, gone("without effect: only trainers that sample completions read it", None)
    ),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"),
        gone("data.max_length holds the prompt and its completion", None),
    ),
}
# What other trainers add.
MORE: dict[str, Rule] = by_word(
    {
        "desirable_weight undesirable_weight": lambda sheet, old: sheet.put(
            f"algorithm.{old.key}", number(old), old
        ),
        "center_rewards_coefficient": to("algorithm.center", number),
        "chat_template": template,
        "disable_dropout": gone("dropout is as the model's config says: model.config"),
        "ld_alpha use_weighting": only(1.0, 1, why=NEUTRAL, fix="remove it"),
        "precompute_ref_batch_size ignore_bias_buffers bnb_4bit_quant_storage generate_during_eval": gone(
            "nothing here needs it"
        ),
        "accelerate_config": gone("convert that file, too, or train with --accelerate-config"),
        "env": gone("set variables of the environment in the shell"),
    }
)
_RATE = {"sft": 2e-5, "reward": 1e-4, "ppo": 3e-6}
# PEFT's own for Llama, Qwen, Mistral and Gemma. A model that has no such layers is refused, and never trained on others.
PEFT: Defaults = {"adapter.targets": (["q_proj", "v_proj"], "lora_target_modules")}
_LORA: Defaults = {
    "adapter.r": (16, "lora_r"),
    "adapter.alpha": (32, "lora_alpha"),
    "adapter.dropout": (0.05, "lora_dropout"),
}


def defaults_of(trainer: str) -> Defaults:
    """TRL's own for a trainer, where they differ from transformers'."""
    made: Defaults = {
        "optimizer.lr": (_RATE.get(TRAINERS[trainer], 1e-6), "learning_rate"),
        "precision.kind": ("bf16", "bf16"),
        "memory.activation_checkpointing": ("full", "gradient_checkpointing"),
        **_LORA,
    }
    if trainer in ("grpo", "rloo"):
        made["algorithm.group_size"] = (8 if trainer == "grpo" else 2, "num_generations")
    if trainer == "rloo":
        made |= {
            "algorithm.estimator": ("rloo", "trl rloo"),
            "algorithm.kl.coefficient": (0.05, "beta"),
        }
    if trainer in ("grpo", "rloo", "ppo"):
        made[f"{GENERATOR}.max_new_tokens"] = (
            53 if trainer == "ppo" else COMPLETION,
            "max_completion_length",
        )
    if trainer == "ppo":
        made[f"{GENERATOR}.temperature"] = (0.7, "temperature")
    return made


def trl_arguments(sheet: Sheet, olds: list[Old], trainer: str | None = None) -> None:
    """Put them on the sheet. `trainer`: None for a file, whose keys tell it; training arguments of any script are those of none."""
    keys = {old.key for old in olds}
    if trainer is None:
        hints = {"grpo": {"num_generations", "reward_funcs", "max_completion_length"}, "ppo": {"num_ppo_epochs", "total_episodes"},
                 "kto": {"desirable_weight", "undesirable_weight"}, "reward": {"center_rewards_coefficient"}}  # fmt: skip
        trainer = next((name for name, its in hints.items() if its & keys), None) or _by_folder(
            keys, olds[0].source.name
        )
    if trainer is None:
        training_arguments(sheet, olds, MORE)
    else:
        more = {**IDLE, **MORE}
        if TRAINERS[trainer] in ("grpo", "ppo"):
            more |= {
                **ROLLOUT,
                "beta": to("algorithm.kl.coefficient", number),
                "loss_type": grpo_loss,
            }
        training_arguments(
            sheet,
            olds,
            more,
            f"`trl {trainer}`",
            lambda sheet: combine(sheet, trainer, olds[0]),
            defaults_of(trainer),
        )
    fill(sheet, olds[0], PEFT, "PEFT's")


def _by_folder(keys: set[str], name: str) -> str | None:
    """Of arguments that only trainers of pairs have: which one it is, as folders and names of recipes say it."""
    if "beta" not in keys or "loss_type" in keys:
        return None
    return next(
        (
            word
            for word in reversed(re.split(r"[\W_]+", name.lower()))
            if word in ("dpo", "orpo", "kto")
        ),
        "dpo",
    )


def grpo_loss(sheet: Sheet, old: Old) -> None:
    """loss_type of GRPO: how tokens are weighted, or another surrogate."""
    if str(old.value) == "cispo":
        sheet.put("algorithm.surrogate", "cispo", old)
    else:
        weights = {"grpo": "sequence", "dr_grpo": "constant", "bnpo": "token", "dapo": "token"}
        sheet.put("algorithm.normalize", one_of(weights)(old), old)


def combine(sheet: Sheet, trainer: str, old: Old) -> None:
    """The algorithm of a trainer, and its rewards and generator."""
    kind = TRAINERS[trainer]
    if kind in ("grpo", "ppo"):
        rollouts(sheet, old, defaults_of(trainer)[f"{GENERATOR}.max_new_tokens"][0])
    evaluates, named = (
        sheet.waiting.get("eval_strategy"),
        {"dataset_name", "dataset_test_split"} & sheet.waiting.keys(),
    )
    if (
        evaluates is not None
        and str(evaluates.value).lower() not in ("no", "false")
        and named == {"dataset_name"}
    ):
        sheet.waiting["dataset_test_split"] = replace(
            evaluates, key="dataset_test_split", value="test", place=("dataset_test_split",)
        )
        sheet.note(evaluates, "on the split `test`, TRL's default for dataset_test_split")
    if (
        kind == "sft"
        and sheet.get("data.learn_on") is None
        and "assistant_only_loss" not in sheet.waiting
    ):
        sheet.notes.append(
            f"{old.source.name}: `messages` are learned by the assistant's turns; TRL's default is all: data.learn_on: all"
        )
    loss = sheet.waiting.pop("loss_type", None) if kind != "dpo" else None
    if kind == "kto":
        kto_loss(sheet, loss)
    elif loss is not None and loss.value not in (kind, "nll"):
        sheet.lacks(loss, f"{kind} has no other loss", "remove it")
    if "loss_type" not in sheet.waiting:
        sheet.put(
            "algorithm.kind", kind, replace(old, key=trainer, value=trainer, place=(trainer,))
        )


def rollouts(sheet: Sheet, old: Old, completion: int = COMPLETION, prompt: int = PROMPT) -> None:
    """Rewards, what generates, and how long it may become: `completion` and `prompt` are the tokens of either where nothing says it. TRL's
    reward functions get lists of completions; Drumline's get one."""
    _rewards(sheet, old)
    _generator(sheet, old)
    longest = sheet.waiting.pop("max_prompt_length", None)
    if sheet.get("data.max_length") is None:
        prompt = whole(longest) if longest else prompt
        length = prompt + int(sheet.get(f"{GENERATOR}.max_new_tokens", completion))
        sheet.put("data.max_length", length, longest or old)
        sheet.notes.append(
            f"{old.source.name}: data.max_length {length}: {prompt} tokens of a prompt, and a completion"
        )
    elif longest:
        sheet.note(longest, "without effect: data.max_length holds the prompt and its completion")


def _rewards(sheet: Sheet, old: Old) -> None:
    given = pop(
        sheet,
        "reward_funcs",
        "reward_weights",
        "reward_model_name_or_path",
        "reward_model_path",
        "reward_model",
    )
    functions, weights = given.pop("reward_funcs", None), given.pop("reward_weights", None)
    rewards: list[dict[str, Any]] = [
        {"kind": "model", "model": {"id": str(each.value)}} for each in given.values()
    ]
    for name in name_list(functions) if functions else ():
        module, dot, function = name.rpartition(".")
        if functions and dot:
            rewards.append({"kind": "function", "path": f"{module}:{function}"})
            sheet.note(
                functions, f"{name} gets one prompt and one completion here, and returns one number"
            )
        elif functions:
            sheet.lacks(
                functions,
                f"{name} is TRL's own",
                "write a function: algorithm.rewards [{kind: function, path: mine.py:name}]",
            )
    values = weights.value if weights is not None and isinstance(weights.value, list) else []
    for reward, value in zip(rewards, values, strict=False):
        reward["weight"] = number(replace(weights or old, value=value))
    if rewards:
        sheet.put("algorithm.rewards", rewards, functions or old)
    else:
        sheet.notes.append(f"{old.source.name}: no reward function is named: set algorithm.rewards")


def _generator(sheet: Sheet, old: Old) -> None:
    vllm = pop(sheet, "use_vllm", *VLLM)
    use = vllm.pop("use_vllm", None)
    if use is not None and flag(use):
        sheet.put(f"{GENERATOR}.kind", "vllm", use)
        mode, memory = vllm.pop("vllm_mode", None), vllm.get("vllm_gpu_memory_utilization")
        if mode is not None and mode.value == "server":
            base, host, port = (
                vllm.pop(f"vllm_server_{name}", None) for name in ("base_url", "host", "port")
            )
            url = f"http://{host.value if host else '127.0.0.1'}:{port.value if port else 8000}"
            sheet.put(f"{GENERATOR}.url", str(base.value) if base else url, mode)
        elif memory is not None:
            sheet.put(
                f"{GENERATOR}.memory", number(vllm.pop("vllm_gpu_memory_utilization")), memory
            )
    elif sheet.get(f"{GENERATOR}.kind") is None:
        sheet.put(f"{GENERATOR}.kind", "hf", old)
    for each in vllm.values():
        sheet.note(
            each,
            "without effect"
            if use is not None and flag(use)
            else "without effect: use_vllm is not on",
        )


def command_in(text: str) -> tuple[str, list[str], str] | None:
    """Trainer and arguments of the first command of TRL in a shell script, and what stands before it; None where there is none."""
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        found_in = (
            None
            if line.lstrip().startswith("#")
            else next((m for m in COMMAND.finditer(line) if m[1] or m[3]), None)
        )
        if found_in is not None:
            try:
                arguments = shlex.split(line[found_in.end() :], comments=True)
                shell = next(
                    (at for at, word in enumerate(arguments) if re.match(r"[|&;<>]|\d>", word)),
                    len(arguments),
                )
                return found_in[2], arguments[:shell], line[: found_in.start()].strip()
            except ValueError as error:
                raise ConfigError(
                    f"not readable as a command: {error}",
                    where=line.strip()[:40],
                    fix="close its quotes",
                ) from None
    return None


def trl_command(sheet: Sheet, trainer: str, arguments: list[str], before: str, name: str) -> None:
    """Put a command line on the sheet: `--key value …`, `--key=value`, `--switch`, and the file of --config below them."""
    if "--" in before:
        sheet.notes.append(
            f"{name}: {redact(' '.join(before.split()))}: flags of a launcher are not read: --nproc, or --accelerate-config"
        )
    given: dict[str, Old] = {}
    source, key = Source(name), ""
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            off = key.startswith("no_")
            key = key.removeprefix("no_").replace("-", "_")
            given[key] = Old(key, _value(text) if equals else not off, source, (f"--{key}",))
        elif not key:
            raise ConfigError(
                f"{word!r} belongs to no argument", where=name, fix="write --key value"
            )
        else:
            so_far, value = given[key].value, _value(word)
            joined = (
                value
                if so_far is True
                else [*(so_far if isinstance(so_far, list) else [so_far]), value]
            )
            given[key] = replace(given[key], value=joined)
    file = given.pop("config", None)
    if file is not None:
        given = {
            **{old.key: old for old in load_file(found(sheet.base, str(file.value)), file)},
            **given,
        }
    for old in given.values():
        if isinstance(old.value, str) and "$" in old.value:
            sheet.note(old, "a variable of the shell: write its value")
    if not given:
        raise ConfigError(
            "has no arguments", where=name, fix="write --model_name_or_path … --dataset_name …"
        )
    trl_arguments(sheet, list(given.values()), trainer)


def _value(text: str) -> Any:
    try:
        return read_yaml(text, "value")[0]
    except ConfigError:
        return text
