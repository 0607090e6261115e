"""Training: set-up before the launch, the loop, a rank's entry. `drumline.train` is this room and, called, `train.run.train`."""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """A room whose name is a verb of `drumline`, too."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        # A rank imports the room, and not the launcher.
        return importlib.import_module("drumline.train.run").train(*args, **options)


sys.modules[__name__].__class__ = _Called
