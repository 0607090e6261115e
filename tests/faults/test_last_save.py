"""A disk that is full when a run ends or is asked to stop: what was trained waits for room, goes
elsewhere, or is reported; never redone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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
from tests.faults.live import wait_until
from tests.harness import ENV, write_config
from tests.unit.test_loop import STEPS, loop, of, plan

NO_SPACE = re.compile(r"no space: [\d,]+ bytes needed, [\d,]+ free in \S+/checkpoints")
LOST = re.compile(
    r"error: .*the last checkpoint could not be written: "
    r"no space: .*[\d,]+ bytes needed, [\d,]+ free in"
)
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "disk", 2) as folder:
        yield folder


def loop_on(folder: Path, **checkpoint: Any) -> tuple[Loop, list[dict[str, Any]]]:
    """A loop without an evaluation, whose run folder is `folder`, and what it will say."""
    return loop(folder, held_out=False, checkpoint=checkpoint)


def after(built: Loop, step: int, act: Callable[[], Any]) -> None:
    """Call `act` once the loop has done `step`."""
    inner = built._train_step

    def then(*arguments: Any) -> None:
        inner(*arguments)
        if built.state.step == step:
            act()

    built._train_step = then  # type: ignore[method-assign]


def full_at_the_end(disk: Path, **checkpoint: Any) -> Loop:
    """A loop whose disk is full after its last step, and that does not wait for room."""
    built, _ = loop_on(disk, wait_seconds=0, **checkpoint)
    after(built, STEPS, lambda: fill(disk))
    return built


def run_without_room(built: Loop) -> NotSaved:
    """Run the loop, and return how it said that its last checkpoint has no room."""
    with pytest.raises(NotSaved, match=NO_SPACE) as told:
        built.run()
    return told.value


def saved(said: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """Return the step of each save, and whether it went well."""
    found = []
    for event in of(said, "save"):
        found.append((event["step"], event["error"] is None))
    return found


def fill_for_a_while(disk: Path) -> None:
    """Take all room, and give it back after a second and a half."""
    ballast = fill(disk)
    threading.Timer(1.5, ballast.unlink).start()


def ask_to_stop(built: Loop) -> None:
    """What SIGTERM does to the loop's flag."""
    built.stop_flag.requested = signal.SIGTERM  # type: ignore[misc]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_periodic_save_that_found_no_room_is_made_up_for(disk: Path, asynchronous: bool) -> None:
    built, said = loop_on(disk, every=3, wait_seconds=5)
    built.saver.checkpointer = Checkpointer(disk / "checkpoints", 2, False, "min", asynchronous)
    after(built, 3, lambda: fill(disk))
    after(built, 5, (disk / "ballast").unlink)

    built.run()

    # One line for the failure, none for each look; the checkpoint comes once there is room again.
    assert saved(said) == [(3, False), (5, True), (6, True)]

    first = of(said, "save")[0]
    assert NO_SPACE.search(first["error"])


@pytest.mark.claim("a disk that is full at the end loses nothing")
def test_the_last_save_waits_for_room(disk: Path) -> None:
    built, said = loop_on(disk, wait_seconds=60)
    after(built, STEPS, lambda: fill_for_a_while(disk))

    built.run()

    assert saved(said) == [(STEPS, False), (STEPS, True)]

    path = newest(disk / "checkpoints", verify=True).path
    assert path is not None
    assert read_state(path)["trainer"]["step"] == STEPS


@pytest.mark.full
def test_a_save_on_stop_waits_too(disk: Path) -> None:
    built, said = loop_on(disk, wait_seconds=60)
    after(built, 4, lambda: fill_for_a_while(disk))
    after(built, 4, lambda: ask_to_stop(built))

    # The step under way is finished.
    with pytest.raises(Preempted, match="saved at step 5"):
        built.run()
    assert saved(said) == [(5, False), (5, True)]


@pytest.mark.full
def test_patience_has_an_end_also_when_asked_to_stop(disk: Path) -> None:
    error = run_without_room(full_at_the_end(disk))
    assert error.exit_code == 1
    assert error.rank_code == 74
    assert "checkpoint.fallback_dir" not in str(error)

    # A run that is asked to stop has its seconds of grace.
    (disk / "ballast").unlink()
    built, _ = loop(disk, held_out=False, launch={"grace_seconds": 2})
    fill(disk)
    ask_to_stop(built)

    with pytest.raises(NotSaved, match=r"tried for \d s"):
        built.run()


def test_what_another_try_would_not_mend_is_not_tried_again(disk: Path) -> None:
    built, said = loop_on(disk, wait_seconds=3600)

    def break_engine() -> None:
        built.engine.tensors = lambda: {"model.weight": "no tensor"}  # type: ignore[method-assign]

    after(built, STEPS, break_engine)
    reason = "AttributeError: 'str' object has no attribute 'numel'; tried for 0 s"

    with pytest.raises(NotSaved, match=reason):
        built.run()
    assert saved(said) == [(STEPS, False)]


