"""An accelerate config file → strategy, processes, precision. Keys by accelerate 1.15 (`commands/config/config_args.py`,
`commands/launch.py`)."""

from __future__ import annotations

from drumline.compat.deepspeed import (
    EXPORT,
    STAGES,
    clip,
    low_precision,
    own_deepspeed_file,
    put_offload,
)
from drumline.compat.rules import (
    Rule,
    flag,
    gone,
    if_on,
    later,
    name_list,
    nothing,
    one_of,
    only,
    read,
    switch,
    to,
    whole,
)
from drumline.compat.sheet import AUTO, Old, Sheet, pop, refuse
from drumline.core.mistakes import by_word

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
SHARDING = {  # FSDP1's names and their numbers → (kind, reshard_after_forward, hybrid)
    "full_shard": ("fsdp2", True, False),
    "shard_grad_op": ("fsdp2", False, False),
    "no_shard": ("ddp", None, False),
    "hybrid_shard": ("fsdp2", True, True),
    "hybrid_shard_zero2": ("fsdp2", False, True),
}
SHARDING |= {str(index): SHARDING[name] for index, name in enumerate(list(SHARDING), start=1)}


def accelerate_file(sheet: Sheet, olds: list[Old]) -> None:
    """Put a whole accelerate config on the sheet. Raises ConfigError by the old file's line."""
    read(TABLE, sheet, olds, WHAT)
    combine(sheet)


def combine(sheet: Sheet) -> None:
    """Set strategy, processes and precision by the keys that wait."""
    waiting = sheet.waiting
    type_ = waiting.get("distributed_type")
    kind = one_of(TYPES, dict.fromkeys(OTHER_DEVICES, DEVICES))(type_) if type_ else None
    type_name = str(type_.value).lower() if type_ else None
    for name, translate in (
        ("fsdp_config", read_fsdp),
        ("deepspeed_config", read_deepspeed),
        ("megatron_lm_config", read_megatron),
    ):
        old = waiting.pop(name, None)
        if old is None or not old.inside():
            continue
        if name == f"{type_name}_config" or (type_ is None and name != "megatron_lm_config"):
            translate(sheet, old, old.inside())
        else:
            sheet.note(
                old,
                f"without effect: distributed_type is {type_.value}" if type_ else "without effect",
            )
    if type_ and kind and sheet.get("strategy.kind") is None:
        sheet.put("strategy.kind", kind, type_)
    if type_ and type_name == "multi_cpu":
        sheet.put("run.device", "cpu", type_)
    if (old := waiting.pop("parallelism_config", None)) is not None:
        read(PARALLELISM, sheet, old.inside(), "parallelism_config", "parallelism_config_")
    processes(sheet)
    low_precision(sheet)


