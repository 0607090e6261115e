"""What `--probe` found, as tables."""

from __future__ import annotations

from rich.console import Console

from drumline.plan.choice.probe import Factors, Probe
from drumline.plan.forecast.truth import compare
from drumline.planning.check import remarks, table


def show_probes(probes: tuple[Probe, ...], console: Console) -> None:
    """Predicted against measured of each candidate that was tried, and the factors that correct the estimates."""
    for probe in probes:
        if probe.measured is None or probe.factors is None:
            console.print(f"tried {probe.name}: {probe.failed}\n", style="yellow", markup=False, soft_wrap=True)
            continue
        console.print(f"tried {probe.name} for {probe.measured.step} steps:", style="bold", markup=False)
        rows = compare(probe.predicted, probe.measured)
        console.print(table(rows))
        for remark in remarks(rows, probe.measured):
            console.print(f"  {remark}", markup=False, soft_wrap=True)
        console.print(f"its estimate times {in_words(probe.factors)}\n", markup=False, soft_wrap=True)
    if any(probe.factors for probe in probes):
        console.print("Every plan below is corrected: these by their own factors, the others by the mean.\n", style="italic")


def in_words(factors: Factors) -> str:
    """`live 1.21, seconds 3.4`: those that are not 1."""
    said = [f"{name} {value:.3g}" for name, value in factors if abs(value - 1) > 5e-3]
    return ", ".join(said) or "1: it was right"
