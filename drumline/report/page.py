"""`drumline report` and the page at a run's end: one HTML file that needs no network. page.js draws its charts by Plotly."""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from drumline.errors import EnvironmentFault, UserError
from drumline.foreign import disk_errors, first_line
from drumline.plan.plan import Plan
from drumline.report import sections
from drumline.report.bars import notes
from drumline.report.curves import charts
from drumline.report.details import OF_A_RUN
from drumline.report.facts import RunFacts, short_names
from drumline.report.markup import Html, as_json, join, tag
from drumline.report.picture import draw
from drumline.system.files import whole_file
from drumline.version import __version__

MOST_DETAILED = 12  # runs whose details are on one page; curves and the table have all
MOST_AT_END = 2**26  # bytes of events: some 100,000 steps. More would keep a terminal waiting
PAGE = "report.html"
AFTER_CONFIGURATION = ("Checkpoints", "Environment")  # the last sections of a page


def report(folders: list[Path], out: Path | None) -> Path:
    """Write the page of some runs and a PNG of their main curves beside it; return the page's path.

    `out`: the file; by default it is in the run's folder, or in the current one for several runs.
    Raises UserError for a folder that is no run, EnvironmentFault if a file cannot be written.
    """
    runs = [RunFacts(folder) for folder in dict.fromkeys(folders)]
    if out is not None:
        path = out
    elif len(runs) == 1:
        path = runs[0].folder / PAGE
    else:
        path = Path(PAGE)
    if path.suffix != ".html" or (path.exists() and not path.is_file()):
        raise UserError(
            "is no place for a page", where=str(path), fix="name a file that ends in .html"
        )
    _write(path, page(runs))
    png = path.with_suffix(".png")
    with _writing(png):
        is_drawn = draw(runs, png)
    for run in runs:
        notes(f"{run.name}: {problem}" for problem in run.problems)
    if not is_drawn:
        notes([f"{png.name} is left out: pip install matplotlib draws it"])
    return path


def at_end(plan: Plan) -> Path | None:
    """Write the page at a run's end, and its PNG if matplotlib is installed; return the page's path.

    None if `report.html` is false or no rank began. Whatever fails is one note, since the run has
    already ended as it has.
    """
    run_dir = Path(plan.run_dir)
    path = run_dir / PAGE
    events = run_dir / "events.jsonl"
    try:
        if not plan.config.report.html or not events.is_file():
            return None
        size = events.stat().st_size
        if size > MOST_AT_END:
            notes([f"events.jsonl has {size >> 20} MiB: drumline report {run_dir} makes its page"])
            return None
        run = RunFacts(run_dir)
        _write(path, page([run]))
        draw([run], path.with_suffix(".png"))
        return path
    except Exception as error:  # noqa: BLE001 - nothing of a page is worth the exit code of a run
        notes([f"{path} could not be written: {first_line(error)}"])
        return None


def _write(path: Path, text: str) -> None:
    """Write a text to a file that others may read. Raises EnvironmentFault if it cannot be written."""
    with _writing(path), whole_file(path, shared=True) as file:
        file.write(text.encode(errors="replace"))


def _writing(path: Path) -> AbstractContextManager[None]:
    """Turn errors of the disk into an EnvironmentFault that names the file."""
    return disk_errors(
        "cannot be written", str(path), EnvironmentFault, "name another place with --out"
    )


def asset(name: str) -> str:
    """Return the text of a file of this folder, or Plotly's script."""
    if name == "plotly.min.js":
        folder = files("plotly") / "package_data"
    else:
        folder = files("drumline.report")
    return (folder / name).read_text(encoding="utf-8")


class PageSection(NamedTuple):
    """A section of a page. `inner`: None or empty if there is nothing to show."""

    title: str
    inner: Html | None


