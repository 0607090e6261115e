"""`launch.kind: kubernetes`: what is submitted, and how a run is followed, by the real client over real HTTP. There is no cluster here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.config.load import Request, load
from drumline.config.resume import Resume
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from tests.kubernetes_api import RUNNING, Api, Look, ended, pod, serving

pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
pytest.importorskip(
    "kubeflow_trainer_api", reason="the package kubeflow-trainer-api is not installed"
)

from drumline.launch.kubernetes import follow
from drumline.launch.kubernetes.manifest import checked
from drumline.launch.kubernetes.submit import submission_of
from drumline.train.command import launch_ranks, train

pytestmark = pytest.mark.slow

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
KINDS = ("TrainJob", "JobSet", "Job")


def config(folder: Path, **changes: Any) -> Path:
    values = {
        "model": {"id": "/data/model"},
        "data": {"train": [{"kind": "file", "path": "/data/train.jsonl"}]},
        "run": {"dir": "/runs/tiny"},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**values, "launch": {**LAUNCH, **changes}}))
    return path


def objects(folder: Path, workload: str, **changes: Any) -> list[dict[str, Any]]:
    loaded = load(config(folder, **changes), [])
    return submission_of(loaded.config.launch, Request(loaded)).objects(workload)  # type: ignore[arg-type]


def pods_of(workload: dict[str, Any]) -> dict[str, Any]:
    """What was set of the pods, wherever the kind has it."""
    spec = workload["spec"]
    if workload["kind"] == "TrainJob":
        patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
            "replicatedJobs"
        ][0]["template"]["spec"]
        found = deepcopy(patch["template"]["spec"])
        trainer = spec["trainer"]
        found["containers"][0] |= {
            "image": trainer["image"],
            "env": trainer["env"],
            "resources": trainer["resourcesPerNode"],
        }
        return {**found, "containers": [{**found["containers"][0], "command": trainer["command"]}]}
    job = spec["replicatedJobs"][0]["template"]["spec"] if workload["kind"] == "JobSet" else spec
    return job["template"]["spec"]  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------- what is submitted


@pytest.mark.parametrize("workload", KINDS)
def test_the_manifest_has_what_the_yaml_says(tmp_path: Path, workload: str) -> None:
    made, text, *rest = objects(tmp_path, workload)
    pods = pods_of(made)
    (container,) = pods["containers"]
    assert made["kind"] == workload and made["metadata"]["namespace"] == "ml"
    assert container["image"] == "registry.example/drumline:1"
    assert container["command"] == [
        "python",
        "-m",
        "torch.distributed.run",
        "-m",
        "drumline",
        "train",
        "/workspace/tiny.yaml",
    ]
    limits = {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": {"cpu": "16", **limits}, "limits": limits}
    env = {each["name"]: each for each in container["env"]}
    assert env["NCCL_DEBUG"] == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert env["WANDB_API_KEY"]["valueFrom"] == {
        "secretKeyRef": {"name": "wandb", "key": "WANDB_API_KEY"}
    }
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pods["volumes"]}
    assert (
        volumes[mounts["/runs"]["name"]]["persistentVolumeClaim"] == {"claimName": "runs"}
        and not mounts["/runs"]["readOnly"]
    )
    assert (
        volumes[mounts["/data"]["name"]]["persistentVolumeClaim"] == {"claimName": "data"}
        and mounts["/data"]["readOnly"]
    )
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "16Gi",
    }
    assert volumes[mounts["/workspace/tiny.yaml"]["name"]]["configMap"] == {
        "name": made["metadata"]["name"]
    }
    assert pods["nodeSelector"] == {"pool": "h100"} and pods["serviceAccountName"] == "trainer"
    assert (
        pods["imagePullSecrets"] == [{"name": "registry"}]
        and pods["terminationGracePeriodSeconds"] == 90
    )
    taints = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a"},
    ]
    assert pods["tolerations"] == taints
    sent = yaml.safe_load(text["data"]["tiny.yaml"])
    assert sent["run"]["dir"] == "/runs/tiny" and sent["launch"]["kind"] == "kubernetes"
    assert [each["kind"] for each in rest] == (["Service"] if workload == "Job" else [])


def test_a_job_and_a_job_set_say_how_pods_meet_and_start_again(tmp_path: Path) -> None:
    for workload in ("Job", "JobSet"):
        made = objects(tmp_path, workload)[0]
        name, spec = made["metadata"]["name"], made["spec"]
        job = spec if workload == "Job" else spec["replicatedJobs"][0]["template"]["spec"]
        env = {each["name"]: each for each in job["template"]["spec"]["containers"][0]["env"]}
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
        assert (
            env["PET_NNODES"]["value"],
            env["PET_NPROC_PER_NODE"]["value"],
            env["PET_RDZV_ID"]["value"],
        ) == ("2", "8", name)
        assert "job-completion-index" in env["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
        first = f"{name}-0.{name}" if workload == "Job" else f"{name}-node-0-0.{name}"
        assert env["PET_MASTER_ADDR"]["value"] == first
        (rule,) = job["podFailurePolicy"]["rules"]
        assert (
            rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
        )
        restarts = (
            job["backoffLimit"] if workload == "Job" else spec["failurePolicy"]["maxRestarts"]
        )
        assert restarts == (4 if workload == "Job" else 2)


def levels(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all dictionaries whose keys are fields, and not names that a user chose."""
    if isinstance(value, dict) and place[-1:] not in [
        (free,) for free in ("labels", "data", "nodeSelector", "requests", "limits", "selector")
    ]:
        yield place
        for key, inner in value.items():
            yield from levels(inner, (*place, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from levels(inner, (*place, index))


@pytest.mark.claim(
    "what Kubernetes would get has only fields that exist, and a failed pod is named with its node"
)
@pytest.mark.parametrize("workload", KINDS)
def test_a_field_that_does_not_exist_is_refused_at_each_level(
    tmp_path: Path, workload: str
) -> None:
    for manifest in objects(tmp_path, workload):
        places = list(levels(manifest))
        assert len(places) > (15 if manifest["kind"] == workload else 1)
        for place in places:
            spoilt = deepcopy(manifest)
            inside = spoilt
            for key in place:
                inside = inside[key]
            inside["notAField"] = "x"
            with pytest.raises(DrumlineError, match=f"{manifest['kind']} has no field .*notAField"):
                checked(spoilt)
        assert checked(manifest) == manifest


def test_paths_beside_the_yaml_stay_relative(tmp_path: Path) -> None:
    path = config(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    loaded = load(path, ["model.chat_template=chat.jinja", "run.dir=/runs/x"])
    assert Path(str(loaded.config.model.chat_template)).is_absolute()  # type: ignore[union-attr]
    submission = submission_of(
        loaded.config.launch, Request(loaded, resume=Resume(), allow=("optimizer.lr",))
    )  # type: ignore[arg-type]
    sent = yaml.safe_load(submission.config)
    assert sent["model"]["chat_template"] == "chat.jinja" and sent["run"]["dir"] == "/runs/x"
    assert submission.command[-4:] == ("--resume", "newest", "--allow", "optimizer.lr")
    model = loaded.config.model.model_copy(update={"trust_remote_code": True})
    trusting = replace(loaded, config=loaded.config.model_copy(update={"model": model}))
    assert (
        submission_of(loaded.config.launch, Request(trusting, resume=Resume())).command[-1]
        == "--trust-remote-code"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.dir=/elsewhere/x"], "/elsewhere/x lies on no volume"),
        (["run.dir=runs/x"], "/workspace/runs/x lies on no volume"),
        (["run.dir=/data/x"], "mounted read-only"),
        (["launch.env.API_KEY=abcdefgh"], "is a secret"),
        (["launch.gpus=-1"], "launch.gpus"),
        (["launch.memory=64GB"], "launch.memory"),
        (["launch.volumes.1.path=/runs"], "same path"),
        (
            ["strategy={kind: zero2, options: {monitor: {api_key: hunter2hunter2}}}"],
            "would stand in the manifest",
        ),
        (
            ["strategy={kind: zero2, options: {monitor: {api_key: '${env:MINE}'}}}"],
            "the pods do not have",
        ),
    ],
)
def test_mistakes(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded = load(config(tmp_path), overrides)
        submission_of(loaded.config.launch, Request(loaded))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- submitting and following


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`drumline train` against a server that shows the looks; returns the exit code and the server."""
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)

    def train_against(
        looks: list[Look] | None = None,
        dry_run: bool = False,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        with serving(tmp_path, looks, **options) as (api, kubeconfig):
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            path = config(tmp_path, **(changes or {}))
            return train(path, [], resume=None, allow=(), dry_run=dry_run), api

    return train_against


def on_request(monkeypatch: pytest.MonkeyPatch, end: str, do: Callable[[Api], Any]) -> None:
    """Do something before the server answers a request of a path with this end."""
    before = Api.answer

    def answer(self: Api, method: str, path: str, *more: Any) -> Any:
        if path.endswith(end):
            do(self)
        return before(self, method, path, *more)

    monkeypatch.setattr(Api, "answer", answer)


DONE = [{"type": "Complete", "status": "True", "reason": "Done", "message": ""}]
FAILED = [
    {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "Job has failed",
    }
]


@pytest.mark.parametrize(
    ("groups", "kind", "path"),
    [
        (
            ("batch", "jobset.x-k8s.io", "trainer.kubeflow.org"),
            "TrainJob",
            "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs",
        ),
        (
            ("batch", "jobset.x-k8s.io"),
            "JobSet",
            "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets",
        ),
        (("batch",), "Job", "/apis/batch/v1/namespaces/ml/jobs"),
    ],
)
def test_submitted_and_followed_to_its_end(
    run: Any, capsys: Any, groups: tuple[str, ...], kind: str, path: str
) -> None:
    looks = [
        Look(pods=[pod("a-0", 0, "Pending"), pod("a-1", 1, "Pending", node="gpu-2")]),
        Look(
            pods=[
                pod("a-0", 0, "Running", state=RUNNING),
                pod("a-1", 1, "Running", node="gpu-2", state=RUNNING),
            ]
        ),
        Look(
            DONE,
            [
                pod("a-0", 0, "Succeeded", state=ended(0)),
                pod("a-1", 1, "Succeeded", node="gpu-2", state=ended(0)),
            ],
        ),
    ]
    code, api = run(looks, groups=groups, log="step 1 loss 2.5\nstep 2 loss 2.4\n")
    out, err = capsys.readouterr()
    assert code == 0
    posted = [(path, body["kind"]) for method, path, body in api.requests if method == "POST"]
    more = [("/api/v1/namespaces/ml/services", "Service")] if kind == "Job" else []
    assert posted == [(path, kind), ("/api/v1/namespaces/ml/configmaps", "ConfigMap"), *more]
    name = api.posted(kind)["metadata"]["name"]
    owner = api.posted("ConfigMap")["metadata"]["ownerReferences"]
    assert [(each["kind"], each["name"], each["uid"]) for each in owner] == [
        (kind, name, f"uid-of-{kind}")
    ]
    listed = {path: query for method, path, query in api.requests if method == "GET"}[
        "/api/v1/namespaces/ml/pods"
    ]
    label = "batch.kubernetes.io/job-name" if kind == "Job" else "jobset.sigs.k8s.io/jobset-name"
    assert listed == {"labelSelector": [f"{label}={name}"]}
    assert out == "step 1 loss 2.5\nstep 2 loss 2.4\n"  # of rank 0's pod, once
    assert "experimental" in err
    for line in (
        "pod a-0 on gpu-1: Pending",
        "pod a-0 on gpu-1: Running",
        "pod a-1 on gpu-2: Succeeded",
        "finished",
    ):
        assert err.count(line) == 1, err


OOM = {
    "containerStatuses": [
        {**pod("x", 0, "", state=ended(137, "OOMKilled"))["status"]["containerStatuses"][0]}
    ]
}
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
DRAINED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes have 8 nvidia.com/gpu",
}
NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
QUOTA = {
    "metadata": {"name": "e", "namespace": "ml", "uid": "e"},
    "involvedObject": {"kind": "Job", "name": "run-tiny-other"},
    "reason": "FailedCreate",
    "message": "exceeded quota",
    "type": "Warning",
}


@pytest.mark.claim(
    "what Kubernetes would get has only fields that exist, and a failed pod is named with its node"
)
@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (
            pod("a-1", 1, "Failed", "gpu-7", **OOM),
            ["pod a-1 on gpu-7: out of memory (OOMKilled)", "launch.memory"],
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", **EVICTED),
            ["pod a-1 on gpu-7: evicted: The node was low on resource"],
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", conditions=[DRAINED]),
            ["pod a-1 on gpu-7: disrupted (EvictionByEvictionAPI)"],
        ),
        (
            pod("a-1", 1, "Pending", "", conditions=[NO_NODE]),
            ["pod a-1 on no node yet: no node for it (Unschedulable): 0/3"],
        ),
        (
            pod("a-1", 1, "Pending", "gpu-7", state=NO_IMAGE),
            ["ImagePullBackOff: not found", "launch.image"],
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", state=ended(1)),
            ["pod a-1 on gpu-7 ended first, with exit code 1", "kubectl logs a-1"],
        ),
    ],
    ids=["memory", "evicted", "drained", "no node", "no image", "error"],
)
def test_a_failure_is_named_by_pod_and_node(
    run: Any, capsys: Any, bad: dict[str, Any], parts: list[str]
) -> None:
    other = pod("a-0", 0, "Failed", state=ended(1, at="2026-01-01T00:01:00Z"))
    returned, _ = run([Look(pods=[bad]), Look(FAILED, [other, bad])])
    err = capsys.readouterr().err
    assert returned == 1
    assert all(part in err for part in parts), err
    assert err.splitlines()[-1].startswith("error: run-tiny-") and "a-1" in err.splitlines()[-1]


def test_what_a_pod_has_waited_for_is_not_blamed_later(run: Any, capsys: Any) -> None:
    waits = Look(pods=[pod("a-0", 0, "Pending", "", conditions=[NO_NODE])])
    runs = Look(pods=[pod("a-0", 0, "Running", state=RUNNING)])
    code, _ = run([waits, runs, Look(FAILED, [pod("a-0", 0, "Failed", state=ended(1))])])
    err = capsys.readouterr().err
    assert (
        code == 1
        and "no node for it" in err
        and "ended first, with exit code 1" in err.splitlines()[-1]
    )


def test_warnings_of_the_run_alone_are_shown(run: Any, capsys: Any) -> None:
    code, _ = run([Look(DONE, events=[QUOTA])])
    assert code == 0 and "exceeded quota" not in capsys.readouterr().err


def test_a_signal_removes_it_and_its_pods_save(
    run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Look(pods=[pod("a-0", 0, "Running", state=RUNNING)])
    on_request(
        monkeypatch,
        "/pods",
        lambda api: os.kill(os.getpid(), 0 if api.deleted.is_set() else signal.SIGTERM),
    )
    code, api = run(
        [running], leaving=[running, Look(FAILED, [pod("a-0", 0, "Failed", state=ended(75))])]
    )
    assert code == 75
    (deleted,) = [(path, body) for method, path, body in api.requests if method == "DELETE"]
    assert (
        deleted[1] == {"propagationPolicy": "Foreground"} and "/trainjobs/run-tiny-" in deleted[0]
    )
    err = capsys.readouterr().err
    assert "the pods save" in err and "go on with --resume" in err


def test_a_dry_run_prints_what_would_be_submitted(run: Any, capsys: Any) -> None:
    code, api = run(dry_run=True, groups=("batch", "jobset.x-k8s.io"))
    out, _ = capsys.readouterr()
    assert code == 0 and not api.objects
    assert [each["kind"] for each in yaml.safe_load_all(out)] == ["JobSet", "ConfigMap"]
    assert "\n  tiny.yaml: |\n    model:\n" in out, "the config's own lines"


def test_who_does_not_wait_only_submits(run: Any) -> None:
    code, api = run(changes={"detach": True})
    assert code == 0 and {
        path.rpartition("/")[2] for method, path, _ in api.requests if method == "GET"
    } == {""}


def test_a_dry_run_needs_no_cluster(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert train(config(tmp_path), [], resume=None, allow=(), dry_run=True) == 0
    out, err = capsys.readouterr()
    assert [each["kind"] for each in yaml.safe_load_all(out)] == [
        "TrainJob",
        "ConfigMap",
    ] and "no cluster is known" in err
    assert train(config(tmp_path), [], resume=None, allow=(), dry_run=True, everything=True) == 0
    whole = capsys.readouterr().out
    keys = whole.partition("\n# Every key of the config:\n")[2]
    assert keys.startswith("# model:\n") and "#   lr: 2.0e-05\n" in keys
    assert [each["kind"] for each in yaml.safe_load_all(whole)] == ["TrainJob", "ConfigMap"], (
        "it can still be submitted"
    )


def test_what_the_server_refuses_is_one_line(run: Any) -> None:
    with pytest.raises(EnvironmentFault, match="403 Forbidden: trainjobs is forbidden"):
        run(refuse={"trainjobs": (403, "trainjobs is forbidden")})
    with pytest.raises(EnvironmentFault, match="exceeded quota"):
        run(refuse={"configmaps": (403, "exceeded quota")})
    with pytest.raises(EnvironmentFault, match=r"knows no JobSet.*use Job"):
        run(groups=("batch",), changes={"workload": "JobSet"})


def test_what_was_made_is_removed_where_the_rest_cannot_be(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Api] = []
    on_request(monkeypatch, "/configmaps", seen.append)
    with pytest.raises(EnvironmentFault):
        run(refuse={"configmaps": (403, "exceeded quota")})
    assert [method for method, _, _ in seen[0].requests if method != "GET"] == [
        "POST",
        "POST",
        "DELETE",
    ]


def test_python_is_told_to_use_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="drumline train CONFIG"):
        launch_ranks(Request(load(config(tmp_path), [])), display=False)
