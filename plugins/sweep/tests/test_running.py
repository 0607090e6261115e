"""A trial that is a job of Slurm: it goes on while Slurm is busy, and its end may be noted late."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.launch.slurm import queue
from drumline_sweep.trials import Running, Trial
from tests.unit.test_slurm import fake_squeue, noted, of_job


@pytest.mark.slow
def test_a_job_runs_until_its_end_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = fake_squeue(tmp_path, monkeypatch)
    run = of_job(tmp_path).parent
    trial = Running(Trial((), run), None, None, True)

    def poll() -> int | None:
        trial.asked_at = -100.0  # long ago: the queue is read again
        return trial.poll()

    squeue("error: slurm_load_jobs error: Socket timed out on send/recv operation")
    assert poll() is None, "its job goes on meanwhile"
    squeue("RUNNING None")
    assert poll() is None
    squeue("COMPLETED None")
    assert poll() is None, "its end is not noted yet"
    noted(run, 0)
    assert poll() == 0


@pytest.mark.slow
def test_a_job_that_is_gone_without_a_note_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = fake_squeue(tmp_path, monkeypatch)
    run = of_job(tmp_path).parent
    squeue("COMPLETED None")
    monkeypatch.setattr(queue, "NOTE_SECONDS", 0.0)
    assert Running(Trial((), run), None, None, True, asked_at=-100.0).poll() == 1
