"""The sections of a report, each a function of a run: HTML, or None where nothing of it was recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.explain import count, flow
from drumline.core.section import Section
from drumline.errors import DrumlineError
from drumline.report.facts import RunFacts, differences, flat, mapping, number, numbers
from drumline.report.markup import Html, bytes_of, facts, join, moment, seconds_of, table, tag, text
from drumline.telemetry.truth import OFF

COUNTED = ("productive", "recompute", "startup", "restore", "save", "eval", "other")  # of goodput
MOST_COLUMNS = 8  # of keys that differ, in the table of runs
MOST_CELL = 300  # characters of a value in a table


class Figures:
    """Drawings of a page, in the order of their places."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add(self, drawing: dict[str, Any]) -> Html:
        """The place where page.js draws it."""
        self.made.append(drawing)
        note = tag("small", drawing["note"]) if drawing.get("note") else ""
        place = tag("div", class_="chart", data_chart=len(self.made) - 1, role="img", aria_label=drawing["title"])
        return tag("figure", tag("figcaption", drawing["title"], note), place)


# ------------------------------------------------------------------------------------------------------------ all runs


def summary(runs: list[RunFacts], names: list[str]) -> Html:
    """Tiles of one run, a table of several; and what one should know."""
    if len(runs) == 1:
        plan = runs[0].last("run_start").get("plan_line")
        known = join((tag("p", plan, class_="plan") if plan else "", tag("div", *map(_tile, _key_numbers(runs[0]).items()), class_="tiles")))
    else:
        keys = differences(runs)
        rows = []
        for run, name in zip(runs, names, strict=True):
            rows.append([name, *_key_numbers(run).values(), *(short(run.config.get(key)) for key in keys[:MOST_COLUMNS])])
        headers = ["run", *_key_numbers(runs[0]), *keys[:MOST_COLUMNS]]
        left = f"{len(keys) - MOST_COLUMNS} more keys differ: see “Configuration”." if len(keys) > MOST_COLUMNS else ""
        known = join((table(headers, rows, class_="sortable"), tag("p", left, class_="note") if left else ""))
    remarks = [(f"{name}: " * (len(runs) > 1) + each) for run, name in zip(runs, names, strict=True) for each in _remarks(run)]
    return join((known, tag("ul", *(tag("li", each) for each in remarks), class_="remarks") if remarks else ""))


def _tile(item: tuple[str, Any]) -> Html:
    name, value = item
    return tag("div", tag("span", name), tag("strong", value, class_=f"status {value}" if name == "status" else None), class_="tile")


def _key_numbers(run: RunFacts) -> dict[str, Any]:
    """What one looks at first; the same names for each run."""
    losses, rates, goodput = run.curves.get("loss", []), run.curves.get("tokens/s", []), run.goodput
    metric = run.config.get("eval.metric")
    scores = run.points("eval", str(metric))
    worth = goodput.get("productive", 0.0) / goodput["elapsed"] if goodput.get("elapsed") else None
    peaks = [row for row in run.comparisons if row.category == "peak"]
    last = max((step for step, _ in losses), default=0)
    return {
        "status": run.status,
        "steps": f"{last:,} of {run.last('run_start').get('steps') or '?'}",
        "loss": f"{losses[0][1]:.4g} → {losses[-1][1]:.4g}" if losses else None,
        "held out": f"{metric} {scores[0][1]:.4g} → {scores[-1][1]:.4g}" if scores else None,
        "tokens/s, median": f"{statistics.median(value for _, value in rates):,.0f}" if rates else None,
        "peak a rank": f"{peaks[0].show(peaks[0].measured)} of {peaks[0].show(peaks[0].predicted)} planned" if peaks else None,
        "goodput": f"{worth:.0%}" if worth is not None else None,
        "restarts": run.restarts,
        "time": seconds_of(run.seconds),
    }


def _remarks(run: RunFacts) -> list[str]:
    """Lines that a reader must not miss."""
    start, lines = run.last("run_start"), [*run.problems]
    lines += [f"not finite at {len(found)} steps, first at step {found[0]['step']}" for found in [run.of("nonfinite")] if found]
    lines += [f"the loss jumped at step {event.get('step')}" for event in run.of("spike")[:3]]
    lines += [f"rank {event.get('rank')} held up the others from step {event.get('step')}" for event in run.of("straggler")[:3]]
    lines += [f"the weights of ranks {event.get('ranks')} differed at step {event.get('step')}" for event in run.of("weights_differ")[:3]]
    lines += [f"a checkpoint of step {event.get('step')} failed: {event['error']}" for event in run.of("save") if event.get("error")][:3]
    warnings = run.last("measured").get("warnings")
    lines += [f"the plan was off: {line}" for line in warnings] if isinstance(warnings, list) else []
    left_out = start.get("left_out")
    return lines + ([str(line) for line in left_out] if isinstance(left_out, list) else [])


