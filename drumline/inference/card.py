"""The model card of a run: facts of its folder, and nothing that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.data import HubSource
from drumline.core.explain import count, explain, strategy_name
from drumline.core.load import changed_values
from drumline.core.plan import DataPlan, Plan
from drumline.core.redact import redact
from drumline.core.yaml_lines import write_yaml
from drumline.errors import ModelError
from drumline.foreign import expanded, read_object
from drumline.models.export import PROVENANCE
from drumline.telemetry.events import Eval, Event, Step, read

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The start of a path of this machine, up to a folder in it: of /, ~, and of what stands behind a scheme, but for a host.
LOCAL = re.compile(
    r"(?<![\w/.~])(?P<scheme>(?:[A-Za-z][\w+.-]*:+)*)(?:(?:/(?!/)|/{3,}|(?<=file:)//)[^\s/'\"]+/|~[^\s/'\"]*/)"
)
LICENSE = ("license", "license_name", "license_link")


def card(run_dir: Path, plan: Plan, folder: Path, to: str, adapter: bool) -> str:
    """README.md of what `folder` holds: YAML for the hub between two lines, then Markdown."""
    config, events = plan.config, read(run_dir / "events.jsonl")
    base, metadata = base_of(plan)
    origin = read_object(folder / PROVENANCE, ModelError, f"remove {folder}")
    head = {
        **metadata,
        "library_name": "peft" if adapter else "transformers",
        **({"pipeline_tag": "text-generation"} if config.algorithm.writes else {}),
        "tags": [
            "drumline",
            config.algorithm.kind,
            *(["lora"] if config.adapter.kind == "lora" else []),
        ],
    }
    if hub := sorted({source.id for source in config.data.train if isinstance(source, HubSource)}):
        head["datasets"] = hub
    if base is not None and HUB_ID.fullmatch(base):
        head |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    form = (
        "the adapter alone, for PEFT"
        if adapter
        else "whole weights" + ", the adapter merged" * (config.adapter.kind == "lora")
    )
    classes = [(str(index), _text(label)) for index, label in enumerate(plan.labels)]
    parts = [
        f"---\n{write_yaml(head)}---",
        f"# {_text(to.split('/')[-1])}",
        f"Trained by Drumline with `{config.algorithm.kind}`"
        + f" from {f'`{_code(base)}`' if base else 'random weights'}. It holds {form}, in {origin.get('dtype')}.",
        *(["## Classes\n" + _table([("logit", "class"), *classes])] if classes else []),
        *_sections(run_dir, plan, events, origin),
        *(
            []
            if "license" in metadata
            else ["## License\nNot known: the base model's card names none, or could not be read."]
        ),
    ]
    return redact("\n\n".join(parts) + "\n")


def _sections(run_dir: Path, plan: Plan, events: list[Event], origin: dict[str, Any]) -> list[str]:
    data, made = (
        plan.data,
        [
            f"{name} {origin[name]}"
            for name in ("drumline", "torch", "transformers")
            if origin.get(name)
        ],
    )
    name, strings = run_dir.resolve().name, [*_strings(plan.model_dump(mode="json"))]

    def short(text: str) -> str:
        """Paths of the plan may have spaces, where no pattern finds their ends."""
        for each in sorted(strings, key=len, reverse=True):
            text = text.replace(each, public(each)) if public(each) != each else text
        return _short_paths(text)

    return [
        "## Data\n"
        + _table(
            [
                ("source", "kind"),
                *((_source(source), source.kind) for source in plan.config.data.train),
            ]
        ),
        *([_counts(data)] if data else []),
        *[f"- {_text(short(line))}" for line in (data.notes if data else ())],
        *_measured(events, origin.get("step")),
        f"## Command\n    drumline train {name}.yaml\n\nwith this as {name}.yaml (paths of the machine are shortened):",
        f"```yaml\n{write_yaml(public(_given(plan.config)))}```",
        f"## Plan\n{strategy_name(plan)} on {plan.mesh.world_size} × {plan.device}.\n\n```\n{short(explain(plan))}\n```",
        f"## Versions\nWritten with {', '.join(made)}.",
    ]


def _counts(data: DataPlan) -> str:
    """Return how much data the run had; samples of a module of the user's own have no tokens."""
    tokens = f", {data.train_tokens:,} tokens" if data.train_tokens else ""
    return f"{data.train_samples:,} training samples{tokens}; {data.eval_samples:,} held out."


