"""The commands of README and docs are run in their order, page by page, on a tiny model: all that a
machine without GPUs, clusters and networks can run. Those that it cannot are parsed
(tests/unit/test_docs_commands.py), and listed here with the reason."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.commands import GUIDES, PAGES, commands
from tests.harness import chat_rows, write_config, write_rows
from tests.pages import TASKS, run_line, write_programs
from tests.tiny import tiny_model_dir

# Beginning of a command → why it is not run here, or what runs it.
NOT_HERE = {
    "make ": "CI runs `make test`; `make demo` downloads what it trains",
    "pip install": "changes the environment; tests/configs/test_package.py installs a wheel",
    "python -m build": "tests/configs/test_package.py",
    "python benchmarks/": "takes minutes; tests/unit/test_benchmarks.py runs each at its smallest size",
    "python -m tests.faults.chaos --hosts": "takes root and minutes; plugins/hosts/tests/test_chaos.py",
    "docker ": "no Docker; tests/unit/test_dockerfile.py reads its file",
    "export ": "sets a variable of the shell",
    "dmesg ": "the kernel's log is not for everyone; tests/unit/test_doctor.py reads standard input",
    "torchrun ": "several hosts, or the test that RUN_BY names; tests/unit/test_launcher_pages.py",
    "python -m torch.distributed.launch": "the same",
    "deepspeed ": "the same",
    "accelerate ": "the same",
    "mpirun ": "the same",
    "srun ": "needs Slurm; tests/slurm",
    "drumline train mine.yaml run.device=mps": "needs a Mac",
    "drumline stop": "a run that is under way; tests/unit/test_runs.py",
    "drumline watch": "serves until it is stopped; tests/unit/test_watch.py",
    "drumline train mine.yaml --watch": "the same",
    "drumline sweep mine.yaml optimizer.lr=1e-5,3e-5 run.seed": "six runs take minutes; plugins/sweep/tests/test_trials.py makes fewer",
    "drumline sweep mine.yaml optimizer.lr=log": "the same",
    "drumline bench": "tests/distributed/test_scale.py",
    "drumline doctor --bandwidth": "measures for minutes; tests/unit/test_doctor.py",
}
# Pages whose commands need hosts, a cluster or a store; the tests that run them are named in
# tests/unit/test_launcher_pages.py.
ELSEWHERE = {"ssh", "slurm", "kubernetes", "ray", "slow_links"}
# Which tests/configs/test_guides.py follows.
GUIDES_OF_A_TASK = {guide for guide in GUIDES if guide in TASKS}
# A code besides 0, by the beginning of the command: what a check of this machine finds is its
# answer.
CODES = {"drumline doctor": (0, 1), "drumline verify": (0, 1)}
STORE = "s3://"  # a store is not here; tests/faults/test_checkpoint_url.py
NAMES = ("mine", "sft", "config", "CONFIG")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted: YAMLs of these names, rows, and a run that has ended."""
    folder = tmp_path_factory.mktemp("docs")
    config = write_config(folder, tiny_model_dir(folder / "model"), rows=24)
    text = config.read_text().replace(f"dir: {folder}/run", "dir: RUN")
    # Which the GPUs that pages plan for would contradict.
    text = text.replace("  device: cpu\n", "")
    for name in NAMES:
        (folder / f"{name}.yaml").write_text(text.replace("RUN", f"runs/{name}"))
    write_rows(folder / "rows.jsonl", chat_rows(24))
    (folder / "train.log").write_text("OSError: [Errno 28] No space left on device\n")
    write_programs(folder)
    run(folder, "drumline train mine.yaml --nproc 2")
    shutil.copytree(folder / "runs" / "mine", folder / "kept")
    return folder


def run(folder: Path, line: str) -> None:
    done = run_line(folder, line)
    codes: tuple[int, ...] = (0,)
    for begin, allowed in CODES.items():
        if line.startswith(begin):
            codes = allowed
    assert done.returncode in codes, (
        f"{line}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    )
    assert "Traceback" not in done.stderr, line


def skipped(line: str) -> bool:
    return STORE in line or any(line.startswith(begin) for begin in NOT_HERE)


def test_what_is_not_run_is_on_a_page() -> None:
    lines: list[str] = []
    for name in set(PAGES) - GUIDES_OF_A_TASK:
        lines += commands(PAGES[name])
    for begin in NOT_HERE:
        assert any(line.startswith(begin) for line in lines), begin


@pytest.mark.full
@pytest.mark.parametrize("page", sorted(set(PAGES) - ELSEWHERE - GUIDES_OF_A_TASK))
def test_commands_of_a_page(folder: Path, page: str) -> None:
    lines = [line for line in commands(PAGES[page]) if not skipped(line)]
    if not lines:
        pytest.skip("no command of it runs here")
    for line in lines:
        for name, stand_in in STAND_INS.items():
            line = line.replace(name, stand_in)
        words = shlex.split(line)
        lay_out(folder, words)
        if "--resume" in words:
            stem = config_of(words)
            if stem != "mine":
                run(folder, f"drumline train {stem}.yaml")
            shutil.rmtree(folder / "runs" / stem / "checkpoints" / "step-00000004")
        run(folder, line)


# Of a page → what stands in for it.
STAND_INS = {"RUN": "runs/mine", "CONFIG.yaml": "mine.yaml", "--rank 3": "--rank 1"}


def config_of(words: list[str]) -> str:
    """Which of NAMES a command's config is."""
    for word in words:
        if word.endswith(".yaml") and Path(word).stem in NAMES:
            return Path(word).stem
    return "mine"


def lay_out(folder: Path, words: list[str]) -> None:
    """Remove what other commands made, and lay down the runs that a command is about."""
    for name in ("my-model", "new.yaml", "both.html"):
        made = folder / name
        if made.is_dir():
            shutil.rmtree(made, ignore_errors=True)
        else:
            made.unlink(missing_ok=True)
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    if words[1] == "train" and "--resume" not in words:
        return
    names = ["mine"]
    for word in words:
        if word.startswith("runs/"):
            names.append(Path(word).name.replace("*", "0"))
    for name in dict.fromkeys(names):
        shutil.copytree(folder / "kept", runs / name)
