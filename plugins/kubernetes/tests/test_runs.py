"""`drumline ps`, `logs`, `follow` and `stop` of a run that was submitted to a cluster: what is requested of the API, over real HTTP."""

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
from drumline_kubernetes import follow
from plugins.kubernetes.tests.api import RUNNING, Api, Look, pod, serving
from plugins.kubernetes.tests.test_submit import DONE, FAILED, on_request, run

__all__ = ["run"]  # the fixture


@pytest.fixture
def later(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that was submitted and left alone, by its folder here, and a server that knows it and shows other looks."""
    _, before = run(changes={"detach": True})
    (folder,) = Path("runs").iterdir()

    @contextmanager
    def shown(*looks: Look, **options: Any) -> Iterator[tuple[Path, Api]]:
        with serving(tmp_path, list(looks), **options) as (api, kubeconfig):
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            api.objects |= before.objects
            yield folder, api

    return shown


def test_its_state_is_the_cluster_s(
    later: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits, works = (
        Look(pods=[pod("a-0", 0, "Pending")]),
        Look(pods=[pod("a-0", 0, "Running", state=RUNNING)]),
    )
    for look, state in (
        (waits, "queued"),
        (works, "running"),
        (Look(DONE), "finished"),
        (Look(FAILED), "failed"),
    ):
        with later(look):
            (found,) = runs.states(Path("runs"))
            assert (
                found.state == state
                and found.where.startswith("TrainJob run-tiny-")
                and found.where.endswith("in namespace ml")
            )
    with later() as (_, api):
        api.objects.clear()
        assert [each.state for each in runs.states(Path("runs"))] == ["gone"]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert [each.state for each in runs.states(Path("runs"))] == ["unknown"]


def test_logs_of_its_pods(later: Any, capsys: Any) -> None:
    both = Look(
        pods=[pod("a-1", 1, "Running", state=RUNNING), pod("a-0", 0, "Running", state=RUNNING)]
    )
    with later(both, log="step 1\n") as (folder, api):
        capsys.readouterr()
        runs.print_logs(folder, None)
        out, err = capsys.readouterr()
        assert out == "pod a-0 | step 1\npod a-1 | step 1\n" and "experimental" in err
        runs.print_logs(folder, 9)  # eight ranks a pod
        assert capsys.readouterr().out == "pod a-1 | step 1\n"
        assert [query["follow"] for _, path, query in api.requests if path.endswith("/log")] == [
            ["False"]
        ] * 3
        with pytest.raises(UserError, match="has no pod of rank 16 now"):
            runs.print_logs(folder, 16)


def test_followed_from_elsewhere(later: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Look(pods=[pod("a-0", 0, "Running", state=RUNNING)])
    with later(running, Look(DONE), log="step 1\n") as (folder, _):
        assert runs.follow(folder, lambda event: None) == 0
        assert "step 1" in capsys.readouterr().out
    with later(running) as (folder, api):
        on_request(monkeypatch, "/pods", lambda api: os.kill(os.getpid(), signal.SIGINT))
        assert runs.follow(folder, lambda event: None) == 130
        assert not api.deleted.is_set() and "it goes on" in capsys.readouterr().err


@pytest.mark.claim("a run is followed and stopped by another process, in Kubernetes too")
def test_stopped_from_elsewhere(later: Any, capsys: Any) -> None:
    running = Look(pods=[pod("a-0", 0, "Running", state=RUNNING)])
    with later(running, leaving=[running]) as (folder, api):
        runs.stop(folder)
        assert [
            path.rpartition("/")[2] for method, path, _ in api.requests if method == "DELETE"
        ] == [folder.name]
    assert "go on with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_ends_neither_a_display_nor_a_stop(
    status: int, later: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.05)
    running = Look(pods=[pod("a-0", 0, "Running", state=RUNNING)])

    def refused_once(end: str) -> None:
        answers = [{end: (status, "apiserver is shutting down")}, {}]
        on_request(
            monkeypatch,
            end,
            lambda api: setattr(api, "refuse", answers.pop(0) if len(answers) > 1 else answers[0]),
        )

    with later(running, Look(DONE)) as (folder, _):
        refused_once("/pods")
        assert runs.follow(folder, lambda event: None) == 0
        shown = capsys.readouterr().err
        assert (
            f"the API server does not answer: {status} " in shown
            and "the run goes on without this display" in shown
        )
    with later(running, running, Look(DONE), leaving=[running]) as (folder, api):
        refused_once(folder.name)
        runs.stop(folder)
        assert [method for method, _, _ in api.requests].count(
            "DELETE"
        ) == 2 and api.deleted.is_set()
        assert capsys.readouterr().err.count("asked to stop") == 1
