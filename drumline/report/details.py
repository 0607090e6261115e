"""The sections of a report that are of one run each: HTML, or None where nothing of it was recorded."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from drumline.core.explain import count
from drumline.core.load import override
from drumline.core.plan import LEFT_OUT
from drumline.report.curves import MOST_POINTS, binned
from drumline.report.facts import RunFacts, mapping, number, numbers
from drumline.report.markup import Html, bytes_of, facts, join, moment, seconds_of, table, tag
from drumline.report.sections import Drawings
from drumline.telemetry.truth import OFF

COUNTED = ("productive", "recompute", "startup", "restore", "save", "eval", "other")  # of goodput
# Of memory.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "peak",
    "reserved",
)
MOST_EPISODES = 400


def times(run: RunFacts, drawings: Drawings) -> Html | None:
    """Goodput of each attempt, seconds of a step, and the heat map of ranks and phases."""
    made = []
    ended = [
        (f"attempt {place}", numbers((attempt.end or {}).get("goodput")))
        for place, attempt in enumerate(run.attempts)
    ]
    ended = [(name, goodput) for name, goodput in ended if goodput]
    if ended:
        series = [
            {"name": part, "x": [goodput.get(part, 0.0) for _, goodput in ended]}
            for part in COUNTED
        ]
        lost = len(run.attempts) - len(ended)
        note = (
            f"{lost} of {len(run.attempts)} attempts ended before they could write theirs"
            if lost
            else ""
        )
        rows = [name for name, _ in ended]
        made.append(
            drawings.add("bars", "Seconds of rank 0 by purpose", note, rows=rows, series=series)
        )
    if phases := {
        name: seconds
        for name, seconds in run.phases.items()
        if any(second > 0 for second in seconds)
    }:
        ranks = max(map(len, phases.values()))
        note = "by the clock of the host: on a GPU, whose work is queued, its time is in the phase that waits for it"
        values = [
            [seconds[rank] if rank < len(seconds) else None for rank in range(ranks)]
            for seconds in phases.values()
        ]
        made.append(
            drawings.add(
                "heat", "Seconds by phase and rank", note, rows=list(phases), values=values
            )
        )
    parts = {"data": "data_s", "compute": "compute_s", "waiting for other ranks": "comm_s"}
    lines = [
        {"name": name, "color": place, **binned(points, MOST_POINTS)}
        for place, (name, key) in enumerate(parts.items())
        if (points := run.points("step", key))
    ]
    if lines:
        note = "means over ranks" + (
            ""
            if len(lines) > 2
            else "; waiting for others is not measured apart, and counts as compute"
        )
        made.append(drawings.add("lines", "Seconds of a step", note, series=lines))
    below = []
    if started := numbers(run.last("started").get("seconds")):
        below.append(
            tag(
                "p",
                "First step after ",
                seconds_of(sum(started.values())),
                ": ",
                ", ".join(f"{k} {v:.1f} s" for k, v in started.items()),
            )
        )
    return _grid(made, *below)


def _grid(made: list[Html], *below: Any) -> Html | None:
    """Drawings beside each other, and what stands below them."""
    return (
        join((tag("div", *made, class_="grid") if made else "", *below)) if made or below else None
    )


def memory(run: RunFacts, drawings: Drawings) -> Html | None:
    """Predicted against measured by category, and each rank over the steps."""
    made = []
    planned = numbers(run.last("planned").get("memory"))
    rows = run.comparisons
    measured = {
        row.category: row.measured
        for row in rows
        if row.unit == "bytes" and row.category in planned
    }
    names = [name for name in CATEGORIES if planned.get(name)]
    if names:
        series = [
            {"name": "planned", "x": [planned[name] for name in names]},
            {"name": "measured", "x": [measured.get(name) for name in names]},
        ]
        note = "activations, logits and buffers are measured as a part of the peak"
        made.append(
            drawings.add(
                "bars",
                "Memory of the fullest rank",
                note,
                grouped=True,
                unit="bytes",
                rows=names,
                series=series,
            )
        )
    if lines := _by_rank(run):
        on_gpu = run.last("run_start").get("device") == "cuda"
        by = (
            "the allocator's peak"
            if on_gpu
            else "the process's resident set, with Python and its libraries"
        )
        made.append(drawings.add("lines", "Memory of each rank", by, unit="bytes", series=lines))
    below = []
    if rows:
        cells = [
            [
                row.category,
                row.show(row.predicted),
                row.show(row.measured),
                row.by_how_much(),
                row.note or ("off" if row.warns else ""),
            ]
            for row in rows
        ]
        below.append(
            table(
                ["", "planned", "measured", "difference", f"why (“off” is more than {OFF:.0%})"],
                cells,
            )
        )
    if (limit := number(run.last("planned").get("limit"))) and planned.get("reserved"):
        verdict = run.last("planned").get("verdict")
        below.append(
            tag(
                "p",
                f"A device has {bytes_of(limit)}; {bytes_of(planned['reserved'])} of it were planned for. Verdict: {verdict}.",
            )
        )
    return _grid(made, *below)


def _by_rank(run: RunFacts) -> list[dict[str, Any]]:
    """Of a few ranks each; of more the least and the most."""
    found: dict[int, list[float]] = {}
    for event in run.of("step"):
        ranks = event.get("memory_bytes")
        if isinstance(ranks, list) and ranks and all(number(each) is not None for each in ranks):
            found[event["step"]] = ranks
    most = max(map(len, found.values()), default=0)
    if most > 8:
        named = {
            "least": {step: min(ranks) for step, ranks in found.items()},
            "most": {step: max(ranks) for step, ranks in found.items()},
        }
    else:
        named = {
            f"rank {rank}": {
                step: ranks[rank] for step, ranks in found.items() if rank < len(ranks)
            }
            for rank in range(most)
        }
    return [
        {"name": name, "color": place, **binned(sorted(points.items()), MOST_POINTS)}
        for place, (name, points) in enumerate(named.items())
    ]


def communication(run: RunFacts, drawings: Drawings) -> Html | None:
    """Bytes by kind of collective, and seconds that computing did not hide."""
    planned, sent = numbers(run.last("planned").get("traffic")), run.points("step", "sent_bytes")
    waits, seconds = run.points("step", "comm_s"), run.points("step", "seconds")
    if not sent and not planned.get("total"):
        return None
    total = sum(value for _, value in seconds)
    known = [
        (f"planned: {name.replace('_', '-')}", bytes_of(value))
        for name, value in planned.items()
        if value
    ]
    known += [
        ("counted, a step", bytes_of(sent[-1][1]) if sent else None),
        ("sent by a rank in all", bytes_of(sum(value for _, value in sent)) if sent else None),
    ]
    share = (
        f"{sum(value for _, value in waits) / total:.1%} of the steps' seconds"
        if waits and total
        else "not measured apart under this strategy"
    )
    return facts([*known, ("waiting for other ranks", share)])


def faults(run: RunFacts, drawings: Drawings) -> Html | None:
    """Each attempt and how it ended, and what else went wrong."""
    rows = []
    for place, attempt in enumerate(run.attempts):
        steps, goodput = attempt.steps, numbers((attempt.end or {}).get("goodput"))
        again = seconds_of(goodput.get("recompute")) if goodput.get("recompute") else None
        reach = f"{steps[0]:,} – {steps[-1]:,}" if steps else "none"
        rows.append(
            [
                place,
                moment(attempt.start["t"]),
                seconds_of(attempt.seconds),
                reach,
                again,
                attempt.outcome,
                (attempt.fault or {}).get("log"),
            ]
        )
    if not rows:
        return None
    made = [
        table(
            ["attempt", "began", "took", "steps", "steps done again", "end and cause", "log"], rows
        )
    ]
    for kind, label in (
        ("hang", "hang"),
        ("replan", "new plan"),
        ("takeover", "another host's launcher"),
    ):
        made += [
            facts([(label, event.get("why")), ("after step", event.get("step"))])
            for event in run.of(kind)
        ]
    return join(made)


def data(run: RunFacts, drawings: Drawings) -> Html | None:
    """Samples, and the tokens in the loss."""
    known = numbers(run.plan.get("data"))
    if not known.get("train_samples"):
        return None
    tokens, learned = known.get("train_tokens", 0.0), known.get("train_learned")
    in_loss = f"{learned:,.0f} ({learned / tokens:.1%})" if learned and tokens else None
    passes = run.last("step").get("epoch")
    # Samples of a module of the user's own have none.
    all_tokens = f"{tokens:,.0f}" if tokens else None
    pairs = [
        ("training samples", f"{known['train_samples']:,.0f}"),
        ("tokens", all_tokens),
        ("tokens in the loss", in_loss),
    ]
    pairs += [
        ("held-out samples", f"{known.get('eval_samples', 0):,.0f}"),
        ("passes over the data", f"{passes:.3g}" if number(passes) is not None else None),
    ]
    trained = 0.0
    if tokens:
        trained = sum(value for _, value in run.points("step", "tokens"))
    counts = facts([*pairs, ("tokens trained on", f"{trained:,.0f}" if trained else None)])
    found = mapping(run.plan.get("data")).get("sources")
    sources = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return tag("div", counts, _sources(sources)) if len(sources) > 1 else counts


def _sources(found: list[dict[str, Any]]) -> Html:
    """A row a source of the training rows: what was left out of it, and what an epoch has."""
    rows = []
    for each in found:
        counts = {key: int(value) for key, value in numbers(each).items()}
        without = sum(counts.get(name, 0) for name in LEFT_OUT)
        samples, mixed = counts.get("samples"), counts.get("per_epoch") or None
        rows.append(
            [
                str(each.get("name")),
                counts.get("read"),
                without,
                counts.get("tokens"),
                samples,
                mixed,
            ]
        )
    return table(
        ["source", "rows read", "left out", "tokens", "samples", "samples in an epoch"], rows
    )


def evaluations(run: RunFacts, drawings: Drawings) -> Html | None:
    """A row an evaluation; the last against the first."""
    found = run.of("eval")
    keys = list(
        dict.fromkeys(
            key
            for event in found
            for key in numbers(event)
            if key not in ("t", "step", "samples", "seconds")
        )
    )
    if not keys:
        return None
    rows = [
        [
            event["step"],
            *(number(event.get(key)) for key in keys),
            event.get("samples"),
            seconds_of(event.get("seconds")),
        ]
        for event in found
    ]
    change = []
    for key in keys:
        first, last = number(found[0].get(key)), number(found[-1].get(key))
        change.append(
            f"{last - first:+.4g}"
            if len(found) > 1 and first is not None and last is not None
            else None
        )
    return table(["after step", *keys, "samples", "took"], [*rows, ["change", *change, None, None]])


def samples(run: RunFacts, drawings: Drawings) -> Html | None:
    """What the weights wrote on the same held-out prompts, first and last."""
    found = [
        (event["step"], shown)
        for event in run.of("samples")
        if (shown := _dictionaries(event.get("samples")))
    ]
    if not found:
        return None
    # By their texts: a start that goes on may show more of them.
    firsts = (
        {(str(each.get("set")), str(each.get("prompt"))): each for each in found[0][1]}
        if len(found) > 1
        else {}
    )
    cards = []
    for last in found[-1][1]:
        answers = [("the row's answer", last.get("answer"))] * (last.get("answer") is not None)
        first = firsts.get((str(last.get("set")), str(last.get("prompt"))), {})
        before = [(f"after step {found[0][0]:,}", first.get("text"))] if first else []
        texts = [
            ("prompt", last.get("prompt")),
            *before,
            (f"after step {found[-1][0]:,}", last.get("text")),
            *answers,
        ]
        cards.append(_card(texts))
    return tag("div", *cards, class_="cards")


def rollouts(run: RunFacts, drawings: Drawings) -> Html | None:
    """Episodes with their rewards; page.js filters them."""
    found = [
        (event, each)
        for event in run.of("completions")
        for each in _dictionaries(event.get("completions"))
    ]
    if not found:
        return None
    kept = (
        [*found[: MOST_EPISODES // 2], *found[-(MOST_EPISODES // 2) :]]
        if len(found) > MOST_EPISODES
        else found
    )
    cards = []
    for event, each in reversed(kept):
        reward, ended = (
            number(each.get("reward")),
            "" if each.get("ended") else ", cut at the most tokens",
        )
        worth = "no reward" if reward is None else f"reward {reward:.4g}"
        step = f"to step {event['step']:,}"
        if event.get("trained") is False:
            step += " (not reached)"
        head = f"{worth} · {step} · {each.get('domain')} · {each.get('tokens')} tokens{ended}"
        cards.append(
            _card(
                [(head, None), ("prompt", each.get("prompt")), ("completion", each.get("text"))],
                reward,
            )
        )
    limits = (
        tag(
            "input",
            type="number",
            step="any",
            class_=kind,
            placeholder=f"reward, {label}",
            aria_label=f"reward, {label}",
        )
        for kind, label in (("least", "from"), ("most", "to"))
    )
    search = tag("input", type="search", placeholder="search texts", aria_label="search texts")
    left_out = (
        f"The first and last {MOST_EPISODES // 2} of {len(found):,} recorded episodes."
        if len(found) > len(kept)
        else "The first episodes of each rollout."
    )
    return tag(
        "div",
        tag(
            "p", *limits, search, tag("span", class_="count"), tag("span", left_out), class_="tools"
        ),
        tag("div", *cards, class_="cards"),
        class_="episodes",
    )


def _dictionaries(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _card(texts: list[tuple[str, Any]], reward: float | None = None) -> Html:
    made = [
        join((tag("b", name), tag("pre", _written(value)) if value is not None else ""))
        for name, value in texts
    ]
    return tag("div", *made, class_="card", data_reward="" if reward is None else repr(reward))


def _written(value: Any) -> str:
    """A text, or messages a line each."""
    if isinstance(value, list):
        return "\n".join(
            f"{each.get('role')}: {each.get('content')}" for each in _dictionaries(value)
        )
    return str(value)


def devices(run: RunFacts, drawings: Drawings) -> Html | None:
    """Utilisation, temperature and power of each rank's GPU; energy."""
    made = []
    for name, label in (
        ("utilisation", "utilisation, %"),
        ("celsius", "temperature, °C"),
        ("watts", "power, W"),
    ):
        points: dict[int, list[tuple[int, float]]] = {}
        for event in run.of("devices"):
            for rank, each in enumerate(_dictionaries(event.get("ranks"))):
                if (value := number(each.get(name))) is not None and type(event.get("step")) is int:
                    points.setdefault(rank, []).append((event["step"], value))
        lines = [
            {"name": f"rank {rank}", "color": rank, **binned(each, MOST_POINTS)}
            for rank, each in sorted(points.items())
        ]
        made += [drawings.add("lines", f"GPU: {label}", series=lines)] if lines else []
    energy = [
        value for event in run.of("run_end") if (value := number(event.get("kwh"))) is not None
    ]
    return _grid(
        made, *[tag("p", f"Energy that the devices took: {sum(energy):.4g} kWh.")] * bool(energy)
    )


