"""The engines: they parallelise a model over the ranks as planned, train it and evaluate it.

Imports `models`, `dist`, `plan` and the rooms that these import. `train` builds engines and calls
them (`build.build_engine` for a config, `build.build_module` for a user's module); `planner` traces
models with `native.prepare`. An engine knows no algorithm. Begin reading with
`engine` (the interface), `native` (Drumline's own engine) and `build` (plan → engine). `strategies`
has a folder for each strategy with code of its own.
"""
