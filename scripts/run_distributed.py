"""Start training on N processes: `python scripts/run_distributed.py --nproc_per_node 4 --config C.yaml --algorithm sft`.

By itself it is `drumline train C.yaml --nproc 4`. --use_torchrun starts torchrun instead, once on each machine.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from drumline.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc_per_node", type=int, help="processes on this machine; without it, one per GPU, or 1")
    parser.add_argument("--config", required=True)
    parser.add_argument("--algorithm", help="sft or pretrain; without it, the config's")
    parser.add_argument("--use_torchrun", action="store_true", help="several machines need it")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    train = ["train", given.config, *([f"algorithm.kind={given.algorithm}"] if given.algorithm else []), *given.overrides]
    if not given.use_torchrun:
        if given.nnodes > 1:
            parser.error("--nnodes above 1 needs --use_torchrun")
        main([*train, *(["--nproc", str(given.nproc_per_node)] if given.nproc_per_node else [])])
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={given.nproc_per_node or 'auto'}"]
    torchrun += [f"--nnodes={given.nnodes}", f"--node-rank={given.node_rank}"]
    torchrun += [f"--master-addr={given.master_addr}", f"--master-port={given.master_port}", "-m", "drumline", *train]
    os.execv(sys.executable, torchrun)
