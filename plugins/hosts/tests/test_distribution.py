"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributions import check_kinds, check_no_circles, check_seams, check_version
from tests.harness import ROOT

FOLDER = Path(__file__).parents[1]
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
    "drumline.config.resume",
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


def test_only_seams_of_drumline_are_imported() -> None:
    check_seams(FOLDER, SEAMS)


def test_no_module_needs_itself() -> None:
    check_no_circles(FOLDER)


def test_the_version_is_drumline_s() -> None:
    check_version(FOLDER)


def test_drumline_names_the_distribution_of_each_of_its_kinds() -> None:
    check_kinds(FOLDER)


def test_each_rule_of_the_page_is_named_where_it_is_followed() -> None:
    code = "\n".join(path.read_text() for path in (FOLDER / "src").rglob("*.py"))
    named = set(re.findall(r"\b[LAVT]\d\b", code))
    for name in ("elastic_hosts.md", "elastic_hosts.zh.md"):
        page = (ROOT / "docs" / "explanations" / name).read_text()
        rules = set(re.findall(r"^- \*\*([LAVT]\d)\*\*", page, re.MULTILINE))
        assert rules == named
