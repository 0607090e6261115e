"""What cannot be combined, each with its reason and the nearest thing that works. Read before any process starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from drumline.config.config import Config, LoRAConfig
from drumline.config.refusal import Refusal
from drumline.config.rollouts import VLLMGenerator
from drumline.plan.attention import RING_CHUNK
from drumline.plan.batch import nearest
from drumline.plan.copies import copied_over
from drumline.plan.facts import MULTIPLE, TP_STYLES, chunkable, takes_fp8
from drumline.plan.optimizer_rules import refusals as optimizer_refusals
from drumline.plan.rule import Case, packed_bits, plain, recomputes_some, sees
from drumline.plan.strategy_engine import engine_of
from drumline.plan.stream import whole_stream

# What only a run of the model may show: its reason is found there.
NO_STAGES = Refusal("pp × the model", "", "use strategy: fsdp2 or tp instead")
NO_PARTS = Refusal("cp × the model", "", "use fsdp2, ddp or pp without cp")
NO_RECOMPUTING = Refusal(
    "activation checkpointing × the model",
    "",
    "set it to none, or use a smaller micro-batch",
    "memory.activation_checkpointing",
)
NO_FP8 = Refusal(
    "precision fp8 × the device or the model", "", "use precision=bf16", "precision.kind"
)
NO_LIGER = Refusal("kernels=liger × the model", "", "take it out", "model.kernels")
NO_CHUNKS = Refusal("mlp_chunk × the model", "", "take it out", "memory.mlp_chunk")
NO_PACKS = Refusal(
    "packing × the model", "", "set data.packing: false for this model", "data.packing"
)


def check_rules(case: Case) -> None:
    """Raises PlanError by the first rule that refuses: those for all strategies, then the strategy's own."""
    common = (
        *(_mps, _images, _adapters, _model, _written, _memory, _speed, _batch_norm),
        *(_tensor_parallel, _sequence_parallel, _context_parallel),
    )
    for rules in (
        *common,
        _zero_bubble,
        _health,
        _expert_parallel,
        optimizer_refusals,
        engine_of(case.strategy).refusals,
    ):
        for refusal in rules(case):
            raise refusal.error()


def _mps(case: Case) -> Iterator[Refusal]:
    config = case.config
    if config.run.device != "mps":
        return
    if case.mesh.world_size > 1 or not (case.strategy.one_process and case.strategy.in_step):
        reason = "Apple's GPU has no collectives, and one process has all of it"
        yield Refusal(
            "mps × several processes",
            reason,
            "use --nproc 1 strategy=single, or run.device=cpu",
            "run.device",
        )
    if not config.algorithm.sees_images or case.precision != "fp32" or packed_bits(config):
        reason = "it is written for sft and pretrain in fp32"  # the sums of others are in fp64 on the device, and it has none
        yield Refusal(
            "mps × what it has not been written for",
            reason,
            "use precision=fp32, or run.device=cpu",
            "run.device",
        )


def _images(case: Case) -> Iterator[Refusal]:
    yield from compared_images(case.config, sees(case))
    mesh, alone = case.mesh, case.config.images_alone
    if sees(case) and not case.config.algorithm.sees_images:
        reason = "its batches carry no images, and ranks whose vision tower does not run would leave the others waiting"
        yield Refusal(
            "images × an algorithm that is not sft or pretrain",
            reason,
            "use algorithm=sft, or a model of text",
            "algorithm",
        )
    if sees(case) and mesh.pp > 1:
        reason = "stages hand on hidden states alone, and the tower's features are added to those of several blocks (DeepStack)"
        yield Refusal("images × pp", reason, "use strategy=fsdp2")
    if sees(case) and mesh.cp > 1:
        reason = "transformers puts the features of all images into the places it counts in a row, and a rank has a part of the places"
        yield Refusal("images × cp", reason, "use strategy=fsdp2 with activation checkpointing")
    if alone and mesh.cp > 1:
        reason = "an image is one sample: its pixels become tokens inside of the model, so there is no sequence to deal out to ranks"
        yield Refusal("cp × images", reason, "use strategy=ddp or fsdp2")
    if alone and mesh.pp > 1:
        yield Refusal(
            "pp × images",
            "the stages of a pipeline are handed token ids",
            "use strategy=ddp or fsdp2",
        )


