"""The planner's answer as JSON, as overrides of a YAML, and as the YAML that `drumline init` writes.

All functions are pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.config import Config
from drumline.config.registry import kinds_alone
from drumline.hardware.catalog import DEVICES, HOST_NETWORK, LINKS, usual_host_memory
from drumline.hardware.cluster import DeviceSpec, Link
from drumline.plan.estimate import Estimate
from drumline.plan.explain import flow_style
from drumline.plan.unadapted import find_unadapted
from drumline.planner.adapter_size import adapter_size
from drumline.planner.search.advice import Change, ModeResult
from drumline.planner.search.answer import GB, Answer, Candidate, Question, number
from drumline.planner.search.auto import describe_faster_tight_plan, disagreements, risk
from drumline.planner.search.pure_bf16 import PureBF16
from drumline.system.yaml_lines import write_yaml
from drumline.version import __version__

# Version of the JSON. Scripts read it, so its keys keep their names, also older words such as `guides`.
VERSION = 1
# Sections that a layout sets. All other sections of a candidate's config are the user's own.
LAYOUT_SECTIONS = ("strategy", "batch", "memory", "precision", "compile")
# Keys of the section `memory` that a layout sets.
LAYOUT_KEYS_OF_MEMORY = (
    "activation_checkpointing",
    "checkpointed_blocks",
    "activation_offload",
    "mlp_chunk",
    "on_oom",
)
SCHEMA = "drumline.schema.json"
# Characters of a comment line in the file of `drumline init`, without the leading `# `.
COMMENT_WIDTH = 116
# LoRA's factors start at zero and take ten times the learning rate (Hu et al. 2021, section D).
LORA_RATE_FACTOR = 10
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


def describe_use(
    config: Config, candidate: Candidate, path: Path | None, given: Iterable[str] = ()
) -> str:
    """Return the text that says how to train by a candidate.

    It is a command if a YAML was given, else a YAML.

    `path`: the YAML that was planned for; None: there was none.
    `given`: the overrides of that YAML.
    """
    if path is None:
        return _yaml_to_use(config, candidate)
    # The candidate's own strategy takes the place of the user's.
    other_overrides = [override for override in given if not _sets_strategy(override)]
    command = ["drumline", "train", str(path), *other_overrides, *overrides(config, candidate)]
    return f"To train by {candidate.name}:\n  {shlex.join(command)}"


def _sets_strategy(override: str) -> bool:
    """Return whether an override such as `strategy.tp=2` sets a key of the section `strategy`."""
    key = override.partition("=")[0]
    section = key.partition(".")[0]
    return section == "strategy"


def _yaml_to_use(config: Config, candidate: Candidate) -> str:
    """Return the YAML that trains by a candidate, as indented lines below a heading."""
    lines = [f"To train by {candidate.name}, in a YAML (`drumline init` writes it):"]
    text = write_yaml(full_config(config, candidate))
    for line in text.splitlines():
        remark = ""
        # A plan by flags alone has a placeholder in the place of the data.
        if line.endswith("path: data.jsonl"):
            remark = "  # yours"
        lines.append(f"  {line}{remark}")
    return "\n".join(lines)


def needs_gb(estimate: Estimate, digits: int = 1) -> str:
    """Return the GB that a device needs, with both ends of the range in brackets: `61.2 (58.0-66.3)`.

    `digits`: decimal places of the two ends.
    """
    needed = f"{estimate.memory.reserved / GB:.1f}"
    low, high = estimate.needs
    low_gb = low / GB
    high_gb = high / GB
    # A range without width is none.
    if low_gb == high_gb:
        return needed
    return f"{needed} ({low_gb:.{digits}f}-{high_gb:.{digits}f})"


def explain_choice(answer: Answer) -> str:
    """Return one or two sentences on the first candidate of an answer and on the second."""
    first = answer.ranked[0]
    estimate = first.estimate
    memory = f"needs {needs_gb(estimate)} of {estimate.limit / GB:.1f} GB a device"
    step = f"{number(estimate.seconds.total)} s a step"
    text = f"{first.name}: {memory}, {step}, {estimate.tokens_per_s:,.0f} tokens/s"
    if estimate.verdict == "tight":
        text += f"; that is tight: {risk(first)}"
    text += "."
    if len(answer.ranked) > 1:
        second = answer.ranked[1]
        text += f" Second: {second.name}, {second.estimate.tokens_per_s:,.0f} tokens/s."
    line = describe_faster_tight_plan(answer)
    if line:
        text += f" {line[0].upper()}{line[1:]}."
    return text


def commented_yaml(answer: Answer, name: str) -> str:
    """Return the YAML that `drumline init` writes.

    It has what was planned for and the first plan, with comments.

    `name`: of the file, for the commands in its head.
    """
    config = answer.question.config
    values = {"algorithm": config.algorithm.kind}
    values |= _usual_training(config)
    values |= full_config(config, answer.ranked[0])
    # The last two kinds are joined by "or", the others by commas.
    algorithms = ", ".join(kinds_alone(AlgorithmSpec)).rsplit(", ", 1)
    texts = {
        "why": f"Chosen by `drumline plan`. {explain_choice(answer)} `auto` chooses anew at each start.",
        "columns": config.algorithm.columns,
        "algorithms": " or ".join(algorithms),
    }
    lines = [
        f"# yaml-language-server: $schema=./{SCHEMA}",
        f"# Written by `drumline init` {__version__}. See all plans: drumline plan {name}",
        f"# Train: drumline train {name} (--dry-run only shows what would happen)",
    ]
    # Known sections in their order, then the others.
    for section in dict.fromkeys([*SECTIONS, *values]):
        if section in values:
            lines.append("")
            lines += _section_lines(section, values[section], texts)
    return "\n".join(lines) + "\n"


def _usual_training(config: Config) -> dict[str, Any]:
    """Return the sections that a first run usually has: a learning rate, a schedule and one epoch."""
    rate = config.algorithm.rate
    if config.adapter.kind == "lora":
        rate *= LORA_RATE_FACTOR
    return {
        "optimizer": {"lr": rate},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.03},
        "run": {"epochs": 1},
    }


def _section_lines(section: str, value: Any, texts: Mapping[str, str]) -> list[str]:
    """Return a section of the YAML as lines, its comment above it.

    `texts`: what the placeholders of SECTIONS stand for.
    """
    lines = []
    about = SECTIONS.get(section)
    if about:
        comment = about.format(**texts)
        for line in wrap(comment, COMMENT_WIDTH, break_long_words=False, break_on_hyphens=False):
            lines.append(f"# {line}")
    # A section that only names its kind is written short: `strategy: ddp`.
    if isinstance(value, dict) and set(value) == {"kind"}:
        value = value["kind"]
    lines.append(write_yaml({section: value}).rstrip())
    return lines


def sections_of_layout(candidate: Candidate) -> dict[str, Any]:
    """Return the sections of a YAML that set a candidate's layout, without values that are defaults."""
    strategy = candidate.layout.strategy
    batch = candidate.layout.batch
    options = strategy.model_dump(mode="json", exclude_defaults=True)
    sections: dict[str, Any] = {
        "strategy": {"kind": strategy.kind, **options},
        "batch": {"global_samples": batch.global_samples, "micro_batch": batch.micro_batch},
    }
    for name in ("memory", "precision", "compile", "checkpoint"):
        section = getattr(candidate.config, name).model_dump(mode="json", exclude_defaults=True)
        if section:
            sections[name] = section
    return sections


