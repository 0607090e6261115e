"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import drumline
from drumline.cli import plugins
from drumline.config.old_names import DISTRIBUTED
from drumline.config.registry import DISTRIBUTIONS, entry_points

FOLDER = Path(__file__).parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
# The seams: what a command of a stranger's may import, too.
SEAMS = {
    "drumline",
    "drumline.errors",
    "drumline.foreign",
    "drumline.cli.arguments",
    "drumline.cli.plugins",
    # The config of the trials, and overrides of it.
    "drumline.config.config",
    "drumline.config.load",
    "drumline.config.run",
    "drumline.system.yaml_lines",
    # Trials are processes, or jobs of Slurm.
    "drumline.hardware.detect",
    "drumline.launch.runs",
    "drumline.launch.slurm.queue",
    "drumline.system.files",
    "drumline.system.process",
    "drumline.system.signals",
    # Tables, figures and pages.
    "drumline.bench.file_names",
    "drumline.bench.pages",
    "drumline.report.bars",
    "drumline.telemetry.events",
}
HEAVY = """
import sys
from drumline.cli import main
try:
    main(['--help'])
except SystemExit:
    pass
print(*sys.modules)
"""


def imported_modules() -> Iterator[tuple[Path, str]]:
    """Yield the modules that each file of the distribution imports.

    A private name is yielded with its module, which makes it no seam.
    """
    for path in sorted((FOLDER / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full_name = f"{node.module}.{alias.name}"
                    if alias.name.startswith("_") or full_name in SEAMS:
                        yield path, full_name
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


def test_drumline_names_the_distribution_of_its_command() -> None:
    commands = PROJECT["entry-points"]["drumline.commands"]
    for name, place in commands.items():
        assert DISTRIBUTIONS["commands"][name] == PROJECT["name"]
        assert entry_points("commands")[name].value == place
        command = plugins.plugin_command(name)
        assert command.rich_help_panel == "Train"
        assert command.help.startswith("Train a config with many values")


@pytest.mark.slow
def test_help_imports_the_command_and_none_of_its_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAVY],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "Train a config with many values" in done.stdout
    modules = done.stdout.split()
    assert "drumline_sweep.cli" in modules
    for heavy in ("torch", "optuna", "matplotlib", "drumline_sweep.sweep"):
        assert heavy not in modules


def test_modules_are_found_by_their_names_in_drumline() -> None:
    own = {}
    for old, new in DISTRIBUTED.items():
        if new.startswith("drumline_sweep."):
            own[old] = new
    assert own
    for old, new in own.items():
        assert importlib.import_module(f"drumline.{old}") is importlib.import_module(new)
