"""The sections of a report that are of one run each.

For each section a function returns what it shows, or None if nothing of it was recorded. OF_A_RUN
lists them with their titles. templates/details.html.jinja makes HTML of what is returned here.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from drumline.config.load import override
from drumline.plan.explain import count
from drumline.plan.plan import LEFT_OUT
from drumline.report.curves import MOST_POINTS, Series, thin_out
from drumline.report.facts import (
    NOT_SCORES,
    Attempt,
    Points,
    RunFacts,
    as_mapping,
    as_number,
    as_numbers,
)
from drumline.report.markup import (
    ABSENT,
    Pairs,
    Table,
    format_bytes,
    format_seconds,
    format_time,
    table,
    without_empty,
)
from drumline.report.sections import ChartRegistry, ChartSlot
from drumline.telemetry.plan_accuracy import OFF, Comparison, lessons

# Purposes of the seconds in a run_end's goodput.
PURPOSES = ("productive", "recompute", "startup", "restore", "save", "eval", "other")
MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "peak",
    "reserved",
)
# Fields of a step event and the names of their curves.
STEP_SECONDS = {"data_s": "data", "compute_s": "compute", "comm_s": "waiting for other ranks"}
DEVICE_CURVES = {
    "utilisation": "utilisation, %",
    "celsius": "temperature, °C",
    "watts": "power, W",
}
# Kinds of events that are shown below the attempts.
TROUBLES = {"hang": "hang", "replan": "new plan", "takeover": "another host's launcher"}
# Episodes that a page shows, at most.
MOST_EPISODES = 400
# Ranks whose memory is drawn one by one. Of more ranks the least and the most are drawn.
MOST_RANKS = 8


@dataclass(frozen=True)
class Times:
    """What the seconds of a run were spent on."""

    charts: list[ChartSlot]
    # How long the first step took to come, and what that time was spent on; None if not known.
    first_step: str | None


def times(run: RunFacts, registry: ChartRegistry) -> Times | None:
    """Return goodput of each attempt, seconds of a step, and the heat map of ranks and phases.

    `registry`: the charts of the page, to which those of this section are added.
    """
    charts = [
        *_add_goodput_chart(run, registry),
        *_add_phases_chart(run, registry),
        *_add_step_seconds_chart(run, registry),
    ]
    first_step = None
    started = as_numbers(run.last("started").get("seconds"))
    if started:
        total = format_seconds(sum(started.values())) or ABSENT
        parts = [f"{name} {seconds:.1f} s" for name, seconds in started.items()]
        listed = ", ".join(parts)
        first_step = f"{total}: {listed}"
    if not charts and first_step is None:
        return None
    return Times(charts, first_step)


def _add_goodput_chart(run: RunFacts, registry: ChartRegistry) -> list[ChartSlot]:
    """Add the chart of seconds by purpose of each attempt that wrote them."""
    # The rows of the chart, and for each purpose the seconds of every row.
    names = []
    seconds_by_purpose: dict[str, list[float]] = {purpose: [] for purpose in PURPOSES}
    for number, attempt in enumerate(run.attempts):
        seconds_of_attempt = attempt.seconds_by_purpose
        if not seconds_of_attempt:
            continue
        names.append(f"attempt {number}")
        for purpose, seconds in seconds_by_purpose.items():
            seconds.append(seconds_of_attempt.get(purpose, 0.0))
    if not names:
        return []
    series = []
    for purpose, seconds in seconds_by_purpose.items():
        series.append({"name": purpose, "x": seconds})
    note = ""
    attempts = len(run.attempts)
    lost = attempts - len(names)
    if lost:
        # A rank writes its seconds when it ends, which one that is killed cannot do.
        note = f"{lost} of {attempts} attempts ended before they could write theirs"
    title = "Seconds of rank 0 by purpose"
    return [registry.add("bars", title, note, rows=names, series=series)]


def _add_phases_chart(run: RunFacts, registry: ChartRegistry) -> list[ChartSlot]:
    """Add the heat map of seconds by phase and rank, without phases that took no time."""
    names = []
    seconds_of_phases = []
    for phase, seconds in run.phases.items():
        if any(second > 0 for second in seconds):
            names.append(phase)
            seconds_of_phases.append(seconds)
    if not names:
        return []
    # A heat map needs rows of one length, but a phase of an attempt with fewer ranks has fewer.
    ranks = max(map(len, seconds_of_phases))
    values: list[list[float | None]] = []
    for seconds in seconds_of_phases:
        missing = [None] * (ranks - len(seconds))
        values.append([*seconds, *missing])
    title = "Seconds by phase and rank"
    note = (
        "by the host's clock; GPU kernels run asynchronously,"
        " so their time appears in the phase that synchronises"
    )
    return [registry.add("heat", title, note, rows=names, values=values)]


def _add_step_seconds_chart(run: RunFacts, registry: ChartRegistry) -> list[ChartSlot]:
    """Add the chart of what the seconds of a step were spent on.

    Without a measured time of waiting for other ranks, which counts as computing then, the chart
    has a note about it.
    """
    lines = []
    for color, (field, name) in enumerate(STEP_SECONDS.items()):
        points = run.points("step", field)
        if points:
            lines.append(_line(name, color, points))
    if not lines:
        return []
    note = "means over ranks"
    if len(lines) < len(STEP_SECONDS):
        note += "; waiting for others is not measured apart, and counts as compute"
    return [registry.add("lines", "Seconds of a step", note, series=lines)]


def _line(name: str, color: int, points: Points) -> Series:
    """Return a line of a chart, thinned out if it is long. `color`: its number in the palette."""
    line: Series = {"name": name, "color": color}
    line.update(thin_out(points, MOST_POINTS))
    return line


@dataclass(frozen=True)
class Memory:
    """The memory of the ranks."""

    charts: list[ChartSlot]
    # What a device has and what was planned, in a sentence; None if one of both is not known.
    verdict: str | None


def memory(run: RunFacts, registry: ChartRegistry) -> Memory | None:
    """Return the memory of each rank over the steps, and what a device has.

    `registry`: the charts of the page, to which those of this section are added.
    """
    event = run.last("planned")
    planned = as_numbers(event.get("memory"))
    charts = _add_memory_of_ranks_chart(run, registry)
    verdict = None
    limit = as_number(event.get("limit"))
    reserved = planned.get("reserved")
    if limit and reserved:
        device = f"A device has {format_bytes(limit)}"
        planned_for = f"{format_bytes(reserved)} of it were planned for"
        word = event.get("verdict")
        verdict = f"{device}; {planned_for}. Verdict: {word}."
    if not charts and verdict is None:
        return None
    return Memory(charts, verdict)


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a run, beside what it measured."""

    charts: list[ChartSlot]
    # A row for each category that was both predicted and measured: of bytes, and of seconds.
    tables: list[Table]
    # What the differences teach, a line each.
    lessons: list[str]
    # The command by which later plans learn from this run; None: nothing was measured.
    command: str | None