def full_config(config: Config, candidate: Candidate) -> dict[str, Any]:
    """Return the keys of a config that trains by a candidate.

    They are all that the user set, then the layout's sections.

    `config`: the one that was planned for.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    made = {key: value for key, value in values.items() if key not in LAYOUT_SECTIONS}
    made |= sections_of_layout(candidate)
    ranks = _ranks_to_name(config, candidate)
    if ranks is not None:
        launch = made.get("launch", {})
        made["launch"] = {**launch, "nproc": ranks}
    return {key: value for key, value in made.items() if value not in ({}, None)}


def _ranks_to_name(config: Config, candidate: Candidate) -> int | None:
    """Return the ranks of a host that `launch.nproc` has to be set to; None if it is right as it is.

    By itself the launcher starts one rank a GPU, and without GPUs a single one.
    """
    described = config.cluster
    nproc = config.launch.nproc
    world_size = candidate.layout.mesh.world_size
    if nproc is not None:
        hosts = 1
        if described is not None:
            hosts = described.nodes
        ranks = max(1, world_size // hosts)
        if ranks == nproc:
            return None
        return ranks
    is_usual = candidate.layout.device == "cuda" or world_size == 1
    if is_usual or described is None:
        return None
    return described.per_node


def overrides(config: Config, candidate: Candidate) -> list[str]:
    """Return the overrides with which the planned config trains as a candidate does."""
    strategy = sections_of_layout(candidate)["strategy"]
    made = ["strategy=" + flow_style(strategy)]
    memory = candidate.config.memory
    for key in LAYOUT_KEYS_OF_MEMORY:
        value = getattr(memory, key)
        if value != getattr(config.memory, key):
            made.append(f"memory.{key}={flow_style(value)}")
    if candidate.config.compile.enabled and not config.compile.enabled:
        made.append("compile.enabled=true")
    for key in ("export", "export_adapter"):
        value = getattr(candidate.layout.config.checkpoint, key)
        if value != getattr(config.checkpoint, key):
            made.append(f"checkpoint.{key}={str(value).lower()}")
    made += _batch_overrides(config, candidate)
    ranks = _ranks_to_name(config, candidate)
    if ranks is not None:
        made.append(f"launch.nproc={ranks}")
    return made


def _batch_overrides(config: Config, candidate: Candidate) -> list[str]:
    """Return the overrides of the section `batch` that a candidate needs."""
    made = []
    for key in ("global_samples", "micro_batch", "accumulation"):
        # A batch that is set in tokens has its number of samples from these.
        follows_tokens = key == "global_samples" and config.batch.global_tokens is not None
        value = getattr(candidate.layout.batch, key)
        if value != getattr(config.batch, key) and not follows_tokens:
            made.append(f"batch.{key}={value}")
    return made


def answer_as_json(
    answer: Answer,
    tokens: float | None = None,
    changes: Sequence[Change] = (),
    modes: Sequence[ModeResult] = (),
    pure_bf16: PureBF16 | None = None,
) -> dict[str, Any]:
    """Return the answer of `drumline plan --json`, in bytes, seconds, tokens and FLOPs, never scaled.

    `tokens`: of the whole run; None: those of its steps.
    `changes`: what would make it fit, if nothing does.
    `modes`: the results of full training, LoRA and QLoRA.
    `pure_bf16`: the best plan with weights and moments in bf16, if it differs much.
    """
    question = answer.question

    def as_json(candidate: Candidate | None) -> dict[str, Any] | None:
        """Return a candidate with its estimate; None if there is none."""
        if candidate is None:
            return None
        return candidate_as_json(question, candidate, tokens)

    refused = []
    for family in answer.refused:
        best = as_json(family.best)
        refused.append({"name": family.name, "reason": family.reason, "best": best})
    adapters = []
    for each in modes:
        longest = None
        if each.longest is not None:
            longest = each.longest.number
        best = as_json(each.best)
        adapters.append({"adapter": each.name.lower(), "best": best, "max_length": longest})
    heuristics = []
    for other in disagreements(answer):
        heuristics.append({"guide": other.heuristic, "says": other.says, "reason": other.reason})
    helpful = []
    for change in changes:
        helpful.append({"what": change.what, "candidate": as_json(change.candidate)})
    in_bf16 = None
    if pure_bf16 is not None:
        in_bf16 = as_json(pure_bf16.candidate)
    return {
        "version": VERSION,
        "model": _model_as_json(question),
        "cluster": _cluster_as_json(question),
        "task": _task_as_json(question),
        "ranked": [as_json(candidate) for candidate in answer.ranked],
        "refused": refused,
        "tight": as_json(answer.tight),
        "adapters": adapters,
        "pure_bf16": in_bf16,
        "looked_at": answer.looked_at,
        "estimated": answer.estimated,
        "guides": heuristics,
        "changes": helpful,
        "probes": [probe.model_dump(mode="json") for probe in answer.probes],
    }


def _model_as_json(question: Question) -> dict[str, Any]:
    """Return the model's sizes, and the modules that an adapter leaves out."""
    facts = question.facts
    unadapted = []
    for group in find_unadapted(facts, question.config.adapter):
        unadapted.append({**group._asdict(), "share": group.share})
    adapter = adapter_size(facts, question.config)
    return {
        "id": question.config.model.id,
        "type": facts.name,
        "parameters": facts.parameters,
        "learned": facts.trainable,
        "unadapted": unadapted,
        "adapter": adapter and adapter._asdict(),
        "layers": facts.layers,
        "hidden": facts.hidden,
        "vocabulary": facts.vocab_size,
        "flops_per_token": facts.flops_per_token,
        "roles": {name: {"parameters": role.parameters} for name, role in facts.roles.items()},
    }


