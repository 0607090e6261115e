"""Combine training arguments that have a meaning only together: rate, warm-up, data, adapters, …

Rules leave such keys in `Sheet.waiting`, and `combine` takes them from there group by group.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

from drumline.compat import accelerate as acc
from drumline.compat.deepspeed import (
    PRECISIONS,
    STAGES,
    load_file,
    locate_file,
    read_deepspeed_config,
    read_deepspeed_json,
)
from drumline.compat.rules import (
    Converter,
    apply_rules,
    read_choice,
    read_flag,
    read_integer,
    read_names,
    read_number,
    set_key,
)
from drumline.compat.sheet import (
    OldKey,
    Sheet,
    Unsupported,
    contradiction,
    format_value,
    take_waiting,
    translation_error,
)
from drumline.config.algorithm import AlgorithmSpec
from drumline.config.registry import find
from drumline_convert.mixtures import read_mixer
from drumline_convert.preferences import combine_preferences
from drumline_convert.sources import Dataset, local_source, put_sources, sources_of

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
}


_SCHEDULE_FIX = f"take one of {', '.join(dict.fromkeys(SCHEDULES))}"
NO_SCHEDULES = dict.fromkeys(
    (
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_warmup_with_min_lr",
        "greedy",
    ),
    _SCHEDULE_FIX,
)


def combine(sheet: Sheet) -> None:
    """Combine every group in turn. Keys that wait afterwards are accelerate's."""
    combine_preferences(sheet)
    _set_learning_rate(sheet)
    _set_betas(sheet)
    _set_schedule(sheet)
    _set_dtype(sheet)
    _set_interval(sheet, "save", "checkpoint.every", "saved", 500)
    # transformers evaluates by default as often as it logs.
    log_every = sheet.get("run.log_every", 500)
    _set_interval(sheet, "eval", "eval.every", "evaluated", log_every)
    _set_best_metric(sheet)
    _set_data(sheet)
    _set_strategy(sheet)
    _set_batch_norm(sheet)
    _set_adapter(sheet)
    if sheet.get("schedule.warmup_steps") and sheet.get("schedule.warmup_ratio"):
        ratio = sheet.origins["schedule", "warmup_ratio"]
        steps = sheet.origins["schedule", "warmup_steps"]
        sheet.note(ratio, f"without effect: {steps.where} says {format_value(steps.value)}")


# Drumline's names of metrics that transformers, TRL and LLaMA-Factory name otherwise.
METRICS = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "logps/chosen": "log_prob_chosen",
    "logps/rejected": "log_prob_rejected",
    "mean_token_accuracy": "token_accuracy",
}


def _metric_name(metric: OldKey, kind: str) -> str:
    """Return Drumline's name of a metric, for a kind of algorithm."""
    name = str(metric.value).removeprefix("eval_")
    if name == "accuracy" and kind in ("sft", "pretrain"):
        return "token_accuracy"
    return METRICS.get(name, name)


def _set_best_metric(sheet: Sheet) -> None:
    """Set the metric of the best checkpoint, and whether higher is better.

    As in transformers, higher is better by default unless the name ends in `loss`.
    """
    old = take_waiting(sheet, "metric_for_best_model", "greater_is_better")
    metric = old.get("metric_for_best_model")
    greater = old.get("greater_is_better")
    if metric is not None:
        kind = str(sheet.get("algorithm.kind", "sft"))
        name = _metric_name(metric, kind)
        spec = find(AlgorithmSpec, kind)
        is_known = spec is None or name in spec.metrics or name.startswith("reward/")
        if sheet.lenient and spec is not None and not is_known:
            sheet.report_unsupported(
                metric, f"{kind} measures no {name!r}", f"there are {', '.join(spec.metrics)}"
            )
            return
        sheet.put("eval.metric", name, metric)
    if greater is not None:
        sheet.put("eval.mode", "max" if read_flag(greater) else "min", greater)
    elif metric is not None:
        falls = str(metric.value).endswith("loss")
        sheet.put("eval.mode", "min" if falls else "max", metric)


