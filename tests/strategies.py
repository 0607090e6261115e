"""The specs of all strategies, for tests that write them down."""

from __future__ import annotations

from drumline.core.strategy import Compression, StrategySpec
from drumline.strategies.auto.spec import AutoStrategy
from drumline.strategies.cp.spec import CPStrategy
from drumline.strategies.ddp.spec import DDPStrategy
from drumline.strategies.diloco.spec import DiLoCoStrategy
from drumline.strategies.dp.spec import DPStrategy
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.local_sgd.spec import LocalSGDStrategy
from drumline.strategies.model_parallel.spec import ModelParallelStrategy
from drumline.strategies.pp.spec import PPStrategy
from drumline.strategies.single.spec import SingleStrategy
from drumline.strategies.tp.spec import TPStrategy
from drumline.strategies.zero.config import Offload
from drumline.strategies.zero.spec import Zero1Strategy, Zero2Strategy, Zero3Strategy

__all__ = [
    "AutoStrategy", "CPStrategy", "Compression", "DDPStrategy", "DPStrategy", "DiLoCoStrategy", "FSDP2Strategy", "LocalSGDStrategy",
    "ModelParallelStrategy", "Offload", "PPStrategy", "SingleStrategy", "StrategySpec", "TPStrategy", "Zero1Strategy", "Zero2Strategy",
    "Zero3Strategy",
]  # fmt: skip
