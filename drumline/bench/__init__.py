"""Measure the user's own work on the user's own devices.

`verify` compares strategies with one process, `scaling` (`drumline bench`) measures speed over
processes and hosts, and `calibrate` measures the rates of this machine for the planner.
"""
