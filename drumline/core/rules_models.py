"""What cannot be combined for the sake of a model, an adapter or the roles of an algorithm: rows of the table in core.rules."""

from __future__ import annotations

from drumline.core.rollouts import VLLMGenerator
from drumline.core.rule import Case, Rule, plain, quantizes, sees

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "images × an algorithm that is not sft or pretrain",
        lambda c: sees(c) and not c.config.algorithm.sees_images,
        "its batches carry no images, and ranks whose vision tower does not run would leave the others waiting",
        "use algorithm=sft, or a model of text",
        "algorithm",
    ),
    Rule(
        "images × pp",
        lambda c: sees(c) and c.mesh.pp > 1,
        "stages hand on hidden states alone, and the tower's features are added to those of several blocks (DeepStack)",
        "use strategy=fsdp2",
    ),
    Rule(
        "images × cp",
        lambda c: sees(c) and c.mesh.cp > 1,
        "transformers puts the features of all images into the places it counts in a row, and a rank would have a part of the places",
        "use strategy=fsdp2 with activation checkpointing",
    ),
    Rule(
        "frozen parts × an adapter",
        lambda c: bool(c.config.model.freeze) and c.config.adapter.kind == "lora",
        "an adapter freezes the whole model",
        "take model.freeze out",
        "model.freeze",
    ),
    Rule(
        "QLoRA × weights that are cut or sharded",
        lambda c: quantizes(c.config) and not (c.strategy.takes_packed and plain(c.mesh)),
        "packed weights are proven whole on each rank only",
        "use strategy=ddp, or adapter.quantize=none",
        "adapter.quantize",
    ),
    Rule(
        "QLoRA × random weights",
        lambda c: quantizes(c.config) and c.config.model.init == "random",
        "only weights that are loaded can be packed",
        "use adapter.quantize=none",
        "adapter.quantize",
    ),
    Rule(
        "adapter export × no adapter",
        lambda c: c.config.checkpoint.export_adapter and c.config.adapter.kind == "none",
        "there is no adapter to export",
        "use adapter=lora, or take checkpoint.export_adapter out",
        "checkpoint.export_adapter",
    ),
    Rule(
        "adapter export × a model of the run's own",
        lambda c: c.config.checkpoint.export_adapter and not c.config.model.as_published,
        "the frozen model lies in no folder that a reader could lay the adapter over",
        "take checkpoint.export_adapter out: the merged model is exported",
        "checkpoint.export_adapter",
    ),
    Rule(
        "reference=adapter × no adapter",
        lambda c: c.config.algorithm.reference_of(c.config) == "adapter" and c.config.adapter.kind != "lora",
        "without an adapter there is none to switch off",
        "use adapter=lora, or algorithm.reference=precomputed",
        "algorithm.reference",
    ),
    Rule(
        "reference=adapter × a reference model of its own",
        lambda c: (
            c.config.algorithm.reference_of(c.config) == "adapter" and getattr(c.config.algorithm, "reference_model", None) is not None
        ),
        "the policy without its adapter is what training starts from, not algorithm.reference_model",
        "use algorithm.reference=precomputed or live",
        "algorithm.reference",
    ),
    Rule(
        "cp × images",
        lambda c: c.mesh.cp > 1 and c.config.images_alone,
        "an image is one sample: its pixels become tokens inside of the model, so there is no sequence to deal out to ranks",
        "use strategy=ddp or fsdp2",
    ),
    Rule(
        "pp × images",
        lambda c: c.mesh.pp > 1 and c.config.images_alone,
        "the stages of a pipeline are handed token ids",
        "use strategy=ddp or fsdp2",
    ),
    Rule(
        "cp × a model without position ids",
        lambda c: c.mesh.cp > 1 and c.facts is not None and c.facts.first_position is None,
        "its tokens would count from the start of each part, since it takes no positions from outside",
        "use strategy=ddp or fsdp2",
    ),
    Rule(
        "pp × the router loss of a mixture of experts",
        lambda c: c.mesh.pp > 1 and c.facts is not None and c.facts.trains_router,
        "the loss is a product of means over all layers, and a stage has some of them",
        "use strategy=fsdp2, or train without it: model.config.output_router_logits=false",
        "model.config.output_router_logits",
    ),
    Rule(
        "ring × tokens that see those behind them",
        lambda c: c.mesh.cp > 1 and c.strategy.context_method() == "ring" and c.facts is not None and c.facts.bidirectional,
        "torch's ring attention takes no mask, and padding is kept out by one",
        "use ulysses",
    ),
    Rule(
        "cp × the model",
        lambda c: c.mesh.cp > 1 and c.facts is not None and c.facts.whole_sequences,
        lambda c: f"context parallelism cannot run {c.facts.name}: {c.facts.whole_sequences}" if c.facts else "",
        "use fsdp2, ddp or pp without cp",
        phase="model",
    ),
    Rule(
        "pp × the model",
        lambda c: c.mesh.pp > 1 and c.facts is not None and c.facts.uncut,
        lambda c: c.facts.uncut if c.facts else "",
        "use strategy: fsdp2 or tp instead",
        phase="model",
    ),
    Rule(
        "vLLM × an adapter",
        lambda c: (vllm := _vllm(c)) is not None and vllm.weights != "none" and c.config.adapter.kind == "lora",
        "vLLM is handed whole weights, and an adapter lies beside them",
        "use generator=hf, or adapter=none",
        "algorithm.generator",
    ),
    Rule(
        "vLLM × a model without files",
        lambda c: (vllm := _vllm(c)) is not None and vllm.url is None and c.config.model.id is None,
        "its engine starts from a model's files, and this one has none",
        "use generator=hf, or set model.id",
        "algorithm.generator",
    ),
    Rule(
        "ring × windows",
        lambda c: c.mesh.cp > 1 and c.strategy.context_method() == "ring" and c.facts is not None and c.facts.windows,
        "ring attention in torch takes no mask, and this model has layers with windows of their own",
        "use ulysses",
        phase="model",
    ),
    Rule(
        "activation checkpointing × the model",
        lambda c: c.config.memory.activation_checkpointing != "none" and c.facts is not None and not c.facts.recomputes,
        lambda c: f"{c.facts.name} has no activation checkpointing" if c.facts else "",
        "set it to none, or use a smaller micro-batch",
        "memory.activation_checkpointing",
        "model",
    ),
)

# What only a run of the model shows. Its reason is found there.
NO_STAGES = Rule("pp × the model", bool, "", "use strategy: fsdp2 or tp instead", phase="rank")
NO_PARTS = Rule("cp × the model", bool, "", "use fsdp2, ddp or pp without cp", phase="rank")
NO_PACKS = Rule("packing × the model", bool, "", "set data.packing: false for this model", "data.packing", "rank")


def _vllm(case: Case) -> VLLMGenerator | None:
    generator = case.config.algorithm.rollout and case.config.algorithm.rollout.generator
    return generator if isinstance(generator, VLLMGenerator) else None
