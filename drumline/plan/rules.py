"""The rules: what cannot be combined, why, and the nearest thing that works.

A rule is a generator of refusals; the first one becomes the error. `check_rules` lists all rules, and
is called before any process starts. No torch here.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from drumline.config.config import Config
from drumline.config.refusal import Refusal
from drumline.config.rollouts import ServerGenerator
from drumline.plan.adapter_rules import refusals as adapter_refusals
from drumline.plan.attention import RING_CHUNK, row_multiple
from drumline.plan.batch import nearest_multiples
from drumline.plan.copies import copied_over
from drumline.plan.facts import MULTIPLE, TP_STYLES, ModelFacts, has_chunkable_mlp, takes_fp8
from drumline.plan.generator_rules import refusals as generator_refusals
from drumline.plan.optimizer_rules import refusals as optimizer_refusals
from drumline.plan.retrieval_rules import refusals as retrieval_refusals
from drumline.plan.rule import (
    Case,
    is_data_parallel_only,
    is_vision_language,
    packed_bits,
    uses_selective_checkpointing,
)
from drumline.plan.strategy_engine import engine_spec
from drumline.plan.stream import sequence_parallel_refusals
from drumline.plan.teacher_rules import refusals as teacher_refusals

# Refusals whose reason depends on the model. It is filled in by `replace` here, from the model's facts,
# or by `error(reason)` in engine and models, when the model is built.
NO_PIPELINE = Refusal("pp × the model", "", "use strategy=fsdp2")
NO_CONTEXT_PARALLEL = Refusal("cp × the model", "", "use strategy=ddp or fsdp2, without cp")
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
NO_PACKING = Refusal(
    "packing × the model", "", "set data.packing: false for this model", "data.packing"
)

ROUTER_BIAS = "model.router_bias_rate"

Rule = Callable[[Case], Iterator[Refusal]]


def check_rules(case: Case) -> None:
    """Raise PlanError with the first refusal of a run, judged by its policy.

    Rules of all strategies come first, then those of the optimizer, then the strategy's own. If
    several refuse, the order decides which one the user sees.
    """
    _raise_first_refusal(_rules_in_order(case), case)


def check_role_rules(case: Case, trainable: bool) -> None:
    """Raise PlanError with the first refusal of a model besides the policy.

    `case`: that of the run, with the config and the facts of this model in place of the policy's.
    `trainable`: whether the model is trained. Rules about rows, the adapter, rollouts, evaluations
    and health checks are left out: these are of the policy, with which `check_rules` has checked
    them.
    """
    rules_of_policy = (
        _mps,
        _rows_with_images,
        retrieval_refusals,
        adapter_refusals,
        teacher_refusals,
        generator_refusals,
        _evaluation,
        _health,
    )
    rules = [rule for rule in _rules_in_order(case) if rule not in rules_of_policy]
    if trainable:
        # The tower of a frozen model has no gradients to wait for.
        rules.insert(0, _unseen_images)
    elif case.facts is not None and not case.facts.experts:
        # It has nothing to cut over the ranks of ep, which are data ranks for all of its weights.
        rules.remove(_expert_parallel)
    _raise_first_refusal(rules, case)


def _raise_first_refusal(rules: Iterable[Rule], case: Case) -> None:
    """Raise PlanError with the first refusal that the rules yield for a case."""
    for rule in rules:
        refusal = next(rule(case), None)
        if refusal is not None:
            raise refusal.error()


def _rules_in_order(case: Case) -> tuple[Rule, ...]:
    """Return all rules for a case, in the order in which they are checked."""
    return (
        _mps,
        _rows_with_images,
        _images,
        retrieval_refusals,
        adapter_refusals,
        teacher_refusals,
        generator_refusals,
        _model,
        _evaluation,
        _memory,
        _compile,
        _kernels,
        _fp8,
        _batch_norm,
        _tensor_parallel,
        _sequence_parallel,
        _context_parallel,
        _zero_bubble,
        _health,
        _expert_parallel,
        _router_bias,
        optimizer_refusals,
        engine_spec(case.strategy).refusals,
    )


def _mps(case: Case) -> Iterator[Refusal]:
    """Yield refusals of Apple's GPU."""
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
    if not config.algorithm.packs or case.precision != "fp32" or packed_bits(config):
        # The algorithms that pack rows are sft and pretrain. All others sum in fp64 on the device,
        # which Apple's GPU does not have.
        yield Refusal(
            "mps × what it has not been written for",
            "it is written for sft and pretrain in fp32",
            "use precision=fp32, or run.device=cpu",
            "run.device",
        )


