"""A DeepSpeed config, in a file of its own or inside another one → strategy zeroN, batch, rate and precision. Keys by DeepSpeed 0.19
(`deepspeed/runtime/constants.py`, `deepspeed/runtime/zero/config.py`), which is not imported here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.compat.rules import (
    Rule,
    flag,
    gone,
    later,
    nothing,
    number,
    one_of,
    only,
    read,
    to,
    whole,
)
from drumline.compat.sheet import (
    AUTO,
    Old,
    Sheet,
    Source,
    contradiction,
    listed,
    pop,
    refuse,
    shown,
)
from drumline.core.mistakes import by_word
from drumline.core.yaml_lines import read_yaml
from drumline.errors import ConfigError
from drumline.foreign import expanded, read_text

STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
WHAT = "a DeepSpeed config"


def deepspeed_config(sheet: Sheet, olds: list[Old], own_file: str | None = None) -> None:
    """Put a whole DeepSpeed config on the sheet. `own_file`: its path if Drumline's engine reads it; then only what the plan requires is
    taken out of it. Without one, keys that Drumline does not have go to strategy.options."""
    aside = Sheet(sheet.base, sheet.folder, lenient=sheet.lenient) if own_file else sheet
    zero = next((old for old in olds if old.key == "zero_optimization"), None)
    inside = zero.inside() if zero else []
    read(ZERO, aside, inside, f"{WHAT}'s zero_optimization")
    kind = next((one_of(STAGES)(old) for old in inside if old.key == "stage"), "ddp")
    stated = zero or Old("zero_optimization", {}, olds[0].source, ("zero_optimization",))
    sheet.put("strategy.kind", kind, stated)
    if own_file and kind != "ddp":
        sheet.put("strategy.config", own_file, stated)
    for old in olds:
        target = aside if own_file and old.key not in PLANNED else sheet
        if kind == "ddp" and old.key in ENGINE_ONLY:
            target.note(old, "only DeepSpeed's engine knows it, and ZeRO stage 0 is plain DDP")
        else:
            read({**TABLE, **ENGINE_ONLY}, target, [old], WHAT)
    for name, old in pop(sheet, "offload_optimizer", "offload_parameters").items():
        cpu = (
            {"device": replace(old, value="cpu" if flag(old) else "none")}
            if old.key.startswith("cpu_offload")
            else None
        )
        put_offload(sheet, kind, name, old, cpu or old.by_key())


def option(section: str = "") -> Rule:
    """The value goes on to DeepSpeed as it is."""
    return lambda sheet, old: to(f"strategy.options{section}.{old.key}")(sheet, old)


def power_of_two(old: Old) -> float:
    """The loss scale by its power. Raises ConfigError for one that fp64 cannot hold."""
    if number(old) > 1000:
        raise refuse(
            old, f"{shown(old.value)} given, a power of two is wanted", "write a number such as 16"
        )
    return 2.0 ** number(old)


def _low(precision: str) -> Rule:
    """fp16: {enabled: true, …}: `enabled` waits for the other keys of precision."""
    translations = {
        "initial_scale_power": to("precision.initial_scale", power_of_two),
        "loss_scale": only(
            0,
            why="Drumline's loss scale is dynamic",
            fix="set it to 0, and initial_scale_power to begin elsewhere",
        ),
    }
    silent = gone("Drumline's loss scaler has no such setting")

    def rule(sheet: Sheet, old: Old) -> None:
        inner = old.by_key()
        if (on := inner.pop("enabled", None)) and on.value not in AUTO:
            later(precision)(sheet, on)
        if on and on.value not in AUTO and flag(on):
            for each in inner.values():
                translations.get(each.key, silent)(sheet, each)

    return rule


def put_offload(sheet: Sheet, kind: str, name: str, old: Old, inner: dict[str, Old]) -> None:
    """Set the place of optimizer states or parameters by the keys of section `old`: {device: cpu | nvme, nvme_path: …, pin_memory: …}.
    DeepSpeed offloads parameters under ZeRO-3 only."""
    kinds = {"no": "none", "none": "none", "cpu": "cpu", "nvme": "nvme"}
    made: dict[str, Any] = {"kind": one_of(kinds)(inner["device"]) if "device" in inner else "none"}
    if made["kind"] == "none":
        return
    if made["kind"] == "nvme":
        if "nvme_path" not in inner or inner["nvme_path"].value in AUTO:
            raise refuse(old, "nvme without nvme_path", "add nvme_path: a folder on the disk")
        made["path"] = str(inner["nvme_path"].value)
    if "pin_memory" in inner and flag(inner["pin_memory"]):
        made["pin_memory"] = True
    if kind == "ddp" or (name == "offload_parameters" and kind != "zero3"):
        sheet.note(
            old,
            f"without effect: DeepSpeed offloads {'nothing at stage 0' if kind == 'ddp' else 'parameters at stage 3 only'}",
        )
    else:
        sheet.put(f"strategy.{name}", made, old)


def _typed(section: str, kinds: dict[str, str], params: dict[str, Rule]) -> Rule:
    """{type: one of `kinds`, params: {…}}: both go to a section of the new config."""

    def rule(sheet: Sheet, old: Old) -> None:
        inner = old.by_key()
        if "type" in inner:
            sheet.put(f"{section}.kind", one_of(kinds)(inner["type"]), inner["type"])
        if "params" in inner:
            read(params, sheet, inner["params"].inside(), f"{WHAT}'s {old.key}")

    return rule


def _enabled(then: Rule) -> Rule:
    """A rule for a section {enabled: true, …}, applied where it is on."""

    def rule(sheet: Sheet, old: Old) -> None:
        if any(
            inner.key == "enabled" and inner.value not in AUTO and flag(inner)
            for inner in old.inside()
        ):
            then(sheet, old)

    return rule


def tracker(name: str) -> Rule:
    """The tracker `name` is one more."""

    def rule(sheet: Sheet, old: Old) -> None:
        before = sheet.get("run.report_to", [])
        sheet.put("run.report_to", [*before, *[name] * (name not in before)], old, over=before)

    return rule


def clip(old: Old) -> float | None:
    """The limit of the gradient's norm; None for 0, with which DeepSpeed and Hugging Face never clip."""
    return number(old) or None


