"""A rank that joins and leaves by dist.start: `python -m tests.distributed.starting_worker HOW`; its launch.timeout_seconds is 41, but for
`phases`, where nobody has set it.

timeouts  prints the seconds after which a collective of each group fails: the mesh's dimensions, what is flattened of it, one more group
phases    prints these seconds until the first step, after a long one, during an evaluation, until a step after it, and then; after that
          rank 1 does not come to a collective of one second, and rank 0 prints why it ends
blocked   rank 0 waits in vain for rank 1, raises, and leaves
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from drumline.checkpoint.ranks import RankGroup
from drumline.config.mesh import DIMENSIONS, Mesh
from drumline.dist.mesh import device_mesh, gradient_group, side_group
from drumline.dist.start import start, stop
from drumline.dist.timeouts import set_timeout
from drumline.train.failure import exit_on_error
from drumline.train.timeouts import CollectiveTimeout


def main(how: str) -> None:
    ranks = start("cpu", "gloo", None if how == "phases" else 41.0)
    if how in ("timeouts", "phases"):
        whole = device_mesh(Mesh(tp=2), "cpu")
        groups = [
            *(whole[name].get_group() for name in DIMENSIONS),
            gradient_group(whole),
            dist.new_group([0, 1]),
        ]
        if how == "timeouts":
            print(*(seconds_of(group) for group in groups))
            stop()
            return
        follow_phases(groups)
        set_timeout(1.0)
        if ranks.rank == 0:
            try:
                dist.all_reduce(torch.ones(2))
            except RuntimeError as error:
                print(error)
        else:
            time.sleep(5)
        stop(failed=True)
        return
    dist.all_reduce(torch.ones(2))
    if ranks.rank == 1:
        time.sleep(600)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
    try:
        raise ValueError(f"{len(works)} collectives are under way")
    except ValueError:
        stop(failed=True)
        raise


def seconds_of(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def follow_phases(groups: list[dist.ProcessGroup]) -> None:
    """Print the limit after each phase of a run; it is one number for all of `groups`, but for
    those of saves and beside the steps."""
    saves = RankGroup.create_separate().group
    beside = side_group(dist.group.WORLD)
    config = SimpleNamespace(
        compile=SimpleNamespace(enabled=False),
        data=SimpleNamespace(stream=None),
        run=SimpleNamespace(callbacks=()),
    )
    plan: Any = SimpleNamespace(config=config, predicted=SimpleNamespace(estimate=None))

    def limit() -> float:
        (seconds,) = {seconds_of(group) for group in (dist.group.WORLD, *groups)}
        return seconds

    timeout = CollectiveTimeout(plan)
    seen = [limit()]
    timeout.after_step(1, [0.0, 0.0])
    seen.append(limit())
    timeout.after_step(2, [40.0, 50.0])
    seen.append(limit())
    timeout.before_long_work(2)
    seen.append(limit())
    # Its numbers arrive late: the evaluation may not be over on all ranks.
    timeout.after_step(2, [1.0, 1.0])
    seen.append(limit())
    timeout.after_step(3, [1.0, 1.0])
    seen.append(limit())
    print(*seen, seconds_of(saves), seconds_of(beside))


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1])
