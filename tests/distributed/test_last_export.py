"""An export that fails at the end of a run: the run is finished, nothing starts again, and one line
says how to get the model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from drumline.report.page import report
from tests.faults.live import wait_for
from tests.faults.test_launch import end as end_of
from tests.harness import events, run_drumline, start_drumline, write_config
from tests.tiny import tiny_model_dir

FOREIGN_FILE = """
    def on_save(self, event):
        (RUN / "export").mkdir(exist_ok=True)
        (RUN / "export" / "mine.txt").write_text("mine")
"""
KILLED = """
    def on_start(self, event):
        threading.Thread(target=self.kill, daemon=True).start()

    def kill(self):
        while '"exporting"' not in (RUN / "events.jsonl").read_text():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
"""
STANDS_STILL = KILLED.replace("SIGKILL", "SIGSTOP")
CALLBACK = """
import os, signal, threading, time
from pathlib import Path

RUN = Path(__file__).parent / "run"

class Break:
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(FOREIGN_FILE, id="fails", marks=pytest.mark.full),
        pytest.param(KILLED, id="is killed"),
    ],
)
def test_a_run_whose_export_breaks_is_finished(tmp_path: Path, failure: str) -> None:
    run = tmp_path / "run"
    (tmp_path / "mine.py").write_text(CALLBACK + failure)
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        adapter={"kind": "lora"},
        launch={"nproc": 2},
        checkpoint={"export": "best"},
        run={"steps": 2, "callbacks": ["mine.py:Break"]},
    )
    finished = run_drumline("train", config)
    (end,) = events(run, "run_end")
    assert (end["status"], end["exit_code"], end["step"]) == ("finished", 0, 2)
    assert events(run, "fault") == []
    assert len(events(run, "run_start")) == 1
    (exported,) = events(run, "export")
    way = f"drumline export {run} --to FOLDER --adapter"
    assert exported["path"] is None
    assert way in exported["error"]
    assert way in finished.err
    assert "the run is finished and its weights are saved" in finished.err
    assert way in report([run], tmp_path / "page.html").read_text()
    apart = tmp_path / "apart"
    run_drumline("export", run, "--to", apart, "--adapter")
    assert (apart / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_stop_signal_in_the_export_finds_the_weights_saved(tmp_path: Path) -> None:
    """It was reported as ranks that did not save in time."""
    run = tmp_path / "run"
    (tmp_path / "mine.py").write_text(CALLBACK + STANDS_STILL)
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        launch={"nproc": 1, "grace_seconds": 1},
        checkpoint={"export": "last"},
        run={"steps": 2, "callbacks": ["mine.py:Break"]},
    )
    process = start_drumline("train", config)
    wait_for(run, "exporting", 2, process)
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == 75, said
    assert "stopped: SIGTERM in the export: the run is finished and its weights were saved" in said
    assert f"export again with drumline export {run} --to FOLDER" in said
    assert "did not save in time" not in said
    (end,) = events(run, "run_end")
    assert (end["status"], end["exit_code"], end["step"]) == ("preempted", 75, 2)
    (tmp_path / "mine.py").write_text("class Break:\n    def on_end(self, event): pass\n")
    run_drumline("train", config, "--resume")
    assert (run / "export" / "model.safetensors").exists()
