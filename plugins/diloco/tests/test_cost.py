"""What the planner says of fragments: the time that they take, and the bytes that a step sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.hardware.cluster import Cluster
from drumline.plan.plan import Plan
from tests.distributed.rows import Row
from tests.distributed.test_planner_traffic import MODEL, predicted, run_rows, slug
from tests.harness import events
from tests.tiny import tiny_model_dir
from tests.unit.test_planner_times import cluster, taken


def communication(period: int, **options: int) -> float:
    """Return the exposed seconds of two hosts that share 100 Mb/s."""
    eight = cluster(nodes=2, inter="0.1Gb")
    slow = Cluster(eight.device, 1, 2, eight.intra, eight.inter, eight.host_link)
    strategy = {"kind": "diloco", "period": period, **options}
    return taken(strategy, slow, world=2).communication


def test_fragments_hide_behind_the_steps_beside_them() -> None:
    """8 bits are a quarter. Beside enough steps nothing is left but what the link cannot carry in a period."""
    whole = communication(50)
    coded = communication(50, bits=8)
    assert 3.5 * coded < whole < 4.5 * coded
    assert communication(50_000, bits=8, fragments=10, delay=5_000) == 0
    assert communication(50_000, bits=8, fragments=10, delay=1) > 0


ROWS = [
    Row("diloco, a step that sends in 8 bits", 2, {"strategy": {"kind": "diloco", "period": 3, "bits": 8}}),
    Row(
        "diloco, a fragment beside the steps",
        2,
        {"strategy": {"kind": "diloco", "period": 6, "fragments": 2, "delay": 2}},
    ),
]  # fmt: skip


@pytest.mark.full
def test_the_planner_says_what_a_step_sends(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model", **MODEL)
    run_rows(tmp_path, ROWS)
    for row in ROWS:
        folder = tmp_path / slug(row) / "run"
        plan = Plan.load(folder / "plan.json")
        sent = events(folder, "step")[-1]["sent_bytes"]
        assert sent == pytest.approx(predicted(plan), rel=1e-6, abs=1)
