"""The degrees by which a strategy spreads a model besides data parallelism, given beside its name or by the name alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.mesh import Dimension, Mesh, divide, divisors
from drumline.core.rule import no_option
from drumline.core.section import Ranks, Section
from drumline.core.strategy import MIXED, Names, Schedule, Space, StrategySpec
from drumline.errors import PlanError

SCHEDULES = ("1f1b", "interleaved", "gpipe")  # that the search tries


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="Order of forward and backward. gpipe: all forwards first; 1f1b: in turn, less memory; interleaved: several stages a"
        " rank, smaller bubble; zero_bubble: as interleaved, with the weights' gradients put into the bubble.",
    )
    stages_per_rank: int | None = Field(None, gt=0, le=1000, description="interleaved and zero_bubble: stages a rank holds; null: 2.")

    def stages(self) -> tuple[Schedule, int]:
        """The schedule, and how many stages a rank holds. Raises PlanError where the two do not go together."""
        interleaves = self.schedule in ("interleaved", "zero_bubble")
        if self.stages_per_rank not in (None, 1) and not interleaves:
            raise PlanError(
                f"schedule {self.schedule} has one stage a rank, {self.stages_per_rank} were asked for",
                where="strategy.stages_per_rank",
                fix="use schedule: interleaved, or leave it out",
            )
        return self.schedule, (self.stages_per_rank or 2) if interleaves else 1


class Degrees(StrategySpec):
    """The mesh is pp × replicate × shard × cp × tp; what these leave of the processes is data parallel."""

    tp: Ranks = Field(1, description="Tensor parallel: each matrix is cut over this many ranks.")
    cp: Ranks = Field(1, description="Context parallel: each sequence is cut over this many ranks.")
    pp: Ranks = Field(1, description="Pipeline parallel: the layers are cut into stages over this many ranks.")
    cp_method: Literal["ulysses", "ring"] = Field(
        "ulysses", description="How attention sees the whole sequence: all-to-all over heads, or a ring of keys and values (GPUs)."
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="The schedule, where pp > 1.")

    def rest(self, world: int) -> tuple[int, dict[str, int]]:
        """Ranks that the degrees leave, and the degrees."""
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        return divide(world, self.tp * self.cp * self.pp, f"tp {self.tp} × cp {self.cp} × pp {self.pp}", "strategy"), degrees

    def mesh(self, world: int) -> Mesh:
        rest, degrees = self.rest(world)
        return Mesh(replicate=rest, **degrees)

    def context_method(self) -> Literal["ulysses", "ring"]:
        return self.cp_method

    def pipeline_schedule(self) -> tuple[Schedule, int]:
        return self.pipeline.stages()

    def names(self, world: int) -> Names:
        degrees = {name: getattr(self, name) for name in ("pp", "cp", "tp") if getattr(self, name) > 1}
        numbered = [f"{name} {degree}" for name, degree in degrees.items()]
        if self.pp > 1 and self.pipeline.schedule != "1f1b":
            numbered[0] += f" {self.pipeline.schedule}"
        family, name = self.describe(bool(degrees), world // (self.tp * self.cp * self.pp))
        simple = self.simplicity + MIXED * len(degrees) + self.unusual()
        return Names(" × ".join(filter(None, [family, *degrees])), " × ".join(filter(None, [name, *numbered])), simple)

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """What stands before the degrees in family and name. `data`: ranks that these leave."""
        return ("", "") if mixed and data == 1 else (self.kind, self.kind)

    def unusual(self) -> int:
        """What makes it less simple, besides degrees."""
        return int(self.pp > 1 and self.pipeline.schedule != "1f1b")


class OneDegree(StrategySpec):
    """One degree given by the name of the strategy; the other processes hold copies (DDP)."""

    dimension: ClassVar[Dimension]
    lacks = (
        *no_option("offload_cpu offload_nvme", "each rank keeps its part where it computes",
                   "fsdp2 with offload=cpu (tp, cp and pp go with it), or zero3"),
        *no_option("replicate", "it holds copies of what is not cut anyhow", "a smaller degree; the other processes hold copies"),
    )  # fmt: skip
    degree: Ranks | None = Field(None, description="Ranks that share one copy of the model; null: all.")

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "ddp", cls.dimension: 2, **options}

    def mesh(self, world: int) -> Mesh:
        degree = self.degree or world
        return Mesh(**{self.dimension: degree, "replicate": divide(world, degree, f"degree {degree}", "strategy.degree")})

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
    """Degrees that divide: tensor parallel within a host, at most a stage a layer, no pipeline of parts of sequences."""
    world = space.world
    for tp, cp, pp in product(divisors(space.per_node), divisors(world), divisors(world)):
        if tp == cp == pp == 1 or world % (tp * cp * pp) or pp > max(1, space.layers) or (cp > 1 and pp > 1):
            continue
        for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            yield {"tp": tp, "cp": cp, "pp": pp, "pipeline": PipelineConfig(schedule=schedule)}
