"""Predict what faults cost a run: how often to save, the share of time that trains, spare hosts that pay.

Faults come independently, at a constant rate a device. The interval is Daly's (A higher order
estimate of the optimum checkpoint interval for restart dumps, FGCS 22, 2006; its first term is
Young's, CACM 17, 1974), the goodput follows from his expected time of a segment.

All functions are pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from drumline.hardware.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.planner.cost.memory import checkpoint_bytes
from drumline.planner.search.answer import Candidate

HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS
# The mean hours between two faults of a device, and the share of faults that lose a host with its
# memory. Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs, of which 78% were hardware,
# confirmed or suspected (Dubey et al. 2024, section 3.3.4).
MTBF_HOURS = 54 * 24 * 16384 / 419
HOST_LOST_SHARE = 0.78


class MeasuredSeconds(NamedTuple):
    """Seconds of something that was measured several times, or could be as short as a limit."""

    shortest: float
    median: float
    longest: float


# Which of the three a run is estimated with.
Pace = Literal["shortest", "median", "longest"]
# The medians and the longest times below are those of 37 kills on three hosts with tiny models
# (benchmarks/results/chaos_hosts-cpu.json and chaos_hosts_elastic-cpu.json; two cores that other
# work shared; kills of a launcher and of a cable have no such times). No GPU has measured them, and
# larger models take longer: `cluster.restart_seconds` sets what a run takes. A test holds these
# numbers equal to the files.
#
# Seconds until a dead rank is noticed. At best it is at the next look of the host's agent
# (launch.agent.MONITOR_SECONDS). The others are of 21 killed ranks.
NOTICE_RANK = MeasuredSeconds(0.1, 0.5, 0.8)
# Seconds until a lost host is noticed. At best it is when a silent host is given up
# (SILENT_SECONDS of drumline-hosts). The others are of 6 lost hosts.
NOTICE_HOST = MeasuredSeconds(6.0, 8.1, 18.6)
# Seconds from a noticed fault to the first step, without reading a checkpoint from a disk and
# without the steps that are done again. The shortest is of two processes on an idle machine with a
# checkpoint in host memory, less NOTICE_RANK (benchmarks/results/recovery-cpu.json).
RESTART = MeasuredSeconds(1.0, 24.0, 74.9)
# The most spare hosts that are tried.
MOST_SPARES = 1000
# An interval this many times as long as the mean time between faults gets no training done. The formula
# cannot tell: exp overflows at 709.
MOST_MEAN_TIMES = 500


@dataclass(frozen=True)
class CheckpointTier:
    """A tier of checkpoints (on disk or in host memory), and the faults after which it is restored.

    All times are in seconds.

    `stall`: how long a save holds the steps up.
    `lag`: how long after that a run cannot go back to the save yet, while steps go on.
    `restart`: the time from a fault to the first step after it.
    `mtbf`: the mean time between such faults.
    """

    stall: float
    lag: float
    restart: float
    mtbf: float

    def best_interval_seconds(self, step: float) -> float:
        """Return the best interval between two saves, in seconds of training, by Daly.

        It is one step (`step` seconds) at least, and long enough for a save to end before the next
        one.
        """
        if self.stall >= 2 * self.mtbf:
            # Daly's series holds only if a save takes less than twice the time between faults.
            return self.mtbf
        root = math.sqrt(self.stall / (2 * self.mtbf))
        young = math.sqrt(2 * self.stall * self.mtbf)
        daly = young * (1 + root / 3 + root**2 / 9) - self.stall
        return max(daly, self.lag - self.stall, step)

    def goodput(self, interval: float) -> float:
        """Return the expected share of the time that is training.

        `interval`: seconds of training between two saves. A fault while a save is under way goes back
        to the save before. On average that costs `lag` seconds more.
        """
        restart = (self.restart + self.lag) / self.mtbf
        segment = (interval + self.stall) / self.mtbf
        if restart + segment >= MOST_MEAN_TIMES:
            return 0.0
        return interval / (self.mtbf * math.exp(restart) * math.expm1(segment))


@dataclass(frozen=True)
class RunUnderFaults:
    """A run on devices that fail.

    `step`: seconds of a step.
    `disk`: saves on disk.
    `memory`: saves in host memory (checkpoint.in_memory_every); None without.
    `hosts_lost`: in an hour, over all hosts.
    `repair_hours`: of a host.
    """

    devices: int
    hosts: int
    step: float
    disk: CheckpointTier
    memory: CheckpointTier | None
    hosts_lost: float
    repair_hours: float

    @property
    def faults_a_day(self) -> float:
        """Return the expected faults of a day, over all devices."""
        rate = 1 / self.disk.mtbf
        if self.memory is not None:
            rate += 1 / self.memory.mtbf
        return DAY_SECONDS * rate

    @property
    def every(self) -> int:
        """Return the best checkpoint.every, in steps."""
        return max(1, round(self.disk.best_interval_seconds(self.step) / self.step))

    @property
    def in_memory_every(self) -> int | None:
        """Return the best checkpoint.in_memory_every, in steps; None without saves in memory."""
        if self.memory is None:
            return None
        return max(1, round(self.memory.best_interval_seconds(self.step) / self.step))

    def goodput(self, every: int | None = None) -> float:
        """Return the expected share of the time that is training, if each lost host is replaced at once.

        `every`: steps between two saves on disk; None: the best number.
        """
        steps = every or self.every
        share = self.disk.goodput(steps * self.step)
        if self.memory is None:
            return share
        steps_in_memory = self.in_memory_every or 1
        return share * self.memory.goodput(steps_in_memory * self.step)

    @property
    def _hosts_in_repair(self) -> float:
        """The expected number of hosts that are in repair at a time."""
        return self.hosts_lost * self.repair_hours

    def available(self, spares: int) -> float:
        """Return the share of the time in which no more hosts are in repair than there are spare ones.

        The number of hosts in repair has a Poisson distribution.
        """
        mean = self._hosts_in_repair
        return sum(_poisson(mean, number) for number in range(spares + 1))

    @cached_property
    def spares(self) -> int:
        """The number of spare hosts with which a step costs least.

        Each spare host is paid for, but the run waits less for hosts in repair.
        """
        best_spares = 0
        best_worth = 0.0
        available = 0.0
        for spares in range(min(self.hosts, MOST_SPARES) + 1):
            available += _poisson(self._hosts_in_repair, spares)
            worth = available * self.hosts / (self.hosts + spares)
            if worth > best_worth:
                best_spares = spares
                best_worth = worth
        return best_spares

    def hours(self, hours: float) -> float:
        """Return the expected hours of a run that takes `hours` without faults.

        Its interval between saves and its number of spare hosts are the best ones.
        """
        share = self.goodput() * self.available(self.spares)
        if share == 0:
            return math.inf
        return hours / share


def _poisson(mean: float, number: int) -> float:
    """Return the probability of this number if `mean` are expected."""
    if mean == 0:
        return float(number == 0)
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))


def run_under_faults(
    candidate: Candidate,
    cluster: Cluster,
    facts: ModelFacts,
    devices: int | None = None,
    pace: Pace = "median",
) -> RunUnderFaults:
    """Return a plan's run with the rates of its faults and the costs of its saves.

    `devices`: plan for another number of them, each with as much to do and to save. Without
    checkpoint.asynchronous the writing of a checkpoint holds the steps up.
    `pace`: how long faults take to be noticed and the run to be back, of what was measured. The best
    intervals between saves do not depend on it.
    """
    options = candidate.config.checkpoint
    world = candidate.devices
    state = checkpoint_bytes(candidate.layout, facts)
    copied = _copy_seconds(cluster, state / world)
    state_of_host = state / _hosts(world, cluster)
    written = cluster.disk_seconds("write", state_of_host)
    read = cluster.disk_seconds("read", state_of_host)
    devices = devices or world
    hosts = _hosts(devices, cluster)
    restart = _restart_seconds(cluster, pace)
    notice = _NoticeSeconds.estimate(hosts, pace)
    mtbf = (cluster.mtbf_hours or MTBF_HOURS) * HOUR_SECONDS / devices
    from_disk = restart + read
    if options.asynchronous:
        disk = CheckpointTier(copied, written, notice.any_fault + from_disk, mtbf)
    else:
        disk = CheckpointTier(written, 0.0, notice.any_fault + from_disk, mtbf)
    memory = None
    if options.in_memory_every is not None:
        # A lost host goes back to the disk, all other faults to the host's memory.
        mtbf_without_lost_hosts = mtbf / (1 - HOST_LOST_SHARE)
        memory = CheckpointTier(copied, 0.0, notice.rank + restart, mtbf_without_lost_hosts)
        disk = replace(disk, restart=notice.host + from_disk, mtbf=mtbf / HOST_LOST_SHARE)
    return RunUnderFaults(
        devices=devices,
        hosts=hosts,
        step=candidate.estimate.seconds.total,
        disk=disk,
        memory=memory,
        hosts_lost=HOST_LOST_SHARE * HOUR_SECONDS / mtbf,
        repair_hours=cluster.repair_hours,
    )


def goodput_range(candidate: Candidate, cluster: Cluster, facts: ModelFacts) -> tuple[float, float]:
    """Return the lowest and the highest expected share of the time that is training.

    They are those of the longest and of the shortest restarts that were measured.
    """
    slow = run_under_faults(candidate, cluster, facts, pace="longest")
    fast = run_under_faults(candidate, cluster, facts, pace="shortest")
    return slow.goodput(), fast.goodput()


def _hosts(devices: int, cluster: Cluster) -> int:
    """Return the number of hosts with so many devices."""
    return math.ceil(devices / cluster.per_node)


def _copy_seconds(cluster: Cluster, bytes_: float) -> float:
    """Return the seconds to copy bytes of a device's state aside, on a CPU within its own memory."""
    if cluster.device.kind == "cpu":
        return bytes_ / cluster.device.bandwidth
    return cluster.host_seconds("to_host", bytes_)


class _NoticeSeconds(NamedTuple):
    """Seconds until a fault is noticed: of a rank, of a host, and the mean over all faults."""

    rank: float
    host: float
    any_fault: float

    @classmethod
    def estimate(cls, hosts: int, pace: Pace) -> _NoticeSeconds:
        """Return the seconds of a run on so many hosts.

        On one host there is no other host that would wait for it, so the dead ranks are what is
        noticed.
        """
        rank: float = getattr(NOTICE_RANK, pace)
        host = rank
        if hosts > 1:
            host = getattr(NOTICE_HOST, pace)
        mean = HOST_LOST_SHARE * host + (1 - HOST_LOST_SHARE) * rank
        return cls(rank, host, mean)


def _restart_seconds(cluster: Cluster, pace: Pace) -> float:
    """Return the seconds from a noticed fault to the first step, without reading a checkpoint."""
    if cluster.restart_seconds is not None:
        return cluster.restart_seconds
    seconds: float = getattr(RESTART, pace)
    return seconds
