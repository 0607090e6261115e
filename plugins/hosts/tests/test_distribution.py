"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import drumline
from drumline.config.launcher import LauncherSpec
from drumline.config.registry import DISTRIBUTIONS, entry_points, find
from tests.harness import ROOT

FOLDER = Path(__file__).parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
# The seams: what a launcher of a stranger's may import, too.
SEAMS = {
    "drumline",
    "drumline.version",
    "drumline.errors",
    "drumline.foreign",
    "drumline.hardware.detect",
    # The section `launch` and the plan.
    "drumline.config.config",
    "drumline.config.launcher",
    "drumline.plan.out_of_memory",
    "drumline.plan.plan",
    "drumline.config.section",
    # Processes, files, signals and the network of a host.
    "drumline.system.files",
    "drumline.system.network",
    "drumline.system.output",
    "drumline.system.process",
    "drumline.system.redact",
    "drumline.system.signals",
    "drumline.system.sockets",
    # One attempt on one host, the loop of attempts, and the lease of the run folder.
    "drumline.launch.agent",
    "drumline.launch.environment",
    "drumline.launch.lease",
    "drumline.launch.local",
    "drumline.launch.postmortem",
    "drumline.launch.preflight",
    # A launcher that follows another plans anew, writes events and the last page.
    "drumline.report.page",
    "drumline.telemetry.events",
    "drumline.train.replan",
}


def imported_modules() -> Iterator[tuple[Path, str]]:
    """Yield the modules that each file of the distribution imports.

    A private name is yielded with its module, which makes it no seam.
    """
    for path in sorted((FOLDER / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    is_private = alias.name.startswith("_") and alias.name != "__version__"
                    if is_private or f"{node.module}.{alias.name}" in SEAMS:
                        yield path, f"{node.module}.{alias.name}"
                    else:
                        yield path, node.module


def test_only_seams_of_drumline_are_imported() -> None:
    found = set()
    for path, module in imported_modules():
        if module.split(".")[0] == "drumline":
            assert module in SEAMS, f"{path} imports {module}"
            found.add(module)
    assert found == SEAMS, "the list may lose what nobody imports any more"


def test_the_version_is_drumline_s() -> None:
    assert PROJECT["version"] == drumline.__version__
    assert PROJECT["dependencies"] == [f"drumline=={drumline.__version__}"]


def test_drumline_names_the_distribution_of_each_of_its_kinds() -> None:
    kinds = PROJECT["entry-points"]["drumline.launchers"]
    named = DISTRIBUTIONS["launchers"]
    assert {kind for kind in named if named[kind] == PROJECT["name"]} == set(kinds)
    for kind, place in kinds.items():
        assert entry_points("launchers")[kind].value == place
        spec = find(LauncherSpec, kind)
        assert spec is not None and f"{spec.__module__}:{spec.__name__}" == place


def test_each_rule_of_the_page_is_named_where_it_is_followed() -> None:
    code = "\n".join(path.read_text() for path in (FOLDER / "src").rglob("*.py"))
    named = set(re.findall(r"\b[LAVT]\d\b", code))
    for name in ("elastic_hosts.md", "elastic_hosts.zh.md"):
        page = (ROOT / "docs" / "explanations" / name).read_text()
        rules = set(re.findall(r"^- \*\*([LAVT]\d)\*\*", page, re.MULTILINE))
        assert rules == named
