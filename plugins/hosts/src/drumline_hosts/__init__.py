"""Drumline's launchers of several hosts: ssh, with hosts that may come and go, and Ray.

The launcher's side is `coordinator`, and `elastic` if hosts come and go. The side of a host is `agent`,
`takeover` and `vote`. The rules that both follow have numbers: docs/explanations/elastic_hosts.md.
"""

# First of all, also under `python -m drumline_hosts…`: it takes the current folder out of the path.
import drumline  # noqa: F401
