"""The section dp of the YAML: nn.DataParallel, kept for completeness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from drumline.config.mesh import Mesh
from drumline.config.strategies.single import OneProcess
from drumline.config.strategy import DataParallel
from drumline.plan.plan import Plan
from drumline.plan.rule import Case, Refusal, sees


class DPStrategy(OneProcess):
    """nn.DataParallel: one process, a thread a device."""

    position: ClassVar[int] = 2
    simplicity: ClassVar[int] = 1
    kind: Literal["dp"] = "dp"

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what a batch that is cut into runs of rows cannot do."""
        algorithm = case.config.algorithm
        if sees(case):
            yield Refusal(
                "images × dp",
                "nn.DataParallel cuts every tensor of a batch into equal runs, and rows have uneven numbers of patches",
                "use strategy=ddp",
            )
        if case.device == "cuda" and algorithm.rows_per_sample > 1:
            yield Refusal(
                "dp × pairs",
                "nn.DataParallel cuts a batch into runs of rows, and the two answers of a pair would land on two GPUs",
                "use strategy=ddp",
            )
        if case.device == "cuda" and algorithm.pairs_with_previous:
            yield Refusal(
                "dp × a mean over the global batch",
                "nn.DataParallel cuts a batch into runs of rows, and the loss of each takes a mean over the whole global batch",
                "use strategy=ddp",
            )
        if case.config.compile.enabled:
            yield Refusal(
                "dp × compile",
                "nn.DataParallel copies modules at each step, and a compiled block goes on with the weights it was compiled for",
                "use strategy=ddp, or compile.enabled=false",
                "compile.enabled",
            )

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "dp"

    def devices_per_rank(self, devices: int) -> int:
        return devices

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        """Return what the plan says of this strategy, and of GPUs that get no rows."""
        origin = (
            "strategy dp: nn.DataParallel, kept for completeness. One Python process feeds all GPUs, copies the weights to each at each"
            " forward and sums the gradients on the first; strategy ddp has none of that, and is faster on one machine too"
        )
        if devices == 1:
            return [origin, "strategy dp: there is one device, so it is the same as single"]
        share = f"strategy dp: each micro-batch of {micro_batch} samples is cut over {devices} GPUs"
        if micro_batch < devices:
            share += f", of which {devices - micro_batch} get none"
        return [origin, share]

    def spread(
        self, plan: Plan, whole: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        from drumline.engine.strategies.dp import spread

        return spread(plan, model, roots[0][0], values)
