"""`drumline report` and the page at a run's end: one HTML file that needs no network. The drawing is page.js's, by Plotly."""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path

from drumline import __version__
from drumline.core.files import whole_file
from drumline.core.plan import Plan
from drumline.errors import EnvironmentFault, UserError
from drumline.foreign import disk_errors, first_line
from drumline.report import sections
from drumline.report.bars import notes
from drumline.report.curves import charts
from drumline.report.details import OF_A_RUN
from drumline.report.facts import RunFacts, short_names
from drumline.report.markup import Html, as_json, join, tag
from drumline.report.picture import draw

MOST_DETAILED = 12  # runs whose details are on one page; curves and the table have all
MOST_AT_END = 2**26  # bytes of events: some 100,000 steps. More would keep a terminal waiting
PAGE = "report.html"


def report(folders: list[Path], out: Path | None) -> Path:
    """Write the page of some runs, by default into the folder of the first, and a PNG of the main curves beside it. Raises UserError for
    what is no run, EnvironmentFault where it cannot be written."""
    runs = [RunFacts(folder) for folder in dict.fromkeys(folders)]
    path = out or (runs[0].folder / PAGE if len(runs) == 1 else Path(PAGE))
    if path.suffix != ".html" or (path.exists() and not path.is_file()):
        raise UserError(
            "is no place for a page", where=str(path), fix="name a file that ends in .html"
        )
    _write(path, page(runs))
    with _writing(path.with_suffix(".png")):
        drawn = draw(runs, path.with_suffix(".png"))
    notes([f"{run.name}: {problem}" for run in runs for problem in run.problems])
    notes(
        []
        if drawn
        else [f"{path.with_suffix('.png').name} is left out: pip install matplotlib draws it"]
    )
    return path


def at_end(plan: Plan) -> Path | None:
    """The page at a run's end, and its PNG where matplotlib is installed; None where `report.html` is false or no rank began. Whatever goes
    wrong is one note: the run has ended as it has."""
    run_dir = Path(plan.run_dir)
    events = run_dir / "events.jsonl"
    try:
        if not plan.config.report.html or not events.is_file():
            return None
        if (size := events.stat().st_size) > MOST_AT_END:
            notes([f"events.jsonl has {size >> 20} MiB: drumline report {run_dir} makes its page"])
            return None
        run = RunFacts(run_dir)
        _write(run_dir / PAGE, page([run]))
        draw([run], (run_dir / PAGE).with_suffix(".png"))
        return run_dir / PAGE
    except Exception as error:  # noqa: BLE001 - nothing of a page is worth the exit code of a run
        notes([f"{run_dir / PAGE} could not be written: {first_line(error)}"])
        return None


def _write(path: Path, text: str) -> None:
    with _writing(path), whole_file(path, shared=True) as file:
        file.write(text.encode(errors="replace"))


def _writing(path: Path) -> AbstractContextManager[None]:
    return disk_errors(
        "cannot be written", str(path), EnvironmentFault, "name another place with --out"
    )


def asset(name: str) -> str:
    """A file of this folder, or Plotly's script."""
    where = (
        files("plotly") / "package_data" if name == "plotly.min.js" else files("drumline.report")
    )
    return (where / name).read_text(encoding="utf-8")


def page(runs: list[RunFacts]) -> str:
    """The whole HTML of one or more runs."""
    names = short_names(runs)
    detailed = runs[:MOST_DETAILED]
    drawings = sections.Drawings()
    curves = join(drawings.add(**chart) for chart in charts(runs, names))
    parts = [
        ("Summary", sections.summary(runs, names)),
        ("Curves", tag("div", curves, class_="grid") if curves else None),
    ]
    for title, section in OF_A_RUN.items():
        made = [section(run, drawings) for run in detailed]
        if any(made):
            parts.append((title, join(_of_run(place, inner) for place, inner in enumerate(made))))
    last = sum(title in ("Checkpoints", "Environment") for title, _ in parts)
    parts.insert(len(parts) - last, ("Configuration", sections.configuration(detailed, names)))
    if len(runs) > len(detailed):
        text = f"Details and configuration are of the first {MOST_DETAILED} of {len(runs)} runs; drumline report RUN has another's."
        parts[0] = ("Summary", join((parts[0][1], tag("p", text, class_="note"))))
    shown = [(title, inner) for title, inner in parts if inner]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    foot = tag(
        "footer",
        f"Drumline {__version__} · made {time.strftime('%Y-%m-%d %H:%M')} · this file holds all that it shows",
    )
    body = join(
        (
            _top(title, names[: len(detailed)]),
            tag(
                "nav",
                *(tag("a", each, href=f"#{_id(each)}") for each, _ in shown),
                aria_label="Sections",
            ),
            tag(
                "main",
                *(tag("section", tag("h2", each), inner, id=_id(each)) for each, inner in shown),
                foot,
            ),
            tag(
                "noscript",
                tag("p", "Curves and filters need JavaScript; tables do without.", class_="note"),
            ),
        )
    )
    return document(
        f"{title} · Drumline", body, {"charts": drawings.made}, asset("draw.js") + asset("page.js")
    )


def document(title: str, body: Html, data: object, script: str, connect: str = "'none'") -> str:
    """A page that runs its own two scripts alone, and reaches nothing but `connect`."""
    scripts = [asset("plotly.min.js"), script]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in scripts
    )
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}"
    head = join(
        (
            Html(
                '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            ),
            Html(
                f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="color-scheme" content="light dark">'
            ),
            tag("title", title),
            Html(f"<style>{asset('page.css')}</style>"),
        )
    )
    values = Html(f'<script type="application/json" id="values">{as_json(data)}</script>')
    ran = Html(
        f'<script type="text/plain" id="plotly">{scripts[0]}</script><script>{scripts[1]}</script>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{values}{ran}</body></html>\n'


def _top(title: str, names: list[str]) -> Html:
    options = (tag("option", name, value=place) for place, name in enumerate(names))
    pick = tag("label", "Details of ", tag("select", *options, id="pick")) if len(names) > 1 else ""
    buttons = (
        tag("button", "Log scale", id="log", type="button", aria_pressed="false"),
        tag("button", "Print", id="print", type="button"),
    )
    theme = tag("button", "Dark", id="theme", type="button")
    return tag("header", tag("h1", title), tag("div", pick, *buttons, theme, class_="tools"))


def _of_run(place: int, inner: Html | None) -> Html:
    return tag(
        "div",
        inner or tag("p", "Nothing of this was recorded.", class_="note"),
        class_="run",
        data_run=place,
        hidden=place > 0,
    )


def _id(title: str) -> str:
    return "to-" + title.lower().replace(" ", "-")