def _set_learning_rate(sheet: Sheet) -> None:
    """Set the learning rate, and its scaling if use_linear_scaling is on.

    A scaled rate is base_learning_rate × devices, or base_learning_rate × samples / base_batch_size
    (Goyal et al. 2017). With the key num_gpus it is base_learning_rate × √devices.
    """
    old = take_waiting(sheet, "learning_rate", "base_learning_rate", "use_linear_scaling")
    plain = old.get("learning_rate")
    base = old.get("base_learning_rate")
    scaling = old.get("use_linear_scaling")
    is_scaled = scaling is not None and read_flag(scaling)
    if scaling is not None and is_scaled:
        _set_scaling(sheet, scaling, base)
    if is_scaled or plain is None:
        used, unused = base or plain, plain
    else:
        used, unused = plain, base
    if used is not None:
        sheet.put("optimizer.lr", read_number(used), used)
    if unused is not None and unused is not used:
        if is_scaled:
            reason = "base_learning_rate is scaled"
        else:
            reason = "use_linear_scaling is not on"
        sheet.note(unused, f"without effect: {reason}")


def _set_scaling(sheet: Sheet, scaling: OldKey, base: OldKey | None) -> None:
    """Set how the learning rate grows with the devices. `base` is the key base_learning_rate."""
    processes = sheet.waiting.get("num_processes")
    if base is not None and processes is not None and processes.key == "num_gpus":
        sheet.put("optimizer.lr_scaling", "sqrt", scaling)
        sheet.note(
            scaling,
            "beside base_learning_rate and num_gpus it is base_learning_rate × √num_gpus, as in guides",
        )
    else:
        sheet.put("optimizer.lr_scaling", "linear", scaling)


def _set_betas(sheet: Sheet) -> None:
    """Set Adam's betas if one of them is given; the other is transformers' default."""
    old = take_waiting(sheet, "adam_beta1", "adam_beta2")
    if not old:
        return
    beta1 = read_number(old["adam_beta1"]) if "adam_beta1" in old else 0.9
    beta2 = read_number(old["adam_beta2"]) if "adam_beta2" in old else 0.999
    first_key = next(iter(old.values()))
    sheet.put("optimizer.betas", [beta1, beta2], first_key)


