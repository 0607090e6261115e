"""Joining a run that somebody else has launched: torchrun, or any launcher that sets the usual
variables."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.dist.start import RankInfo, start
from drumline.errors import EnvironmentFault
from drumline.launch.environment import listen
from tests.distributed.ranks import start_ranks
from tests.faults.live import gone
from tests.forks import Forked
from tests.harness import ENV, ROOT

WORKER = "tests.distributed.joining_worker"
# A process that says in one line why it cannot join.
JOIN = """
from drumline.dist.start import rendezvous
from drumline.errors import DrumlineError
try:
    rendezvous()
except DrumlineError as error:
    print(type(error).__name__, error.line())
"""


def torchrun(folder: Path, how: str, restarts: int = 0) -> tuple[int, str]:
    options = ("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}")
    command = ["torch.distributed.run", *options, "-m", WORKER, folder, how]
    return end(Forked(*command, env=ENV, cwd=ROOT))


def end(process: Forked, timeout: float = 120) -> tuple[int, str]:
    return process.told(timeout)


def by_hand(folder: Path, how: str, **rendezvous: Any) -> list[Forked]:
    """Two ranks as mpirun or a batch system would start them."""
    return start_ranks(WORKER, folder, how, cwd=ROOT, **rendezvous)


def plans_of(folder: Path) -> set[str]:
    """What the two ranks were told."""
    return {(folder / f"done-{rank}").read_text() for rank in (0, 1)}


def test_torchrun(tmp_path: Path) -> None:
    code, said = torchrun(tmp_path, "together")
    assert code == 0, said
    assert plans_of(tmp_path) == {"the plan of attempt 0"}
    assert gone(str(tmp_path), 2.0)


@pytest.mark.full
def test_torchrun_restart_is_told_the_new_plan(tmp_path: Path) -> None:
    # Under torchrun's defaults the store outlives the attempt: the old text and the old process
    # group's keys are still in it.
    code, said = torchrun(tmp_path, "restart", restarts=1)
    assert code == 0, said
    assert plans_of(tmp_path) == {"the plan of attempt 1"}
    assert gone(str(tmp_path), 2.0)


@pytest.mark.claim("torchrun, Slurm's and others' variables are joined")
def test_any_launcher_with_the_usual_variables(tmp_path: Path) -> None:
    for process in by_hand(tmp_path, "together"):
        code, said = end(process)
        assert code == 0, said


def test_others_are_told_when_there_is_no_plan(tmp_path: Path) -> None:
    for process in by_hand(tmp_path, "refuse"):
        code, said = end(process)
        assert code == 2, said


def test_others_notice_that_rank_0_died_while_it_prepared(tmp_path: Path) -> None:
    first, second = by_hand(tmp_path, "die")
    code, _ = end(first)
    assert code == -signal.SIGKILL
    # It waits a day for a text, but not for a dead rank.
    code, said = end(second)
    assert code == 1
    assert "Traceback" in said


def test_a_host_without_an_address_is_one_line(tmp_path: Path) -> None:
    for process in by_hand(tmp_path, "together", port=1234, host="no-such-host.invalid"):
        code, said = end(process)
        assert code != 0
        assert "the host 'no-such-host.invalid' of rank 0 has no address" in said


def test_one_process_alone_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert start("cpu", "gloo", 1.0) == RankInfo()


def test_a_port_that_is_held_is_one_line(tmp_path: Path) -> None:
    with listen(None) as held:
        port = held.getsockname()[1]
        usual = {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        told = subprocess.run(
            [sys.executable, "-c", JOIN],
            env={**ENV, **usual},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert told.returncode == 0
    error = f"{EnvironmentFault.__name__} MASTER_PORT: port {port} is taken"
    assert told.stdout.startswith(error), told.stdout