def _rows_with_images(case: Case) -> Iterator[Refusal]:
    """Yield refusals of rows with images, which stand among a model's tokens or are all of a row."""
    yield from compared_images(case.config, is_vision_language(case))
    yield from _unseen_images(case)
    if is_vision_language(case):
        yield from _rollouts_of_images(case.config)
        yield from _other_models_of_images(case)


def _unseen_images(case: Case) -> Iterator[Refusal]:
    """Yield the refusal of a vision-language model whose tower would not run in each batch."""
    if is_vision_language(case) and not case.config.algorithm.sees_images:
        reason = "its batches have no images, and ranks whose vision tower does not run would leave the others waiting"
        yield Refusal(
            "images × the algorithm",
            reason,
            "use algorithm sft, reward, dpo, orpo, simpo, kto or grpo, or its language model alone: for Qwen3.5"
            " model.config={model_type: qwen3_5_text}",
            "algorithm",
        )


def _images(case: Case) -> Iterator[Refusal]:
    """Yield refusals of a model that reads images, for how it is cut over ranks."""
    mesh = case.mesh
    images_alone = case.config.images_alone
    if is_vision_language(case) and mesh.pp > 1:
        reason = "stages pass on hidden states alone, and a tower's features may be added in several blocks (DeepStack)"
        yield Refusal("images × pp", reason, "use strategy=fsdp2")
    if images_alone and mesh.cp > 1:
        reason = "an image is one sample: its pixels become tokens inside of the model, so there is no sequence to cut"
        yield Refusal("cp × images", reason, "use strategy=ddp or fsdp2")
    if images_alone and mesh.pp > 1:
        yield Refusal(
            "pp × images",
            "the stages of a pipeline take token ids",
            "use strategy=ddp or fsdp2",
        )


def _rollouts_of_images(config: Config) -> Iterator[Refusal]:
    """Yield refusals of rollouts of a vision-language model."""
    rollout = config.algorithm.rollout
    if rollout is None:
        return
    if rollout.generator.kind != "hf":
        yield Refusal(
            f"images × generator={rollout.generator.kind}",
            "it takes the tokens of a prompt alone, without its images",
            "use generator=hf",
            "algorithm.generator",
        )
    if rollout.environment is not None:
        yield Refusal(
            "images × an environment",
            "its messages are appended as tokens of text, and those of images would have no features",
            "take algorithm.environment out, or name a model of text",
            "algorithm.environment",
        )


def _other_models_of_images(case: Case) -> Iterator[Refusal]:
    """Yield refusals of models of text beside a vision-language model: they get its batches."""
    if case.facts is None:
        return
    for name, facts in case.facts.roles.items():
        if not facts.vision_language:
            yield Refusal(
                f"images × a {name} model of text",
                "it would read the tokens that stand for an image as text",
                "name one that reads images; rewards by functions get the paths of the images",
                "algorithm",
            )


def compared_images(config: Config, vision_language: bool) -> Iterator[Refusal]:
    """Yield refusals of images whose rows would be compared by similarity.

    Data are prepared before any case is known, so these rules look at the config alone.
    `vision_language`: whether images stand among the model's tokens.
    """
    if not vision_language and not config.images_alone:
        return
    for key in ("duplicates", "decontaminate"):
        comparison = getattr(config.data, key)
        if comparison is None:
            continue
        # Only duplicates have a kind; decontamination always compares n-grams.
        if getattr(comparison, "kind", "near") != "exact":
            yield Refusal(
                f"data.{key} × images",
                "it compares texts alone",
                "use data.duplicates=exact, or take it out",
                f"data.{key}",
            )


