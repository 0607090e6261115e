"""Drumline keeps every rank in step: one YAML and one command train a model on however many devices there are."""

import logging

__version__ = "0.4.0"

# Where DeepSpeed is installed, transformers and accelerate import it, and it writes warnings to standard output. By the
# logger's name, since this must stand before whoever imports it first; its errors pass.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
