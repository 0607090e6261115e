"""`drumline report` and the page at a run's end: one HTML file that needs no network.

page.js draws its charts by Plotly, whose script is in the file.
"""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault, UserError
from drumline.foreign import disk_errors, first_line
from drumline.plan.plan import Plan
from drumline.report import sections
from drumline.report.bars import notes
from drumline.report.curves import charts
from drumline.report.details import OF_A_RUN
from drumline.report.facts import RunFacts, short_names
from drumline.report.markup import as_json, render
from drumline.report.picture import draw
from drumline.system.files import whole_file
from drumline.version import __version__

# Runs whose details are on one page, at most. Curves and the table have all runs.
MAX_RUNS_WITH_DETAILS = 12
# Bytes of events, some 100,000 steps. The page of more would keep a terminal waiting.
MOST_AT_END = 2**26
PAGE = "report.html"
# The last sections of a page, behind the configuration.
AFTER_CONFIGURATION = ("Checkpoints", "Environment")


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
    with _translate_disk_errors(png):
        is_drawn = draw(runs, png)
    for run in runs:
        notes(f"{run.name}: {problem}" for problem in run.problems)
    if not is_drawn:
        notes([f"{png.name} is left out: pip install matplotlib draws it"])
    return path


def write_final_page(plan: Plan) -> Path | None:
    """Write the page at a run's end, and a PNG if matplotlib is installed; return the page's path.

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
            mib = size // 2**20
            notes([f"events.jsonl has {mib} MiB: drumline report {run_dir} makes its page"])
            return None
        run = RunFacts(run_dir)
        _write(path, page([run]))
        draw([run], path.with_suffix(".png"))
        return path
    except Exception as error:  # noqa: BLE001 - nothing of a page is worth the exit code of a run
        notes([f"{path} could not be written: {first_line(error)}"])
        return None


def _write(path: Path, text: str) -> None:
    """Write a text to a file that others may read. Raises EnvironmentFault if that fails."""
    with _translate_disk_errors(path), whole_file(path, shared=True) as file:
        file.write(text.encode(errors="replace"))


def _translate_disk_errors(path: Path) -> AbstractContextManager[None]:
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


@dataclass(frozen=True)
class PageSection:
    """A section of a page, which templates/page.html.jinja shows by its title."""

    title: str
    # What it shows. A section of details has a list with a view for each run, which is None if
    # nothing of it was recorded.
    view: Any

    @property
    def id(self) -> str:
        """Return the id of its element."""
        return "to-" + self.title.lower().replace(" ", "-")


def page(runs: list[RunFacts]) -> str:
    """Return the whole HTML of one or more runs."""
    names = short_names(runs)
    registry = sections.ChartRegistry()
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    # Before `registry.specs` is read, since the sections add their charts to it.
    page_sections = _page_sections(runs, names, registry)
    script = asset("draw.js") + asset("page.js")
    return document(
        "page.html.jinja",
        title,
        {"charts": registry.specs},
        script,
        detailed_names=names[:MAX_RUNS_WITH_DETAILS],
        sections=page_sections,
        version=__version__,
        made_at=time.strftime("%Y-%m-%d %H:%M"),
    )


def _page_sections(
    runs: list[RunFacts], names: list[str], registry: sections.ChartRegistry
) -> list[PageSection]:
    """Return the sections of a page that have something to show, in their order.

    The first runs alone have details.
    """
    detailed_runs = runs[:MAX_RUNS_WITH_DETAILS]
    curves = [registry.add(**chart) for chart in charts(runs, names)]
    details = []
    last = []
    for title, make_view in OF_A_RUN.items():
        views = [make_view(run, registry) for run in detailed_runs]
        # A section without anything in any run is left out.
        if not any(views):
            continue
        section = PageSection(title, views)
        if title in AFTER_CONFIGURATION:
            last.append(section)
        else:
            details.append(section)
    made = [PageSection("Summary", sections.summary(runs, names, len(detailed_runs)))]
    if curves:
        made.append(PageSection("Curves", curves))
    made += details
    configuration = sections.configuration(detailed_runs, names)
    if configuration is not None:
        made.append(PageSection("Configuration", configuration))
    return [*made, *last]


def document(
    template: str, title: str, data: object, script: str, connect: str = "'none'", **values: Any
) -> str:
    """Return a page that runs its own two scripts alone: Plotly's and `script`.

    Its Content-Security-Policy admits scripts by their hashes, so that nothing that a run has
    written can be run as one, whatever may go wrong when it is escaped.

    Args:
        template: A file of the folder templates, which extends document.html.jinja.
        title: The title of the page.
        data: What the scripts read, as JSON.
        script: What draws the page.
        connect: The only address that the scripts may reach, as a source of the policy.
        values: What the template shows.
    """
    plotly = asset("plotly.min.js")
    return render(
        f"report/templates/{template}",
        title=title,
        style=asset("page.css"),
        plotly=plotly,
        script=script,
        script_sources=f"{_csp_hash(plotly)} {_csp_hash(script)}",
        connect=connect,
        data=as_json(data),
        **values,
    )


def _csp_hash(script: str) -> str:
    """Return the source of a Content-Security-Policy that admits exactly this script."""
    digest = hashlib.sha256(script.encode()).digest()
    encoded = base64.b64encode(digest).decode()
    return f"'sha256-{encoded}'"