def _model(case: Case) -> Iterator[Refusal]:
    """Yield refusals because of the model's own code; none if the model is not known yet."""
    facts = case.facts
    if facts is None:
        return
    if case.mesh.cp > 1:
        yield from _context_parallel_model(case, facts)
    if case.mesh.pp > 1:
        yield from _pipeline_model(facts)
    if case.config.model.router_bias_rate and not facts.has_router_bias:
        reason = (
            f"the routers of {facts.name} have no bias that is a buffer: e_score_correction_bias"
        )
        yield Refusal("router_bias_rate × the model", reason, "take it out", ROUTER_BIAS)
    if case.config.memory.activation_checkpointing != "none" and not facts.recomputes:
        yield replace(NO_RECOMPUTING, reason=f"{facts.name} has no activation checkpointing")


def _context_parallel_model(case: Case, facts: ModelFacts) -> Iterator[Refusal]:
    """Yield refusals of models whose sequences cannot be cut over the ranks of cp."""
    if facts.first_position is None:
        reason = "it takes no position ids, so each part would count its tokens from 0"
        yield Refusal("cp × a model without position ids", reason, "use strategy=ddp or fsdp2")
    if _uses_ring_attention(case) and facts.bidirectional:
        reason = "torch's ring attention takes no mask, and padding needs one"
        yield Refusal("ring × tokens that see those behind them", reason, "use ulysses")
    if facts.whole_sequences:
        reason = f"context parallelism cannot run {facts.name}: {facts.whole_sequences}"
        yield replace(NO_CONTEXT_PARALLEL, reason=reason)
    if _uses_ring_attention(case) and facts.windows:
        reason = "ring attention in torch takes no mask, and this model has layers with windows of their own"
        yield Refusal("ring × windows", reason, "use ulysses")


def _pipeline_model(facts: ModelFacts) -> Iterator[Refusal]:
    """Yield refusals of models that cannot be cut into the stages of a pipeline."""
    if facts.trains_router:
        where = "model.config.output_router_logits"
        reason = "the loss is a product of means over all layers, and a stage has only some of them"
        instead = f"use strategy=fsdp2, or train without it: {where}=false"
        yield Refusal("pp × the router loss of a mixture of experts", reason, instead, where)
    if facts.uncut:
        yield replace(NO_PIPELINE, reason=facts.uncut)


def _evaluation(case: Case) -> Iterator[Refusal]:
    """Yield refusals of the section eval: patience, samples and tasks."""
    config = case.config
    options = config.eval
    has_held_out_rows = bool(config.data.eval or config.data.holdout)
    if options.patience is not None and not has_held_out_rows and not options.tasks:
        yield Refusal(
            "eval.patience × no held-out rows",
            "it counts evaluations",
            "set data.eval or data.holdout",
            "eval.patience",
        )
    if options.generates:
        yield from _evaluation_texts(case, has_held_out_rows)


def _evaluation_texts(case: Case, has_held_out_rows: bool) -> Iterator[Refusal]:
    """Yield refusals of evaluations in which the model generates text: eval.samples, eval.tasks."""
    config = case.config
    options = config.eval
    rollout = config.algorithm.rollout
    key = "eval.tasks"
    if options.samples:
        key = "eval.samples"
    if config.head == "seq2seq":
        yield Refusal(
            f"{key} × an encoder and a decoder",
            "the sampler writes on behind a prompt, and such a model's prompt is not in its decoder",
            f"take {key} out, and sample from an export with transformers",
            key,
        )
    elif (
        config.has_own_module or not config.algorithm.writes or config.head not in ("lm", "valued")
    ):
        yield Refusal(
            f"{key} × a model without text", "it gives numbers, not text", f"take {key} out", key
        )
    if is_vision_language(case) and options.tasks:
        yield Refusal(
            "eval.tasks × images",
            "lm-eval gives prompts of text alone",
            "take eval.tasks out",
            "eval.tasks",
        )
    if packed_bits(config) and not (
        case.strategy.whole_weights and is_data_parallel_only(case.mesh)
    ):
        reason = "they need a whole copy of a sharded model, and packed weights are not gathered"
        yield Refusal(
            f"QLoRA × {key} of a cut model", reason, f"use strategy=ddp, or take {key} out", key
        )
    if options.samples and not has_held_out_rows:
        yield Refusal(
            "eval.samples × no held-out rows",
            "prompts are held-out rows",
            "set data.eval or data.holdout",
            key,
        )
    if rollout is not None and rollout.environment is not None and options.samples:
        yield Refusal(
            "eval.samples × an environment",
            "a sample is one answer to a row, and the environment decides what the model reads",
            "take eval.samples out: the evaluation plays whole episodes, and the report shows those of rollouts",
            "eval.samples",
        )
    if rollout is not None and options.max_new_tokens is not None:
        yield Refusal(
            "eval.max_new_tokens × rollouts",
            "samples are made as rollouts are",
            "set algorithm.generator.max_new_tokens",
            "eval.max_new_tokens",
        )
    if rollout is not None and options.tasks and isinstance(rollout.generator, ServerGenerator):
        yield Refusal(
            "eval.tasks × vLLM or SGLang",
            "lm-eval gets a model in the ranks",
            "use generator=hf, or take eval.tasks out",
            "eval.tasks",
        )


