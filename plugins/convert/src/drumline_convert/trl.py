"""Translate arguments of TRL's scripts (1.10): a YAML for `trl --config`, or a command line.

Such a command is `trl dpo --beta 0.1`. This module has the rules for what TRL's trainers add to
training arguments (`drumline_convert.arguments`).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any, NamedTuple

from drumline.compat.deepspeed import load_file, locate_file
from drumline.compat.rules import (
    Rule,
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
from drumline.compat.sheet import OldKey, Sheet, Source, take_waiting
from drumline.config.mistakes import split_synonyms
from drumline.config.model import TEMPLATES
from drumline.errors import ConfigError
from drumline.system.redact import redact
from drumline.system.yaml_lines import read_yaml
from drumline_convert.arguments import LOGS, NEUTRAL, training_arguments
from drumline_convert.defaults import Defaults, fill_defaults
from drumline_convert.preferences import set_kto_loss

# Kinds of algorithm by TRL's trainers.
TRAINERS = {
    "sft": "sft",
    "dpo": "dpo",
    "grpo": "grpo",
    "rloo": "grpo",
    "reward": "reward",
    "kto": "kto",
    "ppo": "ppo",
    "orpo": "orpo",
    "reward_modeling": "reward",
}
# A command of TRL, by its name (`trl sft`) or by its file (`sft.py`).
COMMAND = re.compile(rf"(?:^|[\s/;&|])(trl\s|trl\.scripts\.)?({'|'.join(TRAINERS)})(\.py)?(?=\s|$)")


def read_scaling(old: OldKey) -> str:
    """Return algorithm.scale for scale_rewards; true is per group."""
    word = str(old.value).lower()
    if word == "true":
        return "group"
    if word == "false":
        return "none"
    names = {name: name for name in ("group", "batch", "none")}
    return str(read_choice(names)(old))


def note_template(sheet: Sheet, old: OldKey) -> None:
    """Note which chat template is used, since models for chats have their own."""
    name = str(old.value).replace("llama3", "llama-3")
    advice = "model.chat_template sets another"
    for template in TEMPLATES:
        if name.startswith(template):
            advice = f"for a base model write model.chat_template: {template}"
            break
    sheet.note(old, f"the model's own chat template is used; {advice}")


GENERATOR = "algorithm.generator"
VLLM = (
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_gpu_memory_utilization",
)


# The tokens of a prompt if the old file sets no limit, and TRL's default for its completion.
PROMPT = 1024
COMPLETION = 512


def put_same_name(sheet: Sheet, old: OldKey) -> None:
    """Set the key of `algorithm` that has the name of the old key to its number."""
    sheet.put(f"algorithm.{old.key}", read_number(old), old)


# Learning rates of TRL's trainers; the rest have _USUAL_RATE.
_RATES = {"sft": 2e-5, "reward": 1e-4, "ppo": 3e-6}
_USUAL_RATE = 1e-6
# The arguments of trainers with rollouts. Axolotl's section `trl` and LLaMA-Factory's ppo have some
# of them, too.
ROLLOUT: dict[str, Rule] = split_synonyms(
    {
        "num_generations": set_key("algorithm.group_size", read_integer),
        "max_completion_length response_length": set_key(
            f"{GENERATOR}.max_new_tokens", read_integer
        ),
        "temperature": set_key(f"{GENERATOR}.temperature", read_number),
        "top_p": set_key(f"{GENERATOR}.top_p", read_number),
        "top_k": set_key(f"{GENERATOR}.top_k", read_integer),
        "num_iterations num_ppo_epochs ppo_epochs": set_key("algorithm.epochs", read_integer),
        "epsilon cliprange": set_key("algorithm.clip", read_number),
        "epsilon_high": postpone(),
        "delta": set_key("algorithm.delta", read_number),
        "importance_sampling_level": set_key(
            "algorithm.ratio", read_choice({"token": "token", "sequence": "sequence"})
        ),
        "scale_rewards": set_key("algorithm.scale", read_scaling, skip=()),
        "mask_truncated_completions": set_key("algorithm.mask_truncated", read_flag),
        "entropy_coef": set_key("algorithm.entropy_weight", read_number),
        "kl_coef": set_key("algorithm.kl.coefficient", read_number),
        "kl_estimator": set_key("algorithm.kl.estimator", read_choice({"k1": "k1", "k3": "k3"})),
        "cliprange_value": set_key("algorithm.value_clip", read_number),
        "vf_coef": set_key("algorithm.value_weight", read_number),
        "gamma lam": put_same_name,
        "missing_eos_penalty": set_key("algorithm.missing_stop_penalty", read_number),
        "reward_funcs reward_weights reward_model_name_or_path reward_model_path reward_model": postpone(),
        f"use_vllm {' '.join(VLLM)}": postpone(),
        "use_transformers_continuous_batching": set_if_on(f"{GENERATOR}.kind", "continuous"),
        "min_p repetition_penalty generation_kwargs reward_clip_range off_policy_mask_threshold": reject(
            1.0, 1, why=NEUTRAL, fix="remove it"
        ),
        "sync_ref_model use_bias_correction_kl whiten_rewards normalize_advantages": reject(
            why=NEUTRAL, fix="remove it"
        ),
        "top_entropy_quantile": reject(1.0, 1, why=NEUTRAL, fix="remove it"),
        "steps_per_generation generation_batch_size": drop(
            "a rollout has algorithm.minibatches × batch.global_samples episodes"
        ),
        "max_prompt_length": postpone(),
        "num_mini_batches": set_key("algorithm.minibatches", read_integer),
        "log_completions num_completions_to_print log_unique_prompts log_multimodal num_sample_generations": drop(
            LOGS
        ),
        "ds3_gather_for_generation cache_implementation vllm_enable_sleep_mode vllm_model_impl": drop(
            "the generator sees to it"
        ),
    }
)
# Rules for the same arguments of trainers that sample nothing.
IDLE: dict[str, Rule] = {
    **dict.fromkeys(
        ROLLOUT, drop("without effect: only trainers that sample completions read it", None)
    ),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"),
        drop("data.max_length holds the prompt and its completion", None),
    ),
}
# The arguments that other trainers add.
MORE: dict[str, Rule] = split_synonyms(
    {
        "desirable_weight undesirable_weight": put_same_name,
        "center_rewards_coefficient": set_key("algorithm.center", read_number),
        "chat_template": note_template,
        "disable_dropout": drop("dropout is as the model's config says: model.config"),
        "ld_alpha use_weighting": reject(1.0, 1, why=NEUTRAL, fix="remove it"),
        "precompute_ref_batch_size ignore_bias_buffers bnb_4bit_quant_storage generate_during_eval": drop(
            "nothing here needs it"
        ),
        "accelerate_config": drop("convert that file, too, or train with --accelerate-config"),
        "env": drop("set variables of the environment in the shell"),
    }
)
# PEFT's default targets for Llama, Qwen, Mistral and Gemma. A model without such layers is refused,
# rather than trained with adapters on other layers.
PEFT: Defaults = {"adapter.targets": (["q_proj", "v_proj"], "lora_target_modules")}
_LORA: Defaults = {
    "adapter.r": (16, "lora_r"),
    "adapter.alpha": (32, "lora_alpha"),
    "adapter.dropout": (0.05, "lora_dropout"),
}


def defaults_of(trainer: str) -> Defaults:
    """Return TRL's own defaults for a trainer that differ from transformers'."""
    rate = _RATES.get(TRAINERS[trainer], _USUAL_RATE)
    defaults: Defaults = {
        "optimizer.lr": (rate, "learning_rate"),
        "precision.kind": ("bf16", "bf16"),
        "memory.activation_checkpointing": ("full", "gradient_checkpointing"),
        **_LORA,
    }
    if trainer == "grpo":
        defaults["algorithm.group_size"] = (8, "num_generations")
        defaults[f"{GENERATOR}.max_new_tokens"] = (COMPLETION, "max_completion_length")
    elif trainer == "rloo":
        defaults["algorithm.group_size"] = (2, "num_generations")
        defaults["algorithm.estimator"] = ("rloo", "trl rloo")
        defaults["algorithm.kl.coefficient"] = (0.05, "beta")
        defaults[f"{GENERATOR}.max_new_tokens"] = (COMPLETION, "max_completion_length")
    elif trainer == "ppo":
        defaults[f"{GENERATOR}.max_new_tokens"] = (53, "max_completion_length")
        defaults[f"{GENERATOR}.temperature"] = (0.7, "temperature")
    return defaults


# Keys that only one trainer of TRL has.
HINTS = {
    "grpo": {"num_generations", "reward_funcs", "max_completion_length"},
    "ppo": {"num_ppo_epochs", "total_episodes"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
}


def trl_arguments(sheet: Sheet, olds: list[OldKey], trainer: str | None = None) -> None:
    """Put the arguments of a trainer of TRL on the sheet.

    `trainer` is None for a file, whose keys tell it. The training arguments of any other script
    belong to no trainer.
    """
    if trainer is None:
        trainer = _guess_trainer(olds)
    if trainer is None:
        training_arguments(sheet, olds, MORE)
    else:
        rules = {**IDLE, **MORE}
        if TRAINERS[trainer] in ("grpo", "ppo"):
            rules |= ROLLOUT
            rules["beta"] = set_key("algorithm.kl.coefficient", read_number)
            rules["loss_type"] = set_grpo_loss
        training_arguments(
            sheet,
            olds,
            rules,
            f"`trl {trainer}`",
            lambda sheet: combine(sheet, trainer, olds[0]),
            defaults_of(trainer),
        )
    fill_defaults(sheet, olds[0], PEFT, "PEFT's")


def _guess_trainer(olds: list[OldKey]) -> str | None:
    """Guess the trainer from a file's keys, its name or its folders; None if they do not tell."""
    keys = {old.key for old in olds}
    for name, hints in HINTS.items():
        if hints & keys:
            return name
    if "beta" not in keys or "loss_type" in keys:
        return None
    # Only trainers of pairs have beta, and recipes have the trainer's name in the path of the file.
    tokens = re.split(r"[\W_]+", olds[0].source.name.lower())
    for word in reversed(tokens):
        if word in ("dpo", "orpo", "kto"):
            return word
    return "dpo"