def _cluster_as_json(question: Question) -> dict[str, Any]:
    """Return the cluster: its devices, links, hosts and price."""
    cluster = question.cluster
    return {
        **_device_as_json(cluster.device),
        "per_node": cluster.per_node,
        "nodes": cluster.nodes,
        "intra": _link_as_json(cluster.intra),
        "inter": _link_as_json(cluster.inter),
        "host_link": _link_as_json(cluster.host_link),
        "host_memory_bytes": cluster.host_memory_bytes,
        "host_memory_assumed": cluster.host_memory_assumed,
        "price_per_device_hour": cluster.price_per_device_hour,
        "found_here": cluster.is_this_machine,
    }


def _task_as_json(question: Question) -> dict[str, Any]:
    """Return what is trained on: the algorithm, and what is known of the data."""
    data = None
    if question.data is not None:
        data = question.data.model_dump(mode="json")
    return {
        "algorithm": question.config.algorithm.kind,
        "max_length": question.config.data.max_length,
        "data": data,
    }


def candidate_as_json(
    question: Question, candidate: Candidate, tokens: float | None = None
) -> dict[str, Any]:
    """Return a candidate with its whole estimate, in bytes, seconds, tokens and FLOPs.

    `tokens`: of the run whose hours and cost are given; None: those of its steps.
    """
    layout = candidate.layout
    estimate = candidate.estimate
    seconds = estimate.seconds
    traffic = estimate.traffic
    fastest, slowest = estimate.seconds_range
    return {
        "name": candidate.name,
        "verdict": estimate.verdict,
        "risk": estimate.risk,
        "strategy": candidate.config.strategy.model_dump(mode="json"),
        "mesh": layout.mesh.model_dump(mode="json"),
        "devices": candidate.devices,
        "micro_batch": layout.batch.micro_batch,
        "accumulation": layout.batch.accumulation,
        "global_samples": layout.batch.global_samples,
        "activation_checkpointing": layout.activation_checkpointing,
        "checkpointed_blocks": layout.config.memory.checkpointed_blocks,
        "activation_offload": layout.config.memory.activation_offload,
        "mlp_chunk": layout.config.memory.mlp_chunk,
        "precision": layout.precision,
        "compile": bool(layout.config.compile.enabled),
        "steps": layout.steps,
        "tokens_per_step": layout.tokens_per_step,
        "memory": estimate.memory.model_dump(mode="json"),
        "needs": estimate.needs,
        "memory_limit": estimate.limit,
        "host": estimate.host.model_dump(mode="json"),
        "host_limit": estimate.host_limit,
        "seconds": {**seconds.model_dump(mode="json"), "total": seconds.total},
        "startup_seconds": estimate.startup,
        "seconds_range": [fastest * seconds.total, slowest * seconds.total],
        "traffic": {**traffic.model_dump(mode="json"), "total": traffic.total},
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_range": [estimate.tokens_per_s / slowest, estimate.tokens_per_s / fastest],
        "mfu": estimate.mfu,
        "hours": candidate.hours(tokens),
        "cost": candidate.cost(question.cluster.price_per_device_hour, tokens),
        "config": sections_of_layout(candidate),
    }


