"""YAML and overrides → Config; every mistake as one line that names the place and the way out. No torch here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from drumline.config.schema import Config
from drumline.config.suggest import SYNONYMS, elsewhere, keys_at, kind_of, models_at, nearest
from drumline.config.yaml_lines import Path as KeyPath
from drumline.config.yaml_lines import parse_value, read_yaml
from drumline.errors import ConfigError


@dataclass(frozen=True)
class Loaded:
    """A config and where it came from. Paths of data files in it are relative to `base_dir`, run.dir to the current folder."""

    config: Config
    path: Path
    base_dir: Path


def load(path: Path, overrides: list[str]) -> Loaded:
    """Read a YAML file and lay dotted overrides over it. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), fix="give the path of a YAML; examples/ has some to copy") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix="give the path of a readable YAML file") from None
    config = load_text(text, overrides, str(path))
    if config.model.chat_template is not None:
        # Ranks read it from the plan, and no longer know where the YAML was.
        template = str((path.parent / config.model.chat_template).absolute())
        config = config.model_copy(update={"model": config.model.model_copy(update={"chat_template": template})})
    return Loaded(config, path, path.parent)


def load_text(text: str, overrides: list[str], name: str = "config") -> Config:
    """The same for a text; `name` stands in its error lines."""
    values, lines = read_yaml(text, name)
    if values is None:
        raise ConfigError("the file is empty", where=name, fix="it needs at least `data: {train: […]}`")
    if not isinstance(values, dict):
        raise ConfigError(f"holds a {type(values).__name__}, not keys and values", where=f"{name}:1", fix="write `key: value` lines")
    values = copy.deepcopy(values)
    overridden: dict[KeyPath, str] = {}
    for override in overrides:
        path = _override(values, override)
        overridden[path] = override
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, lines, overridden, name) from None


def _override(values: dict[str, Any], override: str) -> KeyPath:
    """Set `a.b.0.c=value` in nested values; returns its path."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"{override!r} is no override", where="command line", fix="write key=value, such as optimizer.lr=1e-4")
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
    place: Any = values
    for key, following in pairwise(path):
        if isinstance(place, list):
            place = _item(place, key, override)
            continue
        current = place.get(key)
        if isinstance(current, str) and following != "kind":
            current = {"kind": current}
        if not isinstance(current, dict | list):
            current = {}
        place[key] = current
        place = current
    value = parse_value(text)
    if isinstance(place, list):
        _item(place, path[-1], override)
        place[int(path[-1])] = value
    else:
        place[path[-1]] = value
    return path


def _item(place: list[Any], key: str | int, override: str) -> Any:
    if not isinstance(key, int) or key >= len(place):
        raise ConfigError(
            f"the list has {len(place)} items, no {key!r}", where=f"override {override}", fix=f"count from 0 to {len(place) - 1}"
        )
    return place[key]


# ------------------------------------------------------------------------------------------------------------ error lines


def _first_error(error: ValidationError, lines: dict[KeyPath, int], overridden: dict[KeyPath, str], name: str) -> ConfigError:
    """The first mistake as one line; how many more there are stands behind it."""
    details = error.errors()
    # Unknown keys go first: a misspelt key also makes the right one look as if it were missing.
    details.sort(key=lambda d: d["type"] != "extra_forbidden")
    detail = details[0]
    path = _plain(detail["loc"])
    what, fix = _words(detail, path)
    more = f" ({len(details) - 1} more mistake{'s' * (len(details) > 2)} after this)" if len(details) > 1 else ""
    return ConfigError(what + more, where=_where(path, lines, overridden, name), fix=fix)


def _plain(loc: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the union tags that it puts in."""
    path: list[str | int] = []
    for part in loc:
        sections = models_at(tuple(path))
        kinds = {kind_of(model) for model in sections} - {None}
        known = {key for model in sections for key in model.model_fields}
        if isinstance(part, str) and part in kinds and part not in known:
            continue
        path.append(part)
    return tuple(path)


def _where(path: KeyPath, lines: dict[KeyPath, int], overridden: dict[KeyPath, str], name: str) -> str:
    for start, override in overridden.items():
        if path[: len(start)] == start:
            return f"override {override}"
    dotted = ".".join(map(str, path))
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f"{name}:{lines[path[:length]]}: {dotted}"
    return f"{name}: {dotted}" if dotted else name


def _words(detail: Any, path: KeyPath) -> tuple[str, str]:
    """(what is wrong, how to mend it) of one of pydantic's errors."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return f"{path[-1]!r} is missing", "add it; `drumline schema` describes it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = [k for model in models_at(path) if (k := kind_of(model))]
        tag = given.get("kind") if isinstance(given, dict) else given
        guess = nearest(str(tag), kinds)
        what = f"no kind {tag!r} here" if kind == "union_tag_invalid" else "which `kind` this is was left out"
        return what, (f"did you mean {guess!r}? " if guess else "") + f"there are {', '.join(kinds)}"
    if kind == "literal_error":
        return f"{given!r} is not one of {context['expected']}", "choose one of them"
    if kind == "value_error":
        return str(context["error"]), "mend the YAML"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    if kind.startswith("model_"):
        return f"{_short(given)} given where keys and values are wanted", f"known keys: {', '.join(keys_at(path))}"
    return f"{_short(given)} given ({type(given).__name__}): {message}", "give such a value"


def _unknown_key(path: KeyPath) -> tuple[str, str]:
    key, place = str(path[-1]), path[:-1]
    known = keys_at(place)
    guess = nearest(key, known)
    what = f"unknown key {key!r}"
    if guess:
        return what, f"did you mean {guess!r}?"
    others = elsewhere(SYNONYMS.get(key, key))
    if others:
        return what, f"did you mean {' or '.join(others[:3])}?"
    return what, f"known here: {', '.join(known)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# --------------------------------------------------------------------------------------------------- printing, comparing


def to_yaml(config: Config) -> str:
    """The config with every default visible."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))


@dataclass(frozen=True)
class Difference:
    """One key that differs between two configs; `matters`: the numbers of a resumed run would."""

    key: str
    old: Any
    new: Any
    matters: bool


# What may change when a run goes on; everything else decides the numbers.
FREE = (
    "strategy", "launch", "checkpoint", "eval", "health", "memory", "compile",
    "run.dir", "run.deterministic", "run.device", "run.log_every", "run.report_to",
    "data.workers", "data.prefetch", "data.cache_dir", "algorithm.loss_chunk", "model.attention",
)  # fmt: skip


def differences(old: Config, new: Config) -> list[Difference]:
    """Keys whose values differ, in the order of the config."""
    before, after = _flat(old), _flat(new)
    found = []
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            free = any(key == name or key.startswith(name + ".") for name in FREE)
            found.append(Difference(key, before.get(key), after.get(key), not free))
    return found


def _flat(section: BaseModel) -> dict[str, Any]:
    out: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{prefix}.{key}" if prefix else key)
        else:
            out[prefix] = value

    walk(section.model_dump(mode="json"), "")
    return out


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the YAML. Where `strategy: ddp` is short for `{kind: ddp}`, the string is allowed too."""
    made = Config.model_json_schema()
    for name in ("algorithm", "strategy", "schedule", "precision"):
        kinds = sorted({kind for model in models_at((name,)) for kind in _kinds(model)})
        full = made["properties"][name]
        made["properties"][name] = {"anyOf": [{"enum": kinds}, full], "default": full.pop("default", None)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Drumline config", **made}


def _kinds(model: type[BaseModel]) -> list[str]:
    from typing import get_args

    return [str(kind) for kind in get_args(model.model_fields["kind"].annotation)]
