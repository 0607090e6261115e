"""What a strategy's spec is: the section of the YAML, and its answers to the rest of the house. No torch here. Each answer
has a default, that of copies of the model on all ranks, so that a strategy of a user's own overrides only what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from drumline.config.mesh import Dimension, Mesh, divide, divisors
from drumline.config.registry import Registered, Spec
from drumline.config.section import KIND_ALONE, MOST_STEPS, Ranks, Section
from drumline.errors import PlanError
from drumline.hardware.cluster import Collective
from drumline.plan.estimate import Activations
from drumline.plan.facts import Part
from drumline.plan.rule import Case, Refusal, no_option
from drumline.plan.stream import SequenceParallel
from drumline.planner.cost.terms import (
    Buffers,
    Copied,
    Host,
    State,
    Volume,
    copies_buffers,
    native_state,
    send_gradients,
    send_norm,
)

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.plan.facts import ModelFacts
    from drumline.plan.plan import BatchPlan, Layout, Plan

Engine = Literal["native", "pipeline", "deepspeed"]
DataParallel = Literal["none", "dp", "ddp", "fsdp2", "zero", "local_sgd", "diloco"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "model_parallel"]
Precision = Literal["fp32", "bf16", "fp16"]
# Of two strategies as fast as each other the planner takes the simpler: less to understand, and to go wrong.
MIXED, OFFLOADED = 10, 5
WITH_MEMORY = ("powersgd", "topk")  # compressions that keep on each rank what they have not sent


class Compression(Section):
    """What DDP sends instead of fp32 gradients."""

    kind: Literal["none", "bf16", "fp16", "powersgd", "topk", "int8"] = Field(
        "none",
        description="bf16, fp16: half the bytes. powersgd: low-rank factors (Vogels et al. 2019). topk: the largest entries, the rest kept"
        " for later (Stich et al. 2018). int8: 8-bit quantised, a quarter of the bytes.",
    )
    rank: int = Field(4, gt=0, le=10**6, description="powersgd: the rank of the factors.")
    start_step: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="powersgd, topk: gradients are sent whole before this step.",
    )
    ratio: float = Field(
        0.01, gt=0, le=1, description="topk: the part of the entries that is sent."
    )

    def compresses(self, step: int) -> bool:
        """Whether gradients are compressed in the step after `step` steps."""
        return self.kind != "none" and (self.kind not in WITH_MEMORY or step >= self.start_step)


class CopyOptions(Section):
    """How copies of the model are kept equal: DDP's options, or those that other strategies use around theirs."""

    bucket_cap_mb: float = Field(
        25.0, gt=0, le=10**6, description="MiB of gradients reduced together."
    )
    gradient_as_bucket_view: bool = Field(
        True, description="Gradients are views of the buckets: saves one copy of them."
    )
    static_graph: bool = Field(
        False, description="The set of used parameters never changes: lets DDP skip work."
    )
    find_unused_parameters: bool = Field(
        False, description="Some parameters may get no gradient in a step."
    )
    broadcast_buffers: bool = Field(
        True, description="Copy rank 0's buffers to all before each forward."
    )
    compression: Annotated[Compression, KIND_ALONE] = Field(
        default_factory=Compression, description="What replaces fp32 gradients."
    )


COPIES = CopyOptions()


class Names(NamedTuple):
    """`family`: what a strategy is called without its numbers; `name`: with them; `simple`: less is simpler."""

    family: str
    name: str
    simple: int


class Space(NamedTuple):
    """What the search looks for strategies on.

    `layers`: of the model, and `experts` of a layer. `nvme`: a folder on a disk to offload to.
    """

    nodes: int
    per_node: int
    layers: int
    nvme: str | None
    experts: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


