"""The reference pages of docs/: keys, commands, events, exit codes and Python, made from the code."""
