"""Ranks that are forked while the launcher plans: used if the plan is as foreseen, and never left behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from drumline.config.config import Config
from drumline.errors import PlanError
from drumline.hardware.detect import VISIBILITY_VARIABLES
from drumline.launch.early import EarlyRanks
from drumline.train import entry
from drumline.vendor.transformers import import_without_torchao
from tests.harness import ENV, write_config

RANK = """
import json, os, signal, sys
default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print(json.dumps([sys.argv[1:], __name__, os.environ["RANK"], "BEFORE" in os.environ, os.getsid(0) == os.getpid(), default]))
print("an error", file=sys.stderr)
sys.exit(7)
"""
# What a launcher does, in a process that imports next to nothing.
LAUNCHER = """
import json, os, signal, sys, types
sys.modules["drumline.train.preload"] = types.ModuleType("preload")
from drumline.config.config import Config
from drumline.system.process import tied_arguments
from drumline.launch import early
from drumline.launch.early import EarlyRanks
signal.signal(signal.SIGTERM, lambda *more: None)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
folder, case = sys.argv[1:]
device = "auto" if case.startswith("GPU") else "cpu"
config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}, "launch": {"nproc": 2}, "run": {"device": device}})
early.likely_gpus = lambda: 2
asked = "os.getpid() != here" if case.endswith("CUDA was asked") else "False"
os.mkdir(folder + "/torch")
open(folder + "/torch/__init__.py", "w").close()
with open(folder + "/torch/cuda.py", "w") as file:
    file.write(f"import os\\nhere = os.getpid()\\ndef _is_in_bad_fork(): return {asked}")
sys.path.insert(0, folder)
ranks = EarlyRanks(config)
children = [early.pid for early in ranks.waiting]

def take(threads):
    with open(folder + "/out", "w") as out, open(folder + "/err", "w") as err:
        command = [sys.executable, *tied_arguments(folder + "/rank.py", "plan.json")]
        env = {"RANK": "7", "OMP_NUM_THREADS": threads, "PATH": os.environ["PATH"]}
        return ranks.start_rank(lambda **options: "usual", command, env=env, stdout=out, stderr=err, start_new_session=True)

if case in ("begun", "interrupted"):
    early = take(ranks.threads)
    print(json.dumps([early.pid == children[0], early.wait(30), early.poll()]))
elif case == "other threads":
    print(json.dumps([take("33"), len(ranks.waiting)]))
elif "CUDA" in case:
    print(json.dumps([len(ranks.waiting), "OMP_NUM_THREADS" in os.environ]))
elif case == "dead":
    for early in ranks.waiting:
        early.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    print(json.dumps([take(ranks.threads), len(ranks.waiting)]))
ranks.end()
print(json.dumps([os.path.exists(f"/proc/{pid}") for pid in children]))
if case == "killed":
    EarlyRanks(config)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def launcher(folder: Path, case: str, rank: str = RANK) -> list[Any]:
    """What LAUNCHER prints, a value a line."""
    (folder / "rank.py").write_text(rank)
    env = {name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"} | {
        "BEFORE": "1"
    }
    command = [sys.executable, "-c", LAUNCHER, str(folder), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_goes_on_as_a_new_process_would(tmp_path: Path) -> None:
    assert launcher(tmp_path, "begun") == [[True, 7, 7], [False, False]]
    assert json.loads((tmp_path / "out").read_text()) == [
        ["plan.json"],
        "__main__",
        "7",
        False,
        True,
        True,
    ]
    assert (tmp_path / "err").read_text() == "an error\n"


@pytest.mark.slow
def test_ctrl_c_ends_it_as_it_ends_a_new_process(tmp_path: Path) -> None:
    """By the signal, so the launcher knows that nothing failed."""
    rank = "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(30)\n"
    died = -signal.SIGINT
    assert launcher(tmp_path, "interrupted", rank) == [[True, died, died], [False, False]]
    assert (tmp_path / "err").read_text().endswith("KeyboardInterrupt\n")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "waiting"), [("other threads", 2), ("dead", 0)])
def test_a_rank_whose_threads_are_others_or_that_has_died_is_started_as_usual(
    tmp_path: Path, case: str, waiting: int
) -> None:
    assert launcher(tmp_path, case) == [["usual", waiting], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "waiting"),
    [("GPU: CUDA was asked", 0), ("GPU: CUDA was left alone", 2), ("CPU: CUDA was asked", 0)],
)
def test_there_are_none_where_what_was_imported_has_asked_cuda(
    tmp_path: Path, case: str, waiting: int
) -> None:
    """torch lets no fork ask CUDA again after that, and its optimizers ask on a processor too."""
    assert launcher(tmp_path, case) == [[waiting, False], [False] * waiting]


def test_a_rank_on_the_processor_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VISIBILITY_VARIABLES:
        monkeypatch.setenv(name, "0")
    seen = {}

    def note_what_is_visible(plan: Any, resume: str | None) -> None:
        seen[plan.device] = [os.environ[name] for name in VISIBILITY_VARIABLES]

    for device in ("cuda", "cpu"):
        plan = SimpleNamespace(device=device)
        monkeypatch.setattr(entry.Plan, "load", lambda path, plan=plan: plan)
        entry.main(["plan.json"], work=note_what_is_visible)
    assert seen == {"cuda": ["0", "0", "0"], "cpu": ["", "", ""]}


def test_torchao_is_imported_by_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao initialises CUDA as it is imported, and no fork of the launcher could use a GPU."""
    place = "transformers.quantizers.quantizer_torchao"
    utils = importlib.import_module("transformers.utils")

    def is_available(*_: object) -> bool:
        return True

    monkeypatch.delitem(sys.modules, place, raising=False)
    monkeypatch.setattr(utils, "is_torchao_available", is_available)
    # An import of either raises; an earlier test may have imported them.
    for module in ("torchao", "torchao.prototype.safetensors.safetensors_support"):
        monkeypatch.setitem(sys.modules, module, None)
    import_without_torchao()
    quantizer: Any = sys.modules[place]
    assert quantizer.is_torchao_available is utils.is_torchao_available is is_available
    with pytest.raises(ImportError, match="torchao"):
        quantizer.flatten_tensor_state_dict({})


@pytest.mark.slow
def test_they_are_killed_with_the_launcher(tmp_path: Path) -> None:
    assert launcher(tmp_path, "killed") == [[False, False]]
    _, alive = psutil.wait_procs(
        [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])],
        timeout=3.0,
    )
    assert not alive


def test_there_are_none_where_this_process_has_used_torch(tmp_path: Path) -> None:
    import torch  # noqa: F401

    config = Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x"}]}, "launch": {"nproc": 2}}
    )
    with EarlyRanks(config) as ranks:
        assert not ranks.waiting


@pytest.mark.claim("a rank starts before its plan, and does not outlive it")
@pytest.mark.slow
def test_they_are_gone_where_there_is_no_plan(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "no-model")
    command = [sys.executable, "-m", "drumline", "train", str(config)]
    done = subprocess.run(
        command, env=ENV, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == PlanError.exit_code and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(config) in (p.info["cmdline"] or [])
    ]
    assert not (tmp_path / "run").exists()
