"""The engine side of strategies: a folder for each strategy with code of its own.

`NAME/spec.py` has an EngineSpec: what the strategy refuses, and how it wraps a model or builds
its engine. `config/strategies/NAME.py` has its keys and names this class in `engine_class`, and
`planner/strategies/NAME.py` has its cost.
"""
