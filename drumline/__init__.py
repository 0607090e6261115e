"""Drumline keeps every rank in step: one YAML and one command train a model on however many devices there are."""

__version__ = "0.1.0"
