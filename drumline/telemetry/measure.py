"""Measure what a run takes, to compare it with its plan: memory by category, seconds, bytes sent.

A run has two `measured` events: one as soon as enough steps are timed, and one at its end. One step
of each type (see `Strategy.step_kind`) is instrumented: it runs under dispatch modes that see each
operator (telemetry.traffic, and on a CPU telemetry.memory_tracker). It is slower, and its seconds
are reported separately, as `counted`. Everything else is read between operators. No result changes.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from drumline.dist.reduce import SumReducer
from drumline.plan.estimate import Estimate
from drumline.plan.plan import Plan
from drumline.plan.rule import is_data_parallel_only
from drumline.system import heartbeat
from drumline.telemetry.events import Emit, Measured, Planned
from drumline.telemetry.memory_tracker import LiveBytes, MemoryStats, Phase
from drumline.telemetry.plan_accuracy import (
    FORWARD_AND_BACKWARD,
    Measurement,
    compare,
    notes,
)
from drumline.telemetry.traffic import Traffic

# Steps that are timed before the first report. The median of three is not changed by one step that
# something else disturbed.
TIMED = 3
# Categories of the seconds of a step; `counted` is the seconds of the instrumented step.
PASSES = ("forward", "backward")
SECONDS = ("total", "data", "communication", "optimizer", "counted", *PASSES)
# The parts of a step that have a peak of memory of their own. A GPU runs forward and backward without
# a stop, so both have one peak together.
PEAKS = ("forward", "backward", FORWARD_AND_BACKWARD, "clip", "step")
STATE_CATEGORIES = ("parameters", "gradients", "optimizer")
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
# proc(5): "reset the peak resident set size to the process's current resident set size value".
RESET_PEAK = "5"
# Fields of /proc/self/status, in KiB.
PROC_FIELDS = ("VmSize", "VmData", "VmRSS", "VmHWM")
log = logging.getLogger(__name__)


def planned_event(estimate: Estimate) -> Planned:
    """Return the event of what a plan predicts."""
    return Planned(
        memory=estimate.memory.model_dump(),
        host=estimate.host.model_dump(),
        # `forward` is a part of `compute`, and not a category.
        seconds=estimate.seconds.model_dump(exclude={"forward"})
        | {"total": estimate.seconds.total},
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
    for name in PROC_FIELDS:
        # "12345 kB", which are KiB.
        kib = fields[name].split()[0]
        counts[name] = int(kib) * 1024
    return counts


class HostPeak:
    """Peak bytes of host memory by period: `load`, `train`, and `save` from the first checkpoint."""

    def __init__(self) -> None:
        """Begin with the memory until now, which counts as loading."""
        self.bytes_ = dict.fromkeys(("load", "train", "save"), 0)
        self.end("load")

    def end(self, period: str) -> None:
        """Count the peak since the last call as that of `period`."""
        counts = process_bytes()
        try:
            CLEAR.write_text(RESET_PEAK)
            # The peak since the last call.
            peak = counts["VmHWM"]
        except OSError:
            # The peak cannot be reset and would be that of all phases: the present memory replaces
            # it.
            peak = counts["VmRSS"]
        self.bytes_[period] = max(self.bytes_[period], peak)


class Measure:
    """Measures one rank.

    The training loop calls `watch` around the parts of each step, then `end_step` and
    `note_seconds`, and `finish` once after the last step. All ranks call them at the same steps,
    since some are collective. `traffic` decides which steps are instrumented.
    """

    def __init__(
        self,
        plan: Plan,
        memory_stats: Callable[[], MemoryStats],
        reducer: SumReducer,
        emit: Emit,
        traffic: Traffic,
    ) -> None:
        self.plan = plan
        self.memory_stats = memory_stats
        self.reducer = reducer
        self.emit = emit
        self.traffic = traffic
        self.host_peak = HostPeak()
        # Bytes of parameters, gradients and optimizer in the instrumented step.
        self.stats: dict[str, int] = {}
        # Bytes at the peak of a step: on a CPU of the instrumented steps, on a GPU of all steps.
        self.peak = 0
        self.reserved = 0
        # The same peak by part of a step (PEAKS).
        self.peaks: dict[str, int] = {}
        # Tokens, padding included, of the largest micro-batch of the same steps.
        self.max_tokens = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.reported = False
        self._tracker: LiveBytes | None = None
        self._optimizer_seconds = 0.0
        # Seconds of each pass since the rank began, at the end of the last step.
        self._pass_totals: dict[str, float] = {}

    @contextlib.contextmanager
    def watch(self, steps_done: int, phase: Phase | None = None) -> Iterator[None]:
        """Measure a part of a step within the context.

        Args:
            steps_done: Number of steps before this one.
            phase: The part of the step: None for forward and backward, `clip` for the gradient
                norm, `step` for the optimizer's update.
        """
        is_instrumented = self.traffic.due(steps_done)
        began = time.time()
        if is_instrumented and phase == "clip":
            # At the end of backward.
            self.stats = self.memory_stats()._asdict()
        if self.plan.device == "cuda":
            # The peak of another part of the step, or between steps (loading, evaluation, rollouts),
            # does not belong to this part.
            torch.cuda.reset_peak_memory_stats()
        # `device_type`, since `device` is "cpu" also for the tensors of an mps device.
        if is_instrumented and self.plan.device_type == "cpu":
            if self._tracker is None:
                self._tracker = LiveBytes()
            self._tracker.phase = phase
        with self.traffic.watch(steps_done), self._tracker or contextlib.nullcontext():
            yield
        if self.plan.device == "cuda":
            self._note_cuda_peak(phase or FORWARD_AND_BACKWARD)
        if phase == "step":
            self._optimizer_seconds = time.time() - began

    def _note_cuda_peak(self, part: str) -> None:
        """Note the peak of the allocator since its last reset as that of a part of the step."""
        peak = torch.cuda.max_memory_allocated()
        self.peaks[part] = max(self.peaks.get(part, 0), peak)
        self.peak = max(self.peak, peak)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def end_step(
        self,
        steps_done: int,
        micro_batches: list[Any],
        staging_bytes: int,
        made_update: bool,
        **wait_seconds: float,
    ) -> tuple[int | None, str | None]:
        """End a step. Return the bytes that a rank sends in such a step, and a key of SECONDS.

        Collective if the step was instrumented. The bytes are None until a step of this type was
        instrumented. `note_seconds` files the step's time under the key: `counted` for an
        instrumented step, None for the first steps, which are not timed, and else `total`.

        Args:
            steps_done: Number of steps before this one.
            micro_batches: The micro-batches of the step, whose tokens are counted.
            staging_bytes: Bytes of the host buffers from which checkpoints are written.
            made_update: False if an instrumented step made no update.
            wait_seconds: Seconds of waiting for `data` (before the step) and for other ranks
                (`communication`, NaN if it is not measured).
        """
        # Before `end_step` of the traffic, which counts the step as done.
        is_instrumented = self.traffic.due(steps_done)
        is_early = self.traffic.steps < self.traffic.FIRST
        sent = self.traffic.end_step(steps_done, made_update)
        if is_instrumented or self.plan.device == "cuda":
            for micro_batch in micro_batches:
                self.max_tokens = max(self.max_tokens, _tokens(micro_batch))
        self.host_peak.end("save" if staging_bytes else "train")
        if self._tracker is not None:
            # Staging buffers are host memory wherever the model lies; on a CPU the tracker counts
            # them too.
            self.peak = max(self.peak, self._tracker.peak - staging_bytes)
            for part, peak in self._tracker.peaks.items():
                self.peaks[part] = max(self.peaks.get(part, 0), peak - staging_bytes)
            self._tracker = None
        pass_seconds = self._seconds_of_passes()
        if is_instrumented:
            return sent, "counted"
        if is_early:
            return sent, None
        self.seconds["optimizer"].append(self._optimizer_seconds)
        for name, value in (wait_seconds | pass_seconds).items():
            self.seconds[name].append(value)
        return sent, "total"

    def _seconds_of_passes(self) -> dict[str, float]:
        """Return the seconds of this step's forward and backward, by the host's clock.

        Waiting for other ranks is not in them. Empty if they are not known: nobody watches the rank,
        or it is a GPU, whose kernels run asynchronously, or a pipeline, which mixes both passes.
        """
        totals = heartbeat.seconds()
        before = self._pass_totals
        self._pass_totals = {name: totals[name] or 0.0 for name in PASSES}
        seconds = {name: total - before.get(name, 0.0) for name, total in self._pass_totals.items()}
        is_known = all(value > 0 for value in seconds.values())
        if not is_known or self.plan.device_type != "cpu" or self.plan.mesh.pp > 1:
            return {}
        return seconds

    def note_seconds(self, step_number: int, timing_key: str | None, seconds: float) -> None:
        """Note the seconds of a step, and report once enough steps are timed. Collective.

        Args:
            step_number: Number of the step, from 1.
            timing_key: The key of SECONDS that `end_step` returned.
            seconds: Seconds that the step took on this rank, without waiting for data.
        """
        if timing_key is not None:
            self.seconds[timing_key].append(seconds)
        is_timed = len(self.seconds["total"]) == TIMED
        if not self.reported and self.stats and is_timed:
            self._report(step_number, final=False)

    def finish(self, steps_done: int) -> None:
        """Report after the last step and what follows it. Collective."""
        self.host_peak.end("save")
        self._report(steps_done, final=True)

    def _report(self, steps_done: int, final: bool) -> None:
        """Emit the event of all measurements, compared with the plan. Collective."""
        measurement = self._measurement(steps_done, final)
        estimate = self.plan.predicted.estimate
        rows = []
        if estimate is not None:
            rows = compare(estimate, measurement)
        off = {}
        reasons = set()
        warned = []
        warnings = []
        for row in rows:
            # JSON has no infinity, which is the share of a prediction of 0.
            if math.isfinite(row.off):
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
        if self.reducer.rank == 0 and not self.reported:
            for warning in warnings:
                log.warning("the plan was wrong: %s", warning)
        self.reported = True

    def _measurement(self, steps_done: int, final: bool) -> Measurement:
        """Return what all ranks measured, the same on every rank. Collective."""
        by_rank = self._gathered_numbers()
        seconds = {}
        for name in SECONDS:
            of_ranks = by_rank[f"{name}_s"]
            if _are_known(of_ranks):
                # The slowest rank sets the pace.
                seconds[name] = max(of_ranks)
        memory = _known_bytes(by_rank, (*STATE_CATEGORIES, "peak", "reserved"))
        peaks = _known_bytes(by_rank, PEAKS, "peak in ")
        phases = {}
        for phase in heartbeat.PHASES:
            of_ranks = by_rank[f"in {phase}"]
            if _are_known(of_ranks):
                phases[phase] = [round(value, 3) for value in of_ranks]
        # The plan of a pipeline predicts its fullest stage, so other stages are not compared with
        # it.
        fullest_ranks = self._ranks_of_fullest_stage(memory)
        most_memory = _most_of_ranks(memory, fullest_ranks)
        hosts = _ranks_by_host(by_rank["host_id"])
        # As a fraction of the planned tokens; samples without tokens count as planned.
        token_fill = 1.0
        max_tokens = max(by_rank["max_tokens"])
        if max_tokens:
            token_fill = max_tokens / self._planned_tokens()
        return Measurement(
            step=steps_done,
            final=final,
            by=self._source_of_peak(memory),
            memory=most_memory,
            peaks=_most_of_ranks(peaks, fullest_ranks),
            by_rank=memory,
            host=self._fullest_host(by_rank, hosts),
            ranks_per_host=max(len(ranks) for ranks in hosts),
            seconds=seconds,
            phases=phases,
            timed=len(self.seconds["total"]),
            traffic=self._mean_traffic(),
            # Weights and gradients are sent whole; activations, which other parallelism sends,
            # grow with the tokens.
            grows=not is_data_parallel_only(self.plan.mesh),
            width=token_fill,
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
        _, values = self.reducer({}, *numbers)
        return dict(zip(names, values, strict=True))

    def _ranks_of_fullest_stage(self, memory: dict[str, list[int]]) -> list[int]:
        """Return the ranks of the pipeline stage that has the rank with the highest peak."""
        ranks = range(self.reducer.world_size)
        fullest_rank = 0
        if "peak" in memory:
            peaks = memory["peak"]
            fullest_rank = peaks.index(max(peaks))
        stages = [self.plan.mesh.coordinates(rank)["pp"] for rank in ranks]
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
        """Return the host memory of all ranks of the fullest host, in bytes by period.

        Args:
            by_rank: As `_gathered_numbers` returns it.
            hosts: The ranks of each host.
        """
        bytes_of_periods = {}
        for period in self.host_peak.bytes_:
            of_ranks = by_rank[period]
            if not _are_known(of_ranks):
                continue
            of_hosts = []
            for ranks in hosts:
                bytes_ = sum(int(of_ranks[rank]) for rank in ranks)
                of_hosts.append(bytes_)
            bytes_of_periods[period] = max(of_hosts)
        return bytes_of_periods

    def _mean_traffic(self) -> float | None:
        """Return the mean bytes that a rank sends in a step; None until all types are counted."""
        known = self.traffic.known
        # Type of step → its share of the steps of a long run.
        shares = self.plan.config.strategy.step_shares()
        if not shares.keys() <= known.keys():
            return None
        return sum(share * known[step_type] for step_type, share in shares.items())

    def _planned_tokens(self) -> int:
        """Return the tokens of a micro-batch that were planned for."""
        batch = self.plan.batch
        rows = batch.micro_batch * batch.rows_per_sample
        return rows * self.plan.config.data.max_length

    def _numbers(self) -> dict[str, float | None]:
        """Return what this rank measured; None for what it does not know."""
        numbers: dict[str, float | None] = {}
        for name in STATE_CATEGORIES:
            numbers[name] = self.stats.get(name)
        numbers["peak"] = self.peak or None
        numbers["reserved"] = self.reserved or None
        for part in PEAKS:
            numbers[f"peak in {part}"] = self.peaks.get(part)
        numbers["max_tokens"] = self.max_tokens
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
        # Only numbers are gathered, so a checksum stands for the host's name.
        numbers["host_id"] = zlib.crc32(socket.gethostname().encode())
        for period, bytes_ in self.host_peak.bytes_.items():
            numbers[period] = bytes_ or None
        return numbers


def _ranks_by_host(id_of_rank: list[float]) -> list[list[int]]:
    """Return the ranks of each host. `id_of_rank`: a number for the host of each rank."""
    ranks_by_host: dict[float, list[int]] = {}
    for rank, host_id in enumerate(id_of_rank):
        ranks = ranks_by_host.setdefault(host_id, [])
        ranks.append(rank)
    return list(ranks_by_host.values())


def _known_bytes(
    by_rank: dict[str, list[float]], names: Iterable[str], prefix: str = ""
) -> dict[str, list[int]]:
    """Return name → bytes of each rank, for the names whose bytes all ranks know.

    `by_rank`: as `Measure._gathered_numbers` returns it, with `prefix` before each name.
    """
    known = {}
    for name in names:
        of_ranks = by_rank[prefix + name]
        if _are_known(of_ranks):
            known[name] = [int(value) for value in of_ranks]
    return known


def _most_of_ranks(sizes: dict[str, list[int]], ranks: list[int]) -> dict[str, int]:
    """Return name → the most bytes on any of some ranks. `sizes`: name → bytes of each rank."""
    return {name: max(of_ranks[rank] for rank in ranks) for name, of_ranks in sizes.items()}


def _are_known(values: list[float]) -> bool:
    """Return whether every rank knows its value."""
    return not any(math.isnan(value) for value in values)


def _tokens(micro_batch: Any) -> int:
    """Return the tokens of a micro-batch with its padding; 0 if it has none."""
    tokens = 0
    # Only batches of an encoder and a decoder have both.
    for name in ("input_ids_BT", "encoder_ids_BS"):
        ids = getattr(micro_batch, name, None)
        if ids is not None:
            tokens += ids.numel()
    return tokens
