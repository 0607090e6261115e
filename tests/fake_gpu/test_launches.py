"""How many kernels a step launches, against loops by hand of the same model: FSDP2 in bf16 on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_gpu.ledger_file import LedgerFile
from tests.fake_gpu.plain_loop import CHUNK, LENGTH, RANK_OF_ADAPTERS, SAMPLES
from tests.fake_gpu.running import NEEDS_STAND_IN, claim_plan, machine, run_ranks
from tests.harness import Sections, write_config
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, NEEDS_STAND_IN]
LAYERS = 8
MOST = 1.1  # of the launches by hand, by issue 37
STEPS = 4
STEP = 2  # neither the first nor the last
# Our runs: what changes the usual one. All have packed rows.
OURS: dict[str, Sections] = {
    "usual": {},
    "chunks": {"algorithm": {"kind": "pretrain", "loss_chunk": CHUNK}},
    "lora": {"adapter": {"kind": "lora", "r": RANK_OF_ADAPTERS}},
}
BY_HAND = ("whole", "chunks", "packed", "lora")  # see plain_loop.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what each of our runs (`ours/`) and each loop (`by-hand/`) launched."""
    folder = tmp_path_factory.mktemp("launches")
    model = tiny_model_dir(folder / "model", layers=LAYERS)

    arguments = [model, folder / "by-hand", *BY_HAND]
    failed = run_ranks("tests.fake_gpu.plain_loop", arguments, 2, 400)
    assert not failed, failed

    plans = [plan_of_the_same(folder / "ours" / name, model, OURS[name]) for name in OURS]
    failed = run_ranks("tests.fake_gpu.ranks", plans, 2, 400)
    assert not failed, failed
    return folder


@pytest.mark.parametrize(
    ("ours", "by_hand"),
    [("usual", "whole"), ("usual", "packed"), ("chunks", "chunks"), ("lora", "lora")],
)
def test_at_most_a_tenth_more_than_by_hand(folder: Path, ours: str, by_hand: str) -> None:
    mine = LedgerFile(folder / "ours" / ours / "run").launches[STEP]
    theirs = LedgerFile(folder / "by-hand" / by_hand).launches[STEP]

    assert mine.total() <= MOST * theirs.total(), (mine - theirs, theirs - mine)


def plan_of_the_same(folder: Path, model: Path, sections: Sections) -> Path:
    """Return the plan of a run that has as many tokens in a step as the loops by hand."""
    folder.mkdir(parents=True)
    usual: Sections = {
        "algorithm": {"kind": "pretrain", "loss_chunk": 1024},  # the default: one chunk here
        "data": {"packing": True, "max_length": LENGTH, "eval": []},
        "batch": {"global_samples": 2 * SAMPLES, "micro_batch": SAMPLES},
        "strategy": "fsdp2",
        "precision": "bf16",
        "run": {"steps": STEPS, "log_every": STEPS, "device": "cuda"},
        "checkpoint": {"every": None},
    }
    path = write_config(folder, model, rows=400, **(usual | sections))
    return claim_plan(path, 2, machine(2))
