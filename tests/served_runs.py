"""The config of a run of GRPO whose completions are sampled by servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import write_config

# Two ranks in place of one.
TWO_RANKS = {"launch": {"nproc": 2}, "batch": {"global_samples": 8, "micro_batch": 2}}


def write_served_run(
    folder: Path,
    model: Path,
    urls: str | Sequence[str],
    generator: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """Write a config of three rollouts of 8 episodes, with a step each, and return its path.

    Before each rollout the sampler is probed by 8 prompts, at each server.

    Args:
        folder: The folder of the run.
        model: The folder of the policy's model.
        urls: The servers, which vLLM's API is asked of.
        generator: Further keys of the generator.
        algorithm: Further keys of the algorithm.
        sections: Sections of the config that replace those of this function.
    """
    sampler = {"kind": "vllm", "url": urls, "max_new_tokens": 6, **(generator or {})}
    reward = {"kind": "regex", "pattern": "[aeiou]", "full": False}
    grpo = {"kind": "grpo", "group_size": 4, "generator": sampler, "rewards": [reward]}
    defaults: dict[str, Any] = {
        "algorithm": {**grpo, **(algorithm or {})},
        "batch": {"global_samples": 8, "micro_batch": 4},
        "run": {"steps": 3},
        "data": {"eval": []},
    }
    return write_config(folder, model, **{**defaults, **sections})
