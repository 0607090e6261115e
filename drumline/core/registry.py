"""The kinds of each thing that comes in kinds (strategies, algorithms): this package's, those of installed packages, the user's own. And
any code of the user's own by its name: `module:name`, `file.py:name`, or an entry point of an installed package.

A kind is a spec: a `Section` whose fields are its part of the YAML, and whose methods answer the rest of the code. Specs of
this package lie in `drumline/GROUP/NAME/spec.py`; those of another package are entry points of `drumline.GROUP`; one of the user's own is
written `kind: path.py:Name` (relative to the YAML) or `kind: package.module:Name`. No torch here.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
)
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from drumline.core.section import Section, kinds_without_keys
from drumline.errors import ConfigError, DrumlineError
from drumline.foreign import class_and_line, expanded


class Spec(Section):
    """What the specs of all groups have in common. A base class of a group sets `group` and `thing`."""

    # Strategies: drumline/strategies/ and the entry points drumline.strategies.
    group: ClassVar[str]
    thing: ClassVar[str]  # what an error calls one of them
    module: ClassVar[str] = ""  # where those of this package are that have no folder of their own
    default: ClassVar[str] = ""  # the kind of a section that names none; none: it must
    short: ClassVar[bool] = True  # the kind alone may stand for a section without further keys
    texts: ClassVar[bool] = (
        False  # any text may stand for a section, and the kind may be left out: see `long`
    )
    position: ClassVar[int] = 1000  # in tables and lists: the smallest first
    kind: str = ""

    @classmethod
    def long(cls, value: Any, base_dir: Path | None) -> Any:
        """The section that a short form stands for; another value as it is. `base_dir`: what paths are relative to."""
        if isinstance(value, str) and cls.short:
            return {"kind": value}
        return (
            {"kind": cls.default, **value} if isinstance(value, Mapping) and cls.default else value
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its kind: another process finds the user's class by it, not by the module's name."""
        base = next(cls for cls in type(self).__mro__ if "group" in vars(cls))
        return partial(
            make, base, **{name: getattr(self, name) for name in self.model_fields_set | {"kind"}}
        ), ()


S = TypeVar("S", bound=Spec)
OWN = {
    "type": "string",
    "pattern": ":",
    "description": "path.py:Name or package.module:Name of your own",
}
TEXT = "__drumline_text__"  # where a module keeps the file that it was run from
_own: dict[
    type[Spec], dict[str, Any]
] = {}  # those that a config named as path.py:Name, by that name


def literal_kinds(model: type[BaseModel]) -> list[str]:
    """The values that `kind` may have in a section; none where it is not fixed."""
    field = model.model_fields.get("kind")
    return (
        [str(kind) for kind in get_args(field.annotation)]
        if field is not None and get_origin(field.annotation) is Literal
        else []
    )


def kinds(base: type[S]) -> dict[str, type[S]]:
    """Kind → spec, of all that are known. Raises ConfigError for a plug-in that cannot be imported."""
    own = _built_in(base)
    found = {
        **own,
        **{
            name: _of_package(base, name)
            for name in known_names(base.group, own)
            if name not in own
        },
        **_own.get(base, {}),
    }
    return dict(sorted(found.items(), key=lambda item: item[1].position))


def make(base: type[S], kind: str, **values: Any) -> S:
    """A spec with the defaults of its kind. `values`: its fields."""
    spec = find(base, kind)
    assert spec is not None, kind
    return spec.model_validate({"kind": kind, **values})


def kinds_alone(base: type[S]) -> list[str]:
    """The kinds that need no further key."""
    return [
        kind
        for kind, spec in kinds(base).items()
        if not any(field.is_required() for field in spec.model_fields.values())
    ]


def find(
    base: type[S], kind: str, base_dir: Path | None = None, trusted: bool = True
) -> type[S] | None:
    """The spec of a kind; None where there is none. `base_dir`: what a file's path is relative to. Raises ConfigError for a plug-in that
    cannot be imported, or is no spec of this group, and for the user's own code in a file that is not `trusted`."""
    if kind in _built_in(base):
        return _built_in(base)[kind]
    if ":" not in kind:
        return _of_package(base, kind) if kind in entry_points(base.group) else None
    where = f"{base.thing}.kind"
    place, _, name = kind.rpartition(":")
    base_dir = (base_dir or Path()).absolute()
    if place.endswith(".py"):
        kind = f"{base_dir / expanded(place)}:{name}"
    mine = _own.setdefault(base, {})
    if kind not in mine:
        if not trusted:
            what = f"{kind} is code that lies beside the config, and this may be a stranger's"
            raise ConfigError(
                what, where=where, fix="read that code, then add model.trust_remote_code=true"
            )
        mine[kind] = _checked(base, find_object(kind, base_dir, where), kind)
    return cast("type[S]", mine[kind])


