"""Traces as rank 0 of a process group that sends nothing: `python -m drumline.tracing.child`, the question on stdin, the answer the last
line of stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from drumline.plan.plan import Plan
from drumline.tracing.run import Untraceable
from drumline.tracing.trace import traces


def main() -> None:
    import torch.distributed as dist

    from drumline.strategies import context_parallel
    from drumline.vendor.torch import FakeStore

    context_parallel._same_in_parts = lambda *_: True  # a proof needs ranks that answer; a run asks for it
    question = json.load(sys.stdin)
    world_size = Plan.model_validate(question["plan"]).mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        print(json.dumps([asdict(traced) for traced in traces(question)]))
    except Untraceable as reason:
        sys.exit(str(reason))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