def set_grpo_loss(sheet: Sheet, old: OldKey) -> None:
    """Read loss_type of GRPO: how tokens are weighted, or another surrogate."""
    if str(old.value) == "cispo":
        sheet.put("algorithm.surrogate", "cispo", old)
    else:
        weights = {"grpo": "sequence", "dr_grpo": "constant", "bnpo": "token", "dapo": "token"}
        sheet.put("algorithm.normalize", read_choice(weights)(old), old)


def combine(sheet: Sheet, trainer: str, old: OldKey) -> None:
    """Set a trainer's algorithm, rewards and generator. `old` is any key of the file."""
    kind = TRAINERS[trainer]
    if kind in ("grpo", "ppo"):
        completion, _ = defaults_of(trainer)[f"{GENERATOR}.max_new_tokens"]
        set_rollouts(sheet, old, completion)
    _postpone_test_split(sheet)
    sets_learned = sheet.get("data.learn_on") is not None or "assistant_only_loss" in sheet.waiting
    if kind == "sft" and not sets_learned:
        sheet.notes.append(
            f"{old.source.name}: of `messages` only the assistant's turns are learned; TRL learns"
            " all of them: data.learn_on: all does as TRL"
        )
    if kind != "dpo":
        loss = sheet.waiting.pop("loss_type", None)
        if kind == "kto":
            set_kto_loss(sheet, loss)
        elif loss is not None and loss.value not in (kind, "nll"):
            sheet.report_unsupported(loss, f"{kind} has no other loss", "remove it")
    if "loss_type" not in sheet.waiting:
        sheet.put(
            "algorithm.kind", kind, replace(old, key=trainer, value=trainer, place=(trainer,))
        )


