"""Measure what a run takes, to compare it with its plan: memory by category, seconds, bytes sent.

A run has two `measured` events: one as soon as enough steps are timed, and one at its end. One step
of each kind is counted, under dispatch modes that see each operator (telemetry.traffic, and on a
CPU telemetry.memory_tracker). It is slower, and its seconds are reported separately. Everything
else is read between operators. No result changes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from drumline.dist.reduce import Gather
from drumline.plan.estimate import Estimate
from drumline.plan.plan import Plan
from drumline.plan.rule import plain
from drumline.system import heartbeat
from drumline.telemetry.events import Emit, Measured, Planned
from drumline.telemetry.memory_tracker import LiveBytes, MemoryStats, Phase
from drumline.telemetry.traffic import Traffic
from drumline.telemetry.truth import Measurement, compare, notes

# Steps that are timed before the first report. The median of three is not changed by one step that
# something else disturbed.
TIMED = 3
SECONDS = ("total", "data", "communication", "optimizer", "counted")
STATES = ("parameters", "gradients", "optimizer")
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
# proc(5): "reset the peak resident set size to the process's current resident set size value".
RESET_PEAK = "5"
COUNTS = ("VmSize", "VmData", "VmRSS", "VmHWM")
log = logging.getLogger(__name__)


def planned(estimate: Estimate) -> Planned:
    """Return the event of what a plan predicts."""
    return Planned(
        memory=estimate.memory.model_dump(),
        host=estimate.host.model_dump(),
        seconds=estimate.seconds.model_dump() | {"total": estimate.seconds.total},
        traffic=estimate.traffic.model_dump() | {"total": estimate.traffic.total},
        verdict=estimate.verdict,
        limit=estimate.limit,
        calibrated=estimate.calibrated,
    )


def process_bytes() -> dict[str, int]:
    """Return the memory of this process, in bytes, as proc(5) names it.

    The keys are VmSize, VmData, VmRSS and VmHWM, which is the largest VmRSS so far. On a system
    without /proc the values are the closest ones of psutil.
    """
    try:
        text = STATUS.read_text()
    except OSError:
        now = psutil.Process().memory_info()
        return {"VmSize": now.vms, "VmData": now.vms, "VmRSS": now.rss, "VmHWM": now.rss}
    fields = {}
    for line in text.splitlines():
        name, value = line.split(":", 1)
        fields[name] = value
    counts = {}
    for name in COUNTS:
        # "12345 kB", which are KiB.
        kib = fields[name].split()[0]
        counts[name] = int(kib) * 1024
    return counts


class HostPeak:
    """Peak bytes of host memory: while weights load, in training, and from the first checkpoint."""

    def __init__(self) -> None:
        """Begin with the memory until now, which counts as loading."""
        self.bytes_ = dict.fromkeys(("load", "train", "save"), 0)
        self.end("load")

    def end(self, phase: str) -> None:
        """Count the memory since the last call as that of `phase`."""
        counts = process_bytes()
        try:
            CLEAR.write_text(RESET_PEAK)
            # The peak since the last call.
            peak = counts["VmHWM"]
        except OSError:
            # The peak cannot be reset and would be that of all phases: the present memory replaces
            # it.
            peak = counts["VmRSS"]
        self.bytes_[phase] = max(self.bytes_[phase], peak)


class Measure:
    """Measures one rank.

    All ranks call the same methods at the same steps, since some of these are collective. `traffic`
    decides which steps are counted.
    """

    def __init__(
        self,
        plan: Plan,
        memory_stats: Callable[[], MemoryStats],
        gather: Gather,
        emit: Emit,
        traffic: Traffic,
    ) -> None:
        self.plan = plan
        self.memory_stats = memory_stats
        self.gather = gather
        self.emit = emit
        self.traffic = traffic
        self.host = HostPeak()
        # Bytes of the counted step, by category.
        self.stats: dict[str, int] = {}
        # Bytes at the peak of a step: on a CPU of the counted steps, on a GPU of all steps.
        self.peak = 0
        self.reserved = 0
        # Tokens of the widest micro-batch of the same steps.
        self.width = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.reported = False
        self._tracker: LiveBytes | None = None
        self._optimizer_seconds = 0.0

    @contextlib.contextmanager
    def watch(self, step: int, phase: Phase | None = None) -> Iterator[None]:
        """Watch a part of a step within the context.

        Args:
            step: Number of steps before this one.
            phase: None for forward and backward, then `clip` for the norm, and `step` for the
                update.
        """
        is_counted = self.traffic.due(step)
        began = time.time()
        if is_counted and phase == "clip":
            # At the end of backward.
            self.stats = self.memory_stats()._asdict()
        if self.plan.device == "cuda" and phase is None:
            # The peak between steps (loading, evaluation, rollouts) does not belong to a step.
            torch.cuda.reset_peak_memory_stats()
        if is_counted and self.plan.place == "cpu":
            if self._tracker is None:
                self._tracker = LiveBytes()
            self._tracker.phase = phase
        with self.traffic.watch(step), self._tracker or contextlib.nullcontext():
            yield
        if phase == "step":
            self._optimizer_seconds = time.time() - began

    def end_step(
        self, step: int, micro_batches: list[Any], copies: int, whole: bool, **waits: float
    ) -> tuple[int | None, str | None]:
        """End a step, and return the bytes that it sent and the name for `note_seconds`.

        Collective if the step was counted. The bytes are None if they are not known. The name is
        None for a step that is neither counted nor timed.

        Args:
            step: Number of steps before this one.
            micro_batches: The micro-batches of the step, whose tokens are counted.
            copies: Bytes of the copies in host memory that checkpoints are written from.
            whole: False if a counted step made no update.
            waits: Seconds of waiting for `data` (before the step) and for other ranks
                (`communication`, NaN if it is not measured).
        """
        # Before `end_step` of the traffic, which counts the step as done.
        is_counted = self.traffic.due(step)
        is_early = self.traffic.steps < self.traffic.FIRST
        sent = self.traffic.end_step(step, whole)
        if is_counted or self.plan.device == "cuda":
            for micro_batch in micro_batches:
                self.width = max(self.width, _tokens(micro_batch))
        self.host.end("save" if copies else "train")
        if self._tracker is not None:
            # The copies are host memory wherever the model lies; on a CPU the tracker counts them
            # too.
            self.peak = max(self.peak, self._tracker.peak - copies)
            self._tracker = None
        elif self.plan.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        if is_counted:
            return sent, "counted"
        if is_early:
            return sent, None
        self.seconds["optimizer"].append(self._optimizer_seconds)
        for name, value in waits.items():
            self.seconds[name].append(value)
        return sent, "total"

    def note_seconds(self, step: int, name: str | None, seconds: float) -> None:
        """Note the seconds of a step, and report once enough steps are timed. Collective.

        Args:
            step: Number of steps with this one.
            name: The name that `end_step` returned.
            seconds: Seconds that the step took on this rank, without waiting for data.
        """
        if name is not None:
            self.seconds[name].append(seconds)
        is_timed = len(self.seconds["total"]) == TIMED
        if not self.reported and self.stats and is_timed:
            self._report(step, final=False)

    def finish(self, step: int) -> None:
        """Report after the last step and what follows it. Collective."""
        self.host.end("save")
        self._report(step, final=True)

    def _report(self, step: int, final: bool) -> None:
        """Emit the event of all measurements, compared with the plan. Collective."""
        measurement = self._measurement(step, final)
        estimate = self.plan.predicted.estimate
        rows = []
        if estimate is not None:
            rows = compare(estimate, measurement)
        off = {}
        reasons = set()
        warned = []
        warnings = []
        for row in rows:
            off[row.category] = row.off
            if row.note:
                reasons.add(f"{row.category}: {row.note}")
            if row.warns:
                warned.append(row.category)
                warnings.append(row.line())
        event = Measured(
            metrics=measurement.model_dump(),
            off=off,
            warned=warned,
            warnings=warnings,
            notes=notes(measurement) + sorted(reasons),
        )
        self.emit(event)
        # The second report has much the same warnings.
        if self.gather.rank == 0 and not self.reported:
            for warning in warnings:
                log.warning("the plan was wrong: %s", warning)
        self.reported = True

    def _measurement(self, step: int, final: bool) -> Measurement:
        """Return what all ranks measured, the same on every rank. Collective."""
        by_rank = self._gathered_numbers()
        seconds = {}
        for name in SECONDS:
            of_ranks = by_rank[f"{name}_s"]
            if _are_known(of_ranks):
                # The slowest rank sets the pace.
                seconds[name] = max(of_ranks)
        memory = {}
        for name in (*STATES, "peak", "reserved"):
            of_ranks = by_rank[name]
            if _are_known(of_ranks):
                memory[name] = [int(value) for value in of_ranks]
        phases = {}
        for phase in heartbeat.PHASES:
            of_ranks = by_rank[f"in {phase}"]
            if _are_known(of_ranks):
                phases[phase] = [round(value, 3) for value in of_ranks]
        # The plan of a pipeline predicts its fullest stage, so other stages are not compared with
        # it.
        fullest_ranks = self._ranks_of_fullest_stage(memory)
        most_memory = {}
        for name, sizes in memory.items():
            most_memory[name] = max(sizes[rank] for rank in fullest_ranks)
        hosts = _ranks_by_host(by_rank["host"])
        # Tokens as a fraction of the planned ones; samples without tokens count as planned.
        width = 1.0
        most_tokens = max(by_rank["width"])
        if most_tokens:
            width = most_tokens / self._planned_tokens()
        return Measurement(
            step=step,
            final=final,
            by=self._source_of_peak(memory),
            memory=most_memory,
            by_rank=memory,
            host=self._fullest_host(by_rank, hosts),
            ranks_per_host=max(len(ranks) for ranks in hosts),
            seconds=seconds,
            phases=phases,
            timed=len(self.seconds["total"]),
            traffic=self._mean_traffic(),
            grows=not plain(self.plan.mesh),
            width=width,
        )

    def _gathered_numbers(self) -> dict[str, list[float]]:
        """Return name → the number of each rank, NaN if the rank does not know it. Collective.

        The names are those of `_numbers`, which must be the same on all ranks, in the same order.
        """
        numbers = []
        names = []
        for name, value in self._numbers().items():
            names.append(name)
            if value is None:
                numbers.append(math.nan)
            else:
                numbers.append(float(value))
        _, values = self.gather({}, *numbers)
        return dict(zip(names, values, strict=True))

    def _ranks_of_fullest_stage(self, memory: dict[str, list[int]]) -> list[int]:
        """Return the ranks of the pipeline stage that has the rank with the highest peak."""
        ranks = range(self.gather.world_size)
        fullest_rank = 0
        if "peak" in memory:
            peaks = memory["peak"]
            fullest_rank = peaks.index(max(peaks))
        stages = [self.plan.mesh.place(rank)["pp"] for rank in ranks]
        fullest_stage = stages[fullest_rank]
        return [rank for rank in ranks if stages[rank] == fullest_stage]

    def _source_of_peak(
        self, memory: dict[str, list[int]]
    ) -> Literal["allocator", "tracker"] | None:
        """Return what saw the peak of memory; None if nothing was measured."""
        if not memory:
            return None
        return "allocator" if self.plan.device == "cuda" else "tracker"

    def _fullest_host(
        self, by_rank: dict[str, list[float]], hosts: list[list[int]]
    ) -> dict[str, int]:
        """Return the host memory of all ranks of the fullest host, in bytes by phase.

        Args:
            by_rank: As `_gathered_numbers` returns it.
            hosts: The ranks of each host.
        """
        bytes_of_phases = {}
        for phase in self.host.bytes_:
            of_ranks = by_rank[phase]
            if not _are_known(of_ranks):
                continue
            of_hosts = []
            for ranks in hosts:
                bytes_ = sum(int(of_ranks[rank]) for rank in ranks)
                of_hosts.append(bytes_)
            bytes_of_phases[phase] = max(of_hosts)
        return bytes_of_phases

    def _mean_traffic(self) -> float | None:
        """Return the mean bytes that a rank sends in a step; None until all kinds are counted."""
        known = self.traffic.known
        # Kind of step → its part of the steps of a long run.
        shares = self.plan.config.strategy.step_shares()
        if not shares.keys() <= known.keys():
            return None
        return sum(share * known[kind] for kind, share in shares.items())

    def _planned_tokens(self) -> int:
        """Return the tokens of a micro-batch that were planned for."""
        batch = self.plan.batch
        rows = batch.micro_batch * batch.rows_per_sample
        return rows * self.plan.config.data.max_length

    def _numbers(self) -> dict[str, float | None]:
        """Return what this rank measured; None for what it does not know."""
        numbers: dict[str, float | None] = {}
        for name in STATES:
            numbers[name] = self.stats.get(name)
        numbers["peak"] = self.peak or None
        numbers["reserved"] = self.reserved or None
        numbers["width"] = self.width
        for name in SECONDS:
            median = None
            values = self.seconds.get(name)
            if values:
                median = statistics.median(values)
            numbers[f"{name}_s"] = median
        if self.plan.device == "cuda":
            # A GPU's step is still under way when it returns, so how long its optimizer takes is
            # not seen.
            numbers["optimizer_s"] = None
        for phase, seconds in heartbeat.seconds().items():
            numbers[f"in {phase}"] = seconds
        # Only numbers are gathered, so the host's name becomes a number.
        numbers["host"] = zlib.crc32(socket.gethostname().encode())
        for phase, bytes_ in self.host.bytes_.items():
            numbers[phase] = bytes_ or None
        return numbers


def _ranks_by_host(host_of_rank: list[float]) -> list[list[int]]:
    """Return the ranks of each host. `host_of_rank`: a number for the host of each rank."""
    ranks_by_host: dict[float, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks = ranks_by_host.setdefault(host, [])
        ranks.append(rank)
    return list(ranks_by_host.values())


def _are_known(values: list[float]) -> bool:
    """Return whether every rank knows its value."""
    return not any(math.isnan(value) for value in values)


def _tokens(micro_batch: Any) -> int:
    """Return the tokens of a micro-batch with its padding; 0 if it has none."""
    ids = getattr(micro_batch, "input_ids_BT", None)
    if ids is None:
        return 0
    return ids.numel()
