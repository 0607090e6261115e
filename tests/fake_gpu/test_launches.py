"""How many kernels a step launches, against a loop by hand of the same model: FSDP2 in bf16 on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.core.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.fake_gpu.environment import PYTHON
from tests.fake_gpu.ledger_file import LedgerFile
from tests.fake_gpu.plain_loop import LENGTH, SAMPLES
from tests.fake_gpu.running import machine, run_ranks
from tests.harness import write_config
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the CUDA build of torch: make fake-gpu"),
]
LAYERS = 8
MOST = 1.1
STEPS = 4
STEP = 2  # neither the first nor the last


def test_at_most_a_tenth_more_than_by_hand(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=LAYERS)
    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    failed = run_ranks("tests.fake_gpu.plain_loop", [model, by_hand], 2, 400)
    assert not failed, failed
    plan = plan_of_the_same(tmp_path, model)
    failed = run_ranks("tests.fake_gpu.ranks", [plan], 2, 400)
    assert not failed, failed
    ours = launches(plan.parent)
    theirs = launches(by_hand)
    more = {kind: ours.get(kind, 0) - theirs.get(kind, 0) for kind in ours | theirs}
    assert sum(ours.values()) <= MOST * sum(theirs.values()), (sum(theirs.values()), more)


def launches(folder: Path) -> dict[str, int]:
    return dict(LedgerFile.read(folder / "ledger-0.json").launches_by_step[STEP])


def plan_of_the_same(folder: Path, model: Path) -> Path:
    """Return the plan of a run that has as many tokens in a step, and as many documents."""
    path = write_config(
        folder,
        model,
        rows=400,
        algorithm={"kind": "pretrain", "loss_chunk": 1024},  # the default
        data={"packing": True, "max_length": LENGTH, "eval": []},
        batch={"global_samples": 2 * SAMPLES, "micro_batch": SAMPLES},
        strategy="fsdp2",
        precision="bf16",
        run={"steps": STEPS, "log_every": STEPS, "device": "cuda"},
        checkpoint={"every": None},
    )
    request = Request(load(path, []), world_size=2, machine=machine(2))
    plan, _ = claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
    return plan
