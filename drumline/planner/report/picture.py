"""The report of `drumline plan --figure`.

On the left are bars of memory by category beside the device's limit, on the right points of time
against memory. The bars show why a plan fits, and the points which plan is worth its memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drumline.errors import EnvironmentFault, UserError
from drumline.foreign import disk_errors
from drumline.planner.report.table import CATEGORIES, gradients_at_peak, headline, main_cells
from drumline.planner.search.answer import GB, Answer, Candidate, number
from drumline.report.markup import render, table

KINDS = (".png", ".svg", ".html")
# The colours of Okabe and Ito, which colour-blind readers can distinguish; what the allocator cannot
# use is grey.
COLOURS = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#F0E442",
    "#CC79A7",
    "#999999",
    "#DDDDDD",
)
# What the allocator reserves and cannot use.
RESERVE = "reserve"
PARTS = (*CATEGORIES, RESERVE)
# Colours of the points: of what fits, of what does not, and of the Pareto front.
FIT = "#0072B2"
NO_FIT = "#D55E00"
FRONT = "#009E73"
# Bars of what fits, and of what does not.
MOST_BARS = 12
MOST_REFUSED = 6
# Heights along the axis of bars: of a bar, and of the gap between those that fit and those that do
# not.
BAR_HEIGHT = 0.72
GAP_HEIGHT = 0.6
# The box behind a number, so that no line runs through its digits.
NUMBER_BACKGROUND = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 0.8,
}
# Candidates that need more than this many times the device's memory are not drawn.
MOST_OF_LIMIT = 1.6
# A candidate that does not fit has no point if the slowest that fits is more than this many times as
# fast: the point would press all others together.
MOST_TIMES_SLOWER = 4
# The axis of seconds is logarithmic if the slowest candidate takes more than this many times as long as
# the fastest.
LOGARITHMIC_FROM = 4
MILLION = 1e6
# Names beside the points: inches from one to the next, and their left edge as a share of the axes'
# width.
NAME_DISTANCE = 0.2
NAME_LEFT = 1.03
# The thin line from a name to its point. Distances from the ends are in points.
NAME_LINE = {
    "arrowstyle": "-",
    "color": "#999999",
    "linewidth": 0.7,
    "relpos": (0, 0.5),
    "shrinkA": 2,
    "shrinkB": 4,
}


@dataclass(frozen=True)
class Shown:
    """The candidates to draw.

    `fit`: those that fit or are tight, in the answer's order.
    `refused`: the nearest that do not fit, the nearest first.
    `limit`: GB of a device.
    `left_out`: the number of candidates that are not drawn.
    """

    fit: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    limit: float
    left_out: int


def draw(answer: Answer, path: Path) -> None:
    """Write the figure as .png, .svg or .html. The last also has its numbers as tables.

    Raises UserError for another kind of file, and EnvironmentFault if matplotlib is missing or the file
    cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in KINDS:
        fix = f"name a file that ends in {' or '.join(KINDS)}"
        raise UserError(f"no picture of kind {path.suffix!r}", where=f"--figure {path}", fix=fix)
    shown = select_candidates(answer)
    if not shown.fit and not shown.refused:
        raise UserError(
            "there is nothing to draw: rules refuse every family",
            where=f"--figure {path}",
            fix="see the table",
        )
    figure = make_figure(answer, shown)
    with disk_errors(
        "cannot be written", f"--figure {path}", EnvironmentFault, "choose another place"
    ):
        if kind == ".html":
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg")
            path.write_text(page(answer, drawn.getvalue()), encoding="utf-8")
        else:
            figure.savefig(path, dpi=150)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other one beats in both memory and time.

    The first needs the least memory, the last takes the least time.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=_memory_then_speed):
        if not best or candidate.estimate.tokens_per_s > best[-1].estimate.tokens_per_s:
            best.append(candidate)
    return best


def _memory_then_speed(candidate: Candidate) -> tuple[int, float]:
    """Return the key that sorts candidates by memory, and equal ones by speed, the fastest first."""
    return candidate.estimate.memory.reserved, -candidate.estimate.tokens_per_s


def _needed_bytes(candidate: Candidate) -> int:
    """Return the bytes that a device needs."""
    return candidate.estimate.memory.reserved


def select_candidates(answer: Answer) -> Shown:
    """Return the first MOST_BARS candidates that fit, and the nearest that do not."""
    limit = answer.question.cluster.device.memory_bytes
    refused = [family.best for family in answer.refused if family.best is not None]
    refused.sort(key=_needed_bytes)
    near = [candidate for candidate in refused if _needed_bytes(candidate) <= MOST_OF_LIMIT * limit]
    if not near:
        near = refused[:1]
    drawn_fit = tuple(answer.ranked[:MOST_BARS])
    drawn_refused = tuple(near[:MOST_REFUSED])
    candidates = len(answer.ranked) + len(refused)
    left_out = candidates - len(drawn_fit) - len(drawn_refused)
    return Shown(drawn_fit, drawn_refused, limit / GB, left_out)


