"""How DeepSpeed trains a model under ZeRO, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from drumline.config.config import Config
from drumline.config.refusal import Refusal
from drumline.config.strategies.zero import OFFLOADS, Zero, Zero3Strategy
from drumline.config.strategy import Precision
from drumline.engine.strategies.zero.config import adopt, deepspeed_config
from drumline.engine.strategies.zero.machine import require
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, Plan
from drumline.plan.rule import Case, uses_selective_checkpointing
from drumline.plan.strategy_engine import EngineSpec

Z = TypeVar("Z", bound=Zero)


class ZeroSpec(EngineSpec[Z]):
    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what DeepSpeed cannot do, or would do in another way than the YAML says."""
        if case.device == "cpu" and case.precision == "fp16":
            yield Refusal(
                "ZeRO × fp16 × CPU",
                "DeepSpeed takes fp16 on GPUs only",
                "use precision=bf16 or fp32, or strategy=fsdp2",
                "precision",
            )
        if self.strategy.stage < 3 and self.strategy.offloads()[0] == "nvme":
            yield Refusal(
                "zero1, zero2 × NVMe offload",
                "DeepSpeed has NVMe offload in ZeRO-3 only, and would quietly use host memory",
                "use strategy=zero3, or offload_optimizer=cpu",
                "strategy.offload_optimizer",
            )

    def adopted(self, config: Config) -> Config:
        """Return the config completed by what the user's DeepSpeed config sets (`adopt`)."""
        return adopt(config, self.strategy)

    def engine_options(
        self,
        config: Config,
        batch: BatchPlan,
        precision: Precision,
        steps: int | None,
        run_dir: str,
        facts: ModelFacts | None,
    ) -> dict[str, Any] | None:
        return deepspeed_config(config, self.strategy, batch, precision, steps, run_dir, facts)

    def require(self, plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
        """Raise EnvironmentFault if the machine lacks what DeepSpeed needs for this."""
        offloads = {}
        for name in OFFLOADS.values():
            if hasattr(self.strategy, name):
                offloads[f"strategy.{name}"] = getattr(self.strategy, name)
        require(offloads, on_progress)

    def prepare(
        self, plan: Plan, model: Any, values: Any, *, overlaps: bool = True, **options: Any
    ) -> Any:
        from drumline.engine.strategies.zero.engine import prepare

        return prepare(plan, model, values, **options)


class Zero3Spec(ZeroSpec[Zero3Strategy]):
    def refusals(self, case: Case) -> Iterator[Refusal]:
        yield from super().refusals(case)
        if uses_selective_checkpointing(case):
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
        if self.strategy.offloads() == ("none", "nvme"):
            yield Refusal(
                "zero3 with its optimizer on the device × parameters on NVMe",
                "the step would bring all weights back to the device",
                "set offload_optimizer to cpu or nvme as well",
                "strategy.offload_parameters",
            )
        if self.strategy.offload_optimizer.kind == "nvme" and case.config.optimizer.kind == "sgd":
            yield Refusal(
                "zero3 on NVMe × SGD",
                "DeepSpeed swaps the moments of Adam only",
                "use optimizer.kind=adamw, or offload_optimizer=cpu",
                "strategy.offload_optimizer",
            )
        quantises = (
            self.strategy.zeropp.quantized_weights or self.strategy.zeropp.quantized_gradients
        )
        if case.device == "cpu" and quantises:
            yield Refusal(
                "ZeRO++ quantisation × CPU",
                "its kernels are for GPUs",
                "leave quantized_weights and quantized_gradients out",
                "strategy.zeropp",
            )
        if case.mesh.world_size % self.strategy.zeropp.hierarchical_partition:
            yield Refusal(
                "ZeRO++ hierarchical_partition × number of processes",
                "the ranks of a second copy must divide all ranks",
                "use the number of GPUs of one host",
                "strategy.zeropp.hierarchical_partition",
            )
