"""What is submitted for a config: the objects, their fields, and mistakes that are refused before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.config.load import Request, load
from drumline.config.resume import Resume
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.train.command import launch_ranks
from drumline_kubernetes.manifest import require_known_fields
from plugins.kubernetes.tests.submitting import dry_run, objects, submission, write_config

pytestmark = pytest.mark.slow

KINDS = ("TrainJob", "JobSet", "Job")
# Keys whose values are names that a user chose, and no fields.
FREE = ("labels", "data", "nodeSelector", "requests", "limits", "selector")
TORCHRUN = ["python", "-m", "torch.distributed.run", "-m", "drumline", "train"]


def job_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the Job in a Job or a JobSet."""
    spec: dict[str, Any] = workload["spec"]
    if workload["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec


def pods_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the pods, with what a TrainJob has elsewhere."""
    if workload["kind"] != "TrainJob":
        return job_of(workload)["template"]["spec"]
    spec = workload["spec"]
    runtime = spec["runtimePatches"][0]["trainingRuntimeSpec"]
    (job,) = runtime["template"]["spec"]["replicatedJobs"]
    pods = deepcopy(job["template"]["spec"]["template"]["spec"])
    (container,) = pods["containers"]
    trainer = spec["trainer"]
    for key in ("image", "env", "command"):
        container[key] = trainer[key]
    container["resources"] = trainer["resourcesPerNode"]
    return pods


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the only container of the pods."""
    (container,) = pods_of(workload)["containers"]
    return container


def by(key: str, values: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the dictionaries of a list, each under its value of a key."""
    return {value[key]: value for value in values}


@pytest.mark.parametrize("workload", KINDS)
def test_the_container_has_what_the_yaml_says(tmp_path: Path, workload: str) -> None:
    made = objects(tmp_path, workload)[0]
    assert made["kind"] == workload
    assert made["metadata"]["namespace"] == "ml"
    container = container_of(made)
    assert container["image"] == "registry.example/drumline:1"
    assert container["command"] == [*TORCHRUN, "/workspace/tiny.yaml"]
    limits = {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert container["resources"]["limits"] == limits
    assert container["resources"]["requests"] == {"cpu": "16", **limits}


@pytest.mark.parametrize("workload", KINDS)
def test_variables_have_values_or_name_secrets(tmp_path: Path, workload: str) -> None:
    container = container_of(objects(tmp_path, workload)[0])
    env = by("name", container["env"])
    assert env["NCCL_DEBUG"]["value"] == "INFO"
    key = env["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "wandb", "key": "WANDB_API_KEY"}
    token = env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "hub", "key": "token"}


@pytest.mark.parametrize("workload", KINDS)
def test_volumes_are_mounted(tmp_path: Path, workload: str) -> None:
    made = objects(tmp_path, workload)[0]
    mounts = by("mountPath", container_of(made)["volumeMounts"])
    volumes = by("name", pods_of(made)["volumes"])

    def volume_at(path: str) -> dict[str, Any]:
        name = mounts[path]["name"]
        return volumes[name]

    assert volume_at("/runs")["persistentVolumeClaim"] == {"claimName": "runs"}
    assert not mounts["/runs"]["readOnly"]
    assert volume_at("/data")["persistentVolumeClaim"] == {"claimName": "data"}
    assert mounts["/data"]["readOnly"]
    shared_memory = {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volume_at("/dev/shm")["emptyDir"] == shared_memory
    name = made["metadata"]["name"]
    assert volume_at("/workspace/tiny.yaml")["configMap"] == {"name": name}


@pytest.mark.parametrize("workload", KINDS)
def test_pods_are_placed_as_the_yaml_says(tmp_path: Path, workload: str) -> None:
    pods = pods_of(objects(tmp_path, workload)[0])
    assert pods["nodeSelector"] == {"pool": "h100"}
    assert pods["serviceAccountName"] == "trainer"
    assert pods["imagePullSecrets"] == [{"name": "registry"}]
    assert pods["terminationGracePeriodSeconds"] == 90
    gpu, team = pods["tolerations"]
    assert gpu == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert team == {"key": "team", "operator": "Equal", "value": "a"}


@pytest.mark.parametrize("workload", KINDS)
def test_the_config_and_a_service_go_with_it(tmp_path: Path, workload: str) -> None:
    _, text, *services = objects(tmp_path, workload)
    sent = yaml.safe_load(text["data"]["tiny.yaml"])
    assert sent["run"]["dir"] == "/runs/tiny"
    assert sent["launch"]["kind"] == "kubernetes"
    kinds = [service["kind"] for service in services]
    if workload == "Job":
        assert kinds == ["Service"]
    else:
        assert kinds == []


@pytest.mark.parametrize("workload", ["Job", "JobSet"])
def test_pods_meet_at_the_first_one(tmp_path: Path, workload: str) -> None:
    made = objects(tmp_path, workload)[0]
    name = made["metadata"]["name"]
    job = job_of(made)
    assert job["completions"] == 2
    assert job["parallelism"] == 2
    assert job["completionMode"] == "Indexed"
    env = by("name", container_of(made)["env"])
    assert env["PET_NNODES"]["value"] == "2"
    assert env["PET_NPROC_PER_NODE"]["value"] == "8"
    assert env["PET_RDZV_ID"]["value"] == name
    index = env["PET_NODE_RANK"]["valueFrom"]["fieldRef"]
    assert "job-completion-index" in index["fieldPath"]
    first = f"{name}-node-0-0.{name}"
    if workload == "Job":
        first = f"{name}-0.{name}"
    assert env["PET_MASTER_ADDR"]["value"] == first


def test_pods_start_again_as_often_as_the_yaml_says(tmp_path: Path) -> None:
    job = objects(tmp_path, "Job")[0]["spec"]
    assert job["backoffLimit"] == 4, "each of two pods may fail twice"
    job_set = objects(tmp_path, "JobSet")[0]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 2


@pytest.mark.parametrize("workload", ["Job", "JobSet"])
def test_a_node_that_is_drained_is_no_failure(tmp_path: Path, workload: str) -> None:
    job = job_of(objects(tmp_path, workload)[0])
    (rule,) = job["podFailurePolicy"]["rules"]
    (condition,) = rule["onPodConditions"]
    assert rule["action"] == "Ignore"
    assert condition["type"] == "DisruptionTarget"


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all dictionaries whose keys are fields."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*place, index))
    if not isinstance(value, dict):
        return
    if place and place[-1] in FREE:
        return
    yield place
    for key, inner in value.items():
        yield from places(inner, (*place, key))


def with_unknown_field(manifest: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    """Return a copy of a manifest with a field that does not exist."""
    spoilt = deepcopy(manifest)
    inside: Any = spoilt
    for key in place:
        inside = inside[key]
    inside["notAField"] = "x"
    return spoilt


@pytest.mark.claim(
    "what Kubernetes would get has only fields that exist, and a failed pod is named with its node"
)
@pytest.mark.parametrize("workload", KINDS)
def test_a_field_that_does_not_exist_is_refused_at_each_level(
    tmp_path: Path, workload: str
) -> None:
    for manifest in objects(tmp_path, workload):
        kind = manifest["kind"]
        found = list(places(manifest))
        at_least = 2
        if kind == workload:
            at_least = 16
        assert len(found) >= at_least
        for place in found:
            spoilt = with_unknown_field(manifest, place)
            with pytest.raises(DrumlineError, match=f"{kind} has no field .*notAField"):
                require_known_fields(spoilt)
        assert require_known_fields(manifest) == manifest


def test_paths_beside_the_yaml_stay_relative(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    loaded = load(path, ["model.chat_template=chat.jinja", "run.dir=/runs/x"])
    template = str(loaded.config.model.chat_template)
    assert Path(template).is_absolute()
    sent = yaml.safe_load(submission(loaded).config)
    assert sent["model"]["chat_template"] == "chat.jinja"
    assert sent["run"]["dir"] == "/runs/x"


def test_options_of_the_command_go_along(tmp_path: Path) -> None:
    loaded = load(write_config(tmp_path), [])
    resumed = submission(loaded, resume=Resume(), allow=("optimizer.lr",))
    assert resumed.command[-4:] == ("--resume", "newest", "--allow", "optimizer.lr")
    model = loaded.config.model.model_copy(update={"trust_remote_code": True})
    config = loaded.config.model_copy(update={"model": model})
    trusting = replace(loaded, config=config)
    assert submission(trusting, resume=Resume()).command[-1] == "--trust-remote-code"


def strategy_with(key: str) -> str:
    """Return an override whose strategy has an API key."""
    monitor = f"{{monitor: {{api_key: '{key}'}}}}"
    return f"strategy={{kind: zero2, options: {monitor}}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.dir=/elsewhere/x", "/elsewhere/x lies on no volume"),
        ("run.dir=runs/x", "/workspace/runs/x lies on no volume"),
        ("run.dir=/data/x", "mounted read-only"),
        ("launch.env.API_KEY=abcdefgh", "is a secret"),
        ("launch.gpus=-1", "launch.gpus"),
        ("launch.memory=64GB", "launch.memory"),
        ("launch.volumes.1.path=/runs", "same path"),
        (strategy_with("hunter2hunter2"), "would stand in the manifest"),
        (strategy_with("${env:MINE}"), "the pods do not have"),
    ],
)
def test_mistakes(tmp_path: Path, override: str, message: str) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match=message):
        submission(load(path, [override]))


def kinds_in(text: str) -> list[str]:
    """Return the kinds of the objects of a manifest."""
    return [each["kind"] for each in yaml.safe_load_all(text)]


def test_a_dry_run_needs_no_cluster(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    path = write_config(tmp_path)
    assert dry_run(path) == 0
    shown = capsys.readouterr()
    assert kinds_in(shown.out) == ["TrainJob", "ConfigMap"]
    assert "no cluster is known" in shown.err
    assert dry_run(path, everything=True) == 0
    whole = capsys.readouterr().out
    keys = whole.partition("\n# Every key of the config:\n")[2]
    assert keys.startswith("# model:\n")
    assert "#   lr: 2.0e-05\n" in keys
    assert kinds_in(whole) == ["TrainJob", "ConfigMap"], "it can still be submitted"


def test_python_is_told_to_use_the_command_line(tmp_path: Path) -> None:
    request = Request(load(write_config(tmp_path), []))
    with pytest.raises(EnvironmentFault, match="drumline train CONFIG"):
        launch_ranks(request, display=False)


@pytest.mark.parametrize(
    ("kind", "module"), [("TrainJob", "kubeflow_trainer_api"), ("Job", "kubernetes")]
)
def test_a_library_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    package = module.replace("_", "-")
    with pytest.raises(EnvironmentFault) as fault:
        require_known_fields({"kind": kind})
    assert fault.value.line() == (
        f"launch.kind: the package {package} is missing — pip install {package}"
    )
