"""The base class of launchers: the keys that all kinds have, and how a kind starts its ranks.

This module does not import torch. Types of rooms above this one are named in docstrings: a Plan is
`plan.plan.Plan`, a Config is `config.config.Config`, a Request is `config.load.Request`, a Replans
is `plan.out_of_memory.Replans`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from drumline.config.registry import Registered, Spec
from drumline.config.section import Seconds
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Machine
from drumline.system.network import LONG_SECONDS, START_SECONDS, STEP_SECONDS

# Runs a Python module on a host, as `system.process.run_module` does on this one. Arguments: the name
# of the module, its standard input, and the limit in seconds. Result: the exit code (None if time
# ran out), the standard output and the standard error.
RunModule = Callable[[str, str, float], tuple[int | None, str, str]]


@dataclass(frozen=True)
class Reached:
    """A host of a run.

    Attributes:
        address: Its address; empty if it is not known.
        run: Runs a module of Drumline on it.
    """

    address: str
    run: RunModule


class SubmittedRun(ABC):
    """A run that another program holds, with its folder on hosts of that program.

    `LauncherSpec.submit` notes it in a folder here (`launch.submitted.note_run`). The commands
    `drumline ps`, `logs`, `follow` and `stop` call these methods for that folder.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """The place of the run in one line, such as `Job a in namespace b`."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return what is noted of the run, as JSON. `LauncherSpec.submitted_run` gets it back."""

    @abstractmethod
    def state(self) -> str:
        """Return the state: queued, running, finished, failed, gone, or (no answer) unknown."""

    @abstractmethod
    def print_logs(self, rank: int | None) -> None:
        """Print the logs of one rank, or of all ranks if `rank` is None.

        Raises:
            UserError: There are none.
        """

    @abstractmethod
    def follow(self) -> int:
        """Show what the run does until it ends, and return its exit code.

        Ctrl-C ends the view and not the run.
        """

    @abstractmethod
    def stop(self) -> None:
        """Have the run save and end, and wait until it has ended."""