def _memory(case: Case) -> Iterator[Refusal]:
    """Yield refusals of the section memory."""
    config = case.config
    memory = config.memory
    checkpointing = memory.activation_checkpointing

    if memory.budget_gb is not None and config.has_own_module:
        yield _memory_refusal(
            "budget_gb",
            "a module of your own",
            "what it keeps is not known",
            "set activation_checkpointing",
        )
    for key in ("checkpointed_blocks", "activation_offload", "mlp_chunk"):
        if not getattr(memory, key):
            continue
        if not _runs_whole_blocks(case):
            yield _memory_refusal(
                key,
                "tp, pp, ep, zero, ring",
                "it is tested with ranks that run whole blocks alone",
                "take it out, or use strategy=fsdp2 or ddp, with cp by ulysses",
            )
        if config.compile.enabled and key != "checkpointed_blocks":
            yield _memory_refusal(
                key, "compile", "a compiled block runs as one", "take one of the two out"
            )
    if memory.checkpointed_blocks is not None and checkpointing == "none":
        yield _memory_refusal(
            "checkpointed_blocks",
            "no checkpointing",
            "it is the number of blocks with checkpointing",
            "use activation_checkpointing=full",
        )
    if memory.activation_offload and checkpointing == "selective":
        reason = "selective checkpointing keeps tensors outside of those that autograd saves, and only these are moved"
        yield _memory_refusal(
            "activation_offload",
            "selective checkpointing",
            reason,
            "use activation_checkpointing=full",
        )
    yield from _memory_of_stacks(case)
    if memory.mlp_chunk and case.facts is not None and not has_chunkable_mlp(case.facts):
        yield replace(
            NO_CHUNKS, reason=f"{case.facts.name} has no dense feed-forward part of the name mlp"
        )


def _memory_of_stacks(case: Case) -> Iterator[Refusal]:
    """Yield refusals of the section memory for models with more than one list of blocks."""
    memory = case.config.memory
    for key in ("checkpointed_blocks", "activation_offload"):
        if getattr(memory, key) and case.config.head == "seq2seq":
            yield _memory_refusal(
                key,
                "an encoder and a decoder",
                "it is written for one list of blocks, which run one behind the other",
                "use activation_checkpointing=full",
            )


def _memory_refusal(key: str, other: str, reason: str, instead: str) -> Refusal:
    """Return the refusal of a key of the section memory in combination with `other`."""
    return Refusal(f"{key} × {other}", reason, instead, f"memory.{key}")


def _compile(case: Case) -> Iterator[Refusal]:
    """Yield refusals of compile.loss and compile.optimizer."""
    config = case.config
    if config.compile.loss and case.mesh.tp > 1:
        yield Refusal(
            "compile.loss × tp",
            "ranks exchange sums over their parts of the vocabulary within a chunk",
            "take it out",
            "compile.loss",
        )
    if not config.compile.optimizer:
        return
    optimizer = config.optimizer
    is_plain_step = (
        optimizer.kind in ("adamw", "sgd")
        and not optimizer.fused
        and not _steps_per_parameter(config)
        and config.precision.master != "bf16"
    )
    if not is_plain_step or not _is_native(case) or not case.strategy.whole_weights:
        yield Refusal(
            "compile.optimizer × the optimizer or the strategy",
            "it compiles steps of AdamW and SGD that are plain operators, over whole weights",
            "use strategy=ddp and optimizer: {kind: adamw, fused: false}",
            "compile.optimizer",
        )


