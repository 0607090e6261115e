"""Start training on N processes: `python scripts/run_distributed.py --nproc_per_node 4 --config C.yaml --algorithm sft`.

By itself it is `drumline train C.yaml --nproc 4`. --use_torchrun, or --nnodes above 1, starts torchrun instead, once on each machine.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder shadows nothing
sys.path.append(str(Path(__file__).parent.parent))

from drumline.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nproc_per_node",
        type=int,
        help="processes on this machine; without it, one per GPU, or 1",
    )
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--algorithm",
        help="sft, pretrain, reward, dpo, ppo, grpo, classify, embed or rerank; without it, the config's",
    )
    parser.add_argument(
        "--use_torchrun",
        action="store_true",
        help="several machines need it, and have it without a word",
    )
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node_rank", type=int)
    parser.add_argument("--master_addr")
    parser.add_argument("--master_port", type=int)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    algorithm = {"reward_model": "reward"}.get(given.algorithm, given.algorithm)
    train = [
        "train",
        given.config,
        *([f"algorithm.kind={algorithm}"] if algorithm else []),
        *given.overrides,
    ]
    if not given.use_torchrun and given.nnodes == 1:
        for flag in ("node_rank", "master_addr", "master_port"):
            if getattr(given, flag) is not None:
                print(
                    f"note: --{flag} has no effect: one machine, without --use_torchrun",
                    file=sys.stderr,
                )
        main([*train, *(["--nproc", str(given.nproc_per_node)] if given.nproc_per_node else [])])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={given.nproc_per_node or 'auto'}",
    ]
    torchrun += [f"--nnodes={given.nnodes}", f"--node-rank={given.node_rank or 0}"]
    torchrun += [
        f"--master-addr={given.master_addr or '127.0.0.1'}",
        f"--master-port={given.master_port or 29500}",
        "-m",
        "drumline",
        *train,
    ]
    os.execv(sys.executable, torchrun)