def _set_schedule(sheet: Sheet) -> None:
    """Set warm-up and the options of the schedule.

    warmup_steps is used before warmup_ratio unless it is 0. Below 1 it is a ratio (transformers 5).
    """
    old = take_waiting(sheet, "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
    kind = sheet.origins.get(("schedule", "kind"))
    is_constant = kind is not None and str(kind.value).lower() == "constant"
    for key in ("warmup_steps", "warmup_ratio"):
        if key not in old or not read_number(old[key]):
            continue
        if is_constant:
            sheet.note(
                old[key], "without effect: `constant` has no warm-up; `constant_with_warmup` has"
            )
        else:
            _set_warmup(sheet, key, old[key])
            break
    if "lr_scheduler_kwargs" in old:
        for option in _parse_json(old["lr_scheduler_kwargs"]).children():
            _set_schedule_option(sheet, option)


def _set_warmup(sheet: Sheet, key: str, old: OldKey) -> None:
    """Set the warm-up from `old`, which is warmup_steps or warmup_ratio as `key` says."""
    if key == "warmup_ratio" or read_number(old) < 1:
        sheet.put("schedule.warmup_ratio", read_number(old), old)
    else:
        sheet.put("schedule.warmup_steps", read_integer(old), old)
    sheet.put("schedule.warmup_from_zero", True, old)


# Options of schedules that request what Drumline does in any case.
USUAL_OPTIONS = (("decay_type", "linear"), ("warmup_type", "linear"), ("num_cycles", 0.5))


DEFAULT_RATE = 5e-5  # transformers' learning rate


def _set_schedule_option(sheet: Sheet, option: OldKey) -> None:
    """Translate one key of lr_scheduler_kwargs."""
    if option.key in ("min_lr_rate", "min_lr_ratio"):
        sheet.put("schedule.min_ratio", read_number(option), option)
        return
    if option.key == "min_lr":
        lr = sheet.get("optimizer.lr") or DEFAULT_RATE
        sheet.put("schedule.min_ratio", read_number(option) / lr, option)
        return
    if option.key == "num_decay_steps" and sheet.get("schedule.kind") == "wsd":
        steps = sheet.get("run.steps")
        if not steps:
            sheet.report_unsupported(
                option,
                "it is a part of all steps here, and max_steps is not set",
                "set schedule.decay_ratio",
            )
            return
        decay_steps = read_integer(option)
        if 0 < decay_steps <= steps:
            sheet.put("schedule.decay_ratio", decay_steps / steps, option)
            return
    if (option.key, option.value) not in USUAL_OPTIONS:
        sheet.report_unsupported(
            option,
            f"no {option.key} here",
            "schedule has warmup_steps, warmup_ratio, min_ratio and decay_ratio",
        )


def _parse_json(old: OldKey) -> OldKey:
    """Return a key with the keys and values that its text has as JSON, as commands give them."""
    if not isinstance(old.value, str) or not old.value:
        return old
    try:
        return replace(old, value=json.loads(old.value))
    except (ValueError, RecursionError):
        return old


def _set_dtype(sheet: Sheet) -> None:
    """Set the precision by torch_dtype, if nothing else sets it.

    There it is the type of the weights. Drumline's master weights are fp32.
    """
    old = sheet.waiting.pop("dtype", None)
    if old is None or str(old.value) == "auto":
        return
    kind = PRECISIONS.get(str(old.value).lower().removeprefix("torch."))
    if kind is None:
        raise translation_error(
            old,
            f"no type {format_value(old.value)} here",
            f"there are {', '.join(dict.fromkeys(PRECISIONS.values()))}",
        )
    if {"bf16", "fp16", "mixed_precision"} & sheet.waiting.keys() or kind == "fp32":
        sheet.note(old, "master weights are fp32; the compute type is `precision`")
    else:
        sheet.note(old, f"master weights are fp32; they are computed with in {kind}")
        sheet.put("precision.kind", kind, old)


def step_count(old: OldKey) -> int:
    """Return a number of steps.

    Raises ConfigError for a fraction of the run (0.1): its length is known only after the data is
    read.
    """
    if 0 < read_number(old) < 1:
        raise Unsupported(
            f"{old.value} of all steps", where=old.where, fix="write a number of steps"
        )
    return read_integer(old)


def _fraction_of_run(sheet: Sheet, old: OldKey) -> int | str | None:
    """Return a fraction of the run (0.1) as steps or epochs.

    None for a number of steps, and if the file sets neither steps nor epochs.
    """
    fraction = read_number(old)
    if not 0 < fraction < 1:
        return None
    steps = sheet.get("run.steps")
    if steps:
        return math.ceil(fraction * steps)
    epochs = sheet.get("run.epochs")
    if epochs:
        return f"{fraction * epochs:g} epochs"
    return None


def _set_interval(sheet: Sheet, prefix: str, dotted: str, verb: str, default: int | None) -> None:
    """Set the interval of checkpoints or evaluations.

    Args:
        prefix: Prefix of the old keys, `PREFIX_strategy` (no, steps, epoch, best) and
            `PREFIX_steps`.
        dotted: The new key.
        verb: The word for what happens then, in notes.
        default: Number of steps if only the strategy is given.
    """
    old = take_waiting(sheet, f"{prefix}_strategy", f"{prefix}_steps")
    strategy = old.get(f"{prefix}_strategy")
    every = old.get(f"{prefix}_steps")
    kind = "steps"
    if strategy is not None:
        kind = read_choice({name: name for name in ("no", "steps", "epoch", "best")})(strategy)
    if strategy is not None and kind != "steps":
        if kind == "epoch":
            sheet.put(dotted, "1 epoch", strategy)
        elif kind == "best":
            sheet.note(
                strategy,
                f"{verb} each N steps: {dotted}. Without it, at the end and after a better evaluation",
            )
        if every is not None:
            sheet.note(every, f"without effect: {strategy.key} is {kind}")
    elif every is not None:
        fraction = _fraction_of_run(sheet, every)
        if fraction is not None:
            sheet.put(dotted, fraction, every)
        else:
            rules = {every.key: set_key(dotted, step_count)}
            apply_rules(rules, sheet, [every], "training arguments")
    elif strategy is not None and default:
        sheet.put(dotted, default, strategy)


# The keys of `columns` here → the old keys.
COLUMNS = {
    "text": "dataset_text_field",
    "prompt": "prompt_column",
    "completion": "completion_column",
    "messages": "messages_column",
}


class _DataKeys(NamedTuple):
    """The old keys of the data of training or of evaluation."""

    part: str
    files: str
    split: str
    limit: str


TRAIN_KEYS = _DataKeys("train", "train_file", "dataset_train_split", "max_train_samples")


EVAL_KEYS = _DataKeys("eval", "validation_file", "dataset_test_split", "max_eval_samples")


def _set_data(sheet: Sheet) -> None:
    """Set files or a hub's dataset, with limits and columns."""
    read_mixer(sheet)
    old = take_waiting(
        sheet,
        "dataset_name",
        "data_files",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "dataset_streaming",
        "train_file",
        "validation_file",
        "max_train_samples",
        "max_eval_samples",
        "dataset_text_field",
        "prompt_column",
        "completion_column",
        "messages_column",
    )
    columns = {part: str(old[name].value) for part, name in COLUMNS.items() if name in old}
    # assistant_only_loss or completion_only_loss: both wait under this name.
    answers = sheet.waiting.pop("assistant_only_loss", None)
    if answers is not None:
        sheet.put("data.learn_on", "assistant" if read_flag(answers) else "all", answers)
    if columns.get("text") in ("text", "messages"):
        # TRL's default, which it ignores for rows of messages.
        del columns["text"]
    _postpone_eval_files(old)
    for keys in (TRAIN_KEYS, EVAL_KEYS):
        _set_sources(sheet, old, keys, columns)


def _set_sources(
    sheet: Sheet, old: dict[str, OldKey], keys: _DataKeys, columns: dict[str, str]
) -> None:
    """Set data.train or data.eval to files or to a hub's dataset, if the old file names any."""
    options: dict[str, Any] = {}
    if columns:
        options["columns"] = columns
    if keys.limit in old and read_integer(old[keys.limit]) > 0:
        options["limit"] = read_integer(old[keys.limit])
    file = old.get(keys.files)
    if file is not None:
        sources = [{**_source(sheet, name), **options} for name in _file_names(file)]
        put_sources(sheet, keys.part, sources, file)
        if keys.part == "train" and "data_files" in old:
            sheet.note(
                old["data_files"], f"without effect on data.train: {file.key} names the rows"
            )
    elif _names_rows(old, keys):
        sources = _dataset_sources(sheet, old, keys, is_limited="limit" in options)
        decisive = old.get("dataset_name") or old["data_files"]
        put_sources(sheet, keys.part, [source | options for source in sources], decisive)


def _file_names(file: OldKey) -> list[str]:
    """Return the path or paths that a key has. Raises ConfigError if it has none."""
    if not isinstance(file.value, str | list) or not file.value:
        raise translation_error(
            file,
            f"{format_value(file.value)} given, a path is wanted",
            "give the path of a .jsonl, .json, .csv, .parquet or .txt file",
        )
    if isinstance(file.value, str):
        return [file.value]
    return [str(name) for name in file.value]


def _dataset_sources(
    sheet: Sheet, old: dict[str, OldKey], keys: _DataKeys, is_limited: bool
) -> list[dict[str, Any]]:
    """Return the sources of dataset_name and data_files; a hub's streams if its rows are limited."""
    files = old.get("data_files")
    path = old.get("dataset_name")
    if path is None:
        assert files is not None
        path = replace(files, value="json")
    dataset = Dataset(path, old.get("dataset_config"), old.get(keys.split), files=files)
    sources = sources_of(sheet, dataset)
    streaming = old.get("dataset_streaming")
    if not sources or streaming is None or not read_flag(streaming):
        return sources
    if sources[0]["kind"] != "hub":
        sheet.note(streaming, f"data.{keys.part}: files are read whole")
    elif is_limited:
        sources[0]["streaming"] = True
    else:
        sheet.note(streaming, f"data.{keys.part} is read whole: a stream needs {keys.limit}")
    return sources


def _names_rows(old: dict[str, OldKey], keys: _DataKeys) -> bool:
    """Return True if dataset_name or data_files name rows of training, or of evaluation."""
    if "dataset_name" not in old and "data_files" not in old:
        return False
    return keys.part == "train" or keys.split in old


def _postpone_eval_files(old: dict[str, OldKey]) -> None:
    """Set the split of evaluation if data_files has files for it and no key sets one."""
    files = old.get("data_files")
    if files is None or not isinstance(files.value, dict) or EVAL_KEYS.split in old:
        return
    for split in ("validation", "test"):
        if split in files.value:
            old[EVAL_KEYS.split] = replace(files, value=split)
            return


def _source(sheet: Sheet, name: str) -> dict[str, Any]:
    """Return the source for a file, a folder or a hub's dataset, as keys like data_path name it."""
    path = locate_file(sheet.base, name)
    if not path.exists() and "." not in path.name and "*" not in name:
        return {"kind": "hub", "id": name}
    return local_source(sheet, path)


def _strategy_names() -> dict[str, str]:
    """Return the names of strategies in guides and other tools → kinds of strategy here."""
    ddp = ("ddp", "distributed_data_parallel", "data_parallel", "multi_gpu", "torch_ddp")
    names = dict.fromkeys(ddp, "ddp")
    names |= dict.fromkeys(("fsdp", "fsdp2", "fully_sharded_data_parallel"), "fsdp2")
    names |= dict.fromkeys(("deepspeed", "zero"), "deepspeed")
    for stage in (1, 2, 3):
        for prefix in ("zero", "zero_", "zero-", "deepspeed_zero", "deepspeed_zero_"):
            names[f"{prefix}{stage}"] = f"zero{stage}"
    names |= dict.fromkeys(("single", "none", "no", "single_gpu"), "single")
    names |= dict.fromkeys(("tp", "tensor_parallel"), "tp")
    names |= dict.fromkeys(("pp", "pipeline", "pipeline_parallel"), "pp")
    names |= dict.fromkeys(("cp", "context_parallel", "sequence_parallel"), "cp")
    for kind in ("auto", "dp", "model_parallel", "local_sgd", "diloco"):
        names[kind] = kind
    return names


STRATEGIES = _strategy_names()


def _set_strategy(sheet: Sheet) -> None:
    """Set the strategy by the keys of all tools for it, which must agree."""
    given = take_waiting(
        sheet,
        "distributed_strategy",
        "fsdp",
        "fsdp_config",
        "fsdp_layer",
        "deepspeed",
        "zero_stage",
        "tp",
        "pp",
        "cp",
    )
    named = given.pop("distributed_strategy", None)
    old = {name: each for name, each in given.items() if _is_on(sheet, each)}
    kind = None
    if named is not None:
        kind = read_choice(STRATEGIES, {"horovod": "use ddp"})(named)
    fsdp_keys = _fsdp_keys(old)
    if fsdp_keys and kind in (None, "fsdp2"):
        _set_fsdp(sheet, old)
    elif named is not None:
        _ignore_or_refuse(sheet, fsdp_keys, named)
    zero_keys = [old[name] for name in ("deepspeed", "zero_stage") if name in old]
    if zero_keys and kind in (None, "deepspeed", "zero1", "zero2", "zero3"):
        _set_zero(sheet, old)
    elif named is not None:
        _ignore_or_refuse(sheet, zero_keys, named)
    if named is not None:
        _set_named_kind(sheet, kind, named)
    for name in ("tp", "pp", "cp"):
        if name in old:
            _set_degree(sheet, name, old[name])
    _set_ddp_options(sheet)


def _set_named_kind(sheet: Sheet, kind: str | None, named: OldKey) -> None:
    """Set the strategy that distributed_strategy names; DeepSpeed without a stage is ZeRO-2."""
    if kind == "deepspeed":
        if sheet.get("strategy.kind") is None:
            sheet.put("strategy.kind", "zero2", named)
    elif kind not in (None, "auto"):
        sheet.put("strategy.kind", kind, named)


def _ignore_or_refuse(sheet: Sheet, keys: list[OldKey], named: OldKey) -> None:
    """Note sections for another strategy than the named one. Raises ConfigError for single words.

    Guides show the sections of all strategies in one file; a single word is a contradiction.
    """
    for each in keys:
        if not isinstance(each.value, dict):
            raise contradiction(each, named)
        sheet.note(each, f"without effect: {named.where} is {named.value}")


def _set_degree(sheet: Sheet, name: str, old: OldKey) -> None:
    """Set the degree of tp, pp or cp; beside no other strategy it is that of ddp."""
    degree = read_integer(old)
    if degree <= 1:
        return
    kind = sheet.get("strategy.kind")
    if kind is None:
        sheet.put("strategy.kind", "ddp", old)
    if kind == name:
        sheet.put("strategy.degree", degree, old)
    else:
        sheet.put(f"strategy.{name}", degree, old)


def _is_on(sheet: Sheet, old: OldKey) -> bool:
    """Return False for a section with `enabled: false`, as guides write it, and note that."""
    if not isinstance(old.value, dict):
        return True
    enabled = old.children_by_key().get("enabled")
    if enabled is None or read_flag(enabled):
        return True
    sheet.note(old, "without effect: enabled is false")
    return False


def _fsdp_keys(old: dict[str, OldKey]) -> list[OldKey]:
    """Return the keys that request FSDP.

    `fsdp: ""`, `fsdp: false` and a bare fsdp_config beside other strategies do not.
    """
    switch = old.get("fsdp")
    if switch is not None:
        is_empty = switch.value in (False, "", [])
        if is_empty or str(switch.value).lower() in ("false", "none", "no"):
            return []
    return [old[name] for name in ("fsdp", "fsdp_config", "fsdp_layer") if name in old]


def _fsdp_words(switch: OldKey) -> list[OldKey]:
    """Return the keys for the words of `fsdp: "full_shard auto_wrap offload"`.

    Raises ConfigError for an unknown word.
    """
    if isinstance(switch.value, list):
        tokens = read_names(switch)
    else:
        tokens = switch.value.replace(",", " ").split()
    olds = []
    for word in tokens:
        low = word.lower()
        if low in acc.SHARDING:
            olds.append(replace(switch, key="sharding_strategy", value=low))
        elif low == "offload":
            olds.append(replace(switch, key="offload_params", value=True))
        elif low not in ("auto_wrap", "true"):
            names = ", ".join(name for name in acc.SHARDING if not name.isdigit())
            raise translation_error(
                switch, f"no {word!r} here", f"there are {names}, offload, auto_wrap"
            )
    return olds


def _set_fsdp(sheet: Sheet, old: dict[str, OldKey]) -> None:
    """Set FSDP by the words of `fsdp`, and by fsdp_config as a section or the path of a JSON."""
    olds: list[OldKey] = []
    switch = old.get("fsdp")
    config = old.get("fsdp_config")
    if switch is not None and isinstance(switch.value, str | list):
        olds += _fsdp_words(switch)
    for section in (switch, config):
        if section is not None and isinstance(section.value, dict):
            olds += [each for each in section.children() if each.key != "enabled"]
    if config is not None and isinstance(config.value, str):
        olds += load_file(locate_file(sheet.base, config.value), config)
    if "fsdp_layer" in old:
        olds.append(replace(old["fsdp_layer"], key="transformer_layer_cls_to_wrap"))
    acc.read_fsdp(sheet, _fsdp_keys(old)[0], olds)


def _set_zero(sheet: Sheet, old: dict[str, OldKey]) -> None:
    """Set ZeRO by `deepspeed`, the path of a JSON or a section, and by zero_stage."""
    section = old.get("deepspeed")
    if section is not None and section.value:
        if isinstance(section.value, dict):
            _read_zero_section(sheet, section)
        elif isinstance(section.value, str):
            read_deepspeed_json(sheet, section)
    stage = old.get("zero_stage")
    if stage is not None:
        sheet.put("strategy.kind", read_choice(STAGES)(stage), stage)


def _read_zero_section(sheet: Sheet, section: OldKey) -> None:
    """Set ZeRO from a section: the path or content of a JSON, or accelerate's stage and switches."""
    inner = section.children_by_key()
    file = inner.get("config") or inner.get("config_file") or inner.get("config_path")
    switches = {"stage", "zero_stage", "enabled", *acc.DEEPSPEED}
    if file is not None and isinstance(file.value, str):
        read_deepspeed_json(sheet, file)
    elif "zero_optimization" in inner or not inner.keys() & switches:
        read_deepspeed_config(sheet, list(inner.values()))
    else:
        olds = []
        for each in inner.values():
            if each.key == "stage":
                olds.append(replace(each, key="zero_stage"))
            elif each.key != "enabled":
                olds.append(each)
        acc.read_deepspeed(sheet, section, olds)


DDP = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "broadcast_buffers",
    "static_graph",
    "gradient_as_bucket_view",
)


