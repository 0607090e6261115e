"""Load a Config from YAML and overrides, and compare the configs of two runs.

`load` takes a file, `load_values` a dictionary, and `load_text` the text of a YAML. Each of them
makes a `Draft` of the values (`make_draft`), lays the overrides over it and checks the whole
(`validate_draft`). `drumline train` and the other commands call `load`; the functions of Python call
`reader`, which chooses between `load` and `load_values`.

Each mistake is one line that names the place and a fix. This module does not import torch.
"""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from drumline.config.config import Config
from drumline.config.data import is_surely_own, spell_out_sources
from drumline.config.mistakes import (
    check_numbers,
    first_mistake,
    fix_large_number,
    kinds_at,
    null_means_default_at,
    short_at,
)
from drumline.config.model import TEMPLATES
from drumline.config.resume import Resume
from drumline.config.run import EvalConfig, direction
from drumline.errors import CheckpointError, ConfigError, DrumlineError, shorten
from drumline.foreign import MIB, expand_home, first_line, read_object
from drumline.foreign import read_text as plain_text
from drumline.system.redact import redacted_json, withhold
from drumline.system.yaml_lines import NumberTooLarge, Place, read_yaml, write_yaml

if TYPE_CHECKING:
    from drumline.compat.sheet import Sheet
    from drumline.hardware.detect import Machine

Overrides = Mapping[str, Any] | Sequence[str]
# Characters of an override's value in an error line.
MOST_VALUE = 200
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Files of a folder that an error line names.
MOST_NAMED = 5
# Bytes of a config file. A large one has some thousand.
MOST_CONFIG = MIB
# A path that YAML reads as text without quotes.
PLAIN_PATH = re.compile(r"[\w.~+=-]*/[\w./~+=-]*")


@dataclass(frozen=True)
class Loaded:
    """A config, and the file that it was loaded from.

    Paths of data files are relative to `base_dir`, and run.dir is relative to the current folder.

    Attributes:
        is_translated: Whether keys were translated from the config of another tool or launcher.
        notes: For a translated config, what became of its keys.
        resume: For a translated config, what it resumes from.
    """

    config: Config
    path: Path
    base_dir: Path
    notes: tuple[str, ...] = ()
    resume: Resume | None = None
    is_translated: bool = False


@dataclass(frozen=True)
class Request:
    """A run that `drumline train` is asked for.

    Attributes:
        loaded: The config.
        world_size: Number of processes; None if the config and the machine decide.
        resume: Checkpoint or run to resume from; None to start anew.
        allow: Keys that may differ from the run that it resumes.
        machine: A host that the processes run on; None for this one.
    """

    loaded: Loaded
    world_size: int | None = None
    resume: Resume | None = None
    allow: tuple[str, ...] = ()
    machine: Machine | None = None


def load(
    path: Path, overrides: list[str], launcher_defaults: Sheet | None = None, trusted: bool = True
) -> Loaded:
    """Load the config of a YAML file, which may be another tool's (see `compat`).

    Args:
        path: The file.
        overrides: Overrides such as `optimizer.lr=1e-4`, which come last.
        launcher_defaults: Keys from the config of a launcher, such as accelerate's or DeepSpeed's,
            for what the file leaves open.
        trusted: Whether the file may allow a model's own code (trust_remote_code). In a file that
            may be a stranger's, only an override can.

    Raises:
        ConfigError: The file cannot be read, or has a mistake.
    """
    base = _base_of(path)
    draft = make_draft(read_text(path), str(path), base, launcher_defaults)
    return _load_draft(draft, path, base, overrides, trusted, launcher_defaults is not None)


def _base_of(path: Path) -> Path:
    """Return the folder that paths in a config are relative to.

    It is the config's own folder. For the config.yaml of a run, it is the folder of the YAML that
    the run was started with.
    """
    plan = path.parent / "plan.json"
    if path.name == "config.yaml" and plan.is_file():
        values = read_object(plan, ConfigError, "copy config.yaml to where the data are")
        base = values.get("base_dir")
        if isinstance(base, str):
            return Path(base)
    return path.parent


