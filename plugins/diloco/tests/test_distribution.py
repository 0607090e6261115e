"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import drumline
from drumline.config.registry import ADDED_KEYS, entry_points, find
from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.config.strategy import StrategyConfig
from drumline_diloco.section import StreamingDiLoCoStrategy

FOLDER = Path(__file__).parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
# The seams: what a package of a stranger's that adds keys to a strategy may import, too.
SEAMS = {
    "drumline.errors",
    # The three parts of the strategy that it extends, and the engine of whole weights.
    "drumline.config.strategies.diloco",
    "drumline.planner.strategies.diloco",
    "drumline.engine.strategies.diloco.spec",
    "drumline.engine.strategies.diloco.engine",
    # What the three parts of any strategy need.
    "drumline.config.refusal",
    "drumline.config.section",
    "drumline.engine.native",
    "drumline.plan.facts",
    "drumline.plan.plan",
    "drumline.plan.rule",
    "drumline.planner.cost.terms",
    # The code of 8 bits, and a process group beside the steps.
    "drumline.dist.mesh",
    "drumline.engine.compress",
    "drumline.plan.wire",
    "drumline.vendor.torch",
    # Secrets, heartbeats and the network of a host.
    "drumline.system.heartbeat",
    "drumline.system.network",
    "drumline.system.redact",
    "drumline.system.sockets",
}
# The plan and the planner import these, in processes that need no torch.
LIGHT = ("__init__.py", "section.py", "cost.py", "spec.py")


def imported_modules(path: Path, nodes: list[ast.stmt] | None = None) -> Iterator[str]:
    """Yield the modules that a file imports, or some of its statements.

    A private name is yielded with its module, which makes it no seam.
    """
    tree = ast.parse(path.read_text())
    for node in nodes or ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name.startswith("_"):
                    yield f"{node.module}.{alias.name}"
                else:
                    yield node.module


def test_only_seams_of_drumline_are_imported() -> None:
    found = set()
    for path in sorted((FOLDER / "src").rglob("*.py")):
        for module in imported_modules(path):
            if module.split(".")[0] == "drumline":
                assert module in SEAMS, f"{path} imports {module}"
                found.add(module)
    assert found == SEAMS, "the list may lose what nobody imports any more"


def test_the_plan_needs_no_torch() -> None:
    for name in LIGHT:
        path = FOLDER / "src" / "drumline_diloco" / name
        top_level = ast.parse(path.read_text()).body
        modules = set(imported_modules(path, top_level))
        heavy = {"torch", "drumline_diloco.streaming", "drumline_diloco.peers"}
        assert not modules & heavy, f"{path} imports them at its top"


def test_the_version_is_drumline_s() -> None:
    assert PROJECT["version"] == drumline.__version__
    assert PROJECT["dependencies"] == [f"drumline=={drumline.__version__}"]


def test_it_extends_diloco() -> None:
    place = PROJECT["entry-points"]["drumline.extended_strategies"]["diloco"]
    assert entry_points("extended_strategies")["diloco"].value == place
    assert find(StrategyConfig, "diloco") is StreamingDiLoCoStrategy


def test_drumline_names_the_distribution_of_each_added_key() -> None:
    distribution, named = ADDED_KEYS["strategies", "diloco"]
    assert distribution == PROJECT["name"]
    defaults = StreamingDiLoCoStrategy().model_dump()
    added = {}
    for key, value in defaults.items():
        if key not in DiLoCoStrategy.model_fields:
            added[key] = value
    assert named == added
