"""What training arguments say in several keys at once: rate, warm-up, when to save, data, strategy, adapters; and what they leave unsaid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drumline.config.compat import accelerate as acc
from drumline.config.compat.combine import PRECISIONS, found, load_file, own_deepspeed_file, shown
from drumline.config.compat.deepspeed import STAGES, deepspeed_config
from drumline.config.compat.sheet import Old, Sheet, choice, contradiction, flag, number, refuse, said, whole, words

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
             "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd", "wsd": "wsd"}  # fmt: skip
NO_SCHEDULES = {
    name: f"take one of {', '.join(dict.fromkeys(SCHEDULES))}"
    for name in ("cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy")
}
STRATEGIES = {
    **{name: "ddp" for name in ("ddp", "distributed_data_parallel", "data_parallel", "multi_gpu", "torch_ddp")},
    **{name: "fsdp2" for name in ("fsdp", "fsdp2", "fully_sharded_data_parallel")},
    **{name: "deepspeed" for name in ("deepspeed", "zero")},
    **{f"{before}{n}": f"zero{n}" for n in (1, 2, 3) for before in ("zero", "zero_", "zero-", "deepspeed_zero", "deepspeed_zero_")},
    **{name: "single" for name in ("single", "none", "no", "single_gpu")},
    **{name: "tp" for name in ("tp", "tensor_parallel")},
    **{name: "pp" for name in ("pp", "pipeline", "pipeline_parallel")},
    **{name: "cp" for name in ("cp", "context_parallel", "sequence_parallel")},
    **{name: name for name in ("auto", "dp", "model_parallel", "local_sgd", "diloco")},
}


def combine(sheet: Sheet) -> None:
    """Every group in turn. What waits afterwards is accelerate's."""
    for group in (_rate, _betas, _warmup, _dtype, _saving, _evaluation, _data, _strategy, _batch_norm, _adapter):
        group(sheet)


def _pop(sheet: Sheet, *names: str) -> dict[str, Old]:
    return {name: sheet.taken.pop(name) for name in names if name in sheet.taken}


# ------------------------------------------------------------------------------------------------------ rate and schedule


def _rate(sheet: Sheet) -> None:
    """use_linear_scaling: base_learning_rate × devices (Goyal et al. 2017), or × samples / base_batch_size where that is said."""
    old = _pop(sheet, "learning_rate", "base_learning_rate", "use_linear_scaling")
    plain, base = old.get("learning_rate"), old.get("base_learning_rate")
    scaled = "use_linear_scaling" in old and flag(old["use_linear_scaling"])
    if scaled:
        sheet.put("optimizer.lr_scaling", "linear", old["use_linear_scaling"])
    used, other = (base or plain, plain) if scaled or plain is None else (plain, base)
    if used is not None:
        sheet.put("optimizer.lr", number(used), used)
    if other is not None and other is not used:
        sheet.note(other, f"without effect: {'base_learning_rate is scaled' if scaled else 'use_linear_scaling is not on'}")


