"""Under somebody else's launcher `drumline train` notices, launches nothing, and does the same
work."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.distributed.ranks import free_port
from tests.faults.live import gone, kill, wait_for
from tests.forks import Forked
from tests.harness import ENV, column, events, losses, run_drumline, write_config
from tests.tiny import tiny_model_dir

PAIR = ("--standalone", "--nproc-per-node=2")


def torchrun(*arguments: object, options: Sequence[str] = PAIR, **env: str) -> Forked:
    command = ["torch.distributed.run", *options, "-m", "drumline", *arguments]
    return Forked(*command, env={**ENV, **env})


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
    assert "  model  " in said
    assert said.count("Finished 60 steps") == 1
    run_drumline("train", config, f"run.dir={tmp_path / 'b'}", "--nproc", "2")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert gone(str(tmp_path), 2.0)


@pytest.mark.full  # test_one_plan_and_one_line_for_all_ranks
def test_bad_input_is_one_line_there_too(config: Path, tmp_path: Path) -> None:
    process = torchrun("train", config, f"run.dir={tmp_path / 'run'}", "batch.global_samples=5")
    code, said = end(process)
    assert code != 0
    assert said.count("error: batch: ") == 1, said
    assert gone(str(tmp_path), 2.0)


@pytest.mark.full  # test_launch_join restarts under torchrun, too
def test_restart_goes_on_from_the_newest_checkpoint(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*PAIR, "--max-restarts=1"]
    process = torchrun("train", config, f"run.dir={run}", options=options)
    wait_for(run, "save", 10, process)
    below = psutil.Process(process.pid).children(recursive=True)
    rank_1 = [child.pid for child in below if child.environ().get("RANK") == "1"]
    kill(rank_1[0])
    code, said = end(process)
    assert code == 0, said
    (restored,) = events(run, "restore")
    assert restored["step"] >= 10
    assert sorted(losses(run)) == list(range(1, 61))


@pytest.mark.full  # test_launch_environment kills each launcher above a rank
def test_ranks_die_with_a_launcher_that_is_killed(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", *PAIR]
    line = ["-m", "drumline", "train", str(config), f"run.dir={run}", "run.steps=5000"]
    process = subprocess.Popen(
        [*launcher, *line], env=ENV, start_new_session=True, stdout=subprocess.DEVNULL
    )
    wait_for(run, "save", 10, process)
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in below if "drumline.launch.watcher" not in child.cmdline()]
    kill(process.pid)
    process.wait()
    assert len(ranks) >= 2
    _, left = psutil.wait_procs(ranks, timeout=3 * 1.0)
    for rank in left:
        assert rank.status() == psutil.STATUS_ZOMBIE
    assert gone(str(tmp_path), 60), (
        "what watches the ranks ends when it has seen that they are gone"
    )


@pytest.mark.full
def test_a_host_that_joins_does_not_end_the_run(config: Path, tmp_path: Path) -> None:
    """Two agents on one host: the second comes while the first one trains. Both count no restart.

    torch 2.13's first agent tells a second one nothing of the store that it shares with its ranks,
    so that sharing is switched off.
    """
    run = tmp_path / "run"
    options = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=beat",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
    ]
    line = ("train", config, f"run.dir={run}", "run.steps=400")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = [torchrun(*line, options=options, **env)]
    try:
        wait_for(run, "save", 10, started[0])
        started.append(torchrun(*line, options=options, **env))
        code, said = end(started[0])
        assert code == 0, said
        code, said = end(started[1])
        assert code == 0, said
    finally:
        for process in started:
            process.end()
    assert column(run, "world_size", "run_start") == [1, 2]
    assert events(run, "run_start")[1]["resumed_from"] == "newest"
    assert events(run, "restore")[-1]["step"] >= 10
    assert sorted(losses(run)) == list(range(1, 401))


def by_hand(folders: list[Path], *arguments: object) -> tuple[list[int], list[str]]:
    """One rank in each folder, as hosts of their own would start them; the exit code of each, and
    what it said."""
    usual = {
        **ENV,
        "WORLD_SIZE": str(len(folders)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_RANK": "0",
    }
    started = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        env = {**usual, "RANK": str(rank)}
        started.append(Forked("drumline", "train", *arguments, env=env, cwd=folder))
    codes = []
    outputs = []
    for process in started:
        code, said = end(process)
        codes.append(code)
        outputs.append(said)
    return codes, outputs


@pytest.mark.full
def test_hosts_that_do_not_share_the_run_folder_do_not_train(config: Path, tmp_path: Path) -> None:
    codes, outputs = by_hand([tmp_path / "a", tmp_path / "b"], config, "run.dir=run")
    assert codes == [2, 2], outputs
    lines = "\n".join(outputs).splitlines()
    (line,) = [line for line in lines if line.startswith("error:")]
    assert socket.gethostname() in line
    assert str(tmp_path / "a" / "run") in line
    assert "does not have the run folder" in line
    assert not (tmp_path / "a" / "run" / "events.jsonl").exists(), "it began"


@pytest.mark.full  # tests/faults/test_checkpoint_replicas.py has its parts
def test_hosts_keep_folders_of_their_own_where_each_has_a_replica(
    config: Path, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    line = (config, "run.dir=run", "checkpoint.replicas=1")
    codes, outputs = by_hand(hosts, *line, "run.steps=20")
    assert codes == [0, 0], outputs
    run = hosts[0] / "run"
    shutil.rmtree(run)
    codes, outputs = by_hand(hosts, *line, "run.steps=20")
    assert codes == [2, 2], outputs
    assert "the run folder is not empty on host" in "".join(outputs)
    codes, outputs = by_hand(hosts, *line, "run.steps=40", "--resume", "--allow", "run.steps")
    assert codes == [0, 0], outputs
    assert column(run, "step", "restore") == [20], "the other host had it"
    assert sorted(losses(run)) == list(range(21, 41))
    for host in hosts:
        checkpoint = host / "run" / "checkpoints" / "step-00000040"
        assert (checkpoint / "manifest.json").is_file()


def test_one_plan_and_one_line_for_all_ranks(config: Path, tmp_path: Path) -> None:
    here = [tmp_path / "here"] * 2
    codes, (first, second) = by_hand(here, config, "--dry-run")
    assert codes == [0, 0], first + second
    assert first.count("on 2 × cpu") == 1, "a plan for as many as were started"
    assert "on 2 × cpu" not in second
    # Rank 0 knows it before the other has come, and waits for it.
    codes, (first, second) = by_hand(here, "no.yaml")
    assert codes == [2, 2]
    assert first.count("error:") == 1, first
    assert "error:" not in second, second
    assert "Traceback" not in first + second
