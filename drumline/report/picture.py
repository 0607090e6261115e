"""The main curves as a PNG, by matplotlib: the extra `plot`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.report.curves import charts
from drumline.report.facts import RunFacts, short_names

MOST_CHARTS = 6
COLORS = ("#3b6fb6", "#d9793b", "#3f8f6b", "#b5485d", "#7a62a8", "#8a6d3b", "#5b8fa8", "#a85b8f", "#6b7a3f", "#555555")  # of page.js, too


def draw(runs: list[RunFacts], path: Path) -> bool:
    """Write the PNG; False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    drawn = charts(runs, short_names(runs))[:MOST_CHARTS]
    figure = Figure(figsize=(12, 3.2 * max(1, -(-len(drawn) // 3))), layout="constrained")
    for place, chart in enumerate(drawn):
        axes = figure.add_subplot(-(-len(drawn) // 3), 3, place + 1)
        axes.set_title(chart["title"], loc="left", fontsize=10, parse_math=False)
        for each in (each for each in chart["series"] if not each.get("member")):
            _line(axes, each)
        if 1 < len(chart["series"]) <= len(COLORS) and (place == 0 or len(runs) == 1):
            axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.tick_params(labelsize=8)
    if not drawn:
        figure.text(0.5, 0.5, "no step was finished", ha="center")
    figure.savefig(path, dpi=110)
    return True


def _line(axes: Any, each: dict[str, Any]) -> None:
    color = COLORS[each["color"] % len(COLORS)]
    marker = "o" if len(each["x"]) < 30 else None
    axes.plot(
        each["x"], each["y"], color=color, linewidth=1.4, marker=marker, markersize=3, label=each["name"].lstrip("_").replace("$", r"\$")
    )
    if "low" in each:
        axes.fill_between(each["x"], each["low"], each["high"], color=color, alpha=0.18, linewidth=0)
