"""The sections zero1, zero2 and zero3 of the YAML, which train with DeepSpeed.

ZeRO (Rajbhandari et al. 2020) shards over the ranks the optimizer's states (1), the gradients too
(2), and the weights too (3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from drumline.config.mesh import Mesh
from drumline.config.refusal import no_option
from drumline.config.section import KIND_ALONE, PathText, Ranks, Section
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategy import (
    OFFLOADED,
    DataParallel,
    Engine,
    Names,
    StrategyConfig,
)
from drumline.errors import ConfigError
from drumline.foreign import read_object
from drumline.system.redact import withhold

# DeepSpeed's names of a section for offloading → those of the strategy.
OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}


class Offload(Section):
    kind: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where it lives while it is not used."
    )
    path: PathText | None = Field(None, description="nvme: a folder on the disk.")
    pin_memory: bool = Field(False, description="Page-locked host memory: faster copies.")

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Offload:
        if self.kind == "nvme" and self.path is None:
            raise ValueError("nvme needs `path`: a folder on the disk")
        return self


OffloadField = Annotated[Offload, KIND_ALONE]


class ZeroPlusPlus(Section):
    """ZeRO++ (Wang et al. 2023)."""

    quantized_weights: bool = Field(False, description="Gather weights as 8-bit blocks.")
    quantized_gradients: bool = Field(False, description="Reduce gradients as 4-bit blocks.")
    hierarchical_partition: Ranks = Field(
        1, description="Ranks of a second copy of the weights' partition; 1: none."
    )


class Zero(StrategyConfig):
    stage: ClassVar[Literal[1, 2, 3]]
    keeps_low: ClassVar[bool] = True
    simplicity: ClassVar[int] = 4
    compared: ClassVar[bool] = True
    in_step: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = True
    package: ClassVar[str | None] = "deepspeed"
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.zero:ZeroCost"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.zero.spec:ZeroSpec"
    lacks = (
        *no_option("tp cp pp", "DeepSpeed cuts flat buffers, and knows nothing of matrices cut by DTensor or of stages",
                   "fsdp2 with tp, cp or pp"),
        *no_option("compression", "DeepSpeed reduces gradients itself, without hooks", "zero3 with zeropp: {quantized_gradients: true}"),
    )  # fmt: skip
    config: PathText | dict[str, Any] | None = Field(
        None,
        description="A DeepSpeed config of your own: a JSON, relative to the YAML, or its keys. `auto` values are filled in.",
    )
    offload_optimizer: OffloadField = Field(
        default_factory=Offload,
        description="Where moments and fp32 weights live, and the step runs.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Any other keys of a DeepSpeed config, passed through."
    )
    flops_profiler: bool = Field(
        False, description="DeepSpeed's profile of one step, into RUN/flops_profile.txt."
    )

    @classmethod
    def example(cls, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of this strategy in the matrix of `drumline strategies`."""
        if "offload" not in options:
            return {"kind": kind, **options}
        return {"kind": kind, "offload_optimizer": {"kind": options["offload"], "path": "/nvme"}}

    def with_files(self, base_dir: Path) -> Self:
        """Return this strategy with the DeepSpeed config itself in place of its path."""
        if not isinstance(self.config, str):
            return self
        file = base_dir / self.config
        wrong_type = "strategy.config is the path of one JSON object, relative to the YAML"
        values = read_object(file, ConfigError, wrong_type, once=True)

        def place_in_file(path: tuple[str, ...]) -> str:
            """Return the file and the dotted key of a value, without `strategy.config`."""
            return f"{file}: {'.'.join(path[2:])}"

        own = withhold(values, place_in_file, ("strategy", "config"))
        return self.model_copy(update={"config": own})

    def mesh(self, world: int) -> Mesh:
        # The optimizer's states are sharded over all ranks.
        return Mesh(shard=world)

    def engine(self, mesh: Mesh) -> Engine:
        return "deepspeed"

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "zero"

    def shards(self, mesh: Mesh) -> int:
        return mesh.shard

    def offloads(self) -> tuple[str, str]:
        return self.offload_optimizer.kind, "none"

    def frozen(self) -> StrategyConfig:
        """Return the strategy of frozen models beside the trainable one."""
        return SingleStrategy()

    def names(self, world: int) -> Names:
        """Return the strategy's name for a table: its stage, and what is offloaded."""
        offload_words = self.offload_words()
        name = " ".join([self.kind, *offload_words])
        simplicity = self.simplicity
        if offload_words:
            simplicity += OFFLOADED
        return Names(name, name, simplicity)

    def offload_words(self) -> list[str]:
        """Return the words of a table for what is offloaded; none if nothing is.

        | optimizer | parameters | words |
        |---|---|---|
        | cpu | none | `offload`, for ZeRO-3 `offload optimizer` |
        | cpu or none | cpu | `offload` |
        | nvme | none or cpu | `nvme`, for ZeRO-3 `nvme optimizer` |
        | any | nvme | `nvme` |
        """
        optimizer, parameters = self.offloads()
        for kind, word in (("nvme", "nvme"), ("cpu", "offload")):
            if kind not in (optimizer, parameters):
                continue
            if self.stage == 3 and parameters != kind:
                word += " optimizer"
            return [word]
        return []


NO_COPIES = (
    *Zero.lacks,
    *no_option(
        "replicate", "DeepSpeed has a second partition for ZeRO-3 only", "fsdp2 with replicate"
    ),
)


class Zero1Strategy(Zero):
    position: ClassVar[int] = 7
    stage: ClassVar[Literal[1, 2, 3]] = 1
    lacks = NO_COPIES
    kind: Literal["zero1"] = "zero1"


class Zero2Strategy(Zero):
    position: ClassVar[int] = 8
    stage: ClassVar[Literal[1, 2, 3]] = 2
    lacks = NO_COPIES
    kind: Literal["zero2"] = "zero2"


class Zero3Strategy(Zero):
    position: ClassVar[int] = 9
    stage: ClassVar[Literal[1, 2, 3]] = 3
    whole_weights: ClassVar[bool] = False
    hooked: ClassVar[bool] = True
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.zero:Zero3Cost"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.zero.spec:Zero3Spec"
    lacks = (
        *Zero.lacks,
        *no_option(
            "replicate",
            "DeepSpeed has its own key for it",
            "zeropp: {hierarchical_partition: N}, or fsdp2 with replicate",
        ),
    )
    kind: Literal["zero3"] = "zero3"
    offload_parameters: OffloadField = Field(
        default_factory=Offload, description="Where weights live while they are not used."
    )
    zeropp: ZeroPlusPlus = Field(default_factory=ZeroPlusPlus, description="ZeRO++ switches.")

    def offloads(self) -> tuple[str, str]:
        return self.offload_optimizer.kind, self.offload_parameters.kind

    def frozen(self) -> StrategyConfig:
        if self.offload_parameters.kind == "none":
            return FSDP2Strategy(offload="none")
        return FSDP2Strategy(offload="cpu")