def prediction(run: RunFacts, registry: ChartRegistry) -> Prediction | None:
    """Return memory and seconds as predicted and as measured, by category and by part of a step.

    None if nothing was predicted. `registry`: the charts of the page, to which those of this section
    are added.
    """
    planned = as_numbers(run.last("planned").get("memory"))
    comparisons = run.comparisons
    charts = [
        *_add_memory_by_category_chart(planned, comparisons, registry),
        *_add_parts_chart(comparisons, "peak, ", "Peak of memory by part of a step", registry),
        *_add_parts_chart(comparisons, "seconds, ", "Seconds of a step by part", registry),
    ]
    tables = []
    for unit in ("bytes", "s"):
        rows = [row for row in comparisons if row.unit == unit]
        if rows:
            tables.append(_comparison_table(rows))
    command = None
    if comparisons:
        folder = shlex.quote(str(run.folder.resolve()))
        command = f"drumline plan --check {folder} --learn"
    if not charts and not tables:
        return None
    is_cpu = run.last("run_start").get("device") != "cuda"
    return Prediction(charts, tables, lessons(comparisons, is_cpu), command)


def _add_parts_chart(
    comparisons: list[Comparison], prefix: str, title: str, registry: ChartRegistry
) -> list[ChartSlot]:
    """Add the chart of predicted and measured values of the parts of a step.

    `prefix`: of the categories that are parts, such as `peak, `.
    """
    rows = [row for row in comparisons if row.category.startswith(prefix)]
    if not rows:
        return []
    names = [row.category.removeprefix(prefix) for row in rows]
    series = [
        {"name": "predicted", "x": [row.predicted for row in rows]},
        {"name": "measured", "x": [row.measured for row in rows]},
    ]
    return [registry.add("bars", title, grouped=True, unit=rows[0].unit, rows=names, series=series)]


