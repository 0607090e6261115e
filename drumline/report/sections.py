"""The sections of a report, each a function of a run: HTML, or None where nothing of it was recorded."""

from __future__ import annotations

import statistics
from typing import Any

from pydantic import BaseModel

from drumline.core.config import Config
from drumline.core.explain import flow
from drumline.core.section import Section
from drumline.errors import DrumlineError
from drumline.report.facts import (
    RATES,
    SAMPLES_PER_S,
    RunFacts,
    Trace,
    differences,
    mapping,
    number,
    numbers,
)
from drumline.report.markup import Html, Keyed, facts, join, seconds_of, table, tag, text
from drumline.telemetry.events import has_groups
from drumline.telemetry.truth import Comparison
from drumline.telemetry.watched import ranks_named

MOST_COLUMNS = 8  # of keys that differ, in the table of runs
MOST_CELL = 300  # characters of a value in a table


class Drawings:
    """Drawings of a page, in the order of their places."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add(self, kind: str, title: str, note: str = "", **drawing: Any) -> Html:
        """The place where draw.js draws it: lines (`series`, `marks`), bars (`rows`, `series`) or heat (`rows`, `values`)."""
        self.made.append({"kind": kind, "title": title, **drawing})
        place = tag(
            "div", class_="chart", data_chart=len(self.made) - 1, role="img", aria_label=title
        )
        return tag("figure", tag("figcaption", title, tag("small", note) if note else ""), place)


# ------------------------------------------------------------------------------------------------------------ all runs


def summary(runs: list[RunFacts], names: list[str]) -> Html:
    """Tiles of one run, a table of several; and what one should know."""
    if len(runs) == 1:
        plan = runs[0].last("run_start").get("plan_line")
        tiles = tag("div", *map(_tile, _key_numbers(runs[0]).items()), class_="tiles")
        failure = runs[0].failure
        shown_failure = (
            tag("div", facts(list(failure.items())), class_="failure") if failure else ""
        )
        known = join((tag("p", plan, class_="plan") if plan else "", tiles, shown_failure))
    else:
        keys = differences(runs)
        rows = []
        for run, name in zip(runs, names, strict=True):
            rows.append(
                [
                    name,
                    *_key_numbers(run).values(),
                    *(short(run.config.get(key)) for key in keys[:MOST_COLUMNS]),
                ]
            )
        headers = ["run", *_key_numbers(runs[0]), *keys[:MOST_COLUMNS]]
        left = (
            f"{len(keys) - MOST_COLUMNS} more keys differ: see “Configuration”."
            if len(keys) > MOST_COLUMNS
            else ""
        )
        known = join(
            (table(headers, rows, class_="sortable"), tag("p", left, class_="note") if left else "")
        )
    of: dict[str, list[str]] = {}  # remark → the runs that it is true of
    for run, name in zip(runs, names, strict=True):
        for remark in _remarks(run):
            of.setdefault(remark, []).append(name)
    remarks = [
        each if len(those) == len(runs) else f"{', '.join(those)}: {each}"
        for each, those in of.items()
    ]
    return join(
        (
            known,
            tag("ul", *(tag("li", each) for each in remarks), class_="remarks") if remarks else "",
        )
    )


def _tile(item: tuple[str, Any]) -> Html:
    name, value = item
    return tag(
        "div",
        tag("span", name),
        tag("strong", value, class_=f"status {value}" if name == "status" else None),
        class_="tile",
    )


def _key_numbers(run: RunFacts) -> dict[str, Any]:
    """What one looks at first; the same names for each run."""
    goodput = run.goodput
    learned = next((name for name in ("reward", "loss") if name in run.curves), "loss")
    metric = run.config.get("eval.metric")
    peaks = [row for row in run.comparisons if row.category == "peak"]
    return {
        "status": run.status,
        "steps": Keyed(
            f"{run.reached:,} of {text(run.last('run_start').get('steps') or '?')}", run.reached
        ),
        "training": _first_and_last(learned, run.traces.get(learned, [])),
        "held out": _first_and_last(str(metric), run.traces.get(f"held out: {metric}", [])),
        "speed, median": _speed(run),
        "peak a rank": _peak(peaks[0]) if peaks else None,
        "goodput": Keyed(f"{goodput:.0%}", goodput) if goodput is not None else None,
        "restarts": run.restarts,
        "time": (took := seconds_of(run.seconds)) and Keyed(took, run.seconds),
    }


def _speed(run: RunFacts) -> str | None:
    """Return the median speed of the logged steps with its unit, sorted by the number; None where none was logged."""
    unit = SAMPLES_PER_S if SAMPLES_PER_S in run.curves else RATES["tokens_per_s"]
    speeds = [value for _, value in run.curves.get(unit, [])]
    if not speeds:
        return None
    median = statistics.median(speeds)
    shown = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
    return Keyed(f"{shown} {unit}", median)


def _first_and_last(name: str, trace: Trace) -> str | None:
    """Sorted by the last."""
    found, last = (
        [value for _, value in trace if value is not None],
        trace[-1][1] if trace else None,
    )
    if not found:
        return None
    return (
        f"{name} {found[0]:.4g} → no number"
        if last is None
        else Keyed(f"{name} {found[0]:.4g} → {last:.4g}", last)
    )


def _peak(row: Comparison) -> str:
    return Keyed(f"{row.show(row.measured)}, planned {row.show(row.predicted)}", row.measured)


def _remarks(run: RunFacts) -> list[str]:
    """Lines that a reader must not miss."""
    start, lines = run.last("run_start"), [*run.problems]
    lines += [
        f"not finite at {len(found)} steps, first at step {found[0]['step']}"
        for found in [run.of("nonfinite")]
        if found
    ]
    lines += _never_differed(run)
    lines += _without_reward(run)
    lines += _left_out(run)
    lines += [f"the loss jumped at step {event.get('step')}" for event in run.of("spike")[:3]]
    lines += [
        f"rank {event.get('rank')} held up the others from step {event.get('step')}"
        for event in run.of("straggler")[:3]
    ]
    lines += [
        f"the weights of {ranks_named(event.get('ranks') or [])} differed at step {event.get('step')}"
        for event in run.of("weights_differ")[:3]
    ]
    lines += [
        f"a checkpoint of step {event.get('step')} failed: {event['error']}"
        for event in run.of("save")
        if event.get("error")
    ][:3]
    warnings = run.last("measured").get("warnings")
    lines += (
        [f"the plan was off: {line}" for line in warnings] if isinstance(warnings, list) else []
    )
    for name in ("unadapted", "left_out"):
        found = start.get(name)
        if isinstance(found, list):
            lines += [str(line) for line in found]
    return lines


def _never_differed(run: RunFacts) -> list[str]:
    """Return the line of a run that learned nothing, since no group of completions had rewards that differ."""
    if (
        run.config.get("algorithm.kind") == "ppo"
    ):  # it learns from values, whatever the others of a group got
        return []
    differ = []
    for event in run.of("rollout"):
        share = number(event.get("groups_differ"))
        if event.get("reward") is None:  # older runs have a share of 0 there
            continue
        if share is not None and has_groups(
            number(event.get("prompts")), number(event.get("episodes"))
        ):
            differ.append(share)
    if not differ or any(differ):
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
    """A value of the config on one line; keys of lists that are not set are left out."""
    shown = flow(_set(value))
    return shown if len(shown) <= MOST_CELL else f"{shown[:MOST_CELL]} …"


def _set(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: made for key, inner in value.items() if (made := _set(inner)) not in (None, {})
        }
    return [_set(each) for each in value] if isinstance(value, list) else value


def configuration(runs: list[RunFacts], names: list[str]) -> Html | None:
    """Each key with its value in each run: those that the user set, those that differ between runs, or all."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return None
    differing, given = set(differences(runs)), set().union(*(_given(run) for run in runs))
    rows = []
    for key in keys:
        first = runs[0].config.get(key)
        cells = [tag("td", short(run.config[key]) if key in run.config else None) for run in runs]
        marks = " ".join([*["set"] * (key in given), *["differs"] * (key in differing)])
        name = tag("td", tag("code", key), *[tag("mark", "differs")] * (key in differing))
        rows.append(
            tag(
                "tr",
                name,
                *cells,
                class_=marks or None,
                title=None if key in given else f"default: {short(first)}",
            )
        )
    choices = [("differs", f"differences ({len(differing)})")] * (len(runs) > 1) + [
        ("set", f"not default ({len(given)})"),
        ("", f"all ({len(keys)})"),
    ]
    tools = tag(
        "p",
        *(
            tag("button", label, type="button", data_only=kind, class_="only")
            for kind, label in choices
        ),
        tag(
            "input",
            type="search",
            placeholder="search keys and values",
            aria_label="search keys and values",
            data_search="config",
        ),
        class_="tools",
    )
    head = tag(
        "thead", tag("tr", tag("th", "key"), *(tag("th", name) for name in names[: len(runs)]))
    )
    return join(
        (
            tools,
            tag("div", tag("table", head, tag("tbody", *rows), id="config"), class_="wide"),
            *(map(_resolved, runs[:1])),
        )
    )


