"""Processes, files, signals, sockets and redaction: what has nothing to do with training.

Imports no other room, and no torch; all rooms may import it. Begin reading with `files` and
`process`.
"""
