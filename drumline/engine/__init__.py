"""The engines: they spread a model over the ranks as planned, and step it.

Imports `models`, `dist`, `plan` and what is below. An engine knows no algorithm. Begin reading with
`engine` (what an engine answers), `native` (Drumline's own) and `build` (plan → engine);
`strategies` has a folder for each strategy that spreads in a way of its own.
"""