def load_values(
    values: Mapping[str, Any],
    overrides: list[str],
    launcher_defaults: Sheet | None = None,
    trusted: bool = True,
) -> Loaded:
    """Load a config from a dictionary, otherwise as `load` does.

    Paths in it are relative to the current folder. Raises ConfigError.
    """
    try:
        text = json.dumps(values, default=os.fspath)
    except (TypeError, ValueError) as error:
        fix = "text, numbers, lists, dictionaries and paths go into a config; name your own code by path.py:name"
        raise ConfigError(
            f"cannot be written as YAML: {first_line(error)}", where="config", fix=fix
        ) from None
    draft = make_draft(text, "config", Path(), launcher_defaults)
    # The lines are those of `text`, which the user never sees.
    draft = replace(draft, lines={})
    return _load_draft(
        draft, _script_name(), Path(), overrides, trusted, launcher_defaults is not None
    )


def _script_name() -> Path:
    """Return the file name of the script that runs, after which the run folder is named."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not script:
        return Path("notebook")
    return Path(Path(script).name)


def reader(config: str | Path | Mapping[str, Any]) -> Callable[..., Loaded]:
    """Return `load` bound to a path, or `load_values` bound to a dictionary."""
    if isinstance(config, Mapping):
        return partial(load_values, config)
    return partial(load, Path(config))


def overrides_of(given: Overrides | None) -> list[str]:
    """Return overrides in the form of the command line, `key=value`.

    `given` has either values of Python by dotted key, or overrides in that form already. Raises
    ConfigError for a value that cannot be written as YAML.
    """
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return list(given)
    overrides = []
    for key, value in given.items():
        try:
            text = json.dumps(value, default=os.fspath)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot be written as YAML: {first_line(error)}", where=f"override {key}"
            ) from None
        overrides.append(f"{key}={text}")
    return overrides


def _load_draft(
    draft: Draft,
    path: Path,
    base: Path,
    overrides: list[str],
    trusted: bool,
    has_launcher_defaults: bool,
) -> Loaded:
    """Return the checked config of a draft, with paths that do not depend on where the YAML is."""
    config = validate_draft(draft, overrides, trusted, base)
    update: dict[str, Any] = {"strategy": config.strategy.with_files(base)}
    for name, key in (("model", "chat_template"), ("cluster", "calibration")):
        section = getattr(config, name)
        file = getattr(section, key, None)
        if file is None or file in TEMPLATES:
            continue
        # Whoever reads these two files gets their paths alone. Other paths of the config are
        # resolved against the `base_dir` of the plan.
        absolute = (base / expand_home(file)).absolute()
        update[name] = section.model_copy(update={key: str(absolute)})
    return Loaded(
        config.model_copy(update=update),
        path,
        base,
        notes=tuple(draft.notes),
        resume=draft.resume,
        is_translated=draft.is_translated or has_launcher_defaults,
    )


def load_text(text: str, overrides: list[str], name: str = "config") -> Config:
    """Return the Config of a YAML text, which error lines call `name`. Raises ConfigError.

    Unlike in what `load_lines` returns, its paths are as they stand in the text.
    """
    return validate_draft(make_draft(text, name, Path(), None), overrides)


def load_lines(text: str, overrides: list[str], name: str) -> Loaded:
    """Load a config from a YAML text, otherwise as `load` does.

    Paths in it are relative to the current folder, and error lines call it `name`. Raises
    ConfigError.
    """
    draft = make_draft(text, name, Path(), None)
    return _load_draft(
        draft, Path(name), Path(), overrides, trusted=True, has_launcher_defaults=False
    )


def read_text(path: Path) -> str:
    """Return the text of a config file, in a form that YAML can read. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(
            "is a folder, and one file is wanted", where=str(path), fix=_file_meant(path)
        )
    text = plain_text(
        path, ConfigError, "give the path of a YAML; examples/ has some to copy", MOST_CONFIG
    )
    if path.suffix == ".json":
        # JSON may be indented with tabs, YAML may not.
        return text.replace("\t", "  ")
    return text


def _file_meant(folder: Path) -> str:
    """Return advice for a folder that is given as a config: the files in it that may be meant."""
    try:
        names = sorted(each.name for each in folder.iterdir() if each.suffix in CONFIG_SUFFIXES)
    except OSError:
        names = []
    if not names:
        return "give the path of a YAML; examples/ has some to copy"
    more = ""
    if len(names) > MOST_NAMED:
        more = f" or one of {len(names) - MOST_NAMED} others"
    return f"name the file in it that is meant: {', '.join(names[:MOST_NAMED])}{more}"


