"""Drumline keeps every rank in step: one YAML and one command train a model on however many devices there are.

drumline.train("mine.yaml", {"optimizer.lr": 1e-4})      a run, as `drumline train` has it
drumline.plan(model="llama-3.1-8b", cluster="4x4090")    what fits, how fast, and why
drumline.verify("mine.yaml", strategies=["fsdp2"])       a few steps against one process
drumline.load(run).chat("Hello")                         what was trained, to talk to
drumline.session(strategy="fsdp2", global_samples=64)    a training loop of one's own, on the same engines
drumline.errors                                          all that these raise on purpose
"""

import sys

if sys.platform == "win32":  # before whatever Windows lacks (fcntl, resource, signals) is imported
    print(
        "error: Drumline does not run on Windows itself — install it in WSL 2: `wsl --install`, then pip there",
        file=sys.stderr,
    )
    raise SystemExit(2)

# `python -m drumline…`, also under torchrun and for ranks: Python has put the current folder before everything, so that a statistics.py
# in it would run in the place of Python's own. sys.argv begins with -m only as long as the module to be run is looked for.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]

import logging
from typing import TYPE_CHECKING, Any

from drumline import errors
from drumline.version import __version__ as __version__

if TYPE_CHECKING:
    from drumline.bench.verify import compare as verify
    from drumline.inference.model import load
    from drumline.planner.public import plan
    from drumline.train.run import Run, train
    from drumline.train.session import session

# torchao, which transformers imports where it is there, warns of kernels for GPUs that are not here, and of its own use of torch.
# transformers names the kernels that recurrent layers lack, once a function; `models.recurrent` says it in a line.
for chatty in ("torchao", "torch.utils._pytree", "transformers.integrations.hub_kernels"):
    logging.getLogger(chatty).setLevel(logging.ERROR)

__all__ = ("Run", "errors", "load", "plan", "session", "train", "verify")

# Name → (module, name there): torch is imported by whoever trains, not by `import drumline`.
_PLACES = {
    "Run": ("train.run", "Run"),
    "load": ("inference.model", "load"),
    "session": ("train.session", "session"),
    "verify": ("bench.verify", "compare"),
}

# Where DeepSpeed is installed, transformers and accelerate import it, and it writes warnings to standard output. By the
# logger's name, since this must stand before whoever imports it first; its errors pass.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("train", "plan"):  # a room of this name is there, and can be called
        return importlib.import_module(f"drumline.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(importlib.import_module(f"drumline.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