OPTIMIZER: dict[str, Rule] = by_word(
    {
        "lr": to("optimizer.lr", number),
        "betas": to("optimizer.betas"),
        "eps": to("optimizer.eps", number),
        "weight_decay": to("optimizer.weight_decay", number),
        "momentum": to("optimizer.momentum", number),
        "torch_adam fused": gone("the engine picks the kernel"),
        "adam_w_mode": only(
            True,
            why="plain Adam adds decay to the gradient; Drumline's AdamW does not",
            fix="set it to true",
        ),
        "bias_correction": only(
            True, why="AdamW without bias correction is not supported", fix="set it to true"
        ),
        "amsgrad": only(why="AMSGrad is not supported", fix="set it to false"),
        "adamw_mode": gone("the optimizer is AdamW"),
    }
)

SCHEDULER: dict[str, Rule] = by_word(
    {
        "warmup_min_lr warmup_min_ratio": only(
            0, 0.0, why="warm-up begins at 0", fix="set it to 0"
        ),
        "warmup_max_lr": to("optimizer.lr", number),
        "warmup_num_steps": to("schedule.warmup_steps", whole),
        "total_num_steps": to("run.steps", whole),
        "cos_min_ratio": to("schedule.min_ratio", number),
        "warmup_type": gone("warm-up is linear"),
        "last_batch_iteration": gone("a resumed run knows its step"),
    }
)

EXPORT = "`drumline export --dtype bf16` writes 16-bit weights from any checkpoint"
ZERO_OPTION = option(".zero_optimization")
ZERO: dict[str, Rule] = by_word(
    {
        "stage": nothing,  # read before the others: it decides what they mean
        "offload_optimizer cpu_offload": later("offload_optimizer"),
        "offload_param cpu_offload_params cpu_offload_param": later("offload_parameters"),
        "cpu_offload_use_pin_memory": gone("set pin_memory in the offload section"),
        "zero_quantized_weights": to("strategy.zeropp.quantized_weights", flag),
        "zero_quantized_gradients": to("strategy.zeropp.quantized_gradients", flag),
        "zero_hpz_partition_size": to("strategy.zeropp.hierarchical_partition", whole),
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save": gone(
            EXPORT
        ),
        "stage3_gather_fp16_weights_on_model_save": gone(
            "`drumline export --dtype fp16` writes 16-bit weights from any checkpoint"
        ),
        "elastic_checkpoint": gone("every checkpoint is read on any number of devices"),
        "load_from_fp32_weights": gone("checkpoints always hold fp32 weights"),
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

# Keys that the plan requires (`PLANNED`), and other keys with a meaning.
TABLE: dict[str, Rule] = by_word(
    {
        "train_batch_size": to("batch.global_samples", whole),
        "train_micro_batch_size_per_gpu": to("batch.micro_batch", whole),
        "gradient_accumulation_steps": to("batch.accumulation", whole),
        "gradient_clipping": to("optimizer.max_grad_norm", clip),
        "fp16": _low("fp16"),
        "bf16 bfloat16": _low("bf16"),
        "optimizer": _typed(
            "optimizer", {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}, OPTIMIZER
        ),
        "scheduler": _typed(
            "schedule",
            {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
            SCHEDULER,
        ),
        "zero_optimization": nothing,  # read before the others
        "activation_checkpointing": gone(
            "memory.activation_checkpointing sets it; this section is for models that call DeepSpeed's own"
        ),
        "steps_per_print": gone("figures come each run.log_every steps"),
        "wall_clock_breakdown": gone("events.jsonl has the times of each step"),
        "memory_breakdown": gone("events.jsonl has each rank's memory"),
        "dump_state": gone("--dry-run shows every value"),
        "log_level": gone("Drumline says what matters on one line"),
        "flops_profiler": _enabled(
            lambda sheet, old: sheet.put("strategy.flops_profiler", True, old)
        ),
        "tensorboard": _enabled(tracker("tensorboard")),
        "wandb": _enabled(tracker("wandb")),
        "csv_monitor": _enabled(gone("events.jsonl has the figures")),
        "comet": _enabled(
            gone("trackers are tensorboard, wandb, mlflow and trackio: run.report_to")
        ),
        "dataloader_drop_last": gone("the last batch is filled up with rows that carry no weight"),
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": gone(
            "Drumline's engine chooses the optimizer"
        ),
        "amp": _enabled(only(why="NVIDIA Apex is not used", fix="set bf16 or fp16")),
        "pipeline": gone("strategy pp is Drumline's pipeline"),
        "autotuning": gone("only the deepspeed launcher tunes"),
        "elasticity": gone("any number of devices resumes any checkpoint"),
        "curriculum_learning data_efficiency": _enabled(
            only(why="there is no curriculum", fix="remove it")
        ),
    }
)
PLANNED = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16",
           "bfloat16", "optimizer", "scheduler"}  # fmt: skip
