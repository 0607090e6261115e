"""The house rules on who may import whom, read from the code itself."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "drumline"

# room → rooms that it may import, besides itself and those that all may. Lower rooms come first.
BELOW_PLAN = {"system", "config", "hardware"}
MAY: dict[str, set[str]] = {
    "errors": set(),
    "foreign": set(),
    "version": set(),
    "vendor": set(),
    "hardware": set(),
    "system": set(),
    "config": {"system", "hardware"},
    "compat": {"system", "config"},
    "plan": BELOW_PLAN,
    "dist": {"system", "config"},
    "checkpoint": {"system", "config"},
    "telemetry": {"system", "config", "plan", "dist"},
    "report": {"system", "config", "plan", "telemetry"},
    "models": {*BELOW_PLAN, "plan", "dist", "checkpoint"},
    # The tokenizer, so that preparing and training cannot disagree about it.
    "data": {*BELOW_PLAN, "plan", "models"},
    "algorithms": {"system", "config", "plan", "data"},
    "engine": {"system", "config", "plan", "dist", "models", "telemetry"},
    "rl": {*BELOW_PLAN, "plan", "dist", "data", "algorithms", "engine", "telemetry"},
    # Traces run engines.
    "planner": {
        *BELOW_PLAN,
        "plan",
        "telemetry",
        "report",
        "models",
        "data",
        "algorithms",
        "engine",
    },
    "launch": {*BELOW_PLAN, "plan", "telemetry", "doctor"},
    "doctor": {*BELOW_PLAN, "plan", "dist", "telemetry"},
    "train": {
        *BELOW_PLAN,
        "compat",
        "plan",
        "dist",
        "checkpoint",
        "telemetry",
        "report",
        "models",
        "data",
        "algorithms",
        "engine",
        "rl",
        "planner",
        "launch",
    },
    "bench": {
        *BELOW_PLAN,
        "plan",
        "dist",
        "checkpoint",
        "telemetry",
        "report",
        "models",
        "launch",
        "planner",
        "train",
    },
    "inference": {
        "system",
        "config",
        "plan",
        "dist",
        "checkpoint",
        "telemetry",
        "report",
        "models",
        "data",
        "rl",
        "launch",
        "train",
    },
    "cli": {
        *("system", "config", "plan", "report", "telemetry", "planner"),
        *("launch", "train", "bench", "inference", "doctor"),
    },
    "__main__": {"cli"},
    "__init__": {"bench", "planner", "train", "inference"},  # each when it is asked for
}
# Entered in one function each, where it is needed; such an import makes no circle when modules are loaded.
LATE: dict[str, set[str]] = {"config": {"compat"}}
# Rooms that must be quick to enter: no import of these at module level.
LIGHT = {
    *("errors", "foreign", "version", "hardware", "system", "config", "compat", "plan", "report"),
    *("__main__", "__init__", "cli"),
}
HEAVY = {"torch", "transformers", "datasets", "deepspeed", "accelerate", "peft"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                [node.module]
                if node.module != "drumline"
                else [f"drumline.{alias.name}" for alias in node.names]
            )


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def of_room(room: str) -> list[Path]:
    found = [path for path in FILES if room_of(path) == room]
    assert found, room
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.claim("rooms import what they may")
@pytest.mark.parametrize("room", MAY)
def test_imports_keep_to_the_plan(room: str) -> None:
    allowed = MAY[room] | LATE.get(room, set()) | {room, "errors", "foreign", "vendor", "version"}
    for path in of_room(room):
        for name in imports(tree_of(path)):
            top, _, rest = name.partition(".")
            assert top != "drumline" or not rest or rest.split(".")[0] in allowed, (
                f"{path} imports {name}; it may import {sorted(allowed)}"
            )
        top_level = [
            node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        for name in (
            imports(ast.Module(body=list(top_level), type_ignores=[])) if room in LIGHT else ()
        ):
            assert name.split(".")[0] not in HEAVY and not name.startswith("drumline.vendor."), (
                f"{path} imports {name} at its top"
            )


# What a library shows: of these only the top, and these folders; of torch everything without an underscore.
SHOWN = {
    "transformers": {"transformers.utils"},
    "peft": set(),
    "deepspeed": {"deepspeed.accelerator", "deepspeed.utils"},
}


def privately(tree: ast.AST) -> Iterator[str]:
    """Names that a library keeps for itself: imported, or reached from one of its modules by dots."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
            yield from (alias.name for alias in node.names if hidden(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if hidden(node.module, alias.name)
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                parts.append(at.attr)
                at = at.value
            ours = not (
                isinstance(at, ast.Name) and known.get(at.id, "").split(".")[0] in {"torch", *SHOWN}
            )
            if not ours and any(
                part.startswith("_") and not part.startswith("__") for part in parts
            ):
                yield ".".join(reversed(parts))


def hidden(module: str, name: str = "") -> bool:
    top = module.split(".")[0]
    if top == "torch":
        return any(
            part.startswith("_") and not part.startswith("__")
            for part in (*module.split("."), name)
        )
    if top not in SHOWN:
        return False
    # `from transformers import masking_utils`.
    submodule = module == top == "transformers" and name.islower()
    return submodule or name.startswith("_") or (module != top and module not in SHOWN[top])


@pytest.mark.parametrize("room", [room for room in MAY if room != "vendor"])
def test_names_that_libraries_hide_are_imported_in_one_place(room: str) -> None:
    for path in of_room(room):
        found = sorted(set(privately(tree_of(path))))
        assert not found, (
            f"{path} uses {found}: add them to drumline/vendor/, and import them from there"
        )


def test_hidden_names_are_seen() -> None:
    shown = "import torch\nfrom torch import nn\nfrom transformers import AutoConfig\nfrom transformers.utils import logging\nnn.Linear"
    assert not list(privately(ast.parse(shown)))
    for code in (
        "import torch\ntorch._foreach_mul_(1)",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "def f():\n    from transformers import masking_utils",
        "from transformers.masking_utils import sdpa_mask",
        "from peft.tuners.tuners_utils import BaseTunerLayer",
        "import deepspeed.runtime.utils",
    ):
        assert list(privately(ast.parse(code))), code


def test_no_room_needs_itself() -> None:
    assert list(TopologicalSorter(MAY).static_order())  # raises CycleError where there is a circle


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needed(node: ast.AST, for_types: bool) -> Iterator[str]:
    """Yield the modules and names that code imports, also in functions.

    `for_types`: also those that only a type checker imports.
    """
    if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from needed(child, for_types)


@functools.cache
def graph(for_types: bool) -> dict[str, set[str]]:
    """Of each module those that it imports at its top, in a function, or (`for_types`) for the type checker."""
    modules = {module_of(path): path for path in FILES}

    def imported(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]  # a name in a module

    return {
        module: {imported(name) for name in needed(tree_of(path), for_types)}
        & modules.keys() - {module}
        for module, path in modules.items()
    }


def test_no_module_needs_itself() -> None:
    # Raises CycleError, with the modules of the circle.
    assert list(TopologicalSorter(graph(for_types=True)).static_order())


@pytest.mark.slow
@pytest.mark.claim("no rank needs the planner, and no module itself by a circle")
def test_no_rank_needs_the_planner() -> None:
    """A rank imports its entry, and engines and algorithms by name."""
    runtime = graph(for_types=False)
    reached = dict[str, str]()
    todo = [
        (module, module)
        for module in runtime
        if module == "drumline.train.entry" or room(module) in ("engine", "algorithms")
    ]
    while todo:
        module, walk = todo.pop()
        if module not in reached:
            reached[module] = walk
            packages = {module.rsplit(".", 1)[0]} & runtime.keys()  # whose __init__ runs first
            todo += [(other, f"{walk} → {other}") for other in runtime[module] | packages]
    assert "drumline.train.loop" in reached
    assert not [walk for module, walk in reached.items() if room(module) == "planner"]


def room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_every_room_has_its_rules() -> None:
    assert {room_of(path) for path in FILES} <= set(MAY)


IMPORT = f"import sys, {', '.join(f'drumline.{name}' for name in ('config.load', 'plan.plan', 'telemetry.events', 'hardware.detect'))}"
HELP = "import sys; from drumline.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"


def modules_after(code: str) -> set[str]:
    """Return the modules that another process has imported after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_keys_of_other_tools_are_imported_where_one_is_met() -> None:
    code = "from drumline.config.load import load_values; from drumline.train.command import request_maker\n"
    code += (
        "request_maker({'data': {'train': [{'kind': 'digits'}]}, 'model': 'gpt2'}, [], None, ())()"
    )
    loaded = modules_after(code)
    assert "drumline.train.command" in loaded
    assert not {name for name in loaded if name.startswith("drumline.compat")}


@pytest.mark.slow
def test_a_short_config_of_drumline_s_own_needs_no_tables() -> None:
    loaded = modules_after(
        "from drumline.config.load import load_text; load_text('data: rows.jsonl', [])"
    )
    assert "drumline.compat.readers" in loaded
    assert not {"drumline.compat.rules", "drumline_convert"} & loaded


@pytest.mark.slow
@pytest.mark.parametrize("code", [IMPORT, HELP], ids=["light rooms", "--help"])
def test_torch_is_not_imported_for_nothing(code: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(told.stdout.split())
    assert {"sys", "drumline"} <= loaded and not HEAVY & loaded
