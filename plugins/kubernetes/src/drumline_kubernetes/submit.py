"""Run `drumline train` on a machine outside of the pods: check the config, write the manifest, submit it, and follow the run."""

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

# Keys of files that `config.load` makes absolute. The registry does so for code (path.py:Name).
LOADED = ("chat_template", "calibration")
# Characters. A name may have 63 with what the operators append.
LONGEST_NAME = 36


def submit(launch: KubernetesOptions, request: Request, dry_run: bool) -> int:
    """Submit a run, follow it unless it is detached, and return its exit code. With `dry_run` print the manifest alone."""
    submission = submission_of(launch, request)
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
    return run.follower().until_end()


def _workload(launch: KubernetesOptions) -> str:
    """Return the kind of workload that a cluster would get, and print a note if the cluster cannot be asked."""
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


def submission_of(launch: KubernetesOptions, request: Request) -> Submission:
    """Return what is submitted for a run.

    Raises ConfigError for a run folder that would be lost with its pods, for a secret that pods
    would not have, and for a secret that all could read in the manifest.
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
    config = relative(loaded.config.model_dump(mode="json"), f"{loaded.base_dir.absolute()}/")
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
        # With --resume a pod does not take the config's word for it.
        command.append("--trust-remote-code")
    run_name = f"run-{stem}-{secrets.token_hex(3)}"
    return Submission(launch, run_name, text, path, tuple(command))


def relative(value: Any, base: str, key: str = "") -> Any:
    """Return the values of a config, with paths that loading has made absolute relative to the config again.

    The config lies elsewhere in the container. `base` is its folder here, and `key` the key of this
    value.
    """
    if isinstance(value, dict):
        return {name: relative(inner, base, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [relative(inner, base) for inner in value]
    if isinstance(value, str) and (key in LOADED or ".py:" in value):
        return value.removeprefix(base)
    return value


def require_secrets(config: str, launch: KubernetesOptions) -> None:
    """Raise ConfigError for a secret in the text of a config, and for a variable that pods do not have."""
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
