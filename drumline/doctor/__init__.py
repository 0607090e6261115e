"""Check the hosts of a run before it starts, and find in its logs afterwards why it failed.

`command` is `drumline doctor`. `host` checks one host, `hosts` several of them, `ranks` and
`reduce` measure an all-reduce. `diagnose` searches logs for the faults in `signatures.yaml`. The
launcher also calls `hosts.preflight` before each run on several hosts, and
`diagnose.find_likely_cause` after a failure.
"""
