"""The command line: a module for each group of commands, and `program`, which runs them.

Heavy imports are within the commands.
"""

from drumline.cli.program import app, main

__all__ = ["app", "main"]
