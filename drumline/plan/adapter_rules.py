"""What adapters cannot be combined with: LoRA, DoRA, QLoRA and trained tokens.

Also their export, and their use as a reference. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.algorithm import TeachingSpec
from drumline.config.config import LoRAConfig
from drumline.config.refusal import Refusal
from drumline.plan.facts import cut_dimension, divides_when_packed, is_packed
from drumline.plan.rule import Case, is_data_parallel_only, packed_bits


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield why the adapter of a case is refused. Users are only shown the first refusal."""
    if case.config.model.freeze and _has_lora(case):
        yield Refusal(
            "frozen parts × an adapter",
            "an adapter freezes the whole model",
            "take model.freeze out",
            "model.freeze",
        )
    yield from _lora(case)
    if packed_bits(case.config):
        yield from _quantization(case)
    if case.config.checkpoint.export_adapter:
        yield from _export(case)
    teaching = case.config.algorithm.teaching
    if teaching is not None:
        if teaching.is_own_teacher:
            yield from _own_teacher(case, teaching)
    elif case.config.algorithm.reference_of(case.config) == "adapter":
        yield from _reference(case)


def _has_lora(case: Case) -> bool:
    return case.config.adapter.kind == "lora"


def _lora(case: Case) -> Iterator[Refusal]:
    """Yield refusals of DoRA, of factors of an embedding, and of trained tokens."""
    adapter = case.config.adapter
    if not isinstance(adapter, LoRAConfig):
        return
    if adapter.dora and case.mesh.tp > 1:
        yield Refusal(
            "DoRA × tp",
            "it needs the norms of whole rows of a weight, and a rank has parts of some",
            "use strategy=fsdp2, or adapter.dora=false",
            "adapter.dora",
        )
    # On a CPU, dp has one device and makes no copies.
    copies_modules = case.strategy.data_parallel(case.mesh) == "dp" and case.device == "cuda"
    if copies_modules and _adapts_embedding(case):
        reason = (
            "nn.DataParallel makes no copies of a dictionary of parameters,"
            " in which PEFT keeps the factors of an embedding"
        )
        yield Refusal(
            "an adapter over the embedding × dp", reason, "use strategy=ddp", "adapter.targets"
        )
    if not adapter.trainable_tokens:
        return
    tokens_key = "adapter.trainable_tokens"
    if case.config.model.new_tokens:
        # The user has set this key, and the ids follow from it.
        tokens_key = "model.new_tokens"
    if case.mesh.tp > 1:
        yield Refusal(
            "trainable tokens × tp",
            "PEFT adds their rows to a whole embedding and a whole head, and a rank has parts of these",
            "use strategy=fsdp2, or adapter.modules_to_save=[embed_tokens, lm_head]",
            tokens_key,
        )
    if copies_modules:
        reason = "nn.DataParallel makes no copies of a dictionary of parameters, in which PEFT keeps them"
        yield Refusal("trainable tokens × dp", reason, "use strategy=ddp", tokens_key)


def _adapts_embedding(case: Case) -> bool:
    """Return whether LoRA has factors for the embedding; False if the model is not known yet."""
    if case.facts is None:
        return False
    return any(".lora_embedding_A." in weight.name for weight in case.facts.end_weights)


def _quantization(case: Case) -> Iterator[Refusal]:
    """Yield refusals of frozen weights that QLoRA packs."""
    key = "adapter.quantize"
    yield from _packed_parts(case)
    if not case.strategy.takes_packed:
        yield Refusal(
            f"QLoRA × {case.strategy.kind}",
            "packed weights are tested only with ranks that step together, one process a device",
            "use strategy=ddp or fsdp2, or adapter.quantize=none",
            key,
        )
    policy_is_whole = case.strategy.whole_weights and is_data_parallel_only(case.mesh)
    if case.config.algorithm.rollout is not None and not policy_is_whole:
        yield Refusal(
            "QLoRA × rollouts of a cut policy",
            "rollouts are sampled from a whole copy of a sharded policy, and packed weights are not gathered",
            "use strategy=ddp, or adapter.quantize=none",
            key,
        )


