"""Metrics of a candidate: hours, cost, gradients at the peak; and the YAML that sets it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drumline.core.config import Config
from drumline.core.estimate import Memory
from drumline.core.explain import flow
from drumline.planner.search.answer import Candidate, Question

GB = 1e9
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
SECONDS = ("compute", "communication", "bubble", "optimizer", "offload", "rollout")
# Sections that a layout sets. What else is in a candidate's config is the user's own.
CHOSEN = ("strategy", "batch", "memory", "precision", "compile")


def hours(candidate: Candidate, tokens: float | None = None) -> float | None:
    """Of the run: of `tokens` trained on where given, else of its steps; None where neither is known."""
    estimate, steps = candidate.estimate, candidate.layout.steps
    if tokens is not None:
        return tokens / estimate.tokens_per_s / 3600
    return None if steps is None else steps * estimate.seconds.total / 3600


def cost(question: Question, candidate: Candidate, tokens: float | None = None) -> float | None:
    """Of the run, in the currency of the price; None where price or length of the run is not known."""
    price, time = question.cluster.price_per_device_hour, hours(candidate, tokens)
    return None if price is None or time is None else price * time * devices(candidate)


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason → all that have it, in their order."""
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason, []).append(name)
    return found


def devices(candidate: Candidate) -> int:
    return candidate.layout.mesh.world_size * candidate.layout.devices_per_rank


def gradients_at_peak(memory: Memory) -> int:
    """Bytes of gradients at the peak: before backward's end not all exist. `memory.gradients` counts all."""
    rest = sum(getattr(memory, name) for name in CATEGORIES if name not in ("gradients", "overhead"))
    return min(memory.gradients, max(0, memory.peak - rest))


def mesh_degrees(candidate: Candidate) -> str:
    """The degrees that are not 1: `shard 4 · tp 2`."""
    degrees = [f"{name} {size}" for name, size in candidate.layout.mesh.model_dump().items() if size > 1]
    return " · ".join(degrees) or "1"


def chosen(candidate: Candidate) -> dict[str, Any]:
    """The sections of a YAML that set this layout, defaults left out."""
    layout, strategy = candidate.layout, candidate.layout.strategy
    values: dict[str, Any] = {"strategy": {"kind": strategy.kind, **strategy.model_dump(mode="json", exclude_defaults=True)}}
    batch = layout.batch
    values["batch"] = {"global_samples": batch.global_samples, "micro_batch": batch.micro_batch}
    for name in ("memory", "precision", "compile"):
        if section := getattr(candidate.config, name).model_dump(mode="json", exclude_defaults=True):
            values[name] = section
    return values


def full_config(config: Config, candidate: Candidate) -> dict[str, Any]:
    """The planned config with this layout: all that the user set, and the layout's sections over it."""
    values = config.model_dump(mode="json", exclude_unset=True)
    made = {key: value for key, value in values.items() if key not in CHOSEN} | chosen(candidate)
    return {key: value for key, value in made.items() if value not in ({}, None)}


def overrides(config: Config, candidate: Candidate) -> list[str]:
    """The overrides with which the planned config trains as this candidate does."""
    batch, checkpointing = candidate.layout.batch, candidate.layout.activation_checkpointing
    made = ["strategy=" + flow(chosen(candidate)["strategy"])]
    if checkpointing != config.memory.activation_checkpointing:
        made.append(f"memory.activation_checkpointing={checkpointing}")
    for key in ("global_samples", "micro_batch", "accumulation"):
        given = getattr(config.batch, key)
        if given != getattr(batch, key) and not (key == "global_samples" and config.batch.global_tokens is not None):
            made.append(f"batch.{key}={getattr(batch, key)}")
    return made
