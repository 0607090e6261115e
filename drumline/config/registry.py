"""Find the kinds of strategies, algorithms and so on: of this package, of others, of the user.

It also finds any code of the user's own by its name: `module:name`, `file.py:name`, or an entry
point of an installed package.

A kind is a spec: a `Section` whose fields are its part of the YAML, and whose methods answer the
rest of the code. Specs of this package are found by the names of their modules (`Spec.module_pattern`).
Those of another package are entry points of `drumline.GROUP`. A user's own is written `kind:
path.py:Name` (relative to the YAML) or `kind: package.module:Name`.

A package may also add keys to a kind of this package. Its entry point of `drumline.extended_GROUP`
has the name of the kind and gives a subclass of the kind's spec, which takes its place. No torch
here.
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
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
)
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from drumline.config.section import Section, kinds_without_keys
from drumline.errors import ConfigError, DrumlineError
from drumline.foreign import class_and_line, expand_home


class Spec(Section):
    """The base of all specs. The base class of a group sets `group`, `noun` and `yaml_key`."""

    # Name of the group, such as "strategies" for the entry points drumline.strategies.
    group: ClassVar[str]
    # Names of the modules that hold this package's specs, with {} for any name, such as
    # drumline.algorithms.{}.spec. Empty if all are in `extra_module`.
    module_pattern: ClassVar[str] = ""
    # The word for one of the group in errors: algorithm.
    noun: ClassVar[str]
    # The key of the YAML whose `kind` errors name, which need not be the `noun`: launch, not
    # launcher.
    yaml_key: ClassVar[str]
    # A module with further specs of this package, beside those of `module_pattern`; empty for none.
    extra_module: ClassVar[str] = ""
    # The kind of a section that names none; empty if it must name one.
    default: ClassVar[str] = ""
    # Whether a kind as text is short for a section without further keys: `strategy: ddp`.
    allows_kind_alone: ClassVar[bool] = True
    # Whether any text is short for a section, which `long` makes of it, as `rows.jsonl` is for a data
    # source. Then a section may also leave its kind out.
    allows_any_text: ClassVar[bool] = False
    # Order in tables and lists: the smallest comes first.
    position: ClassVar[int] = 1000
    kind: str = ""

    @classmethod
    def kind_key(cls, field: str | None = None) -> str:
        """Return the key of the YAML that holds the kind. `field` is that of its section, if known."""
        return f"{cls.yaml_key}.kind"

    @classmethod
    def long(cls, value: Any, base_dir: Path | None) -> Any:
        """Return the section that a short form stands for; any other value is returned unchanged.

        `base_dir` is the folder that paths are relative to.
        """
        if isinstance(value, str) and cls.allows_kind_alone:
            return {"kind": value}
        if isinstance(value, Mapping) and cls.default:
            return {"kind": cls.default, **value}
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the kind, by which another process finds the user's class."""
        base = next(cls for cls in type(self).__mro__ if "group" in vars(cls))
        names = self.model_fields_set | {"kind"}
        values = {name: getattr(self, name) for name in names}
        return partial(make, base, **values), ()


S = TypeVar("S", bound=Spec)
# JSON schema of a kind that is code of the user's own.
USERS_OWN_KIND = {
    "type": "string",
    "pattern": ":",
    "description": "path.py:Name or package.module:Name of your own",
}
# Attribute of a module that was run from a file, with the text of that file.
TEXT = "__drumline_text__"
# At most so many public names of a module are shown in an error.
MOST_NAMES = 8
# Drumline's other distributions, by group and by the kind or command that they offer.
DISTRIBUTIONS: dict[str, dict[str, str]] = {
    "launchers": {
        "ssh": "drumline-hosts",
        "ray": "drumline-hosts",
        "kubernetes": "drumline-kubernetes",
    },
    "config_readers": {
        "llama_factory": "drumline-convert",
        "axolotl": "drumline-convert",
        "training": "drumline-convert",
    },
    "commands": {"convert": "drumline-convert", "sweep": "drumline-sweep"},
}


class AddedKeys(NamedTuple):
    """The keys, with their defaults, that another distribution of Drumline adds to a kind."""

    distribution: str
    defaults: dict[str, Any]