def processes(sheet: Sheet) -> None:
    """Processes of this machine. Several machines need one launcher each, as under other launchers."""
    waiting, machines = sheet.waiting, machine_count(sheet)
    if (old := waiting.get("num_processes")) is not None and whole(old) > 0:
        if whole(old) % machines:
            raise refuse(
                old,
                f"{old.value} processes do not divide over {machines} machines",
                "make it a multiple of num_machines",
            )
        sheet.put("launch.nproc", whole(old) // machines, old)
    if machines > 1:
        address = waiting["main_process_ip"].value if "main_process_ip" in waiting else "HOST"
        port = waiting["main_process_port"].value if "main_process_port" in waiting else 29500
        sheet.note(
            waiting["num_machines"],
            f"start it on each machine: torchrun --nnodes {machines} --node-rank R --nproc-per-node N --master-addr {address}"
            f" --master-port {port} -m drumline train CONFIG.yaml",
        )
        return
    if (old := waiting.get("main_process_port")) is not None and whole(old):
        sheet.put("launch.port", whole(old), old)
    for name in ("main_process_ip", "machine_rank"):
        if (old := waiting.get(name)) is not None and old.value not in (
            0,
            "0",
            "127.0.0.1",
            "localhost",
        ):
            sheet.note(old, "one machine needs none")


def machine_count(sheet: Sheet) -> int:
    """num_machines; 1 where it is not set or 0."""
    return max(1, whole(sheet.waiting["num_machines"])) if "num_machines" in sheet.waiting else 1


def read_fsdp(sheet: Sheet, section: Old, olds: list[Old]) -> None:
    """Keys of fsdp_config, of accelerate or of Hugging Face's Trainer. Two of them set how far to shard: FSDP1's sharding_strategy, and
    reshard_after_forward, which has the same names in FSDP1."""
    read(FSDP, sheet, olds, "fsdp_config", "fsdp_")
    found: list[tuple[Old, tuple[str, bool | None, bool]]] = []
    version = sheet.waiting.pop("version", None)
    for name, old in pop(sheet, "sharding_strategy", "reshard_after_forward").items():
        plain = name == "reshard_after_forward" and str(old.value).lower() in ("true", "false")
        found.append((old, ("fsdp2", flag(old), False) if plain else one_of(SHARDING)(old)))
    first, *rest = found or [(section, ("fsdp2", True, False))]
    for other, means in rest:
        # FSDP2 reads reshard_after_forward, FSDP1 sharding_strategy; the one that is not read may keep its default.
        if means[:2] != first[1][:2] and not (
            version and str(version.value) == "1" and means[1] is True
        ):
            raise refuse(
                other,
                f"{other.value!r}, but {first[0].where} is {first[0].value!r}",
                "keep one of them",
            )
    old, (kind, reshard, hybrid) = first
    sheet.put("strategy.kind", kind, old)
    if kind == "ddp":
        sheet.note(old, "no shards: that is DDP")
        for name in [name for name in sheet.values["strategy"] if name != "kind"]:
            del sheet.values["strategy"][name]
        return
    sheet.put("strategy.reshard_after_forward", reshard, old)
    if hybrid:
        machines = machine_count(sheet)
        sheet.put("strategy.replicate", machines, old)
        sheet.note(
            old, f"a copy a machine: strategy.replicate is {machines}; raise it for more copies"
        )


PREFETCH = {"backward_pre": 1, "backward_post": 0, "no_prefetch": 0, "no": 0, "1": 1, "2": 0}
FSDP: dict[str, Rule] = by_word(
    {
        "version sharding_strategy reshard_after_forward mixed_precision": later(),
        "cpu_offload offload_params": to(
            "strategy.offload", lambda old: "cpu" if flag(old) else "none"
        ),
        "transformer_layer_cls_to_wrap transformer_cls_names_to_wrap": lambda sheet, old: (
            sheet.put("strategy.wrap", name_list(old), old) if name_list(old) else None
        ),
        "auto_wrap_policy min_num_params": gone(
            "units are the model's own block classes; strategy.wrap names others"
        ),
        "backward_prefetch": to("strategy.backward_prefetch", one_of(PREFETCH)),
        "forward_prefetch": to("strategy.prefetch", lambda old: int(flag(old))),
        # Trainer requires gradient_checkpointing to be off beside it.
        "activation_checkpointing": if_on(
            lambda sheet, old: sheet.put(
                "memory.activation_checkpointing", "full", old, over="none"
            )
        ),
        "activation_checkpointing_offload": only(
            why="inputs of blocks stay on the device", fix="set it to false"
        ),
        "ignored_modules": only(why="every parameter is sharded", fix="remove it"),
        "state_dict_type": gone(
            "checkpoints are sharded, and any strategy reads them; the Hugging Face folder is whole"
        ),
        "use_orig_params": gone("FSDP2 always keeps the original parameters"),
        "cpu_ram_efficient_loading": gone("each rank reads its own part of the weights"),
        "sync_module_states": gone("all ranks begin with the same weights"),
        "limit_all_gathers": gone("FSDP2 needs no rate limit"),
        "mixed_precision_policy": only(
            why="each type has a key",
            fix="set precision, strategy.param_dtype and strategy.reduce_dtype",
        ),
        "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt": only(why=DEVICES, fix="remove it"),
    }
)

PARALLELISM: dict[str, Rule] = by_word(
    {
        "dp_replicate_size": to("strategy.replicate", whole),
        "dp_shard_size": gone("shards go over all processes that tp, cp and replicate leave"),
        "tp_size": to("strategy.tp", whole),
        "cp_size": to("strategy.cp", whole),
        "cp_backend sp_backend": gone("strategy.cp_method sets it"),
        "cp_comm_strategy": gone("strategy.cp_method sets it: ulysses, or ring on GPUs"),
        "sp_size": lambda sheet, old: (
            sheet.put("strategy.cp", whole(old), old) if whole(old) > 1 else None
        ),
        "sp_seq_length": gone("data.max_length sets it"),
        "sp_seq_length_is_variable": gone("sequences may differ in length"),
        "sp_attn_implementation": gone("model.attention sets it"),
    }
)


def read_deepspeed(sheet: Sheet, section: Old, olds: list[Old]) -> None:
    """Keys of deepspeed_config, wherever they come from: a stage and a few switches, or the path of a DeepSpeed JSON."""
    for file in olds:
        if file.key == "deepspeed_config_file" and str(file.value).lower() not in ("none", ""):
            own_deepspeed_file(sheet, file)
            olds = [old for old in olds if old.key != "zero_stage"]
    read(DEEPSPEED, sheet, olds, "deepspeed_config")
    stage = sheet.waiting.pop("zero_stage", None)
    if sheet.get("strategy.kind") is None:
        sheet.put("strategy.kind", one_of(STAGES)(stage) if stage else "zero2", stage or section)
    kind = sheet.get("strategy.kind")
    for name, part in (("offload_optimizer", "optimizer"), ("offload_parameters", "param")):
        given = pop(sheet, f"offload_{part}_device", f"offload_{part}_nvme_path")
        inner = {
            key.removeprefix(f"offload_{part}_"): each
            for key, each in given.items()
            if str(each.value).lower() != "none"
        }
        if "device" in inner and inner["device"].value != "":
            put_offload(sheet, kind, name, inner["device"], inner)


DEEPSPEED: dict[str, Rule] = by_word(
    {
        "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path": later(),
        "deepspeed_config_file": nothing,  # read first
        "gradient_accumulation_steps": to("batch.accumulation", whole),
        "gradient_clipping": to("optimizer.max_grad_norm", clip),
        "zero3_init_flag": gone("the model is built sharded wherever the strategy can"),
        "zero3_save_16bit_model": gone(EXPORT),
        "deepspeed_moe_layer_cls_names": to(
            "strategy.options.zero_optimization.leaf_module.classes", name_list
        ),
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter": gone(
            "one launcher a machine starts the ranks; nothing goes over ssh"
        ),
    }
)


