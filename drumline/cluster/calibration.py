"""What `drumline calibrate` measured of this machine: a value, stored per hardware and software version. Pure but for its file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import ConfigDict, Field

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Entries = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Measured:
    """A line through timings: seconds of S bytes = latency + S / bandwidth."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of the file that it is read from (cluster.stored)
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Rate


def line_through(points: Sequence[tuple[float, float]]) -> Measured:
    """The line through (bytes, seconds) with the least squares of relative errors; neither its latency nor its bandwidth is negative."""
    rows = [(1 / t**2, s, t) for s, t in points]
    w, ws, wt = sum(w for w, _, _ in rows), sum(w * s for w, s, _ in rows), sum(w * t for w, _, t in rows)
    wss, wst = sum(w * s * s for w, s, _ in rows), sum(w * s * t for w, s, t in rows)
    spread = w * wss - ws * ws
    slope = (w * wst - ws * wt) / spread if len({s for s, _ in points}) > 1 else 0.0
    latency = (wt - slope * ws) / w
    if slope <= 0 or latency < 0:  # of one size, or noise: the mean rate, as if nothing had to be waited for
        return Measured(0.0, wss / wst)
    return Measured(latency, 1 / slope)


@dataclass(frozen=True)
class Product:
    """A measured matrix product (rows × inner) · (inner × columns), FLOP/s."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rows: Entries
    inner: Entries
    columns: Entries
    rate: Rate


@dataclass(frozen=True)
class Calibration:
    """Rates as they were measured; empty where nothing was. `matmul`: precision → FLOP/s of large products; `products`: precision → the
    shapes that were tried; `memory`: bytes/s that a device copies (read and write counted); `collectives`: (kind, ranks) → line, kind one
    of all_reduce, all_gather, reduce_scatter, all_to_all, p2p, and bytes what a rank sends, as `dist.traffic` counts; `host`: to_device,
    to_host → line; `disk`: write, read → line."""

    hardware: str = ""
    software: str = ""
    matmul: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    collectives: Mapping[tuple[str, int], Measured] = field(default_factory=dict)
    host: Mapping[str, Measured] = field(default_factory=dict)
    disk: Mapping[str, Measured] = field(default_factory=dict)
    products: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)

    def matmul_rate(self, precision: str, rows: int | None = None, width: int | None = None) -> float | None:
        """FLOP/s at the measured shape nearest to (rows × width) · (width × width), by ratios; of large products where no shape is given;
        None where that precision was not measured."""
        tried = self.products.get(precision, ())
        if rows is None or width is None or not tried:
            return self.matmul.get(precision)

        def distance(p: Product) -> float:
            return abs(math.log(p.rows / rows)) + abs(math.log(p.inner / width)) + abs(math.log(p.columns / width))

        return min(tried, key=distance).rate

    def line(self, kind: str, ranks: int) -> Measured | None:
        """Of a collective on one host, in the group nearest in size that was measured. A broadcast goes around as an all-gather does."""
        kind = "all_gather" if kind == "broadcast" else kind
        sizes = [size for name, size in self.collectives if name == kind]
        return self.collectives[kind, min(sizes, key=lambda size: abs(math.log(size / ranks)))] if sizes else None

    def shared(self, processes: int) -> Calibration:
        """What each of several processes has of a processor that was measured whole."""
        return replace(
            self,
            matmul={precision: rate / processes for precision, rate in self.matmul.items()},
            memory=self.memory and self.memory / processes,
            products={precision: tuple(replace(p, rate=p.rate / processes) for p in tried) for precision, tried in self.products.items()},
        )
