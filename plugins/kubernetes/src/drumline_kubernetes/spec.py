"""The launcher `kubernetes`. It is experimental, since it was never tested in a cluster."""

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
    """Runs in pods of a Kubernetes cluster, one a node. Experimental.

    It makes a Kubeflow TrainJob, a JobSet or an Indexed Job.
    """

    allows_kind_alone: ClassVar[bool] = False
    kind: Literal["kubernetes"] = "kubernetes"

    def early(self, config: Config, plan_path: Path) -> NoReturn:
        """Raise EnvironmentFault: only a run from Python comes here; the command line submits."""
        what = "a run in a cluster is submitted by the command line, and not from Python"
        raise EnvironmentFault(what, where="launch.kind", fix="drumline train CONFIG.yaml")

    def submit(self, request: Request, dry_run: bool) -> int:
        from drumline_kubernetes.submit import submit

        return submit(self, request, dry_run)

    def submitted_run(self, values: dict[str, Any]) -> KubernetesRun:
        from drumline_kubernetes.runs import KubernetesRun

        return KubernetesRun.from_note(self, values)
