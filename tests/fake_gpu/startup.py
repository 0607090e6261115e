"""What each process over the stand-in does at its start, before it imports torch."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.fake_gpu.ledger import LEDGER, OUTSIDE

# Bytes. Models get memory but no weights, and from then on larger tensors are not computed.
COMPUTE_UP_TO = "FAKE_GPU_COMPUTE_UP_TO"


def install() -> None:
    LEDGER.start()
    _show_devices()
    after_import("torch", _prepare_torch)
    after_import("drumline.train.loop", _mark_steps)
    if COMPUTE_UP_TO in os.environ:
        after_import("drumline.models.shards", _leave_weights_empty)


def _prepare_torch(torch: Any) -> None:
    """cuDNN plans its kernels in a library of its own, which the stand-in does not replace."""
    enable = torch.backends.cuda.enable_cudnn_sdp
    torch.backends.cuda.enable_cudnn_sdp = lambda enabled: enable(False)
    enable(False)
    torch.backends.cudnn.enabled = False
    from tests.fake_gpu import compute

    compute.install()


def _mark_steps(loop: Any) -> None:
    """A step lasts from its beginning to that of the next: drawing the next batch belongs to it."""
    train_step = loop.Loop._train_step
    run = loop.Loop.run

    @functools.wraps(train_step)
    def marked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        LEDGER.begin_step(self.state.step)
        return train_step(self, *args, **kwargs)

    @functools.wraps(run)
    def marked_run(self: Any) -> Any:
        try:
            return run(self)
        finally:
            LEDGER.begin_step(OUTSIDE)

    loop.Loop._train_step = marked_step
    loop.Loop.run = marked_run


def _show_devices() -> None:
    """/dev has no nvidia0 here, and the project looks for it."""
    glob = pathlib.Path.glob

    def glob_with_devices(
        path: pathlib.Path, pattern: str, **options: Any
    ) -> Iterator[pathlib.Path]:
        if str(path) == "/dev" and pattern.startswith("nvidia"):
            number = int(os.environ.get("FAKE_GPUS", "1"))
            return iter([pathlib.Path(f"/dev/nvidia{index}") for index in range(number)])
        return glob(path, pattern, **options)

    pathlib.Path.glob = glob_with_devices  # type: ignore[assignment]


class _Nothing:
    """A source of weights that leaves them as they are: nobody looks at their numbers."""

    uses_module_names = True

    def put(self, tensors: Any, model: Any) -> None:
        pass


def _leave_weights_empty(shards: Any) -> None:
    """Give models memory and no values: those of billions of parameters would take minutes.

    From then on tensors of more than COMPUTE_UP_TO are not computed. Before, small copies of the
    model, on which its properties are tried, have their numbers.
    """
    fill = shards.Values.fill
    most_bytes = int(os.environ[COMPUTE_UP_TO])

    def fill_with_nothing(values: Any, *args: Any, **options: Any) -> None:
        from tests.fake_gpu import compute

        compute.limit_to(most_bytes)
        fill(replace(values, source=_Nothing()), *args, **options)

    shards.Values.fill = fill_with_nothing


class _Finder(importlib.abc.MetaPathFinder):
    """Runs `action` on a module right after it was loaded for the first time."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self.action(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


def after_import(name: str, action: Callable[[Any], None]) -> None:
    sys.meta_path.insert(0, _Finder(name, action))