class StrategySpec(Spec):
    """The base of all strategies."""

    group: ClassVar[str] = "strategies"
    modules: ClassVar[str] = "drumline.config.strategies.{}"
    thing: ClassVar[str] = "strategy"
    simplicity: ClassVar[int] = MIXED
    planned: ClassVar[bool] = False  # the planner chooses another in its place
    compared: ClassVar[bool] = False  # by `drumline verify` where nobody names strategies
    one_process: ClassVar[bool] = False
    package: ClassVar[str | None] = None  # that it needs besides this one's dependencies
    in_step: ClassVar[bool] = (
        False  # without tp, cp and pp: ranks take each forward together, on whole samples of their own
    )
    exchange: ClassVar[Collective | None] = (
        None  # of weights now and then, where gradients are not averaged in each step
    )
    takes_packed: ClassVar[bool] = False  # goes with QLoRA's packed weights, without tp
    whole_weights: ClassVar[bool] = True  # without tp, cp and pp: each rank holds all of them
    keeps_low: ClassVar[bool] = (
        False  # weights lie in the type that it computes in, with fp32 ones for the step besides
    )
    hooked: ClassVar[bool] = (
        False  # its engine gathers the weights of each module by hooks in Python
    )
    lacks: ClassVar[
        tuple[Refusal, ...]
    ] = ()  # options that it has no key for, by `plan.rule.no_option`

    # ------------------------------------------------------------------------------------------------ config and layout

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The section as one writes it with these options: tp, cp, pp, replicate, compression, offload (cpu or nvme)."""
        return {"kind": kind, **options}

    def with_files(self, base_dir: Path) -> Self:
        """With the contents of files that it names, relative to `base_dir`: ranks read the plan alone."""
        return self

    def resolved(self, world: int, why: list[str]) -> StrategySpec:
        """Itself; for a strategy that the planner chooses, before it has chosen: the simplest one."""
        return self

    def adopted(self, config: Config) -> Config:
        """The config with what only a file of this strategy's says."""
        return config

    def mesh(self, world: int) -> Mesh:
        """Its mesh on `world` processes. Raises PlanError where they do not divide."""
        if self.one_process and world != 1:
            what = f"strategy {self.kind} runs one process, {world} were asked for"
            raise PlanError(what, where="strategy", fix="use strategy=ddp or --nproc 1")
        return Mesh(replicate=world)

    def engine(self, mesh: Mesh) -> Engine:
        return "pipeline" if mesh.pp > 1 else "native"

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        """How ranks that see different samples share the work."""
        return "ddp" if mesh.data_ranks * mesh.cp > 1 else "none"

    def devices_per_rank(self, devices: int) -> int:
        """Of the devices of a machine, those that one process drives."""
        return 1

    def offloads(self) -> tuple[str, str]:
        """Where the optimizer's states lie, and weights that are not used: none (on the device), cpu or nvme."""
        return "none", "none"

    def context_method(self) -> Literal["ulysses", "ring"]:
        """How context parallelism is done; `ulysses` where there is none."""
        return "ulysses"

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        """The schedule of a strategy with stages, and how many stages a rank holds."""
        return "1f1b", 1

    def copies(self) -> CopyOptions:
        """How copies are kept equal, where there are some."""
        return COPIES

    def gathered_in(self, precision: Precision, images: bool) -> Precision | None:
        """The low type in which weights are gathered; None: they are used as they are kept."""
        return None

    def engine_options(
        self,
        config: Config,
        batch: BatchPlan,
        precision: Precision,
        steps: int | None,
        run_dir: str,
        facts: ModelFacts | None,
    ) -> dict[str, Any] | None:
        """What another package's engine is given; None for Drumline's own."""
        return None

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """What the user should know of it on this many processes, one line each."""
        return []

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """What it cannot be combined with, besides what no strategy can (plan.rules)."""
        yield from ()

    def frozen(self) -> StrategySpec:
        """How a model is spread that only answers, beside one that learns under this strategy."""
        return self

    def require(self, plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
        """Raises EnvironmentFault where the machine lacks what it needs, before any process starts."""

    # ----------------------------------------------------------------------------------- communication: pure, by the step

    def step_kind(self, step: int) -> str:
        """A name for what the step after `step` steps sends: steps of one kind send alike."""
        return "whole"

    def step_shares(self) -> dict[str, float]:
        """Of a long run's steps, the part of each kind."""
        return {"whole": 1.0}

    def overlap(self) -> float:
        """The part of a long run's steps that runs beside what `send` adds with beside="steps"."""
        return 0.0

    def kept_bytes(self, world: int) -> int:
        """Bytes for each trainable parameter that a rank keeps in buffers between steps for talking less."""
        return 0

    # --------------------------------------------------------------------------------------------------- search and tables

    def names(self, world: int) -> Names:
        return Names(self.kind, self.kind, self.simplicity)

    def title(self, data_parallel: str, mesh: Mesh) -> str:
        """What a plan's line calls it, mixes written out: `fsdp2 × tp 2`."""
        parts = [
            f"{name} {getattr(mesh, name)}"
            for name in ("pp", "ep", "cp", "tp")
            if getattr(mesh, name) > 1
        ]
        return " × ".join(
            parts if parts and mesh.data_ranks == 1 and self.whole_weights else [self.kind, *parts]
        )

    def variants(self) -> Iterator[StrategySpec]:
        """Where the user has named it: itself, and with what was left open."""
        yield self

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        """What the search looks at where the user has left the strategy open."""
        yield from ()

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        """(how much changes, strategy): what takes the same steps with less on each rank. `is_shared`: more than one rank does the work."""
        return []

    # ------------------------------------------------------------------- cost: pure; that of copies of the model (planner.cost.terms)

    def outer_bytes(self) -> int:
        """Bytes for each trainable parameter that its own optimizer keeps, besides the run's."""
        return 0

    def shards(self, mesh: Mesh) -> int:
        """Parts that each weight is cut into, besides tensor parallelism."""
        return 1

    def optimizer_shards(self, mesh: Mesh) -> int:
        """The same of what the optimizer keeps."""
        return self.shards(mesh)

    def state(self, layout: Layout, facts: ModelFacts, mine: Part) -> State:
        """What a rank with this part of the model holds between steps."""
        return native_state(layout, facts, mine)

    def buffers(
        self, layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
    ) -> Buffers:
        """What it holds besides `state` and activations. `kept`: a trace knows autocast's copies, which depend on the model's own code."""
        return copies_buffers(layout, facts, mine, state, kept)

    def host(self, layout: Layout, facts: ModelFacts, between: int) -> Host:
        """What a rank holds in host memory, where its states take `between` bytes of it. Native engines read each rank's part onto the
        device, and copy a checkpoint that is written in the background."""
        return Host(between, between, 0, int(layout.config.checkpoint.asynchronous))

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Add what weights and gradients send in the step after `step` steps; None: the mean of a long run. `has`: see cut_weights."""
        send_gradients(volume, layout, facts, has, step)

    def send_norm(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str]
    ) -> None:
        """Add what the gradient norm sends."""
        send_norm(volume, layout, has)

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """What offloading copies in a step. `trainable`: parameters that a rank updates."""
        return Copied(0.0, 0.0)

    # ----------------------------------------------------------------------------------------------- with torch, imported late

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """The engine of a model that is laid out without weights; None: the one of `drumline.parallel` that the plan names. `options`: of
        any module, see `engine.native.prepare` (plain, overlaps) and its engine (make_optimizer)."""
        return None

    def spread(
        self, plan: Plan, whole: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        """The `Spread` of a model, whose weights `values` fills; None: as copies. `whole`: the device mesh; `roots`: modules that run, each
        with the model in it (of a pipeline, one for each stage)."""
        return None


Strategy = Annotated[StrategySpec, Registered(StrategySpec)]

# ------------------------------------------------------------------------- degrees beside data parallelism: tp, cp and pp

SCHEDULES = ("1f1b", "interleaved", "gpipe")  # that the search tries


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="Order of forward and backward. gpipe: all forwards first; 1f1b: in turn, less memory; interleaved: several stages a"
        " rank, smaller bubble; zero_bubble: as interleaved, with the weights' gradients put into the bubble.",
    )
    stages_per_rank: int | None = Field(
        None,
        gt=0,
        le=1000,
        description="interleaved and zero_bubble: stages a rank holds; null: 2.",
    )

    def stages(self) -> tuple[Schedule, int]:
        """The schedule, and how many stages a rank holds. Raises PlanError where the two do not go together."""
        interleaves = self.schedule in ("interleaved", "zero_bubble")
        if self.stages_per_rank not in (None, 1) and not interleaves:
            what = f"schedule {self.schedule} has one stage a rank, {self.stages_per_rank} were asked for"
            raise PlanError(
                what,
                where="strategy.stages_per_rank",
                fix="use schedule: interleaved, or leave it out",
            )
        return self.schedule, (self.stages_per_rank or 2) if interleaves else 1


class Degrees(SequenceParallel, StrategySpec):
    """The mesh is pp × replicate × shard × ep × cp × tp; what pp, cp and tp leave of the processes is data parallel."""

    tp: Ranks = Field(1, description="Tensor parallel: each matrix is cut over this many ranks.")
    cp: Ranks = Field(1, description="Context parallel: each sequence is cut over this many ranks.")
    pp: Ranks = Field(
        1, description="Pipeline parallel: the layers are cut into stages over this many ranks."
    )
    ep: Ranks = Field(
        1,
        description="Expert parallel: groups of this many data ranks hold a mixture's experts, a part each, and exchange tokens.",
    )
    cp_method: Literal["ulysses", "ring"] = Field(
        "ulysses",
        description="How attention sees the whole sequence: all-to-all over heads, or a ring of keys and values (GPUs; experimental).",
    )
    pipeline: PipelineConfig = Field(
        default_factory=PipelineConfig, description="The schedule, where pp > 1."
    )

    def rest(self, world: int) -> tuple[int, dict[str, int]]:
        """Ranks that the degrees leave, and the degrees."""
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}
        data = divide(
            world,
            self.tp * self.cp * self.pp,
            f"tp {self.tp} × cp {self.cp} × pp {self.pp}",
            "strategy",
        )
        return divide(data, self.ep, f"groups of ep {self.ep}", "strategy.ep"), degrees

    def mesh(self, world: int) -> Mesh:
        rest, degrees = self.rest(world)
        return Mesh(replicate=rest, **degrees)

    def context_method(self) -> Literal["ulysses", "ring"]:
        return self.cp_method

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return self.pipeline.stages()

    def names(self, world: int) -> Names:
        degrees = {
            name: getattr(self, name)
            for name in ("pp", "ep", "cp", "tp")
            if getattr(self, name) > 1
        }
        numbered = [f"{name} {degree}" for name, degree in degrees.items()]
        if self.pp > 1 and self.pipeline.schedule != "1f1b":
            numbered[0] += f" {self.pipeline.schedule}"
        family, name = self.describe(bool(degrees), world // (self.tp * self.cp * self.pp))
        simple = self.simplicity + MIXED * len(degrees) + self.unusual()
        return Names(
            " × ".join(filter(None, [family, *degrees])),
            " × ".join(filter(None, [name, *numbered])),
            simple,
        )

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """What stands before the degrees in family and name. `data`: ranks that these leave."""
        return ("", "") if mixed and data == 1 else (self.kind, self.kind)

    def unusual(self) -> int:
        """What makes it less simple, besides degrees."""
        return int(self.pp > 1 and self.pipeline.schedule != "1f1b")


class OneDegree(StrategySpec):
    """One degree given by the name of the strategy; the other processes hold copies (DDP)."""

    dimension: ClassVar[Dimension]
    takes_packed: ClassVar[bool] = True
    lacks = (
        *no_option("offload_cpu offload_nvme", "each rank's part stays on the device that computes",
                   "fsdp2 with offload=cpu (tp, cp and pp go with it), or zero3"),
        *no_option("replicate", "what is not cut is already copied over the other processes", "a smaller degree leaves more copies"),
    )  # fmt: skip
    degree: Ranks | None = Field(
        None, description="Ranks that share one copy of the model; null: all."
    )

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "ddp", cls.dimension: 2, **options}

    def mesh(self, world: int) -> Mesh:
        degree = self.degree or world
        return Mesh(
            **{
                self.dimension: degree,
                "replicate": divide(world, degree, f"degree {degree}", "strategy.degree"),
            }
        )

    def names(self, world: int) -> Names:
        degree = self.degree or world
        copies = ["ddp"] if degree < world else []
        schedule = getattr(self, "schedule", "1f1b")
        name = f"{self.kind} {degree}" + (f" {schedule}" if schedule != "1f1b" else "")
        return Names(" × ".join([*copies, self.kind]), " × ".join([*copies, name]), self.simplicity)

    def title(self, data_parallel: str, mesh: Mesh) -> str:
        degree = f"{self.kind} {getattr(mesh, self.dimension)}"
        return degree if mesh.data_ranks == 1 else f"{data_parallel} × {degree}"


def mixes(space: Space) -> Iterator[dict[str, Any]]:
    """Degrees that divide: tensor and expert parallel within a host, at most a stage a layer, no pipeline of parts of sequences."""
    world, inside = space.world, divisors(space.per_node)
    experts = [
        (1, 1, pp, ep)
        for pp, ep in product(divisors(world), inside)
        if space.experts and ep > 1 and space.experts % ep == 0
    ]
    for tp, cp, pp, ep in [*product(inside, divisors(world), divisors(world), (1,)), *experts]:
        if (
            tp == cp == pp == ep == 1
            or world % (tp * cp * pp * ep)
            or pp > max(1, space.layers)
            or (cp > 1 and pp > 1)
        ):
            continue
        for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            yield {
                "tp": tp,
                "cp": cp,
                "pp": pp,
                "ep": ep,
                "pipeline": PipelineConfig(schedule=schedule),
            }
