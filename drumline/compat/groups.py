"""Training arguments that belong together: rate, warm-up, when to save, data, strategy, adapters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drumline.compat import accelerate as acc
from drumline.compat.deepspeed import (
    PRECISIONS,
    STAGES,
    deepspeed_config,
    found,
    load_file,
    new_path,
    own_deepspeed_file,
)
from drumline.compat.mixtures import mixer
from drumline.compat.preferences import preferences
from drumline.compat.rules import flag, name_list, number, one_of, read, to, whole
from drumline.compat.sheet import Lacking, Old, Sheet, contradiction, pop, refuse, shown
from drumline.core.algorithm import AlgorithmSpec
from drumline.core.registry import find

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
             "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd", "wsd": "wsd"}  # fmt: skip
NO_SCHEDULES = {
    name: f"take one of {', '.join(dict.fromkeys(SCHEDULES))}"
    for name in (
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_warmup_with_min_lr",
        "greedy",
    )
}


def combine(sheet: Sheet) -> None:
    """Combine every group in turn. Keys that wait afterwards are accelerate's."""
    for group in (
        preferences,
        _optimizer,
        _warmup,
        _dtype,
        _intervals,
        _best,
        _data,
        _strategy,
        _batch_norm,
        _adapter,
    ):
        group(sheet)
    if sheet.get("schedule.warmup_steps") and sheet.get("schedule.warmup_ratio"):
        ratio, steps = (sheet.origins["schedule", f"warmup_{name}"] for name in ("ratio", "steps"))
        sheet.note(ratio, f"without effect: {steps.where} says {shown(steps.value)}")


# What transformers', TRL's and LLaMA-Factory's evaluations call metrics that have another name here.
METRICS = {
    "rewards/accuracies": "accuracy", "rewards/margins": "margin", "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected", "logps/chosen": "log_prob_chosen", "logps/rejected": "log_prob_rejected",
    "mean_token_accuracy": "token_accuracy",
}  # fmt: skip


def _best(sheet: Sheet) -> None:
    """greater_is_better: as transformers has it, by default for every metric whose name does not end in `loss`."""
    old = pop(sheet, "metric_for_best_model", "greater_is_better")
    metric, greater = old.get("metric_for_best_model"), old.get("greater_is_better")
    if metric is not None:
        name, kind = (
            str(metric.value).removeprefix("eval_"),
            str(sheet.get("algorithm.kind", "sft")),
        )
        name = (
            "token_accuracy"
            if name == "accuracy" and kind in ("sft", "pretrain")
            else METRICS.get(name, name)
        )
        spec = find(AlgorithmSpec, kind)
        if (
            sheet.lenient
            and spec is not None
            and name not in spec.metrics
            and not name.startswith("reward/")
        ):
            sheet.lacks(
                metric, f"{kind} measures no {name!r}", f"there are {', '.join(spec.metrics)}"
            )
            return
        sheet.put("eval.metric", name, metric)
    if used := greater or metric:
        rises = flag(used) if used is greater else not str(used.value).endswith("loss")
        sheet.put("eval.mode", "max" if rises else "min", used)


def _optimizer(sheet: Sheet) -> None:
    """use_linear_scaling: base_learning_rate × devices, or × samples / base_batch_size (Goyal et al. 2017). With num_gpus: × √devices."""
    old = pop(sheet, "learning_rate", "base_learning_rate", "use_linear_scaling")
    plain, base = old.get("learning_rate"), old.get("base_learning_rate")
    scaled = "use_linear_scaling" in old and flag(old["use_linear_scaling"])
    if scaled:
        root = (
            base is not None
            and "num_processes" in sheet.waiting
            and sheet.waiting["num_processes"].key == "num_gpus"
        )
        sheet.put("optimizer.lr_scaling", "sqrt" if root else "linear", old["use_linear_scaling"])
        if root:
            what = "beside base_learning_rate and num_gpus it is base_learning_rate × √num_gpus, as in guides"
            sheet.note(old["use_linear_scaling"], what)
    used, other = (base or plain, plain) if scaled or plain is None else (plain, base)
    if used is not None:
        sheet.put("optimizer.lr", number(used), used)
    if other is not None and other is not used:
        sheet.note(
            other,
            f"without effect: {'base_learning_rate is scaled' if scaled else 'use_linear_scaling is not on'}",
        )
    if old := pop(sheet, "adam_beta1", "adam_beta2"):
        betas = [
            number(old[name]) if name in old else default
            for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999))
        ]
        sheet.put("optimizer.betas", betas, next(iter(old.values())))