def page(runs: list[RunFacts]) -> str:
    """Return the whole HTML of one or more runs."""
    names = short_names(runs)
    drawings = sections.Drawings()
    shown = [section for section in _page_sections(runs, names, drawings) if section.inner]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    links = []
    blocks = []
    for section in shown:
        id_ = _id(section.title)
        links.append(tag("a", section.title, href=f"#{id_}"))
        blocks.append(tag("section", tag("h2", section.title), section.inner, id=id_))
    made_at = time.strftime("%Y-%m-%d %H:%M")
    foot = tag(
        "footer", f"Drumline {__version__} · made {made_at} · this file holds all that it shows"
    )
    without_script = tag(
        "p", "Curves and filters need JavaScript; tables do without.", class_="note"
    )
    body = join(
        (
            _top(title, names[:MOST_DETAILED]),
            tag("nav", *links, aria_label="Sections"),
            tag("main", *blocks, foot),
            tag("noscript", without_script),
        )
    )
    script = asset("draw.js") + asset("page.js")
    return document(f"{title} · Drumline", body, {"charts": drawings.made}, script)


def _page_sections(
    runs: list[RunFacts], names: list[str], drawings: sections.Drawings
) -> list[PageSection]:
    """Return the sections of a page in their order. The first runs alone have details."""
    detailed = runs[:MOST_DETAILED]
    curves = join(drawings.add(**chart) for chart in charts(runs, names))
    grid = tag("div", curves, class_="grid") if curves else None
    details = []
    last = []
    for title, make_section in OF_A_RUN.items():
        of_runs = [make_section(run, drawings) for run in detailed]
        if not any(of_runs):
            continue
        blocks = [_of_run(place, inner) for place, inner in enumerate(of_runs)]
        section = PageSection(title, join(blocks))
        if title in AFTER_CONFIGURATION:
            last.append(section)
        else:
            details.append(section)
    overview = sections.summary(runs, names)
    if len(runs) > len(detailed):
        note = f"Details and configuration are of the first {MOST_DETAILED} of {len(runs)} runs; drumline report RUN has another's."
        overview = join((overview, tag("p", note, class_="note")))
    return [
        PageSection("Summary", overview),
        PageSection("Curves", grid),
        *details,
        PageSection("Configuration", sections.configuration(detailed, names)),
        *last,
    ]


def document(title: str, body: Html, data: object, script: str, connect: str = "'none'") -> str:
    """Return a page that runs its own two scripts alone: Plotly's and `script`.

    `data`: what the scripts read, as JSON. `connect`: the only address that they may reach, as a
    source of a Content-Security-Policy.
    """
    plotly = asset("plotly.min.js")
    hashes = f"{_csp_hash(plotly)} {_csp_hash(script)}"
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}"
    head = join(
        (
            Html(
                '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            ),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            Html('<meta name="color-scheme" content="light dark">'),
            tag("title", title),
            Html(f"<style>{asset('page.css')}</style>"),
        )
    )
    values = f'<script type="application/json" id="values">{as_json(data)}</script>'
    # As plain text Plotly's script does not delay the page: draw.js starts it for the first chart.
    scripts = f'<script type="text/plain" id="plotly">{plotly}</script><script>{script}</script>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{values}{scripts}</body></html>\n'


def _csp_hash(script: str) -> str:
    """Return the source of a Content-Security-Policy that admits exactly this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _top(title: str, names: list[str]) -> Html:
    """Return the header with the title and the buttons. `names`: of the runs that have details."""
    pick: Html | str = ""
    if len(names) > 1:
        options = [tag("option", name, value=place) for place, name in enumerate(names)]
        pick = tag("label", "Details of ", tag("select", *options, id="pick"))
    log = tag("button", "Log scale", id="log", type="button", aria_pressed="false")
    printing = tag("button", "Print", id="print", type="button")
    theme = tag("button", "Dark", id="theme", type="button")
    tools = tag("div", pick, log, printing, theme, class_="tools")
    return tag("header", tag("h1", title), tools)


def _of_run(place: int, inner: Html | None) -> Html:
    """Return the block of one run in a section; page.js shows that of the run that is picked."""
    shown = inner or tag("p", "Nothing of this was recorded.", class_="note")
    return tag("div", shown, class_="run", data_run=place, hidden=place > 0)


def _id(title: str) -> str:
    """Return the id of a section."""
    return "to-" + title.lower().replace(" ", "-")
