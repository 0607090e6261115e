"""Load strategies written before 0.6.0, whose three parts are in one class, `StrategySpec`.

Today a strategy is a section with two parts, a cost and an engine, and its methods are spread over
the three. Before, one class had all methods, and a plug-in's subclass may override any of them.
Under the old names of modules (`config.old_names`) each strategy of Drumline is therefore a section
with all methods (`LegacyMethods`), and both its parts are `ForwardingPart`.

Example: the planner calls `kept_bytes` of the cost part of such a strategy. The ForwardingPart calls
`kept_bytes` of the section. If the plug-in overrides it, that runs. If not, the method of
LegacyMethods runs, which makes the cost part of today for the section and calls its `kept_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

from drumline.config.registry import part_class
from drumline.config.strategy import StrategyConfig


def legacy_strategies(module: ModuleType) -> dict[str, type[StrategyConfig]]:
    """Return the strategies of a module by name, as classes with the methods of all three parts."""
    found = {}
    for name, value in vars(module).items():
        is_strategy = isinstance(value, type) and issubclass(value, StrategyConfig)
        if is_strategy and not issubclass(value, LegacyMethods):
            found[name] = add_legacy_methods(value)
    return found


def add_legacy_methods(new: type[StrategyConfig]) -> type[StrategyConfig]:
    """Return a subclass of a strategy that has the methods of all three parts, as before 0.6.0."""
    members = {
        "__module__": new.__module__,
        "__doc__": new.__doc__,
        "current_cost": new.cost_class,
        "current_engine": new.engine_class,
        "cost_class": ForwardingPart,
        "engine_class": ForwardingPart,
        "__annotations__": dict.fromkeys(
            ("current_cost", "current_engine", "cost_class", "engine_class"), ClassVar[Any]
        ),
    }
    return type(new.__name__, (LegacyMethods, new), members)


COST = (
    *("kept_bytes", "outer_bytes", "state", "buffers", "host", "overlap", "send", "send_norm"),
    *("copied", "variants", "fallbacks"),
)
ENGINE = ("refusals", "adopted", "engine_options", "require", "prepare", "spread")


class LegacyMethods:
    """The methods of a strategy's cost and of its engine, for the section of an old strategy."""

    current_cost: ClassVar[str | type]
    current_engine: ClassVar[str | type]

    @classmethod
    def candidates(cls, space: Any) -> Iterator[Any]:
        """Yield what the search tries of this kind."""
        yield from part_class(cls.current_cost).candidates(cls, space)


class ForwardingPart:
    """The cost or engine part of an old strategy. It forwards each call to the section."""

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


def _method_of_part(part: str, name: str) -> Any:
    """Return a method for the section that calls the method `name` of its part of today.

    `part`: the attribute of the section with the class of the part.
    """

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        current_part = part_class(getattr(self, part))(self)
        return getattr(current_part, name)(*arguments, **options)

    method.__name__ = name
    return method


for _name in COST:
    setattr(LegacyMethods, _name, _method_of_part("current_cost", _name))
for _name in ENGINE:
    setattr(LegacyMethods, _name, _method_of_part("current_engine", _name))
