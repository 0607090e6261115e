"""Every name that a library keeps for itself and we use is there in the installed version.

One that is not is named in one line.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch

from drumline.errors import EnvironmentFault
from drumline.vendor import names
from tests.harness import ROOT
from tests.unit.test_imports import FILES, module_of, tree_of

VENDOR = "drumline.vendor."
LIBRARIES = ("torch", "transformers", "deepspeed", "peft")


def vendor_module(library: str) -> Any:
    return importlib.import_module(VENDOR + library)


NAMES: list[tuple[str, str]] = []
NAME_IDS: list[str] = []
# (library, class or object, hidden member).
MEMBERS: list[tuple[str, str, str]] = []
MEMBER_IDS: list[str] = []
LISTED: set[str] = set()
for library in LIBRARIES:
    module = vendor_module(library)
    for name in module.PLACES:
        NAMES.append((library, name))
        NAME_IDS.append(f"{library}.{name}")
    for place, members in module.MEMBERS.items():
        for member in members:
            MEMBERS.append((library, place, member))
            MEMBER_IDS.append(f"{place}.{member}")
            LISTED.add(member)

# Python's own, lm-eval's, the mark of a function that torch has compiled, and a table that older
# versions of transformers lack.
ELSEWHERE = {
    "_PACKAGE_TO_DISTRIBUTION",
    "_asdict",
    "_exit",
    "_replace",
    "_broken",
    "_call_queue",
    "_executor_manager_thread",
    "_run_exitfuncs",
    "_rank",
    "_world_size",
    "_torchdynamo_orig_callable",
}
# Functions of ours beside the names of a library.
OURS = {
    "transformers.packed_mask",
    "transformers.import_without_torchao",
    "transformers.ask_the_host",
    "transformers.kernel_packages",
    "transformers.torch_functions",
    "torch.dump_flight_recorders",
}
# Used by such functions, so nobody imports them.
USED_WITHIN = {
    "transformers.and_masks",
    "transformers.packed_sequence_mask_function",
    "torch.compiled_c10d",
}


def nodes() -> Iterator[ast.AST]:
    """Yield the syntax nodes of the whole package."""
    for path in FILES:
        yield from ast.walk(tree_of(path))


def hidden_members(found: set[str]) -> set[str]:
    """Return those of the names that are hidden, and neither ours nor Python's."""
    hidden = set()
    for name in found - ELSEWHERE:
        is_hidden = name.startswith("_")
        if is_hidden and not name.startswith(("__", "_drumline")):
            hidden.add(name)

    return hidden


@pytest.mark.parametrize(("library", "name"), NAMES, ids=NAME_IDS)
def test_the_name_is_there(library: str, name: str) -> None:
    pytest.importorskip(library)
    assert getattr(vendor_module(library), name) is not None


@pytest.mark.slow
def test_every_name_is_used() -> None:
    used = set()
    for node in nodes():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(VENDOR):
            library = node.module.removeprefix(VENDOR)
            used |= {f"{library}.{alias.name}" for alias in node.names}

    assert set(NAME_IDS) == used - OURS | USED_WITHIN


@pytest.mark.parametrize(
    ("library", "place", "member"),
    MEMBERS,
    ids=MEMBER_IDS,
)
def test_the_member_is_there(library: str, place: str, member: str) -> None:
    pytest.importorskip(library)
    owner = names(library, "", "", {"owner": place})("owner")
    if hasattr(owner, member):
        return

    # Set in an instance.
    bases = [base for base in owner.__mro__ if base.__module__.startswith(library)]
    assert any(member in inspect.getsource(base) for base in bases), f"no {member}"


