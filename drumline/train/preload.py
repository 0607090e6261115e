"""Imports what every rank of a Hugging Face model needs, whatever its plan.

`launch.early` imports this module in processes that become ranks, while their plan is still being
made, since it takes seconds.
"""

# ruff: noqa: E402 - what is imported first decides what the rest imports.

import torch

from drumline.vendor.transformers import import_without_torchao

import_without_torchao()

# These also import what other models share with Llama.
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.registry import find
from drumline.config.strategy import StrategyConfig
from drumline.telemetry.trackers import Callbacks, open_sinks
from drumline.train.build import build
from drumline.train.failure import convert_out_of_memory

__all__ = [
    "AutoTokenizer",
    "Callbacks",
    "LlamaForCausalLM",
    "PreTrainedTokenizerFast",
    "build",
    "convert_out_of_memory",
    "open_sinks",
    "torch",
]

# Finding one of each kind imports all of that kind.
SPECS = find(AlgorithmSpec, "sft"), find(StrategyConfig, "single")
