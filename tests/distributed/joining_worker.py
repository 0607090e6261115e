"""A rank that joins through dist.start alone, under a launcher that is not ours: `python -m tests.distributed.joining_worker FOLDER HOW`.

together  rank 0 tells the others a text, all sum their ranks a few times
restart   the same; rank 1 kills itself in the first attempt, in the middle
refuse    rank 0 tells them that there is no plan
die       rank 0 is killed before it has told anything
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from drumline.dist.start import RankInfo, publish, receive, rendezvous, start, stop


def main(folder: Path, how: str) -> None:
    ranks = RankInfo.from_environment()
    rendezvous()
    (folder / f"there-{ranks.attempt}-{ranks.rank}").touch()
    if ranks.rank == 0:
        while len(list(folder.glob(f"there-{ranks.attempt}-*"))) < ranks.world_size:
            time.sleep(0.02)
        if how == "die":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        text = f"the plan of attempt {ranks.attempt}" if how != "refuse" else "no plan"
        publish(text)
    else:
        text = receive()
    if how == "refuse":
        if ranks.rank == 0:
            receive("heard", 60)  # the store goes with rank 0
        else:
            publish("", "heard")
        raise SystemExit(2)
    assert start("cpu", "gloo", 60) == ranks
    for number in range(5):
        total = torch.tensor([float(ranks.rank)])
        dist.all_reduce(total)
        assert total.item() == sum(range(ranks.world_size))
        if how == "restart" and (ranks.attempt, ranks.rank, number) == (0, 1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
    stop()
    (folder / f"done-{ranks.rank}").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
