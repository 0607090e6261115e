"""The sections zero1, zero2 and zero3 of the YAML, which train with DeepSpeed.

ZeRO (Rajbhandari et al. 2020) shards over the ranks the optimizer's states (1), the gradients too (2),
and the weights too (3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.section import PathText
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategy import (
    OFFLOADED,
    DataParallel,
    Engine,
    Names,
    Precision,
    Space,
    StrategySpec,
)
from drumline.engine.strategies.zero.config import (
    OFFLOADS,
    Offload,
    OffloadField,
    ZeroPlusPlus,
    adopt,
    deepspeed_config,
)
from drumline.engine.strategies.zero.machine import require
from drumline.errors import ConfigError
from drumline.foreign import read_object
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, Plan
from drumline.plan.rule import Case, Refusal, no_option, recomputes_some
from drumline.planner.strategies.zero import ZeroCosts
from drumline.system.redact import withhold

CPU = Offload(kind="cpu")


class Zero(ZeroCosts):
    simplicity: ClassVar[int] = 4
    compared: ClassVar[bool] = True
    in_step: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = True
    package: ClassVar[str | None] = "deepspeed"
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

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what DeepSpeed cannot do, or would do in another way than the YAML says."""
        if case.device == "cpu" and case.precision == "fp16":
            yield Refusal(
                "ZeRO × fp16 × CPU",
                "DeepSpeed takes fp16 on GPUs only",
                "use precision=bf16 or fp32, or strategy=fsdp2",
                "precision",
            )
        if self.stage < 3 and self.offloads()[0] == "nvme":
            yield Refusal(
                "zero1, zero2 × NVMe offload",
                "DeepSpeed has NVMe offload in ZeRO-3 only, and would quietly use host memory",
                "use strategy=zero3, or offload_optimizer=cpu",
                "strategy.offload_optimizer",
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

    def adopted(self, config: Config) -> Config:
        """Return the config completed by what the user's DeepSpeed config sets (`adopt`)."""
        return adopt(config, self)

    def mesh(self, world: int) -> Mesh:
        # The optimizer's states are sharded over all ranks.
        return Mesh(shard=world)

    def engine(self, mesh: Mesh) -> Engine:
        return "deepspeed"

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "zero"

    def offloads(self) -> tuple[str, str]:
        return self.offload_optimizer.kind, "none"

    def engine_options(
        self,
        config: Config,
        batch: BatchPlan,
        precision: Precision,
        steps: int | None,
        run_dir: str,
        facts: ModelFacts | None,
    ) -> dict[str, Any] | None:
        return deepspeed_config(config, self, batch, precision, steps, run_dir, facts)

    def frozen(self) -> StrategySpec:
        """Return the strategy of frozen models beside the trainable one."""
        return SingleStrategy()

    def require(self, plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
        """Raise EnvironmentFault if the machine lacks what DeepSpeed needs for this."""
        offloads = {}
        for name in OFFLOADS.values():
            if hasattr(self, name):
                offloads[f"strategy.{name}"] = getattr(self, name)
        require(offloads, on_progress)

    def names(self, world: int) -> Names:
        """Return the strategy's name for a table: its stage, and what is offloaded."""
        places = self.places()
        name = " ".join([self.kind, *places])
        simplicity = self.simplicity
        if places:
            simplicity += OFFLOADED
        return Names(name, name, simplicity)

    def places(self) -> list[str]:
        """Return the words of a table for offloading: one or none."""
        optimizer, parameters = self.offloads()
        for kind, word in (("nvme", "nvme"), ("cpu", "offload")):
            if kind not in (optimizer, parameters):
                continue
            if self.stage == 3 and parameters != kind:
                word += " optimizer"
            return [word]
        return []

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        """Yield this stage, and this stage with its optimizer on the host."""
        if space.world > 1:
            yield cls()
        yield cls(offload_optimizer=CPU)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        """Return the higher stages, and this one with its optimizer on the host.

        There are none if the user's own DeepSpeed config says what DeepSpeed does.
        """
        if self.config is not None or self.options:
            return []
        host = self.offload_optimizer
        higher: list[type[Zero]] = [Zero2Strategy, Zero3Strategy]
        found: list[tuple[int, StrategySpec]] = []
        for strategy in higher:
            if strategy.stage > self.stage:
                found.append((2, strategy(offload_optimizer=host)))
        if host.kind == "none" and device == "cuda":
            found.append((3, self.model_copy(update={"offload_optimizer": CPU})))
        return found

    def prepare(
        self, plan: Plan, model: Any, values: Any, *, overlaps: bool = True, **options: Any
    ) -> Any:
        from drumline.engine.strategies.zero.engine import prepare

        return prepare(plan, model, values, **options)


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

    def refusals(self, case: Case) -> Iterator[Refusal]:
        yield from super().refusals(case)
        if recomputes_some(case):
            yield Refusal(
                "selective checkpointing × zero3",
                "torch's selective checkpointing requires the same operations again,"
                " and DeepSpeed gathers weights within a block in another order then",
                "use memory.activation_checkpointing=full, or strategy=fsdp2",
                "memory.activation_checkpointing",
            )
        if case.config.compile.enabled:
            yield Refusal(
                "zero3 × compile",
                "its hooks gather weights between the calls of layers, which torch.compile cannot trace",
                "use strategy=zero2 or fsdp2",
                "compile.enabled",
            )
        if self.offloads() == ("none", "nvme"):
            yield Refusal(
                "zero3 with its optimizer on the device × parameters on NVMe",
                "the step would bring all weights back to the device",
                "set offload_optimizer to cpu or nvme as well",
                "strategy.offload_parameters",
            )
        if self.offload_optimizer.kind == "nvme" and case.config.optimizer.kind == "sgd":
            yield Refusal(
                "zero3 on NVMe × SGD",
                "DeepSpeed swaps the moments of Adam only",
                "use optimizer.kind=adamw, or offload_optimizer=cpu",
                "strategy.offload_optimizer",
            )
        quantises = self.zeropp.quantized_weights or self.zeropp.quantized_gradients
        if case.device == "cpu" and quantises:
            yield Refusal(
                "ZeRO++ quantisation × CPU",
                "its kernels are for GPUs",
                "leave quantized_weights and quantized_gradients out",
                "strategy.zeropp",
            )
        if case.mesh.world_size % self.zeropp.hierarchical_partition:
            yield Refusal(
                "ZeRO++ hierarchical_partition × number of processes",
                "the ranks of a second copy must divide all ranks",
                "use the number of GPUs of one host",
                "strategy.zeropp.hierarchical_partition",
            )

    def offloads(self) -> tuple[str, str]:
        return self.offload_optimizer.kind, self.offload_parameters.kind

    def frozen(self) -> StrategySpec:
        if self.offload_parameters.kind == "none":
            return FSDP2Strategy(offload="none")
        return FSDP2Strategy(offload="cpu")

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        yield from super().candidates(space)
        yield cls(offload_optimizer=CPU, offload_parameters=CPU)
        if space.nvme is not None:
            disk = Offload(kind="nvme", path=space.nvme)
            yield cls(offload_optimizer=disk)
            yield cls(offload_optimizer=disk, offload_parameters=disk)
