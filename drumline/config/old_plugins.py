"""Load strategies written before 0.6.0, whose three parts are in one class, `StrategySpec`.

Under the old names of modules (`config.old_names`) the strategies of Drumline still have all
answers, and the parts of such a strategy ask the section, so they call what a subclass overrides.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

from drumline.config.registry import part_class
from drumline.config.strategy import StrategyConfig


def with_old_answers(module: ModuleType) -> dict[str, type[StrategyConfig]]:
    """Return the strategies of a module as classes that have the answers of all three parts."""
    found = {}
    for name, value in vars(module).items():
        is_strategy = isinstance(value, type) and issubclass(value, StrategyConfig)
        if is_strategy and not issubclass(value, OldAnswers):
            found[name] = old_strategy(value)
    return found


def old_strategy(new: type[StrategyConfig]) -> type[StrategyConfig]:
    """Return a strategy's class with the answers of all three parts, as it was before 0.6.0."""
    members = {
        "__module__": new.__module__,
        "__doc__": new.__doc__,
        "new_cost": new.cost_class,
        "new_engine": new.engine_class,
        "cost_class": OldPart,
        "engine_class": OldPart,
        "__annotations__": dict.fromkeys(
            ("new_cost", "new_engine", "cost_class", "engine_class"), ClassVar[Any]
        ),
    }
    return type(new.__name__, (OldAnswers, new), members)


COST = (
    *("kept_bytes", "outer_bytes", "state", "buffers", "host", "overlap", "send", "send_norm"),
    *("copied", "variants", "fallbacks"),
)
ENGINE = ("refusals", "adopted", "engine_options", "require", "prepare", "spread")


class OldAnswers:
    """The answers of a strategy's cost and of its engine, as methods of its section."""

    new_cost: ClassVar[str | type]
    new_engine: ClassVar[str | type]

    @classmethod
    def candidates(cls, space: Any) -> Iterator[Any]:
        """Yield what the search tries of this kind."""
        yield from part_class(cls.new_cost).candidates(cls, space)


class OldPart:
    """A part of an old strategy: what it is asked, the section answers itself."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @classmethod
    def candidates(cls, kind: Any, space: Any) -> Iterator[Any]:
        """Yield what the search tries of this kind."""
        yield from kind.candidates(space)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods before there is a section.
        if name.startswith("__") or name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)


def _answer_by(part: str, name: str) -> Any:
    """Return a method of the section that asks its new part."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        new_part = part_class(getattr(self, part))(self)
        return getattr(new_part, name)(*arguments, **options)

    method.__name__ = name
    return method


for _name in COST:
    setattr(OldAnswers, _name, _answer_by("new_cost", _name))
for _name in ENGINE:
    setattr(OldAnswers, _name, _answer_by("new_engine", _name))
