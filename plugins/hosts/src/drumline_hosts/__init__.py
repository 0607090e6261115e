"""Drumline's launchers of several hosts: ssh, with hosts that may come and go, and Ray.

The launcher's side is in `coordinator`, and in `elastic` if hosts come and go. The side of a host
is in `agent`, `takeover` and `vote`. Both sides follow rules that have numbers, such as L2 and A2:
docs/explanations/elastic_hosts.md lists them.
"""

# First of all, also under `python -m drumline_hosts…`: it takes the current folder out of the path.
import drumline  # noqa: F401
