"""Every name that a library keeps for itself and we use is there in the installed version, and one that is not is told in one line."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from drumline.errors import EnvironmentFault
from drumline.vendor import names
from tests.unit.test_imports import FILES, module_of, tree_of

LIBRARIES = ("torch", "transformers", "deepspeed", "peft")
NAMES = [
    (library, name)
    for library in LIBRARIES
    for name in importlib.import_module(f"drumline.vendor.{library}").PLACES
]


@pytest.mark.parametrize(
    ("library", "name"), NAMES, ids=[f"{library}.{name}" for library, name in NAMES]
)
def test_the_name_is_there(library: str, name: str) -> None:
    pytest.importorskip(library)
    vendor = importlib.import_module(f"drumline.vendor.{library}")
    assert getattr(vendor, name) is not None


@pytest.mark.slow
def test_every_name_is_used() -> None:
    used = {
        f"{node.module.removeprefix('drumline.vendor.')}.{alias.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("drumline.vendor.")
        for alias in node.names
    }
    functions = {
        f"transformers.{name}" for name in ("packed_mask", "import_without_torchao", "ask_the_host")
    }
    functions |= {"torch.dump_flight_recorders"}
    # packed_mask uses them.
    inside = {
        "transformers.and_masks",
        "transformers.packed_sequence_mask_function",
    }
    inside |= {"torch.compiled_c10d"}
    assert {f"{library}.{name}" for library, name in NAMES} == used - functions | inside


MEMBERS = [
    (library, place, member)
    for library in LIBRARIES
    for place, members in importlib.import_module(f"drumline.vendor.{library}").MEMBERS.items()
    for member in members
]
LISTED = {member for *_, member in MEMBERS}
# Python's own, lm-eval's, and the mark of a function that torch has compiled.
ELSEWHERE = {
    *(
        "_asdict",
        "_exit",
        "_replace",
        "_broken",
        "_call_queue",
        "_executor_manager_thread",
        "_run_exitfuncs",
        "_rank",
        "_world_size",
    ),
    "_torchdynamo_orig_callable",
}


def hidden_member(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and not name.startswith("_drumline")
        and name not in ELSEWHERE
    )


@pytest.mark.parametrize(
    ("library", "place", "member"),
    MEMBERS,
    ids=[f"{place}.{member}" for _, place, member in MEMBERS],
)
def test_the_member_is_there(library: str, place: str, member: str) -> None:
    pytest.importorskip(library)
    owner = names(library, "", "", {"owner": place})("owner")
    if not hasattr(owner, member):  # set in an instance
        assert any(
            member in inspect.getsource(base)
            for base in owner.__mro__
            if base.__module__.startswith(library)
        ), f"no {member}"


@pytest.mark.slow
def test_every_member_that_is_used_is_listed() -> None:
    """Read or set on anything but our own objects, by a name that no class of ours makes."""
    ours, used = set(), set()
    for node in (node for path in FILES for node in ast.walk(tree_of(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
            (ours if own else used).add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
        ):
            used.add(getattr(node.args[1], "value", ""))
    found = {name for name in used - ours if isinstance(name, str) and hidden_member(name)}
    assert found <= LISTED, sorted(found - LISTED)
    assert used | overridden() >= LISTED, sorted(LISTED - used - overridden())


def test_every_member_that_is_overridden_is_listed() -> None:
    assert overridden() <= LISTED, sorted(overridden() - LISTED)


@functools.cache
def overridden() -> set[str]:
    """Hidden members of a library's class that a class of ours defines anew."""
    found: set[str] = set()
    for path in FILES:
        classes = [
            node
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef) and node.bases
        ]
        hidden = {
            node.name
            for made in classes
            for node in made.body
            if isinstance(node, ast.FunctionDef) and hidden_member(node.name)
        }
        if not hidden:
            continue
        module = importlib.import_module(module_of(path))
        for made in (
            each
            for each in vars(module).values()
            if isinstance(each, type) and each.__module__ == module.__name__
        ):
            bases = [base for base in made.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
            found |= {
                name
                for name in hidden & set(vars(made))
                if any(name in vars(base) for base in bases)
            }
    return found


@pytest.mark.parametrize(
    "place",
    [
        "torch.distributed.no_such_file:name",
        "torch.distributed:no_such_name",
        "torch:_C.no_such_name",
    ],
)
def test_a_name_that_is_gone_is_told_with_the_versions_that_have_it(place: str) -> None:
    with pytest.raises(EnvironmentFault) as told:
        names("torch", "2.11.0", "2.13.0", {"name": place})("name")
    line = told.value.line()
    assert (
        f"torch {metadata.version('torch')} has no {place.replace(':', '.')}" in line
        and "2.11.0 to 2.13.0 have it" in line
    )
    assert "pip install 'torch>=2.11.0,<=2.13.0'" in line


def test_a_library_that_is_not_installed_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        names("no_such_library", "1", "2", {"name": "no_such_library:name"})("name")
    with pytest.raises(AttributeError, match="other"):
        names("torch", "1", "2", {})("other")


def test_the_oldest_versions_are_those_that_are_installed_for_make_test_oldest() -> None:
    root = Path(__file__).parents[2]
    oldest = dict(
        line.split("==") for line in (root / "constraints-oldest.txt").read_text().split()
    )
    for library in LIBRARIES:
        source = (root / "drumline" / "vendor" / f"{library}.py").read_text()
        assert f'names("{library}", "{oldest[library]}"' in source
    # What it takes to be compared with others is newer.
    project = re.sub(r"\nbench = .*", "", (root / "pyproject.toml").read_text())
    for package, version in oldest.items():
        for bound in re.findall(rf'"{package}>=([0-9.]+)[",]', project, re.IGNORECASE):
            assert numbers(version) == numbers(bound), f"{package}>={bound}, ran {version}"


def test_the_versions_that_pyproject_admits_end_with_the_newest_that_was_tried() -> None:
    root = Path(__file__).parents[2]
    project = (root / "pyproject.toml").read_text()
    for library in LIBRARIES:
        source = (root / "drumline" / "vendor" / f"{library}.py").read_text()
        (newest,) = re.findall(rf'names\("{library}", "[0-9.]+", "([0-9.]+)"', source)
        major, minor = numbers(newest)[:2]
        bounds = set(re.findall(rf'"{library}>=[0-9.]+,<([0-9.]+)"', project))
        assert bounds == {f"{major}.{minor + 1}"}, library


def numbers(version: str) -> list[int]:
    """1.10 and 1.10.0 are one version."""
    found = [int(part) for part in version.split(".")]
    while found[-1] == 0 and len(found) > 1:
        found.pop()
    return found


def test_packed_documents_do_not_meet() -> None:
    """The same rule under every version: tokens of one document, by places (causal)."""
    from drumline.vendor.transformers import packed_mask

    documents_BT = torch.tensor([[0, 0, 0, 1, 1]])
    positions_BT = torch.tensor([[0, 1, 2, 0, 1]])
    allowed = packed_mask(lambda batch, head, query, key: key <= query, positions_BT, documents_BT)
    seen = [
        [bool(allowed(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(5)] for q in range(5)
    ]
    assert seen == [[k <= q and (k < 3) == (q < 3) for k in range(5)] for q in range(5)]
