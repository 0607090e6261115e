"""An export that fails at the end of a run: the run is finished, nothing starts again, and one line says how to get the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.report.page import report
from tests.harness import drumline, events, write_config
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
CALLBACK = """
import os, signal, threading, time
from pathlib import Path

RUN = Path(__file__).parent / "run"

class Break:
"""


@pytest.mark.slow
@pytest.mark.parametrize("failure", [FOREIGN_FILE, KILLED], ids=["fails", "is killed"])
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
    finished = drumline("train", config)
    assert finished.code == 0, finished.err
    (end,) = events(run, "run_end")
    assert (end["status"], end["exit_code"], end["step"]) == ("finished", 0, 2)
    assert events(run, "fault") == [] and len(events(run, "run_start")) == 1
    (exported,) = events(run, "export")
    way = f"drumline export {run} --to FOLDER --adapter"
    assert exported["path"] is None and way in exported["error"] and way in finished.err
    assert "the run is finished and its weights are saved" in finished.err
    assert way in report([run], tmp_path / "page.html").read_text()
    apart = drumline("export", run, "--to", tmp_path / "apart", "--adapter")
    assert apart.code == 0 and (tmp_path / "apart" / "adapter_model.safetensors").exists(), (
        apart.err
    )