def _packed_parts(case: Case) -> Iterator[Refusal]:
    """Yield refusals of packed weights that tensor parallelism would cut within a code."""
    tp = case.mesh.tp
    if case.facts is None or tp == 1:
        return
    for block, _ in case.facts.kinds_of_blocks:
        for weight in block:
            dimension = cut_dimension(weight)
            if dimension is None or not is_packed(weight):
                continue
            if not divides_when_packed(weight.shape, dimension, tp):
                size = weight.shape[dimension]
                yield Refusal(
                    f"QLoRA × tp {tp}",
                    f"{size} entries of {weight.name} do not divide into {tp} parts of whole codes",
                    "use a smaller tp, strategy=fsdp2, or adapter.quantize=none",
                    "adapter.quantize",
                )


def _export(case: Case) -> Iterator[Refusal]:
    """Yield refusals of an export that has the adapter alone."""
    key = "checkpoint.export_adapter"
    if not _has_lora(case):
        yield Refusal(
            "adapter export × no adapter",
            "there is no adapter to export",
            f"use adapter=lora, or take {key} out",
            key,
        )
    if not case.config.model.as_published:
        yield Refusal(
            "adapter export × a model of the run's own",
            "the frozen model is in no published folder that the adapter could be loaded over",
            f"take {key} out: the merged model is exported",
            key,
        )


def _own_teacher(case: Case, teaching: TeachingSpec) -> Iterator[Refusal]:
    """Yield refusals of a teacher that is the trained model with its adapter switched off."""
    key = "algorithm.teacher"
    adapter = case.config.adapter
    if not isinstance(adapter, LoRAConfig):
        yield Refusal(
            "teacher=base × no adapter",
            "there is no adapter to switch off",
            "use adapter=lora, or name a model as the teacher",
            key,
        )
        return
    if not adapter.is_reference_if_disabled:
        yield Refusal(
            "teacher=base × PiSSA, modules_to_save",
            "without the adapter the model is not the one that training starts from: PiSSA and modules_to_save change its weights",
            "name the model itself as the teacher",
            key,
        )
    if not teaching.has_second_loss:
        fix = "name another model as the teacher"
        if "cross_entropy_weight" in type(teaching).model_fields:
            fix = "set algorithm.cross_entropy_weight, such as 0.5, or name another model as the teacher"
        yield Refusal(
            "teacher=base × no other loss",
            "the adapter starts at zero, so that the model equals its teacher and the loss is 0: nothing would be learned",
            fix,
            key,
        )
    if teaching.top_k == 0 and _adapts_head(case, adapter):
        yield Refusal(
            "teacher=base × top_k=0 × an adapter over embedding or head",
            "the head itself gives the teacher's logits, and the adapter stands in its place",
            "use algorithm.top_k=32",
            "algorithm.top_k",
        )


def _adapts_head(case: Case, adapter: LoRAConfig) -> bool:
    """Return whether factors or trained rows lie over the embedding or the head."""
    if adapter.trainable_tokens:
        return True
    if case.facts is None:
        return False
    return any(".lora_" in weight.name for weight in case.facts.end_weights)


def _reference(case: Case) -> Iterator[Refusal]:
    """Yield refusals of a reference model that is the policy with its adapter switched off."""
    key = "algorithm.reference"
    if not _has_lora(case):
        yield Refusal(
            "reference=adapter × no adapter",
            "there is no adapter to switch off",
            "use adapter=lora, or algorithm.reference=precomputed",
            key,
        )
    elif not case.config.adapter.is_reference_if_disabled:
        yield Refusal(
            "reference=adapter × PiSSA, modules_to_save",
            "without the adapter the model is not the one that training starts from: PiSSA and modules_to_save change its weights",
            "use algorithm.reference=precomputed or live",
            key,
        )
    if getattr(case.config.algorithm, "reference_model", None) is not None:
        yield Refusal(
            "reference=adapter × a reference model of its own",
            "the policy without its adapter is what training starts from, not algorithm.reference_model",
            "use algorithm.reference=precomputed or live",
            key,
        )
