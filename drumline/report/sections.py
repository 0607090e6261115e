"""The sections of a report that are about all of its runs: what one looks at first, and their configuration."""

from __future__ import annotations

import statistics
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumline.config.config import Config
from drumline.config.section import Section
from drumline.errors import DrumlineError
from drumline.plan.explain import flow
from drumline.report.facts import (
    HELD_OUT,
    RATES,
    SAMPLES_PER_S,
    RunFacts,
    Trace,
    as_mapping,
    as_number,
    as_numbers,
    differences,
)
from drumline.report.markup import Html, Keyed, facts, format_seconds, join, table, tag, text
from drumline.telemetry.events import has_groups
from drumline.telemetry.truth import Comparison
from drumline.telemetry.watched import ranks_named

MOST_COLUMNS = 8  # of keys that differ, in the table of runs
MOST_CELL = 300  # characters of a value in a table
MOST_REMARKS = 3  # of a kind of event
WHOLE_SPEED = 100  # speeds from here on are shown without decimals
# Values of the plan that are shown under the configuration.
RESOLVED = (
    "engine",
    "backend",
    "device",
    "precision",
    "activation_checkpointing",
    "offload",
    "steps",
    "warmup_steps",
    "lr",
    "model_path",
)


class Drawings:
    """The charts of a page. draw.js finds each by its place in `made`."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add(self, kind: str, title: str, note: str = "", **drawing: Any) -> Html:
        """Add a chart and return the element that draw.js draws it in.

        `kind`: lines (with `series` and `marks`), bars (with `rows` and `series`) or heat (with
        `rows` and `values`).
        """
        self.made.append({"kind": kind, "title": title, **drawing})
        number = len(self.made) - 1
        chart = tag("div", class_="chart", data_chart=number, role="img", aria_label=title)
        small = tag("small", note) if note else ""
        return tag("figure", tag("figcaption", title, small), chart)


def summary(runs: list[RunFacts], names: list[str]) -> Html:
    """Return tiles for one run, or a table of several runs; and the remarks a reader must not miss."""
    if len(runs) == 1:
        overview = _overview_of_one(runs[0])
    else:
        overview = _overview_of_many(runs, names)
    return join((overview, _remarks_of_all(runs, names)))


def _overview_of_one(run: RunFacts) -> Html:
    """Return the plan, the key numbers and the failure of a run."""
    parts = []
    plan = run.last("run_start").get("plan_line")
    if plan:
        parts.append(tag("p", plan, class_="plan"))
    tiles = [_tile(name, value) for name, value in _key_numbers(run).items()]
    parts.append(tag("div", *tiles, class_="tiles"))
    failure = run.failure
    if failure:
        parts.append(tag("div", facts(failure.items()), class_="failure"))
    return join(parts)


def _overview_of_many(runs: list[RunFacts], names: list[str]) -> Html:
    """Return a table with the key numbers of each run and the first keys of the config that differ."""
    keys = differences(runs)
    shown_keys = keys[:MOST_COLUMNS]
    rows = []
    for run, name in zip(runs, names, strict=True):
        row = [name, *_key_numbers(run).values()]
        for key in shown_keys:
            row.append(short(run.config.get(key)))
        rows.append(row)
    headers = ["run", *_key_numbers(runs[0]), *shown_keys]
    parts = [table(headers, rows, class_="sortable")]
    if len(keys) > MOST_COLUMNS:
        left_out = f"{len(keys) - MOST_COLUMNS} more keys differ: see “Configuration”."
        parts.append(tag("p", left_out, class_="note"))
    return join(parts)


def _remarks_of_all(runs: list[RunFacts], names: list[str]) -> Html:
    """Return the list of remarks; one that does not apply to all runs begins with their names."""
    names_by_remark: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for remark in _remarks(run):
            names_by_remark.setdefault(remark, []).append(name)
    if not names_by_remark:
        return Html("")
    items = []
    for remark, of_runs in names_by_remark.items():
        if len(of_runs) == len(runs):
            items.append(tag("li", remark))
        else:
            items.append(tag("li", f"{', '.join(of_runs)}: {remark}"))
    return tag("ul", *items, class_="remarks")


def _tile(name: str, value: Any) -> Html:
    """Return a tile with a key number and its name."""
    class_ = f"status {value}" if name == "status" else None
    return tag("div", tag("span", name), tag("strong", value, class_=class_), class_="tile")


def _key_numbers(run: RunFacts) -> dict[str, Any]:
    """Return what one looks at first; the same names for each run."""
    learned = "loss"
    if "reward" in run.curves:
        learned = "reward"
    metric = run.config.get("eval.metric")
    planned_steps = text(run.last("run_start").get("steps") or "?")
    return {
        "status": run.status,
        "steps": Keyed(f"{run.reached:,} of {planned_steps}", run.reached),
        "training": _first_and_last(learned, run.traces.get(learned, [])),
        "held out": _first_and_last(str(metric), run.traces.get(f"{HELD_OUT}{metric}", [])),
        "speed, median": _speed(run),
        "peak a rank": _peak(run.comparisons),
        "goodput": _goodput(run),
        "restarts": run.restarts,
        "time": _duration(run),
    }


def _speed(run: RunFacts) -> str | None:
    """Return the median speed of the logged steps with its unit, sorted by the number; None where none was logged."""
    unit = SAMPLES_PER_S if SAMPLES_PER_S in run.curves else RATES["tokens_per_s"]
    speeds = [value for _, value in run.curves.get(unit, [])]
    if not speeds:
        return None
    median = statistics.median(speeds)
    shown = f"{median:,.0f}" if median >= WHOLE_SPEED else f"{median:.3g}"
    return Keyed(f"{shown} {unit}", median)


def _first_and_last(name: str, trace: Trace) -> str | None:
    """Return the first and the last value of a curve, sorted by the last; None if it has no number."""
    numbers = [value for _, value in trace if value is not None]
    if not numbers:
        return None
    first = numbers[0]
    last = trace[-1][1]
    if last is None:
        return f"{name} {first:.4g} → no number"
    return Keyed(f"{name} {first:.4g} → {last:.4g}", last)


def _peak(comparisons: list[Comparison]) -> str | None:
    """Return the measured and the planned peak of memory, sorted by the first; None if not measured."""
    for row in comparisons:
        if row.category == "peak":
            shown = f"{row.show(row.measured)}, planned {row.show(row.predicted)}"
            return Keyed(shown, row.measured)
    return None


def _goodput(run: RunFacts) -> str | None:
    """Return the goodput in percent, sorted by the number; None if nothing is known of it."""
    goodput = run.goodput
    if goodput is None:
        return None
    return Keyed(f"{goodput:.0%}", goodput)


def _duration(run: RunFacts) -> str | None:
    """Return how long the run was running, sorted by the seconds."""
    shown = format_seconds(run.seconds)
    if shown is None:
        return None
    return Keyed(shown, run.seconds)


def _remarks(run: RunFacts) -> list[str]:
    """Return the lines that a reader must not miss."""
    lines = list(run.problems)
    nonfinite = run.of("nonfinite")
    if nonfinite:
        first = nonfinite[0]["step"]
        lines.append(f"not finite at {len(nonfinite)} steps, first at step {first}")
    lines += _never_differed(run)
    lines += _without_reward(run)
    lines += _left_out(run)
    for event in run.of("spike")[:MOST_REMARKS]:
        lines.append(f"the loss jumped at step {event.get('step')}")
    for event in run.of("straggler")[:MOST_REMARKS]:
        rank, step = event.get("rank"), event.get("step")
        lines.append(f"rank {rank} held up the others from step {step}")
    for event in run.of("weights_differ")[:MOST_REMARKS]:
        ranks = ranks_named(event.get("ranks") or [])
        lines.append(f"the weights of {ranks} differed at step {event.get('step')}")
    failed_saves = [event for event in run.of("save") if event.get("error")]
    for event in failed_saves[:MOST_REMARKS]:
        lines.append(f"a checkpoint of step {event.get('step')} failed: {event['error']}")
    warnings = run.last("measured").get("warnings")
    if isinstance(warnings, list):
        lines += [f"the plan was off: {warning}" for warning in warnings]
    start = run.last("run_start")
    for name in ("unadapted", "left_out"):
        notes = start.get(name)
        if isinstance(notes, list):
            lines += [str(note) for note in notes]
    return lines


def _never_differed(run: RunFacts) -> list[str]:
    """Return the line of a run that learned nothing, since no group of completions had rewards that differ."""
    # PPO learns from values, whatever the other completions of a group got.
    if run.config.get("algorithm.kind") == "ppo":
        return []
    shares = []
    for event in run.of("rollout"):
        # Older runs have a share of 0 if there is no reward.
        if event.get("reward") is None:
            continue
        share = as_number(event.get("groups_differ"))
        prompts = as_number(event.get("prompts"))
        episodes = as_number(event.get("episodes"))
        if share is not None and has_groups(prompts, episodes):
            shares.append(share)
    if not shares or any(shares):
        return []
    return ["the rewards of a prompt's completions never differed: nothing was learned"]


def _without_reward(run: RunFacts) -> list[str]:
    """Return the line that counts the rollouts of which no episode got a reward."""
    rollouts = {event.get("step"): event for event in run.of("rollout")}
    without = [event for event in rollouts.values() if event.get("reward") is None]
    if not without:
        return []
    return [f"no episode got a reward in {len(without):,} of {len(rollouts):,} rollouts"]


def _left_out(run: RunFacts) -> list[str]:
    """Return the line that counts the episodes to which no reward applies."""
    left_out = sum(value for _, value in run.points("rollout", "left_out"))
    episodes = sum(value for _, value in run.points("rollout", "episodes"))
    if not left_out:
        return []
    return [f"no reward applied to {left_out:,.0f} of {episodes:,.0f} episodes: they were left out"]


def short(value: Any) -> str:
    """Return a value of the config on one line; keys inside of it that are not set are left out."""
    shown = flow(_without_unset(value))
    return shown if len(shown) <= MOST_CELL else f"{shown[:MOST_CELL]} …"


def _without_unset(value: Any) -> Any:
    """Return a value without the keys of its dictionaries that are null or empty."""
    if isinstance(value, list):
        return [_without_unset(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        reduced = _without_unset(inner)
        if reduced not in (None, {}):
            kept[key] = reduced
    return kept


def configuration(runs: list[RunFacts], names: list[str]) -> Html | None:
    """Return the table of keys with their values in each run, or None if no run has a config.

    Buttons above it choose the keys that differ between runs, those that the user set, or all.
    """
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.config))
    if not keys:
        return None
    differing = set(differences(runs))
    given: set[str] = set()
    for run in runs:
        given |= _given(run)
    choices = []
    if len(runs) > 1:
        choices.append(("differs", f"differences ({len(differing)})"))
    choices.append(("set", f"not default ({len(given)})"))
    choices.append(("", f"all ({len(keys)})"))
    rows = [_key_row(key, runs, key in given, key in differing) for key in keys]
    headers = [tag("th", "key")]
    for name in names[: len(runs)]:
        headers.append(tag("th", name))
    head = tag("thead", tag("tr", *headers))
    body = tag("tbody", *rows)
    keys_table = tag("div", tag("table", head, body, id="config"), class_="wide")
    return join((_tools(choices), keys_table, _resolved(runs[0])))


def _key_row(key: str, runs: list[RunFacts], is_given: bool, is_differing: bool) -> Html:
    """Return a key of the config with its value in each run."""
    classes = []
    name: list[Html] = [tag("code", key)]
    if is_given:
        classes.append("set")
    if is_differing:
        classes.append("differs")
        name.append(tag("mark", "differs"))
    cells = [tag("td", *name)]
    for run in runs:
        value = short(run.config[key]) if key in run.config else None
        cells.append(tag("td", value))
    title = None
    if not is_given:
        title = f"default: {short(runs[0].config.get(key))}"
    return tag("tr", *cells, class_=" ".join(classes) or None, title=title)


def _tools(choices: list[tuple[str, str]]) -> Html:
    """Return the buttons (mark of the rows that are shown, label) and the search field of the table of keys."""
    buttons = []
    for kind, label in choices:
        buttons.append(tag("button", label, type="button", data_only=kind, class_="only"))
    search = tag(
        "input",
        type="search",
        placeholder="search keys and values",
        aria_label="search keys and values",
        data_search="config",
    )
    return tag("p", *buttons, search, class_="tools")


def _given(run: RunFacts) -> set[str]:
    """Return the keys whose value is not the default; empty if this version cannot read the config."""
    values = as_mapping(run.plan.get("config"))
    try:
        config = Config.model_validate(values, context={"trusted": False})
    except (ValueError, DrumlineError):
        return set()
    changed = _changed(config)
    given = set()
    for key in run.config:
        if any(key == name or key.startswith(f"{name}.") for name in changed):
            given.add(key)
    return given


def _changed(section: BaseModel, prefix: str = "") -> list[str]:
    """Return the dotted names of a section's fields that are not at their defaults.

    `prefix`: the section's own dotted name with a dot, empty for the whole config.
    """
    changed: list[str] = []
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        default = _default(field, section)
        if isinstance(value, Section):
            if not field.is_required() and type(default) is not type(value):
                changed.append(f"{prefix}{name}.kind")
            changed += _changed(value, f"{prefix}{name}.")
        elif value != default:
            changed.append(f"{prefix}{name}")
    return changed


def _default(field: FieldInfo, section: BaseModel) -> Any:
    """Return the default of a field of a section; None if it must be set."""
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data=vars(section))


def _resolved(run: RunFacts) -> Html:
    """Return what the plan made of the config, and why."""
    plan = run.plan
    mesh = as_mapping(plan.get("mesh"))
    pairs: list[tuple[str, Any]] = [
        ("strategy", run.last("run_start").get("strategy")),
        ("mesh", " × ".join(f"{name} {size}" for name, size in mesh.items())),
    ]
    for name in RESOLVED:
        pairs.append((_spaced(name), plan.get(name)))
    batch = as_mapping(plan.get("batch"))
    pairs.append(("batch", ", ".join(f"{_spaced(name)} {value}" for name, value in batch.items())))
    for name, value in as_numbers(plan.get("data")).items():
        if value:
            pairs.append((f"data: {_spaced(name)}", value))
    parts = [tag("summary", "What was resolved, and why"), facts(pairs)]
    why = plan.get("why")
    if isinstance(why, list) and why:
        parts.append(tag("ul", *(tag("li", reason) for reason in why)))
    return tag("details", *parts, open=True)


def _spaced(name: str) -> str:
    """Return the name of a field with spaces in place of its underscores."""
    return name.replace("_", " ")