def make_figure(answer: Answer, shown: Shown) -> Any:
    """Return the figure as one of matplotlib. Raise EnvironmentFault if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise EnvironmentFault(
            "the package matplotlib is missing", where="--figure", fix="pip install matplotlib"
        ) from None
    rows = len(shown.fit) + len(shown.refused)
    height = max(4.6, 2.0 + 0.34 * rows)  # inches
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)  # which knows how large texts are
    bars, points = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_bars(bars, shown)
    _draw_points(points, shown)
    figure.suptitle(" · ".join(headline(answer.question)), fontsize=11, x=0.01, ha="left")
    if shown.left_out:
        figure.supxlabel(
            f"{shown.left_out} more not drawn: slower ones, and ones that need far more",
            fontsize=8,
            x=0.99,
            ha="right",
        )
    return figure


def _draw_bars(axes: Any, shown: Shown) -> None:
    """Draw a bar a candidate, the best on top; those that do not fit are below, and hatched."""
    candidates = [*shown.fit, *shown.refused]
    heights: list[float] = list(range(len(shown.fit)))
    for index in range(len(shown.refused)):
        heights.append(len(shown.fit) + GAP_HEIGHT + index)
    ends = [0.0] * len(candidates)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [peak_gb(candidate, part) for candidate in candidates]
        drawn = axes.barh(
            heights,
            widths,
            left=ends,
            color=colour,
            height=BAR_HEIGHT,
            label=part,
            edgecolor="white",
            linewidth=0.4,
        )
        for bar in drawn[len(shown.fit) :]:
            bar.set_hatch("////")
            bar.set_alpha(0.55)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    furthest = max(max(ends), shown.limit)
    for candidate, height, end in zip(candidates, heights, ends, strict=True):
        _draw_range(axes, candidate, height, end, furthest)
    axes.set_yticks(heights, [candidate.name for candidate in candidates], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * furthest)
    _draw_frame(axes, shown.limit, columns=4)
    axes.set_xlabel("GB of the fullest device; the number is what it needs in all")
    title = "Memory by category, at the peak"
    if shown.refused:
        title += " (hatched: does not fit)"
    axes.set_title(title, fontsize=10, loc="left")


def _draw_range(
    axes: Any, candidate: Candidate, height: float, end: float, furthest: float
) -> None:
    """Draw the range of what a candidate needs over its bar, and the number behind both.

    `height`: of the bar along the y axis; `end`: of the bar, GB; `furthest`: the longest bar or the limit, GB.
    """
    low, high = candidate.estimate.needs
    needs = [low / GB, high / GB]
    axes.plot(needs, (height, height), color="black", linewidth=1)
    axes.text(
        max(end, needs[1]) + 0.01 * furthest,
        height,
        f"{candidate.estimate.memory.reserved / GB:.1f}",
        va="center",
        fontsize=8,
        bbox=NUMBER_BACKGROUND,
    )


def _draw_frame(axes: Any, limit: float, columns: int) -> None:
    """Draw the limit of memory as a line, put the legend below, and leave out the upper and right border.

    `limit`: GB of a device; `columns`: of the legend.
    """
    axes.axvline(limit, color="black", linewidth=1.4)
    below = (0.5, -0.55 / (axes.figure.get_figheight() - 1.5))
    axes.legend(fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=below, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def peak_gb(candidate: Candidate, part: str) -> float:
    """Return the GB of a category at the peak, of the gradients only those that exist then.

    All categories make the peak together, and with the reserve what a device needs.
    """
    memory = candidate.estimate.memory
    if part == RESERVE:
        return (memory.reserved - memory.peak - memory.overhead) / GB
    if part == "gradients":
        return gradients_at_peak(memory) / GB
    return float(getattr(memory, part)) / GB


def _draw_points(axes: Any, shown: Shown) -> None:
    """Draw seconds for a million tokens against what a device needs.

    The first of the answer and the Pareto front have their names beside.
    """
    slowest = min((_speed(candidate) for candidate in shown.fit), default=0.0)
    refused = [
        candidate for candidate in shown.refused if MOST_TIMES_SLOWER * _speed(candidate) >= slowest
    ]
    _draw_markers(axes, shown.fit, FIT, "o", "fits or tight")
    _draw_markers(axes, refused, NO_FIT, "x", "does not fit")
    front = pareto(shown.fit)
    points = _points_of(front)
    axes.plot(
        points.gb,
        points.seconds,
        color=FRONT,
        linewidth=1.6,
        zorder=2,
        drawstyle="steps-post",
        label="Pareto front: none needs less and is faster",
    )
    _draw_frame(axes, shown.limit, columns=3)
    _scale_seconds(axes, _points_of([*shown.fit, *refused]).seconds)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"GB that a device needs (line: {shown.limit:.1f} there are)")
    axes.set_ylabel("seconds for 1M tokens")
    axes.set_title("Time against memory", fontsize=10, loc="left")
    # The answer's first may be part of the front, too.
    named = {candidate.name: candidate for candidate in (*shown.fit[:1], *front)}
    _draw_names(axes, list(named.values()))


def _speed(candidate: Candidate) -> float:
    """Return the tokens/s of all devices."""
    return candidate.estimate.tokens_per_s


def _draw_markers(
    axes: Any, candidates: Sequence[Candidate], colour: str, marker: str, label: str
) -> None:
    """Draw a marker for each candidate."""
    points = _points_of(candidates)
    axes.scatter(
        points.gb, points.seconds, color=colour, marker=marker, s=36, zorder=3, label=label
    )


def _scale_seconds(axes: Any, seconds: Sequence[float]) -> None:
    """Set the limits of the axis of seconds, or make it logarithmic if the times are far apart."""
    if max(seconds) > LOGARITHMIC_FROM * min(seconds):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(0.85 * min(seconds), 1.1 * max(seconds))


class Points(NamedTuple):
    """The points of candidates: GB that a device needs, and seconds for a million tokens."""

    gb: list[float]
    seconds: list[float]


def _points_of(candidates: Sequence[Candidate]) -> Points:
    """Return the points of some candidates."""
    needed = [_needed_bytes(candidate) / GB for candidate in candidates]
    seconds = [MILLION / _speed(candidate) for candidate in candidates]
    return Points(needed, seconds)


class NamedPoint(NamedTuple):
    """A point in the units of the axes (0 at the lower left corner, 1 at the upper right one), and its name."""

    x: float
    y: float
    name: str


def _named_points(axes: Any, candidates: Sequence[Candidate]) -> Iterator[NamedPoint]:
    """Yield the points of some candidates in the units of the axes, with their names."""
    # This lays the axes out, which decides where a point lies.
    axes.figure.canvas.draw()
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    points = _points_of(candidates)
    for candidate, gb, seconds in zip(candidates, points.gb, points.seconds, strict=True):
        x, y = to_axes((gb, seconds))
        yield NamedPoint(x, y, candidate.name)


def _height_then_width(point: NamedPoint) -> tuple[float, float]:
    """Return the key that sorts points from the lowest to the highest, and equal ones from the left."""
    return point.y, point.x


def _draw_names(axes: Any, candidates: Sequence[Candidate]) -> None:
    """Write names in a column right of the axes, each with a thin line to its point.

    A name is as high as its point, but a line of text above the name below it at least.
    """
    points = sorted(_named_points(axes, candidates), key=_height_then_width)
    distance = NAME_DISTANCE / axes.get_window_extent().height * axes.figure.dpi
    heights: list[float] = []
    for point in points:
        height = point.y
        if heights:
            height = max(height, heights[-1] + distance)
        heights.append(height)
    too_high = max(0.0, max(heights, default=0.0) - 1.0)
    for point, height in zip(points, heights, strict=True):
        axes.annotate(
            point.name,
            xy=(point.x, point.y),
            xytext=(NAME_LEFT, height - too_high),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=9,
            va="center",
            arrowprops=dict(NAME_LINE),
            annotation_clip=False,
        )


def page(answer: Answer, svg: str) -> str:
    """Return an HTML page that loads nothing else: the picture as SVG, and its numbers as tables."""
    memory_heads = [f"{part} GB" for part in CATEGORIES]
    heads = (
        "strategy",
        "verdict",
        "needs GB",
        "step s",
        "tokens/s",
        "MFU",
        *memory_heads,
        "sent GB",
    )
    ranked = None
    if answer.ranked:
        ranked = table(heads, [_page_row(candidate) for candidate in answer.ranked])
    refused = None
    if answer.refused:
        reasons = [(family.name, family.reason) for family in answer.refused]
        refused = table(("family", "reason"), reasons, class_="out")
    return render(
        "planner/report/picture.html.jinja",
        title=" · ".join(headline(answer.question)),
        # Without the declaration of XML.
        picture=svg[svg.index("<svg") :],
        ranked=ranked,
        refused=refused,
    )


def _page_row(candidate: Candidate) -> tuple[str, ...]:
    """Return the cells of a candidate in the table of the HTML page."""
    estimate = candidate.estimate
    main = main_cells(candidate).values()
    memory = [f"{getattr(estimate.memory, part) / GB:.1f}" for part in CATEGORIES]
    sent = number(estimate.traffic.total / GB)
    return (candidate.name, *main, *memory, sent)
