"""Translate an accelerate config: strategy, processes, precision.

The keys are those of accelerate 1.15 (`commands/config/config_args.py`, `commands/launch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from drumline.compat.deepspeed import (
    EXPORT,
    STAGES,
    put_offload,
    read_clip,
    read_deepspeed_json,
    set_precision,
)
from drumline.compat.rules import (
    Rule,
    apply_if_on,
    apply_rules,
    choose_by_flag,
    do_nothing,
    drop,
    postpone,
    read_choice,
    read_flag,
    read_integer,
    read_names,
    reject,
    set_if_on,
    set_key,
)
from drumline.compat.sheet import AUTO, OldKey, Sheet, take_waiting, translation_error
from drumline.config.mistakes import split_synonyms

WHAT = "an accelerate config"
DEVICES = "Drumline runs on GPUs that torch calls cuda (NVIDIA, AMD) and on CPUs"
TYPES = {
    "no": "single",
    "multi_gpu": "ddp",
    "multi_cpu": "ddp",
    "fsdp": "fsdp2",
    "deepspeed": "zero2",
    "megatron_lm": "ddp",
    "tp": "tp",
}


class Sharding(NamedTuple):
    """What a sharding strategy of FSDP means in Drumline.

    Args:
        kind: strategy.kind.
        reshard: strategy.reshard_after_forward; None for DDP, which shards nothing.
        is_hybrid: each machine has a copy of the model, and shards it among its own devices.
    """

    kind: str
    reshard: bool | None
    is_hybrid: bool


# The sharding strategies of FSDP1 by name, and below by number: accelerate accepts both.
SHARDING = {
    "full_shard": Sharding("fsdp2", reshard=True, is_hybrid=False),
    "shard_grad_op": Sharding("fsdp2", reshard=False, is_hybrid=False),
    "no_shard": Sharding("ddp", reshard=None, is_hybrid=False),
    "hybrid_shard": Sharding("fsdp2", reshard=True, is_hybrid=True),
    "hybrid_shard_zero2": Sharding("fsdp2", reshard=False, is_hybrid=True),
}
SHARDING |= {str(index): SHARDING[name] for index, name in enumerate(list(SHARDING), start=1)}


def read_accelerate_file(sheet: Sheet, old_keys: list[OldKey]) -> None:
    """Put a whole accelerate config on the sheet. Raises ConfigError with the old file's line."""
    apply_rules(TABLE, sheet, old_keys, WHAT)
    combine_waiting_keys(sheet)


def combine_waiting_keys(sheet: Sheet) -> None:
    """Set strategy, processes and precision by the keys in `sheet.waiting`."""
    type_ = sheet.waiting.get("distributed_type")
    kind = None
    if type_ is not None:
        kind = read_choice(TYPES, dict.fromkeys(OTHER_DEVICES, DEVICES))(type_)
    _read_section(sheet, "fsdp_config", type_, read_fsdp)
    _read_section(sheet, "deepspeed_config", type_, read_deepspeed)
    _read_section(sheet, "megatron_lm_config", type_, read_megatron)
    if type_ is not None and sheet.get("strategy.kind") is None:
        sheet.put("strategy.kind", kind, type_)
    if type_ is not None and str(type_.value).lower() == "multi_cpu":
        sheet.put("run.device", "cpu", type_)
    parallelism = sheet.waiting.pop("parallelism_config", None)
    if parallelism is not None:
        apply_rules(
            PARALLELISM,
            sheet,
            parallelism.children(),
            "parallelism_config",
            "parallelism_config_",
        )
    set_processes(sheet)
    set_precision(sheet)


SectionReader = Callable[[Sheet, OldKey, list[OldKey]], None]


def _read_section(sheet: Sheet, name: str, type_: OldKey | None, reader: SectionReader) -> None:
    """Read the section of a strategy if distributed_type selects it; otherwise add a note.

    Without distributed_type a section of FSDP or DeepSpeed is read as well.

    Args:
        sheet: The sheet.
        name: The name of the section, which waits on the sheet.
        type_: The key distributed_type; None if the file lacks it.
        reader: Puts the keys of the section on the sheet.
    """
    section = sheet.waiting.pop(name, None)
    if section is None:
        return
    keys = section.children()
    if not keys:
        return
    if type_ is None:
        is_selected = name != "megatron_lm_config"
        reason = "without effect"
    else:
        is_selected = name == f"{str(type_.value).lower()}_config"
        reason = f"without effect: distributed_type is {type_.value}"
    if is_selected:
        reader(sheet, section, keys)
    else:
        sheet.note(section, reason)