def _postpone_test_split(sheet: Sheet) -> None:
    """Let TRL's default split of evaluation wait if the file evaluates a dataset without one."""
    strategy = sheet.waiting.get("eval_strategy")
    if strategy is None or str(strategy.value).lower() in ("no", "false"):
        return
    if "dataset_name" in sheet.waiting and "dataset_test_split" not in sheet.waiting:
        sheet.waiting["dataset_test_split"] = replace(
            strategy, key="dataset_test_split", value="test", place=("dataset_test_split",)
        )
        sheet.note(strategy, "on the split `test`, TRL's default for dataset_test_split")


def set_rollouts(
    sheet: Sheet, old: OldKey, completion: int = COMPLETION, prompt: int = PROMPT
) -> None:
    """Set rewards, what generates, and how long a prompt with its completion may become.

    `completion` and `prompt` are the tokens of either if the file sets none. TRL's reward functions
    get lists of completions; Drumline's get one.
    """
    _set_rewards(sheet, old)
    _set_generator(sheet, old)
    _set_upper_clip(sheet)
    longest = sheet.waiting.pop("max_prompt_length", None)
    if sheet.get("data.max_length") is None:
        if longest is not None:
            prompt = read_integer(longest)
        length = prompt + int(sheet.get(f"{GENERATOR}.max_new_tokens", completion))
        sheet.put("data.max_length", length, longest or old)
        sheet.notes.append(
            f"{old.source.name}: data.max_length {length}: {prompt} tokens of a prompt, and a"
            " completion"
        )
    elif longest is not None:
        sheet.note(longest, "without effect: data.max_length holds the prompt and its completion")