def compared_images(config: Config, vision_language: bool) -> Iterator[Refusal]:
    """The same of the data alone, which are prepared before any case is known."""
    for key in ("duplicates", "decontaminate") if vision_language or config.images_alone else ():
        if (found := getattr(config.data, key)) is not None and getattr(
            found, "kind", "near"
        ) != "exact":
            yield Refusal(
                f"data.{key} × images",
                "it compares texts alone",
                "use data.duplicates=exact, or take it out",
                f"data.{key}",
            )


def _adapters(case: Case) -> Iterator[Refusal]:
    config, has_lora = case.config, case.config.adapter.kind == "lora"
    if config.model.freeze and has_lora:
        yield Refusal(
            "frozen parts × an adapter",
            "an adapter freezes the whole model",
            "take model.freeze out",
            "model.freeze",
        )
    adapter = config.adapter
    if isinstance(adapter, LoRAConfig):
        if adapter.dora and case.mesh.tp > 1:
            reason = "it takes the length of whole rows of a weight, and a rank has parts of some"
            yield Refusal(
                "DoRA × tp", reason, "use strategy=fsdp2, or adapter.dora=false", "adapter.dora"
            )
        ends = case.facts.end_weights if case.facts is not None else ()
        adapts_embedding = any(".lora_embedding_A." in weight.name for weight in ends)
        copies_on_gpus = case.strategy.data_parallel(case.mesh) == "dp" and case.device == "cuda"
        if adapts_embedding and copies_on_gpus:
            name = "an adapter over the embedding × dp"
            reason = (
                "nn.DataParallel makes no copies of a dictionary of parameters,"
                " in which PEFT keeps the factors of an embedding"
            )
            yield Refusal(name, reason, "use strategy=ddp", "adapter.targets")
        token_rows = "model.new_tokens" if config.model.new_tokens else "adapter.trainable_tokens"
        if adapter.trainable_tokens and case.mesh.tp > 1:
            reason = "PEFT lays their rows over a whole embedding and a whole head, and a rank has parts of these"
            instead = "use strategy=fsdp2, or adapter.modules_to_save=[embed_tokens, lm_head]"
            yield Refusal("trainable tokens × tp", reason, instead, token_rows)
        if (
            adapter.trainable_tokens
            and case.strategy.data_parallel(case.mesh) == "dp"
            and case.device == "cuda"
        ):
            reason = "nn.DataParallel makes no copies of a dictionary of parameters, in which PEFT keeps them"
            yield Refusal("trainable tokens × dp", reason, "use strategy=ddp", token_rows)
    if packed_bits(config):
        where = "adapter.quantize"
        if case.mesh.tp > 1:
            reason = (
                "scales belong to blocks along whole rows of a weight, and a rank has parts of some"
            )
            yield Refusal(
                "QLoRA × tp", reason, "use strategy=fsdp2, or adapter.quantize=none", where
            )
        if not case.strategy.takes_packed:
            reason, instead = (
                "packed weights are tested only where all ranks step together, one process a device",
                "use strategy=ddp or fsdp2, or adapter.quantize=none",
            )
            yield Refusal(f"QLoRA × {case.strategy.kind}", reason, instead, where)
        if config.algorithm.rollout is not None and not (
            case.strategy.whole_weights and plain(case.mesh)
        ):
            reason = "rollouts are sampled from a copy of a policy that is cut, and packed weights are not handed out whole"
            yield Refusal(
                "QLoRA × rollouts of a cut policy",
                reason,
                "use strategy=ddp, or adapter.quantize=none",
                where,
            )
    if config.checkpoint.export_adapter:
        where = "checkpoint.export_adapter"
        if not has_lora:
            yield Refusal(
                "adapter export × no adapter",
                "there is no adapter to export",
                f"use adapter=lora, or take {where} out",
                where,
            )
        if not config.model.as_published:
            reason = "the frozen model lies in no folder that a reader could lay the adapter over"
            yield Refusal(
                "adapter export × a model of the run's own",
                reason,
                f"take {where} out: the merged model is exported",
                where,
            )
    if config.algorithm.reference_of(config) == "adapter":
        if not has_lora:
            reason, instead = (
                "without an adapter there is none to switch off",
                "use adapter=lora, or algorithm.reference=precomputed",
            )
            yield Refusal("reference=adapter × no adapter", reason, instead, "algorithm.reference")
        elif not adapter.switches:
            reason = "without it the model is not what training starts from: PiSSA and modules_to_save change its weights"
            instead = "use algorithm.reference=precomputed or live"
            yield Refusal(
                "reference=adapter × PiSSA, modules_to_save", reason, instead, "algorithm.reference"
            )
        if getattr(config.algorithm, "reference_model", None) is not None:
            reason = "the policy without its adapter is what training starts from, not algorithm.reference_model"
            instead = "use algorithm.reference=precomputed or live"
            yield Refusal(
                "reference=adapter × a reference model of its own",
                reason,
                instead,
                "algorithm.reference",
            )
    vllm = config.algorithm.rollout and config.algorithm.rollout.generator
    if isinstance(vllm, VLLMGenerator):
        if vllm.weights != "none" and has_lora:
            reason = "vLLM is handed whole weights, and an adapter lies beside them"
            yield Refusal(
                "vLLM × an adapter",
                reason,
                "use generator=hf, or adapter=none",
                "algorithm.generator",
            )
        if vllm.url is None and config.model.id is None:
            reason = "its engine starts from a model's files, and this one has none"
            yield Refusal(
                "vLLM × a model without files",
                reason,
                "use generator=hf, or set model.id",
                "algorithm.generator",
            )