def set_processes(sheet: Sheet) -> None:
    """Set the number of processes of this machine: num_processes counts those of all machines.

    Each of several machines needs a launcher of its own, which a note says. Raises ConfigError if
    the processes do not divide over the machines.
    """
    waiting = sheet.waiting
    machines = machine_count(sheet)
    total = waiting.get("num_processes")
    if total is not None and read_integer(total) > 0:
        if read_integer(total) % machines:
            raise translation_error(
                total,
                f"{total.value} processes do not divide over {machines} machines",
                "make it a multiple of num_machines",
            )
        sheet.put("launch.nproc", read_integer(total) // machines, total)
    if machines > 1:
        _note_machines(sheet, machines)
        return
    port = waiting.get("main_process_port")
    if port is not None and read_integer(port):
        sheet.put("launch.port", read_integer(port), port)
    for name in ("main_process_ip", "machine_rank"):
        old = waiting.get(name)
        if old is not None and old.value not in (0, "0", "127.0.0.1", "localhost"):
            sheet.note(old, "one machine needs none")


def _note_machines(sheet: Sheet, machines: int) -> None:
    """Add a note with the command that has to be run on each machine."""
    waiting = sheet.waiting
    address = waiting["main_process_ip"].value if "main_process_ip" in waiting else "HOST"
    port = waiting["main_process_port"].value if "main_process_port" in waiting else 29500
    sheet.note(
        waiting["num_machines"],
        f"start it on each machine: torchrun --nnodes {machines} --node-rank R --nproc-per-node N"
        f" --master-addr {address} --master-port {port} -m drumline train CONFIG.yaml",
    )


def machine_count(sheet: Sheet) -> int:
    """Return num_machines; 1 if it is not set or 0."""
    if "num_machines" not in sheet.waiting:
        return 1
    return max(1, read_integer(sheet.waiting["num_machines"]))


def read_fsdp(sheet: Sheet, section: OldKey, old_keys: list[OldKey]) -> None:
    """Put the keys of an fsdp_config, of accelerate or of Hugging Face's Trainer, on the sheet.

    Two keys set how to shard: sharding_strategy of FSDP1, and reshard_after_forward of FSDP2, which
    may also have the name of a sharding strategy. Raises ConfigError if they differ.
    """
    apply_rules(FSDP, sheet, old_keys, "fsdp_config", "fsdp_")
    version = sheet.waiting.pop("version", None)
    old, sharding = _read_sharding(sheet, section, version)
    sheet.put("strategy.kind", sharding.kind, old)
    if sharding.kind == "ddp":
        sheet.note(old, "no shards: that is DDP")
        # The options of FSDP that have been set so far have no effect under DDP.
        sheet.values["strategy"] = {"kind": "ddp"}
        return
    sheet.put("strategy.reshard_after_forward", sharding.reshard, old)
    if sharding.is_hybrid:
        machines = machine_count(sheet)
        sheet.put("strategy.replicate", machines, old)
        sheet.note(
            old, f"a copy a machine: strategy.replicate is {machines}; raise it for more copies"
        )


def _read_sharding(
    sheet: Sheet, section: OldKey, version: OldKey | None
) -> tuple[OldKey, Sharding]:
    """Return how to shard, and the key that sets it; by default FULL_SHARD and the section itself.

    Args:
        sheet: The sheet, on which the keys wait.
        section: The key of the section.
        version: The key of FSDP's version; None if the section lacks it.

    Raises ConfigError for two keys that differ.
    """
    given: list[tuple[OldKey, Sharding]] = []
    for name, old in take_waiting(sheet, "sharding_strategy", "reshard_after_forward").items():
        is_flag = str(old.value).lower() in ("true", "false")
        if name == "reshard_after_forward" and is_flag:
            given.append((old, Sharding("fsdp2", read_flag(old), is_hybrid=False)))
        else:
            given.append((old, read_choice(SHARDING)(old)))
    if not given:
        return section, Sharding("fsdp2", reshard=True, is_hybrid=False)
    first, sharding = given[0]
    is_version_1 = version is not None and str(version.value) == "1"
    for other, other_sharding in given[1:]:
        # FSDP1 reads sharding_strategy, and accelerate also writes reshard_after_forward with its
        # default. For FSDP2 accelerate writes reshard_after_forward alone, so both keys are by the
        # user's hand.
        is_default = is_version_1 and other_sharding.reshard is True
        is_same = other_sharding[:2] == sharding[:2]
        if not is_same and not is_default:
            raise translation_error(
                other,
                f"{other.value!r}, but {first.where} is {first.value!r}",
                "keep one of them",
            )
    return first, sharding


def _set_wrap(sheet: Sheet, old: OldKey) -> None:
    """Set the classes of blocks that FSDP wraps, if any are named."""
    names = read_names(old)
    if names:
        sheet.put("strategy.wrap", names, old)


def _set_full_checkpointing(sheet: Sheet, old: OldKey) -> None:
    """Set activation checkpointing, even if another key has set it to `none`.

    Hugging Face's Trainer requires gradient_checkpointing to be off if FSDP's own switch is on.
    """
    sheet.put("memory.activation_checkpointing", "full", old, over="none")


def _set_sequence_parallel(sheet: Sheet, old: OldKey) -> None:
    """Set strategy.cp by sp_size, the degree of sequence parallelism by DeepSpeed-Ulysses."""
    degree = read_integer(old)
    if degree > 1:
        sheet.put("strategy.cp", degree, old)


PREFETCH = {"backward_pre": 1, "backward_post": 0, "no_prefetch": 0, "no": 0, "1": 1, "2": 0}
FSDP: dict[str, Rule] = split_synonyms(
    {
        "version sharding_strategy reshard_after_forward mixed_precision": postpone(),
        "cpu_offload offload_params": set_key("strategy.offload", choose_by_flag("cpu", "none")),
        "transformer_layer_cls_to_wrap transformer_cls_names_to_wrap": _set_wrap,
        "auto_wrap_policy min_num_params": drop(
            "units are the model's own block classes; strategy.wrap names others"
        ),
        "backward_prefetch": set_key("strategy.backward_prefetch", read_choice(PREFETCH)),
        "forward_prefetch": set_key("strategy.prefetch", choose_by_flag(1, 0)),
        "activation_checkpointing": apply_if_on(_set_full_checkpointing),
        "activation_checkpointing_offload": reject(
            why="inputs of blocks stay on the device", fix="set it to false"
        ),
        "ignored_modules": reject(why="every parameter is sharded", fix="remove it"),
        "state_dict_type": drop(
            "checkpoints are sharded, and any strategy reads them; the Hugging Face folder is whole"
        ),
        "use_orig_params": drop("FSDP2 always keeps the original parameters"),
        "cpu_ram_efficient_loading": drop("each rank reads its own part of the weights"),
        "sync_module_states": drop("all ranks begin with the same weights"),
        "limit_all_gathers": drop("FSDP2 needs no rate limit"),
        "mixed_precision_policy": reject(
            why="each type has a key",
            fix="set precision, strategy.param_dtype and strategy.reduce_dtype",
        ),
        "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt": reject(
            why=DEVICES, fix="remove it"
        ),
    }
)

PARALLELISM: dict[str, Rule] = split_synonyms(
    {
        "dp_replicate_size": set_key("strategy.replicate", read_integer),
        "dp_shard_size": drop("shards go over all processes that tp, cp and replicate leave"),
        "tp_size": set_key("strategy.tp", read_integer),
        "cp_size": set_key("strategy.cp", read_integer),
        "cp_backend sp_backend": drop("strategy.cp_method sets it"),
        "cp_comm_strategy": drop("strategy.cp_method sets it: ulysses, or ring on GPUs"),
        "sp_size": _set_sequence_parallel,
        "sp_seq_length": drop("data.max_length sets it"),
        "sp_seq_length_is_variable": drop("sequences may differ in length"),
        "sp_attn_implementation": drop("model.attention sets it"),
    }
)


def read_deepspeed(sheet: Sheet, section: OldKey, old_keys: list[OldKey]) -> None:
    """Put the keys of accelerate's section deepspeed_config on the sheet.

    The section has a stage and a few switches, or the path of a DeepSpeed JSON.
    """
    for file in old_keys:
        if file.key == "deepspeed_config_file" and str(file.value).lower() not in ("none", ""):
            read_deepspeed_json(sheet, file)
            old_keys = [old for old in old_keys if old.key != "zero_stage"]
    apply_rules(DEEPSPEED, sheet, old_keys, "deepspeed_config")
    stage = sheet.waiting.pop("zero_stage", None)
    if sheet.get("strategy.kind") is None:
        if stage is None:
            sheet.put("strategy.kind", "zero2", section)
        else:
            sheet.put("strategy.kind", read_choice(STAGES)(stage), stage)
    kind = sheet.get("strategy.kind")
    _set_offload(sheet, kind, "offload_optimizer", "offload_optimizer_")
    _set_offload(sheet, kind, "offload_parameters", "offload_param_")


def _set_offload(sheet: Sheet, kind: str, name: str, prefix: str) -> None:
    """Set the key `name` of the strategy by the waiting keys `PREFIXdevice` and `PREFIXnvme_path`."""
    inner = {}
    for key, old in take_waiting(sheet, f"{prefix}device", f"{prefix}nvme_path").items():
        if str(old.value).lower() != "none":
            inner[key.removeprefix(prefix)] = old
    if "device" in inner and inner["device"].value != "":
        put_offload(sheet, kind, name, inner["device"], inner)


DEEPSPEED: dict[str, Rule] = split_synonyms(
    {
        "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path": postpone(),
        "deepspeed_config_file": do_nothing,  # read first
        "gradient_accumulation_steps": set_key("batch.accumulation", read_integer),
        "gradient_clipping": set_key("optimizer.max_grad_norm", read_clip),
        "zero3_init_flag": drop("the model is built sharded wherever the strategy can"),
        "zero3_save_16bit_model": drop(EXPORT),
        "deepspeed_moe_layer_cls_names": set_key(
            "strategy.options.zero_optimization.leaf_module.classes", read_names
        ),
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter": drop(
            "one launcher a machine starts the ranks; nothing goes over ssh"
        ),
    }
)


