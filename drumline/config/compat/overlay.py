"""A launcher's or an accelerate file's strategy, laid over a config that leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.compat import recognise
from drumline.config.compat.accelerate import accelerate_file
from drumline.config.compat.combine import deepspeed_file, load_file
from drumline.config.compat.environment import LAUNCHED, from_accelerate
from drumline.config.compat.sheet import AUTO, Old, Sheet, Source, said
from drumline.config.yaml_lines import Place
from drumline.errors import ConfigError


@dataclass(frozen=True)
class Overlay:
    """Values, where each is said, and those (`weak`) that give way to the config without a word."""

    values: dict[str, Any]
    said: dict[Place, str]
    notes: list[str]
    weak: frozenset[Place] = frozenset()


def from_file(path: Path) -> Overlay:
    """An accelerate config or a DeepSpeed JSON. Raises ConfigError for any other file."""
    olds = load_file(path, Old("accelerate_config", str(path), Source("command line"), ("--accelerate-config",)))
    kind = recognise({old.key: old.value for old in olds})
    sheet = Sheet(path.parent, path.parent)
    if kind == "accelerate":
        accelerate_file(sheet, olds)
    elif kind == "deepspeed":
        deepspeed_file(sheet, olds, own_file=str(path.absolute()))
    else:
        fix = "an accelerate file has distributed_type, a DeepSpeed JSON zero_optimization"
        raise ConfigError("neither an accelerate config nor a DeepSpeed one", where=str(path), fix=fix)
    return _made(sheet)


def from_environment(environ: Mapping[str, str]) -> Overlay | None:
    """What `accelerate launch` says, where it has started this process."""
    sheet = from_accelerate(environ, Path())
    if sheet is None:
        return None
    unsaid = environ[LAUNCHED] == "no"  # its default; a config that names a precision knows better
    return _made(sheet, frozenset({("precision", "kind")}) if unsaid else frozenset())


def _made(sheet: Sheet, weak: frozenset[Place] = frozenset()) -> Overlay:
    if (own := sheet.get("strategy.config")) is not None:
        sheet.values["strategy"]["config"] = str((sheet.folder / own).absolute())  # the config lies elsewhere
    return Overlay(sheet.values, sheet.said, sheet.notes, weak)


def lay(values: dict[str, Any], overlay: Overlay, where: Callable[[Place], str]) -> dict[Place, str]:
    """Set what the config leaves open. Returns where each value that was set is said.

    Raises ConfigError where both speak and differ. Options of one and the same strategy are no contradiction: the config's stand,
    since launchers hand on their defaults as if they had been asked for.
    """
    for name in ("strategy", "precision"):
        if isinstance(values.get(name), str):
            values[name] = {"kind": values[name]}
    mine = values.get("strategy")
    same = isinstance(mine, dict) and mine.get("kind") == overlay.values.get("strategy", {}).get("kind")
    placed: dict[Place, str] = {}

    def told(place: Place) -> str:
        while place not in overlay.said:
            place = place[:-1]
        return overlay.said[place]

    def visit(inside: dict[str, Any], theirs: dict[str, Any], place: Place) -> None:
        for key, value in theirs.items():
            here, current = (*place, key), inside.get(key)
            if isinstance(value, dict) and (current is None or isinstance(current, dict)):
                if current is None:
                    inside[key], placed[here] = {}, told(here)
                visit(inside[key], value, here)
            elif current in AUTO:
                inside[key], placed[here] = value, told(here)
            elif current != value and here not in overlay.weak and not (same and here[0] == "strategy"):
                what = f"{said(current)}, but {told(here)} makes it {said(value)}"
                raise ConfigError(what, where=where(here), fix=f"leave {'.'.join(here)} out of the config, or change the launcher's")

    visit(values, overlay.values, ())
    return placed
