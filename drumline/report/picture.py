"""The main curves as a PNG, by matplotlib: the extra `plot`."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.report.curves import charts
from drumline.report.facts import RunFacts, short_names

MOST_CHARTS = 6
CJK = re.compile(r"CJK|WenQuanYi|Source Han|PingFang|Heiti|Hiragino|Arial Unicode")
# Of page.js, too.
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
    """Write the PNG; False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    # Letters that the first font lacks are the second's: Chinese, Japanese and Korean, where the system has one.
    with mpl.rc_context({"font.family": ["DejaVu Sans", *_cjk()[:1]]}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a box stands for what neither has
        _draw(runs, path)
    return True


def _cjk() -> list[str]:
    from matplotlib.font_manager import fontManager

    return sorted({font.name for font in fontManager.ttflist if CJK.search(font.name)})


def _draw(runs: list[RunFacts], path: Path) -> None:
    from matplotlib.figure import Figure

    drawn = charts(runs, short_names(runs))[:MOST_CHARTS]
    figure = Figure(figsize=(12, 3.2 * max(1, -(-len(drawn) // 3))), layout="constrained")
    for place, chart in enumerate(drawn):
        axes = figure.add_subplot(-(-len(drawn) // 3), 3, place + 1)
        axes.set_title(_shown(chart["title"]), loc="left", fontsize=10, parse_math=False)
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


def _shown(name: str) -> str:
    """A file's name may have bytes that are no text."""
    return name.encode(errors="replace").decode()


def _line(axes: Any, each: dict[str, Any]) -> None:
    color = COLORS[each["color"] % len(COLORS)]
    marker = "o" if len(each["x"]) < 30 else None
    label = _shown(each["name"]).lstrip("_").replace("$", r"\$")
    axes.plot(
        each["x"], each["y"], color=color, linewidth=1.4, marker=marker, markersize=3, label=label
    )
    if "low" in each:
        axes.fill_between(
            each["x"], each["low"], each["high"], color=color, alpha=0.18, linewidth=0
        )
