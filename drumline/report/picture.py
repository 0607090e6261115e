"""The main curves as a PNG, by matplotlib: the extra `plot`."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.report.curves import Series, charts
from drumline.report.facts import RunFacts, short_names

MOST_CHARTS = 6
COLUMNS = 3
# A curve of fewer points has a marker at each.
FEW_POINTS = 30
CJK = re.compile(r"CJK|WenQuanYi|Source Han|PingFang|Heiti|Hiragino|Arial Unicode")
# The colors of draw.js without its last one, so that a run has one color on the page and in the
# picture.
COLORS = (
    "#3b6fb6",
    "#d9793b",
    "#3f8f6b",
    "#b5485d",
    "#7a62a8",
    "#8a6d3b",
    "#5b8fa8",
    "#a85b8f",
    "#6b7a3f",
    "#555555",
)


def draw(runs: list[RunFacts], path: Path) -> bool:
    """Write a PNG of the main curves of some runs to `path`.

    Returns False, and writes nothing, if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    # The second font has the letters that the first lacks: Chinese, Japanese and Korean, if the
    # system has such a font.
    fonts = ["DejaVu Sans", *_cjk_fonts()[:1]]
    with mpl.rc_context({"font.family": fonts}), warnings.catch_warnings():
        # A letter that neither font has is drawn as a box, and matplotlib would warn about it.
        warnings.filterwarnings("ignore", "Glyph")
        _draw(runs, path)
    return True


def _cjk_fonts() -> list[str]:
    """Return the names of installed fonts with Chinese, Japanese or Korean letters."""
    from matplotlib.font_manager import fontManager

    names = {font.name for font in fontManager.ttflist}
    return sorted(name for name in names if CJK.search(name))


def _draw(runs: list[RunFacts], path: Path) -> None:
    """Draw the first charts, three in a row, and write them to `path`."""
    # Not pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    drawn = charts(runs, short_names(runs))[:MOST_CHARTS]
    rows = (len(drawn) + COLUMNS - 1) // COLUMNS
    figure = Figure(figsize=(12, 3.2 * max(1, rows)), layout="constrained")
    for place, chart in enumerate(drawn):
        axes = figure.add_subplot(rows, COLUMNS, place + 1)
        axes.set_title(_printable(chart["title"]), loc="left", fontsize=10, parse_math=False)
        for series in chart["series"]:
            # A member of a group of seeds is drawn on the page alone; here are their means.
            if not series.get("is_group_member"):
                _draw_line(axes, series)
        # The charts of several runs have the same colors, so one legend is enough.
        needs_legend = place == 0 or len(runs) == 1
        if needs_legend and 1 < len(chart["series"]) <= len(COLORS):
            axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.tick_params(labelsize=8)
    if not drawn:
        figure.text(0.5, 0.5, "no step was finished", ha="center")
    figure.savefig(path, dpi=110)


def _printable(name: str) -> str:
    """Return a name without bytes that are no text, which a file's name may have."""
    return name.encode(errors="replace").decode()


def _draw_line(axes: Any, series: Series) -> None:
    """Draw a line with its band."""
    steps = series["x"]
    place = series["color"] % len(COLORS)
    color = COLORS[place]
    marker = "o" if len(steps) < FEW_POINTS else None
    # matplotlib leaves out labels that begin with _, and takes text between $ for a formula.
    label = _printable(series["name"]).lstrip("_").replace("$", r"\$")
    axes.plot(
        steps,
        series["y"],
        color=color,
        linewidth=1.4,
        marker=marker,
        markersize=3,
        label=label,
    )
    if "low" in series:
        axes.fill_between(
            steps,
            series["low"],
            series["high"],
            color=color,
            alpha=0.18,
            linewidth=0,
        )
