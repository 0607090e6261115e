"""What every process needs: processes, files, signals, sockets and redaction.

Also here: the heartbeat by which hangs of ranks are found (`heartbeat`), the network's names and
interfaces (`network`), output that may be lost (`output`), YAML with line numbers (`yaml_lines`),
templates, secrets by munge (`munge`), and models of ModelScope (`mirror`).

It imports only `errors` and `foreign`, and no torch; every other package of `drumline` may import
it. Begin reading with `files` and `process`.
"""