@pytest.mark.slow
def test_every_member_that_is_used_is_listed() -> None:
    """Read or set on anything but our own objects, by a name that no class of ours makes."""
    ours = set()
    used = set()
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if isinstance(node.ctx, ast.Store) and owner in ("self", "cls"):
                ours.add(node.attr)
            else:
                used.add(node.attr)
        elif isinstance(node, ast.Call):
            used |= name_looked_up(node)

    found = hidden_members(used - ours)
    assert found <= LISTED, sorted(found - LISTED)

    used |= overridden()
    assert used >= LISTED, sorted(LISTED - used)


def name_looked_up(node: ast.Call) -> set[str]:
    """Return the name that getattr, hasattr or setattr is called with, if it is written out."""
    function = ast.unparse(node.func)
    if function not in ("getattr", "hasattr", "setattr") or len(node.args) < 2:
        return set()

    name = getattr(node.args[1], "value", "")
    return {name} if isinstance(name, str) else set()


def test_every_member_that_is_overridden_is_listed() -> None:
    assert overridden() <= LISTED, sorted(overridden() - LISTED)


@functools.cache
def overridden() -> set[str]:
    """Return the hidden members of a library's class that a class of ours defines anew."""
    found: set[str] = set()
    for path in FILES:
        hidden = hidden_members(methods_of_subclasses(tree_of(path)))
        if not hidden:
            continue
        module = importlib.import_module(module_of(path))
        for made in vars(module).values():
            if isinstance(made, type) and made.__module__ == module.__name__:
                own = hidden & set(vars(made))
                found |= own & members_of_libraries(made)

    return found


def methods_of_subclasses(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    found.add(each.name)

    return found


def members_of_libraries(made: type) -> set[str]:
    """Return the members that a class has from a library's classes."""
    found: set[str] = set()
    for base in made.__mro__:
        if base.__module__.split(".")[0] in LIBRARIES:
            found |= set(vars(base))

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
    version = metadata.version("torch")
    name = place.replace(":", ".")
    assert f"torch {version} has no {name}" in line
    assert "2.11.0 to 2.13.0 have it" in line
    assert "pip install 'torch>=2.11.0,<=2.13.0'" in line


def test_a_library_that_is_not_installed_is_an_import_error() -> None:
    missing = names("no_such_library", "1", "2", {"name": "no_such_library:name"})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        missing("name")

    empty = names("torch", "1", "2", {})
    with pytest.raises(AttributeError, match="other"):
        empty("other")


def vendor_versions(library: str) -> tuple[str, str]:
    """Return the oldest and the newest version that the library's vendor module names."""
    source = (ROOT / "drumline" / "vendor" / f"{library}.py").read_text()
    ((oldest, newest),) = re.findall(rf'names\("{library}", "([0-9.]+)", "([0-9.]+)"', source)
    return oldest, newest


def test_the_oldest_versions_are_those_that_are_installed_for_make_test_oldest() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().split()
    oldest = dict(line.split("==") for line in lines)
    for library in LIBRARIES:
        assert vendor_versions(library)[0] == oldest[library]

    # What it takes to be compared with others is newer.
    project = re.sub(r"\nbench = .*", "", (ROOT / "pyproject.toml").read_text())
    for package, version in oldest.items():
        for bound in re.findall(rf'"{package}>=([0-9.]+)[",]', project, re.IGNORECASE):
            assert numbers(version) == numbers(bound), f"{package}>={bound}, ran {version}"


def test_the_versions_that_pyproject_admits_end_with_the_newest_that_was_tried() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for library in LIBRARIES:
        _, newest = vendor_versions(library)
        major, minor, *_ = numbers(newest)
        bounds = set(re.findall(rf'"{library}>=[0-9.]+,<([0-9.]+)"', project))
        assert bounds == {f"{major}.{minor + 1}"}, library


def numbers(version: str) -> list[int]:
    """Return the numbers of a version. 1.10 and 1.10.0 are one version."""
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

    for query in range(5):
        for key in range(5):
            is_seen = bool(allowed(0, 0, torch.tensor(query), torch.tensor(key)))
            is_one_document = (key < 3) == (query < 3)
            assert is_seen == (is_one_document and key <= query)