def _set_upper_clip(sheet: Sheet) -> None:
    """Set how large a probability ratio may become.

    TRL cuts the ratios of cispo at epsilon_high and all others at 1 + epsilon_high. Drumline cuts
    at 1 + clip_high.
    """
    high = sheet.waiting.pop("epsilon_high", None)
    if sheet.get("algorithm.surrogate") != "cispo":
        if high is not None:
            sheet.put("algorithm.clip_high", read_number(high), high)
        return
    fix = "set epsilon_high above 1, for example to 5"
    if high is None:
        cispo = sheet.origins["algorithm", "surrogate"]
        sheet.report_unsupported(cispo, "without epsilon_high TRL cuts each ratio below 1", fix)
        return
    bound = read_number(high)
    if bound <= 1:
        sheet.report_unsupported(high, "TRL cuts each ratio of cispo below 1", fix)
        return
    sheet.put("algorithm.clip_high", bound - 1, high)
    sheet.note(high, f"the largest ratio, which is 1 + algorithm.clip_high: {bound - 1:g}")


def _set_rewards(sheet: Sheet, old: OldKey) -> None:
    """Set the rewards: models first, then functions, with their weights."""
    given = take_waiting(
        sheet,
        "reward_funcs",
        "reward_weights",
        "reward_model_name_or_path",
        "reward_model_path",
        "reward_model",
    )
    functions = given.pop("reward_funcs", None)
    weights = given.pop("reward_weights", None)
    rewards: list[dict[str, Any]] = []
    for model in given.values():
        rewards.append({"kind": "model", "model": {"id": str(model.value)}})
    if functions is not None:
        rewards += _reward_functions(sheet, functions)
    if weights is not None and isinstance(weights.value, list):
        for reward, value in zip(rewards, weights.value, strict=False):
            reward["weight"] = read_number(replace(weights, value=value))
    if rewards:
        sheet.put("algorithm.rewards", rewards, functions or old)
    else:
        sheet.notes.append(f"{old.source.name}: no reward function is named: set algorithm.rewards")


def _reward_functions(sheet: Sheet, functions: OldKey) -> list[dict[str, Any]]:
    """Return the rewards for the functions `module.name` of reward_funcs; reports TRL's own."""
    rewards = []
    for name in read_names(functions):
        module, dot, function = name.rpartition(".")
        if dot:
            rewards.append({"kind": "function", "path": f"{module}:{function}"})
            sheet.note(
                functions, f"{name} gets one prompt and one completion here, and returns one number"
            )
        else:
            sheet.report_unsupported(
                functions,
                f"{name} is TRL's own",
                "write a function: algorithm.rewards [{kind: function, path: mine.py:name}]",
            )
    return rewards


def _set_generator(sheet: Sheet, old: OldKey) -> None:
    """Set what generates completions: vLLM if use_vllm is on, else transformers.

    Keys of vLLM that are not used get a note.
    """
    vllm = take_waiting(sheet, "use_vllm", *VLLM)
    switch = vllm.pop("use_vllm", None)
    reason = "without effect: use_vllm is not on"
    if switch is not None and read_flag(switch):
        reason = "without effect"
        sheet.put(f"{GENERATOR}.kind", "vllm", switch)
        _set_vllm(sheet, vllm)
    elif sheet.get(f"{GENERATOR}.kind") is None:
        sheet.put(f"{GENERATOR}.kind", "hf", old)
    for unused in vllm.values():
        sheet.note(unused, reason)