# The keys that are added to a kind, by group and kind.
ADDED_KEYS = {
    ("strategies", "diloco"): AddedKeys(
        "drumline-diloco",
        {"fragments": 1, "bits": 32, "delay": 0, "keep": 0.5, "peers": [], "secret": None},
    )
}
# Specs of the user's own that configs have named, by base class of the group and by path.py:Name.
_users_specs: dict[type[Spec], dict[str, Any]] = {}


@cache
def part_class(path: str | type) -> Any:
    """Return the class that `module:Name` names; a class is returned as it is.

    Raises ConfigError if a plug-in's module cannot be imported.
    """
    if isinstance(path, type):
        return path
    module, _, name = path.partition(":")
    where = "strategy.kind"
    holder = run_user_code(partial(importlib.import_module, module), module, where)
    return _member(holder, name, module, where)


def literal_kinds(model: type[BaseModel]) -> list[str]:
    """Return the values that `kind` may have in a section; none if it is not fixed."""
    field = model.model_fields.get("kind")
    if field is None or get_origin(field.annotation) is not Literal:
        return []
    return [str(kind) for kind in get_args(field.annotation)]


def kinds(base: type[S]) -> dict[str, type[S]]:
    """Return the specs of all known kinds by kind, in the order of tables and lists.

    Raises:
        ConfigError: A plug-in cannot be imported.
    """
    built_in = _built_in(base)
    specs = {}
    for name in known_names(base.group, built_in):
        if name in built_in:
            specs[name] = _find_extended(base, name)
        else:
            specs[name] = _spec_of_package(base, name)
    specs |= _users_specs.get(base, {})
    return dict(sorted(specs.items(), key=lambda item: item[1].position))


def make(base: type[S], kind: str, **values: Any) -> S:
    """Return a spec of a kind with these fields, and defaults for all others."""
    spec = find(base, kind)
    assert spec is not None, kind
    return spec.model_validate({"kind": kind, **values})


def kinds_alone(base: type[S]) -> list[str]:
    """Return the kinds that need no further key."""
    names = []
    for kind, spec in kinds(base).items():
        needs_more = any(field.is_required() for field in spec.model_fields.values())
        if not needs_more:
            names.append(kind)
    return names


def find(
    base: type[S],
    kind: str,
    base_dir: Path | None = None,
    trusted: bool = True,
    field: str | None = None,
) -> type[S] | None:
    """Return the spec class of a kind; None if there is none.

    Args:
        base: Base class of the group.
        kind: The kind, which may be path.py:Name or module:Name.
        base_dir: Folder that paths are relative to.
        trusted: Whether code beside the config may be run.
        field: Field of the config that errors name, for a group that several fields take.

    Raises:
        ConfigError: A plug-in cannot be imported or is no spec of this group, or `kind` is code
            that is not trusted.
    """
    if kind in _built_in(base):
        return _find_extended(base, kind)
    if ":" not in kind:
        if kind in entry_points(base.group):
            return _spec_of_package(base, kind)
        return None
    where = base.kind_key(field)
    place, _, name = kind.rpartition(":")
    base_dir = (base_dir or Path()).absolute()
    if place.endswith(".py"):
        kind = f"{base_dir / expand_home(place)}:{name}"
    own = _users_specs.setdefault(base, {})
    if kind not in own:
        if not trusted:
            what = f"{kind} is code that lies beside the config, and this may be a stranger's"
            raise ConfigError(
                what, where=where, fix="read that code, then add model.trust_remote_code=true"
            )
        own[kind] = _require_kind(base, find_object(kind, base_dir, where), kind, where)
    return cast("type[S]", own[kind])


@cache
def _built_in(base: type[S]) -> dict[str, type[S]]:
    """Return the specs of this package's kinds, by kind."""
    specs = {}
    for name in _spec_modules(base):
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, base):
                for kind in literal_kinds(value):
                    specs[kind] = value
    return specs


def _spec_modules(base: type[Spec]) -> list[str]:
    """Return the names of this package's modules that hold specs of a group."""
    names = []
    if base.extra_module:
        names.append(base.extra_module)
    room, has_names, below = base.module_pattern.partition(".{}")
    if not has_names:
        return names
    for module in pkgutil.iter_modules(importlib.import_module(room).__path__):
        # A plain module holds no module `below` it.
        if below and not module.ispkg:
            continue
        name = base.module_pattern.format(module.name)
        if importlib.util.find_spec(name):
            names.append(name)
    return names