def _warmup(sheet: Sheet) -> None:
    """warmup_steps goes before warmup_ratio unless it is 0; below 1 it is a ratio itself (transformers 5)."""
    old = pop(sheet, "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
    kind = sheet.origins.get(("schedule", "kind"))
    constant = kind is not None and str(kind.value).lower() == "constant"
    steps, ratio = old.get("warmup_steps"), old.get("warmup_ratio")
    for each in (steps, ratio):
        if each is not None and constant and number(each):
            sheet.note(
                each, "without effect: `constant` has no warm-up; `constant_with_warmup` has"
            )
    used = next(
        (each for each in (steps, ratio) if each is not None and number(each) and not constant),
        None,
    )
    if used is not None:
        part = used is ratio or number(used) < 1
        sheet.put(
            f"schedule.warmup_{'ratio' if part else 'steps'}",
            number(used) if part else whole(used),
            used,
        )
        sheet.put("schedule.warmup_from_zero", True, used)
    for each in (
        _from_json(old["lr_scheduler_kwargs"]).inside() if "lr_scheduler_kwargs" in old else ()
    ):
        steps_, decays = sheet.get("run.steps"), sheet.get("schedule.kind") == "wsd"
        if each.key in ("min_lr", "min_lr_rate", "min_lr_ratio"):
            low, lr = number(each), sheet.get("optimizer.lr") or 5e-5
            sheet.put("schedule.min_ratio", low / lr if each.key == "min_lr" else low, each)
        elif each.key == "num_decay_steps" and decays and steps_ and 0 < whole(each) <= steps_:
            sheet.put("schedule.decay_ratio", whole(each) / steps_, each)
        elif each.key == "num_decay_steps" and decays and not steps_:
            sheet.lacks(
                each,
                "it is a part of all steps here, and max_steps is not set",
                "set schedule.decay_ratio",
            )
        elif (each.key, each.value) not in (
            ("decay_type", "linear"),
            ("warmup_type", "linear"),
            ("num_cycles", 0.5),
        ):
            sheet.lacks(
                each,
                f"no {each.key} here",
                "schedule has warmup_steps, warmup_ratio, min_ratio and decay_ratio",
            )


def _from_json(old: Old) -> Old:
    """Keys and values that a command gives as JSON."""
    try:
        return (
            replace(old, value=json.loads(old.value))
            if isinstance(old.value, str) and old.value
            else old
        )
    except (ValueError, RecursionError):
        return old


def _dtype(sheet: Sheet) -> None:
    """The precision by torch_dtype, if nothing else sets it. It is the type of the weights there; Drumline's are fp32."""
    old = sheet.waiting.pop("dtype", None)
    if old is None or str(old.value) == "auto":
        return
    kind = PRECISIONS.get(str(old.value).lower().removeprefix("torch."))
    if kind is None:
        raise refuse(
            old,
            f"no type {shown(old.value)} here",
            f"there are {', '.join(dict.fromkeys(PRECISIONS.values()))}",
        )
    if {"bf16", "fp16", "mixed_precision"} & sheet.waiting.keys() or kind == "fp32":
        sheet.note(old, "master weights are fp32; the compute type is `precision`")
    else:
        sheet.note(old, f"master weights are fp32; they are computed with in {kind}")
        sheet.put("precision.kind", kind, old)


def step_count(old: Old) -> int:
    """A number of steps. Raises ConfigError for a part of the run (0.1): its length is known only after the data is read."""
    if 0 < number(old) < 1:
        raise Lacking(f"{old.value} of all steps", where=old.where, fix="write a number of steps")
    return whole(old)


def _part_of_run(sheet: Sheet, old: Old) -> int | str | None:
    """A part of the run (0.1) as steps or epochs; None for a number of steps, and where neither is given."""
    steps, epochs = sheet.get("run.steps"), sheet.get("run.epochs")
    if not 0 < number(old) < 1 or not (steps or epochs):
        return None
    return math.ceil(number(old) * steps) if steps else f"{number(old) * epochs:g} epochs"


def _intervals(sheet: Sheet) -> None:
    """`every` of checkpoints and evaluations, by a strategy (no, steps, epoch, best) and a number of steps."""
    evaluation = ("eval", "eval.every", "evaluated", sheet.get("run.log_every", 500))
    for prefix, dotted, what, default in (("save", "checkpoint.every", "saved", 500), evaluation):
        old = pop(sheet, f"{prefix}_strategy", f"{prefix}_steps")
        strategy, every = old.get(f"{prefix}_strategy"), old.get(f"{prefix}_steps")
        kind = (
            one_of({name: name for name in ("no", "steps", "epoch", "best")})(strategy)
            if strategy
            else "steps"
        )
        if strategy is not None and kind == "epoch":
            sheet.put(dotted, "1 epoch", strategy)
        elif strategy is not None and kind == "best":
            sheet.note(
                strategy,
                f"{what} each N steps: {dotted}. Without it, at the end and after a better evaluation",
            )
        if kind != "steps":
            if every is not None and strategy is not None:
                sheet.note(every, f"without effect: {strategy.key} is {kind}")
        elif every is not None and (part := _part_of_run(sheet, every)) is not None:
            sheet.put(dotted, part, every)
        elif every is not None:
            read({every.key: to(dotted, step_count)}, sheet, [every], "training arguments")
        elif strategy is not None and default:
            sheet.put(dotted, default, strategy)


COLUMNS = {
    "text": "dataset_text_field",
    "prompt": "prompt_column",
    "completion": "completion_column",
    "messages": "messages_column",
}


def _data(sheet: Sheet) -> None:
    """Set files or a hub's dataset, with limits and columns."""
    mixer(sheet)
    old = pop(sheet, "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "train_file",
               "validation_file", "max_train_samples", "max_eval_samples", "dataset_text_field", "prompt_column", "completion_column",
               "messages_column")  # fmt: skip
    columns = {part: str(old[name].value) for part, name in COLUMNS.items() if name in old}
    if answers := sheet.waiting.pop(
        "assistant_only_loss", None
    ):  # or completion_only_loss: either does it
        sheet.put("data.learn_on", "assistant" if flag(answers) else "all", answers)
    if columns.get("text") in ("text", "messages"):
        del columns["text"]  # TRL's default, which it passes over for rows of messages
    for part, files, split, limit in (
        ("train", "train_file", "dataset_train_split", "max_train_samples"),
        ("eval", "validation_file", "dataset_test_split", "max_eval_samples"),
    ):
        rest: dict[str, Any] = {"columns": columns} if columns else {}
        if limit in old and whole(old[limit]) > 0:
            rest["limit"] = whole(old[limit])
        if file := old.get(files):
            if not isinstance(file.value, str | list) or not file.value:
                fix = "give the path of a .jsonl, .json, .csv, .parquet or .txt file"
                raise refuse(file, f"{shown(file.value)} given, a path is wanted", fix)
            names = [file.value] if isinstance(file.value, str) else map(str, file.value)
            sheet.put(f"data.{part}", [{**_source(sheet, name), **rest} for name in names], file)
        elif "dataset_name" in old and (part == "train" or split in old):
            keys = {"id": "dataset_name", "name": "dataset_config", "split": split}
            hub: dict[str, Any] = {
                "kind": "hub",
                **{key: str(old[name].value) for key, name in keys.items() if name in old},
            }
            if "dataset_streaming" in old and flag(old["dataset_streaming"]):
                if "limit" in rest:
                    hub["streaming"] = True
                else:
                    sheet.note(
                        old["dataset_streaming"],
                        f"data.{part} is read whole: a stream needs {limit}",
                    )
            sheet.put(f"data.{part}", [{**hub, **rest}], old["dataset_name"])


def _source(sheet: Sheet, name: str) -> dict[str, Any]:
    path = found(sheet.base, name)
    if not path.exists() and "." not in path.name and "*" not in name:
        return {"kind": "hub", "id": name}  # data_path and the like name either
    return {"kind": "saved" if path.is_dir() else "file", "path": new_path(sheet, path)}


STRATEGIES = {
    **dict.fromkeys(
        ("ddp", "distributed_data_parallel", "data_parallel", "multi_gpu", "torch_ddp"), "ddp"
    ),
    **dict.fromkeys(("fsdp", "fsdp2", "fully_sharded_data_parallel"), "fsdp2"),
    **dict.fromkeys(("deepspeed", "zero"), "deepspeed"),
    **{
        f"{before}{n}": f"zero{n}"
        for n in (1, 2, 3)
        for before in ("zero", "zero_", "zero-", "deepspeed_zero", "deepspeed_zero_")
    },
    **dict.fromkeys(("single", "none", "no", "single_gpu"), "single"),
    **dict.fromkeys(("tp", "tensor_parallel"), "tp"),
    **dict.fromkeys(("pp", "pipeline", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("cp", "context_parallel", "sequence_parallel"), "cp"),
    **{name: name for name in ("auto", "dp", "model_parallel", "local_sgd", "diloco")},
}


def _strategy(sheet: Sheet) -> None:
    """The strategy by distributed_strategy, fsdp, fsdp_config, deepspeed, zero_stage and ddp_…, which must agree."""
    old = pop(
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
    named = old.pop("distributed_strategy", None)
    old = {name: each for name, each in old.items() if _is_on(sheet, each)}
    kind = one_of(STRATEGIES, {"horovod": "use ddp"})(named) if named else None
    groups = (
        (_fsdp_parts(old), kind in (None, "fsdp2"), _fsdp),
        (
            [old[name] for name in ("deepspeed", "zero_stage") if name in old],
            kind in (None, "deepspeed", "zero1", "zero2", "zero3"),
            _zero,
        ),
    )
    for parts, chosen, translate in groups:
        if parts and chosen:
            translate(sheet, old)
        elif named is not None:
            # A section for another strategy is a guide's way to show all of them; one word is a contradiction.
            for each in parts:
                if not isinstance(each.value, dict):
                    raise contradiction(each, named)
                sheet.note(each, f"without effect: {named.where} is {named.value}")
    if (
        named is not None
        and kind not in (None, "auto")
        and (kind != "deepspeed" or sheet.get("strategy.kind") is None)
    ):
        sheet.put("strategy.kind", "zero2" if kind == "deepspeed" else kind, named)
    for name in ("tp", "pp", "cp"):
        if name in old and whole(old[name]) > 1:
            if (kind := sheet.get("strategy.kind")) is None:
                sheet.put("strategy.kind", "ddp", old[name])
            sheet.put(
                "strategy.degree" if kind == name else f"strategy.{name}",
                whole(old[name]),
                old[name],
            )
    _ddp(sheet)


def _is_on(sheet: Sheet, old: Old) -> bool:
    """False for a section with `enabled: false`, as guides write it."""
    on = old.by_key().get("enabled") if isinstance(old.value, dict) else None
    if on is None or flag(on):
        return True
    sheet.note(old, "without effect: enabled is false")
    return False


def _fsdp_parts(old: dict[str, Old]) -> list[Old]:
    """The keys that request FSDP: `fsdp: ""`, `fsdp: false` and a bare fsdp_config beside other strategies do not."""
    on = old.get("fsdp")
    if on is not None and (
        on.value in (False, "", []) or str(on.value).lower() in ("false", "none", "no")
    ):
        return []
    return [old[name] for name in ("fsdp", "fsdp_config", "fsdp_layer") if name in old]


def _fsdp(sheet: Sheet, old: dict[str, Old]) -> None:
    """fsdp: "full_shard auto_wrap offload", with fsdp_config as keys and values or the path of a JSON."""
    olds: list[Old] = []
    switch = old.get("fsdp")
    if switch is not None and isinstance(switch.value, str | list):
        for word in (
            name_list(switch)
            if isinstance(switch.value, list)
            else switch.value.replace(",", " ").split()
        ):
            low = word.lower()
            if low in acc.SHARDING:
                olds.append(replace(switch, key="sharding_strategy", value=low))
            elif low == "offload":
                olds.append(replace(switch, key="offload_params", value=True))
            elif low not in ("auto_wrap", "true"):
                names = ", ".join(name for name in acc.SHARDING if not name.isdigit())
                raise refuse(switch, f"no {word!r} here", f"there are {names}, offload, auto_wrap")
    for name in ("fsdp", "fsdp_config"):
        section = old.get(name)
        if section is not None and isinstance(section.value, dict):
            olds += [each for each in section.inside() if each.key != "enabled"]
        elif name == "fsdp_config" and section is not None and isinstance(section.value, str):
            olds += load_file(found(sheet.base, section.value), section)
    if "fsdp_layer" in old:
        olds.append(replace(old["fsdp_layer"], key="transformer_layer_cls_to_wrap"))
    acc.read_fsdp(sheet, _fsdp_parts(old)[0], olds)


def _zero(sheet: Sheet, old: dict[str, Old]) -> None:
    """deepspeed: the path of a JSON, the JSON itself, or a stage and switches as accelerate has them."""
    section = old.get("deepspeed")
    if section is not None and isinstance(section.value, dict) and section.value:
        inner = section.by_key()
        file = inner.get("config") or inner.get("config_file") or inner.get("config_path")
        if file is not None and isinstance(file.value, str):
            own_deepspeed_file(sheet, file)
        elif "zero_optimization" in inner or not inner.keys() & {
            "stage",
            "zero_stage",
            "enabled",
            *acc.DEEPSPEED,
        }:
            deepspeed_config(sheet, list(inner.values()))
        else:
            olds = [each for each in inner.values() if each.key != "enabled"]
            acc.read_deepspeed(
                sheet,
                section,
                [replace(each, key="zero_stage") if each.key == "stage" else each for each in olds],
            )
    elif section is not None and isinstance(section.value, str) and section.value:
        own_deepspeed_file(sheet, section)
    if (stage := old.get("zero_stage")) is not None:
        sheet.put("strategy.kind", one_of(STAGES)(stage), stage)


def _ddp(sheet: Sheet) -> None:
    """Options of DDP, which the argument names have on any strategy."""
    for dotted, old in pop(sheet, *(f"ddp.{name}" for name in DDP)).items():
        name = dotted.removeprefix("ddp.")
        kind = sheet.get("strategy.kind")
        if kind is None:
            sheet.put("strategy.kind", "ddp", old)
        elif kind != "ddp":
            sheet.note(old, f"without effect: the strategy is {kind}")
            continue
        sheet.put(f"strategy.{name}", number(old) if name == "bucket_cap_mb" else flag(old), old)


DDP = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "broadcast_buffers",
    "static_graph",
    "gradient_as_bucket_view",
)


def _batch_norm(sheet: Sheet) -> None:
    size = sheet.waiting.pop("sync_bn_group_size", None)
    if size is not None and not sheet.get("model.sync_batchnorm"):
        sheet.note(size, "without effect: sync_bn is not on")
    elif size is not None and whole(size) > 1:
        sheet.put("model.sync_batchnorm_ranks", whole(size), size)


def _targets(sheet: Sheet, old: Old) -> None:
    """adapter.targets: names of layers, or a word for several. PEFT also takes a pattern, as one text."""
    names = name_list(old)
    if (
        word := next((name for name in names if name in ("all-linear", "attention")), None)
    ) is not None:
        sheet.put("adapter.targets", word, old)
    elif isinstance(old.value, str) and re.search(r"[\\^$*+?()\[\]{}|]", old.value):
        sheet.lacks(
            old,
            "layers are named, not by a pattern",
            "list the ends of their names: adapter.targets: [q_proj, v_proj]",
        )
    elif names:
        sheet.put("adapter.targets", names, old)


def _adapter(sheet: Sheet) -> None:
    keys: dict[str, tuple[str, Callable[[Old], Any]]] = {
        "lora_r": ("r", whole), "lora_alpha": ("alpha", number), "lora_dropout": ("dropout", number), "use_rslora": ("rslora", flag),
        "use_dora": ("dora", flag), "lora_modules_to_save": ("modules_to_save", name_list),
    }  # fmt: skip
    old = pop(sheet, "use_peft", *keys, "lora_target_modules", "load_in_4bit", "load_in_8bit")
    on = old.pop("use_peft", None)
    if on is not None and not flag(on):
        for each in old.values():
            sheet.note(each, f"without effect: {on.key} is false")
        return
    for default in ("use_rslora", "use_dora", "lora_modules_to_save"):
        if default in old and not old[default].value:
            del old[default]
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if name in old and flag(old[name])]
    if len(bits) > 1:
        raise contradiction(old["load_in_8bit"], old["load_in_4bit"])
    first_key = on or next(
        (old[name] for name in (*bits, *(n for n in old if n.startswith(("lora_", "use_"))))), None
    )
    if first_key is None:
        return
    sheet.put("adapter.kind", "lora", first_key)
    for name, (key, convert) in keys.items():
        if name in old:
            sheet.put(f"adapter.{key}", convert(old[name]), old[name])
    if (targets := old.get("lora_target_modules")) is not None:
        _targets(sheet, targets)
    if bits:
        sheet.put("adapter.quantize", bits[0].removeprefix("load_in_"), old[bits[0]])
