"""The answer as JSON: every number, with keys that stay. docs/planning.md says what each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.hardware.catalog import DEVICES, LINKS
from drumline.hardware.cluster import DeviceSpec, Link
from drumline.planner.report.yaml_output import chosen
from drumline.planner.search.advice import Change
from drumline.planner.search.answer import Answer, Candidate, Question
from drumline.planner.search.auto import disagreements

VERSION = 1


def as_json(answer: Answer, tokens: float | None = None, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """The answer in bytes, seconds, tokens and FLOPs, never scaled. `changes`: what would make it fit, where nothing does."""
    question, facts, cluster = answer.question, answer.question.facts, answer.question.cluster
    return {
        "version": VERSION,
        "model": {
            "id": question.config.model.id,
            "type": facts.name,
            "parameters": facts.parameters,
            "learned": facts.trainable,
            "layers": facts.layers,
            "hidden": facts.hidden,
            "vocabulary": facts.vocab_size,
            "flops_per_token": facts.flops_per_token,
            "roles": {name: {"parameters": f.parameters} for name, f in facts.roles.items()},
        },
        "cluster": {
            **_device(cluster.device),
            "per_node": cluster.per_node,
            "nodes": cluster.nodes,
            "intra": _link(cluster.intra),
            "inter": _link(cluster.inter),
            "host_link": _link(cluster.host_link),
            "host_memory_bytes": cluster.host_memory_bytes,
            "price_per_device_hour": cluster.price_per_device_hour,
            "found_here": cluster.found,
        },
        "task": {
            "algorithm": question.config.algorithm.kind,
            "max_length": question.config.data.max_length,
            "data": None if question.data is None else question.data.model_dump(mode="json"),
        },
        "ranked": [candidate(question, c, tokens) for c in answer.ranked],
        "refused": [
            {"name": r.name, "reason": r.reason, "best": candidate(question, r.best, tokens) if r.best else None} for r in answer.refused
        ],
        "tight": candidate(question, answer.tight, tokens) if answer.tight and not answer.probes else None,
        "looked_at": answer.looked_at,
        "guides": [{"guide": d.heuristic, "says": d.says, "reason": d.reason} for d in disagreements(answer)],
        "changes": [{"what": c.what, "candidate": candidate(question, c.found, tokens)} for c in changes],
        "probes": [probe.model_dump(mode="json") for probe in answer.probes],
    }


def candidate(question: Question, found: Candidate, tokens: float | None = None) -> dict[str, Any]:
    """The numbers of one candidate."""
    layout, estimate = found.layout, found.estimate
    return {
        "name": found.name,
        "verdict": estimate.verdict,
        "strategy": found.config.strategy.model_dump(mode="json"),
        "mesh": layout.mesh.model_dump(mode="json"),
        "devices": found.devices,
        "micro_batch": layout.batch.micro_batch,
        "accumulation": layout.batch.accumulation,
        "global_samples": layout.batch.global_samples,
        "activation_checkpointing": layout.activation_checkpointing,
        "precision": layout.precision,
        "steps": layout.steps,
        "tokens_per_step": layout.tokens_per_step,
        "memory": estimate.memory.model_dump(mode="json"),
        "memory_limit": estimate.limit,
        "host": estimate.host.model_dump(mode="json"),
        "host_limit": estimate.host_limit,
        "seconds": {**estimate.seconds.model_dump(mode="json"), "total": estimate.seconds.total},
        "traffic": {**estimate.traffic.model_dump(mode="json"), "total": estimate.traffic.total},
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "hours": found.hours(tokens),
        "cost": found.cost(question.cluster.price_per_device_hour, tokens),
        "config": chosen(found),
    }


def catalog() -> dict[str, Any]:
    """The devices and links of the catalog."""
    devices = [_device(spec) | {"intra": spec.intra, "host_link": spec.host_link, "source": spec.source} for spec in DEVICES.values()]
    links = [_link(link) | {"reached": link.efficiency, "source": link.source} for link in LINKS.values()]
    return {"version": VERSION, "devices": devices, "links": links}


def _device(spec: DeviceSpec) -> dict[str, Any]:
    return {
        "device": spec.name,
        "kind": spec.kind,
        "memory_bytes": spec.memory_bytes,
        "memory_bytes_per_s": spec.bandwidth,
        "flops": dict(spec.flops),
    }


def _link(link: Link) -> dict[str, Any]:
    return {"name": link.name, "bytes_per_s": link.bandwidth, "latency_s": link.latency}