def _betas(sheet: Sheet) -> None:
    old = _pop(sheet, "adam_beta1", "adam_beta2")
    if old:
        betas = [number(old[name]) if name in old else default for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
        sheet.put("optimizer.betas", betas, next(iter(old.values())))


def _warmup(sheet: Sheet) -> None:
    """warmup_steps goes before warmup_ratio unless it is 0; below 1 it is a ratio itself (transformers 5)."""
    old = _pop(sheet, "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
    kind = sheet.origins.get(("schedule", "kind"))
    constant = kind is not None and str(kind.value).lower() == "constant"
    steps, ratio = old.get("warmup_steps"), old.get("warmup_ratio")
    for each in (steps, ratio):
        if each is not None and constant and number(each):
            sheet.note(each, "without effect: `constant` has no warm-up; `constant_with_warmup` has")
    if not constant and steps is not None and number(steps):
        part = number(steps) < 1
        sheet.put(f"schedule.warmup_{'ratio' if part else 'steps'}", number(steps) if part else whole(steps), steps)
    elif not constant and ratio is not None and number(ratio):
        sheet.put("schedule.warmup_ratio", number(ratio), ratio)
    for each in old["lr_scheduler_kwargs"].inside() if "lr_scheduler_kwargs" in old else ():
        if each.key not in ("min_lr", "min_lr_rate", "min_lr_ratio"):
            raise refuse(each, f"no {each.key} here", "schedule has warmup_steps, warmup_ratio, min_ratio and decay_ratio")
        low, lr = number(each), sheet.get("optimizer.lr", 5e-5)
        sheet.put("schedule.min_ratio", low / lr if each.key == "min_lr" else low, each)


def _dtype(sheet: Sheet) -> None:
    """torch_dtype is what weights are held in, there. Here they are held in fp32; where nothing else is said it gives the precision."""
    old = sheet.taken.pop("dtype", None)
    if old is None or str(old.value) == "auto":
        return
    kind = PRECISIONS.get(str(old.value).lower().removeprefix("torch."))
    if kind is None:
        raise refuse(old, f"no type {said(old.value)} here", f"there are {', '.join(dict.fromkeys(PRECISIONS.values()))}")
    if {"bf16", "fp16", "mixed_precision"} & sheet.taken.keys() or kind == "fp32":
        sheet.note(old, "master weights are fp32; the compute type is `precision`")
    else:
        sheet.note(old, f"master weights are fp32; they are computed with in {kind}")
        sheet.put("precision.kind", kind, old)


# ----------------------------------------------------------------------------------------------------------- when, and on what


def _times(sheet: Sheet, strategy: Old | None, steps: Old | None, dotted: str, what: str, unasked: int | None) -> None:
    """A strategy of no, steps, epoch or best, and a number of steps → `every`."""
    kind = choice({name: name for name in ("no", "steps", "epoch", "best")})(strategy) if strategy else "steps"
    if strategy is not None and kind in ("epoch", "best"):
        sheet.note(strategy, f"{what} each N steps: {dotted}. Without it, at the end" + (" and after a better evaluation" if kind == "best" else ""))
    if kind != "steps":
        if steps is not None and strategy is not None:
            sheet.note(steps, f"without effect: {strategy.key} is {kind}")
    elif steps is not None and 0 < number(steps) < 1:
        raise refuse(steps, f"{steps.value} of all steps", "write a number of steps")
    elif steps is not None:
        sheet.put(dotted, whole(steps), steps)
    elif strategy is not None and unasked:
        sheet.put(dotted, unasked, strategy)


def _saving(sheet: Sheet) -> None:
    old = _pop(sheet, "save_strategy", "save_steps")
    _times(sheet, old.get("save_strategy"), old.get("save_steps"), "checkpoint.every", "saved", 500)


def _evaluation(sheet: Sheet) -> None:
    old = _pop(sheet, "eval_strategy", "eval_steps")
    _times(sheet, old.get("eval_strategy"), old.get("eval_steps"), "eval.every", "evaluated", sheet.get("run.log_every", 500))


def _data(sheet: Sheet) -> None:
    """Files or a hub's data set, with limits and columns."""
    old = _pop(sheet, "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "train_file",
               "validation_file", "max_train_samples", "max_eval_samples", "dataset_text_field", "prompt_column", "completion_column",
               "messages_column")  # fmt: skip
    columns = {part: str(old[name].value) for part, name in
               (("text", "dataset_text_field"), ("prompt", "prompt_column"), ("completion", "completion_column"), ("messages", "messages_column"))
               if name in old}  # fmt: skip
    if columns.get("text") in ("text", "messages"):
        del columns["text"]  # TRL's default, which it passes over for rows of messages
    for part, files, split, limit in (
        ("train", "train_file", "dataset_train_split", "max_train_samples"),
        ("eval", "validation_file", "dataset_test_split", "max_eval_samples"),
    ):
        rest: dict[str, Any] = {"columns": columns} if columns else {}
        if limit in old and whole(old[limit]) > 0:
            rest["limit"] = whole(old[limit])
        if files in old:
            sheet.put(f"data.{part}", [{**_source(sheet, old[files], name), **rest} for name in _files(old[files])], old[files])
        elif "dataset_name" in old and (part == "train" or split in old):
            sheet.put(f"data.{part}", [{**_hub(old, old.get(split)), **rest}], old["dataset_name"])


def _files(old: Old) -> list[str]:
    if not isinstance(old.value, str | list) or not old.value:
        raise refuse(old, f"{said(old.value)} given, a path is wanted", "give the path of a .jsonl, .json, .csv, .parquet or .txt file")
    return [old.value] if isinstance(old.value, str) else [str(name) for name in old.value]


def _source(sheet: Sheet, old: Old, name: str) -> dict[str, Any]:
    path = found(sheet.base, name)
    if not path.exists() and "." not in path.name and "*" not in name:
        return {"kind": "hub", "id": name}  # data_path and the like name either
    return {"kind": "saved" if path.is_dir() else "file", "path": shown(sheet, path)}


def _hub(old: dict[str, Old], split: Old | None) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": "hub", "id": str(old["dataset_name"].value)}
    if "dataset_config" in old:
        made["name"] = str(old["dataset_config"].value)
    if split is not None:
        made["split"] = str(split.value)
    if "dataset_streaming" in old and flag(old["dataset_streaming"]):
        made["streaming"] = True
    return made


# ------------------------------------------------------------------------------------------------------------------ strategy


def _strategy(sheet: Sheet) -> None:
    """distributed_strategy, and what fsdp, fsdp_config, deepspeed, zero_stage and ddp_… say besides. They must agree."""
    old = _pop(sheet, "distributed_strategy", "fsdp", "fsdp_config", "fsdp_layer", "deepspeed", "zero_stage", "tp", "pp", "cp")
    named = old.pop("distributed_strategy", None)
    kind = choice(STRATEGIES, {"horovod": "use ddp"})(named) if named else None
    shards, zero = _fsdp_parts(old), [old[name] for name in ("deepspeed", "zero_stage") if name in old]
    if kind in (None, "fsdp2") and shards:
        _fsdp(sheet, old)
    elif shards and kind is not None and named is not None:
        _unused(sheet, shards, named)
    if (kind is None or kind == "deepspeed" or kind.startswith("zero")) and zero:
        _zero(sheet, old)
    elif zero and named is not None:
        _unused(sheet, zero, named)
    if named is not None and kind not in (None, "auto") and (kind != "deepspeed" or sheet.get("strategy.kind") is None):
        sheet.put("strategy.kind", "zero2" if kind == "deepspeed" else kind, named)
    _degrees(sheet, {name: old[name] for name in ("tp", "pp", "cp") if name in old})
    _ddp(sheet)


def _fsdp_parts(old: dict[str, Old]) -> list[Old]:
    """What asks for FSDP: `fsdp: ""`, `fsdp: false` and a bare fsdp_config beside other strategies do not."""
    on = old.get("fsdp")
    if on is not None and (on.value in (False, "", []) or str(on.value).lower() in ("false", "none", "no")):
        return []
    return [old[name] for name in ("fsdp", "fsdp_config", "fsdp_layer") if name in old]


def _unused(sheet: Sheet, parts: Iterable[Old], named: Old) -> None:
    """A section for another strategy is a guide's way to show all of them; one word is a contradiction."""
    for old in parts:
        if not isinstance(old.value, dict):
            raise contradiction(old, named)
        sheet.note(old, f"without effect: {named.where} is {named.value}")


def _fsdp(sheet: Sheet, old: dict[str, Old]) -> None:
    """fsdp: "full_shard auto_wrap offload", with fsdp_config as keys and values or the path of a JSON."""
    first = next(iter(_fsdp_parts(old)))
    keys: dict[str, Any] = {}
    switch = old.get("fsdp")
    if switch is not None and isinstance(switch.value, str | list):
        for word in words(switch) if isinstance(switch.value, list) else switch.value.replace(",", " ").split():
            low = word.lower()
            if low in acc.SHARDING:
                keys["sharding_strategy"] = low
            elif low == "offload":
                keys["offload_params"] = True
            elif low not in ("auto_wrap", "true"):
                raise refuse(switch, f"no {word!r} here", f"there are {', '.join(n for n in acc.SHARDING if not n.isdigit())}, offload, auto_wrap")
    if keys:
        assert switch is not None
        acc.read_fsdp(sheet, [Old(key, value, switch.source, switch.place) for key, value in keys.items()])
    for name in ("fsdp", "fsdp_config"):
        section = old.get(name)
        if section is not None and isinstance(section.value, dict):
            acc.read_fsdp(sheet, acc.prefixed(section, "fsdp_", acc.FSDP))
        elif name == "fsdp_config" and section is not None and isinstance(section.value, str):
            acc.read_fsdp(sheet, load_file(found(sheet.base, section.value), section))
    if "fsdp_layer" in old:
        acc.read_fsdp(sheet, [Old("transformer_layer_cls_to_wrap", old["fsdp_layer"].value, first.source, old["fsdp_layer"].place)])
    acc.sharding(sheet, first)


def _zero(sheet: Sheet, old: dict[str, Old]) -> None:
    """deepspeed: the path of a JSON, the JSON itself, or a stage and switches as accelerate has them."""
    section = old.get("deepspeed")
    if section is not None and isinstance(section.value, dict):
        inner = {each.key: each for each in section.inside()}
        file = inner.get("config") or inner.get("config_file") or inner.get("config_path")
        if file is not None and isinstance(file.value, str):
            own_deepspeed_file(sheet, file)
        elif "zero_optimization" in inner or not inner.keys() & {"stage", "zero_stage", "enabled", *acc.DEEPSPEED}:
            deepspeed_config(sheet, list(inner.values()))
        else:
            names = {"stage": "zero_stage"}
            kept = {names.get(k, k): Old(names.get(k, k), e.value, e.source, e.place) for k, e in inner.items() if k != "enabled"}
            acc.read_deepspeed(sheet, section, kept)
    elif section is not None and isinstance(section.value, str) and section.value:
        own_deepspeed_file(sheet, section)
    if (stage := old.get("zero_stage")) is not None:
        sheet.put("strategy.kind", choice(STAGES)(stage), stage)


def _degrees(sheet: Sheet, degrees: dict[str, Old]) -> None:
    for name, old in degrees.items():
        if whole(old) > 1:
            kind = sheet.get("strategy.kind")
            if kind is None:
                sheet.put("strategy.kind", "ddp", old)
            sheet.put("strategy.degree" if kind == name else f"strategy.{name}", whole(old), old)


def _ddp(sheet: Sheet) -> None:
    """Options of DDP, which the argument names have on any strategy."""
    olds = {name: sheet.taken.pop(f"ddp.{name}") for name in DDP if f"ddp.{name}" in sheet.taken}
    for name, old in olds.items():
        kind = sheet.get("strategy.kind")
        if kind is None:
            sheet.put("strategy.kind", "ddp", old)
        elif kind != "ddp":
            sheet.note(old, f"without effect: the strategy is {kind}")
            continue
        sheet.put(f"strategy.{name}", number(old) if name == "bucket_cap_mb" else flag(old), old)


DDP = ("bucket_cap_mb", "find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view")


def _batch_norm(sheet: Sheet) -> None:
    old = _pop(sheet, "sync_bn", "sync_bn_group_size")
    on = old.get("sync_bn")
    if on is not None and flag(on):
        sheet.put("model.sync_batchnorm", {"enabled": True}, on)
        if "sync_bn_group_size" in old:
            sheet.put("model.sync_batchnorm", {"enabled": True, "group_size": whole(old["sync_bn_group_size"])}, on)
    elif "sync_bn_group_size" in old:
        sheet.note(old["sync_bn_group_size"], "without effect: sync_bn is not on")


# ------------------------------------------------------------------------------------------------------------------ adapters


def _adapter(sheet: Sheet) -> None:
    old = _pop(sheet, "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
    on = old.pop("use_peft", None)
    if on is not None and not flag(on):
        for each in old.values():
            sheet.note(each, f"without effect: {on.key} is false")
        return
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if name in old and flag(old[name])]
    if len(bits) > 1:
        raise contradiction(old["load_in_8bit"], old["load_in_4bit"])
    asked = on or next((old[name] for name in (*bits, *(n for n in old if n.startswith("lora_")))), None)
    if asked is None:
        return
    sheet.put("adapter.kind", "lora", asked)
    for name, key, convert in (("lora_r", "r", whole), ("lora_alpha", "alpha", number), ("lora_dropout", "dropout", number)):
        if name in old:
            sheet.put(f"adapter.{key}", convert(old[name]), old[name])
    if (targets := old.get("lora_target_modules")) is not None:
        whole_set = targets.value if targets.value in ("all-linear", "attention") else words(targets)
        sheet.put("adapter.targets", whole_set, targets)
    if bits:
        sheet.put("adapter.quantize", bits[0].removeprefix("load_in_"), old[bits[0]])


# ------------------------------------------------------------------------------------------------------------------- defaults

# What transformers' Trainer (5.23) takes where an argument is left out, and Drumline another: dotted key → value, and the name there.
DEFAULTS: dict[str, tuple[Any, str]] = {
    "batch.micro_batch": (8, "per_device_train_batch_size"),
    "batch.accumulation": (1, "gradient_accumulation_steps"),
    "optimizer.lr": (5e-5, "learning_rate"),
    "schedule.kind": ("linear", "lr_scheduler_type"),
    "run.epochs": (3.0, "num_train_epochs"),
    "run.seed": (42, "seed"),
    "precision.kind": ("fp32", "bf16"),
    "data.packing": (False, "packing"),
}


def defaults(sheet: Sheet, old: Old) -> None:
    """Fill in what the Trainer would have taken, and say so in one note. `old`: any key of the file."""
    filled = []
    for dotted, (value, name) in DEFAULTS.items():
        section = dotted.partition(".")[0]
        if sheet.get(dotted) is not None or (dotted == "run.epochs" and sheet.get("run.steps")):
            continue
        if section == "batch" and sheet.get("batch.global_samples"):
            continue
        sheet.put(dotted, value, Old(name, value, old.source, (name,)))
        filled.append(f"{dotted} {said(value)}")
    if filled:
        sheet.notes.append(f"{old.source.name}: not said there, so transformers' own defaults: {', '.join(filled)}")
