"""Code of the user's own by its name: `module:name`, `file.py:name`, or an entry point of an installed package. No torch here."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from drumline.errors import ConfigError


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that looks most like `word`; None where none does."""
    lower = {each.lower(): each for each in names}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def find_object(path: str, base_dir: Path, where: str, thing: str = "class") -> Any:
    """By `module:name` or `file.py:name`. Modules are looked for beside the YAML as well. `thing`: what an error calls it.

    Raises ConfigError for what cannot be found or imported."""
    place, _, name = path.rpartition(":")
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))  # at the end: it shadows nothing
    found: Any = _file(base_dir / Path(place).expanduser(), where) if place.endswith(".py") else _module(place, base_dir, where)
    for part in name.split("."):
        if not hasattr(found, part):
            there = [other for other, value in vars(found).items() if callable(value) and not other.startswith("__")]
            fix = f"it has {', '.join(sorted(there)[:8])}" if there else None
            raise ConfigError(f"{place} has no {thing} {name!r}{perhaps(part, there)}", where=where, fix=fix)
        found = getattr(found, part)
    return _callable(found, path, where) if thing == "function" else found


def _callable(found: Any, name: str, where: str) -> Any:
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a function", where=where)
    return found


@cache
def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Name → what installed packages offer in the group drumline.GROUP."""
    return {point.name: point for point in importlib.metadata.entry_points(group=f"drumline.{group}")}


def known_names(group: str, own: Iterable[str]) -> list[str]:
    """This package's `own` names, then those of installed packages. Raises ConfigError where one of these takes an own name."""
    points, own = entry_points(group), [*own]
    for name in own:
        if name in points:
            package = package_of(points[name])
            what = f"{package} offers {name!r} as one of drumline.{group}, which is drumline's own name"
            raise ConfigError(what, where=package, fix="uninstall it")
    return [*own, *points]


def package_of(point: importlib.metadata.EntryPoint) -> str:
    """The name and version of the package that offers it."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def find_function(name: str, group: str, base_dir: Path, where: str, thing: str, fix: str) -> Callable[..., Any]:
    """A function by `module:function`, `file.py:function`, or the name that an installed package gives it in drumline.GROUP. `thing`: what
    an error calls it. Raises ConfigError for what cannot be found or imported, or is no function."""
    if ":" in name:
        function: Callable[..., Any] = find_object(name, base_dir, where, "function")
    elif point := entry_points(group).get(name):
        function = _callable(imported(point.load, f"{thing} {name!r} of {package_of(point)}", where), name, where)
    else:
        raise ConfigError(f"no installed package offers {thing} {name!r}{perhaps(name, entry_points(group))}", where=where, fix=fix)
    return function


def call_object(path: str, base_dir: Path, where: str, options: dict[str, Any]) -> Any:
    """What the function of that name gives for its arguments by name. Raises ConfigError where it cannot be found or raises."""
    function = find_object(path, base_dir, where, "function")
    return imported(lambda: function(**options), path, where, doing="calling")


def _file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        candidates = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no file {path}{perhaps(path.name, candidates)}", where=where)
    name = f"drumline_own_{path.stem}_{zlib.crc32(bytes(path.absolute())):08x}"  # two folders may have a file of one name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, as if it were run
    imported(lambda: spec.loader.exec_module(module) if spec.loader else None, str(path), where)
    return module


def _module(name: str, base_dir: Path, where: str) -> ModuleType:
    try:
        return imported(lambda: importlib.import_module(name), name, where)
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or not cause.name or not f"{name}.".startswith(f"{cause.name}."):
            raise
        candidates = [module.name for module in pkgutil.iter_modules()]
        fix = f"give its path as file.py:function, or put it beside the YAML in {base_dir}"
        raise ConfigError(f"there is no module {cause.name!r}{perhaps(cause.name, candidates)}", where=where, fix=fix) from error


def imported(load: Callable[[], Any], name: str, where: str, doing: str = "importing") -> Any:
    """What a plug-in's module gives. Raises ConfigError for whatever the module raises."""
    try:
        return load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises
        raise ConfigError(f"{doing} {name} raised {type(error).__name__}: {error}", where=where) from error


def perhaps(word: str, names: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing."""
    close = nearest(word, names)
    return f"; did you mean {close!r}?" if close else ""