def read_megatron(sheet: Sheet, section: OldKey, old_keys: list[OldKey]) -> None:
    """Put the keys of a megatron_lm_config on the sheet.

    Megatron's degrees of parallelism become tp, pp and cp of the strategy ddp.
    """
    sheet.put("strategy.kind", "ddp", section)
    apply_rules(MEGATRON, sheet, old_keys, "megatron_lm_config", "megatron_lm_")


RECOMPUTATION = {
    "full": "full",
    "selective": "selective",
    "true": "selective",
    "false": "none",
    "no": "none",
}


def _set_recomputation(sheet: Sheet, old: OldKey) -> None:
    """Set activation checkpointing by Megatron's recomputation, unless it is off."""
    kind = read_choice(RECOMPUTATION)(old)
    if kind != "none":
        sheet.put("memory.activation_checkpointing", kind, old)


NOT_MEGATRON = drop("the model is transformers' own, not Megatron's")
MEGATRON: dict[str, Rule] = split_synonyms(
    {
        "tp_degree": set_key("strategy.tp", read_integer),
        "pp_degree": set_key("strategy.pp", read_integer),
        "context_parallel_size": set_key("strategy.cp", read_integer),
        "num_micro_batches": set_key("batch.accumulation", read_integer),
        "gradient_clipping": set_key("optimizer.max_grad_norm", read_clip),
        "recompute_activations recompute_granularity": _set_recomputation,
        "recompute_method recompute_num_layers": drop("each block is one unit"),
        "sequence_parallelism": drop(
            "tensor parallelism does what it can with the sequence by itself"
        ),
        "use_distributed_optimizer": drop("strategy fsdp2 shards the optimizer's state"),
        "use_custom_fsdp": reject(
            why="that is another strategy", fix="set strategy: {kind: fsdp2, tp: N}"
        ),
        "expert_model_parallel_size expert_tensor_parallel_size": reject(
            1, why="experts are not spread", fix="set it to 1"
        ),
        "attention_dropout hidden_dropout": drop("model.config sets it, by the model's own name"),
        "eod_mask_loss": drop("what carries loss is data.learn_on"),
        "calculate_per_token_loss": drop("losses are always sums over tokens"),
        "no_load_optim no_save_optim optimizer_cpu_offload use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d": NOT_MEGATRON,
        "decoder_last_pipeline_num_layers attention_backend attention_softmax_in_fp32 use_rotary_position_embeddings": NOT_MEGATRON,
    }
)