def _set_ddp_options(sheet: Sheet) -> None:
    """Set options of DDP. Other strategies have the arguments, too, but not their effect."""
    for dotted, old in take_waiting(sheet, *(f"ddp.{name}" for name in DDP)).items():
        name = dotted.removeprefix("ddp.")
        kind = sheet.get("strategy.kind")
        if kind is None:
            sheet.put("strategy.kind", "ddp", old)
        elif kind != "ddp":
            sheet.note(old, f"without effect: the strategy is {kind}")
            continue
        if name == "bucket_cap_mb":
            sheet.put(f"strategy.{name}", read_number(old), old)
        else:
            sheet.put(f"strategy.{name}", read_flag(old), old)


def _set_batch_norm(sheet: Sheet) -> None:
    """Set how many ranks share the statistics of batch norm, if they are synchronised at all."""
    size = sheet.waiting.pop("sync_bn_group_size", None)
    if size is None:
        return
    if not sheet.get("model.sync_batchnorm"):
        sheet.note(size, "without effect: sync_bn is not on")
    elif read_integer(size) > 1:
        sheet.put("model.sync_batchnorm_ranks", read_integer(size), size)


# Characters of a regular expression, which names of layers do not have.
PATTERN = re.compile(r"[\\^$*+?()\[\]{}|]")


