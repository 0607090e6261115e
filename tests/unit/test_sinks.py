"""Trackers get the figures through their own libraries; a missing one is named at the start, a failing one costs only itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.errors import EnvironmentFault
from drumline.train.sinks import Sink, open_sinks

EVENT = {"t": 1.0, "kind": "step", "step": 3, "loss": 2.5, "mfu": None, "memory_bytes": [7, 8]}


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], tmp_path, {}, "run")
    sink.event(EVENT)
    sink.event({"t": 1.0, "kind": "eval", "step": 3, "loss": 1.5, "exact_match": 0.25})
    sink.event({"t": 1.0, "kind": "preempt", "step": 3, "signal": "SIGTERM"})
    sink.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {
        "train/loss", "train/memory_bytes/rank_0", "train/memory_bytes/rank_1", "eval/loss", "eval/exact_match",
    }  # fmt: skip
    (scalar,) = board.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (3, 2.5)


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_a_missing_library_is_named_with_its_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, kind, None)
    with pytest.raises(EnvironmentFault, match=rf"drumline\[{kind}\]"):
        open_sinks([kind], tmp_path, {}, "run")


def test_a_failing_tracker_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def write(figures: dict[str, float], step: int) -> None:
        calls.append(step)
        raise ConnectionError("gone")

    sink = Sink("tracker", write, lambda: None)
    sink.event(EVENT)
    sink.event(EVENT)
    sink.close()
    assert calls == [3]
    assert capsys.readouterr().err == "warning: tracker failed and gets no more figures: ConnectionError: gone\n"
