"""The section `strategy` of the YAML: what all kinds of it have in common.

A strategy has three parts, each a class that is found by the kind:
- its fields and its mesh, a `StrategyConfig` (here, and in `config.strategies`),
- what it costs, a `planner.strategies.StrategyCost`,
- how it spreads and steps a model, a `plan.strategy_engine.EngineSpec` (in
  `engine.strategies`).

No torch here. Each answer has a default, that of copies of the model on all ranks, so that a
strategy of a user's own overrides only what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from drumline.config.mesh import Dimension, Mesh, divide
from drumline.config.refusal import Refusal, no_option
from drumline.config.registry import Registered, Spec
from drumline.config.section import KIND_ALONE, MOST_STEPS, Ranks, Section
from drumline.errors import PlanError
from drumline.hardware.cluster import Collective

Engine = Literal["native", "pipeline", "deepspeed"]
DataParallel = Literal["none", "dp", "ddp", "fsdp2", "zero", "local_sgd", "diloco"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "model_parallel"]
Precision = Literal["fp32", "bf16", "fp16"]
# If two strategies are equally fast, the planner takes the simpler one, with the lower number.
# Each degree of pp, ep, cp or tp above 1 adds MIXED, and offloading adds OFFLOADED.
MIXED = 10
OFFLOADED = 5
# Compressions that keep on each rank what they have not sent yet.
WITH_MEMORY = ("powersgd", "topk")


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
        """Return whether gradients are compressed in step `step`, counted from 0."""
        return self.kind != "none" and (self.kind not in WITH_MEMORY or step >= self.start_step)


class CopyOptions(Section):
    """How copies of the model are kept equal: the options of DDP, and of strategies with copies."""

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
    """How tables name a strategy.

    Attributes:
        family: Its name without numbers.
        name: Its name with numbers.
        simple: A number that is lower for a simpler strategy.
    """

    family: str
    name: str
    simple: int


class StrategyConfig(Spec):
    """The base of all strategies: the fields of the YAML, and the mesh that follows from them."""

    group: ClassVar[str] = "strategies"
    module_pattern: ClassVar[str] = "drumline.config.strategies.{}"
    # The two other parts, as module:Name, or the classes themselves.
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.base:StrategyCost"
    engine_class: ClassVar[str | type] = "drumline.plan.strategy_engine:EngineSpec"
    noun: ClassVar[str] = "strategy"
    yaml_key: ClassVar[str] = "strategy"
    # If two strategies are equally fast, the planner takes the one with the smaller number.
    simplicity: ClassVar[int] = MIXED
    # Whether the planner chooses another strategy in its place.
    planned: ClassVar[bool] = False
    # Whether `drumline verify` compares it if nobody names strategies.
    compared: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    # A package that it needs beside Drumline's dependencies; None for none.
    package: ClassVar[str | None] = None
    # Whether it is synchronous data parallelism with one process for each rank, if it is used without
    # tp, cp and pp: in each step all ranks run forward and backward on samples of their own, and
    # then apply the same update. Batch norms may share their statistics only then.
    in_step: ClassVar[bool] = False
    # The collective by which ranks exchange weights once in several steps; None if gradients are
    # averaged in each step instead.
    exchange: ClassVar[Collective | None] = None
    # Whether it works with the packed weights of QLoRA.
    takes_packed: ClassVar[bool] = False
    # Without tp, cp and pp: whether each rank holds all weights.
    whole_weights: ClassVar[bool] = True
    # Whether the weights of the model have the low type of the precision, and the optimizer keeps a
    # copy of them in fp32.
    keeps_low: ClassVar[bool] = False
    # Whether its engine gathers the weights of each module by hooks in Python.
    hooked: ClassVar[bool] = False
    # Options that it has no key for; see `config.refusal.no_option`.
    lacks: ClassVar[tuple[Refusal, ...]] = ()

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return a section `strategy` as a user writes it, for the matrix of `drumline strategies`.

        Args:
            kind: The kind of the strategy.
            options: Keys to set, of tp, cp, pp, replicate, compression and offload (cpu or nvme).
        """
        return {"kind": kind, **options}

    def with_files(self, base_dir: Path) -> Self:
        """Return this strategy with the contents of the files that it names, for the plan.

        `base_dir`: the folder that paths are relative to.
        """
        return self

    def resolved(self, world: int, why: list[str]) -> StrategyConfig:
        """Return the strategy that is planned: this one, or for `auto` the simplest one.

        `why`: gets a line for a choice.
        """
        return self

    def mesh(self, world: int) -> Mesh:
        """Return the mesh of `world` processes. Raises PlanError if they do not divide."""
        if self.one_process and world != 1:
            what = f"strategy {self.kind} runs one process, {world} were asked for"
            raise PlanError(what, where="strategy", fix="use strategy=ddp or --nproc 1")
        return Mesh(replicate=world)

    def engine(self, mesh: Mesh) -> Engine:
        """Return which engine steps the model."""
        if mesh.pp > 1:
            return "pipeline"
        return "native"

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        """Return how ranks that see different samples share the work."""
        if mesh.data_ranks * mesh.cp > 1:
            return "ddp"
        return "none"

    def devices_per_rank(self, devices: int) -> int:
        """Return how many of a machine's devices one process drives."""
        return 1

    def offloads(self) -> tuple[str, str]:
        """Return where the optimizer's states are, and where weights are while they are not used.

        Each is none (on the device), cpu or nvme.
        """
        return "none", "none"

    def context_method(self) -> Literal["ulysses", "ring"]:
        """Return how context parallelism is done; `ulysses` if there is none."""
        return "ulysses"

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        """Return the schedule of a strategy with stages, and how many stages a rank holds."""
        return "1f1b", 1

    def copies(self) -> CopyOptions:
        """Return how copies of the model are kept equal, if there are some."""
        return COPIES

    def gathered_in(self, precision: Precision, images: bool) -> Precision | None:
        """Return the low type that weights are gathered in; None if they are used as they are kept.

        Args:
            precision: The compute type.
            images: Whether the model takes images.
        """
        return None

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """Return lines about this strategy on `plan_world` processes, for the user."""
        return []

    def frozen(self) -> StrategyConfig:
        """Return the strategy of frozen models beside one that learns under this strategy."""
        return self

    def step_kind(self, step: int) -> str:
        """Return the kind of step `step`, counted from 0. Steps of one kind send the same.

        It is whole (gradients, uncompressed), compressed (gradients), apart (nothing, each rank by
        itself) or together (weights are exchanged).
        """
        return "whole"

    def step_shares(self) -> dict[str, float]:
        """Return what fraction of the steps of a long run is of each kind (see `step_kind`)."""
        return {"whole": 1.0}

    def names(self, world: int) -> Names:
        """Return what tables call this strategy on `world` processes."""
        return Names(self.kind, self.kind, self.simplicity)

    def title(self, data_parallel: str, mesh: Mesh) -> str:
        """Return what a plan's line calls it, mixes written out: `fsdp2 × tp 2`."""
        degrees = []
        for name in ("pp", "ep", "cp", "tp"):
            degree = getattr(mesh, name)
            if degree > 1:
                degrees.append(f"{name} {degree}")
        has_one_copy = mesh.data_ranks == 1 and self.whole_weights
        if degrees and has_one_copy:
            return " × ".join(degrees)
        return " × ".join([self.kind, *degrees])

    def shards(self, mesh: Mesh) -> int:
        """Return the number of parts that each weight is cut into, besides tensor parallelism."""
        return 1

    def optimizer_shards(self, mesh: Mesh) -> int:
        """Return the number of parts that the optimizer's states are cut into."""
        return self.shards(mesh)


