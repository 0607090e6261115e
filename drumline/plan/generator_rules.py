"""Refusals of generators: what servers and engines that sample cannot be combined with. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.config import LoRAConfig
from drumline.config.refusal import Refusal
from drumline.config.rollouts import ServerGenerator, VLLMGenerator
from drumline.plan.rule import Case

WHERE = "algorithm.generator"
WEIGHTS = "algorithm.generator.weights"
# The fix that works for each adapter: sampling without a server.
OTHER_GENERATOR = "use generator=hf"


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield the refusals of a case's generator; none if the algorithm samples nothing."""
    rollout = case.config.algorithm.rollout
    if rollout is None or not isinstance(rollout.generator, ServerGenerator):
        return
    generator = rollout.generator
    adapter = case.config.adapter
    if generator.weights == "folder" and isinstance(adapter, LoRAConfig):
        fix = "use generator=hf, or adapter=none"
        if isinstance(generator, VLLMGenerator) and generator.url is not None:
            fix = f"set {WEIGHTS}=adapter, or {fix}"
        yield Refusal(
            f"{generator.kind} × an adapter",
            "it takes whole weights, and an adapter is kept beside them",
            fix,
            WHERE,
        )
    if generator.weights == "adapter":
        yield from _adapter_refusals(case)
    if generator.url is None and case.config.model.id is None:
        yield Refusal(
            "vLLM × a model without files",
            "its engine starts from a model's files, and this one has none",
            "use generator=hf, or set model.id",
            WHERE,
        )


def _adapter_refusals(case: Case) -> Iterator[Refusal]:
    """Yield refusals of `weights: adapter`, which hands an adapter to servers with the base model."""
    adapter = case.config.adapter
    if not isinstance(adapter, LoRAConfig):
        yield Refusal(
            "weights=adapter × no adapter",
            "there is no adapter to hand over",
            f"use adapter=lora, or {WEIGHTS}=folder",
            WEIGHTS,
        )
        return
    if not case.config.model.as_published:
        yield Refusal(
            "weights=adapter × a model of the run's own",
            "the servers have no base model that the adapter fits",
            f"{OTHER_GENERATOR}, or set model.id to a model with weights, and take model.config out",
            WEIGHTS,
        )
    yield from _refusals_by_vllm(adapter)
    facts = case.facts
    if facts is None:
        return
    unsupported = [weight.name for weight in facts.end_weights if ".lora_" in weight.name]
    for block in facts.block_weights:
        for weight in block:
            if ".lora_" in weight.name and ".experts." in weight.name:
                unsupported.append(weight.name)
    if unsupported:
        yield Refusal(
            "weights=adapter × an adapter over experts, embedding or head",
            f"whether vLLM loads it depends on its version and on the model: {unsupported[0]}",
            f"{OTHER_GENERATOR}, or name layers of the blocks: adapter.targets=attention",
            WEIGHTS,
        )


def _refusals_by_vllm(adapter: LoRAConfig) -> Iterator[Refusal]:
    """Yield refusals of adapters that vLLM cannot load, or would apply differently."""
    if adapter.dora:
        yield _adapter_refusal("DoRA", "vLLM does not load it", "adapter.dora=false")
    if adapter.init != "zero":
        reason = "it subtracts its first factors from the policy's weights, and servers keep theirs"
        yield _adapter_refusal("PiSSA", reason, "adapter.init=zero")
    if adapter.quantize != "none":
        reason = "the policy computes with packed weights, and servers with their own"
        yield _adapter_refusal("QLoRA", reason, "adapter.quantize=none")
    if adapter.modules_to_save:
        reason = "vLLM loads no modules that were trained whole"
        yield _adapter_refusal("modules_to_save", reason, "take adapter.modules_to_save out")
    if adapter.trainable_tokens:
        reason = "vLLM loads no rows of an embedding"
        fix = "take adapter.trainable_tokens and model.new_tokens out"
        yield _adapter_refusal("trainable tokens", reason, fix)
    if adapter.more:
        reason = "vLLM applies one adapter to a request"
        yield _adapter_refusal("several adapters", reason, "take adapter.more out")


def _adapter_refusal(other: str, reason: str, fix: str) -> Refusal:
    """Return the refusal of `weights: adapter` together with an option of the adapter."""
    return Refusal(f"weights=adapter × {other}", reason, f"{OTHER_GENERATOR}, or {fix}", WEIGHTS)
