"""What faults cost a run: how often to save, what part of the time is training, and how many spare hosts are worth their price. Pure.

Faults come independently, at a constant rate a device. The interval is Daly's (A higher order estimate of the optimum checkpoint interval
for restart dumps, FGCS 22, 2006; its first term is Young's, CACM 17, 1974), the goodput follows from his expected time of a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from drumline.core.facts import ModelFacts
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.memory import checkpoint_bytes
from drumline.planner.search.answer import Candidate

# Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs; 78% were hardware, confirmed or
# suspected. These count as a lost host, whose memory is lost with it.
MTBF_HOURS = 54 * 24 * 16384 / 419
HOST_LOST = 0.78
# Seconds (ARCHITECTURE.md, "Faults"): a dead rank is seen at once, a host that is cut off is given up. And from a kill to the first step,
# as measured with two processes and a tiny model: 5.0 to 7.5. Larger models take longer: cluster.restart_seconds sets it.
NOTICE_RANK, NOTICE_HOST = 0.1, 6.0
RESTART = 7.5
MOST_SPARES = 1000


@dataclass(frozen=True)
class Level:
    """A kind of save, and the faults that need it: `stall`: seconds that a save holds the steps up; `lag`: until it can be gone back to,
    beside the steps; `restart`: from the fault to the first step; `mtbf`: seconds between such faults."""

    stall: float
    lag: float
    restart: float
    mtbf: float

    def best(self, step: float) -> float:
        """Seconds of training between two saves, by Daly; a step at least, and a save ends before the next one begins."""
        if self.stall >= 2 * self.mtbf:
            return self.mtbf
        part = math.sqrt(self.stall / (2 * self.mtbf))
        return max(
            math.sqrt(2 * self.stall * self.mtbf) * (1 + part / 3 + part**2 / 9) - self.stall,
            self.lag - self.stall,
            step,
        )

    def goodput(self, interval: float) -> float:
        """The expected part of the time that is training, for a save after each `interval` seconds of it. A fault while a save is under way
        goes back to the one before, so on average it costs `lag` seconds more."""
        restart, segment = (
            (self.restart + self.lag) / self.mtbf,
            (interval + self.stall) / self.mtbf,
        )
        return (
            interval / (self.mtbf * math.exp(restart) * math.expm1(segment))
            if restart + segment < 500
            else 0.0
        )


@dataclass(frozen=True)
class Campaign:
    """A run on devices that fail. `step`: seconds; `disk`: a save on disk; `memory`: one in host memory (checkpoint.in_memory_every), None
    without; `hosts_lost`: an hour, over all hosts; `repair_hours`: of a host."""

    devices: int
    hosts: int
    step: float
    disk: Level
    memory: Level | None
    hosts_lost: float
    repair_hours: float

    @property
    def faults_a_day(self) -> float:
        return 24 * 3600 * (1 / self.disk.mtbf + (1 / self.memory.mtbf if self.memory else 0.0))

    @property
    def every(self) -> int:
        """The best checkpoint.every, in steps."""
        return max(1, round(self.disk.best(self.step) / self.step))

    @property
    def in_memory_every(self) -> int | None:
        """The best checkpoint.in_memory_every, in steps."""
        return max(1, round(self.memory.best(self.step) / self.step)) if self.memory else None

    def goodput(self, every: int | None = None) -> float:
        """The expected part of the time that is training, with a host at hand for each one lost. `every`: steps; None: the best."""
        found = self.disk.goodput((every or self.every) * self.step)
        return (
            found * self.memory.goodput((self.in_memory_every or 1) * self.step)
            if self.memory
            else found
        )

    def available(self, spares: int) -> float:
        """The part of the time in which no more hosts are in repair than there are spare ones: as many as Poisson says."""
        return sum(
            _poisson(self.hosts_lost * self.repair_hours, number) for number in range(spares + 1)
        )

    @cached_property
    def spares(self) -> int:
        """Spare hosts with which a step costs least: each one is paid for, and saves waiting for repair."""
        mean, found, best, share = self.hosts_lost * self.repair_hours, 0, 0.0, 0.0
        for number in range(min(self.hosts, MOST_SPARES) + 1):
            share += _poisson(mean, number)
            if (worth := share * self.hosts / (self.hosts + number)) > best:
                found, best = number, worth
        return found

    def hours(self, hours: float) -> float:
        """Expected hours of a run that takes so many without faults, with the best interval and spare hosts."""
        part = self.goodput() * self.available(self.spares)
        return hours / part if part else math.inf


def _poisson(mean: float, number: int) -> float:
    """The probability of this number where `mean` are expected."""
    return (
        math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        if mean
        else float(number == 0)
    )


def campaign(
    found: Candidate, cluster: Cluster, facts: ModelFacts, devices: int | None = None
) -> Campaign:
    """The campaign of a plan. `devices`: on another number of them, each with as much to do and to save. Without checkpoint.asynchronous
    the writing of a checkpoint holds the steps up."""
    config, world = found.config.checkpoint, found.devices
    state = checkpoint_bytes(found.layout, facts)
    kept = state / world
    copied = (
        kept / cluster.device.bandwidth
        if cluster.device.kind == "cpu"
        else cluster.host_seconds("to_host", kept)
    )
    hosts = -(-world // cluster.per_node)
    written, read = (
        cluster.disk_seconds(direction, state / hosts) for direction in ("write", "read")
    )
    devices = devices or world
    hosts = -(-devices // cluster.per_node)
    notice = NOTICE_HOST if hosts > 1 else NOTICE_RANK
    restart = notice + (RESTART if cluster.restart_seconds is None else cluster.restart_seconds)
    mtbf = (cluster.mtbf_hours or MTBF_HOURS) * 3600 / devices
    stall, lag = (copied, written) if config.asynchronous else (written, 0.0)
    disk, memory = Level(stall, lag, restart + read, mtbf), None
    if config.in_memory_every is not None:
        memory = Level(copied, 0.0, restart, mtbf / (1 - HOST_LOST))
        disk = replace(disk, mtbf=mtbf / HOST_LOST)
    return Campaign(
        devices,
        hosts,
        found.estimate.seconds.total,
        disk,
        memory,
        HOST_LOST * 3600 / mtbf,
        cluster.repair_hours,
    )