def short(value: Any) -> str:
    """A value of the config on one line."""
    shown = flow(value)
    return shown if len(shown) <= MOST_CELL else f"{shown[:MOST_CELL]} …"


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
        rows.append(tag("tr", name, *cells, class_=marks or None, title=None if key in given else f"default: {short(first)}"))
    choices = [("differs", f"differences ({len(differing)})")] * (len(runs) > 1) + [("set", f"set ({len(given)})"), ("", f"all ({len(keys)})")]
    tools = tag(
        "p",
        *(tag("button", label, type="button", data_only=kind, class_="only") for kind, label in choices),
        tag("input", type="search", placeholder="search keys and values", aria_label="search keys and values", data_search="config"),
        class_="tools",
    )
    head = tag("thead", tag("tr", tag("th", "key"), *(tag("th", name) for name in names[: len(runs)])))
    return join((tools, tag("div", tag("table", head, tag("tbody", *rows), id="config"), class_="wide"), *(map(_resolved, runs[:1]))))


def _given(run: RunFacts) -> set[str]:
    """Keys whose value is not the default; none where this version cannot read the config."""
    try:
        config = Config.model_validate(mapping(run.plan.get("config")), context={"trusted": False})
    except (ValueError, DrumlineError):
        return set()
    return {key for key in run.config if any(key == name or key.startswith(f"{name}.") for name in _changed(config))}


def _changed(section: Section, place: str = "") -> list[str]:
    found: list[str] = []
    for name, field in type(section).model_fields.items():
        value, default = getattr(section, name), None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, Section) and type(value) is type(default):
            found += _changed(value, f"{place}{name}.")
        elif value != default:
            found.append(f"{place}{name}")
    return found


def _resolved(run: RunFacts) -> Html:
    """What the plan made of it."""
    plan, data = run.plan, mapping(run.plan.get("data"))
    wanted = ("engine", "backend", "device", "precision", "activation_checkpointing", "offload", "steps", "warmup_steps", "lr", "model_path")
    pairs = [(name.replace("_", " "), plan.get(name)) for name in wanted]
    pairs.insert(0, ("strategy", run.last("run_start").get("strategy")))
    pairs.insert(1, ("mesh", " × ".join(f"{name} {size}" for name, size in mapping(plan.get("mesh")).items())))
    pairs += [("batch", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in mapping(plan.get("batch")).items()))]
    pairs += [(f"data: {name.replace('_', ' ')}", value) for name, value in numbers(data).items() if value]
    why = plan.get("why")
    reasons = tag("ul", *(tag("li", line) for line in why)) if isinstance(why, list) and why else ""
    return tag("details", tag("summary", "What was resolved, and why"), facts(pairs), reasons, open=True)


# ------------------------------------------------------------------------------------------------------------- one run


def times(run: RunFacts, figures: Figures) -> Html | None:
    """Goodput of each attempt, seconds of a step, and the heat map of ranks and phases."""
    made = []
    ended = [(f"attempt {place}", numbers((attempt.end or {}).get("goodput"))) for place, attempt in enumerate(run.attempts)]
    ended = [(name, goodput) for name, goodput in ended if goodput]
    if ended:
        series = [{"name": part, "x": [goodput.get(part, 0.0) for _, goodput in ended]} for part in COUNTED]
        made.append(figures.add({"kind": "bars", "title": "Goodput: seconds of rank 0 by purpose", "rows": [name for name, _ in ended], "series": series}))
    if phases := {name: seconds for name, seconds in run.phases.items() if any(second > 0 for second in seconds)}:
        ranks = max(map(len, phases.values()))
        note = "by the clock of the host: on a GPU, whose work is queued, its time is in the phase that waits for it"
        rows = [[seconds[rank] if rank < len(seconds) else None for rank in range(ranks)] for seconds in phases.values()]
        made.append(figures.add({"kind": "heat", "title": "Seconds by phase and rank", "rows": list(phases), "values": rows, "note": note}))
    parts = {"data": "data_s", "compute": "compute_s", "waiting for other ranks": "comm_s"}
    from drumline.report.curves import MOST_POINTS, binned

    lines = [{"name": name, "color": place, **binned(points, MOST_POINTS)} for place, (name, key) in enumerate(parts.items()) if (points := run.points("step", key))]
    if lines:
        note = "means over ranks" + ("" if len(lines) > 2 else "; waiting for others is not measured apart, and counts as compute")
        made.append(figures.add({"kind": "lines", "title": "Seconds of a step", "series": lines, "note": note}))
    if started := numbers(run.last("started").get("seconds")):
        made.append(tag("p", "First step after ", seconds_of(sum(started.values())), ": ", ", ".join(f"{k} {v:.1f} s" for k, v in started.items())))
    return tag("div", *made, class_="grid") if made else None


