"""The specs of all strategies, for tests that write them down."""

from __future__ import annotations

from drumline.config.strategies.auto import AutoStrategy
from drumline.config.strategies.cp import CPStrategy
from drumline.config.strategies.ddp import DDPStrategy
from drumline.config.strategies.diloco import DiLoCoStrategy
from drumline.config.strategies.dp import DPStrategy
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategies.local_sgd import LocalSGDStrategy
from drumline.config.strategies.model_parallel import ModelParallelStrategy
from drumline.config.strategies.pp import PPStrategy
from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategies.tp import TPStrategy
from drumline.config.strategies.zero import Offload, Zero1Strategy, Zero2Strategy, Zero3Strategy
from drumline.config.strategy import Compression, StrategyConfig

__all__ = [
    "AutoStrategy", "CPStrategy", "Compression", "DDPStrategy", "DPStrategy", "DiLoCoStrategy", "FSDP2Strategy", "LocalSGDStrategy",
    "ModelParallelStrategy", "Offload", "PPStrategy", "SingleStrategy", "StrategyConfig", "TPStrategy", "Zero1Strategy", "Zero2Strategy",
    "Zero3Strategy",
]  # fmt: skip