def read_megatron(sheet: Sheet, section: Old, olds: list[Old]) -> None:
    """Keys of megatron_lm_config. Megatron's degrees are those of ddp with tp, pp and cp."""
    sheet.put("strategy.kind", "ddp", section)
    read(MEGATRON, sheet, olds, "megatron_lm_config", "megatron_lm_")


def _recompute(sheet: Sheet, old: Old) -> None:
    kinds = {
        "full": "full",
        "selective": "selective",
        "true": "selective",
        "false": "none",
        "no": "none",
    }
    if (kind := one_of(kinds)(old)) != "none":
        sheet.put("memory.activation_checkpointing", kind, old)


NOT_MEGATRON = gone("the model is transformers' own, not Megatron's")
MEGATRON: dict[str, Rule] = by_word(
    {
        "tp_degree": to("strategy.tp", whole),
        "pp_degree": to("strategy.pp", whole),
        "context_parallel_size": to("strategy.cp", whole),
        "num_micro_batches": to("batch.accumulation", whole),
        "gradient_clipping": to("optimizer.max_grad_norm", clip),
        "recompute_activations recompute_granularity": _recompute,
        "recompute_method recompute_num_layers": gone("each block is one unit"),
        "sequence_parallelism": gone(
            "tensor parallelism does what it can with the sequence by itself"
        ),
        "use_distributed_optimizer": gone("strategy fsdp2 shards the optimizer's state"),
        "use_custom_fsdp": only(
            why="that is another strategy", fix="set strategy: {kind: fsdp2, tp: N}"
        ),
        "expert_model_parallel_size expert_tensor_parallel_size": only(
            1, why="experts are not spread", fix="set it to 1"
        ),
        "attention_dropout hidden_dropout": gone("model.config sets it, by the model's own name"),
        "eod_mask_loss": gone("what carries loss is data.learn_on"),
        "calculate_per_token_loss": gone("losses are always sums over tokens"),
        "no_load_optim no_save_optim optimizer_cpu_offload use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d": NOT_MEGATRON,
        "decoder_last_pipeline_num_layers attention_backend attention_softmax_in_fp32 use_rotary_position_embeddings": NOT_MEGATRON,
    }
)