def checkpoints(run: RunFacts, drawings: Drawings) -> Html | None:
    rows = []
    for row in run.checkpoints:
        state = (
            "whole"
            if row["whole"]
            else "damaged"
            if row["there"]
            else row.get("error") or "removed"
        )
        at = moment(row["t"]) if "t" in row else None
        rows.append(
            [
                row["step"],
                state,
                row["metric"],
                bytes_of(row.get("bytes")),
                seconds_of(row.get("seconds")),
                seconds_of(row.get("blocked_seconds")),
                at,
            ]
        )
    export = run.last("export")
    line = ""
    if export and export.get("error"):
        line = tag("p", export["error"])
    elif export:
        difference = export.get("max_logit_difference")
        line = tag(
            "p",
            "Exported to ",
            tag("code", export.get("path")),
            f"; largest difference of logits {difference}",
        )
    metric = f"eval.metric ({run.config.get('eval.metric')})"
    return (
        join(
            (
                table(
                    ["after step", "state", metric, "size", "written in", "training waited", "at"],
                    rows,
                ),
                line,
            )
        )
        if rows or export
        else None
    )


def environment(run: RunFacts, drawings: Drawings) -> Html | None:
    """Where it ran, and the command that repeats it."""
    start = run.last("run_start")
    pairs = [(name, value) for name, value in mapping(start.get("environment")).items()]
    pairs += [
        ("processes", start.get("world_size")),
        (
            "parameters",
            count(number(start.get("parameters")) or 0) if start.get("parameters") else None,
        ),
    ]
    command = repeat(run)
    again = (
        tag(
            "div",
            tag("pre", tag("code", command)),
            tag("button", "Copy", type="button", class_="copy"),
            class_="command",
        )
        if command
        else ""
    )
    return (
        join((facts(pairs), tag("h3", "The command that repeats it") if command else "", again))
        if pairs or command
        else None
    )


def repeat(run: RunFacts) -> str | None:
    """`drumline train` of the run's own config.yaml, with as many processes, into another folder."""
    config, folder = run.folder / "config.yaml", run.folder.resolve()
    if not config.is_file():
        return None
    world = run.last("run_start").get("world_size")
    here = (
        run.config.get("launch.kind", "local") == "local"
        and isinstance(world, int)
        and run.config.get("launch.nproc") is None
    )
    return (
        f"drumline train {shlex.quote(str(folder / 'config.yaml'))} {shlex.quote(override('run.dir', f'{folder}-again'))}"
        + f" --nproc {world}" * here
    )


OF_A_RUN: dict[str, Callable[[RunFacts, Drawings], Html | None]] = {
    "Time": times,
    "Memory": memory,
    "Devices": devices,
    "Communication": communication,
    "Attempts and faults": faults,
    "Data": data,
    "Evaluations": evaluations,
    "Samples": samples,
    "Rollouts": rollouts,
    "Checkpoints": checkpoints,
    "Environment": environment,
}