def memory(run: RunFacts, figures: Figures) -> Html | None:
    """Predicted against measured by category, and each rank over the steps."""
    made = []
    planned = numbers(run.last("planned").get("memory"))
    rows = run.comparisons
    measured = {row.category: row.measured for row in rows if row.unit == "bytes" and row.category in planned}
    names = [name for name in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "peak", "reserved") if planned.get(name)]
    if names:
        series = [{"name": "planned", "x": [planned[name] for name in names]}, {"name": "measured", "x": [measured.get(name) for name in names]}]
        note = "activations, logits and buffers are measured as a part of the peak"
        made.append(figures.add({"kind": "bars", "grouped": True, "unit": "bytes", "title": "Memory of the fullest rank", "rows": names, "series": series, "note": note}))
    if lines := _by_rank(run):
        by = "the allocator's peak" if run.last("run_start").get("device") == "cuda" else "the process's resident set, with Python and its libraries"
        made.append(figures.add({"kind": "lines", "unit": "bytes", "title": "Memory of each rank", "series": lines, "note": by}))
    if rows:
        cells = [[row.category, row.show(row.predicted), row.show(row.measured), row.by_how_much(), row.note or ("off" if row.warns else "")] for row in rows]
        made.append(tag("div", table(["", "planned", "measured", "", f"off: by more than {OFF:.0%}"], cells), class_="whole"))
    if (limit := number(run.last("planned").get("limit"))) and planned.get("reserved"):
        made.append(tag("p", f"A device has {bytes_of(limit)}; {bytes_of(planned['reserved'])} of it were planned for. Verdict: {run.last('planned').get('verdict')}."))
    return tag("div", *made, class_="grid") if made else None


def _by_rank(run: RunFacts) -> list[dict[str, Any]]:
    """Of a few ranks each; of more the least and the most."""
    from drumline.report.curves import MOST_POINTS, binned

    found: dict[int, list[float]] = {}
    for event in run.of("step"):
        ranks = event.get("memory_bytes")
        if isinstance(ranks, list) and ranks and all(number(each) is not None for each in ranks):
            found[event["step"]] = ranks
    most = max(map(len, found.values()), default=0)
    if most > 8:
        named: dict[str, Callable[[list[float]], float]] = {"least": min, "most": max}
    else:
        named = {f"rank {rank}": (lambda ranks, rank=rank: ranks[rank] if rank < len(ranks) else ranks[-1]) for rank in range(most)}  # type: ignore[misc]
    return [
        {"name": name, "color": place, **binned([(step, value(ranks)) for step, ranks in sorted(found.items())], MOST_POINTS)}
        for place, (name, value) in enumerate(named.items())
    ]


def communication(run: RunFacts, figures: Figures) -> Html | None:
    """Bytes by kind of collective, and seconds that computing did not hide."""
    planned, sent = numbers(run.last("planned").get("traffic")), run.points("step", "sent_bytes")
    waits, seconds = run.points("step", "comm_s"), run.points("step", "seconds")
    if not sent and not planned.get("total"):
        return None
    total = sum(value for _, value in seconds)
    known = [(f"planned: {name.replace('_', '-')}", bytes_of(value)) for name, value in planned.items() if value]
    known += [("counted, a step", bytes_of(sent[-1][1]) if sent else None), ("sent by a rank in all", bytes_of(sum(value for _, value in sent)) if sent else None)]
    share = f"{sum(value for _, value in waits) / total:.1%} of the steps' seconds" if waits and total else "not measured apart under this strategy"
    return facts([*known, ("waiting for other ranks", share)])


