"""YAML and overrides → Config; every mistake as one line that names the place and the way out. No torch here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from drumline.core.config import Config
from drumline.core.data import in_full, is_own
from drumline.core.mistakes import (
    check_numbers,
    first_mistake,
    fix_large_number,
    kinds_at,
    null_means_default_at,
    short_at,
)
from drumline.core.model import TEMPLATES
from drumline.core.redact import plain, withhold
from drumline.core.run import EvalConfig, direction
from drumline.core.yaml_lines import NumberTooLarge, Place, read_yaml, write_yaml
from drumline.errors import CheckpointError, ConfigError, DrumlineError, shortened
from drumline.foreign import MIB, expanded, first_line, read_object
from drumline.foreign import read_text as plain_text

if TYPE_CHECKING:
    from drumline.compat.sheet import Sheet
    from drumline.hardware.detect import Machine

Overrides = Mapping[str, Any] | Sequence[str]
MOST_VALUE = 200  # characters of an override's value in an error line
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
MOST_NAMED = 5  # files of a folder, in an error line
MOST_CONFIG = MIB  # bytes of a YAML: a large one has some thousand


@dataclass(frozen=True)
class Loaded:
    """A config and where it came from. Paths of data files in it are relative to `base_dir`, run.dir to the current folder. `old`: it is
    another tool's, or another tool's is laid over it; `notes`: what became of its keys; `resume`: its value for --resume."""

    config: Config
    path: Path
    base_dir: Path
    notes: tuple[str, ...] = ()
    resume: str | None = None
    old: bool = False


@dataclass(frozen=True)
class Request:
    """One `drumline train`: the config, how many processes there are (None: as config and machine say), and where to go on from.
    `machine`: a host that they run on; None: this one."""

    loaded: Loaded
    world_size: int | None = None
    resume: str | None = None
    allow: tuple[str, ...] = ()
    machine: Machine | None = None


def load(
    path: Path, overrides: list[str], over: Sheet | None = None, trusted: bool = True
) -> Loaded:
    """Read a YAML file, also another tool's (see `compat`), lay a launcher's strategy over it, and then dotted overrides. Not `trusted`:
    the file may be a stranger's run, so that an override alone can allow a model's own code (trust_remote_code). Raises ConfigError."""
    base = _base_of(path)
    return _loaded(
        drafted(read_text(path), str(path), base, over),
        path,
        base,
        overrides,
        trusted,
        over is not None,
    )


def _base_of(path: Path) -> Path:
    """What paths in a config are relative to: its folder; for the config.yaml of a run, that of the YAML which the run was started with."""
    plan = path.parent / "plan.json"
    if path.name == "config.yaml" and plan.is_file():
        base = read_object(plan, ConfigError, "copy config.yaml to where the data are").get(
            "base_dir"
        )
        return Path(base) if isinstance(base, str) else path.parent
    return path.parent


def load_values(
    values: Mapping[str, Any], overrides: list[str], over: Sheet | None = None, trusted: bool = True
) -> Loaded:
    """The same for a dictionary in place of a file: paths in it are relative to the current folder. Raises ConfigError."""
    try:
        text = json.dumps(values, default=os.fspath)
    except (TypeError, ValueError) as error:
        fix = "text, numbers, lists, dictionaries and paths go into a config; name your own code by path.py:name"
        raise ConfigError(
            f"cannot be written as YAML: {first_line(error)}", where="config", fix=fix
        ) from None
    draft = drafted(text, "config", Path(), over)
    script = Path(
        getattr(sys.modules["__main__"], "__file__", None) or "notebook"
    ).name  # it names the run folder where nobody does
    return _loaded(
        replace(draft, lines={}), Path(script), Path(), overrides, trusted, over is not None
    )


def reader(config: str | Path | Mapping[str, Any]) -> Callable[..., Loaded]:
    """`load` of a file, or `load_values` of the keys themselves, with the rest of its arguments to come."""
    return (
        partial(load_values, config) if isinstance(config, Mapping) else partial(load, Path(config))
    )


def overrides_of(given: Overrides | None) -> list[str]:
    """Overrides as the command line has them: of values of Python by dotted key, or written as `key=value` already."""
    made = []
    for key, value in given.items() if isinstance(given, Mapping) else ():
        try:
            made.append(f"{key}={json.dumps(value, default=os.fspath)}")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot be written as YAML: {first_line(error)}", where=f"override {key}"
            ) from None
    return made if isinstance(given, Mapping) else [*(given or ())]


def _loaded(
    draft: Draft, path: Path, base: Path, overrides: list[str], trusted: bool, laid_over: bool
) -> Loaded:
    config = validated(draft, overrides, trusted, base)
    update: dict[str, Any] = {"strategy": config.strategy.with_files(base)}
    for name, key in (("model", "chat_template"), ("cluster", "calibration")):
        if (
            file := getattr(section := getattr(config, name), key, None)
        ) is not None and file not in TEMPLATES:
            # Ranks read it from the plan, and no longer know where the YAML was.
            update[name] = section.model_copy(update={key: str((base / expanded(file)).absolute())})
    return Loaded(
        config.model_copy(update=update),
        path,
        base,
        tuple(draft.notes),
        draft.resume,
        draft.old or laid_over,
    )


def load_text(text: str, overrides: list[str], name: str = "config") -> Config:
    """The same for a text; `name` stands in its error lines."""
    return validated(drafted(text, name, Path(), None), overrides)


def load_lines(text: str, overrides: list[str], name: str) -> Loaded:
    """`load` of a text, whose paths are relative to the current folder."""
    return _loaded(
        drafted(text, name, Path(), None),
        Path(name),
        Path(),
        overrides,
        trusted=True,
        laid_over=False,
    )


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(
            "is a folder, and one file is wanted", where=str(path), fix=_file_meant(path)
        )
    text = plain_text(
        path, ConfigError, "give the path of a YAML; examples/ has some to copy", MOST_CONFIG
    )
    # JSON may be indented with tabs, YAML may not.
    return text.replace("\t", "  ") if path.suffix == ".json" else text


def _file_meant(folder: Path) -> str:
    """Return which files of a folder may be meant in its place."""
    try:
        names = sorted(each.name for each in folder.iterdir() if each.suffix in CONFIG_SUFFIXES)
    except OSError:
        names = []
    if not names:
        return "give the path of a YAML; examples/ has some to copy"
    more = f" or one of {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return f"name the file in it that is meant: {', '.join(names[:MOST_NAMED])}{more}"


@dataclass
class Draft:
    """Values on their way to a Config, and where each was set: lines of a file, other places (`set_at`), overrides laid over both. `old`:
    they come from another tool's file."""

    name: str
    values: dict[str, Any]
    lines: dict[Place, int]
    set_at: dict[Place, str] = field(default_factory=dict)
    overrides: dict[Place, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resume: str | None = None
    old: bool = False

    def where(self, place: Place) -> str:
        """The override or the line that a value came from, with its dotted key; the nearest section's line for a key that is not there."""
        for start, override in reversed(self.overrides.items()):
            if place[: len(start)] == start:
                return override_label(override)
        for start, override in self.overrides.items():
            if place and place not in self.lines and start[: len(place)] == place:
                return override_label(override)
        dotted = ".".join(place)
        for length in range(len(place), 0, -1):
            if place[:length] in self.set_at:
                return self.set_at[place[:length]]
            if place[:length] in self.lines:
                return f"{self.name}:{self.lines[place[:length]]}: {dotted}"
        return f"{self.name}: {dotted}" if dotted else self.name


def drafted(
    text: str,
    name: str,
    base: Path,
    over: Sheet | None = None,
    folder: Path | None = None,
    lenient: bool = False,
) -> Draft:
    """The values of a config, Drumline's or another tool's. `base`: the folder that it lies in; `folder`: that of a new config; `lenient`:
    what Drumline lacks is a note and no error."""
    try:
        values, lines = read_yaml(text, name)
    except NumberTooLarge as error:
        fix = fix_large_number(error.place) or error.fix
        where = f"{error.where}: {'.'.join(error.place)}"
        raise ConfigError(error.what, where=where, fix=fix) from None
    if values is None:
        raise ConfigError("the file is empty", where=name, fix="it needs at least data: rows.jsonl")
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else f"only {values!r}"
        raise ConfigError(
            f"holds {what}, not keys and values", where=f"{name}:1", fix="write `key: value` lines"
        )
    draft = Draft(name, values, lines)
    if not is_own(values):
        from drumline.compat import translate

        if (new := translate(values, lines, name, base, folder or base, lenient)) is not None:
            draft = Draft(
                name, new.values, {}, new.set_at, notes=new.notes, resume=new.resume, old=True
            )
    if "data" in draft.values:
        draft.values["data"] = in_full(draft.values["data"], base)
    if over is not None:
        from drumline.compat.overlay import lay

        draft.set_at = {**lay(draft.values, over, draft.where), **draft.set_at}
        draft.notes += over.notes
    return draft


def has_data(values: dict[str, Any]) -> bool:
    """Whether the values say what to train on."""
    data = values.get("data")
    return "train" in data if isinstance(data, dict) else bool(data)


def validated(
    draft: Draft, overrides: list[str], trusted: bool = True, base_dir: Path | None = None
) -> Config:
    """The Config of a draft with overrides over it. `base_dir`: what files of the user's own code are relative to. Raises ConfigError."""
    values = draft.values
    draft.overrides = {}
    for override in overrides:
        draft.overrides[lay_over(values, override)] = override
        if "data" in values:  # so that the next one finds the keys of its sources
            values["data"] = in_full(values["data"], base_dir or Path())
    if draft.old and not has_data(values):
        fix = "add it on the command line: data=rows.jsonl, or --accelerate-config for a config that has it"
        raise ConfigError("says nothing of data", where=draft.name, fix=fix)
    values = _without_nulls(values)
    values = withhold(
        values if trusted else _without_trust(values, tuple(draft.overrides)), draft.where
    )
    try:
        allowed = trusted or (
            isinstance(values.get("model"), dict)
            and values["model"].get("trust_remote_code") is True
        )
        config = Config.model_validate(values, context={"base_dir": base_dir, "trusted": allowed})
    except ValidationError as error:
        raise first_mistake(error, draft.where) from None
    check_numbers(values, config.model_dump(), draft.where)
    _check_metric(config, draft)
    return config


def _check_metric(config: Config, draft: Draft) -> None:
    """Raises ConfigError where eval.metric is one that no evaluation has. Names of domains and tasks are known when they are read."""
    sets, names = [name for name in config.data.eval_sets if name], config.algorithm.metrics
    metric = config.eval.metric
    of_set, _, rest = metric.partition("/")
    inner = rest if of_set in sets else metric
    of_task = metric.startswith("tasks/") and config.eval.tasks
    unmeasured = config.eval.tasks and not (config.data.eval or config.data.holdout or of_task)
    if unmeasured:
        fix = "set data.eval or data.holdout, or name a metric of a task: tasks/NAME/METRIC"
        raise ConfigError(
            f"{metric!r} is measured on held-out rows, and there are none",
            where=draft.where(("eval", "metric")),
            fix=fix,
        )
    if (
        inner not in names
        and not (inner.startswith("reward/") and "reward" in names)
        and not of_task
    ):
        known = [
            *names,
            *(f"{name}/{each}" for name in sets for each in names),
            *["tasks/NAME/METRIC"] * bool(config.eval.tasks),
        ]
        what = f"algorithm {config.algorithm.kind} measures no {metric!r}"
        raise ConfigError(
            what, where=draft.where(("eval", "metric")), fix=f"one of {', '.join(known)}"
        )


def override(key: str, path: object) -> str:
    """An override that sets a key to a path, which is quoted where YAML would read something else: `#` begins a comment."""
    text = str(path)
    return (
        f"{key}={text}"
        if re.fullmatch(r"[\w.~+=-]*/[\w./~+=-]*", text)
        else f"{key}={json.dumps(text, ensure_ascii=False)}"
    )


def _without_nulls(value: Any, place: Place = ()) -> Any:
    """A copy of the values without the keys that null leaves at their defaults, such as `adapter: null`."""
    if isinstance(value, list):
        return [_without_nulls(inner, (*place, str(index))) for index, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind = value.get("kind") if isinstance(value.get("kind"), str) else None
    kept = {}
    for key, inner in value.items():
        at = (*place, str(key))
        if inner is not None or not null_means_default_at(at, kind):
            kept[key] = _without_nulls(inner, at)
    return kept


def _without_trust(value: Any, granted: tuple[Place, ...], place: Place = ()) -> Any:
    """A copy of the values in which trust_remote_code is false wherever no override sets it."""
    if isinstance(value, dict):
        return {
            key: _without_trust(inner, granted, (*place, str(key))) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [
            _without_trust(inner, granted, (*place, str(index)))
            for index, inner in enumerate(value)
        ]
    mine = any(place[: len(override)] == override for override in granted)
    return False if place[-1:] == ("trust_remote_code",) and not mine else value


def lay_over(values: dict[str, Any], override: str) -> Place:
    """Set `a.b.0.c=value` in nested values, making sections on the way. Returns its place; raises ConfigError naming the override."""
    dotted, equals, text = override.partition("=")
    place = tuple(dotted.split("."))
    if not equals or "" in place:
        raise ConfigError(
            f"{override!r} is no override",
            where="command line",
            fix="write key=value, such as optimizer.lr=1e-4",
        )
    if not text.strip():  # often a variable of the shell that is not set
        raise _override_error(override, "nothing given", f"write a value, or {dotted}=null")
    try:
        value = read_yaml(text, "value")[0]
    except ConfigError as error:
        fix = "put the value in quotes, once for the shell and once for YAML: key='\"…\"'"
        if isinstance(error, NumberTooLarge):
            fix = fix_large_number((*place, *error.place)) or fix
        raise _override_error(override, error.what, fix) from None
    inside: Any = values
    for depth, (key, following) in enumerate(pairwise(place), start=1):
        if isinstance(inside, list):
            inside = inside[_index(inside, key, override)]
            continue
        if not isinstance(inside, dict):
            break
        inside[key] = inside = _section(inside.get(key), place[:depth], following, override)
    if isinstance(inside, list):
        inside[_index(inside, place[-1], override)] = value
    elif isinstance(inside, dict):
        inside[place[-1]] = value
    else:
        raise _override_error(
            override,
            f"{'.'.join(place[:-1])} has no keys: it is {inside!r}",
            "give the whole of it",
        )
    return place


def _section(current: Any, place: Place, following: str, override: str) -> Any:
    """What an override goes into: the section that is there, a new one, or one made of its short form (`strategy: ddp`)."""
    if isinstance(current, dict | list):
        return current
    if current is None:
        if following.isdecimal():
            dotted = ".".join(place)
            raise _override_error(
                override, f"{dotted} is no list yet", f"give the whole of it: {dotted}=[…]"
            )
        return {}
    try:
        if (short := short_at(place)) is not None and isinstance(full := short.long(current), dict):
            return full
    except ValueError as error:
        raise _override_error(override, str(error), "give the whole of it") from None
    if isinstance(current, str) and kinds_at(place):
        return {"kind": current}
    raise _override_error(
        override, f"{'.'.join(place)} has no keys: it is {current!r}", "give the whole of it"
    )


def _index(inside: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(inside):
        count = f"{len(inside)} item" + "s" * (len(inside) != 1)
        fix = f"count from 0 to {len(inside) - 1}" if inside else "give the whole list"
        raise _override_error(override, f"the list has {count}, no {key!r}", fix)
    return int(key)


def _override_error(override: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=override_label(override), fix=fix)


def override_label(override: str) -> str:
    """Return how an error line names an override: its key, and its value without the middle of a long one."""
    key, _, value = override.partition("=")
    return f"override {key}={shortened(value, MOST_VALUE)}"


def to_yaml(config: Config) -> str:
    """The config with every default visible."""
    return write_yaml(config.model_dump(mode="json"))


def changed_values(config: Config) -> dict[str, Any]:
    """The keys that are not at their defaults, and the kind of each section that has such keys. Read again, they give the same config."""
    full = config.model_dump(mode="json")
    values: dict[str, Any] = _with_kinds(
        config.model_dump(mode="json", exclude_defaults=True), full
    )
    for name, default in config.algorithm.best_by.items():  # defaults that come with the algorithm
        if full["eval"][name] != default:
            values.setdefault("eval", {})[name] = full["eval"][name]
    _add_dependent_defaults(values, full)
    return values


def _add_dependent_defaults(values: dict[str, Any], full: dict[str, Any]) -> None:
    """Add keys at their own default if another key of `values` gives them another one.

    GRPO's `estimator: rloo` makes `scale: none` the default, so `scale: group` must be said.
    A config that cannot be read alone (it names files of elsewhere) is left as it is.
    """
    try:
        again = Config.model_validate(values).model_dump(mode="json")
    except (ValidationError, DrumlineError):
        return
    before, after = flat(full), flat(again)
    for key, value in before.items():
        if after.get(key) == value:
            continue
        section = values
        *path, name = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value


def _with_kinds(changed: Any, full: Any) -> Any:
    if isinstance(changed, list):
        return [_with_kinds(*pair) for pair in zip(changed, full, strict=True)]
    if not isinstance(changed, dict):
        return changed
    kind = {"kind": full["kind"]} if "kind" in full else {}
    return {**kind, **{key: _with_kinds(value, full[key]) for key, value in changed.items()}}


# What may change when a run goes on; everything else decides the numbers.
FREE = (
    "strategy", "launch", "cluster", "checkpoint", "health", "memory", "compile",
    *(f"eval.{name}" for name in EvalConfig.model_fields if name not in ("metric", "mode")),  # these have rated what is best so far
    "run.dir", "run.deterministic", "run.device", "run.log_every", "run.collect_every", "run.report_to", "run.tracker", "run.callbacks",
    "data.workers", "data.prefetch", "data.verify", "data.cache_dir", "data.stream.blocks", "algorithm.loss_chunk",
    "report", "run.profile", "algorithm.reward_failure", "algorithm.reward_workers", "model.attention", "model.trust_remote_code",
)  # fmt: skip


def allowed(key: str, allow: tuple[str, ...]) -> bool:
    """Whether `allow` names a key, a section that it is in, or all."""
    return "all" in allow or any(key == name or key.startswith(name + ".") for name in allow)


def saved_config(values: Any, now: Config, allow: tuple[str, ...], where: str) -> Config:
    """The config of a checkpoint's state. Where it names a plug-in that is gone, or a file that was moved, the keys that may change are
    taken from `now`. Raises CheckpointError where what is left cannot be read."""
    try:
        return Config.model_validate(values)
    except (ValidationError, ConfigError):
        mixed, current = deepcopy(values), now.model_dump(mode="json")
    for key in (*FREE, *allow):
        section, _, rest = key.partition(".")
        if not rest and section in current:
            mixed[section] = current[section]
        elif rest in current.get(section, {}) and isinstance(mixed.get(section), dict):
            mixed[section][rest] = current[section][rest]
    try:
        return now if "all" in allow else Config.model_validate(mixed)
    except (ValidationError, ConfigError) as error:
        first = first_mistake(error) if isinstance(error, ValidationError) else error
        fix = "install or put back what it names, or accept another with --allow SECTION"
        raise CheckpointError(
            f"its config cannot be read: {first.where}: {first.what}", where=where, fix=fix
        ) from None


def refused(old: Config, new: Config, allow: tuple[str, ...]) -> tuple[str, list[str]]:
    """The keys that decide the numbers, differ, and that `allow` lacks: in a line with their values, and in the order of the config. Where
    a global batch is set, how it is cut up may change, too; and of the same metric eval.mode may become what its name says: older versions
    took min for each."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    totals = ("batch.global_samples", "batch.global_tokens")
    same_batch = all(before[key] == after[key] for key in totals) and any(
        before[key] for key in totals
    )
    may = (*FREE, *allow, *(("batch.micro_batch", "batch.accumulation") if same_batch else ()))
    may += ("eval.mode",) * (
        old.eval.metric == new.eval.metric and new.eval.mode == direction(new.eval.metric)
    )
    keys = [
        key
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not allowed(key, may)
    ]
    return "; ".join(
        f"{key} {plain(before.get(key))!r} → {plain(after.get(key))!r}" for key in keys
    ), keys


def strategy_change(old: Config, new: Config, checkpoint: str) -> str | None:
    """Return the line that says a checkpoint goes on under another strategy; None under the same.

    Any strategy reads what any other wrote, so this is never refused.
    """
    if old.strategy.kind == new.strategy.kind:
        return None
    return f"{checkpoint} was saved under {old.strategy.kind}; the run goes on under {new.strategy.kind}"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value, of dictionaries at any depth; a list is one value."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in flat(inner, f"{prefix}.{name}".lstrip(".")).items()
    }


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the YAML, short forms too (`core.section.Short`)."""
    made = Config.model_json_schema()
    for section in made["$defs"].values():
        if "const" in section["properties"].get("kind", {}):
            # It tells the union's members apart.
            section["required"] = [
                "kind",
                *section.get("required", []),
            ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "Drumline config",
    }
