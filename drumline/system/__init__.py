"""Processes, files, signals, sockets and the redaction of secrets: what has nothing to do with training.

Imports no other room, and no torch; all rooms may import it. Begin reading with `files` and
`process`.
"""
