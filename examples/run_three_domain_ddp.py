"""GRPO over three domains under DDP: `grpo_three_domains.yaml` with so many prompts of each domain in every step.

    python examples/run_three_domain_ddp.py [--model ID_OR_FOLDER] [--num-gpus N] [--tasks-per-domain T] [--group-size G] [key=value …]

A step learns from 3 × T × G episodes, dealt over N processes; without GPUs these are processes on the CPU. Further arguments lay over any
key of the config, as in `drumline train`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("grpo_three_domains.yaml")
DOMAINS = ("arithmetic", "logic", "algorithmic")


def overrides(
    model: str | None, processes: int, tasks_per_domain: int, group_size: int
) -> list[str]:
    """What is laid over the config."""
    shares = ", ".join(f"{domain}: 1" for domain in DOMAINS)
    return [
        *([f"model.id={model}"] if model else []),
        "strategy=ddp",
        f"launch.nproc={processes}",
        f"algorithm.group_size={group_size}",
        f"algorithm.curriculum={{kind: weights, weights: {{{shares}}}}}",
        f"batch.global_samples={len(DOMAINS) * tasks_per_domain * group_size}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a local folder, a hub id or package:NAME; by default the config's"
    )
    parser.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        help="processes, one a GPU; on the CPU where there is none",
    )
    parser.add_argument(
        "--tasks-per-domain", type=int, default=2, help="prompts of each domain in a step"
    )
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    options, more = parser.parse_known_args()
    chosen = overrides(
        options.model, options.num_gpus, options.tasks_per_domain, options.group_size
    )
    return subprocess.run(
        [sys.executable, "-m", "drumline", "train", str(CONFIG), *chosen, *more]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