@dataclass
class Draft:
    """Values that become a Config, and the origin of each, for error lines.

    Attributes:
        name: Name of the file in error lines.
        lines: Line in the file of each value.
        set_at: Origin of values that come from another tool's keys.
        overrides: The overrides, by the value that they set.
        notes: For another tool's file, what became of its keys.
        resume: For another tool's file, what it resumes from.
        is_translated: Whether the values were translated from another tool's file.
    """

    name: str
    values: dict[str, Any]
    lines: dict[Place, int]
    set_at: dict[Place, str] = field(default_factory=dict)
    overrides: dict[Place, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resume: Resume | None = None
    is_translated: bool = False

    def where(self, place: Place) -> str:
        """Return the override or the line that a value came from, with the value's dotted key.

        The line of a missing key is that of the nearest section around it.
        """
        for start, override in reversed(self.overrides.items()):
            if place[: len(start)] == start:
                return override_label(override)
        if place and place not in self.lines:
            # The section may exist only because an override has set a key in it.
            for start, override in self.overrides.items():
                if start[: len(place)] == place:
                    return override_label(override)
        dotted = ".".join(place)
        for length in range(len(place), 0, -1):
            around = place[:length]
            if around in self.set_at:
                return self.set_at[around]
            if around in self.lines:
                return f"{self.name}:{self.lines[around]}: {dotted}"
        if dotted:
            return f"{self.name}: {dotted}"
        return self.name


def make_draft(
    text: str,
    name: str,
    base: Path,
    launcher_defaults: Sheet | None = None,
    folder: Path | None = None,
    lenient: bool = False,
) -> Draft:
    """Return the draft of a config, which is Drumline's own or another tool's.

    Its values are not checked yet: `validate_draft` does that.

    Args:
        text: Text of the config.
        name: Name of the file in error lines.
        base: Folder of the config.
        launcher_defaults: Keys from the config of a launcher, such as accelerate's or DeepSpeed's,
            for what the config leaves open.
        folder: Folder of the translated config if the config is another tool's; None for `base`.
        lenient: Whether a key of another tool that Drumline lacks gets a note and no error.

    Raises:
        ConfigError: The text has a mistake.
    """
    values, lines = _read_values(text, name)
    draft = Draft(name, values, lines)
    if not is_surely_own(values):
        from drumline.compat import translate

        translated = translate(values, lines, name, base, folder or base, lenient)
        if translated is not None:
            draft = Draft(
                name,
                translated.values,
                lines={},
                set_at=translated.set_at,
                notes=translated.notes,
                resume=translated.resume,
                is_translated=True,
            )
    if "data" in draft.values:
        draft.values["data"] = spell_out_sources(draft.values["data"], base)
    if launcher_defaults is not None:
        from drumline.compat.overlay import merge_overlay

        set_by_launcher = merge_overlay(draft.values, launcher_defaults, draft.where)
        draft.set_at = {**set_by_launcher, **draft.set_at}
        draft.notes += launcher_defaults.notes
    return draft


def _read_values(text: str, name: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return the keys and values of a YAML text, and their lines. Raises ConfigError."""
    try:
        values, lines = read_yaml(text, name)
    except NumberTooLarge as error:
        where = f"{error.where}: {'.'.join(error.place)}"
        fix = fix_large_number(error.place) or error.fix
        raise ConfigError(error.what, where=where, fix=fix) from None
    if values is None:
        raise ConfigError("the file is empty", where=name, fix="it needs at least data: rows.jsonl")
    if not isinstance(values, dict):
        what = f"only {values!r}"
        if isinstance(values, list):
            what = "a list"
        raise ConfigError(
            f"holds {what}, not keys and values", where=f"{name}:1", fix="write `key: value` lines"
        )
    return values, lines


def has_data(values: dict[str, Any]) -> bool:
    """Return whether the values set what to train on."""
    data = values.get("data")
    if isinstance(data, dict):
        return "train" in data
    return bool(data)


def validate_draft(
    draft: Draft, overrides: list[str], trusted: bool = True, base_dir: Path | None = None
) -> Config:
    """Return the Config of a draft with overrides.

    The overrides are set in the values of the draft, which is changed.

    Args:
        draft: The draft.
        overrides: Overrides such as `optimizer.lr=1e-4`.
        trusted: As for `load`.
        base_dir: The folder that files of the user's own code are relative to.

    Raises:
        ConfigError: There is a mistake.
    """
    values = draft.values
    draft.overrides = {}
    for override in overrides:
        place = apply_override(values, override)
        draft.overrides[place] = override
        if "data" in values:
            # In full, so that the next override finds the keys of its sources.
            values["data"] = spell_out_sources(values["data"], base_dir or Path())
    if draft.is_translated and not has_data(values):
        fix = "add it on the command line: data=rows.jsonl, or --accelerate-config for a config that has it"
        raise ConfigError("says nothing of data", where=draft.name, fix=fix)
    values = _without_nulls(values)
    if not trusted:
        values = _without_trust(values, tuple(draft.overrides))
    values = withhold(values, draft.where)
    context = {"base_dir": base_dir, "trusted": trusted or _trusts_remote_code(values)}
    try:
        config = Config.model_validate(values, context=context)
    except ValidationError as error:
        raise first_mistake(error, draft.where) from None
    check_numbers(values, config.model_dump(), draft.where)
    _check_metric(config, draft)
    return config


def _trusts_remote_code(values: dict[str, Any]) -> bool:
    """Return whether the values allow a model's own code to run."""
    model = values.get("model")
    return isinstance(model, dict) and model.get("trust_remote_code") is True


def _check_metric(config: Config, draft: Draft) -> None:
    """Raise ConfigError if no evaluation of the run has the metric in eval.metric.

    Names of tasks and of their metrics are known only when they are read, so they are not checked.
    """
    metric = config.eval.metric
    tasks = config.eval.tasks
    if tasks and metric.startswith("tasks/"):
        return
    if tasks and not (config.data.eval or config.data.holdout):
        raise ConfigError(
            f"{metric!r} is measured on held-out rows, and there are none",
            where=draft.where(("eval", "metric")),
            fix="set data.eval or data.holdout, or name a metric of a task: tasks/NAME/METRIC",
        )
    sets = [name for name in config.data.eval_sets if name]
    names = config.algorithm.metrics
    # A metric of one evaluation set is written SET/METRIC.
    inner = metric
    of_set, _, rest = metric.partition("/")
    if of_set in sets:
        inner = rest
    # Names of rewards follow `reward/`.
    is_of_reward = inner.startswith("reward/") and "reward" in names
    if inner in names or is_of_reward:
        return
    known = list(names)
    for set_name in sets:
        known += [f"{set_name}/{name}" for name in names]
    if tasks:
        known.append("tasks/NAME/METRIC")
    raise ConfigError(
        f"algorithm {config.algorithm.kind} measures no {metric!r}",
        where=draft.where(("eval", "metric")),
        fix=f"one of {', '.join(known)}",
    )


def override(key: str, path: object) -> str:
    """Return an override that sets a key to a path.

    The path is in quotes if YAML would read it as something else: `#` begins a comment.
    """
    text = str(path)
    if not PLAIN_PATH.fullmatch(text):
        text = json.dumps(text, ensure_ascii=False)
    return f"{key}={text}"


def _without_nulls(value: Any, place: Place = ()) -> Any:
    """Return a copy of the values without nulls that mean the default, such as `adapter: null`."""
    if isinstance(value, list):
        return [_without_nulls(inner, (*place, str(index))) for index, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        kind = None
    kept = {}
    for key, inner in value.items():
        at = (*place, str(key))
        if inner is not None or not null_means_default_at(at, kind):
            kept[key] = _without_nulls(inner, at)
    return kept


def _without_trust(value: Any, overrides: tuple[Place, ...], place: Place = ()) -> Any:
    """Return a copy of the values without trust_remote_code, unless an override sets it."""
    if isinstance(value, dict):
        copied = {}
        for key, inner in value.items():
            copied[key] = _without_trust(inner, overrides, (*place, str(key)))
        return copied
    if isinstance(value, list):
        items = []
        for index, inner in enumerate(value):
            items.append(_without_trust(inner, overrides, (*place, str(index))))
        return items
    if place[-1:] != ("trust_remote_code",):
        return value
    is_set_by_user = any(place[: len(override)] == override for override in overrides)
    if is_set_by_user:
        return value
    return False


def apply_override(values: dict[str, Any], override: str) -> Place:
    """Set `a.b.0.c=value` in nested values, and return the place of the key.

    Sections on the way to it are made. Raises ConfigError that names the override.
    """
    dotted, equals, text = override.partition("=")
    place = tuple(dotted.split("."))
    if not equals or "" in place:
        raise ConfigError(
            f"{override!r} is no override",
            where="command line",
            fix="write key=value, such as optimizer.lr=1e-4",
        )
    if not text.strip():
        # Often a variable of the shell that is not set.
        raise _override_error(override, "nothing given", f"write a value, or {dotted}=null")
    value = _read_value(text, place, override)
    section: Any = values
    for depth, (key, following) in enumerate(pairwise(place), start=1):
        if isinstance(section, list):
            section = section[_index(section, key, override)]
        elif isinstance(section, dict):
            inner = _section(section.get(key), place[:depth], following, override)
            section[key] = inner
            section = inner
        else:
            break
    if isinstance(section, list):
        section[_index(section, place[-1], override)] = value
    elif isinstance(section, dict):
        section[place[-1]] = value
    else:
        raise _override_error(
            override,
            f"{'.'.join(place[:-1])} has no keys: it is {section!r}",
            "give the whole of it",
        )
    return place


def _read_value(text: str, place: Place, override: str) -> Any:
    """Return the value that an override sets, read as YAML. Raises ConfigError."""
    try:
        value, _ = read_yaml(text, "value")
    except ConfigError as error:
        fix = "put the value in quotes, once for the shell and once for YAML: key='\"…\"'"
        if isinstance(error, NumberTooLarge):
            fix = fix_large_number((*place, *error.place)) or fix
        raise _override_error(override, error.what, fix) from None
    return value


def _section(current: Any, place: Place, following: str, override: str) -> Any:
    """Return the section that an override goes into.

    It is the one that is there, a new one, or one made of its short form (`strategy: ddp`).
    `following`: the next part of the override's key, which would be a number in a list.
    Raises ConfigError if there is a value without keys.
    """
    if isinstance(current, dict | list):
        return current
    dotted = ".".join(place)
    if current is None:
        if following.isdecimal():
            raise _override_error(
                override, f"{dotted} is no list yet", f"give the whole of it: {dotted}=[…]"
            )
        return {}
    try:
        short = short_at(place)
        if short is not None:
            full = short.long(current)
            if isinstance(full, dict):
                return full
    except ValueError as error:
        raise _override_error(override, str(error), "give the whole of it") from None
    if isinstance(current, str) and kinds_at(place):
        return {"kind": current}
    raise _override_error(
        override, f"{dotted} has no keys: it is {current!r}", "give the whole of it"
    )


def _index(items: list[Any], key: str, override: str) -> int:
    """Return a key of an override as the index of a list. Raises ConfigError if it is none."""
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    count = f"{len(items)} items"
    if len(items) == 1:
        count = "1 item"
    fix = "give the whole list"
    if items:
        fix = f"count from 0 to {len(items) - 1}"
    raise _override_error(override, f"the list has {count}, no {key!r}", fix)


def _override_error(override: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=override_label(override), fix=fix)


def override_label(override: str) -> str:
    """Return how an error line names an override: its key and value, without a long value's middle."""
    key, _, value = override.partition("=")
    return f"override {key}={shorten(value, MOST_VALUE)}"


def to_yaml(config: Config) -> str:
    """Return the config as YAML with every default visible."""
    return write_yaml(config.model_dump(mode="json"))


def changed_values(config: Config) -> dict[str, Any]:
    """Return the keys that are not at their defaults, and the kind of each section with such keys.

    A config that is made of them is equal to this one.
    """
    full = config.model_dump(mode="json")
    changed = config.model_dump(mode="json", exclude_defaults=True)
    values: dict[str, Any] = _with_kinds(changed, full)
    # These defaults come with the algorithm.
    for name, default in config.algorithm.best_by.items():
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
    """Return changed values with the `kind` of each section that has one, taken from `full`."""
    if isinstance(changed, list):
        pairs = zip(changed, full, strict=True)
        return [_with_kinds(inner, full_inner) for inner, full_inner in pairs]
    if not isinstance(changed, dict):
        return changed
    values = {}
    if "kind" in full:
        values["kind"] = full["kind"]
    for key, inner in changed.items():
        values[key] = _with_kinds(inner, full[key])
    return values


# Keys that may change when a run resumes. Training results depend on all others. eval.metric and
# eval.mode are not among these keys, because the best checkpoint so far was chosen by them.
FREE = (
    "strategy", "launch", "cluster", "checkpoint", "health", "memory", "compile",
    *(f"eval.{name}" for name in EvalConfig.model_fields if name not in ("metric", "mode")),
    "run.dir", "run.deterministic", "run.device", "run.log_every", "run.collect_every", "run.report_to", "run.tracker", "run.callbacks",
    "data.workers", "data.prefetch", "data.verify", "data.cache_dir", "data.stream.blocks", "algorithm.loss_chunk",
    "report", "run.profile", "algorithm.reward_failure", "algorithm.reward_workers", "algorithm.teacher.url",
    "algorithm.teacher.timeout_seconds", "model.attention", "model.trust_remote_code",
)  # fmt: skip


def is_allowed(key: str, allow: tuple[str, ...]) -> bool:
    """Return whether `allow` names a key, a section that the key is in, or all."""
    if "all" in allow:
        return True
    return any(key == name or key.startswith(f"{name}.") for name in allow)


def saved_config(values: Any, now: Config, allow: tuple[str, ...], where: str) -> Config:
    """Return the config of a checkpoint.

    If its values cannot be read, because they name a plug-in that is gone or a file that was moved,
    the keys that may change are taken from `now`.

    Args:
        values: The config in the state of the checkpoint.
        now: The config of the run that resumes.
        allow: Keys or sections that may change besides those in FREE; all: each of them.
        where: Name of the checkpoint in errors.

    Raises:
        CheckpointError: The keys that may not change cannot be read.
    """
    try:
        return Config.model_validate(values)
    except (ValidationError, ConfigError):
        mixed = deepcopy(values)
    current = now.model_dump(mode="json")
    for key in (*FREE, *allow):
        _copy_key(key, current, mixed)
    if "all" in allow:
        return now
    try:
        return Config.model_validate(mixed)
    except (ValidationError, ConfigError) as error:
        mistake = error if isinstance(error, ConfigError) else first_mistake(error)
        raise CheckpointError(
            f"its config cannot be read: {mistake.where}: {mistake.what}",
            where=where,
            fix="install or put back what it names, or accept another with --allow SECTION",
        ) from None


def _copy_key(key: str, source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy the value of a dotted key between two nested dictionaries, if both have its section."""
    *sections, name = key.split(".")
    source_section: Any = source
    target_section: Any = target
    for section in sections:
        source_section = source_section.get(section)
        target_section = target_section.get(section)
        if not isinstance(source_section, dict) or not isinstance(target_section, dict):
            return
    if name in source_section:
        target_section[name] = source_section[name]


class RefusedChanges(NamedTuple):
    """Changes between two configs that a run which resumes may not make; empty if there are none.

    Attributes:
        keys: The dotted keys, in the order of the config.
        description: One line with each key and its two values.
    """

    keys: list[str]
    description: str


def refused_changes(old: Config, new: Config, allow: tuple[str, ...]) -> RefusedChanges:
    """Return the keys that differ, although training results depend on them.

    Keys in FREE and in `allow` may differ. If a global batch is set, so may how it is divided into
    micro-batches. For the same metric, eval.mode may become what the metric's name implies, since
    older versions took min for each metric.
    """
    before = flat(old.model_dump(mode="json"))
    after = flat(new.model_dump(mode="json"))
    free = [*FREE, *allow]
    if _has_same_global_batch(before, after):
        free += ["batch.micro_batch", "batch.accumulation"]
    same_metric = old.eval.metric == new.eval.metric
    if same_metric and new.eval.mode == direction(new.eval.metric):
        free.append("eval.mode")
    keys = []
    changes = []
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) == after.get(key) or is_allowed(key, tuple(free)):
            continue
        keys.append(key)
        changes.append(
            f"{key} {redacted_json(before.get(key))!r} → {redacted_json(after.get(key))!r}"
        )
    return RefusedChanges(keys, "; ".join(changes))


def _has_same_global_batch(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether two flat configs set the same global batch."""
    totals = ("batch.global_samples", "batch.global_tokens")
    if not any(before[key] for key in totals):
        return False
    return all(before[key] == after[key] for key in totals)


def strategy_change(old: Config, new: Config, checkpoint: str) -> str | None:
    """Return the line that says a checkpoint goes on under another strategy; None under the same.

    Any strategy reads what any other wrote, so this is never refused.
    """
    if old.strategy.kind == new.strategy.kind:
        return None
    return f"{checkpoint} was saved under {old.strategy.kind}; the run goes on under {new.strategy.kind}"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted key. A list is one value."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    leaves = {}
    for name, inner in value.items():
        dotted = f"{prefix}.{name}".lstrip(".")
        leaves.update(flat(inner, dotted))
    return leaves


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the YAML, with short forms (`config.section.Short`)."""
    config_schema = Config.model_json_schema()
    for section in config_schema["$defs"].values():
        if "const" in section["properties"].get("kind", {}):
            # `kind` tells which member of a union a section is.
            section["required"] = ["kind", *section.get("required", [])]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **config_schema,
        "title": "Drumline config",
    }
