"""What the pods run: the command and the variables of the manifest, as processes on loopback."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from plugins.kubernetes.tests.submitting import submission
from tests.distributed.ranks import free_port
from tests.faults.live import gone, wait_for
from tests.forks import Forked
from tests.harness import ENV, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


class Pod:
    """The folder in which both pods lie, and the container that they run."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder = folder / "pod"
        volume = f"{{claim: runs, path: {folder}}}"
        keys = f"image: drumline, nodes: 2, workdir: {self.folder}, volumes: [{volume}]"
        launch = f"launch={{kind: kubernetes, {keys}}}"
        loaded = load(config, [launch, f"run.dir={folder / 'pods'}"])
        job, text, _ = submission(loaded).objects("Job")
        self.folder.mkdir()
        for name in ("train.jsonl", "eval.jsonl"):
            shutil.copy(folder / name, self.folder)
        (self.folder / "config.yaml").write_text(text["data"]["config.yaml"])
        (container,) = job["spec"]["template"]["spec"]["containers"]
        self.container: dict[str, Any] = container

    def start(self, index: int, port: int) -> Forked:
        """Start a pod of the Job, whose names lead to loopback."""
        env = {each["name"]: each.get("value") for each in self.container["env"]}
        env["PET_NODE_RANK"] = str(index)
        env["PET_MASTER_ADDR"] = "127.0.0.1"
        env["PET_MASTER_PORT"] = str(port)
        python, option, module, *arguments = self.container["command"]
        assert (python, option) == ("python", "-m")
        return Forked(module, *arguments, env={**ENV, **env})


def test_two_pods_train_and_go_on_when_they_start_again(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    config = write_config(tmp_path, model, run={"steps": 60}, checkpoint={"every": 5})
    pod = Pod(tmp_path, config)
    run = tmp_path / "pods"
    port = free_port()

    before = [pod.start(index, port) for index in range(2)]
    wait_for(run, "save", 10, before[0])
    for process in before:
        os.killpg(process.pid, signal.SIGKILL)
    assert gone(str(pod.folder), 5.0)
    again = [pod.start(index, port) for index in range(2)]
    for process in again:
        code, output = process.told(200)
        assert code == 0, output
    (restored,) = events(run, "restore")
    assert restored["step"] >= 10
    local = tmp_path / "local"
    done = drumline("train", config, f"run.dir={local}", "--nproc", "2")
    assert done.code == 0, done.err
    assert losses(run) == losses(local)
