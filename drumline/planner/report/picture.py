"""The answer as a figure: memory by category with the device's limit, and time against memory with the Pareto front."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault, UserError
from drumline.foreign import disk_errors
from drumline.planner.report.table import CATEGORIES, gradients_at_peak, headline, main_cells
from drumline.planner.search.answer import GB, Answer, Candidate, number
from drumline.report.markup import table, text

KINDS = (".png", ".svg", ".html")
# The colours of Okabe and Ito, which colour-blind readers can distinguish; what the allocator cannot use is grey.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#999999", "#DDDDDD")
RESERVE = "reserve"
FIT, NO_FIT, FRONT = "#0072B2", "#D55E00", "#009E73"
MOST_BARS, MOST_REFUSED = 12, 6
# So that a line does not run through a number.
BEHIND = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 0.8,
}
FAR = 1.6  # limits of the device: what needs more is left out of the picture
SLOW = 4  # times the slowest that fits: what does not fit and takes longer would press all others together, and has its bar alone


@dataclass(frozen=True)
class Shown:
    """The candidates to draw: `fit` or tight ones in the answer's order, `refused` the nearest first; `left_out`: the number of others."""

    fit: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    limit: float
    left_out: int


def draw(answer: Answer, path: Path) -> None:
    """Write a .png, .svg or .html (the picture in it, and the figures as tables). Raises UserError or EnvironmentFault."""
    if path.suffix.lower() not in KINDS:
        fix = f"name a file that ends in {' or '.join(KINDS)}"
        raise UserError(f"no picture of kind {path.suffix!r}", where=f"--figure {path}", fix=fix)
    shown = chosen_of(answer)
    if not shown.fit and not shown.refused:
        raise UserError(
            "there is nothing to draw: rules refuse every family",
            where=f"--figure {path}",
            fix="see the table",
        )
    figure = figure_of(answer, shown)
    with disk_errors(
        "cannot be written", f"--figure {path}", EnvironmentFault, "choose another place"
    ):
        if path.suffix.lower() == ".html":
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg")
            path.write_text(page(answer, drawn.getvalue()), encoding="utf-8")
        else:
            figure.savefig(path, dpi=150)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats in both memory and time, from the least memory to the least time."""
    best: list[Candidate] = []
    for candidate in sorted(
        candidates, key=lambda c: (c.estimate.memory.reserved, -c.estimate.tokens_per_s)
    ):
        if not best or candidate.estimate.tokens_per_s > best[-1].estimate.tokens_per_s:
            best.append(candidate)
    return best


def chosen_of(answer: Answer) -> Shown:
    """The first MOST_BARS, and of those that do not fit the nearest."""
    limit = answer.question.cluster.device.memory_bytes
    near = sorted(
        (r.best for r in answer.refused if r.best), key=lambda c: c.estimate.memory.reserved
    )
    refused = [c for c in near if c.estimate.memory.reserved <= FAR * limit] or near[:1]
    drawn = tuple(answer.ranked[:MOST_BARS]), tuple(refused[:MOST_REFUSED])
    return Shown(*drawn, limit / GB, len(answer.ranked) + len(near) - len(drawn[0]) - len(drawn[1]))


def figure_of(answer: Answer, shown: Shown) -> Any:
    """A matplotlib Figure. Raises EnvironmentFault where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise EnvironmentFault(
            "the package matplotlib is missing", where="--figure", fix="pip install matplotlib"
        ) from None
    rows = len(shown.fit) + len(shown.refused)
    figure = Figure(figsize=(14, max(4.6, 2.0 + 0.34 * rows)), layout="constrained")
    FigureCanvasAgg(figure)  # which knows how large texts are
    bars, points = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _bars(bars, shown)
    _points(points, shown)
    figure.suptitle(" · ".join(headline(answer.question)), fontsize=11, x=0.01, ha="left")
    if shown.left_out:
        figure.supxlabel(
            f"{shown.left_out} more not drawn: slower ones, and ones that need far more",
            fontsize=8,
            x=0.99,
            ha="right",
        )
    return figure


def _bars(axes: Any, shown: Shown) -> None:
    """A bar a candidate, the best on top; those that do not fit below, hatched."""
    candidates = [*shown.fit, *shown.refused]
    places = [
        *range(len(shown.fit)),
        *(len(shown.fit) + 0.6 + i for i in range(len(shown.refused))),
    ]
    left = [0.0] * len(candidates)
    for part, colour in zip((*CATEGORIES, RESERVE), COLOURS, strict=True):
        widths = [part_of(c, part) for c in candidates]
        drawn = axes.barh(
            places,
            widths,
            left=left,
            color=colour,
            height=0.72,
            label=part,
            edgecolor="white",
            linewidth=0.4,
        )
        for bar in drawn[len(shown.fit) :]:
            bar.set_hatch("////")
            bar.set_alpha(0.55)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    furthest = max(max(left), shown.limit)
    for candidate, place, end in zip(candidates, places, left, strict=True):
        needs = [each / GB for each in candidate.estimate.needs]
        axes.plot(needs, (place, place), color="black", linewidth=1)
        axes.text(
            max(end, needs[1]) + 0.01 * furthest,
            place,
            f"{candidate.estimate.memory.reserved / GB:.1f}",
            va="center",
            fontsize=8,
            bbox=BEHIND,
        )
    axes.set_yticks(places, [c.name for c in candidates], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * furthest)
    _frame(axes, shown.limit, columns=4)
    axes.set_xlabel("GB of the fullest device; the number is what it needs in all")
    axes.set_title(
        "Memory by category, at the peak" + (" (hatched: does not fit)" if shown.refused else ""),
        fontsize=10,
        loc="left",
    )