def _add_memory_by_category_chart(
    planned: dict[str, float], comparisons: list[Comparison], registry: ChartRegistry
) -> list[ChartSlot]:
    """Add the chart of predicted and measured bytes of each category that was predicted."""
    names = [name for name in MEMORY_CATEGORIES if planned.get(name)]
    if not names:
        return []
    measured = {row.category: row.measured for row in comparisons}
    planned_bytes = [planned[name] for name in names]
    # None leaves out the bar.
    measured_bytes = [measured.get(name) for name in names]
    series = [
        {"name": "predicted", "x": planned_bytes},
        {"name": "measured", "x": measured_bytes},
    ]
    chart = registry.add(
        "bars",
        "Memory of the fullest rank",
        "of activations, logits and buffers only the sum is measured: see the table",
        grouped=True,
        unit="bytes",
        rows=names,
        series=series,
    )
    return [chart]


def _add_memory_of_ranks_chart(run: RunFacts, registry: ChartRegistry) -> list[ChartSlot]:
    """Add the chart of the memory of ranks over the steps."""
    lines = _memory_by_rank(run)
    if not lines:
        return []
    is_on_gpu = run.last("run_start").get("device") == "cuda"
    if is_on_gpu:
        measured_by = "the allocator's peak"
    else:
        measured_by = "the process's resident set, with Python and its libraries"
    title = "Memory of each rank"
    chart = registry.add("lines", title, measured_by, unit="bytes", series=lines)
    return [chart]


def _comparison_table(comparisons: list[Comparison]) -> Table:
    """Return the table of predicted against measured values."""
    rows = []
    for row in comparisons:
        why = row.note
        if not why and row.warns:
            why = "off"
        planned = row.show(row.predicted)
        measured = row.show(row.measured)
        difference = row.describe_difference()
        rows.append([row.category, planned, measured, difference, why])
    why_header = f"why (“off” is more than {OFF:.0%})"
    headers = ["", "predicted", "measured", "difference", why_header]
    return table(headers, rows)


def _memory_by_rank(run: RunFacts) -> list[Series]:
    """Return the memory of each rank as lines; of many ranks only the least and the most."""
    sizes_by_step = _memory_by_step(run)
    steps = sorted(sizes_by_step)
    # A run may go on with another number of ranks.
    ranks = max((len(sizes) for sizes in sizes_by_step.values()), default=0)
    if ranks > MOST_RANKS:
        least: Points = []
        most: Points = []
        for step in steps:
            sizes = sizes_by_step[step]
            least.append((step, min(sizes)))
            most.append((step, max(sizes)))
        return [_line("least", 0, least), _line("most", 1, most)]
    lines = []
    for rank in range(ranks):
        points: Points = []
        for step in steps:
            sizes = sizes_by_step[step]
            if rank < len(sizes):
                points.append((step, sizes[rank]))
        lines.append(_line(f"rank {rank}", rank, points))
    return lines


def _memory_by_step(run: RunFacts) -> dict[int, list[float]]:
    """Return the bytes of each rank by step, without those of damaged events."""
    sizes_by_step: dict[int, list[float]] = {}
    for event in run.events_of_kind("step"):
        sizes = event.get("memory_bytes")
        if not isinstance(sizes, list) or not sizes:
            continue
        # Without one of them the least and the most would be those of other ranks.
        are_numbers = all(as_number(bytes_) is not None for bytes_ in sizes)
        if are_numbers:
            sizes_by_step[event["step"]] = sizes
    return sizes_by_step


def communication(run: RunFacts, registry: ChartRegistry) -> Pairs | None:
    """Return bytes by kind of collective, and the share of time in which ranks waited for others.

    None if the run neither planned nor sent anything.
    """
    planned = as_numbers(run.last("planned").get("traffic"))
    sent = run.points("step", "sent_bytes")
    if not sent and not planned.get("total"):
        return None
    pairs: Pairs = []
    for name, bytes_ in planned.items():
        if bytes_:
            collective = name.replace("_", "-")
            size = format_bytes(bytes_)
            pairs.append((f"planned: {collective}", size))
    if sent:
        _, newest = sent[-1]
        total, prefix = _total_of_steps(run, sent)
        pairs.append(("sent per rank, last step", format_bytes(newest)))
        pairs.append(("sent per rank, all steps", f"{prefix}{format_bytes(total)}"))
    waiting = _share_of_waiting(run)
    pairs.append(("waiting for other ranks", waiting))
    return without_empty(pairs)