def _kernels(case: Case) -> Iterator[Refusal]:
    """Yield refusals of model.kernels: liger."""
    if case.config.model.kernels != "liger":
        return
    if case.device == "cpu" or not _is_native(case) or case.config.has_own_module:
        yield replace(
            NO_LIGER,
            name="kernels=liger × cpu, tp, cp, pp, ep, zero, a module of your own",
            reason="Triton's kernels are for GPUs, and parts of tensors, stages, DeepSpeed's hooks and other modules are not tested",
        )
    if importlib.util.find_spec("liger_kernel") is None:
        yield replace(
            NO_LIGER,
            reason="the package liger-kernel is missing",
            instead="pip install liger-kernel",
        )


def _fp8(case: Case) -> Iterator[Refusal]:
    """Yield refusals of precision.gather: fp8 and of precision.kind: fp8."""
    if case.config.precision.gather == "fp8":
        yield from _fp8_gathering(case)
    if case.config.precision.kind == "fp8":
        yield from _fp8_products(case)


def _fp8_gathering(case: Case) -> Iterator[Refusal]:
    """Yield the refusal of precision.gather: fp8."""
    precision = case.config.precision
    has_one_scale = precision.kind == "fp8" and precision.scaling == "tensorwise"
    is_sharded = case.strategy.data_parallel(case.mesh) == "fsdp2"
    if not has_one_scale or not is_sharded or _steps_per_parameter(case.config):
        yield Refusal(
            "gather=fp8 × the precision or the strategy",
            "FSDP2 gathers weights in fp8 with one scale each, made after a step of them all",
            "use strategy=fsdp2, precision.kind=fp8 and scaling=tensorwise, without in_backward",
            "precision.gather",
        )


def _fp8_products(case: Case) -> Iterator[Refusal]:
    """Yield refusals of precision.kind: fp8."""
    config = case.config
    if importlib.util.find_spec("torchao") is None:
        yield replace(
            NO_FP8, reason="the package torchao is missing", instead="pip install torchao"
        )
    if not _is_native(case) or config.adapter.kind != "none" or config.model.freeze:
        yield replace(
            NO_FP8,
            name="precision fp8 × tp, cp, pp, ep, zero, frozen weights",
            reason="torchao's layers multiply whole weights, and compute the gradients of frozen ones, too",
        )
    if case.facts is not None and not _has_fp8_layer(case.facts):
        reason = f"{case.facts.name} has no linear layer in its blocks whose sides are multiples of {MULTIPLE}"
        yield replace(NO_FP8, reason=reason)


def _has_fp8_layer(facts: ModelFacts) -> bool:
    """Return whether a linear layer of the model's blocks can multiply in fp8."""
    weights = chain.from_iterable(block for block, _ in facts.kinds_of_blocks)
    return any(takes_fp8(weight) for weight in weights)


def _is_native(case: Case) -> bool:
    """Return whether Drumline's own engine steps the model, on ranks that run whole layers."""
    return case.strategy.engine(case.mesh) == "native" and is_data_parallel_only(case.mesh)


def _runs_whole_blocks(case: Case) -> bool:
    """Return whether each rank runs all blocks by Drumline's own engine.

    It may run them on its part of each row: only Ulysses' attention sees the others.
    """
    mesh = case.mesh
    is_native = case.strategy.engine(mesh) == "native"
    return is_native and mesh.tp * mesh.pp * mesh.ep == 1 and not _uses_ring_attention(case)


def _steps_per_parameter(config: Config) -> bool:
    """Return whether the optimizer steps parameter by parameter instead of all at once."""
    return config.optimizer.in_backward or config.optimizer.offload


def _batch_norm(case: Case) -> Iterator[Refusal]:
    """Yield refusals of model.sync_batchnorm, by which ranks share their statistics."""
    model = case.config.model
    if not model.sync_batchnorm:
        return
    if not (case.strategy.in_step and is_data_parallel_only(case.mesh)):
        reason = "batch statistics are shared over ranks that hold whole samples and are in step at each forward: under DDP, FSDP2 and ZeRO"
        yield Refusal(
            "SyncBatchNorm × a strategy that is not data parallel",
            reason,
            "use strategy=ddp",
            "model.sync_batchnorm",
        )
    if case.mesh.data_ranks % (model.sync_batchnorm_ranks or 1):
        yield Refusal(
            "SyncBatchNorm × groups that do not divide",
            "the ranks of a group must divide the data ranks",
            "use a divisor of the data ranks, or null for all",
            "model.sync_batchnorm_ranks",
        )
    if case.facts is not None and case.facts.batch_norms == 0:
        yield Refusal(
            "SyncBatchNorm × no batch norm",
            "this model has no batch norm",
            "take model.sync_batchnorm out",
            "model.sync_batchnorm",
        )