def _given(run: RunFacts) -> set[str]:
    """Keys whose value is not the default; none where this version cannot read the config."""
    try:
        config = Config.model_validate(mapping(run.plan.get("config")), context={"trusted": False})
    except (ValueError, DrumlineError):
        return set()
    return {
        key
        for key in run.config
        if any(key == name or key.startswith(f"{name}.") for name in _changed(config))
    }


def _changed(section: BaseModel, place: str = "") -> list[str]:
    found: list[str] = []
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        default = (
            None
            if field.is_required()
            else field.get_default(call_default_factory=True, validated_data=vars(section))
        )
        if isinstance(value, Section):
            found += [f"{place}{name}.kind"] * (
                not field.is_required() and type(default) is not type(value)
            )
            found += _changed(value, f"{place}{name}.")
        elif value != default:
            found.append(f"{place}{name}")
    return found


def _resolved(run: RunFacts) -> Html:
    """What the plan made of it."""
    plan, data = run.plan, mapping(run.plan.get("data"))
    wanted = (
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
    pairs = [(name.replace("_", " "), plan.get(name)) for name in wanted]
    pairs.insert(0, ("strategy", run.last("run_start").get("strategy")))
    pairs.insert(
        1,
        ("mesh", " × ".join(f"{name} {size}" for name, size in mapping(plan.get("mesh")).items())),
    )
    pairs += [
        (
            "batch",
            ", ".join(
                f"{name.replace('_', ' ')} {value}"
                for name, value in mapping(plan.get("batch")).items()
            ),
        )
    ]
    pairs += [
        (f"data: {name.replace('_', ' ')}", value) for name, value in numbers(data).items() if value
    ]
    why = plan.get("why")
    reasons = tag("ul", *(tag("li", line) for line in why)) if isinstance(why, list) and why else ""
    return tag(
        "details", tag("summary", "What was resolved, and why"), facts(pairs), reasons, open=True
    )
