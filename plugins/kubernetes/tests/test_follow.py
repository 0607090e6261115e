"""A run is submitted and followed by the real client over real HTTP. There is no cluster here."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import yaml

from drumline.errors import EnvironmentFault
from plugins.kubernetes.tests.api import Api, Look, container_status, ended, pod, running
from plugins.kubernetes.tests.submitting import DONE, FAILED, Train, on_request

pytestmark = pytest.mark.slow

OPERATORS = {
    "TrainJob": ("batch", "jobset.x-k8s.io", "trainer.kubeflow.org"),
    "JobSet": ("batch", "jobset.x-k8s.io"),
    "Job": ("batch",),
}
PATHS = {
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets",
    "Job": "/apis/batch/v1/namespaces/ml/jobs",
}
CORE = "/api/v1/namespaces/ml"


@pytest.mark.parametrize("kind", PATHS)
def test_the_first_kind_that_the_cluster_knows_is_made(run: Train, kind: str) -> None:
    code, api = run([Look(DONE)], groups=OPERATORS[kind])
    assert code == 0
    expected = [PATHS[kind], f"{CORE}/configmaps"]
    if kind == "Job":
        expected.append(f"{CORE}/services")
    assert api.paths("POST") == expected
    workload = api.posted(kind)
    (owner,) = api.posted("ConfigMap")["metadata"]["ownerReferences"]
    assert owner["kind"] == kind
    assert owner["name"] == workload["metadata"]["name"]
    assert owner["uid"] == f"uid-of-{kind}"


@pytest.mark.parametrize("kind", PATHS)
def test_its_pods_are_found_by_their_label(run: Train, kind: str) -> None:
    _, api = run([Look(DONE)], groups=OPERATORS[kind])
    label = "jobset.sigs.k8s.io/jobset-name"
    if kind == "Job":
        label = "batch.kubernetes.io/job-name"
    name = api.posted(kind)["metadata"]["name"]
    queries = dict(zip(api.paths("GET"), api.bodies("GET"), strict=True))
    assert queries[f"{CORE}/pods"] == {"labelSelector": [f"{label}={name}"]}


def test_submitted_and_followed_to_its_end(run: Train, capsys: Any) -> None:
    waiting = [pod("a-0", 0, "Pending"), pod("a-1", 1, "Pending", "gpu-2")]
    working = [running("a-0", 0), running("a-1", 1, "gpu-2")]
    finished = [
        pod("a-0", 0, "Succeeded", state=ended(0)),
        pod("a-1", 1, "Succeeded", "gpu-2", state=ended(0)),
    ]
    looks = [Look(pods=waiting), Look(pods=working), Look(DONE, finished)]
    log = "step 1 loss 2.5\nstep 2 loss 2.4\n"
    code, _ = run(looks, log=log)
    shown = capsys.readouterr()
    assert code == 0
    assert shown.out == log, "of rank 0's pod, once"
    assert "experimental" in shown.err
    for line in (
        "pod a-0 on gpu-1: Pending",
        "pod a-0 on gpu-1: Running",
        "pod a-1 on gpu-2: Succeeded",
        "finished",
    ):
        assert shown.err.count(line) == 1, shown.err


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
OUT_OF_MEMORY = {"containerStatuses": [container_status(ended(137, "OOMKilled"))]}


@pytest.mark.claim(
    "what Kubernetes would get has only fields that exist, and a failed pod is named with its node"
)
@pytest.mark.parametrize(
    ("bad", "line", "fix"),
    [
        (
            pod("a-1", 1, "Failed", "gpu-7", **OUT_OF_MEMORY),
            "pod a-1 on gpu-7: out of memory (OOMKilled)",
            "launch.memory",
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", **EVICTED),
            "pod a-1 on gpu-7: evicted: The node was low on resource",
            "launch.node_selector",
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", conditions=[DRAINED]),
            "pod a-1 on gpu-7: disrupted (EvictionByEvictionAPI)",
            "",
        ),
        (
            pod("a-1", 1, "Pending", "", conditions=[NO_NODE]),
            "pod a-1 on no node yet: no node for it (Unschedulable): 0/3",
            "",
        ),
        (
            pod("a-1", 1, "Pending", "gpu-7", state=NO_IMAGE),
            "ImagePullBackOff: not found",
            "launch.image",
        ),
        (
            pod("a-1", 1, "Failed", "gpu-7", state=ended(1)),
            "pod a-1 on gpu-7 ended first, with exit code 1",
            "kubectl logs a-1",
        ),
    ],
    ids=["memory", "evicted", "drained", "no node", "no image", "error"],
)
def test_a_failure_is_named_by_pod_and_node(
    run: Train, capsys: Any, bad: dict[str, Any], line: str, fix: str
) -> None:
    later = ended(1, at="2026-01-01T00:01:00Z")
    other = pod("a-0", 0, "Failed", state=later)
    code, _ = run([Look(pods=[bad]), Look(FAILED, [other, bad])])
    shown = capsys.readouterr().err
    assert code == 1
    assert line in shown
    assert fix in shown
    newest = shown.splitlines()[-1]
    assert newest.startswith("error: run-tiny-")
    assert "a-1" in newest


def test_what_a_pod_has_waited_for_is_not_blamed_later(run: Train, capsys: Any) -> None:
    waits = pod("a-0", 0, "Pending", "", conditions=[NO_NODE])
    failed = pod("a-0", 0, "Failed", state=ended(1))
    looks = [Look(pods=[waits]), Look(pods=[running("a-0", 0)]), Look(FAILED, [failed])]
    code, _ = run(looks)
    shown = capsys.readouterr().err
    assert code == 1
    assert "no node for it" in shown
    assert "ended first, with exit code 1" in shown.splitlines()[-1]


def test_warnings_of_the_run_alone_are_shown(run: Train, capsys: Any) -> None:
    of_another_run = {
        "metadata": {"name": "e", "namespace": "ml", "uid": "e"},
        "involvedObject": {"kind": "Job", "name": "run-tiny-other"},
        "reason": "FailedCreate",
        "message": "exceeded quota",
        "type": "Warning",
    }
    code, _ = run([Look(DONE, events=[of_another_run])])
    assert code == 0
    assert "exceeded quota" not in capsys.readouterr().err


def test_a_signal_removes_it_and_its_pods_save(
    run: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(api: Api) -> None:
        if not api.deleted.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    on_request(monkeypatch, "/pods", interrupt)
    working = Look(pods=[running("a-0", 0)])
    saved = Look(FAILED, [pod("a-0", 0, "Failed", state=ended(75))])
    code, api = run([working], leaving=[working, saved])
    assert code == 75
    assert api.bodies("DELETE") == [{"propagationPolicy": "Foreground"}]
    assert "/trainjobs/run-tiny-" in api.paths("DELETE")[0]
    shown = capsys.readouterr().err
    assert "the pods save" in shown
    assert "go on with --resume" in shown


def test_a_dry_run_prints_what_would_be_submitted(run: Train, capsys: Any) -> None:
    code, api = run(dry_run=True, groups=("batch", "jobset.x-k8s.io"))
    shown = capsys.readouterr().out
    assert code == 0
    assert not api.objects
    workload, config = yaml.safe_load_all(shown)
    assert workload["kind"] == "JobSet"
    assert config["kind"] == "ConfigMap"
    assert "\n  tiny.yaml: |\n    model:\n" in shown, "the config's own lines"


def test_who_does_not_wait_only_submits(run: Train) -> None:
    code, api = run(changes={"detach": True})
    assert code == 0
    assert api.paths("GET") == ["/apis/"]


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        ({"trainjobs": (403, "trainjobs is forbidden")}, "403 Forbidden: trainjobs is forbidden"),
        ({"configmaps": (403, "exceeded quota")}, "exceeded quota"),
    ],
)
def test_what_the_server_refuses_is_one_line(
    run: Train, refuse: dict[str, tuple[int, str]], message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        run(refuse=refuse)


def test_a_kind_that_the_cluster_does_not_know_is_refused(run: Train) -> None:
    with pytest.raises(EnvironmentFault, match=r"knows no JobSet.*use Job"):
        run(groups=("batch",), changes={"workload": "JobSet"})


def test_what_was_made_is_removed_if_the_rest_cannot_be(
    run: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Api] = []
    on_request(monkeypatch, "/configmaps", seen.append)
    with pytest.raises(EnvironmentFault):
        run(refuse={"configmaps": (403, "exceeded quota")})
    assert seen[0].changes() == ["POST", "POST", "DELETE"]
