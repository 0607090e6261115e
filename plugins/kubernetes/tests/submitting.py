"""A config with every key of the launcher, and `drumline train` of it against a server of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.config.load import Loaded, Request, load
from drumline.train.command import train
from drumline_kubernetes.manifest import Submission
from drumline_kubernetes.submit import make_submission
from plugins.kubernetes.tests.api import Api, Look, serving

LAUNCH: dict[str, Any] = {
    "kind": "kubernetes",
    "image": "registry.example/drumline:1",
    "namespace": "ml",
    "nodes": 2,
    "gpus": 8,
    "cpu": 16,
    "memory": "64Gi",
    "shm": "16Gi",
    "node_selector": {"pool": "h100"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "team", "value": "a"},
    ],
    "volumes": [
        {"claim": "runs", "path": "/runs"},
        {"claim": "data", "path": "/data", "read_only": True},
    ],
    "env": {"NCCL_DEBUG": "INFO"},
    "secrets": {
        "WANDB_API_KEY": {"secret": "wandb"},
        "HF_TOKEN": {"secret": "hub", "key": "token"},
    },
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "max_restarts": 2,
}
VALUES: dict[str, Any] = {
    "model": {"id": "/data/model"},
    "data": {"train": [{"kind": "file", "path": "/data/train.jsonl"}]},
    "run": {"dir": "/runs/tiny"},
}
DONE = [{"type": "Complete", "status": "True", "reason": "Done", "message": ""}]
FAILED = [
    {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "Job has failed",
    }
]


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a config into a folder, with other values of some keys of `launch`."""
    path = folder / "tiny.yaml"
    launch = {**LAUNCH, **changes}
    path.write_text(yaml.safe_dump({**VALUES, "launch": launch}))
    return path


def submission(loaded: Loaded, **options: Any) -> Submission:
    """Return what is submitted for a config. `options`: those of the command."""
    launch: Any = loaded.config.launch
    return make_submission(launch, Request(loaded, **options))


def objects(folder: Path, workload: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the objects that are submitted for a config."""
    loaded = load(write_config(folder, **changes), [])
    return submission(loaded).objects(workload)


def dry_run(path: Path, **options: Any) -> int:
    """Run `drumline train --dry-run`, and return its exit code."""
    return train(path, [], resume=None, allow=(), dry_run=True, **options)


class Train:
    """`drumline train` against a server of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch

    def __call__(
        self,
        looks: list[Look] | None = None,
        dry_run: bool = False,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[int, Api]:
        """Return the exit code, and the server. `options`: those of `serving`."""
        path = write_config(self.folder, **(changes or {}))
        with serving(self.folder, looks, **options) as (api, kubeconfig):
            self.monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            code = train(path, [], resume=None, allow=(), dry_run=dry_run)
        return code, api


def on_request(monkeypatch: pytest.MonkeyPatch, end: str, do: Callable[[Api], Any]) -> None:
    """Do something before the server answers a request of a path with this end."""
    before = Api.answer

    def answer(self: Api, method: str, path: str, *more: Any) -> Any:
        if path.endswith(end):
            do(self)
        return before(self, method, path, *more)

    monkeypatch.setattr(Api, "answer", answer)
