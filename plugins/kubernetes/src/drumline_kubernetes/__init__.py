"""Drumline's launcher for Kubernetes: it makes a workload, follows its pods, and stops the run."""

# First of all, also under `python -m drumline_kubernetes…`: it takes the current folder out of the
# path.
import drumline  # noqa: F401