def _machine(sheet: Sheet, old: Old) -> None:
    if str(old.value).upper() != "LOCAL_MACHINE":
        raise refuse(
            old,
            f"{old.value!r} is not this machine",
            "use LOCAL_MACHINE, and start Drumline where the devices are",
        )


def _gpus(sheet: Sheet, old: Old) -> None:
    if old.value not in (*AUTO, "all"):
        sheet.note(
            old, f"choose GPUs from outside: CUDA_VISIBLE_DEVICES={','.join(name_list(old))}"
        )


def dynamo(sheet: Sheet, old: Old) -> None:
    """dynamo_config, or the older dynamo_backend."""
    inner = (
        {each.key.removeprefix("dynamo_"): each for each in old.inside()}
        if isinstance(old.value, dict)
        else {"backend": old}
    )
    compile_blocks(sheet, inner)


def compile_blocks(sheet: Sheet, inner: dict[str, Old]) -> None:
    """dynamo's keys without their prefix → compile."""
    backend = inner.pop("backend", None)
    if backend is None or str(backend.value).lower() in ("no", "false", "none", ""):
        return
    if str(backend.value).lower() != "inductor":
        raise refuse(
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


def _fp8(sheet: Sheet, old: Old) -> None:
    if old.inside():
        sheet.note(old, "fp8 is torchao's: precision.scaling sets it, with mixed_precision: fp8")


TABLE: dict[str, Rule] = by_word(
    {
        "compute_environment": _machine,
        "distributed_type num_processes num_machines machine_rank main_process_ip main_process_port": later(),
        "mixed_precision fp16 fsdp_config deepspeed_config megatron_lm_config parallelism_config": later(),
        "dynamo_config dynamo_backend": dynamo,
        "gpu_ids": _gpus,
        "use_cpu": switch("run.device", "cpu"),
        "debug": gone("NCCL's own TORCH_DISTRIBUTED_DEBUG=DETAIL does it"),
        "rdzv_backend same_network": gone("one launcher a machine, and a store that rank 0 holds"),
        "main_training_function": gone("there is no training script"),
        "enable_cpu_affinity": gone("bind from outside: numactl or taskset"),
        "downcast_bf16": only(why=DEVICES, fix="set it to 'no'"),
        "fp8_config": _fp8,
        "ipex_config": gone(
            "for Intel CPUs; accelerate has dropped it"
        ),  # accelerate 1.10 writes it
        "mpirun_config": lambda sheet, old: (
            sheet.note(old, "under mpirun, start one launcher a machine") if old.inside() else None
        ),
        "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands": gone(
            "TPUs are not used"
        ),
    }
)
