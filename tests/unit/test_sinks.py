"""Trackers: what they are given, what happens without their library, and when they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
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
from tests.harness import read_json

Values = dict[str, Any]

STEP: Values = {
    "t": 0.0,
    "kind": "step",
    "lr": 1e-4,
    "grad_norm": None,
    "tokens": 100,
    "mfu": None,
    "memory_bytes": [1, 2],
    "epoch": 0.5,
}
EVAL: Values = {
    "t": 0.0,
    "kind": "eval",
    "step": 2,
    "loss": 1.5,
    "exact_match": 0.5,
    "samples": 8,
    "seconds": 1.0,
}
SAMPLE = {
    "set": "",
    "prompt": "Who?",
    "text": "Nobody.",
    "answer": None,
    "ended": True,
    "tokens": 3,
}
SAMPLES: Values = {
    "t": 0.0,
    "kind": "samples",
    "step": 2,
    "when": "after",
    "seconds": 0.1,
    "samples": [SAMPLE],
}
ABOUT = TrackerConfig(project="my-project", name="first", group="all", tags=("a", "b"), notes="why")
CONFIG = {"run": {"seed": 1}, "model": {"config": {"api_key": "secret"}}}


def step(number: int, loss: float | None = 1.0) -> Values:
    return {**STEP, "step": number, "loss": loss}


def open_sink(name: str, folder: Path, **options: Any) -> Sink:
    (sink,) = open_sinks([name], folder, CONFIG, "my run", **options)
    return sink


def send(sink: Sink, events: Iterable[Values]) -> None:
    for event in events:
        sink.event(Event.from_values(event))


def show(name: str, folder: Path, *events: Values, **options: Any) -> None:
    """Send the events of one attempt to a tracker."""
    sink = open_sink(name, folder, **options)
    send(sink, events)
    sink.close()


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return read


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = read_tensorboard(folder)
    scalars = {}
    for tag in read.Tags()["scalars"]:
        scalars[tag] = [(point.step, point.value) for point in read.Scalars(tag)]

    return scalars


def test_figures_of_an_event() -> None:
    assert metrics(Event.from_values(step(3))) == {
        "loss": 1.0,
        "lr": 1e-4,
        "tokens": 100.0,
        "epoch": 0.5,
        "memory_bytes/rank_0": 1.0,
        "memory_bytes/rank_1": 2.0,
    }
    many = metrics(Event.from_values({**step(3), "memory_bytes": list(range(5, 69))}))
    assert many["memory_bytes/least"] == 5
    assert many["memory_bytes/most"] == 68
    assert len(many) == 6

    save = {"kind": "save", "step": 1, "path": "p", "bytes": 3, "error": None}
    assert "path" not in metrics(Event.from_values(save))


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    preempt = {"t": 0.0, "kind": "preempt", "step": 2, "signal": "SIGTERM"}
    show("tensorboard", tmp_path, step(1, 5.0), step(2, None), EVAL, preempt)
    read = tensorboard_scalars(tmp_path)
    assert read["train/loss"] == [(1, 5.0)]
    assert read["eval/exact_match"] == [(2, 0.5)]
    assert read["train/tokens"] == [(1, 100.0), (2, 100.0)]
    assert read["train/memory_bytes/rank_1"] == [(1, 2.0), (2, 2.0)]

    for tag in read:
        assert "signal" not in tag
        assert not tag.endswith("/t")


def test_steps_done_again_are_shown_once(tmp_path: Path) -> None:
    show("tensorboard", tmp_path, *[step(number, 10.0 - number) for number in range(1, 6)])
    again = {"kind": "restore", "step": 3}
    show("tensorboard", tmp_path, again, step(4, 6.5), step(5, 5.5))
    losses = tensorboard_scalars(tmp_path)["train/loss"]
    assert losses == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.5), (5, 5.5)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab"])
def test_a_library_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = LIBRARIES[name]
    # As if it were not installed, where it is.
    monkeypatch.setitem(sys.modules, library.module, None)
    message = f"run.report_to: {name} is not installed — {library.install}"
    with pytest.raises(EnvironmentFault) as error:
        check_installed([name])

    assert message in error.value.line()

    with pytest.raises(EnvironmentFault) as error:
        open_sinks([name], tmp_path, {}, "r")

    assert message in error.value.line()
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
    send(sink, map(step, range(1, 5)))
    sink.close()
    assert written == [1, 2]

    (line,) = capsys.readouterr().err.splitlines()
    raised_at = write.__code__.co_firstlineno + 3
    what = f"RuntimeError in test_sinks.py:{raised_at}: no route to host with key [redacted]"
    assert f"wandb gets no more metrics, the run goes on: {what}" in line


def test_a_tracker_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file where a folder is wanted")
    message = r"run.report_to: tensorboard does not start: .* — see whether RUN/tensorboard"
    with pytest.raises(EnvironmentFault, match=message):
        open_sink("tensorboard", tmp_path)

    # A run that has begun is worth more than its tracker.
    (tmp_path / "trackers.json").write_text(json.dumps({"tensorboard": "x"}))
    show("tensorboard", tmp_path, step(1))
    assert capsys.readouterr().err.count("tensorboard gets no more metrics") == 1


def test_tensorboard_shows_samples_and_what_the_run_is_for(tmp_path: Path) -> None:
    show("tensorboard", tmp_path, SAMPLES, options=ABOUT)
    read = read_tensorboard(tmp_path)

    def text_of(tag: str) -> str:
        (text,) = read.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val
        return text.decode()

    assert text_of("samples/0") == "    Who?\n    \n    Nobody."
    assert '"my-project"' in text_of("run")
    assert '"why"' in text_of("run")


# Those below run where the extra is installed; W&B and SwanLab offline, MLflow and trackio on local
# files.


KEY = "0123456789" * 4


def two_attempts(name: str, folder: Path) -> str:
    """A run of three steps that is started again after the second; returns the tracker's id of
    it."""
    ids = []
    first = [step(1, 5.0), step(2, 4.0), {**EVAL, "step": 1}, SAMPLES]
    again = [{"kind": "restore", "step": 2}, step(3, 3.0)]
    for events in (first, again):
        sink = open_sink(name, folder, options=ABOUT)
        send(sink, events)
        assert sink._tracker is not None, "a figure could not be written"

        sink.close()
        ids.append(read_json(folder / "trackers.json")[name])

    assert ids[0] == ids[1], "both attempts belong to one run"
    return str(ids[0])


def assert_no_secret(folder: Path) -> None:
    """No file there holds the API key or a secret of the config."""
    for file in folder.rglob("*"):
        if file.is_file():
            written = file.read_bytes()
            assert b"secret" not in written, file
            assert KEY.encode() not in written, file


def assert_written(file: Path, *words: str) -> None:
    written = file.read_bytes()
    for word in words:
        assert word.encode() in written, word


@pytest.mark.full
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    identity = two_attempts("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2
    assert_written(files[0], "train/loss", "my-project", "first", "all", "why")

    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    assert read_json(table)["data"] == [[2, "", "Who?", "Nobody.", None]]
    assert_no_secret(tmp_path)


@pytest.mark.full
def test_swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders with one id, which `swanlab sync` puts together: that needs its server, and is
    not shown here."""
    pytest.importorskip("swanlab", reason="pip install swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)
    identity = two_attempts("swanlab", tmp_path)
    files = sorted((tmp_path / "swanlab").glob(f"run-*-{identity}/run-{identity}.swanlab"))
    assert len(files) == 2
    assert_written(files[0], "train/loss", "my-project")

    (text,) = (tmp_path / "swanlab").rglob("media/text/*.txt")
    assert text.read_text() == "Nobody."
    assert_no_secret(tmp_path)


@pytest.mark.full
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny sqlalchemy alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    identity = two_attempts("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(identity, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 5.0), (2, 4.0), (3, 3.0)]

    found = client.get_run(identity)
    assert client.get_experiment(found.info.experiment_id).name == "my-project"
    assert found.info.run_name == "first"

    tags = found.data.tags
    assert tags["group"] == "all"
    assert tags["tags"] == "a, b"
    assert tags["mlflow.note.content"] == "why"

    (samples,) = client.list_artifacts(identity, "samples")
    assert samples.path == "samples/step-00000002.json"


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
        send(sink, [step(1)])

    runs = sys.modules.pop("trackio").runs
    assert read_json(tmp_path / "other/trackers.json") == {"trackio": "made-up-1"}
    assert runs == {"run": [1], "made-up-1": [1, 1]}


@pytest.mark.full
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio", reason="pip install trackio")
    assert two_attempts("trackio", tmp_path) == "first"

    (store,) = (tmp_path / "store").glob("*.db")
    assert "my" in store.name
    assert_written(store, "train/loss", "Nobody.", "all", "why")

    (tmp_path / "other").mkdir()
    assert two_attempts("trackio", tmp_path / "other") != "first", "the name is taken"
