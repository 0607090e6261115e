"""Translate a DeepSpeed config, which may be part of another file: strategy, batch, precision.

The keys are those of DeepSpeed 0.19 (`deepspeed/runtime/constants.py`,
`deepspeed/runtime/zero/config.py`). DeepSpeed itself is not imported.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat.rules import (
    Rule,
    apply_rules,
    do_nothing,
    drop,
    postpone,
    read_choice,
    read_flag,
    read_integer,
    read_number,
    reject,
    set_key,
)
from drumline.compat.sheet import (
    AUTO,
    OldKey,
    Sheet,
    Source,
    contradiction,
    format_value,
    section_keys,
    take_waiting,
    translation_error,
)
from drumline.config.mistakes import split_synonyms
from drumline.errors import ConfigError
from drumline.foreign import expand_home, read_text
from drumline.system.yaml_lines import read_yaml

STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
WHAT = "a DeepSpeed config"


def read_deepspeed_config(
    sheet: Sheet, old_keys: list[OldKey], engine_path: str | None = None
) -> None:
    """Put a whole DeepSpeed config on the sheet.

    There are two ways. If the config is a file of its own, `strategy.config` names it, and
    Drumline's DeepSpeed engine reads it. Then only the keys that a plan needs (PLANNED) go on the
    sheet. If the config is part of another file, all keys go on the sheet, and those that Drumline
    does not have go to `strategy.options`.

    Args:
        sheet: The sheet.
        old_keys: The keys of the config; at least one.
        engine_path: The path of the config for the engine; None if it is part of another file.
    """
    # Keys that the engine reads by itself are only checked: their sheet is thrown away.
    other_sheet = sheet
    if engine_path:
        other_sheet = Sheet(sheet.base, sheet.folder, lenient=sheet.lenient)
    zero = _find_zero(old_keys)
    apply_rules(ZERO, other_sheet, zero.children(), f"{WHAT}'s zero_optimization")
    kind = _zero_kind(zero)
    sheet.put("strategy.kind", kind, zero)
    if engine_path and kind != "ddp":
        sheet.put("strategy.config", engine_path, zero)
    for old in old_keys:
        target = sheet if old.key in PLANNED else other_sheet
        if kind == "ddp" and old.key in ENGINE_ONLY:
            target.note(old, "only DeepSpeed's engine knows it, and ZeRO stage 0 is plain DDP")
        else:
            apply_rules({**TABLE, **ENGINE_ONLY}, target, [old], WHAT)
    for name, old in take_waiting(sheet, "offload_optimizer", "offload_parameters").items():
        if old.key.startswith("cpu_offload"):
            # The older switch: true or false.
            device = "cpu" if read_flag(old) else "none"
            put_offload(sheet, kind, name, old, {"device": replace(old, value=device)})
        else:
            put_offload(sheet, kind, name, old, old.children_by_key())


def _find_zero(old_keys: list[OldKey]) -> OldKey:
    """Return the key zero_optimization; if there is none, one with an empty section."""
    for old in old_keys:
        if old.key == "zero_optimization":
            return old
    return OldKey("zero_optimization", {}, old_keys[0].source, ("zero_optimization",))


def _zero_kind(zero: OldKey) -> str:
    """Return the kind of strategy for the stage of zero_optimization; ddp without a stage."""
    for old in zero.children():
        if old.key == "stage":
            kind: str = read_choice(STAGES)(old)
            return kind
    return "ddp"


def keep_as_option(section: str = "") -> Rule:
    """Return a rule that passes the value on to DeepSpeed as it is, in strategy.options.

    Args:
        section: The section of DeepSpeed's config with a dot before it: `.zero_optimization`.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        set_key(f"strategy.options{section}.{old.key}")(sheet, old)

    return rule


# A loss scale must be a number in fp64, whose largest power of two is 2 to the 1023.
MOST_POWER = 1000


def read_power_of_two(old: OldKey) -> float:
    """Return 2 to the power that an old key gives. Raises ConfigError for a power above 1000."""
    power = read_number(old)
    if power > MOST_POWER:
        raise translation_error(
            old,
            f"{format_value(old.value)} given, a power of two is wanted",
            "write a number such as 16",
        )
    return 2.0**power


LOSS_SCALE: dict[str, Rule] = {
    "initial_scale_power": set_key("precision.initial_scale", read_power_of_two),
    "loss_scale": reject(
        0,
        why="Drumline's loss scale is dynamic",
        fix="set it to 0, and initial_scale_power to begin elsewhere",
    ),
}


NO_SUCH_SETTING = drop("Drumline's loss scaler has no such setting")


