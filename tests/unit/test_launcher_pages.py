"""A page a launcher: its YAML is a config, and a test runs each of its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from drumline.config.load import load_values
from tests.harness import ROOT

DATA = {"data": {"train": [{"kind": "digits"}]}}
TRAIN = "drumline train CONFIG.yaml"
HOSTS_OF_MPIRUN = "tests/unit/test_launch_tasks.py::test_several_hosts_of_mpirun"
SEVERAL = (
    "tests/hosts/test_lines.py::test_a_line_of_each_host"  # which takes its lines from the page
)
ONE = "tests/distributed/test_launch_lines.py::test_a_launch_line"
# page → command → the test that runs it, with the test's own config, hosts and numbers
RUN_BY = {
    "launchers": {
        "drumline ps": "tests/unit/test_runs.py::test_a_run_is_followed_and_stopped_by_another_process",
        "drumline logs RUN --rank 3": "tests/unit/test_runs.py::test_logs",
        "drumline follow RUN": "tests/unit/test_runs.py::test_a_run_is_followed_and_stopped_by_another_process",
        "drumline stop RUN": "tests/unit/test_runs.py::test_a_run_is_followed_and_stopped_by_another_process",
        "export DRUMLINE_SECRET=": "tests/unit/test_launch_hosts.py::test_a_rank_without_the_secret_does_not_meet_the_others",
    },
    "ssh": {
        f"{TRAIN} --dry-run": "plugins/hosts/tests/test_ssh.py::test_a_dry_run_says_what_would_be_run_on_each_host",
        TRAIN: "plugins/hosts/tests/test_ssh.py::test_same_losses_as_two_ranks_of_one_machine",
    },
    "slurm": {
        f"{TRAIN} --dry-run": "tests/slurm/test_slurm.py::test_a_job_of_two_nodes_trains_as_two_local_ranks",
        TRAIN: "tests/slurm/test_slurm.py::test_a_job_of_two_nodes_trains_as_two_local_ranks",
        f"{TRAIN} --detach": "tests/slurm/test_slurm.py::test_detached_then_followed_then_stopped",
        f"srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 {TRAIN}": "tests/slurm/test_slurm.py::test_joins_without_being_told",
    },
    "kubernetes": {
        f"{TRAIN} --dry-run": "plugins/kubernetes/tests/test_manifest.py::test_a_dry_run_needs_no_cluster",
        TRAIN: "plugins/kubernetes/tests/test_follow.py::test_submitted_and_followed_to_its_end",
        f"{TRAIN} --detach": "plugins/kubernetes/tests/test_follow.py::test_who_does_not_wait_only_submits",
    },
    "ray": {TRAIN: "plugins/hosts/tests/test_ray.py::test_same_losses_as_two_local_ranks"},
    "torchrun": {
        "torchrun --nproc-per-node 2": ONE,
        "python -m torch.distributed.launch --nproc_per_node 2": ONE,
        "deepspeed --num_gpus 2": ONE,
        "torchrun --nnodes": SEVERAL,
        "python -m torch.distributed.launch --nnodes": SEVERAL,
        "accelerate launch --multi_gpu": SEVERAL,
        "deepspeed --hostfile": "tests/hosts/test_lines.py::test_deepspeed_with_a_hostfile",
        f"mpirun -np 4 {TRAIN}": "tests/slurm/test_slurm.py::test_joins_under_mpirun",
        f"mpirun -np 16 -H node1:8,node2:8 -x PATH -x MASTER_ADDR=node1 {TRAIN}": HOSTS_OF_MPIRUN,
    },
}


def page_path(name: str, language: str = "") -> Path:
    """Return the page of this name, which is a guide or a reference."""
    (path,) = (ROOT / "docs").rglob(f"{name}{language}.md")
    return path


def commands(page: str) -> list[str]:
    """Without those that install."""
    text = page_path(page).read_text()
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.strip().splitlines()
    ]
    return [line for line in lines if not line.startswith("pip install")]


@pytest.mark.parametrize("page", RUN_BY)
def test_each_command_is_run_by_a_test(page: str) -> None:
    found = commands(page)
    for line in found:
        assert shlex.split(line) and [known for known in RUN_BY[page] if line.startswith(known)], (
            f"{page}.md: no test runs: {line}"
        )
    for known, test in RUN_BY[page].items():
        assert any(line.startswith(known) for line in found), f"{page}.md has no {known}"
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", Path(ROOT, path).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("page", ["ssh", "slurm", "kubernetes", "ray"])
def test_the_yaml_of_a_page_is_a_config(page: str) -> None:
    for language in ("", ".zh"):
        text = page_path(page, language).read_text()
        blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        assert blocks
        for block in blocks:
            assert load_values({**DATA, **yaml.safe_load(block)}, []).config.launch.kind == page