def _set_targets(sheet: Sheet, old: OldKey, of_experts: list[str]) -> None:
    """Set adapter.targets: names of layers, or one word for many. Reports PEFT's patterns.

    `of_experts`: names of experts' parameters, which stand beside those of layers.
    """
    names = read_names(old)
    for name in names:
        if name in ("all-linear", "attention"):
            sheet.put("adapter.targets", name, old)
            return
    if isinstance(old.value, str) and PATTERN.search(old.value):
        sheet.report_unsupported(
            old,
            "layers are named, not by a pattern",
            "list the ends of their names: adapter.targets: [q_proj, v_proj]",
        )
    elif names:
        sheet.put("adapter.targets", [*names, *of_experts], old)


# Old keys → the keys of `adapter`.
ADAPTER_KEYS: dict[str, tuple[str, Converter]] = {
    "lora_r": ("r", read_integer),
    "lora_alpha": ("alpha", read_number),
    "lora_dropout": ("dropout", read_number),
    "use_rslora": ("rslora", read_flag),
    "use_dora": ("dora", read_flag),
    "lora_modules_to_save": ("modules_to_save", read_names),
}


# PEFT's names of layers and of experts' parameters.
TARGETS = ("lora_target_modules", "lora_target_parameters")
QUANTIZED = ("load_in_4bit", "load_in_8bit")