def _model(case: Case) -> Iterator[Refusal]:
    """What the model cannot do; nothing where it is not known yet."""
    facts, ring = case.facts, _rings(case)
    if facts is None:
        return
    if case.mesh.cp > 1:
        if facts.first_position is None:
            reason = "its tokens would count from the start of each part, since it takes no positions from outside"
            yield Refusal("cp × a model without position ids", reason, "use strategy=ddp or fsdp2")
        if ring and facts.bidirectional:
            reason = "torch's ring attention takes no mask, and padding is kept out by one"
            yield Refusal("ring × tokens that see those behind them", reason, "use ulysses")
        if facts.whole_sequences:
            yield replace(
                NO_PARTS,
                reason=f"context parallelism cannot run {facts.name}: {facts.whole_sequences}",
            )
        if ring and facts.windows:
            reason = "ring attention in torch takes no mask, and this model has layers with windows of their own"
            yield Refusal("ring × windows", reason, "use ulysses")
    if case.mesh.pp > 1:
        if facts.trains_router:
            where = "model.config.output_router_logits"
            reason = "the loss is a product of means over all layers, and a stage has some of them"
            instead = f"use strategy=fsdp2, or train without it: {where}=false"
            yield Refusal("pp × the router loss of a mixture of experts", reason, instead, where)
        if facts.uncut:
            yield replace(NO_STAGES, reason=facts.uncut)
    if case.config.memory.activation_checkpointing != "none" and not facts.recomputes:
        yield replace(NO_RECOMPUTING, reason=f"{facts.name} has no activation checkpointing")


def _written(case: Case) -> Iterator[Refusal]:
    """eval.samples and eval.tasks."""
    config, options = case.config, case.config.eval
    if options.patience is not None and not (
        config.data.eval or config.data.holdout or options.tasks
    ):
        yield Refusal(
            "eval.patience × no held-out rows",
            "it counts evaluations",
            "set data.eval or data.holdout",
            "eval.patience",
        )
    if not options.generates:
        return
    key, rollout = f"eval.{'samples' if options.samples else 'tasks'}", config.algorithm.rollout
    if config.plain or not config.algorithm.writes or config.head not in ("lm", "valued"):
        yield Refusal(
            f"{key} × a model without text", "it gives numbers, not text", f"take {key} out", key
        )
    if sees(case):
        yield Refusal(
            f"{key} × images",
            "prompts are handed to the sampler as text alone",
            f"take {key} out",
            key,
        )
    if packed_bits(config) and not (case.strategy.whole_weights and plain(case.mesh)):
        reason = "they are computed by a copy of a model that is cut, and packed weights are not handed out whole"
        yield Refusal(
            f"QLoRA × {key} of a cut model", reason, f"use strategy=ddp, or take {key} out", key
        )
    if options.samples and not config.data.eval and not config.data.holdout:
        yield Refusal(
            "eval.samples × no held-out rows",
            "prompts are held-out rows",
            "set data.eval or data.holdout",
            key,
        )
    if rollout is not None and options.max_new_tokens is not None:
        reason = "samples are made as rollouts are"
        yield Refusal(
            "eval.max_new_tokens × rollouts",
            reason,
            "set algorithm.generator.max_new_tokens",
            "eval.max_new_tokens",
        )
    if rollout is not None and options.tasks and isinstance(rollout.generator, VLLMGenerator):
        yield Refusal(
            "eval.tasks × vLLM",
            "lm-eval gets a model in the ranks",
            "use generator=hf, or take eval.tasks out",
            "eval.tasks",
        )


