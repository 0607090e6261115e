"""The section dp of the YAML: nn.DataParallel, kept for completeness."""

from __future__ import annotations

from typing import ClassVar, Literal

from drumline.config.mesh import Mesh
from drumline.config.strategies.single import OneProcess
from drumline.config.strategy import DataParallel


class DPStrategy(OneProcess):
    """nn.DataParallel: one process, a thread a device."""

    position: ClassVar[int] = 2
    simplicity: ClassVar[int] = 1
    kind: Literal["dp"] = "dp"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.dp.spec:DPSpec"

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
