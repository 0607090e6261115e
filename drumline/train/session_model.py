"""The object that `session.prepare` returns for a model: it stands for the user's module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from drumline.engine.engine import CustomLoopEngine
from drumline.errors import UserError


class Model:
    """Stands for the user's module. A call goes through the engine, attributes are the module's."""

    engine: CustomLoopEngine
    module: nn.Module

    def __init__(self, engine: CustomLoopEngine) -> None:
        vars(self).update(engine=engine, module=engine.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for special methods, even before `module` is set.
        is_special = name.startswith("__") and name.endswith("__")
        if is_special or "module" not in vars(self):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = isinstance(value, nn.Module)
        has_weights = is_module and next(value.parameters(), None) is not None
        if has_weights or isinstance(value, nn.Parameter):
            raise UserError(
                f"{name} has weights, and the model is spread already",
                where="session",
                fix="make it part of the module that build returns",
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
        """Return a copy of the module alone.

        Raises UserError if this rank holds only a shard of the module.
        """
        if not self.engine.is_whole:
            raise UserError(
                "this rank holds only a shard, so the model cannot be copied",
                where="session",
                fix="make it a second model of prepare, or use ddp",
            )
        return copy.deepcopy(self.module, memo)
