"""The command line: one module a group of commands, and `program`, which runs them. Heavy imports are inside of the commands."""

from drumline.cli.program import app, main

__all__ = ["app", "main"]
