"""The engine side of strategies: a folder for each strategy with code of its own.

`NAME/spec.py` has a StrategyEngine: what the strategy refuses, and how it spreads a model or builds
its engine. `config/strategies/NAME.py` has its keys and names this class in `engine_class`, and
`planner/strategies/NAME.py` has its cost.
"""