def _memory(case: Case) -> Iterator[Refusal]:
    config, memory = case.config, case.config.memory
    kind, apart = (
        memory.activation_checkpointing,
        case.strategy.engine(case.mesh) != "native" or not plain(case.mesh),
    )

    def refused(key: str, other: str, reason: str, instead: str) -> Refusal:
        return Refusal(f"{key} × {other}", reason, instead, f"memory.{key}")

    if memory.budget_gb is not None and config.plain:
        yield refused(
            "budget_gb",
            "a module of your own",
            "what it keeps is not known",
            "set activation_checkpointing",
        )
    for key in ("checkpointed_blocks", "activation_offload", "mlp_chunk"):
        if getattr(memory, key) and apart:
            reason = "it is proven where a rank runs whole blocks on whole rows"
            yield refused(
                key, "tp, cp, pp, ep, zero", reason, "take it out, or use strategy=fsdp2 or ddp"
            )
        if getattr(memory, key) and config.compile.enabled and key != "checkpointed_blocks":
            yield refused(key, "compile", "a compiled block runs as one", "take one of the two out")
    if memory.checkpointed_blocks is not None and kind == "none":
        yield refused(
            "checkpointed_blocks",
            "no checkpointing",
            "it counts those that are",
            "use activation_checkpointing=full",
        )
    if memory.activation_offload and kind == "selective":
        reason = (
            "what it keeps of operators goes past the tensors that autograd saves, which are moved"
        )
        yield refused(
            "activation_offload",
            "selective checkpointing",
            reason,
            "use activation_checkpointing=full",
        )
    if memory.activation_offload and sees(case):
        yield refused(
            "activation_offload",
            "images",
            "blocks of a vision tower run between those of the text",
            "take it out",
        )
    if memory.mlp_chunk and case.facts is not None and not chunkable(case.facts):
        yield replace(
            NO_CHUNKS, reason=f"{case.facts.name} has no dense feed-forward part of the name mlp"
        )


def _speed(case: Case) -> Iterator[Refusal]:
    """compile.loss, compile.optimizer, model.kernels and precision fp8: proven where a rank has whole weights, or FSDP2 gathers them."""
    config, mesh, options = case.config, case.mesh, case.config.precision
    whole, in_parts = (
        case.strategy.engine(mesh) == "native" and plain(mesh),
        config.optimizer.in_backward or config.optimizer.offload,
    )
    if config.compile.loss and mesh.tp > 1:
        yield Refusal(
            "compile.loss × tp",
            "parts of the vocabulary exchange sums within a chunk",
            "take it out",
            "compile.loss",
        )
    if config.compile.optimizer:
        own = (
            config.optimizer.fused
            or config.optimizer.kind not in ("adamw", "sgd")
            or options.master == "bf16"
        )
        if own or in_parts or not whole or not case.strategy.whole_weights:
            reason = (
                "it compiles steps of AdamW and SGD that are plain operators, over whole weights"
            )
            instead = "use strategy=ddp and optimizer: {kind: adamw, fused: false}"
            yield Refusal(
                "compile.optimizer × the optimizer or the strategy",
                reason,
                instead,
                "compile.optimizer",
            )
    if config.model.kernels == "liger":
        if case.device == "cpu" or not whole or config.plain:
            reason = "Triton's kernels are for GPUs, and parts of tensors, stages, DeepSpeed's hooks and other modules were not tried"
            yield replace(
                NO_LIGER,
                name="kernels=liger × cpu, tp, cp, pp, ep, zero, a module of your own",
                reason=reason,
            )
        if importlib.util.find_spec("liger_kernel") is None:
            yield replace(
                NO_LIGER,
                reason="the package liger-kernel is missing",
                instead="pip install liger-kernel",
            )
    if options.gather == "fp8":
        sharded = case.strategy.data_parallel(mesh) == "fsdp2"
        if options.kind != "fp8" or options.scaling != "tensorwise" or not sharded or in_parts:
            reason = (
                "FSDP2 gathers weights in fp8 with one scale each, made after a step of them all"
            )
            instead = (
                "use strategy=fsdp2, precision.kind=fp8 and scaling=tensorwise, without in_backward"
            )
            yield Refusal(
                "gather=fp8 × the precision or the strategy", reason, instead, "precision.gather"
            )
    if options.kind == "fp8":
        if importlib.util.find_spec("torchao") is None:
            yield replace(
                NO_FP8, reason="the package torchao is missing", instead="pip install torchao"
            )
        if not whole or config.adapter.kind != "none" or config.model.freeze:
            reason = "torchao's layers multiply whole weights, and compute the gradients of frozen ones, too"
            yield replace(
                NO_FP8, name="precision fp8 × tp, cp, pp, ep, zero, frozen weights", reason=reason
            )
        if case.facts is not None and not any(
            takes_fp8(weight) for block, _ in case.facts.kinds_of_blocks for weight in block
        ):
            yield replace(
                NO_FP8,
                reason=f"{case.facts.name} has no linear layer in its blocks whose sides are multiples of {MULTIPLE}",
            )


