"""Drumline keeps every rank in step: one YAML and one command train a model on however many devices there are."""

import sys

# `python -m drumline…`, also under torchrun and for ranks: Python has put the current folder before everything, so that a statistics.py
# in it would run in the place of Python's own. sys.argv begins with -m only as long as the module to be run is looked for.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]

import logging

__version__ = "0.5.0"

# Where DeepSpeed is installed, transformers and accelerate import it, and it writes warnings to standard output. By the
# logger's name, since this must stand before whoever imports it first; its errors pass.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