def _set_vllm(sheet: Sheet, vllm: dict[str, OldKey]) -> None:
    """Set the address of vLLM's server, or its share of the memory in the same process.

    `vllm` loses the keys that are used.
    """
    mode = vllm.pop("vllm_mode", None)
    if mode is not None and mode.value == "server":
        base = vllm.pop("vllm_server_base_url", None)
        host = vllm.pop("vllm_server_host", None)
        port = vllm.pop("vllm_server_port", None)
        host_name = host.value if host else "127.0.0.1"
        port_number = port.value if port else 8000
        url = f"http://{host_name}:{port_number}"
        if base is not None:
            url = str(base.value)
        sheet.put(f"{GENERATOR}.url", url, mode)
    elif "vllm_gpu_memory_utilization" in vllm:
        memory = vllm.pop("vllm_gpu_memory_utilization")
        sheet.put(f"{GENERATOR}.memory", read_number(memory), memory)


class Command(NamedTuple):
    """A command of TRL in a shell script: its trainer, its arguments, and what stands before it."""

    trainer: str
    arguments: list[str]
    before: str


def command_in(text: str) -> Command | None:
    """Return the first command of TRL in a shell script; None if there is none.

    Raises ConfigError if its quotes are not closed.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        if line.lstrip().startswith("#"):
            continue
        match = _match_command(line)
        if match is None:
            continue
        try:
            tokens = shlex.split(line[match.end() :], comments=True)
        except ValueError as error:
            raise ConfigError(
                f"not readable as a command: {error}",
                where=line.strip()[:40],
                fix="close its quotes",
            ) from None
        return Command(match[2], _words_of_command(tokens), line[: match.start()].strip())
    return None


def _match_command(line: str) -> re.Match[str] | None:
    """Return the first trainer in a line that stands behind `trl` or is a script; None without."""
    for match in COMMAND.finditer(line):
        if match[1] or match[3]:
            return match
    return None


def _words_of_command(tokens: list[str]) -> list[str]:
    """Return the words before the first pipe, redirection or other sign of the shell."""
    for index, word in enumerate(tokens):
        if re.match(r"[|&;<>]|\d>", word):
            return tokens[:index]
    return tokens


def trl_command(sheet: Sheet, command: Command, name: str) -> None:
    """Put a command line on the sheet: `--key value …`, `--key=value`, `--switch`.

    The keys of the file of --config lie below them. `name` names the command in notes and errors.
    """
    if "--" in command.before:
        launcher = redact(" ".join(command.before.split()))
        sheet.notes.append(
            f"{name}: {launcher}: flags of a launcher are not read: --nproc, or --accelerate-config"
        )
    given = _parse_arguments(command.arguments, name)
    file = given.pop("config", None)
    if file is not None:
        in_file = load_file(locate_file(sheet.base, str(file.value)), file)
        given = {**{old.key: old for old in in_file}, **given}
    for old in given.values():
        if isinstance(old.value, str) and "$" in old.value:
            sheet.note(old, "a variable of the shell: write its value")
    if not given:
        raise ConfigError(
            "has no arguments", where=name, fix="write --model_name_or_path … --dataset_name …"
        )
    trl_arguments(sheet, list(given.values()), command.trainer)


def _parse_arguments(tokens: list[str], name: str) -> dict[str, OldKey]:
    """Return the arguments of a command by key. Raises ConfigError for a value without a key."""
    given: dict[str, OldKey] = {}
    source = Source(name)
    key = ""
    for word in tokens:
        if word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            is_off = key.startswith("no_")
            key = key.removeprefix("no_").replace("-", "_")
            value = _parse_value(text) if equals else not is_off
            given[key] = OldKey(key, value, source, (f"--{key}",))
        elif not key:
            raise ConfigError(
                f"{word!r} belongs to no argument", where=name, fix="write --key value"
            )
        else:
            joined = _add_value(given[key].value, _parse_value(word))
            given[key] = replace(given[key], value=joined)
    return given


def _add_value(before: Any, value: Any) -> Any:
    """Return an argument's value with one more word; `before` is True if it has none yet."""
    if before is True:
        return value
    if isinstance(before, list):
        return [*before, value]
    return [before, value]


def _parse_value(text: str) -> Any:
    """Return the value that a text has in YAML; the text itself if it has none."""
    try:
        return read_yaml(text, "value")[0]
    except ConfigError:
        return text
