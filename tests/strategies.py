"""The specs of all strategies, for tests that write them down."""

from __future__ import annotations

from drumline.core.strategy import Compression, StrategySpec
from drumline.strategies.auto.spec import AutoStrategy
from drumline.strategies.ddp.spec import DDPStrategy
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.local_sgd.spec import DiLoCoStrategy, LocalSGDStrategy
from drumline.strategies.one_degree.spec import CPStrategy, ModelParallelStrategy, PPStrategy, TPStrategy
from drumline.strategies.single.spec import DPStrategy, SingleStrategy
from drumline.strategies.zero.config import Offload
from drumline.strategies.zero.spec import Zero1Strategy, Zero2Strategy, Zero3Strategy

__all__ = [
    "AutoStrategy", "CPStrategy", "Compression", "DDPStrategy", "DPStrategy", "DiLoCoStrategy", "FSDP2Strategy", "LocalSGDStrategy",
    "ModelParallelStrategy", "Offload", "PPStrategy", "SingleStrategy", "StrategySpec", "TPStrategy", "Zero1Strategy", "Zero2Strategy",
    "Zero3Strategy",
]  # fmt: skip
