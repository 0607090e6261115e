"""What a launcher's spec is: the section `launch` of the YAML, and how ranks are started, or found to be started already. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, model_validator

from drumline.config.registry import Registered, Spec
from drumline.config.section import Seconds
from drumline.errors import EnvironmentFault
from drumline.system.network import LONG_SECONDS, START_SECONDS, STEP_SECONDS

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.config.load import Request
    from drumline.hardware.detect import Machine
    from drumline.plan.out_of_memory import Exhausted
    from drumline.plan.plan import Plan

# As system.process.run_module: module, stdin, seconds.
RunModule = Callable[[str, str, float], tuple[int | None, str, str]]


@dataclass(frozen=True)
class Reached:
    """A host that is reached: its address, empty where nobody knows it, and how a module of Drumline is run there."""

    address: str
    run: RunModule


# (what was known when memory ran out, the last step done) → (the plan's verdict, why the run does not go on; None: plan.json is new).
OnOutOfMemory = Callable[["Exhausted", int], tuple[str, str | None]]


class Replans(Protocol):
    """An OnOutOfMemory that plans for another number of ranks, too."""

    def __call__(self, out: Exhausted, step: int, /) -> tuple[str, str | None]: ...

    def resize(self, ranks: int, /) -> bool:
        """Makes plan.json anew; False where there is no plan for so many."""


class LauncherSpec(Spec):
    """The base of all launchers. One of your own overrides `start`, or `rank_variables` where another program starts the ranks."""

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
        """Where this process is one rank of several already: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. It then joins the
        others, and rank 0 plans. Nothing: this process starts them."""
        return {}

    def processes(self) -> int | None:
        """How many ranks `start` starts; None: as many as `nproc` and this machine's devices say."""
        return sum(self.host_ranks()) or None

    def machine(self, config: Config) -> Machine | None:
        """A host that ranks run on, to plan for; None: this one. Raises EnvironmentFault where nobody knows what it has."""
        return None

    def host_ranks(self) -> tuple[int, ...]:
        """How many ranks each host has; nothing where all are on this one, or another program knows."""
        return ()

    @property
    def number_of_hosts(self) -> int:
        """How many hosts a run has that starts from here; 0 where that is not set by a number or a list."""
        return 0

    @property
    def hosts_may_change(self) -> bool:
        """Return whether hosts may join and leave while this run lasts."""
        return False

    def on_hosts(self, number: int) -> list[str]:
        """Overrides by which a run takes so many hosts with `nproc` ranks each, for `drumline bench`. Raises UserError."""
        return [f"launch.nodes={number}"]

    def reach(self) -> Mapping[str, Reached]:
        """The hosts of a run by name, for `drumline doctor`; nothing: this one alone. Raises EnvironmentFault for one that is not there."""
        return {}

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        """What `start` would hand to another program, for --dry-run; empty where it hands over nothing."""
        return ""

    def submit(self, request: Request, dry_run: bool) -> int | None:
        """Hand the run to another program that starts `drumline train` where it shall run, follow it, and return its exit code. `dry_run`:
        print what would be handed over. None: it runs from here, by `start`."""
        return None

    def early(self, config: Config, plan_path: Path) -> AbstractContextManager[Any]:
        """Entered before there is a plan, and left when the ranks have ended or there is no plan: what may start meanwhile. What it gives
        is an argument of `start`."""
        return nullcontext()

    def require(self) -> None:
        """Raises EnvironmentFault where ranks could not be started, before the run folder is made."""

    def compare(self, plan: Plan, early: Any) -> None:
        """Raises EnvironmentFault where hosts differ in what the plan needs. The lease of the run folder is held, and nothing is in it."""

    def start(
        self,
        plan: Plan,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Replans,
        early: Any,
    ) -> int:
        """Run the ranks of a plan to their end and return the exit code (`drumline.errors`). A rank is `python -m drumline.train.entry
        PLAN`, perhaps with `--resume` and where to go on, in the variables above. Each event of the run goes to `on_event`
        (`telemetry.events.Tail` follows events.jsonl); `on_oom` makes a new plan when memory ran out."""
        raise EnvironmentFault(
            f"launcher {self.kind} starts no ranks",
            where="launch.kind",
            fix="start them as its program does",
        )


Launcher = Annotated[LauncherSpec, Registered(LauncherSpec)]
