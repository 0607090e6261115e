"""What the pods of `launch.kind: kubernetes` run: the command and the variables of the manifest, as processes on loopback."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import Request, load
from tests.distributed.ranks import free_port
from tests.faults.live import gone, wait_for
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir

pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
pytestmark = pytest.mark.full

from drumline_kubernetes.submit import submission_of  # noqa: E402


def test_two_pods_train_and_go_on_when_they_start_again(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), run={"steps": 60}, checkpoint={"every": 5}
    )
    pod = tmp_path / "pod"
    launch = f"launch={{kind: kubernetes, image: drumline, nodes: 2, workdir: {pod}, volumes: [{{claim: runs, path: {tmp_path}}}]}}"
    loaded = load(path, [launch, f"run.dir={tmp_path / 'pods'}"])
    submission = submission_of(loaded.config.launch, Request(loaded))
    job, text, _ = submission.objects("Job")
    pod.mkdir()
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(tmp_path / name, pod)
    (pod / "config.yaml").write_text(text["data"]["config.yaml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    port = free_port()

    first = [start(container, index, port) for index in range(2)]
    wait_for(tmp_path / "pods", "save", 10, first[0])
    for process in first:
        os.killpg(process.pid, signal.SIGKILL)
    assert gone(str(pod), 5.0)
    again = [start(container, index, port) for index in range(2)]
    ends = [process.told(200) for process in again]
    assert [code for code, _ in ends] == [0, 0], ends
    (restored,) = events(tmp_path / "pods", "restore")
    assert restored["step"] >= 10
    local = drumline("train", path, f"run.dir={tmp_path / 'local'}", "--nproc", "2")
    assert local.code == 0, local.err
    assert losses(tmp_path / "pods") == losses(tmp_path / "local")


def start(container: dict[str, Any], index: int, port: int) -> Forked:
    """A pod of the Job, whose names lead to loopback."""
    env = {each["name"]: each.get("value") for each in container["env"]}
    env |= {
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    python, option, module, *arguments = container["command"]
    assert (python, option) == ("python", "-m")
    return Forked(module, *arguments, env={**ENV, **env})
