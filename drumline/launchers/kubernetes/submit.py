"""`drumline train` on a machine outside of the pods: check, write the manifest, submit, follow."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from drumline.core.explain import default_run_dir
from drumline.core.load import Request
from drumline.core.redact import OURS, REFERENCE
from drumline.core.yaml_lines import write_yaml
from drumline.errors import ConfigError, EnvironmentFault
from drumline.launchers.kubernetes.manifest import Submission

if TYPE_CHECKING:
    from drumline.launchers.kubernetes.spec import KubernetesLauncher

# Files that `core.load` finds; code (path.py:Name) is found by the registry.
LOADED = (
    "chat_template",
    "calibration",
)
LONGEST_NAME = 36  # characters; 63 are left for what the operators append


def submit(launch: KubernetesLauncher, request: Request, dry_run: bool) -> int:
    """Returns the run's exit code."""
    submission = submission_of(launch, request)
    from drumline.launchers.kubernetes.cluster import Cluster

    if dry_run:
        workload: str = launch.workload
        if workload == "auto":
            try:
                workload = Cluster.connect(launch).workload()
            except EnvironmentFault as fault:
                workload = "TrainJob"
                print(
                    f"note: a TrainJob, if the cluster has Kubeflow's operator; {fault.line()}",
                    file=sys.stderr,
                )
        print("---\n".join(write_yaml(each) for each in submission.objects(workload)), end="")
        return 0
    from drumline.launchers.kubernetes.runs import EXPERIMENTAL, Submitted

    print(EXPERIMENTAL, file=sys.stderr)
    cluster = Cluster.connect(launch)
    workload = cluster.workload()
    made = Submitted(
        launch, workload, submission.name, cluster.create(submission.objects(workload))
    )
    made.note()
    return 0 if launch.detach else made.follower().until_end()


def submission_of(launch: KubernetesLauncher, request: Request) -> Submission:
    """Raises ConfigError for a run folder that would be lost with its pods, and for secrets that pods would not have, or that all could
    read in the manifest."""
    loaded = request.loaded
    run_dir = str(
        PurePosixPath(launch.workdir) / (loaded.config.run.dir or default_run_dir(loaded.path))
    )
    volume = launch.volume_of(run_dir)
    if volume is None:
        fix = "name a claim under launch.volumes, and a folder on it with run.dir=…"
        raise ConfigError(
            f"{run_dir} lies on no volume: what the run saves would be lost with its pods",
            where="run.dir",
            fix=fix,
        )
    if volume.read_only:
        raise ConfigError(
            f"{run_dir} lies on the claim {volume.claim}, which is mounted read-only",
            where="run.dir",
            fix="choose another",
        )
    config = relative(loaded.config.model_dump(mode="json"), f"{loaded.base_dir.absolute()}/")
    config["run"]["dir"] = run_dir
    text = write_yaml(config)
    require_secrets(text, launch)
    stem = (
        re.sub(r"[^a-z0-9]+", "-", loaded.path.stem.lower())[:LONGEST_NAME].strip("-") or "config"
    )
    path = PurePosixPath(launch.workdir) / f"{stem}.yaml"
    more = ["--resume", request.resume] if request.resume else []
    allow = ["--allow", ",".join(request.allow)] if request.allow else []
    # With --resume a pod takes no word of the config for it.
    trust = ["--trust-remote-code"] if loaded.config.model.trust_remote_code else []
    command = (
        "python",
        "-m",
        "torch.distributed.run",
        "-m",
        "drumline",
        "train",
        str(path),
        *more,
        *allow,
        *trust,
    )
    return Submission(launch, f"run-{stem}-{secrets.token_hex(3)}", text, path, command)


def relative(value: Any, base: str, key: str = "") -> Any:
    """The config's values; those that loading has made absolute are relative to the config again, which lies elsewhere in the container."""
    if isinstance(value, dict):
        return {name: relative(inner, base, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [relative(inner, base) for inner in value]
    return (
        value.removeprefix(base)
        if isinstance(value, str) and (key in LOADED or ".py:" in value)
        else value
    )


def require_secrets(config: str, launch: KubernetesLauncher) -> None:
    for name in REFERENCE.findall(config):
        if name.startswith(OURS):
            what = "a secret in the config would stand in the manifest for all to read"
            raise ConfigError(
                what,
                where="launch.secrets",
                fix="write ${env:NAME} in its place, and name its Secret under launch.secrets",
            )
        if name not in launch.secrets and name not in launch.env:
            raise ConfigError(
                f"the config uses ${{env:{name}}}, which the pods do not have",
                where="launch.secrets",
                fix=f"add {name}",
            )