def _precision_section(precision: str) -> Rule:
    """Return the rule for the section fp16 or bf16: {enabled: true, …}.

    `enabled` waits until all keys that set a precision have been read (`set_precision`).
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        inner = old.children_by_key()
        enabled = inner.pop("enabled", None)
        if enabled is None or enabled.value in AUTO:
            return
        postpone(precision)(sheet, enabled)
        if read_flag(enabled):
            for each in inner.values():
                apply_rule = LOSS_SCALE.get(each.key, NO_SUCH_SETTING)
                apply_rule(sheet, each)

    return rule


DEVICES = {"no": "none", "none": "none", "cpu": "cpu", "nvme": "nvme"}


def put_offload(sheet: Sheet, kind: str, name: str, old: OldKey, inner: dict[str, OldKey]) -> None:
    """Set whether optimizer states or parameters are kept in host memory or on an NVMe disk.

    DeepSpeed offloads parameters at stage 3 only, and nothing at stage 0.

    Args:
        sheet: the sheet.
        kind: the kind of strategy.
        name: offload_optimizer or offload_parameters.
        old: the section, for errors and notes.
        inner: its keys: device (cpu or nvme), nvme_path, pin_memory.
    """
    if "device" not in inner:
        return
    device = read_choice(DEVICES)(inner["device"])
    if device == "none":
        return
    offload: dict[str, Any] = {"kind": device}
    if device == "nvme":
        if "nvme_path" not in inner or inner["nvme_path"].value in AUTO:
            raise translation_error(
                old, "nvme without nvme_path", "add nvme_path: a folder on the disk"
            )
        offload["path"] = str(inner["nvme_path"].value)
    if "pin_memory" in inner and read_flag(inner["pin_memory"]):
        offload["pin_memory"] = True
    if kind == "ddp":
        sheet.note(old, "without effect: DeepSpeed offloads nothing at stage 0")
    elif name == "offload_parameters" and kind != "zero3":
        sheet.note(old, "without effect: DeepSpeed offloads parameters at stage 3 only")
    else:
        sheet.put(f"strategy.{name}", offload, old)


def _typed_section(section: str, kinds: dict[str, str], params: dict[str, Rule]) -> Rule:
    """Return the rule for a section {type: …, params: {…}} of DeepSpeed, which becomes a section here.

    Args:
        section: The section of Drumline's config.
        kinds: Type in lower case → `kind` of the section.
        params: Key of `params` → its rule.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        inner = old.children_by_key()
        if "type" in inner:
            sheet.put(f"{section}.kind", read_choice(kinds)(inner["type"]), inner["type"])
        if "params" in inner:
            apply_rules(params, sheet, inner["params"].children(), f"{WHAT}'s {old.key}")

    return rule


def _apply_if_enabled(rule: Rule) -> Rule:
    """Return a rule that applies another rule to a section if it has `enabled: true`."""

    def apply(sheet: Sheet, old: OldKey) -> None:
        for inner in old.children():
            if inner.key == "enabled" and inner.value not in AUTO and read_flag(inner):
                rule(sheet, old)

    return apply


def add_tracker(name: str) -> Rule:
    """Return a rule that adds a tracker to run.report_to."""

    def rule(sheet: Sheet, old: OldKey) -> None:
        before = sheet.get("run.report_to", [])
        trackers = list(before)
        if name not in before:
            trackers.append(name)
        sheet.put("run.report_to", trackers, old, over=before)

    return rule


def read_clip(old: OldKey) -> float | None:
    """Return the largest norm of the gradient; None, which means no clipping, for 0.

    DeepSpeed and Hugging Face's Trainer do not clip if the limit is 0.
    """
    return read_number(old) or None


def _set_profiler(sheet: Sheet, old: OldKey) -> None:
    """Switch DeepSpeed's FLOPs profiler on."""
    sheet.put("strategy.flops_profiler", True, old)


OPTIMIZER: dict[str, Rule] = split_synonyms(
    {
        "lr": set_key("optimizer.lr", read_number),
        "betas": set_key("optimizer.betas"),
        "eps": set_key("optimizer.eps", read_number),
        "weight_decay": set_key("optimizer.weight_decay", read_number),
        "momentum": set_key("optimizer.momentum", read_number),
        "torch_adam fused": drop("the engine picks the kernel"),
        "adam_w_mode": reject(
            True,
            why="plain Adam adds decay to the gradient; Drumline's AdamW does not",
            fix="set it to true",
        ),
        "bias_correction": reject(
            True, why="AdamW without bias correction is not supported", fix="set it to true"
        ),
        "amsgrad": reject(why="AMSGrad is not supported", fix="set it to false"),
        "adamw_mode": drop("the optimizer is AdamW"),
    }
)

