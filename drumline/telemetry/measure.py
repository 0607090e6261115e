"""What a run really takes, compared with its plan: memory by category, host memory, seconds, bytes sent.

A run has two `measured` events. One step of each kind is counted, under dispatch modes that see each operator (telemetry.traffic, and on
a CPU telemetry.memory_tracker). It is slower, and its seconds are reported separately. Everything else is read between operators. No
result changes.
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

# Steps that are timed before the first report; the median of three passes over one that something else disturbed.
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
    """Return VmSize, VmData, VmRSS and VmHWM (the largest VmRSS so far), in bytes; without /proc what psutil knows."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        now = psutil.Process().memory_info()
        return {"VmSize": now.vms, "VmData": now.vms, "VmRSS": now.rss, "VmHWM": now.rss}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in COUNTS}


class HostPeak:
    """Bytes of host memory at their largest while weights are loaded, in training, and from the first checkpoint on."""

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
            # The peak is that of all phases, so this takes the memory of now.
            peak = counts["VmRSS"]
        self.bytes_[phase] = max(self.bytes_[phase], peak)


class Measure:
    """Measures one rank. All ranks call the same methods at the same steps; `traffic` decides which steps are counted."""

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

        `step`: steps done so far. `phase`: None for forward and backward, then `clip` for the norm, and
        `step` for the update.
        """
        is_counted = self.traffic.due(step)
        began = time.time()
        if is_counted and phase == "clip":
            # At the end of backward.
            self.stats = self.memory_stats()._asdict()
        if self.plan.device == "cuda" and phase is None:
            # The peak between steps (loading, evaluation, rollouts) is none of a step's.
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
        """End a step, and return the bytes that it sent, and the name for its seconds that `took` needs.

        The bytes are None if they are not known. The name is None for a step that is neither counted nor
        timed. Collective if the step was counted.
        `step`: steps done before. `copies`: bytes of host memory that checkpoints are written from.
        `whole` False: a counted step made no update. `waits`: seconds of waiting for `data` (before the
        step) and for other ranks (`communication`, NaN if it is not measured).
        """
        is_counted = self.traffic.due(step)
        is_early = self.traffic.steps < self.traffic.FIRST
        sent = self.traffic.end_step(step, whole)
        if is_counted or self.plan.device == "cuda":
            for micro_batch in micro_batches:
                self.width = max(self.width, _tokens(micro_batch))
        self.host.end("save" if copies else "train")
        if self._tracker is not None:
            # The copies are host memory wherever the model lies; on a CPU the tracker counts them too.
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

    def took(self, step: int, name: str | None, seconds: float) -> None:
        """Note that a step took `seconds` without waiting for data, and report once enough steps are timed. Collective.

        `step`: steps done with it. `name`: as `end_step` returned it.
        """
        if name is not None:
            self.seconds[name].append(seconds)
        if not self.reported and self.stats and len(self.seconds["total"]) == TIMED:
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
        wrong_rows = [row for row in rows if row.warns]
        reasons = {f"{row.category}: {row.note}" for row in rows if row.note}
        event = Measured(
            metrics=measurement.model_dump(),
            off={row.category: row.off for row in rows},
            warned=[row.category for row in wrong_rows],
            warnings=[row.line() for row in wrong_rows],
            notes=notes(measurement) + sorted(reasons),
        )
        self.emit(event)
        if self.gather.rank == 0 and not self.reported:
            for row in wrong_rows:
                log.warning("the plan was wrong: %s", row.line())
        self.reported = True

    def _measurement(self, step: int, final: bool) -> Measurement:
        """Return what all ranks measured, the same on every rank. Collective."""
        by_rank = self._gathered_numbers()
        seconds = {}
        for name in SECONDS:
            of_ranks = by_rank[f"{name}_s"]
            if _are_known(of_ranks):
                seconds[name] = max(of_ranks)
        memory = {}
        for name in (*STATES, "peak", "reserved"):
            if _are_known(by_rank[name]):
                memory[name] = [int(value) for value in by_rank[name]]
        phases = {}
        for phase in heartbeat.PHASES:
            of_ranks = by_rank[f"in {phase}"]
            if _are_known(of_ranks):
                phases[phase] = [round(value, 3) for value in of_ranks]
        alike = self._ranks_of_fullest_stage(memory)
        hosts = _ranks_by_host(by_rank["host"])
        width = max(by_rank["width"])
        return Measurement(
            step=step,
            final=final,
            by=self._source_of_peak(memory),
            memory={name: max(values[rank] for rank in alike) for name, values in memory.items()},
            by_rank=memory,
            host=self._fullest_host(by_rank, hosts),
            ranks_per_host=max(len(ranks) for ranks in hosts),
            seconds=seconds,
            phases=phases,
            timed=len(self.seconds["total"]),
            traffic=self._mean_traffic(),
            grows=not plain(self.plan.mesh),
            width=width / self._planned_tokens() if width else 1.0,
        )

    def _gathered_numbers(self) -> dict[str, list[float]]:
        """Return each number of `_numbers` of all ranks, by rank; NaN if a rank does not know it. Collective."""
        numbers = []
        names = []
        for name, value in self._numbers().items():
            names.append(name)
            numbers.append(math.nan if value is None else float(value))
        _, values = self.gather({}, *numbers)
        return dict(zip(names, values, strict=True))

    def _ranks_of_fullest_stage(self, memory: dict[str, list[int]]) -> list[int]:
        """Return the ranks of the pipeline stage that has the rank with the highest peak."""
        ranks = range(self.gather.world_size)
        fullest = 0
        if "peak" in memory:
            fullest = max(ranks, key=memory["peak"].__getitem__)
        stages = [self.plan.mesh.place(rank)["pp"] for rank in ranks]
        return [rank for rank in ranks if stages[rank] == stages[fullest]]

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
        """Return phase → bytes of host memory of a host's ranks together, of the fullest host. `hosts`: ranks of each."""
        bytes_of_phases = {}
        for phase in self.host.bytes_:
            if _are_known(by_rank[phase]):
                of_hosts = [sum(int(by_rank[phase][rank]) for rank in ranks) for ranks in hosts]
                bytes_of_phases[phase] = max(of_hosts)
        return bytes_of_phases

    def _mean_traffic(self) -> float | None:
        """Return the bytes that a rank sends in a step, mean over the kinds of steps; None until all kinds are counted."""
        known = self.traffic.known
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
        numbers: dict[str, float | None] = {name: self.stats.get(name) for name in STATES}
        numbers["peak"] = self.peak or None
        numbers["reserved"] = self.reserved or None
        numbers["width"] = self.width
        for name in SECONDS:
            values = self.seconds.get(name)
            numbers[f"{name}_s"] = statistics.median(values) if values else None
        if self.plan.device == "cuda":
            # A GPU's step is still under way when it returns, so how long its optimizer takes is not seen.
            numbers["optimizer_s"] = None
        for phase, seconds in heartbeat.seconds().items():
            numbers[f"in {phase}"] = seconds
        numbers["host"] = zlib.crc32(socket.gethostname().encode())
        for phase, bytes_ in self.host.bytes_.items():
            numbers[phase] = bytes_ or None
        return numbers


def _ranks_by_host(host_of_rank: list[float]) -> list[list[int]]:
    """Return the ranks of each host. `host_of_rank`: a number for the host of each rank."""
    ranks_of: dict[float, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks_of.setdefault(host, []).append(rank)
    return list(ranks_of.values())


def _are_known(values: list[float]) -> bool:
    return not any(math.isnan(value) for value in values)


def _tokens(batch: Any) -> int:
    """Return the tokens of a micro-batch with its padding; 0 if it has none."""
    ids = getattr(batch, "input_ids_BT", None)
    return 0 if ids is None else ids.numel()
