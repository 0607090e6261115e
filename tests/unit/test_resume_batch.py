"""What a run may go on with: a global batch of the same size, and keys that change no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.core.load import load
from drumline.core.plan import Plan
from drumline.errors import CheckpointError
from drumline.train.setup import Request, _check_same_run, make_plan
from tests.harness import write_config
from tests.tiny import tiny_model_dir


def test_a_run_goes_on_with_batches_of_the_same_size(tmp_path: Path) -> None:
    """However it is cut up or written; on more ranks a micro-batch and an accumulation make another one."""
    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), batch={"global_samples": None, "micro_batch": 2, "accumulation": 4}, strategy="ddp"
    )

    def plan(ranks: int, *overrides: str) -> Plan:
        return make_plan(Request(load(path, list(overrides)), ranks), on_progress=lambda *_: None)

    two, one = plan(2), plan(1)
    assert (two.batch.global_samples, one.batch.global_samples) == (16, 8) and two.data is not None and two.data.identity is not None
    state = {"config": two.config.model_dump(mode="json"), "global_samples": 16, "data": two.data.identity.model_dump()}
    with pytest.raises(
        CheckpointError, match=r"a step took 16 samples, and takes 8 now .* batch.global_samples=16 batch.accumulation=null"
    ):
        _check_same_run("c", state, one, ())
    _check_same_run("c", state, one, ("batch.global_samples",))
    _check_same_run("c", state, plan(1, "batch.global_samples=16", "batch.accumulation=null"), ())
    _check_same_run("c", {**state, "global_samples": None}, one, ())  # of an older version, which does not say
    with pytest.raises(CheckpointError, match=r"batch\.micro_batch 2 → 1"):
        _check_same_run("c", state, plan(1, "batch.micro_batch=1"), ())
    for key in ("report.html=false", "run.profile={at: 3}"):
        _check_same_run("c", state, plan(2, key), ())