SCHEDULER: dict[str, Rule] = split_synonyms(
    {
        "warmup_min_lr warmup_min_ratio": reject(
            0, 0.0, why="warm-up begins at 0", fix="set it to 0"
        ),
        "warmup_max_lr": set_key("optimizer.lr", read_number),
        "warmup_num_steps": set_key("schedule.warmup_steps", read_integer),
        "total_num_steps": set_key("run.steps", read_integer),
        "cos_min_ratio": set_key("schedule.min_ratio", read_number),
        "warmup_type": drop("warm-up is linear"),
        "last_batch_iteration": drop("a resumed run knows its step"),
    }
)

EXPORT = "`drumline export --dtype bf16` writes 16-bit weights from any checkpoint"
ZERO_OPTION = keep_as_option(".zero_optimization")
ZERO: dict[str, Rule] = split_synonyms(
    {
        "stage": do_nothing,  # it has been read before, since it decides what the others mean
        "offload_optimizer cpu_offload": postpone("offload_optimizer"),
        "offload_param cpu_offload_params cpu_offload_param": postpone("offload_parameters"),
        "cpu_offload_use_pin_memory": drop("set pin_memory in the offload section"),
        "zero_quantized_weights": set_key("strategy.zeropp.quantized_weights", read_flag),
        "zero_quantized_gradients": set_key("strategy.zeropp.quantized_gradients", read_flag),
        "zero_hpz_partition_size": set_key("strategy.zeropp.hierarchical_partition", read_integer),
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save": drop(
            EXPORT
        ),
        "stage3_gather_fp16_weights_on_model_save": drop(
            "`drumline export --dtype fp16` writes 16-bit weights from any checkpoint"
        ),
        "elastic_checkpoint": drop("every checkpoint is read on any number of devices"),
        "load_from_fp32_weights": drop("checkpoints always hold fp32 weights"),
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions": ZERO_OPTION,
        "allgather_bucket_size overlap_comm sub_group_size round_robin_gradients legacy_stage1 ignore_unused_parameters": ZERO_OPTION,
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters": ZERO_OPTION,
        "max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters": ZERO_OPTION,
        "stage3_model_persistence_threshold stage3_max_reuse_distance stage3_module_granularity_threshold": ZERO_OPTION,
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential module_granularity_threshold": ZERO_OPTION,
        "allgather_sequential use_all_reduce_for_fetch_params zero_quantized_nontrainable_weights": ZERO_OPTION,
        "memory_efficient_linear parameter_alignment pipeline_loading_checkpoint override_module_apply": ZERO_OPTION,
        "log_trace_cache_warnings enable_sanity_checks leaf_module mics_shard_size mics_hierarchical_params_gather": ZERO_OPTION,
        "zenflow compute_grad_norm save_muon_momentum_buffer_in_memory": ZERO_OPTION,
    }
)

# The keys of the top level that have a meaning here.
TABLE: dict[str, Rule] = split_synonyms(
    {
        "train_batch_size": set_key("batch.global_samples", read_integer),
        "train_micro_batch_size_per_gpu": set_key("batch.micro_batch", read_integer),
        "gradient_accumulation_steps": set_key("batch.accumulation", read_integer),
        "gradient_clipping": set_key("optimizer.max_grad_norm", read_clip),
        "fp16": _precision_section("fp16"),
        "bf16 bfloat16": _precision_section("bf16"),
        "optimizer": _typed_section(
            "optimizer", {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}, OPTIMIZER
        ),
        "scheduler": _typed_section(
            "schedule",
            {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
            SCHEDULER,
        ),
        "zero_optimization": do_nothing,  # it has been read before
        "activation_checkpointing": drop(
            "memory.activation_checkpointing sets it; this section is for models that call DeepSpeed's own"
        ),
        "steps_per_print": drop("figures come each run.log_every steps"),
        "wall_clock_breakdown": drop("events.jsonl has the times of each step"),
        "memory_breakdown": drop("events.jsonl has each rank's memory"),
        "dump_state": drop("--dry-run shows every value"),
        "log_level": drop("Drumline says what matters on one line"),
        "flops_profiler": _apply_if_enabled(_set_profiler),
        "tensorboard": _apply_if_enabled(add_tracker("tensorboard")),
        "wandb": _apply_if_enabled(add_tracker("wandb")),
        "csv_monitor": _apply_if_enabled(drop("events.jsonl has the figures")),
        "comet": _apply_if_enabled(
            drop("trackers are tensorboard, wandb, mlflow and trackio: run.report_to")
        ),
        "dataloader_drop_last": drop("the last batch is filled up with rows that carry no weight"),
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": drop(
            "Drumline's engine chooses the optimizer"
        ),
        "amp": _apply_if_enabled(reject(why="NVIDIA Apex is not used", fix="set bf16 or fp16")),
        "pipeline": drop("strategy pp is Drumline's pipeline"),
        "autotuning": drop("only the deepspeed launcher tunes"),
        "elasticity": drop("any number of devices resumes any checkpoint"),
        "curriculum_learning data_efficiency": _apply_if_enabled(
            reject(why="there is no curriculum", fix="remove it")
        ),
    }
)
# The keys of TABLE that a plan needs, even if the engine reads the config itself.
PLANNED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
    "bfloat16",
    "optimizer",
    "scheduler",
}
ENGINE_OPTION = keep_as_option()
ENGINE_ONLY: dict[str, Rule] = split_synonyms(
    {
        "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor": ENGINE_OPTION,
        "gradient_allreduce_op sparse_gradients disable_allgather aio data_types checkpoint comms_logger": ENGINE_OPTION,
        "compression_training torch_autocast compile zenflow graph_harvesting hybrid_engine nebula": ENGINE_OPTION,
        "sparse_attention use_data_before_expert_parallelism timers tensor_parallel": ENGINE_OPTION,
    }
)


