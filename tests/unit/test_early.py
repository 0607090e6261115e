"""Ranks that are started while the launcher plans: told later what they are, used if the plan is as foreseen, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from drumline.core.config import Config
from drumline.core.load import Request, load
from drumline.core.process import Early, tied
from drumline.errors import PlanError
from drumline.launchers.early import EarlyRanks
from drumline.train.command import launch_ranks
from tests.harness import write_config

SCRIPT = """
import gc, json, os, sys
print(json.dumps([sys.argv[1:], os.environ["RANK"], "BEFORE" in os.environ, "colorsys" in sys.modules, gc.isenabled()]))
print("an error", file=sys.stderr)
"""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """EarlyRanks that import next to nothing and then are a script."""
    monkeypatch.setattr("drumline.launchers.early.Early", lambda imported, module, *more, env: Early("colorsys", module, *more, env=env))
    monkeypatch.setenv("BEFORE", "1")
    (tmp_path / "rank.py").write_text(SCRIPT)
    config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}, "launch": {"nproc": 2}, "run": {"device": "cpu"}})
    monkeypatch.setattr("drumline.launchers.early.usable_cores", lambda: 4)
    with EarlyRanks(config, tmp_path / "run" / "plan.json") as made:
        yield made


def take(ranks: EarlyRanks, folder: Path, env: dict[str, str]) -> Any:
    """As torch's agent asks; `usual` comes back where no early rank will do."""
    files: list[IO[str]] = [(folder / name).open("w") for name in ("out", "err")]
    with files[0] as out, files[1] as err:
        command = [sys.executable, *tied(str(folder / "rank.py"), "plan.json", "--resume", "newest")]
        return ranks.take(lambda **options: "usual", command, env=env, stdout=out, stderr=err, start_new_session=True)


def test_goes_on_as_it_is_told(ranks: EarlyRanks, tmp_path: Path) -> None:
    env = dict(ranks.env)
    del ranks.env["BEFORE"], env["BEFORE"]
    first, waiting = ranks.waiting
    assert psutil.Process(first.pid).cmdline()[-2:] == ["drumline.train.entry", str(tmp_path / "run" / "plan.json")]
    assert take(ranks, tmp_path, {**env, "RANK": "7"}) is first and first.wait(30) == 0
    assert json.loads((tmp_path / "out").read_text()) == [["plan.json", "--resume", "newest"], "7", False, True, True]
    assert (tmp_path / "err").read_text() == "an error\n"
    ranks.end()
    assert waiting.returncode == -signal.SIGKILL and not ranks.waiting


def test_a_rank_whose_threads_are_others_or_that_has_died_is_started_as_usual(ranks: EarlyRanks, tmp_path: Path) -> None:
    assert ranks.env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "2")
    assert take(ranks, tmp_path, {**ranks.env, "OMP_NUM_THREADS": "3"}) == "usual" and len(ranks.waiting) == 2
    for early in ranks.waiting:
        early.kill()
        os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    assert take(ranks, tmp_path, ranks.env) == "usual" and not ranks.waiting


def test_ends_if_it_is_told_nothing(tmp_path: Path) -> None:
    early = Early("colorsys", "drumline.train.entry", env=os.environ)
    early.communicate(timeout=30)
    assert early.returncode == 0


def test_they_are_there_before_the_plan_and_gone_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[psutil.Process] = []

    def refuse(request: Request, **options: Any) -> None:
        deadline = time.monotonic() + 30  # a process that was just started has no command line for a moment
        while not any(str(tmp_path / "run" / "plan.json") in child.cmdline() for child in seen):
            assert time.monotonic() < deadline
            seen[:] = psutil.Process().children()
        raise PlanError("no such plan", where="strategy", fix="take another")

    monkeypatch.setattr("drumline.train.setup.make_plan", refuse)
    config = write_config(tmp_path, tmp_path / "model")
    with pytest.raises(PlanError):
        launch_ranks(Request(load(config, [])), display=False)
    assert seen and not any(child.is_running() and str(tmp_path) in " ".join(child.cmdline()) for child in seen)
    assert not (tmp_path / "run").exists()


def test_with_fewer_cores_than_ranks_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("drumline.launchers.early.usable_cores", lambda: 1)
    config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}, "launch": {"nproc": 2}})
    with EarlyRanks(config, tmp_path / "plan.json") as ranks:
        assert not ranks.waiting