def test_the_other_disk_takes_it_and_a_run_goes_on_from_there(disk: Path, tmp_path: Path) -> None:
    built = full_at_the_end(disk, every=2, fallback_dir=str(tmp_path / "other"))
    error = run_without_room(built)

    folder = fallback_folder(built.plan.config, built.plan.run_dir)
    assert folder is not None
    assert folder.parent == tmp_path / "other"

    path = folder / f"step-{STEPS:08d}"
    advice = f"it lies in {path} — free some space, and go on with --resume {path}"

    assert advice in error.line()
    assert read_state(path)["trainer"]["step"] == STEPS

    # Brought home, it is the newest: its serial goes on where the run's own ended.
    (disk / "ballast").unlink()
    home = disk / "checkpoints" / path.name
    shutil.copytree(path, home)

    assert newest(disk / "checkpoints", verify=True).path == home


@pytest.mark.parametrize("bad", ["same disk", "cannot be made"])
def test_another_disk_that_is_none(disk: Path, tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").touch()
    others = {"same disk": disk / "other", "cannot be made": tmp_path / "file" / "other"}
    checkpoint = {"fallback_dir": str(others[bad])}

    error = run_without_room(full_at_the_end(disk, **checkpoint))

    assert "nor in checkpoint.fallback_dir: " in str(error)
    assert "\n" not in str(error)

    if bad == "cannot be made":
        made = plan(tmp_path / "new", checkpoint=checkpoint)
        refused = r"checkpoint.fallback_dir .* — name another folder"

        with pytest.raises(EnvironmentFault, match=refused):
            claim_run_dir(made, Request(loaded=None))  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_disk_that_may_not_be_written_is_refused_at_the_start(
    run_dir: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "other"
    _check_fallback_dir(plan(run_dir, checkpoint={"fallback_dir": str(mine)}))

    assert not list(mine.iterdir())

    refused = r"fallback_dir .*: cannot be used: Permission denied"
    with tempfile.TemporaryDirectory() as other:
        Path(other).chmod(0o755)  # all may look into it

        os.seteuid(65534)
        try:
            with pytest.raises(EnvironmentFault, match=refused):
                _check_fallback_dir(plan(run_dir, checkpoint={"fallback_dir": other}))
        finally:
            os.seteuid(0)


def test_weights_alone_where_a_whole_checkpoint_does_not_fit(tmp_path: Path) -> None:
    tensors = {}
    for part in ("model", "optim", "value/model", "value/optim"):
        tensors[f"{part}.w"] = torch.ones(2 * MIB)  # 8 MiB

    checkpointer = Checkpointer(tmp_path / "checkpoints", 2, False, "min", asynchronous=False)
    with small_disk(tmp_path / "disk", 24) as disk:
        result, whole = checkpointer.rescue(disk / "run", 7, tensors, {"trainer": {}}, None)

        assert result.path is not None
        assert result.error is None
        assert not whole
        assert set(check(result.path, verify=True).tensors) == {"model.w", "value/model.w"}
        assert read_state(result.path) == {"trainer": {}, "weights_only": True}


def test_checkpoints_that_were_removed_under_the_run_are_made_again(tmp_path: Path) -> None:
    built, said = loop_on(tmp_path, every=2)
    root = tmp_path / "checkpoints"
    after(built, 3, lambda: shutil.rmtree(root))

    built.run()

    assert saved(said) == [(2, True), (4, True), (6, True)]
    assert newest(root, verify=True).skipped == []


def test_a_full_disk_does_not_cost_the_files_of_the_run(disk: Path) -> None:
    made = plan(disk)
    claim_run_dir(made, Request(loaded=None))  # type: ignore[arg-type]
    config = (disk / "config.yaml").read_bytes()
    saved_plan = (disk / "plan.json").read_bytes()

    files = [path.name for path in disk.iterdir() if path.is_file()]
    assert sorted(files) == ["config.yaml", "plan.json"]
    fill(disk)
    again = Request(loaded=None, resume=Resume())  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFault, match="cannot write the run folder: No space left"):
        claim_run_dir(made, again)

    assert (disk / "config.yaml").read_bytes() == config
    assert (disk / "plan.json").read_bytes() == saved_plan


def start_on(disk: Path, config: Path) -> subprocess.Popen[str]:
    """A run of 60 steps on the disk, whose output is not."""
    overrides = [f"run.dir={disk / 'run'}", "run.steps=60"]
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", "train", config, *overrides],
        env=ENV,
        cwd=config.parent,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.full  # the whole command; what decides it is shown above in process
def test_a_full_disk_at_the_end_is_not_trained_for_again(model: Path, tmp_path: Path) -> None:
    """Two real ranks on a disk without a byte left, for their logs and errors neither."""
    other = tmp_path / "other"
    checkpoint = {"every": 2, "wait_seconds": 2, "fallback_dir": str(other)}
    config = write_config(tmp_path, model, launch={"nproc": 2}, checkpoint=checkpoint)
    with small_disk(tmp_path / "disk", 24) as disk:
        process = start_on(disk, config)
        try:
            wait_until(lambda: list(disk.glob("run/checkpoints/step-*")), 200, process)
            fill(disk)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()

        assert process.returncode == 1, said
        assert LOST.search(said), said
        assert "starting again" not in said, said
        kinds = [event.kind for event in read(disk / "run" / "events.jsonl")]
        assert kinds.count("run_start") == 1

    (rescued,) = other.glob("*/step-*")

    assert read_state(rescued)["trainer"]["step"] == 60