def catalog_as_json() -> dict[str, Any]:
    """Return the devices, links and networks of the catalog, with their sources."""
    devices = []
    for spec in DEVICES.values():
        host_bytes, host_source = usual_host_memory(spec)
        device = _device_as_json(spec)
        device["intra"] = spec.intra
        device["host_link"] = spec.host_link
        device["source"] = spec.source
        device["host_memory_bytes"] = host_bytes
        device["host_memory_source"] = host_source
        devices.append(device)
    links = []
    for link in LINKS.values():
        links.append({**_link_as_json(link), "reached": link.efficiency, "source": link.source})
    networks = []
    for intra, (network, source) in HOST_NETWORK.items():
        networks.append({"intra": intra, "inter": network, "source": source})
    return {"version": VERSION, "devices": devices, "links": links, "networks": networks}


def _device_as_json(spec: DeviceSpec) -> dict[str, Any]:
    """Return a device's datasheet, in bytes and FLOP/s."""
    return {
        "device": spec.name,
        "kind": spec.kind,
        "memory_bytes": spec.memory_bytes,
        "memory_bytes_per_s": spec.bandwidth,
        "flops": dict(spec.flops),
    }


def _link_as_json(link: Link) -> dict[str, Any]:
    """Return a link's datasheet: bytes per second one way, and seconds of latency."""
    return {"name": link.name, "bytes_per_s": link.bandwidth, "latency_s": link.latency}
