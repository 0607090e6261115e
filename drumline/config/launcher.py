"""The section `launch` of the YAML, and how its kind starts ranks, or joins those that another program has started.

No torch here. Types of rooms above this one are named in docstrings: a Plan is `plan.plan.Plan`, a
Config is `config.config.Config`, a Request is `config.load.Request`, a Replans is
`plan.out_of_memory.Replans`.
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

# As system.process.run_module: module, stdin, seconds.
RunModule = Callable[[str, str, float], tuple[int | None, str, str]]


@dataclass(frozen=True)
class Reached:
    """A host of a run. `address`: empty if it is not known. `run`: runs a module of Drumline there."""

    address: str
    run: RunModule


class SubmittedRun(ABC):
    """A run whose folder lies elsewhere, on hosts of the program that has it.

    `LauncherSpec.submit` notes it in a folder here, by `launch.submitted.note_run`. Then `drumline
    ps`, `logs`, `follow` and `stop` of that folder call these methods.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """The place of the run in one line, such as `Job a in namespace b`."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return what is noted of the run, as JSON has it. `LauncherSpec.submitted_run` gets it back."""

    @abstractmethod
    def state(self) -> str:
        """Return the state in one word: queued, running, finished, failed, gone; or unknown if nobody answers."""

    @abstractmethod
    def print_logs(self, rank: int | None) -> None:
        """Print what the ranks have printed, or one of them. Raises UserError if there is nothing."""

    @abstractmethod
    def follow(self) -> int:
        """Show what the run does until it ends, and return its exit code. Ctrl-C leaves the run alone."""

    @abstractmethod
    def stop(self) -> None:
        """Have the run save and end, and wait until it has ended."""


class LauncherSpec(Spec):
    """The base of all launchers.

    One of your own overrides `start`, or `rank_variables` if another program starts the ranks.
    """

    group: ClassVar[str] = "launchers"
    modules: ClassVar[str] = "drumline.launch.{}.spec"
    thing: ClassVar[str] = "launcher"
    yaml_key: ClassVar[str] = "launch"
    module: ClassVar[str] = "drumline.launch.spec"
    default: ClassVar[str] = "local"
    # Ranks run on other hosts, and whoever starts them there holds the run folder, by its lease.
    elsewhere: ClassVar[bool] = False
    # Hosts may come and go: `nodes` is {min, max}.
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
    def _fixed(cls, values: Any) -> Any:
        if (
            not cls.elastic
            and isinstance(values, Mapping)
            and isinstance(values.get("nodes"), Mapping)
        ):
            raise ValueError(
                "nodes: {min, max} is for launch.kind: ssh: only there hosts may come and go — give their number"
            )
        return values

    def rank_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a rank that another program has started; none if this process starts the ranks.

        They are RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Such a rank joins the
        others, and rank 0 plans. `environment`: of this process.
        """
        return {}

    def processes(self) -> int | None:
        """Return how many ranks `start` starts; None: as many as `nproc` and this machine's devices say."""
        return sum(self.host_ranks()) or None

    def machine(self, config: Any) -> Machine | None:
        """Return a host that ranks run on, to plan for; None: this one.

        Raises EnvironmentFault if it is not known what the host has. `config`: a Config.
        """
        return None

    def host_ranks(self) -> tuple[int, ...]:
        """Return how many ranks each host has; nothing if all are on this one, or if another program decides."""
        return ()

    @property
    def number_of_hosts(self) -> int:
        """Return how many hosts a run has that starts from here; 0 if no number and no list says it."""
        return 0

    @property
    def hosts_may_change(self) -> bool:
        """Return whether hosts may join and leave while this run lasts."""
        return False

    def on_hosts(self, number: int) -> list[str]:
        """Return the overrides by which a run takes `number` hosts with `nproc` ranks each, for `drumline bench`.

        Raises UserError if it cannot.
        """
        return [f"launch.nodes={number}"]

    def reach(self) -> Mapping[str, Reached]:
        """Return name → host of a run, for `drumline doctor`; nothing: this host alone.

        Raises EnvironmentFault for a host that does not answer.
        """
        return {}

    def submission(self, plan: Any, plan_path: Path, resume: str | None) -> str:
        """Return what `start` would hand to another program, for --dry-run; empty if it hands over nothing."""
        return ""

    def submit(self, request: Any, dry_run: bool) -> int | None:
        """Hand the run to another program, follow it, and return its exit code; None: it runs from here, by `start`.

        The other program starts `drumline train` on hosts of its own. `request`: a Request.
        `dry_run`: only print what would be handed over.
        """
        return None

    def submitted_run(self, values: Any) -> SubmittedRun:
        """Return a run that `submit` has noted. `values`: those of its note (`SubmittedRun.values`).

        Raises KeyError, TypeError or ValueError if they are none of this launcher's.
        """
        raise ValueError(f"launcher {self.kind} notes no runs")

    def early(self, config: Any, plan_path: Path) -> AbstractContextManager[Any]:
        """Return a context for what may start before there is a plan. What it gives is an argument of `start`.

        It is left when the ranks have ended, or if there is no plan. `config`: a Config.
        """
        return nullcontext()

    def require(self) -> None:
        """Raise EnvironmentFault if ranks could not be started. It is called before the run folder is made."""

    def compare(self, plan: Any, early: Any) -> None:
        """Raise EnvironmentFault if hosts differ in what the plan needs.

        The lease of the run folder is held then, and nothing is in the folder. `plan`: a Plan.
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
        with `--resume` if `resume` says where to go on.
        `plan`: a Plan. `on_event`: gets each event of the run (`telemetry.events.Tail` follows
        events.jsonl).
        `on_oom`: a Replans, which makes a new plan when memory has run out. `early`: what `early`
        gave.
        """
        raise EnvironmentFault(
            f"launcher {self.kind} starts no ranks",
            where="launch.kind",
            fix="start them as its program does",
        )


Launcher = Annotated[LauncherSpec, Registered(LauncherSpec)]