def _batch_norm(case: Case) -> Iterator[Refusal]:
    model = case.config.model
    if not model.sync_batchnorm:
        return
    if not (case.strategy.in_step and plain(case.mesh)):
        reason = "batch statistics are shared over ranks that hold whole samples and are in step at each forward: under DDP, FSDP2 and ZeRO"
        yield Refusal(
            "SyncBatchNorm × a strategy that is not data parallel",
            reason,
            "use strategy=ddp",
            "model.sync_batchnorm",
        )
    if case.mesh.data_ranks % (model.sync_batchnorm_ranks or 1):
        reason, instead = (
            "the ranks of a group must divide the data ranks",
            "use a divisor of the data ranks, or null for all",
        )
        yield Refusal(
            "SyncBatchNorm × groups that do not divide",
            reason,
            instead,
            "model.sync_batchnorm_ranks",
        )
    if case.facts is not None and case.facts.batch_norms == 0:
        reason = "this model has no batch norm"
        yield Refusal(
            "SyncBatchNorm × no batch norm",
            reason,
            "take model.sync_batchnorm out",
            "model.sync_batchnorm",
        )


def _tensor_parallel(case: Case) -> Iterator[Refusal]:
    facts, tp = case.facts, case.mesh.tp
    if facts is None or tp == 1:
        return
    if not facts.tp_styles:
        yield Refusal(
            "tp × no plan",
            "this model's class carries no tensor-parallel plan in transformers",
            "use strategy=fsdp2",
        )
    if unknown := sorted(facts.tp_styles - TP_STYLES):
        reason = (
            f"this model's tensor-parallel plan has styles that are not built: {', '.join(unknown)}"
        )
        yield Refusal("tp × the model's plan", reason, "use strategy=fsdp2")
    if facts.tp_failure:
        yield Refusal("tp × the model's code", facts.tp_failure, "use strategy=fsdp2")
    if "experts" in facts.tp_styles and facts.experts % tp:
        yield Refusal(
            "tp × experts",
            f"{facts.experts} experts do not divide by tp",
            "choose a tp that divides their number",
        )
    if facts.tp_cuts_heads and (facts.heads % tp or facts.kv_heads % tp):
        reason = "the attention heads, and those of keys and values, must divide by tp"
        yield Refusal("tp × heads", reason, "choose a tp that divides both numbers")
    if -(-facts.vocab_size // tp) * (tp - 1) >= facts.vocab_size:
        yield Refusal(
            "tp × small vocabulary",
            "some rank would hold no row of the vocabulary",
            "use a smaller tp",
        )


def _sequence_parallel(case: Case) -> Iterator[Refusal]:
    if not getattr(case.strategy, "sequence_parallel", False):
        return
    if case.mesh.tp == 1:
        reason = "tokens are cut over the ranks of tp"
        yield Refusal(
            "sequence_parallel × tp 1",
            reason,
            "set tp, or take it out",
            "strategy.sequence_parallel",
        )
    elif case.facts is not None:
        yield from whole_stream(case.config, case.facts)


def _expert_parallel(case: Case) -> Iterator[Refusal]:
    mesh, facts, where = case.mesh, case.facts, "strategy.ep"
    if mesh.ep == 1:
        return
    if mesh.tp * mesh.cp > 1:
        reason = "experts lie on data ranks that have whole tokens; with tp its ranks hold a part of the experts each"
        yield Refusal(
            "ep × tp, cp", reason, "use tp or cp without ep, or ep with ddp, fsdp2 and pp", where
        )
    if case.config.compile.enabled:
        yield Refusal(
            "ep × compile",
            "how many tokens come to a rank is another number each time",
            "use compile.enabled=false",
            where,
        )
    if facts is not None and not facts.experts:
        yield Refusal(
            "ep × the model",
            "it has no experts that are known here",
            "leave strategy.ep out",
            where,
        )
    if facts is not None and facts.experts % mesh.ep:
        reason = f"{facts.experts} experts do not divide by ep {mesh.ep}"
        yield Refusal("ep × experts", reason, "choose an ep that divides their number", where)
    if sees(case) or packed_bits(case.config):
        yield Refusal(
            "ep × images, QLoRA",
            "it is proven for texts and weights that are not packed",
            "use fsdp2 without ep",
            where,
        )


def _context_parallel(case: Case) -> Iterator[Refusal]:
    config, mesh, cp = case.config, case.mesh, case.mesh.cp
    if cp == 1:
        return
    ring, length, heads = (
        _rings(case),
        config.data.max_length,
        case.facts.heads if case.facts else 0,
    )
    if ring and case.device == "cpu":
        yield Refusal(
            "ring × CPU", "ring attention has no CPU kernel in torch", "use cp_method=ulysses"
        )
    if ring and config.packs:
        reason = (
            "torch's ring attention takes no mask, and documents of a pack are kept apart by one"
        )
        yield Refusal("ring × packing", reason, "use ulysses, or data.packing=false")
    if mesh.pp > 1:
        yield Refusal(
            "cp × pp",
            "the stages of a pipeline pass on whole sequences",
            "use cp with ddp or fsdp2, or pp without cp",
        )
    if config.model.attention == "eager" or (
        ring and config.model.attention not in ("auto", "sdpa")
    ):
        reason = f"parts of sequences are exchanged around {'the ring of torch' if ring else 'sdpa'}, not around {config.model.attention}"
        yield Refusal("cp × attention", reason, "use model.attention=auto", "model.attention")
    parts = 2 * cp if ring else cp  # a ring shares causal work out evenly where each rank has two
    reason = f"sequences of {length} tokens do not divide into {parts} parts"
    if ring and case.precision == "fp32" and case.device != "cpu":
        reason += (
            f" of a multiple of {RING_CHUNK} tokens, which the ring's kernel for fp32 requires"
        )
        parts *= RING_CHUNK
    if length % parts:
        yield Refusal(
            "cp × max_length", reason, f"nearest: {nearest(length, parts)}", "data.max_length"
        )
    if not ring and heads % (cp * mesh.tp):
        reason = f"{heads} attention heads do not divide by cp {cp}" + (
            f" × tp {mesh.tp}" if mesh.tp > 1 else ""
        )
        fits = max(n for n in range(1, cp + 1) if heads % (n * mesh.tp) == 0 or n == 1)
        yield Refusal("cp × heads", reason, f"use cp={fits}, or cp_method=ring on GPUs")


def _zero_bubble(case: Case) -> Iterator[Refusal]:
    if case.mesh.pp == 1 or case.strategy.pipeline_schedule()[0] != "zero_bubble":
        return
    if recomputes_some(case):
        reason = "the split backward goes through a block twice, and what was kept of it is given out once"
        instead = "use schedule: interleaved, or activation_checkpointing=full"
        yield Refusal(
            "selective checkpointing × zero_bubble",
            reason,
            instead,
            "memory.activation_checkpointing",
        )
    if case.config.compile.enabled:
        reason = "a compiled block has one backward, which does not split into that of its inputs and that of its weights"
        yield Refusal("zero_bubble × compile", reason, "use schedule: interleaved")


def _health(case: Case) -> Iterator[Refusal]:
    health = case.config.health
    if health.check_weights_every and not copied_over(case.strategy, case.mesh):
        apart = case.strategy.exchange is not None
        reason = (
            "each rank has weights of its own between two exchanges"
            if apart
            else "no rank holds the weights of another"
        )
        instead, where = "take it out, or use strategy=ddp", "health.check_weights_every"
        yield Refusal(
            "check_weights_every × weights that no two ranks share", reason, instead, where
        )
    if health.on_spike == "rollback" and case.config.algorithm.rollout is not None:
        reason = "a rollout depends on the weights, and would be another one after going back"
        yield Refusal("on_spike=rollback × rollouts", reason, "use note or skip", "health.on_spike")


def _rings(case: Case) -> bool:
    return case.mesh.cp > 1 and case.strategy.context_method() == "ring"