ENGINE_OPTION = option()
ENGINE_ONLY: dict[str, Rule] = by_word(
    {
        "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor": ENGINE_OPTION,
        "gradient_allreduce_op sparse_gradients disable_allgather aio data_types checkpoint comms_logger": ENGINE_OPTION,
        "compression_training torch_autocast compile zenflow graph_harvesting hybrid_engine nebula": ENGINE_OPTION,
        "sparse_attention use_data_before_expert_parallelism timers tensor_parallel": ENGINE_OPTION,
    }
)


PRECISIONS = {"no": "fp32", "none": "fp32", "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16",
              "bfloat16": "bf16", "bf16_mixed": "bf16", "fp16_mixed": "fp16", "fp8": "fp8"}  # fmt: skip


def low_precision(sheet: Sheet) -> None:
    """The precision by fp8, bf16, fp16 and mixed_precision together. Raises ConfigError with both places where two are on."""
    kinds = [
        (name if flag(old) else "fp32", old)
        for name, old in pop(sheet, "fp8", "bf16", "fp16").items()
    ]
    if (old := sheet.waiting.pop("mixed_precision", None)) is not None:
        kinds.append((one_of(PRECISIONS)(old), old))
    # accelerate writes `mixed_precision: no` by default, also beside a DeepSpeed JSON that has bf16 on.
    on = [(kind, old) for kind, old in kinds if kind != "fp32"]
    if any(kind == "fp8" for kind, _ in on):
        on = [(kind, old) for kind, old in on if kind != "bf16"]  # the rest of the model is in bf16
    for kind, old in on:
        if kind != on[0][0]:
            raise contradiction(old, on[0][1])
    if kinds:
        sheet.put("precision.kind", *(on or kinds)[0])


def deepspeed_file(sheet: Sheet, olds: list[Old], own_file: str | None = None) -> None:
    """A DeepSpeed config that is a file by itself. Raises ConfigError by its line."""
    deepspeed_config(sheet, olds, own_file)
    low_precision(sheet)


def own_deepspeed_file(sheet: Sheet, old: Old) -> None:
    """A DeepSpeed JSON that an old file names: its stage is the strategy, and Drumline's engine reads the file itself."""
    path = found(sheet.base, str(old.value))
    deepspeed_config(sheet, load_file(path, old), own_file=new_path(sheet, path))


def found(base: Path, name: str) -> Path:
    """A file that an old one names: beside it, or from the current folder, as accelerate and transformers look for it."""
    beside = base / expanded(name)
    here = expanded(name)
    return here if not beside.exists() and here.exists() else beside


def new_path(sheet: Sheet, path: Path) -> str:
    """A path as the new config writes it: relative to its folder, or absolute for what lies elsewhere."""
    whole, folder = path.absolute(), sheet.folder and sheet.folder.absolute()
    return str(whole.relative_to(folder)) if folder and whole.is_relative_to(folder) else str(whole)


def load_file(path: Path, old: Old) -> list[Old]:
    """The keys of a JSON or YAML file that an old one names."""
    try:
        # JSON may be indented with tabs, and YAML may not.
        text = read_text(path, ConfigError).replace("\t", "  ")
    except ConfigError as error:
        reason = error.what.removeprefix("cannot be read: ")
        raise refuse(
            old,
            f"{str(path)!r} cannot be read: {reason}",
            "give the path of a YAML or JSON file, relative to this one",
        ) from None
    values, lines = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError("holds no keys and values", where=str(path), fix='write {"key": value}')
    return listed(values, Source(str(path), lines))
