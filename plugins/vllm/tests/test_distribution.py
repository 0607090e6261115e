"""What the distribution says of itself, and what it needs where vLLM runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import drumline
from drumline.rl import vllm, weight_network
from drumline_vllm import reading
from tests.distributions import check_no_circles, imported_modules, project_of

FOLDER = Path(__file__).parents[1]


def test_it_imports_torch_and_vllm_alone() -> None:
    for path, module in imported_modules(FOLDER, set()):
        package = module.split(".")[0]
        is_allowed = package in {"torch", "vllm", "drumline_vllm"}
        assert is_allowed or package in sys.stdlib_module_names, f"{path} imports {module}"


def test_no_module_needs_itself() -> None:
    check_no_circles(FOLDER)


def test_the_version_is_drumline_s_and_nothing_is_installed_with_it() -> None:
    project = project_of(FOLDER)

    assert project["version"] == drumline.__version__
    # The builds of vLLM have several names, and a second one would replace the first.
    assert project["dependencies"] == []


def test_its_entry_point_is_there() -> None:
    points = project_of(FOLDER)["entry-points"]["vllm.general_plugins"]
    module, _, name = points["drumline"].partition(":")

    assert callable(getattr(importlib.import_module(module), name))


def test_both_sides_speak_the_same_protocol() -> None:
    engine = (FOLDER / "src/drumline_vllm/engine.py").read_text()

    assert f"\nPROTOCOL = {vllm.PROTOCOL}\n" in engine
    assert reading.FOLDER_HEADER == weight_network.FOLDER_HEADER