def _frame(axes: Any, limit: float, columns: int) -> None:
    """Lines at the limits of memory, the legend below, and no lines on top and at the right."""
    axes.axvline(limit, color="black", linewidth=1.4)
    below = (0.5, -0.55 / (axes.figure.get_figheight() - 1.5))
    axes.legend(fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=below, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def part_of(candidate: Candidate, part: str) -> float:
    """GB of a category at the peak: of the gradients, as many as are there then. They make the peak together, and with the reserve what
    is needed."""
    memory = candidate.estimate.memory
    if part == RESERVE:
        return (memory.reserved - memory.peak - memory.overhead) / GB
    if part == "gradients":
        return gradients_at_peak(memory) / GB
    return float(getattr(memory, part)) / GB


def _points(axes: Any, shown: Shown) -> None:
    """Seconds for a million tokens against what a device needs; the first of the answer and the front have their names beside."""
    slowest = min((c.estimate.tokens_per_s for c in shown.fit), default=0.0)
    refused = [c for c in shown.refused if SLOW * c.estimate.tokens_per_s >= slowest]
    for group, colour, marker, label in (
        (shown.fit, FIT, "o", "fits or tight"),
        (refused, NO_FIT, "x", "does not fit"),
    ):
        axes.scatter(*_places(group), color=colour, marker=marker, s=36, zorder=3, label=label)
    front, label = pareto(shown.fit), "Pareto front: none needs less and is faster"
    axes.plot(
        *_places(front), color=FRONT, linewidth=1.6, zorder=2, drawstyle="steps-post", label=label
    )
    _frame(axes, shown.limit, columns=3)
    times = _places([*shown.fit, *refused])[1]
    if max(times) > 4 * min(times):
        axes.set_yscale("log")
        for of_axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            of_axis("{x:g}")
    else:
        axes.set_ylim(0.85 * min(times), 1.1 * max(times))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"GB that a device needs (line: {shown.limit:.1f} there are)")
    axes.set_ylabel("seconds for 1M tokens")
    axes.set_title("Time against memory", fontsize=10, loc="left")
    _name(axes, list({c.name: c for c in (*shown.fit[:1], *front)}.values()))


def _places(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [c.estimate.memory.reserved / GB for c in candidates], [
        1e6 / c.estimate.tokens_per_s for c in candidates
    ]


def _name(axes: Any, candidates: Sequence[Candidate]) -> None:
    """Names in a column right of the axes, as high as their points but a line apart at least, each with a thin line to its point."""
    axes.figure.canvas.draw()  # lays the axes out
    place = (axes.transData + axes.transAxes.inverted()).transform
    points = [
        (*place(at), c)
        for c, at in zip(candidates, zip(*_places(candidates), strict=True), strict=True)
    ]
    points.sort(key=lambda point: (point[1], point[0]))
    # Of the axes' height: a fifth of an inch.
    gap = 0.2 / axes.get_window_extent().height * axes.figure.dpi
    heights = [y for _, y, _ in points]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    too_high = max(0.0, max(heights, default=0.0) - 1.0)
    for (x, y, candidate), height in zip(points, heights, strict=True):
        axes.annotate(
            candidate.name,
            xy=(x, y),
            xytext=(1.03, height - too_high),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=9,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": "#999999",
                "linewidth": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 4,
            },
            annotation_clip=False,
        )


def page(answer: Answer, svg: str) -> str:
    """A page of its own: the picture as SVG, and the figures as tables."""
    title = text(" · ".join(headline(answer.question)))
    heads = (
        "strategy",
        "verdict",
        "needs GB",
        "step s",
        "tokens/s",
        "MFU",
        *(f"{part} GB" for part in CATEGORIES),
        "sent GB",
    )
    rows = [
        (
            c.name,
            *main_cells(c).values(),
            *(f"{getattr(c.estimate.memory, part) / GB:.1f}" for part in CATEGORIES),
            number(c.estimate.traffic.total / GB),
        )
        for c in answer.ranked
    ]
    out = [(r.name, r.reason) for r in answer.refused]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>body{{font:14px system-ui;margin:2em;max-width:1300px}}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.out td{text-align:left}</style>",
        f"<h1 style='font-size:18px'>{title}</h1>",
        svg[svg.index("<svg") :],
        table(heads, rows) if rows else "<p>Nothing fits.</p>",
        "<h2 style='font-size:16px'>Out</h2>" + table(("family", "reason"), out, class_="out")
        if out
        else "",
    ]
    return "\n".join(parts) + "\n"
