"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

from pathlib import Path

from tests.distributions import (
    check_kinds,
    check_no_circles,
    check_seams,
    check_version,
    project_of,
)

FOLDER = Path(__file__).parents[1]
# The seams: what a launcher of a stranger's may import, too.
SEAMS = {
    "drumline",
    "drumline.errors",
    "drumline.foreign",
    # The section `launch`, and the config that is sent.
    "drumline.config.config",
    "drumline.config.launcher",
    "drumline.config.load",
    "drumline.config.section",
    "drumline.plan.explain",
    "drumline.system.redact",
    "drumline.system.yaml_lines",
    # The note of a run whose folder lies elsewhere, and signals while it is followed.
    "drumline.launch.submitted",
    "drumline.system.signals",
}


def test_only_seams_of_drumline_are_imported() -> None:
    check_seams(FOLDER, SEAMS)


def test_no_module_needs_itself() -> None:
    check_no_circles(FOLDER)


def test_the_version_is_drumline_s() -> None:
    check_version(FOLDER)


def test_the_clients_of_the_cluster_come_with_it() -> None:
    dependencies = project_of(FOLDER)["dependencies"]
    names = {dependency.partition(">=")[0] for dependency in dependencies}
    assert {"kubernetes", "kubeflow-trainer-api"} <= names


def test_drumline_names_the_distribution_of_its_kind() -> None:
    check_kinds(FOLDER)
