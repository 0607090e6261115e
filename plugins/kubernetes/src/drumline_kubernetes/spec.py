"""A run in the pods of a Kubernetes cluster. Experimental: it has been tested without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from drumline.errors import EnvironmentFault
from drumline_kubernetes.options import KubernetesOptions

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.config.load import Request
    from drumline_kubernetes.runs import KubernetesRun


class KubernetesLauncher(KubernetesOptions):
    """Pods of a Kubernetes cluster, one a node: a Kubeflow TrainJob, a JobSet or an Indexed Job. Experimental."""

    short: ClassVar[bool] = False
    kind: Literal["kubernetes"] = "kubernetes"

    def early(self, config: Config, plan_path: Path) -> NoReturn:
        what = "a run in a cluster is submitted by the command line, and not from Python"
        raise EnvironmentFault(what, where="launch.kind", fix="drumline train CONFIG.yaml")

    def submit(self, request: Request, dry_run: bool) -> int:
        from drumline_kubernetes.submit import submit

        return submit(self, request, dry_run)

    def submitted_run(self, values: dict[str, Any]) -> KubernetesRun:
        from drumline_kubernetes.runs import KubernetesRun

        return KubernetesRun.from_note(self, values)