def _tensor_parallel(case: Case) -> Iterator[Refusal]:
    """Yield refusals of tensor parallelism because of the model's plan or sizes."""
    facts = case.facts
    tp = case.mesh.tp
    if facts is None or tp == 1:
        return
    if not facts.tp_styles:
        yield Refusal(
            "tp × no plan",
            "this model's class carries no tensor-parallel plan in transformers",
            "use strategy=fsdp2",
        )
    unknown = sorted(facts.tp_styles - TP_STYLES)
    if unknown:
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
    rows_per_rank = math.ceil(facts.vocab_size / tp)
    if rows_per_rank * (tp - 1) >= facts.vocab_size:
        yield Refusal(
            "tp × small vocabulary",
            "some rank would hold no row of the vocabulary",
            "use a smaller tp",
        )


def _sequence_parallel(case: Case) -> Iterator[Refusal]:
    """Yield refusals of sequence parallelism, if the user has set it."""
    if not getattr(case.strategy, "sequence_parallel", False):
        return
    if case.mesh.tp == 1:
        yield Refusal(
            "sequence_parallel × tp 1",
            "tokens are cut over the ranks of tp",
            "set tp, or take it out",
            "strategy.sequence_parallel",
        )
    elif case.facts is not None:
        yield from sequence_parallel_refusals(case.config, case.facts)


def _expert_parallel(case: Case) -> Iterator[Refusal]:
    """Yield refusals of expert parallelism, which cuts a mixture's experts over data ranks.

    With tp they are cut over its ranks as well.
    """
    mesh = case.mesh
    facts = case.facts
    where = "strategy.ep"
    if mesh.ep == 1:
        return
    if case.config.compile.enabled and uses_selective_checkpointing(case):
        reason = (
            "what a block of several graphs keeps cannot be told apart from what it computes again"
        )
        instead = "use activation_checkpointing=full, or compile.enabled=false"
        yield Refusal("ep × compile × selective checkpointing", reason, instead, where)
    if facts is not None and not facts.experts:
        yield Refusal(
            "ep × the model",
            "it has no experts that are known here",
            "leave strategy.ep out",
            where,
        )
    if facts is not None and facts.experts % (mesh.ep * mesh.tp):
        reason = f"{facts.experts} experts do not divide by ep {mesh.ep}"
        instead = "choose an ep that divides their number"
        if mesh.tp > 1:
            reason += f" × tp {mesh.tp}, whose ranks hold some of them each"
            instead = "choose an ep and a tp whose product divides their number"
        yield Refusal("ep × experts", reason, instead, where)


def _router_bias(case: Case) -> Iterator[Refusal]:
    """Yield refusals of model.router_bias_rate, besides that of models without such a bias."""
    config = case.config
    instead = "take it out"
    if not config.model.router_bias_rate:
        return
    if config.has_own_module:
        reason = "the experts of a module of your own are not known"
        yield Refusal("router_bias_rate × model.kind", reason, instead, ROUTER_BIAS)
    if config.adapter.kind != "none":
        reason = "the files of an adapter have no place for the router's bias"
        yield Refusal("router_bias_rate × adapter", reason, "use adapter=none", ROUTER_BIAS)
    if case.strategy.exchange is not None:
        reason = "it follows the load of all ranks after each step, and here ranks step alone"
        yield Refusal("router_bias_rate × local steps", reason, "use ddp or fsdp2", ROUTER_BIAS)
    if case.strategy.data_parallel(case.mesh) == "dp":
        reason = "the loads of experts are not counted over its threads"
        yield Refusal("router_bias_rate × dp", reason, "use strategy=ddp", ROUTER_BIAS)
    if case.strategy.engine(case.mesh) == "deepspeed" and case.precision != "fp32":
        reason = "DeepSpeed keeps buffers in 16 bits, which lose such small steps"
        yield Refusal("router_bias_rate × DeepSpeed", reason, "use ddp or fsdp2", ROUTER_BIAS)


