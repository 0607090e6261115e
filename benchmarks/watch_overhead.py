"""What watching costs a step: heartbeats, spikes and stragglers in a rank, and the launcher's look at its ranks.

    python benchmarks/watch_overhead.py [--steps 60] [--hidden 256] [--smoke] [--out FILE]

Two processes train a small model under DDP over gloo. After each step a rank does once more what the loop does for watching in a step, by
the same calls, and takes its time. The figure is the median of those seconds over the median step's; the slower rank counts. The
launcher looks ten times a second: its share of a core is its processor seconds for that, and a checksum of all weights
(health.check_weights_every) is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.common import ROOT

RANKS, LOOKS_A_SECOND = 2, 10


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = common.parse(parser, steps=4, hidden=32)
    if options.rank is not None:
        print(json.dumps(rank(options.steps, options.hidden)))
        return
    from drumline.launch.watch import Watch

    watch = Watch(RANKS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    command = [
        sys.executable,
        __file__,
        "--steps",
        str(options.steps),
        "--hidden",
        str(options.hidden),
        "--rank",
    ]
    ranks = [
        subprocess.Popen(
            [*command, str(number)],
            env={**environment, "RANK": str(number), **watch.variable(number)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(RANKS)
    ]
    looks, spent = 0, 0.0
    while any(process.poll() is None for process in ranks):
        began = time.process_time()
        watch.look(
            {number: process.pid for number, process in enumerate(ranks) if process.poll() is None}
        )
        spent, looks = spent + time.process_time() - began, looks + 1
        time.sleep(1 / LOOKS_A_SECOND)
    watch.close()
    by_rank = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    figures = {
        "step_seconds": max(found["step"] for found in by_rank),
        "watching_of_a_step": max(found["watching"] / found["step"] for found in by_rank),
        "checksum_of_a_step": max(found["checksum"] / found["step"] for found in by_rank),
        "launcher_of_a_core": spent / looks * LOOKS_A_SECOND,
        "by_rank": by_rank,
    }
    print(json.dumps(figures))
    common.write(figures, options.out)


def rank(steps: int, hidden: int) -> dict[str, float]:
    """Medians of seconds."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from drumline.config.run import HealthConfig
    from drumline.dist.reduce import SumReducer
    from drumline.dist.start import start, stop
    from drumline.system import heartbeat
    from drumline.telemetry.stragglers import Stragglers
    from drumline.train.health import Spikes, checksum

    health = HealthConfig(on_spike="skip", spike_window=20)
    heartbeat.register(health.limits())
    ranks = start("cpu", "gloo", 60)
    reducer = SumReducer(ranks.rank, RANKS, "cpu")
    spikes, stragglers = Spikes(health, print), Stragglers(reducer, lambda event: None, 10.0**6)
    model = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(8)))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    data, seconds = (
        torch.randn(64, hidden),
        dict[str, list[float]](step=[], watching=[], checksum=[]),
    )
    for step in range(steps):
        began = time.perf_counter()
        loss = ddp(data).square().mean()
        loss.backward()
        optimizer.step()
        gathered = reducer.start({"loss": loss.detach().double()}, 0.0, 0.0, 0.0)
        loss_sum = gathered["loss"]
        finite = torch.isfinite(loss_sum)
        gathered.read()
        after = time.perf_counter()
        watched(step, heartbeat, spikes, stragglers, loss_sum, finite)
        seconds["step"].append(after - began)
        seconds["watching"].append(time.perf_counter() - after)
        before = time.perf_counter()
        checksum(SimpleNamespace(model=model))
        seconds["checksum"].append(time.perf_counter() - before)
    heartbeat.beat("done")
    stop()
    return {name: statistics.median(values) for name, values in seconds.items()}


def watched(
    step: int, heartbeat: Any, spikes: Any, stragglers: Any, loss: Any, finite: Any
) -> None:
    """What a step of train.loop does besides: one micro-batch, one log line."""
    heartbeat.step(step, step)
    for phase in (
        "data",
        "forward",
        "forward",
        "backward",
        "collective",
        "optimizer",
        "collective",
        "report",
    ):
        heartbeat.beat(phase)
    value = 1.0 + step % 2
    flight = SimpleNamespace(
        position=step,
        limit=None,
        denominator=1.0,
        finite=True,
        total={"loss": value},
        loss=value,
        step=step,
        sample_ids=None,
    )
    spikes.allows(flight, loss, finite)
    spikes.judge(flight, 0, False)
    stragglers.add(step, 1.0, 1000, [0.0] * RANKS, [0.0] * RANKS)


if __name__ == "__main__":
    main()
