"""A model of a session as the loop sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from drumline.errors import UserError
from drumline.parallel.engine import OpenEngine


class Model:
    """It is called like the module, through the engine, and has all of its attributes, which are read, set and deleted there."""

    engine: OpenEngine
    module: nn.Module

    def __init__(self, engine: OpenEngine) -> None:
        vars(self).update(engine=engine, module=engine.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self) or (
            name.startswith("__") and name.endswith("__")
        ):  # what copies and pickles ask for
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) or (
            isinstance(value, nn.Module) and next(value.parameters(), None) is not None
        ):
            what = f"{name} has weights, and the model is spread already"
            raise UserError(
                what, where="session", fix="make it part of the module that build returns"
            )
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the module alone. Raises UserError where a rank has no whole one."""
        if not self.engine.is_whole:
            what, fix = (
                "a rank holds a part of the model, and copies no more",
                "make it a second model of prepare, or use ddp",
            )
            raise UserError(what, where="session", fix=fix)
        return copy.deepcopy(self.module, memo)