def _set_adapter(sheet: Sheet) -> None:
    """Set LoRA and its options, if requested. Raises ConfigError for 4 and 8 bits together."""
    old = take_waiting(sheet, "use_peft", *ADAPTER_KEYS, *TARGETS, *QUANTIZED)
    switch = old.pop("use_peft", None)
    if switch is not None and not read_flag(switch):
        for each in old.values():
            sheet.note(each, f"without effect: {switch.key} is false")
        return
    for default in ("use_rslora", "use_dora", "lora_modules_to_save", "lora_target_parameters"):
        if default in old and not old[default].value:
            del old[default]
    quantized = [name for name in QUANTIZED if name in old and read_flag(old[name])]
    if len(quantized) > 1:
        raise contradiction(old["load_in_8bit"], old["load_in_4bit"])
    decisive = switch or _first_adapter_key(old, quantized)
    if decisive is not None:
        sheet.put("adapter.kind", "lora", decisive)
        _set_adapter_options(sheet, old, quantized)


def _set_adapter_options(sheet: Sheet, old: dict[str, OldKey], quantized: list[str]) -> None:
    """Set the options of LoRA. `quantized` has the switch of packed weights that is on, if any."""
    for name, (key, convert) in ADAPTER_KEYS.items():
        if name in old:
            sheet.put(f"adapter.{key}", convert(old[name]), old[name])
    parameters = old.get("lora_target_parameters")
    of_experts = [] if parameters is None else read_names(parameters)
    if "lora_target_modules" in old:
        _set_targets(sheet, old["lora_target_modules"], of_experts)
    elif parameters is not None:
        sheet.put("adapter.targets", of_experts, parameters)
    if quantized:
        name = quantized[0]
        sheet.put("adapter.quantize", name.removeprefix("load_in_"), old[name])


def _first_adapter_key(old: dict[str, OldKey], quantized: list[str]) -> OldKey | None:
    """Return the first key that requests an adapter; None if no key does.

    `quantized` has the switch of packed weights that is on, if any.
    """
    if quantized:
        return old[quantized[0]]
    for name, each in old.items():
        if name.startswith(("lora_", "use_")):
            return each
    return None
