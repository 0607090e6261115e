"""Rooms whose name is also a verb of `drumline`: `drumline.train(…)` and `drumline.plan(…)`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, ClassVar


def make_callable(room: str, function: str) -> None:
    """Let a call of the module `room` be one of `function`.

    `function`: a `module:name`, which is imported by the call.
    """

    class CallableRoom(ModuleType):
        target: ClassVar[str] = function

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            module, _, name = self.target.partition(":")
            return getattr(importlib.import_module(module), name)(*arguments, **options)

    sys.modules[room].__class__ = CallableRoom