def _total_of_steps(run: RunFacts, points: Points) -> tuple[float, str]:
    """Return the sum of a value over all steps, and what to write before it: `about ` or nothing.

    It is `about ` if not all steps have an event, as with `run.log_every` above 1: the others count
    with the mean. Steps of a folder that the run continues count, too.
    """
    steps = as_number(run.last("step").get("step"))
    total = sum(value for _, value in points)
    if not points or steps is None or len(points) == steps:
        return total, ""
    return total / len(points) * steps, "about "


def _share_of_waiting(run: RunFacts) -> str:
    """Return the part of the steps' seconds in which a rank waited for others."""
    waits = run.points("step", "comm_s")
    total = sum(value for _, value in run.points("step", "seconds"))
    if not waits or not total:
        return "not measured apart under this strategy"
    waited = sum(value for _, value in waits)
    share = waited / total
    return f"{share:.1%} of the steps' seconds"


@dataclass(frozen=True)
class Attempts:
    """The starts of a run and how each ended."""

    attempts: Table
    # What else went wrong: hangs, new plans, and launchers of other hosts that took the run over.
    troubles: list[Pairs]


def faults(run: RunFacts, registry: ChartRegistry) -> Attempts | None:
    """Return each attempt and how it ended, and what else went wrong.

    None if the run never started.
    """
    if not run.attempts:
        return None
    rows = []
    for number, attempt in enumerate(run.attempts):
        rows.append([number, *_attempt_row(attempt)])
    headers = [
        "attempt",
        "began",
        "took",
        "steps",
        "steps done again",
        "end and cause",
        "log",
    ]
    troubles = []
    for kind, label in TROUBLES.items():
        for event in run.events_of_kind(kind):
            why = event.get("why")
            step = event.get("step")
            troubles.append(without_empty([(label, why), ("after step", step)]))
    return Attempts(table(headers, rows), troubles)


def _attempt_row(attempt: Attempt) -> list[Any]:
    """Return the cells of an attempt, without its number, in the order of `faults`' headers."""
    reach = "none"
    steps = attempt.steps
    if steps:
        first = steps[0]
        last = steps[-1]
        reach = f"{first:,} – {last:,}"
    done_again = None
    recompute = attempt.seconds_by_purpose.get("recompute")
    if recompute:
        done_again = format_seconds(recompute)
    log = None
    if attempt.fault is not None:
        log = attempt.fault.get("log")
    began = format_time(attempt.start_event["t"])
    took = format_seconds(attempt.seconds)
    return [began, took, reach, done_again, attempt.outcome, log]


@dataclass(frozen=True)
class Data:
    """What a run was trained on."""

    facts: Pairs
    # A row for each source of training rows; None if there is one alone.
    sources: Table | None


def data(run: RunFacts, registry: ChartRegistry) -> Data | None:
    """Return the samples, the tokens in the loss, and the sources of the training rows.

    None if the plan does not say how many samples there are.
    """
    planned = as_mapping(run.plan.get("data"))
    counts = as_numbers(planned)
    train_samples = counts.get("train_samples")
    if not train_samples:
        return None
    pairs: Pairs = [("training samples", f"{train_samples:,.0f}")]
    # Samples of a module of the user's own have no tokens.
    tokens = counts.get("train_tokens")
    learned = counts.get("train_learned")
    if tokens:
        pairs.append(("tokens", f"{tokens:,.0f}"))
        if learned:
            share = learned / tokens
            pairs.append(("tokens in the loss", f"{learned:,.0f} ({share:.1%})"))
    held_out = counts.get("eval_samples", 0)
    pairs.append(("held-out samples", f"{held_out:,.0f}"))
    passes = as_number(run.last("step").get("epoch"))
    if passes is not None:
        pairs.append(("passes over the data", f"{passes:.3g}"))
    if tokens:
        trained_tokens, prefix = _total_of_steps(run, run.points("step", "tokens"))
        if trained_tokens:
            pairs.append(("tokens trained on", f"{prefix}{trained_tokens:,.0f}"))
    sources = _dictionaries(planned.get("sources"))
    table_of_sources = None
    if len(sources) > 1:
        table_of_sources = _source_table(sources)
    return Data(without_empty(pairs), table_of_sources)