def _find_extended(base: type[S], kind: str) -> type[S]:
    """Return the spec of a kind of this package, or of an installed package that adds keys to it."""
    if kind in entry_points(f"extended_{base.group}"):
        return _extension(base, kind)
    return _built_in(base)[kind]


@cache
def _extension(base: type[S], kind: str) -> type[S]:
    """Return the spec of an installed package that adds keys to a kind of this package.

    Raises ConfigError if it cannot be imported, or is not derived from the kind's own spec.
    """
    return _load_spec(_built_in(base)[kind], f"extended_{base.group}", kind)


@cache
def _spec_of_package(base: type[S], name: str) -> type[S]:
    """Return the spec that an installed package offers under a name."""
    return _load_spec(base, base.group, name)


def _load_spec(base: type[S], group: str, name: str) -> type[S]:
    """Return the spec of an entry point. Raises ConfigError if it is not derived from `base`."""
    point = entry_points(group)[name]
    package = package_of(point)
    spec = run_user_code(point.load, f"the {base.noun} {name!r} of {package}", package)
    return _require_kind(base, spec, name, base.kind_key())


def _require_kind(base: type[S], spec: Any, kind: str, where: str) -> type[S]:
    """Return the spec, with `kind` as its kind.

    Raises ConfigError, which names the key `where`, if it is no spec of this group.
    """
    if not isinstance(spec, type) or not issubclass(spec, base):
        what = f"{kind} is no {base.noun}: it is not derived from {base.__module__}.{base.__name__}"
        raise ConfigError(what, where=where, fix="name a class that is")
    if literal_kinds(spec) == [kind]:
        return spec
    fields: dict[str, Any] = {"kind": (Literal[kind], kind)}
    named = create_model(
        spec.__name__, __base__=spec, __module__=spec.__module__, __doc__=spec.__doc__, **fields
    )
    return cast("type[S]", named)


@dataclass(frozen=True)
class Registered:
    """Lets a field of the config take all kinds of a group.

    The field's type is `Annotated[Base, Registered(Base)]`. The kind alone is short for a section
    without further keys. The context of a validation may have `base_dir` and `trusted`; see `find`.
    """

    base: type[Spec]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # Each kind writes its own fields.
        serialization = core_schema.simple_ser_schema("any")
        return core_schema.with_info_plain_validator_function(
            self._validate, serialization=serialization
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schemas = {kind: spec.__pydantic_core_schema__ for kind, spec in kinds(self.base).items()}
        full = handler(_union(schemas))
        choices: list[dict[str, Any]] = []
        if self.base.allows_kind_alone:
            choices += [{"enum": sorted(kinds_without_keys(full, handler))}, USERS_OWN_KIND]
        if self.base.allows_any_text:
            choices += [{"type": "string"}, {"type": "object", "not": {"required": ["kind"]}}]
        own = {"type": "object", "properties": {"kind": USERS_OWN_KIND}, "required": ["kind"]}
        return {"anyOf": [*choices, full, own]}

    def _validate(self, value: Any, info: ValidationInfo) -> Any:
        """Return the spec of a section, or pydantic's error for a section that is none."""
        if isinstance(value, self.base):
            return value
        context = info.context or {}
        value = self.base.long(value, context.get("base_dir"))
        kind = value.get("kind") if isinstance(value, Mapping) else None
        spec = None
        if isinstance(kind, str):
            spec = find(self.base, kind, **context, field=info.field_name)
        if spec is None:
            _require_distribution(self.base, kind)
            specs = kinds(self.base)
        else:
            if ":" in str(kind):
                # A path is written in full, so the section names the kind as its spec does.
                kind = literal_kinds(spec)[0]
            value = _without_added_keys(self.base, spec, {**value, "kind": kind})
            specs = {str(kind): spec}
        validators = {
            name: _validator(candidate, info.context) for name, candidate in specs.items()
        }
        return SchemaValidator(_union(validators)).validate_python(value)


@dataclass(frozen=True)
class Named:
    """Lets a field of the config take a text that names a function.

    The text is one of `own`, an entry point of drumline.GROUP, or path.py:Name of the user's own.
    """

    group: str
    own: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"enum": known_names(self.group, self.own)}, USERS_OWN_KIND]}

    def _known(self, name: str) -> str:
        known = known_names(self.group, self.own)
        if ":" not in name and name not in known:
            hint = perhaps(name, known) or "; one of your own is file.py:function"
            raise ValueError(f"{name!r} is not one of {', '.join(known)}{hint}")
        return name


