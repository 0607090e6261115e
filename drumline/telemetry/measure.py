"""What a run really takes, compared with its plan: memory by category, host memory, seconds, bytes sent. Two `measured` events a run.

One step of each kind is counted, under dispatch modes that see each operator (telemetry.traffic, and on a CPU
telemetry.memory_tracker): it is slower, and its seconds are reported apart. Everything else is read between operators.
Nothing that is computed changes.
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
from typing import Any

import psutil
import torch

from drumline.core import heartbeat
from drumline.core.estimate import Estimate
from drumline.core.plan import Plan
from drumline.core.rule import plain
from drumline.dist.reduce import Gather
from drumline.telemetry.events import Emit, Measured, Planned
from drumline.telemetry.memory_tracker import LiveBytes, MemoryStats, Phase
from drumline.telemetry.traffic import Traffic
from drumline.telemetry.truth import Measurement, compare, notes

# Steps that are timed before the first report; the median of three passes over one that something else disturbed.
TIMED = 3
SECONDS = ("total", "data", "communication", "optimizer", "counted")
STATES = ("parameters", "gradients", "optimizer")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): "reset the peak resident set size to the process's current resident set size value"
COUNTS = ("VmSize", "VmData", "VmRSS", "VmHWM")
log = logging.getLogger(__name__)


def planned(estimate: Estimate) -> Planned:
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
    """VmSize, VmData, VmRSS and VmHWM (the largest VmRSS so far), in bytes. Where there is no /proc, what psutil knows instead."""
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
        """What was before counts as loading."""
        self.bytes_ = dict.fromkeys(("load", "train", "save"), 0)
        self.end("load")

    def end(self, phase: str) -> None:
        """What was since the last call was `phase`."""
        counts = process_bytes()
        try:
            CLEAR.write_text(RESET_PEAK)
            peak = counts["VmHWM"]  # since the last call
        except OSError:
            peak = counts["VmRSS"]  # the peak would be that of all phases
        self.bytes_[phase] = max(self.bytes_[phase], peak)


class Measure:
    """One rank's measuring. All ranks call the same methods at the same steps; `traffic` decides which steps are counted."""

    def __init__(
        self,
        plan: Plan,
        memory_stats: Callable[[], MemoryStats],
        gather: Gather,
        emit: Emit,
        traffic: Traffic,
    ) -> None:
        self.plan, self.memory_stats, self.gather, self.emit, self.traffic = (
            plan,
            memory_stats,
            gather,
            emit,
            traffic,
        )
        self.host = HostPeak()
        self.stats: dict[str, int] = {}  # bytes, of the counted step
        self.peak = self.reserved = (
            0  # bytes at the peak of a step: on a CPU of the counted ones, on a GPU of all
        )
        self.width = (
            0  # tokens of the widest micro-batch: on a CPU of the counted steps, on a GPU of all
        )
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.reported = False
        self._tracker: LiveBytes | None = None
        self._optimizer = 0.0

    # ---------------------------------------------------------------------------------------------------- around a step

    @contextlib.contextmanager
    def watch(self, step: int, phase: Phase | None = None) -> Iterator[None]:
        """Around the parts of a step: None for forward and backward, then `clip` for the norm, and `step`."""
        counts, began = self.traffic.due(step), time.time()
        if counts and phase == "clip":
            self.stats = self.memory_stats()._asdict()  # at the end of backward
        if (
            self.plan.device == "cuda" and phase is None
        ):  # what came between steps is none of theirs: loading, evaluation, rollouts
            torch.cuda.reset_peak_memory_stats()
        if counts and self.plan.place == "cpu":
            self._tracker = self._tracker or LiveBytes()
            self._tracker.phase = phase
        with self.traffic.watch(step), self._tracker or contextlib.nullcontext():
            yield
        if phase == "step":
            self._optimizer = time.time() - began

    def end_step(
        self, step: int, micro_batches: list[Any], copies: int, whole: bool, **waits: float
    ) -> tuple[int | None, str | None]:
        """Bytes that the step sent, where that is known, and what `took` will call its seconds. `copies`: bytes of host memory that
        checkpoints are written from; `whole` False: no update was made, of a counted step; `waits`: seconds of waiting for `data` (before
        it) and for other ranks (`communication`, NaN where it is not measured). Collective where the step was counted."""
        counted, early = self.traffic.due(step), self.traffic.steps < self.traffic.FIRST
        sent = self.traffic.end_step(step, whole)
        if counted or self.plan.device == "cuda":
            self.width = max([self.width, *map(_tokens, micro_batches)])
        self.host.end("save" if copies else "train")
        if self._tracker is not None:
            # The copies are host memory wherever the model lies; on a CPU the tracker counts them too.
            self.peak, self._tracker = max(self.peak, self._tracker.peak - copies), None
        elif self.plan.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        if not counted and not early:
            for name, value in {"optimizer": self._optimizer, **waits}.items():
                self.seconds[name].append(value)
        return sent, "counted" if counted else None if early else "total"

    def took(self, step: int, name: str | None, seconds: float) -> None:
        """The step that makes `step` of them took `seconds`, without waiting for data. `name`: as `end_step` gave it. Collective."""
        if name is not None:
            self.seconds[name].append(seconds)
        if not self.reported and self.stats and len(self.seconds["total"]) == TIMED:
            self._report(step, final=False)

    def finish(self, step: int) -> None:
        """After the last step and what follows on it. Collective."""
        self.host.end("save")
        self._report(step, final=True)

    # ---------------------------------------------------------------------------------------------------- what is known

    def _report(self, step: int, final: bool) -> None:
        found = self._measurement(step, final)
        estimate = self.plan.predicted.estimate
        rows = compare(estimate, found) if estimate is not None else []
        off = [row for row in rows if row.warns]
        reasons = sorted({f"{row.category}: {row.note}" for row in rows if row.note})
        event = Measured(
            metrics=found.model_dump(),
            off={row.category: row.off for row in rows},
            warned=[row.category for row in off],
            warnings=[row.line() for row in off],
            notes=notes(found) + reasons,
        )
        self.emit(event)
        if self.gather.rank == 0 and not self.reported:
            for row in off:
                log.warning("the plan was wrong: %s", row.line())
        self.reported = True

    def _measurement(self, step: int, final: bool) -> Measurement:
        """What all ranks measured, the same on every rank. Collective."""
        mine = {
            name: math.nan if value is None else float(value)
            for name, value in self._numbers().items()
        }
        _, values = self.gather({}, *mine.values())
        ranks = dict(zip(mine, values, strict=True))
        seconds = {name: max(ranks[f"{name}_s"]) for name in SECONDS if _known(ranks[f"{name}_s"])}
        memory = {
            name: [int(v) for v in ranks[name]]
            for name in (*STATES, "peak", "reserved")
            if _known(ranks[name])
        }
        world = self.gather.world_size
        fullest = (
            max(range(world), key=lambda rank: memory["peak"][rank]) if "peak" in memory else 0
        )
        stages = [self.plan.mesh.place(rank)["pp"] for rank in range(world)]
        alike = [rank for rank in range(world) if stages[rank] == stages[fullest]]
        hosts = [
            [r for r in range(world) if ranks["host"][r] == name]
            for name in sorted(set(ranks["host"]))
        ]
        phases = {
            p: max(sum(int(ranks[p][r]) for r in host) for host in hosts)
            for p in self.host.bytes_
            if _known(ranks[p])
        }
        sent, often = self.traffic.known, self.plan.config.strategy.step_shares()
        batch = self.plan.batch
        planned_tokens = (
            batch.micro_batch * batch.rows_per_sample * self.plan.config.data.max_length
        )
        return Measurement(
            step=step,
            final=final,
            by=None if not memory else "allocator" if self.plan.device == "cuda" else "tracker",
            memory={name: max(values[rank] for rank in alike) for name, values in memory.items()},
            by_rank=memory,
            host=phases,
            ranks_per_host=max(map(len, hosts)),
            seconds=seconds,
            phases={
                p: [round(s, 3) for s in ranks[f"in {p}"]]
                for p in heartbeat.PHASES
                if _known(ranks[f"in {p}"])
            },
            timed=len(self.seconds["total"]),
            traffic=sum(part * sent[kind] for kind, part in often.items())
            if often.keys() <= sent.keys()
            else None,
            grows=not plain(self.plan.mesh),
            width=max(ranks["width"]) / planned_tokens if max(ranks["width"]) else 1.0,
        )

    def _numbers(self) -> dict[str, float | None]:
        """What this rank measured; None where it is not known."""
        medians = {
            name: statistics.median(values) if values else None
            for name, values in self.seconds.items()
        }
        return {
            **{name: self.stats.get(name) for name in STATES},
            "peak": self.peak or None,
            "reserved": self.reserved or None,
            "width": self.width,
            # A GPU's step is still under way when it returns, so how long its optimizer takes is not seen.
            **{
                f"{name}_s": None
                if name == "optimizer" and self.plan.device == "cuda"
                else medians.get(name)
                for name in SECONDS
            },
            **{f"in {phase}": spent for phase, spent in heartbeat.seconds().items()},
            "host": zlib.crc32(socket.gethostname().encode()),
            **{phase: bytes_ or None for phase, bytes_ in self.host.bytes_.items()},
        }


def _known(values: list[float]) -> bool:
    return not any(math.isnan(value) for value in values)


def _tokens(batch: Any) -> int:
    """Tokens that a micro-batch is wide; 0 where it has none."""
    ids = getattr(batch, "input_ids_BT", None)
    return 0 if ids is None else ids.numel()
