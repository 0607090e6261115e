"""The usual launch lines of training guides: `torchrun --nproc_per_node 4 main.py --mode train --config C.yaml --algorithm sft`.

Works under torchrun, torch.distributed.launch, deepspeed and accelerate launch, or alone. All of it is `drumline train C.yaml`.
"""

import sys

sys.path.append(sys.path.pop(0))  # this folder shadows nothing

import argparse

from drumline.cli import main
from drumline.launch.environment import first_rank_reports

NAMES = {"reward_model": "reward"}  # of algorithms in guides
MODES = {"train": ["train"], "plan": ["train", "--dry-run"], "prepare": ["prepare"]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One line over the `drumline` command, which has more to say: drumline --help"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="train",
        help="plan: show what would happen; prepare: tokenise the data",
    )
    parser.add_argument(
        "--config",
        required=True,
        help="a YAML of Drumline, accelerate or transformers, or a DeepSpeed JSON",
    )
    parser.add_argument(
        "--algorithm",
        help="sft, pretrain, reward, dpo, ppo, grpo, classify, embed or rerank; without it, the config's",
    )
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted, since guides write it; --deepspeed_config chooses",
    )
    parser.add_argument(
        "--deepspeed_config", metavar="F", help="a DeepSpeed JSON: its ZeRO stage is the strategy"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        help="go on from the newest checkpoint, or from this one",
    )
    parser.add_argument(
        "--local_rank", "--local-rank", help="what launchers add; the environment says the same"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="dotted keys laid over the config"
    )
    with first_rank_reports():
        given = parser.parse_intermixed_args()
    options = ["--accelerate-config", given.deepspeed_config] if given.deepspeed_config else []
    options += ["--resume", given.resume] if given.resume else []
    overrides = (
        [f"algorithm.kind={NAMES.get(given.algorithm, given.algorithm)}"] if given.algorithm else []
    )
    main([*MODES[given.mode], given.config, *overrides, *given.overrides, *options])
