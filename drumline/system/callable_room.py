"""Make a package callable: `drumline.train` and `drumline.plan` are packages and functions."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, ClassVar


def make_callable(room: str, function: str) -> None:
    """Make a package callable: a call of it calls `function`.

    `room`: the package's name. `function`: MODULE:NAME, which the first call imports.
    """

    class CallableRoom(ModuleType):
        target: ClassVar[str] = function

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            module, _, name = self.target.partition(":")
            return getattr(importlib.import_module(module), name)(*arguments, **options)

    sys.modules[room].__class__ = CallableRoom