def _context_parallel(case: Case) -> Iterator[Refusal]:
    """Yield refusals of context parallelism, which cuts sequences over ranks."""
    config = case.config
    mesh = case.mesh
    if mesh.cp == 1:
        return
    ring = _uses_ring_attention(case)
    if ring and case.device == "cpu":
        yield Refusal(
            "ring × CPU", "ring attention has no CPU kernel in torch", "use cp_method=ulysses"
        )
    if ring and config.packs:
        reason = "torch's ring attention takes no mask, and the documents of a pack need one"
        yield Refusal("ring × packing", reason, "use ulysses, or data.packing=false")
    if mesh.pp > 1:
        yield Refusal(
            "cp × pp",
            "the stages of a pipeline pass on whole sequences",
            "use cp with ddp or fsdp2, or pp without cp",
        )
    attention = config.model.attention
    if attention == "eager" or (ring and attention not in ("auto", "sdpa")):
        carrier = "sdpa"
        if ring:
            carrier = "the ring of torch"
        reason = f"parts of sequences are exchanged around {carrier}, not around {attention}"
        yield Refusal("cp × attention", reason, "use model.attention=auto", "model.attention")
    yield from _context_parallel_length(case)
    if not ring:
        yield from _context_parallel_heads(case)


def _context_parallel_length(case: Case) -> Iterator[Refusal]:
    """Yield the refusal of a data.max_length that does not divide into parts for cp ranks."""
    length = case.config.data.max_length
    cp = case.mesh.cp
    multiple = row_multiple(cp, case.strategy.context_method(), case.precision, case.device)
    parts = cp
    if _uses_ring_attention(case):
        parts = 2 * cp
    reason = f"sequences of {length} tokens do not divide into {parts} parts"
    if multiple > parts:
        reason += (
            f" of a multiple of {RING_CHUNK} tokens, which the ring's kernel for fp32 requires"
        )
    if length % multiple:
        yield Refusal(
            "cp × max_length",
            reason,
            f"nearest: {nearest_multiples(length, multiple)}",
            "data.max_length",
        )


def _context_parallel_heads(case: Case) -> Iterator[Refusal]:
    """Yield the refusal of heads that do not divide by cp; none if the model is not known yet."""
    if case.facts is None:
        return
    heads = case.facts.heads
    cp = case.mesh.cp
    tp = case.mesh.tp
    if heads % (cp * tp) == 0:
        return
    reason = f"{heads} attention heads do not divide by cp {cp}"
    if tp > 1:
        reason += f" × tp {tp}"
    largest = 1
    for degree in range(1, cp + 1):
        if heads % (degree * tp) == 0:
            largest = degree
    yield Refusal("cp × heads", reason, f"use cp={largest}, or cp_method=ring on GPUs")


def _zero_bubble(case: Case) -> Iterator[Refusal]:
    """Yield refusals of the schedule zero_bubble, which splits the backward of a block in two."""
    if case.mesh.pp == 1 or case.strategy.pipeline_schedule()[0] != "zero_bubble":
        return
    if uses_selective_checkpointing(case):
        reason = "the split backward runs through a block twice, and what selective checkpointing keeps can be used once"
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
    """Yield refusals of the section health."""
    health = case.config.health
    if health.check_weights_every and not copied_over(case.strategy, case.mesh):
        reason = "no two ranks hold the same weights"
        if case.strategy.exchange is not None:
            reason = "each rank has weights of its own between two exchanges"
        yield Refusal(
            "check_weights_every × weights that no two ranks share",
            reason,
            "take it out, or use strategy=ddp",
            "health.check_weights_every",
        )
    if health.on_spike == "rollback" and case.config.algorithm.rollout is not None:
        reason = "a rollout depends on the weights, and would be another one after going back"
        yield Refusal("on_spike=rollback × rollouts", reason, "use note or skip", "health.on_spike")


def _uses_ring_attention(case: Case) -> bool:
    """Return whether context parallelism passes keys and values around a ring."""
    return case.mesh.cp > 1 and case.strategy.context_method() == "ring"