PRECISIONS = {
    "no": "fp32",
    "none": "fp32",
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "fp8": "fp8",
}


def set_precision(sheet: Sheet) -> None:
    """Set precision.kind by the waiting keys fp8, bf16, fp16 and mixed_precision.

    Raises ConfigError with both places if two of them choose different precisions.
    """
    given: list[tuple[str, OldKey]] = []
    for name, old in take_waiting(sheet, "fp8", "bf16", "fp16").items():
        given.append((name if read_flag(old) else "fp32", old))
    mixed = sheet.waiting.pop("mixed_precision", None)
    if mixed is not None:
        given.append((read_choice(PRECISIONS)(mixed), mixed))
    if not given:
        return
    # accelerate writes `mixed_precision: no` by default, also beside a DeepSpeed JSON that has bf16
    # on: an fp32 counts only if nothing else is on.
    low = [(kind, old) for kind, old in given if kind != "fp32"]
    if any(kind == "fp8" for kind, _ in low):
        # fp8 is for matrix products, and the rest of the model is in bf16: no contradiction.
        low = [(kind, old) for kind, old in low if kind != "bf16"]
    first_kind, first = (low or given)[0]
    for kind, old in low:
        if kind != first_kind:
            raise contradiction(old, first)
    sheet.put("precision.kind", first_kind, first)


def read_deepspeed_file(
    sheet: Sheet, old_keys: list[OldKey], engine_path: str | None = None
) -> None:
    """Put the keys of a DeepSpeed JSON on the sheet. See `read_deepspeed_config` for the arguments.

    Raises ConfigError with the line of a key that cannot be translated.
    """
    read_deepspeed_config(sheet, old_keys, engine_path)
    set_precision(sheet)


def read_deepspeed_json(sheet: Sheet, old: OldKey) -> None:
    """Put on the sheet what a plan needs of a DeepSpeed JSON that an old key names.

    Drumline's DeepSpeed engine reads the file itself. Raises ConfigError for a file that cannot be
    read, or has no keys.
    """
    path = locate_file(sheet.base, str(old.value))
    keys = load_file(path, old)
    if not keys:
        raise translation_error(
            old, f"{str(path)!r} is empty", "write zero_optimization: {stage: 2} into it"
        )
    read_deepspeed_config(sheet, keys, engine_path=new_path(sheet, path))


def locate_file(base: Path, name: str) -> Path:
    """Return the path of a file that an old file names.

    A relative path is looked up in the folder of the old file (`base`) and then in the current
    folder, as accelerate and transformers do.
    """
    here = expand_home(name)
    beside = base / here
    if not beside.exists() and here.exists():
        return here
    return beside


def new_path(sheet: Sheet, path: Path) -> str:
    """Return a path as the new config writes it.

    It is relative to the folder of the new config, or absolute if the file lies elsewhere.
    """
    absolute = path.absolute()
    if sheet.folder is None:
        return str(absolute)
    folder = sheet.folder.absolute()
    if not absolute.is_relative_to(folder):
        return str(absolute)
    return str(absolute.relative_to(folder))


def load_file(path: Path, old: OldKey) -> list[OldKey]:
    """Return the keys of a JSON or YAML file that an old key names.

    Raises ConfigError for a file that cannot be read, or is no section of keys and values.
    """
    try:
        # JSON may be indented with tabs, and YAML may not.
        text = read_text(path, ConfigError).replace("\t", "  ")
    except ConfigError as error:
        reason = error.what.removeprefix("cannot be read: ")
        raise translation_error(
            old,
            f"{str(path)!r} cannot be read: {reason}",
            "give the path of a YAML or JSON file, relative to this one",
        ) from None
    values, lines = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError("holds no keys and values", where=str(path), fix='write {"key": value}')
    return section_keys(values, Source(str(path), lines))
