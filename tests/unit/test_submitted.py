"""Runs whose folder lies elsewhere: any launcher's are found by their note, shown, followed and stopped."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drumline.config.launcher import LauncherSpec, SubmittedRun
from drumline.errors import UserError
from drumline.launch import runs
from drumline.launch.submitted import NOTE, note_run
from drumline.telemetry.events import Event


class BatchRun(SubmittedRun):
    """A run of a batch system that writes down what it is asked."""

    requests: ClassVar[list[str]] = []

    def __init__(self, queue: str, number: int) -> None:
        self.queue = queue
        self.number = number

    @property
    def where(self) -> str:
        return f"job {self.number} in {self.queue}"

    def values(self) -> dict[str, Any]:
        return {"number": self.number}

    def state(self) -> str:
        return "running"

    def print_logs(self, rank: int | None) -> None:
        print(f"{self.where}: log of {rank}")

    def follow(self) -> int:
        self.requests.append(f"follow {self.number}")
        return 75

    def stop(self) -> None:
        self.requests.append(f"stop {self.number}")


class BatchLauncher(LauncherSpec):
    """A launcher of a stranger's package."""

    queue: str = "short"

    def submitted_run(self, values: Any) -> BatchRun:
        return BatchRun(self.queue, int(values["number"]))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launcher offered by an installed package, as kind `batch_of_tests`."""
    point = EntryPoint("batch_of_tests", f"{__name__}:BatchLauncher", "drumline.launchers")
    points = {point.name: point}
    monkeypatch.setattr("drumline.config.registry.entry_points", lambda group: points)
    monkeypatch.setattr(BatchRun, "requests", [])


def submit(folder: Path) -> Path:
    """Note a run below a folder, and return its folder."""
    launch = BatchLauncher(kind="batch_of_tests", queue="long")
    note_run(folder / "a", launch, BatchRun("long", 7))
    return folder / "a"


def follow(folder: Path) -> int:
    """Follow a run, and return its exit code."""

    def ignore(event: Event) -> None:
        """The launcher shows the run itself."""

    return runs.follow(folder, ignore)


def test_commands_ask_the_launcher_of_the_note(
    installed: None, tmp_path: Path, capsys: Any
) -> None:
    folder = submit(tmp_path)
    shown = capsys.readouterr().err
    assert shown.startswith(f"submitted job 7 in long: drumline follow {folder} shows it")
    (state,) = runs.states(tmp_path)
    assert state.run_dir == folder
    assert state.state == "running"
    assert state.where == "job 7 in long"
    assert [each.where for each in runs.states(folder)] == ["job 7 in long"]
    runs.print_logs(folder, 3)
    assert capsys.readouterr().out == "job 7 in long: log of 3\n"
    assert follow(folder) == 75
    runs.stop(folder)
    assert BatchRun.requests == ["follow 7", "stop 7"]


def test_a_note_that_cannot_be_written_is_only_reported(
    installed: None, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a").write_text("no folder")
    folder = submit(tmp_path)
    assert f"it cannot be noted in {folder}: File exists" in capsys.readouterr().err


def test_a_note_is_for_its_owner_alone(installed: None, tmp_path: Path) -> None:
    note = submit(tmp_path) / NOTE
    assert note.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({}, "is no note of a run: KeyError: 'launch'"),
        ({"launch": {"kind": "batch_of_tests"}}, "is no note of a run: KeyError: 'run'"),
        (
            {"launch": {"kind": "batch_of_tests"}, "run": {}},
            "is no note of a run: KeyError: 'number'",
        ),
        ({"launch": {"kind": "batch_of_tests", "x": 1}, "run": {}}, "is no note of a run: "),
        ({"launch": {"kind": "local"}, "run": {}}, "launcher local notes no runs"),
        ({"launch": {"kind": "mine.py:Name"}, "run": {}}, "names code, mine.py:Name"),
        (
            {"launch": {"kind": "kubernetes", "image": "a"}, "run": {}},
            "launch.kind: kubernetes needs pip install drumline-kubernetes",
        ),
    ],
)
def test_a_note_without_its_launcher_is_one_line(
    installed: None, tmp_path: Path, note: dict[str, Any], message: str
) -> None:
    folder = submit(tmp_path)
    (folder / NOTE).write_text(json.dumps(note))
    with pytest.raises(UserError) as error:
        follow(folder)
    assert message in error.value.line()
    (state,) = runs.states(tmp_path)
    assert state.state == "unknown"
    assert message in state.where
