"""A disk that is full when a run ends or is asked to stop: what was trained waits for room, goes elsewhere, or is told of; never redone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.load import check, newest, read_state
from drumline.checkpoint.save import Checkpointer
from drumline.config.resume import Resume
from drumline.errors import EnvironmentFault, NotSaved, Preempted
from drumline.telemetry.events import read
from drumline.train.loop import Loop
from drumline.train.setup import Request, _check_fallback_dir, claim_run_dir
from drumline.train.state import fallback_folder
from tests.faults.disks import fill, small_disk
from tests.harness import ENV, write_config
from tests.tiny import tiny_model_dir
from tests.unit.test_loop import STEPS, loop, of, plan

NO_SPACE = re.compile(r"no space: [\d,]+ bytes needed, [\d,]+ free in \S+/checkpoints")
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2) as folder:
        yield folder


def after(built: Loop, step: int, act: Callable[[], Any]) -> None:
    """Call `act` once the loop has done `step`."""
    inner = built._train_step

    def then(*arguments: Any) -> None:
        inner(*arguments)
        if built.state.step == step:
            act()

    built._train_step = then  # type: ignore[method-assign]


def saved(said: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    return [(event["step"], event["error"] is None) for event in of(said, "save")]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_periodic_save_that_found_no_room_is_made_up_for(disk: Path, asynchronous: bool) -> None:
    built, said = loop(disk, held_out=False, checkpoint={"every": 3, "wait_seconds": 5})
    built.saver.checkpointer = Checkpointer(disk / "checkpoints", 2, False, "min", asynchronous)
    after(built, 3, lambda: fill(disk))
    after(built, 5, lambda: (disk / "ballast").unlink())
    built.run()
    # One line for the failure, none for each look; the checkpoint comes as soon as there is room again.
    assert saved(said) == [(3, False), (5, True), (6, True)]
    assert NO_SPACE.search(of(said, "save")[0]["error"])


def fill_for_a_while(disk: Path) -> None:
    ballast = fill(disk)
    threading.Timer(1.5, ballast.unlink).start()


@pytest.mark.claim("a disk that is full at the end loses nothing")
def test_the_last_save_waits_for_room(disk: Path) -> None:
    built, said = loop(disk, held_out=False, checkpoint={"wait_seconds": 60})
    after(built, STEPS, lambda: fill_for_a_while(disk))
    built.run()
    assert saved(said) == [(STEPS, False), (STEPS, True)]
    found = newest(disk / "checkpoints", verify=True)
    assert found.path and read_state(found.path)["trainer"]["step"] == STEPS


def test_a_save_on_stop_waits_too(disk: Path) -> None:
    built, said = loop(disk, held_out=False, checkpoint={"wait_seconds": 60})

    def ask() -> None:
        fill_for_a_while(disk)
        built.stop_flag.requested = signal.SIGTERM  # type: ignore[misc]

    after(built, 4, ask)
    with pytest.raises(Preempted, match="saved at step 5"):  # the step under way is finished
        built.run()
    assert saved(said) == [(5, False), (5, True)]


def test_patience_has_an_end_also_when_asked_to_stop(disk: Path) -> None:
    built, _ = loop(disk, held_out=False, checkpoint={"wait_seconds": 0})
    after(built, STEPS, lambda: fill(disk))
    with pytest.raises(NotSaved, match=NO_SPACE) as told:
        built.run()
    assert (told.value.exit_code, told.value.rank_code) == (
        1,
        74,
    ) and "checkpoint.fallback_dir" not in str(told.value)
    (disk / "ballast").unlink()
    built, _ = loop(disk, held_out=False, launch={"grace_seconds": 2})
    fill(disk)
    built.stop_flag.requested = signal.SIGTERM  # type: ignore[misc]
    with pytest.raises(NotSaved, match=r"tried for \d s"):
        built.run()


def test_what_another_try_would_not_mend_is_not_tried_again(disk: Path) -> None:
    built, said = loop(disk, held_out=False, checkpoint={"wait_seconds": 3600})
    after(
        built,
        STEPS,
        lambda: setattr(built.engine, "tensors", lambda: {"model.weight": "no tensor"}),
    )
    with pytest.raises(
        NotSaved, match="AttributeError: 'str' object has no attribute 'numel'; tried for 0 s"
    ):
        built.run()
    assert saved(said) == [(STEPS, False)]


def test_the_other_disk_takes_it_and_a_run_goes_on_from_there(disk: Path, tmp_path: Path) -> None:
    options = {"every": 2, "wait_seconds": 0, "fallback_dir": str(tmp_path / "other")}
    built, _ = loop(disk, held_out=False, checkpoint=options)
    after(built, STEPS, lambda: fill(disk))
    with pytest.raises(NotSaved, match=NO_SPACE) as told:
        built.run()
    folder = fallback_folder(built.plan.config, built.plan.run_dir)
    assert folder is not None and folder.parent == tmp_path / "other"
    path = folder / f"step-{STEPS:08d}"
    assert (
        f"it lies in {path} — free some space, and go on with --resume {path}" in told.value.line()
    )
    assert read_state(path)["trainer"]["step"] == STEPS
    # Brought home, it is the newest: its serial goes on where the run's own ended.
    (disk / "ballast").unlink()
    shutil.copytree(path, disk / "checkpoints" / path.name)
    assert newest(disk / "checkpoints", verify=True).path == disk / "checkpoints" / path.name


@pytest.mark.parametrize("bad", ["same disk", "cannot be made"])
def test_another_disk_that_is_none(disk: Path, tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").touch()
    other = disk / "other" if bad == "same disk" else tmp_path / "file" / "other"
    built, _ = loop(
        disk, held_out=False, checkpoint={"wait_seconds": 0, "fallback_dir": str(other)}
    )
    after(built, STEPS, lambda: fill(disk))
    with pytest.raises(NotSaved, match=NO_SPACE) as told:
        built.run()
    assert "nor in checkpoint.fallback_dir: " in str(told.value) and "\n" not in str(told.value)
    if bad == "cannot be made":
        with pytest.raises(
            EnvironmentFault, match=r"checkpoint.fallback_dir .* — name another folder"
        ):
            claim_run_dir(
                plan(tmp_path / "new", checkpoint={"fallback_dir": str(other)}),
                Request(loaded=None),
            )  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_disk_that_may_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    made = plan(tmp_path / "run", checkpoint={"fallback_dir": str(tmp_path / "other")})
    _check_fallback_dir(made)
    assert not list((tmp_path / "other").iterdir())
    with tempfile.TemporaryDirectory() as other:  # all may look into it
        Path(other).chmod(0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(
                EnvironmentFault, match=r"fallback_dir .*: cannot be used: Permission denied"
            ):
                _check_fallback_dir(plan(tmp_path / "run", checkpoint={"fallback_dir": other}))
        finally:
            os.seteuid(0)


def test_weights_alone_where_a_whole_checkpoint_does_not_fit(tmp_path: Path) -> None:
    # 8 MiB each.
    tensors = {
        f"{part}.w": torch.ones(2 * MIB)
        for part in ("model", "optim", "value/model", "value/optim")
    }
    checkpointer = Checkpointer(tmp_path / "checkpoints", 2, False, "min", asynchronous=False)
    with small_disk(tmp_path / "disk", 24) as disk:
        result, whole = checkpointer.rescue(disk / "run", 7, tensors, {"trainer": {}}, None)
        assert result.path is not None and result.error is None and not whole
        assert set(check(result.path, verify=True).tensors) == {"model.w", "value/model.w"}
        assert read_state(result.path) == {"trainer": {}, "weights_only": True}


def test_checkpoints_that_were_removed_under_the_run_are_made_again(tmp_path: Path) -> None:
    built, said = loop(tmp_path, held_out=False, checkpoint={"every": 2})
    after(built, 3, lambda: shutil.rmtree(tmp_path / "checkpoints"))
    built.run()
    assert saved(said) == [(2, True), (4, True), (6, True)]
    assert newest(tmp_path / "checkpoints", verify=True).skipped == []


def test_a_full_disk_does_not_cost_the_files_of_the_run(disk: Path) -> None:
    made = plan(disk)
    request = Request(loaded=None)  # type: ignore[arg-type]
    claim_run_dir(made, request)
    before = {path.name: path.read_bytes() for path in disk.iterdir() if path.is_file()}
    assert set(before) == {"config.yaml", "plan.json"}
    fill(disk)
    with pytest.raises(EnvironmentFault, match="cannot write the run folder: No space left"):
        claim_run_dir(made, Request(loaded=None, resume=Resume()))  # type: ignore[arg-type]
    assert all((disk / name).read_bytes() == content for name, content in before.items())


@pytest.mark.full  # the whole command; what decides it is shown above in process
def test_a_full_disk_at_the_end_is_not_trained_for_again(tmp_path: Path) -> None:
    """Two real ranks on a disk without a byte left, for their logs and errors neither."""
    checkpoint = {"every": 2, "wait_seconds": 2, "fallback_dir": str(tmp_path / "other")}
    config = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), launch={"nproc": 2}, checkpoint=checkpoint
    )
    with small_disk(tmp_path / "disk", 24) as disk:
        run = disk / "run"
        process = subprocess.Popen(
            [sys.executable, "-m", "drumline", "train", config, f"run.dir={run}", "run.steps=60"],
            env=ENV, cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            deadline = time.time() + 200
            while (
                not list((run / "checkpoints").glob("step-*"))
                and process.poll() is None
                and time.time() < deadline
            ):
                time.sleep(0.02)
            fill(disk)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 1, said
        assert re.search(
            r"error: .*the last checkpoint could not be written: no space: .*[\d,]+ bytes needed, [\d,]+ free in",
            said,
        ), said
        assert "starting again" not in said, said
        assert [event.kind for event in read(run / "events.jsonl")].count("run_start") == 1
    (rescued,) = (tmp_path / "other").glob("*/step-*")
    assert read_state(rescued)["trainer"]["step"] == 60
