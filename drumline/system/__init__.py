"""Processes, files, signals, sockets and redaction: what every process needs.

The heartbeat by which hangs of ranks are found is here, too. Imports only `errors` and `foreign`,
and no torch; every other package of `drumline` may import it. Begin reading with `files` and
`process`.
"""