def _validator(spec: type[Spec], context: Any) -> CoreSchema:
    """Return the schema that validates a section as `spec`."""

    def validate(value: Any) -> Spec:
        return spec.model_validate(value, context=context)

    return core_schema.no_info_plain_validator_function(validate)


def _union(choices: dict[str, CoreSchema]) -> CoreSchema:
    """Return the schema of a section whose `kind` selects one of `choices`."""
    return core_schema.tagged_union_schema(dict[Any, CoreSchema](choices), "kind")


def _require_distribution(base: type[Spec], kind: Any) -> None:
    """Raise ConfigError if a kind that was not found is one of a distribution of Drumline's own."""
    distributions = DISTRIBUTIONS.get(base.group, {})
    if isinstance(kind, str) and kind in distributions:
        distribution = distributions[kind]
        raise ConfigError(f"{kind} needs pip install {distribution}", where=base.kind_key())


def _without_added_keys(
    base: type[Spec], spec: type[Spec], section: dict[str, Any]
) -> dict[str, Any]:
    """Return a section without keys of a missing distribution, if they have their defaults.

    A plan that was made before 0.6.0 has all of them. Raises ConfigError for another value.
    """
    added = ADDED_KEYS.get((base.group, section["kind"]))
    if added is None:
        return section
    kept = {}
    for key, value in section.items():
        if key in spec.model_fields or key not in added.defaults:
            kept[key] = value
        elif value is not None and value != added.defaults[key]:
            what = f"{key} needs pip install {added.distribution}"
            raise ConfigError(what, where=f"{base.yaml_key}.{key}")
    return kept


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is most similar to `word`; None if none is similar."""
    by_lower = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    if not matches:
        return None
    return by_lower[matches[0]]


def find_object(path: str, base_dir: Path, where: str, noun: str = "class") -> Any:
    """Return the object of `module:name` or `file.py:name`. Modules may also be beside the YAML.

    `noun`: the word for the object in errors; a "function" must be callable.
    Raises ConfigError for what cannot be found or imported.
    """
    place, _, name = path.rpartition(":")
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))  # at the end: it shadows nothing
    found: Any
    if place.endswith(".py"):
        found = _file(base_dir / expand_home(place), where)
    else:
        found = _module(place, base_dir, where)
    found = _member(found, name, place, where, noun)
    if noun == "function":
        return _callable(found, path, where)
    return found


def _member(module: Any, name: str, place: str, where: str, noun: str = "class") -> Any:
    """Return a module's object by its name, which may have dots. Raises ConfigError if it has none.

    `place`: what an error calls the module.
    """
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = _public_callables(found)
            fix = f"it has {', '.join(sorted(names)[:MOST_NAMES])}" if names else None
            what = f"{place} has no {noun} {name!r}{perhaps(part, names)}"
            raise ConfigError(what, where=where, fix=fix)
        found = getattr(found, part)
    return found


def _public_callables(holder: Any) -> list[str]:
    """Return the names of the classes and functions of a module or class."""
    names = []
    for name, value in vars(holder).items():
        if callable(value) and not name.startswith("__"):
            names.append(name)
    return names


def _callable(found: Any, name: str, where: str) -> Any:
    """Return `found`. Raises ConfigError if it cannot be called."""
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a function", where=where)
    return found


@cache
def installed_entry_points() -> dict[str, dict[str, importlib.metadata.EntryPoint]]:
    """Return the entry points of installed packages in Drumline's groups, by group and name, sorted.

    The metadata of every installed package is read for it.
    """
    points = importlib.metadata.entry_points()
    by_group = {}
    for group in points.groups:
        if not group.startswith("drumline."):
            continue
        # Packages are found in the order of their folders on the disk, which differs by machine.
        in_order = sorted(points.select(group=group), key=lambda point: point.name)
        by_group[group] = {point.name: point for point in in_order}
    return by_group


def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages in the group drumline.GROUP, by name, sorted."""
    return installed_entry_points().get(f"drumline.{group}", {})