@cache
def _built_in(base: type[S]) -> dict[str, type[S]]:
    names = [base.module] if base.module else []
    room = importlib.util.find_spec(f"drumline.{base.group}")
    folders = (
        [
            f"{room.name}.{m.name}.spec"
            for m in pkgutil.iter_modules(room.submodule_search_locations)
            if m.ispkg
        ]
        if room
        else []
    )
    modules = [
        importlib.import_module(name)
        for name in [*names, *(name for name in folders if importlib.util.find_spec(name))]
    ]
    specs = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base)
    ]
    return {kind: spec for spec in specs for kind in literal_kinds(spec)}


@cache
def _of_package(base: type[S], name: str) -> type[S]:
    point = entry_points(base.group)[name]
    return _checked(
        base,
        imported(
            point.load, f"the {base.thing} {name!r} of {package_of(point)}", package_of(point)
        ),
        name,
    )


def _checked(base: type[S], spec: Any, kind: str) -> type[S]:
    """The spec under the kind that it is called by."""
    if not isinstance(spec, type) or not issubclass(spec, base):
        what = (
            f"{kind} is no {base.thing}: it is not derived from {base.__module__}.{base.__name__}"
        )
        raise ConfigError(what, where=f"{base.thing}.kind", fix="name a class that is")
    if literal_kinds(spec) == [kind]:
        return spec
    fields: dict[str, Any] = {"kind": (Literal[kind], kind)}
    return cast(
        "type[S]",
        create_model(
            spec.__name__, __base__=spec, __module__=spec.__module__, __doc__=spec.__doc__, **fields
        ),
    )


@dataclass(frozen=True)
class Registered:
    """Makes the type of a field of a base class: `Annotated[Base, Registered(Base)]` takes each kind that the registry knows. The
    kind alone is short for a section without further keys. The context of a validation may have `base_dir` and `trusted`, see `find`."""

    base: type[Spec]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        any_ = core_schema.simple_ser_schema("any")  # each kind writes its own fields
        return core_schema.with_info_plain_validator_function(self._validated, serialization=any_)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        full = handler(
            _union({kind: spec.__pydantic_core_schema__ for kind, spec in kinds(self.base).items()})
        )
        own = {"type": "object", "properties": {"kind": OWN}, "required": ["kind"]}
        alone = (
            [{"enum": sorted(kinds_without_keys(full, handler))}, OWN] if self.base.short else []
        )
        texts = (
            [{"type": "string"}, {"type": "object", "not": {"required": ["kind"]}}]
            if self.base.texts
            else []
        )
        return {"anyOf": [*alone, *texts, full, own]}

    def _validated(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, self.base):
            return value
        value = self.base.long(value, (info.context or {}).get("base_dir"))
        kind = value.get("kind") if isinstance(value, Mapping) else None
        spec = find(self.base, kind, **(info.context or {})) if isinstance(kind, str) else None
        if spec is None:
            specs = kinds(self.base)
        else:
            kind = literal_kinds(spec)[0] if ":" in str(kind) else str(kind)
            value, specs = {**value, "kind": kind}, {kind: spec}

        def validated(spec: type[Spec]) -> CoreSchema:
            return core_schema.no_info_plain_validator_function(
                lambda given: spec.model_validate(given, context=info.context)
            )

        return SchemaValidator(
            _union({kind: validated(spec) for kind, spec in specs.items()})
        ).validate_python(value)


@dataclass(frozen=True)
class Named:
    """Makes the type of a text that names a function: one of `own`, an entry point of drumline.GROUP, or path.py:Name of the user's."""

    group: str
    own: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"enum": known_names(self.group, self.own)}, OWN]}

    def _known(self, name: str) -> str:
        known = known_names(self.group, self.own)
        if ":" not in name and name not in known:
            hint = perhaps(name, known) or "; one of your own is file.py:function"
            raise ValueError(f"{name!r} is not one of {', '.join(known)}{hint}")
        return name


