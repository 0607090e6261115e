"""`drumline ps`, `logs`, `follow` and `stop` of a run that was submitted to a cluster, over real HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import UserError
from drumline.launch import runs
from drumline.launch.submitted import NOTE
from drumline.telemetry.events import Event
from plugins.kubernetes.tests.api import Api, Look, pod, running, serving
from plugins.kubernetes.tests.submitting import DONE, FAILED, Train, on_request

WORKING = Look(pods=[running("a-0", 0)])


class Later:
    """A run that was submitted and left alone, by its folder here."""

    def __init__(self, run: Train) -> None:
        _, api = run(changes={"detach": True})
        self.run = run
        self.objects = api.objects
        (self.folder,) = Path("runs").iterdir()

    @contextmanager
    def shown(self, *looks: Look, **options: Any) -> Iterator[Api]:
        """Yield a server that knows the run and shows other looks. `options`: those of `serving`."""
        with serving(self.run.folder, list(looks), **options) as (api, kubeconfig):
            self.run.monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            api.objects.update(self.objects)
            yield api


@pytest.fixture
def later(run: Train) -> Later:
    """Return a run that was submitted and left alone."""
    return Later(run)


def state() -> runs.State:
    """Return the state of the only run."""
    (found,) = runs.states(Path("runs"))
    return found


def follow(folder: Path) -> int:
    """Follow a run, and return its exit code."""

    def ignore(event: Event) -> None:
        """A cluster has no events for this side."""

    return runs.follow(folder, ignore)


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (Look(pods=[pod("a-0", 0, "Pending")]), "queued"),
        (WORKING, "running"),
        (Look(DONE), "finished"),
        (Look(FAILED), "failed"),
    ],
    ids=["queued", "running", "finished", "failed"],
)
def test_its_state_is_the_cluster_s(later: Later, look: Look, name: str) -> None:
    with later.shown(look):
        found = state()
    assert found.state == name
    assert found.where.startswith("TrainJob run-tiny-")
    assert found.where.endswith("in namespace ml")


def test_a_run_that_the_cluster_has_not_is_gone(later: Later) -> None:
    with later.shown() as api:
        api.objects.clear()
        assert state().state == "gone"


def test_without_a_cluster_its_state_is_unknown(
    later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert state().state == "unknown"


def test_a_note_of_no_workload_is_refused(later: Later) -> None:
    note = later.folder / NOTE
    text = note.read_text()
    note.write_text(text.replace('"TrainJob"', '"Pie"'))
    with pytest.raises(UserError, match="there is no workload 'Pie'"):
        follow(later.folder)


def test_logs_of_its_pods(later: Later, capsys: Any) -> None:
    both = Look(pods=[running("a-1", 1), running("a-0", 0)])
    with later.shown(both, log="step 1\n") as api:
        capsys.readouterr()
        runs.print_logs(later.folder, None)
        shown = capsys.readouterr()
        assert shown.out == "pod a-0 | step 1\npod a-1 | step 1\n"
        assert "experimental" in shown.err
        runs.print_logs(later.folder, 9)
        assert capsys.readouterr().out == "pod a-1 | step 1\n", "a pod has eight ranks"
        with pytest.raises(UserError, match="has no pod of rank 16 now"):
            runs.print_logs(later.folder, 16)
    logs = [query for _, path, query in api.requests if path.endswith("/log")]
    assert len(logs) == 3
    for query in logs:
        assert query["follow"] == ["False"]


def test_followed_from_elsewhere(later: Later, capsys: Any) -> None:
    with later.shown(WORKING, Look(DONE), log="step 1\n"):
        assert follow(later.folder) == 0
    assert "step 1" in capsys.readouterr().out


def test_ctrl_c_leaves_it_alone(later: Later, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(api: Api) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with later.shown(WORKING) as api:
        on_request(monkeypatch, "/pods", interrupt)
        assert follow(later.folder) == 130
        assert not api.deleted.is_set()
    assert "it goes on" in capsys.readouterr().err


@pytest.mark.claim("a run is followed and stopped by another process, in Kubernetes too")
def test_stopped_from_elsewhere(later: Later, capsys: Any) -> None:
    with later.shown(WORKING, leaving=[WORKING]) as api:
        runs.stop(later.folder)
    (path,) = api.paths("DELETE")
    assert path.endswith(f"/{later.folder.name}")
    assert "go on with --resume" in capsys.readouterr().err


def refuse_once(monkeypatch: pytest.MonkeyPatch, end: str, status: int) -> None:
    """Have the server refuse the first request of a path with this end, and no other."""
    refused = []

    def refuse(api: Api) -> None:
        api.refuse = {}
        if not refused:
            refused.append(end)
            api.refuse = {end: (status, "apiserver is shutting down")}

    on_request(monkeypatch, end, refuse)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_ends_no_display(
    status: int, later: Later, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_once(monkeypatch, "/pods", status)
    with later.shown(WORKING, Look(DONE)):
        assert follow(later.folder) == 0
    shown = capsys.readouterr().err
    assert f"the API server does not answer: {status} " in shown
    assert "the run goes on without this display" in shown


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_ends_no_stop(
    status: int, later: Later, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_once(monkeypatch, later.folder.name, status)
    with later.shown(WORKING, WORKING, Look(DONE), leaving=[WORKING]) as api:
        runs.stop(later.folder)
    assert api.changes() == ["DELETE", "DELETE"]
    assert api.deleted.is_set()
    assert capsys.readouterr().err.count("asked to stop") == 1
