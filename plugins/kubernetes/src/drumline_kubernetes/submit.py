"""Submit a run to a cluster: check the config, write the manifest, submit and follow it."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import PurePosixPath
from typing import Any

from drumline.config.load import Request
from drumline.errors import ConfigError, EnvironmentFault
from drumline.launch.submitted import note_run
from drumline.plan.explain import default_run_dir
from drumline.system.redact import OURS, REFERENCE
from drumline.system.yaml_lines import write_yaml
from drumline_kubernetes.cluster import Cluster
from drumline_kubernetes.manifest import Submission
from drumline_kubernetes.options import KubernetesOptions
from drumline_kubernetes.runs import KubernetesRun, print_experimental

# Keys with paths of files that `config.load` makes absolute. The registry makes paths of code
# (path.py:Name) absolute.
LOADED = ("chat_template", "calibration")
# Characters of a run's name. With what the operators append it may have 63.
LONGEST_NAME = 36


def submit(launch: KubernetesOptions, request: Request, dry_run: bool) -> int:
    """Submit a run, follow it unless it is detached, and return its exit code.

    With `dry_run` only print the manifest.
    """
    submission = make_submission(launch, request)
    if dry_run:
        objects = submission.objects(_workload(launch))
        print("---\n".join(write_yaml(each) for each in objects), end="")
        return 0
    print_experimental()
    cluster = Cluster.connect(launch)
    workload = cluster.workload()
    uid = cluster.create(submission.objects(workload))
    run = KubernetesRun(launch, workload, submission.name, uid)
    note_run(run.folder, launch, run)
    if launch.detach:
        return 0
    return run.follower().follow_to_end()


def _workload(launch: KubernetesOptions) -> str:
    """Return the kind of workload to make; without an answer of the cluster, guess and say so."""
    if launch.workload != "auto":
        return str(launch.workload)
    try:
        return Cluster.connect(launch).workload()
    except EnvironmentFault as fault:
        print(
            f"note: a TrainJob, if the cluster has Kubeflow's operator; {fault.line()}",
            file=sys.stderr,
        )
        return "TrainJob"


def make_submission(launch: KubernetesOptions, request: Request) -> Submission:
    """Return what is submitted for a run.

    Raises:
        ConfigError: The run folder would be lost with its pods, the pods would not have a secret,
            or all could read a secret in the manifest.
    """
    loaded = request.loaded
    folder = loaded.config.run.dir or default_run_dir(loaded.path)
    run_dir = str(PurePosixPath(launch.workdir) / folder)
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
    config = with_relative_paths(
        loaded.config.model_dump(mode="json"), f"{loaded.base_dir.absolute()}/"
    )
    config["run"]["dir"] = run_dir
    text = write_yaml(config)
    require_secrets(text, launch)
    name = re.sub(r"[^a-z0-9]+", "-", loaded.path.stem.lower())
    stem = name[:LONGEST_NAME].strip("-") or "config"
    path = PurePosixPath(launch.workdir) / f"{stem}.yaml"
    command = ["python", "-m", "torch.distributed.run", "-m", "drumline", "train", str(path)]
    if request.resume:
        command += ["--resume", str(request.resume)]
    if request.allow:
        command += ["--allow", ",".join(request.allow)]
    if loaded.config.model.trust_remote_code:
        # With --resume a pod does not trust the config's own key.
        command.append("--trust-remote-code")
    run_name = f"run-{stem}-{secrets.token_hex(3)}"
    return Submission(launch, run_name, text, path, tuple(command))


def with_relative_paths(value: Any, base: str, key: str = "") -> Any:
    """Return the values of a config, with the absolute paths that loading made relative again.

    The config is in another folder in the container.

    Args:
        value: The values, or a part of them.
        base: Folder of the config on this machine, with a slash at its end.
        key: Key of `value`.
    """
    if isinstance(value, dict):
        return {name: with_relative_paths(inner, base, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_relative_paths(inner, base) for inner in value]
    if isinstance(value, str) and (key in LOADED or ".py:" in value):
        return value.removeprefix(base)
    return value


def require_secrets(config: str, launch: KubernetesOptions) -> None:
    """Check that the text of a config has no secret, and only variables that pods have.

    Raises:
        ConfigError: It has a secret, or another variable.
    """
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
