"""The sections of a report that are about all of its runs: the summary and the configuration.

templates/sections.html.jinja shows what is returned here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumline.config.config import Config
from drumline.config.section import Section
from drumline.errors import DrumlineError
from drumline.plan.explain import flow_style
from drumline.report.facts import (
    HELD_OUT,
    RATES,
    SAMPLES_PER_S,
    RawPoints,
    RunFacts,
    as_mapping,
    as_number,
    as_numbers,
    differences,
)
from drumline.report.markup import (
    Keyed,
    Pairs,
    Table,
    format_seconds,
    format_value,
    table,
    without_empty,
)
from drumline.telemetry.events import has_groups
from drumline.telemetry.plan_accuracy import Comparison
from drumline.telemetry.watched import ranks_named

# Most columns for differing keys in the table of runs.
MOST_COLUMNS = 8
# Most characters of a value in a table.
MOST_CELL = 300
# Most remarks about one kind of event.
MOST_REMARKS = 3
# Kinds of events that are remarks, with the line of one. Fields that an event lacks are None.
REMARKS = {
    "spike": "the loss jumped at step {step}",
    "straggler": "rank {rank} held up the others from step {step}",
}
# Speeds from here on are shown without decimals.
WHOLE_SPEED = 100
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


@dataclass(frozen=True)
class ChartSlot:
    """The placeholder of a chart on a page, into which draw.js draws."""

    # Index of its spec in `ChartRegistry.specs`.
    number: int
    title: str
    # What stands beside the title; may be empty.
    note: str


class ChartRegistry:
    """Collects what draw.js draws on a page. Nothing is drawn here."""

    def __init__(self) -> None:
        # As `curves.ChartSpec`; the page has them as JSON.
        self.specs: list[dict[str, Any]] = []

    def add(self, kind: str, title: str, note: str = "", **content: Any) -> ChartSlot:
        """Add a chart and return its placeholder.

        Args:
            kind: What draw.js draws: `lines` (from `series` and `marks`), `bars` (from `rows` and
                `series`) or `heat` (from `rows`, `values`, and `columns` and `unit` if these are not
                ranks and seconds).
            title: The title.
            note: What stands beside the title.
            content: The fields of the spec that the kind needs, as JSON.
        """
        number = len(self.specs)
        self.specs.append({"kind": kind, "title": title, **content})
        return ChartSlot(number, title, note)


@dataclass(frozen=True)
class Summary:
    """The first part of the page: plan, tiles and failure of one run, or a table of several runs."""

    # The lines that a reader must not miss.
    remarks: list[str]
    # Lines that say which keys and which runs' details are not on the page; None: all are there.
    hidden_keys_note: str | None = None
    hidden_details_note: str | None = None
    # The plan of the only run in words, its key numbers by name, and what ended it badly.
    plan: str | None = None
    tiles: dict[str, Any] | None = None
    failure: Pairs | None = None
    # A row for each of several runs.
    runs: Table | None = None


def summary(runs: list[RunFacts], names: list[str], detail_count: int) -> Summary:
    """Return the summary of a page.

    `names`: what each run is called. `detail_count`: how many of the runs have details on the page.
    """
    remarks = _remarks_of_all(runs, names)
    if len(runs) == 1:
        run = runs[0]
        plan = run.last("run_start").get("plan_line")
        failure = without_empty(run.failure.items())
        return Summary(remarks, plan=plan, tiles=_key_numbers(run), failure=failure)
    keys = differences(runs)
    hidden_keys_note = None
    if len(keys) > MOST_COLUMNS:
        more = len(keys) - MOST_COLUMNS
        hidden_keys_note = f"{more} more keys differ: see “Configuration”."
    hidden_details_note = None
    if len(runs) > detail_count:
        which = f"the first {detail_count} of {len(runs)} runs"
        hidden_details_note = (
            f"Details and configuration are of {which}; drumline report RUN has another's."
        )
    table_of_runs = _table_of_runs(runs, names, keys[:MOST_COLUMNS])
    return Summary(remarks, hidden_keys_note, hidden_details_note, runs=table_of_runs)


def _table_of_runs(runs: list[RunFacts], names: list[str], keys: list[str]) -> Table:
    """Return a table with the key numbers of each run and its values of some keys of the config."""
    # The key numbers have the same names in all runs.
    headers = ["run", *_key_numbers(runs[0]), *keys]
    rows = []
    for run, name in zip(runs, names, strict=True):
        numbers = _key_numbers(run).values()
        values = [short(run.config.get(key)) for key in keys]
        rows.append([name, *numbers, *values])
    return table(headers, rows, class_="sortable")


def _remarks_of_all(runs: list[RunFacts], names: list[str]) -> list[str]:
    """Return the remarks; one that does not apply to all runs begins with their names."""
    names_by_remark: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for remark in _remarks(run):
            names_of_runs = names_by_remark.setdefault(remark, [])
            names_of_runs.append(name)
    lines = []
    for remark, names_of_runs in names_by_remark.items():
        if len(names_of_runs) == len(runs):
            lines.append(remark)
        else:
            listed = ", ".join(names_of_runs)
            lines.append(f"{listed}: {remark}")
    return lines


def _key_numbers(run: RunFacts) -> dict[str, Any]:
    """Return what one looks at first, as name → value or None; the same names for each run."""
    # The loss of reinforcement learning says little; its reward is what should rise.
    training_curve = "loss"
    if "reward" in run.curves:
        training_curve = "reward"
    training = run.raw_curves.get(training_curve, [])
    metric = run.config.get("eval.metric")
    held_out = run.raw_curves.get(f"{HELD_OUT}{metric}", [])
    planned_steps = format_value(run.last("run_start").get("steps") or "?")
    return {
        "status": run.status,
        "steps": Keyed(f"{run.last_step:,} of {planned_steps}", run.last_step),
        "training": _first_and_last(training_curve, training),
        "held out": _first_and_last(str(metric), held_out),
        "speed, median": _speed(run),
        "peak per rank": _peak(run.comparisons),
        "goodput": _goodput(run),
        "restarts": run.restarts,
        "time": _duration(run),
    }


def _speed(run: RunFacts) -> str | None:
    """Return the median speed of the logged steps as text, with the number as the sort key.

    None if no step was logged.
    """
    unit = RATES["tokens_per_s"]
    # A run has this curve only if its samples have no tokens.
    if SAMPLES_PER_S in run.curves:
        unit = SAMPLES_PER_S
    speeds = [value for _, value in run.curves.get(unit, [])]
    if not speeds:
        return None
    median = statistics.median(speeds)
    if median >= WHOLE_SPEED:
        number = f"{median:,.0f}"
    else:
        number = f"{median:.3g}"
    return Keyed(f"{number} {unit}", median)


def _first_and_last(name: str, points: RawPoints) -> str | None:
    """Return the first and the last value of a curve as text, with the last as the sort key.

    Without a last number there is no sort key; None if the curve has no number at all.
    """
    numbers = [value for _, value in points if value is not None]
    if not numbers:
        return None
    first = numbers[0]
    # Not the last number: a run that has diverged must not look well.
    _, last = points[-1]
    if last is None:
        return f"{name} {first:.4g} → no number"
    return Keyed(f"{name} {first:.4g} → {last:.4g}", last)


def _peak(comparisons: list[Comparison]) -> str | None:
    """Return the measured and the planned peak of memory as text; the measured is the sort key.

    None if none was measured.
    """
    for row in comparisons:
        if row.category == "peak":
            measured = row.show(row.measured)
            planned = row.show(row.predicted)
            return Keyed(f"{measured}, planned {planned}", row.measured)
    return None


def _goodput(run: RunFacts) -> str | None:
    """Return the goodput in percent as text, with the fraction as the sort key; None if unknown."""
    goodput = run.goodput
    if goodput is None:
        return None
    return Keyed(f"{goodput:.0%}", goodput)


def _duration(run: RunFacts) -> str | None:
    """Return how long the run was running as text, with the seconds as the sort key."""
    text = format_seconds(run.seconds)
    if text is None:
        return None
    return Keyed(text, run.seconds)


def _remarks(run: RunFacts) -> list[str]:
    """Return the lines about a run that a reader must not miss."""
    lines = list(run.problems)
    lines += _not_finite(run)
    lines += _never_differed(run)
    lines += _without_reward(run)
    lines += _unrewarded_episodes(run)
    for kind, remark in REMARKS.items():
        first_events = run.events_of_kind(kind)[:MOST_REMARKS]
        for event in first_events:
            # An event of another version may lack a field.
            values = defaultdict(lambda: None, event)
            lines.append(remark.format_map(values))
    lines += _weights_differ(run)
    lines += _failed_saves(run)
    for warning in _texts(run.last("measured"), "warnings"):
        lines.append(f"the plan was off: {warning}")
    start = run.last("run_start")
    lines += _texts(start, "unadapted")
    lines += _texts(start, "left_out")
    return lines


def _not_finite(run: RunFacts) -> list[str]:
    """Return the line that counts the steps whose loss or gradient was not finite."""
    steps = run.events_of_kind("nonfinite")
    if not steps:
        return []
    first = steps[0]["step"]
    return [f"not finite at {len(steps)} steps, first at step {first}"]


def _weights_differ(run: RunFacts) -> list[str]:
    """Return a line for each of the first steps at which the weights of ranks differed."""
    lines = []
    for event in run.events_of_kind("weights_differ")[:MOST_REMARKS]:
        ranks = ranks_named(event.get("ranks") or [])
        step = event.get("step")
        lines.append(f"the weights of {ranks} differed at step {step}")
    return lines


def _failed_saves(run: RunFacts) -> list[str]:
    """Return a line for each of the first checkpoints that could not be saved."""
    lines: list[str] = []
    for event in run.events_of_kind("save"):
        error = event.get("error")
        if error and len(lines) < MOST_REMARKS:
            step = event.get("step")
            lines.append(f"a checkpoint of step {step} failed: {error}")
    return lines


def _texts(event: dict[str, Any], name: str) -> list[str]:
    """Return the texts of a list of an event; empty for anything else."""
    values = event.get(name)
    if not isinstance(values, list):
        return []
    return [str(value) for value in values]


def _never_differed(run: RunFacts) -> list[str]:
    """Return the line of a run that learned nothing, since the rewards of no group differed.

    A group is the completions of one prompt. GRPO and its like compare the rewards inside of it.
    """
    # PPO learns from values, whatever the other completions of a group got.
    if run.config.get("algorithm.kind") == "ppo":
        return []
    shares = []
    for event in run.events_of_kind("rollout"):
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
    # By step: a rollout that is done again after a restart counts once.
    rollouts = {event.get("step"): event for event in run.events_of_kind("rollout")}
    rewards = []
    for event in rollouts.values():
        # A run of gkd may have no rewards at all.
        if event.get("rewards") != {}:
            rewards.append(event.get("reward"))
    without = rewards.count(None)
    if not without:
        return []
    return [f"no episode got a reward in {without:,} of {len(rollouts):,} rollouts"]


def _unrewarded_episodes(run: RunFacts) -> list[str]:
    """Return the line that counts the episodes to which no reward applies."""
    unrewarded = sum(value for _, value in run.points("rollout", "left_out"))
    if not unrewarded:
        return []
    episodes = sum(value for _, value in run.points("rollout", "episodes"))
    share = f"{unrewarded:,.0f} of {episodes:,.0f} episodes"
    return [f"no reward applied to {share}: they were left out"]


def short(value: Any) -> str:
    """Return a value of the config on one line; keys inside of it that are not set are left out."""
    text = flow_style(_without_unset(value))
    if len(text) <= MOST_CELL:
        return text
    return f"{text[:MOST_CELL]} …"


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


@dataclass(frozen=True)
class Choice:
    """A button that chooses which keys are shown."""

    # The CSS class of the rows that it shows; empty: all rows.
    kind: str
    label: str


@dataclass(frozen=True)
class KeyRow:
    """A key of the config with its value in each run."""

    name: str
    # In the order of the runs; None: a run does not have the key.
    values: list[str | None]
    # CSS classes, by which the buttons choose; None: it has none.
    class_: str | None
    is_differing: bool
    # What a reader sees who points at it; None: nothing.
    title: str | None


@dataclass(frozen=True)
class Configuration:
    """The keys of the config of some runs, and what the plan of the first made of them."""

    # Of the runs.
    names: list[str]
    choices: list[Choice]
    rows: list[KeyRow]
    # What the plan of the first run set in place of `auto` and other open keys, and why.
    resolved: Pairs
    why: list[Any]


def configuration(runs: list[RunFacts], names: list[str]) -> Configuration | None:
    """Return the keys with their values in each run, or None if no run has a config.

    Buttons above them choose the keys that differ between runs, those that are not at their
    defaults, or all.
    """
    keys = _keys_of(runs)
    if not keys:
        return None
    differing = set(differences(runs))
    non_default = _non_default_keys_of_any(runs)
    choices = []
    if len(runs) > 1:
        choices.append(Choice("differs", f"differences ({len(differing)})"))
    if non_default is not None:
        choices.append(Choice("set", f"not default ({len(non_default)})"))
    choices.append(Choice("", f"all ({len(keys)})"))
    rows = []
    for key in keys:
        is_non_default = non_default is None or key in non_default
        rows.append(_key_row(key, runs, is_non_default, key in differing))
    first = runs[0]
    why = first.plan.get("why")
    if not isinstance(why, list):
        why = []
    return Configuration(names[: len(runs)], choices, rows, _resolved_values(first), why)


def _keys_of(runs: list[RunFacts]) -> list[str]:
    """Return the keys that any of the runs has in its config, in their order."""
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.config))
    return list(keys)


def _key_row(key: str, runs: list[RunFacts], is_non_default: bool, is_differing: bool) -> KeyRow:
    """Return a key of the config with its value in each run."""
    # By the buttons of `configuration`.
    classes = []
    if is_non_default:
        classes.append("set")
    if is_differing:
        classes.append("differs")
    values: list[str | None] = []
    for run in runs:
        value = None
        if key in run.config:
            value = short(run.config[key])
        values.append(value)
    title = None
    if not is_non_default:
        default = short(runs[0].config.get(key))
        title = f"default: {default}"
    class_ = " ".join(classes) or None
    return KeyRow(key, values, class_, is_differing, title)


def _non_default_keys_of_any(runs: list[RunFacts]) -> set[str] | None:
    """Return the keys whose value is not the default in any of the runs; None if not known."""
    non_default: set[str] = set()
    for run in runs:
        non_default_here = _non_default_keys(run)
        if non_default_here is None:
            return None
        non_default |= non_default_here
    return non_default


def _non_default_keys(run: RunFacts) -> set[str] | None:
    """Return the keys whose value is not the default.

    None if the config cannot be read here: another version wrote it, or a plug-in is not installed.
    """
    values = as_mapping(run.plan.get("config"))
    # Not trusted: a run folder may be a stranger's, and its config must not import code.
    context = {"trusted": False}
    try:
        config = Config.model_validate(values, context=context)
    except (ValueError, DrumlineError):
        return None
    non_default = set()
    for name in _changed_fields(config):
        inside = f"{name}."
        for key in run.config:
            if key == name or key.startswith(inside):
                non_default.add(key)
    return non_default


def _changed_fields(section: BaseModel, prefix: str = "") -> list[str]:
    """Return the dotted names of a section's fields that are not at their defaults.

    `prefix`: the section's own dotted name with a dot, empty for the whole config.
    """
    changed: list[str] = []
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        default = _default(field, section)
        path = f"{prefix}{name}"
        if isinstance(value, Section):
            # A section of another kind has other fields, which have defaults of their own.
            is_other_kind = type(default) is not type(value)
            if not field.is_required() and is_other_kind:
                changed.append(f"{path}.kind")
            changed += _changed_fields(value, f"{path}.")
        elif value != default:
            changed.append(path)
    return changed


def _default(field: FieldInfo, section: BaseModel) -> Any:
    """Return the default of a field of a section; None if it must be set."""
    if field.is_required():
        return None
    # A default may follow from the fields before it.
    return field.get_default(call_default_factory=True, validated_data=vars(section))


def _resolved_values(run: RunFacts) -> Pairs:
    """Return what the plan made of the config."""
    plan = run.plan
    mesh = as_mapping(plan.get("mesh"))
    axes = [f"{name} {size}" for name, size in mesh.items()]
    strategy = run.last("run_start").get("strategy")
    pairs: Pairs = [
        ("strategy", strategy),
        ("mesh", " × ".join(axes)),
    ]
    for name in RESOLVED:
        pairs.append((_with_spaces(name), plan.get(name)))
    batch = as_mapping(plan.get("batch"))
    sizes = []
    for name, value in batch.items():
        label = _with_spaces(name)
        sizes.append(f"{label} {value}")
    pairs.append(("batch", ", ".join(sizes)))
    for name, value in as_numbers(plan.get("data")).items():
        if value:
            label = _with_spaces(name)
            pairs.append((f"data: {label}", value))
    return without_empty(pairs)


def _with_spaces(name: str) -> str:
    """Return the name of a field with spaces in place of its underscores."""
    return name.replace("_", " ")
