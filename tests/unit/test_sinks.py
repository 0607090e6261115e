"""Trackers: what they are given, what happens without their library, and when they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.config.run import TrackerConfig
from drumline.errors import EnvironmentFault
from drumline.telemetry.events import Event
from drumline.telemetry.trackers import (
    LIBRARIES,
    Sink,
    Tracker,
    _mlflow_name,
    check_installed,
    metrics,
    open_sinks,
)

STEP: dict[str, Any] = {
    "t": 0.0, "kind": "step", "lr": 1e-4, "grad_norm": None, "tokens": 100, "mfu": None, "memory_bytes": [1, 2], "epoch": 0.5,
}  # fmt: skip
EVAL: dict[str, Any] = {
    "t": 0.0,
    "kind": "eval",
    "step": 2,
    "loss": 1.5,
    "exact_match": 0.5,
    "samples": 8,
    "seconds": 1.0,
}
SAMPLES: dict[str, Any] = {
    "t": 0.0, "kind": "samples", "step": 2, "when": "after", "seconds": 0.1,
    "samples": [{"set": "", "prompt": "Who?", "text": "Nobody.", "answer": None, "ended": True, "tokens": 3}],
}  # fmt: skip
ABOUT = TrackerConfig(project="my-project", name="first", group="all", tags=("a", "b"), notes="why")
CONFIG = {"run": {"seed": 1}, "model": {"config": {"api_key": "secret"}}}


def step(number: int, loss: float | None = 1.0) -> dict[str, Any]:
    return {**STEP, "step": number, "loss": loss}


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_figures_of_an_event() -> None:
    assert metrics(Event.of(step(3))) == {
        "loss": 1.0, "lr": 1e-4, "tokens": 100.0, "epoch": 0.5, "memory_bytes/rank_0": 1.0, "memory_bytes/rank_1": 2.0,
    }  # fmt: skip
    many = metrics(Event.of({**step(3), "memory_bytes": list(range(5, 69))}))
    assert (many["memory_bytes/least"], many["memory_bytes/most"]) == (5, 68) and len(many) == 6
    assert "path" not in metrics(
        Event.of({"kind": "save", "step": 1, "path": "p", "bytes": 3, "error": None})
    )


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    (sink,) = open_sinks(["tensorboard"], tmp_path, CONFIG, "r")
    for event in (
        step(1, 5.0),
        step(2, None),
        EVAL,
        {"t": 0.0, "kind": "preempt", "step": 2, "signal": "SIGTERM"},
    ):
        sink.event(Event.of(event))
    sink.close()
    read = tensorboard_scalars(tmp_path / "tensorboard")
    assert read["train/loss"] == [(1, 5.0)] and read["eval/exact_match"] == [(2, 0.5)]
    assert read["train/tokens"] == [(1, 100.0), (2, 100.0)] and read[
        "train/memory_bytes/rank_1"
    ] == [(1, 2.0), (2, 2.0)]
    assert not any("signal" in tag or tag.endswith("/t") for tag in read)


def test_steps_done_again_are_shown_once(tmp_path: Path) -> None:
    for events in (
        [step(s, 10.0 - s) for s in range(1, 6)],
        [{"kind": "restore", "step": 3}, step(4, 6.5), step(5, 5.5)],
    ):
        (sink,) = open_sinks(["tensorboard"], tmp_path, CONFIG, "r")
        for event in events:
            sink.event(Event.of(event))
        sink.close()
    assert tensorboard_scalars(tmp_path / "tensorboard")["train/loss"] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (4, 6.5),
        (5, 5.5),
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab"])
def test_a_library_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it were not installed, where it is.
    monkeypatch.setitem(sys.modules, LIBRARIES[name][0], None)
    for check in (lambda: check_installed([name]), lambda: open_sinks([name], tmp_path, {}, "r")):
        with pytest.raises(EnvironmentFault) as error:
            check()
        assert (
            f"run.report_to: {name} is not installed — {LIBRARIES[name][1]}" in error.value.line()
        )
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_is_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    written: list[int] = []

    def write(group: str, numbers: dict[str, float], step: int) -> None:
        written.append(step)
        if step == 2:
            raise RuntimeError("no route to host\nwith key 0123456789")

    def close() -> None:
        raise AssertionError("a broken tracker is left alone")

    sink = Sink("wandb", Tracker("x", write, close))
    for number in range(1, 5):
        sink.event(Event.of(step(number)))
    sink.close()
    assert written == [1, 2]
    (line,) = capsys.readouterr().err.splitlines()
    raised_at = write.__code__.co_firstlineno + 3
    what = f"RuntimeError in test_sinks.py:{raised_at}: no route to host with key [redacted]"
    assert f"wandb gets no more metrics, the run goes on: {what}" in line


def test_a_tracker_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file where a folder is wanted")
    with pytest.raises(
        EnvironmentFault,
        match=r"run.report_to: tensorboard does not start: .* — see whether RUN/tensorboard",
    ):
        open_sinks(["tensorboard"], tmp_path, {}, "r")
    # A run that has begun is worth more than its tracker.
    (tmp_path / "trackers.json").write_text(json.dumps({"tensorboard": "x"}))
    (sink,) = open_sinks(["tensorboard"], tmp_path, {}, "r")
    sink.event(Event.of(step(1)))
    sink.close()
    assert capsys.readouterr().err.count("tensorboard gets no more metrics") == 1


def test_tensorboard_shows_samples_and_what_the_run_is_for(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], tmp_path, CONFIG, "r", options=ABOUT)
    sink.event(Event.of(SAMPLES))
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    texts = {
        tag: read.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("run", "samples/0")
    }
    assert (
        texts["samples/0"] == "    Who?\n    \n    Nobody."
        and '"my-project"' in texts["run"]
        and '"why"' in texts["run"]
    )


# Those below run where the extra is installed; W&B and SwanLab offline, MLflow and trackio on local files.


def two_attempts(name: str, folder: Path) -> str:
    """A run of three steps that is started again after the second; returns the tracker's id of it."""
    ids = []
    first = [step(1, 5.0), step(2, 4.0), {**EVAL, "step": 1}, SAMPLES]
    for events in (first, [{"kind": "restore", "step": 2}, step(3, 3.0)]):
        (sink,) = open_sinks([name], folder, CONFIG, "my run", options=ABOUT)
        for event in events:
            sink.event(Event.of(event))
        assert sink._tracker is not None, "a figure could not be written"
        sink.close()
        ids.append(json.loads((folder / "trackers.json").read_text())[name])
    assert ids[0] == ids[1], "both attempts belong to one run"
    return str(ids[0])


