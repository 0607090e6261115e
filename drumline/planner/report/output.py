"""The answer as JSON with every number (explained in docs/plan_reference.md), the YAML and the command that train by a candidate, and the
whole file of `drumline init`. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from drumline import __version__
from drumline.core.algorithm import AlgorithmSpec
from drumline.core.config import Config
from drumline.core.estimate import Estimate
from drumline.core.explain import flow
from drumline.core.registry import kinds_alone
from drumline.core.unadapted import find_unadapted
from drumline.core.yaml_lines import write_yaml
from drumline.hardware.catalog import DEVICES, HOST_NETWORK, LINKS, usual_host_memory
from drumline.hardware.cluster import DeviceSpec, Link
from drumline.planner.search.advice import Adapted, Change
from drumline.planner.search.answer import GB, Answer, Candidate, Question, number
from drumline.planner.search.auto import disagreements, risk, with_little_room

VERSION = 1  # of the JSON, whose keys stay
# Sections that a layout sets. What else is in a candidate's config is the user's own.
CHOSEN = ("strategy", "batch", "memory", "precision", "compile")
SCHEMA = "drumline.schema.json"
# Sections in their order, and what stands above them.
SECTIONS = {
    "model": "What to start from: a folder, a hub id, or package:NAME. `init: random` starts from nothing.",
    "algorithm": "What is learned: {algorithms}; `drumline schema` has their options.",
    "data": "A row of the data has {columns}; other names are mapped by `columns`. max_length: tokens of a row.",
    "adapter": "LoRA: the model's own weights stay as they are. all-linear, r 16 and alpha 32 where nothing else is set.",
    "cluster": "What was planned for. Without it: the devices that are found where the run starts.",
    "strategy": "{why}",
    "memory": "Activations: full keeps a block's input and computes the block again in backward; selective keeps more.",
    "batch": "Of an optimizer step: global_samples = micro_batch × accumulation × data ranks.",
    "precision": "The type to compute in; trainable weights stay fp32.",
    "optimizer": "A usual rate to begin with; look at the first losses.",
    "schedule": None,
    "checkpoint": "The newest two are kept, and the best; `drumline train FILE --resume` goes on from the newest.",
    "run": "The run's folder is runs/<name of this file>.",
}


def to_use(
    config: Config, candidate: Candidate, path: Path | None, given: Iterable[str] = ()
) -> str:
    """The command that trains by it (a YAML was given), or the YAML to write (none was). `given`: overrides
    of the YAML."""
    if path is not None:
        kept = [
            override
            for override in given
            if override.partition("=")[0].partition(".")[0] != "strategy"
        ]
        return f"To train by {candidate.name}:\n  {shlex.join(['drumline', 'train', str(path), *kept, *overrides(config, candidate)])}"
    lines = [
        line + "  # yours" * line.endswith("path: data.jsonl")
        for line in write_yaml(full_config(config, candidate)).splitlines()
    ]
    return "\n".join(
        [
            f"To train by {candidate.name}, in a YAML (`drumline init` writes it):",
            *(f"  {line}" for line in lines),
        ]
    )


def needs_gb(estimate: Estimate, digits: int = 1) -> str:
    """What a device needs in GB, with both ends, these with `digits` behind the point."""
    low, high = (each / GB for each in estimate.needs)
    return f"{estimate.memory.reserved / GB:.1f}" + (
        f" ({low:.{digits}f}-{high:.{digits}f})" if low != high else ""
    )


def why(answer: Answer) -> str:
    """The first candidate of an answer in a sentence, and the second."""
    first, *next_ones = answer.ranked
    estimate = first.estimate
    share = f"needs {needs_gb(estimate)} of {estimate.limit / GB:.1f} GB a device"
    text = f"{first.name}: {share}, {number(estimate.seconds.total)} s a step, {estimate.tokens_per_s:,.0f} tokens/s"
    if estimate.verdict == "tight":
        text += f"; that is tight: {risk(first)}"
    text += (
        f". Second: {next_ones[0].name}, {next_ones[0].estimate.tokens_per_s:,.0f} tokens/s."
        if next_ones
        else "."
    )
    return text + (f" {line[0].upper()}{line[1:]}." if (line := with_little_room(answer)) else "")


def file(answer: Answer, name: str) -> str:
    """The commented YAML of `drumline init`: what was planned for, and the first of the answer. `name`: of the file."""
    config, first = answer.question.config, answer.ranked[0]
    # LoRA's factors start at nothing and take ten times as much (Hu et al. 2021, section D).
    rate = config.algorithm.rate * (10 if config.adapter.kind == "lora" else 1)
    usual = {
        "optimizer": {"lr": rate},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.03},
        "run": {"epochs": 1},
    }
    values = {"algorithm": config.algorithm.kind, **usual, **full_config(config, first)}
    texts = {
        "why": f"Chosen by `drumline plan`. {why(answer)} `auto` chooses anew at each start.",
        "columns": config.algorithm.columns,
        "algorithms": " or ".join(", ".join(kinds_alone(AlgorithmSpec)).rsplit(", ", 1)),
    }
    lines = [
        f"# yaml-language-server: $schema=./{SCHEMA}",
        f"# Written by `drumline init` {__version__}. See all plans: drumline plan {name}",
        f"# Train: drumline train {name} (--dry-run only shows what would happen)",
    ]
    for section in dict.fromkeys([*SECTIONS, *values]):
        if section in values:
            about = SECTIONS.get(section)
            comment = (
                wrap(about.format(**texts), 116, break_long_words=False, break_on_hyphens=False)
                if about
                else []
            )
            value = values[section]
            short = value["kind"] if isinstance(value, dict) and set(value) == {"kind"} else value
            lines += ["", *(f"# {line}" for line in comment), write_yaml({section: short}).rstrip()]
    return "\n".join(lines) + "\n"


def chosen(candidate: Candidate) -> dict[str, Any]:
    """The sections of a YAML that set this layout, defaults left out."""
    layout, strategy = candidate.layout, candidate.layout.strategy
    values: dict[str, Any] = {
        "strategy": {
            "kind": strategy.kind,
            **strategy.model_dump(mode="json", exclude_defaults=True),
        }
    }
    batch = layout.batch
    values["batch"] = {"global_samples": batch.global_samples, "micro_batch": batch.micro_batch}
    for name in ("memory", "precision", "compile", "checkpoint"):
        if section := getattr(candidate.config, name).model_dump(
            mode="json", exclude_defaults=True
        ):
            values[name] = section
    return values


def full_config(config: Config, candidate: Candidate) -> dict[str, Any]:
    """The planned config with this layout: all that the user set, and the layout's sections over it."""
    values = config.model_dump(mode="json", exclude_unset=True)
    made = {key: value for key, value in values.items() if key not in CHOSEN} | chosen(candidate)
    if (ranks := _named_ranks(config, candidate)) is not None:
        made["launch"] = {**made.get("launch", {}), "nproc": ranks}
    return {key: value for key, value in made.items() if value not in ({}, None)}


