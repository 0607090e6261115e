"""The engines: they spread a model over the ranks as planned, train it and evaluate it.

Imports `models`, `dist`, `plan` and what is below. An engine knows no algorithm. Begin reading with
`engine` (the interface), `native` (Drumline's own engine) and `build` (plan → engine). `strategies`
has a folder for each strategy with code of its own.
"""