def _source_table(sources: list[dict[str, Any]]) -> Table:
    """Return a row for each source: how many rows were read, dropped and made into samples."""
    rows = []
    for source in sources:
        counts: dict[str, int] = {}
        for key, value in as_numbers(source).items():
            counts[key] = int(value)
        dropped_rows = 0
        for name in LEFT_OUT:
            dropped_rows += counts.get(name, 0)
        # Without a mixture of sources it is 0, which means nothing.
        per_epoch = counts.get("per_epoch") or None
        rows.append(
            [
                str(source.get("name")),
                counts.get("read"),
                dropped_rows,
                counts.get("tokens"),
                counts.get("samples"),
                per_epoch,
            ]
        )
    headers = [
        "source",
        "rows read",
        "left out",
        "tokens",
        "samples",
        "samples in an epoch",
    ]
    return table(headers, rows)


def evaluations(run: RunFacts, registry: ChartRegistry) -> Table | None:
    """Return a row for each evaluation, and a last one with the change from the first to the last.

    None if no evaluation has a score.
    """
    eval_events = run.events_of_kind("eval")
    # Of all evaluations: one may lack a score that another has.
    names: dict[str, None] = {}
    for event in eval_events:
        names.update(dict.fromkeys(as_numbers(event)))
    scores = [name for name in names if name not in NOT_SCORES]
    if not scores:
        return None
    rows = []
    for event in eval_events:
        values = [as_number(event.get(score)) for score in scores]
        samples = event.get("samples")
        took = format_seconds(event.get("seconds"))
        rows.append([event["step"], *values, samples, took])
    changes = [_change(eval_events, score) for score in scores]
    rows.append(["change", *changes, None, None])
    headers = ["after step", *scores, "samples", "took"]
    return table(headers, rows)


def _change(evaluations: list[dict[str, Any]], score: str) -> str | None:
    """Return the change of a score from the first to the last evaluation, with its sign.

    None if there is only one evaluation, or if one of the two has no such score.
    """
    if len(evaluations) < 2:
        return None
    first = as_number(evaluations[0].get(score))
    last = as_number(evaluations[-1].get(score))
    if first is None or last is None:
        return None
    difference = last - first
    return f"{difference:+.4g}"


class CardText(NamedTuple):
    """A text of a card, below its title."""

    title: str
    # None: the title stands alone.
    text: str | None
    # A class of page.css: `model` for what a model wrote, `error` for a failure; or none.
    class_: str = ""


@dataclass(frozen=True)
class Card:
    """A box of the page with a few titles and the text below each."""

    texts: list[CardText]
    # A number as text, by which page.js filters episodes; empty for a card without a reward.
    reward: str = ""
    # Some of MARKS, by which page.js filters episodes.
    marks: tuple[str, ...] = ()


def samples(run: RunFacts, registry: ChartRegistry) -> list[Card] | None:
    """Return what the model generated for the same held-out prompts, first and last.

    These are the events of `eval.samples`. None if the run has none.
    """
    # Each is (step, samples).
    written = []
    for event in run.events_of_kind("samples"):
        found = _dictionaries(event.get("samples"))
        if found:
            written.append((event["step"], found))
    if not written:
        return None
    first_step, first_samples = written[0]
    last_step, last_samples = written[-1]
    # Matched by their texts, since a resumed run may show more of them.
    first_by_prompt: dict[tuple[str, str], dict[str, Any]] = {}
    if len(written) > 1:
        for sample in first_samples:
            first_by_prompt[_prompt_key(sample)] = sample
    cards = []
    for sample in last_samples:
        texts: Pairs = [("prompt", sample.get("prompt"))]
        first = first_by_prompt.get(_prompt_key(sample))
        if first:
            texts.append((f"after step {first_step:,}", first.get("text")))
        texts.append((f"after step {last_step:,}", sample.get("text")))
        answer = sample.get("answer")
        if answer is not None:
            texts.append(("the row's answer", answer))
        cards.append(Card(_message_texts(texts)))
    return cards


def _prompt_key(sample: dict[str, Any]) -> tuple[str, str]:
    """Return the name of the evaluation set and the prompt of a sample."""
    return str(sample.get("set")), str(sample.get("prompt"))


# What an episode may be marked by → how the page calls these episodes.
MARKS = {
    "environment": "the environment failed",
    "tool": "a call of a tool failed",
    "unrewarded": "no reward",
    "cut": "cut before the end",
}


