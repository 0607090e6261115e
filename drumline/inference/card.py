"""The model card of a run's export: the facts that its folder has, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.config.data import HubSource
from drumline.config.load import changed_values
from drumline.errors import ModelError
from drumline.foreign import expand_home, map_leaves, read_object
from drumline.models.export import PROVENANCE
from drumline.plan.explain import count, explain, strategy_name
from drumline.plan.plan import DataPlan, Plan
from drumline.system.redact import redact
from drumline.system.templates import render_text
from drumline.system.yaml_lines import write_yaml
from drumline.telemetry.events import Eval, Event, Step, read

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The start of a path of this machine, up to the / behind its first folder. In these texts it matches
# what is in brackets:
#
#     [/home/]me/rows.jsonl    [~/]rows.jsonl    [file:///data/]rows.jsonl
#
# Addresses, such as s3://bucket/rows.jsonl, do not match: a host follows their scheme.
LOCAL_FOLDER = re.compile(
    r"(?<![\w/.~])(?P<scheme>(?:[A-Za-z][\w+.-]*:+)*)(?:(?:/(?!/)|/{3,}|(?<=file:)//)[^\s/'\"]+/|~[^\s/'\"]*/)"
)
# Keys of a model card for its license, and the most characters of such a value.
LICENSE = ("license", "license_name", "license_link")
MOST_LICENSE_CHARACTERS = 200
# Packages whose versions an export notes.
VERSIONS = ("drumline", "torch", "transformers")


def model_card(run_dir: Path, plan: Plan, folder: Path, to: str, adapter: bool) -> str:
    """Return the text of an export's README.md: YAML for the hub, then Markdown.

    The card is public. It has no secret, and only the last names of paths of this machine.

    Args:
        run_dir: The folder of the run.
        plan: The run's plan.
        folder: The folder of the export.
        to: The export's name on the hub, ORG/NAME.
        adapter: Whether the export has only the adapter.
    """
    config = plan.config
    base, license_keys = base_of(plan)
    # What the export wrote about itself: its step, its dtype, and versions of packages.
    origin = read_object(folder / PROVENANCE, ModelError, f"remove {folder}")
    head = _head(plan, base, license_keys, adapter)
    _, _, name_on_hub = to.rpartition("/")
    start = "random weights"
    if base:
        start = f"`{_code(base)}`"
    run_name = run_dir.resolve().name
    events = read(run_dir / "events.jsonl")
    changed_keys = shorten_paths(_changed_keys(config))
    versions = []
    for package in VERSIONS:
        # An older export may lack one.
        if origin.get(package):
            versions.append(f"{package} {origin[package]}")
    text = render_text(
        "inference/card.md.jinja",
        head=write_yaml(head),
        name=_text(name_on_hub),
        algorithm=config.algorithm.kind,
        start=start,
        form=_form(config, adapter),
        dtype=origin.get("dtype"),
        classes=_classes(plan),
        sources=_sources(config),
        counts=_counts(plan.data),
        notes=_notes(plan),
        measured=_describe_measurements(events, origin.get("step")),
        file=f"{run_name}.yaml",
        config=write_yaml(changed_keys),
        strategy=strategy_name(plan),
        devices=f"{plan.mesh.world_size} × {plan.device}",
        plan=_shorten_paths_of_plan(explain(plan), plan),
        versions=", ".join(versions),
        has_license="license" in license_keys,
    )
    return redact(text)


def _head(
    plan: Plan, base: str | None, license_keys: dict[str, Any], adapter: bool
) -> dict[str, Any]:
    """Return the keys of the card's YAML, which the hub shows and searches by.

    Args:
        plan: The run's plan.
        base: The model that training started from; None: random weights.
        license_keys: Keys of the license, from the base's card.
        adapter: Whether the export has only the adapter.
    """
    config = plan.config
    tags = ["drumline", config.algorithm.kind]
    if config.adapter.kind == "lora":
        tags.append("lora")
    library = config.algorithm.library
    relation = "finetune"
    if adapter:
        library = "peft"
        relation = "adapter"
    head: dict[str, Any] = {**license_keys, "library_name": library}
    task = config.algorithm.task
    if config.algorithm.writes:
        task = "text-generation"
    if task is not None:
        head["pipeline_tag"] = task
    head["tags"] = tags
    hub_datasets = set()
    for source in config.data.train:
        if isinstance(source, HubSource):
            hub_datasets.add(source.id)
    if hub_datasets:
        head["datasets"] = sorted(hub_datasets)
    # A folder's name would be a link to a stranger's model, or to none.
    if base is not None and HUB_ID.fullmatch(base):
        head["base_model"] = base
        head["base_model_relation"] = relation
    return head


def _form(config: Config, adapter: bool) -> str:
    """Return what the export holds, as text. `adapter`: whether it has only the adapter."""
    if adapter:
        return "the adapter alone, for PEFT"
    if config.adapter.kind == "lora":
        return "whole weights, the adapter merged"
    return "whole weights"


def _classes(plan: Plan) -> str | None:
    """Return the table of classes; None if the model has none."""
    if not plan.labels:
        return None
    rows = [("logit", "class")]
    for index, label in enumerate(plan.labels):
        rows.append((str(index), _text(label)))
    return _table(rows)


def _sources(config: Config) -> str:
    """Return the table of the sources of training rows."""
    rows = [("source", "kind")]
    for source in config.data.train:
        rows.append((_source(source), source.kind))
    return _table(rows)


def _notes(plan: Plan) -> list[str]:
    """Return the notes of the data, without paths of this machine."""
    if plan.data is None:
        return []
    return [_text(_shorten_paths_of_plan(line, plan)) for line in plan.data.notes]


def _shorten_paths_of_plan(text: str, plan: Plan) -> str:
    """Return a text in which each path of this machine is cut to its last name.

    Paths that the plan has are replaced first: they may have spaces, so no pattern would find their
    ends.
    """
    values = plan.model_dump(mode="json")
    # The longest first: one path may be the start of another.
    for string in sorted(_strings(values), key=len, reverse=True):
        shortened = shorten_paths(string)
        if shortened != string:
            text = text.replace(string, shortened)
    return _shorten_plain_paths(text)


def _counts(data: DataPlan | None) -> str | None:
    """Return a line with how much data the run had; None if the plan has no data.

    Samples of a module of the user's own have no tokens.
    """
    if data is None:
        return None
    tokens = ""
    if data.train_tokens:
        tokens = f", {data.train_tokens:,} tokens"
    return f"{data.train_samples:,} training samples{tokens}; {data.eval_samples:,} held out."


@dataclass(frozen=True)
class MeasuredText:
    """What was measured, as text for the card."""

    # A table of held-out metrics; None if there was no evaluation.
    scores: str | None
    # The number of held-out samples.
    samples: str
    # Steps, tokens and seconds; None if no step was done.
    cost: str | None


def _describe_measurements(events: list[Event], exported: Any) -> MeasuredText:
    """Return held-out metrics of the first evaluation and of the exported step, and the run's cost.

    Args:
        events: The run's events.
        exported: The step of the exported checkpoint; anything else if the export does not know it.
    """
    # A step that a resumed run has done again counts once, by its last event.
    evals: dict[int, Eval] = {}
    steps: dict[int, Step] = {}
    for event in events:
        if isinstance(event, Eval):
            evals[event.step] = event
        elif isinstance(event, Step):
            steps[event.step] = event
    shown: list[Eval] = []
    if evals:
        first = min(evals)
        shown.append(evals[first])
        if exported in evals and exported != first:
            shown.append(evals[exported])
    scores = None
    samples = ""
    if shown:
        scores = _table(_metric_rows(shown))
        samples = f"{shown[-1].samples:,}"
    cost = None
    if steps:
        last = steps[max(steps)]
        # Damaged events may have null here.
        seconds = sum(event.seconds or 0 for event in steps.values())
        tokens = sum(event.tokens or 0 for event in steps.values())
        loss = _number(last.loss)
        cost = f"{last.step:,} steps, {count(tokens)} tokens, {seconds:.3g} s of steps; last training loss {loss}."
    return MeasuredText(scores, samples, cost)


def _metric_rows(evals: list[Eval]) -> list[tuple[str, ...]]:
    """Return the rows of a table of metrics, with a column for each evaluation."""
    names: dict[str, None] = {}
    for event in evals:
        for name, value in event.metrics.items():
            if isinstance(value, int | float):
                names[name] = None
    headers = [f"step {event.step}" for event in evals]
    rows: list[tuple[str, ...]] = [("held-out metric", *headers)]
    for name in names:
        # An evaluation may lack a metric of another one.
        values = [_number(event.metrics.get(name)) for event in evals]
        rows.append((_text(name), *values))
    return rows


def base_of(plan: Plan) -> tuple[str | None, dict[str, Any]]:
    """Return the model that training started from, and the keys of the license in its card.

    The model is an id of the hub, or the last name of a folder's path; None for random weights.
    """
    model = plan.config.model
    if model.init == "random" or model.id is None or plan.model_path is None:
        return None, {}
    path = Path(plan.model_path)
    base = model.id
    if expand_home(model.id).is_dir():
        base = path.name
    readme = None
    if path.is_dir():
        readme = path / "README.md"
    return base, license_of(readme, model.id, model.revision)


def license_of(readme: Path | None, name: str, revision: str | None) -> dict[str, Any]:
    """Return the keys of LICENSE in a model's card; {} if it cannot be read or names no license.

    Args:
        readme: The card's file; None: the card of the hub's model `name`.
        name: An id of the hub.
        revision: The revision of the hub's model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    try:
        file = readme or hf_hub_download(name, "README.md", revision=revision)
        metadata = metadata_load(file) or {}
    except Exception:  # noqa: BLE001 - a stranger's file, or no network: the card says that the license is not known
        return {}
    values = {}
    for key in LICENSE:
        value = metadata.get(key)
        # A stranger wrote it, and it goes into the head of our card.
        if isinstance(value, str) and value.isprintable() and len(value) < MOST_LICENSE_CHARACTERS:
            values[key] = value
    # A name or a link means nothing without the license that it belongs to.
    if "license" not in values:
        return {}
    return values