Strategy = Annotated[StrategyConfig, Registered(StrategyConfig)]


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
        """Return the schedule, and how many stages a rank holds.

        Raises:
            PlanError: The schedule does not allow that number of stages.
        """
        interleaves = self.schedule in ("interleaved", "zero_bubble")
        if self.stages_per_rank not in (None, 1) and not interleaves:
            what = f"schedule {self.schedule} has one stage a rank, {self.stages_per_rank} were asked for"
            raise PlanError(
                what,
                where="strategy.stages_per_rank",
                fix="use schedule: interleaved, or leave it out",
            )
        if interleaves:
            return self.schedule, self.stages_per_rank or 2
        return self.schedule, 1


class SequenceParallel(Section):
    """Part of a strategy that may cut matrices over tp ranks."""

    sequence_parallel: bool | None = Field(
        None,
        description="With tp > 1, norms and the residual stream are cut by tokens over the tp ranks, too (Korthikanti et al. 2022)."
        " null: true where that is proven for the model.",
    )


class Degrees(SequenceParallel, StrategyConfig):
    """The degrees of parallelism: the mesh is pp × replicate × shard × ep × cp × tp.

    Processes that pp, cp and tp do not use are data parallel.
    """

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

    def remaining_ranks_and_degrees(self, world: int) -> tuple[int, dict[str, int]]:
        """Return how many ranks the degrees leave for copies or shards, and the degrees by name.

        `world`: the number of processes. Raises PlanError if the degrees do not divide it.
        """
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}
        data = divide(
            world,
            self.tp * self.cp * self.pp,
            f"tp {self.tp} × cp {self.cp} × pp {self.pp}",
            "strategy",
        )
        groups = divide(data, self.ep, f"groups of ep {self.ep}", "strategy.ep", "data rank")
        return groups, degrees

    def mesh(self, world: int) -> Mesh:
        remaining, degrees = self.remaining_ranks_and_degrees(world)
        return Mesh(replicate=remaining, **degrees)

    def context_method(self) -> Literal["ulysses", "ring"]:
        return self.cp_method

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return self.pipeline.stages()

    def names(self, world: int) -> Names:
        degrees = []
        numbered = []
        for name in ("pp", "ep", "cp", "tp"):
            degree = getattr(self, name)
            if degree > 1:
                degrees.append(name)
                numbered.append(f"{name} {degree}")
        if self.pp > 1 and self.pipeline.schedule != "1f1b":
            numbered[0] += f" {self.pipeline.schedule}"
        family, name = self.describe(bool(degrees), world // (self.tp * self.cp * self.pp))
        simple = self.simplicity + MIXED * len(degrees) + self.complexity()
        return Names(
            " × ".join(filter(None, [family, *degrees])),
            " × ".join(filter(None, [name, *numbered])),
            simple,
        )

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """Return the strategy's words in a table: family and name, as in `Names`, without degrees.

        Both are empty if the degrees alone name the strategy.

        Args:
            mixed: Whether a degree is above 1.
            data: Number of ranks that the degrees leave for data parallelism.
        """
        if mixed and data == 1:
            return "", ""
        return self.kind, self.kind

    def complexity(self) -> int:
        """Return by how much its options, without the degrees, raise the number `Names.simple`."""
        return int(self.pp > 1 and self.pipeline.schedule != "1f1b")


class OneDegree(StrategyConfig):
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
        """Return the section of ddp with this degree: only there it goes with other options."""
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
        copies = []
        if degree < world:
            copies.append("ddp")
        name = f"{self.kind} {degree}"
        # Only pp has this key.
        schedule = getattr(self, "schedule", "1f1b")
        if schedule != "1f1b":
            name += f" {schedule}"
        return Names(" × ".join([*copies, self.kind]), " × ".join([*copies, name]), self.simplicity)

    def title(self, data_parallel: str, mesh: Mesh) -> str:
        degree = f"{self.kind} {getattr(mesh, self.dimension)}"
        if mesh.data_ranks == 1:
            return degree
        return f"{data_parallel} × {degree}"
