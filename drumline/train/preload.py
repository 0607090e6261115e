"""What every rank of a Hugging Face model imports, whatever its plan.

It takes seconds, and needs no plan.
"""

# ruff: noqa: E402 - what is imported first decides what the rest imports.

import torch

from drumline.vendor.transformers import import_without_torchao

import_without_torchao()

# Which bring what other models share with Llama.
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
from drumline.train.failure import watched

__all__ = [
    "AutoTokenizer",
    "Callbacks",
    "LlamaForCausalLM",
    "PreTrainedTokenizerFast",
    "build",
    "open_sinks",
    "torch",
    "watched",
]

SPECS = find(AlgorithmSpec, "sft"), find(StrategyConfig, "single")  # the first of each imports all
