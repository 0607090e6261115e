"""`drumline sweep`: train a config with many values, and rank the runs.

`axes` reads the values, `sweep` runs their trials (`trials`) and shows the results, `optuna_study`
has Optuna choose points.
"""

# First of all, also under `python -m drumline_sweep…`: it takes the current folder out of the path.
import drumline  # noqa: F401