class LauncherSpec(Spec):
    """The base of all launchers.

    A launcher of your own overrides `start`; or `submit`, if another program runs `drumline train`;
    or `rank_variables`, if another program starts the ranks.
    """

    group: ClassVar[str] = "launchers"
    module_pattern: ClassVar[str] = "drumline.launch.{}.spec"
    noun: ClassVar[str] = "launcher"
    yaml_key: ClassVar[str] = "launch"
    extra_module: ClassVar[str] = "drumline.launch.spec"
    default: ClassVar[str] = "local"
    # Whether the lease of the run folder is held on another host, by the program that starts the
    # ranks there, and not by this process. Only one process at a time holds the lease of a run
    # folder and may write to it (`launch.lease`).
    is_lease_remote: ClassVar[bool] = False
    # Whether hosts may come and go, so that `nodes` may be {min, max}.
    elastic: ClassVar[bool] = False

    nproc: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="Processes of each host; null: one per GPU, or 1 without GPUs.",
    )
    max_restarts: int = Field(
        3, ge=0, le=10**6, description="Restarts after a rank fails; progress resets the count."
    )
    port: int | None = Field(
        None,
        gt=0,
        lt=65536,
        description="Rendezvous port, on loopback where all ranks are on this machine; null: any free port.",
    )
    grace_seconds: Seconds = Field(
        60.0, description="Time for the ranks to save after SIGTERM, before they are killed."
    )
    timeout_seconds: Seconds | None = Field(
        None,
        description=f"A collective that takes longer than this fails; null: {START_SECONDS:g} s until the first step, then"
        f" {STEP_SECONDS:g} s, or three times the longest step, and {LONG_SECONDS:g} s for evaluations, saves and rollouts.",
    )
    interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,63}$",
        description="The network interface between hosts, for gloo and NCCL; null: that of the route to the other hosts.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_changing_hosts(cls, values: Any) -> Any:
        if cls.elastic or not isinstance(values, Mapping):
            return values
        if isinstance(values.get("nodes"), Mapping):
            raise ValueError(
                "nodes: {min, max} is for launch.kind: ssh: only there hosts may come and go — give their number"
            )
        return values

    def rank_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of this rank if another program has started it; empty otherwise.

        They are RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Such a rank joins the
        others, and rank 0 plans.

        Args:
            environment: The environment variables of this process.
        """
        return {}

    def processes(self) -> int | None:
        """Return the number of ranks; None if `nproc` or this machine's devices decide."""
        return sum(self.host_ranks()) or None

    def machine(self, config: Any) -> Machine | None:
        """Return a host that ranks run on, to plan for; None if it is this one.

        Args:
            config: The Config.

        Raises:
            EnvironmentFault: It is not known what the host has.
        """
        return None

    def host_ranks(self) -> tuple[int, ...]:
        """Return how many ranks each host has; empty for this host alone, or if it is not known."""
        return ()

    @property
    def number_of_hosts(self) -> int:
        """Number of hosts of a run that starts from here; 0 if the section does not say it."""
        return 0

    @property
    def hosts_may_change(self) -> bool:
        """Whether hosts may join and leave while this run lasts."""
        return False

    def overrides_for_hosts(self, number: int) -> list[str]:
        """Return the overrides for a run on `number` hosts, for `drumline bench`.

        Raises:
            UserError: There are fewer hosts.
        """
        return [f"launch.nodes={number}"]

    def reach(self) -> Mapping[str, Reached]:
        """Return the hosts of a run by name, for `drumline doctor`; empty for this host alone.

        Raises:
            EnvironmentFault: A host does not answer.
        """
        return {}

    def submission(self, plan: Any, plan_path: Path, resume: str | None) -> str:
        """Return what `start` would give to another program, for --dry-run; empty if nothing."""
        return ""

    def submit(self, request: Any, dry_run: bool) -> int | None:
        """Give the run to another program, follow it, and return its exit code.

        The other program starts `drumline train` on hosts of its own. None means that this launcher
        does not do so, and the run is started here by `start`.

        Args:
            request: The Request.
            dry_run: Only print what would be given to the program.
        """
        return None

    def submitted_run(self, values: Any) -> SubmittedRun:
        """Return a run that `submit` has noted.

        Args:
            values: The noted values (`SubmittedRun.values`).

        Raises:
            KeyError, TypeError, ValueError: They are not of a run of this launcher.
        """
        raise ValueError(f"launcher {self.kind} notes no runs")

    def early(self, config: Any, plan_path: Path) -> AbstractContextManager[Any]:
        """Return a context that starts what may start before there is a plan.

        Its value is the argument `early` of `start`. It is left when the ranks have ended, or if
        there is no plan.

        Args:
            config: The Config.
            plan_path: Path that the file of the plan will have.
        """
        return nullcontext()

    def require(self) -> None:
        """Check that ranks could be started. This is called before the run folder is made.

        Raises:
            EnvironmentFault: They could not.
        """

    def check_hosts(self, plan: Any, early: Any) -> None:
        """Check that all hosts have what the plan needs, such as the same files of the model.

        This is called when this process holds the lease of the run folder and has not yet written
        anything else into it, so that a failed check leaves no run behind.

        Args:
            plan: The Plan.
            early: The value of the context of the method `early`.

        Raises:
            EnvironmentFault: Hosts differ.
        """

    def start(
        self,
        plan: Any,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Any,
        early: Any,
    ) -> int:
        """Run the ranks of a plan to their end, and return the exit code (`drumline.errors`).

        A rank is `python -m drumline.train.entry PLAN`, with the variables of `rank_variables`, and
        with `--resume` to resume.

        Args:
            plan: The Plan.
            plan_path: File of the plan.
            resume: The value of a rank's option `--resume`; None: it gets none.
            on_event: Gets each event of the run (`telemetry.events.tail` follows events.jsonl).
            on_oom: A Replans, which makes a new plan when memory has run out.
            early: The value of the context of the method `early`.
        """
        raise EnvironmentFault(
            f"launcher {self.kind} starts no ranks",
            where="launch.kind",
            fix="start them as its program does",
        )


Launcher = Annotated[LauncherSpec, Registered(LauncherSpec)]