def _check_machine(sheet: Sheet, old: OldKey) -> None:
    """Raise ConfigError if compute_environment is not this machine."""
    if str(old.value).upper() != "LOCAL_MACHINE":
        raise translation_error(
            old,
            f"{old.value!r} is not this machine",
            "use LOCAL_MACHINE, and start Drumline where the devices are",
        )


def _note_gpus(sheet: Sheet, old: OldKey) -> None:
    """Add a note on how to choose GPUs, if the file names some."""
    if old.value not in (*AUTO, "all"):
        sheet.note(
            old, f"choose GPUs from outside: CUDA_VISIBLE_DEVICES={','.join(read_names(old))}"
        )


def set_dynamo(sheet: Sheet, old: OldKey) -> None:
    """Set `compile` by dynamo_config, or by the older key dynamo_backend."""
    if isinstance(old.value, dict):
        inner = {each.key.removeprefix("dynamo_"): each for each in old.children()}
    else:
        inner = {"backend": old}
    set_compile(sheet, inner)


def set_compile(sheet: Sheet, inner: dict[str, OldKey]) -> None:
    """Set `compile` by the keys of a dynamo_config.

    Args:
        sheet: The sheet.
        inner: Key without its prefix `dynamo_` → old key.

    Raises ConfigError for a backend that Drumline lacks.
    """
    backend = inner.pop("backend", None)
    if backend is None or str(backend.value).lower() in ("no", "false", "none", ""):
        return
    if str(backend.value).lower() != "inductor":
        raise translation_error(
            backend,
            f"no backend {backend.value!r} here",
            "use INDUCTOR, torch.compile's own, or NO",
        )
    sheet.put("compile.enabled", True, backend)
    for key, each in inner.items():
        if key == "mode" and each.value not in (*AUTO, "default"):
            sheet.put("compile.mode", str(each.value), each)
        elif key != "mode":
            sheet.note(
                each, "each block is compiled by itself, with torch's own choice of the rest"
            )