def _measured(events: list[Event], exported: Any) -> list[str]:
    """What was measured: held-out metrics before training and of the exported step, and what the run took."""
    evals = {event.step: event for event in events if isinstance(event, Eval)}
    shown = [evals[step] for step in dict.fromkeys([*sorted(evals)[:1], exported]) if step in evals]
    steps = {event.step: event for event in events if isinstance(event, Step)}
    out = ["## Figures"]
    if shown:
        names = list(
            dict.fromkeys(
                name
                for event in shown
                for name, value in event.metrics.items()
                if isinstance(value, int | float)
            )
        )
        rows = [("held-out metric", *(f"step {event.step}" for event in shown))]
        rows += [
            (_text(name), *(_number(event.metrics.get(name)) for event in shown)) for name in names
        ]
        out.append(_table(rows) + f"\n\nOn {shown[-1].samples:,} samples.")
    if steps:
        last, seconds = steps[max(steps)], sum(event.seconds or 0 for event in steps.values())
        tokens = sum(event.tokens or 0 for event in steps.values())
        out.append(
            f"{last.step:,} steps, {count(tokens)} tokens, {seconds:.3g} s of steps; last training loss {_number(last.loss)}."
        )
    return out if len(out) > 1 else [*out, "None was measured."]


def base_of(plan: Plan) -> tuple[str | None, dict[str, Any]]:
    """(what training started from: an id, or the name of a folder; None: random weights; the license that its card names)."""
    model = plan.config.model
    if model.init == "random" or model.id is None or plan.model_path is None:
        return None, {}
    local = Path(plan.model_path)
    base = local.name if expanded(model.id).is_dir() else model.id
    return base, license_of(
        local / "README.md" if local.is_dir() else None, model.id, model.revision
    )


def license_of(readme: Path | None, name: str, revision: str | None) -> dict[str, Any]:
    """The keys of LICENSE in a model's card; nothing where it cannot be read or has none. `readme` None: that of the hub's `name`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(readme or hf_hub_download(name, "README.md", revision=revision)) or {}
    except Exception:  # noqa: BLE001 - a stranger's file, or no network: the card says that the license is not known
        return {}
    values = {
        key: found[key]
        for key in LICENSE
        if isinstance(found.get(key), str) and found[key].isprintable() and len(found[key]) < 200
    }
    return values if "license" in values else {}


def _given(config: Config) -> dict[str, Any]:
    """The keys that are not their defaults, and each section's kind; without the places of this cluster, which are nobody else's matter."""
    values = changed_values(config)
    values.pop("launch", None)
    values.get("run", {}).pop("dir", None)
    for section in (values.get("checkpoint", {}), values.get("algorithm", {}).get("generator", {})):
        section.pop("url", None)
    return dict(values)


def public(value: Any) -> Any:
    """A value in which paths of this machine are names alone. A text that is one path may have spaces in it."""
    if isinstance(value, dict):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    if (
        isinstance(value, str)
        and (start := LOCAL.match(value))
        and not re.search(r"\n|\s[/~-]", value)
    ):
        return f"{start['scheme']}…/{value.rstrip('/').rpartition('/')[2]}"
    return _short_paths(value) if isinstance(value, str) else value


def _short_paths(text: str) -> str:
    return re.sub(LOCAL.pattern + r"(?:[^\s/'\"]+/)*([^\s/'\"]+)", r"\g<scheme>…/\2", text)


def _strings(value: Any) -> Iterator[str]:
    """All of them that a value holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _source(source: Any) -> str:
    """Which rows these are: a name, and never a folder of this machine."""
    named = (
        getattr(source, "id", None)
        or ", ".join(getattr(source, "tasks", ()))
        or getattr(source, "path", None)
        or source.label
    )
    return f"`{_code(str(public(str(named))))}`"


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _text(text: str) -> str:
    """Text that is neither Markdown nor HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _code(text: str | None) -> str:
    """Text between backticks, in a cell of a table."""
    return " ".join((text or "").split()).replace("`", "'").replace("|", "¦")