class Episode(NamedTuple):
    """A recorded episode of a rollout."""

    # The `completions` event that it is in.
    event: dict[str, Any]
    # Its own: prompt, text, reward and others, see `watched.Completions`.
    values: dict[str, Any]


@dataclass(frozen=True)
class Rollouts:
    """Episodes of a run."""

    # The newest first.
    episodes: list[Card]
    # A sentence that says which of the recorded episodes are shown.
    shown_note: str
    # Mark → how the page calls the episodes that have it, with their number. Only marks of some
    # episode that is shown.
    filters: dict[str, str]


def rollouts(run: RunFacts, registry: ChartRegistry) -> Rollouts | None:
    """Return episodes with their rewards, the newest first; page.js filters them.

    None if the run recorded none.
    """
    episodes = []
    for event in run.events_of_kind("completions"):
        for values in _dictionaries(event.get("completions")):
            episodes.append(Episode(event, values))
    if not episodes:
        return None
    shown_note = "The first episodes of each rollout."
    if len(episodes) > MOST_EPISODES:
        half = MOST_EPISODES // 2
        shown_note = f"The first and last {half} of {len(episodes):,} recorded episodes."
        episodes = [*episodes[:half], *episodes[-half:]]
    cards = [_episode_card(episode) for episode in reversed(episodes)]
    counts = Counter(mark for card in cards for mark in card.marks)
    filters = {}
    for mark, label in MARKS.items():
        if counts[mark]:
            filters[mark] = f"{label} ({counts[mark]:,})"
    return Rollouts(cards, shown_note, filters)


def _episode_card(episode: Episode) -> Card:
    """Return the card of an episode: its reward, step, domain and length, and its texts."""
    values = episode.values
    reward = as_number(values.get("reward"))
    worth = "no reward"
    filter_key = ""
    if reward is not None:
        worth = f"reward {reward:.4g}"
        # Exact, since the filter compares it with what the reader enters.
        filter_key = repr(reward)
    step = f"for steps up to {episode.event['step']:,}"
    # Older versions do not write it; only False means that no step learned from the rollout.
    if episode.event.get("trained") is False:
        step += " (not trained on)"
    tokens = values.get("tokens")
    length = f"{tokens} tokens"
    if not values.get("ended"):
        length += ", cut at the most tokens"
    domain = values.get("domain")
    head = f"{worth} · {step} · {domain} · {length}"
    turns = _dictionaries(values.get("messages"))
    if turns:
        texts = _turn_texts(turns, values.get("failure"))
    else:
        prompt = ("prompt", values.get("prompt"))
        completion = ("completion", values.get("text"))
        texts = _message_texts([prompt, completion])
    return Card([CardText(head, None), *texts], filter_key, _marks(values, turns))