def faults(run: RunFacts, figures: Figures) -> Html | None:
    """Each attempt and how it ended, and what else went wrong."""
    rows = []
    for place, attempt in enumerate(run.attempts):
        steps, goodput = attempt.steps, numbers((attempt.end or {}).get("goodput"))
        again = seconds_of(goodput.get("recompute")) if goodput.get("recompute") else None
        reach = f"{steps[0]:,} – {steps[-1]:,}" if steps else "none"
        rows.append([place, moment(attempt.start["t"]), seconds_of(attempt.seconds), reach, again, attempt.outcome, (attempt.fault or {}).get("log")])
    if not rows:
        return None
    made = [table(["attempt", "began", "took", "steps", "steps done again", "end and cause", "log"], rows)]
    for kind, label in (("hang", "hang"), ("replan", "new plan"), ("takeover", "another host's launcher")):
        made += [facts([(label, event.get("why")), ("after step", event.get("step"))]) for event in run.of(kind)]
    return join(made)


def data(run: RunFacts, figures: Figures) -> Html | None:
    """Samples, and the tokens in the loss."""
    known = numbers(run.plan.get("data"))
    if not known.get("train_samples"):
        return None
    tokens, learned = known.get("train_tokens", 0.0), known.get("train_learned")
    in_loss = f"{learned:,.0f} ({learned / tokens:.1%})" if learned is not None and tokens else None
    passes = run.last("step").get("epoch")
    pairs = [("training samples", f"{known['train_samples']:,.0f}"), ("tokens", f"{tokens:,.0f}"), ("tokens in the loss", in_loss)]
    pairs += [("held-out samples", f"{known.get('eval_samples', 0):,.0f}"), ("passes over the data", f"{passes:.3g}" if number(passes) is not None else None)]
    trained = sum(value for _, value in run.points("step", "tokens"))
    return facts([*pairs, ("tokens trained on", f"{trained:,.0f}" if trained else None)])


def evaluations(run: RunFacts, figures: Figures) -> Html | None:
    """A row an evaluation; the last against the first."""
    found = run.of("eval")
    keys = list(dict.fromkeys(key for event in found for key in event if key not in ("t", "kind", "step", "samples", "seconds")))
    if not keys:
        return None
    rows = [[event["step"], *(number(event.get(key)) for key in keys), event.get("samples"), seconds_of(event.get("seconds"))] for event in found]
    change = []
    for key in keys:
        first, last = number(found[0].get(key)), number(found[-1].get(key))
        change.append(f"{last - first:+.4g}" if len(found) > 1 and first is not None and last is not None else None)
    return table(["after step", *keys, "samples", "took"], [*rows, ["change", *change, None, None]])


def checkpoints(run: RunFacts, figures: Figures) -> Html | None:
    rows = []
    for row in run.checkpoints:
        state = "whole" if row["whole"] else "damaged" if row["there"] else row.get("error") or "removed"
        at = moment(row["t"]) if "t" in row else None
        rows.append([row["step"], state, row["metric"], bytes_of(row.get("bytes")), seconds_of(row.get("seconds")), seconds_of(row.get("blocked_seconds")), at])
    export = run.last("export")
    line = tag("p", "Exported to ", tag("code", export.get("path")), f"; largest difference of logits {export.get('max_logit_difference')}") if export else ""
    metric = f"eval.metric ({run.config.get('eval.metric')})"
    return join((table(["after step", "state", metric, "size", "written in", "training waited", "at"], rows), line)) if rows or export else None


def environment(run: RunFacts, figures: Figures) -> Html | None:
    """Where it ran, and the command that repeats it."""
    start = run.last("run_start")
    pairs = [(name, value) for name, value in mapping(start.get("environment")).items()]
    pairs += [("processes", start.get("world_size")), ("parameters", count(number(start.get("parameters")) or 0) if start.get("parameters") else None)]
    command = repeat(run)
    again = tag("div", tag("pre", tag("code", command)), tag("button", "Copy", type="button", class_="copy"), class_="command") if command else ""
    return join((facts(pairs), tag("h3", "The command that repeats it") if command else "", again)) if pairs or command else None


def repeat(run: RunFacts) -> str | None:
    """`drumline train` of the run's own config.yaml, with as many processes, into another folder."""
    import shlex

    config, folder = run.folder / "config.yaml", run.folder.resolve()
    if not config.is_file():
        return None
    world = run.last("run_start").get("world_size")
    here = run.config.get("launch.kind", "local") == "local" and isinstance(world, int) and run.config.get("launch.nproc") is None
    return f"drumline train {shlex.quote(str(folder / 'config.yaml'))} {shlex.quote(f'run.dir={folder}-again')}" + f" --nproc {world}" * here


OF_A_RUN: dict[str, Callable[[RunFacts, Figures], Html | None]] = {
    "Time": times,
    "Memory": memory,
    "Communication": communication,
    "Attempts and faults": faults,
    "Data": data,
    "Evaluations": evaluations,
    "Checkpoints": checkpoints,
    "Environment": environment,
}