def _union(choices: dict[str, CoreSchema]) -> CoreSchema:
    return core_schema.tagged_union_schema(dict[Any, CoreSchema](choices), "kind")


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
    found: Any = (
        _file(base_dir / expanded(place), where)
        if place.endswith(".py")
        else _module(place, base_dir, where)
    )
    for part in name.split("."):
        if not hasattr(found, part):
            there = [
                other
                for other, value in vars(found).items()
                if callable(value) and not other.startswith("__")
            ]
            fix = f"it has {', '.join(sorted(there)[:8])}" if there else None
            raise ConfigError(
                f"{place} has no {thing} {name!r}{perhaps(part, there)}", where=where, fix=fix
            )
        found = getattr(found, part)
    return _callable(found, path, where) if thing == "function" else found


def _callable(found: Any, name: str, where: str) -> Any:
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a function", where=where)
    return found


@cache
def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Name → what installed packages offer in the group drumline.GROUP."""
    return {
        point.name: point for point in importlib.metadata.entry_points(group=f"drumline.{group}")
    }


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


def find_function(
    name: str, group: str, base_dir: Path, where: str, thing: str, fix: str
) -> Callable[..., Any]:
    """A function by `module:function`, `file.py:function`, or the name that an installed package gives it in drumline.GROUP. `thing`: what
    an error calls it. Raises ConfigError for what cannot be found or imported, or is no function."""
    if ":" in name:
        function: Callable[..., Any] = find_object(name, base_dir, where, "function")
    elif point := entry_points(group).get(name):
        function = _callable(
            imported(point.load, f"{thing} {name!r} of {package_of(point)}", where), name, where
        )
    else:
        raise ConfigError(
            f"no installed package offers {thing} {name!r}{perhaps(name, entry_points(group))}",
            where=where,
            fix=fix,
        )
    return function


class _Source(SourceFileLoader):
    """Without Python's cache, which takes a file for the one before if it has as many bytes and was written within the same second."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("no cache is asked")


def _file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        candidates = (
            [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        )
        raise ConfigError(f"there is no file {path}{perhaps(path.name, candidates)}", where=where)
    name = f"drumline_own_{path.stem}_{zlib.crc32(bytes(path.absolute())):08x}"  # two folders may have a file of one name
    text = path.read_bytes()
    if (known := sys.modules.get(name)) is not None and vars(known).get(TEXT) == text:
        return known  # whatever keys name it mean the same classes; one that was written anew is run anew
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, as if it were run
    imported(lambda: spec.loader.exec_module(module) if spec.loader else None, str(path), where)
    vars(module)[TEXT] = text
    return module


def _module(name: str, base_dir: Path, where: str) -> ModuleType:
    try:
        return imported(lambda: importlib.import_module(name), name, where)
    except ConfigError as error:
        cause = error.__cause__
        if (
            not isinstance(cause, ModuleNotFoundError)
            or not cause.name
            or not f"{name}.".startswith(f"{cause.name}.")
        ):
            raise
        candidates = [module.name for module in pkgutil.iter_modules()]
        fix = f"give its path as file.py:function, or put it beside the YAML in {base_dir}"
        raise ConfigError(
            f"there is no module {cause.name!r}{perhaps(cause.name, candidates)}",
            where=where,
            fix=fix,
        ) from error


def imported(load: Callable[[], Any], name: str, where: str, doing: str = "importing") -> Any:
    """What a plug-in's module gives. Raises ConfigError for whatever the module raises; an error of ours from code that is run stays."""
    try:
        return load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises
        if isinstance(error, DrumlineError) and doing != "importing":
            raise
        raise ConfigError(
            f"{doing} {name} raised {class_and_line(error)}: {error}", where=where
        ) from error


def call_own(function: Callable[..., Any], path: str, where: str, *arguments: Any) -> Any:
    """Call a function of the user's own that runs during training, and return what it gives.

    Raises ConfigError that names the key, the function and the line that raised. After an OSError
    it is a DrumlineError, which a restart may pass: a read may have failed for once.
    """
    try:
        return function(*arguments)
    except DrumlineError:
        raise
    except (Exception, SystemExit) as error:  # whatever a stranger's function raises
        error_type = DrumlineError if isinstance(error, OSError) else ConfigError
        raise error_type(f"{path} raised {class_and_line(error)}: {error}", where=where) from error


def perhaps(word: str, names: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing."""
    close = nearest(word, names)
    return f"; did you mean {close!r}?" if close else ""