def known_names(group: str, own: Iterable[str]) -> list[str]:
    """Return this package's `own` names, then those of installed packages.

    Raises ConfigError if an installed package offers one of the own names.
    """
    points = entry_points(group)
    own = list(own)
    for name in own:
        if name in points:
            package = package_of(points[name])
            what = f"{package} offers {name!r} as one of drumline.{group}, which is drumline's own name"
            raise ConfigError(what, where=package, fix="uninstall it")
    return [*own, *points]


def package_of(point: importlib.metadata.EntryPoint) -> str:
    """Return the name and version of the package that offers an entry point."""
    if point.dist is None:
        return point.value
    return f"{point.dist.name} {point.dist.version}"


def find_function(
    name: str, group: str, base_dir: Path, where: str, noun: str, fix: str
) -> Callable[..., Any]:
    """Return a function by its name.

    It is `module:function`, `file.py:function`, or what an installed package calls it in
    drumline.GROUP.
    `noun`: the word for it in errors.
    Raises ConfigError for what cannot be found or imported, or is no function.
    """
    if ":" in name:
        return find_object(name, base_dir, where, "function")
    return _callable(find_installed(name, group, where, noun, fix), name, where)


def find_installed(name: str, group: str, where: str, noun: str, fix: str) -> Any:
    """Return the object that an installed package calls `name` in drumline.GROUP.

    `noun`: the word for it in errors.
    Raises ConfigError, which names the key `where`, if there is none or it cannot be imported.
    """
    points = entry_points(group)
    if name not in points:
        what = f"no installed package offers {noun} {name!r}{perhaps(name, points)}"
        raise ConfigError(what, where=where, fix=fix)
    point = points[name]
    return run_user_code(point.load, f"{noun} {name!r} of {package_of(point)}", where)


class _Source(SourceFileLoader):
    """Loads source files without Python's cache of compiled ones.

    The cache takes a file for the previous one if it has as many bytes and was written within the
    same second.
    """

    def path_stats(self, path: Any) -> Any:
        raise OSError("no cache is asked")


def _file(path: Path, where: str) -> ModuleType:
    """Return the module of a .py file, which is run if it has changed. Raises ConfigError."""
    if not path.is_file():
        siblings = []
        if path.parent.is_dir():
            siblings = [other.name for other in path.parent.glob("*.py")]
        raise ConfigError(f"there is no file {path}{perhaps(path.name, siblings)}", where=where)
    # Two folders may have a file of the same name.
    folder_hash = zlib.crc32(bytes(path.absolute()))
    name = f"drumline_own_{path.stem}_{folder_hash:08x}"
    text = path.read_bytes()
    known = sys.modules.get(name)
    if known is not None and vars(known).get(TEXT) == text:
        # All keys that name this file mean the same classes.
        return known
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, as if it were run
    run_user_code(partial(spec.loader.exec_module, module), str(path), where)
    vars(module)[TEXT] = text
    return module


def _module(name: str, base_dir: Path, where: str) -> ModuleType:
    """Return the module of a name. Raises ConfigError."""
    try:
        return run_user_code(partial(importlib.import_module, name), name, where)
    except ConfigError as error:
        missing = _missing_module(error)
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            # Another error, or a module is missing that this one imports.
            raise
        candidates = [module.name for module in pkgutil.iter_modules()]
        what = f"there is no module {missing!r}{perhaps(missing, candidates)}"
        fix = f"give its path as file.py:function, or put it beside the YAML in {base_dir}"
        raise ConfigError(what, where=where, fix=fix) from error


def _missing_module(error: ConfigError) -> str | None:
    """Return the module whose absence caused an error; None for an error of another cause."""
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        return cause.name
    return None


def run_user_code(load: Callable[[], Any], name: str, where: str, doing: str = "importing") -> Any:
    """Call `load`, which imports or runs a user's or plug-in's code, and return its result.

    Raises ConfigError for whatever the code raises. Unless `doing` is importing, a DrumlineError
    passes as it is.
    """
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
    """Return `; did you mean …?` with the most similar name; nothing if none is similar."""
    close = nearest(word, names)
    if not close:
        return ""
    return f"; did you mean {close!r}?"