def _changed_keys(config: Config) -> dict[str, Any]:
    """Return the keys of a config that are not their defaults, and each section's kind.

    Places of this cluster are left out, since they matter to nobody else.
    """
    values = changed_values(config)
    values.pop("launch", None)
    values.get("run", {}).pop("dir", None)
    values.get("checkpoint", {}).pop("url", None)
    values.get("algorithm", {}).get("generator", {}).pop("url", None)
    return dict(values)


def shorten_paths(value: Any) -> Any:
    """Return a value in which each path of this machine is cut to its last name.

    Dictionaries and lists are searched. A text that is one path may have spaces in it.
    """
    return map_leaves(value, _shorten_path)


def _shorten_path(value: Any) -> Any:
    """Return a text with each path of this machine cut to its last name; other values unchanged."""
    if not isinstance(value, str):
        return value
    start = LOCAL_FOLDER.match(value)
    # A second path or an option after a space means that this is a command, not one path.
    if start is None or re.search(r"\n|\s[/~-]", value):
        return _shorten_plain_paths(value)
    _, _, name = value.rstrip("/").rpartition("/")
    return f"{start['scheme']}…/{name}"


def _shorten_plain_paths(text: str) -> str:
    """Return a text in which each path of this machine without spaces is cut to its last name."""
    # More folders, and then the name that stays.
    whole_path = LOCAL_FOLDER.pattern + r"(?:[^\s/'\"]+/)*(?P<name>[^\s/'\"]+)"
    return re.sub(whole_path, r"\g<scheme>…/\g<name>", text)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, without the keys of dictionaries."""
    if isinstance(value, str):
        yield value
        return
    inner_values: Iterable[Any] = ()
    if isinstance(value, dict):
        inner_values = value.values()
    elif isinstance(value, list):
        inner_values = value
    for inner in inner_values:
        yield from _strings(inner)


def _source(source: Any) -> str:
    """Return the name of a source of rows, in backticks, without folders of this machine."""
    # Kinds of sources have different fields. The first of these that it has counts.
    tasks = ", ".join(getattr(source, "tasks", ()))
    name = getattr(source, "id", None) or tasks or getattr(source, "path", None) or source.label
    public_name = str(shorten_paths(str(name)))
    return f"`{_code(public_name)}`"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "---|" * len(rows[0])
    return "\n".join([head, rule, *rest])


def _number(value: Any) -> str:
    """Return a number as text with four digits; a dash for anything else."""
    if isinstance(value, int | float):
        return f"{value:.4g}"
    return "–"


def _text(text: str) -> str:
    """Return a text on one line, without effect as Markdown or HTML."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", line)


def _code(text: str | None) -> str:
    """Return a text that can stand between backticks in a cell of a table."""
    line = " ".join((text or "").split())
    # Between backticks nothing can be escaped.
    return line.replace("`", "'").replace("|", "¦")