def _named_ranks(config: Config, candidate: Candidate) -> int | None:
    """Ranks of a host where `launch` has to say them, or says others: by itself it starts one a GPU, and without GPUs one."""
    layout, described, nproc = candidate.layout, config.cluster, config.launch.nproc
    if nproc is not None:
        here = max(1, layout.mesh.world_size // (described.nodes if described else 1))
        return None if here == nproc else here
    alone = layout.device == "cuda" or layout.mesh.world_size == 1
    return None if alone or described is None else described.per_node


def overrides(config: Config, candidate: Candidate) -> list[str]:
    """The overrides with which the planned config trains as this candidate does."""
    batch, memory = candidate.layout.batch, candidate.config.memory
    made = ["strategy=" + flow(chosen(candidate)["strategy"])]
    for key in ("activation_checkpointing", "checkpointed_blocks", "on_oom"):
        if getattr(memory, key) != getattr(config.memory, key):
            made.append(f"memory.{key}={getattr(memory, key)}")
    for key in ("export", "export_adapter"):
        value = getattr(candidate.layout.config.checkpoint, key)
        if value != getattr(config.checkpoint, key):
            made.append(f"checkpoint.{key}={str(value).lower()}")
    for key in ("global_samples", "micro_batch", "accumulation"):
        given = getattr(config.batch, key)
        if given != getattr(batch, key) and not (
            key == "global_samples" and config.batch.global_tokens is not None
        ):
            made.append(f"batch.{key}={getattr(batch, key)}")
    ranks = _named_ranks(config, candidate)
    return made if ranks is None else [*made, f"launch.nproc={ranks}"]


def as_json(
    answer: Answer,
    tokens: float | None = None,
    changes: Sequence[Change] = (),
    adapted: Sequence[Adapted] = (),
) -> dict[str, Any]:
    """The answer in bytes, seconds, tokens and FLOPs, never scaled. `changes`: what would make it fit, where nothing does."""
    question, facts, cluster = answer.question, answer.question.facts, answer.question.cluster
    return {
        "version": VERSION,
        "model": {
            "id": question.config.model.id,
            "type": facts.name,
            "parameters": facts.parameters,
            "learned": facts.trainable,
            "unadapted": [
                {**group._asdict(), "share": group.share}
                for group in find_unadapted(facts, question.config.adapter)
            ],
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
            "host_memory_assumed": cluster.host_memory_assumed,
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
            {
                "name": r.name,
                "reason": r.reason,
                "best": candidate(question, r.best, tokens) if r.best else None,
            }
            for r in answer.refused
        ],
        "tight": candidate(question, answer.tight, tokens) if answer.tight else None,
        "adapters": [
            {
                "adapter": each.name.lower(),
                "best": candidate(question, each.best, tokens) if each.best else None,
                "max_length": each.longest.number if each.longest else None,
            }
            for each in adapted
        ],
        "looked_at": answer.looked_at,
        "guides": [
            {"guide": d.heuristic, "says": d.says, "reason": d.reason}
            for d in disagreements(answer)
        ],
        "changes": [
            {"what": c.what, "candidate": candidate(question, c.found, tokens)} for c in changes
        ],
        "probes": [probe.model_dump(mode="json") for probe in answer.probes],
    }


def candidate(question: Question, found: Candidate, tokens: float | None = None) -> dict[str, Any]:
    layout, estimate = found.layout, found.estimate
    return {
        "name": found.name,
        "verdict": estimate.verdict,
        "risk": estimate.risk,
        "strategy": found.config.strategy.model_dump(mode="json"),
        "mesh": layout.mesh.model_dump(mode="json"),
        "devices": found.devices,
        "micro_batch": layout.batch.micro_batch,
        "accumulation": layout.batch.accumulation,
        "global_samples": layout.batch.global_samples,
        "activation_checkpointing": layout.activation_checkpointing,
        "precision": layout.precision,
        "compile": bool(layout.config.compile.enabled),
        "steps": layout.steps,
        "tokens_per_step": layout.tokens_per_step,
        "memory": estimate.memory.model_dump(mode="json"),
        "needs": estimate.needs,
        "memory_limit": estimate.limit,
        "host": estimate.host.model_dump(mode="json"),
        "host_limit": estimate.host_limit,
        "seconds": {**estimate.seconds.model_dump(mode="json"), "total": estimate.seconds.total},
        "startup_seconds": estimate.startup,
        "seconds_range": [end * estimate.seconds.total for end in estimate.seconds_range],
        "traffic": {**estimate.traffic.model_dump(mode="json"), "total": estimate.traffic.total},
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_range": [
            estimate.tokens_per_s / end for end in reversed(estimate.seconds_range)
        ],
        "mfu": estimate.mfu,
        "hours": found.hours(tokens),
        "cost": found.cost(question.cluster.price_per_device_hour, tokens),
        "config": chosen(found),
    }


def catalog() -> dict[str, Any]:
    """The devices and links of the catalog."""
    devices = []
    for spec in DEVICES.values():
        host_bytes, host_source = usual_host_memory(spec)
        usual = {"intra": spec.intra, "host_link": spec.host_link, "source": spec.source}
        devices.append(
            _device(spec)
            | usual
            | {"host_memory_bytes": host_bytes, "host_memory_source": host_source}
        )
    links = [
        _link(link) | {"reached": link.efficiency, "source": link.source} for link in LINKS.values()
    ]
    networks = [
        {"intra": intra, "inter": network, "source": source}
        for intra, (network, source) in HOST_NETWORK.items()
    ]
    return {"version": VERSION, "devices": devices, "links": links, "networks": networks}


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
