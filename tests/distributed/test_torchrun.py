"""Under somebody else's launcher `drumline train` notices, launches nothing, and does the same work."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import gone, kill, wait_for
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir


def torchrun(
    *arguments: object, options: Sequence[str] = ("--standalone", "--nproc-per-node=2"), **env: str
) -> Forked:
    return Forked(
        "torch.distributed.run", *options, "-m", "drumline", *arguments, env={**ENV, **env}
    )


def end(process: Forked) -> tuple[int, str]:
    return process.told(280)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        data={"packing": False},
        run={"steps": 60},
        checkpoint={"every": 10},
    )


@pytest.mark.claim("torchrun, Slurm's and others' variables are joined")
def test_same_losses_as_our_own_launcher(config: Path, tmp_path: Path) -> None:
    code, said = end(torchrun("train", config, f"run.dir={tmp_path / 'a'}"))
    assert code == 0, said
    assert "  model  " in said and said.count("Finished 60 steps") == 1
    assert drumline("train", config, f"run.dir={tmp_path / 'b'}", "--nproc", "2").code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert gone(str(tmp_path), 2.0)


@pytest.mark.full  # test_one_plan_and_one_line_for_all_ranks
def test_bad_input_is_one_line_there_too(config: Path, tmp_path: Path) -> None:
    code, said = end(
        torchrun("train", config, f"run.dir={tmp_path / 'run'}", "batch.global_samples=5")
    )
    assert code != 0
    assert said.count("error: batch: ") == 1, said
    assert gone(str(tmp_path), 2.0)


@pytest.mark.full  # test_launch_join restarts under torchrun, too
def test_restart_goes_on_from_the_newest_checkpoint(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun(
        "train",
        config,
        f"run.dir={run}",
        options=["--standalone", "--nproc-per-node=2", "--max-restarts=1"],
    )
    wait_for(run, "save", 10, process)
    rank_1 = [pid for pid in _children(process.pid) if _rank(pid) == "1"]
    kill(rank_1[0])
    code, said = end(process)
    assert code == 0, said
    (restored,) = events(run, "restore")
    assert restored["step"] >= 10
    assert sorted(losses(run)) == list(range(1, 61))


@pytest.mark.full  # test_launch_environment kills each launcher above a rank
def test_ranks_die_with_a_launcher_that_is_killed(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "drumline",
        "train",
        str(config),
    ]
    process = subprocess.Popen(
        [*command, f"run.dir={run}", "run.steps=5000"],
        env=ENV,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    wait_for(run, "save", 10, process)
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in below if "drumline.launch.watcher" not in child.cmdline()]
    kill(process.pid)
    process.wait()
    left = psutil.wait_procs(ranks, timeout=3 * 1.0)[1]
    assert len(ranks) >= 2 and all(each.status() == psutil.STATUS_ZOMBIE for each in left)
    assert gone(str(tmp_path), 60), (
        "what watches the ranks ends when it has seen that they are gone"
    )


@pytest.mark.full
def test_a_host_that_joins_does_not_end_the_run(config: Path, tmp_path: Path) -> None:
    """Two agents on one host: the second comes while the first one trains. Both count no restart.

    torch 2.13's first agent tells a second one nothing of the store that it shares with its ranks, so that sharing is switched off."""
    run, port = tmp_path / "run", free_port()
    options = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=beat",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    line = ("train", config, f"run.dir={run}", "run.steps=400")
    usual: dict[str, Any] = {
        "options": [*options, "--local-addr=127.0.0.1"],
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    started = [torchrun(*line, **usual)]
    try:
        wait_for(run, "save", 10, started[0])
        started.append(torchrun(*line, **usual))
        code, said = end(started[0])
        assert code == 0, said
        assert end(started[1])[0] == 0
    finally:
        for process in started:
            process.end()
    starts = events(run, "run_start")
    assert [start["world_size"] for start in starts] == [1, 2] and starts[1][
        "resumed_from"
    ] == "newest"
    assert events(run, "restore")[-1]["step"] >= 10
    assert sorted(losses(run)) == list(range(1, 401))


def by_hand(folders: list[Path], *arguments: object) -> list[tuple[int, str]]:
    """One rank in each folder, as hosts of their own would start them; how each ended."""
    usual = {
        **ENV,
        "WORLD_SIZE": str(len(folders)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_RANK": "0",
    }
    for folder in folders:
        folder.mkdir(exist_ok=True)
    started = [
        Forked("drumline", "train", *arguments, env={**usual, "RANK": str(n)}, cwd=folder)
        for n, folder in enumerate(folders)
    ]
    return [end(process) for process in started]


@pytest.mark.full
def test_hosts_that_do_not_share_the_run_folder_do_not_train(config: Path, tmp_path: Path) -> None:
    ends = by_hand([tmp_path / "a", tmp_path / "b"], config, "run.dir=run")
    assert [code for code, _ in ends] == [2, 2], ends
    (line,) = [line for _, said in ends for line in said.splitlines() if line.startswith("error:")]
    assert (
        socket.gethostname() in line
        and str(tmp_path / "a" / "run") in line
        and "does not have the run folder" in line
    )
    assert not (tmp_path / "a" / "run" / "events.jsonl").exists(), "it began"


@pytest.mark.full  # tests/faults/test_checkpoint_replicas.py has its parts
def test_hosts_keep_folders_of_their_own_where_each_has_a_replica(
    config: Path, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    line = ("run.dir=run", "checkpoint.replicas=1")
    assert [code for code, _ in by_hand(hosts, config, *line, "run.steps=20")] == [0, 0]
    shutil.rmtree(hosts[0] / "run")
    refused = by_hand(hosts, config, *line, "run.steps=20")
    assert [code for code, _ in refused] == [
        2,
        2,
    ] and "the run folder is not empty on host" in "".join(said for _, said in refused)
    assert [
        code
        for code, _ in by_hand(
            hosts, config, *line, "run.steps=40", "--resume", "--allow", "run.steps"
        )
    ] == [0, 0]
    assert [event["step"] for event in events(hosts[0] / "run", "restore")] == [20], (
        "the other host had it"
    )
    assert sorted(losses(hosts[0] / "run")) == list(range(21, 41))
    assert all(
        (host / "run" / "checkpoints" / "step-00000040" / "manifest.json").is_file()
        for host in hosts
    )


def test_one_plan_and_one_line_for_all_ranks(config: Path, tmp_path: Path) -> None:
    here = [tmp_path / "here"] * 2
    planned = by_hand(here, config, "--dry-run")
    assert [code for code, _ in planned] == [0, 0], planned
    assert [said.count("on 2 × cpu") for _, said in planned] == [1, 0], (
        "a plan for as many as were started"
    )
    # Rank 0 knows it before the other has come, and waits for it.
    missing = by_hand(here, "no.yaml")
    assert [code for code, _ in missing] == [2, 2]
    assert [said.count("error:") for _, said in missing] == [1, 0] and "Traceback" not in "".join(
        said for _, said in missing
    ), missing


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _rank(pid: int) -> str | None:
    return psutil.Process(pid).environ().get("RANK")
