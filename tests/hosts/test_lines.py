"""The launch lines of training guides over two hosts: torchrun, torch.distributed.launch,
accelerate, and deepspeed by pdsh."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, events, losses, write_config
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full
PYTHON = sys.executable
PAGE = (ROOT / "docs" / "guides" / "torchrun.md").read_text()
SEVERAL_HOSTS = PAGE.partition("## Several hosts")[2].partition("\n## ")[0]
# The page's own lines, by how they begin. They differ between hosts by the number of the host
# alone.
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", SEVERAL_HOSTS, re.DOTALL)
    for line in block.strip().splitlines()
]
EACH = [line for line in LINES if not line.startswith("deepspeed")]
DEEPSPEED = [line for line in LINES if line.startswith("deepspeed")]
PROGRAMS = {
    "python": [PYTHON],
    "torchrun": [PYTHON, "-m", "torch.distributed.run"],
    "accelerate": [PYTHON, "-m", "accelerate.commands.accelerate_cli"],
    "deepspeed": [PYTHON, "-m", "deepspeed.launcher.runner"],
}


def words(line: str, number: int, config: Path) -> list[str]:
    """A line of the page as host `number` starts it: with two hosts of one rank each, and the
    test's config."""
    here = {"mine.yaml": str(config), "hosts.txt": str(config.with_name("hostfile"))}
    line = re.sub(
        r"(nproc_per_node[ =])8",
        r"\g<1>1",
        line.replace("HOST", "a").replace("num_processes 16", "num_processes 2"),
    )
    line = re.sub(r"((?:node|machine)_rank[ =])0", rf"\g<1>{number}", line)
    first, *more = line.split()
    return [*PROGRAMS[first], *(here.get(word, word) for word in more)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b"]) as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    # Which a launcher's file may say.
    model = tiny_model_dir(folder / "model")
    batch = {"micro_batch": None}
    return write_config(
        folder,
        model,
        data={"packing": False, "eval": []},
        batch=batch,
        run={"steps": 3},
        checkpoint={"every": None},
    )


@pytest.fixture(scope="module")
def own(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks of one machine."""
    run = tmp_path_factory.mktemp("own") / "run"
    line = [PYTHON, "-m", "drumline", "train", str(config), f"run.dir={run}", "launch.nproc=2"]
    subprocess.run(line, env=ENV, cwd=ROOT, check=True, capture_output=True, timeout=280)
    return losses(run)


def environment(config: Path) -> dict[str, str]:
    """accelerate's default config must not decide; nor a host's GPUs, which all hosts of a test
    share."""
    return {**ENV, "HF_HOME": str(config.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("line", EACH, ids=lambda line: " ".join(line.split()[:3]))
def test_a_line_of_each_host(
    line: str, two: dict[str, Host], config: Path, own: dict[int, float], tmp_path: Path
) -> None:
    if line.startswith("accelerate"):
        pytest.importorskip("accelerate")
    run = tmp_path / "run"
    processes = []
    for number, host in enumerate(two.values()):
        processes.append(
            host.start(*words(line, number, config), f"run.dir={run}", env=environment(config))
        )
    for process in processes:
        code, out = ended(process, 280)
        assert code == 0, out
    (start,) = events(run, "run_start")
    assert start["world_size"] == 2
    assert losses(run) == pytest.approx(own, rel=1e-5)


def test_deepspeed_with_a_hostfile(
    two: dict[str, Host], config: Path, own: dict[int, float], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    if shutil.which("pdsh") is None and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "pdsh"],
            capture_output=True,
            timeout=300,
            check=False,
        )
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is missing")
    config.with_name("hostfile").write_text("a slots=1\nb slots=1\n")
    (line,) = DEEPSPEED
    env = {**environment(config), "PDSH_SSH_ARGS_APPEND": f"-F {two['a'].ssh_config}"}
    run = tmp_path / "run"
    program = PROGRAMS["deepspeed"]
    more = words(line, 0, config)[len(PROGRAMS["deepspeed"]) :]
    # Its own look at the hosts knows no other configuration of ssh.
    code, out = ended(
        two["a"].start(*program, "--no_ssh_check", *more, f"run.dir={run}", env=env), 280
    )
    assert code == 0, out
    (start,) = events(run, "run_start")
    assert (start["world_size"], start["strategy"]) == (2, "zero2")
    assert losses(run) == pytest.approx(own, rel=1e-5)


def test_a_host_of_rank_0_without_an_address_is_one_line(
    two: dict[str, Host], config: Path, tmp_path: Path
) -> None:
    line = [PYTHON, "-m", "drumline", "train", str(config), f"run.dir={tmp_path / 'run'}"]
    usual = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "no-such-host.invalid",
        "MASTER_PORT": "29505",
    }
    code, out = ended(two["b"].start(*line, env={**ENV, **usual}), 120)
    assert code == 2, out
    assert re.search("the host 'no-such-host.invalid' of rank 0 has no address", out), out
    assert "Traceback" not in out, out