def tells_a_secret(folder: Path) -> bool:
    """Whether a file there holds the API key or a secret of the config."""
    written = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return any(b"secret" in each or b"0123456789" * 4 in each for each in written)


@pytest.mark.full
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    identity = two_attempts("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2 and b"train/loss" in files[0].read_bytes()
    assert all(word in files[0].read_bytes() for word in (b"my-project", b"first", b"all", b"why"))
    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [[2, "", "Who?", "Nobody.", None]]
    assert not tells_a_secret(tmp_path)


@pytest.mark.full
def test_swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders with one id, which `swanlab sync` puts together: that needs its server, and is not shown here."""
    pytest.importorskip("swanlab", reason="pip install swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_API_KEY", "0123456789" * 4)
    identity = two_attempts("swanlab", tmp_path)
    files = sorted((tmp_path / "swanlab").glob(f"run-*-{identity}/run-{identity}.swanlab"))
    assert (
        len(files) == 2
        and b"train/loss" in files[0].read_bytes()
        and b"my-project" in files[0].read_bytes()
    )
    assert [text.read_text() for text in (tmp_path / "swanlab").rglob("media/text/*.txt")] == [
        "Nobody."
    ]
    assert not tells_a_secret(tmp_path)


@pytest.mark.full
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny sqlalchemy alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    identity = two_attempts("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(identity, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 5.0), (2, 4.0), (3, 3.0)]
    found = client.get_run(identity)
    assert (
        client.get_experiment(found.info.experiment_id).name == "my-project"
        and found.info.run_name == "first"
    )
    assert (
        found.data.tags["group"],
        found.data.tags["tags"],
        found.data.tags["mlflow.note.content"],
    ) == ("all", "a, b", "why")
    assert [each.path for each in client.list_artifacts(identity, "samples")] == [
        "samples/step-00000002.json"
    ]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train/loss", "train/loss"),
        ("rollout/reward/*", "rollout/reward/_"),
        ("held out/tasks/pass@1 (x)", "held out/tasks/pass_1 _x_"),
        ("a/../b", "a/_/b"),
    ],
)
def test_mlflow_refuses_none_of_our_names(name: str, shown: str) -> None:
    assert _mlflow_name(name) == shown


# trackio's rules for names.
TRACKIO = """from types import SimpleNamespace
runs = {}
def init(project, name, config, group, resume):
    global now
    assert resume == "never" or name in runs
    now = f"made-up-{len(runs)}" if resume == "never" and name in runs else name
    runs.setdefault(now, [])
    return SimpleNamespace(name=now)
def log(numbers, step): runs[now].append(step)
def finish(): pass
"""


def test_a_run_keeps_the_name_that_trackio_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    for name in ("one", "other", "other"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (sink,) = open_sinks(["trackio"], folder, CONFIG, "run")
        sink.event(Event.of(step(1)))
    runs = sys.modules.pop("trackio").runs
    assert json.loads((tmp_path / "other/trackers.json").read_text()) == {"trackio": "made-up-1"}
    assert runs == {"run": [1], "made-up-1": [1, 1]}


@pytest.mark.full
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio", reason="pip install trackio")
    assert two_attempts("trackio", tmp_path) == "first"
    (store,) = (tmp_path / "store").glob("*.db")
    written = store.read_bytes()
    (tmp_path / "other").mkdir()
    assert two_attempts("trackio", tmp_path / "other") != "first", "the name is taken"
    assert "my" in store.name and all(
        word in written for word in (b"train/loss", b"Nobody.", b"all", b"why")
    )