def _marks(values: dict[str, Any], turns: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the MARKS of an episode. `turns`: its messages, if it has an environment."""
    marks = []
    if values.get("failure") is not None:
        marks.append("environment")
    if any(as_number(turn.get("tool_errors")) for turn in turns):
        marks.append("tool")
    if as_number(values.get("reward")) is None:
        marks.append("unrewarded")
    if not values.get("ended"):
        marks.append("cut")
    return tuple(marks)


def _turn_texts(turns: list[dict[str, Any]], failure: Any) -> list[CardText]:
    """Return the turns of an episode with an environment, each with who speaks.

    `failure`: why the environment failed; None if it did not.
    """
    texts: list[CardText] = []
    number = 0
    for turn in turns:
        title = str(turn.get("role"))
        if turn.get("name"):
            title = f"{title} {turn['name']}"
        # Only messages that the model has sampled have this key.
        is_sampled = "reward" in turn
        if is_sampled:
            number += 1
            title = f"{title}, turn {number}"
            reward = as_number(turn["reward"])
            if reward is not None:
                title = f"{title} · reward {reward:.4g}"
        texts.append(CardText(title, _turn_text(turn), _turn_class(turn, is_sampled)))
    if failure is not None:
        texts.append(CardText("the environment failed", str(failure), "error"))
    return texts


def _turn_class(turn: dict[str, Any], is_sampled: bool) -> str:
    """Return the class of page.css for a message. `is_sampled`: whether the model sampled it."""
    if is_sampled:
        return "model"
    # So begin the results of calls that failed (`rl.tools`).
    if turn.get("role") == "tool" and str(turn.get("content")).startswith("error:"):
        return "error"
    return ""


def _turn_text(turn: dict[str, Any]) -> str:
    """Return what a message says and calls, a line each."""
    lines = []
    if turn.get("content"):
        lines.append(str(turn["content"]))
    for call in _dictionaries(turn.get("tool_calls")):
        function = as_mapping(call.get("function"))
        arguments = function.get("arguments")
        # Long ones are the beginning of their JSON already.
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        lines.append(f"calls {function.get('name')} {arguments}")
    errors = turn.get("unread_calls")
    if isinstance(errors, list):
        for error in errors:
            lines.append(f"calls in a way that cannot be read: {error}")
    return "\n".join(lines)


def _dictionaries(value: Any) -> list[dict[str, Any]]:
    """Return the dictionaries of a list; empty for anything else."""
    if not isinstance(value, list):
        return []
    return [each for each in value if isinstance(each, dict)]


def _message_texts(pairs: Pairs) -> list[CardText]:
    """Return titles with their texts, each a text as it is, or messages as a line each."""
    texts: list[CardText] = []
    for title, value in pairs:
        text = None
        if value is not None:
            text = _message_text(value)
        texts.append(CardText(title, text))
    return texts


def _message_text(value: Any) -> str:
    """Return a text as it is, and messages as a line each."""
    if not isinstance(value, list):
        return str(value)
    lines = []
    for message in _dictionaries(value):
        role = message.get("role")
        content = message.get("content")
        lines.append(f"{role}: {content}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Devices:
    """What the devices did."""

    charts: list[ChartSlot]
    # The energy that they took, as text; None if no counter could be read.
    kwh: str | None


def devices(run: RunFacts, registry: ChartRegistry) -> Devices | None:
    """Return utilisation, temperature and power of each rank's GPU, and the energy of all devices.

    None if nothing of it was read. `registry`: the charts of the page, to which those of this
    section are added.
    """
    charts = []
    for name, label in DEVICE_CURVES.items():
        lines = []
        for rank, points in sorted(_device_points(run, name).items()):
            lines.append(_line(f"rank {rank}", rank, points))
        if lines:
            chart = registry.add("lines", f"GPU: {label}", series=lines)
            charts.append(chart)
    # In kWh. Each start counts its own, so that they are added up.
    energies = []
    for event in run.events_of_kind("run_end"):
        energy = as_number(event.get("kwh"))
        if energy is not None:
            energies.append(energy)
    kwh = None
    if energies:
        kwh = f"{sum(energies):.4g}"
    if not charts and kwh is None:
        return None
    return Devices(charts, kwh)


def _device_points(run: RunFacts, field: str) -> dict[int, Points]:
    """Return the points of a field of `devices` events by rank."""
    points: dict[int, Points] = {}
    for event in run.events_of_kind("devices"):
        step = event.get("step")
        if type(step) is not int:
            continue
        for rank, device in enumerate(_dictionaries(event.get("ranks"))):
            # None: the device has no such counter.
            value = as_number(device.get(field))
            if value is not None:
                of_rank = points.setdefault(rank, [])
                of_rank.append((step, value))
    return points


def experts(run: RunFacts, registry: ChartRegistry) -> list[ChartSlot] | None:
    """Return the heat map of each expert's tokens by layer, over the mean of the layer's experts.

    It is of the newest step whose tokens were written. None for a model without experts.
    """
    event = run.last("expert_load")
    names = []
    values: list[list[float | None]] = []
    for name, counts in as_mapping(event.get("tokens")).items():
        ratios = _ratios_to_mean(counts)
        if ratios:
            names.append(_short_layer_name(name))
            values.append([*ratios])
    if not names:
        return None
    # Layers may have different numbers of experts, but a heat map needs rows of one length.
    width = max(map(len, values))
    for row in values:
        row += [None] * (width - len(row))
    step = event.get("step")
    title = f"Tokens of each expert at step {step}, over the mean of its layer"
    chart = registry.add(
        "heat",
        title,
        "1: all experts of the layer get as many; no token is dropped",
        rows=names,
        columns=[f"expert {number}" for number in range(width)],
        unit="× mean",
        values=values,
    )
    return [chart]


def _ratios_to_mean(counts: Any) -> list[float]:
    """Return each of some counts over their mean; empty if these are damaged, or all 0."""
    if not isinstance(counts, list):
        return []
    numbers = [as_number(count) for count in counts]
    present = [number for number in numbers if number is not None and number >= 0]
    total = sum(present)
    if len(present) < len(numbers) or not total:
        return []
    return [number * len(present) / total for number in present]


def _short_layer_name(name: str) -> str:
    """Return `layer 3` for the name of a layer's module, which has its number in it."""
    for part in name.split("."):
        if part.isdecimal():
            return f"layer {part}"
    return name


@dataclass(frozen=True)
class Exported:
    """The export of a run, by the fields of its event."""

    path: Any
    # Between the trained model and the exported folder, as text.
    difference: str
    # Why there is no export; empty or None if there is one.
    error: Any


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that were saved, and the export."""

    checkpoints: Table
    # None: nothing was exported.
    export: Exported | None


def checkpoints(run: RunFacts, registry: ChartRegistry) -> Checkpoints | None:
    """Return a row for each checkpoint that was saved, and what was exported.

    None if the run did neither.
    """
    event = run.last("export")
    if not run.checkpoints and not event:
        return None
    export = None
    if event:
        difference = str(event.get("max_logit_difference"))
        export = Exported(event.get("path"), difference, event.get("error"))
    rows = []
    for row in run.checkpoints:
        saved_at = None
        if "t" in row:
            saved_at = format_time(row["t"])
        size = format_bytes(row.get("bytes"))
        took = format_seconds(row.get("seconds"))
        waited = format_seconds(row.get("blocked_seconds"))
        state = _checkpoint_state(row)
        step = row["step"]
        metric = row["metric"]
        rows.append([step, state, metric, size, took, waited, saved_at])
    metric_name = run.config.get("eval.metric")
    headers = [
        "after step",
        "state",
        f"eval.metric ({metric_name})",
        "size",
        "written in",
        "training waited",
        "at",
    ]
    return Checkpoints(table(headers, rows), export)


def _checkpoint_state(row: dict[str, Any]) -> str:
    """Return in a word whether a checkpoint can be loaded, or why it does not exist.

    `row`: as `RunFacts.checkpoints` has it.
    """
    if row["is_readable"]:
        return "whole"
    if row["exists"]:
        return "damaged"
    return row.get("error") or "removed"


@dataclass(frozen=True)
class Environment:
    """The host, the devices and the versions with which a run was trained."""

    facts: Pairs
    # The command that repeats the run; None if it has no config.yaml.
    command: str | None


def environment(run: RunFacts, registry: ChartRegistry) -> Environment:
    """Return the host and the versions of a run, and the command that repeats it."""
    start = run.last("run_start")
    recorded = as_mapping(start.get("environment"))
    pairs: Pairs = list(recorded.items())
    pairs.append(("processes", start.get("world_size")))
    parameters = start.get("parameters")
    if parameters:
        number = as_number(parameters) or 0
        pairs.append(("parameters", count(number)))
    return Environment(without_empty(pairs), repeat(run))


def repeat(run: RunFacts) -> str | None:
    """Return the command that trains the run's own config.yaml again, into another folder.

    It starts as many processes. None if the run has no config.yaml.
    """
    folder = run.folder.resolve()
    config = folder / "config.yaml"
    if not config.is_file():
        return None
    path = shlex.quote(str(config))
    run_dir = shlex.quote(override("run.dir", f"{folder}-again"))
    command = f"drumline train {path} {run_dir}"
    world_size = run.last("run_start").get("world_size")
    # Of other launchers, and if the config sets it, the config alone decides how many start.
    is_local = run.config.get("launch.kind", "local") == "local"
    is_nproc_set = run.config.get("launch.nproc") is not None
    if is_local and not is_nproc_set and isinstance(world_size, int):
        command += f" --nproc {world_size}"
    return command


# The title of each section, and the function that returns what it shows. Templates and page.py know
# a section by its title. A section adds its charts to the registry of the page; sections of tables and
# texts alone leave it as it is.
OF_A_RUN: dict[str, Callable[[RunFacts, ChartRegistry], Any]] = {
    "Time": times,
    "Predicted and measured": prediction,
    "Memory": memory,
    "Devices": devices,
    "Experts": experts,
    "Communication": communication,
    "Attempts and faults": faults,
    "Data": data,
    "Evaluations": evaluations,
    "Samples": samples,
    "Rollouts": rollouts,
    "Checkpoints": checkpoints,
    "Environment": environment,
}
