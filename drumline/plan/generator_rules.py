"""What servers and engines that sample completions cannot be combined with. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.config import LoRAConfig
from drumline.config.refusal import Refusal
from drumline.config.rollouts import ServerGenerator, VLLMGenerator
from drumline.plan.rule import Case

WHERE = "algorithm.generator"
WEIGHTS = "algorithm.generator.weights"
# How to hand over an adapter that no server can load.
INSTEAD = "use generator=hf"


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield why the generator of a case's rollouts is refused."""
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
        yield from _adapter(case)
    if generator.url is None and case.config.model.id is None:
        yield Refusal(
            "vLLM × a model without files",
            "its engine starts from a model's files, and this one has none",
            "use generator=hf, or set model.id",
            WHERE,
        )


def _adapter(case: Case) -> Iterator[Refusal]:
    """Yield refusals of an adapter that is handed to servers which have the base model."""
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
            f"{INSTEAD}, or set model.id to a model with weights, and take model.config out",
            WEIGHTS,
        )
    yield from _unloadable(adapter)
    facts = case.facts
    if facts is None:
        return
    adapted = [weight.name for weight in facts.end_weights if ".lora_" in weight.name]
    for block in facts.block_weights:
        for weight in block:
            if ".lora_" in weight.name and ".experts." in weight.name:
                adapted.append(weight.name)
    if adapted:
        yield Refusal(
            "weights=adapter × an adapter over experts, embedding or head",
            f"whether vLLM loads it depends on its version and on the model: {adapted[0]}",
            f"{INSTEAD}, or name layers of the blocks: adapter.targets=attention",
            WEIGHTS,
        )


def _unloadable(adapter: LoRAConfig) -> Iterator[Refusal]:
    """Yield refusals of adapters that vLLM does not load, or not as they are trained."""
    if adapter.dora:
        yield _refusal("DoRA", "vLLM does not load it", "adapter.dora=false")
    if adapter.init != "zero":
        reason = "it subtracts its first factors from the policy's weights, and servers keep theirs"
        yield _refusal("PiSSA", reason, "adapter.init=zero")
    if adapter.quantize != "none":
        reason = "the policy computes with packed weights, and servers with their own"
        yield _refusal("QLoRA", reason, "adapter.quantize=none")
    if adapter.modules_to_save:
        reason = "vLLM loads no modules that were trained whole"
        yield _refusal("modules_to_save", reason, "take adapter.modules_to_save out")
    if adapter.trainable_tokens:
        reason = "vLLM loads no rows of an embedding"
        fix = "take adapter.trainable_tokens and model.new_tokens out"
        yield _refusal("trainable tokens", reason, fix)
    if adapter.more:
        reason = "vLLM applies one adapter to a request"
        yield _refusal("several adapters", reason, "take adapter.more out")


def _refusal(other: str, reason: str, fix: str) -> Refusal:
    """Return a refusal of `weights: adapter` beside an option of the adapter."""
    return Refusal(f"weights=adapter × {other}", reason, f"{INSTEAD}, or {fix}", WEIGHTS)