OTHER_DEVICES = (
    "xla",
    "tpu",
    "multi_npu",
    "multi_mlu",
    "multi_sdaa",
    "multi_musa",
    "multi_xpu",
    "multi_hpu",
    "multi_neuron",
)


def _note_fp8(sheet: Sheet, old: OldKey) -> None:
    """Add a note that fp8_config has no effect, if it has keys."""
    if old.children():
        sheet.note(old, "fp8 is torchao's: precision.scaling sets it, with mixed_precision: fp8")


def _note_mpirun(sheet: Sheet, old: OldKey) -> None:
    """Add a note on how to start under mpirun, if the section has keys."""
    if old.children():
        sheet.note(old, "under mpirun, start one launcher a machine")


TABLE: dict[str, Rule] = split_synonyms(
    {
        "compute_environment": _check_machine,
        "distributed_type num_processes num_machines machine_rank main_process_ip main_process_port": postpone(),
        "mixed_precision fp16 fsdp_config deepspeed_config megatron_lm_config parallelism_config": postpone(),
        "dynamo_config dynamo_backend": set_dynamo,
        "gpu_ids": _note_gpus,
        "use_cpu": set_if_on("run.device", "cpu"),
        "debug": drop("NCCL's own TORCH_DISTRIBUTED_DEBUG=DETAIL does it"),
        "rdzv_backend same_network": drop("one launcher a machine, and a store that rank 0 holds"),
        "main_training_function": drop("there is no training script"),
        "enable_cpu_affinity": drop("bind from outside: numactl or taskset"),
        "downcast_bf16": reject(why=DEVICES, fix="set it to 'no'"),
        "fp8_config": _note_fp8,
        "ipex_config": drop(
            "for Intel CPUs; accelerate has dropped it"
        ),  # accelerate 1.10 writes it
        "mpirun_config": _note_mpirun,
        "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands": drop(
            "TPUs are not used"
        ),
    }
)
