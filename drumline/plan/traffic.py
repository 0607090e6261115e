"""Bytes that a rank sends in one optimizer step, by the ring algorithm's shares. Pure; `dist.traffic` counts the same where it runs."""

from __future__ import annotations

from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Traffic
from drumline.plan.layout import Layout


def traffic(layout: Layout, facts: ModelFacts) -> Traffic:
    """Of one step of the kind that most are (see plan.communication.step_kind)."""
    n = layout.mesh.data_ranks * layout.mesh.cp
    return Traffic(all_reduce=2 * (n - 1) / n * 4 * facts.learned / (layout.mesh.tp * layout.mesh.pp))
